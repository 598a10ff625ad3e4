"""Acceptance by kind of text, and its effect on speed: docs/reports/domains.{json,md}.

    headstart measure experiment=families bench=domains measure.name=domains \\
      measure.kinds=[ngram,suffix,jacobi,lookahead,early_exit,layer_skip,jump_forward]
    python -m scripts.evidence.domains

The second command measures nothing. It reads the report of the first: chains of 4 at temperature 0,
of every trained family and of drafters that need no training; jump_forward drafts what a schema
forces, and so only structured output. Its first table has TAR by domain beside the ranges that
serving guides publish for large targets. The second table has TAR beside the measured speedup, and
that speedup's share of the possible one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from heads.api.errors import UserError
from inference.report.claims import ratio_text
from inference.report.markdown import list_conditions, markdown_table
from inference.report.model import DrafterResult, Report, read_report
from scripts.evidence.common import FAMILIES, Facts, cell, write_report
from scripts.tools.common import REPORTS, command

COMMAND = (
    "headstart measure experiment=families bench=domains measure.name=domains "
    "measure.kinds=[ngram,suffix,jacobi,lookahead,early_exit,layer_skip,jump_forward] && "
    "python -m scripts.evidence.domains"
)
PUBLISHED = {
    "structured": "highest",
    "code": "75-85%",
    "translation": "70-80%",
    "summaries": "65-75%",
    "chat": "55-70%",
    "creative": "-",
}
"""Domain -> the range that guides publish, for targets of 7 billion parameters and more."""
BLOCK = 4
"""Tokens of the block whose Jacobi iterations are counted."""


def report(given: argparse.Namespace) -> None:
    """Read the measurement and write the report."""
    path = given.run / "domains" / "report.json"
    if not path.is_file():
        raise UserError(f"'{path}' is missing. Run `{COMMAND.partition(' && ')[0]}` first.")
    found = read_report(path)
    if unknown := {name for one in found.drafters for name in one.domains} ^ set(PUBLISHED):
        raise UserError(
            f"'{path}' was not measured with bench=domains: it has other domains "
            f"({', '.join(sorted(unknown))}). Measure again."
        )
    content = collect(found)
    write_report(given.out, content, markdown(content, found))
    print(f"{len(content['rows'])} drafters")


def collect(found: Report) -> Facts:
    """The content of the report."""
    rows = [row(one) for one in sorted(found.drafters, key=lambda one: -one.tau)]
    return {
        "format": 1,
        "command": COMMAND,
        "target": found.target.to_dict(),
        "device": found.device.to_dict(),
        "settings": found.settings.to_dict(),
        "git": found.git or {},
        "published": PUBLISHED,
        "rows": rows,
        "jacobi_iterations": {
            row["name"]: iterations(row) for row in rows if row["kind"] == "jacobi"
        },
    }


def row(one: DrafterResult) -> Facts:
    """The values of a drafter that are kept."""
    whole = one.to_dict()
    keys = ("tau", "tau_ci95", "tar", "speedup", "speedup_ci95", "lossless")
    kept = {key: whole[key] for key in keys}
    domains = {name: found.to_dict() for name, found in one.domains.items()}
    return {"name": one.name, "kind": one.kind, **kept, "efficiency": one.efficiency} | {
        "domains": domains
    }


def iterations(row: Facts) -> dict[str, float]:
    """The number of Jacobi's verifications until a block of `BLOCK` tokens no longer changes, by
    domain. One verification fixes tau tokens on average (BLOCK: only one at a time, as in plain
    decoding)."""
    return {name: BLOCK / found["tau"] for name, found in row["domains"].items()}


def markdown(content: Facts, found: Report) -> list[str]:
    """The lines of the page."""
    rows, domains = content["rows"], list(PUBLISHED)
    conditions = list_conditions(found.target, found.device, found.settings, content["command"])
    shown = [
        [one["name"], *(f"{100 * one['domains'][name]['tar']:.0f}%" for name in domains)]
        for one in rows
    ]
    jacobi = [
        f"Jacobi's iterations until a block of {BLOCK} tokens is stable, of at most {BLOCK} "
        f"({BLOCK} / tau): " + ", ".join(f"{name} {figures[name]:.2f}" for name in domains) + "."
        for figures in content["jacobi_iterations"].values()
    ]
    return [
        "# Acceptance by the kind of text",
        "",
        f"Written by `{content['command']}` from [domains.json](domains.json). **TAR**: accepted "
        "drafted tokens per tested one. The domains are small models' versions of what the "
        "published ranges are about (scripts/assets/domains.py): translation carries parameters "
        "from one docstring notation into another, chat is conversations of three turns, "
        "structured output follows a JSON schema, creative prompts ask for what no document says. "
        "The ranges are those of serving guides, for large targets and their drafters.",
        "",
        *conditions,
        "",
        *markdown_table(["TAR", *domains], [["published", *PUBLISHED.values()], *shown]),
        "",
        *jacobi,
        "",
        "## What acceptance becomes",
        "",
        "The speedup is that of the same run against plain decoding. A drafter's speed follows tau "
        "less what its drafts and the wider verifications cost: efficiency is the share of the "
        "speedup that its own draft times allow.",
        "",
        *markdown_table(
            ["drafter", "TAR", "tau", "speedup", "efficiency", *domains],
            [speed_row(one, domains) for one in rows],
        ),
        "",
        "By domain: speedup.",
        "",
    ]


def speed_row(one: Facts, domains: Sequence[str]) -> list[str]:
    """A line of the second table."""
    return [
        one["name"],
        f"{100 * one['tar']:.0f}%",
        cell(one["tau"], one["tau_ci95"]),
        ratio_text(one["speedup"], one["speedup_ci95"]),
        f"{100 * one['efficiency']:.0f}%",
        *(f"{one['domains'][name]['speedup']:.2f}" for name in domains),
    ]


main = command(
    report,
    run={"positional": True, "type": Path, "nargs": "?", "default": FAMILIES},
    out=(REPORTS / "domains", "without its ending"),
)

if __name__ == "__main__":
    sys.exit(main())
