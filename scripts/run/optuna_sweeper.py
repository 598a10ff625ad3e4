"""`hydra/sweeper=optuna`: Optuna chooses the values of the next jobs from the results so far.

The group, its keys and the spelling of search spaces are those of Hydra's plug-in
(hydra-optuna-sweeper). That plug-in's last release requires Optuna 2, whose storages do not work
under SQLAlchemy 2; this sweeper calls the installed Optuna. Two defaults differ. `direction` is
maximize, since the value of a job is tau or speedup. The sampler's seed is run.seed, so that the
same command continues its jobs instead of drawing new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf

from heads.api.errors import UserError

SAMPLERS: dict[str, dict[str, Any]] = {
    "tpe": {
        "_target_": "optuna.samplers.TPESampler",
        "n_startup_trials": 10,
        "n_ei_candidates": 24,
        "multivariate": False,
    },
    "random": {"_target_": "optuna.samplers.RandomSampler"},
    "cmaes": {"_target_": "optuna.samplers.CmaEsSampler", "sigma0": None},
    "nsgaii": {"_target_": "optuna.samplers.NSGAIISampler", "population_size": 50},
    "qmc": {"_target_": "optuna.samplers.QMCSampler"},
    "grid": {"_target_": "optuna.samplers.GridSampler", "_partial_": True},
}
"""hydra/sweeper/sampler: the class and its arguments."""
RESULTS_FILE = "optimization_results.yaml"


def installed(name: str) -> bool:
    """Whether the package of a launcher or sweeper is installed."""
    module = {"optuna": "optuna", "joblib": "joblib"}.get(name, "submitit")
    return find_spec(module) is not None


def register() -> None:
    """Register `hydra/sweeper=optuna` with Hydra, in place of the plug-in's if that is
    installed."""
    store = ConfigStore.instance()
    node = {
        "defaults": [{"sampler": "tpe"}],
        "direction": "maximize",
        "storage": None,
        "study_name": None,
        "n_trials": 20,
        "n_jobs": 1,
        "max_failure_rate": 0.0,
        "params": None,
        "custom_search_space": None,
    }
    store.store(group="hydra/sweeper", name="optuna", node=node, provider="headstart")
    for name, sampler in SAMPLERS.items():
        content = {**sampler, "seed": None}
        store.store(group="hydra/sweeper/sampler", name=name, node=content, provider="headstart")


def defaults(composed: DictConfig) -> dict[str, str]:
    """Sweeper settings that follow from the run's settings."""
    if OmegaConf.select(composed, "hydra.sweeper.sampler.seed") is not None:
        return {}
    key = "hydra.sweeper.sampler.seed"
    return {key: f"{key}={OmegaConf.select(composed, 'run.seed')}"}


def search(hydra: Hydra, config: DictConfig, task: TaskFunction) -> None:
    """Run the jobs of a composed sweep, as `Hydra.multirun` does with a plug-in. A plug-in would
    have to be a separate package."""
    callbacks = Callbacks(config)
    callbacks.on_multirun_start(config=config, config_name=config.hydra.job.config_name)
    settings: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    sampler = instantiate(settings.pop("sampler"))
    sweeper = OptunaSweeper(sampler=sampler, **settings)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
    sweeper.setup(hydra_context=context, task_function=task, config=config)
    sweeper.sweep([str(item) for item in config.hydra.overrides.task])
    callbacks.on_multirun_end(config=config, config_name=config.hydra.job.config_name)


