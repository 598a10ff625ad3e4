"""Load on `headstart serve`: `python -m scripts.load_test --drafter FOLDER` writes docs/reports/serve_load.json.

The server runs as a process of its own on loopback; its clients are the real openai client. Answers are compared with what plain
offline decoding gives, token by token; where they differ they are examined (inference/audit/comparison.py): a near tie of float32 is counted,
anything else is a mismatch. Phases:

1. speed: the greedy requests answered by `Engine` with the same drafter, one and 16 at a time, and over HTTP by as many clients, in
   turn;
2. load: `--clients` clients for `--minutes`, fewer than the server has places: nothing may be refused or fail; memory is watched;
3. overload: more clients than places: the rest must be refused with 429 and Retry-After at once, the others answered;
4. SIGTERM in the middle of requests: they end, and so does the process, with status 0.

Exit status 1 when a request failed, a text is a mismatch, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from heads.api.errors import UserError
from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.manifest import write_json
from inference.measure.metrics import divide
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.server.metrics import resident_bytes
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts import drafters
from scripts.load_clients import Case, Seen, each_once, load
from scripts.run import RunConfig

ROOT = Path(__file__).resolve().parents[1]
SAMPLING = (
    SamplingSettings(),
    SamplingSettings(temperature=1.0),
    SamplingSettings(temperature=0.7, top_p=0.9),
    SamplingSettings(temperature=1.0, top_k=40, min_p=0.02),
)
SHOWN = ("headstart_tau", "headstart_acceptance", "headstart_requests_total", "headstart_engine_seconds_total")
LIMITS = (16, 48, 32, 64, 24)
WARM_UP_SHARE = 1 / 3
"""Share of the load phase after which memory must not grow any more: until then libraries fill their caches of kernels by shape."""
ROUNDS = 3
GROWTH_ALLOWED = 0.03
"""Share by which memory at the end may exceed that after the warm-up: allocators breathe."""


@dataclass
class Process:
    """A server that runs. base: its /v1 address."""

    popen: subprocess.Popen[str]
    base: str
    model: str

    @property
    def memory(self) -> int:
        """Bytes."""
        return resident_bytes(self.popen.pid)

    def metrics(self) -> dict[str, float]:
        """/metrics by name and labels."""
        text = httpx.get(self.base.removesuffix("/v1") + "/metrics").text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all phases and write the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.load_test", description=__doc__.split("\n")[0])
    parser.add_argument("--drafter", default="ngram", help="checkpoint folder, or a kind without weights")
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--overload-seconds", type=float, default=30.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of the engine, offline and in the server")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "serve_load.json")
    given = parser.parse_args(arguments)
    try:
        report = measured(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    write_json(given.out, report)
    print(json.dumps({key: report[key] for key in ("ratios", "load", "overload", "memory", "end", "fine")}, indent=2))
    return 0 if report["fine"] else 1


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    torch.set_num_threads(given.threads)
    target = TargetModel.load(TargetConfig(path=given.target, dtype="float32", device="cpu"))
    found = drafters.find(given.drafter, RunConfig())
    decode = drafters.draft_settings(found, DecodeConfig())
    told("answering offline")
    cases = known_answers(target, given.cases)
    greedy = [case for case in cases if case.sampling.greedy]
    drafter = drafters.load(found, target)
    engines = {rows: Engine(target, drafter, replace(decode, batch_size=rows)) for rows in (1, 16)}
    queue = given.clients
    process = start(given, queue, decode)
    try:
        begun = process.memory
        asyncio.run(each_once(process.base, process.model, greedy, 4))  # buffers of every size are made here
        told("comparing speeds")
        compared = ratios(process, engines, greedy)
        told(f"{given.clients} clients for {given.minutes:g} minutes")
        memory: list[tuple[float, int]] = []
        clock = time.monotonic()
        seen = asyncio.run(
            load(
                process.base, process.model, cases, given.clients, given.minutes * 60,
                each=lambda: memory.append((time.monotonic() - clock, process.memory)),
            )
        )  # fmt: skip
        places = given.rows + queue
        told("overload")
        over = asyncio.run(load(process.base, process.model, cases, places + 120, given.overload_seconds))
        numbers = process.metrics()
        end = ended(process, cases)
    finally:
        process.popen.kill()
    audits = {name: audited(target, cases, part) for name, part in (("load", seen), ("overload", over))}
    kept = memory_kept(begun, memory, process_end=memory[-1][1])
    report = {
        "format": 1,
        "command": shlex.join(["python", "-m", "scripts.load_test", *sys.argv[1:]]),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": given.threads, "python": platform.python_version()},
        "versions": {name: __import__(name).__version__ for name in ("torch", "transformers", "fastapi", "uvicorn", "openai")},
        "drafter": {"name": found.name, "kind": found.kind, "shape": decode.shape, "depth": decode.depth},
        "server": {"rows": given.rows, "queue": queue, "cases": len(cases), "limits": LIMITS},
        "ratios": compared,
        "load": {"clients": given.clients, **summary(seen), **audits["load"]},
        "overload": {"clients": places + 120, "places": places, **summary(over), **audits["overload"]},
        "memory": kept,
        "metrics": {key: numbers[key] for key in sorted(numbers) if key.startswith(SHOWN)},
        "end": end,
    }  # fmt: skip
    report["fine"] = fine(report)
    return report


def told(phase: str) -> None:
    """Say what begins."""
    print(f"{time.strftime('%H:%M:%S')} {phase}", file=sys.stderr, flush=True)


def fine(report: dict[str, Any]) -> bool:
    """Whether everything that is asked of the server holds."""
    below, above, end = report["load"], report["overload"], report["end"]
    return (
        below["failed"] == below["refused"] == below["mismatches"] == 0
        and above["failed"] == above["mismatches"] == above["refused_without_retry_after"] == 0
        and above["refused"] > 0
        and report["memory"]["growth"] <= GROWTH_ALLOWED
        and end["status"] == 0
        and end["failed"] == 0
    )


def known_answers(target: TargetModel, count: int) -> list[Case]:
    """Requests of different prompts, lengths and settings, with plain decoding's answers, each decoded alone."""
    folder = ROOT / "assets" / "prompts"
    files = [folder / f"{name}.jsonl" for name in ("code", "chat", "math", "stories") if (folder / f"{name}.jsonl").is_file()]
    prompts = select_prompts(load_prompts(files or [folder]), -(-count // max(1, len(files))), seed=5)[:count]
    requests = to_requests(prompts, target.tokenizer, DecodeConfig())
    engines = [
        Engine(target, None, DecodeConfig(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)) for s in SAMPLING
    ]
    cases = []
    for number, request in enumerate(requests):
        limit, seed = LIMITS[number % len(LIMITS)], 1000 + number
        engine = engines[number % len(SAMPLING)]
        (answer,) = engine.generate([request.tokens], [seed], max_new_tokens=limit)
        tokens = tuple(answer.completion.tokens)
        cases.append(Case(number, request.tokens, limit, seed, SAMPLING[number % len(SAMPLING)], answer.text, tokens))
    return cases


def ratios(process: Process, engines: dict[int, Engine], cases: list[Case]) -> dict[str, Any]:
    """Tokens per second of the server over that of `Engine.run` with as many rows as there are clients, on the same requests.

    Both take turns, so that a machine that slows down slows both; the ratio is the median of `ROUNDS` such pairs.
    """
    found = {}
    for clients, engine in engines.items():
        pairs = []
        for _ in range(ROUNDS):
            begin = time.monotonic()
            done = list(engine.run([Request(case.number, case.prompt, case.seed, case.limit) for case in cases]))
            offline = divide(sum(len(item.tokens) for item in done), time.monotonic() - begin)
            seen = asyncio.run(each_once(process.base, process.model, cases, clients))
            pairs.append((offline, divide(seen.tokens, seen.wall)))
        rates = [divide(served, offline) for offline, served in pairs]
        found[f"{clients}_clients"] = {
            "offline_tokens_per_second": float(np.median([offline for offline, _ in pairs])),
            "served_tokens_per_second": float(np.median([served for _, served in pairs])),
            "ratio": float(np.median(rates)),
            "ratios": rates,
        }
    return found


def start(given: argparse.Namespace, queue: int, decode: DecodeConfig) -> Process:
    """Start the server and wait until it listens."""
    command = [
        sys.executable, "-m", "scripts.cli", "serve", "target=local", f"target.path={given.target}", "target.dtype=float32",
        "target.device=cpu", f"serve.drafter='{given.drafter}'", "serve.port=0", f"serve.queue={queue}", "serve.context=1024",
        f"decode.batch_size={given.rows}", f"decode.shape={decode.shape}", f"decode.depth={decode.depth}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert popen.stdout is not None
    lines = []
    for line in popen.stdout:
        lines.append(line)
        found = re.search(r"serving '(.+)' with .* at (http://\S+/v1)", line)
        if found:
            return Process(popen, found.group(2), found.group(1))
    raise UserError(f"the server did not start: {' / '.join(lines[-3:])}")


def ended(process: Process, cases: list[Case]) -> dict[str, Any]:
    """Ask, send SIGTERM meanwhile, and see everything end."""

    async def asked() -> Seen:
        """Ask sixteen long answers, signal when all are in, and wait for them."""
        longest = sorted(cases, key=lambda case: -case.limit)[:16]
        asking = asyncio.create_task(each_once(process.base, process.model, longest, 16))
        most = 0.0
        while most < 16 and not asking.done():  # until all are in, or the first are out again
            await asyncio.sleep(0.02)
            numbers = await asyncio.to_thread(process.metrics)
            inside = numbers["headstart_requests_running"] + numbers["headstart_requests_waiting"]
            if inside < most:
                break
            most = inside
        process.popen.send_signal(signal.SIGTERM)
        return await asking

    begin = time.monotonic()
    seen = asyncio.run(asked())
    status = process.popen.wait(60)
    return {"status": status, "seconds": time.monotonic() - begin, "answers": seen.answers, "failed": len(seen.failures)}


def audited(target: TargetModel, cases: list[Case], seen: Seen) -> dict[str, int]:
    """Why answers differ, counted by answer; equal differences are examined once."""
    counts = {"identical": seen.identical, "near_ties": 0, "mismatches": 0}
    known: dict[tuple[int, tuple[int, ...]], bool] = {}
    for number, text, tokens in seen.different:
        case = cases[number]
        if tokens == case.tokens:  # the same tokens and another text: not a matter of rounding
            counts["mismatches"] += 1
            continue
        if (number, tokens) not in known:
            request = Request(number, case.prompt, case.seed, case.limit)
            known[number, tokens] = audit(target, [request], [case.tokens], [tokens], case.sampling).mismatches == 0
        shown = [token for token in tokens if token not in target.eos_token_ids]
        same_text = target.tokenizer.decode(shown, skip_special_tokens=True) == text
        counts["near_ties" if known[number, tokens] and same_text else "mismatches"] += 1
    return counts


def summary(seen: Seen) -> dict[str, Any]:
    """A phase in numbers; seconds as percentiles."""

    def spread(values: list[float]) -> dict[str, float]:
        if not values:
            return {}
        return {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)} | {"max": max(values)}

    return {
        "seconds": seen.wall,
        "answers": seen.answers,
        "failed": len(seen.failures),
        "failures": sorted(set(seen.failures))[:5],
        "refused": len(seen.refused),
        "refused_without_retry_after": seen.without_retry_after,
        "requests_per_second": divide(seen.answers, seen.wall),
        "tokens_per_second": divide(seen.tokens, seen.wall),
        "answer_seconds": spread(seen.seconds),
        "first_piece_seconds": spread(seen.first),
        "refusal_seconds": spread(seen.refused),
    }


def memory_kept(begun: int, memory: list[tuple[float, int]], process_end: int) -> dict[str, Any]:
    """Memory at the start, after the warm-up and at the end of the load phase, and once in ten seconds."""
    total = memory[-1][0]
    warm = next(size for at, size in memory if at >= WARM_UP_SHARE * total)
    curve = [size for place, (_, size) in enumerate(memory) if place % 20 == 0]
    return {
        "start": begun,
        "warm": warm,
        "end": process_end,
        "most": max(size for _, size in memory),
        "growth": process_end / warm - 1,
        "every_ten_seconds": curve,
    }


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    facts = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", facts.read_text()) if facts.is_file() else None
    return found.group(1) if found else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
