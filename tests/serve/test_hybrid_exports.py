"""Drafters of a hybrid target in a real vLLM: EAGLE-3 and the target's own MTP block.

vLLM's gated delta rule takes bfloat16 alone on a CPU, so its text and ours part in near ties, and
the steps behind them with it: steps are compared where the texts are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.export.check.config import LiveConfig
from inference.export.check.live import LiveRow, live_check, make_requests, read_served
from inference.measure.prompts import load_prompts
from inference.measure.vllm_process import EngineProcess
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.export.ground import write
from tests.serve.hybrid import as_qwen3_next
from tests.serve.test_exports import ROOT, teach

pytestmark = [pytest.mark.serve, pytest.mark.slow]

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 3},
    "native_mtp": {"from_target_layer": 11, "depths": 3},
}
"""The block begins as the last layer, which is attention. Both learn the answers."""


@pytest.fixture(scope="module")
def rows(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LiveRow]:
    scratch = tmp_path_factory.mktemp("hybrid")
    folder = as_qwen3_next(ROOT / "assets" / "tiny-hybrid", scratch / "target")
    narrow = TargetModel.load(TargetConfig(str(folder), dtype="bfloat16", device="cpu"))
    wide = TargetModel.load(TargetConfig(str(folder), dtype="float32", device="cpu"))
    config = LiveConfig(prompts_per_domain=1, max_new_tokens=24)
    requests = make_requests(config, load_prompts(ROOT / "assets" / "prompts"), narrow, 8)
    served = []
    for kind, settings in DRAFTERS.items():
        own = get_kind(kind).config_class(**settings)
        drafter = new_drafter(kind, own, wide.info, wide.weights, seed=1)
        teach(drafter, wide, requests, steps=80)
        save_drafter(drafter, scratch / kind / "checkpoint", wide.info)
        write(wide, scratch / kind / "checkpoint", scratch / kind / "export", "vllm")
        served.append(replace(read_served(scratch / kind / "export", narrow), name=kind))
    process = EngineProcess(engine_python, environment={"PYTHONPATH": str(ROOT)})
    found = live_check(narrow, served, requests, process, (1,), 512)
    return {row.name: row for row in found}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_engine_takes_our_steps_where_it_writes_our_text(
    rows: dict[str, LiveRow], kind: str
) -> None:
    row = rows[kind]
    assert row.answers, row.problems
    assert row.lossless["mismatches"] == 0, row.problems
    ours, theirs = row.answers["ours"], row.answers["engine"]
    same = [place for place, text in enumerate(ours.tokens) if text == theirs.tokens[place]]
    assert len(same) >= len(ours.tokens) // 2
    for place in same:
        assert theirs.steps[place] == ours.steps[place]
    assert any(step > 1 for place in same for step in ours.steps[place])
