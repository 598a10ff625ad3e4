"""The batch profile: both arms answer the same requests, draft lengths are told apart, and the best
one wins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.drafter import forget
from heads.api.errors import UserError
from heads.suffix import Config as SuffixConfig
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, PassRecord, Request
from inference.decoding.structured.constraint import Constraint
from inference.measure import metrics
from inference.measure.profile import (
    ProfileConfig,
    Setting,
    Turn,
    best,
    context_of,
    make_blocks,
    profile,
    prompt_totals,
    take_turns,
)
from inference.measure.prompts import Prompt, to_requests
from inference.report.model import ProfilePoint
from inference.target.model import TargetModel
from tests.fakes import AlwaysRight, AlwaysWrong
from tests.models import VOCAB, random_target

DECODE = DecodeConfig(depth=3, max_new_tokens=13)


def prompts(count: int = 5) -> list[Prompt]:
    generator = torch.Generator().manual_seed(11)
    return [
        Prompt(
            f"p{n}",
            "x",
            tokens=tuple(torch.randint(3, VOCAB, (4 + n,), generator=generator).tolist()),
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    model = random_target(dtype=torch.float32)
    model.eos_token_ids = ()
    return model


@pytest.fixture(scope="module")
def requests(target: TargetModel) -> list[Request]:
    return to_requests(prompts(), target.tokenizer, DECODE)


@pytest.fixture(scope="module")
def known(target: TargetModel, requests: list[Request]) -> dict[tuple[int, ...], list[int]]:
    found = Engine(target, None, DECODE).run(requests)
    return {c.request.tokens: [*c.request.tokens, *c.tokens] for c in found}


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, tuple[int, ...]]]:
    """A clock without noise (1 ms a step whatever the batch, 0.2 ms per drafted depth), and a log
    of the runs.
    """
    log: list[tuple[str, int, tuple[int, ...]]] = []
    run = Engine.run

    def timed(engine: Engine, requests: Any, *rest: Any) -> Iterator[Any]:
        waiting = list(requests)
        done = list(run(engine, waiting, *rest))
        steps = engine.clock.passes
        drafted = 0.0002 * engine.tree.max_depth * steps
        engine.clock.seconds = {
            **dict.fromkeys(engine.clock.seconds, 0.0),
            "verify": 0.001 * steps,
            "draft": drafted,
        }
        name = type(engine.drafter).__name__ if engine.drafter else "plain"
        log.append(
            (
                f"{name} {engine.tree.max_depth}",
                engine.decode.batch_size,
                tuple(r.seed for r in waiting),
            )
        )
        yield from done

    monkeypatch.setattr(Engine, "run", timed)
    return log


def named(requests: list[Request]) -> dict[str, Request]:
    return dict(zip((prompt.id for prompt in prompts()), requests, strict=True))


def test_both_arms_answer_the_same_requests_in_turn(
    target: TargetModel, requests: list[Request], known: Any, steady: list[Any]
) -> None:
    arms = [
        Arm("right", AlwaysRight(known, VOCAB), DECODE),
        Arm("wrong", AlwaysWrong(known, VOCAB), DECODE),
    ]
    config = ProfileConfig(batches=(1, 2), blocks=3, refills=2)
    block = profile(config, target, arms, named(requests), seed=0)
    points = {(p.arm, p.batch, p.depth): p for p in block.points}
    assert set(points) == {(a, b, d) for a in ("right", "wrong") for b in (1, 2) for d in (1, 2, 3)}
    for (arm, _, depth), point in points.items():
        step = 1 + 0.2 * depth
        # 12 committed tokens: 6, 4 or 3 passes
        assert point.tau == (depth + 1 if arm == "right" else 1.0)
        assert point.speedup == pytest.approx((depth + 1 if arm == "right" else 1) / step)
        assert point.speedup_ci95 == pytest.approx([point.speedup] * 2)
        assert point.baseline_tokens_per_second == pytest.approx(1000 * point.batch)
    assert points["right", 2, 3].answers == 3 * 2 * 2
    chosen = {(b.arm, b.batch): (b.depth, b.shape) for b in block.best}
    assert chosen == {
        ("right", 1): (3, "chain"),
        ("right", 2): (3, "chain"),
        ("wrong", 1): (0, "none"),
        ("wrong", 2): (0, "none"),
    }
    measured = steady[4:16]  # right at batch size 1: four warm-ups, then three blocks of four runs
    assert {batch for _, batch, _ in measured} == {1}
    for number in range(3):
        runs = measured[4 * number : 4 * number + 4]
        assert len({seeds for _, _, seeds in runs}) == 1  # the same requests for every draft length
        assert {name for name, _, _ in runs} == {
            "plain 0",
            "AlwaysRight 1",
            "AlwaysRight 2",
            "AlwaysRight 3",
        }
    assert [measured[4 * n][0] for n in range(3)] == [
        "plain 0",
        "AlwaysRight 1",
        "AlwaysRight 2",
    ]  # taking turns


def test_a_batch_of_two_gives_the_texts_of_single_runs(
    target: TargetModel, requests: list[Request]
) -> None:
    """The blocks hold whole prompts: what the profile decodes in batches is what the report decodes
    one by one.
    """
    config = ProfileConfig(batches=(2,), blocks=2, refills=2)
    blocks = make_blocks(
        config, target, Setting("batch", 2, 0, 0.0), Arm("x", None, DECODE), named(requests)
    )
    assert [len(block) for block in blocks] == [4, 4]
    assert [r.tokens for block in blocks for r in block][:5] == [r.tokens for r in requests]
    # a prompt that comes again has another seed
    assert len({r.seed for block in blocks for r in block}) == 8
    single = {r.tokens: next(iter(Engine(target, None, DECODE).run([r]))).tokens for r in requests}
    for done in Engine(target, None, replace(DECODE, batch_size=2)).run(blocks[0]):
        assert done.tokens == single[done.request.tokens]


def test_contexts_are_real_prompts_cut_in_front(
    target: TargetModel, requests: list[Request], known: Any, steady: list[Any]
) -> None:
    assert context_of(requests, 3, 4) == requests[3].tokens[-4:]
    long = context_of(requests, 1, 30)
    assert len(long) == 30
    assert long[-len(requests[1].tokens) :] == requests[1].tokens
    before = long[: -len(requests[1].tokens)]
    # the prompt before it stands before it
    assert before[-len(requests[0].tokens) :] == requests[0].tokens
    arm = Arm("right", AlwaysRight(known, VOCAB), DECODE)
    config = ProfileConfig(contexts=(40, 20), temperatures=(0, 1), blocks=2, refills=1)
    block = profile(config, target, [arm], named(requests), seed=0)
    assert [(p.sweep, p.context, p.temperature, p.depth) for p in block.points] == [
        ("context", 40, 0.0, 3),
        ("context", 20, 0.0, 3),
        ("temperature", 6, 0.0, 3),
        ("temperature", 6, 1.0, 3),
    ]
    with pytest.raises(
        UserError, match=r"contexts holds 250; with decode\.max_new_tokens=13 .* at most 243"
    ):
        profile(ProfileConfig(contexts=(250,)), target, [arm], named(requests), seed=0)


def test_a_tree_is_compared_with_the_chains(
    target: TargetModel, requests: list[Request], known: Any, steady: list[Any]
) -> None:
    tree = replace(DECODE, shape="tree", choices=((0,), (1,), (0, 0)))
    arm = Arm("right", AlwaysRight(known, VOCAB), tree)
    config = ProfileConfig(batches=(1,), blocks=1, refills=1, depths=(1, 2, 9))
    block = profile(config, target, [arm], named(requests), seed=0)
    assert [(p.shape, p.depth, p.nodes) for p in block.points] == [
        ("chain", 1, 2),
        ("chain", 2, 3),
        ("tree", 2, 4),
    ]


def test_the_best_draft_is_none_where_none_pays() -> None:
    slow = ProfilePoint(
        arm="a",
        sweep="batch",
        batch=8,
        context=5,
        temperature=0.0,
        shape="chain",
        depth=2,
        nodes=3,
        answers=16,
        tau=1.5,
        tokens_per_second=90.0,
        baseline_tokens_per_second=100.0,
        speedup=0.9,
        speedup_ci95=(0.8, 1.0),
    )
    fast = slow.model_copy(update={"depth": 4, "speedup": 1.2, "tokens_per_second": 120.0})
    (none,), (long,) = best([slow]), best([slow, fast])
    assert (none.arm, none.sweep, none.batch, none.context) == ("a", "batch", 8, 5)
    assert (none.shape, none.depth, none.tokens_per_second) == ("none", 0, 100.0)
    assert (long.shape, long.depth, long.speedup) == ("chain", 4, 1.2)


def test_settings_are_checked(target: TargetModel, requests: list[Request], known: Any) -> None:
    assert not ProfileConfig().wanted
    with pytest.raises(UserError, match=r"bench\.profile\.batches\[0\] must lie in \[1, 65536\]"):
        ProfileConfig(batches=(0,))
    with pytest.raises(UserError, match=r"bench\.profile\.temperatures\[0\] must lie in \[0, "):
        ProfileConfig(temperatures=(-1.0,))
    with pytest.raises(UserError, match=r"bench\.profile\.blocks must lie in \[1, "):
        ProfileConfig(blocks=0)
    arm = Arm("right", AlwaysRight(known, VOCAB), DECODE)
    with pytest.raises(
        UserError, match=r"arms names 'left', which is not measured. Measured: right"
    ):
        profile(ProfileConfig(batches=(1,), arms=("left",)), target, [arm], named(requests), seed=0)
    with pytest.raises(UserError, match=r"bench\.profile\.depths .* deepest"):
        profile(ProfileConfig(batches=(1,), depths=(7,)), target, [arm], named(requests), seed=0)


def test_blocks_keep_what_the_answers_must_follow(requests: list[Request]) -> None:
    follows = Constraint("regex", "[a-z]+")
    constrained = {str(n): replace(one, constraint=follows) for n, one in enumerate(requests)}
    setting = Setting("batch", 2, 0, 0.0)
    blocks = make_blocks(
        ProfileConfig(batches=(2,)),
        random_target(),
        setting,
        Arm("fake", AlwaysRight({}, VOCAB), DECODE),
        constrained,
    )
    assert all(one.constraint == follows for block in blocks for one in block)


def test_shorter_chains_have_no_lengths_of_the_longest(
    target: TargetModel, requests: list[Request], known: dict[tuple[int, ...], list[int]]
) -> None:
    decode = replace(DECODE, adaptive="throughput", adaptive_lengths=(0, 1, 3))
    arm = Arm("fake", AlwaysRight(known, VOCAB), decode)
    asked = {str(n): one for n, one in enumerate(requests)}
    config = ProfileConfig(batches=(2,), depths=(1, 2))
    found = profile(config, target, [arm], asked, seed=1)
    assert {point.depth for point in found.points} == {1, 2}


def test_a_prompt_that_repeats_in_several_blocks_is_one_unit(requests: list[Request]) -> None:
    def block(*numbers: int) -> Turn:
        done = [
            Completion(requests[n], [], "length", [PassRecord(n, 1 + n, False)] * (1 + n))
            for n in numbers
        ]
        passes = sum(len(one.passes) for one in done)
        return Turn(done, {"verify": 0.01 * passes, "prefill": 0.0}, passes)

    once, often = (prompt_totals([block(0, 1), block(2, 3)] * rounds, 4) for rounds in (1, 5))
    assert len(once.prompts) == len(often.prompts) == 4
    assert often.decode_seconds == pytest.approx(5 * once.decode_seconds)
    assert once.decode_seconds == pytest.approx([0.01, 0.02, 0.03, 0.04])  # by their passes
    narrow, wide = (metrics.tokens_per_second_ci95(one) for one in (often, once))
    assert narrow == pytest.approx(wide) and wide[1] - wide[0] > 50
    overlapping = prompt_totals([block(0, 1), block(1, 2), block(2, 0)], 4)
    assert len(overlapping.prompts) == 3


def test_a_drafter_that_remembers_has_not_answered_the_prompts_before(target: TargetModel) -> None:
    """Engines of several draft lengths share it, and each decodes the same prompts."""
    drafter = new_drafter(
        "suffix", SuffixConfig(history_tokens=4096), target.info, target.weights, 0
    )
    blocks = [to_requests(prompts(), target.tokenizer, DECODE)]

    def accepted(depths: Sequence[int]) -> int:
        engines = {d: Engine(target, drafter, replace(DECODE, depth=d)) for d in depths}
        (turn,) = take_turns(engines, blocks, batch=1)[3]
        return sum(record.accepted for done in turn.completions for record in done.passes)

    forget(drafter)
    assert accepted([2, 3]) == accepted([3])
