"""`headstart tune`: chooses how to draft with a trained drafter on this machine, and writes
decode.yaml into its checkpoint.

headstart tune run.name=demo tune.drafter=eagle3
headstart tune tune.drafter=<folder> tune.batches=[1,4,16] tune.temperatures=[0,1]

<run>/tune/<drafter>/tune.json has the basis of the choice: acceptance, cost curves, every draft's
predicted speed.
"""

from __future__ import annotations

from heads.api.checkpoint import CONFIG_FILE, weights_file
from heads.api.errors import UserError
from inference.decoding.decode_file import require_tuned, write_tuned
from inference.decoding.draft import Draft
from inference.engines.settings import engine_settings, greedy_drafts, known_least
from inference.manifest import checkpoint_hash, write_json
from inference.measure.datasets import load_bench_prompts
from inference.target.model import TargetModel
from inference.tune.table import tune_table
from inference.tune.tuner import Tuner
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.drafters import Found
from scripts.run.folder import open_folder
from scripts.run.process import console, prepare_process, result_facts, say, shown
from scripts.run.prompts import validation_prompts

TUNE_FILE = "tune.json"


def run(settings: Settings) -> None:
    """Tune, write decode.yaml and tune.json, and show the chosen drafts."""
    config, found, screen = settings.tune, chosen(settings), console()
    require_tuned(found.folder)
    files = [found.folder / CONFIG_FILE, weights_file(found.folder)]
    weights = checkpoint_hash(found.folder)
    folder = open_folder(
        settings, settings.run.directory / "tune" / found.name, files, stage_decides=True
    )
    prepare_process(settings.run)
    target = TargetModel.load(settings.target)
    source = validation_prompts(settings, "tune.prompts", config.prompts)
    prompts = load_bench_prompts(source, config.dataset, config.domains).prompts
    drafter = drafters.load(found, target)
    tuner = Tuner.prepare(config, target, drafter, prompts, settings.decode, screen.print)
    rows = tuner.tune()
    facts = result_facts(settings, target)
    own = {"name": found.name, "kind": found.kind, "path": shown(found.folder)}
    result = folder.path / TUNE_FILE
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
    written = write_tuned(
        found.folder, weights, facts["target"], facts["device"], rows, facts["command"]
    )
    folder.finish()
    screen.print(tune_table(found.name, rows))
    for row in rows:
        if row["label"] == "none":
            where = f"batch size {row['batch_size']}, temperature {row['temperature']:g}"
            screen.print(f"{where}: no speculation. No draft was faster than plain decoding.")
    say(f"{shown(written)}; what it rests on: {shown(result)}")


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
