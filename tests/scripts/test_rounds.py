"""Rounds: what each is told, how the loop decides from what was measured, and a whole loop, killed
and left in peace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from heads.api.errors import UserError
from inference.manifest import file_sha256, read_manifest
from inference.measure import metrics
from inference.measure.answers import AnswerLog, Record
from inference.measure.metrics import Gain
from inference.verifications import read_facts
from scripts.cli import main
from scripts.config.schema import Settings, load_settings, read_settings, write_settings
from scripts.config.stage_configs import BudgetConfig
from scripts.config.stages import STAGES
from scripts.run import drafters
from scripts.run.folder import open_folder
from scripts.stages.loop import facts as rounds_facts
from scripts.stages.loop import speed, steps
from scripts.stages.loop.facts import Answered, HelpedGeneration, LoopRecord, RoundRecord, Spent
from scripts.stages.loop.plan import RoundPlan
from scripts.stages.loop.rounds import Rounds, answers_plainly, only_switches
from scripts.stages.loop.steps import Step, perform
from scripts.stages.loop.table import compare, table
from tests.chaos.kill_loop import kill_and_compare, timeless
from tests.scripts.loops import micro_loop
from train.feedback.config import FeedbackConfig


def settings(*overrides: str) -> Settings:
    return load_settings(
        STAGES["loop"],
        ["experiment=embedded_loop", "head=eagle3", "loop.round.overrides=[]", *overrides],
    )


# What a round is told


def test_every_round_answers_a_share_of_its_own_with_the_drafter_before_it() -> None:
    plan = RoundPlan(settings("loop.round.prompts=share"))
    first, second = plan.generation(0, "", False, None), plan.generation(1, "a b/best", True, None)
    loaded = [step.settings for step in (first, second)]
    assert [item.data.share for item in loaded] == [(0, 3), (1, 3)]
    assert [item.sampling.seed for item in loaded] == [1, 2]
    assert [item.generate.drafter for item in loaded] == [None, "a b/best"]
    assert [item.generate.records.enabled for item in loaded] == [False, True]
    assert [item.sampling.shape for item in loaded] == ["none", "chain"]
    # nothing had been fed back before either
    assert [item.generate.round for item in loaded] == [0, 0]
    assert [item.run.directory for item in loaded] == [
        Path(f"outputs/embedded_loop/round-{n}") for n in range(2)
    ]


def test_hard_prompts_are_answered_again_beside_the_share(tmp_path: Path) -> None:
    plan = RoundPlan(settings("loop.round.prompts=share", "data.limit=90"))
    step = plan.generation(2, "d", True, tmp_path / "hard_prompts.jsonl")
    data = step.settings.data
    assert data.path == "" and [source.share for source in data.mixture] == [(2, 3), (0, 1)]
    assert (data.mixture[0].limit, data.mixture[0].column, data.mixture[0].domain_column) == (
        90,
        "messages",
        "domain",
    )
    assert (data.mixture[1].path, data.mixture[1].kind) == (
        str(tmp_path / "hard_prompts.jsonl"),
        "tokens",
    )


def test_branches_are_answered_all_of_them_with_the_drafter_before(tmp_path: Path) -> None:
    plan = RoundPlan(
        settings(
            "loop.round.prompts=share", "data.limit=90", "data.shuffle=true", f"run.root={tmp_path}"
        )
    )
    step = plan.answering_made(2, "branches", "d")
    found = step.settings
    assert (found.data.path, found.data.kind, found.data.mixture) == (
        str(plan.made_prompts(2, "branches")),
        "tokens",
        (),
    )
    assert (found.data.limit, found.data.shuffle, found.data.share) == (None, False, (0, 1))
    assert found.data.deduplicate == "none", "branches of a prompt differ in a token or two"
    assert (found.generate.drafter, found.generate.records.enabled, found.generate.round) == (
        "d",
        True,
        1,
    )
    assert (
        found.run.directory
        == plan.made_prompts(2, "branches").parent
        == plan.folder(2) / "branches"
    )


def test_trainings_are_parts_of_one_schedule_and_only_later_rounds_use_the_drafters_words() -> None:
    plan = RoundPlan(settings("train.on_policy.share=0.5", "schedule.begin=0.1"))
    steps = [
        plan.training_step(n, Path("x"), f"round-{n - 1}/best" if n else "", n > 0)
        for n in range(3)
    ]
    loaded = [step.settings for step in steps]
    parts = [(item.schedule.begin, item.schedule.end) for item in loaded]
    assert [bound for part in parts for bound in part] == pytest.approx(
        [0.1, 0.4, 0.4, 0.7, 0.7, 1.0]
    )
    assert [item.train.refresh.init_from for item in loaded] == ["", "round-0/best", "round-1/best"]
    assert [item.train.on_policy.share for item in loaded] == [0.0, 0.5, 0.5]
    assert len({item.train.seed for item in loaded}) == 3
    whole = RoundPlan(settings("loop.round.one_schedule=false")).training_step(
        1, Path("x"), "", True
    )
    assert whole.settings.schedule.begin == 0.0


def test_a_rounds_own_overrides_win_and_the_last_ones_stay() -> None:
    plan = RoundPlan(
        settings(
            "loop.round.overrides=[[],['sampling.temperature=0.25','train.max_steps=7']]",
            "loop.round.trial_steps=5",
        )
    )
    answers = [plan.generation(n, "", False, None) for n in range(3)]
    assert [step.settings.sampling.temperature for step in answers] == [0.7, 0.25, 0.25]
    training = plan.training_step(2, Path("x"), "", True)
    assert training.settings.train.max_steps == 7
    trial = plan.trial(1, "replay", Path("x"), "start", False)
    loaded = trial.settings
    assert (loaded.train.max_steps, loaded.schedule.end, loaded.run.drafter, loaded.run.name) == (
        5,
        1.0,
        "replay",
        "trials",
    )


def test_a_round_may_learn_from_records_with_settings_of_its_own() -> None:
    own = "[[],['feedback.error_weight=8'],['feedback.token_weights=false','train.on_policy.share=0.5']]"
    rounds = Rounds(settings(f"loop.round.overrides={own}"))
    assert [rounds.plan.feedback(number).error_weight for number in range(4)] == [4, 8, 4, 4]
    assert [rounds.active(number) for number in (1, 2, 3)] == [
        ["token_weights", "anchor_weights"],
        *([["anchor_weights", "on_policy"]] * 2),
    ]
    # the loop's own values are recorded
    assert rounds.asked.feedback == FeedbackConfig(token_weights=True, anchor_weights=True)


def test_a_round_is_judged_on_the_validation_prompts_unless_told_otherwise() -> None:
    found = RoundPlan(settings("bench=gsm8k")).measurement(1, ["some/best"])
    assert Path(
        found.bench.prompts
    ).name == "validation.jsonl" and found.bench.dataset.template in (None, "")
    assert (found.measure.drafters, found.measure.kinds, found.decode.max_new_tokens) == (
        ("some/best",),
        (),
        64,
    )
    assert found.resolved["measure"]["drafters"] == ["some/best"]
    # what a round is judged by does not depend on how busy the machine is
    assert (found.bench.repeats, found.bench.retries) == (1, 0)
    with pytest.raises(
        UserError, match=r"train\.prompts names 2 files, but a round is judged on one"
    ):
        RoundPlan(settings("train.prompts=[a.jsonl,b.jsonl]")).measurement(1, [])


def test_what_the_loop_and_the_rounds_are_measured_on_is_held_out_of_every_round() -> None:
    given = ["data=jsonl", "data.path=p.jsonl", "bench=jsonl", "bench.prompts=m.jsonl"]
    given.append("loop.round.judge=['bench.prompts=j.jsonl']")
    plan = RoundPlan(settings(*given, "loop.round.prompts=share"))
    stages = [plan.generation(number, "", False, None).settings for number in range(2)]
    stages += [plan.answering_made(1, "branches", "").settings, plan.hold_out(plan.generate)]
    for stage in stages:
        assert [one.path for one in stage.data.held_out_prompts] == ["m.jsonl", "j.jsonl"]
    # with neither, the data's own prompts are held out
    own = RoundPlan(settings(*given[:2])).generation(0, "", False, None).settings
    assert own.data.held_out_prompts == ()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "sampling.server=http://host:1",
            "loop.rounds needs answers of our own decoder.*given: server and sample",
        ),
        ("generate.answers=dataset", "given: own and dataset"),
        ("joint=lora", "loop.rounds trains a drafter for a target that stays what it is"),
        ("decode.shape=none", "nothing is drafted"),
        (
            "loop.recipes=[a,b]",
            r"loop.rounds=3 trains one drafter in rounds, but this loop trains \['a', 'b'\]",
        ),
        ("loop.rounds=-1", r"loop.rounds must lie in \[0, "),
        ("loop.round.prompts=some", "loop.round.prompts 'some' is unknown"),
        ("loop.round.trial_steps=-1", r"loop.round.trial_steps must lie in \[0, "),
        (
            "loop.round.overrides=[[],['serve.port=1']]",
            r"loop\.round\.overrides\[1\]: no round reads 'serve\.port=1'\. A round reads the "
            "groups run, target, data, .*, feedback, .*, measure",
        ),
        ("loop.round.overrides=[['loop.rounds=9']]", "no round reads 'loop.rounds=9'"),
        ("loop.round.overrides=[['experiment=families']]", "no round reads 'experiment=families'"),
        ("loop.round.overrides=[['feedback.tokn_weights=true']]", "Did you mean 'token_weights'"),
        ("loop.round.overrides=[[zzz]]", r"loop\.round\.overrides\[0\]: 'zzz' is not a setting"),
        ("loop.round.judge=[bnch.seed=1]", "loop.round.judge: .* Did you mean 'bench'"),
        ("loop.budget.tokens=-5", r"loop.budget.tokens must lie in \[0, "),
    ],
)
def test_what_rounds_cannot_be_made_of_is_refused(override: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        RoundPlan(settings(override))


def test_rounds_of_adapters_are_refused() -> None:
    """A round goes on from the best drafter so far, which an adapter cannot."""
    given = ["init_from=x", "lora_rank=2", "adapter=true"]
    with pytest.raises(UserError, match="an adapter cannot be the base of another one"):
        RoundPlan(settings(*(f"train.refresh.{value}" for value in given)))


def test_a_changed_step_reads_back_as_it_was(tmp_path: Path) -> None:
    plan = RoundPlan(
        settings("loop.round.prompts=share", f"run.root={tmp_path}", 'run.name="it is a, {b}"')
    )
    step = plan.generation(2, "it's a\\b, {c}", True, tmp_path / "hard, 'ones'.jsonl")
    write_settings(step.settings, tmp_path / "generate.yaml")
    found = read_settings(step.stage, tmp_path / "generate.yaml")
    for group in step.stage.groups:
        assert getattr(found, group) == getattr(step.settings, group)
    assert found.resolved == step.settings.resolved and found.choices == step.settings.choices
    assert found.given("data.mixture") and found.command == step.settings.command


def test_a_launched_training_takes_the_prompts_that_its_round_gives_it(
    tmp_path: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the first round holds out of its own data. A launch would import Headstart anew,
    so the launched command runs in this process."""

    def run(command: list[str], check: bool) -> SimpleNamespace:
        assert command[0] == "env" and not check
        return SimpleNamespace(returncode=main(command[2:]))

    monkeypatch.setattr(steps, "subprocess", SimpleNamespace(run=run))
    given = [item for item in micro_loop(tmp_path) if not item.startswith("train.prompts")]
    given += ["data.reserve.validation=6", "data.reserve.bench=0"]
    plan = RoundPlan(load_settings(STAGES["loop"], given))
    answers = plan.generation(0, "", False, None)
    perform("env", answers)
    perform("env", plan.training_step(0, answers.settings.run.directory / "generate", "", False))
    best = read_manifest(plan.training(0), "train")["best"]
    assert best["tau"] >= 1.0


