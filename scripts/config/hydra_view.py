"""The output of Hydra's own flags: `--cfg job|hydra|all`, `--info ...`, `--hydra-help`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override

from scripts.config.compose import check_override, force, hydra_of, root_of
from scripts.config.stages import Stage


def print_config(
    stage: Stage, overrides: Sequence[Override], part: str, package: str, resolve: bool
) -> None:
    """Print the composed YAML as Hydra does. part: `job` without Hydra's own settings, `hydra` with
    only these, or `all`. package: print only this key. resolve: resolve interpolations."""
    texts = forced(stage, overrides)
    with hydra_of(stage) as hydra:
        hydra.show_cfg(root_of(stage), texts, part, package or None, resolve)


def print_info(stage: Stage, overrides: Sequence[Override], part: str) -> None:
    """Print Hydra's information: search path, plug-ins, defaults list, composition."""
    texts, root = forced(stage, overrides), logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        with hydra_of(stage) as hydra:
            hydra.show_info(part, root_of(stage), texts)
    finally:  # Hydra prints it by logging at debug level
        root.handlers, root.level = before, level


def print_help(stage: Stage, overrides: Sequence[Override]) -> None:
    """Print the help that Hydra gives about itself."""
    with hydra_of(stage) as hydra:
        parser = get_args_parser()
        hydra.hydra_help(None, parser, parser.parse_args([str(o.input_line) for o in overrides]))


def forced(stage: Stage, overrides: Sequence[Override]) -> list[str]:
    """The overrides as texts for Hydra, with those of the stage checked."""
    return [
        force(item) if item.is_hydra_override() else check_override(stage, item)
        for item in overrides
    ]
