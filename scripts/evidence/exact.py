"""Measures `decode.exact`: `python -m scripts.evidence.exact` writes exact.{json,md}.

The embedded target answers its own evaluation prompts plainly, one at a time. Then it answers them
with chains and trees of drafts that are right in seven of ten tokens, and in batches, each with
exact=false and exact=true in turn. The report counts texts that differ from the plain one, and
flips: tokens that the target picks differently, behind the same text, if it reads as many tokens at
a time as the draft has. The cost is the ratio of seconds; both ways of one arm are decoded one
after the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from heads.api.errors import UserError
from inference.audit.comparison import flips_alone
from inference.decoding.config import DecodeConfig
from inference.measure.config import process_facts
from inference.report.markdown import markdown_table
from inference.target.hardware import device_facts
from inference.target.loading import DTYPES, pick_device
from scripts.evidence.acceptance.correctness import Writing, dtype_name
from scripts.evidence.acceptance.parts import Setting
from scripts.evidence.acceptance.shapes import FULL
from scripts.evidence.common import Facts, write_report
from scripts.tools.common import REPORTS, command

ABOUT = (
    "Embedded target, greedy; drafts are right seven times of ten. **texts**: answers that are not "
    "those of plain decoding, one at a time. **flips**: tokens per 1,000 that the target picks "
    "differently behind the same text when it reads as many at a time as the draft has. **time**: "
    "seconds with exact=true over those without, same arm, in turn."
)


@dataclass(frozen=True)
class ArmOfText:
    """A way to write the same text. nodes: the nodes that a verification reads at a time."""

    name: str
    drafted: bool
    decode: DecodeConfig

    @property
    def nodes(self) -> int:
        return self.decode.tree().num_nodes if self.drafted else 1


def report(given: argparse.Namespace) -> None:
    """Decode and write the report."""
    device, rows = pick_device(given.device), list[Facts]()
    for name in given.dtypes:
        if name not in DTYPES:
            raise UserError(f"--dtypes: '{name}' is none of {', '.join(DTYPES)}.")
        sizes = replace(FULL, tokens=given.tokens, texts=given.prompts)
        rows += list(compare(Setting(device, DTYPES[name], sizes)))
    content = {"format": 1, "command": given.command, "device": device_facts(device)}
    content |= {"versions": process_facts()["versions"], "tokens": given.tokens, "rows": rows}
    write_report(given.out, content, page(content))
    print(f"{given.out}.json, {given.out}.md")


def arms(tokens: int) -> Iterator[ArmOfText]:
    """Plain decoding and the arms that are compared with it."""
    plain = DecodeConfig(shape="none", max_new_tokens=tokens)
    chain = DecodeConfig(depth=5, max_new_tokens=tokens)
    yield ArmOfText("plain", False, plain)
    yield ArmOfText("plain, 8 rows", False, replace(plain, batch_size=8))
    yield ArmOfText("chain of 5", True, chain)
    yield ArmOfText("chain of 5, 8 rows", True, replace(chain, batch_size=8))
    yield ArmOfText("tree of 26", True, replace(chain, shape="dynamic", nodes=26))


def compare(setting: Setting) -> Iterator[Facts]:
    """The rows of one dtype."""
    writing = Writing.of(setting, setting.dtype)
    plain = {False: writing.plain}
    exact = DecodeConfig(shape="none", max_new_tokens=setting.sizes.tokens, exact=True)
    plain[True] = writing.decode(None, exact)
    drafter = writing.guesses()
    for arm in arms(setting.sizes.tokens):
        row: Facts = {"dtype": dtype_name(setting.dtype), "arm": arm.name, "nodes": arm.nodes}
        for way in (False, True):
            begin = time.perf_counter()
            answers = writing.decode(
                drafter if arm.drafted else None, replace(arm.decode, exact=way)
            )
            seconds = time.perf_counter() - begin
            differing = sum(a != b for a, b in zip(answers, plain[way], strict=True))
            found: dict[str, Any] = {"seconds": seconds, "differing": differing}
            if arm.nodes > 1:
                given = writing.target, writing.requests, plain[way], arm.decode.sampling()
                counts = flips_alone(*given, arm.nodes, exact=way, chunk=arm.decode.prefill_chunk)
                found["flips_per_1000"] = 1000 * counts[1] / counts[0]
                found["tokens"] = counts[0]
            row["exact" if way else "usual"] = found
        row["texts"] = len(plain[True])
        row["time"] = row["exact"]["seconds"] / row["usual"]["seconds"]
        yield row


def page(content: Facts) -> list[str]:
    """The report as Markdown."""
    header = ["dtype", "arm", "texts, usual", "exact", "flips, usual", "exact", "time"]
    body = [
        [
            row["dtype"],
            row["arm"],
            *(f"{row[way]['differing']}/{row['texts']}" for way in ("usual", "exact")),
            *(
                f"{row[way]['flips_per_1000']:.2f}" if "flips_per_1000" in row[way] else ""
                for way in ("usual", "exact")
            ),
            f"{row['time']:.2f}",
        ]
        for row in content["rows"]
    ]
    device = content["device"]
    return [
        "# Exact decoding",
        "",
        ABOUT,
        "",
        f"`{content['command']}` on {device['name']} ({device['threads']} threads).",
        "",
        *markdown_table(header, body, texts=2),
        "",
    ]


main = command(
    report,
    dtypes={"nargs": "+", "default": ("bfloat16", "float32"), "metavar": "DTYPE"},
    device="cpu",
    prompts=12,
    tokens=96,
    out=REPORTS / "exact",
)

if __name__ == "__main__":
    sys.exit(main())