def test_a_rounds_own_values_win_over_the_loops_changes() -> None:
    own = "loop.round.overrides=[['sampling.seed=77','data.share=[1,2]','schedule.end=0.9','train.eval_every=3']]"
    plan = RoundPlan(settings("loop.round.prompts=share", own, "loop.round.trial_steps=5"))
    answers, training = (
        plan.generation(1, "d", True, None),
        plan.training_step(1, Path("x"), "", False),
    )
    assert (answers.settings.sampling.seed, answers.settings.data.share) == (77, (1, 2))
    assert (training.settings.schedule.begin, training.settings.schedule.end) == (
        pytest.approx(1 / 3),
        0.9,
    )
    trial = plan.trial(1, "replay", Path("x"), "start", False).settings
    assert (trial.schedule.end, trial.train.eval_every, trial.train.save_every) == (1.0, 3, 0)


def test_a_training_costs_its_setup_and_every_process(tmp_path: Path) -> None:
    training, generate, nothing = (tmp_path / name for name in ("train", "generate", "nothing"))
    summary = {"wall_seconds": 90.0, "setup_seconds": 10.0, "device_hours": 300 / 3600, "tokens": 7}
    session = {"started": "2026-01-01T00:00:00+00:00", "processes": 2}
    record = {"format": 1, "sessions": [session], "finished": "2026-01-01T00:00:30+00:00"}
    for folder, name, content in (
        (training, "summary.json", summary),
        (generate, "run.json", record),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))
    found = rounds_facts.spent([training, generate, nothing])
    assert found == Spent(130.0, 7, pytest.approx((300 + 60) / 3600))


