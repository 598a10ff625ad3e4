"""Calibrate a block drafter's confidence: fit a temperature per depth to the accepted drafts.

    python -m scripts.tools.calibrate_confidence outputs/families/train/dspark@0.005/best \\
        --out outputs/dspark_calibrated

Writes a copy of the checkpoint with the temperatures (sequential temperature scaling, DSpark,
2607.05147; heads/nn/block/confidence.py). Every fifth prompt is held out. On these prompts, the
calibration error of the survival up to each depth is printed, before and after.

Legend: M recorded chains, K depths.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import load_drafter, save_drafter
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.nn.block.confidence import calibration_errors
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.model import TargetModel
from scripts.tools.common import command, target_of
from scripts.tools.recording import RECORDING, split_requests


def calibrate(given: argparse.Namespace) -> None:
    """Fit on four fifths of the prompts, write the checkpoint, and print the quality of the
    confidence on the rest."""
    target = target_of(given)
    drafter: Any = load_drafter(given.drafter, target.info, target.weights)
    head = getattr(drafter, "confidence_head", None)
    if head is None:
        raise UserError(
            f"'{given.drafter}' (kind '{drafter.kind}') has no confidence to calibrate. Train one "
            "with head=dspark, or with head.confidence=true; other drafters get an estimate from "
            "scripts/tools/fit_acceptance.py."
        )
    decode = DecodeConfig(
        temperature=given.temperature,
        depth=given.depth or drafter.depths,
        max_new_tokens=given.tokens,
        graph="off",  # every pass is watched as it is made
        lag=0,
    )
    fitted_on, held_out = split_requests(given, target, decode)
    head.temperatures.fill_(1.0)
    odds, accepted = recorded(target, drafter, decode, held_out)
    drafter.calibrate(*recorded(target, drafter, decode, fitted_on))
    fitted = head.temperatures[: decode.depth].cpu()
    save_drafter(drafter, given.out, target.info)
    errors = {
        name: [round(error, 4) for error in calibration_errors(odds, accepted, temperatures)]
        for name, temperatures in (("before", torch.ones(decode.depth)), ("after", fitted))
    }
    report = {
        "checkpoint": str(given.out),
        "temperatures": [round(value, 3) for value in fitted.tolist()],
        "held_out": {"prompts": len(held_out), "chains": len(accepted)},
        **{f"calibration_error_{name}": values for name, values in errors.items()},
    }
    print(json.dumps(report, indent=2))


def recorded(
    target: TargetModel, drafter: Any, decode: DecodeConfig, requests: list[Request]
) -> tuple[Tensor, Tensor]:
    """Log-odds [M, K] of the confidence (its temperatures being 1) and accepted drafts [M] int64 of
    the passes over `requests`.

    An answer's last pass is left out, because the answer's end and not a rejection may have cut it.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    for request in requests:
        with watched(drafter) as passes:
            list(Engine(target, drafter, decode).run([request]))
        kept += passes[:-1]
    if not kept:
        raise UserError(
            "no draft was verified. Give prompts whose answers are longer, or raise --tokens."
        )
    confidences, accepted = map(torch.cat, zip(*kept, strict=True))
    return torch.logit(confidences.double(), eps=1e-7).cpu(), accepted.cpu()


@contextmanager
def watched(drafter: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """In this context, every pass appends the confidences [1, K] of its chain and its number of
    accepted drafts [1]."""
    passes: list[tuple[Tensor, Tensor]] = []
    propose, commit, last = drafter.propose, drafter.commit, list[Tensor]()

    def watch_propose(state: Any, noise: Noise) -> Proposal:
        proposal: Proposal = propose(state, noise)
        assert proposal.confidence is not None, "a drafter with a confidence head gives confidences"
        last[:] = [proposal.confidence[:, 1:].clone()]
        return proposal

    def watch_commit(state: Any, accepted: TargetStates) -> Any:
        if last:  # the prompt is committed without a proposal
            passes.append((last.pop(), accepted.lengths - 1))
        return commit(state, accepted)

    drafter.propose, drafter.commit = watch_propose, watch_commit
    try:
        yield passes
    finally:
        del drafter.propose, drafter.commit


main = command(calibrate, **RECORDING, depth=(0, "drafted tokens; 0: as deep as the drafter goes"))

if __name__ == "__main__":
    sys.exit(main())
