"""Is plain decoding a fair baseline? `python -m scripts.evidence.plain_decoding` compares loops.

Arms: our loop without a drafter and with each given one (`--drafter`), as it is and compiled;
transformers' greedy `generate`, prompt lookup, and, with `--assistant` (a drafter of kind distilled, or
a folder that transformers loads), its assisted generation with default settings and with our depth. Same
weights, threads, dtype and prompts; greedy; batch 1. The arms take turns prompt by prompt, each time
another one first, so that a busy machine slows all alike.

The report (docs/reports/plain_decoding.json) has for every arm: seconds of whole calls, prefill
included, tokens, how many texts are those of our plain loop, and how much faster per token it is than
`generate`, with a bootstrap interval over prompts; for our arms also tau, milliseconds per step and
phase, and efficiency (`inference.measure.metrics`). Compiling takes place while warming up and is reported apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from heads.api.checkpoint import load_drafter, read_config
from heads.api.errors import UserError
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.execution.compiled import seconds_spent
from inference.decoding.requests import Request
from inference.manifest import write_json
from inference.measure import metrics
from inference.measure.baselines import BaselinesConfig, Mode, Peer, is_llama, make_peers
from inference.measure.metrics import Outcome, Totals
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.target.loading import DTYPES, TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.common import REPORTS
from scripts.tools.common import PROMPTS, ROOT, TARGET, add_options, make_parser, run

PLAIN, GENERATE = "ours_plain", "transformers_generate"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and write the report; returns the exit status."""
    parser = make_parser("scripts.evidence.plain_decoding", __doc__)
    add_options(
        parser,
        target=TARGET,
        prompts=(PROMPTS, "a file or a folder"),
        count=(4, "prompts per domain"),
        tokens=(128, "most new tokens of an answer"),
        repeats=1,
        threads=(0, "0: as torch chooses"),
    )
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--drafter", type=Path, action="append", default=[], help="may be repeated")
    parser.add_argument("--depth", type=int, default=4, help="drafted tokens of a chain")
    assistant = "distilled checkpoint or a transformers folder"
    parser.add_argument("--assistant", type=Path, help=assistant)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=REPORTS / "plain_decoding.json")
    return run(parser, report, arguments)


def report(given: argparse.Namespace) -> None:
    """Compare, write and print."""
    content = {**compare(given), "command": given.command}
    write_json(given.out, content)
    print(json.dumps(content, indent=2))


