"""Measures each acceptance rule above temperature 0, for the same drafters and drafts.

    python -m scripts.evidence.rules NAME=FOLDER NAME=FOLDER

Every drafter decodes the same prompts at every temperature with chains of 3, 5 and 7, a static and
a dynamic tree. It uses every rule that keeps the target's distribution and supports that shape,
with three seeds. Writes docs/reports/rules.{json,md}: tau of every rule, and the ratio of its (tau
- 1) to that of `match` for the same draft. `decode.rule=auto` stands for the rules marked there.
Drafters may be measured one at a time: the report keeps the others, and is written after every
draft.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.rules.names import best_rule
from inference.manifest import checkpoint_hash
from inference.measure.prompts import load_prompts, select_prompts
from inference.report.markdown import markdown_table
from scripts.evidence.common import Facts, cell, decode_totals, settings_of
from scripts.evidence.small_targets import (
    NEW_TOKENS,
    SEEDS,
    begin,
    compared,
    options_of_report,
    put_rows,
    save,
)
from scripts.tools.common import PROMPTS, command, cpu_target

MATCH = "match"
TEMPERATURES = (0.7, 1.0)
RULES = {
    "chain": (MATCH, "rejection", "block"),
    "tree": (MATCH, "specinfer", "traversal"),
    "dynamic": (MATCH, "specinfer"),
}


def drafts() -> list[DecodeConfig]:
    """The drafts that are decoded: chains, the tree of conf/decode/tree, a dynamic one."""
    plain = DecodeConfig(max_new_tokens=NEW_TOKENS, batch_size=16)
    static = settings_of("measure", "decode=tree").decode
    return [
        *(replace(plain, depth=depth) for depth in (3, 5, 7)),
        replace(plain, shape="tree", choices=static.choices, depth=static.depth),
        replace(plain, shape="dynamic", depth=4, nodes=26, width=8),
    ]


def label(draft: DecodeConfig) -> str:
    """The label for tables: chain and its depth, or the shape and its nodes."""
    nodes = draft.tree().num_nodes
    return f"chain {draft.depth}" if draft.shape == "chain" else f"{draft.shape} {nodes}"


def report(given: argparse.Namespace) -> None:
    """Decode, and write the report after every draft."""
    torch.set_num_threads(given.threads)
    named = [item.partition("=")[::2] for item in given.drafters]
    for name, folder in named:
        if not (name and folder):
            raise UserError(
                f"'{name}' names no checkpoint: give NAME=FOLDER, for instance "
                "eagle3=outputs/demo/train/eagle3/best."
            )
    target = cpu_target()
    found = load_prompts(PROMPTS)
    domains = len({prompt.domain for prompt in found})
    prompts = select_prompts(found, max(1, given.prompts // domains), seed=0)
    settings = {"target": target.info.revision, "prompts": len(prompts), "seeds": SEEDS}
    content = begin(given, settings)
    weights: dict[str, str] = content.setdefault("weights", {})
    for name, folder in named:
        now = checkpoint_hash(folder)
        if weights.setdefault(name, now) != now:  # rows of another drafter under this name
            content["rows"] = [row for row in content["rows"] if row["drafter"] != name]
            weights[name] = now
        for temperature in TEMPERATURES:
            for draft in drafts():
                totals = {
                    rule: [
                        decode_totals(
                            target,
                            Path(folder),
                            prompts,
                            replace(draft, temperature=temperature, rule=rule, seed=seed),
                        )
                        for seed in SEEDS
                    ]
                    for rule in RULES[draft.shape]
                }
                where = {"drafter": name, "temperature": temperature}
                where |= {"shape": draft.shape, "draft": label(draft)}
                rows = [
                    {**where, "rule": rule, **compared(ours, totals[MATCH])}
                    for rule, ours in totals.items()
                ]
                print("\n".join(table(rows)), flush=True)
                put_rows(content, rows, ("drafter", "temperature", "draft"))
                save(given, content, settings, markdown)


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of a markdown table of rules.json's `rows`, in their order: tau of each rule, and
    (tau - 1) divided by that of rule match, with 95% intervals. The rule that `decode.rule=auto`
    stands for is marked."""
    header = ["drafter", "T", "draft", "rule", "tau", "(tau - 1) against match"]
    shown = []
    for row in rows:
        ours, best = row["ours"], best_rule(str(row["shape"]), 1.0)
        assert isinstance(ours, dict)
        mark = " (auto)" if row["rule"] == best else ""
        against = cell(row["ratio"], row["ratio_ci95"])  # type: ignore[arg-type]
        shown.append(
            [
                *(f"{row[key]}" for key in ("drafter", "temperature", "draft")),
                f"{row['rule']}{mark}",
                cell(ours["tau"], ours["tau_ci95"]),
                "1" if row["rule"] == MATCH else against,
            ]
        )
    return markdown_table(header, shown)


def markdown(content: Facts) -> list[str]:
    """The lines of rules.md."""
    settings = content["settings"]
    return [
        "# Acceptance rules above temperature 0",
        "",
        f"{settings['prompts']} prompts, {len(settings['seeds'])} seeds each, up to "
        f"{settings['new_tokens']} new tokens; intervals: 95% bootstrap over prompts and seeds. "
        "`match` keeps the text of plain decoding for the seed, every other rule its "
        "distribution. In a dynamic tree drafts are certain for `specinfer`, and `match` grows it "
        f"along the shared Gumbel noise. Made by `{content['command']}`; all figures: rules.json.",
        "",
        *table(content["rows"]),
        "",
    ]


main = command(
    report,
    drafters={"positional": True, "nargs": "+", "help": "NAME=FOLDER of a checkpoint"},
    **options_of_report("rules"),
)

if __name__ == "__main__":
    sys.exit(main())
