"""The kinds of drafters, by file name: `heads/eagle3.py` is the kind `eagle3`.

A kind's module defines `Config` (a frozen dataclass, its YAML's schema) and `Drafter` (a class
built as `Drafter(config, info)`). To add a kind, add that one file and `conf/head/<kind>.yaml`;
nothing here lists names. A separate package adds kinds through entry points of the group
`headstart.kinds`, from a kind's name to its module.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.kinds import find_kind


@dataclass(frozen=True)
class Kind:
    """One kind: its name, the dataclass of its configuration and its class."""

    name: str
    config_class: type
    drafter_class: type

    @property
    def trainable(self) -> bool:
        """False for kinds with only the decoding contract: those without weights (n-gram lookup) or
        without weights of their own."""
        return issubclass(self.drafter_class, TrainableDrafter) and self.drafter_class.trains

    def needs_training(self, config: Any) -> bool:
        """Whether a drafter of this configuration has to be trained before it drafts."""
        cls = self.drafter_class
        return issubclass(cls, TrainableDrafter) and not cls.works_untrained(config)

    def export_method(self, config: Any) -> str:
        """The method under which serving engines run a drafter of this configuration; see
        `TrainableDrafter.export_method`. For kinds without weights: the kind's name."""
        cls = self.drafter_class
        return cls.export_method(config) if issubclass(cls, TrainableDrafter) else self.name


def get_kind(name: str) -> Kind:
    """Import and return a kind; raises `UserError` if there is none of that name, or if the module
    found does not define a kind."""
    place = find_kind(name)
    if isinstance(place, str):
        module: Any = importlib.import_module(place)
        where = f"heads/{name}.py"
    else:
        where = f"'{place.value}', which offers the kind '{name}',"
        try:
            module = place.load()
        except (ImportError, AttributeError) as error:
            raise UserError(f"{where} cannot be imported: {error}.") from error
    for needed in ("Config", "Drafter"):
        if not hasattr(module, needed):
            raise UserError(
                f"{where} is not a drafter kind: it must define `{needed}` (see "
                "docs/adding_a_drafter.md)."
            )
    if module.Drafter.kind != name:
        raise UserError(
            f"{where} defines the kind '{module.Drafter.kind}': the name in `Drafter.kind`, which "
            "checkpoints hold, must be the one that it is found by."
        )
    return Kind(name, module.Config, module.Drafter)
