"""The audit passes a sound decoder, and every planted bug makes it fail: where the bug is, and
nowhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from heads.api.checkpoint import new_drafter
from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.registry import get_kind
from heads.api.tree import DynamicShape, TokenTree
from inference.audit import findings as audit_findings
from inference.audit import report as audit_report
from inference.audit.comparison import Divergence
from inference.audit.config import AuditConfig
from inference.audit.drafters import ScriptedDrafter
from inference.audit.findings import BINS, Audit, Findings, FlipRow, make_audit
from inference.audit.statistics import chi_square, entropy, exact_distribution
from inference.audit.suite import Contestant, likeliest, processor_cases, run_audit
from inference.decoding.config import DecodeConfig
from inference.decoding.sampling.distribution import SamplingSettings, shape_logits
from inference.decoding.sampling.noise import SharedNoise
from inference.decoding.sampling.processors import Prefix, Processors
from inference.measure.config import Provenance
from inference.measure.prompts import Prompt
from inference.target.kv_cache import KVCache
from inference.target.loading import DTYPES
from inference.target.model import TargetModel
from tests.inference.decoding.slow_device import SlowDevice, StaleDevice, every_engine_on
from tests.models import VOCAB, random_model, random_target

DECODE = DecodeConfig(depth=3)
SMALL = AuditConfig(
    precisions=("float64",),
    prompts=2,
    batch_size=2,
    max_new_tokens=12,
    shapes=("tree",),
    seeds=150,
    kinds=(),
)
CAPTURED: dict[str, Any] = {
    "checks": ("invariance",),
    "shapes": ("chain",),
    "temperatures": (0.0,),
    "max_new_tokens": 20,
}
"""Enough tokens for steps to be captured, even where drafts are accepted."""
PROVENANCE: Provenance = {"command": "headstart audit", "versions": {}}


def load_target(precision: str) -> TargetModel:
    return random_target(dtype=DTYPES[precision], num_hidden_layers=2)


def prompts(count: int = 2) -> list[Prompt]:
    generator = torch.Generator().manual_seed(5)
    lengths = (11, 3, 6, 14)[:count]
    texts = [
        tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())
        for length in lengths
    ]
    return [Prompt(f"p{place}", "domain", tokens=text) for place, text in enumerate(texts)]


def contestant(kind: str) -> Contestant:
    def load(target: TargetModel) -> Any:
        return new_drafter(kind, get_kind(kind).config_class(), target.info, target.weights, seed=0)

    return Contestant(kind, load, DECODE)


def audited(*kinds: str, **changes: Any) -> Findings:
    return run_audit(
        replace(SMALL, **changes),
        DECODE,
        load_target,
        [contestant(kind) for kind in kinds],
        prompts(),
    )


def audit_of(findings: Findings) -> Audit:
    return make_audit(findings, {}, PROVENANCE)


@pytest.fixture(scope="module")
def sound() -> Findings:
    """Two formats, two shapes, a drafter with weights and one without, all three checks."""
    return audited(
        "medusa",
        "ngram",
        precisions=("float64", "bfloat16"),
        shapes=("chain", "tree"),
        rules=("match",),
    )


# A sound decoder


def test_a_sound_decoder_passes_everywhere(sound: Findings) -> None:
    assert not sound.failed and not sound.skipped
    rows = [row for row in sound.rows if row.check == "invariance"]
    found = {(r.precision, r.drafter, r.shape, r.batch_size, r.temperature) for r in rows}
    drafters = ("medusa", "ngram", "knows 70%", "always wrong", "random")
    wanted = set(product(("float64", "bfloat16"), drafters, ("chain", "tree"), (1, 2), (0.0, 1.0)))
    assert found - wanted == {
        (p, "none", "none", 2, t) for p in ("float64", "bfloat16") for t in (0.0, 1.0)
    }
    assert wanted <= found
    assert all(row.identical == row.sequences == 2 for row in rows if row.precision == "float64")


def test_the_scripted_drafters_do_what_they_are_called(sound: Findings) -> None:
    per_pass: dict[str, list[float]] = {}
    for row in sound.rows:
        per_pass.setdefault(row.drafter, []).append(row.tokens_per_pass)
    assert min(per_pass["knows 70%"]) > 1.5
    assert set(per_pass["always wrong"]) == {1.0}


def test_every_processor_is_audited_where_it_changes_something(sound: Findings) -> None:
    rows = [row for row in sound.rows if row.check == "processors"]
    assert {row.precision for row in rows} == {"float64"}
    assert {row.drafter for row in rows} == {"medusa", "ngram", "knows 70%"}
    changed = {row.case: row.changed for row in rows}
    assert len(changed) == 12
    assert all(changed.values()), changed


def test_the_distribution_is_tested_for_every_drafter_and_shape(sound: Findings) -> None:
    found = {(row.drafter, row.shape) for row in sound.distributions}
    assert found == set(product(("medusa", "ngram", "guesses"), ("chain", "tree")))
    assert all(row.cells >= 8 and row.p_value > 1e-3 for row in sound.distributions)
    assert (
        max(row.tokens_per_pass for row in sound.distributions if row.drafter == "guesses") > 1.15
    )


def test_captured_steps_are_compared_with_launched_ones() -> None:
    """On a device that captures; on a CPU there is nothing to compare."""
    assert not any(row.captured for row in audited("medusa", **CAPTURED).rows)
    with every_engine_on(SlowDevice()):
        found = audited("medusa", **CAPTURED)
    assert not found.failed and all(row.captured for row in found.rows)
    # plain decoding by captured steps too, one row at a time
    assert {(row.drafter, row.batch_size) for row in found.rows} >= {("none", 1), ("none", 2)}
    page = audit_report.drafter_rows(audit_of(found))
    assert {line["captured"] for line in page} == {"2/2"}


def test_a_stale_replay_fails() -> None:
    """In bfloat16, where texts of other passes may part at near ties: those of the same may not."""
    with every_engine_on(StaleDevice()):
        found = audited("medusa", precisions=("bfloat16",), **CAPTURED)
    assert found.failed == found.rows
    assert all(row.changed_by_capture for row in found.rows)
    lines = audit_report.failures(audit_of(found))
    assert "answers that launched steps decode otherwise" in lines[0]


# Planted bugs


def forget_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted nodes stay where they were verified."""
    monkeypatch.setattr(KVCache, "compact", lambda *_: None)


