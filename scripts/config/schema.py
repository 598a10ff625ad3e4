"""The settings of a stage: one checked object per configuration group.

`Settings` is the table of groups: its annotations say which class each top-level key becomes.
`scripts.config.stages` says which stages read a group; conf/base.yaml has its default option.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra.core.override_parser.types import Override

from heads.api.config import build
from heads.api.errors import UserError
from heads.api.reading import read_yaml_object
from heads.api.registry import get_kind
from inference.audit.config import AuditConfig
from inference.decoding.config import DecodeConfig
from inference.export.check.config import VerifyConfig
from inference.export.config import ExportConfig, ImportConfig
from inference.export.hub.config import PushConfig
from inference.hub.config import PullConfig
from inference.measure.config import BenchConfig
from inference.server.config import ServeConfig
from inference.staleness.config import WatchConfig
from inference.target.loading import TargetConfig
from inference.traffic.config import TrafficConfig
from inference.tune.config import TuneConfig
from scripts.config.compose import compose_stage, parse
from scripts.config.stage_configs import (
    ChatConfig,
    LoopConfig,
    MeasureConfig,
    RefreshStageConfig,
    ReportConfig,
    RunConfig,
)
from scripts.config.stages import OPTION_GROUPS, STAGES, Stage
from train.config import TrainConfig
from train.data.config import DataConfig
from train.engines.base import EngineConfig
from train.features.config import FeaturesConfig
from train.feedback.config import FeedbackConfig
from train.generate.config import GenerateConfig
from train.generate.sampling import SamplingConfig
from train.joint.config import JointConfig
from train.learning.config import LearnConfig
from train.optim import OptimConfig, ScheduleConfig
from train.planning.plan import PlanConfig


@dataclass(frozen=True)
class HeadSettings:
    """The chosen drafter: its kind and that kind's own configuration."""

    kind: str
    config: Any


