"""A long run of random work: `python -m scripts.soak --minutes 30` decodes random prompts, lengths, seeds and cancellations.

Every answer is compared with plain decoding of the same request; what differs is examined (inference/audit/comparison.py): a near tie of
float32 is counted, anything else is a mismatch. Resident memory is read every round; growth is judged from the second third on,
when every engine has its buffers. Writes docs/reports/soak.json; exit status 1 on a mismatch or on growth.
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
from typing import Any

import torch
from rich.console import Console

from heads.api.checkpoint import load_drafter, new_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.measure.prompts import load_prompts, to_requests
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

ROOT = Path(__file__).resolve().parent.parent
GROWTH_ALLOWED = 0.03
"""Share by which resident memory may differ between the second and the last third of a run: allocators breathe."""
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
POOL = 12
"""Engines kept at a time, all of one capacity, so that a plateau is reached early and growth would show."""
LIMITS = (1, 2, 7, 20, 48)
SHAPES: tuple[dict[str, Any], ...] = (
    {"shape": "chain", "depth": 3},
    {"shape": "chain", "depth": 4},
    {"shape": "tree", "choices": TREE},
    {"shape": "dynamic", "nodes": 12, "depth": 4, "width": 3},
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"repetition_penalty": 1.2},
    {
        "temperature": 1.0,
        "min_p": 0.05,
        "logit_bias": ((11, 2.0), (13, -4.0)),
        "bad_words": ((17,), (18, 19)),
    },
)


@dataclass
class Tally:
    """What the soak has seen so far."""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak and write the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument(
        "--drafters", nargs="*", default=[], help="checkpoint folders; fresh eagle3, medusa and ngram besides"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "soak.json")
    given = parser.parse_args(arguments)
    try:
        target = TargetModel.load(TargetConfig(path=given.target, dtype=given.dtype))
        soak = Soak(target, given.drafters, given.seed)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    soak.run(given.minutes * 60, Console())
    report = soak.report()
    report["command"] = "python -m scripts.soak " + " ".join(
        arguments if arguments is not None else sys.argv[1:]
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in report.items() if key != "memory"}, indent=1))
    return 0 if report["passed"] else 1


class Soak:
    """Engines of many settings over one target, and random work for them."""

    def __init__(self, target: TargetModel, checkpoints: Sequence[str], seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.drafters = {
            str(path): load_drafter(Path(path), target.info, target.weights) for path in checkpoints
        }
        for kind in ("eagle3", "medusa", "ngram"):
            config = get_kind(kind).config_class()
            self.drafters[f"fresh {kind}"] = new_drafter(kind, config, target.info, target.weights, seed=1)
        folder = ROOT / "assets" / "prompts"
        prompts = load_prompts([folder / f"{name}.jsonl" for name in ("code", "explain", "reference")])
        self.texts = [request.tokens for request in to_requests(prompts, target.tokenizer, DecodeConfig())]
        self.capacity = max(map(len, self.texts)) + max(LIMITS) + 16
        self.engines: dict[tuple[str, DecodeConfig], Engine] = {}
        self.plain: dict[DecodeConfig, Engine] = {}
        self.tally = Tally()

    def run(self, seconds: float, console: Console) -> None:
        """Rounds until the time is up; a line per minute."""
        begin = said = time.monotonic()
        while time.monotonic() - begin < seconds and not self.tally.mismatches:
            self.round()
            self.tally.memory.append((round(time.monotonic() - begin, 1), resident_bytes()))
            if time.monotonic() - said > 60:
                said = time.monotonic()
                console.print(self.line(seconds - (said - begin)), highlight=False)

    def line(self, left: float) -> str:
        tally = self.tally
        return (
            f"{tally.rounds} rounds, {tally.answers} answers, {tally.tokens} tokens, {tally.cancelled} cancelled, "
            f"{tally.near_ties} near ties, {tally.mismatches} mismatches, {tally.memory[-1][1] >> 20} MiB, {left / 60:.0f} min left"
        )

    def round(self) -> None:
        """One engine, one batch of random requests, some of them cancelled; compared with plain decoding."""
        draw = self.random
        name = draw.choice(list(self.drafters))
        shape = draw.choice(SHAPES)
        config = DecodeConfig(
            batch_size=draw.choice((1, 2, 5)),
            lag=draw.choice((0, 0, 1, 2)),
            prefill_chunk=draw.choice((16, 64, 2048)),
            **shape,
            **draw.choice(SAMPLING),
        )
        engine = self.engines.get((name, config))
        if engine is None:
            if len(self.engines) >= POOL:  # engines come and go, and must leave nothing behind
                self.engines.pop(draw.choice(list(self.engines)))
                gc.collect()
            engine = Engine(self.target, self.drafters[name], config, capacity=self.capacity)
            self.engines[name, config] = engine
        requests = [self.request(index) for index in range(draw.randint(1, 7))]
        found = self.decode(engine, requests)
        self.compare(config, requests, found, f"{name} {asdict(config)}")
        self.tally.rounds += 1

    def request(self, index: int) -> Request:
        """A piece of a real prompt, or random tokens, with a limit and a seed of its own."""
        draw = self.random
        if draw.random() < 0.2:
            tokens = tuple(draw.randrange(5, self.target.info.vocab_size) for _ in range(draw.randint(1, 90)))
        else:
            text = draw.choice(self.texts)
            tokens = text[: draw.randint(1, len(text))] if draw.random() < 0.3 else text
        return Request(index, tokens, draw.randrange(1 << 62), draw.choice(LIMITS))

    def decode(self, engine: Engine, requests: list[Request]) -> list[Completion]:
        """All completions in the order of the requests; now and then one is cancelled, or the run is left and begun again."""
        draw = self.random
        doomed = draw.randrange(len(requests)) if draw.random() < 0.3 else -1
        after = draw.randint(1, 12)
        seen = [0] * len(requests)

        def watch(request: Request, tokens: list[int], record: Any) -> None:
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
        self, config: DecodeConfig, requests: list[Request], found: list[Completion], what: str
    ) -> None:
        """Book every answer: identical, a near tie, or a mismatch. Of cancelled ones the part that was decoded is compared."""
        tally = self.tally
        sampling = asdict(config.sampling())
        settings = DecodeConfig(shape="none", **sampling)
        if settings not in self.plain:
            self.plain[settings] = Engine(self.target, None, settings, capacity=self.capacity)
        plain = self.plain[settings]
        answers = {completion.request.index: completion.tokens for completion in plain.run(requests)}
        whole: list[tuple[Any, Any, Any]] = []
        for completion in found:
            expected = answers[completion.request.index]
            tally.answers += 1
            tally.tokens += len(completion.tokens)
            if completion.finish == "cancelled":
                tally.cancelled += 1
                if completion.tokens == expected[: len(completion.tokens)]:
                    tally.identical += 1
                    continue
                limit = max(1, len(completion.tokens))
                shorter = replace(completion.request, max_new_tokens=limit)
                whole.append((shorter, expected[:limit], completion.tokens))
            else:
                whole.append((completion.request, expected, completion.tokens))
        asked, expected_all, answered = ([item[i] for item in whole] for i in range(3))
        report = audit(self.target, asked, expected_all, answered, config.sampling())
        tally.identical += report.identical
        tally.near_ties += report.near_ties
        tally.mismatches += report.mismatches
        if report.mismatches:
            tally.failures.append(f"{what}: {[asdict(item) for item in report.divergences]}")

    def report(self) -> dict[str, Any]:
        """The numbers, and whether the soak passed."""
        tally, memory = self.tally, self.tally.memory
        third = max(1, len(memory) // 3)
        middle, last = (
            max(size for _, size in part) for part in (memory[third : 2 * third] or memory, memory[-third:])
        )
        growth = last / middle - 1
        every = max(1, len(memory) // 60)
        return {
            "passed": tally.mismatches == 0 and growth <= GROWTH_ALLOWED,
            "minutes": round(memory[-1][0] / 60, 1),
            "target": self.target.info.id.removeprefix(str(ROOT) + "/"),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            **{key: value for key, value in asdict(tally).items() if key != "memory"},
            "memory_growth": round(growth, 4),
            "memory_growth_allowed": GROWTH_ALLOWED,
            "memory": memory[::every],
        }


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    sys.exit(main())
