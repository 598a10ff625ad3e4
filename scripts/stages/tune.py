"""`headstart tune`: chooses how to draft with a trained drafter on this machine, and writes
decode.yaml into its checkpoint.

headstart tune run.name=demo tune.drafter=eagle3
headstart tune tune.drafter=<folder> tune.batches=[1,4,16] tune.temperatures=[0,1]

<run>/tune/<drafter>/tune.json has what the choice rests on: acceptance, cost curves, every draft's
predicted speed.
"""

from __future__ import annotations

import shlex
from typing import Any

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from heads.api.errors import UserError
from inference.decoding.decode_file import require_tuned, write_tuned
from inference.manifest import write_json
from inference.measure.datasets import load_bench_prompts
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from inference.tune.table import tune_table
from inference.tune.tuner import Tuner
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process, prepare_process, shown
from scripts.stages.report import console

TUNE_FILE = "tune.json"


def run(settings: Settings) -> None:
    """Tune, write decode.yaml and tune.json, and show what was chosen."""
    if not is_main_process():
        return  # one process measures: others beside it would only disturb the clock
    found = chosen(settings)
    assert found.checkpoint is not None, "`chosen` refuses others"
    require_tuned(found.checkpoint)
    files = [found.checkpoint / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    folder = open_folder(
        settings, settings.run.directory / "tune" / found.name, files, stage_decides=True
    )
    prepare_process(settings.run)
    screen = console()
    tuner, facts = prepare(settings, found, screen.print)
    rows = tuner.tune()
    command = "headstart tune " + shlex.join(settings.arguments)
    write_json(
        folder.path / TUNE_FILE,
        {"format": 1, "command": command, **facts, "rows": rows, **tuner.facts()},
    )
    written = write_tuned(found.checkpoint, facts["target"], facts["device"], rows, command)
    folder.finish()
    screen.print(tune_table(found.name, rows))
    for row in rows:
        if row["label"] == "none":
            where = f"batch size {row['batch_size']}, temperature {row['temperature']:g}"
            screen.print(f"{where}: no speculation. No draft was faster than plain decoding.")
    print(f"{shown(written)}; what it rests on: {shown(folder.path / TUNE_FILE)}", flush=True)


def chosen(settings: Settings) -> Found:
    """The drafter to tune; raises `UserError` for one without a checkpoint, which has no place for
    the result."""
    given = settings.tune.drafter
    found = drafters.find(given, settings.run) if given else drafters.one_of(settings.run)
    if found.checkpoint is None or not (found.checkpoint / WEIGHTS_FILE).is_file():
        raise UserError(
            f"'{found.name}' has no checkpoint that decode.yaml could lie in. Give a trained "
            "drafter (tune.drafter), or compare "
            "draft lengths with `headstart measure bench.profile.batches=[1,4,16]`."
        )
    return found


def prepare(
    settings: Settings, found: Found, say: Any = lambda _: None
) -> tuple[Tuner, dict[str, Any]]:
    """The tuner with everything loaded; and what it works with, for reports."""
    config = settings.tune
    target = TargetModel.load(settings.target)
    prompts = load_bench_prompts(config.prompts, config.dataset, config.domains).prompts
    tuner = Tuner.prepare(
        config, target, drafters.load(found, target), prompts, settings.decode, say
    )
    facts = {
        "target": {"id": target.info.id, "revision": target.info.revision},
        "device": device_facts(target.device),
        "drafter": {
            "name": found.name,
            "kind": found.kind,
            "path": shown(found.checkpoint) if found.checkpoint else "",
        },
    }
    return tuner, facts
