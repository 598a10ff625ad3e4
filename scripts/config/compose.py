"""Turns the command line into plain values: Hydra composes the YAML files of conf/ with the given
overrides.

Every value given on the command line is forced into the composition. So a misspelt key reaches the
single check that names the path and the alternatives, also with `+key=value`, which Hydra would
accept.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import conf
from heads.api.config import shown
from heads.api.errors import UserError, suggest
from heads.api.kinds import offered_kinds
from inference.cpu import multiplies_bfloat16
from scripts.config.fields import REPOSITORY, keys_named
from scripts.config.stages import EXTRA_VARIABLE, GROUPS, OPTION_GROUPS, RECIPE_GROUPS, Stage

CONF = Path(conf.__file__).resolve().parent
CONF_ENTRY_POINTS = "headstart.conf"
UNREADABLE = (
    *(HydraException, OmegaConfBaseException, yaml.YAMLError),
    *(ValueError, RecursionError, OSError),
)
"""The errors for settings, and files of settings, that cannot be read. ValueError includes text
that is not UTF-8 and numbers of thousands of digits."""
NAMED = re.compile(r"[\w./@:-]+=[\w./@:=-]*")
"""A value that contains an equals sign, as a drafter's name does (medusa-lr=0.001). Hydra reads
such a value only in quotes."""


class ExtraFolders(SearchPathPlugin):
    """Adds the user's folders to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in extra_folders():
            search_path.append(provider=EXTRA_VARIABLE, path=f"file://{folder}")


