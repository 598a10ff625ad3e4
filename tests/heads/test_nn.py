"""The shared network parts: rotary positions, norms, attention, the draft vocabulary, tree plans,
initial values.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from heads.api.errors import UserError
from heads.api.features import default_taps
from heads.api.tree import TokenTree
from heads.nn import attention, blocks, init, vocab
from heads.nn.block.model import default_start
from heads.nn.blocks import LayerShape, RMSNorm
from heads.nn.drafting.places import CachePlace, Memory, static_places
from heads.nn.drafting.plan import TreePlan
from heads.nn.rope import Rope, look_up, rotate
from tests.heads.micro import micro_target
from tests.heads.recipes import build


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rotation_equals_hugging_face() -> None:
    states, positions = random(2, 5, 3, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 90, 3, 0, 411]])
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=3, head_dim=8, max_position_embeddings=512
    )
    cosine, sine = LlamaRotaryEmbedding(config)(states, positions)
    expected, _ = apply_rotary_pos_emb(states.transpose(1, 2), states.transpose(1, 2), cosine, sine)
    rope = Rope(8, 10000.0)
    torch.testing.assert_close(
        rotate(states, rope.at(positions, torch.float64)), expected.transpose(1, 2)
    )
    table = rope.table(512, states.device, torch.float64)
    torch.testing.assert_close(rotate(states, look_up(table, positions)), expected.transpose(1, 2))


def test_rotation_tables_stay_when_larger_ones_are_made() -> None:
    """A captured step reads the table that was there when it was captured."""
    rope, cpu = Rope(4, 100.0), torch.device("cpu")
    first = rope.table(3, cpu, torch.float32)
    larger = rope.table(9, cpu, torch.float32)
    assert (first.shape[0], larger.shape[0]) == (4, 16) and torch.equal(larger[:4], first)
    assert rope.table(2, cpu, torch.bfloat16).dtype == torch.bfloat16
    assert rope.table(4, cpu, torch.float32) is first
    assert rope.table(10, cpu, torch.float32) is larger


def test_a_norm_under_autocast_is_the_norm_of_its_rounded_weight() -> None:
    """torch has a fused norm for one dtype alone and warns of others."""
    norm = RMSNorm(256, 1e-5)
    init.copy(norm.weight, random(256, seed=1))
    states = (30 * random(4, 256)).bfloat16()
    found = norm(states)
    narrow = RMSNorm(256, 1e-5).bfloat16()
    init.copy(narrow.weight, norm.weight.bfloat16())
    assert found.dtype == torch.bfloat16 and torch.equal(found, narrow(states))
    found.float().sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_is_computed_in_float32_or_better(dtype: torch.dtype) -> None:
    norm = RMSNorm(256, 1e-5).to(dtype)
    init.copy(norm.weight, random(256, seed=1).to(dtype))
    states = (30 * random(4, 256)).to(dtype)
    exact = states.double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    found = norm(states)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def slow_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query head over a list of keys and values."""
    weights = torch.stack([query @ key for key in keys]).div(math.sqrt(query.shape[0])).softmax(0)
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cache_attention_sees_its_mask(queries: int, kv_heads: int) -> None:
    query, key, value = (
        random(2, queries, 4, 8),
        random(2, 7, kv_heads, 8, seed=1),
        random(2, 7, kv_heads, 8, seed=2),
    )
    mask = torch.rand(2, queries, 7, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 0] = True
    additive = attention.additive(mask, torch.float64)
    found = attention.cache_attention(query, key, value, additive).view(2, queries, 4, 8)
    for row in range(2):
        for q in range(queries):
            for head in range(4):
                sees, kv = mask[row, q].nonzero().squeeze(1).tolist(), head // (4 // kv_heads)
                expected = slow_attention(
                    query[row, q, head],
                    [key[row, s, kv] for s in sees],
                    [value[row, s, kv] for s in sees],
                )
                torch.testing.assert_close(found[row, q, head], expected)


CHOICES = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [2, 0, 1]]


def frame_of(tree: TokenTree, base: Tensor) -> CachePlace:
    table = Rope(8, 10000.0).table(16, base.device, torch.float64)
    return static_places(TreePlan.of(tree), Memory(base, table))


def run_rows(plan: TreePlan) -> list[int]:
    """The drafted nodes that have children."""
    return plan.drawn_from.nonzero().squeeze(1).tolist()


