"""The decoder's evidence in one place: `python -m scripts.evidence.decoder` writes
docs/decoder.md's tables.

It measures nothing. It puts the tables of the reports that other commands wrote, each with its
command, into the page. A report that is missing is left out and named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from heads.api.errors import UserError
from inference.report.markdown import markdown_table
from scripts.evidence import plain_decoding
from scripts.evidence import soak as soak_run
from scripts.evidence.common import DOCS, REPORTS, cell, read_json
from scripts.tools.common import Section, make_parser, run
from scripts.tools.rank_trees import TauRow

PAGE = DOCS / "decoder.md"
SECTION = Section("decoder", "scripts/evidence/decoder.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page's section; returns the exit status."""
    return run(make_parser("scripts.evidence.decoder", __doc__), report, arguments)


def report(given: argparse.Namespace) -> None:
    """Write the page's section."""
    sections, missing = [], []
    for name, (title, render) in PARTS.items():
        path = REPORTS / f"{name}.json"
        content = read_json(path)
        if not content:
            missing.append(name)
            continue
        try:
            lines = render(content)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"'{path}' is broken ({error!r}). Write it with its command."
            ) from error
        source = f"[{name}.json](reports/{name}.json), by `{content['command']}`."
        sections.append("\n".join([f"### {title}", "", *lines, "", source]))
    SECTION.write(PAGE, "\n\n".join(sections))
    print(f"{len(sections)} parts; missing: {', '.join(missing) or 'none'}")


def speed(content: plain_decoding.Content) -> list[str]:
    """plain_decoding.json: our loops and transformers', in turns."""
    header = ["arm", "ms / token", "over generate", "tau", "speedup", "efficiency"]
    header += ["outside draft and verify", "texts"]
    rows = []
    for name, arm in content["arms"].items():
        speedup = cell(arm["speedup"], arm["speedup_ci95"]) if "speedup" in arm else ""
        outside = arm.get("outside_draft_and_verify")
        rows.append(
            [
                name,
                f"{arm['ms_per_token']:.2f}",
                cell(arm["speed_over_generate"], arm["ci95"]),
                f"{arm['tau']:.2f}" if "tau" in arm else "",
                speedup,
                f"{arm['efficiency']:.2f}" if "efficiency" in arm else "",
                "" if outside is None else f"{outside:.1%}",
                f"{arm['identical_texts']}/{content['prompts'] * content['repeats']}",
            ]
        )
    facts = (
        f"{content['target']}, {content['dtype']}, {content['threads']} threads, batch 1, "
        f"{content['prompts']} prompts x {content['repeats']} repeats, up to "
        f"{content['max_new_tokens']} new tokens."
    )
    return [*markdown_table(header, rows), "", facts]


def trees(content: Mapping[str, object]) -> list[str]:
    """tree_ranking.json: every measured tau with its interval."""
    rows = []
    for part in ("shapes", "rules", "rankings"):
        for (drafter, temperature, *what), found in leaves(content.get(part, {})):
            tau = cell(found["tau"], found["ci95"])
            rows.append([part, drafter, temperature, " ".join(what), tau])
    return markdown_table(["part", "drafter", "temperature", "what", "tau"], rows)


def soak(content: soak_run.Content) -> list[str]:
    """soak.json: the result of random work."""
    return [
        f"{'passed' if content['passed'] else 'FAILED'}: {content['minutes']} minutes, "
        f"{content['rounds']} rounds, {content['answers']} answers with {content['tokens']} "
        f"tokens, {content['cancelled']} cancelled; {content['identical']} identical, "
        f"{content['near_ties']} near ties, {content['mismatches']} mismatches; resident memory "
        f"{content['memory_growth']:+.1%} from the second to the last third "
        f"({content['memory_growth_allowed']:.0%} allowed)."
    ]


PARTS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "plain_decoding": ("Speed on this CPU", speed),
    "tree_ranking": ("Trees and rules", trees),
    "soak": ("Soak", soak),
}


def leaves(tree: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], TauRow]]:
    """The entries of nested mappings that hold a `tau`, with their keys."""
    if isinstance(tree, dict) and "tau" in tree:
        yield path, cast(TauRow, tree)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))


if __name__ == "__main__":
    sys.exit(main())
