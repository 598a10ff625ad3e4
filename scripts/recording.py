"""What scripts share that decode prompts with a finished drafter to fit something on what was accepted.

Every fifth prompt is held out, so that what is said about a fit is said of prompts of all domains that it never saw.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

ROOT = Path(__file__).parents[1]
HELD_OUT_EVERY = 5


def parser(
    module: str, about: str, depth: int, depth_help: str = "drafted tokens"
) -> argparse.ArgumentParser:
    """The options that all of them have: the drafter, where the result goes, target, prompts and decoding."""
    found = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    found.add_argument("drafter", type=Path, metavar="FOLDER")
    found.add_argument("--out", type=Path, required=True, help="where the result goes")
    found.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    validation = ROOT / "assets" / "prompts" / "training" / "validation.jsonl"
    found.add_argument("--prompts", type=Path, nargs="+", default=[validation])
    found.add_argument("--count", type=int, default=32, help="prompts per domain")
    found.add_argument("--tokens", type=int, default=96, help="most new tokens per prompt")
    found.add_argument("--depth", type=int, default=depth, help=depth_help)
    found.add_argument("--temperature", type=float, default=0.0)
    return found


def load(given: argparse.Namespace) -> tuple[TargetModel, Any]:
    """The target in float32 on the CPU, and the drafter of the checkpoint."""
    target = TargetModel.load(TargetConfig(path=given.target, dtype="float32", device="cpu"))
    return target, load_drafter(given.drafter, target.info, target.weights)


def requests_apart(
    given: argparse.Namespace, target: TargetModel, decode: DecodeConfig
) -> tuple[list[Request], list[Request]]:
    """(to fit on, held out); raises `UserError` when there are too few for both."""
    prompts = select_prompts(load_prompts(given.prompts), given.count, seed=3)
    requests = to_requests(prompts, target.tokenizer, decode)
    fitted_on = [request for place, request in enumerate(requests) if place % HELD_OUT_EVERY]
    if not fitted_on:
        raise UserError(
            f"at least two prompts are needed, one of which is held out; given {len(requests)}. Raise --count or give more."
        )
    return fitted_on, requests[::HELD_OUT_EVERY]


def printed(run: Callable[[argparse.Namespace], dict[str, Any]], given: argparse.Namespace) -> int:
    """Run and print the report, or the error; returns the exit status."""
    try:
        report = run(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2))
    return 0
