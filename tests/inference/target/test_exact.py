"""decode.exact: the same bits alone, in a chain, in a tree and in a batch; without it they differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.audit.comparison import audit, flips_alone
from inference.audit.drafters import ScriptedDrafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.kernels.reference.row_linear import ROW_LINEAR
from inference.target.exact import install_exact, is_exact
from inference.target.model import TargetModel
from tests.inference.decoding.test_lossless import requests
from tests.inference.kernels.planted import run_in_its_place
from tests.models import random_target, texts_of

NEEDS = FeatureSpec(last_hidden=True)


def target_of(family: str, dtype: torch.dtype) -> TargetModel:
    more = {} if family == "gpt2" else {"hidden_size": 64, "num_hidden_layers": 3}
    return random_target(family, dtype=dtype, **more)


def text(length: int) -> torch.Tensor:
    return torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(1))


def verified(target: TargetModel, width: int, exact: bool, rows: int = 1) -> torch.Tensor:
    """Logits of 13 tokens behind a prompt of 7, from passes over `width` of them, in the last of
    some rows of different lengths."""
    tokens = text(20).expand(rows, -1)
    cache, index = target.new_cache(rows, 48), torch.arange(rows)
    lengths = torch.tensor([7 - row % 4 for row in range(rows)][::-1])
    found = []
    with target.computing(exact):
        target.prefill(cache, index, tokens[:, :7], lengths, NEEDS)
        for first in range(0, 13, width):
            count = min(width, 13 - first)
            tree = TokenTree.chain(count - 1)
            now = tokens[:, 7 + first : 7 + first + count]
            longest = int(lengths.max())
            logits, _, _ = target.verify(cache, now, tree, lengths, longest, NEEDS, rows == 1)
            path = torch.arange(count).expand(rows, -1)
            whole = torch.full_like(lengths, count)
            cache.commit(tree, lengths, path, whole - 1, whole)
            lengths = lengths + count
            found.append(logits[-1])
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi", "gpt2"])
def test_passes_of_any_width_and_batch_give_the_same_bits(family: str, dtype: torch.dtype) -> None:
    target = target_of(family, dtype)
    plain = verified(target, 1, True)
    for width, rows in ((2, 1), (6, 1), (13, 1), (1, 3), (6, 3), (4, 8)):
        assert torch.equal(verified(target, width, True, rows), plain), (width, rows)


@pytest.mark.parametrize(
    ("family", "more", "norm"),
    [
        ("nanochat", {}, "NanoChatRMSNorm"),  # heads before tokens
        ("llama4_text", {"moe_layers": []}, "Llama4TextL2Norm"),  # tokens before heads
        ("olmo", {}, "OlmoLayerNorm"),
        ("hunyuan_v1_dense", {}, "HunYuanDenseV1RMSNorm"),  # has weights, heads before tokens
    ],
)
def test_norms_are_called_in_one_shape_for_any_width(
    family: str, more: dict[str, Any], norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms without weights too."""
    target = random_target(family, dtype=torch.bfloat16, **more)
    norms = [one for one in target.model.modules() if type(one).__name__ == norm]
    assert norms
    shapes: list[set[torch.Size]] = []
    forward = type(norms[0]).forward

    def noted(self: Any, x: torch.Tensor) -> Any:
        if target.exact and is_exact():
            shapes[-1].add(x.shape)
        return forward(self, x)

    monkeypatch.setattr(type(norms[0]), "forward", noted)
    found = []
    for width, rows in ((1, 1), (6, 1), (13, 2)):
        shapes.append(set())
        found.append(verified(target, width, True, rows))
    assert shapes[0] and all(each == shapes[0] for each in shapes)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_sizes_that_fill_no_vector_register_give_the_same_bits(activation: str) -> None:
    """A CPU computes the last few of all numbers of a pass by another exponential."""
    target = random_target(
        "llama", dtype=torch.float32, intermediate_size=300, hidden_act=activation
    )
    plain = verified(target, 1, True)
    for width, rows in ((2, 1), (6, 1), (13, 1), (4, 3)):
        assert torch.equal(verified(target, width, True, rows), plain), (width, rows)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_head_takes_all_rows_at_once_where_a_kernel_keeps_them_apart(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gemma2: with a soft-cap behind the product."""
    target = target_of(family, torch.float32)
    vocab, rows = target.info.vocab_size, list[int]()

    def product(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        if len(weight) == vocab:
            rows.append(len(x))
        return ROW_LINEAR.reference(x, weight, *bias)

    plain = verified(target, 1, True)
    run_in_its_place(monkeypatch, product, ROW_LINEAR)
    found = verified(target, 13, True)
    assert rows == [13]
    torch.testing.assert_close(found, plain)


def test_a_norm_made_of_norms_is_left_alone() -> None:
    """StableLM's norm of heads splits its input by heads, so its parts are prepared instead."""
    target = random_target("stablelm", qk_layernorm=True)
    install_exact(target.model)
    kinds = {type(one).__name__: hasattr(one, "headstart_exact") for one in target.model.modules()}
    assert kinds["LayerNorm"] and not kinds["StableLmLayerNormPerHead"]
    plain = verified(target, 1, True)
    assert torch.equal(verified(target, 6, True), plain)


def test_without_it_bits_differ() -> None:
    target = target_of("llama", torch.bfloat16)
    plain = verified(target, 1, False)
    assert not torch.equal(verified(target, 13, False, 3), plain)
    assert torch.equal(verified(target, 1, False), plain)
    torch.testing.assert_close(verified(target, 1, True), plain, rtol=0.1, atol=0.2)


def test_a_trees_branch_has_the_bits_of_its_text() -> None:
    target = target_of("llama", torch.bfloat16)
    tokens = text(20)
    parents = torch.tensor([[0, 0, 0, 1, 2, 4, 2, 5]])
    tree = TokenTree.from_parents(parents, 4)
    branch = [0, 2, 4, 5, 7]
    drafted = torch.full((1, 8), 11)
    drafted[:, branch] = tokens[:, 7:12]
    cache, row = target.new_cache(1, 32), torch.tensor([0])
    with target.computing(True):
        target.prefill(cache, row, tokens[:, :7], row + 7, NEEDS)
        logits, _, _ = target.verify(cache, drafted, tree, row + 7, 7, NEEDS)
    assert torch.equal(logits[0, branch], verified(target, 1, True)[:5])


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_same_with_any_draft_and_batch(shape: Any, temperature: float) -> None:
    target = target_of("llama", torch.bfloat16)
    target.eos_token_ids = ()
    items = requests(4, new=24)
    decode = DecodeConfig(temperature=temperature, exact=True, depth=5, nodes=9, shape=shape)

    def answers(drafter: Any, decode: DecodeConfig) -> dict[int, list[int]]:
        return texts_of(Engine(target, drafter, decode), items)

    plain = answers(None, decode.without_draft())
    known = {item.tokens: [*item.tokens, *plain[item.index]] for item in items}
    drafter = ScriptedDrafter(known, target.info.vocab_size, 0.7)
    for rows in (1, 3):
        config = DecodeConfig(**{**vars(decode), "batch_size": rows})
        assert answers(drafter, config) == plain
    assert not target.exact


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("mixtral", {}, "Experts|Router"),
        ("qwen3_5_text", {"recurrent": True}, "recurrent layers"),
        ("deepseek_v32", {}, "an indexer"),
    ],
)
def test_targets_with_sums_of_their_own_are_refused(
    family: str, more: dict[str, Any], reason: str
) -> None:
    target = random_target(family, **more)
    with pytest.raises(UserError, match=reason), target.computing(True):
        pass
    assert not target.exact


