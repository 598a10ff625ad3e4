"""The roofline: bytes are those that are really read, shares are ratios of what was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from heads.api.checkpoint import new_drafter
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from heads.distilled import Config as DistilledConfig
from heads.eagle3 import Config as Eagle3Config
from heads.medusa import Config as MedusaConfig
from heads.ngram import Config as NgramConfig
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.kernels.packed_linear import packed_linears
from inference.measure.roofline import (
    TargetBytes,
    WeightReads,
    drafter_bytes,
    probe_bandwidth,
    roofline,
    share_of,
)
from inference.report.model import BandwidthFacts, parse_report
from inference.target.model import TargetModel
from tests.inference.example_report import example_report
from tests.models import SMALL, random_target

DECODE = DecodeConfig(depth=3, max_new_tokens=8)
TEXT = list(range(3, 43))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target()  # float64: not packed, so its reads can be counted as well


def arm(target: TargetModel, kind: str, config: Any) -> Arm:
    return Arm(kind, new_drafter(kind, config, target.info, target.weights, seed=0), DECODE)


def test_the_counter_counts_reads_and_nothing_else() -> None:
    weight, table = torch.randn(6, 4), torch.randn(10, 4)
    linear = nn.Linear(4, 6, bias=True)
    with torch.no_grad(), WeightReads([weight, table, *linear.parameters()]) as reads:
        x = F.embedding(torch.tensor([1, 2]), table)
        assert reads.bytes == x.nbytes  # a lookup reads its rows only
        weight.t().view(4, 6)
        assert reads.bytes == x.nbytes  # a view reads nothing
        F.linear(x, weight)
        F.linear(x, weight[:3])
        linear(x)
    assert (
        reads.bytes
        == x.nbytes + weight.nbytes + weight.nbytes // 2 + linear.weight.nbytes + linear.bias.nbytes
    )


def test_target_bytes_are_what_a_step_reads(target: TargetModel) -> None:
    """The formula against the weights that a verification of one node really reads."""
    size = TargetBytes.of(target)
    cache = target.new_cache(1, 32)
    lengths = torch.tensor([0])
    with torch.no_grad(), WeightReads(list(target.model.parameters())) as reads:
        target.verify(cache, torch.tensor([[5]]), TokenTree.chain(0), lengths, 0, FeatureSpec())
    row = SMALL["hidden_size"] * 8
    assert reads.bytes == size.weights + row  # one row of the embedding table is looked up
    per_token = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"] * 8 * 8
    assert size.kv_per_token == per_token
    assert size.step(1, 10) == size.step(7, 10) == size.weights + 10 * per_token


def test_a_tied_head_is_read_though_it_is_the_embedding() -> None:
    untied, tied = random_target(), random_target(tie_word_embeddings=True)
    assert TargetBytes.of(tied).weights == TargetBytes.of(untied).weights


def test_experts_are_read_in_part() -> None:
    size = TargetBytes(weights=1000, experts=800, kv_per_token=0, states=0, reached=0.25)
    assert [size.step(n, 0) for n in (1, 2, 4, 8)] == [1200, 1400, 1800, 1800]


def test_experts_that_a_token_reaches_are_a_share_or_all_of_them() -> None:
    known = TargetBytes.of(random_target("mixtral"))
    assert known.experts and known.reached == 0.5
    # DBRX has its numbers in another part of its config
    unknown = TargetBytes.of(random_target("dbrx"))
    assert unknown.experts and unknown.step(1, 0) == unknown.weights + unknown.experts


def test_states_are_read_twice_and_written_once_whatever_the_length() -> None:
    size = TargetBytes(weights=1000, experts=0, kv_per_token=2, states=50, reached=0.0)
    assert (size.step(1, 0), size.step(8, 100)) == (1150, 1350)


def test_drafter_bytes_follow_from_the_passes(target: TargetModel) -> None:
    head = target.weights.lm_head.nbytes
    tables = {
        name: sum(p.nbytes for p in module.parameters())
        for name, module in (
            ("eagle3", arm(target, "eagle3", Eagle3Config()).drafter),
            ("distilled", arm(target, "distilled", DistilledConfig(num_layers=1)).drafter),
        )
    }
    eagle = drafter_bytes(target, arm(target, "eagle3", Eagle3Config()), TEXT)
    # three passes over the layer and the head: two while drafting (the first token needs the head
    # only), one while committing
    fused = 3 * (tables["eagle3"])
    assert 0.6 * fused < eagle < fused
    small = drafter_bytes(target, arm(target, "distilled", DistilledConfig(num_layers=1)), TEXT)
    body = tables["distilled"] - 2 * head  # without its embedding table and head
    assert 3 * (body + head) <= small <= 3 * (body + head) + 8 * SMALL["hidden_size"] * 64
    medusa = arm(target, "medusa", MedusaConfig(num_heads=3))
    own = sum(p.nbytes for p in medusa.drafter.parameters())
    assert own <= drafter_bytes(target, medusa, TEXT) <= own + 3 * head  # one pass over all heads
    assert drafter_bytes(target, arm(target, "ngram", NgramConfig()), TEXT) == 0


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("eagle3", Eagle3Config()),
        ("distilled", DistilledConfig(num_layers=1, share_embeddings=True)),
    ],
)
def test_packed_weights_are_counted_too(target: TargetModel, kind: str, config: Any) -> None:
    # its LM head is packed for good, the drafter's linears for now
    half = random_target(dtype=torch.float32)
    packed = arm(half, kind, config)
    whole = drafter_bytes(target, arm(target, kind, config), TEXT)
    assert drafter_bytes(half, packed, TEXT) == whole // 2
    with packed_linears(packed.drafter):
        assert drafter_bytes(half, packed, TEXT) == whole // 2


def test_the_probe_measures_this_device() -> None:
    found = probe_bandwidth(torch.device("cpu"), torch.float32, size=1 << 22)
    assert found.device == "cpu"
    assert found.used_bytes_per_second == max(
        found.copy_bytes_per_second, found.gemv_bytes_per_second
    )
    assert 1e7 < found.used_bytes_per_second < 1e13


def test_the_block_puts_steps_beside_the_bandwidth(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    eagle = arm(target, "eagle3", Eagle3Config())
    split = {"draft": 1.0, "verify": 2.0, "commit": 0.5, "other": 0.3, "gap": 0.2}
    entry = {
        "draft": {"depth": 3, "nodes": 4},
        "step_ms": split,
        "speedup": 1.8,
        "ideal_speedup": 2.0,
    }
    report = parse_report(example_report(entry))
    bandwidth = BandwidthFacts(
        device="cpu",
        copy_bytes_per_second=2e9,
        gemv_bytes_per_second=1e9,
        used_bytes_per_second=2e9,
    )
    monkeypatch.setattr("inference.measure.roofline.probe_bandwidth", lambda *_: bandwidth)
    lengths = {"baseline": 20.0, "eagle3": 30.0}
    block = roofline(target, [eagle], report.baseline, report.drafters, TEXT, lengths)
    size = TargetBytes.of(target)
    plain, numbers = block.baseline, block.arms["eagle3"]
    assert plain.step_ms == 2.0  # 16 s for 8000 tokens
    assert plain.bytes_per_step == size.step(1, 20)
    assert plain.share == pytest.approx(size.step(1, 20) / (2e9 * 0.002))
    assert numbers.step_ms == pytest.approx(4.0)
    assert numbers.bytes_per_step == size.step(4, 30) + numbers.drafter_bytes
    assert numbers.share == pytest.approx(numbers.bytes_per_step / (2e9 * 0.004))
    assert numbers.efficiency == pytest.approx(0.9)
    assert numbers.split.to_dict() == pytest.approx({k: v / 4.0 for k, v in split.items()})
    assert share_of(10, 0.0, bandwidth) == 0.0
