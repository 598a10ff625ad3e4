"""Acceptance by kind of text, and its effect on speed: docs/reports/domains.{json,md}.

    headstart measure experiment=families bench=domains bench.prompts_per_domain=4 \\
      measure.name=domains \\
      measure.kinds=[ngram,suffix,jacobi,lookahead,early_exit,layer_skip,jump_forward]
    python -m scripts.evidence.domains

The second command reads the report of the first: chains of 4 at temperature 0, of every trained
family and of drafters that need no training; jump_forward drafts what a schema forces, and so only
structured output. Its first table has TAR by domain beside the ranges that serving guides publish
for large targets. The second table has TAR beside the measured speedup, and that speedup's share of
the possible one. The target answers the first turns of the same prompts, and the passes of Jacobi
iteration over these answers are counted (jacobi_blocks.py). --keep keeps the rows of the report
that the run lacks, so that a row can be added (measure.drafters=[dflash2] measure.kinds=[]).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from heads.api.errors import UserError
from inference.measure.prompts import load_prompts
from inference.report.claims import ratio_text
from inference.report.markdown import list_conditions, markdown_table
from inference.report.model import DrafterResult, Report, read_report
from inference.target.model import TargetModel
from scripts.evidence.common import (
    FAMILIES,
    Facts,
    cell,
    decode_prompts,
    keep_rows,
    read_json,
    settings_of,
    write_report,
)
from scripts.evidence.jacobi_blocks import passes_until_stable
from scripts.tools.common import REPORTS, command

COMMAND = (
    "headstart measure experiment=families bench=domains bench.prompts_per_domain=4 "
    "measure.name=domains "
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
"""Tokens of a block whose Jacobi iterations are counted."""


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
    if given.keep:
        kept = keep_rows(content, read_json(given.out.with_suffix(".json")), "domains.json")
        content["rows"] = sorted([*content["rows"], *kept], key=lambda one: -one["tau"])
    content["jacobi_iterations"] = iterations(found)
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


def iterations(found: Report) -> Facts:
    """The mean passes until a block is stable, by domain, over the target's greedy answers to the
    prompts of a measurement, without their schemas; and the number of blocks."""
    settings = settings_of("measure", "experiment=families", "bench=domains")
    target = TargetModel.load(settings.target)
    prompts = [
        replace(prompt, constraint=None)
        for prompt in load_prompts(settings.bench.prompts)
        if prompt.id in found.run.prompts["domains"]
    ]
    decode = replace(settings.decode, max_new_tokens=found.settings.max_new_tokens)
    done = decode_prompts(target, None, prompts, decode.without_draft())
    passes: dict[str, list[int]] = {name: [] for name in PUBLISHED}
    for one in done:
        before, answer = list(one.request.tokens), list(one.tokens)
        counted = passes_until_stable(target, before + answer, len(before), BLOCK)
        passes[prompts[one.request.index].domain] += counted
    return {
        name: {"passes": sum(counted) / max(len(counted), 1), "blocks": len(counted)}
        for name, counted in passes.items()
    }


def markdown(content: Facts, found: Report) -> list[str]:
    """The lines of the page."""
    rows, domains = content["rows"], list(PUBLISHED)
    conditions = list_conditions(found.target, found.device, found.settings, content["command"])
    shown = [
        [one["name"], *(f"{100 * one['domains'][name]['tar']:.0f}%" for name in domains)]
        for one in rows
    ]
    counted = content["jacobi_iterations"]
    jacobi = (
        f"Passes of Jacobi iteration that change a block of {BLOCK} tokens until it is stable, at "
        f"most {BLOCK}: "
        + ", ".join(f"{name} {counted[name]['passes']:.2f}" for name in domains)
        + ". Means over the whole blocks of the target's greedy answers to the same prompts (first "
        "turns; structured output without its schema), from the token before the block, repeated."
    )
    header = ["drafter", "TAR", "tau", "speedup", "efficiency"]
    return [
        "# Acceptance by the kind of text",
        "",
        f"Written by `{content['command']}` from [domains.json](domains.json). **TAR**: accepted "
        "drafted tokens per tested one. The domains are small models' versions of what the "
        "published ranges are about (scripts/assets/domains.py): translation carries parameters "
        "from one docstring notation into another, chat is conversations of three turns, "
        "structured output follows a JSON schema, creative prompts ask for what no document says. "
        "The ranges are those of serving guides, for large targets and their drafters. Rows with a "
        "device of their own in domains.json are of another run; every speedup is a "
        "ratio within its run.",
        "",
        *conditions,
        "",
        *markdown_table(["TAR", *domains], [["published", *PUBLISHED.values()], *shown]),
        "",
        jacobi,
        "",
        "## What acceptance becomes",
        "",
        "The speedup is that of the same run against plain decoding. A drafter's speed follows tau "
        "less what its drafts and the wider verifications cost: efficiency is the share of the "
        "speedup that its own draft times allow.",
        "",
        *markdown_table(
            [*header, *(f"speedup, {name}" for name in domains)],
            [speed_row(one, domains) for one in rows],
        ),
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
    keep={"action": "store_true", "help": "keep the rows of the report that the run lacks"},
)

if __name__ == "__main__":
    sys.exit(main())