# How the loop goes on


def test_the_loops_own_process_has_the_threads_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A repeated loop, whose first stages are complete, decodes as one that ran them."""
    threads: list[int] = []

    def first_round(rounds: Rounds, number: int) -> RoundRecord:
        threads.append(torch.get_num_threads())
        raise UserError("no further")

    monkeypatch.setattr(Rounds, "play", first_round)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(UserError, match="no further"):
            Rounds(settings("run.threads=1", f"run.root={tmp_path}")).run()
    finally:
        torch.set_num_threads(before)
    assert threads == [1]


def gained(tau: float, low: float, high: float) -> Gain:
    return Gain(tau, (low, high), tau, (low, high))


def entry(number: int, switches: list[str]) -> RoundRecord:
    return RoundRecord(number, switches=switches, spent=Spent(10.0, 100.0, 0.5))


@pytest.fixture(scope="module")
def nine() -> Settings:
    """Nine rounds. Changed copies do not compose the settings of their stages again."""
    return settings("loop.rounds=9")


@pytest.fixture
def loop(nine: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rounds]:
    """A loop whose rounds were played with the given gains: (switches, gain) per round behind the
    first."""

    def played(later: list[tuple[list[str], Gain]], patience: int = 1, **budget: Any) -> Rounds:
        changed = replace(nine.loop.round, patience=patience)
        asked = replace(nine.loop, round=changed, budget=BudgetConfig(**budget))
        rounds = Rounds(nine.put(loop=asked))
        for number, (switches, gain) in enumerate([([], gained(0, 0, 0)), *later]):
            monkeypatch.setattr(rounds_facts, "compare", lambda *_, gain=gain: gain)
            rounds.done.append(entry(number, switches))
            rounds.judge(number)
        return rounds

    return played


def test_what_brings_no_clear_rise_is_turned_off_and_then_the_loop_ends(
    loop: Callable[..., Rounds],
) -> None:
    rise, stay, fall = gained(0.5, 0.2, 0.8), gained(0.1, -0.1, 0.3), gained(-0.2, -0.4, 0.0)
    one = loop([(["token_weights"], rise), (["token_weights", "anchor_weights"], stay)])
    assert (one.best, one.stale, one.ends()) == (2, 0, "")
    assert set(one.off) == {"token_weights", "anchor_weights"} and one.active(3) == []
    assert (
        one.off["token_weights"]
        == "round 2 with it changed tau by +0.100 [-0.100, +0.300], which is no clear rise"
    )
    two = loop([(["token_weights"], rise), (["token_weights"], stay), ([], fall)])
    assert (two.best, two.stale, two.ends()) == (2, 1, "tau")
    patient = loop([([], fall)], patience=2)
    assert (patient.best, patient.stale, patient.ends()) == (0, 1, "")
    assert loop([([], fall)] * 3, patience=0).ends() == ""
    assert loop([([], rise)] * 8).ends() == "rounds"


def test_made_prompts_are_answered_plainly_only_where_that_is_faster_and_records_are_not_read() -> (
    None
):
    slow, fast = (HelpedGeneration(1, 9, 1.0, 1.0, gain, 2.0, {}, 1) for gain in (0.8, 1.2))
    assert answers_plainly(["variations"], slow)
    assert not answers_plainly(["variations"], fast) and not answers_plainly(["variations"], None)
    for more in ("branches", "token_weights"):
        assert not answers_plainly(["variations", more], slow)


def test_rounds_are_compared_on_the_prompts_that_both_have_measured(tmp_path: Path) -> None:
    """`loop.round.overrides` may change them from round to round."""

    def measured(name: str, prompts: dict[str, int]) -> tuple[Path, str]:
        records = AnswerLog.open(tmp_path / name, "x", ["d"])
        for prompt, accepted in prompts.items():
            records.add(Record("d", prompt, 0, [1], [(accepted, accepted + 1, True)], {}))
        records.finish()
        return tmp_path / name, "d"

    for name in ("old", "new", "other"):
        (tmp_path / name).mkdir()
    old = measured("old", {"a": 0, "b": 0, "c": 3})
    new = measured("new", {"b": 1, "a": 1, "x": 0})
    both = [rounds_facts.totals(*one).only(["b", "a"]) for one in (new, old)]
    assert rounds_facts.compare(new, old) == metrics.gain(*both)
    with pytest.raises(UserError, match="no prompt in common"):
        rounds_facts.compare(measured("other", {"y": 1}), old)


def test_a_round_begins_only_if_the_budget_holds_it(loop: Callable[..., Rounds]) -> None:
    rise = gained(0.5, 0.2, 0.8)
    for key, enough, short in (("tokens", 300, 299), ("seconds", 30, 29), ("gpu_hours", 1.5, 1.4)):
        assert loop([([], rise)], **{key: enough}).ends() == ""
        assert loop([([], rise)], **{key: short}).ends() == f"budget ({key})"


def test_switches_that_are_off_are_off_with_all_that_belongs_to_them() -> None:
    config = FeedbackConfig(
        token_weights=True,
        domain_weights=True,
        traffic={"code": 1.0},
        hard_prompts=0.5,
        error_weight=2.0,
    )
    assert only_switches(config, ["token_weights"]) == FeedbackConfig(
        token_weights=True, error_weight=2.0
    )
    assert only_switches(config, ["domain_weights", "hard_prompts"]) == FeedbackConfig(
        domain_weights=True, traffic={"code": 1.0}, hard_prompts=0.5, error_weight=2.0
    )


# A whole loop


MADE = [
    "loop.round.trial_steps=2",
    "feedback.hard_prompts=0.5",
    "feedback.branches=1",
    "feedback.branch_likely=0.0001",
    "feedback.variations=1",
]
KILLS = 2


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Three rounds on a micro target, left in peace in calm/run and killed in killed/run."""
    folder = tmp_path_factory.mktemp("rounds")
    found = kill_and_compare([*micro_loop(folder), *MADE], folder, kills=KILLS)
    return found, folder / "calm" / "run"


