"""The findings of an audit: in memory, and as audit.json.

The file is checked on writing and on reading: an audit whose counts do not add up, or whose verdict
contradicts its rows, is refused.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainSerializer, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from heads.api.errors import UserError
from inference.audit.comparison import Divergence
from inference.manifest import write_json
from inference.measure.config import Provenance
from inference.report.model import FORMAT, Block, DeviceFacts, LosslessCounts, parse
from inference.report.model import read as read_block

AUDIT_FILE = "audit.json"
BINS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 2.0, 10.0, math.inf)
"""Edges of the histogram of |margin| / tolerance. Up to 1 a flip is a near tie."""


class Part(Block):
    """A part of audit.json."""

    whole: ClassVar[str] = "an audit"
    stage: ClassVar[str] = "audit"


Divergences = Annotated[
    list[Divergence],
    PlainValidator(
        lambda items: [
            item if isinstance(item, Divergence) else Divergence.from_dict(item) for item in items
        ]
    ),
    PlainSerializer(lambda items: [item.to_dict() for item in items]),
]


class Compared(Part):
    """What was compared with plain decoding."""

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


class AuditRow(LosslessCounts, Compared):
    """One comparison with plain decoding."""

    whole: ClassVar[str] = Compared.whole

    tokens: int
    flips: int
    tokens_per_pass: float
    """Tokens committed per verification; above 1 where drafts were accepted."""
    changed: int
    """Answers that the case's settings changed."""
    captured: bool = False
    """Whether steps were captured and replayed; all was then decoded by launched ones as well."""
    changed_by_capture: int = 0
    """Answers that launched steps decode otherwise."""
    passed: bool
    """Identical in float64, else without mismatches; and not changed by capture."""
    divergences: Divergences

    @model_validator(mode="after")
    def _check_passed(self) -> AuditRow:
        if self.passed and (self.mismatches or self.changed_by_capture):
            raise PydanticCustomError("inconsistent", "has mismatches and says that it passed.")
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
    """A combination that a drafter or a rule does not support."""

    drafter: str
    shape: str
    reason: str


class AuditedTarget(Part):
    """The target model."""

    id: str
    revision: str
    parameters: int


class FlipRow(Part):
    """How often a number format changed a decision, and how the margins compare with the gap."""

    precision: str
    tokens: int
    """Tokens audited."""
    flips: int
    """Those that plain decoding would not have picked after the same text."""
    near_ties: int
    places: int
    """Different ones among the flips: all drafters meet the same close decisions."""
    histogram: list[int]
    """Flips by |margin| / tolerance; the edges are `bins`."""
    filtered: int
    """Flips where a filter removed one of the two tokens, so that there is no margin."""
    largest_gap: float
    """In logits."""
    bins: list[float | None]
    """The last edge, infinity, is None."""
    per_thousand: float
    alone_tokens: int = 0
    """Tokens of plain decoding that the target picked again, reading several at a time."""
    alone_flips: int = 0
    """Those of them that it picked differently."""

    @property
    def alone_per_thousand(self) -> float | None:
        """Flips of the target alone per thousand tokens; None if none were counted."""
        return 1000 * self.alone_flips / self.alone_tokens if self.alone_tokens else None

    @classmethod
    def of(
        cls,
        precision: str,
        tokens: int,
        flips: Sequence[Divergence],
        alone: tuple[int, int] = (0, 0),
    ) -> FlipRow:
        """Count the flips of some audited tokens. alone: tokens and flips of the target alone."""
        histogram, filtered = [0] * (len(BINS) - 1), 0
        for flip in flips:
            if not math.isfinite(flip.margin) or flip.tolerance == 0:
                filtered += 1
            else:
                histogram[bisect_left(BINS[1:], abs(flip.margin) / flip.tolerance)] += 1
        places = {(one.prompt, one.place, one.expected, one.found, one.margin) for one in flips}
        return cls(
            precision=precision,
            tokens=tokens,
            flips=len(flips),
            near_ties=sum(flip.near_tie for flip in flips),
            places=len(places),
            histogram=histogram,
            filtered=filtered,
            largest_gap=max((flip.gap for flip in flips), default=0.0),
            bins=[*BINS[:-1], None],
            per_thousand=1000 * len(flips) / tokens if tokens else 0.0,
            alone_tokens=alone[0],
            alone_flips=alone[1],
        )


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
    git: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_verdict(self) -> Audit:
        verdict = _judge(self.comparisons, self.distributions)
        if self.verdict != verdict:
            facts = {"given": str(self.verdict), "found": str(verdict)}
            message = "verdict is {given}, but its rows say {found}."
            raise PydanticCustomError("inconsistent", message, facts)
        return self


def _judge(comparisons: list[AuditRow], distributions: list[DistributionRow]) -> Verdict:
    passed = [*(row.passed for row in comparisons), *(row.passed for row in distributions)]
    failed = passed.count(False)
    return Verdict(lossless=not failed, compared=len(comparisons), failed=failed)


@dataclass
class Findings:
    """The results of a running audit."""

    rows: list[AuditRow] = field(default_factory=list)
    distributions: list[DistributionRow] = field(default_factory=list)
    flips: list[FlipRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    target: AuditedTarget | None = None
    device: DeviceFacts | None = None

    @property
    def failed(self) -> list[AuditRow | DistributionRow]:
        """The comparisons that show a mismatch."""
        every: list[AuditRow | DistributionRow] = [*self.rows, *self.distributions]
        return [row for row in every if not row.passed]

    def skip(self, drafter: str, shape: str, error: UserError) -> None:
        """Record a skipped combination once, not per precision and batch."""
        found = Skipped(drafter=drafter, shape=shape, reason=str(error))
        if found not in self.skipped:
            self.skipped.append(found)


def make_audit(findings: Findings, settings: dict[str, Any], provenance: Provenance) -> Audit:
    """The content of audit.json. settings: the configuration of the audit."""
    assert findings.target is not None and findings.device is not None, "nothing was audited"
    content = {
        "format": FORMAT,
        "target": findings.target,
        "device": findings.device,
        "settings": settings,
        "verdict": _judge(findings.rows, findings.distributions),
        "comparisons": findings.rows,
        "distributions": findings.distributions,
        "flips": findings.flips,
        "skipped": findings.skipped,
        **provenance,
    }
    return parse(Audit, content, "the new audit")


def write(audit: Audit, folder: Path) -> Path:
    """Write audit.json into `folder` atomically; returns its path."""
    path = folder / AUDIT_FILE
    write_json(path, audit.model_dump(mode="json", exclude_unset=True))
    return path


def read(path: Path) -> Audit:
    """Read an audit.json, or the one in a folder; raises `UserError` if that fails."""
    return read_block(Audit, path, AUDIT_FILE)
