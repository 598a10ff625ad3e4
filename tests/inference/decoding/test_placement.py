"""A drafter on another device: the same tokens, and only what is needed crosses over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.kinds import kind_names
from inference.decoding import placement
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.pair import DrafterPair
from inference.decoding.placement import PlacedDrafter, weights_on
from inference.decoding.requests import Completion
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.session import Session
from inference.target.model import TargetModel
from tests.heads.recipes import recipe
from tests.inference.decoding.test_lossless import SHAPES, decode, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import VOCAB, random_target

CPU = torch.device("cpu")
DYNAMIC: dict[str, Any] = {"shape": "dynamic", "nodes": 8, "depth": 3, "width": 3}


def placed(drafter: Any, **settings: Any) -> PlacedDrafter:
    return PlacedDrafter(drafter, CPU, CPU, **settings)


def outcome(found: dict[int, Completion]) -> dict[int, Any]:
    """Tokens and passes: equal only if every single draft was."""
    return {index: (item.tokens, item.passes) for index, item in found.items()}


CASES = [(kind, shape) for kind in kind_names() for shape in SHAPES] + [("eagle3", "dynamic")]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("kind", "shape", "temperature"),
    [(*case, 1.0) for case in CASES] + [("eagle3", shape, 0.0) for shape in (*SHAPES, "dynamic")],
)
def test_a_placed_drafter_drafts_what_it_drafts_in_place(
    kind: str, shape: str, temperature: float
) -> None:
    target, items = random_target(), requests(3, new=12)
    setting = DYNAMIC if shape == "dynamic" else SHAPES[shape]
    config = DecodeConfig(temperature=temperature, batch_size=2, **setting)  # type: ignore[arg-type]
    alone = decode(target, drafter_of(kind, target), config, items)
    moved = decode(target, placed(drafter_of(kind, target)), config, items)
    assert outcome(moved) == outcome(alone)


def test_the_memory_of_a_placed_drafter_and_of_a_pair_is_counted() -> None:
    target = random_target()
    eagle, medusa = (drafter_of(kind, target) for kind in ("eagle3", "medusa"))

    def counted(drafter: Any) -> int:
        return Engine(target, drafter).memory_bytes()["drafter"]

    both = counted(eagle) + counted(medusa)
    assert 0 < counted(eagle) < both
    assert counted(placed(eagle)) == counted(eagle)
    pair = DrafterPair(placed(eagle), medusa, target.info.vocab_size, lambda request: False)
    assert counted(pair) == both


def test_rules_that_weigh_drafts_get_their_probabilities_back() -> None:
    target, items = random_target(), requests(3, new=12)
    config = DecodeConfig(temperature=1.0, batch_size=2, rule="rejection", depth=3)
    alone = decode(target, drafter_of("eagle3", target), config, items)
    moved = decode(target, placed(drafter_of("eagle3", target)), config, items)
    assert outcome(moved) == outcome(alone)


class Counted(PlacedDrafter):
    """Remembers the shape of everything that crosses."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.crossed: list[tuple[torch.Size, torch.dtype]] = []

    def _move(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.crossed.append((value.shape, value.dtype))
        return super()._move(value, device).clone()


def prompt_and_two_passes(
    target: TargetModel, drafter: Counted, temperature: float = 0.0, **settings: Any
) -> list[list[Any]]:
    """What crosses at the prompt and in each of two passes of one row, its buffers being there
    already."""
    engine = Engine(target, drafter, DecodeConfig(temperature=temperature, depth=3, **settings))
    list(engine.run(requests(1, new=30)))
    drafter.crossed.clear()
    parts: list[list[Any]] = []
    run = engine.run(requests(1, new=30), yield_steps=True)
    for _ in range(3):
        next(run)
        parts.append([(tuple(shape), dtype) for shape, dtype in drafter.crossed])
        drafter.crossed.clear()
    run.close()
    return parts


INT = torch.int64
RUN, DRAFT, KEYS = ((4, 1, 4), INT), ((1, 4), INT), ((1,), INT)


def test_only_what_the_drafter_reads_crosses() -> None:
    target = random_target()
    ngram = Counted(drafter_of("ngram", target), CPU, CPU)
    assert prompt_and_two_passes(target, ngram) == [[((4, 1, 11), INT)], [DRAFT, RUN], [DRAFT, RUN]]
    medusa = Counted(drafter_of("medusa", target), CPU, CPU)
    assert medusa.needs.last_hidden and not medusa.needs.taps
    prompt, first, second = prompt_and_two_passes(target, medusa)
    hidden = target.info.hidden_size
    assert prompt == [((4, 1, 11), INT), ((1, 11, hidden), torch.float64)]
    assert first == second == [DRAFT, RUN, ((1, 4, hidden), torch.float64)]


def test_keys_cross_when_they_change_and_drafting_reads_them() -> None:
    target = random_target()
    _, first, second = prompt_and_two_passes(
        target, Counted(drafter_of("ngram", target), CPU, CPU), 1.0
    )
    assert (first, second) == ([KEYS, DRAFT, RUN], [DRAFT, RUN])  # the seed of the new prompt
    medusa = Counted(drafter_of("medusa", target), CPU, CPU)
    _, first, second = prompt_and_two_passes(target, medusa, 1.0, rule="rejection")
    assert (
        first[:2] == [KEYS, KEYS] and second[0] == KEYS and second[1] == DRAFT
    )  # the root as well, in every pass


def test_keys_that_change_cross_again() -> None:
    """The noise of another request must not be drawn with the keys of the one before."""
    target = random_target()
    config = DecodeConfig(temperature=1.5, depth=3)
    drafter = Counted(drafter_of("medusa", target), CPU, CPU)
    engine = Engine(target, drafter, config)
    alone = Engine(target, drafter_of("medusa", target), config)
    for seed in (3, 4):
        items = [
            type(item)(item.index, item.tokens, seed, item.max_new_tokens) for item in requests(2)
        ]
        assert outcome({c.request.index: c for c in engine.run(items)}) == outcome(
            {c.request.index: c for c in alone.run(items)}
        )


class Watched(Counted):
    """Compares the rows' settings that the drafter gets with those of the target."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.modes: set[int] = set()

    def _keyed(self, noise: Any) -> Any:
        found = super()._keyed(noise)
        own, rows = vars(noise.rows), vars(found.rows)
        assert own.keys() == rows.keys()
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                assert rows[name] is not value and torch.equal(rows[name], value), name
            else:
                assert rows[name] is value, name
        self.modes.add(found.rows.mode)
        return found


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_settings_of_requests_cross_when_they_change(rule: str) -> None:
    target, found = random_target(), []
    settings = [
        SamplingSettings(),
        SamplingSettings(),
        SamplingSettings(temperature=1.0),
        SamplingSettings(temperature=0.7),
        SamplingSettings(temperature=1.5, top_k=9),
    ]
    items = [
        replace(item, sampling=own) for item, own in zip(requests(5, new=12), settings, strict=True)
    ]
    watched = Watched(drafter_of("medusa", target), CPU, CPU)
    for drafter in (watched, drafter_of("medusa", target)):
        done: list[Completion] = []
        engine = Engine(target, drafter, DecodeConfig(batch_size=2, depth=3, rule=rule))
        with Session(engine, 80) as session:
            for item in items:
                session.add(item)
            while session.unfinished:
                done += session.step()
        found.append(outcome({one.request.index: one for one in done}))
    assert found[0] == found[1]
    assert watched.modes == {0, 1, 2}  # rows without noise, with it, and with filters


def test_what_a_drafter_says_of_its_trees_is_passed_on() -> None:
    target = random_target()
    drafter = drafter_of("medusa", target)
    drafter.weighs_trees = False
    auto = DecodeConfig(rule="auto", temperature=1.0, shape="tree", choices=((0,), (1,)))
    assert Engine(target, placed(drafter), auto).decode.rule == "match"
    assert Engine(target, placed(drafter_of("medusa", target)), auto).decode.rule == "auto"


def test_transfers_are_counted_and_timed() -> None:
    target = random_target()
    drafter = placed(drafter_of("medusa", target), measure=True)
    decode(target, drafter, DecodeConfig(depth=3), requests(1, new=12))
    crossed = drafter.transfer
    assert crossed.moves_in > crossed.moves_out > 0 and crossed.seconds > 0
    assert crossed.bytes_out == crossed.moves_out * 4 * 8  # four int64 tokens a pass, nothing else


def test_copies_wait_for_no_device_unless_they_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(placement, "wait_for", waited.append)
    target, found = random_target(), []
    for measure in ({}, {"measure": True}):
        drafter = placed(drafter_of("medusa", target), **measure)
        decode(target, drafter, DecodeConfig(depth=3), requests(1, new=12))
        moves = drafter.transfer.moves_in + drafter.transfer.moves_out
        assert len(waited) == (4 * moves if measure else 0)
        assert (drafter.transfer.seconds > 0) == bool(measure)
        found.append(drafter.transfer.bytes_in)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi"])
def test_shared_weights_elsewhere_give_the_targets_logits(family: str) -> None:
    target = random_target(family)
    weights = weights_on(target, CPU)
    states = torch.randn(2, 5, target.info.hidden_size, dtype=torch.float64)
    assert torch.equal(weights.logits(states), target.weights.logits(states))
    assert set(weights.state) == set(target.weights.state) and weights.embedding.shape == (
        VOCAB,
        32,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", kind_names())
@pytest.mark.parametrize(("target_device", "device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_cpu_and_cuda_work_together(kind: str, target_device: str, device: str) -> None:
    """Another device rounds differently, so drafts may differ; the text may not."""
    target = random_target(device=target_device)
    items = requests(5)
    counts = torch.arange(VOCAB)
    inner = new_drafter(*recipe(kind), target.info, weights_on(target, device), 0, counts)
    drafter = PlacedDrafter(inner, device, target_device, measure=True)
    for temperature in (0.0, 1.0):
        settings = DecodeConfig(temperature=temperature, batch_size=2, graph="off")
        plain = decode(target, None, settings, items)
        found = decode(target, drafter, settings, items)
        assert {i: c.tokens for i, c in found.items()} == {i: c.tokens for i, c in plain.items()}
    assert drafter.transfer.seconds > 0
