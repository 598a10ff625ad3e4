"""`headstart <stage> -m ...`: a stage once per combination of listed values, through Hydra's
sweepers and launchers, and a table that ranks the jobs.

Hydra determines the jobs (`hydra/sweeper=basic`, `optuna`, or an installed plug-in) and where they
run (`hydra/launcher=basic`, `joblib`, `submitit_local`, `submitit_slurm`). Every job composes and
runs its stage as a separate command would, and writes `job.json` into its folder below
`hydra.sweep.dir` (<run>/sweeps/<stage>-<time>/<number>/), beside Hydra's `.hydra/`. It returns the
value to maximise to the sweeper (`scripts.run.ranking.result_of`).
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from heads.api.errors import UserError, suggest
from inference.hub.fetch import is_published_name
from scripts.config.compose import force, hydra_of, parse, require_key, root_of
from scripts.config.schema import Settings, load_settings
from scripts.config.stage_configs import RunConfig
from scripts.config.stages import RECIPE_GROUPS, STAGES, Stage
from scripts.run import optuna_sweeper
from scripts.run.folder import require_answers, stage_folder
from scripts.run.process import is_main_process
from scripts.run.ranking import JobRecord, print_ranking, read_records, result_of
from scripts.run.runner import StoppedError, run_one

PLUGINS = {
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
    },
    "hydra/sweeper": {"optuna": "optuna"},
}
"""Group -> option -> the package that it needs; the extra `sweep` includes all of them."""
FOLDER = "${run.root}/${run.name}/%s/%s-${now:%%Y-%%m-%%d_%%H-%%M-%%S}"
QUIET = ("hydra/hydra_logging=none", "hydra/job_logging=none")
"""Default settings of a sweep: log lines of libraries stay out of the output."""
DRAWN = re.compile(r"-?\d*\.\d{7,}(e-?\d+)?")
NAMED = ("measure", "audit", "watch")
"""Stages whose jobs are distinguished by <stage>.name."""
TRAINED = ("train", "plan", "import", "loop")
"""Stages whose jobs are distinguished by run.drafter."""
OWN_RUN = {
    "generate": (),
    "refresh": (),
    "feedback": ("feedback.answers", "feedback.records"),
    "traffic": ("traffic.drafters",),
}
"""Stages with one folder per run, whose jobs are distinguished by run.name -> the settings of which
one names their input, which they would look for in the job's own run."""
ANSWERING = (*(group for group in STAGES["generate"].groups if group != "run"), "run.seed", "debug")
"""Settings that change a loop's answers, which all drafters of a run share."""
STOPPED = "it was stopped before it was complete. Repeating the command continues there."


def run(stage: Stage, given: Sequence[Override], multirun: bool) -> int:
    """Run the jobs and print their ranking, or run once in Hydra's way if settings of Hydra are
    given (`hydra.run.dir=...`). Returns the worst exit status. Raises `UserError`, before the first
    job starts, for settings that a job cannot run with."""
    optuna_sweeper.register()
    with hydra_of(stage) as hydra:
        parsed = parse(given, hydra.config_loader)
        require_plugins(hydra, parsed)
        own = [item for item in parsed if not item.is_hydra_override()]
        hydras = {i.key_or_group: str(i.input_line) for i in parsed if i.is_hydra_override()}
        if not multirun and hydras.get("hydra.mode", "").upper() != "HYDRA.MODE=MULTIRUN":
            return run_single(hydra, stage, own, hydras)
        with sweep_folder(stage) as folder:
            defaults = {text.split("=")[0]: text for text in (*QUIET, f"hydra.sweep.dir={folder}")}
            return run_multiple(hydra, stage, own, {**defaults, **hydras})


def run_single(hydra: Hydra, stage: Stage, own: list[Override], hydras: Mapping[str, str]) -> int:
    """One run with Hydra's folder, logging and working directory."""
    for key in hydras:
        if re.match(r"hydra[./](launcher|sweeper|sweep)\b", key):
            raise UserError(f"{key} says how several jobs run: add -m and list values.")
    load_settings(stage, own)  # its errors are clearer than Hydra's
    folder = f"hydra.run.dir={FOLDER % ('hydra', stage.name)}"
    texts = [*map(force, own), *({"hydra.run.dir": folder} | dict(hydras)).values()]
    fixed = tuple(item.key_or_group for item in own)
    done = hydra.run(root_of(stage), partial(run_job, stage.name, fixed, 1), texts)
    assert done.hydra_cfg is not None
    folder = str(OmegaConf.select(done.hydra_cfg, "hydra.runtime.output_dir"))
    return worst(read_records(Path(folder)))