@dataclass
class Contestant:
    """One arm: how it answers a request, and the cost of its answers.

    `seconds`, `tokens` and `texts` have one entry per prompt, repeats summed.
    """

    name: str
    answer: Callable[[Request], tuple[list[int], Outcome | None]]
    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    compile_seconds: float = 0.0

    def run(self, request: Request) -> None:
        """Answer a request and add its cost."""
        begin = time.perf_counter()
        tokens, outcome = self.answer(request)
        took = time.perf_counter() - begin
        self.seconds[request.index] = self.seconds.get(request.index, 0.0) + took
        self.tokens[request.index] = self.tokens.get(request.index, 0) + len(tokens)
        self.texts[request.index] = tokens
        if outcome is not None:
            self.outcomes.append(outcome)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Answer requests that do not count."""
        before = seconds_spent()
        for request in requests:
            self.answer(request)
        self.compile_seconds = seconds_spent() - before

    def per_prompt(self) -> tuple[metrics.Floats, metrics.Floats]:
        """Seconds and tokens, in the order of the prompts."""
        order = sorted(self.seconds)
        seconds = np.array([self.seconds[index] for index in order], dtype=np.float64)
        return seconds, np.array([self.tokens[index] for index in order], dtype=np.float64)


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Decode every prompt with every arm, in turns; raises `UserError` for what cannot be loaded."""
    if given.threads:
        torch.set_num_threads(given.threads)
    config = TargetConfig(path=str(given.target), dtype=given.dtype, device="cpu")
    target = TargetModel.load(config)
    plain = DecodeConfig(shape="none", max_new_tokens=given.tokens)
    chain = replace(plain, shape="chain", depth=given.depth)
    prompts = select_prompts(load_prompts(given.prompts), given.count)
    requests = to_requests(prompts, target.tokenizer, plain)
    room = max(len(item.tokens) for item in requests) + given.tokens + given.depth + 2
    arms = [Arm(PLAIN, None, plain)]
    for path in given.drafter:
        drafter = load_drafter(path, target.info, target.weights)
        arms.append(Arm(f"ours_{read_config(path)['kind']}", drafter, chain, str(path)))
    contestants = []
    for arm in arms:
        for compiled in (False, True) if given.compile else (False,):
            decode = replace(arm.decode, compile=compiled)
            engine = Engine(target, arm.drafter, decode, capacity=-(-room // 64) * 64)
            name = arm.name + ("_compiled" if compiled else "")
            contestants.append(Contestant(name, with_engine(engine)))
    for peer in peers(given.assistant, target, chain):
        contestants.append(Contestant(peer.name, with_peer(peer)))
    by_length = sorted(requests, key=lambda item: len(item.tokens))
    for contestant in contestants:
        contestant.warm_up([by_length[0], by_length[-1]])
    for turn in range(given.repeats):
        for number, request in enumerate(requests):
            first = (number + turn) % len(contestants)
            for contestant in contestants[first:] + contestants[:first]:
                contestant.run(request)
    by_name = {item.name: item for item in contestants}
    inside = given.target.is_relative_to(ROOT)
    return {
        "target": str(given.target.relative_to(ROOT) if inside else given.target),
        "dtype": given.dtype,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "prompts": len(requests),
        "repeats": given.repeats,
        "max_new_tokens": given.tokens,
        "arms": {name: summary(item, by_name) for name, item in by_name.items()},
    }


def peers(assistant: Path | None, target: TargetModel, chain: DecodeConfig) -> list[Peer]:
    """transformers' own loops; the assisted ones only where there is an assistant."""
    unassisted = BaselinesConfig(("generate", "prompt_lookup"))
    if assistant is None:
        return make_peers(unassisted, target, [Arm("none", None, chain)])
    if "kind" in json.loads((assistant / "config.json").read_text(encoding="utf-8")):
        drafter = load_drafter(assistant, target.info, target.weights)
        if not is_llama(drafter):
            raise UserError(
                f"--assistant '{assistant}' is no Llama: give a drafter of kind distilled."
            )
        modes: tuple[Mode, ...] = ("generate", "assisted", "assisted_constant", "prompt_lookup")
        return make_peers(BaselinesConfig(modes), target, [Arm("assistant", drafter, chain)])
    found = make_peers(unassisted, target, [Arm("none", None, chain)])
    model = AutoModelForCausalLM.from_pretrained(assistant, dtype=target.dtype).eval()
    options = {"assistant_model": model}
    return [*found, Peer("transformers_assisted", found[0].model, found[0].end_ids, options)]


def with_engine(engine: Engine) -> Callable[[Request], tuple[list[int], Outcome]]:
    """Answers by an engine of ours."""

    def answer(request: Request) -> tuple[list[int], Outcome]:
        engine.clock.reset()
        done = next(iter(engine.run([request])))
        seconds = dict(engine.clock.seconds)
        return done.tokens, Outcome(str(request.index), "all", done.passes, seconds)

    return answer


def with_peer(peer: Peer) -> Callable[[Request], tuple[list[int], None]]:
    """Answers by transformers."""
    return lambda request: (peer.answer(request).tokens, None)


def summary(item: Contestant, by_name: dict[str, Contestant]) -> dict[str, Any]:
    """One arm. Speed over `generate` is in tokens per second of whole calls.

    Speedup and efficiency are against our plain loop, compiled like the arm, prefill excluded.
    """
    plain, generate = by_name[PLAIN], by_name[GENERATE]
    seconds, tokens = item.per_prompt()
    other_seconds, other_tokens = generate.per_prompt()
    weights = metrics.resample_weights(len(seconds), seed=0)
    fast = (weights @ tokens) / (weights @ seconds)
    slow = (weights @ other_tokens) / (weights @ other_seconds)
    ratio = (tokens.sum() / seconds.sum()) / (other_tokens.sum() / other_seconds.sum())
    found: dict[str, Any] = {
        "tokens": int(tokens.sum()),
        "identical_texts": sum(text == plain.texts[key] for key, text in item.texts.items()),
        "seconds": round(float(seconds.sum()), 4),
        "ms_per_token": round(1000 * float(seconds.sum() / tokens.sum()), 4),
        "speed_over_generate": round(float(ratio), 4),
        "ci95": [round(x, 4) for x in metrics.interval95(fast, slow)],
    }
    if item.outcomes:
        compiled = item.name.endswith("_compiled")
        baseline = by_name.get(f"{PLAIN}_compiled", plain) if compiled else plain
        found |= steps(item, baseline) | {"compile_seconds": round(item.compile_seconds, 1)}
    return found


def steps(item: Contestant, baseline: Contestant) -> dict[str, Any]:
    """Milliseconds of our steps by phase, and speedup and efficiency over plain decoding."""
    deepest = max(
        (record.accepted for outcome in item.outcomes for record in outcome.passes), default=0
    )
    arm, plain = Totals.collect(item.outcomes, deepest), Totals.collect(baseline.outcomes, 0)
    split = metrics.step_ms(arm)
    inside = (split["draft"] + split["verify"]) / sum(split.values())
    found: dict[str, Any] = {
        "step_ms": {phase: round(value, 4) for phase, value in split.items()},
        "outside_draft_and_verify": round(1 - inside, 4),
    }
    if item.name.startswith(PLAIN):
        return found
    speedup, interval = metrics.speedup(arm, plain)
    ideal = metrics.ideal_speedup(arm, plain)
    return found | {
        "tau": round(metrics.tau_estimate(arm).tau, 4),
        "speedup": round(speedup, 4),
        "speedup_ci95": [round(x, 4) for x in interval],
        "ideal_speedup": round(ideal, 4),
        "efficiency": round(speedup / ideal, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
