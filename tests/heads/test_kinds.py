"""What holds for every kind: lossless decoding, steps without host synchronisation, complete checkpoints, own
gradients only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.registry import get_kind, kind_names
from heads.api.state import write_rows
from heads.api.tree import TokenTree
from inference.engine import DecodeConfig, Engine, Request
from inference.target import TargetModel
from tests.heads.micro import MicroTarget, PlainNoise, micro_target, packed_batch, seen_states
from tests.models import VOCAB, random_target

KINDS = kind_names()
TRAINABLE = [name for name in KINDS if get_kind(name).trainable]
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 31},
    "distilled": {"from_target_layers": (0, 1)},
}
CHAIN = {"shape": "chain", "depth": 3}
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
DOCUMENTS = [[5, 9, 3, 22, 17, 4, 8, 30, 11, 2, 6, 19], [7, 7, 1, 30, 3, 12, 13, 14, 15]]


def make(kind: str, target: TargetModel | MicroTarget, **options: Any) -> Any:
    """A drafter of `kind`, shaken out of its initial values if it has weights."""
    vocab = target.info.vocab_size
    config = get_kind(kind).config_class(**options)
    drafter = new_drafter(
        kind, config, target.info, target.weights, seed=0, token_counts=torch.arange(vocab).flip(0)
    )
    if isinstance(drafter, TrainableDrafter):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "shape", [{"shape": "chain", "depth": 3}, {"shape": "tree", "choices": TREE}], ids=["chain", "tree"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_lossless_in_a_refilled_ragged_batch(
    kind: str, shape: dict, temperature: float
) -> None:
    target = random_target()
    drafter = make(kind, target, **OPTIONS.get(kind, {}))
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (9, 1, 5, 12, 3)
    ]
    requests = [Request(i, tuple(prompt), seed=40 + i, max_new_tokens=20) for i, prompt in enumerate(prompts)]
    plain = {
        c.request.index: c.tokens
        for c in Engine(target, None, DecodeConfig(temperature=temperature)).run(requests)
    }
    config = DecodeConfig(temperature=temperature, batch_size=3, **shape)
    found = {c.request.index: c.tokens for c in Engine(target, drafter, config).run(requests)}
    assert found == plain


class NoHostSync(TorchDispatchMode):
    """Refuses what would make a device wait for the host: reading values, and shapes that depend on them."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"host synchronisation by {name}"
        if name in ("index", "index_put", "index_put_"):
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            assert not masks, "indexing by a mask has a shape that depends on values"
        return func(*args, **(kwargs or {}))


