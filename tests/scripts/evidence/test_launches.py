"""The counter of launches against operations that a person can count, and what layers have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from heads.nn.blocks import RMSNorm
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.costs import Bench
from inference.kernels.reference.commit import ACCEPT_WALK
from inference.measure.roofline import TargetBytes, WeightReads
from inference.target.model import TargetModel
from scripts.evidence.acceptance.shapes import LLAMA, TOY, as_target, build_model, new_head
from scripts.evidence.launches import (
    DEPTH,
    Launches,
    StepModel,
    Tally,
    cache_bytes,
    compiled_layer,
    count,
    count_in,
    eagle3_bytes,
    step_launches,
    target_bytes,
    times,
)


def test_views_and_allocations_launch_nothing_and_a_kernel_of_ours_once() -> None:
    x, launches = torch.randn(4, 6), Launches()
    launches.phase = "step"
    with launches, launches.kernels():
        y = x.transpose(0, 1)[1:].reshape(5, 4) + 1  # a copy would be one more: views until here
        z = torch.empty(3)
        y.mul_(2)
        y @ torch.ones(4, 2)
        ACCEPT_WALK(torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), TokenTree.chain(2))
    assert z.shape == (3,)
    # add, mul, ones, matmul; then two zeros with a cast each, and the walk; the chain's own tensors
    before = launches.counts["step"]
    with launches, launches.kernels():
        tokens, picks, tree = torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), TokenTree.chain(2)
    made = launches.counts["step"] - before
    assert before == 4 + made + 1
    assert tokens.shape == picks.shape and tree.num_nodes == 3
    assert launches.take("step").products == 1
    assert launches.take("step") == Tally()


def test_a_product_of_three_dimensions_and_a_norm_of_a_drafter_are_one_launch_each() -> None:
    product, norm, states = torch.nn.Linear(6, 4, bias=False), RMSNorm(4, 1e-5), torch.ones(2, 3, 6)
    torch.nn.init.ones_(norm.weight)
    launches = Launches()
    with torch.no_grad(), launches, launches.kernels():
        out = norm(product(states))
    assert out.shape == (2, 3, 4)
    assert launches.take("") == Tally(2, 1)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return as_target(build_model(TOY, torch.device("cpu"), torch.float64, 64))


def test_products_of_a_step_are_those_of_its_weights(target: TargetModel) -> None:
    """Seven of a layer and the LM head; of EAGLE-3 the same for every token, and the fusion."""
    found = step_launches(target, new_head("eagle3", TOY, target))
    assert found["verify"].products == 7 * TOY.layers + 1
    own = [found[phase].products for phase in ("draft", "other", "commit")]
    assert own == [8 * DEPTH - 7, 0, 8]
    assert all(tally.launches > tally.products for tally in found.values())


PROGRAM = """
extern_kernels.mm(unused)
def call(args):
    cpp_fused_add_0(arg0)
    extern_kernels.mm(buf0, out=buf1)
    torch.ops.headstart.attend.default(buf1)
    extern_kernels.addmm(buf0, out=buf1)
    cpp_fused_mul_1(arg0)
"""


def test_products_of_a_compiled_program_are_counted_apart() -> None:
    assert count_in(PROGRAM) == Tally(4, 2)


def test_bytes_are_those_that_a_step_reads(target: TargetModel) -> None:
    """The formulas, in bfloat16, against what toy models read in float64."""
    wider = torch.float64.itemsize / torch.bfloat16.itemsize
    matrices = [weight for weight in target.model.parameters() if weight.ndim > 1]
    lookup = target.weights.embedding.data_ptr()
    bench = Bench(target, 1, 16, DEPTH + 1, list(range(40)))
    bench.fill(FeatureSpec())
    read_by_target = [weight for weight in matrices if weight.data_ptr() != lookup]
    with torch.no_grad(), WeightReads(read_by_target) as reads:
        bench.verification(DEPTH + 1)()
    assert reads.bytes == wider * target_bytes(TOY)

    head = new_head("eagle3", TOY, target)
    arm = Arm("eagle3", head, DecodeConfig(depth=DEPTH))
    propose, commit = bench.step(arm, arm.decode.tree())
    own = [weight for weight in head.parameters() if weight.ndim > 1]
    with torch.no_grad(), WeightReads(own) as reads:
        propose()
        commit()
    assert reads.bytes == wider * eagle3_bytes(TOY)
    assert wider * cache_bytes(TOY, TOY.layers) == TargetBytes.of(target).kv_per_token


def test_merged_projections_are_fewer_products() -> None:
    """Of 12 compiled launches 8 take a launch's time, of 39 plain ones 32."""
    steps = [Tally(39, 7) * LLAMA.layers, Tally(12, 4) * LLAMA.layers]
    at = times(LLAMA, 512, steps, Tally(), Tally(100, 41))
    saved = 1000 * StepModel().launch_seconds * LLAMA.layers * (32 - 8)
    for name in ("plain_ms", "eagle3_ms"):
        assert at[name][0] - at[name][1] == pytest.approx(saved)
    # 8 kv heads of 128 in 32 layers: 128 KiB per token; EAGLE-3 reads 5 layers' more
    far = times(LLAMA, 512 + 8192, steps, Tally(), Tally(100, 41))
    rate = StepModel().bandwidth * StepModel().share / 1000
    assert far["plain_ms"][0] - at["plain_ms"][0] == pytest.approx(8192 * 131_072 / rate)
    more = 8192 * 131_072 * (LLAMA.layers + DEPTH) / LLAMA.layers / rate
    assert far["eagle3_ms"][0] - at["eagle3_ms"][0] == pytest.approx(more)


def test_the_model_adds_reading_and_launching() -> None:
    model = StepModel(bandwidth=1e9, share=0.5, launch_seconds=1e-3)
    assert model.milliseconds(5e6, Tally(10, 10)) == pytest.approx(10.0)
    assert model.milliseconds(5e6, Tally(14, 10)) == pytest.approx(14.0)
    # Llama-3.1-8B has 8.03 billion weights, of which the embedding is looked up
    assert target_bytes(LLAMA) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.001)


@pytest.mark.slow
def test_a_compiled_layer_takes_twelve_launches() -> None:
    """Of both families, four of them products; and their plain layers four and five times as
    many."""
    qwen = replace(TOY, family=Qwen3Config)
    for shape in (TOY, qwen):
        assert compiled_layer(replace(shape, layers=2)) == Tally(12, 4)
    llama = count("llama31_8b", LLAMA, TOY)
    assert 35 <= llama["layer"] <= 45
    assert llama["layer_compiled"] == 12
    assert llama["layer_products"] == [7, 4] and llama["eagle3_products"] == 8 * DEPTH + 1
    assert llama["ideal_ms"] < llama["plain_ms"][1] < llama["plain_ms"][0] < llama["eagle3_ms"][0]