class OptunaSweeper(Sweeper):
    """Asks Optuna for values, lets the launcher run `n_jobs` jobs at a time, and reports their
    results to Optuna."""

    def __init__(
        self,
        sampler: Any,
        direction: Any,
        storage: str | None,
        study_name: str | None,
        n_trials: int,
        n_jobs: int,
        max_failure_rate: float,
        params: Mapping[str, str] | None,
        custom_search_space: str | None,
    ) -> None:
        self.sampler, self.storage, self.study_name = sampler, storage, study_name
        self.directions = [direction] if isinstance(direction, str) else list(direction)
        self.n_trials, self.n_jobs, self.max_failure_rate = n_trials, n_jobs, max_failure_rate
        self.params, self.custom = dict(params or {}), custom_search_space

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before `sweep`."""
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the trials; returns the launcher's result for each batch."""
        import optuna

        assert self.config is not None and self.hydra_context is not None and self.launcher
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = parser.parse_overrides([*(f"{k}={v}" for k, v in self.params.items()), *arguments])
        space = {i.get_key_element(): distribution(i) for i in given if i.is_sweep_override()}
        if not space and not self.custom:
            raise UserError(
                "hydra/sweeper=optuna has nothing to search. Give a range for a key, such as "
                "'optim.lr=tag(log, interval(1e-5, 1e-3))' or head=medusa,eagle3."
            )
        fixed = [str(item.input_line) for item in given if not item.is_sweep_override()]
        study = optuna.create_study(
            study_name=self.study_name,
            storage=self.storage,
            sampler=self.make_sampler(space),
            directions=self.directions,
            load_if_exists=True,
        )
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        done = len([t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE])
        batches, started = [], 0
        while done + started < self.n_trials:
            size = min(self.n_jobs, self.n_trials - done - started)
            trials = [study.ask(dict(space)) for _ in range(size)]
            if self.custom:
                for trial in trials:
                    get_method(self.custom)(self.config, trial)
            jobs = [[*fixed, *(f"{k}={v}" for k, v in t.params.items())] for t in trials]
            returned = self.launcher.launch(jobs, initial_job_idx=started)
            self.tell(study, trials, returned)
            started += size
            batches.append(returned)
            self.write_results(study, folder)
        return batches

    def make_sampler(self, space: Mapping[str, Any]) -> Any:
        """The sampler; a grid sampler gets its values here."""
        if not isinstance(self.sampler, partial):
            return self.sampler
        grid = {}
        for key, values in space.items():
            if not hasattr(values, "choices"):
                raise UserError(f"{key}: a grid needs listed values, as {key}=a,b.")
            grid[key] = values.choices
        return self.sampler(search_space=grid)

    def tell(self, study: Any, trials: Sequence[Any], returned: Sequence[Any]) -> None:
        """Report a batch; raises the first error if the share of failures exceeds
        `max_failure_rate`."""
        import optuna

        failed = []
        for trial, result in zip(trials, returned, strict=True):
            value = result._return_value
            if isinstance(value, Exception) or value is None:
                failed.append(value)
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            try:
                study.tell(trial, value if len(self.directions) > 1 else float(value))
            except RuntimeError as error:  # an exhausted grid stops a study that is not running
                if "Study.stop" not in str(error):
                    raise
        if len(failed) > self.max_failure_rate * len(trials):
            raise failed[0] or UserError(
                "hydra/sweeper=optuna: a job failed, or ended without a value. Stages with one are "
                "train and loop (tau) and measure (speedup). hydra.sweeper.max_failure_rate=0.5 "
                "goes on in spite of failures."
            )

    def write_results(self, study: Any, folder: Path) -> None:
        """Write the best values so far, as the plug-in does at the end."""
        if len(self.directions) > 1:
            best = [{"params": t.params, "values": t.values} for t in study.best_trials]
            content: dict[str, Any] = {"name": "optuna", "solutions": best}
        else:
            done = [t for t in study.trials if t.value is not None]
            if not done:
                return
            trial = study.best_trial
            content = {"name": "optuna", "best_params": trial.params, "best_value": trial.value}
        OmegaConf.save(OmegaConf.create(content), folder / RESULTS_FILE)


def distribution(override: Override) -> Any:
    """The distribution of a key's values for Optuna: `interval(a, b)`, `tag(log, interval(a, b))`,
    `range(a, b)`, `choice(a, b)`, `a,b` and `glob(...)`."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        log = "log" in value.tags
        if whole:
            return IntDistribution(int(value.start), int(value.end), log=log)
        return FloatDistribution(float(value.start), float(value.end), log=log)
    if isinstance(value, RangeSweep) and not value.shuffle:
        values, step = list(value.range()), value.step
        if all(isinstance(number, int) for number in (*values[:1], step)):
            return IntDistribution(int(values[0]), int(values[-1]), step=int(step))
        return FloatDistribution(float(values[0]), float(values[-1]), step=float(step))
    return CategoricalDistribution(list(override.sweep_iterator(transformer=Transformer.encode)))
