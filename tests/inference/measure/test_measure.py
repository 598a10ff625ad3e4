"""A whole measurement on a tiny random target: what the report says must be what happened."""

from __future__ import annotations

import html
import io
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.errors import UserError
from heads.medusa import Config as MedusaConfig
from heads.ngram import Config as NgramConfig
from heads.suffix import Config as SuffixConfig
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution import worth
from inference.decoding.execution.compiled import CompiledStep, NotCompiledError
from inference.decoding.requests import Completion, Request
from inference.decoding.rules.names import LOSSLESS, RULES
from inference.decoding.rules.registry import get_rule
from inference.measure import run as measure_module
from inference.measure.answers import FINAL_FILE, read_records
from inference.measure.config import (
    BenchConfig,
    LostConfig,
    check_arms,
    report_settings,
    require_same_task,
    split_prompts,
)
from inference.measure.prompts import Prompt, to_requests
from inference.measure.run import measure, quick_tau
from inference.report.markdown import facts, print_table, render
from inference.report.model import read_report
from inference.report.page.render import write_page
from inference.target.model import TargetModel
from inference.verifications import SEQUENCES, RecordsConfig, read_table
from tests.fakes import AlwaysRight, AlwaysWrong, SometimesRight
from tests.models import VOCAB, TokenIds, random_target

DECODE = DecodeConfig(depth=3, max_new_tokens=13)  # 12 committed tokens: three full passes of four
QUIET = Console(quiet=True)


def prompts(per_domain: int = 3) -> list[Prompt]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for domain in ("code", "prose"):
        for number in range(per_domain):
            tokens = torch.randint(3, VOCAB, (4 + number,), generator=generator).tolist()
            made.append(Prompt(f"{domain}-{number}", domain, tokens=tuple(tokens)))
    return made


def known_answers(target: TargetModel, decode: DecodeConfig) -> dict[tuple[int, ...], list[int]]:
    """Prompt tokens -> prompt and plain continuation, for the fakes."""
    requests = to_requests(prompts(), target.tokenizer, decode)
    found = Engine(target, None, decode).run(requests)
    return {c.request.tokens: [*c.request.tokens, *c.tokens] for c in found}


REAL_ANSWER = measure_module._answer


def steady_answer(engine: Engine, request: Request) -> tuple[Completion, dict[str, float]]:
    """Decode in earnest, but as if on a machine whose clock knows no noise: 1 ms a pass, 0.2 ms to
    draft."""
    completion, seconds = REAL_ANSWER(engine, request)
    passes = len(completion.passes)
    drafting = 0.0 if engine.drafter is None else 0.0002 * passes
    return completion, {
        **dict.fromkeys(seconds, 0.0),
        "prefill": 0.004,
        "verify": 0.001 * passes,
        "draft": drafting,
    }


@pytest.fixture(autouse=True, scope="module")
def steady_clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "_answer", steady_answer)
        yield


@pytest.fixture(scope="module")
def target() -> TargetModel:
    model = random_target(dtype=torch.float32)
    model.eos_token_ids = ()  # every answer has its full length
    return model


@pytest.fixture(scope="module")
def arms(target: TargetModel) -> list[Arm]:
    known = known_answers(target, DECODE)
    ngram = new_drafter("ngram", NgramConfig(), target.info, target.weights, seed=0)
    return [
        Arm("right", AlwaysRight(known, VOCAB), DECODE),
        Arm("wrong", AlwaysWrong(known, VOCAB), DECODE),
        Arm("ngram", ngram, DECODE),
    ]


CONFIG = BenchConfig(prompts_per_domain=2, warmup_prompts=1, repeats=2)


