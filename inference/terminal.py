"""Lines and tables for the terminal: their width and style."""

from __future__ import annotations

import os
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

UNBROKEN = 10_000
"""Columns of output that is not a terminal. Logs are searched line by line, so no line is
broken."""


def make_console(**settings: Any) -> Console:
    """A console (`rich.console.Console(**settings)`) as wide as the terminal, or as COLUMNS says.
    Lines that go to a file or a pipe are not broken."""
    found = Console(**settings)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = UNBROKEN
    return found


def make_table(title: str = "", **settings: Any) -> Table:
    """An empty table in the style that all tables share."""
    return Table(
        title=title or None, box=SIMPLE_HEAD, pad_edge=False, title_justify="left", **settings
    )
