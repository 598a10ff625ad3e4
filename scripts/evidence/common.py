"""Shared code of the evidence scripts: report files, stages, decoding of checkpoints, table
cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.manifest import write_bytes
from inference.measure.metrics import Outcome, TauEstimate, Totals
from inference.measure.prompts import Prompt, to_requests
from inference.target.model import TargetModel
from scripts import cli
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.tools.common import ROOT

DOCS = ROOT / "docs"
REPORTS = DOCS / "reports"


class TauFacts(TypedDict):
    """tau as reports hold it; acceptance: the share of passes that accepted each depth."""

    tau: float
    tau_ci95: list[float]
    acceptance: list[float]


def read_json(path: Path) -> Any:
    """The JSON value in a file; an empty object where there is no file. The caller names its
    type."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def run_stage(name: str, *overrides: str, statuses: Sequence[int] = (0,)) -> int:
    """Run a stage in this process; returns its status, raises `UserError` for one not in
    `statuses`."""
    status = cli.main([name, *overrides])
    if status not in statuses:
        raise UserError(
            f"`headstart {name}` failed, see above; run the same command again to continue."
        )
    return status


def run_on_target(
    stage: str, target: Path, run: Path, *overrides: str, statuses: Sequence[int] = (0,)
) -> None:
    """Run a stage with the settings of `experiment=families` on a local target, in the run
    `run`."""
    shared = ["experiment=[families]", "target=local", f"target.path={target}"]
    shared += ["target.dtype=float32", f"run.root={run.parent}", f"run.name={run.name}"]
    run_stage(stage, *shared, *overrides, statuses=statuses)


def family_recipe(name: str) -> list[str]:
    """The training overrides of a row of `experiment=families`, without its learning rate."""
    row = load_settings(STAGES["loop"], ["experiment=families"]).loop.sweep[name]
    return [f"head={row.head or name}", *row.overrides]


def decode_prompts(
    target: TargetModel,
    checkpoint: Path | None,
    prompts: Sequence[Prompt],
    decode: DecodeConfig,
    changed_target: bool = False,
) -> list[Completion]:
    """Completions of the prompts that fit the target's positions, in their order.

    checkpoint: the drafter; None decodes without one. changed_target: accept a drafter of another
    version of the target.
    """
    drafter = None
    if checkpoint is not None:
        drafter = load_drafter(
            checkpoint, target.info, target.weights, changed_target=changed_target
        )
    room = target.info.max_position_embeddings
    requests = to_requests(prompts, target.tokenizer, decode, capacity=room, overlong="skip")
    done = Engine(target, drafter, decode).run(requests)
    return sorted(done, key=lambda item: item.request.index)


def sum_up(done: Sequence[Completion], prompts: Sequence[Prompt], depth: int) -> Totals:
    """Sums per prompt of completions whose requests were made from `prompts`."""
    asked = [(prompts[item.request.index], item.passes) for item in done]
    return Totals.collect([Outcome(prompt.id, prompt.domain, x) for prompt, x in asked], depth)


def tau_facts(found: TauEstimate) -> TauFacts:
    """A tau estimate as reports hold it."""
    return {"tau": found.tau, "tau_ci95": [*found.ci95], "acceptance": [*found.unconditional]}


def cell(value: float, interval: Sequence[float], form: str = ".2f") -> str:
    """A table cell: a value and its 95% interval."""
    return f"{value:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"


def write_page(path: Path, lines: Sequence[str]) -> None:
    """Write a page of markdown lines."""
    write_bytes(path, "\n".join(lines).encode())
