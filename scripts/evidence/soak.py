"""A long run of random work: `python -m scripts.evidence.soak --minutes 30` writes
docs/reports/soak.json.

Random prompts, lengths, seeds and cancellations. Every answer is compared with plain decoding of
the same request; differences are examined (inference/audit/comparison.py): a near tie of float32 is
counted, anything else is a mismatch. Resident memory is read every round; growth is judged from the
second third on, when every engine has its buffers. The exit status is 1 after a mismatch or growth.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypedDict

import torch

from heads.api.checkpoint import load_drafter, new_drafter
from heads.api.registry import get_kind
from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, PassRecord, Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.manifest import write_json
from inference.measure.prompts import load_prompts, to_requests
from inference.server.metrics import resident_bytes
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.evidence.common import REPORTS
from scripts.tools.common import PROMPTS, ROOT, TARGET, add_options, make_parser, run

GROWTH_ALLOWED = 0.03
"""Share by which resident memory may grow from the second to the last third: allocators vary."""
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
POOL = 12
"""Engines kept at a time, all of one capacity, so that memory is level early and growth would
show."""
LIMITS = (1, 2, 7, 20, 48)
SHAPES = (
    DecodeConfig(shape="chain", depth=3),
    DecodeConfig(shape="chain", depth=4),
    DecodeConfig(shape="tree", choices=TREE),
    DecodeConfig(shape="dynamic", nodes=12, depth=4, width=3),
)
BIAS, BAD_WORDS = ((11, 2.0), (13, -4.0)), ((17,), (18, 19))
SAMPLING = (
    SamplingSettings(),
    SamplingSettings(temperature=1.0),
    SamplingSettings(temperature=0.7, top_k=50, top_p=0.9),
    SamplingSettings(repetition_penalty=1.2),
    SamplingSettings(temperature=1.0, min_p=0.05, logit_bias=BIAS, bad_words=BAD_WORDS),
)


@dataclass
class Tally:
    """The counts so far."""

    rounds: int = 0
    answers: int = 0
    tokens: int = 0
    cancelled: int = 0
    identical: int = 0
    near_ties: int = 0
    mismatches: int = 0
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, resident bytes) after every round."""