def test_killed_at_random_points_it_ends_the_same(killed: tuple[dict[str, Any], Path]) -> None:
    found, _ = killed
    assert found["kills"] == KILLS, found
    assert found["same_weights"] and found["same_summary"], found


def test_every_round_builds_on_the_best_one_before_it(killed: tuple[dict[str, Any], Path]) -> None:
    run = killed[1]
    content = json.loads((run / "loop.json").read_text())
    assert (content["state"], content["ended_by"], len(content["rounds"])) == (
        "complete",
        "rounds",
        3,
    )
    best, asked = 0, set()
    for number, found in enumerate(content["rounds"]):
        folder = run / f"round-{number}"
        answers = read_manifest(folder / "generate", "generate")
        ids = {
            row
            for shard in answers["shards"]
            for row in pq.read_table(folder / "generate" / shard["file"])["id"].to_pylist()
        }
        fresh = {
            name.removeprefix("train/") for name in ids if not name.startswith("hard_prompts/")
        }
        assert not fresh & asked and len(fresh) == 8
        asked |= fresh
        head = read_manifest(folder / "train" / "medusa", "train")["head"]
        if number == 0:
            assert "refresh" not in head and "records" not in answers
            continue
        start = content["rounds"][best]["training"]["checkpoint"]
        assert (
            found["start"]
            == start
            == head["refresh"]["init_from"]
            == f"run/round-{best}/train/medusa/best"
        )
        assert (
            found["generation"]["lossless"]["mismatches"] == 0
            and found["generation"]["answers"] == 3
        )
        if number == 1:
            assert read_facts(folder / "generate" / "records")["drafter"]["name"] == start
            assert answers["records"]["missing"] == 0
        best = number if found["gain"]["tau"] > 0 else best
    assert content["best"]["round"] == best
    assert len(asked) == 24


