"""`headstart traffic`: what speculation gains on given traffic, per drafter and draft length, by
simulating a server here.

headstart traffic run.name=demo traffic.file=requests.jsonl
headstart traffic traffic.file=metrics.txt traffic.drafters=[<folder>] traffic.depths=[1,2,4]

Writes <run>/traffic/traffic.json (docs/tuning.md says what a line of the traffic holds).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from heads.api.errors import UserError
from inference.manifest import write_json
from inference.measure.prompts import load_prompts
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from inference.traffic.advice import advise, ways_to_serve
from inference.traffic.arrivals import Arrival, read_traffic
from inference.traffic.config import TrafficConfig
from inference.traffic.table import advice_lines, traffic_table
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import is_main_process, prepare_process, shown
from scripts.stages.report import console

TRAFFIC_FILE = "traffic.json"


def run(settings: Settings) -> None:
    """Read the traffic, measure, simulate, write and show."""
    if not is_main_process():
        return
    config, found = settings.traffic, chosen(settings)
    file = Path(config.file).expanduser()
    folder = open_folder(
        settings,
        settings.run.directory / "traffic",
        [file] if file.is_file() else [],
        stage_decides=True,
    )
    prepare_process(settings.run)
    screen = console()
    target = TargetModel.load(settings.target)
    limit = target.info.max_position_embeddings
    arrivals = read_traffic(config, target.tokenizer, min(config.context or limit, limit))
    context = needed_context(config, arrivals, limit)
    prompts = load_prompts(config.prompts)
    loaded = {item.name: drafters.load(item, target) for item in found}
    ways = ways_to_serve(config, target, loaded, prompts, settings.decode, context, screen.print)
    told = advise(ways, arrivals, config.rows, config.seed)
    facts = {
        "format": 1,
        "command": "headstart traffic " + shlex.join(settings.arguments),
        "target": {"id": target.info.id, "revision": target.info.revision},
        "device": device_facts(target.device),
    }
    write_json(folder.path / TRAFFIC_FILE, {**facts, **told})
    folder.finish()
    screen.print(traffic_table(told))
    for line in advice_lines(told):
        screen.print(line)
    print(shown(folder.path / TRAFFIC_FILE), flush=True)


def chosen(settings: Settings) -> list[Found]:
    """The drafters to advise on; raises `UserError` when there are none, or two of one name."""
    given = settings.traffic.drafters
    found = [drafters.find(name, settings.run) for name in given]
    found = found or drafters.best_of_sweeps(drafters.trained(settings.run))
    if not found:
        raise UserError(
            f"'{settings.run.directory}' has no trained drafter. Train one, or give checkpoint "
            "folders in traffic.drafters."
        )
    names = [item.name for item in found]
    if len(set(names)) < len(names):
        raise UserError(f"traffic.drafters names two drafters alike: {', '.join(names)}.")
    return found


def needed_context(config: TrafficConfig, arrivals: Sequence[Arrival], limit: int) -> int:
    """Positions per row; raises `UserError` for traffic that does not fit into them, or into the
    target's."""
    longest = max(item.prompt + item.answer for item in arrivals)
    context = config.context or longest
    if longest > context or context > limit:
        raise UserError(
            f"a request of the traffic takes {longest} positions (prompt and answer); "
            f"traffic.context is {context} and the target "
            f"has {limit}. Leave such requests out, or say shorter answers."
        )
    return context
