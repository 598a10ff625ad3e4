"""Shared code of tools that decode prompts with a finished drafter and fit something to the
results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.measure.prompts import Prompt, load_prompts, select_prompts, to_requests
from inference.target.model import TargetModel
from scripts.tools.common import TARGET, VALIDATION

HELD_OUT_EVERY = 5


RECORDING: dict[str, Any] = {
    "drafter": {"positional": True, "type": Path, "metavar": "FOLDER"},
    "out": {"type": Path, "required": True, "help": "where the result goes"},
    "target": str(TARGET),
    "dtype": "float32",
    "device": "cpu",
    "prompts": {"type": Path, "nargs": "+", "default": [VALIDATION]},
    "count": (32, "prompts per domain"),
    "tokens": (96, "most new tokens per prompt"),
    "temperature": 0.0,
}
"""The shared options, as `command` takes them."""


def split_requests(
    given: argparse.Namespace, target: TargetModel, decode: DecodeConfig
) -> tuple[list[Request], list[Request]]:
    """Requests (to fit on, held out). Every fifth one is held out, so that the quality of a fit is
    measured on unseen prompts. Raises `UserError` if there are too few for both."""
    prompts = select_prompts(load_prompts(given.prompts), given.count, seed=3)
    requests = to_requests(prompts, target.tokenizer, decode)
    fitted_on = [request for place, request in enumerate(requests) if place % HELD_OUT_EVERY]
    if not fitted_on:
        raise UserError(
            f"at least two prompts are needed, one of which is held out; given {len(requests)}. "
            "Raise --count or give more."
        )
    return fitted_on, requests[::HELD_OUT_EVERY]


def split_prompts(
    prompts: Sequence[Prompt], count: int, held_out: int
) -> tuple[list[Prompt], list[Prompt]]:
    """`count` prompts per domain, and up to `held_out` further ones per domain."""
    first = select_prompts(prompts, count, seed=1)
    taken = {prompt.id for prompt in first}
    rest = [prompt for prompt in prompts if prompt.id not in taken]
    return first, select_prompts(rest, held_out, seed=2) if rest and held_out else []
