"""All operations that have kernels, and the implementation of each that a device runs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import asdict

import torch

from heads.kernels.dispatch import OPS, Op, choose

DECLARED_IN = ("heads.kernels.reference", "inference.kernels.reference")
"""Packages whose modules declare operations."""


def all_ops() -> Iterator[Op]:
    """Every operation, ordered by name; imports the modules that declare them."""
    for name in DECLARED_IN:
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{name}.{module.name}")
    yield from (OPS[name] for name in sorted(OPS))


def report(device: torch.device | str) -> list[dict[str, str]]:
    """For every operation: its name, its implementation for tensors on `device`, and the reason."""
    return [{"op": op.name, **asdict(choose(op, device))} for op in all_ops()]
