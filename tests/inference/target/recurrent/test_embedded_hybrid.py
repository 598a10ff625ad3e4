"""The embedded hybrid target on text: its answers are those of plain decoding, whatever drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

ASSETS = Path(__file__).resolve().parents[4] / "assets"
PLAIN = DecodeConfig(shape="none", max_new_tokens=32, batch_size=6)
DRAFTS = {
    "chain": DecodeConfig(depth=4, max_new_tokens=32, batch_size=3),
    "tree": DecodeConfig(shape="dynamic", depth=4, nodes=16, width=4, max_new_tokens=32),
    "sampled": DecodeConfig(depth=4, temperature=1.0, rule="match", max_new_tokens=32),
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.load(
        TargetConfig(str(ASSETS / "tiny-hybrid"), dtype="float32", device="cpu")
    )


def answers(target: TargetModel, drafter: object, decode: DecodeConfig) -> list[Completion]:
    prompts = select_prompts(load_prompts(ASSETS / "prompts"), 1)
    requests = to_requests(prompts, target.tokenizer, decode, capacity=512)
    done = Engine(target, drafter, decode).run(requests)
    return sorted(done, key=lambda item: item.request.index)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_drafter_changes_the_speed_and_not_the_text(target: TargetModel, draft: str) -> None:
    small = str(ASSETS / "tiny-target-small")
    config = get_kind("distilled").config_class(from_model=small)
    drafter = new_drafter("distilled", config, target.info, target.weights, seed=0)
    decode = DRAFTS[draft]
    plain = answers(
        target, None, DecodeConfig(**{**vars(PLAIN), "temperature": decode.temperature})
    )
    drafted = answers(target, drafter, decode)
    assert [found.tokens for found in drafted] == [found.tokens for found in plain]
    passes = [one for found in drafted for one in found.passes]
    assert sum(map(len, (found.tokens for found in drafted))) > 1.3 * len(passes)
