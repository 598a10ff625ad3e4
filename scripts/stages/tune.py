"""`headstart tune`: chooses how to draft with a trained drafter on this machine, and writes
decode.yaml into its checkpoint.

headstart tune run.name=demo tune.drafter=eagle3
headstart tune tune.drafter=<folder> tune.batches=[1,4,16] tune.temperatures=[0,1]

<run>/tune/<drafter>/tune.json has the basis of the choice: acceptance, cost curves, every draft's
predicted speed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heads.api.checkpoint import CONFIG_FILE, weights_file
from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.decoding.decode_file import DECODE_FILE, HEADLINE, require_tuned, write_tuned
from inference.decoding.draft import Draft
from inference.engines.settings import engine_settings, greedy_drafts, known_least
from inference.manifest import checkpoint_hash, write_json
from inference.measure.datasets import load_bench_prompts
from inference.target.model import TargetModel
from inference.tune.table import tune_table
from inference.tune.tuner import Tuner, TuneRow
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder, read_record
from scripts.run.process import console, device, prepare_process, result_facts, say, shown
from scripts.run.prompts import prompt_files, validation_prompts

TUNE_FILE = "tune.json"


def run(settings: Settings) -> None:
    """Tune, write decode.yaml and tune.json, and show the chosen drafts; a complete tuning is only
    shown again."""
    if settings.given("decode.temperature") and not settings.given("tune.temperatures"):
        asked = (settings.decode.temperature,)
        settings = settings.put(tune=replace(settings.tune, temperatures=asked))
    found, screen = chosen(settings), console()
    require_tuned(found.folder)
    source = validation_prompts(settings, "tune.prompts", settings.tune.prompts)
    files = [found.folder / CONFIG_FILE, weights_file(found.folder), *prompt_files(source)]
    out = settings.run.directory / "tune" / found.name
    result, again = out / TUNE_FILE, not is_of_this_machine(settings, out, found.folder)
    folder = open_folder(settings, out, files, stage_decides=True, repeats=again)
    if not folder.skip():
        tune(settings, found, source, result)
        folder.finish()
    rows: list[TuneRow] = read_object(result)["rows"]
    screen.print(tune_table(found.name, rows))
    for row in rows:
        if row["label"] == "none":
            where = f"batch size {row['batch_size']}, temperature {row['temperature']:g}"
            screen.print(f"{where}: no speculation. No draft was faster than plain decoding.")
    say(f"{shown(found.folder / DECODE_FILE)}; what it rests on: {shown(result)}")


def is_of_this_machine(settings: Settings, out: Path, checkpoint: Path) -> bool:
    """Whether the tuning in `out` was made on this machine and is that of the checkpoint's
    decode.yaml."""
    result, written, record = out / TUNE_FILE, checkpoint / DECODE_FILE, read_record(out)
    if record is None or not (result.is_file() and written.is_file()):
        return False
    headline = f"{HEADLINE}{read_object(result).get('command')}\n"
    same = written.read_bytes().startswith(headline.encode())
    return same and record.is_of_device(device(settings))


def tune(settings: Settings, found: Found, source: str, result: Path) -> None:
    """Tune on the prompts `source`, and write decode.yaml and the file `result`."""
    config, weights = settings.tune, checkpoint_hash(found.folder)
    prepare_process(settings.run)
    target = TargetModel.load(settings.target)
    prompts = load_bench_prompts(source, config.dataset, config.domains).prompts
    drafter = drafters.load(found, target)
    tuner = Tuner.prepare(config, target, drafter, prompts, settings.decode, console().print)
    rows = tuner.tune()
    facts = result_facts(settings, target)
    own = {"name": found.name, "kind": found.kind, "path": shown(found.folder)}
    places = [(row["batch_size"], row["temperature"]) for row in rows]
    drafts, chains = (
        greedy_drafts(
            (*place, Draft.read(read)) for place, read in zip(places, several, strict=True)
        )
        for several in ([row["draft"] for row in rows], [row["chain"] for row in rows])
    )
    least = known_least((row["batch_size"], row["least_probability"]) for row in rows)
    engines = engine_settings(drafts, chains, least)
    write_json(result, {**facts, "drafter": own, "rows": rows, "engines": engines, **tuner.facts()})
    write_tuned(found.folder, weights, facts["target"], facts["device"], rows, facts["command"])


def chosen(settings: Settings) -> Found:
    """The drafter to tune; raises `UserError` for one without a checkpoint."""
    run, given = settings.run, settings.tune.drafter
    found = drafters.find(given, run) if given else drafters.choose(run, several=False)[0]
    if not found.has_weights:
        raise UserError(
            f"'{found.name}' has no checkpoint that decode.yaml could lie in. Give a trained "
            "drafter (tune.drafter), or compare draft lengths with `headstart measure "
            "bench.profile.batches=[1,4,16]`."
        )
    return found
