"""Do the results of the embedded target hold on another one? A second small target, other text, the same recipes.

    python -m scripts.held_out [--speculators <python that has speculators>]

Makes a small Qwen3 from C++ headers (scripts/held_out_target), lets it answer prompts, trains drafters with the settings of
conf/experiment/families.yaml at the learning rates that were best on the embedded target, and measures them on prompts of files
that neither target nor drafters saw. With `--speculators` that library trains EAGLE-3, DFlash and DSpark on the same answers for
the same passes; its checkpoints are converted and measured in the same session. Writes docs/reports/held_out.{json,md}. Every step
that is done is skipped, so the command may be repeated after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.manifest import MANIFEST_FILE, read_manifest, write_bytes, write_json
from inference.measure.prompts import load_prompts, to_requests
from inference.measure.run import quick_tau
from inference.report.markdown import markdown_table
from inference.report.model import read_report
from scripts import cli
from scripts.compare_speculators import PLACES, RECIPES, Setting, write_rows
from scripts.held_out_target import corpus, making
from scripts.held_out_target.model import HeldOutShape

ROOT = Path(__file__).resolve().parent.parent
COMPARED = ROOT / "docs" / "reports" / "speculators.json"
EPOCHS = 2
DEPTH, NEW_TOKENS = 4, 96


@dataclass(frozen=True)
class Row:
    """A recipe of conf/experiment/families.yaml and the learning rate that was best for it on the embedded target."""

    head: str
    rate: float
    overrides: tuple[str, ...] = ()


ROWS = {
    "medusa": Row("medusa", 1e-2),
    "hydra_heads": Row("hydra_heads", 3e-3),
    "eagle": Row("eagle", 1e-2),
    "eagle3": Row("eagle3", 3e-3, ("head.ttt_steps=4",)),
    "eagle3_copied": Row("eagle3", 3e-3, ("head.ttt_steps=4", f"head.from_target_layer={HeldOutShape().layers - 1}")),
    "dflash": Row("dflash", 1e-3, ("head.num_anchors=64",)),
    "dspark": Row("dspark", 1e-3, ("head.num_anchors=64",)),
}
ORDER = (
    ("dspark", "dflash"),
    ("dspark", "eagle3"),
    ("eagle3", "eagle"),
    ("eagle3_copied", "eagle"),
    ("eagle", "medusa"),
    ("hydra_heads", "medusa"),
)
"""Which tau is to lie above which."""
RIVALS = ("eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class Place:
    """Where everything lies. target: the held-out target's folder."""

    work: Path
    target: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.work / "run"

    @property
    def prompts(self) -> Path:
        """The prompts that the headers gave."""
        return self.work / "data" / "prompts"

    def stage(self, name: str, *overrides: str) -> None:
        """Run a stage of `headstart` on this target and run; raises `UserError` when it fails."""
        shared = ["experiment=[families]", "target=local", f"target.path={self.target}", "target.dtype=float32",
                  f"run.root={self.work}", "run.name=run"]  # fmt: skip
        if cli.main([name, *shared, *overrides]) != 0:
            raise UserError(f"`headstart {name}` failed, see above; run the same command again to go on.")

    def generate(self) -> None:
        """Let the target answer."""
        self.stage("generate", "data=embedded", f"data.path={self.prompts / 'train.jsonl'}")

    def train(self, name: str, row: Row) -> None:
        """Train one drafter."""
        prompts = f"train.prompts=[{self.prompts / 'validation.jsonl'}]"
        self.stage("train", f"head={row.head}", *row.overrides, f"optim.lr={row.rate}", f"run.drafter={name}", prompts)

    def measure(self, per_domain: int) -> None:
        """Measure all drafters of the run, and n-gram lookup."""
        prompts = ("bench=jsonl", f"bench.prompts={self.prompts / 'measuring'}", f"bench.prompts_per_domain={per_domain}")
        draft = (f"decode.max_new_tokens={NEW_TOKENS}", f"measure.draft={{shape: chain, depth: {DEPTH}}}")
        self.stage("measure", *prompts, *draft, "measure.kinds=[ngram]")


