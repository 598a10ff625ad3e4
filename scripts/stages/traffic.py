"""`headstart traffic`: estimates what speculation gains on given traffic, per drafter and draft
length, by simulating a server.

headstart traffic run.name=demo traffic.file=requests.jsonl
headstart traffic traffic.file=metrics.txt traffic.drafters=[<folder>] traffic.depths=[1,2,4]

Writes <run>/traffic/traffic.json (docs/tuning.md describes the lines of the traffic).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.decoding.decode_file import DECODE_FILE
from inference.manifest import write_json
from inference.measure.prompts import load_prompts
from inference.target.model import TargetModel
from inference.traffic.advice import (
    TrafficAdvice,
    advice_lines,
    advise,
    traffic_table,
    ways_to_serve,
)
from inference.traffic.arrivals import needed_context, read_traffic
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder, read_record, require_run
from scripts.run.process import console, device, prepare_process, result_facts, say, shown
from scripts.run.prompts import prompt_files, validation_prompts

TRAFFIC_FILE = "traffic.json"


def run(settings: Settings) -> None:
    """Read the traffic, measure, simulate, write and show the results; complete ones are only shown
    again."""
    if settings.given("decode.temperature") and not settings.given("traffic.temperature"):
        asked = settings.decode.temperature
        settings = settings.put(traffic=replace(settings.traffic, temperature=asked))
    found, screen = chosen(settings), console()
    file, out = Path(settings.traffic.file).expanduser(), settings.run.directory / "traffic"
    source = validation_prompts(settings, "traffic.prompts", settings.traffic.prompts)
    files = [*([file] if file.is_file() else []), *prompt_files(source)]
    files += [one for one in drafters.weight_files(found) if one.name != DECODE_FILE]
    record = read_record(out)
    again = record is None or not record.is_of_device(device(settings))
    folder = open_folder(settings, out, files, stage_decides=True, repeats=again)
    if not folder.skip():
        simulate(settings, found, source, out / TRAFFIC_FILE)
        folder.finish()
    advice = cast(TrafficAdvice, read_object(out / TRAFFIC_FILE))
    screen.print(traffic_table(advice))
    for line in advice_lines(advice):
        screen.print(line)
    say(shown(out / TRAFFIC_FILE))


def simulate(settings: Settings, found: Sequence[Found], source: str, result: Path) -> None:
    """Measure on the prompts `source`, simulate the traffic, and write the file `result`."""
    config = settings.traffic
    prepare_process(settings.run)
    target = TargetModel.load(settings.target)
    limit = target.info.max_position_embeddings
    arrivals = read_traffic(config, target.tokenizer, min(config.context or limit, limit))
    context = needed_context(config, arrivals, limit)
    prompts = load_prompts(source)
    loaded = {item.name: drafters.load(item, target) for item in found}
    ways = ways_to_serve(config, target, loaded, prompts, settings.decode, context, console().print)
    advice = advise(ways, arrivals, config.rows, config.seed)
    write_json(result, {**result_facts(settings, target), **advice})


def chosen(settings: Settings) -> list[Found]:
    """The drafters to advise on; raises `UserError` if there are none, or two with one name."""
    if not settings.traffic.drafters:
        require_run(settings.run, "Or give checkpoint folders in traffic.drafters.")
    found = [drafters.find(name, settings.run) for name in settings.traffic.drafters]
    found = found or drafters.best_of_sweeps(drafters.list_trained(settings.run))
    if not found:
        raise UserError(
            f"'{settings.run.directory}' has no trained drafter. Train one, or give checkpoint "
            "folders in traffic.drafters."
        )
    names = [item.name for item in found]
    if len(set(names)) < len(names):
        raise UserError(f"traffic.drafters names two drafters alike: {', '.join(names)}.")
    return found
