"""Processors at every node of a tree against transformers' own on that node's text, written out in
full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.processors import Prefix, Processors, process

VOCAB = 13  # small: tokens repeat within a text, and random bad words are really begun
SLOTS = 9
BIAS = ((2, 0.7), (5, -3.25), (11, 1e-3))
SETTINGS = {
    "penalty": SamplingSettings(repetition_penalty=1.7),
    "reward": SamplingSettings(repetition_penalty=0.6),
    "bias": SamplingSettings(logit_bias=BIAS),
    "one-token words": SamplingSettings(bad_words=((4,), (9,))),
    "words": SamplingSettings(
        bad_words=(*((a, b) for a in range(0, VOCAB, 2) for b in (1, 3, 8)), (1, 4, 1))
    ),
    "all": SamplingSettings(
        repetition_penalty=1.3,
        logit_bias=BIAS,
        bad_words=(
            *((a, b, 6) for a in range(VOCAB) for b in (0, 5, 7, 12)),
            (7,),
            (3, 2),
            (4, 2),
            (0, 0, 0, 0, 2),
        ),
    ),
}


def random_tree(rows: int, nodes: int, generator: torch.Generator) -> TokenTree:
    parents = torch.zeros(rows, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(0, node, (rows,), generator=generator)
    return TokenTree.from_parents(parents, nodes - 1)


TREES: dict[str, Callable[[torch.Generator], TokenTree]] = {
    "root": lambda generator: TokenTree.chain(0),
    "chain": lambda generator: TokenTree.chain(6),
    "static": lambda generator: TokenTree.from_choices(
        [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]
    ),
    "dynamic": lambda generator: random_tree(4, 11, generator),
}


def example(shape: str, seed: int) -> tuple[Tensor, Prefix]:
    """Random logits [4, N, V] float64, some exactly 0, behind ragged histories (one of them
    empty)."""
    generator = torch.Generator().manual_seed(seed)
    tree = TREES[shape](generator)
    history = torch.randint(0, VOCAB, (4, SLOTS), generator=generator)
    tokens = torch.randint(0, VOCAB, (4, tree.num_nodes), generator=generator)
    logits = torch.randn(4, tree.num_nodes, VOCAB, generator=generator, dtype=torch.float64) * 3
    logits[:, :, 1] = 0.0
    return logits, Prefix(history, torch.tensor([0, 1, SLOTS, 4]), tokens, tree)


def texts(prefix: Prefix, with_path: bool = True) -> list[list[list[int]]]:
    """Every node's text, found by walking up to the root; without the path only what was
    committed."""
    parents = prefix.tree.parents.expand(prefix.tokens.shape).tolist()
    found = []
    for row, tokens in enumerate(prefix.tokens.tolist()):
        start = prefix.history[row, : int(prefix.lengths[row])].tolist()
        found.append([])
        for node in range(len(tokens)):
            path = []
            while node:
                path.append(tokens[node])
                node = parents[row][node]
            found[-1].append([*start, tokens[0], *(path[::-1] if with_path else [])])
    return found


def expected(logits: Tensor, settings: SamplingSettings, written: list[list[list[int]]]) -> Tensor:
    """transformers' processors in the order of its `generate`, one text at a time."""
    steps = LogitsProcessorList()
    if settings.logit_bias:
        steps.append(
            SequenceBiasLogitsProcessor([[[token], value] for token, value in settings.logit_bias])
        )
    if settings.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.bad_words:
        steps.append(NoBadWordsLogitsProcessor([list(word) for word in settings.bad_words]))
    rows = [
        [steps(torch.tensor([text]), logits[row, node][None])[0] for node, text in enumerate(nodes)]
        for row, nodes in enumerate(written)
    ]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_node_gets_what_transformers_gives_for_its_text(
    name: str, shape: str, seed: int
) -> None:
    logits, prefix = example(shape, seed)
    found = process(logits, SETTINGS[name], prefix)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected(logits, SETTINGS[name], texts(prefix)))


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("name", ["penalty", "reward", "words", "all"])
def test_the_committed_text_alone_would_be_wrong(name: str, shape: str) -> None:
    """Negative control: without the drafted path the comparison above must fail, but not at the
    root."""
    logits, prefix = example(shape, 0)
    found = process(logits, SETTINGS[name], prefix)
    committed = expected(logits, SETTINGS[name], texts(prefix, with_path=False))
    differs = (found != committed).any(-1)
    assert differs.any() and not differs[:, 0].any()


def test_a_bad_word_that_begins_in_the_history_ends_in_the_tree() -> None:
    """History 9 1 2, then the root 3 and 4: 5 would complete the word 2 3 4 5. Row 1 has no
    history."""
    tree = TokenTree.chain(2)
    history = torch.tensor([[9, 1, 2, 8], [2, 1, 2, 8]])
    tokens = torch.tensor([[3, 4, 7], [3, 4, 7]])
    logits = torch.zeros(2, 3, VOCAB)
    prefix = Prefix(history, torch.tensor([3, 0]), tokens, tree)
    found = process(logits, SamplingSettings(bad_words=((2, 3, 4, 5),)), prefix)
    assert torch.isinf(found).nonzero().tolist() == [[0, 1, 5]]


def test_slots_behind_the_committed_text_have_no_say() -> None:
    logits, prefix = example("static", 5)
    stale = prefix.history.clone()
    for row, length in enumerate(prefix.lengths.tolist()):
        stale[row, length:] = VOCAB - 1 - stale[row, length:]
    other = Prefix(stale, prefix.lengths, prefix.tokens, prefix.tree)
    for settings in SETTINGS.values():
        assert torch.equal(process(logits, settings, prefix), process(logits, settings, other))


def test_logits_are_float32_at_least_and_untouched_without_processors() -> None:
    logits, prefix = example("chain", 1)
    half = logits.bfloat16()
    assert process(half, SamplingSettings(1.0, top_k=3), None) is half
    found = process(half, SETTINGS["all"], prefix)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected(half.float(), SETTINGS["all"], texts(prefix)))


class NoQuestions(TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        masked = name == "index" and any(
            item is not None and item.dtype == torch.bool for item in args[1]
        )
        assert not masked and name not in ("_local_scalar_dense", "nonzero", "masked_select"), name
        return function(*args, **(kwargs or {}))


def test_a_step_asks_the_device_for_nothing() -> None:
    for shape in TREES:
        logits, prefix = example(shape, 3)
        built = Processors(SETTINGS["all"], VOCAB, "cpu")
        with NoQuestions():
            built(logits, prefix)
    with pytest.raises(AssertionError, match="index"), NoQuestions():
        logits[logits > 0]


def test_what_ignores_the_text_needs_no_prefix() -> None:
    logits, prefix = example("static", 2)
    for name in ("bias", "one-token words"):
        built = Processors(SETTINGS[name], VOCAB, "cpu")
        assert built.active and torch.equal(built(logits, None), built(logits, prefix))


@pytest.mark.parametrize("bad", [{"logit_bias": ((VOCAB, 1.0),)}, {"bad_words": ((1, VOCAB + 3),)}])
def test_tokens_outside_the_vocabulary_are_refused(
    bad: dict[str, tuple[tuple[int, float], ...]],
) -> None:
    with pytest.raises(
        UserError,
        match=rf"decode.{next(iter(bad))} names token \d+, but the target's vocabulary has 13",
    ):
        Processors(SamplingSettings(**bad), VOCAB, "cpu")  # type: ignore[arg-type]
