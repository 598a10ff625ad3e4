"""Made by hand: a report.json for tests of what reads reports, and passes for tests of metrics."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from inference.decoding.requests import PassRecord
from inference.measure.metrics import Outcome


def outcome(
    prompt: str, domain: str, accepted: Sequence[int], depth: int, seconds: float = 0.0
) -> Outcome:
    """A decoded prompt whose passes accepted the given numbers of drafted tokens; all time is
    verify time."""
    passes = [PassRecord(count, count + 1, count < depth) for count in accepted]
    return Outcome(prompt, domain, passes, {"verify": seconds})


ENTRY: dict[str, Any] = {
    "kind": "eagle3",
    "path": "outputs/demo/eagle3/best",
    "parameters": 1_200_000,
    "draft": {
        "shape": "chain",
        "depth": 4,
        "nodes": 5,
        "name": "eagle3",
        "noise": "shared",
        "weights_sha256": "a" * 64,
    },
    "tau": 2.75,
    "tau_ci95": [2.6, 2.9],
    "tokens": 8000,
    "verify_passes": 2909,
    "tar": 0.72,
    "acceptance": {"unconditional": [0.7, 0.5, 0.35, 0.2], "conditional": [0.7, 0.714, 0.7, 0.571]},
    "domains": {
        "code": {"tau": 3.0, "tau_ci95": [2.8, 3.2], "tar": 0.75, "speedup": 2.0},
        "explain": {"tau": 2.5, "tau_ci95": [2.3, 2.7], "tar": 0.69, "speedup": 1.6},
    },
    "contexts": [
        {
            "first": 0,
            "end": 512,
            "prompts": 48,
            "tau": 2.8,
            "tau_ci95": [2.6, 3.0],
            "tar": 0.73,
            "speedup": 1.9,
            "speedup_ci95": [1.75, 2.05],
        },
        {
            "first": 512,
            "end": 1024,
            "prompts": 16,
            "tau": 2.4,
            "tau_ci95": [2.1, 2.7],
            "tar": 0.66,
            "speedup": 1.1,
            "speedup_ci95": [0.95, 1.25],
        },
    ],
    "tokens_per_second": 900.0,
    "speedup": 1.8,
    "speedup_ci95": [1.7, 1.9],
    "ideal_speedup": 2.2,
    "step_ms": {"draft": 0.5, "verify": 2.3, "commit": 0.2, "other": 0.1},
    "memory_bytes": {"target": 16_000_000, "drafter": 2_400_000, "kv": 3_000_000},
    "lossless": {"sequences": 64, "identical": 64, "near_ties": 0, "mismatches": 0},
}
REPORT: dict[str, Any] = {
    "format": 1,
    "target": {
        "id": "assets/tiny-target",
        "revision": "sha256:0",
        "dtype": "float32",
        "parameters": 7_900_000,
    },
    "device": {"kind": "cpu", "name": "Example CPU", "threads": 2},
    "settings": {
        "temperature": 0.0,
        "max_new_tokens": 128,
        "batch_size": 1,
        "rule": "match",
        "seed": 0,
        "prompts": 64,
    },
    "baseline": {"tokens": 8000, "seconds": 16.0, "tokens_per_second": 500.0},
    "drafters": [ENTRY],
    "command": "headstart measure",
    "versions": {"torch": "2.13.0"},
    "git": {"revision": "0" * 40, "dirty": False},
    "run": {
        "arms": {"eagle3": {"speedup_ci95_by_domain": {"code": [1.9, 2.1], "explain": [1.5, 1.7]}}}
    },
}

SETTING: dict[str, Any] = {
    "arm": "eagle3",
    "sweep": "batch",
    "context": 90,
    "temperature": 0.0,
    "shape": "chain",
}


def profile_point(batch: int, depth: int, speedup: float) -> dict[str, Any]:
    """A point of a profile's batch sweep."""
    return {
        **SETTING,
        "batch": batch,
        "depth": depth,
        "nodes": depth + 1,
        "answers": 10 * batch,
        "tau": 2.5,
        "tokens_per_second": 100.0 * batch * speedup,
        "baseline_tokens_per_second": 100.0 * batch,
        "speedup": speedup,
        "speedup_ci95": [speedup - 0.1, speedup + 0.1],
    }


def cost_point(nodes: int, seconds: float) -> dict[str, Any]:
    """A point of a cost curve."""
    return {
        "nodes": nodes,
        "rows": 1,
        "length": 128,
        "seconds": seconds,
        "low": seconds,
        "high": seconds,
    }


LOOP: dict[str, Any] = {
    "tokens_per_second": 250.0,
    "tokens_per_second_ci95": [240.0, 260.0],
    "ratio": 0.5,
    "ratio_ci95": [0.45, 0.55],
    "end_to_end_tokens_per_second": 200.0,
    "end_to_end_ratio": 0.41,
    "tau": 1.0,
    "sequences": 64,
    "identical": 63,
    "interleaved": True,
}
BLOCKS: dict[str, Any] = {
    "baselines": {
        "transformers_generate": LOOP,
        "vllm_ngram": {**LOOP, "interleaved": False, "version": "0.32.0"},
    },
    "profile": {
        "blocks": 5,
        "refills": 2,
        "points": [profile_point(1, 2, 1.5), profile_point(1, 4, 1.8), profile_point(8, 2, 0.9)],
        "best": [
            {**SETTING, "batch": 1, "depth": 4, "tokens_per_second": 180.0, "speedup": 1.8},
            {
                **SETTING,
                "batch": 8,
                "shape": "none",
                "depth": 0,
                "tokens_per_second": 800.0,
                "speedup": 1.0,
            },
        ],
    },
    "costs": {
        "target": "assets/tiny-target",
        "device": "cpu",
        "dtype": "float32",
        "launch": "eager",
        "repeats": 15,
        "verify": [cost_point(1, 0.00312), cost_point(8, 0.00481)],
        "draft": {"eagle3": [cost_point(2, 0.00055)]},
        "commit": {"eagle3": [cost_point(2, 0.00022)]},
    },
    "roofline": {
        "bandwidth": {
            "device": "cpu",
            "copy_bytes_per_second": 9e9,
            "gemv_bytes_per_second": 8e9,
            "used_bytes_per_second": 9e9,
        },
        "target_bytes": 16_000_000,
        "expert_bytes": 0,
        "kv_bytes_per_token": 1024,
        "baseline": {"bytes_per_step": 16_100_000, "step_ms": 2.0, "share": 0.89},
        "arms": {
            "eagle3": {
                "bytes_per_step": 20_000_000,
                "drafter_bytes": 3_900_000,
                "step_ms": 3.1,
                "share": 0.72,
                "efficiency": 0.82,
                "split": {"draft": 0.16, "verify": 0.74, "commit": 0.06, "other": 0.04},
            }
        },
    },
}
"""Every optional block of a report, by hand."""


def example_report(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A complete report. `entries`: changes to copies of the example drafter; `changes`: to the top
    level."""
    report = copy.deepcopy(REPORT)
    if entries:
        report["drafters"] = [merged(ENTRY, entry) for entry in entries]
    return merged(report, changes)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of `base` with nested `changes`."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result
