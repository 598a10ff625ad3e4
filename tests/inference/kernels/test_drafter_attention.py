"""Drafters by the tree attention kernel and by masks: the same drafts, the same states.

Legend: B rows, S slots of a drafter's cache.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.tree import DraftShape
from heads.kernels.dispatch import traced_for_cpu
from heads.nn.drafting.sight import UpTo, cache_kernel
from heads.nn.drafting.state import Cached
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.kernels.drafter_attention import MOST_QUERIES, drafter_attention
from inference.kernels.reference.attention import TREE_ATTENTION
from tests.heads.kernels.devices import ON_CPU
from tests.heads.recipes import RECIPES, REMEMBERING
from tests.inference.decoding.test_lossless import TREE, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.inference.kernels.planted import run_in_its_place
from tests.models import random_target

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"shape": "chain", "depth": 4},
    "tree": {"shape": "tree", "choices": TREE},
    "dynamic": {"shape": "dynamic", "nodes": 12, "depth": 4, "width": 4},
}
NO_CACHE = {"jump_forward", "hydra_heads", "jacobi", "lookahead", "medusa", "ngram", "suffix"}
"""Recipes that attend to no cache of their own."""


def by_masks(*_given: Any) -> None:
    """A kernel that takes nothing."""


class BothWays:
    """A drafter that drafts and commits by masks on a copy of its state too, and compares."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        with cache_kernel(by_masks):
            expected = self.inner.start(seen, tree, capacity)
        found = self.inner.start(seen, tree, capacity)
        compare(found, expected)
        return found

    def propose(self, state: Any, noise: Noise) -> Proposal:
        with cache_kernel(by_masks):
            expected = self.inner.propose(deepcopy(state), noise)
        found: Proposal = self.inner.propose(state, noise)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.tree.parents, expected.tree.parents)
        if expected.logits is not None:
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        return found

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        copied = deepcopy(state)
        with cache_kernel(by_masks):
            expected = self.inner.commit(copied, accepted)
        found = self.inner.commit(state, accepted)
        compare(found, expected)
        return found


def compare(found: Any, expected: Any) -> None:
    """States that hold a cache: what the last commit computed."""
    if isinstance(found, Cached):
        torch.testing.assert_close(found.output, expected.output, rtol=1e-4, atol=1e-4)


def decoded(name: str, shape: str, family: str = "llama", new: int = 10) -> None:
    """Decode `new` tokens with a recipe by both ways, in rows of different lengths that are
    refilled."""
    target = random_target(family, dtype=torch.float32)
    drafter = BothWays(drafter_of(name, target))
    decode = DecodeConfig(batch_size=2, temperature=1.0, **SHAPES[shape])
    engine = Engine(target, drafter, decode, details=True)
    done = list(engine.run(requests(3, new=new)))
    assert len(done) == 3 and sum(len(item.passes) for item in done) > 3


class Counter:
    """The reference in the kernel's place, counted where a drafter calls it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *given: Any, **more: Any) -> Tensor:
        self.calls += more.get("at") is not None  # the target's queries are all nodes
        return TREE_ATTENTION.reference(*given, **more)


@pytest.mark.rotated
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in REMEMBERING])
def test_every_recipe_drafts_the_same_by_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter()
    run_in_its_place(monkeypatch, counter)
    for shape in ("chain", "tree", "dynamic") if name in ("eagle3", "mtp") else ("tree",):
        decoded(name, shape)
    assert (counter.calls > 0) == (name not in NO_CACHE)


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_with_windows_draft_the_same_by_the_kernel(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's own layers, with windows of nine positions: shorter than the texts."""
    windows: set[int | None] = set()

    def watched(*given: Any, **more: Any) -> Tensor:
        if more.get("at") is not None:
            windows.add(more["window"])
        return TREE_ATTENTION.reference(*given, **more)

    run_in_its_place(monkeypatch, watched)
    decoded("early_exit", shape, "mistral")
    assert windows == {9}


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize(
    ("name", "shape"), [("eagle3", "dynamic"), ("distilled", "chain"), ("peagle", "tree")]
)
def test_drafts_are_the_same_by_the_interpreted_kernel(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's attention by Triton's, the target's by the reference."""
    pytest.importorskip("triton")
    from inference.kernels.tree_attention import Launch, tree_attention

    launch = Launch(128, 16, 4, 2, 128)  # large blocks, of which fewer are slow

    def in_part(*given: Any, **more: Any) -> Tensor:
        if more.get("at") is None:
            return TREE_ATTENTION.reference(*given, **more)
        return tree_attention(*given, **more, launch=launch, split_size=64)

    run_in_its_place(monkeypatch, in_part)
    decoded(name, shape, new=5)


def test_a_wrong_bit_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparisons above."""

    def blind(*given: Any, **more: Any) -> Tensor:
        query, keys, values, lengths, words, *rest = given
        if more.get("at") is not None:
            words = torch.zeros_like(words)  # committed tokens alone are seen
        return TREE_ATTENTION.reference(query, keys, values, lengths, words, *rest, **more)

    run_in_its_place(monkeypatch, blind)
    with pytest.raises(AssertionError):
        decoded("eagle3", "tree")


class Sizes(TorchDispatchMode):
    """Collects the last dimension of everything that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.last: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, Tensor) and tensor.dim():
                self.last.add(tensor.shape[-1])
        return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["eagle3", "distilled", "mtp"])
def test_no_mask_is_made_by_the_kernel(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a draft or commit has a column for every slot of the drafter's cache."""

    def nothing(query: Tensor, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> Tensor:
        batch, heads, queries, _ = query.shape
        return query.new_zeros(batch, queries, heads, values.shape[-1])

    run_in_its_place(monkeypatch, nothing)
    target = random_target(dtype=torch.float32)
    found: dict[bool, bool] = {}
    for masked in (False, True):
        seen = Watched(drafter_of(name, target), masked)
        decode = DecodeConfig(**SHAPES[shape])
        list(Engine(target, seen, decode, capacity=211).run(requests(1, new=6)))
        assert seen.slots > 211
        found[masked] = seen.slots in seen.sizes.last
    assert found == {False: False, True: True}  # the latter: masks would have been noticed


class Watched:
    """A drafter whose drafts and commits are watched; masked: they are made by masks."""

    def __init__(self, inner: Any, masked: bool) -> None:
        self.inner, self.masked, self.sizes, self.slots = inner, masked, Sizes(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _watched(self, call: Any, *given: Any) -> Any:
        with self.sizes:
            if not self.masked:
                return call(*given)
            with cache_kernel(by_masks):
                return call(*given)

    def propose(self, state: Any, noise: Noise) -> Proposal:
        self.slots = state.slots
        return self._watched(self.inner.propose, state, noise)

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        return self._watched(self.inner.commit, state, accepted)


def test_which_queries_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, dtypes that no kernel computes in and plain CPUs are left to torch's attention."""

    def takes(queries: int, dtype: torch.dtype = torch.float32) -> bool:
        sight = UpTo.run(torch.arange(queries)[None])
        query, key = (
            torch.randn(1, queries, 2, 8, dtype=dtype),
            torch.randn(1, 99, 1, 8, dtype=dtype),
        )
        return drafter_attention(query, key, key, sight, 0) is not None

    assert not takes(4)
    with traced_for_cpu():
        assert takes(4) and not takes(4, torch.bfloat16)
    run_in_its_place(monkeypatch, TREE_ATTENTION.reference)
    assert takes(MOST_QUERIES) and not takes(MOST_QUERIES + 1) and not takes(4, torch.float64)
