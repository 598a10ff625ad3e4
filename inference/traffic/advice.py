"""The gain of speculation on traffic: simulates every drafter and draft length with the same
arrivals, and gives advice.

Two questions are answered separately. What users of this traffic notice: latency and tokens per
second of the simulated server. How much faster decoding itself is at a concurrency: the number of
requests that is not exceeded in 50% of the time (p50), or in 95% (p95).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from rich.table import Table

from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft
from inference.engines.settings import engine_settings, known_least
from inference.measure.metrics import divide
from inference.measure.prompts import Prompt
from inference.target.memory import gib
from inference.target.model import TargetModel
from inference.terminal import make_table
from inference.traffic.arrivals import Arrival
from inference.traffic.config import TrafficConfig
from inference.traffic.server import kept_tokens, measure_prefill, memory_bytes, server_costs
from inference.traffic.simulate import (
    Costs,
    Served,
    SimulatedRequest,
    concurrency,
    draw_commits,
    simulate,
)
from inference.tune.config import TuneConfig
from inference.tune.tuner import Tuner

QUANTILES = {"p50": 0.5, "p95": 0.95}
PLAIN = "none"


class UserView(TypedDict):
    """The view of a server's users; seconds by the names of `QUANTILES`."""

    tokens_per_second: float
    """From the first arrival to the last answer."""
    latency: dict[str, float]
    first_token: dict[str, float]


class WayResult(UserView):
    """The simulated traffic under one way to serve."""

    drafter: str
    draft: str
    depth: int
    tau: float
    speedup_at: dict[str, float]
    """Speedup of decoding at each concurrency."""
    memory_bytes: dict[str, int]
    extra_bytes: int
    """Bytes beyond those of plain decoding."""


class TrafficAdvice(TypedDict):
    """The result of `advise`; concurrency and best by the names of `QUANTILES`."""

    traffic: dict[str, object]
    """Requests, seconds, mean tokens of prompts and answers, domains."""
    rows: int
    concurrency: dict[str, int]
    ways: list[WayResult]
    best: dict[str, dict[str, str]]
    """`drafter` and `draft` of the way with the largest speedup."""
    engines: dict[str, dict[str, dict[str, Any]]]
    """By drafter: the settings of each engine (`inference.engines.settings`) for the drafts that
    are fastest at 1, 2, 4, ... rows."""


@dataclass(frozen=True)
class Way:
    """One way to serve. drafter: its name (`PLAIN` for none); kept: tokens kept per verification,
    by domain ("": all); memory: bytes that it takes; least: least probability of a drafted token by
    numbers of rows, for engines that end chains there, where it is known."""

    drafter: str
    draft: Draft
    costs: Costs
    kept: Mapping[str, Sequence[int]]
    memory: Mapping[str, int]
    least: Mapping[int, float] = field(default_factory=dict)

    def jobs(self, arrivals: Sequence[Arrival], seed: int) -> list[SimulatedRequest]:
        rng, found = np.random.default_rng(seed), []
        for item in arrivals:
            kept = self.kept.get(item.domain) or self.kept[""]
            found.append(SimulatedRequest(item, draw_commits(item.answer, kept, rng)))
        return found

    def speed(self, jobs: Sequence[SimulatedRequest], rows: int) -> float:
        """Tokens per second of decoding `rows` of these jobs together, without their prompts."""
        lengths = [job.arrival.prompt + job.arrival.answer * 0.5 for job in jobs]
        length = divide(sum(lengths), len(jobs))
        return rows * divide(tau_of(jobs), self.costs.step(rows, length))


def tau_of(jobs: Sequence[SimulatedRequest]) -> float:
    return divide(sum(sum(job.commits) for job in jobs), sum(len(job.commits) for job in jobs))


def ways_to_serve(
    config: TrafficConfig,
    target: TargetModel,
    drafters: Mapping[str, Any],
    prompts: Sequence[Prompt],
    decode: DecodeConfig,
    context: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Way]:
    """Plain decoding and every drafter at every length, measured on this machine. decode: sampling
    settings. Raises `UserError` if a drafter supports none of the lengths."""
    batches = {1, config.rows, *(rows for rows in config.batches if rows <= config.rows)}
    tuning = TuneConfig(
        batches=tuple(sorted(batches)),
        temperatures=(config.temperature,),
        depths=config.depths,
        nodes=(),
        tree_depth=max(config.depths),
        thresholds=(),
        prompts_per_domain=config.prompts_per_domain,
        max_new_tokens=config.max_new_tokens,
        repeats=config.repeats,
        rounds=1,
        seed=config.seed,
    )
    found: list[Way] = []
    for name, drafter in drafters.items():
        say(name)
        tuner = Tuner.prepare(tuning, target, drafter, prompts, decode, say)
        survey, costs, task = tuner.survey(config.temperature), tuner.step_costs(), tuner.task
        for rows in tuning.batches:
            tuner.calibrate(rows)
        plain = tuner.at(config.temperature)
        lengths = (task.mean_prompt, task.longest)
        for draft in survey.drafts:
            if draft == NONE and found:
                continue  # measured with the first drafter
            prefill = measure_prefill(target, drafter, draft, plain, task, config.repeats)
            least = (
                (count, tuner.least_probability(draft, config.temperature, count))
                for count in row_counts(config.rows)
            )
            found.append(
                Way(
                    PLAIN if draft == NONE else name,
                    draft,
                    server_costs(costs, draft, config.rows, prefill, lengths),
                    kept_tokens(survey, draft, task),
                    memory_bytes(target, drafter, draft, plain, config.rows, context),
                    known_least(least),
                )
            )
    return found


