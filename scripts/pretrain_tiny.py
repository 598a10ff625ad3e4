"""Makes the embedded target: `python -m scripts.pretrain_tiny prepare|train|evaluate|export|prompts`.

prepare   collect the corpus, train the tokenizer, write token streams and a manifest (needs the development environment)
train     train the model on a prepared folder; resumable; needs torch, numpy and safetensors only
evaluate  held-out loss of a weights file on a prepared folder
export    write assets/tiny-target: weights, config, tokenizer, chat template, card
prompts   choose the prompts for measuring and for training drafters from the held-out groups
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from heads.api.errors import UserError

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser; defaults that depend on the device are None here."""
    root = argparse.ArgumentParser(prog="python -m scripts.pretrain_tiny", description=__doc__.split("\n")[0])
    stages = root.add_subparsers(dest="stage", required=True)

    prepare = stages.add_parser("prepare", help="corpus, tokenizer, token streams")
    prepare.add_argument("--out", type=Path, default=Path(".corpus"))
    prepare.add_argument("--pairs", type=Path, default=Path(".corpus-pairs"), help="where held-out pairs for `prompts` go")
    prepare.add_argument("--extra-packages", type=Path, metavar="FOLDER", help="download pinned packages into FOLDER and use them")
    prepare.add_argument("--max-package-mb", type=float, default=4.5, help="most text that one training package gives")
    prepare.add_argument("--workers", type=int, default=2)
    prepare.add_argument("--seed", type=int, default=0)

    train = stages.add_parser("train", help="train the model")
    train.add_argument("--data", type=Path, default=Path(".corpus"), help="a prepared folder")
    train.add_argument("--state", type=Path, default=Path(".tiny-target"), help="where the checkpoint to resume from stands")
    train.add_argument("--out", type=Path, help="where weights and log go (default: the state folder)")
    train.add_argument("--seconds", type=float, help="training time of the whole run; the schedule ends with it")
    train.add_argument("--steps", type=int, help="steps of the whole run, instead of --seconds")
    train.add_argument("--call-seconds", type=float, help="save and leave this long after the process started; run again to go on")
    train.add_argument("--lr", type=float, default=3e-3)
    train.add_argument("--schedule", choices=("cosine", "wsd"), default="cosine")
    train.add_argument("--batch-tokens", type=int, help="tokens of one step (default: 131072 on cuda, 16384 on cpu)")
    train.add_argument("--micro-tokens", type=int, help="tokens of one forward pass (default: the batch on cuda, 8192 on cpu)")
    train.add_argument("--length", type=int, default=1024)
    train.add_argument("--chat-share", type=float, default=0.4)
    train.add_argument("--final-chat-share", type=float, default=0.7)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--device", help="default: cuda if there is one")
    train.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on cuda")
    train.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="default: on cuda; pays where the CPU has it")
    train.add_argument("--eval-every", type=float, default=90.0, metavar="SECONDS")
    train.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    train.add_argument("--log-every", type=float, default=10.0, metavar="SECONDS")
    train.add_argument("--eval-tokens", type=int, help="tokens per held-out stream (default: all on cuda, 32768 on cpu)")

    evaluate = stages.add_parser("evaluate", help="held-out loss of trained weights")
    evaluate.add_argument("--data", type=Path, default=Path(".corpus"))
    evaluate.add_argument("--weights", type=Path, default=ASSETS / "tiny-target" / "model.safetensors")
    evaluate.add_argument("--eval-tokens", type=int)
    evaluate.add_argument("--device")

    export = stages.add_parser("export", help="write the embedded target's folder")
    export.add_argument("--data", type=Path, default=Path(".corpus"))
    export.add_argument("--run", type=Path, default=Path(".tiny-target"), help="folder with model.safetensors and training.json")
    export.add_argument("--out", type=Path, default=ASSETS / "tiny-target")

    prompts = stages.add_parser("prompts", help="choose prompts from the held-out groups")
    prompts.add_argument("--pairs", type=Path, default=Path(".corpus-pairs"), help="the held-out pairs that prepare wrote")
    prompts.add_argument("--out", type=Path, default=ASSETS / "prompts")
    prompts.add_argument("--measuring", type=int, default=96, help="prompts per domain for measuring, group B")
    prompts.add_argument("--training", type=int, default=1536, help="prompts over all domains for training drafters, group A")
    prompts.add_argument("--seed", type=int, default=0)
    return root


def main(arguments: list[str] | None = None) -> int:
    """Run one stage; return the exit status (a UserError is printed as one line, status 2)."""
    given = parser().parse_args(arguments)
    # Imported per stage: the training machine has neither tokenizers' sources nor the development packages.
    from scripts.tiny_target import stages

    try:
        getattr(stages, given.stage)(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
