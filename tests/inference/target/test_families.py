"""Every family that can be a target, against its own eager forward pass and transformers' own
greedy loop."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.decoding.config import DecodeConfig
from inference.target.loading import prepare, require_supported, usable_positions
from inference.target.model import TargetModel
from tests.fakes import AlwaysRight, SometimesRight
from tests.inference.decoding.test_lossless import SHAPES, answers, decode, requests
from tests.models import (
    ALL_FAMILIES,
    LONGROPE,
    MORE_FAMILIES,
    SIZED_FAMILIES,
    VOCAB,
    random_model,
    random_target,
)

NODES = 12
WINDOW = 9
BATCHES = ((17,), (13, 1, 20, 7))
"""Prefix lengths of one row, and of a ragged batch; shorter than, around and beyond the sliding
windows of 9."""
GENERATING = [
    "gemma4_text",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3",
    "llama4_text",
    "phi3",
    "smollm3",
    "exaone4",
]
"""Families whose text is compared too; those in `FAMILIES` are in test_lossless.py."""


def random_trees(rows: int, generator: torch.Generator) -> list[list[int]]:
    """Parents of NODES nodes for every row, each node behind a random earlier one."""
    return [
        [0] + [int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, NODES)]
        for _ in range(rows)
    ]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def own_logits(model: Any, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The model's own logits [V] at the end of each text, without any cache; texts of one length
    share a pass."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        by_length[len(text)].append(place)
    found: dict[int, torch.Tensor] = {}
    for places in by_length.values():
        logits = model(
            input_ids=torch.stack([texts[place] for place in places]), use_cache=False
        ).logits[:, -1]
        found.update(zip(places, logits, strict=True))
    return [found[place] for place in range(len(texts))]


def check_trees(
    target: TargetModel, model: Any, lengths: tuple[int, ...], seed: int = 1, share: float = 3e-6
) -> None:
    """Verify a random tree behind each prefix; every node's logits are the model's own at the end
    of its path, up to a share of the largest (by default for float32 norms inside)."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    parents = random_trees(rows, generator)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]
    drafts = torch.randint(3, VOCAB, (rows, NODES), generator=generator)
    padded = torch.zeros(rows, max(lengths), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    cache, counts, needs = target.new_cache(rows, 64), torch.tensor(lengths), FeatureSpec()
    tree = TokenTree.from_parents(torch.tensor(parents), NODES - 1)
    first, _ = target.prefill(cache, torch.arange(rows), padded, counts, needs)
    logits, _, _ = target.verify(cache, drafts, tree, counts, max(lengths), needs)
    texts = list(prompts)
    for row in range(rows):
        texts += [
            torch.cat([prompts[row], drafts[row, path_to(n, parents[row])]]) for n in range(NODES)
        ]
    expected = torch.stack(own_logits(model, texts))
    found = torch.cat([first, logits.flatten(0, 1)]).to(expected.dtype)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=share * max(scale, 1.0))
    # the texts do tell the rows apart
    assert float(expected.detach().std(0).max()) > 100 * share * max(scale, 1.0)


