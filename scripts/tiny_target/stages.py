"""What each subcommand of `scripts.pretrain_tiny` does with its parsed arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.tiny_target.progress import note


def prepare(given: argparse.Namespace) -> None:
    """Collect the corpus and write a prepared folder."""
    from scripts.tiny_target import corpus, packages
    from scripts.tiny_target.prepare import prepare as write_prepared

    archives = packages.download(given.extra_packages) if given.extra_packages else []
    documents = [*corpus.from_stdlib(), *corpus.from_topics()]
    documents += corpus.from_site_packages(skip={corpus.archive_package(archive) for archive in archives})
    for archive in archives:
        documents += corpus.from_archive(archive)
    documents = corpus.cap_sources(corpus.deduplicate(documents), int(given.max_package_mb * 1e6))
    note(f"collected {len(documents)} documents, {sum(len(d.text) for d in documents) / 1e6:.0f} MB")
    write_prepared(documents, given.out, given.pairs, given.seed, given.workers)


def train(given: argparse.Namespace) -> None:
    """Train, or go on training, on a prepared folder."""
    import torch

    from scripts.tiny_target.model import ModelShape
    from scripts.tiny_target.settings import TrainSettings
    from scripts.tiny_target.training import Intervals, Trainer

    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    fast = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    batch = given.batch_tokens or (131_072 if fast else 16_384)
    settings = TrainSettings(
        seconds=given.seconds, steps=given.steps, lr=given.lr, schedule=given.schedule, batch_tokens=batch,
        micro_tokens=given.micro_tokens or (batch if fast else min(batch, 8_192)), length=given.length,
        chat_share=given.chat_share, final_chat_share=given.final_chat_share, seed=given.seed,
        bf16=fast if given.bf16 is None else given.bf16,
    )  # fmt: skip
    intervals = Intervals(log=given.log_every, evaluate=given.eval_every, save=given.save_every, call=given.call_seconds)
    trainer = Trainer(
        given.data, given.state, given.out or given.state, settings, ModelShape(), device,
        compiled=fast if given.compile is None else given.compile, intervals=intervals,
        eval_tokens=given.eval_tokens or (None if fast else 32_768), command=_command(),
    )  # fmt: skip
    finished = trainer.run()
    note("training is finished" if finished else "not finished: run the same command again to go on")


def evaluate(given: argparse.Namespace) -> None:
    """Print the held-out loss of a weights file."""
    import torch
    from safetensors.torch import load_file

    from scripts.tiny_target import evaluation
    from scripts.tiny_target.data import load_manifest
    from scripts.tiny_target.model import ModelShape, TinyLlama

    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = TinyLlama(ModelShape())
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(given.weights).items()})
    heldout = evaluation.load_heldout(given.data, load_manifest(given.data), 1024, given.eval_tokens)
    for name, value in evaluation.evaluate(model.to(device), heldout, device, rows=8, bf16=device.type == "cuda").items():
        print(f"{name} {value:.4f}")


def export(given: argparse.Namespace) -> None:
    """Write the embedded target's folder from a training run and a prepared folder."""
    from scripts.tiny_target.export import export as write_export

    write_export(given.data, given.run, given.out)


def prompts(given: argparse.Namespace) -> None:
    """Choose and write the prompt files."""
    from scripts.tiny_target.prompts import write_prompts

    write_prompts(given.pairs, given.out, given.measuring, given.training, given.seed)


def _command() -> str:
    """Return the command line for the record: a folder elsewhere on this machine is named by its last part only."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return "python -m scripts.pretrain_tiny " + " ".join(words)
