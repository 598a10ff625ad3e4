"""From the command line to frozen dataclasses: Hydra composes the YAML, `scripts.convert` builds what the stage's code takes.

Two hops: YAML -> composed node -> dataclass. Every value given on the command line is forced into the composition, so that a
misspelt key reaches the one check that names the path and the alternatives (also with `+key=value`, which Hydra would accept).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf
from heads.api.errors import UserError, suggest
from scripts.convert import to_dataclass
from scripts.stages import OPTION_GROUPS, RECIPE_GROUPS, Stage

if TYPE_CHECKING:
    from inference.audit_config import AuditConfig
    from inference.engine import DecodeConfig
    from inference.export.check.config import VerifyConfig
    from inference.export.config import ExportConfig
    from inference.export.hub.config import PullConfig, PushConfig
    from inference.loading import TargetConfig
    from inference.measure import BenchConfig
    from inference.server.config import ServeConfig
    from inference.traffic.config import TrafficConfig
    from inference.tune.config import TuneConfig
    from inference.watch.config import WatchConfig
    from scripts.chat import ChatConfig
    from scripts.loop import LoopConfig
    from scripts.measure import MeasureConfig
    from scripts.refresh import RefreshStageConfig
    from scripts.report import ReportConfig
    from scripts.run import RunConfig
    from train.data.sampling import SamplingConfig
    from train.data.sources import DataConfig
    from train.engine import EngineConfig
    from train.features import FeaturesConfig
    from train.feedback.config import FeedbackConfig
    from train.generate import GenerateConfig
    from train.joint_config import JointConfig
    from train.loop import TrainConfig
    from train.optim import OptimConfig, ScheduleConfig
    from train.plan import PlanConfig

REPOSITORY = Path(conf.__file__).resolve().parents[1]
EXTRA_VARIABLE = "HEADSTART_CONF"
"""Environment variable: more folders (separated like PATH) with groups and recipes of one's own, searched after conf/."""

CONSUMERS = {
    "target": "inference.loading:TargetConfig",
    "data": "train.data.sources:DataConfig",
    "sampling": "train.data.sampling:SamplingConfig",
    "generate": "train.generate:GenerateConfig",
    "feedback": "train.feedback.config:FeedbackConfig",
    "features": "train.features:FeaturesConfig",
    "engine": "train.engine:EngineConfig",
    "optim": "train.optim:OptimConfig",
    "schedule": "train.optim:ScheduleConfig",
    "joint": "train.joint_config:JointConfig",
    "train": "train.loop:TrainConfig",
    "decode": "inference.engine:DecodeConfig",
    "bench": "inference.measure:BenchConfig",
    "push": "inference.export.hub.config:PushConfig",
    "export": "inference.export.config:ExportConfig",
    "verify": "inference.export.check.config:VerifyConfig",
    "import": "inference.export.config:ImportConfig",
    "pull": "inference.export.hub.config:PullConfig",
    "run": "scripts.run:RunConfig",
    "tune": "inference.tune.config:TuneConfig",
    "traffic": "inference.traffic.config:TrafficConfig",
    "measure": "scripts.measure:MeasureConfig",
    "audit": "inference.audit_config:AuditConfig",
    "plan": "train.plan:PlanConfig",
    "report": "scripts.report:ReportConfig",
    "refresh": "scripts.refresh:RefreshStageConfig",
    "watch": "inference.watch.config:WatchConfig",
    "chat": "scripts.chat:ChatConfig",
    "serve": "inference.server.config:ServeConfig",
    "loop": "scripts.loop:LoopConfig",
}
"""Which dataclass each top-level key becomes. `head` is not listed: its dataclass is the `Config` of the chosen kind."""


@dataclass(frozen=True)
class HeadSettings:
    """The chosen drafter: its kind and that kind's own configuration."""

    kind: str
    config: Any


class Settings:
    """What one stage was told, one attribute per group it reads (another group's attribute does not exist).

    stage: the stage; choices: group -> chosen option(s); resolved: the plain values behind the dataclasses, for config.yaml.
    """

    run: RunConfig
    target: TargetConfig
    head: HeadSettings
    data: DataConfig
    sampling: SamplingConfig
    generate: GenerateConfig
    features: FeaturesConfig
    feedback: FeedbackConfig
    engine: EngineConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    joint: JointConfig
    train: TrainConfig
    decode: DecodeConfig
    bench: BenchConfig
    push: PushConfig
    export: ExportConfig
    verify: VerifyConfig
    pull: PullConfig
    tune: TuneConfig
    traffic: TrafficConfig
    measure: MeasureConfig
    audit: AuditConfig
    plan: PlanConfig
    report: ReportConfig
    refresh: RefreshStageConfig
    watch: WatchConfig
    chat: ChatConfig
    serve: ServeConfig
    loop: LoopConfig

    def __init__(
        self,
        stage: Stage,
        parts: dict[str, Any],
        choices: dict[str, Any],
        resolved: dict[str, Any],
        overrides: list[str],
    ) -> None:
        self.stage, self.choices, self.resolved, self.overrides = stage, choices, resolved, overrides
        vars(self).update(parts)


def load_settings(stage: Stage, overrides: Sequence[str]) -> Settings:
    """Compose the stage's configuration with `overrides` and build every group it reads; raises `UserError`."""
    composed, choices = compose_stage(stage, overrides)
    return build_settings(stage, composed, choices, list(overrides))


