"""Fit an acceptance head for `decode.adaptive=confidence` to the accepted drafts.

    python -m scripts.tools.fit_acceptance outputs/demo/train/distilled/best --depth 8 \\
        --out outputs/demo/acceptance.json

Set `decode.adaptive_head` to the file. It belongs to that drafter and that temperature. Every fifth
prompt is held out. The command prints the mean of |estimate - outcome| in ten equally filled bins
(calibration error) and the area under the ROC curve, for the head and for the drafter's largest
probability.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import load_drafter
from inference.decoding.adaptive.head import Recorded, fit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.model import TargetModel
from scripts.tools.common import command, target_of
from scripts.tools.recording import RECORDING, split_requests

BINS = 10


def fit_head(given: argparse.Namespace) -> None:
    """Fit on four fifths of the prompts, write the head, print its quality on the rest."""
    target = target_of(given)
    drafter = load_drafter(given.drafter, target.info, target.weights)
    decode = DecodeConfig(
        temperature=given.temperature,
        depth=given.depth,
        max_new_tokens=given.tokens,
        adaptive="confidence",
        adaptive_threshold=0.0,
        graph="off",  # the data of a replayed step would be those of the captured one
    )
    fitted_on, held_out = split_requests(given, target, decode)
    head = fit(recorded(target, drafter, decode, fitted_on), given.refusal_weight)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    head.save(given.out)
    rest = recorded(target, drafter, decode, held_out)
    features = torch.cat([part.features for part in rest])
    accepted = torch.cat([part.accepted for part in rest])
    estimates = {"head": head.chance(features), "largest probability": features[:, 0].exp()}
    share = round(float(accepted.double().mean()), 4)
    report = {
        "file": str(given.out),
        "held_out": {"prompts": len(held_out), "drafts": len(accepted), "accepted": share},
        **{name: quality(chance, accepted) for name, chance in estimates.items()},
    }
    print(json.dumps(report, indent=2))


def recorded(
    target: TargetModel, drafter: Any, decode: DecodeConfig, requests: list[Request]
) -> list[Recorded]:
    """The data of every tested draft, from decoding these requests."""
    engine, found = Engine(target, drafter, decode), list[Recorded]()
    lanes = engine._lanes_for(requests)
    assert lanes.limits is not None
    lanes.limits.recorder = found
    list(engine.run(requests))
    return [Recorded(part.features.cpu(), part.accepted.cpu()) for part in found]


def quality(chance: Tensor, accepted: Tensor) -> dict[str, float]:
    """Calibration error and area under the ROC curve of estimates [M] for outcomes [M] bool."""
    order = chance.argsort()
    gaps = [
        abs(float(chance[part].double().mean() - accepted[part].double().mean())) * len(part)
        for part in order.tensor_split(BINS)
        if len(part)
    ]
    ranks = torch.empty(len(chance), dtype=torch.float64)
    ranks[order] = torch.arange(1, len(chance) + 1, dtype=torch.float64)
    kept = int(accepted.sum())
    pairs = kept * (len(accepted) - kept)
    area = (float(ranks[accepted].sum()) - kept * (kept + 1) / 2) / pairs if pairs else 0.5
    return {"calibration_error": round(sum(gaps) / len(chance), 4), "auc": round(area, 4)}


main = command(fit_head, **RECORDING, depth=(8, "drafted tokens"), refusal_weight=1.0)

if __name__ == "__main__":
    sys.exit(main())
