"""What report.json must look like (DESIGN section 4), checked whenever one is written or read.

Numbers leave the project only through this file's format: the table, the plots, model cards and Hub pushes
all read a report that passed `validate_report`. Beyond the agreed keys, a drafter's `draft` block says which
arm it was (`name`, `noise`, a tree's `choices`) and which weights were measured (`weights_sha256`), and the
top level carries the provenance (`command`, `versions`, `git`, `run`) and the blocks that were asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heads.api.errors import UserError

FORMAT = 1

STEP_MS = {"draft": float, "verify": float, "commit": float, "other": float, "gap": float}
MEMORY = {"target": int, "drafter": int, "kv": int}
LOSSLESS = {"sequences": int, "identical": int, "near_ties": int, "mismatches": int}
DOMAIN = {"tau": float, "tau_ci95": "interval", "tar": float, "speedup": float}
DRAFTER: dict[str, Any] = {
    "kind": str,
    "path": str,
    "parameters": int,
    "draft": {
        "shape": str,
        "depth": int,
        "nodes": int,
        "name": str,
        "noise": str,
        "choices": "anything",
        "weights_sha256": str,
    },
    "tau": float,
    "tau_ci95": "interval",
    "tokens": int,
    "verify_passes": int,
    "tar": float,
    "acceptance": {"unconditional": "numbers", "conditional": "numbers"},
    "domains": {"*": DOMAIN},
    "tokens_per_second": float,
    "speedup": float,
    "speedup_ci95": "interval",
    "ideal_speedup": float,
    "step_ms": STEP_MS,
    "memory_bytes": MEMORY,
    "lossless": LOSSLESS,
}
REPORT: dict[str, Any] = {
    "format": int,
    "target": {"id": str, "revision": str, "dtype": str, "parameters": int},
    "device": {"kind": str, "name": str, "threads": int},
    "settings": {
        "temperature": float,
        "max_new_tokens": int,
        "batch_size": int,
        "rule": str,
        "seed": int,
        "prompts": int,
    },
    "baseline": {"tokens": int, "seconds": float, "tokens_per_second": float},
    "drafters": [DRAFTER],
}
SETTING = {"arm": str, "sweep": str, "batch": int, "context": int, "temperature": float}
PROFILE = {
    "blocks": int,
    "refills": int,
    "points": [
        {
            **SETTING,
            "shape": str,
            "depth": int,
            "nodes": int,
            "answers": int,
            "tau": float,
            "tokens_per_second": float,
            "baseline_tokens_per_second": float,
            "speedup": float,
            "speedup_ci95": "interval",
        }
    ],
    "best": [{**SETTING, "shape": str, "depth": int, "tokens_per_second": float, "speedup": float}],
}
POINT = {"nodes": int, "rows": int, "length": int, "seconds": float, "low": float, "high": float}
COSTS = {
    "target": str,
    "device": str,
    "dtype": str,
    "launch": str,
    "repeats": int,
    "verify": [POINT],
    "draft": {"*": [POINT]},
    "commit": {"*": [POINT]},
}
ROOFLINE = {
    "bandwidth": {
        "device": str,
        "copy_bytes_per_second": float,
        "gemv_bytes_per_second": float,
        "used_bytes_per_second": float,
    },
    "target_bytes": int,
    "expert_bytes": int,
    "kv_bytes_per_token": int,
    "baseline": {"bytes_per_step": int, "step_ms": float, "share": float},
    "arms": {
        "*": {
            "bytes_per_step": int,
            "drafter_bytes": int,
            "step_ms": float,
            "share": float,
            "efficiency": float,
            "split": STEP_MS,
        }
    },
}
LOOP = {
    "tokens_per_second": float,
    "tokens_per_second_ci95": "interval",
    "ratio": float,
    "ratio_ci95": "interval",
    "end_to_end_tokens_per_second": float,
    "end_to_end_ratio": float,
    "tau": float,
    "sequences": int,
    "identical": int,
    "interleaved": bool,
    "version": str,
}
TERM = {"name": str, "factor": float, "ci95": "interval"}
SPLIT = {"ceiling": float, "speedup": float, "tau": float, "terms": [TERM]}
ECE: dict[str, Any] = {"ece": float, "ece_ci95": "interval"}
STATES: dict[str, Any] = {
    "tested": int,
    **{
        key: form
        for name in ("accepted", "overlap", "own_overlap", "missed")
        for key, form in ((name, float), (f"{name}_ci95", "interval"))
    },
}
LOST_ARM: dict[str, Any] = {
    **SPLIT,
    "widening": float,
    "domains": {"*": {**SPLIT, "calibration": ECE}},
    "depths": {"*": [STATES]},
    "positions": [{"first": int, "end": int, "calibration": ECE, **STATES}],
    "temperatures": [{"temperature": float, "tau": float, "tau_ci95": "interval", **ECE, **STATES}],
    "tree": {"nodes": int, "own": float, "best": float, "choices": "anything"},
    "calibration": {
        "estimate": str,
        **ECE,
        "bins": [{"count": int, "confidence": float, "accepted": float}],
    },
}
LOST = {"prompts": int, "arms": {"*": LOST_ARM}}
BLOCKS = {"lost": LOST, "profile": PROFILE, "costs": COSTS, "roofline": ROOFLINE, "baselines": {"*": LOOP}}
"""Blocks that a report has only when they were asked for."""
PROVENANCE = ("command", "versions", "git", "run")
"""Top-level keys that say how a report came about; free in form."""


def validate_report(report: Any, source: str = "report") -> dict[str, Any]:
    """Return `report` if it is complete; otherwise raise `UserError` naming `source` and the dotted key at
    fault.
    """
    _check(report, {**REPORT, **BLOCKS, **dict.fromkeys(PROVENANCE, "anything")}, "", source)
    if report["format"] != FORMAT:
        raise UserError(
            f"{source}: format is {report['format']}; this version reads format {FORMAT}. Measure again."
        )
    names = [entry["draft"].get("name", entry["kind"]) for entry in report["drafters"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"{source}: drafters holds {twice} more than once; every arm needs its own draft.name."
        )
    for place, entry in enumerate(report["drafters"]):
        lossless = entry["lossless"]
        if lossless["sequences"] != lossless["identical"] + lossless["near_ties"] + lossless["mismatches"]:
            raise UserError(
                f"{source}: drafters.{place}.lossless does not add up: {lossless}; sequences must be "
                "identical + near_ties + mismatches."
            )
    return dict(report)


OPTIONAL = {
    "name", "noise", "choices", "weights_sha256", "gap", "version", "calibration", "ece_ci95", *BLOCKS, *PROVENANCE,
}  # fmt: skip


def _check(value: Any, form: Any, key: str, source: str) -> None:
    """Compare `value` at the dotted `key` with `form`: a dict of forms, a list of one form, or a leaf."""
    if isinstance(form, dict):
        _check_mapping(value, form, key, source)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise _wrong(source, key, "a list", value)
        for place, item in enumerate(value):
            _check(item, form[0], f"{key}.{place}", source)
    else:
        fits, wanted = LEAVES[form]
        if not fits(value):
            raise _wrong(source, key, wanted, value)


def _check_mapping(value: Any, form: dict[str, Any], key: str, source: str) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(source, key or "the whole file", "an object", value)
    prefix = f"{key}." if key else ""
    if "*" in form:
        for name, item in value.items():
            _check(item, form["*"], prefix + name, source)
        return
    for name in form:
        if name in value:
            _check(value[name], form[name], prefix + name, source)
        elif name not in OPTIONAL:
            raise UserError(
                f"{source}: {prefix}{name} is missing. Reports are written by `headstart measure`; "
                "measure again."
            )
    unknown = sorted(set(value) - set(form))
    if unknown:
        raise UserError(
            f"{source}: {prefix}{unknown[0]} is not part of a report. Allowed: {', '.join(sorted(form))}."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(item) for item in value)


def _is_interval(value: Any) -> bool:
    return _is_numbers(value) and len(value) == 2 and value[0] <= value[1]


LEAVES: dict[Any, tuple[Callable[[Any], bool], str]] = {
    float: (_is_number, "a finite number"),
    int: (_is_count, "a whole number, 0 or more"),
    str: (lambda value: isinstance(value, str), "text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    "numbers": (_is_numbers, "a list of numbers"),
    "interval": (_is_interval, "[low, high] with low <= high"),
    "anything": (lambda value: True, "anything"),
}


def _wrong(source: str, key: str, wanted: str, given: Any) -> UserError:
    return UserError(
        f"{source}: {key} must be {wanted}; given: {given!r}. Reports are written by `headstart measure`."
    )


def read_report(path: Path) -> dict[str, Any]:
    """Read and check one report.json (or the one in a folder). Raises `UserError` when it is absent, broken
    or incomplete.
    """
    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"'{path}' holds no report.json. Run `headstart measure` first, or give the folder it wrote."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{file}' is not readable as JSON ({error}). Measure again.") from error
    return validate_report(content, f"'{file}'")


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Check `report` and write it to `path` atomically."""
    validate_report(report, "the new report")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def arm_name(entry: Mapping[str, Any]) -> str:
    """The name of one entry of `drafters`: `draft.name`, or its kind."""
    return str(entry["draft"].get("name") or entry["kind"])
