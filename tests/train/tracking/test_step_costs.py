"""What a step must not do: hold logits of all positions, ask the target for what nobody reads, run
it twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from heads.api.checkpoint import new_drafter
from heads.api.registry import get_kind
from heads.nn import attention, losses
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.heads.recipes import TRAINED, recipe
from tests.inference.tokenizers import save_micro_target
from train.data.loader import PackedBatch
from train.engines.base import EngineConfig
from train.features.base import OnlineFeatures
from train.planning.dry_run import dry_step, plan_drafter
from train.planning.target import PlannedTarget, plan_target

VOCABULARY, LENGTH = 4000, 256
# So wide that an attention mask of a parallel drafter, [2.4 T, 2.4 T], stays below the bound.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PlannedTarget:
    folder = tmp_path_factory.mktemp("wide")
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    ).save_pretrained(folder)
    return plan_target(TargetConfig(str(folder), device="cpu"))


SHOWN = ("medusa", "eagle3", "distilled", "mtp")
"""Recipes of which each has another way to its loss; drafters of blocks take ten times as long."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.slow) for name in TRAINED],
)
def test_no_recipe_holds_the_logits_of_all_positions(
    target: PlannedTarget, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of a whole step is far below [T, V]: chunks bound what is as wide as the
    vocabulary."""
    for module in (losses, attention):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1 << 18)
    kind, config = recipe(name)
    engine = EngineConfig(name="torch", precision="float32")
    step = dry_step(plan_drafter(kind, config, target), target, engine, 1, LENGTH, 0.8)
    everything = 4 * LENGTH * VOCABULARY
    assert step.largest < everything / 3, f"a tensor of shape {step.largest_shape}"


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa", "distilled"])
def test_the_target_runs_once_and_gives_only_what_is_asked_for(tmp_path: Path, kind: str) -> None:
    save_micro_target(tmp_path / "target")
    real = TargetModel.load(TargetConfig(str(tmp_path / "target"), device="cpu"))
    head = get_kind(kind).config_class()
    drafter = new_drafter(
        kind, head, real.info, real.weights, 0, torch.ones(real.info.vocab_size)
    ).float()
    passes, rows = [], []
    real.decoder.register_forward_hook(lambda module, given, out: passes.append(1))
    real.model.get_output_embeddings().register_forward_hook(
        lambda module, given, out: rows.append(
            0 if torch.is_grad_enabled() else given[0].numel() // given[0].shape[-1]
        )
    )
    length = 48
    mask = torch.arange(length) >= 30
    packed = PackedBatch(
        torch.randint(10, real.info.vocab_size, (2, length)),
        torch.arange(length).repeat(2, 1),
        torch.ones(2, length, dtype=torch.int32),
        mask.repeat(2, 1),
        torch.arange(2),
    )
    batch = OnlineFeatures(real, drafter.needs).batch(packed)
    assert (len(passes), sum(rows)) == (1, 0), "making features takes one pass and no logits"
    assert (batch.taps is None) == (not drafter.needs.taps)
    if batch.taps is not None:
        assert batch.taps.shape[2] == len(drafter.needs.taps)
    assert (batch.last_hidden is None) == (not (drafter.needs.last_hidden or drafter.needs.logits))
    drafter.loss(batch).loss_sum.backward()
    assert len(passes) == 1, "unrolled steps share one set of features"
    if not drafter.needs.logits:
        assert sum(rows) == 0
    elif kind != "dflash":  # its blocks meet a state as often as there are anchors before it
        assert 0 < sum(rows) <= int(packed.loss_mask.sum())
