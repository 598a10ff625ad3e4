"""Shared code of the evidence scripts: stages, decoding with checkpoints, report files and
cells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.manifest import write_bytes, write_json
from inference.measure.metrics import Outcome, TauEstimate, Totals
from inference.measure.prompts import Prompt, to_requests
from inference.target.model import TargetModel
from scripts import cli
from scripts.config.schema import Settings, load_settings
from scripts.config.stages import STAGES
from scripts.tools.common import REPORTS, ROOT

DOCS = REPORTS.parent
FAMILIES = ROOT / "outputs" / "families"
"""Folder of the run of `headstart loop experiment=families`."""
Facts = dict[str, Any]
"""A part of a report as JSON values; the module that writes it defines its schema."""


def read_json(path: Path) -> Any:
    """The JSON value in a file; an empty object if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_report(stem: Path, content: Mapping[str, Any], lines: Iterable[str]) -> None:
    write_json(stem.with_suffix(".json"), content)
    write_bytes(stem.with_suffix(".md"), "\n".join(lines).encode())


def run_stage(name: str, *overrides: str, statuses: Sequence[int] = (0,)) -> None:
    """Run a stage in this process; raises `UserError` for a status not in `statuses`."""
    if cli.main([name, *overrides]) not in statuses:
        raise UserError(
            f"`headstart {name}` failed, see above; run the same command again to continue."
        )


def run_on_target(
    stage: str,
    target: Path,
    run: Path,
    *overrides: str,
    experiment: str = "families",
    statuses: Sequence[int] = (0,),
) -> None:
    """Run a stage with the settings of an experiment on a local target, in the run `run`."""
    shared = [f"experiment=[{experiment}]", "target=local", f"target.path={target}"]
    shared += ["target.dtype=float32", f"run.root={run.parent}", f"run.name={run.name}"]
    run_stage(stage, *shared, *overrides, statuses=statuses)


def keep_rows(content: Facts, former: Facts, where: str) -> list[Facts]:
    """The rows of a former report that a new one lacks, each with the device and commit of its own
    measurement; raises `UserError` if the two differ in target or settings. where: the report."""
    for what in ("target", "settings"):
        if former.get(what) != content[what]:
            raise UserError(
                f"{where} has another {what} than this run, so its rows cannot stand beside "
                f"the new ones: {former.get(what)} there, {content[what]} here. Leave out --keep."
            )
    new = {row["name"] for row in content["rows"]}
    own = {"device": former["device"], "git": former["git"]}
    return [own | row for row in former["rows"] if row["name"] not in new]


def settings_of(stage: str, *overrides: str) -> Settings:
    return load_settings(STAGES[stage], list(overrides))


def family_recipes() -> dict[str, list[str]]:
    """The training overrides of each row of `experiment=families`, without its learning rate."""
    sweep = settings_of("loop", "experiment=families").loop.sweep
    return {name: [f"head={row.head or name}", *row.overrides] for name, row in sweep.items()}


def family_recipe(name: str) -> list[str]:
    return family_recipes()[name]


def family_rate(name: str) -> float:
    """The learning rate of a row of `experiment=families`; if there are several, the first."""
    return settings_of("loop", "experiment=families").loop.sweep[name].rates[0]


def family_overrides(name: str) -> list[str]:
    """The overrides of a row of `experiment=families`: its recipe and its learning rate."""
    return [*family_recipe(name), f"optim.lr={family_rate(name):g}"]


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


def decode_totals(
    target: TargetModel,
    checkpoint: Path,
    prompts: Sequence[Prompt],
    decode: DecodeConfig,
    changed_target: bool = False,
) -> Totals:
    """Sums per prompt for a drafter on the prompts, decoded by `decode_prompts`."""
    done = decode_prompts(target, checkpoint, prompts, decode, changed_target)
    asked = [(prompts[item.request.index], item.passes) for item in done]
    return Totals.collect([Outcome(x.id, x.domain, passes) for x, passes in asked], decode.depth)


def tau_facts(found: TauEstimate) -> Facts:
    """A tau estimate as reports store it; acceptance: share of passes that accepted each depth."""
    return {"tau": found.tau, "tau_ci95": [*found.ci95], "acceptance": [*found.unconditional]}


def cell(value: float, interval: Sequence[float], form: str = ".2f") -> str:
    """A value with its interval. A bound that would read 1.00 without being 1 has a third digit, as
    it decides whether the interval of a ratio includes 1."""
    low, high = (
        ".3f" if form == ".2f" and f"{bound:.2f}" == "1.00" and f"{bound:.4f}" != "1.0000" else form
        for bound in interval
    )
    return f"{value:{form}} [{interval[0]:{low}}, {interval[1]:{high}}]"