def test_it_does_not_go_with_compiling() -> None:
    with pytest.raises(UserError, match="do not go together"):
        DecodeConfig(exact=True, compile=True)


def test_compiled_layers_and_exact_passes_exclude_each_other() -> None:
    target = target_of("llama", torch.float32)
    target.compiled_attention = {0: torch.nn.Identity()}
    with pytest.raises(UserError, match="whose layers are not compiled"), target.computing(True):
        pass


def test_an_audit_of_exact_answers_replays_them_exactly() -> None:
    """What differs is examined by passes that compute as the answers did."""
    target = target_of("llama", torch.bfloat16)
    target.eos_token_ids = ()
    (item,) = requests(1, new=12)
    decode = DecodeConfig(shape="none", exact=True)
    (done,) = Engine(target, None, decode).run([item])
    wrong = [*done.tokens[:5], (done.tokens[5] + 1) % 90, *done.tokens[6:]]
    seen = []
    verify = TargetModel.verify

    def noted(self: TargetModel, *given: Any, **more: Any) -> Any:
        seen.append(self.exact)
        return verify(self, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetModel, "verify", noted)
        audit(target, [item], [done.tokens], [wrong], decode.sampling(), exact=True)
        assert seen and all(seen)
        assert flips_alone(target, [item], [done.tokens], decode.sampling(), 4, exact=True) == (
            12,
            0,
        )
    assert all(seen) and not target.exact
