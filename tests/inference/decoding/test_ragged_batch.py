"""Eight ragged prompts in one batch on the embedded target: exactly the tokens that eight single
runs give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.measure.prompts import load_prompts, to_requests
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.models import texts_of

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"shape": "chain", "depth": 3},
    "dynamic": {"shape": "dynamic", "nodes": 8, "depth": 3, "width": 3},
}


def embedded(repository: Path, dtype: str) -> TargetModel:
    return TargetModel.load(
        TargetConfig(str(repository / "assets" / "tiny-target"), dtype=dtype, device="cpu")
    )


def ragged(repository: Path, target: TargetModel) -> list[Request]:
    """Eight prompts cut to lengths between 1 and 80 tokens, with answers of different lengths."""
    prompts = load_prompts(repository / "assets" / "prompts" / "code.jsonl")[:8]
    whole = to_requests(prompts, target.tokenizer, DecodeConfig())
    lengths, limits = (1, 80, 7, 33, 64, 2, 50, 19), (16, 9, 24, 16, 1, 20, 12, 24)
    return [
        Request(i, request.tokens[:length], 1000 + i, limit)
        for i, (request, length, limit) in enumerate(zip(whole, lengths, limits, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_eight_equals_eight_single_runs(
    repository: Path, shape: str, temperature: float
) -> None:
    target = embedded(repository, "float64")
    requests = ragged(repository, target)
    drafter = new_drafter(
        "eagle3", get_kind("eagle3").config_class(), target.info, target.weights, 0
    )
    config = DecodeConfig(temperature=temperature, batch_size=8, **SHAPES[shape])
    together = texts_of(Engine(target, drafter, config), requests)
    alone = Engine(target, drafter, DecodeConfig(temperature=temperature, **SHAPES[shape]))
    plain = Engine(target, None, DecodeConfig(temperature=temperature))
    for request in requests:
        assert together[request.index] == texts_of(alone, [request])[request.index]
        assert together[request.index] == texts_of(plain, [request])[request.index]


@pytest.mark.slow
def test_in_float32_a_batch_differs_by_near_ties_at_most(repository: Path) -> None:
    target = embedded(repository, "float32")
    requests = ragged(repository, target)
    drafter = new_drafter(
        "medusa", get_kind("medusa").config_class(), target.info, target.weights, 0
    )
    together = texts_of(Engine(target, drafter, DecodeConfig(batch_size=8)), requests)
    alone = Engine(target, None, DecodeConfig())
    single = {request.index: texts_of(alone, [request])[request.index] for request in requests}
    order = [request.index for request in requests]
    report = audit(
        target,
        requests,
        [single[i] for i in order],
        [together[i] for i in order],
        DecodeConfig().sampling(),
    )
    assert report.mismatches == 0 and report.identical >= 6
