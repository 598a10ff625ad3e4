"""One training of vLLM's `speculators`, in a separate process and environment; driven by
scripts/evidence/sides.py.

    <python with speculators> scripts/evidence/foreign/speculators_worker.py job.json

It uses the library as a user would: an Arrow data set with cached hidden states, `TrainConfig`,
`build_draft_model`, its data loaders and its own `Trainer.train_epoch` and `val_epoch`. The library
trains only on accelerators. Four things are set so that it runs on a CPU: the trainer's device, the
device of its autocast, `torch.accelerator.synchronize`, which has nothing to wait for, and, if the
job's dtype is float32, the dtype of Muon's iterations (`muon_in_float32`). The library's autocast
does nothing in float32. Headstart is not imported, since that environment does not have it.

Commands come as JSON lines on stdin and are answered on stdout: {"do": "steps", "count": n} trains
n steps, {"do": "validate"} measures the library's loss on the rows that are held out, {"do":
"save", "to": folder} writes a checkpoint, {"do": "end"} ends. Seconds are CPU seconds of all
threads of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH = 16
"""Documents that the target reads at once while features are computed."""
TOLD = (
    "optimizer lr weight_decay muon_lr muon_momentum muon_weight_decay muon_ns_steps "
    "muon_adjust_lr_fn scheduler_type loss_fn loss_implementation ttt_steps ttt_step_loss_decay "
    "num_layers block_size sample_from_anchor num_depths down_sample_ratio down_sample_ratio_min "
    "max_anchors per_position_loss_weight dflash_decay_gamma dpace_alpha norm_before_residual "
    "norm_before_fc fc_norm norm_output embed_requires_grad full_attention_indices "
    "target_layer_ids hidden_states_dtype total_seq_len epochs seed"
).split()
"""The library's resolved settings that the report repeats, as far as its version has them."""


class EndedError(Exception):
    """Raised to leave the library's loop."""


class Channel:
    """The commands and the answers. Output of libraries goes to stderr."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **answer: Any) -> None:
        """Answer with one JSON line."""
        self.out.write(json.dumps(answer) + "\n")
        self.out.flush()

    def commands(self) -> Iterator[dict[str, Any]]:
        """The commands until `end` or the end of stdin."""
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "end":
                return
            yield command


def peak_bytes() -> int:
    """The peak memory of this process. `getrusage` is not used, because its figure includes the
    parent's memory at the start of the process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: the comparison runs on Linux")