def test_the_target_answers_on_from_what_it_refused_and_the_training_reads_that(
    killed: tuple[dict[str, Any], Path],
) -> None:
    run = killed[1]
    content = json.loads((run / "loop.json").read_text())
    earlier: set[str] = set()
    for number, found in enumerate(content["rounds"]):
        folder = run / f"round-{number}"
        if "branches" not in found:
            assert "branches" not in found["switches"]
            continue
        lines = [
            json.loads(line)
            for line in (folder / "branches" / "branches.jsonl").read_text().splitlines()
        ]
        assert 0 < len(lines) <= found["generated"]["answers"] and not earlier & {
            line["id"] for line in lines
        }
        earlier |= {line["id"] for line in lines}
        answers = read_manifest(folder / "feedback", "generate")
        assert (
            answers["counts"]["done"]
            == LoopRecord.read(run).rounds[number].answers
            > found["generated"]["answers"]
        )
        assert found["branches"]["verifications"] > 0
    assert "branches" in content["rounds"][1] and "branches" not in content["rounds"][0]


def test_trials_say_what_pays_and_turn_off_the_rest(killed: tuple[dict[str, Any], Path]) -> None:
    run = killed[1]
    content = json.loads((run / "loop.json").read_text())
    trials = content["rounds"][1]["trials"]
    # hard prompts choose what is answered next: no training alone can try them
    assert set(trials) == {"token_weights"}
    assert ("token_weights" in content["rounds"][1]["switches"]) == (
        trials["token_weights"]["tau"] > 0
    )
    if trials["token_weights"]["tau"] <= 0:
        assert "2 steps with it gave tau" in content["off"]["token_weights"]
    steps = [
        read_manifest(path, "train")["steps"]
        for path in sorted((run / "round-1" / "trials" / "train").iterdir())
    ]
    assert steps == [2, 2]
    tried = sum(
        read_manifest(path, "train")["tokens"]
        for path in (run / "round-1" / "trials" / "train").iterdir()
    )
    assert (
        content["rounds"][1]["spent"]["tokens"]
        == tried + content["rounds"][1]["training"]["tokens"]
    )