@contextmanager
def hydra_of(stage: Stage) -> Iterator[Hydra]:
    """Yield Hydra with the folders of configuration; its errors leave the block as `UserError`."""
    OmegaConf.register_new_resolver("repo", repository_path, replace=True)
    OmegaConf.register_new_resolver("default_engine", default_engine, replace=True)
    OmegaConf.register_new_resolver("default_precision", default_precision, replace=True)
    OmegaConf.register_new_resolver("fast_precision", fast_precision, replace=True)
    for name in {*offered_kinds(tuple(sys.path))} - {*files("head")}:
        ConfigStore.instance().store(name=name, group="head", node={"kind": name})
    Plugins.instance().register(ExtraFolders)
    outer = GlobalHydra.instance().hydra  # that of a sweep, whose jobs compose their own settings
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("conf", job_name="headstart", version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            yield hydra
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(
            f"the configuration of '{stage.name}' cannot be composed: {first_line(error)}."
        ) from error
    finally:
        GlobalHydra.instance().hydra = outer


def root_of(stage: Stage) -> str:
    """The name of the stage's primary config in conf/."""
    return stage.root if (CONF / f"{stage.root}.yaml").is_file() else "base"


def compose_stage(stage: Stage, given: Sequence[Override]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compose a stage's configuration; raises `UserError` if it cannot be composed.

    Returns two mappings: group -> plain values with resolved interpolations, for the groups that
    the stage reads; and option group -> chosen option (several for recipes, None if there is none).
    Overrides of Hydra's own settings are left out: they determine how jobs run, not what a stage
    does.
    """
    texts = [check_override(stage, item) for item in given if not item.is_hydra_override()]
    # what a command line deletes, a measurement of its loop may delete again, which Hydra refuses
    accepted = [
        text for place, text in enumerate(texts) if text[0] != "~" or text not in texts[:place]
    ]
    with hydra_of(stage):
        composed = compose(root_of(stage), overrides=accepted, return_hydra_config=True)
    choices = {group: composed.hydra.runtime.choices.get(group) for group in OPTION_GROUPS}
    choices |= several_options(given)
    for group, chosen in choices.items():
        for name in chosen if isinstance(chosen, list) else [chosen]:
            require_one_file(group, name)
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    for name in map(str, composed):
        if name not in GROUPS:
            raise UserError(f"{name}: there is no such group.{suggest(name, GROUPS)}")
    return {group: plain(composed, group) for group in stage.groups}, choices


def require_one_file(group: str, name: str | None) -> None:
    """Raise `UserError` for an option whose name several files have, unless they are copies: Hydra
    reads only the first, without a word."""
    places = [folder / group / f"{name}.yaml" for folder in conf_folders()]
    found = [path for path in places if path.is_file()]
    if len({path.read_bytes() for path in found}) > 1:
        raise UserError(
            f"{group}={name}: several files have that name, of which only the first would be read: "
            f"{', '.join(map(str, found))}. Rename yours."
        )


def several_options(given: Sequence[Override]) -> dict[str, list[str]]:
    """The recipes that are chosen as a list (`experiment=[a,b]`), which Hydra leaves out of its
    choices."""
    last = {item.key_or_group: item.value() for item in given}
    chosen = {group: last.get(group) for group in RECIPE_GROUPS}
    return {
        group: [str(name) for name in names]
        for group, names in chosen.items()
        if isinstance(names, list)
    }


def plain(composed: Any, group: str) -> Any:
    """One group as plain values with resolved interpolations; an absent group is empty."""
    try:
        node = composed.get(group)
        return {} if node is None else OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or group}: {first_line(error)}.") from error


def parse(overrides: Sequence[str | Override], loader: Any = None) -> list[Override]:
    """Hydra's parse of the overrides; raises `UserError` for one that cannot be read. loader: knows
    the options, for `glob(...)`."""
    parsed = []
    for text in overrides:
        if isinstance(text, Override):
            if loader is None:
                parsed.append(text)
                continue
            text = str(text.input_line)
        text = quote_names(text)
        try:
            if "=" not in text and not text.startswith("~"):
                raise UserError(
                    f"'{text}' is not a setting. Settings are key=value, for instance head=eagle3 "
                    "or optim.lr=1e-4."
                )
            parsed += OverridesParser.create(config_loader=loader).parse_overrides([text])
        except UserError:
            raise
        except UNREADABLE as error:
            raise UserError(
                f"{shown(text)} cannot be read ({first_line(error)}). Put quotes around values "
                "with special characters: 'key=\"a, b\"'."
            ) from error
    return parsed


def quote_names(text: str) -> str:
    """A setting whose value, or whose list items, are put into quotes where Hydra requires it."""
    key, _, value = text.partition("=")
    if NAMED.fullmatch(value):
        return f"{key}='{value}'"
    items = [item.strip() for item in value[1:-1].split(",")]
    flat = value.startswith("[") and value.endswith("]") and not set("[]{}()'\"") & set(value[1:-1])
    if not flat or not any(NAMED.fullmatch(item) for item in items):
        return text
    quoted = [f"'{item}'" if NAMED.fullmatch(item) else item for item in items]
    return f"{key}=[{','.join(quoted)}]"


def check_override(stage: Stage, override: Override) -> str:
    """The override in the form that Hydra applies; raises `UserError` for one that sets nothing."""
    if override.is_sweep_override():
        raise UserError(
            f"'{override.input_line}' lists several values. Add -m to run once per value, or write "
            "[a,b] for a list."
        )
    key, value = override.key_or_group, override.value()
    require_key(stage, override)
    if override.is_delete():
        return str(override.input_line)
    if key in OPTION_GROUPS and not isinstance(value, dict):
        for name in value if isinstance(value, list) and key in RECIPE_GROUPS else [value]:
            if name is not None and str(name) not in options(key):
                own = " For a model of your own: target=local target.path=<folder or Hub id>."
                raise UserError(
                    f"{key}={name}: there is no such option.{suggest(str(name), options(key))}"
                    f"{own if key == 'target' else ''}"
                )
    return force(override)


def require_key(stage: Stage, override: Override) -> None:
    """Raise `UserError` for an override of a key that the stage does not have."""
    key, given = override.key_or_group, f"'{override.input_line}'"
    group, *below = key.split(".")
    if override.package is not None:
        raise UserError(
            f"{given}: options cannot be put elsewhere (@package); every group has one place."
        )
    if key in OPTION_GROUPS and not isinstance(override._value, dict):
        return
    if group not in GROUPS:
        raise UserError(f"{given}: there is no group '{group}'.{nearest(stage, override)}")
    if group not in stage.groups:
        raise UserError(
            f"{given}: stage '{stage.name}' does not read '{group}'. It reads: "
            f"{', '.join(stage.groups)}."
        )
    if not below and not override.is_delete():
        raise UserError(f"{given}: set one key at a time, as {group}.<key>=value.")


def nearest(stage: Stage, override: Override) -> str:
    """ " Did you mean ...?" for a name that is not a group: the keys that end in it, or groups."""
    key = override.key_or_group
    _, equals, value = str(override.input_line).partition("=")
    found = [] if "." in key else keys_named(key, stage.groups)
    if found:
        return f" Did you mean {' or '.join(f'{name}{equals}{value}' for name in found[:3])}?"
    return suggest(key.split(".")[0], {*GROUPS, *OPTION_GROUPS})


def force(override: Override) -> str:
    """An override as text that Hydra applies whether or not a YAML file has the key, so that a
    misspelt key reaches Headstart's own check. Listed values (`-m`) stay as they are."""
    text = str(override.input_line)
    if override.is_delete() or override.is_hydra_override():
        return text
    text = f"{override.key_or_group}={text.split('=', 1)[1]}"
    chosen = override.key_or_group in OPTION_GROUPS and not isinstance(override._value, dict)
    return text if chosen else f"++{text}"


def options(group: str) -> list[str]:
    """The options of a group: the names of its YAML files, and of kinds that installed packages
    offer."""
    offered = offered_kinds(tuple(sys.path)) if group == "head" else ()
    return sorted({*offered, *files(group)})


def files(group: str) -> list[str]:
    """The names of a group's YAML files."""
    return [path.stem for folder in conf_folders() for path in (folder / group).glob("*.yaml")]


def conf_folders() -> list[Path]:
    """The folders of configuration groups: this repository's conf/, then the user's folders."""
    return [*dict.fromkeys([CONF, *extra_folders()])]


def extra_folders() -> list[Path]:
    """The folders named in HEADSTART_CONF, then those of installed packages; raises `UserError` for
    a missing folder."""
    named = os.environ.get(EXTRA_VARIABLE, "").split(os.pathsep)
    folders = [Path(item).resolve() for item in named if item]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{EXTRA_VARIABLE} names '{folder}', which is not a folder.")
    return [*folders, *offered_folders(tuple(sys.path))]


@cache
def offered_folders(search_path: tuple[str, ...]) -> list[Path]:
    """The folders of YAML files that installed packages offer through entry points of the group
    `headstart.conf`; raises `UserError` for a missing folder. search_path: Python's, for which they
    are searched once, as this takes a tenth of a composition."""
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
    """`${repo:path}`: a path inside the repository, relative to the working directory. An installed
    wheel has no repository; there assets/ lies inside its package `headstart` (setup.py)."""
    found, here = REPOSITORY / relative, Path.cwd().resolve()
    shipped = REPOSITORY / "headstart" / relative
    if not found.exists() and shipped.exists():
        found = shipped
    return str(found.relative_to(here)) if found.is_relative_to(here) else str(found)


def default_engine() -> str:
    """`${default_engine:}`: DeepSpeed if it is installed; it cannot be installed on macOS."""
    return "torch" if find_spec("deepspeed") is None else "deepspeed"


def default_precision(planned_gpu: str) -> str:
    """`${default_precision:GPU}`: bfloat16 if training runs on a GPU, or is planned for the GPU of
    that name; otherwise float32, because many CPUs emulate bfloat16 at a fifth of the speed. Help
    composes without torch, which takes seconds to import, and is told both values."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "bfloat16 on a GPU, float32 on a CPU"
    return "bfloat16" if planned_gpu or torch.cuda.is_available() else "float32"


def fast_precision() -> str:
    """`${fast_precision:}`: for recipes that are measured on CPUs, bfloat16 on every device that
    multiplies it."""
    torch = sys.modules.get("torch")
    fast = multiplies_bfloat16() or (torch is not None and torch.cuda.is_available())
    return "bfloat16" if fast else "float32"


def first_line(error: BaseException) -> str:
    """The first line of another library's message, without its final full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")[:300]