def test_the_guard_itself_refuses_reading_a_value() -> None:
    with NoHostSync(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()


@pytest.mark.parametrize("tree", [TokenTree.chain(3), TokenTree.from_choices(TREE)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_do_not_wait_for_the_host(kind: str, tree: TokenTree) -> None:
    target = micro_target()
    drafter = make(kind, target, **OPTIONS.get(kind, {}))
    state = drafter.start(seen_states(target, drafter.needs, DOCUMENTS, [(0, 7), (0, 5)]), tree, 32)
    accepted = seen_states(target, drafter.needs, DOCUMENTS, [(7, 9), (5, 6)])
    with NoHostSync():
        first = drafter.propose(state, PlainNoise()).tokens
        state = drafter.commit(state, accepted)
        second = drafter.propose(state, PlainNoise()).tokens
    assert first.shape == second.shape == (2, tree.num_nodes)
    assert second[:, 0].tolist() == [DOCUMENTS[0][9], DOCUMENTS[1][6]]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_refilled_row_drafts_like_a_fresh_one(kind: str) -> None:
    target, tree = micro_target(), TokenTree.from_choices(TREE)
    drafter = make(kind, target, **OPTIONS.get(kind, {}))
    state = drafter.start(seen_states(target, drafter.needs, DOCUMENTS, [(0, 9), (0, 6)]), tree, 32)
    untouched = drafter.propose(state, PlainNoise()).tokens[1].tolist()
    fresh = seen_states(target, drafter.needs, [DOCUMENTS[1]], [(0, 3)])
    write_rows(state, torch.tensor([0]), drafter.start(fresh, tree, 32))
    tokens = drafter.propose(state, PlainNoise()).tokens
    assert tokens[1].tolist() == untouched
    assert (
        tokens[0].tolist() == drafter.propose(drafter.start(fresh, tree, 32), PlainNoise()).tokens[0].tolist()
    )


@pytest.mark.parametrize("kind", TRAINABLE)
def test_checkpoint_is_loaded_completely_or_not_at_all(kind: str, tmp_path: Path) -> None:
    target = micro_target()
    drafter = make(kind, target, **OPTIONS.get(kind, {}))
    save_drafter(drafter, tmp_path, target.info)
    loaded = load_drafter(tmp_path, target.info, target.weights)
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        save_file({key: value for key, value in tensors.items() if key != name}, path)
        with pytest.raises(UserError, match="missing tensors"):
            load_drafter(tmp_path, target.info, target.weights)
        if tensors[name].is_floating_point():
            save_file({**tensors, name: tensors[name].clone().fill_(float("nan"))}, path)
            with pytest.raises(UserError, match="not finite"):
                load_drafter(tmp_path, target.info, target.weights)
    save_file({**tensors, "stray": torch.zeros(1)}, path)
    with pytest.raises(UserError, match=r"unknown tensors \['stray'\]"):
        load_drafter(tmp_path, target.info, target.weights)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_weights_are_unset_until_initialised_and_the_same_for_a_seed(kind: str) -> None:
    target = micro_target()
    config = get_kind(kind).config_class()
    fresh = get_kind(kind).drafter_class(config, target.info)
    assert all(parameter.isnan().all() for parameter in fresh.parameters())
    one, two, other = (
        new_drafter(kind, config, target.info, target.weights, seed=seed) for seed in (3, 3, 4)
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    if kind != "medusa":  # starts from zeros and copies only
        assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", TRAINABLE)
def test_loss_reaches_every_weight_and_nothing_of_the_target(kind: str) -> None:
    target = micro_target()
    drafter = make(kind, target, **OPTIONS.get(kind, {}))
    drafter.loss(packed_batch(target, drafter.needs, [DOCUMENTS])).loss_sum.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert all(value.grad is None for value in target.model.parameters())


@pytest.mark.parametrize("kind", TRAINABLE)
def test_packed_documents_do_not_see_each_other(kind: str) -> None:
    target = micro_target()
    drafter = make(kind, target, **OPTIONS.get(kind, {}))
    alone = drafter.loss(packed_batch(target, drafter.needs, [[document] for document in DOCUMENTS]))
    packed = drafter.loss(packed_batch(target, drafter.needs, [DOCUMENTS]))
    torch.testing.assert_close(packed.loss_sum, alone.loss_sum)
    assert packed.metrics.keys() == alone.metrics.keys()
    for name, (total, count) in packed.metrics.items():
        torch.testing.assert_close(total, alone.metrics[name][0])
        assert count == alone.metrics[name][1]


@pytest.mark.parametrize("kind", TRAINABLE)
def test_nothing_supervised_is_a_loss_of_zero(kind: str) -> None:
    target = micro_target()
    drafter = make(kind, target, **OPTIONS.get(kind, {}))
    output = drafter.loss(packed_batch(target, drafter.needs, [DOCUMENTS], prompt=99))
    output.loss_sum.backward()
    assert float(output.loss_sum) == 0
    assert all(int(count) == 0 for _, count in output.metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TRAINABLE)
def test_lower_precision_stays_close(kind: str, dtype: torch.dtype) -> None:
    exact, rounded = micro_target(), micro_target(dtype)
    drafters = [make(kind, target, **OPTIONS.get(kind, {})) for target in (exact, rounded)]
    drafters[1].load_state_dict(drafters[0].state_dict())
    losses = [
        float(drafter.loss(packed_batch(target, drafter.needs, [DOCUMENTS])).loss_sum)
        for drafter, target in zip(drafters, (exact, rounded), strict=True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel={torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype])
    seen = seen_states(rounded, drafters[1].needs, DOCUMENTS, [(0, 7), (0, 5)])
    with torch.no_grad():
        state = drafters[1].start(seen, TokenTree.chain(3), 32)
        assert drafters[1].propose(state, PlainNoise()).tokens.shape == (2, 4)