def build_settings(
    stage: Stage, composed: DictConfig, choices: dict[str, Any], overrides: list[str]
) -> Settings:
    """The dataclasses of a composed configuration; refuses keys that belong to no group."""
    for name in map(str, composed):
        if name not in CONSUMERS and name != "head":
            raise UserError(f"{name}: there is no such group.{suggest(name, [*CONSUMERS, 'head'])}")
    resolved: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for group in stage.groups:
        resolved[group] = plain(composed, group)
        parts[group] = build_head(resolved[group]) if group == "head" else build_group(group, resolved[group])
    return Settings(stage, parts, choices, resolved, overrides)


def plain(composed: DictConfig, group: str) -> Any:
    """One group as plain values with interpolations resolved; an absent group is empty and falls back to its defaults."""
    try:
        node = composed.get(group)
        return {} if node is None else OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or group}: {first_line(error)}.") from error


def build_group(group: str, values: Any) -> Any:
    """The dataclass behind a top-level key, from plain values."""
    module, name = CONSUMERS[group].split(":")
    return to_dataclass(getattr(importlib.import_module(module), name), values, group)


def build_head(values: Any) -> HeadSettings:
    """`head`: `kind` picks the file in heads/, the rest fills that kind's `Config`."""
    from heads.api.registry import get_kind  # brings torch

    rest = dict(values)
    kind = rest.pop("kind", None)
    if not isinstance(kind, str):
        raise UserError(
            "head.kind is missing. Choose a drafter with head=<name>; `headstart train --help` lists them."
        )
    try:
        config_class = get_kind(kind).config_class
    except UserError as error:
        raise UserError(f"head.kind: {error}") from error
    return HeadSettings(kind, to_dataclass(config_class, rest, "head"))


def compose_stage(stage: Stage, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """The composed YAML of a stage and the option chosen in each group."""
    register_resolvers()
    accepted = [check_override(stage, parsed) for parsed in parse(overrides)]
    searchpath = ",".join(f"file://{folder}" for folder in extra_folders())
    if searchpath:
        accepted.append(f"hydra.searchpath=[{searchpath}]")
    try:
        with initialize_config_module("conf", version_base="1.3"):
            composed = compose(stage.root, overrides=accepted, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(
            f"the configuration of '{stage.name}' cannot be composed: {first_line(error)}"
        ) from error
    choices = {group: composed.hydra.runtime.choices.get(group) for group in OPTION_GROUPS}
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    return composed, choices


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of the overrides; raises `UserError` for one that cannot be read."""
    parsed = []
    for text in overrides:
        try:
            if "=" not in text:
                raise UserError(
                    f"'{text}' is not a setting. Settings are key=value, for instance head=eagle3 or optim.lr=1e-4."
                )
            parsed += OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            raise UserError(
                f"'{text}' cannot be read ({first_line(error)}). Put quotes around values with special characters: "
                "'key=\"a, b\"'."
            ) from error
    return parsed


def check_override(stage: Stage, override: Override) -> str:
    """The override as Hydra shall apply it; raises `UserError` for a group, option or key that does not exist."""
    key = override.key_or_group
    value = override.value()
    if override.is_sweep_override():
        raise UserError(
            f"'{override.input_line}' lists several values. Add -m to run once per value, or write [a,b] for a list."
        )
    if override.is_delete() or override.package is not None:
        raise UserError(
            f"'{override.input_line}': only key=value is understood here; to clear a value write {key}=null."
        )
    if key in OPTION_GROUPS and not isinstance(value, dict):
        check_choice(key, value)
        return f"{key}={override.get_value_element_as_str()}"
    group, *below = key.split(".")
    if group not in CONSUMERS and group != "head":
        raise UserError(
            f"'{override.input_line}': there is no group '{group}'.{suggest(group, [*CONSUMERS, *OPTION_GROUPS])}"
        )
    if group not in stage.groups:
        raise UserError(
            f"'{override.input_line}': stage '{stage.name}' does not read '{group}'. It reads: {', '.join(stage.groups)}."
        )
    if not below:
        raise UserError(f"'{override.input_line}': set one key at a time, as {group}.<key>=value.")
    return f"++{key}={override.get_value_element_as_str()}"


def check_choice(group: str, value: Any) -> None:
    """Refuse an option that has no file in the group's folders."""
    several = value if isinstance(value, list) and group in RECIPE_GROUPS else [value]
    for name in several:
        if name is not None and str(name) not in options(group):
            hint = " For a model of your own set target.path=<folder or Hub id>." if group == "target" else ""
            raise UserError(
                f"{group}={name}: there is no such option.{suggest(str(name), options(group))}{hint}"
            )


def options(group: str) -> list[str]:
    """The options of a group: the names of its YAML files, without importing anything."""
    return sorted({path.stem for folder in conf_folders() for path in (folder / group).glob("*.yaml")})


def conf_folders() -> list[Path]:
    """Where configuration groups are looked for: this repository's conf/, then the user's own folders."""
    return [Path(conf.__file__).parent, *extra_folders()]


def extra_folders() -> list[Path]:
    """The folders named in HEADSTART_CONF; raises `UserError` for one that does not exist."""
    folders = [Path(item).resolve() for item in os.environ.get(EXTRA_VARIABLE, "").split(os.pathsep) if item]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{EXTRA_VARIABLE} names '{folder}', which is not a folder.")
    return folders


@cache
def register_resolvers() -> None:
    """`${repo:path}`: a file of this repository, relative to the working directory when that is possible."""
    OmegaConf.register_new_resolver("repo", repository_path, replace=True)


def repository_path(relative: str) -> str:
    """A path inside the repository as a person standing in the working directory would write it."""
    found, here = REPOSITORY / relative, Path.cwd().resolve()
    return str(found.relative_to(here)) if found.is_relative_to(here) else str(found)


def first_line(error: BaseException) -> str:
    """The first line of another library's message, without its full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")