def run_multiple(hydra: Hydra, stage: Stage, own: list[Override], hydras: dict[str, str]) -> int:
    """Pass the jobs to Hydra's sweeper and launcher, and rank their results."""
    texts = [*map(force, own), *hydras.values()]
    composed = hydra.compose_config(root_of(stage), texts, RunMode.MULTIRUN)
    sweeper = composed.hydra.runtime.choices["hydra/sweeper"]
    if sweeper in ("basic", "optuna"):
        # settings of YAML files become part of the command line, whose values win
        keys = {item.key_or_group for item in own}
        params = OmegaConf.select(composed, "hydra.sweeper.params") or {}
        more = parse([f"{key}={value}" for key, value in params.items()], hydra.config_loader)
        own = [*(item for item in more if item.key_or_group not in keys), *own]
        hydras["hydra.sweeper.params"] = "hydra.sweeper.params=null"
    for item in own:
        require_key(stage, item)
    total = 0
    if sweeper == "basic":
        # all jobs are checked before the first one starts
        jobs = [load_settings(stage, job) for job in combine(stage, own)]
        require_own_places(jobs)
        for settings in jobs if stage.name == "train" else ():
            require_answers(settings)
        total = len(jobs)
    if sweeper == "optuna":
        hydras = {**optuna_sweeper.defaults(composed), **hydras}
        total = int(composed.hydra.sweeper.n_trials)
    folder = Path(str(composed.hydra.sweep.dir))
    hydras["hydra.sweep.dir"] = f"hydra.sweep.dir='{folder}'"  # this fixes the folder's time
    fixed = fixed_keys(own)
    texts = [*map(force, own), *hydras.values()]
    try:
        task = partial(run_job, stage.name, fixed, total)
        if sweeper == "optuna":
            final = hydra.compose_config(root_of(stage), texts, RunMode.MULTIRUN)
            optuna_sweeper.search(hydra, final, task)
        else:
            hydra.multirun(root_of(stage), task, texts, with_log_configuration=False)
    except (UserError, SystemExit):
        # the search ends with a failed job, and a sweep with an interrupted one; the record has the
        # error itself
        if not any(record.error for record in read_records(folder)):
            raise
    finally:
        records = read_records(folder)
        if records:
            print_ranking(stage, records)
    return worst(records)


def worst(records: Sequence[JobRecord]) -> int:
    """The highest exit status of the jobs, whose errors are printed."""
    for record in records:
        if record.error:
            job = f"job {record.number}: " if record.swept else ""
            print(f"headstart: {job}{record.error}", file=sys.stderr)
    return max((record.status for record in records), default=0)


def run_job(stage_name: str, fixed: tuple[str, ...], total: int, config: Any) -> float | None:
    """One job, wherever the launcher runs it; returns its value. fixed: the keys that are the same
    in all jobs; a sweeper may add others than the listed ones. config: composed by Hydra; the stage
    composes again with its own checks. A signal raises `SystemExit`, which ends the sweep."""
    whole: Any = HydraConfig.instance().cfg
    assert whole is not None, "Hydra runs the jobs"
    hydra, stage = whole.hydra, STAGES[stage_name]
    job, keys = name_job(stage, [str(item) for item in hydra.overrides.task], fixed)
    number = int(OmegaConf.select(whole, "hydra.job.num", default=0) or 0) + 1
    record = JobRecord(number, stage.name, job, keys)
    if keys:
        print(heading(stage, job, number, total), flush=True)
    try:
        with as_command(stage, job):
            settings = load_settings(stage, job)
            record.status = run_one(settings)
        record.value, record.reached = result_of(settings)
    except StoppedError as error:
        record.status, record.error, record.interrupted = 2, str(error), True
        raise SystemExit(record.status) from error
    except (SystemExit, KeyboardInterrupt) as signal:
        # after a scheduler's signal a stage alone ends with 0, like a complete one
        record.status = getattr(signal, "code", 130) or 2
        record.error, record.interrupted = STOPPED, True
        raise
    except UserError as error:  # reported after the ranking; the other jobs still run
        record.status, record.error = 2, str(error)
    except Exception as error:
        record.status, record.error = 1, f"{type(error).__name__}: {error}"
        raise
    finally:
        if is_main_process():
            record.write(Path(str(hydra.runtime.output_dir)))
    return record.value


