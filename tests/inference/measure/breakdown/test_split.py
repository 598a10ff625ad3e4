"""The loss split: its terms multiply to the measured speedup, and each says what a slow count by
hand says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.eagle3 import Config as Eagle3Config
from heads.early_exit import Config as EarlyExitConfig
from heads.ngram import Config as NgramConfig
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.measure.breakdown.counts import Counts, Rates, expected_tau
from inference.measure.breakdown.observe import (
    BONUS,
    CORRECTED,
    DRAFTED,
    FIRST,
    State,
    Watched,
    watch,
)
from inference.measure.breakdown.split import TERMS, Measured, best_tree, split
from inference.measure.breakdown.transcripts import read_transcripts
from inference.measure.config import BenchConfig, LostConfig
from inference.measure.metrics import Outcome, Totals
from inference.measure.prompts import Prompt, to_requests
from inference.measure.run import measure
from inference.report.markdown import markdown
from inference.report.model import LossSplit, read_report
from inference.target.model import TargetModel
from tests.fakes import AlwaysRight, AlwaysWrong, Fake, SometimesRight
from tests.models import VOCAB, TokenIds, random_model, random_target

CHAIN = DecodeConfig(depth=3, max_new_tokens=14)
TREE = DecodeConfig(shape="tree", choices=((0,), (1,), (0, 0), (0, 1)), max_new_tokens=14)
QUIET = Console(quiet=True)
CONFIGS: dict[str, Any] = {
    "early_exit": EarlyExitConfig(exit_layer=2),
    "eagle3": Eagle3Config(draft_vocab_size=40),
    "ngram": NgramConfig(),
}


class Words(TokenIds):
    """Token 17 is the word " w17"."""

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(f" w{token}" for token in tokens)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    model = random_target(dtype=torch.float32)
    model.tokenizer = Words()
    return model


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(5)
    return [
        Prompt(
            f"{domain}-{i}",
            domain,
            tokens=tuple(torch.randint(3, VOCAB, (5 + i,), generator=generator).tolist()),
        )
        for domain in ("code", "prose")
        for i in range(4)
    ]


def made(target: TargetModel, kind: str) -> Any:
    return new_drafter(
        kind, CONFIGS[kind], target.info, target.weights, seed=1, token_counts=torch.arange(VOCAB)
    )


def requests_of(target: TargetModel, decode: DecodeConfig) -> list[Request]:
    return to_requests(prompts(), target.tokenizer, decode)


def scripted(target: TargetModel, decode: DecodeConfig, sort: type[Fake] = SometimesRight) -> Any:
    plain = Engine(target, None, replace(decode, shape="none")).run(requests_of(target, decode))
    return sort({c.request.tokens: [*c.request.tokens, *c.tokens] for c in plain}, VOCAB)


# A whole measurement


@pytest.fixture(scope="module", params=["greedy", "sampled", "tree"])
def measured(
    request: pytest.FixtureRequest, target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    decode = {"greedy": CHAIN, "sampled": replace(CHAIN, temperature=1.0), "tree": TREE}[
        request.param
    ]
    arms = [
        Arm(kind, made(target, kind), decode)
        for kind in CONFIGS
        if request.param != "tree" or kind != "ngram"
    ]
    config = BenchConfig(
        prompts_per_domain=3,
        compare_noise=False,
        repeats=2,
        retries=0,
        lost=LostConfig(
            enabled=True,
            prompts_per_domain=2,
            temperatures=(0.5,),
            transcripts=1,
            candidates=3,
            repeats=3,
        ),
    )
    out = tmp_path_factory.mktemp(request.param)
    (out / "transcripts.json").write_text("of an earlier measurement")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("counts", "split"):
            patch.setattr(f"inference.measure.breakdown.{module}.RESAMPLES", 40)
        measure(config, target, arms, prompts(), out, console=QUIET)
    return out


def product(part: dict[str, Any]) -> float:
    return float(part["ceiling"] * math.prod(term["factor"] for term in part["terms"]))


def test_the_terms_multiply_to_the_measured_speedup(measured: Path) -> None:
    report = read_report(measured).to_dict()
    assert report["lost"]["prompts"] == 4
    for entry in report["drafters"]:
        arm = report["lost"]["arms"][entry["draft"]["name"]]
        assert [term["name"] for term in arm["terms"]] == list(TERMS)
        assert product(arm) == pytest.approx(entry["speedup"], rel=1e-9)
        assert arm["tau"] == pytest.approx(entry["tau"])
        assert sum(math.log(term["factor"]) for term in arm["terms"]) == pytest.approx(
            math.log(entry["speedup"] / arm["ceiling"]), abs=1e-9
        )
        acceptance = math.prod(term["factor"] for term in arm["terms"][:7])
        assert arm["ceiling"] * acceptance == pytest.approx(entry["tau"], rel=1e-9)
        for domain, part in arm["domains"].items():
            assert product(part) == pytest.approx(entry["domains"][domain]["speedup"], rel=1e-9)
        for term in arm["terms"]:
            assert term["ci95"][0] <= term["ci95"][1]
        best, own = arm["tree"]["best"], arm["tree"]["own"]
        assert best >= 1.0 and own >= 1.0


def test_the_tables_cover_depths_positions_and_temperatures(measured: Path) -> None:
    report = read_report(measured).to_dict()
    own = report["settings"]["temperature"]
    for entry in report["drafters"]:
        arm = report["lost"]["arms"][entry["draft"]["name"]]
        assert set(arm["depths"]) == {"all", "code", "prose"}
        assert all(len(rows) == entry["draft"]["depth"] for rows in arm["depths"].values())
        first = arm["depths"]["all"][0]
        assert first["tested"] == sum(
            arm["depths"][name][0]["tested"] for name in ("code", "prose")
        )
        assert sum(row["tested"] for row in arm["depths"]["all"]) == sum(
            row["tested"] for row in arm["positions"]
        )
        assert [row["temperature"] for row in arm["temperatures"]] == sorted({own, 0.5})
        if "calibration" in arm:
            assert sum(cell["count"] for cell in arm["calibration"]["bins"]) == sum(
                row["tested"] for row in arm["depths"]["all"]
            )
            assert 0 <= arm["calibration"]["ece"] <= 1


def test_the_report_and_its_markdown_name_every_term(measured: Path) -> None:
    text = markdown({"measure": read_report(measured)}, [])
    assert "Where the speed goes" in text
    assert "| sample (rest) |" in text and "| clock (rest) |" in text


def test_transcripts_hold_the_answers_of_plain_decoding(
    measured: Path, target: TargetModel
) -> None:
    report = read_report(measured).to_dict()
    decode = replace(CHAIN, temperature=report["settings"]["temperature"])
    plain = Engine(target, None, replace(decode, shape="none")).run(requests_of(target, decode))
    texts = {prompts()[done.request.index].id: done.tokens for done in plain}
    answers = read_transcripts(measured)
    assert len(answers) == 2 * len(report["drafters"])
    for answer in answers:
        assert [token["id"] for token in answer["tokens"]] == texts[answer["prompt"]]
        assert answer["tokens"][0]["by"] == FIRST
        for token in answer["tokens"][1:]:
            assert len(token["target"]) == 3
            assert token["by"] in (DRAFTED, CORRECTED, BONUS)


def test_a_measurement_without_them_leaves_no_old_transcripts(
    target: TargetModel, tmp_path: Path
) -> None:
    (tmp_path / "transcripts.json").write_text("of an earlier measurement")
    arm = Arm("scripted", scripted(target, CHAIN), CHAIN)
    config = BenchConfig(prompts_per_domain=1, retries=0)
    measure(config, target, [arm], prompts(), tmp_path, console=QUIET)
    assert read_report(tmp_path).lost is None
    assert read_transcripts(tmp_path) == []


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 1}', '{"format": 1, "answers": [{"tokens": [{"by": "x"}]}]}']
)
def test_a_broken_transcript_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "transcripts.json").write_text(content)
    with pytest.raises(UserError, match="holds no transcripts"):
        read_transcripts(tmp_path)


# What is watched


@pytest.mark.parametrize(
    "decode", [CHAIN, replace(CHAIN, temperature=1.0), TREE], ids=["greedy", "sampled", "tree"]
)
@pytest.mark.parametrize("kind", ["early_exit", "eagle3", "scripted"])
def test_watching_changes_nothing(target: TargetModel, decode: DecodeConfig, kind: str) -> None:
    def drafter() -> Any:
        return scripted(target, decode) if kind == "scripted" else made(target, kind)

    requests = requests_of(target, decode)
    engine = Engine(target, drafter(), decode)
    plain = engine.completions(requests)
    for answer, done in zip(watch(target, drafter(), decode, requests), plain, strict=True):
        assert [state.token for state in answer.states] == done.tokens
        assert answer.finish == done.finish
        by_pass = [[s for s in answer.states if s.number == n + 1] for n in range(len(done.passes))]
        assert [len(states) for states in by_pass] == [record.committed for record in done.passes]
        assert [sum(s.by == DRAFTED for s in states) for states in by_pass] == [
            p.accepted for p in done.passes
        ]
        assert [any(s.by == CORRECTED for s in states) for states in by_pass] == [
            p.rejected for p in done.passes
        ]


def test_distributions_are_those_of_the_target_along_the_answer(target: TargetModel) -> None:
    decode = replace(CHAIN, temperature=1.0)
    answer = watch(
        target,
        made(target, "early_exit"),
        decode,
        requests_of(target, decode)[:1],
        candidates=VOCAB,
    )[0]
    text = [*answer.request.tokens, *(state.token for state in answer.states)]
    logits = random_model().float()(torch.tensor([text])).logits[0]
    for place, state in enumerate(answer.states[1:], start=1):
        expected = logits[len(answer.request.tokens) + place - 1].softmax(-1)
        assert dict(state.target) == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)
        if state.tested:
            common = sum(min(p, dict(state.draft).get(token, 0.0)) for token, p in state.target)
            assert state.own_overlap == pytest.approx(common, abs=1e-5)
            assert state.overlap == pytest.approx(common, abs=1e-5)


def test_at_temperature_0_the_overlap_is_agreement_and_the_rank_says_the_same(
    target: TargetModel,
) -> None:
    for answer in watch(
        target, made(target, "early_exit"), CHAIN, requests_of(target, CHAIN), candidates=5
    ):
        for state in answer.states:
            if state.tested:
                assert (
                    state.overlap
                    == (state.by == DRAFTED)
                    == (state.rank == 0)
                    == (state.draft[0][0] == state.token)
                )


def test_what_lies_outside_the_draft_vocabulary_is_missed(target: TargetModel) -> None:
    drafter = made(target, "eagle3")
    inside = (
        set(drafter.token_ids.tolist())
        if hasattr(drafter, "token_ids")
        else set(range(VOCAB - 40, VOCAB))
    )
    seen = [
        state
        for answer in watch(target, drafter, CHAIN, requests_of(target, CHAIN))
        for state in answer.states[1:]
    ]
    assert [state.missed for state in seen] == [float(state.token not in inside) for state in seen]
    assert any(state.missed for state in seen)
    assert not any(state.missed and state.by == DRAFTED for state in seen)


# The arithmetic


def figures(target: TargetModel, sort: type[Fake], decode: DecodeConfig) -> tuple[Measured, Any]:
    """An arm that takes 2 ms to verify and 1 ms to draft, against plain steps of 1 ms and 0.5 ms of
    host."""
    requests, names = requests_of(target, decode), [prompt.id for prompt in prompts()]
    domains = [prompt.domain for prompt in prompts()]
    arm = sorted(
        Engine(target, scripted(target, decode, sort), decode).run(requests),
        key=lambda c: c.request.index,
    )
    plain = sorted(
        Engine(target, None, replace(decode, shape="none")).run(requests),
        key=lambda c: c.request.index,
    )

    def totals(done: Any, verify: float, draft: float) -> Totals:
        outcomes = []
        for name, domain, item in zip(names, domains, done, strict=True):
            count_ = len(item.passes)
            seconds = {"verify": verify * count_, "draft": draft * count_, "other": 0.0005 * count_}
            passes = [PassRecord(p.accepted, p.committed, p.rejected) for p in item.passes]
            outcomes.append(Outcome(name, domain, passes, seconds))
        return Totals.collect(outcomes, decode.tree().max_depth)

    watched = watch(target, scripted(target, decode, sort), decode, requests)
    own = [Prompt(*pair) for pair in zip(names, domains, strict=True)]
    counts = Counts.of(watched, own, decode.tree().max_depth)
    nodes = decode.tree().num_nodes
    return Measured(
        totals(arm, 0.002, 0.001), totals(plain, 0.001, 0.0), 1, nodes, widening=1.5
    ), counts


def factors(found: LossSplit) -> dict[str, float]:
    return {term.name: term.factor for term in found.terms}


def test_a_drafter_that_is_always_right_loses_nothing_to_acceptance_but_the_ends(
    target: TargetModel,
) -> None:
    measured, counts = figures(target, AlwaysRight, CHAIN)
    found = factors(split(measured, counts))
    tokens, passes = measured.arm.committed, measured.arm.passes
    assert passes.tolist() == np.ceil(tokens / 4).tolist()
    assert found["ends"] == pytest.approx(tokens.sum() / passes.sum() / 4)
    for name in ("vocabulary", "drafter", "coupling", "candidates", "shape", "sample"):
        assert found[name] == pytest.approx(1.0), name


def test_a_drafter_that_is_always_wrong_loses_everything_to_its_error(target: TargetModel) -> None:
    measured, counts = figures(target, AlwaysWrong, CHAIN)
    found = factors(split(measured, counts))
    assert found["drafter"] == pytest.approx(1 / 4)
    assert found["ends"] * found["drafter"] * found["sample"] == pytest.approx(1 / 4)


def test_the_time_terms_by_hand(target: TargetModel) -> None:
    measured, counts = figures(target, SometimesRight, CHAIN)
    found = factors(split(measured, counts))
    assert found["widening"] == pytest.approx(1.5 / 2.0)  # 1.5 ms plain, 0.5 ms more by the curves
    assert found["drafting"] == pytest.approx(2.0 / 3.0)
    assert found["commit"] == pytest.approx(1.0)
    assert found["host"] == pytest.approx(1.0)  # as much as in a plain step
    # the verification took 1 ms more, the curves explain half
    assert found["clock"] == pytest.approx(3.0 / 3.5)


@pytest.mark.parametrize("decode", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_samples_own_rates_give_its_tau_but_for_cut_answers(
    target: TargetModel, decode: DecodeConfig
) -> None:
    measured, counts = figures(target, SometimesRight, decode)
    rates = Rates.of(counts, counts.once)
    kept = measured.arm.reached.sum(0) / measured.arm.passes.sum()
    slow, reached = 1.0, 1.0
    for depth in range(counts.depth):
        tried = sum(1 for s in _states(target, decode) if s.depth == depth + 1)
        hits = sum(1 for s in _states(target, decode) if s.depth == depth + 1 and s.by == DRAFTED)
        reached *= hits / tried
        slow += reached
        assert hits == pytest.approx(kept[depth] * measured.arm.passes.sum())
    assert expected_tau(rates.kept)[0] == pytest.approx(slow)
    assert best_tree(rates.ranks[0], 12).tau >= best_tree(rates.ranks[0], 3).tau >= 1.0


def _states(target: TargetModel, decode: DecodeConfig) -> list[Any]:
    watched = watch(target, scripted(target, decode), decode, requests_of(target, decode))
    return [state for answer in watched for state in answer.states[1:]]


def test_calibration_by_hand() -> None:
    states = [
        State(1, DRAFTED, 1, 1, True, rank=0, confidence=0.95),
        State(1, CORRECTED, 2, 1, True, rank=3, confidence=0.91),
        State(1, CORRECTED, 1, 2, True, rank=-1, confidence=0.12),
    ]
    request = Request(0, (1,), 0, 9)
    counts = Counts.of([Watched(request, states)] * 2, [Prompt("a", "x"), Prompt("b", "x")], 2)
    bins = counts.calibration_bins()
    assert counts.calibration_gap(0).ece == pytest.approx((abs(0.95 + 0.91 - 1) + 0.12) / 3)
    assert bins[9].to_dict() == {"count": 4, "confidence": pytest.approx(0.93), "accepted": 0.5}
    assert bins[1].count == 2 and bins[5].count == 0
