"""What a round's folders say: what was answered, trained and measured, and what it cost.

Nothing else decides how a loop goes on, so that a loop that was killed and repeated comes to the same end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from heads.api.checkpoint import WEIGHTS_FILE
from inference.decoding.requests import PassRecord
from inference.manifest import file_sha256, read_manifest
from inference.measure.answers import FINAL_FILE, read_records
from inference.measure.metrics import Gain, Outcome, Totals, gain
from inference.measure.run import REPORT_FILE
from inference.report.model import read_report
from scripts.rounds_plan import MORE
from scripts.run import read_record, shown
from train.tracking.summary import SUMMARY_FILE

MADE_FILE, SPEED_FILE = "made.json", "speed.json"
SPENT = ("seconds", "tokens", "gpu_hours")


def answered(folder: Path) -> dict[str, Any]:
    """Of a generate folder: rows done, answer tokens, verifications on record."""
    manifest = read_manifest(folder, "generate")
    records = manifest.get("records", {})
    return {
        "answers": manifest["counts"]["done"],
        "tokens": manifest["counts"]["tokens"],
        "verifications": records.get("verifications", 0),
    }


def answers_of(entry: Mapping[str, Any]) -> int:
    """How many answers a round generated, by its entry in loop.json."""
    return int(sum(entry[name]["answers"] for name in ("generated", *MORE) if name in entry))


def trained(folder: Path) -> dict[str, Any]:
    """Of a train folder: steps, tokens, best step, the checkpoint and the hash of its weights."""
    manifest = read_manifest(folder, "train")
    checkpoint = folder / manifest["checkpoint"]
    return {
        "steps": manifest["steps"],
        "tokens": manifest["tokens"],
        "best_step": manifest["best"]["step"],
        "checkpoint": shown(checkpoint),
        "weights_sha256": file_sha256(checkpoint / WEIGHTS_FILE),
    }


def measured(folder: Path, name: str) -> dict[str, Any]:
    """Of a measurement: one drafter's tau, speed and losslessness."""
    report = read_report(folder / REPORT_FILE)
    entry = report.drafter(name).to_dict()
    keys = ("tau", "tau_ci95", "tar", "acceptance", "speedup", "speedup_ci95", "lossless")
    return {"prompts": report.settings.prompts, **{key: entry[key] for key in keys}}


def totals(folder: Path, name: str) -> Totals:
    """Sums per prompt of one drafter in a measurement."""
    found = [record for record in read_records(folder / FINAL_FILE) if record.arm == name]
    outcomes = [Outcome(item.prompt, "", [PassRecord(*counts) for counts in item.passes]) for item in found]
    return Totals.collect(outcomes, max((p.accepted for outcome in outcomes for p in outcome.passes), default=0))


def gained(new: tuple[Path, str], old: tuple[Path, str]) -> Gain:
    """What one measured drafter gains over another one. Each: the measurement's folder and the drafter's name there."""
    return gain(totals(*new), totals(*old))


def plain(found: Gain) -> dict[str, Any]:
    """A gain as JSON holds it."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(found).items()}


def other_seconds(folder: Path) -> float:
    """What a round's process did beside its stages: writing prompts, and decoding a sample of the answers in two ways."""
    total = 0.0
    for path in (*(folder / name / MADE_FILE for name in MORE), folder / SPEED_FILE):
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            total += sum(content.get(name, 0.0) for name in ("seconds", "plain_seconds", "drafted_seconds"))
    return total


def spent(stages: Sequence[Path], other: float = 0.0) -> dict[str, float]:
    """What stages cost, from their folders: seconds, tokens trained on, and seconds times processes as hours.

    Seconds of a training are those of all its sessions, setup included; of another stage those of the session that completed it.
    other: seconds of one process beside them.
    """
    total = dict.fromkeys(SPENT, 0.0) | {"seconds": other, "gpu_hours": other / 3600}
    for folder in stages:
        record = read_record(folder) or {}
        last: Mapping[str, Any] = (record.get("sessions") or [{}])[-1]
        summary = folder / SUMMARY_FILE
        if summary.is_file():
            content = json.loads(summary.read_text(encoding="utf-8"))
            seconds, hours = content["wall_seconds"] + content.get("setup_seconds", 0.0), content["device_hours"]
            total["tokens"] += content["tokens"]
        elif record.get("finished"):
            seconds = (datetime.fromisoformat(record["finished"]) - datetime.fromisoformat(last["started"])).total_seconds()
            hours = seconds * last.get("processes", 1) / 3600
        else:
            continue
        total["seconds"] += seconds
        total["gpu_hours"] += hours
    return total