@pytest.fixture(scope="module")
def report(
    target: TargetModel, arms: list[Arm], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("measured")
    measure(CONFIG, target, arms, prompts(), out, console=QUIET)
    return read_report(out).to_dict()


def entry(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in report["drafters"] if item["draft"]["name"] == name)


def test_a_report_says_how_the_target_was_loaded(
    target: TargetModel,
    arms: list[Arm],
    report: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "loading" not in report["target"]
    monkeypatch.setattr(target, "loading", {"quantization": "torchao-int8"})
    measure(replace(CONFIG, repeats=1), target, arms[2:], prompts(), tmp_path, console=QUIET)
    found = read_report(tmp_path)
    assert found.target.loading == {"quantization": "torchao-int8"}
    assert "float32, quantization=torchao-int8" in facts(found)[0]


def test_tau_of_drafters_that_are_always_right_and_always_wrong(report: dict[str, Any]) -> None:
    right, wrong = entry(report, "right"), entry(report, "wrong")
    assert (right["tau"], right["tau_ci95"], right["tar"]) == (4.0, [4.0, 4.0], 1.0)
    assert right["acceptance"] == {"unconditional": [1.0] * 3, "conditional": [1.0] * 3}
    assert (wrong["tau"], wrong["tar"]) == (1.0, 0.0)
    assert wrong["acceptance"]["unconditional"] == [0.0] * 3
    answers = 2 * 4  # repeats x measured prompts
    assert (right["tokens"], right["verify_passes"]) == (12 * answers, 3 * answers)
    assert wrong["verify_passes"] == report["baseline"]["tokens"] == 12 * answers


def test_records_of_a_measurement_are_what_was_timed(
    target: TargetModel, arms: list[Arm], tmp_path: Path
) -> None:
    """Passes, kept drafts and answers of every arm, from the records against records.jsonl; asked
    for or not there."""
    measure(
        CONFIG,
        target,
        arms,
        prompts(),
        tmp_path,
        console=QUIET,
        recording=RecordsConfig(enabled=True),
    )
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()][1:]
    assert {path.name for path in (tmp_path / "records").iterdir()} == {"right", "wrong", "ngram"}
    for arm in ("right", "wrong", "ngram"):
        folder = tmp_path / "records" / arm
        passes, texts = read_table(folder).to_pylist(), read_table(folder, SEQUENCES).to_pylist()
        timed = {
            line["prompt"]: line for line in lines if line["arm"] == arm and line["repeat"] == 0
        }
        assert len(timed) == len(texts) == 4
        for text in texts:
            answer = text["tokens"][text["prompt_length"] :]
            assert answer == timed[text["sequence"]]["tokens"]
            own = sorted(
                (row for row in passes if row["sequence"] == text["sequence"]),
                key=lambda row: row["position"],
            )
            assert [[row["accepted"], row["error_depth"] > 0] for row in own] == [
                [accepted, rejected] for accepted, _, rejected in timed[text["sequence"]]["passes"]
            ]
            for row in own:
                kept = row["drafted"][: row["accepted"]]
                assert text["tokens"][row["position"] + 1 :][: len(kept)] == kept
    measure(CONFIG, target, arms, prompts(), tmp_path / "plain", console=QUIET)
    assert not (tmp_path / "plain" / "records").exists()


def test_every_arm_was_lossless(report: dict[str, Any]) -> None:
    for item in report["drafters"]:
        assert item["lossless"] == {"sequences": 8, "identical": 8, "near_ties": 0, "mismatches": 0}


def test_speedups_are_ratios_of_measured_times(report: dict[str, Any]) -> None:
    right, base = entry(report, "right"), report["baseline"]
    assert base["seconds"] == pytest.approx(base["tokens"] * 0.001)
    assert base["tokens_per_second"] == pytest.approx(1000)
    assert right["tokens_per_second"] == pytest.approx(4 / 0.0012)
    assert right["speedup"] == right["ideal_speedup"] == pytest.approx(4 / 1.2)
    assert right["step_ms"] == pytest.approx(
        {"draft": 0.2, "verify": 1.0, "commit": 0.0, "other": 0.0}
    )
    assert entry(report, "wrong")["speedup"] == pytest.approx(1 / 1.2)


def test_the_clock_covers_the_whole_run(target: TargetModel, arms: list[Arm]) -> None:
    request = to_requests(prompts(), target.tokenizer, DECODE)[0]
    engine = Engine(target, arms[0].drafter, DECODE)
    REAL_ANSWER(engine, request)
    start = time.perf_counter()
    _, seconds = REAL_ANSWER(engine, request)
    wall = time.perf_counter() - start
    assert all(value > 0 for value in seconds.values())
    assert 0.5 * wall < sum(seconds.values()) <= wall


def test_the_report_describes_target_device_and_drafts(
    report: dict[str, Any], target: TargetModel
) -> None:
    assert report["target"]["dtype"] == "float32"
    assert report["target"]["parameters"] == target.info.parameters
    assert report["device"]["threads"] == torch.get_num_threads()
    assert report["settings"] == {
        "temperature": 0.0,
        "max_new_tokens": 13,
        "batch_size": 1,
        "rule": "match",
        "seed": 0,
        "prompts": 4,
        "compile": False,
    }
    ngram = entry(report, "ngram")
    assert (
        ngram["kind"],
        ngram["parameters"],
        ngram["draft"]["depth"],
        ngram["draft"]["nodes"],
    ) == ("ngram", 0, 3, 4)
    assert list(ngram["domains"]) == ["code", "prose"]
    assert ngram["memory_bytes"]["target"] > 0 < ngram["memory_bytes"]["kv"]
    assert report["run"]["arms"]["ngram"]["prefill_seconds"] == pytest.approx(8 * 0.004)
    assert report["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_report_names_the_rule_that_ran_and_what_it_promises(
    target: TargetModel, tmp_path: Path, rule: str, temperature: float
) -> None:
    """Every rule of the registry: report.json, report.md, the terminal's table and the page say
    which, and what it keeps."""
    drafter = new_drafter("medusa", MedusaConfig(num_heads=3), target.info, target.weights, seed=1)
    decode = DecodeConfig(depth=3, max_new_tokens=12, temperature=temperature, seed=4, rule=rule)
    config = BenchConfig(prompts_per_domain=1)
    measure(config, target, [Arm("medusa", drafter, decode)], prompts(), tmp_path, console=QUIET)
    report = read_report(tmp_path).to_dict()
    ran = get_rule(rule, decode.tree())
    assert report["settings"] == {
        "temperature": temperature,
        "max_new_tokens": 12,
        "batch_size": 1,
        "rule": ran.name,
        "seed": 4,
        "prompts": 2,
        "compile": False,
    }
    assert report["run"].get("typical") == (
        {"epsilon": 0.09, "delta": 0.3} if rule == "typical" else None
    )
    noise = [item["draft"]["noise"] for item in report["drafters"]]
    own = {"match": "shared", "typical": "none"}.get(rule, "own")
    assert noise == ([own, "none"] if (rule, temperature) == ("match", 1.0) else [own])
    lossy = temperature > 0 and rule not in LOSSLESS
    shown = Console(record=True, width=200, file=io.StringIO())
    print_table(read_report(tmp_path), shown)
    text, page = (
        render([tmp_path], tmp_path / "shown").read_text(),
        write_page([("it", tmp_path)], tmp_path / "page"),
    )
    for printed in (text, shown.export_text(), page.read_text()):
        assert ("LOSSY" in printed) == lossy
        assert rule in printed or rule == "match"
    assert "MISMATCH" not in text or rule == "match"
    if rule == "typical" and not lossy:
        assert "typical` (lossy above temperature 0)" in text
    if temperature == 0 or rule == "match":
        assert all(item["lossless"]["mismatches"] == 0 for item in report["drafters"])


@pytest.mark.parametrize("rule", [name for name in RULES if name != "match"])
def test_arms_of_different_rules_do_not_stand_in_one_report(
    arms: list[Arm], tmp_path: Path, rule: str
) -> None:
    other = replace(arms[1], decode=replace(DECODE, rule=rule))
    with pytest.raises(
        UserError, match=f"'right' decodes with rule=match, 'wrong' with rule={rule}"
    ):
        check_arms(BenchConfig(), [arms[0], other])
    with pytest.raises(UserError, match=f"'a' decodes with rule=match, 'b' with rule={rule}"):
        report_settings({"a": DECODE, "b": other.decode}, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("repetition_penalty", 1.3),
        ("logit_bias", ((3, 1.0),)),
        ("bad_words", ((5,),)),
        ("typical_epsilon", 0.2),
    ],
)
def test_arms_with_other_processors_do_not_stand_in_one_report(
    arms: list[Arm], key: str, value: Any
) -> None:
    other = replace(arms[1], decode=replace(DECODE, **{key: value}))
    with pytest.raises(UserError, match=f"decodes with {key}=.*give all the same"):
        check_arms(BenchConfig(), [arms[0], other])


