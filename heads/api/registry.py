"""The kinds of drafters, by file name: `heads/eagle3.py` is the kind `eagle3`.

A kind's module defines `Config` (a frozen dataclass, its YAML's schema) and `Drafter` (a class
built as `Drafter(config, info)`). Adding a kind is adding that one file and
`conf/head/<kind>.yaml`; nothing here lists names.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import heads
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError, suggest


@dataclass(frozen=True)
class Kind:
    """One kind: its name, the dataclass of its configuration and its class."""

    name: str
    config_class: type
    drafter_class: type

    @property
    def trainable(self) -> bool:
        """False for kinds with the decoding contract only: without weights (n-gram lookup) or
        without weights of their own."""
        return issubclass(self.drafter_class, TrainableDrafter) and self.drafter_class.trains

    def needs_training(self, config: Any) -> bool:
        """Whether a drafter of this configuration has to be trained before it drafts."""
        cls = self.drafter_class
        return issubclass(cls, TrainableDrafter) and not cls.works_untrained(config)

    def export_method(self, config: Any) -> str:
        """The method by which serving engines know a drafter of this configuration; see
        `TrainableDrafter.export_method`. For kinds without weights: the kind's name."""
        cls = self.drafter_class
        return cls.export_method(config) if issubclass(cls, TrainableDrafter) else self.name


def kind_names() -> list[str]:
    """Names of all kinds, sorted, without importing them."""
    modules = pkgutil.iter_modules(heads.__path__)
    return sorted(m.name for m in modules if not m.ispkg and not m.name.startswith("_"))


def get_kind(name: str) -> Kind:
    """Import and return a kind; raises `UserError` with suggestions when there is none."""
    if name not in kind_names():
        raise UserError(f"there is no drafter kind '{name}'.{suggest(name, kind_names())}")
    module: Any = importlib.import_module(f"heads.{name}")
    for needed in ("Config", "Drafter"):
        if not hasattr(module, needed):
            raise UserError(
                f"heads/{name}.py is not a drafter kind: it must define `{needed}` (see "
                "docs/adding_a_drafter.md)."
            )
    return Kind(name, module.Config, module.Drafter)