class Content(TypedDict):
    """soak.json."""

    passed: bool
    minutes: float
    target: str
    dtype: str
    machine: str
    threads: int
    rounds: int
    answers: int
    tokens: int
    cancelled: int
    identical: int
    near_ties: int
    mismatches: int
    failures: list[str]
    memory_growth: float
    memory_growth_allowed: float
    memory: list[tuple[float, int]]
    command: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak and write the report; returns the exit status."""
    parser = make_parser("scripts.evidence.soak", __doc__)
    add_options(parser, minutes=30.0, target=str(TARGET))
    checkpoints = "checkpoint folders; fresh eagle3, medusa and ngram besides"
    parser.add_argument("--drafters", nargs="*", default=[], help=checkpoints)
    add_options(parser, dtype="float32", seed=0, out=REPORTS / "soak.json")
    return run(parser, report, arguments)


def report(given: argparse.Namespace) -> int:
    """Run, write and print; returns the exit status."""
    target = TargetModel.load(TargetConfig(path=given.target, dtype=given.dtype))
    soak = Soak(target, given.drafters, given.seed)
    soak.run(given.minutes * 60)
    content = soak.report(given.command)
    write_json(given.out, content)
    shown = {key: value for key, value in content.items() if key != "memory"}
    print(json.dumps(shown, indent=1))
    return 0 if content["passed"] else 1


class Soak:
    """Engines of many settings over one target, and random work for them."""

    def __init__(self, target: TargetModel, checkpoints: Sequence[str], seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.drafters = {
            path: load_drafter(Path(path), target.info, target.weights) for path in checkpoints
        }
        for kind in ("eagle3", "medusa", "ngram"):
            config = get_kind(kind).config_class()
            self.drafters[f"fresh {kind}"] = new_drafter(
                kind, config, target.info, target.weights, 1
            )
        files = [PROMPTS / f"{name}.jsonl" for name in ("code", "explain", "reference")]
        asked = to_requests(load_prompts(files), target.tokenizer, DecodeConfig())
        self.texts = [request.tokens for request in asked]
        self.capacity = max(map(len, self.texts)) + max(LIMITS) + 16
        self.engines: dict[tuple[str, DecodeConfig], Engine] = {}
        self.plain: dict[DecodeConfig, Engine] = {}
        self.tally = Tally()

    def run(self, seconds: float) -> None:
        """Rounds until the time is up or an answer is wrong; a line per minute."""
        tally, begin = self.tally, time.monotonic()
        said = begin
        while time.monotonic() - begin < seconds and not tally.mismatches:
            self.round()
            tally.memory.append((round(time.monotonic() - begin, 1), resident_bytes()))
            if time.monotonic() - said > 60:
                said = time.monotonic()
                counts = {
                    key: value for key, value in vars(tally).items() if isinstance(value, int)
                }
                print(f"{(said - begin) / 60:.0f} min: {counts}", flush=True)

    def round(self) -> None:
        """One engine, one batch of random requests; compared with plain decoding."""
        draw = self.random
        name = draw.choice(list(self.drafters))
        config = replace(
            draw.choice(SHAPES),
            batch_size=draw.choice((1, 2, 5)),
            lag=draw.choice((0, 0, 1, 2)),
            prefill_chunk=draw.choice((16, 64, 2048)),
            **asdict(draw.choice(SAMPLING)),
        )
        engine = self.engines.get((name, config))
        if engine is None:
            if len(self.engines) >= POOL:  # engines come and go, and must leave nothing allocated
                self.engines.pop(draw.choice(list(self.engines)))
                gc.collect()
            engine = Engine(self.target, self.drafters[name], config, capacity=self.capacity)
            self.engines[name, config] = engine
        requests = [self.request(index) for index in range(draw.randint(1, 7))]
        self.compare(config, requests, self.decode(engine, requests), name)
        self.tally.rounds += 1

    def request(self, index: int) -> Request:
        """A piece of a real prompt, or random tokens, with a limit and a seed of its own."""
        draw = self.random
        if draw.random() < 0.2:
            size = self.target.info.vocab_size
            tokens = tuple(draw.randrange(5, size) for _ in range(draw.randint(1, 90)))
        else:
            text = draw.choice(self.texts)
            tokens = text[: draw.randint(1, len(text))] if draw.random() < 0.3 else text
        return Request(index, tokens, draw.randrange(1 << 62), draw.choice(LIMITS))

    def decode(self, engine: Engine, requests: list[Request]) -> list[Completion]:
        """All completions in the order of the requests.

        Now and then one is cancelled, or the run is left and begun again.
        """
        draw = self.random
        doomed = draw.randrange(len(requests)) if draw.random() < 0.3 else -1
        after = draw.randint(1, 12)
        seen = [0] * len(requests)

        def watch(request: Request, tokens: list[int], record: PassRecord | None) -> None:
            seen[request.index] += len(tokens)
            if request.index == doomed and seen[doomed] >= after:
                engine.cancel(doomed)

        if draw.random() < 0.05:
            left = engine.run(requests)
            next(left)
            left.close()
        done = {completion.request.index: completion for completion in engine.run(requests, watch)}
        return [done[request.index] for request in requests]

    def compare(
        self, config: DecodeConfig, requests: list[Request], found: list[Completion], name: str
    ) -> None:
        """Count every answer: identical, a near tie, or a mismatch.

        Of a cancelled one the part that was decoded is compared.
        """
        tally = self.tally
        settings = DecodeConfig(shape="none", **asdict(config.sampling()))
        if settings not in self.plain:
            self.plain[settings] = Engine(self.target, None, settings, capacity=self.capacity)
        plain = self.plain[settings].run(requests)
        answers = {completion.request.index: completion.tokens for completion in plain}
        whole: list[tuple[Request, list[int], list[int]]] = []
        for done in found:
            request, expected = done.request, answers[done.request.index]
            tally.answers += 1
            tally.tokens += len(done.tokens)
            if done.finish == "cancelled":
                tally.cancelled += 1
                limit = max(1, len(done.tokens))
                if done.tokens == expected[: len(done.tokens)]:
                    tally.identical += 1
                    continue
                request, expected = replace(request, max_new_tokens=limit), expected[:limit]
            whole.append((request, expected, done.tokens))
        asked, right, answered = ([item[place] for item in whole] for place in range(3))
        judged = audit(self.target, asked, right, answered, config.sampling())  # type: ignore[arg-type]
        tally.identical += judged.identical
        tally.near_ties += judged.near_ties
        tally.mismatches += judged.mismatches
        if judged.mismatches:
            differences = [asdict(item) for item in judged.divergences]
            tally.failures.append(f"{name} {asdict(config)}: {differences}")

    def report(self, command: str) -> Content:
        """The numbers, and whether the soak passed."""
        tally, memory = self.tally, self.tally.memory
        third = max(1, len(memory) // 3)
        parts = (memory[third : 2 * third] or memory, memory[-third:])
        middle, last = (max(size for _, size in part) for part in parts)
        growth = last / middle - 1
        return {
            "passed": tally.mismatches == 0 and growth <= GROWTH_ALLOWED,
            "minutes": round(memory[-1][0] / 60, 1),
            "target": self.target.info.id.removeprefix(f"{ROOT}/"),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "rounds": tally.rounds,
            "answers": tally.answers,
            "tokens": tally.tokens,
            "cancelled": tally.cancelled,
            "identical": tally.identical,
            "near_ties": tally.near_ties,
            "mismatches": tally.mismatches,
            "failures": tally.failures,
            "memory_growth": round(growth, 4),
            "memory_growth_allowed": GROWTH_ALLOWED,
            "memory": memory[:: max(1, len(memory) // 60)],
            "command": command,
        }


if __name__ == "__main__":
    sys.exit(main())
