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
from scripts.config.compose import force, hydra_of, parse, require_key, root_of
from scripts.config.schema import load_settings
from scripts.config.stages import RECIPE_GROUPS, STAGES, Stage
from scripts.run import optuna_sweeper
from scripts.run.folder import require_answers
from scripts.run.process import is_main_process
from scripts.run.ranking import JobRecord, print_ranking, read_records, result_of
from scripts.run.runner import run_one

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
"""Stages whose jobs are distinguished by <stage>.name; the jobs of other stages by run.drafter."""


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
    done = hydra.run(root_of(stage), partial(run_job, stage.name, (), 1), texts)
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
        jobs = combine(stage, own)
        for job in jobs:  # all jobs are checked before the first one starts
            settings = load_settings(stage, job)
            if stage.name == "train":
                require_answers(settings)
        total = len(jobs)
    if sweeper == "optuna":
        hydras = {**optuna_sweeper.defaults(composed), **hydras}
        total = int(composed.hydra.sweeper.n_trials)
    folder = Path(str(composed.hydra.sweep.dir))
    hydras["hydra.sweep.dir"] = f"hydra.sweep.dir='{folder}'"  # this fixes the folder's time
    swept = tuple(item.key_or_group for item in own if item.is_sweep_override())
    texts = [*map(force, own), *hydras.values()]
    try:
        task = partial(run_job, stage.name, swept, total)
        if sweeper == "optuna":
            final = hydra.compose_config(root_of(stage), texts, RunMode.MULTIRUN)
            optuna_sweeper.search(hydra, final, task)
        else:
            hydra.multirun(root_of(stage), task, texts, with_log_configuration=False)
    except UserError:  # the search ends with a failed job, whose record has the error itself
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


def run_job(stage_name: str, swept: tuple[str, ...], total: int, config: Any) -> float | None:
    """One job, wherever the launcher runs it; returns its value. config: composed by Hydra; the
    stage composes again with its own checks."""
    whole: Any = HydraConfig.instance().cfg
    assert whole is not None, "Hydra runs the jobs"
    hydra, stage = whole.hydra, STAGES[stage_name]
    job, keys = name_job(stage, [str(item) for item in hydra.overrides.task], swept)
    number = int(OmegaConf.select(whole, "hydra.job.num", default=0) or 0) + 1
    record = JobRecord(number, stage.name, job, keys)
    if swept:
        print(heading(stage, job, number, total), flush=True)
    try:
        with as_command(stage, job):
            settings = load_settings(stage, job)
            record.status = run_one(settings)
        record.value, record.reached = result_of(settings)
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
    """The overrides of every job of a sweep over listed values."""
    with hydra_of(stage) as hydra:
        own = [item for item in given if not item.is_hydra_override()]
        return combine(stage, parse(own, hydra.config_loader))


def combine(stage: Stage, own: Sequence[Override]) -> list[list[str]]:
    """Every combination of the values listed in the overrides, in order, each with a name."""
    swept = tuple(item.key_or_group for item in own if item.is_sweep_override())
    if not swept:
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
    return [name_job(stage, job, swept)[0] for job in itertools.product(*choices)]


SELECTING = ("export", "push", "tune")
"""Stages in which `run.drafter` selects a drafter, and names no folder."""
SELECTS = ("run.drafter", "tune.drafter")
"""Keys by which `tune` selects a drafter."""


def name_job(
    stage: Stage, job: Sequence[str], swept: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The overrides of a job with a unique name, so that no two jobs write to one folder, and the
    values of the swept keys. `head=medusa,eagle3` needs no further name."""
    texts = [text.removeprefix("++") for text in job]
    values = dict(text.split("=", 1) for text in texts if "=" in text)
    found = {key: values[key] for key in swept if key in values}
    named = [key for key in found if key not in ("run.name", "head", *RECIPE_GROUPS)]
    if stage.name in NAMED:
        named, key = [key for key in found if key != "run.name"], f"{stage.name}.name"
    else:
        key = "run.drafter"
    if stage.name == "tune" and (others := [key for key in named if key not in SELECTS]):
        raise UserError(
            f"a sweep of `tune` over {', '.join(others)} would write every job of a drafter to one "
            "folder and one decode.yaml. Sweep tune.drafter or run.name alone."
        )
    if not named or key in values or stage.name in SELECTING:
        return texts, found
    label = [values["head"]] if "head" in values and stage.name not in NAMED else []
    label += [f"{name.split('.')[-1]}={short(values[name])}" for name in named]
    folder = re.sub(r"[^\w.=-]", "_", "-".join(label))
    if stage.name == "loop":
        settings = load_settings(stage, texts)
        if settings.loop.recipes or settings.loop.sweep:  # these name their drafters themselves
            key, folder = "run.name", f"{settings.run.name}-{folder}"
    return [*texts, f"{key}='{folder}'"], found


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
