"""Advice on traffic for people: a table of drafters and lengths, and what to do."""

from __future__ import annotations

from rich.table import Table

from inference.target.memory import gib
from inference.traffic.advice import TrafficAdvice


def traffic_table(advice: TrafficAdvice) -> Table:
    level, requests = advice["concurrency"], advice["traffic"]["requests"]
    found = Table(title=f"{requests} requests, at most {advice['rows']} decoded together")
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