@contextmanager
def as_command(stage: Stage, job: Sequence[str]) -> Iterator[None]:
    """In this context, this process's arguments are the job's, for run.json."""
    before = sys.argv
    sys.argv = [before[0], stage.name, *job]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def sweep_folder(stage: Stage) -> Iterator[str]:
    """Yield the folder for Hydra's files about the jobs, inside the run's folder. The other
    processes of a launch, whose clocks differ from the main one's, get a temporary folder."""
    if is_main_process():
        yield FOLDER % ("sweeps", stage.name)
        return
    with tempfile.TemporaryDirectory(prefix="headstart-sweep-") as folder:
        yield folder


def heading(stage: Stage, job: Sequence[str], number: int, total: int) -> str:
    """The line before a job. total: 0 if unknown."""
    return f"[{number}/{total or '?'}] headstart {stage.name} {' '.join(job)}"


def expand(stage: Stage, given: Sequence[Override]) -> list[list[str]]:
    """The overrides of every job of a sweep over listed values. Raises `UserError` for a sweeper
    that chooses values by the results of earlier jobs."""
    sweepers = [str(item.value()) for item in given if item.key_or_group == "hydra/sweeper"]
    if sweepers and sweepers[-1] != "basic":
        raise UserError(
            f"hydra/sweeper={sweepers[-1]} chooses the values of its jobs while they run, so they "
            "cannot be shown before. Give single values without -m to see the settings of one job."
        )
    with hydra_of(stage) as hydra:
        own = [item for item in given if not item.is_hydra_override()]
        return combine(stage, parse(own, hydra.config_loader))


def fixed_keys(given: Sequence[Override]) -> tuple[str, ...]:
    """The keys that have one value in all jobs."""
    swept = {item.key_or_group for item in given if item.is_sweep_override()}
    return tuple(item.key_or_group for item in given if item.key_or_group not in swept)


def combine(stage: Stage, own: Sequence[Override]) -> list[list[str]]:
    """Every combination of the values listed in the overrides, in order, each with a name."""
    fixed = fixed_keys(own)
    if not any(item.is_sweep_override() for item in own):
        raise UserError(
            "-m runs a stage for several values, but none are listed. Write for instance "
            "head=medusa,eagle3."
        )
    choices = []
    for item in own:
        if item.is_sweep_override() and not item.is_discrete_sweep():
            raise UserError(
                f"'{item.input_line}' is an interval, which hydra/sweeper=optuna searches. Without "
                "it list values: key=a,b or key=range(1,4)."
            )
        key, text = force(item).split("=", 1) if not item.is_delete() else ("", "")
        values = list(item.sweep_string_iterator()) if item.is_sweep_override() else [text]
        if not values:
            raise UserError(f"'{item.input_line}' matches no option.")
        choices.append([f"{key}={value}" for value in values] if key else [str(item.input_line)])
    return [name_job(stage, job, fixed)[0] for job in itertools.product(*choices)]


SELECTS = ("run.drafter", "tune.drafter", *RECIPE_GROUPS)
"""Keys by which `tune` selects a drafter."""