def advise(
    ways: Sequence[Way], arrivals: Sequence[Arrival], rows: int, seed: int = 0
) -> TrafficAdvice:
    """Simulate the traffic under every way to serve; the first must be plain decoding."""
    plain = ways[0]
    plain_jobs = plain.jobs(arrivals, seed)
    plain_served = simulate(plain_jobs, plain.costs)
    found = concurrency(plain_jobs, plain_served, list(QUANTILES.values()))
    levels = dict(zip(QUANTILES, found, strict=True))
    together = {name: min(level, rows) for name, level in levels.items()}
    slow = {name: plain.speed(plain_jobs, count) for name, count in together.items()}
    results: list[WayResult] = []
    for way in ways:
        jobs = way.jobs(arrivals, seed)
        served = plain_served if way is plain else simulate(jobs, way.costs)
        extra = sum(way.memory.values()) - sum(plain.memory.values())
        results.append(
            {
                "drafter": way.drafter,
                "draft": way.draft.label,
                "depth": way.draft.depth,
                "tau": tau_of(jobs),
                **seen_by_users(jobs, served),
                "speedup_at": {
                    name: divide(way.speed(jobs, count), slow[name])
                    for name, count in together.items()
                },
                "memory_bytes": dict(way.memory),
                "extra_bytes": extra,
            }
        )
    best = {name: max(results, key=lambda result: result["speedup_at"][name]) for name in QUANTILES}
    return {
        "traffic": {
            "requests": len(arrivals),
            "seconds": arrivals[-1].time,
            "prompt_tokens": divide(sum(item.prompt for item in arrivals), len(arrivals)),
            "answer_tokens": divide(sum(item.answer for item in arrivals), len(arrivals)),
            "domains": sorted({item.domain for item in arrivals if item.domain}),
        },
        "rows": rows,
        "concurrency": levels,
        "ways": results,
        "best": {
            name: {"drafter": way["drafter"], "draft": way["draft"]} for name, way in best.items()
        },
        "engines": {
            name: settings_of(ways, name, arrivals, rows, seed)
            for name in dict.fromkeys(way.drafter for way in ways[1:])
        },
    }


def settings_of(
    ways: Sequence[Way], drafter: str, arrivals: Sequence[Arrival], rows: int, seed: int
) -> dict[str, dict[str, Any]]:
    """The settings of each engine for a drafter."""
    chains = [way for way in ways if way.draft == way.draft.as_chain]
    chosen = fastest(chains, drafter, arrivals, rows, seed)
    least = {way.draft: way.least for way in chains if way.drafter == drafter}
    return engine_settings(
        fastest(ways, drafter, arrivals, rows, seed),
        chosen,
        known_least((count, least.get(chain, {}).get(count)) for count, chain in chosen.items()),
    )


def row_counts(rows: int) -> list[int]:
    """The numbers of rows for which engines get drafts: every power of two, and `rows`."""
    return sorted({rows, *(2**power for power in range(rows.bit_length()))})


def fastest(
    ways: Sequence[Way], drafter: str, arrivals: Sequence[Arrival], rows: int, seed: int
) -> dict[int, Draft]:
    """The draft of a drafter, or plain decoding, that is fastest at every power of two of rows."""
    own = [(way, way.jobs(arrivals, seed)) for way in ways if way.drafter in (drafter, PLAIN)]
    return {
        count: max(own, key=lambda pair: pair[0].speed(pair[1], count))[0].draft
        for count in row_counts(rows)
    }


def seen_by_users(jobs: Sequence[SimulatedRequest], served: Sequence[Served]) -> UserView:
    def quantiles(moments: list[float]) -> dict[str, float]:
        waits = [at - job.arrival.time for at, job in zip(moments, jobs, strict=True)]
        return {name: float(np.quantile(waits, share)) for name, share in QUANTILES.items()}

    tokens = sum(job.arrival.answer for job in jobs)
    return {
        "tokens_per_second": divide(tokens, max(item.end for item in served)),
        "latency": quantiles([item.end for item in served]),
        "first_token": quantiles([item.first for item in served]),
    }


def traffic_table(advice: TrafficAdvice) -> Table:
    """One line per drafter and length."""
    level, requests = advice["concurrency"], advice["traffic"]["requests"]
    found = make_table(f"{requests} requests, at most {advice['rows']} decoded together")
    found.add_column("drafter")
    found.add_column("draft")
    speedups = (f"speedup at {level['p50']} (p50)", f"at {level['p95']} (p95)")
    times = ("latency p50", "p95", "first token p50", "p95")
    for column in ("tau", "tokens/s", *times, *speedups, "more memory"):
        found.add_column(column, justify="right")
    for way in advice["ways"]:
        waits = [way["latency"], way["first_token"]]
        seconds = [f"{item[name]:.2f} s" for item in waits for name in ("p50", "p95")]
        found.add_row(
            way["drafter"],
            way["draft"],
            f"{way['tau']:.2f}",
            f"{way['tokens_per_second']:.0f}",
            *seconds,
            *(f"{way['speedup_at'][name]:.2f}" for name in ("p50", "p95")),
            gib(way["extra_bytes"]),
        )
    return found


def advice_lines(advice: TrafficAdvice) -> list[str]:
    """The recommendation, one sentence per concurrency."""
    lines = []
    for name, best in advice["best"].items():
        where = f"at {advice['concurrency'][name]} requests ({name})"
        if best["draft"] == "none":
            lines.append(f"{where}: no speculation, nothing is faster than plain decoding")
            continue
        speedup = max(way["speedup_at"][name] for way in advice["ways"])
        lines.append(
            f"{where}: {best['drafter']}, {best['draft']}: {speedup:.2f} times as fast as plain "
            "decoding"
        )
    return lines
