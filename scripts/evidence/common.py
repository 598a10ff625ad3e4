"""What the makers of reports share: where reports lie, reading them, running stages, and table cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes
from inference.measure.metrics import TauEstimate
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts import cli
from scripts.tools.common import ROOT, TARGET

DOCS = ROOT / "docs"
REPORTS = DOCS / "reports"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def run_stage(name: str, *overrides: str, statuses: Sequence[int] = (0,)) -> int:
    """Run a stage in this process and return its status; raises `UserError` for one not in `statuses`."""
    status = cli.main([name, *overrides])
    if status not in statuses:
        raise UserError(
            f"`headstart {name}` failed, see above; run the same command again to continue."
        )
    return status


def cpu_target(path: Path | str = TARGET) -> TargetModel:
    """A target in float32 on the CPU."""
    return TargetModel.load(TargetConfig(path=str(path), dtype="float32", device="cpu"))


def tau_facts(found: TauEstimate) -> dict[str, Any]:
    """tau, its interval and the share of passes that accepted each depth, as reports hold them."""
    return {"tau": found.tau, "tau_ci95": list(found.ci95), "acceptance": list(found.unconditional)}


def cell(value: float, interval: Sequence[float], form: str = ".2f") -> str:
    """A table cell: a value and its 95% interval."""
    return f"{value:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"


def write_page(path: Path, lines: Sequence[str]) -> None:
    """Write a page of markdown lines."""
    write_bytes(path, "\n".join(lines).encode())