def test_drafted_nodes_see_the_past_and_their_ancestors() -> None:
    tree, base = TokenTree.from_choices(CHOICES), torch.tensor([3, 5])
    plan, frame = TreePlan.of(tree), frame_of(tree, base)
    table = Rope(8, 10000.0).table(16, base.device, torch.float64)
    run = run_rows(plan)
    for level in plan.levels[1:]:
        at = frame.at(level)
        slots, rotation, mask = at.slots, at.rotation, at.sight.mask(16, torch.float64)
        for place, node in enumerate(run[level.span]):
            lineage = tree.ancestors[0, node].nonzero().squeeze(1).tolist()
            for row, first in enumerate(base.tolist()):
                expected = [*range(first), *(first + run.index(i) for i in lineage if i > 0)]
                assert mask[row, place].isfinite().nonzero().squeeze(1).tolist() == expected
                assert mask[row, place, expected].abs().max() == 0
                assert int(slots[row, place]) == first + run.index(node)
                assert torch.equal(rotation[0][row, place, 0], table[first + level.depth - 2, 0])


def test_chain_frames_are_tree_frames() -> None:
    chain, base = TokenTree.chain(4), torch.tensor([3, 0])
    as_tree = replace(chain, is_chain=False)
    seen, also = frame_of(chain, base).sight, frame_of(as_tree, base).sight
    assert torch.equal(seen.mask(16, torch.float64), also.mask(16, torch.float64))
    assert torch.equal(seen.words, also.words)


def test_plan_runs_only_nodes_with_children() -> None:
    plan = TreePlan.of(TokenTree.from_choices(CHOICES))
    assert [run_rows(plan)[level.span] for level in plan.levels] == [[], [1, 3], [5, 6]]
    assert [level.max_rank for level in plan.levels] == [2, 1, 1]
    assert plan.levels[1].rows.tolist() == [0, 2]
    assert plan.levels[2].carry is None
    assert plan.levels[2].pick.tolist() == [0, 2, 3]
    assert plan.best_path.nonzero().squeeze(1).tolist() == [0, 1, 4]


def test_draft_vocabulary_is_the_most_frequent_in_ascending_order() -> None:
    counts = torch.tensor([5, 0, 9, 5, 1, 9, 0])
    ids = vocab.most_frequent(counts, 3)
    assert ids.tolist() == [0, 2, 5]  # of the two fives the lower id
    d2t, t2d = vocab.to_maps(ids, 7)
    assert d2t.tolist() == [0, 1, 3]  # offsets: target id minus draft id
    assert t2d.tolist() == [True, False, True, False, False, True, False]
    assert vocab.to_target_ids(d2t).tolist() == [0, 2, 5]
    with pytest.raises(UserError, match="between 1 and the target's vocabulary of 7"):
        vocab.most_frequent(counts, 8)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(36, (2, 18, 33)), (8, (2, 4, 5)), (6, (1, 3, 5)), (4, (1, 2, 3)), (2, (1,)), (1, (1,))],
)
def test_default_taps_exist_in_every_target(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


@pytest.mark.parametrize(
    ("count", "layers", "chosen"),
    [
        (1, 8, (0,)),
        (2, 8, (0, 7)),
        (3, 9, (0, 4, 8)),
        (5, 36, (0, 9, 18, 26, 35)),
        (3, 1, (0,) * 3),
    ],
)
def test_copied_layers_are_spread_over_the_target(
    count: int, layers: int, chosen: tuple[int, ...]
) -> None:
    assert default_start(count, layers) == chosen


def test_initial_values_do_not_depend_on_dtype() -> None:
    drawn = [torch.empty(3, 4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for tensor in drawn:
        init.normal(tensor, 0.02, torch.Generator().manual_seed(5))
    assert drawn[0].bfloat16().tolist() == drawn[1].tolist()


def test_layer_shapes_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="multiple of num_key_value_heads"):
        LayerShape(16, 4, 3, 4, 24, 1e-6)
    with pytest.raises(UserError, match="must be even"):
        LayerShape(15, 3, 3, 5, 24, 1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_heads_are_a_linear_map_each(bias: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(3, 7, 5, generator=generator, dtype=torch.float64)
    biases = torch.randn(3, 7, generator=generator, dtype=torch.float64) if bias else None
    shared = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    for states in (shared.expand(3, 4, 5), shared + torch.arange(3)[:, None, None]):
        expected = torch.einsum("koh,kmh->kmo", weight, states)
        expected = expected if biases is None else expected + biases[:, None]
        torch.testing.assert_close(blocks.head_products(states, weight, biases), expected)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle", "mtp", "dflash"])
def test_random_weights_are_no_larger_than_the_recipe_says(name: str) -> None:
    target, random_layers = micro_target(), {"start_from": "random"} if name == "dflash" else {}

    def spread(**changes: float) -> float:
        drafter = build(name, target, shaken=0.0, changes={**random_layers, **changes})
        found = [w for key, w in drafter.named_parameters() if key.endswith("mlp.gate_proj.weight")]
        return float(found[-1].detach().std())

    unlimited = spread(initial_std=0.0)
    assert unlimited == pytest.approx(target.info.hidden_size**-0.5, rel=0.2)
    assert spread(initial_std=0.01) == pytest.approx(0.01, rel=0.2)
    assert spread(initial_std=9.0) == unlimited