@pytest.mark.rotated
@pytest.mark.parametrize("lengths", BATCHES, ids=["one row", "ragged"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_tree_logits_are_the_models_own(family: str, lengths: tuple[int, ...]) -> None:
    check_trees(random_target(family), random_model(family), lengths)


@pytest.mark.rotated
@pytest.mark.parametrize("family", SIZED_FAMILIES)
def test_tree_logits_of_further_families_are_the_models_own(family: str) -> None:
    require_supported("some/model", random_model(family).config)
    check_trees(random_target(family), random_model(family), BATCHES[1])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_in_the_implementation_that_serves_agree_in_float32(family: str) -> None:
    """Everything above runs the experts one by one, for float64; loaded models run them grouped."""
    target, model = random_target(family, dtype=torch.float32), random_model(family).float()
    target.model.set_experts_implementation("grouped_mm")
    tokens = torch.arange(3, 15)[None]
    cache, needs, lengths = target.new_cache(1, 40), FeatureSpec(), torch.tensor([12])
    logits, _ = target.prefill(cache, torch.tensor([0]), tokens, lengths, needs)
    torch.testing.assert_close(
        logits, model(input_ids=tokens, use_cache=False).logits[:, -1], rtol=0, atol=1e-4
    )


def own_generation(model: Any, prompt: tuple[int, ...], new: int) -> list[int]:
    """transformers' own greedy text, with its own cache."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
    )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.rotated
@pytest.mark.parametrize("family", GENERATING)
def test_text_with_drafts_is_the_plain_text_and_transformers_own(family: str) -> None:
    target, model, items = random_target(family), random_model(family), requests(3, new=16)
    plain = decode(target, None, DecodeConfig(), items)
    for item in items:
        assert plain[item.index].tokens == own_generation(model, item.tokens, 16)
    for shape in SHAPES.values():
        config = DecodeConfig(batch_size=2, **shape)  # type: ignore[arg-type]
        for fake in (AlwaysRight, SometimesRight):
            found = decode(target, fake(answers(plain), VOCAB), config, items)
            assert {i: c.tokens for i, c in found.items()} == {
                i: c.tokens for i, c in plain.items()
            }
    assert sum(len(c.passes) for c in found.values()) < sum(
        len(c.tokens) - 1 for c in plain.values()
    )


def test_all_listed_families_are_covered() -> None:
    assert set(GENERATING) <= set(MORE_FAMILIES)
    assert len(ALL_FAMILIES) >= 36


# Frequencies that depend on the length


def test_longrope_within_its_short_set_is_the_models_own_up_to_the_boundary() -> None:
    """Nodes beyond the boundary must not change the frequencies of those before it, as
    transformers' own rule would."""
    target, model = (
        random_target("phi3", sliding_window=None, **LONGROPE),
        random_model("phi3", **LONGROPE, sliding_window=None),
    )
    trained = LONGROPE["original_max_position_embeddings"]
    assert target.info.max_position_embeddings == trained
    prompt, nodes = torch.arange(5, 5 + trained - 4)[None], 8
    tokens = torch.arange(40, 40 + nodes)[None]
    cache, needs, lengths = target.new_cache(1, 64), FeatureSpec(), torch.tensor([trained - 4])
    target.prefill(cache, torch.tensor([0]), prompt, lengths, needs)
    logits, _, _ = target.verify(
        cache, tokens, TokenTree.chain(nodes - 1), lengths, trained - 4, needs
    )
    for node in range(4):
        text = torch.cat([prompt, tokens[:, : node + 1]], 1)
        torch.testing.assert_close(
            logits[0, node], model(input_ids=text, use_cache=False).logits[0, -1], rtol=0, atol=2e-5
        )


def test_longrope_with_its_long_set_is_the_models_own_beyond_the_boundary() -> None:
    model = random_model("phi3", **LONGROPE, sliding_window=None)
    pinned = prepare(random_model("phi3", **LONGROPE, sliding_window=None), long_context=True)
    assert usable_positions(pinned.config)[0] == LONGROPE["max_position_embeddings"]
    long, short = torch.arange(3, 43)[None], torch.arange(3, 13)[None]
    own, ours = (m(input_ids=long, use_cache=False).logits for m in (model, pinned))
    torch.testing.assert_close(ours, own, rtol=0, atol=2e-5)
    own, ours = (m(input_ids=short, use_cache=False).logits for m in (model, pinned))
    assert (
        float((own - ours).abs().max()) > 0.01
    )  # for short texts the two sets differ: the choice is the user's


def test_dynamic_scaling_does_not_depend_on_what_else_was_read() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    settings: dict[str, Any] = {"max_position_embeddings": 32, "rope_parameters": rope}
    check_trees(
        random_target("llama", **settings), random_model("llama", **settings), (13, 1, 18, 7)
    )
    model = prepare(random_model("llama", **settings))
    short = torch.arange(3, 13)[None]
    before = model(input_ids=short, use_cache=False).logits
    model(input_ids=torch.arange(3, 60)[None], use_cache=False)  # beyond the trained length
    assert torch.equal(model(input_ids=short, use_cache=False).logits, before)


@pytest.mark.parametrize("lengths", [(17,), (13, 1, 20, 7)], ids=["one row", "ragged"])
def test_chunks_and_tuned_queries_are_the_models_own(lengths: tuple[int, ...]) -> None:
    """Llama 4 beyond its first chunk, and beyond the position from which queries grow."""
    more = {"attention_chunk_size": 8, "floor_scale": 6, "attn_scale": 0.5}
    target = random_target("llama4_text", **more)
    assert target.info.max_position_embeddings == 256
    check_trees(target, random_model("llama4_text", **more), lengths)
    needs = FeatureSpec(last_hidden=True)
    tokens = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(18), torch.arange(12)])[None]
    segments = torch.tensor([[1] * 18 + [2] * 12], dtype=torch.int32)
    _, packed = target.features(tokens, positions, segments, needs)
    assert packed is not None
    model = random_model("llama4_text", **more)
    alone = [model(input_ids=part, use_cache=False).logits for part in tokens.split([18, 12], 1)]
    found = target.weights.logits(packed)
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=0, atol=1e-5)


def test_chunks_of_a_prompt_see_their_own_chunk_of_attention() -> None:
    target = random_target("llama4_text", attention_chunk_size=8, floor_scale=6)
    tokens, lengths = torch.arange(3, 23)[None], torch.tensor([20])
    needs, row = FeatureSpec(), torch.tensor([0])
    whole, _ = target.prefill(target.new_cache(1, 32), row, tokens, lengths, needs)
    parts, _ = target.prefill(target.new_cache(1, 32), row, tokens, lengths, needs, chunk=6)
    # norms round to float32
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