def name_job(
    stage: Stage, job: Sequence[str], fixed: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The overrides of a job with a unique name, so that no two jobs write to one folder, and the
    values of the swept keys, which are all but `fixed`. `head=medusa,eagle3` needs no further
    name."""
    texts = [text.removeprefix("++") for text in job]
    values = dict(text.split("=", 1) for text in texts if "=" in text)
    found = {key: value for key, value in values.items() if key not in fixed}
    named = [key for key in found if key != "run.name"]
    if stage.name == "tune" and (others := [key for key in named if key not in SELECTS]):
        raise UserError(
            f"a sweep of `tune` over {', '.join(others)} would write every job of a drafter to one "
            "folder and one decode.yaml. Sweep tune.drafter or run.name alone."
        )
    key = naming_key(stage, texts, named)
    if key == "run.drafter":
        named = [name for name in named if name != "head"]
    run = load_settings(stage, texts).run.name if key == "run.name" else ""
    if run and "run.name" not in values and run != RunConfig().name:  # that of the recipe
        named = [name for name in named if name not in RECIPE_GROUPS]
    if not key or not named or (key in values and not run):
        return texts, found
    label = [values["head"]] if "head" in values and key == "run.drafter" else []
    label += [f"{name.split('.')[-1]}={short(values[name])}" for name in named]
    folder = re.sub(r"[^\w.=-]", "_", "-".join(label))
    folder = f"{run}-{folder}" if run else folder
    return [*texts, f"{key}='{folder}'"], found


def naming_key(stage: Stage, job: Sequence[str], named: Sequence[str]) -> str:
    """The key that names the folder of a job whose value of the keys `named` is its own; empty for
    a stage that has no folder, or one that its other settings name. Raises `UserError` if the job
    would not find its input in a run of its own."""
    if stage.name in NAMED:
        return f"{stage.name}.name"
    if stage.name in OWN_RUN:
        inputs, keys = OWN_RUN[stage.name], {text.partition("=")[0] for text in job}
        if named and inputs and not keys & {*inputs}:
            raise UserError(
                f"a sweep of `{stage.name}` over {', '.join(named)} gives every job a run of its "
                f"own, where it finds no input. Name it: {' or '.join(inputs)}=[<folder>]."
            )
        if named and stage.name == "refresh":
            require_drafter_elsewhere(load_settings(stage, job).refresh.drafter)
        return "run.name"
    if stage.name == "loop":
        loop = load_settings(stage, job).loop
        # recipes and rows name their drafters themselves
        shared = any(key in ANSWERING or key.split(".")[0] in ANSWERING for key in named)
        return "run.name" if loop.recipes or loop.sweep or shared else "run.drafter"
    return "run.drafter" if stage.name in TRAINED else ""


def require_drafter_elsewhere(given: str) -> None:
    """Raise `UserError` unless the drafter to refresh is one that every job finds in a run of its
    own."""
    if given and not Path(given).is_dir() and not is_published_name(given):
        raise UserError(
            "a sweep of `refresh` gives every job a run of its own, which has no drafter "
            f"'{given}'. Give its folder: refresh.drafter=<run>/train/{given}."
        )


def require_own_places(jobs: Sequence[Settings]) -> None:
    """Raise `UserError` if two jobs write to one folder."""
    known: set[Path] = set()
    for settings in jobs:
        place = place_of(settings)
        if place in known:
            raise UserError(
                f"two jobs of this sweep would write to '{place}'. List values that differ in "
                "more than special characters, and leave out run.drafter and <stage>.name, which "
                "every job is given."
            )
        known |= {place} if place is not None else set()


def place_of(settings: Settings) -> Path | None:
    """The folder that is a job's own; None for a stage without one."""
    name, run = settings.stage.name, settings.run
    if name in NAMED:
        return run.directory / str(getattr(settings, name).name)
    if name in OWN_RUN:
        return run.directory
    if name == "loop" and (settings.loop.recipes or settings.loop.sweep):
        return run.directory
    return stage_folder(settings) if name in ("train", "plan", "loop") else None


def short(value: str) -> str:
    """A value for a folder's name: a number that a sweeper draws is shortened to six digits."""
    return f"{float(value):.6g}" if DRAWN.fullmatch(value) else value


def require_plugins(hydra: Hydra, given: Sequence[Override]) -> None:
    """Raise `UserError` for a launcher or sweeper that is not installed, or has no cluster here."""
    for item in given:
        group, name = item.key_or_group, str(item.value())
        if group not in PLUGINS:
            continue
        known, plugins = hydra.config_loader.get_group_options(group), PLUGINS[group]
        if name in plugins and (name not in known or not optuna_sweeper.installed(name)):
            raise UserError(
                f"{group}={name} needs a package: pip install {plugins[name]}, or "
                "install Headstart with its extra `sweep`."
            )
        if name not in known:
            raise UserError(
                f"{group}={name}: there is no such option.{suggest(name, {*known, *plugins})}"
            )
        if name == "submitit_slurm" and shutil.which("srun") is None:
            raise UserError(
                f"{group}={name} submits to SLURM, whose 'srun' is not on this machine. Run the "
                "command on one of the cluster's, or take hydra/launcher=submitit_local."
            )
