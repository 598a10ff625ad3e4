"""The decoder's evidence in one place: `python -m scripts.decoder_report` writes docs/reports/decoder.json and the page's tables.

It measures nothing. It collects the reports that other commands wrote, each with its command, and renders them into the page.
A report that is not there is left out and named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heads.api.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs" / "reports"
PAGE = ROOT / "docs" / "decoder.md"
BEGIN, END = "<!-- decoder: written by scripts/decoder_report.py -->", "<!-- end of decoder -->"
Table = list[list[str]]


def main() -> int:
    """Write both files; returns the exit status."""
    try:
        report, text = collect()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    (REPORTS / "decoder.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(f"{len(report['parts'])} parts; missing: {', '.join(report['missing']) or 'none'}")
    return 0


def collect() -> tuple[dict[str, Any], str]:
    """decoder.json's content, and the section of the page."""
    report: dict[str, Any] = {
        "format": 1,
        "command": "python -m scripts.decoder_report",
        "parts": {},
        "missing": [],
    }
    sections = []
    for name, (title, render) in PARTS.items():
        path = REPORTS / f"{name}.json"
        if not path.is_file():
            report["missing"].append(name)
            continue
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            lines = render(content)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"'{path}' is broken ({error!r}). Write it again with its command.") from error
        report["parts"][name] = content
        source = f"[{name}.json](reports/{name}.json), by `{content['command']}`"
        sections.append("\n".join([f"### {title}", "", *lines, "", source + "."]))
    return report, "\n\n".join(sections)


def with_section(page: str, text: str) -> str:
    """`page` with what stands between the two marks replaced."""
    if BEGIN not in page or END not in page:
        raise UserError(
            f"'{PAGE}' has lost its marks {BEGIN} and {END}; put them back where the figures belong."
        )
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


# ---- one renderer per report -----------------------------------------------------------------------------------------------


def speed(content: Mapping[str, Any]) -> list[str]:
    """`compare_generate`: our loops and transformers', in turns."""
    rows = [
        [
            "arm",
            "ms / token",
            "over generate",
            "tau",
            "speedup",
            "efficiency",
            "outside draft and verify",
            "texts",
        ]
    ]
    for name, arm in content["arms"].items():
        rows.append(
            [
                name,
                f"{arm['ms_per_token']:.2f}",
                with_interval(arm["speed_over_generate"], arm["ci95"]),
                maybe(arm, "tau"),
                with_interval(arm["speedup"], arm["speedup_ci95"]) if "speedup" in arm else "",
                maybe(arm, "efficiency"),
                f"{arm['outside_draft_and_verify']:.1%}" if "outside_draft_and_verify" in arm else "",
                f"{arm['identical_texts']}/{content['prompts'] * content['repeats']}",
            ]
        )
    facts = f"{content['target']}, {content['dtype']}, {content['threads']} threads, batch 1, {content['prompts']} prompts x "
    return [
        *table(rows),
        "",
        facts + f"{content['repeats']} repeats, up to {content['max_new_tokens']} new tokens.",
    ]


def trees(content: Mapping[str, Any]) -> list[str]:
    """`rank_trees`: every measured tau with its interval."""
    rows = [["part", "drafter", "temperature", "what", "tau"]]
    for part in ("shapes", "rules", "rankings"):
        for path, found in leaves(content.get(part, {})):
            drafter, temperature, *what = path
            rows.append(
                [part, drafter, temperature, " ".join(what), with_interval(found["tau"], found["ci95"])]
            )
    return table(rows)


def soak(content: Mapping[str, Any]) -> list[str]:
    """`soak`: what random work showed."""
    verdict = "passed" if content["passed"] else "FAILED"
    work = f"{content['minutes']} minutes, {content['rounds']} rounds, {content['answers']} answers with {content['tokens']} tokens"
    found = f"{content['identical']} identical, {content['near_ties']} near ties, {content['mismatches']} mismatches"
    memory = f"{content['memory_growth']:+.1%} from the second to the last third ({content['memory_growth_allowed']:.0%} allowed)"
    return [f"{verdict}: {work}, {content['cancelled']} cancelled; {found}; resident memory {memory}."]


PARTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "plain_decoding": ("Speed on this CPU", speed),
    "tree_ranking": ("Trees and rules", trees),
    "soak": ("Soak", soak),
}


# ---- small helpers -----------------------------------------------------------------------------------------------------------


def leaves(
    tree: Mapping[str, Any], path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The entries of nested mappings that hold a `tau`, with their keys."""
    if "tau" in tree:
        return [(path, tree)]
    found = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += leaves(value, (*path, str(key)))
    return found


def with_interval(value: float, interval: list[float]) -> str:
    """A number and its 95% interval."""
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def maybe(arm: Mapping[str, Any], key: str) -> str:
    """A number to two digits, or nothing where the arm has none."""
    return f"{arm[key]:.2f}" if key in arm else ""


def table(rows: Table) -> list[str]:
    """Markdown lines; the first row is the head."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in body)]


if __name__ == "__main__":
    sys.exit(main())
