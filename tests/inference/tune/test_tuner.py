"""The tuner: its steps are decoding's, its prediction follows from the costs, and it chooses what
an exhaustive search would."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.suffix import Config as SuffixConfig
from inference.decoding import costs as costs_module
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.costs import CostCurves, CostPoint
from inference.decoding.draft import NONE, Draft
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, PassRecord
from inference.measure.metrics import divide
from inference.measure.profile import Turn
from inference.measure.prompts import Prompt, to_requests
from inference.target.model import TargetModel
from inference.tune.confidence import CANDIDATES, best_threshold, speeds
from inference.tune.config import TuneConfig
from inference.tune.costs import StepCosts, TimedRun
from inference.tune.survey import Survey, Task, decoded, survey
from inference.tune.tuner import (
    PREDICTION_ERROR,
    DraftSpeed,
    Prediction,
    Tuner,
    answers_of,
    best_chain,
    choose,
    combine,
    representatives,
)
from inference.tune.workload import batch_steps
from tests.heads.recipes import build
from tests.inference.decoding.structured.parts import asked, structured_target
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import VOCAB, random_target

CONFIG = TuneConfig(
    batches=(1, 3),
    depths=(1, 3, 9),
    nodes=(5,),
    tree_depth=2,
    width=3,
    thresholds=(0.1,),
    prompts_per_domain=6,
    max_new_tokens=8,
    repeats=1,
    finalists=3,
    rounds=1,
    close_rounds=1,
)


def prompts(count: int = 6) -> list[Prompt]:
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
    return random_target(dtype=torch.float32)


def tuner_of(
    target: TargetModel,
    kind: str = "medusa",
    decode: DecodeConfig = DecodeConfig(),  # noqa: B008 - frozen
    **changes: Any,
) -> Tuner:
    config = replace(CONFIG, **changes)
    return Tuner.prepare(config, target, drafter_of(kind, target), prompts(), decode)


Seconds = Callable[[str, int, int], float]
"""What a phase takes (draft, verify, commit or other), for nodes and rows."""


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seconds], None]:
    """Makes every call, and every step of decoding, take the seconds that a function says."""

    def install(seconds: Seconds) -> None:
        sizes: dict[str, int] = {}

        def timed(calls: Mapping[Any, Any], *_: Any) -> dict[Any, list[float]]:
            rows = calls_rows(calls)
            return {key: [seconds(key[1], key[2], rows)] for key in calls}

        def calls_rows(calls: Mapping[Any, Any]) -> int:
            call = next(iter(calls.values()))
            return int(call.__closure__[call.__code__.co_freevars.index("self")].cell_contents.rows)

        def run(engine: Engine, requests: Any, *rest: Any) -> Iterator[Any]:
            waiting = list(requests)
            done = list(original(engine, waiting, *rest))
            rows, size = min(engine.decode.batch_size, len(waiting)), engine.tree.num_nodes
            steps, nodes = engine.clock.passes, size
            if engine.decode.adaptive != "none" and steps:
                answers = sorted(done, key=lambda item: item.request.index)
                from inference.tune.workload import Answered

                nodes = batch_steps(
                    [Answered(len(i.request.tokens), i.passes) for i in answers], rows
                ).mean_nodes
            clock = dict.fromkeys(engine.clock.seconds, 0.0)
            if engine.drafter is not None:
                clock |= {
                    phase: steps * seconds(phase, size, rows) for phase in ("draft", "commit")
                }
            clock |= {
                "verify": steps * seconds("verify", nodes, rows),
                "other": steps * seconds("other", size, rows),
            }
            engine.clock.seconds = clock
            sizes[engine.decode.shape] = size
            yield from done

        original = Engine.run
        monkeypatch.setattr(costs_module, "interleave", timed)
        monkeypatch.setattr(Engine, "run", run)

    return install


@pytest.mark.parametrize(
    ("temperature", "rule"), [(0.0, "match"), (1.0, "match"), (0.0, "auto"), (1.0, "auto")]
)
@pytest.mark.parametrize("kind", ["medusa", "distilled"])
def test_the_steps_of_a_survey_are_those_of_decoding(
    target: TargetModel, kind: str, temperature: float, rule: str
) -> None:
    tuner = tuner_of(target, kind, DecodeConfig(rule=rule), temperatures=(temperature,))
    found = tuner.survey(temperature)
    assert Survey.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    families = {draft.family for draft in found.drafts}
    grown = {"dartree"} if kind == "medusa" else set()
    assert families == {"none", "chain", "tree", "dynamic", "adaptive"} | grown
    dartrees = [draft for draft in found.drafts if draft.family == "dartree"]
    assert [draft.depth_penalty for draft in dartrees] == [0.0, 0.2] * len(grown)
    if not grown:
        refused = "dartree 5, depth 2, penalty 0.2"
        assert "decode.shape=dartree" in found.refused[refused]
    assert found.ranks.tested[0] > 10
    (block,) = tuner.task.blocks(3, 1)[:1]
    # each prompt once: above temperature 0 a second visit has another text
    assert len(set(block)) == 6
    for draft, (turn,) in tuner.run(found.drafts, temperature, 3, [block]).items():
        steps = found.steps(draft, [block], 3)
        assert steps.steps == turn.steps, draft.label
        assert steps.tokens == sum(len(done.tokens) - 1 for done in turn.completions)
        if draft.family == "adaptive":
            assert steps.mean_nodes == batch_steps(answers_of(turn), 3).mean_nodes


def test_drafts_without_the_targets_noise_are_decoded(target: TargetModel) -> None:
    heats, changes = (1.0,), {"nodes": (), "thresholds": (), "depths": (2,)}
    tuner = tuner_of(
        target, "distilled", DecodeConfig(share_noise=False), temperatures=heats, **changes
    )
    found, chain = tuner.survey(1.0), Draft("chain", 2)
    (block,) = tuner.task.blocks(3, 1)[:1]
    turn = tuner.run([chain], 1.0, 3, [block])[chain][0]
    assert found.steps(chain, [block], 3).steps == turn.steps


def test_drafts_of_structured_answers_are_decoded() -> None:
    """A grammar leads drafts, which a replay does not know of."""
    target, config = structured_target(), TuneConfig(depths=(3,), nodes=(), thresholds=())
    requests, drafter = tuple(asked(["schema"] * 3, new=24)), build("eagle3", target)
    task = Task(requests, ("a", "b", "c"), ("", "", ""), 0)
    decode, draft = DecodeConfig(max_new_tokens=24, batch_size=3), Draft("chain", 3)
    found = survey(config, target, drafter, task, decode)
    again = task.block_requests([[0, 1, 2]])[0]
    done = sorted(
        Engine(target, drafter, draft.on(decode)).run(again), key=lambda one: one.request.index
    )
    assert [one.passes for one in found.answers[draft]] == [one.passes for one in done]
    assert not found.everywhere


def test_a_drafter_that_remembers_has_not_answered_the_prompts_for_another_draft(
    target: TargetModel,
) -> None:
    drafter = new_drafter(
        "suffix", SuffixConfig(history_tokens=4096), target.info, target.weights, 0
    )
    decode = DecodeConfig(max_new_tokens=13, temperature=1.0, rule="rejection")
    requests = to_requests(prompts(), target.tokenizer, decode)
    alone, again = (decoded(target, drafter, Draft("chain", 3), requests, decode) for _ in range(2))
    assert alone == again


def test_a_medusa_drafts_no_deeper_than_its_heads(target: TargetModel) -> None:
    found = tuner_of(target).survey(0.0)
    assert "chain 9" in found.refused and "cannot draft 9 tokens" in found.refused["chain 9"]
    assert Draft("chain", 3) in found.drafts and found.drafts[0] == NONE
    with pytest.raises(
        UserError,
        match=r"kind 'medusa' can draft none of the shapes to choose from: .*tune\.depths",
    ):
        tuner_of(target, depths=(9,), nodes=()).survey(0.0)


def cheap_verification(phase: str, nodes: float, rows: int) -> float:
    """Verification hardly grows, drafting costs by depth, and decoding adds a fixed time that no
    call shows."""
    base = {
        "verify": 0.010 + 0.0001 * nodes * rows,
        "draft": 0.0004 * nodes,
        "commit": 0.0005,
        "other": 0.002,
    }
    return base[phase]


def dear_verification(phase: str, nodes: float, rows: int) -> float:
    """Every node costs what a pass costs: drafting cannot pay."""
    return {"verify": 0.010 * nodes, "draft": 0.005 * nodes, "commit": 0.001, "other": 0.001}[phase]


@pytest.mark.parametrize(("rule", "chosen"), [("match", "match"), ("auto", "block")])
def test_a_row_names_the_rule_it_was_measured_with(
    target: TargetModel, clocked: Any, rule: str, chosen: str
) -> None:
    clocked(free_drafts)
    heats, changes = (0.0, 1.0), {"nodes": (), "thresholds": (), "depths": (2,), "batches": (1,)}

    def tuner_by(name: str) -> Tuner:
        return tuner_of(target, "distilled", DecodeConfig(rule=name), temperatures=heats, **changes)

    found = tuner_by(rule)
    rows = {row["temperature"]: row for row in found.tune()}
    assert [row["draft"]["shape"] for row in rows.values()] == ["chain", "chain"]
    assert [rows[heat]["rule"] for heat in heats] == ["match", chosen]
    # both rules accept other drafts here: a survey that ignored the rule would be noticed
    blocks, chain = found.task.blocks(1, 1), Draft("chain", 2)
    match, auto = (tuner_by(name).survey(1.0).steps(chain, blocks, 1) for name in ("match", "auto"))
    assert match.steps != auto.steps


def free_drafts(phase: str, nodes: float, rows: int) -> float:
    """A pass takes the same for any draft, which costs nothing: drafting pays."""
    return 0.010 if phase == "verify" else 0.0001


def test_predictions_are_what_decoding_does_and_the_choice_is_the_best_of_all(
    target: TargetModel, clocked: Any
) -> None:
    clocked(cheap_verification)
    tuner = tuner_of(target, batches=(3,))
    for row in tuner.tune():
        batch = row["batch_size"]
        drafts = tuner.survey(0.0).drafts
        everything = tuner.speeds(tuner.run(drafts, 0.0, batch, tuner.task.blocks(batch, 1)))
        best = everything[0]
        assert row["label"] == best.draft.label
        assert row["tokens_per_second"] == pytest.approx(best.tokens_per_second)
        measured = {item.draft.label: item.tokens_per_second for item in everything}
        for item in row["predictions"]:
            assert item["tokens_per_second"] == pytest.approx(measured[item["label"]], rel=1e-6), (
                item["label"]
            )
            assert sum(item["step_ms"].values()) > 12.0  # the fixed time is in it
        assert len(row["measured"]) == 1 + CONFIG.finalists
    facts = tuner.facts()
    assert {item["family"] for item in facts["calibrations"]} == {
        "none",
        "chain",
        "tree",
        "dynamic",
        "dartree",
        "adaptive",
    }
    assert all(item["other_ms"] == pytest.approx(2.0) for item in facts["calibrations"])
    assert CostCurves.from_dict(facts["costs"]).verify(1, 3, 20) == pytest.approx(0.0103)


def ran(draft: Draft, speedup: float, width: float) -> DraftSpeed:
    interval = [speedup / width, speedup * width]
    return DraftSpeed(draft, 1, 100.0, [90.0, 110.0], speedup, interval, 1.0, interval)


def test_a_measurement_counts_by_how_sure_it_is() -> None:
    """Against the posterior mean of two normal estimates of log speedup, summed over a fine
    grid."""
    grid = torch.linspace(-1.0, 1.0, 20001, dtype=torch.float64)
    for predicted, measured, width in ((1.2, 1.0, 1.02), (0.8, 1.1, 1.3), (1.5, 1.4, 1.1)):
        deviation = math.log(width) / 1.96
        distances = (
            (grid - math.log(predicted)) / PREDICTION_ERROR,
            (grid - math.log(measured)) / deviation,
        )
        density = torch.softmax(-0.5 * (distances[0] ** 2 + distances[1] ** 2), 0)
        expected = math.exp(float((density * grid).sum()))
        assert combine(predicted, measured, (measured / width, measured * width)) == pytest.approx(
            expected, rel=1e-6
        )
    assert combine(1.2, 1.1, (1.1, 1.1)) == pytest.approx(1.1)
    assert combine(1.2, 0.0, (0.0, 0.0)) == 0.0  # nothing was committed


def dear_trees(phase: str, nodes: float, rows: int) -> float:
    """Chains cost next to nothing, trees of five nodes half a pass."""
    return {
        "verify": 0.010,
        "draft": 0.005 if nodes == 5 else 0.0001,
        "commit": 0.0001,
        "other": 0.0,
    }[phase]


def test_drafts_close_to_the_fastest_run_longer_on_other_visits(
    target: TargetModel, clocked: Any
) -> None:
    clocked(dear_trees)
    tuner = tuner_of(target, batches=(3,), close_rounds=2)
    drafts = tuner.survey(0.0).drafts
    once = {
        row.draft: row for row in tuner.speeds(tuner.run(drafts, 0.0, 3, tuner.task.blocks(3, 1)))
    }
    least = 0.9 * max(row.tokens_per_second for row in once.values())
    turns = tuner.compare([draft for draft in drafts if draft != NONE], 0.0, 3)
    counts = {draft: len(taken) for draft, taken in turns.items()}
    blocks = len(tuner.task.blocks(3, 1))
    for draft, row in once.items():
        close = draft == NONE or row.tokens_per_second >= least
        assert counts[draft] == (3 if close else 1) * blocks, draft.label
    assert set(counts.values()) == {blocks, 3 * blocks}
    seeds = {done.request.seed for turn in turns[NONE] for done in turn.completions}
    assert len(seeds) == sum(len(turn.completions) for turn in turns[NONE])
    assert next(row for row in tuner.speeds(turns) if row.draft == NONE).speedup == 1.0
    assert set(map(len, tuner_of(target, close_rounds=0).compare(drafts, 0.0, 3).values())) == {
        blocks
    }


def test_repeats_of_the_same_prompts_narrow_no_interval(target: TargetModel) -> None:
    """At temperature 0 every round is the first one over again: as many prompts are known."""
    tuner, chain = tuner_of(target), Draft("chain", 3)
    requests = tuner.task.requests

    def turns(draft: Draft, rounds: int) -> list[Turn]:
        found = []
        for block in tuner.task.blocks(1, 1) * rounds:
            kept = [0 if draft == NONE else number % 4 for number in block]
            done = [
                Completion(requests[number], [], "length", [PassRecord(more, 1 + more, False)] * 8)
                for number, more in zip(block, kept, strict=True)
            ]
            found.append(Turn(done, {"verify": 0.01 * 8 * len(block)}, 8 * len(block)))
        return found

    once, often = (
        next(
            row
            for row in tuner.speeds({draft: turns(draft, rounds) for draft in (NONE, chain)})
            if row.draft == chain
        )
        for rounds in (1, 6)
    )
    assert once.speedup == often.speedup > 1.0
    low, high = once.speedup_ci95
    assert high - low > 0.5 and often.speedup_ci95 == pytest.approx([low, high])
    assert often.tokens_per_second_ci95 == pytest.approx(once.tokens_per_second_ci95)


def test_prediction_and_measurement_choose_together() -> None:
    short, long = Draft("chain", 1), Draft("chain", 4)

    def chosen(predicted: tuple[float, float], measured: tuple[float, float]) -> Draft:
        drafts, speedups = (NONE, short, long), (1.0, *measured)
        # As uncertain as a prediction: each counts as much.
        rows = [
            ran(draft, found, math.exp(1.96 * PREDICTION_ERROR))
            for draft, found in zip(drafts, speedups, strict=True)
        ]
        return choose(rows, {NONE: 1.0, short: predicted[0], long: predicted[1]}).draft

    assert chosen((1.2, 1.3), (1.2, 1.25)) == long
    assert chosen((1.2, 1.3), (1.3, 1.1)) == short  # 1.249 against 1.196
    assert chosen((0.85, 0.8), (1.01, 0.9)) == NONE  # a lucky run of what was predicted to lose
    assert chosen((1.3, 1.2), (0.95, 0.9)) == NONE  # and a prediction that did not come true
    assert chosen((1.1, 0.5), (1.1, 1.9)) == short


def test_an_engine_of_chains_gets_the_best_chain_and_not_a_trees_depth() -> None:
    tree, stopped = (
        Draft("dynamic", 3, nodes=9, width=3),
        Draft("chain", 5, adaptive="confidence", adaptive_threshold=0.4),
    )
    speeds = {
        NONE: 10.0,
        tree: 20.0,
        stopped: 18.0,
        Draft("chain", 5): 15.0,
        Draft("chain", 3): 14.0,
    }
    predicted = [Prediction(draft, speed, 2.0, {}) for draft, speed in speeds.items()]
    assert best_chain(tree, predicted) == Draft("chain", 5)
    assert best_chain(stopped, predicted) == Draft("chain", 5)
    assert best_chain(Draft("chain", 3), predicted) == Draft("chain", 3)  # measured as the best
    slow = [
        replace(item, tokens_per_second=9.0) if item.draft.shape == "chain" else item
        for item in predicted
    ]
    assert best_chain(tree, slow) == NONE
    assert best_chain(NONE, predicted) == NONE


def test_of_drafts_that_cannot_be_told_apart_the_smallest_is_chosen() -> None:
    drafts = [NONE, *(Draft("chain", depth) for depth in (1, 2, 3))]

    def chosen(*speedups: float) -> Draft:
        rows = [
            ran(draft, found, 1.1) for draft, found in zip(drafts, (1.0, *speedups), strict=True)
        ]
        return choose(rows, {row.draft: row.speedup for row in rows}).draft

    assert chosen(1.19, 1.195, 1.20) == Draft("chain", 1)
    assert chosen(1.10, 1.18, 1.20) == Draft("chain", 2)
    assert chosen(1.10, 1.15, 1.20) == Draft("chain", 3)
    assert chosen(0.995, 1.001, 0.9) == Draft("chain", 2)  # what does not pay is no tie


def test_where_drafting_cannot_pay_none_is_chosen(target: TargetModel, clocked: Any) -> None:
    clocked(dear_verification)
    rows = tuner_of(target, nodes=(), thresholds=()).tune()
    assert [(row["label"], row["draft"], row["speedup"]) for row in rows] == [
        ("none", {"shape": "none"}, 1.0)
    ] * 2


def test_drafting_in_decoding_may_cost_more_than_the_call_alone() -> None:
    points = tuple(
        CostPoint(n, b, length, 0.01 * n, 0.0, 0.0)
        for n in (1, 3)
        for b in (1, 4)
        for length in (10, 50)
    )
    one = tuple(point for point in points if point.nodes == 3)
    draft = Draft("chain", 2)
    found = StepCosts(
        CostCurves(
            "t", "cpu", "float32", "eager", 1, points, {draft.label: one}, {draft.label: one}
        )
    )
    assert found.phases(draft, 2, 30) == pytest.approx(
        {"draft": 0.03, "verify": 0.03, "commit": 0.03, "other": 0.0}
    )
    clock = StepClock(torch.device("cpu"))
    clock.passes, clock.seconds = (
        10,
        {"prefill": 9.0, "draft": 0.6, "verify": 0.3, "commit": 0.9, "other": 0.05},
    )
    found.calibrate("chain", 1, [TimedRun(draft, 30, 0, clock)])
    assert found.phases(draft, 1, 50) == pytest.approx(
        {"draft": 0.06, "verify": 0.03, "commit": 0.09, "other": 0.005}
    )
    clock.seconds = {"prefill": 9.0, "draft": 1.2, "verify": 0.3, "commit": 0.9, "other": 0.15}
    found.calibrate("chain", 3, [TimedRun(draft, 30, 0, clock)])
    assert found.phases(draft, 2, 10)["draft"] == pytest.approx(0.09)  # between the two
    assert found.phases(draft, 2, 10)["other"] == pytest.approx(0.01)
    assert found.phases(draft, 16, 10)["other"] == pytest.approx(0.015)
    # a chain that was stopped
    assert found.step(draft, 1, 30, nodes=2) == pytest.approx(0.06 + 0.02 + 0.09 + 0.005)
    slow, quick = StepClock(torch.device("cpu")), StepClock(torch.device("cpu"))
    slow.passes, slow.seconds = 10, {"draft": 0.9, "verify": 0.3, "commit": 0.3, "other": 0.3}
    quick.passes, quick.seconds = 30, {"draft": 0.3, "verify": 0.9, "commit": 0.9, "other": 0.1}
    found.calibrate("chain", 1, [TimedRun(draft, 30, 0, slow), TimedRun(draft, 30, 0, quick)])
    assert found.phases(draft, 1, 30) == pytest.approx(
        {"draft": 0.03, "verify": 0.03, "commit": 0.03, "other": 0.01}
    )
    quick.seconds = {"draft": 0.003, "verify": 0.3, "commit": 0.003, "other": 0.1}
    found.calibrate("none", 1, [TimedRun(NONE, 30, 0, quick)])
    assert found.phases(NONE, 1, 30) == pytest.approx(
        {"draft": 0.0, "verify": 0.01, "commit": 0.0, "other": 0.106 / 30}
    )


def test_a_family_is_represented_by_its_best_and_chains_by_another_length_too() -> None:
    stopped = Draft("chain", 6, adaptive="confidence", adaptive_threshold=0.3)
    ordered = [
        Draft("chain", 3),
        Draft("chain", 2),
        NONE,
        Draft("chain", 6),
        stopped,
        Draft("chain", 1),
    ]
    assert set(representatives(ordered)) == {Draft("chain", 3), NONE, stopped, Draft("chain", 6)}
    assert representatives([NONE, Draft("chain", 1)]) == [Draft("chain", 1), NONE]


def test_blocks_take_every_prompt_and_a_second_visit_samples_anew(target: TargetModel) -> None:
    task = tuner_of(target).task
    blocks = task.blocks(3, 2)
    assert len(blocks) == 12 and all(len(block) == 6 for block in blocks)
    assert {number for block in blocks for number in block} == set(range(6))
    requests = [request for block in task.block_requests(blocks) for request in block]
    assert len({request.seed for request in requests}) == len(requests) == 72
    assert [request.index for request in requests[:9]] == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert divide(sum(len(r.tokens) for r in task.requests), 6) == pytest.approx(
        task.mean_prompt, abs=0.5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": ()}, r"tune\.depths is empty"),
        ({"nodes": (1,)}, r"tune\.nodes\[0\] must lie in \[2, 65536\]; given: 1"),
        ({"thresholds": (1.5,)}, r"tune\.thresholds\[0\] must lie between 0 and 1"),
        ({"temperatures": (-1.0,)}, r"tune\.temperatures\[0\] must lie in \[0, "),
        ({"max_new_tokens": 1}, r"tune\.max_new_tokens must lie in \[2, "),
        ({"rounds": 0}, r"tune\.rounds must lie in \[1, "),
        ({"close_rounds": -1}, r"tune\.close_rounds must lie in \[0, "),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **changes)


def test_prompts_must_be_there_and_of_known_domains(target: TargetModel) -> None:
    with pytest.raises(UserError, match=r"tune\.domains names \['y'\], but the prompts are of: x"):
        tuner_of(target, domains=("y",))
    with pytest.raises(
        UserError, match=r"tuning needs at least two prompts that fit into \d+ positions .* 1 do"
    ):
        tuner_of(target, prompts_per_domain=1)


# The least probability of a drafted token


Texts = list[list[PassRecord]]
"""For each text a pass at every position."""


def cut_speed(texts: Texts, seconds: Sequence[float], least: float) -> float:
    """Tokens per second of a threshold, pass by pass and token by token."""
    tokens, spent = 0, 0.0
    for records in texts:
        place = 0
        while place < len(records):
            drafted = 0
            for probability in records[place].confidence:
                if probability < least:
                    break
                drafted += 1
            spent += seconds[drafted]
            for _ in range(min(records[place].accepted, drafted) + 1):
                tokens, place = tokens + int(place < len(records)), place + 1
    return tokens / spent


def drafted_texts(depth: int, chance: Callable[[float], float]) -> Texts:
    """Texts whose drafted tokens are accepted with a chance that depends on their probability."""
    rng = random.Random(depth)

    def record(left: int) -> PassRecord:
        sure = tuple(rng.choice([rng.random(), 0.5]) for _ in range(depth))
        kept = next((n for n, each in enumerate(sure) if rng.random() > chance(each)), depth)
        count = min(kept + 1, left)
        return PassRecord(min(kept, count), count, kept < count, confidence=sure)

    return [[record(left) for left in range(rng.randint(1, 60), 0, -1)] for _ in range(40)]


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_speeds_of_thresholds_are_those_of_a_plain_loop(depth: int) -> None:
    texts = drafted_texts(depth, lambda sure: sure)
    seconds = [0.01 * 1.1**drafted for drafted in range(depth + 1)]
    expected = [cut_speed(texts, seconds, least) for least in CANDIDATES]
    assert speeds(texts, seconds) == pytest.approx(expected)
    assert best_threshold(texts, seconds) == CANDIDATES[expected.index(max(expected))]


def test_a_threshold_is_chosen_only_where_it_pays() -> None:
    sure = drafted_texts(6, lambda sure: float(sure >= 0.5))
    steep, flat = [0.01 + 0.004 * n for n in range(7)], [0.01] * 7
    assert 0.4 < best_threshold(sure, steep) <= 0.5  # what is rejected is not drafted
    assert best_threshold(sure, flat) == 0.0  # nothing is saved: of equal ones the lowest
    blind = drafted_texts(6, lambda _: 0.9)
    assert best_threshold(blind, [0.01 + 0.0001 * n for n in range(7)]) == 0.0
    hopeless = drafted_texts(6, lambda _: 0.0)
    assert best_threshold(hopeless, steep) == CANDIDATES[-1]


@pytest.mark.parametrize("stepwise", [True, False])
def test_an_ended_chain_costs_what_was_computed_of_it(stepwise: bool) -> None:
    def points(nodes: Sequence[int], each: float) -> tuple[CostPoint, ...]:
        return tuple(
            CostPoint(n, b, length, each * n, 0.0, 0.0)
            for n in nodes
            for b in (1, 4)
            for length in (10, 50)
        )

    chains = {f"chain {depth}": points([depth + 1], 0.002) for depth in (1, 2, 4)}
    commits = {name: points([item[0].nodes], 0.001) for name, item in chains.items()}
    verify = points([1, 2, 3, 5], 0.01)
    found = StepCosts(CostCurves("t", "cpu", "float32", "eager", 1, verify, chains, commits))
    clock = StepClock(torch.device("cpu"))
    clock.passes = 1  # drafting takes three times as long as on the curve, and other work a second
    clock.seconds = {"draft": 0.03, "verify": 0.05, "commit": 0.005, "other": 1.0}
    found.calibrate("chain", 1, [TimedRun(Draft("chain", 4), 20, 0, clock)])
    drafting = [0.004, 0.006, 0.008, 0.010, 0.010] if stepwise else [0.010] * 5
    expected = [
        3 * draft + 0.01 * (drafted + 1) + 0.005 + 1.0 for drafted, draft in enumerate(drafting)
    ]
    assert found.by_drafted(Draft("chain", 4), stepwise, 1, 20) == pytest.approx(expected)


def test_a_greedy_row_has_the_least_probability_that_its_verifications_favour(
    target: TargetModel, clocked: Any
) -> None:
    clocked(free_drafts)
    changes = {"nodes": (), "thresholds": (), "depths": (1, 4), "batches": (1,)}
    changes |= {"prompts_per_domain": 2, "finalists": 1, "close_rounds": 0, "max_new_tokens": 6}
    tuner = tuner_of(target, "distilled", temperatures=(0.0, 1.0), **changes)
    greedy, sampled = tuner.tune()
    chain = Draft.read(greedy["chain"])
    texts = tuner.survey(0.0).everywhere[chain]
    assert all(len(record.confidence) == chain.depth for records in texts for record in records)
    seconds = tuner.step_costs().by_drafted(chain, True, 1, 10)
    loop = [cut_speed(texts, seconds, least) for least in CANDIDATES]
    assert greedy["least_probability"] == CANDIDATES[loop.index(max(loop))]
    assert sampled["least_probability"] is None
    assert tuner.least_probability(NONE, 0.0, 1) is None
    medusa = tuner_of(target, **changes)  # llama.cpp does not draft with it
    assert medusa.least_probability(Draft("chain", 1), 0.0, 1) is None