def test_what_is_lost_is_not_split_for_another_rule(arms: list[Arm]) -> None:
    sampled = replace(arms[0], decode=replace(DECODE, rule="rejection", temperature=1.0))
    with pytest.raises(
        UserError,
        match=r"bench\.lost splits what rule match reaches, but decode\.rule is 'rejection'",
    ):
        check_arms(BenchConfig(lost=LostConfig(enabled=True)), [sampled])


def test_weights_are_named_by_their_hash_and_own_noise_stands_beside(
    target: TargetModel, tmp_path: Path
) -> None:
    from inference.manifest import file_sha256

    drafter = new_drafter("medusa", MedusaConfig(num_heads=3), target.info, target.weights, seed=1)
    save_drafter(drafter, tmp_path / "best", target.info)
    decode = DecodeConfig(depth=3, max_new_tokens=12, temperature=1.0, seed=4)
    config = BenchConfig(prompts_per_domain=1)
    arm = Arm("medusa", drafter, decode, str(tmp_path / "best"))
    report = measure(config, target, [arm], prompts(), tmp_path / "out", console=QUIET).to_dict()
    shared, own = report["drafters"]
    assert [shared["draft"]["noise"], own["draft"]["noise"]] == ["shared", "none"]
    assert own["draft"]["name"] == "medusa (own noise)"
    assert shared["lossless"]["identical"] == own["lossless"]["identical"] == 4
    assert shared["draft"]["weights_sha256"] == file_sha256(tmp_path / "best" / "model.safetensors")
    assert shared["parameters"] == sum(p.numel() for p in drafter.parameters()) > 0