def train_rival(place: Place, kind: str, python: str, threads: int) -> dict[str, float]:
    """Let the library train a kind on the same answers, with the recipe that was best on the embedded target (each of its recipes
    where that is not known); keep the one with the best tau on the validation prompts as drafter `speculators_<kind>`. Returns tau
    by recipe.
    """
    tried = best_recipes(kind)
    record = place.run / "train" / f"speculators_{kind}" / "recipes.json"
    if not record.is_file():
        setting = Setting(python, place.run / "generate", place.target, place.work / "speculators", threads)
        write_rows(setting)
        found: dict[str, float] = {}
        for number, recipe in enumerate(tried):
            out = setting.work / f"theirs-{kind}-{number}"
            side = setting.theirs(kind, f"{kind}-{number}", PLACES, RECIPES[recipe], EPOCHS)
            side.ask(do="steps", count=EPOCHS * side.answer()["steps_per_epoch"])
            side.ask(do="save", to=str(out / "saved"))
            side.end()
            import_folder(Folder.read(out / "saved"), setting.model, out / "converted")
            found[recipe] = validation_tau(place, setting, out / "converted")
        best = max(range(len(tried)), key=lambda number: found[tried[number]])
        for file in (setting.work / f"theirs-{kind}-{best}" / "converted").iterdir():
            write_bytes(record.parent / "best" / file.name, file.read_bytes())
        write_json(record, found)
    known: dict[str, float] = making.read_json(record)
    return known


def best_recipes(kind: str) -> list[str]:
    """The library's recipe with the best tau on the embedded target, by the report of compare_speculators; without it, all."""
    told = making.read_json(COMPARED) if COMPARED.is_file() else {}
    sides = told.get("tau", {}).get(kind, {}).get("sides", {})
    known = {recipe: sides[f"speculators, {recipe}"]["tau"] for recipe in RECIPES if f"speculators, {recipe}" in sides}
    return [max(known, key=lambda recipe: known[recipe])] if known else list(RECIPES)


def validation_tau(place: Place, setting: Setting, checkpoint: Path) -> float:
    """tau on the validation prompts, as the trainings of ours measure it."""
    target = setting.model
    decode = DecodeConfig(temperature=0.0, depth=DEPTH, max_new_tokens=64, batch_size=8)
    prompts = load_prompts(place.prompts / "validation.jsonl")[:24]
    requests = to_requests(prompts, target.tokenizer, decode, capacity=target.info.max_position_embeddings, overlong="skip")
    return quick_tau(target, load_drafter(checkpoint, target.info, target.weights), requests, decode).tau


def report(place: Place, recipes: Mapping[str, Mapping[str, float]], command: str) -> dict[str, Any]:
    """The content of held_out.json."""
    measured = read_report(place.run / "measure" / "report.json")
    rows = {drafter.name: drafter.to_dict() for drafter in measured.drafters}
    kept = ("tau", "tau_ci95", "tar", "acceptance", "parameters", "speedup", "lossless", "domains")
    table = {name: {key: entry[key] for key in kept} for name, entry in rows.items()}
    for name, entry in table.items():
        folder = place.run / "train" / name
        if (folder / MANIFEST_FILE).is_file():
            manifest = read_manifest(folder, "train")
            entry["trained"] = {key: manifest[key] for key in ("steps", "tokens", "seconds", "best")} | {"rate": ROWS[name].rate}
        kind = name.removeprefix("speculators_")
        if kind != name:
            entry["validation_tau_by_recipe"] = dict(recipes[kind])
    order = [
        {"above": above, "below": below, "holds": table[above]["tau"] > table[below]["tau"],
         "difference": table[above]["tau"] - table[below]["tau"]}
        for above, below in ORDER if above in table and below in table
    ]  # fmt: skip
    rivals = [
        {"kind": kind, "ours": table[kind]["tau"], "speculators": table[f"speculators_{kind}"]["tau"],
         "holds": table[kind]["tau"] >= table[f"speculators_{kind}"]["tau"]}
        for kind in RIVALS if {kind, f"speculators_{kind}"} <= set(table)
    ]  # fmt: skip
    told = making.read_json(place.target / "training.json")
    trained = {key: told[key] for key in ("steps", "tokens_seen", "training_seconds")}
    return {
        "format": 1, "command": command, "target": {**measured.target.to_dict(), "id": "held_out/target"},
        "target_training": {**trained, "heldout": told["evaluations"][-1]},
        "answers": read_manifest(place.run / "generate", "generate")["counts"],
        "settings": measured.settings.to_dict(), "device": measured.device.to_dict(), "git": measured.git or {},
        "rows": table, "order": order, "against_speculators": rivals,
    }  # fmt: skip


