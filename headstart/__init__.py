"""Headstart's Python interface: the only import that a program needs.

    import headstart

    trained = headstart.train("eagle3", target="Qwen/Qwen3-8B", data="prompts.jsonl", run="mine")
    engine = headstart.Engine.load("Qwen/Qwen3-8B", trained.checkpoint)
    print(engine.generate("Why is the sky blue?", max_new_tokens=64)[0].text)

`import headstart` imports nothing heavy: a name is imported when it is first used. The packages
behind it (`heads`, `inference`, `train`, `scripts`, `conf`) have common names, so a program's own
`train.py` or `scripts/` may come before them on the import path. Names used from here still resolve
to the installed packages (`headstart.siblings`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headstart.siblings import load_siblings

if TYPE_CHECKING:
    from heads.api.errors import UserError
    from headstart.measuring import measure
    from headstart.training import Trained, train
    from inference.decoding.config import DecodeConfig
    from inference.decoding.engine import Engine, Generation
    from inference.decoding.loading import load_drafter
    from inference.measure.config import BenchConfig
    from inference.report.model import Report, read_report
    from inference.target.loading import TargetConfig
    from inference.target.model import TargetModel
    from train.policy.follower import Follower
    from train.policy.training import RefreshSettings
    from train.policy.trl import TrlRollouts

__version__ = "0.1.0"

__all__ = [
    "BenchConfig",
    "DecodeConfig",
    "Engine",
    "Follower",
    "Generation",
    "RefreshSettings",
    "Report",
    "TargetConfig",
    "TargetModel",
    "Trained",
    "TrlRollouts",
    "UserError",
    "load_drafter",
    "measure",
    "read_report",
    "train",
]

_DECODING = ("heads", "inference")
_TRAINING = ("heads", "inference", "train")
_EVERYTHING = ("heads", "inference", "train", "scripts", "conf")
_HOMES = {
    "BenchConfig": ("inference.measure.config", _DECODING),
    "DecodeConfig": ("inference.decoding.config", _DECODING),
    "Engine": ("inference.decoding.engine", _DECODING),
    "Follower": ("train.policy.follower", _TRAINING),
    "Generation": ("inference.decoding.engine", _DECODING),
    "RefreshSettings": ("train.policy.training", _TRAINING),
    "Report": ("inference.report.model", _DECODING),
    "TargetConfig": ("inference.target.loading", _DECODING),
    "TargetModel": ("inference.target.model", _DECODING),
    "Trained": ("headstart.training", _EVERYTHING),
    "TrlRollouts": ("train.policy.trl", _TRAINING),
    "UserError": ("heads.api.errors", _DECODING),
    "load_drafter": ("inference.decoding.loading", _DECODING),
    "measure": ("headstart.measuring", _EVERYTHING),
    "read_report": ("inference.report.model", _DECODING),
    "train": ("headstart.training", _EVERYTHING),
}
"""Name -> the module that defines it, and the packages that this module needs."""


def __getattr__(name: str) -> Any:
    """The public name, imported when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headstart' has no attribute '{name}'")
    module, packages = _HOMES[name]
    load_siblings(packages)
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
