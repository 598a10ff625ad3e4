"""What a round's folders hold: what was answered, trained and measured, and what it cost.

Nothing else decides how a loop goes on, so that a loop that was killed and repeated comes to the
same end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from heads.api.checkpoint import WEIGHTS_FILE
from heads.api.config import build
from inference.decoding.requests import PassRecord
from inference.manifest import file_sha256, read_manifest
from inference.measure.answers import FINAL_FILE, read_records
from inference.measure.metrics import Gain, Outcome, Totals, gain
from inference.report.model import REPORT_FILE, read_report
from scripts.run.folder import read_record
from scripts.run.process import shown
from scripts.stages.loop.plan import MORE
from scripts.stages.loop.record import Answered, Measured, Spent, Trained
from train.tracking.summary import SUMMARY_FILE

MADE_FILE, SPEED_FILE = "made.json", "speed.json"


def answered(folder: Path) -> Answered:
    manifest = read_manifest(folder, "generate")
    counts, records = manifest["counts"], manifest.get("records", {})
    return Answered(counts["done"], counts["tokens"], records.get("verifications", 0))


def trained(folder: Path) -> Trained:
    manifest = read_manifest(folder, "train")
    checkpoint = folder / manifest["checkpoint"]
    return Trained(
        manifest["steps"],
        manifest["tokens"],
        manifest["best"]["step"],
        shown(checkpoint),
        file_sha256(checkpoint / WEIGHTS_FILE),
    )


def measured(folder: Path, name: str) -> Measured:
    report = read_report(folder / REPORT_FILE)
    entry = next(item for item in report.drafters if item.name == name).to_dict()
    known = {key: entry[key] for key in Measured.__dataclass_fields__ if key in entry}
    return build(Measured, {**known, "prompts": report.settings.prompts}, str(folder))


def totals(folder: Path, name: str) -> Totals:
    outcomes = [
        Outcome(record.prompt, "", [PassRecord(*counts) for counts in record.passes])
        for record in read_records(folder / FINAL_FILE)
        if record.arm == name
    ]
    deepest = max((p.accepted for outcome in outcomes for p in outcome.passes), default=0)
    return Totals.collect(outcomes, deepest)


def gained(new: tuple[Path, str], old: tuple[Path, str]) -> Gain:
    """What a drafter gains over another, each as its measurement's folder and name."""
    return gain(totals(*new), totals(*old))


def other_seconds(folder: Path) -> float:
    """Seconds beside the stages: writing prompts, and decoding a sample in two ways."""
    files = [*(folder / name / MADE_FILE for name in MORE), folder / SPEED_FILE]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.is_file()]
    names = ("seconds", "plain_seconds", "drafted_seconds")
    return float(sum(content.get(name, 0.0) for content in found for name in names))


def spent(stages: Sequence[Path], other: float = 0.0) -> Spent:
    """What stages cost, from their folders, and `other` seconds of one process beside them. Seconds
    of a training are those of all its sessions, setup included; of another stage those of the
    session that completed it."""
    return sum(map(spent_by, stages), Spent(other, 0.0, other / 3600))


def spent_by(folder: Path) -> Spent:
    summary = folder / SUMMARY_FILE
    if summary.is_file():
        content = json.loads(summary.read_text(encoding="utf-8"))
        seconds = content["wall_seconds"] + content.get("setup_seconds", 0.0)
        return Spent(seconds, content["tokens"], content["device_hours"])
    record = read_record(folder)
    if record is None or not record.finished:
        return Spent()
    last, ended = record.sessions[-1], datetime.fromisoformat(record.finished)
    seconds = (ended - datetime.fromisoformat(last.started)).total_seconds()
    return Spent(seconds, 0.0, seconds * last.processes / 3600)