def markdown(content: Mapping[str, Any]) -> bytes:
    """held_out.md."""
    rows = [
        [name, f"{entry['tau']:.2f} [{entry['tau_ci95'][0]:.2f}, {entry['tau_ci95'][1]:.2f}]", f"{entry['tar']:.2f}",
         " ".join(f"{value:.2f}" for value in entry["acceptance"]["unconditional"]), f"{entry['parameters'] / 1e6:.2f}"]
        for name, entry in sorted(content["rows"].items(), key=lambda item: -item[1]["tau"])
    ]  # fmt: skip
    verdicts = [
        [f"{item['above']} above {item['below']}", f"{item['difference']:+.2f}", yes(item["holds"])] for item in content["order"]
    ]
    verdicts += [
        [f"{item['kind']} at least speculators", f"{item['ours'] - item['speculators']:+.2f}", yes(item["holds"])]
        for item in content["against_speculators"]
    ]
    text = [
        "# The held-out check",
        "",
        f"A second small target (Qwen3, {content['target']['parameters'] / 1e6:.2f} M parameters, own tokenizer, trained on C++"
        " headers), the recipes and learning rates of the embedded target, two passes over its greedy answers; chain of 4 at"
        " temperature 0, prompts of files that neither target nor drafters saw."
        f" Made by `{content['command']}`; numbers in full: held_out.json.",
        "",
        *markdown_table(["drafter", "tau", "TAR", "acceptance by depth", "M weights"], rows),
        "",
        *markdown_table(["expected", "difference in tau", "holds"], verdicts),
        "",
    ]
    return "\n".join(text).encode()


def yes(holds: bool) -> str:
    """A verdict in words."""
    return "yes" if holds else "no"


def main(arguments: list[str] | None = None) -> int:
    """Do all that is not done yet; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.held_out", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--speculators", metavar="PYTHON", help="a python that has speculators; without it, only ours are trained")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "held_out")
    parser.add_argument("--steps", type=int, default=800, help="of the target's training, 4,096 tokens each")
    parser.add_argument("--training", type=int, default=making.PROMPTS["training"], help="prompts for the drafters")
    parser.add_argument("--measuring", type=int, default=making.PROMPTS["measuring"], help="prompts for the report")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="drafters to train")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS), help="drafters that speculators trains")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "held_out", help="report, without its ending")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    command = "python -m scripts.held_out" + (" --speculators PYTHON" if given.speculators else "")
    try:
        work = given.work.resolve()
        place = Place(work, making.make(work, given.steps, {**making.PROMPTS, "training": given.training}))
        place.generate()
        for name in given.rows:
            place.train(name, ROWS[name])
        rivals = given.rivals if given.speculators else []
        recipes = {kind: train_rival(place, kind, given.speculators, given.threads) for kind in rivals}
        place.measure(-(-given.measuring // len(corpus.DOMAINS)))
        content = report(place, recipes, command)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    write_json(given.out.with_suffix(".json"), content)
    write_bytes(given.out.with_suffix(".md"), markdown(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
