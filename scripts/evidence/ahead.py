"""Measures what `decode.ahead` gains: `python -m scripts.evidence.ahead` writes ahead.{json,md}.

The embedded target answers its own evaluation prompts, one at a time, with every drafter in three
ways: drafting afterwards on one CPU thread, the same on two (`--serial`), and drafting ahead with
one thread each for target and drafter. All ways of all drafters take turns within a prompt, in a
rotating order. Every text is compared with that of plain decoding, and every answer's passes with
those of drafting afterwards.

Drafters: n-gram lookup, the unchanged small model of assets/tiny-target-small, and each
`--drafter`.

The embedded target's passes are short operations that Python launches, and Python's threads take
turns. So the same is measured on a wide target of random weights (`WIDE`), whose operations take
long enough to run in parallel. Its text counts up (acceptance/shapes.py), and its drafter, a small
model with random weights, counts wrongly at one token in five.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from heads.api.checkpoint import new_drafter
from heads.api.drafter import forget
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.loading import load_drafter
from inference.decoding.requests import Completion, Request
from inference.measure import metrics
from inference.measure.config import process_facts
from inference.measure.metrics import Outcome, Totals, divide
from inference.measure.prompts import Prompt, load_prompts, to_requests
from inference.report.markdown import markdown_table
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from scripts.evidence.acceptance.shapes import (
    Shape,
    as_target,
    counting_model,
    make_counting,
    new_head,
)
from scripts.evidence.common import Facts, cell, write_report
from scripts.tools.common import PROMPTS, REPORTS, ROOT, command, cpu_target

EMBEDDED, WIDE_NAME = "embedded", "wide"
WIDE = Shape(4096, 2048, 6, 16, 4, 5632, 2, 1024, 8, 2816, 0)
"""280 million weights, and 31 million in the drafter."""
WRONG = 0.2
"""Share of the tokens after which the drafter of the wide target counts wrongly."""
SMALL = ROOT / "assets" / "tiny-target-small"
Place = tuple[TargetModel, dict[str, Any], list[Prompt]]
"""A target, its drafters by name, and prompts."""
PLAIN, AHEAD = "plain", "ahead"
ABOUT = (
    "Batch 1. **serial**: drafts are made after verifications, on so many CPU "
    "threads; **ahead**: during them, with 1 thread for the target and 1 for the drafter "
    "(`decode.ahead`). **over serial**: tokens/s over those of drafting "
    "afterwards, same drafter, with 95% intervals over prompts. **kept ahead**: share of drafts "
    "that had been made ahead; **hidden**: milliseconds per draft of making them that passed "
    "during a verification. **texts**: those of plain decoding; **drafts**: answers with the very "
    "passes of drafting afterwards."
)


@dataclass
class Way:
    """One way to decode with one drafter, and its answers. ahead: drafts, kept ones among them,
    hidden seconds; threads: of the calling thread."""

    drafter: str
    name: str
    engine: Engine
    threads: int
    outcomes: list[Outcome] = field(default_factory=list)
    answers: list[Completion] = field(default_factory=list)
    ahead: tuple[int, int, float] = (0, 0, 0.0)

    def answer(self, request: Request, prompt: Prompt, counts: bool) -> None:
        """Decode one request; counts: whether it is measured, not a warm-up."""
        torch.set_num_threads(self.threads)
        forget(self.engine.drafter)
        clock = self.engine.clock
        clock.reset()
        (completion,) = self.engine.run([request])
        if not counts:
            return
        self.answers.append(completion)
        seconds = dict(clock.seconds)
        self.outcomes.append(Outcome(prompt.id, prompt.domain, completion.passes, seconds))
        drafts, kept, hidden = self.ahead
        tally = clock.ahead
        self.ahead = drafts + tally.drafts, kept + tally.kept, hidden + tally.hidden

    @property
    def totals(self) -> Totals:
        return Totals.collect(self.outcomes, self.engine.tree.max_depth)


def report(given: argparse.Namespace) -> None:
    """Decode and write the report."""
    own, rows = torch.get_num_threads(), list[Facts]()
    try:
        for name in given.targets:
            target, drafters, prompts = PLACES[name](given)
            for temperature in given.temperatures:
                ways = all_ways(target, drafters, given, temperature)
                decode_in_turns(target, ways, prompts, given.repeats)
                rows += [{"target": name, **row} for row in facts(ways, temperature)]
    finally:
        torch.set_num_threads(own)
    content = {"format": 1, "command": given.command, "device": device_facts(target.device)}
    content |= {"versions": process_facts()["versions"], "tokens": given.tokens}
    content |= {"prompts": given.prompts, "repeats": given.repeats, "serial": [*given.serial]}
    content["rows"] = rows
    write_report(given.out, content, page(content))
    print(f"{given.out}.json, {given.out}.md")


def embedded(given: argparse.Namespace) -> Place:
    """The embedded target, its drafters, and some of its evaluation prompts."""
    target, prompts = cpu_target(), load_prompts(PROMPTS)
    chosen = prompts[:: max(1, len(prompts) // given.prompts)][: given.prompts]
    return target, load_drafters(target, given.drafter), chosen


def wide(given: argparse.Namespace) -> Place:
    """The wide target, its drafter, and prompts of random tokens."""
    positions = 2 * given.tokens
    target = as_target(counting_model(WIDE, torch.device("cpu"), torch.float32, positions))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(WIDE.vocab, (given.prompts, 16), generator=generator).tolist()
    prompts = [Prompt(str(n), "random", tokens=tuple(each)) for n, each in enumerate(tokens)]
    return target, {"counting model": miscounting_drafter(target)}, prompts


def miscounting_drafter(target: TargetModel) -> Any:
    """A small model that counts as the wide target does, except at `WRONG` of the tokens."""
    drafter: Any = new_head("distilled", replace(WIDE, small_tied=False), target).eval()
    make_counting(drafter, drafter.model.embed_tokens.weight, drafter.lm_head.weight)
    wrong = torch.randperm(WIDE.vocab, generator=torch.Generator().manual_seed(1))
    wrong = wrong[: int(WRONG * WIDE.vocab)]
    head = drafter.lm_head.weight.detach()
    head[wrong] = head[wrong.roll(1)]
    return drafter


def load_drafters(target: TargetModel, folders: Sequence[Path]) -> dict[str, Any]:
    """Drafters by name."""
    found: dict[str, Any] = {"ngram": load_drafter("ngram", target)}
    settings = get_kind("distilled").config_class(from_model=str(SMALL))
    found["small model"] = new_drafter(
        "distilled", settings, target.info, target.weights, seed=0
    ).eval()
    for folder in folders:
        found[str(folder)] = load_drafter(folder, target)
    return found


def all_ways(
    target: TargetModel, drafters: dict[str, Any], given: argparse.Namespace, temperature: float
) -> list[Way]:
    """Plain decoding and drafting afterwards on each number of threads, and drafting ahead."""
    plain = DecodeConfig(shape="none", temperature=temperature, max_new_tokens=given.tokens)
    ways = [Way("", f"{PLAIN} {n}", Engine(target, None, plain), n) for n in given.serial]
    for name, drafter in drafters.items():
        decode = replace(plain, shape="chain", depth=given.depth)
        for threads in given.serial:
            engine = Engine(target, drafter, decode)
            ways.append(Way(name, f"serial {threads}", engine, threads))
        ways.append(Way(name, AHEAD, Engine(target, drafter, replace(decode, ahead=True)), 1))
    return ways


def decode_in_turns(
    target: TargetModel, ways: list[Way], chosen: Sequence[Prompt], repeats: int
) -> None:
    """Decode every prompt in every way; the first prompt also serves as a warm-up."""
    room = target.info.max_position_embeddings
    decode = ways[0].engine.decode
    requests = to_requests(chosen, target.tokenizer, decode, capacity=room, overlong="skip")
    for way in ways:
        way.answer(requests[0], chosen[0], counts=False)
    for repeat in range(repeats):
        for number, request in enumerate(requests):
            turn = (number + repeat) % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                way.answer(request, chosen[request.index], counts=True)


def facts(ways: list[Way], temperature: float) -> list[Facts]:
    """The rows of one temperature."""
    plain, rows = ways[0], list[Facts]()
    for way in ways:
        totals = way.totals
        drafts, kept, hidden = way.ahead
        row: Facts = {
            "temperature": temperature,
            "drafter": way.drafter,
            "way": way.name,
            "threads": way.threads,
            "ms_per_token": 1000 / metrics.tokens_per_second(totals),
            "tau": metrics.tau_estimate(totals).tau,
            "step_ms": metrics.step_ms(totals),
            "texts": sum(map(same_text, way.answers, plain.answers)),
            "answers": len(way.answers),
        }
        if way.drafter:
            row["over"] = {}
            own = [other for other in ways if other.drafter == way.drafter]
            serial = [other for other in own if other.name != AHEAD]
            for other in serial:
                ratio, interval = metrics.speedup(totals, other.totals)
                row["over"][other.name] = {"ratio": ratio, "ci95": [*interval]}
            row["drafts"] = sum(map(same_passes, way.answers, serial[0].answers))
        if way.name == AHEAD:
            row["kept_ahead"] = divide(kept, drafts)
            row["hidden_ms"] = 1000 * divide(hidden, drafts)
        rows.append(row)
    return rows


def same_text(one: Completion, other: Completion) -> bool:
    return one.tokens == other.tokens


def same_passes(one: Completion, other: Completion) -> bool:
    """Whether the passes are equal. This requires equal drafts, as far as they were kept."""
    return one.tokens == other.tokens and one.passes == other.passes


def page(content: Facts) -> list[str]:
    """The report as Markdown."""
    serial = [f"serial {threads}" for threads in content["serial"]]
    header = ["target", "drafter", "way", "temperature", "ms / token", "tau"]
    header += [f"over {name}" for name in serial]
    header += ["draft ms", "hidden ms", "kept ahead", "texts", "drafts"]
    body = []
    for row in content["rows"]:
        over = row.get("over", {})
        ratios = [over.get(name) for name in serial]
        body.append(
            [
                row["target"],
                row["drafter"] or "none",
                row["way"],
                f"{row['temperature']:g}",
                f"{row['ms_per_token']:.2f}",
                f"{row['tau']:.2f}",
                *(cell(each["ratio"], each["ci95"]) if each else "" for each in ratios),
                f"{row['step_ms']['draft']:.2f}" if row["drafter"] else "",
                f"{row['hidden_ms']:.2f}" if "hidden_ms" in row else "",
                f"{100 * row['kept_ahead']:.0f}%" if "kept_ahead" in row else "",
                f"{row['texts']}/{row['answers']}",
                f"{row['drafts']}/{row['answers']}" if "drafts" in row else "",
            ]
        )
    device = content["device"]
    return [
        "# Drafting ahead",
        "",
        ABOUT,
        "",
        f"`{content['command']}` on {device['name']}: {content['prompts']} prompts x "
        f"{content['repeats']} repeats, up to {content['tokens']} new tokens.",
        "",
        *markdown_table(header, body, texts=3),
        "",
    ]


PLACES = {EMBEDDED: embedded, WIDE_NAME: wide}

main = command(
    report,
    targets={"nargs": "+", "choices": sorted(PLACES), "default": (EMBEDDED, WIDE_NAME)},
    drafter={"action": "append", "type": Path, "default": [], "metavar": "FOLDER"},
    temperatures={"nargs": "+", "type": float, "default": (0.0,), "metavar": "T"},
    serial={"nargs": "+", "type": int, "default": (1, 2), "metavar": "THREADS"},
    prompts=12,
    tokens=96,
    depth=4,
    repeats=2,
    out=REPORTS / "ahead",
)

if __name__ == "__main__":
    sys.exit(main())