def test_a_terminal_shows_which_part_runs(
    target: TargetModel, arms: list[Arm], tmp_path: Path
) -> None:
    """Also while arms are prepared, which compiles their steps and may take minutes."""
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=100)
    measure(CONFIG, target, arms, prompts(), tmp_path, console=terminal)
    engines = len(arms) + 1
    text = shown.getvalue()
    assert f"{engines}/{engines}" in text[text.index("preparing") : text.index("measuring")]
    assert "answers/s" in text[text.index("measuring") :]


def test_repeats_do_not_profit_from_answers_that_a_drafter_remembers(
    target: TargetModel, tmp_path: Path
) -> None:
    suffix = new_drafter("suffix", SuffixConfig(), target.info, target.weights, seed=0)
    measure(CONFIG, target, [Arm("suffix", suffix, DECODE)], prompts(), tmp_path, console=QUIET)
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    steps: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    for record in map(json.loads, lines):
        if record["arm"] == "suffix":
            steps[record["repeat"]][record["prompt"]] = record["passes"]
    assert len(steps[0]) == 4 and steps[0] == steps[1]


class InterruptedRunError(Exception):
    """Stands for the kill."""


def test_an_interrupted_measurement_continues(
    target: TargetModel, arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = measure_module._answer, []

    def until_the_seventh(engine: Engine, request: Any) -> Any:
        calls.append(request.index)
        if len(calls) == limit:
            raise InterruptedRunError
        return real(engine, request)

    monkeypatch.setattr(measure_module, "_answer", until_the_seventh)
    config, limit = (
        BenchConfig(prompts_per_domain=2, warmup_prompts=1, repeats=1),
        4 + 7,
    )  # warm-up, then 1 prompt and a half
    with pytest.raises(InterruptedRunError):
        measure(config, target, arms, prompts(), tmp_path, console=QUIET)
    assert not (tmp_path / "report.json").exists()
    lines = (tmp_path / "records.partial.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 6
    with (tmp_path / "records.partial.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"arm": "right", "promp')  # killed in the middle of a line
    calls.clear()
    limit = 0
    report = measure(config, target, arms, prompts(), tmp_path, console=QUIET).to_dict()
    assert len(calls) == 4 + 12  # warm-up again; of the four prompts one was done by all four arms
    assert entry(report, "right")["tau"] == 4.0
    kept = [
        json.loads(line)
        for line in (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    ]
    keys = [(record["arm"], record["prompt"]) for record in kept]
    assert len(keys) == len(set(keys)) == 16
    assert not (tmp_path / "records.partial.jsonl").exists()


def test_a_drafter_that_remembers_answers_remembers_them_again(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted measurement gives the passes of one that was left in peace."""
    config = BenchConfig(prompts_per_domain=9, warmup_prompts=1, repeats=1)
    again = [replace(one, id=f"{one.id}-again") for one in prompts()]  # answers that are known

    def passes(out: Path) -> list[Any]:
        own = SuffixConfig(history_tokens=512)
        drafter = new_drafter("suffix", own, target.info, target.weights, seed=0)
        arm = Arm("suffix", drafter, DecodeConfig(depth=3, max_new_tokens=24))
        measure(config, target, [arm], [*prompts(), *again], out, console=QUIET)
        return [
            (record.prompt, record.passes)
            for record in read_records(out / "records.jsonl")
            if record.arm == "suffix"
        ]

    whole = passes(tmp_path / "whole")
    real, calls = measure_module._answer, []

    def until_the_last(engine: Engine, request: Any) -> Any:
        calls.append(request.index)
        if len(calls) == 2 + 2 * (len(whole) - 1) + 1:  # warm-up, then all prompts but one
            raise InterruptedRunError
        return real(engine, request)

    with monkeypatch.context() as patch:
        patch.setattr(measure_module, "_answer", until_the_last)
        with pytest.raises(InterruptedRunError):
            passes(tmp_path / "parts")
    assert passes(tmp_path / "parts") == whole


def test_records_of_other_settings_are_not_continued(
    target: TargetModel, arms: list[Arm], tmp_path: Path
) -> None:
    (tmp_path / "records.partial.jsonl").write_text(
        '{"fingerprint": "of something else"}\n', encoding="utf-8"
    )
    report = measure(
        BenchConfig(prompts_per_domain=1), target, arms[:1], prompts(), tmp_path, console=QUIET
    ).to_dict()
    assert entry(report, "right")["lossless"]["sequences"] == 4


def disturb(
    monkeypatch: pytest.MonkeyPatch, slower: Callable[[Engine, int], float], prompts: int = 4
) -> None:
    """Let every arm take `slower`(engine, repeat) times as long, as other programs would; one
    warm-up prompt."""
    calls: Counter[int] = Counter()

    def answer(engine: Engine, request: Request) -> tuple[Completion, dict[str, float]]:
        completion, seconds = steady_answer(engine, request)
        factor = slower(engine, (calls[id(engine)] - 1) // prompts)
        calls[id(engine)] += 1
        return completion, {phase: factor * value for phase, value in seconds.items()}

    monkeypatch.setattr(measure_module, "_answer", answer)


def everything_said(folder: Path) -> dict[str, str]:
    """What report.md, report.html and the terminal say of a measurement, each on one line."""
    console = Console(width=120, record=True, file=io.StringIO())
    print_table(read_report(folder), console)
    page = html.unescape(write_page([("measure", folder)], folder / "out").read_text())
    said = {
        "report.md": render([folder], folder / "out").read_text(),
        "report.html": re.sub("<[^>]*>", "", page),
        "terminal": console.export_text(),
    }
    return {name: " ".join(text.split()) for name, text in said.items()}


def test_a_disturbed_repeat_is_measured_again_and_left_out(
    target: TargetModel, arms: list[Arm], report: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    disturb(monkeypatch, lambda engine, repeat: 1.5 if repeat == 0 and engine.drafter else 1.0)
    console = Console(width=120, record=True, file=io.StringIO())
    found = measure(CONFIG, target, arms, prompts(), tmp_path, console=console)
    repeats = found.repeats
    assert repeats is not None
    assert (repeats.measured, repeats.kept, repeats.disturbed) == (3, [1, 2], False)
    assert set(repeats.spread) == {"baseline", "right", "wrong", "ngram"}
    heard = " ".join(console.export_text().split())
    assert "disturbed: the repeats of 'right' differ by 50% (limit 10%). Measuring again." in heard
    for name in ("right", "wrong", "ngram"):  # numbers are those of a quiet machine
        again, before = entry(found.to_dict(), name), entry(report, name)
        for key in ("speedup", "speedup_ci95", "tokens_per_second", "step_ms", "tokens"):
            assert again[key] == pytest.approx(before[key]), key
        counts = again["lossless"]  # what was left out was compared as well
        assert counts["sequences"] == counts["identical"] == 12
    said = "3, of which the 2 fastest count, which differ by at most 0%"
    for place, text in everything_said(tmp_path).items():
        assert "was disturbed" not in text, place
        assert (said in text) == (place != "terminal")


def test_an_interrupted_further_repeat_continues(
    target: TargetModel, arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(engine: Engine, repeat: int) -> float:
        answers.append(repeat)
        if len(answers) == 4 + 2 * 16 + 6:  # warm-up, two repeats, a prompt and a half
            raise InterruptedRunError
        return 1.5 if repeat == 0 and engine.drafter else 1.0

    answers: list[int] = []
    with monkeypatch.context() as patch:
        disturb(patch, slower)
        with pytest.raises(InterruptedRunError):
            measure(CONFIG, target, arms, prompts(), tmp_path, console=QUIET)
    repeats = measure(CONFIG, target, arms, prompts(), tmp_path, console=QUIET).repeats
    assert repeats is not None
    assert (repeats.measured, repeats.kept, repeats.disturbed) == (3, [1, 2], False)
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    assert len(lines) == 3 * 16


def test_a_machine_that_stays_disturbed_is_said_everywhere(
    target: TargetModel, arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, lambda engine, repeat: 1.3**repeat if engine.drafter else 1.0)
    found = measure(replace(CONFIG, retries=1), target, arms, prompts(), tmp_path, console=QUIET)
    assert found.repeats is not None
    assert (found.repeats.measured, found.repeats.kept) == (3, [0, 1])
    assert found.repeats.disturbed and found.repeats.above_tau == []
    assert found.repeats.spread == pytest.approx(
        {"baseline": 0.0, "right": 0.3, "wrong": 0.3, "ngram": 0.3}
    )
    for place, text in everything_said(tmp_path).items():
        assert "The machine was disturbed: the repeats of 'right' differ by 30%" in text, place
        assert "Speeds and speedups of this measurement are not reliable" in text, place


def test_one_repeat_tells_nothing_of_the_machine(
    target: TargetModel, arms: list[Arm], tmp_path: Path
) -> None:
    config = replace(CONFIG, repeats=1)
    found = measure(config, target, arms[:1], prompts(), tmp_path, console=QUIET).repeats
    assert found is not None
    assert (found.measured, found.spread, found.disturbed) == (1, {}, False)
    said = everything_said(tmp_path)
    assert "repeats: 1, so a disturbance of the machine would not have been" in said["report.md"]


def test_a_weak_baseline_is_reported_as_a_disturbance(
    target: TargetModel, arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, lambda engine, repeat: 1.0 if engine.drafter else 20.0)
    found = measure(CONFIG, target, arms, prompts(), tmp_path, console=QUIET)
    assert found.repeats is not None
    assert found.repeats.measured == CONFIG.repeats + CONFIG.retries
    assert found.repeats.above_tau == ["right", "wrong", "ngram"]
    assert found.drafter("right").tau == 4.0 and found.drafter("right").lossless.mismatches == 0
    for place, text in everything_said(tmp_path).items():
        assert "'right', 'wrong', 'ngram' measured a speedup above tau" in text, place
        assert "not valid: above tau" in text, place
        assert "times as fast" not in text, place


def test_arms_that_draft_share_a_rule_and_plain_decoding_has_none() -> None:
    auto = DecodeConfig(temperature=1.0, rule="auto", depth=2)
    decodes = {"baseline": auto.without_draft(), "one": auto, "two": replace(auto, depth=3)}
    require_same_task(decodes)
    assert report_settings(decodes, 4).rule == "block"
    with pytest.raises(UserError, match=r"rule=block.*rule=traversal.*another rule for another"):
        require_same_task({**decodes, "tree": replace(auto, shape="tree", choices=((0,), (1,)))})
    with pytest.raises(UserError, match=r"decodes with temperature=1\.0, 'cold' with"):
        require_same_task({**decodes, "cold": replace(auto, temperature=0.0)})


def test_all_arms_run_in_the_fastest_mode_of_any(arms: list[Arm]) -> None:
    compiled = replace(arms[1], decode=replace(DECODE, compile=True))
    checked = check_arms(BenchConfig(), [arms[0], compiled])
    assert [arm.decode.compile for arm in checked] == [True, True]
    assert report_settings({arm.name: arm.decode for arm in checked}, 4).compile is True
    assert not any(arm.decode.compiles for arm in check_arms(BenchConfig(), arms))


def test_long_measurements_are_compiled_and_go_on_without_where_that_fails(
    target: TargetModel,
    arms: list[Arm],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[bool] = []

    def no_compiler(step: CompiledStep, *given: Any) -> Any:
        tried.append(True)
        raise NotCompiledError("compiling a decoding step failed.")

    monkeypatch.setattr(CompiledStep, "__call__", no_compiler)
    monkeypatch.setattr(worth, "can_compile", lambda *given: True)

    def measured(name: str, decode: DecodeConfig) -> dict[str, Any]:
        own = [replace(arm, decode=decode) for arm in arms]
        measure(BenchConfig(), target, own, prompts(), tmp_path / name, console=QUIET)
        found: dict[str, Any] = json.loads((tmp_path / name / "report.json").read_text())
        return found

    assert measured("short", DECODE)["settings"]["compile"] is False
    assert not tried
    monkeypatch.setattr(worth, "LEAST_STEPS", 10)
    assert measured("long", DECODE)["settings"]["compile"] is False
    assert tried and "not compiled: compiling a decoding step failed" in caplog.text
    with pytest.raises(NotCompiledError):
        measured("asked", replace(DECODE, compile=True))


def test_plain_decoding_is_compiled_exactly_if_the_drafters_are(
    target: TargetModel, arms: list[Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, it would be several times slower, and every speedup that much higher."""
    monkeypatch.setattr(worth, "can_compile", lambda *given: True)

    def compiled(choice: Any) -> set[bool]:
        own = [replace(arm, decode=replace(DECODE, compile=choice)) for arm in arms]
        session = measure_module._prepare(BenchConfig(), target, own, prompts())
        assert len(session.engines) == 1 + len(session.arms)
        return {engine.decode.compiles for engine in session.engines.values()}

    assert compiled("auto") == {False}
    monkeypatch.setattr(worth, "LEAST_STEPS", 10)
    assert compiled("auto") == {True}
    assert compiled(True) == {True} and compiled(False) == {False}


def test_a_drafter_that_changes_the_text_is_reported_as_a_mismatch(
    target: TargetModel, arms: list[Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure_module._answer

    def meddle(engine: Engine, request: Any) -> Any:
        completion, seconds = real(engine, request)
        if engine.drafter is arms[0].drafter:
            completion.tokens[5] = (completion.tokens[5] + 1) % VOCAB
        return completion, seconds

    monkeypatch.setattr(measure_module, "_answer", meddle)
    report = measure(
        BenchConfig(prompts_per_domain=1), target, arms[:2], prompts(), tmp_path, console=QUIET
    ).to_dict()
    assert entry(report, "right")["lossless"]["mismatches"] == 4
    assert entry(report, "wrong")["lossless"]["mismatches"] == 0
    divergence = report["run"]["arms"]["right"]["divergences"][0]
    assert (divergence["place"], divergence["near_tie"]) == (5, False)


def test_what_drafting_ahead_hid_is_reported_for_the_arms_that_did(
    target: TargetModel, arms: list[Arm], tmp_path: Path
) -> None:
    ngram = arms[2]
    ahead = replace(ngram, name="ahead", decode=replace(DECODE, ahead=True))
    measure(CONFIG, target, [ngram, ahead], prompts(), tmp_path, console=QUIET)
    found = read_report(tmp_path).to_dict()
    afterwards, during = entry(found, "ngram"), entry(found, "ahead")
    assert "ahead" not in afterwards and during["tau"] == afterwards["tau"]
    records = [item for item in read_records(tmp_path / FINAL_FILE) if item.arm == "ahead"]
    drafts, kept, hidden = (sum(column) for column in zip(*(r.ahead for r in records), strict=True))
    assert drafts == during["verify_passes"]
    assert during["ahead"] == pytest.approx(
        {"kept": kept / drafts, "hidden_ms": 1000 * hidden / drafts}
    )


def test_quick_tau_counts_like_the_report(target: TargetModel) -> None:
    known = known_answers(target, DECODE)
    requests = to_requests(prompts(), target.tokenizer, DECODE)
    right = quick_tau(target, AlwaysRight(known, VOCAB), requests, DECODE)
    assert (right.tau, right.tar, right.unconditional) == (4.0, 1.0, (1.0,) * 3)
    batched = DecodeConfig(depth=3, max_new_tokens=13, batch_size=4)
    some = quick_tau(target, SometimesRight(known, VOCAB), requests, batched)
    assert 1.0 < some.ci95[0] <= some.tau <= some.ci95[1] < 4.0


def test_arms_that_do_not_compare_are_refused(arms: list[Arm]) -> None:
    config = BenchConfig()
    with pytest.raises(UserError, match="no drafter to measure"):
        check_arms(config, [])
    warm = Arm("warm", arms[0].drafter, DecodeConfig(depth=3, max_new_tokens=13, temperature=1.0))
    with pytest.raises(
        UserError, match=r"'right' decodes with temperature=0\.0, 'warm' with temperature=1\.0"
    ):
        check_arms(config, [arms[0], warm])
    with pytest.raises(UserError, match=r"two arms are called \['right'\]"):
        check_arms(config, [arms[0], arms[0]])
    with pytest.raises(UserError, match="drafts nothing"):
        check_arms(config, [Arm("plain", arms[0].drafter, DecodeConfig(shape="none"))])


def test_prompts_are_split_without_overlap() -> None:
    pool = prompts(3)
    measured, spare = split_prompts(BenchConfig(prompts_per_domain=2, warmup_prompts=5), pool)
    assert len(measured) == 4
    assert {p.id for p in measured} | {p.id for p in spare} == {p.id for p in pool}
    measured, spare = split_prompts(BenchConfig(prompts_per_domain=9), pool)
    assert (len(measured), len(spare)) == (5, 1)  # all were wanted: one gives way
    assert [p.domain for p in split_prompts(BenchConfig(domains=("prose",)), pool)[0]] == [
        "prose"
    ] * 2
    with pytest.raises(UserError, match=r"names \['poems'\], but the prompts are of: code, prose"):
        split_prompts(BenchConfig(domains=("poems",)), pool)
    with pytest.raises(UserError, match="at least two prompts"):
        split_prompts(BenchConfig(), pool[:1])


def test_prompts_that_do_not_fit_the_target(
    target: TargetModel, arms: list[Arm], tmp_path: Path
) -> None:
    long = [Prompt(str(i), "x", tokens=(5,) * 250) for i in range(3)]
    with pytest.raises(UserError, match="no prompt fits"):
        measure(BenchConfig(), target, arms, long, tmp_path, console=QUIET)


def test_bench_settings_are_checked() -> None:
    with pytest.raises(UserError, match=r"bench\.repeats must lie in \[1, "):
        BenchConfig(repeats=0)


class Words(TokenIds):
    """A token per word."""

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[3 + len(word) % 7 for word in text.split()])


def test_prompts_of_several_lengths_are_told_apart_by_the_context_at_their_start(
    tmp_path: Path,
) -> None:
    """Lengthened prompts end in bins of their own tokens, and all bins together are the whole."""
    target = random_target(dtype=torch.float32, max_position_embeddings=1200)
    target.eos_token_ids = ()
    texts = [
        Prompt(f"t{i}", "prose", text=" ".join("the same words".split() * 9)) for i in range(50)
    ]
    target.tokenizer = Words()
    drafter = new_drafter("ngram", NgramConfig(), target.info, target.weights, seed=0)
    config = BenchConfig(
        prompts_per_domain=2, warmup_prompts=1, repeats=1, contexts=(27, 700, 3000)
    )
    measure(config, target, [Arm("ngram", drafter, DECODE)], texts, tmp_path, console=QUIET)
    found = read_report(tmp_path)
    (ngram,) = found.drafters
    assert [(one.label, one.prompts) for one in ngram.contexts] == [
        ("0 to 511", 2),
        ("512 to 1023", 2),
    ]
    for prompt in found.run.prompts["hashes"]:
        assert prompt.split("@")[1] in ("27", "700")  # 3000 is beyond the target's positions
    passes = [one.prompts * 12 / one.tau for one in ngram.contexts]
    assert sum(passes) == pytest.approx(ngram.verify_passes)
