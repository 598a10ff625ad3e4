"""What Hydra's manual promises: --cfg, --info, --config-dir, ~group, hydra.* settings, sweeps with
launchers and sweepers, and a ranking at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from heads.api.errors import UserError
from scripts.cli import main
from scripts.config.compose import CONF, parse
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run import sweep
from scripts.run.ranking import JobRecord, print_ranking, result_of
from scripts.run.sweep import expand, name_job
from tests.inference.example_report import ENTRY, example_report, merged
from tests.scripts.loops import micro_loop, read_by
from train.stopping import Stopped


def test_cfg_prints_the_composition_as_hydra_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "head=eagle3", "optim.lr=0.5", "optim.eps=1e-6", "--cfg", "job"]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert job["head"]["kind"] == "eagle3"
    assert (job["optim"]["lr"], job["optim"]["eps"]) == (0.5, 1e-6)  # eps is in no YAML file
    assert job["data"]["held_out"] == "${train.prompts}"
    assert "hydra" not in job
    assert main(["train", "-c", "job", "-p", "data", "--resolve"]) == 0
    data = yaml.safe_load(capsys.readouterr().out)
    assert data["held_out"][0].endswith("validation.jsonl")
    assert main(["train", "--cfg", "hydra"]) == 0
    assert set(yaml.safe_load(capsys.readouterr().out)) == {"hydra"}
    assert main(["train", "--cfg", "all"]) == 0
    assert {"hydra", "optim"} <= set(yaml.safe_load(capsys.readouterr().out))
    assert main(["train", "optim.lrr=1", "--cfg", "job"]) == 0  # as in Hydra: composed, not checked


def test_deleting_a_group_or_a_key_leaves_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "~optim", "~schedule.warmup", "--show"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert main(["train", "--show"]) == 0
    usual = yaml.safe_load(capsys.readouterr().out)
    assert set(found["optim"]) == set(usual["optim"])
    assert main(["train", "~head", "--show"]) == 2
    assert "head.kind is missing" in capsys.readouterr().err


def test_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_CONF", "")
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("lr: 0.125\n")
    given = ["train", "--config-dir", str(tmp_path)]
    (tmp_path / "more" / "schedule").mkdir(parents=True)
    (tmp_path / "more" / "schedule" / "own.yaml").write_text("kind: wsd\nwarmup: 0.5\n")
    several = [*given, "--config-dir", str(tmp_path / "more")]
    assert main([*several, "optim=mine", "schedule=own", "--show=changed"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["optim"], found["schedule"]["warmup"]) == ({"lr": 0.125}, 0.5)
    monkeypatch.setenv("HEADSTART_CONF", "")
    assert main([*given, "optim=mine", "--show=changed"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["optim"] == {"lr": 0.125}
    assert main([*given, "--info", "searchpath"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    monkeypatch.setenv("HEADSTART_CONF", "")
    path = f"hydra.searchpath=[file://{tmp_path}]"
    assert main(["train", path, "optim=mine", "--show=changed"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["optim"] == {"lr": 0.125}
    monkeypatch.setenv("HEADSTART_CONF", "")
    assert main(["train", "optim=mine", "--show"]) == 2


def test_a_file_of_ones_own_that_would_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "optim").mkdir()
    own, usual = tmp_path / "optim" / "adamw.yaml", CONF / "optim" / "adamw.yaml"
    monkeypatch.setenv("HEADSTART_CONF", str(tmp_path))
    own.write_bytes(usual.read_bytes())
    load_settings(STAGES["train"], [])
    own.write_text("lr: 0.125\n")
    for given in ([], ["optim=adamw"]):
        with pytest.raises(UserError, match=r"optim=adamw: several files have that name, .*Rename"):
            load_settings(STAGES["train"], given)
    load_settings(STAGES["train"], ["optim=muon"])


def test_every_combination_is_a_job_with_a_name_of_its_own() -> None:
    train = STAGES["train"]
    jobs = expand(train, parse(["head=medusa,eagle3", "optim.lr=1e-3,0.5"]))
    assert [job[-1] for job in jobs] == [
        "run.drafter='medusa-lr=0.001'",
        "run.drafter='medusa-lr=0.5'",
        "run.drafter='eagle3-lr=0.001'",
        "run.drafter='eagle3-lr=0.5'",
    ]
    heads = expand(train, parse(["head=glob(eagle*)"]))
    assert heads == [["head=eagle"], ["head=eagle3"]]  # the head names the drafter's folder
    (job, _), *_ = [name_job(train, ["optim.lr=1", "run.drafter=x"], ["run.drafter"])]
    assert job == ["optim.lr=1", "run.drafter=x"]
    measured = expand(STAGES["measure"], parse(["decode.depth=2,4"]))
    assert [job[-1] for job in measured] == ["measure.name='depth=2'", "measure.name='depth=4'"]
    # a loop whose recipes name their drafters is told apart by its run
    loops = expand(STAGES["loop"], parse(["experiment=demo", "data.limit=8,16"]))
    assert [job[-1] for job in loops] == ["run.name='demo-limit=8'", "run.name='demo-limit=16'"]
    exported = expand(STAGES["export"], parse(["export.engine=vllm,sglang"]))
    assert exported == [["export.engine=vllm"], ["export.engine=sglang"]]  # of the run's drafter
    tuned = expand(STAGES["tune"], parse(["tune.drafter=medusa,eagle3"]))
    assert tuned == [["tune.drafter=medusa"], ["tune.drafter=eagle3"]]
    for more in ([], ["tune.drafter=medusa,eagle3"]):
        with pytest.raises(
            UserError, match=r"over tune\.depths would write every job of a drafter"
        ):
            expand(STAGES["tune"], parse([*more, "tune.depths=[3],[5]"]))
    drawn = name_job(train, ["++optim.lr=0.0012520653814999472"], [])[0]
    assert drawn == ["optim.lr=0.0012520653814999472", "run.drafter='lr=0.00125207'"]


def last_of(stage: str, *given: str) -> list[str]:
    """The last override of every job of a sweep."""
    return [job[-1] for job in expand(STAGES[stage], parse(given))]


def test_jobs_whose_stage_has_one_folder_per_run_get_runs_of_their_own() -> None:
    assert last_of("generate", "run.name=x", "data.limit=2,3") == [
        "run.name='x-limit=2'",
        "run.name='x-limit=3'",
    ]
    traffic = last_of("traffic", "traffic.rows=4,8", "traffic.drafters=[a/b]")
    assert traffic == ["run.name='default-rows=4'", "run.name='default-rows=8'"]
    assert last_of("traffic", "run.name=a,b") == ["run.name=a", "run.name=b"]
    refreshed = last_of("refresh", "run.name=x", "refresh.drafter=a/b", "optim.lr=0.1,0.2")
    assert refreshed == ["run.name='x-lr=0.1'", "run.name='x-lr=0.2'"]
    for stage, swept in (("traffic", "traffic.rows=4,8"), ("feedback", "feedback.replay=0,1")):
        with pytest.raises(UserError, match=rf"a sweep of `{stage}` over .* finds no input\. Name"):
            expand(STAGES[stage], parse([swept]))
    with pytest.raises(UserError, match=r"no drafter 'm'\. Give its folder"):
        expand(STAGES["refresh"], parse(["refresh.drafter=m", "optim.lr=0.1,0.2"]))
    # the answers of a loop are those of all its run's drafters
    assert last_of("loop", "data.limit=2,3")[0] == "run.name='default-limit=2'"
    assert last_of("loop", "optim.lr=0.1,0.2")[0] == "run.drafter='lr=0.1'"


def test_recipes_and_the_values_that_a_sweeper_adds_are_in_the_names() -> None:
    swept = "experiment=embedded_eagle3,embedded_loop"
    assert last_of("train", swept)[0] == "run.drafter='experiment=embedded_eagle3'"
    # recipes with runs of their own are apart already
    assert last_of("loop", "experiment=demo,families") == ["experiment=demo", "experiment=families"]
    job, keys = name_job(STAGES["train"], ["++head=medusa", "++optim.lr=0.5"], ["head"])
    assert job[-1] == "run.drafter='medusa-lr=0.5'" and keys == {"optim.lr": "0.5"}


def test_jobs_that_would_write_to_one_folder_are_refused_before_the_first(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (["train.refresh.init_from=a/b,a_b"], ["run.drafter=x", "optim.lr=1,2"]):
        assert main(["plan", "-m", *given]) == 2
        assert "two jobs of this sweep would write to 'outputs" in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("leaving", "status"), [(Stopped("SIGTERM", 3), 2), (Stopped("SIGINT", 3), 130)]
)
def test_a_signal_ends_a_sweep_and_is_recorded(
    in_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    leaving: Stopped,
    status: int,
) -> None:
    def stop(settings: object) -> int:
        raise leaving

    monkeypatch.setattr(sweep, "run_one", stop)
    assert main(["plan", "head=medusa", "plan.count=1,2", "-m"]) == status
    (path,) = Path("outputs/default/sweeps").glob("*/*/job.json")  # the second job has not begun
    record = json.loads(path.read_text())
    assert (record["status"], record["interrupted"]) == (status, True)
    shown = capsys.readouterr()
    assert "interrupted" in shown.out
    assert "headstart: job 1: it was stopped before it was complete." in shown.err


def test_a_loops_job_has_the_value_of_its_own_drafter(in_folder: Path) -> None:
    folder = Path("outputs/x/measure")
    folder.mkdir(parents=True)
    names = {"medusa": 1.5, "eagle3": 3.5, "row": 2.5}
    entries = [merged(ENTRY, {"draft": {"name": name}, "tau": tau}) for name, tau in names.items()]
    (folder / "report.json").write_text(json.dumps(example_report(*entries)))
    for given, value in (
        (["head=medusa"], 1.5),
        (["head=eagle3"], 3.5),
        (["loop.sweep.row.rates=[0.1]", "loop.sweep.row.head=medusa"], 2.5),
        (["head=medusa", "run.drafter=other"], None),
    ):
        settings = load_settings(STAGES["loop"], ["run.name=x", *given])
        assert result_of(settings)[0] == value


def test_a_value_stands_below_its_own_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a table of jobs that sweep different keys."""
    swept = ({"optim.lr": "0.1", "head.depths": "4"}, {"head.depths": "8"})
    print_ranking(STAGES["plan"], [JobRecord(n, "plan", [], one) for n, one in enumerate(swept)])
    lines = capsys.readouterr().out.splitlines()
    place = next(line.index("head.depths") for line in lines if "head.depths" in line)
    assert [line[place] for line in lines if "done" in line] == ["4", "8"]


