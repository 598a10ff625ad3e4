"""`headstart refresh`: adapts a drafter to a changed target with as short a training as possible.
Writes <run>/refresh/refresh.json.

The new target answers a few hundred prompts, sped up by the old drafter. Training continues from
the old checkpoint on these answers. It ends once tau is restored, or when every answer has been
read as often as allowed. The folders are those of the other stages: <run>/generate and
<run>/train/<drafter> (its best/ is the refreshed drafter). Repeat the command to continue an
interrupted refresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads.api.checkpoint import CONFIG_FILE, read_config, weights_file
from heads.api.errors import UserError
from inference.folders import RUN_FILE
from inference.integrity import require_unchanged
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process, prepare_process, say, shown
from scripts.stages.refresh.parts import (
    answer,
    clock,
    goal_of,
    measure_tau,
    measured_prompts,
    read_seconds,
    train_on,
)
from scripts.stages.refresh.record import FORMAT, RefreshCost, RefreshedDrafter, RefreshRecord

SECONDS_FILE = "seconds.json"


def run(settings: Settings) -> None:
    """Refresh, continuing an interrupted folder; a complete one is only shown again."""
    if settings.given("head"):
        raise UserError(
            "head=... is given, but a refresh keeps the kind and settings of refresh.drafter. "
            "Leave it out."
        )
    old = drafters.find_trained("refresh.drafter", settings.refresh.drafter, settings.run)
    start = settings.train.refresh.init_from
    if settings.given("train.refresh.init_from") and Path(start).resolve() != old.folder.resolve():
        raise UserError(
            f"train.refresh.init_from is '{start}', but a refresh starts from refresh.drafter, "
            f"'{old.folder}'. Leave it out, and give a rank as refresh.lora_rank."
        )
    out = settings.run.directory / "train" / (settings.run.drafter or old.kind)
    if out.resolve() in (old.folder.resolve(), old.folder.resolve().parent):
        raise UserError(
            f"'{out}' is the old drafter itself, which a refresh does not write over. Choose "
            "another run.name or run.drafter."
        )
    files = [old.folder / CONFIG_FILE, weights_file(old.folder)]
    folder = open_folder(settings, settings.run.directory / "refresh", files)
    if not folder.skip():
        prepare_process(settings.run)
        record = refresh(settings, old, out, folder.path / SECONDS_FILE, folder.session)
        if is_main_process():
            record.write(folder.path)
        folder.finish()
    if is_main_process():
        require_unchanged(out / "best")
        say(RefreshRecord.read(folder.path).summary())


def refresh(
    settings: Settings, old: Found, out: Path, times: Path, session: Mapping[str, Any]
) -> RefreshRecord:
    """Generate, train into `out`, and measure before and after. times: file of the seconds by
    part."""
    decode = drafters.draft_settings(old, settings.decode, drafters.asked_draft(settings))
    answers = settings.run.directory / "generate"
    if settings.run.overwrite and (answers / RUN_FILE).is_file():
        raise UserError(
            f"run.overwrite: '{answers}' was written by `headstart generate` and is not replaced "
            "by a refresh. Choose another run.name."
        )
    with clock(times, "generate"):
        made = answer(settings, old, decode, answers, session)
    goal = goal_of(settings, old)
    prompts = measured_prompts(settings, old)  # refused before the training, which takes longest
    with clock(times, "train"):
        manifest = train_on(settings, old, decode, answers, out, goal)
    new = out / manifest["checkpoint"]
    with clock(times, "measure"):
        before, after = (measure_tau(settings, decode, prompts, path) for path in (old.folder, new))
    start: Any = manifest["head"]["refresh"]
    used = {"lr": manifest["settings"]["optim"]["lr"], "draft": decode.shape}
    used |= {"temperature": decode.temperature, "rule": decode.acceptance}
    used |= {key: start[key] for key in ("old_target", "lora_rank")}
    return RefreshRecord(
        format=FORMAT,
        drafter=RefreshedDrafter(shown(old.folder), shown(new), old.kind),
        target={"old": read_config(old.folder)["target"], "new": manifest["target"]},
        settings=asdict(settings.refresh) | used,
        before=before,
        after=after,
        goal=goal,
        ended_by=manifest["ended_by"],
        cost=RefreshCost(
            made["counts"]["done"],
            made["counts"]["tokens"],
            manifest["steps"],
            manifest["tokens"],
            manifest["seconds"],
            read_seconds(times),
        ),
    )
