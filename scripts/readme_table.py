"""Writes the README's results table from the committed demo report: `python -m scripts.readme_table`, `--check` to compare only.

The table stands between two markers. It is the table that `headstart report` writes; no number in it is typed by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from heads.api.errors import UserError
from inference.manifest import write_bytes

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
REPORT = REPOSITORY / "docs" / "reports" / "demo.json"
START, END = "<!-- results: written by scripts/readme_table.py -->", "<!-- end of results -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or with --check return 1 when the README's differs."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given not in ([], ["--check"]):
        print("usage: python -m scripts.readme_table [--check]", file=sys.stderr)
        return 2
    text = README.read_text(encoding="utf-8")
    wanted = with_table(text, table(REPORT))
    if given:
        print("the README's table is up to date" if text == wanted else "the README's table is out of date")
        return int(text != wanted)
    if text != wanted:
        write_bytes(README, wanted.encode())
    print(README.name)
    return 0


def table(report_file: Path) -> str:
    """The results table of a report with what it was measured on, or a line that says that there is none yet."""
    from inference.report.markdown import facts, main_table
    from inference.report.model import read_report

    if not report_file.is_file():
        return "No report is committed yet: `make demo`, then copy outputs/demo/report.json to docs/reports/demo.json."
    report = read_report(report_file)
    return "\n".join([*main_table(report), "", *facts(report)])


def with_table(text: str, content: str) -> str:
    """`text` with `content` between the markers; raises `UserError` when they are not there exactly once."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise UserError(f"the README needs the lines '{START}' and '{END}' once each, in this order.")
    before, rest = text.split(START)
    return f"{before}{START}\n{content}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(main())
