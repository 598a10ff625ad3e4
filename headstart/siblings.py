"""Finds Headstart's packages whatever else is on the import path.

`heads`, `inference`, `train`, `scripts` and `conf` lie beside the folder `headstart`, both in
site-packages and in a clone. A program's own `train.py` or `scripts/` comes first on the import
path. Therefore these packages are loaded from their folders by name, and imports inside them find
them in `sys.modules`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]


def load_siblings(names: Iterable[str]) -> None:
    """Put Headstart's own packages of these names into `sys.modules`.

    Raises ImportError if a module of another origin already has such a name: one process cannot
    hold two modules of the same name.
    """
    for name in names:
        folder, loaded = HOME / name, sys.modules.get(name)
        if loaded is None:
            _load(name, folder)
        elif folder not in [Path(place).resolve() for place in getattr(loaded, "__path__", ())]:
            origin = getattr(loaded, "__file__", None) or "another place"
            raise ImportError(
                f"a module '{name}' is imported already, from {origin}, and Headstart has a "
                f"package of that name ({folder}). Rename yours, or use headstart in a program "
                "that does not import it."
            )


def _load(name: str, folder: Path) -> None:
    """Import the package in `folder` under `name`, without using the import path."""
    file = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"Headstart is incomplete: '{folder}' is missing. Install it again.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