class Settings:
    """The settings of a stage: one attribute per group that it reads. Groups that it does not read
    do not exist. `import_` is the group `import`, since `import` is a keyword in Python."""

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
    import_: ImportConfig
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
    learn: LearnConfig
    loop: LoopConfig

    def __init__(
        self,
        stage: Stage,
        values: Mapping[str, Any],
        choices: Mapping[str, Any],
        overrides: Sequence[Override] = (),
    ) -> None:
        """Build every group that the stage reads from plain values; raises `UserError`. choices:
        option group -> chosen option. overrides: the settings given besides the YAML files."""
        self.stage = stage
        self.choices = dict(choices)
        self.resolved = dict(values)
        """The plain values of the groups, without the defaults of their classes."""
        self.overrides = list(overrides)
        self.changed: dict[str, Any] = {}
        """Replacements after the composition: dotted path -> plain value."""
        self.derived: dict[tuple[str, ...], Settings] = {}
        """Stage and command line -> the result of `derive`, which takes a fifth of a second."""
        for group in stage.groups:
            setattr(self, attribute(group), build_group(group, self.resolved.get(group) or {}))

    def given(self, key: str) -> bool:
        """Whether the command line sets `key` itself: a setting (`optim.lr`) or an option group
        (`decode`).

        Values from recipes, option files and conf/base.yaml are defaults and do not count as given.
        A recipe describes a whole run, and a stage that chooses better values than its defaults (a
        drafter's own draft, a refresh's learning rate) still does so under a recipe. The overrides
        that a loop adds to a stage (loop.measures, loop.sweep, loop.round) count as its command
        line, and so do settings that were changed after the composition.
        """
        return key in self.changed or any(item.key_or_group == key for item in self.overrides)

    @property
    def with_defaults(self) -> dict[str, Any]:
        """The plain values of every group with all defaults."""
        own = {group: complete(group, self.resolved.get(group)) for group in self.stage.groups}
        return {**self.resolved, **own}

    @property
    def without_defaults(self) -> dict[str, Any]:
        """The plain values that differ from the classes' defaults, including values that have no
        default."""
        found = {group: changed(group, self.resolved.get(group)) for group in self.stage.groups}
        return {group: values for group, values in found.items() if values}

    @property
    def arguments(self) -> list[str]:
        return [str(item.input_line) for item in self.overrides]

    @property
    def command(self) -> list[str]:
        """The command that these settings stand for, for display."""
        changed = [f"{key}={json.dumps(value)}" for key, value in self.changed.items()]
        return ["headstart", self.stage.name, *self.arguments, *changed]

    def put(self, **groups: Any) -> Settings:
        """A copy with other groups: `settings.put(optim=replace(settings.optim, lr=0.1))`."""
        other = copy(self)
        other.resolved, other.changed = deepcopy(self.resolved), dict(self.changed)
        for group, new in groups.items():
            for place, value in differences(getattr(self, group), new, (group,)):
                other.changed[".".join(place)] = value
                node = other.resolved
                for key in place[:-1]:
                    node[key] = node.get(key) or {}
                    node = node[key]
                node[place[-1]] = value
            setattr(other, group, new)
        return other

    def derive(
        self,
        stage: str,
        recipe: str | None = None,
        before: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> Settings:
        """The settings of another stage under the same command line, for the groups that it reads.

        recipe: an experiment put before the chosen ones, whose values win. before, more: overrides
        put before and after the command line's own. The later value of a key wins; an option that
        they choose replaces the command line's. Experiments that they choose are added to the
        chosen ones, before or after them, and do not change the run's folder.
        """
        front, back = parse(before), parse(more)
        early, late = experiments_of(front), experiments_of(back)
        chosen = self.choices.get("experiment") or []
        experiments = [recipe] if recipe else []
        experiments += [*early, *([chosen] if isinstance(chosen, str) else chosen), *late]
        first = [f"experiment=[{','.join(dict.fromkeys(experiments))}]"] if experiments else []
        place = [f"run.name='{self.run.name}'"] if early or late else []
        front, back = (
            [item for item in side if item.key_or_group != "experiment"] for side in (front, back)
        )
        front = [*parse(place), *front, *parse(first)]
        taken = {item.key_or_group for item in (*front, *back)} & set(OPTION_GROUPS)
        own = [
            item
            for item in self.overrides
            if understands(STAGES[stage], item) and item.key_or_group not in taken
        ]
        given = [*front, *own, *back]
        key = (stage, *(str(item.input_line) for item in given))
        if key not in self.derived:
            self.derived[key] = load_settings(STAGES[stage], given)
        return self.derived[key]


def experiments_of(overrides: Sequence[Override]) -> list[str]:
    """The experiments that are chosen among some overrides."""
    values = [item.value() for item in overrides if item.key_or_group == "experiment"]
    listed = [value if isinstance(value, list) else [value] for value in values]
    return [str(name) for names in listed for name in names if name is not None]


def understands(stage: Stage, override: Override) -> bool:
    """Whether an override of a loop's command line applies to a stage of that loop. The choice of
    data and bench applies to all stages: the data determines the prompts, and the bench determines
    whether `generate` holds prompts out of its data."""
    key = override.key_or_group
    if key in ("debug", "data", "bench"):
        return True
    return key != "experiment" and key.split(".")[0] in stage.groups


def load_settings(stage: Stage, overrides: Sequence[str | Override]) -> Settings:
    """The checked settings of a stage under `overrides`; raises `UserError`."""
    given = [item for item in parse(overrides) if not item.is_hydra_override()]
    return Settings(stage, *compose_stage(stage, given), given)


@cache
def group_classes() -> dict[str, type]:
    """Group -> its class; `head` is left out, whose class is the `Config` of the chosen kind."""
    found = {name.rstrip("_"): cls for name, cls in get_type_hints(Settings).items()}
    del found["head"]
    return found


def attribute(group: str) -> str:
    return f"{group}_" if keyword.iskeyword(group) else group


def build_group(group: str, values: Any) -> Any:
    return build_head(values) if group == "head" else build(group_classes()[group], values, group)


def build_head(values: Mapping[str, Any]) -> HeadSettings:
    """`head`: `kind` picks the file in heads/, the rest fills that kind's `Config`."""
    rest = dict(values)
    kind = rest.pop("kind", None)
    if not isinstance(kind, str):
        raise UserError(
            "head.kind is missing. Choose a drafter with head=<name>; `headstart train --help` "
            "lists them."
        )
    try:
        config_class = get_kind(kind).config_class
    except UserError as error:
        raise UserError(f"head.kind: {error}") from error
    return HeadSettings(kind, build(config_class, rest, "head"))


# Plain values


def plain(value: Any) -> Any:
    """A configuration object as YAML values."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def differences(
    old: Any, new: Any, place: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys in which two objects of one class differ, with the plain values of `new`."""
    for item in fields(new):
        before, after = getattr(old, item.name), getattr(new, item.name)
        if is_dataclass(after) and type(before) is type(after):
            yield from differences(before, after, (*place, item.name))
        elif before != after:
            yield (*place, item.name), plain(after)


def complete(group: str, values: Any) -> dict[str, Any]:
    """Plain values of a group, completed with the defaults of all missing keys. Raises `UserError`
    for values that the group's class does not accept."""
    found: dict[str, Any] = plain(build_group(group, values or {}))
    return found if group != "head" else {"kind": found["kind"], **found["config"]}


def changed(group: str, values: Any) -> dict[str, Any]:
    """The keys of a group whose values are not the defaults of its class."""
    built = build_group(group, values or {})
    if group == "head":
        return {"kind": built.kind, **unlike_default(built.config)}
    return unlike_default(built)


def unlike_default(config: Any) -> dict[str, Any]:
    """The fields of a configuration that differ from their defaults, as plain values."""
    found = {}
    for item in fields(config):
        value, default = getattr(config, item.name), item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if is_dataclass(value) and type(value) is type(default):
            inner = unlike_default(value)
            if inner:
                found[item.name] = inner
        elif value != default:
            found[item.name] = plain(value)
    return found


# Files for other processes


def write_settings(settings: Settings, path: Path) -> None:
    """Write settings for another process (`headstart <stage> --config <path>`)."""
    content = {
        "stage": settings.stage.name,
        "choices": {key: settings.choices.get(key) for key in OPTION_GROUPS},
        "overrides": settings.arguments,
        "changed": settings.changed,  # they count as given there too
        "values": settings.resolved,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def read_settings(stage: Stage, path: Path) -> Settings:
    """The settings that `write_settings` wrote; raises `UserError` for any other file."""
    try:
        content = read_yaml_object(path, "Give a file that `headstart` wrote.")
    except UserError as error:
        raise UserError(f"--config: {error}") from error
    kinds = {"values": dict, "choices": dict, "overrides": list, "changed": dict}
    fit = all(isinstance(content.get(key), kind) for key, kind in kinds.items())
    if content.get("stage") != stage.name or not fit:
        raise UserError(f"--config: '{path}' does not hold the settings of stage '{stage.name}'.")
    found = Settings(stage, content["values"], content["choices"], parse(content["overrides"]))
    found.changed = content["changed"]
    return found
