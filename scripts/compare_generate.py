"""Is our plain decoding a fair baseline, and are we faster than others' loops? `python -m scripts.compare_generate` measures both.

Arms: our loop without a drafter and with each given one (`--drafter`), as it is and compiled; transformers' greedy `generate`,
prompt lookup, and, with `--assistant` (a drafter of kind distilled, or a folder that transformers loads), its assisted generation
with default settings and with our depth. Same weights, threads, dtype and prompts; greedy; batch 1. The arms take turns prompt by
prompt, each time another one first, so that a busy machine slows all alike.

The report (JSON) says for every arm: seconds of whole calls, prefill included, tokens, how many texts are those of our plain
loop, and how much faster per token it is than `generate`, with a bootstrap interval over prompts; for our arms also tau,
milliseconds per step and phase, and efficiency (`inference.measure.metrics`). Compiling takes place while warming up and is reported apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
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
from inference.measure import metrics
from inference.measure.baselines import BaselinesConfig, Peer, is_llama, make_peers
from inference.measure.metrics import Outcome, Totals
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.target.loading import DTYPES, TargetConfig
from inference.target.model import TargetModel

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "ours_plain"
GENERATE = "transformers_generate"


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and write the report; returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        report = compare(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    report["command"] = "python -m scripts.compare_generate " + " ".join(
        sys.argv[1:] if arguments is None else arguments
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_generate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "assets" / "prompts", help="a file or a folder"
    )
    parser.add_argument("--count", type=int, default=4, help="prompts per domain")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens of an answer")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument(
        "--drafter", type=Path, action="append", default=[], help="checkpoint; may be repeated"
    )
    parser.add_argument("--depth", type=int, default=4, help="drafted tokens of a chain")
    parser.add_argument("--assistant", type=Path, help="distilled checkpoint or a transformers folder")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "plain_decoding.json")
    return parser


@dataclass
class _Contestant:
    """One arm: how it answers a request, and what its answers took. seconds, tokens, texts: one entry per prompt, repeats
    summed.
    """

    name: str
    answer: Callable[[Request], tuple[list[int], Outcome | None]]
    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    compile_seconds: float = 0.0

    def run(self, request: Request) -> None:
        begin = time.perf_counter()
        tokens, outcome = self.answer(request)
        took = time.perf_counter() - begin
        self.seconds[request.index] = self.seconds.get(request.index, 0.0) + took
        self.tokens[request.index] = self.tokens.get(request.index, 0) + len(tokens)
        self.texts[request.index] = tokens
        if outcome is not None:
            self.outcomes.append(outcome)

    def warm_up(self, requests: list[Request]) -> None:
        before = seconds_spent()
        for request in requests:
            self.answer(request)
        self.compile_seconds = seconds_spent() - before


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Decode every prompt with every arm, in turns, and return the report. Raises `UserError` for what cannot be loaded."""
    if given.threads:
        torch.set_num_threads(given.threads)
    target = TargetModel.load(TargetConfig(path=given.target, dtype=given.dtype, device="cpu"))
    decode = DecodeConfig(shape="none", max_new_tokens=given.tokens)
    prompts = select_prompts(load_prompts(given.prompts), given.count)
    requests = to_requests(prompts, target.tokenizer, decode)
    room = max(len(item.tokens) for item in requests) + given.tokens + given.depth + 2
    arms = _our_arms(given, target, decode)
    contestants = []
    for arm in arms:
        for compiled in (False, True) if given.compile else (False,):
            engine = Engine(
                target, arm.drafter, replace(arm.decode, compile=compiled), capacity=-(-room // 64) * 64
            )
            contestants.append(
                _Contestant(arm.name + ("_compiled" if compiled else ""), _with_engine(engine))
            )
    contestants += [_Contestant(peer.name, _with_peer(peer)) for peer in _peers(given, target, decode)]
    by_length = sorted(requests, key=lambda item: len(item.tokens))
    for contestant in contestants:
        contestant.warm_up([by_length[0], by_length[-1]])
    for turn in range(given.repeats):
        for number, request in enumerate(requests):
            first = (number + turn) % len(contestants)
            for contestant in contestants[first:] + contestants[:first]:
                contestant.run(request)
    return _facts(given, len(requests)) | {"arms": _summaries(contestants)}


def _our_arms(given: argparse.Namespace, target: TargetModel, plain: DecodeConfig) -> list[Arm]:
    """Plain decoding and every given drafter, as chains."""
    arms = [Arm(PLAIN, None, plain)]
    for path in given.drafter:
        kind = str(read_config(path)["kind"])
        drafter = load_drafter(path, target.info, target.weights)
        decode = replace(plain, shape="chain", depth=given.depth)
        arms.append(Arm(f"ours_{kind}", drafter, decode, str(path)))
    return arms


def _peers(given: argparse.Namespace, target: TargetModel, plain: DecodeConfig) -> list[Peer]:
    """transformers' own loops; the assisted ones only where there is an assistant."""
    decode = replace(plain, shape="chain", depth=given.depth)
    if given.assistant is None:
        return make_peers(BaselinesConfig(("generate", "prompt_lookup")), target, [Arm("none", None, decode)])
    if "kind" in json.loads((given.assistant / "config.json").read_text(encoding="utf-8")):
        drafter = load_drafter(given.assistant, target.info, target.weights)
        if not is_llama(drafter):
            raise UserError(f"--assistant '{given.assistant}' is no Llama: give a drafter of kind distilled.")
        modes = ("generate", "assisted", "assisted_constant", "prompt_lookup")
        return make_peers(BaselinesConfig(modes), target, [Arm("assistant", drafter, decode)])
    peers = make_peers(BaselinesConfig(("generate", "prompt_lookup")), target, [Arm("none", None, decode)])
    assistant = AutoModelForCausalLM.from_pretrained(given.assistant, dtype=target.dtype).eval()
    options = {"assistant_model": assistant}
    return [*peers, Peer("transformers_assisted", peers[0].model, peers[0].end_ids, options)]


def _with_engine(engine: Engine) -> Callable[[Request], tuple[list[int], Outcome]]:
    def answer(request: Request) -> tuple[list[int], Outcome]:
        engine.clock.reset()
        done = next(iter(engine.run([request])))
        return done.tokens, Outcome(str(request.index), "all", done.passes, dict(engine.clock.seconds))

    return answer


def _with_peer(peer: Peer) -> Callable[[Request], tuple[list[int], None]]:
    return lambda request: (peer.answer(request).tokens, None)


# ---- what came out -----------------------------------------------------------------------------------------------------


def _facts(given: argparse.Namespace, prompts: int) -> dict[str, Any]:
    path = Path(given.target)
    return {
        "target": str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path),
        "dtype": given.dtype,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "prompts": prompts,
        "repeats": given.repeats,
        "max_new_tokens": given.tokens,
    }