def hidden_states(
    model: Any, batch: list[list[int]], layers: list[int], dtype: str = "bfloat16"
) -> list[Any]:
    """Per row [T, n + 1, H] of `dtype`: the residual stream after `layers`, and after the last
    layer, before the final norm. Rows are padded behind their ends; causal attention does not read
    the padding.

    dtype: bfloat16 (the target runs under autocast) or float32.
    """
    import torch

    before_norm: list[Any] = []
    width = max(map(len, batch))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in batch])
    handle = model.model.norm.register_forward_pre_hook(
        lambda _module, inputs: before_norm.append(inputs[0])
    )
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, dtype == "bfloat16"):
            found = model.model(tokens, output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    states = torch.stack([*(found.hidden_states[layer] for layer in layers), before_norm[0]], 2)
    states = states.to(getattr(torch, dtype))
    return [states[index, : len(row)].clone() for index, row in enumerate(batch)]


def write_data(job: dict[str, Any], folder: Path) -> dict[str, float]:
    """Write the Arrow data set and the hidden states; returns the tokens and the CPU seconds of the
    target's passes."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["tokens"]))
    for start in range(0, len(rows), BATCH):
        batch = order[start : start + BATCH]
        begun = time.process_time()
        tokens = [rows[index]["tokens"] for index in batch]
        found = hidden_states(model, tokens, job["taps"], job["dtype"])
        seconds += time.process_time() - begun
        for index, states in zip(batch, found, strict=True):
            kept = {"hidden_states": states, "token_ids": torch.tensor(rows[index]["tokens"])}
            save_file(kept, folder / "hidden_states" / f"hs_{index}.safetensors")
    content = {"input_ids": [row["tokens"] for row in rows]}
    content |= {"loss_mask": [row["mask"] for row in rows]}
    content |= {"seq_len": [len(row["tokens"]) for row in rows]}
    Dataset.from_dict(content).with_format("torch").save_to_disk(str(folder))
    return {"tokens": sum(len(row["tokens"]) for row in rows), "seconds": seconds}


def settings(job: dict[str, Any], data: Path) -> argparse.Namespace:
    """The library's settings as its command line resolves them from this job's flags. The first
    `train_rows` rows are trained on, the others are held out."""
    from speculators.train.config import TrainConfig

    rows = len(Path(job["rows"]).read_text(encoding="utf-8").splitlines())
    options = {
        "speculator-type": job["kind"],
        "verifier-name-or-path": job["target"],
        "data-path": data,
        "save-path": job["out"],
        "total-seq-len": job["tokens_per_step"],
        "epochs": job["epochs"],
        # the library trains on int(rows x ratio) rows
        "train-data-ratio": (job["train_rows"] + 0.5) / rows,
        "hidden-states-dtype": job["dtype"],
        "seed": job["seed"],
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags += ["--target-layer-ids", *map(str, job["taps"]), *job["flags"]]
    return argparse.Namespace(**TrainConfig.resolve(flags).flatten())


def muon_in_float32() -> None:
    """Let `torch.optim.Muon`, which the library uses, iterate in float32.

    It casts the gradient to bfloat16, whose products a CPU without such instructions emulates at a
    fraction of float32's speed. Headstart iterates in float32 on these CPUs too
    (train/muon.py). Raises `RuntimeError` if torch has no such function to replace.
    """
    from torch.optim import _muon

    if not hasattr(_muon, "_zeropower_via_newtonschulz"):
        raise RuntimeError("this torch has another Muon, whose iterations cannot be set to float32")
    _muon._zeropower_via_newtonschulz = orthogonalise


def orthogonalise(
    grad: Any, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Any:
    """torch's `_zeropower_via_newtonschulz` without its cast to bfloat16: Newton-Schulz iterations
    of a matrix [rows, columns] in float32."""
    import torch

    a, b, c = ns_coefficients
    turned = grad.size(0) > grad.size(1)
    x = grad.float().T if turned else grad.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if turned else x


def build(job: dict[str, Any], data: Path) -> tuple[Any, dict[str, Any]]:
    """The library's trainer around a fresh drafter, on the CPU, and its resolved settings."""
    import torch
    from hs_connectors import HiddenStatesBackend
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import trainer as library
    from speculators.train.cli import build_draft_model, parse_vocab_mappings, set_seed
    from speculators.train.dataloader import create_train_val_loaders

    args, dtype = settings(job, data), getattr(torch, job["dtype"])
    if job["dtype"] == "float32":
        muon_in_float32()
    set_seed(args.seed)
    d2t, t2d, draft_vocabulary = parse_vocab_mappings(args)
    kind = SpeculatorModel.registry[args.speculator_type]
    drafter = build_draft_model(args, kind, t2d, d2t, draft_vocabulary)
    wanted = (
        "data_path total_seq_len vllm_endpoint on_missing verifier_name_or_path request_timeout "
        "max_retries generation_validation_retries max_consecutive_generation_failures "
        "num_workers prefetch_factor train_data_ratio seed"
    )
    loader, held_out = create_train_val_loaders(
        **{name: getattr(args, name) for name in wanted.split()},
        hidden_states_dtype=dtype,
        transfer=HiddenStatesBackend.registry["file"].from_train_args(args, args.data_path),
        hidden_size=drafter.config.transformer_layer_config.hidden_size,
        num_target_layers=len(drafter.target_layer_ids),
        preprocess=shift_batch if args.speculator_type in ("eagle3", "peagle") else None,
    )
    train_kwargs, val_kwargs = kind.get_trainer_kwargs(**vars(args))
    names = {name for name in library.TrainerConfig._fields if hasattr(args, name)}
    config = library.TrainerConfig(
        **{name: getattr(args, name) for name in names - {"hidden_states_dtype"}},
        num_epochs=args.epochs,
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        hidden_states_dtype=dtype,
    )
    library.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_: None
    trainer = library.Trainer(drafter, config, loader, held_out)
    trainer.device_type = "cpu"
    told = {name: getattr(args, name) for name in TOLD if hasattr(args, name)}
    told["optimizers"] = [type(one).__name__ for one in trainer.optimizers]
    warm_up, total = library._resolve_scheduler_steps(config, len(loader))
    return trainer, {**told, "scheduler_warmup_steps": warm_up, "scheduler_total_steps": total}


def steps(trainer: Any, channel: Channel) -> None:
    """Train on command, through the library's own epochs."""
    seen = {"tokens": 0}

    def count(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        seen["tokens"] += int((kwargs["document_ids"] != -1).sum())

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    commands = channel.commands()
    state = {"left": 0, "begun": 0.0}

    def wait() -> None:
        """Runs before every step of the library's loop. When the requested number of steps is done,
        reports and waits for the next command."""
        state["left"] -= 1
        while state["left"] <= 0:
            if state["begun"]:
                seconds = time.process_time() - state["begun"]
                channel.say(seconds=seconds, peak_bytes=peak_bytes(), **seen)
                state["begun"] = 0.0
            command = next(commands, None)
            if command is None:
                raise EndedError
            if command["do"] == "save":
                trainer.model.save_pretrained(command["to"])
                channel.say(saved=command["to"])
                continue
            if command["do"] == "validate":
                channel.say(validation=trainer.val_epoch(0))
                trainer.model.train()
                continue
            seen["tokens"], state["left"] = 0, command["count"]
            state["begun"] = time.process_time()

    wait()
    epoch = 0
    while True:
        trainer.train_epoch(epoch, step_callback=wait)
        epoch += 1


def main() -> int:
    """Prepare the data if it is missing, build the trainer, report that, and follow commands."""
    import torch

    channel = Channel()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    data, version = Path(job["data"]), importlib.metadata.version("speculators")
    made = data / "made.json"
    if not made.is_file():
        figures = write_data(job, data)
        partial = made.with_suffix(".partial")
        partial.write_text(json.dumps(figures), encoding="utf-8")
        os.replace(partial, made)
        channel.say(made=figures, version=version)
        return 0  # keeps the target out of the training's memory
    trainer, told = build(job, data)
    weights = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    channel.say(
        version=version,
        trained_weights=weights,
        steps_per_epoch=len(trainer.train_loader),
        settings=told,
    )
    with contextlib.suppress(EndedError):
        steps(trainer, channel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