def key_noise_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise depends on a node's number instead of its position."""
    pick = SharedNoise.target_pick

    def by_node(self: SharedNoise, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return pick(self, logits, torch.arange(positions.shape[1]).expand_as(positions))

    monkeypatch.setattr(SharedNoise, "target_pick", by_node)


def penalise_committed_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processors see the text before the root, at every node."""
    process = Processors.__call__

    def without_path(self: Processors, logits: torch.Tensor, prefix: Prefix | None) -> torch.Tensor:
        if prefix is None or prefix.tokens.shape[1] == 1:
            return process(self, logits, prefix)
        nodes = prefix.tokens.shape[1]
        roots = prefix.tokens[:, :1].expand(-1, nodes)
        alone = TokenTree.from_parents(torch.zeros(1, nodes, dtype=torch.int64), 1)
        return process(self, logits, Prefix(prefix.history, prefix.lengths, roots, alone))

    monkeypatch.setattr(Processors, "__call__", without_path)


def accept_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last drafted token of an accepted path is committed in place of the target's own pick."""
    from inference.decoding.rules.match import Match

    judge = Match.judge

    def careless(self: Match, proposal: Any, *rest: Any) -> Any:
        verdict = judge(self, proposal, *rest)
        last = verdict.accepted[:, None]
        verdict.tokens = verdict.tokens.scatter(
            1, last, proposal.tokens.gather(1, verdict.path.gather(1, last))
        )
        return verdict if proposal.tokens.shape[1] > 1 else judge(self, proposal, *rest)

    monkeypatch.setattr(Match, "judge", careless)


@pytest.mark.parametrize(
    ("plant", "must_fail"),
    [
        (forget_to_move, lambda row: row.drafter == "knows 70%"),
        (key_noise_by_node, lambda row: row.drafter == "knows 70%" and row.temperature == 1),
        (accept_without_looking, lambda row: row.drafter in ("knows 70%", "always wrong")),
    ],
)
def test_a_planted_bug_is_found_where_it_is(
    plant: Callable[[pytest.MonkeyPatch], None],
    must_fail: Callable[[Any], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random drafts are accepted now and then, and may fail or not; everything else is decided."""
    plant(monkeypatch)
    findings = audited(checks=("invariance",))
    for row in findings.rows:
        if row.drafter != "random":
            assert row.passed != must_fail(row), row
    assert audit_of(findings).verdict.model_dump() == {
        "lossless": False,
        "compared": 14,
        "failed": len(findings.failed),
    }


def test_a_bug_in_trees_is_none_of_the_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_to_move(monkeypatch)
    findings = audited(checks=("invariance",), shapes=("chain",))
    assert not findings.failed


def test_processors_that_miss_the_drafted_path_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    penalise_committed_text_only(monkeypatch)
    findings = audited(checks=("processors",), shapes=("chain",))
    failed = {row.case for row in findings.rows if not row.passed}
    assert failed >= {"repetition_penalty", "repetition_penalty, greedy"}
    assert not failed & {"logit_bias", "top_k", "top_p", "min_p", "temperature"}


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_wrong_distribution_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that samples a little too coldly: the texts look fine, the chi-square test does
    not."""
    colder = {"checks": ("distribution",), "shapes": ("chain",), "rules": (rule,), "seeds": 600}
    assert not audited(**colder).failed
    for module in ("noise", "distribution"):
        name = f"inference.decoding.sampling.{module}.shape_logits"
        monkeypatch.setattr(name, lambda *given: 1.6 * shape_logits(*given))
    findings = audited(**colder)
    assert [row.passed for row in findings.distributions] == [False]


def test_a_near_tie_is_no_excuse_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 answers must be identical; the same difference passes as a near tie in
    bfloat16."""

    def tie(*given: Any, **settings: Any) -> Any:
        from inference.audit.comparison import AuditReport

        flip = Divergence(0, 3, 5, 6, 0.01, 0.01, 0.02, True, "within the numerical gap")
        return AuditReport(2, 1, 1, 0, 24, 1, [flip], [flip])

    monkeypatch.setattr("inference.audit.suite.audit", tie)
    findings = audited(checks=("invariance",), precisions=("float64", "bfloat16"))
    assert {row.precision for row in findings.failed} == {"float64"}
    assert [(item.flips, item.near_ties, item.histogram[2]) for item in findings.flips] == [
        (14, 14, 14)
    ] * 2


def test_what_a_drafter_does_not_offer_is_noted_once_and_nothing_else_is_lost() -> None:
    class ChainsOnly:
        kind = "chains"

        def __init__(self, inner: Any) -> None:
            self.inner, self.needs = inner, inner.needs

        def start(self, seen: TargetStates, tree: Any, capacity: int) -> Any:
            if not tree.is_chain:
                raise UserError("chains only.")
            return self.inner.start(seen, tree, capacity)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    ngram = contestant("ngram")
    picky = Contestant("picky", lambda target: ChainsOnly(ngram.load(target)), DECODE)
    config = replace(SMALL, checks=("invariance",), shapes=("chain", "tree"), temperatures=(0.0,))
    findings = run_audit(config, DECODE, load_target, [picky], prompts())
    assert [(item.drafter, item.shape, item.reason) for item in findings.skipped] == [
        ("picky", "tree", "chains only.")
    ]
    assert {row.shape for row in findings.rows if row.drafter == "picky"} == {"chain"}
    assert not findings.failed


def test_dartrees_are_audited_where_they_can_be_drafted() -> None:
    findings = audited("medusa", "ngram", checks=("invariance",), shapes=("dartree",))
    assert [(item.drafter, item.shape) for item in findings.skipped] == [("ngram", "dartree")]
    assert "one pass of these kinds gives: " in findings.skipped[0].reason
    assert {row.drafter for row in findings.rows if row.shape == "dartree"} == {
        *("medusa", "knows 70%", "always wrong", "random")
    }
    assert not findings.failed
    assert max(row.tokens_per_pass for row in findings.rows if row.drafter == "knows 70%") > 1.5


# Statistics


def test_the_exact_distribution_is_the_models_own() -> None:
    target, model = load_target("float64"), random_model(num_hidden_layers=2)
    prompt, sampling = (5, 9, 33), SamplingSettings(1.0, top_k=3, repetition_penalty=1.2)
    exact = exact_distribution(target, prompt, sampling, 2)
    assert math.isclose(sum(exact.values()), 1.0, rel_tol=1e-9)
    assert len(exact) == 9
    processors = Processors(sampling, VOCAB, "cpu")
    for answer, share in exact.items():
        expected = 1.0
        for place in range(len(answer)):
            text = torch.tensor([[*prompt, *answer[:place]]])
            logits = model(input_ids=text, use_cache=False).logits
            prefix = Prefix(
                text, torch.tensor([text.shape[1] - 1]), text[:, -1:], TokenTree.chain(0)
            )
            shaped = shape_logits(processors(logits[:, -1:], prefix), sampling)
            expected *= float(shaped.softmax(-1)[0, 0, answer[place]])
        assert math.isclose(share, expected, rel_tol=1e-6)


def test_an_answer_that_ends_early_is_an_answer() -> None:
    target = load_target("float64")
    sampling = SamplingSettings(1.0, top_k=3)
    first = next(iter(exact_distribution(target, (5, 9), sampling, 1)))
    target.eos_token_ids = first
    exact = exact_distribution(target, (5, 9), sampling, 3)
    assert first in exact and len(exact) < 27
    assert math.isclose(sum(exact.values()), 1.0, rel_tol=1e-9)


def test_chi_square_knows_its_table() -> None:
    even = {(0,): 0.5, (1,): 0.5}
    samples = [(0,)] * 120 + [(1,)] * 80
    found = chi_square(samples, even)
    assert found.statistic == pytest.approx(8.0) and found.degrees == 1
    assert found.p_value == pytest.approx(
        0.004678, rel=1e-3
    )  # upper tail of chi-square, one degree of freedom
    assert chi_square([(0,)] * 100 + [(1,)] * 100, even).p_value == 1.0
    assert chi_square([*samples, (2,)], even).p_value == 0.0  # impossible
    assert entropy(even) == pytest.approx(math.log(2))


def test_rare_answers_are_pooled() -> None:
    exact = {(0,): 0.5, (1,): 0.48, **{(place,): 0.002 for place in range(2, 12)}}
    usual = [(0,)] * 250 + [(1,)] * 240 + [(place,) for place in range(2, 12)]
    found = chi_square(usual, exact)
    assert (found.cells, found.degrees, found.statistic) == (3, 2, 0.0)
    few = chi_square(usual[:480] + [(2,)] * 20, exact)
    assert few.p_value < 0.01
    tiny = {(0,): 0.6, (1,): 0.396, (2,): 0.004}
    merged = chi_square([(0,)] * 60 + [(1,)] * 39 + [(2,)], tiny)
    assert merged.cells == 2 and merged.p_value > 0.9


def test_flips_fall_into_their_bins() -> None:
    def flip(margin: float, near: bool) -> Divergence:
        return Divergence(0, 0, 1, 2, margin, 0.5, 2.0, near, "")

    flips = [
        flip(0.1, True),
        flip(-1.9, True),
        flip(2.0, True),
        flip(5.0, False),
        flip(math.inf, False),
    ]
    summary = FlipRow.of("bfloat16", 1000, flips)
    assert dict(zip(BINS[1:], summary.histogram, strict=True)) == {
        0.125: 1,
        0.25: 0,
        0.5: 0,
        0.75: 0,
        1.0: 2,
        2.0: 0,
        10.0: 1,
        math.inf: 0,
    }
    assert (summary.flips, summary.near_ties, summary.filtered, summary.per_thousand) == (
        5,
        3,
        1,
        5.0,
    )
    # the same decisions, met again by another drafter
    summary = FlipRow.of("bfloat16", 2000, [*flips, *flips[:2]])
    assert (summary.flips, summary.places) == (7, 5)


# Scripted drafters, cases


def seen(prompt: tuple[int, ...], first: int) -> TargetStates:
    tokens = torch.tensor([prompt])
    following = torch.tensor([[*prompt[1:], first]])
    place = torch.arange(len(prompt))[None]
    return TargetStates(tokens, following, place, torch.ones_like(tokens, dtype=torch.bool))


@pytest.mark.parametrize(
    "shape", [TokenTree.chain(4), DynamicShape(nodes=12, max_depth=3, width=4)]
)
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_script_is_right_as_often_as_it_is_told(shape: Any, share: float) -> None:
    prompt, answer = (4, 5, 6), list(range(20, 40))
    drafter = ScriptedDrafter({prompt: [*prompt, *answer]}, VOCAB, share)
    state = drafter.start(seen(prompt, 20), shape, 64)
    proposal = drafter.propose(state, None)  # type: ignore[arg-type]
    depth = proposal.tree.depth.expand_as(proposal.tokens)
    assert int(depth.max()) <= shape.max_depth and proposal.tokens.shape[1] == shape.num_nodes
    right = proposal.tokens == torch.tensor(answer)[depth]
    assert bool(right[0, 0]) and bool((right[0, 1:] == bool(share)).all())


def test_dynamic_trees_differ_from_step_to_step() -> None:
    prompt = (4, 5, 6)
    drafter = ScriptedDrafter({}, VOCAB, None)
    state = drafter.start(seen(prompt, 7), DynamicShape(nodes=12, max_depth=3, width=4), 64)
    one = drafter.propose(state, None)  # type: ignore[arg-type]
    state.length += 1
    other = drafter.propose(state, None)  # type: ignore[arg-type]
    assert not torch.equal(one.tree.parents, other.tree.parents)
    assert not torch.equal(one.tokens, other.tokens)
    assert bool((one.tree.parents < torch.arange(12)).logical_or(torch.arange(12) == 0).all())


def test_guesses_depend_on_the_first_token() -> None:
    exact = {(1, 2): 0.3, (1, 3): 0.4, (5, 1): 0.1, (5, 7): 0.2}
    guesses = likeliest((9,), exact)
    assert guesses == {(9, 1): [9, 1, 3], (9, 5): [9, 5, 7]}
    drafter = ScriptedDrafter(guesses, VOCAB, 1.0)
    state = drafter.start(seen((9,), 5), TokenTree.chain(1), 64)
    assert drafter.propose(state, None).tokens.tolist() == [[5, 7]]  # type: ignore[arg-type]


def test_cases_leave_the_end_of_text_alone() -> None:
    cases = processor_cases({0.0: [[7, 2]], 1.0: [[2]]}, ends=(2,))
    for case in cases.values():
        assert all(word[-1] != 2 for word in case.get("bad_words", ()))
        assert all(token != 2 for token, _ in case.get("logit_bias", ()))
        DecodeConfig(**case)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"checks": ("invarience",)},
            "audit.checks: 'invarience' is unknown. Did you mean 'invariance'",
        ),
        ({"precisions": ()}, "audit.precisions is empty"),
        ({"rules": ("typical",)}, "audit.rules: 'typical' is unknown"),
        ({"prompts": 0}, r"audit.prompts must lie in \[1, "),
        ({"temperatures": (-1.0,)}, r"audit\.temperatures\[0\] must lie in \[0, "),
        ({"significance": 0.5}, "audit.significance must lie between 0 and 0.1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AuditConfig(**wrong)


def test_prompts_that_do_not_fit_are_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"no prompt fits: with audit\.max_new_tokens=255"):
        audited(max_new_tokens=255)


# Audit.json and audit.md


def test_the_file_survives_the_round_trip_and_is_valid_json(
    sound: Findings, tmp_path: Path
) -> None:
    audit = audit_of(sound)
    file = audit_findings.write(audit, tmp_path)
    assert audit_findings.read(tmp_path) == audit_findings.read(file) == audit
    assert list(json.loads(file.read_text())) == list(Audit.model_fields)[:-1]  # no git was given
    assert "Infinity" not in file.read_text() and "NaN" not in file.read_text()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.pop("flips"), "flips is missing"),
        (lambda c: c.update(more=1), "more is not part of an audit"),
        (lambda c: c["comparisons"][0].update(identical=7), "comparisons.0 does not add up"),
        (
            lambda c: c["comparisons"][0].update(identical=0, mismatches=2),
            "has mismatches and says that it passed",
        ),
        (lambda c: c["comparisons"][0].update(passed=False), "verdict is .* but its rows say"),
        (
            lambda c: c["comparisons"][0].update(tokens="many"),
            "comparisons.0.tokens must be a whole number, .*; given: 'many'",
        ),
        (lambda c: c["distributions"][0].pop("p_value"), "distributions.0.p_value is missing"),
        (lambda c: c.update(format=9), "format is 9"),
    ],
)
def test_an_audit_that_contradicts_itself_is_refused(
    sound: Findings, spoil: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    content = json.loads(audit_findings.write(audit_of(sound), tmp_path).read_text())
    spoil(content)
    (tmp_path / "audit.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        audit_findings.read(tmp_path)


def test_what_is_absent_or_broken_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no audit\.json\. Run `headstart audit`"):
        audit_findings.read(tmp_path)
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        audit_findings.read(tmp_path)


def page(findings: Findings, folder: Path) -> tuple[str, str]:
    """What is printed, and what audit.md says."""
    audit = audit_of(findings)
    console = Console(width=130)
    with console.capture() as printed:
        audit_report.print_summary(audit, console)
    return printed.get(), audit_report.write_markdown(audit, folder).read_text()


def test_the_page_says_that_all_is_well(sound: Findings, tmp_path: Path) -> None:
    printed, written = page(sound, tmp_path)
    comparisons, tests = len(sound.rows), len(sound.distributions)
    for text in (printed, written):
        assert f"LOSSLESS: {comparisons} comparisons and {tests} distribution tests" in text
        assert "NOT LOSSLESS" not in text
        assert text.count("knows 70%") >= 2  # one line per precision
    assert "| float64 | medusa | 8 | 16/16 | 0/8 | 0.00 |" in written
    assert len(printed.splitlines()) < 70


def test_the_page_names_what_failed_and_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget_to_move(monkeypatch)
    findings = audited(checks=("invariance",))
    printed, written = page(findings, tmp_path)
    for text in (printed, written):
        assert f"NOT LOSSLESS: {len(findings.failed)} of 14 comparisons" in text
        assert "float64, invariance, knows 70%, tree, 1 rows, temperature 0: " in text
        assert "MISMATCH" in text