def test_the_best_round_is_the_runs_drafter(
    killed: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed[1]
    monkeypatch.chdir(run.parent)
    content = json.loads((run / "loop.json").read_text())
    best = content["rounds"][content["best"]["round"]]["training"]
    assert (
        file_sha256(run / "train" / "medusa" / "best" / "model.safetensors")
        == best["weights_sha256"]
    )
    report = json.loads((run / "measure" / "report.json").read_text())
    assert [item["draft"]["weights_sha256"] for item in report["drafters"]] == [
        best["weights_sha256"]
    ]
    assert not (run / "train" / "medusa" / "checkpoints").exists()
    # measurements look there for prompts that were trained on
    answers = drafters.answers_of(drafters.at(run / "train" / "medusa"))
    assert answers and all((folder / "manifest.json").is_file() for folder in answers)


def test_afterwards_the_rounds_are_compared_with_one_open_loop_training(
    killed: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished loop, repeated with the switch: nothing is played again but the comparison, and
    the best drafter stays."""
    run = killed[1]
    monkeypatch.chdir(run.parent)
    (run / "train" / "medusa" / "best" / "decode.yaml").write_text(
        "what another stage has written\n"
    )
    before = json.loads((run / "loop.json").read_text())
    overrides = [
        *micro_loop(run.parents[1]),
        *MADE,
        "run.root=.",
        "run.name=run",
        "loop.round.open_loop=true",
    ]
    returned = Rounds(load_settings(STAGES["loop"], overrides)).run()
    assert LoopRecord.read(run) == returned
    content = json.loads((run / "loop.json").read_text())
    found = content.pop("open_loop")
    assert (
        content.pop("settings")["round"]["open_loop"]
        and not before.pop("settings")["round"]["open_loop"]
    )
    assert timeless(content) == timeless(before)
    assert (run / "train" / "medusa" / "best" / "decode.yaml").is_file()
    tokens = sum(entry["spent"]["tokens"] for entry in content["rounds"])
    # rows of a few documents differ much
    assert found["training"]["tokens"] == pytest.approx(tokens, rel=0.2)
    # all prompts, answered plainly
    assert found["generated"]["answers"] == 24 and found["generated"]["verifications"] == 0
    manifest = read_manifest(run / "open-loop" / "train" / "medusa", "train")
    assert "refresh" not in manifest["head"]  # it begins as the first round did
    best = content["rounds"][content["best"]["round"]]["measured"]["tau"]
    assert found["gain"]["tau"] == pytest.approx(best - found["measured"]["tau"])
    assert found["measured"]["prompts"] == content["rounds"][0]["measured"]["prompts"]
    shown = "".join(str(cell) for column in table(returned).columns for cell in column.cells)
    assert returned.open_loop is not None
    assert "open loop" in shown and "accepted drafts per pass" in compare(returned.open_loop)


def test_what_a_rounds_process_does_beside_its_stages_is_spent_too(
    killed: tuple[dict[str, Any], Path],
) -> None:
    run = killed[1]
    entry = json.loads((run / "loop.json").read_text())["rounds"][1]
    assert rounds_facts.other_seconds(run / "round-1") > entry["generation"]["plain_seconds"] > 0.0
    assert rounds_facts.other_seconds(run / "round-0") == 0.0
    stages = [
        run / "round-1" / place
        for place in ("generate", "branches/generate", "train/medusa", "measure", "trials/measure")
    ]
    stages += list((run / "round-1" / "trials" / "train").iterdir())
    alone = rounds_facts.spent([stage for stage in stages if stage.is_dir()])
    assert entry["spent"]["seconds"] == pytest.approx(
        alone.seconds + rounds_facts.other_seconds(run / "round-1"), rel=1e-6
    )


def test_another_training_in_the_best_drafters_place_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "r" / "train" / "eagle3"
    place.mkdir(parents=True)
    with pytest.raises(
        UserError,
        match=r"is the training of another loop or of `headstart train`, and the rounds' best",
    ):
        Rounds(settings(f"run.root={tmp_path}", "run.name=r")).run()
    assert place.is_dir()


def test_rounds_of_another_drafter_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "r" / "round-0" / "train" / "medusa"
    place.with_name("distilled.aside-20260101T000000-ab12").mkdir(parents=True)
    Rounds(settings(f"run.root={tmp_path}", "run.name=r")).require_own_place()
    place.mkdir()
    with pytest.raises(UserError, match=r"has the rounds of medusa\. .* Choose another run\.name"):
        Rounds(settings(f"run.root={tmp_path}", "run.name=r")).run()


def test_prompts_made_with_other_settings_are_refused_and_made_again_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [f"run.root={tmp_path}", "run.name=r", "feedback.branches=1"]
    monkeypatch.setattr(Rounds, "perform", lambda self, step: None)
    made: list[int] = []

    def write(answers: object, path: Path, config: FeedbackConfig, before: object) -> None:
        made.append(config.branch_within)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")

    monkeypatch.setattr("scripts.stages.loop.rounds.write_branches", write)
    rounds = Rounds(settings(*given))
    for one in (rounds, rounds, Rounds(settings(*given, "feedback.replay_before=7"))):
        assert one.make(1, "branches", "", False)
    other = Rounds(settings(*given, "feedback.branch_within=8"))
    with pytest.raises(UserError, match=r"made with feedback\.branch_within=32, and 8 is given"):
        other.make(1, "branches", "", False)
    other.remove_made(1)
    assert other.make(1, "branches", "", False)
    assert made == [32, 8]


def test_how_made_prompts_are_answered_is_decided_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger sample of the round's speed does not change how an earlier command answered."""
    drafters: list[str | None] = []
    monkeypatch.setattr(
        Rounds, "perform", lambda self, step: drafters.append(step.settings.generate.drafter)
    )
    rounds = Rounds(settings(f"run.root={tmp_path}", "run.name=r", "feedback.branches=1"))
    monkeypatch.setattr(
        "scripts.stages.loop.rounds.write_branches",
        lambda answers, path, config, before: write(path, "{}"),
    )
    for plain in (True, False):
        assert rounds.make(1, "branches", "d", plain)
    rounds.remove_made(1)
    for plain in (False, True):
        assert rounds.make(1, "branches", "d", plain)
    assert drafters == [None, None, "d", "d"]


def test_another_sample_of_a_rounds_speed_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = HelpedGeneration(8, 9, 1.0, 1.0, 1.0, 2.0, {}, 1)
    manifest = write(tmp_path / "generate" / "manifest.json", "{}")
    stored = {"generation": file_sha256(manifest), **asdict(found)}
    write(tmp_path / "speed.json", json.dumps(stored))
    monkeypatch.setattr(speed, "read_answers", lambda folder: {"shards": [{"rows": 8}]})

    def load(target: object) -> None:
        raise UserError("measured anew")

    monkeypatch.setattr(speed.TargetModel, "load", load)
    stage: Any = SimpleNamespace(target=None)
    for count in (8, 16):  # there are no more than 8
        assert speed.measure_generation(stage, tmp_path, count) == found
    with pytest.raises(UserError, match="measured anew"):
        speed.measure_generation(stage, tmp_path, 6)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_a_training_reads_only_answers_that_its_round_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of switches that are off lie there after a loop with other switches."""
    rounds = Rounds(settings(f"run.root={tmp_path}", "run.name=r", "loop.round.memory=0"))
    run = tmp_path / "r"
    for place in ("round-0", "round-1", "round-1/branches", "round-1/variations", "round-2"):
        write(run / place / "generate" / "manifest.json", "{}")
    read: list[list[Path]] = []
    monkeypatch.setattr(
        "scripts.stages.loop.rounds.build", lambda records, answers, *_, **__: read.append(answers)
    )
    some = Answered(1, 1, 1)
    rounds.done = [RoundRecord(0, generated=some), RoundRecord(1, generated=some, branches=some)]
    entry = RoundRecord(2, generated=some)
    rounds.feedback(entry, ["token_weights"], run / "out", run / "round-2" / "train" / "eagle3")
    names = [str(path.relative_to(run).parent) for path in read[0]]
    assert names == ["round-2", "round-1", "round-1/branches", "round-0"]


def test_starting_again_removes_what_a_round_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "r"
    for switch in ("branches", "variations"):
        for name in (f"{switch}.jsonl", "made.json", "generate/manifest.json"):
            write(run / "round-0" / switch / name, '{"stage": "generate"}')

    def stop(rounds: Rounds, step: object) -> None:
        raise UserError("no further")

    monkeypatch.setattr(Rounds, "perform", stop)
    for more, kept in (("run.overwrite=false", 6), ("run.overwrite=true", 0)):
        with pytest.raises(UserError, match="no further"):
            Rounds(settings(f"run.root={tmp_path}", "run.name=r", more)).play(0)
        assert sum(path.is_file() for path in (run / "round-0").rglob("*")) == kept


def test_a_launch_that_is_started_again_keeps_what_its_round_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run.overwrite=true` deletes once in a launch."""
    given = settings(f"run.root={tmp_path}", "run.name=r", "run.overwrite=true")
    folder = tmp_path / "r" / "round-0"
    made = write(folder / "variations" / "variations.jsonl", "{}")

    def start(launch: str, restarts: str) -> bool:
        """Whether the prompts made before are there after a start that generates and ends."""
        monkeypatch.setenv("SLURM_JOB_ID", launch)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        with pytest.raises(UserError, match="ended"):
            Rounds(given).play(0)
        return made.is_file()

    def generate(rounds: Rounds, step: Step) -> None:
        open_folder(step.settings, folder / "generate").released()
        raise UserError("ended")

    monkeypatch.setattr(Rounds, "perform", generate)
    assert not start("first", "0")
    write(made, "{}")
    assert start("first", "1")
    assert not start("second", "1")  # its first start ended before it came here


def test_a_finished_loop_keeps_its_record_if_a_repeat_is_refused(
    killed: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*micro_loop(killed[1].parents[1]), *MADE, "run.root=.", "run.name=run"]
    run = Path(shutil.copytree(killed[1], tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    kept = [run / "loop.json", run / "round-1" / "feedback" / "manifest.json"]
    before = [path.read_bytes() for path in kept]

    def refused(problem: str, *more: str) -> None:
        with pytest.raises(UserError, match=problem):
            Rounds(load_settings(STAGES["loop"], [*given, *more])).run()
        assert [path.read_bytes() for path in kept] == before[-len(kept) :]

    refused(
        r"3 rounds, .*: feedback\.branch_likely was 0\.0001, is 0\.5\. Choose",
        "feedback.branch_likely=0.5",
    )
    refused(r"feedback\.branches was 1, is 0", "feedback.branches=0")
    refused(r"loop\.round\.memory was 1, is 2", "loop.round.memory=2")
    own = "loop.round.overrides=[[],['feedback.error_weight=8']]"
    refused(r"loop\.round\.overrides\[1\] was \(\), is \('feedback\.error_weight=8',\)", own)
    # what only a stage of a later round refuses
    refused("optim.lr was 0.02, is 0.5", "loop.round.overrides=[[],[],['optim.lr=0.5']]")
    # with a damaged record, what trainings have read stays too
    kept.pop(0).write_text("{")
    refused(
        r"has been trained on .*feedback\.error_weight was 4\.0, is 8\.0", "feedback.error_weight=8"
    )
