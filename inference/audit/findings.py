"""What an audit found, as plain data: in memory, and as audit.json.

The file's keys are the fields of the dataclasses here. It is checked when it is written and when it is read:
an audit whose counts do not add up, or whose verdict is not what its rows say, is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from heads.api.errors import UserError
from inference.audit.comparison import Divergence
from inference.audit.statistics import BINS, FlipSummary
from inference.manifest import write_json
from inference.target.hardware import Device

FORMAT = 1
AUDIT_FILE = "audit.json"


@dataclass
class AuditRow:
    """One comparison with plain decoding. case: the processors' setting, empty for invariance.

    tokens_per_pass: committed per verification, to see that drafts were accepted. changed: answers that the
    case's settings changed, to see that they had an effect. passed: identical in float64, else without
    mismatches.
    """

    check: str
    case: str
    precision: str
    drafter: str
    kind: str
    rule: str
    shape: str
    batch_size: int
    temperature: float
    sequences: int
    identical: int
    near_ties: int
    mismatches: int
    tokens: int
    flips: int
    tokens_per_pass: float
    changed: int
    passed: bool
    divergences: list[Divergence]


@dataclass
class DistributionRow:
    """One chi-square test. texts: answers with a probability; cells: classes after pooling."""

    rule: str
    precision: str
    drafter: str
    shape: str
    seeds: int
    texts: int
    entropy: float
    cells: int
    statistic: float
    degrees: int
    p_value: float
    impossible: int
    tokens_per_pass: float
    passed: bool


@dataclass
class Skipped:
    """A combination that a drafter or a rule does not offer, with its own words for it."""

    drafter: str
    shape: str
    reason: str


@dataclass
class Findings:
    """Everything an audit found, and on what."""

    rows: list[AuditRow] = field(default_factory=list)
    distributions: list[DistributionRow] = field(default_factory=list)
    flips: list[FlipSummary] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)
    device: Device | None = None

    @property
    def failed(self) -> list[AuditRow | DistributionRow]:
        """The comparisons that show a mismatch."""
        every: list[AuditRow | DistributionRow] = [*self.rows, *self.distributions]
        return [row for row in every if not row.passed]

    def skip(self, drafter: str, shape: str, error: UserError) -> None:
        """Note a combination once, not per precision and batch."""
        found = Skipped(drafter, shape, str(error))
        if found not in self.skipped:
            self.skipped.append(found)


def to_json(findings: Findings, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The content of audit.json. settings: what was asked for; provenance: `command`, `versions`, maybe
    `git`.
    """
    failed = findings.failed
    content = {
        "format": FORMAT,
        "target": findings.target,
        "device": findings.device,
        "settings": dict(settings),
        "verdict": {"lossless": not failed, "compared": len(findings.rows), "failed": len(failed)},
        "comparisons": [asdict(row) for row in findings.rows],
        "distributions": [asdict(row) for row in findings.distributions],
        "flips": [
            {**asdict(item), "bins": list(BINS), "per_thousand": item.per_thousand} for item in findings.flips
        ],
        "skipped": [asdict(item) for item in findings.skipped],
        **provenance,
    }
    return validate(_finite(content), "the new audit")


def write(content: Mapping[str, Any], folder: Path) -> Path:
    """Write audit.json into `folder` atomically; returns its path."""
    validate(content, "the new audit")
    write_json(folder / AUDIT_FILE, content)
    return folder / AUDIT_FILE


def read(path: Path) -> dict[str, Any]:
    """Read and check an audit.json or the one in a folder; raises `UserError` when it is absent, broken or
    incomplete.
    """
    file = path / AUDIT_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"'{path}' holds no {AUDIT_FILE}. Run `headstart audit` first, or give the folder it wrote."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{file}' is not readable as JSON ({error}). Audit again.") from error
    return validate(content, f"'{file}'")


TOP: dict[str, type] = {
    "format": int,
    "target": dict,
    "device": dict,
    "settings": dict,
    "verdict": dict,
    "comparisons": list,
    "distributions": list,
    "flips": list,
    "skipped": list,
    "command": str,
    "versions": dict,
    "git": dict,
}
OPTIONAL = ("git",)


def validate(content: Any, source: str) -> dict[str, Any]:
    """`content` if it is a complete audit; otherwise raises `UserError` naming `source` and the key at fault."""
    _check_keys(content, TOP, "", source, OPTIONAL)
    if content["format"] != FORMAT:
        raise UserError(f"{source}: format is {content['format']}; this version reads {FORMAT}. Audit again.")
    for name, form in (("comparisons", AuditRow), ("distributions", DistributionRow), ("skipped", Skipped)):
        for place, item in enumerate(content[name]):
            _check_keys(item, get_type_hints(form), f"{name}.{place}.", source)
    flips = {**get_type_hints(FlipSummary), "bins": list, "per_thousand": float}
    for place, item in enumerate(content["flips"]):
        _check_keys(item, flips, f"flips.{place}.", source)
    for place, row in enumerate(content["comparisons"]):
        if row["sequences"] != row["identical"] + row["near_ties"] + row["mismatches"]:
            raise UserError(
                f"{source}: comparisons.{place} does not add up: sequences must be the sum of its parts."
            )
        if row["passed"] and row["mismatches"]:
            raise UserError(f"{source}: comparisons.{place} has mismatches and says that it passed.")
    failed = sum(not row["passed"] for row in (*content["comparisons"], *content["distributions"]))
    verdict = {"lossless": not failed, "compared": len(content["comparisons"]), "failed": failed}
    if content["verdict"] != verdict:
        raise UserError(f"{source}: verdict is {content['verdict']}, but its rows say {verdict}.")
    return dict(content)


def _check_keys(
    value: Any, form: Mapping[str, Any], where: str, source: str, optional: Sequence[str] = ()
) -> None:
    """Compare an object's keys and the kinds of its values with `form`: name -> type."""
    if not isinstance(value, Mapping):
        raise UserError(f"{source}: {where.rstrip('.') or 'the file'} must be an object. Audit again.")
    unknown = sorted(set(value) - set(form))
    missing = sorted(set(form) - set(value) - set(optional))
    if unknown or missing:
        what = (
            f"{where}{missing[0]} is missing" if missing else f"{where}{unknown[0]} is not part of an audit"
        )
        raise UserError(f"{source}: {what}. Audits are written by `headstart audit`; audit again.")
    for name, item in value.items():
        wanted = get_origin(form[name]) or form[name]
        allowed = (int, float) if wanted is float else wanted
        if not isinstance(item, allowed) or (isinstance(item, bool) and wanted is not bool):
            raise UserError(f"{source}: {where}{name} must be of type {wanted.__name__}; given: {item!r}.")


def _finite(value: Any) -> Any:
    """`value` with tuples as lists and infinities as None: JSON knows neither."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
