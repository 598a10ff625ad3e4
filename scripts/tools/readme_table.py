"""Write the README's results table from the committed demo report: `python -m
scripts.tools.readme_table`.

The table stands between two markers. It is the table that `headstart report` writes; `--check` only
compares.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from inference.report.markdown import facts, main_table
from inference.report.model import read_report
from scripts.tools.common import REPORTS, ROOT, Section, make_parser, run

README = ROOT / "README.md"
REPORT = REPORTS / "demo.json"
RESULTS = Section("results", "scripts/tools/readme_table.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or with --check return 1 when the README's differs."""
    parser = make_parser("scripts.tools.readme_table", __doc__, check=(False, "compare only"))
    return run(parser, lambda given: RESULTS.write(README, table(REPORT), given.check), arguments)


def table(report_file: Path) -> str:
    """A report's results table with what it was measured on, or a line that says that there is
    none."""
    if not report_file.is_file():
        return (
            "No report is committed yet: `make demo`, then copy outputs/demo/report.json to "
            "docs/reports/demo.json."
        )
    report = read_report(report_file)
    return "\n".join([*main_table(report), "", *facts(report)])


if __name__ == "__main__":
    sys.exit(main())
