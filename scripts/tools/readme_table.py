"""Write the README's results table from the committed demo report: `python -m
scripts.tools.readme_table`.

The table is between two markers. It is the table that `headstart report` writes; `--check` only
compares.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inference.report.markdown import facts, main_table
from inference.report.model import read_report
from scripts.tools.common import REPORTS, ROOT, Section, command

README = ROOT / "README.md"
REPORT = REPORTS / "demo.json"
RESULTS = Section("results", "scripts/tools/readme_table.py")


def write(given: argparse.Namespace) -> int:
    """Write the table; with --check, return 1 if the README's table differs."""
    return RESULTS.write(README, table(REPORT), given.check)


def table(report_file: Path) -> str:
    """A report's results table with the conditions of its measurement, or a line that says that
    there is no report."""
    if not report_file.is_file():
        return (
            "No report is committed yet: `make demo`, then copy outputs/demo/report.json to "
            "docs/reports/demo.json."
        )
    report = read_report(report_file)
    return "\n".join([*main_table(report), "", *facts(report)])


main = command(write, check=(False, "compare only"))

if __name__ == "__main__":
    sys.exit(main())