def _summaries(contestants: list[_Contestant]) -> dict[str, dict[str, Any]]:
    by_name = {item.name: item for item in contestants}
    plain, generate = by_name[PLAIN], by_name[GENERATE]
    fastest = by_name.get(f"{PLAIN}_compiled", plain)
    return {item.name: _summary(item, plain, generate, fastest) for item in contestants}


def _summary(
    item: _Contestant, plain: _Contestant, generate: _Contestant, fastest: _Contestant
) -> dict[str, Any]:
    """One arm. Speed over `generate` is in tokens per second of whole calls; speedup and efficiency are against our plain loop
    run the same way.
    """
    seconds, tokens = _per_prompt(item.seconds), _per_prompt(item.tokens)
    their_seconds, their_tokens = _per_prompt(generate.seconds), _per_prompt(generate.tokens)
    weights = metrics.resample_weights(len(seconds), seed=0)
    fast = (weights @ tokens) * (weights @ their_seconds)
    slow = (weights @ their_tokens) * (weights @ seconds)
    ratio = (tokens.sum() * their_seconds.sum()) / (their_tokens.sum() * seconds.sum())
    found: dict[str, Any] = {
        "tokens": int(tokens.sum()),
        "identical_texts": sum(text == plain.texts[key] for key, text in item.texts.items()),
        "seconds": round(float(seconds.sum()), 4),
        "ms_per_token": round(1000 * float(seconds.sum() / tokens.sum()), 4),
        "speed_over_generate": round(float(ratio), 4),
        "ci95": [round(x, 4) for x in metrics.interval95(fast, slow)],
    }
    if item.outcomes:
        baseline = fastest if item.name.endswith("_compiled") else plain
        found |= _steps(item, baseline) | {"compile_seconds": round(item.compile_seconds, 1)}
    return found


def _steps(item: _Contestant, baseline: _Contestant) -> dict[str, Any]:
    """Where our steps' time went, and speedup and efficiency over plain decoding (prefill excluded)."""
    deepest = max((record.accepted for outcome in item.outcomes for record in outcome.passes), default=0)
    arm, plain = Totals.collect(item.outcomes, deepest), Totals.collect(baseline.outcomes, 0)
    split = metrics.step_ms(arm)
    found: dict[str, Any] = {
        "step_ms": {phase: round(value, 4) for phase, value in split.items()},
        "outside_draft_and_verify": round(1 - (split["draft"] + split["verify"]) / sum(split.values()), 4),
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


def _per_prompt(values: dict[int, float] | dict[int, int]) -> metrics.Floats:
    return np.array([values[key] for key in sorted(values)], dtype=np.float64)


if __name__ == "__main__":
    sys.exit(main())
