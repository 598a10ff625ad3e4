"""The findings of an audit: in memory, and as audit.json.

The file is checked when it is written and when it is read: an audit whose counts do not add up, or
whose verdict contradicts its rows, is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from heads.api.errors import UserError
from inference.audit.comparison import Divergence
from inference.audit.statistics import BINS, FlipSummary
from inference.manifest import write_json
from inference.measure.config import Provenance
from inference.report.model import DeviceFacts

FORMAT = 1
AUDIT_FILE = "audit.json"


class Part(BaseModel):
    """A part of audit.json. Numbers are finite and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _read_divergences(items: list[Any]) -> list[Divergence]:
    return [item if isinstance(item, Divergence) else Divergence.from_dict(item) for item in items]


Divergences = Annotated[
    list[Divergence],
    PlainValidator(_read_divergences),
    PlainSerializer(lambda items: [item.to_dict() for item in items]),
]


class AuditRow(Part):
    """One comparison with plain decoding."""

    check: str
    case: str
    """The processors' setting; empty for invariance."""
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
    """Tokens committed per verification; above 1 where drafts were accepted."""
    changed: int
    """Answers that the case's settings changed."""
    passed: bool
    """Identical in float64, else without mismatches."""
    divergences: Divergences

    @model_validator(mode="after")
    def _check_counts(self) -> AuditRow:
        if self.sequences != self.identical + self.near_ties + self.mismatches:
            raise ValueError("does not add up: sequences must be the sum of its parts.")
        if self.passed and self.mismatches:
            raise ValueError("has mismatches and says that it passed.")
        return self


class DistributionRow(Part):
    """One chi-square test."""

    rule: str
    precision: str
    drafter: str
    shape: str
    seeds: int
    texts: int
    """Answers with a probability above 0."""
    entropy: float
    cells: int
    """Classes after pooling."""
    statistic: float
    degrees: int
    p_value: float
    impossible: int
    tokens_per_pass: float
    passed: bool


class Skipped(Part):
    """A combination that a drafter or a rule does not offer."""

    drafter: str
    shape: str
    reason: str


class AuditedTarget(Part):
    """The target model."""

    id: str
    revision: str
    parameters: int


class FlipRow(Part):
    """A `FlipSummary` with the edges of its bins; the last edge, infinity, is None."""

    precision: str
    tokens: int
    flips: int
    near_ties: int
    places: int
    histogram: list[int]
    filtered: int
    largest_gap: float
    bins: list[float | None]
    per_thousand: float


class Verdict(Part):
    """The result of an audit."""

    lossless: bool
    compared: int
    failed: int


class Audit(Part):
    """The content of audit.json."""

    format: int
    target: AuditedTarget
    device: DeviceFacts
    settings: dict[str, Any]
    """The configuration: `audit`, `decode` and the target's `dtype`."""
    verdict: Verdict
    comparisons: list[AuditRow]
    distributions: list[DistributionRow]
    flips: list[FlipRow]
    skipped: list[Skipped]
    command: str
    versions: dict[str, str]
    git: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_verdict(self) -> Audit:
        verdict = _judge(self.comparisons, self.distributions)
        if self.verdict != verdict:
            raise ValueError(f"verdict is {self.verdict}, but its rows say {verdict}.")
        return self


def _judge(comparisons: list[AuditRow], distributions: list[DistributionRow]) -> Verdict:
    passed = [*(row.passed for row in comparisons), *(row.passed for row in distributions)]
    failed = passed.count(False)
    return Verdict(lossless=not failed, compared=len(comparisons), failed=failed)


@dataclass
class Findings:
    """The results of an audit that is running."""

    rows: list[AuditRow] = field(default_factory=list)
    distributions: list[DistributionRow] = field(default_factory=list)
    flips: list[FlipSummary] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    target: AuditedTarget | None = None
    device: DeviceFacts | None = None

    @property
    def failed(self) -> list[AuditRow | DistributionRow]:
        """The comparisons that show a mismatch."""
        every: list[AuditRow | DistributionRow] = [*self.rows, *self.distributions]
        return [row for row in every if not row.passed]

    def skip(self, drafter: str, shape: str, error: UserError) -> None:
        """Note a combination once, not per precision and batch."""
        found = Skipped(drafter=drafter, shape=shape, reason=str(error))
        if found not in self.skipped:
            self.skipped.append(found)


def make_audit(findings: Findings, settings: dict[str, Any], provenance: Provenance) -> Audit:
    """The content of audit.json. settings: the configuration of the audit."""
    assert findings.target is not None and findings.device is not None, "nothing was audited"
    edges = [*BINS[:-1], None]
    content = {
        "format": FORMAT,
        "target": findings.target,
        "device": findings.device,
        "settings": settings,
        "verdict": _judge(findings.rows, findings.distributions),
        "comparisons": findings.rows,
        "distributions": findings.distributions,
        "flips": [
            FlipRow(**asdict(item), bins=edges, per_thousand=item.per_thousand)
            for item in findings.flips
        ],
        "skipped": findings.skipped,
        **provenance,
    }
    return _parse(content, "the new audit")


def write(audit: Audit, folder: Path) -> Path:
    """Write audit.json into `folder` atomically; returns its path."""
    path = folder / AUDIT_FILE
    write_json(path, audit.model_dump(mode="json", exclude_unset=True))
    return path


def read(path: Path) -> Audit:
    """Read an audit.json, or the one in a folder; raises `UserError` when it is absent or
    invalid."""
    file = path / AUDIT_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"'{path}' holds no {AUDIT_FILE}. Run `headstart audit` first, or give the folder it "
            "wrote."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{file}' is not readable as JSON ({error}). Audit again.") from error
    return _parse(content, f"'{file}'")


def _parse(content: Any, source: str) -> Audit:
    """`content` as an `Audit`; raises `UserError` with `source` and the key at fault."""
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found != FORMAT:
        raise UserError(f"{source}: format is {found}; this version reads {FORMAT}. Audit again.")
    try:
        return Audit.model_validate(content)
    except ValidationError as error:
        reason = _explain(error.errors()[0])
        raise UserError(
            f"{source}: {reason} Audits are written by `headstart audit`; audit again."
        ) from None


def _explain(error: ErrorDetails) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{key} is missing."
    if error["type"] == "extra_forbidden":
        return f"{key} is not part of an audit."
    if error["type"] == "value_error":
        return f"{key} {error['msg'].removeprefix('Value error, ')}".strip()
    return f"{key or 'the file'}: {error['msg']}; given: {error['input']!r}."
