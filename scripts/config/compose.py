"""From the command line to plain values: Hydra composes the YAML files of conf/ with what was
given.

Every value given on the command line is forced into the composition, so that a misspelt key reaches
the one check that names the path and the alternatives (also with `+key=value`, which Hydra would
accept).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf
from heads.api.errors import UserError, suggest
from heads.api.kinds import offered_kinds
from scripts.config.stages import GROUPS, OPTION_GROUPS, RECIPE_GROUPS, Stage

CONF = Path(conf.__file__).resolve().parent
REPOSITORY = CONF.parent
EXTRA_VARIABLE = "HEADSTART_CONF"
"""Environment variable: more folders (separated like PATH) with groups and recipes of one's own,
searched after conf/."""
CONF_ENTRY_POINTS = "headstart.conf"


def compose_stage(stage: Stage, given: Sequence[Override]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compose a stage's configuration; raises `UserError` for what cannot be composed. Returns
    group -> plain values, interpolations resolved, of the groups that the stage reads; and option
    group -> chosen option, or options for recipes, None where there is none."""
    OmegaConf.register_new_resolver("repo", repository_path, replace=True)
    OmegaConf.register_new_resolver("default_engine", default_engine, replace=True)
    for name in {*offered_kinds(tuple(sys.path))} - {*files("head")}:
        ConfigStore.instance().store(name=name, group="head", node={"kind": name})
    accepted = [check_override(stage, item) for item in given]
    searchpath = ",".join(f"file://{folder}" for folder in extra_folders())
    if searchpath:
        accepted.append(f"hydra.searchpath=[{searchpath}]")
    try:
        with initialize_config_module("conf", version_base="1.3"):
            root = stage.root if (CONF / f"{stage.root}.yaml").is_file() else "base"
            composed = compose(root, overrides=accepted, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(
            f"the configuration of '{stage.name}' cannot be composed: {first_line(error)}"
        ) from error
    choices = {group: composed.hydra.runtime.choices.get(group) for group in OPTION_GROUPS}
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    for name in map(str, composed):
        if name not in GROUPS:
            raise UserError(f"{name}: there is no such group.{suggest(name, GROUPS)}")
    return {group: plain(composed, group) for group in stage.groups}, choices


def plain(composed: Any, group: str) -> Any:
    """One group as plain values with interpolations resolved; an absent group is empty."""
    try:
        node = composed.get(group)
        return {} if node is None else OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or group}: {first_line(error)}.") from error


def parse(overrides: Sequence[str | Override]) -> list[Override]:
    """Hydra's reading of the overrides; raises `UserError` for one that cannot be read."""
    parsed = []
    for text in overrides:
        if isinstance(text, Override):
            parsed.append(text)
            continue
        try:
            if "=" not in text:
                raise UserError(
                    f"'{text}' is not a setting. Settings are key=value, for instance head=eagle3 "
                    "or optim.lr=1e-4."
                )
            parsed += OverridesParser.create().parse_overrides([text])
        except HydraException as error:
            raise UserError(
                f"'{text}' cannot be read ({first_line(error)}). Put quotes around values with "
                "special characters: 'key=\"a, b\"'."
            ) from error
    return parsed


def check_override(stage: Stage, override: Override) -> str:
    """The override as Hydra shall apply it; raises `UserError` for one that sets nothing."""
    key, value, given = override.key_or_group, override.value(), f"'{override.input_line}'"
    if override.is_sweep_override():
        raise UserError(
            f"{given} lists several values. Add -m to run once per value, or write [a,b] for a "
            "list."
        )
    if override.is_delete() or override.package is not None:
        raise UserError(
            f"{given}: only key=value is understood here; to clear a value write {key}=null."
        )
    text = f"{key}={override.get_value_element_as_str()}"
    if key in OPTION_GROUPS and not isinstance(value, dict):
        for name in value if isinstance(value, list) and key in RECIPE_GROUPS else [value]:
            if name is not None and str(name) not in options(key):
                own = " For a model of your own set target.path=<folder or Hub id>."
                raise UserError(
                    f"{key}={name}: there is no such option.{suggest(str(name), options(key))}"
                    f"{own if key == 'target' else ''}"
                )
        return text
    group, *below = key.split(".")
    if group not in GROUPS:
        near = suggest(group, {*GROUPS, *OPTION_GROUPS})
        raise UserError(f"{given}: there is no group '{group}'.{near}")
    if group not in stage.groups:
        raise UserError(
            f"{given}: stage '{stage.name}' does not read '{group}'. It reads: "
            f"{', '.join(stage.groups)}."
        )
    if not below:
        raise UserError(f"{given}: set one key at a time, as {group}.<key>=value.")
    return f"++{text}"


def options(group: str) -> list[str]:
    """The options of a group: the names of its YAML files, and of kinds that packages offer."""
    offered = offered_kinds(tuple(sys.path)) if group == "head" else ()
    return sorted({*offered, *files(group)})


def files(group: str) -> list[str]:
    """The names of a group's YAML files."""
    return [path.stem for folder in conf_folders() for path in (folder / group).glob("*.yaml")]


def conf_folders() -> list[Path]:
    """The folders of configuration groups: this repository's conf/, then the user's own."""
    return [CONF, *extra_folders()]


def extra_folders() -> list[Path]:
    """The folders named in HEADSTART_CONF, then those of installed packages; raises `UserError` for
    one that does not exist."""
    named = os.environ.get(EXTRA_VARIABLE, "").split(os.pathsep)
    folders = [Path(item).resolve() for item in named if item]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{EXTRA_VARIABLE} names '{folder}', which is not a folder.")
    return [*folders, *offered_folders()]


def offered_folders() -> list[Path]:
    """The folders of YAML that installed packages offer, by entry points of the group
    `headstart.conf`; raises `UserError` for one that is not there."""
    folders = []
    for point in entry_points(group=CONF_ENTRY_POINTS):
        spec = find_spec(point.value)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"the entry point '{point.name}' of {CONF_ENTRY_POINTS} names '{point.value}', "
                "which is no package with a folder."
            )
        folders.append(Path(next(iter(spec.submodule_search_locations))).resolve())
    return folders


def repository_path(relative: str) -> str:
    """`${repo:path}`: a path inside the repository as seen from the working directory. An installed
    wheel has no repository: assets/ lies inside its package `headstart` there (setup.py)."""
    found, here = REPOSITORY / relative, Path.cwd().resolve()
    shipped = REPOSITORY / "headstart" / relative
    if not found.exists() and shipped.exists():
        found = shipped
    return str(found.relative_to(here)) if found.is_relative_to(here) else str(found)


def default_engine() -> str:
    """`${default_engine:}`: DeepSpeed where it is installed, which it cannot be on macOS."""
    return "torch" if find_spec("deepspeed") is None else "deepspeed"


def first_line(error: BaseException) -> str:
    """The first line of another library's message, without its full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")