def test_names_of_swept_drafters_can_be_given_as_they_are() -> None:
    given = parse(
        [
            "run.drafter=medusa-lr=0.001",
            "measure.drafters=[medusa-lr=0.001, outputs/x/train/b=1/best,plain]",
            "measure.drafts={ngram: {depth: 8}}",
            "loop.measures={sampled: ['decode.temperature=1']}",
        ]
    )
    assert [item.value() for item in given] == [
        "medusa-lr=0.001",
        ["medusa-lr=0.001", "outputs/x/train/b=1/best", "plain"],
        {"ngram": {"depth": 8}},
        {"sampled": ["decode.temperature=1"]},
    ]


def test_hydras_own_settings_give_a_run_hydras_folder(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", *plan_of(in_folder), "hydra.run.dir=here"]
    assert main(given) == 0
    assert "memory per process" in capsys.readouterr().out
    overrides = yaml.safe_load(Path("here/.hydra/overrides.yaml").read_text())
    assert "++plan.count=2" in overrides
    record = json.loads(Path("here/job.json").read_text())
    assert (record["stage"], record["status"]) == ("plan", 0)


def plan_of(folder: Path) -> list[str]:
    """Overrides of a plan that takes a second."""
    micro = read_by("plan", micro_loop(folder))
    return [*micro, "plan.gpu=h100", "plan.count=2", "train.global_batch=4"]


def test_a_sweep_says_what_failed_and_goes_on(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 3 is no multiple of the processes times the micro-batch
    assert main(["plan", *plan_of(in_folder), "train.global_batch=3,4", "-m"]) == 2
    shown = capsys.readouterr()
    assert "[1/2] headstart plan" in shown.out
    assert "[2/2] headstart plan" in shown.out
    assert "2 jobs of plan" in shown.out
    assert shown.out.count("failed (2)") == 1
    assert "headstart: job 1: train.global_batch=3 cannot be dealt" in shown.err
    (folder,) = Path("outputs/default/sweeps").iterdir()
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*/job.json"))]
    assert [record["swept"] for record in records] == [
        {"train.global_batch": "3"},
        {"train.global_batch": "4"},
    ]
    assert (folder / "1" / ".hydra" / "config.yaml").is_file()
    assert json.loads(Path("outputs/default/plan/medusa-global_batch=4.json").read_text())["fits"]


def test_what_is_asked_of_slurm(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of a submission are shown; without a cluster there is one message."""
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"]
    assert main(["train", *slurm, "hydra.launcher.gpus_per_node=8", "--cfg", "hydra"]) == 0
    launcher = yaml.safe_load(capsys.readouterr().out)["hydra"]["launcher"]
    assert launcher["_target_"].endswith("SlurmLauncher")
    assert (launcher["partition"], launcher["gpus_per_node"]) == ("gpu", 8)
    monkeypatch.setenv("PATH", str(in_folder))
    assert main(["plan", *plan_of(in_folder), *slurm, "plan.count=1,2", "-m"]) == 2
    assert "whose 'srun' is not on this machine" in capsys.readouterr().err


def test_what_a_recipe_sweeps(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """hydra.sweeper.params in YAML; a value of the command line wins."""
    monkeypatch.setenv("HEADSTART_CONF", str(in_folder / "mine"))
    recipe = in_folder / "mine" / "experiment" / "counts.yaml"
    recipe.parent.mkdir(parents=True)
    params = "{plan.count: '1,2', plan.per_machine: '4,8'}"
    recipe.write_text(f"# @package _global_\nhydra:\n  sweeper:\n    params: {params}\n")
    given = [item for item in plan_of(in_folder) if not item.startswith("plan.count")]
    assert main(["plan", "experiment=counts", *given, "plan.per_machine=8", "-m"]) == 0
    assert "2 jobs of plan" in capsys.readouterr().out


@pytest.mark.slow
def test_trainings_are_ranked_by_tau_here_and_in_other_processes(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    given = micro_loop(in_folder)
    assert main(["generate", *read_by("generate", given)]) == 0
    capsys.readouterr()
    train = [item for item in read_by("train", given) if not item.startswith("optim.lr")]
    swept = "optim.lr=1e-5,2e-2"
    assert main(["train", "-m", *train, swept]) == 0
    rows = capsys.readouterr().out.split("2 jobs of train, by tau")[1].splitlines()
    taus = [float(line.split()[2]) for line in rows if line.strip()[:1] in "12" and line.strip()]
    assert taus == sorted(taus, reverse=True)
    best = next(line for line in rows if line.startswith("best: job"))
    assert Path(best.split("; ")[1]).is_dir()
    # the same jobs are complete; other processes find that
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert main(["train", "-m", *train, swept, *parallel]) == 0
    assert "2 jobs of train, by tau" in capsys.readouterr().out
    assert len(list(Path("outputs/default/train").iterdir())) == 2


@pytest.mark.slow
def test_optuna_searches_on_tau_and_goes_on(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optuna = pytest.importorskip("optuna")
    given = micro_loop(in_folder)
    assert main(["generate", *read_by("generate", given)]) == 0
    train = [item for item in read_by("train", given) if not item.startswith("optim.lr")]
    search = ["hydra/sweeper=optuna", "hydra.sweeper.storage=sqlite:///found.db"]
    search += ["hydra.sweeper.study_name=lr", "optim.lr=tag(log, interval(1e-4, 1e-2))"]
    assert main(["train", "-m", *train, *search, "hydra.sweeper.n_trials=2"]) == 0
    assert "2 jobs of train, by tau" in capsys.readouterr().out
    study = optuna.load_study(study_name="lr", storage="sqlite:///found.db")
    assert study.direction.name == "MAXIMIZE"
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    manifest = json.loads(next(Path("outputs/default/train").glob("*/manifest.json")).read_text())
    assert manifest["best"]["tau"] in [trial.value for trial in study.trials]
    assert main(["train", "-m", *train, *search, "hydra.sweeper.n_trials=3"]) == 0
    assert "1 jobs of train, by tau" in capsys.readouterr().out  # the study had two already
    (results, _) = sorted(Path("outputs/default/sweeps").glob("*/optimization_results.yaml"))
    assert set(yaml.safe_load(results.read_text())) == {"name", "best_params", "best_value"}
    # a job that fails ends the search with its own error
    broken = ["train.prompts=[nowhere.jsonl]", "hydra.sweeper.study_name=broken"]
    capsys.readouterr()
    assert main(["train", "-m", *train, *search, "hydra.sweeper.n_trials=1", *broken]) == 2
    shown = capsys.readouterr().err
    assert "job 1: " in shown and "train.prompts was" in shown  # the rate that was drawn first
