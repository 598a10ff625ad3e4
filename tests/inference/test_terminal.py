"""Lines for people: unbroken in files and pipes, one style of tables."""

from __future__ import annotations

import io

import pytest

from inference.terminal import make_console, make_table


def printed(text: str) -> str:
    """What a console that is no terminal makes of a text."""
    file = io.StringIO()
    make_console(file=file).print(text)
    return file.getvalue()


def test_no_line_is_broken_outside_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = "word " * 400 + "end"
    assert printed(line) == line + "\n"
    monkeypatch.setenv("COLUMNS", "80")  # asked for
    assert max(map(len, printed(line).splitlines())) <= 80


def test_a_table_is_as_wide_as_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table, file = make_table("title"), io.StringIO()
    table.add_column("name")
    table.add_row("long " * 60)
    make_console(file=file).print(table)
    lines = file.getvalue().splitlines()
    assert lines[0].strip() == "title"
    assert ("long " * 60).strip() in file.getvalue()
    assert max(map(len, lines)) < 400
