"""Do the results of the embedded target hold on another one? A second small target, other text.

    python -m scripts.evidence.held_out [--speculators <python that has speculators>]

Makes a small Qwen3 from C++ headers (scripts/assets), lets it answer prompts, trains drafters with
the settings of conf/experiment/families.yaml at the learning rates that were best on the embedded
target, and measures them on prompts of files that neither target nor drafters saw. With
`--speculators` that library trains EAGLE-3, DFlash and DSpark on the same answers for as many
passes; its checkpoints are converted and measured in the same session. Writes
docs/reports/held_out.{json,md}. Steps that are done are skipped, so the command may be repeated
after an interruption.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from inference.decoding.config import DecodeConfig
from inference.manifest import MANIFEST_FILE, read_manifest, write_json
from inference.measure.metrics import tau_estimate
from inference.measure.prompts import load_prompts
from inference.report.markdown import markdown_table
from inference.report.model import read_report
from scripts.assets import cpp_headers, held_out_target
from scripts.evidence.common import (
    REPORTS,
    cell,
    decode_prompts,
    family_recipe,
    read_json,
    run_on_target,
    sum_up,
    write_page,
)
from scripts.evidence.speculators import PLACES, RECIPES, Setting, write_rows
from scripts.tools.common import ROOT, add_options, make_parser, run

EPOCHS, DEPTH, NEW_TOKENS = 2, 4, 96


LAYERS = held_out_target.CONFIG["num_hidden_layers"]
LAST_LAYER = f"head.from_target_layer={LAYERS - 1}"
RATES = {
    "medusa": 1e-2,
    "hydra_heads": 3e-3,
    "eagle": 1e-2,
    "eagle3": 3e-3,
    "eagle3_copied": 3e-3,
    "dflash": 1e-3,
    "dspark": 1e-3,
}
"""Row of conf/experiment/families.yaml -> its best learning rate on the embedded target."""
ORDER = (
    ("dspark", "dflash"),
    ("dspark", "eagle3"),
    ("eagle3", "eagle"),
    ("eagle3_copied", "eagle"),
    ("eagle", "medusa"),
    ("hydra_heads", "medusa"),
)
"""Which tau is expected above which."""
RIVALS = ("eagle3", "dflash", "dspark")


class Order(TypedDict):
    """Whether the tau of one row is above that of another."""

    above: str
    below: str
    holds: bool
    difference: float


class Rivalry(TypedDict):
    """tau of a kind trained by this project and by speculators; holds: ours is not below."""

    kind: str
    ours: float
    speculators: float
    holds: bool


class MeasuredRow(TypedDict, total=False):
    """The facts of a row that the page shows; held_out.json has more of them."""

    tau: float
    tau_ci95: Sequence[float]
    tar: float
    acceptance: Mapping[str, Sequence[float]]
    parameters: int


class Content(TypedDict, total=False):
    """held_out.json, as far as the page shows it."""

    command: str
    target: Mapping[str, str | int]
    rows: dict[str, MeasuredRow]
    order: list[Order]
    against_speculators: list[Rivalry]


@dataclass(frozen=True)
class Folders:
    """The held-out target's folder, and that of all work."""

    work: Path
    target: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.work / "run"

    @property
    def prompts(self) -> Path:
        """The prompts made from the headers."""
        return self.work / "data" / "prompts"

    def stage(self, name: str, *overrides: str) -> None:
        """Run a stage of `headstart` on this target and run."""
        run_on_target(name, self.target, self.run, *overrides)


def train_rival(folders: Folders, kind: str, given: argparse.Namespace) -> dict[str, float]:
    """Let the library train a kind on the same answers; returns tau by recipe.

    It uses the recipe that was best on the embedded target, or each of its recipes where that is
    not known; the one with the best tau on the validation prompts becomes `speculators_<kind>`.
    """
    record = folders.run / "train" / f"speculators_{kind}" / "recipes.json"
    found: dict[str, float] = read_json(record)
    if found:
        return found
    answers, work = folders.run / "generate", folders.work / "speculators"
    setting = Setting(given.speculators, answers, folders.target, work, given.threads)
    write_rows(setting)
    checkpoints: dict[str, Path] = {}
    for number, recipe in enumerate(best_recipes(kind)):
        name = f"{kind}-{number}"
        side = setting.theirs(kind, name, PLACES, RECIPES[recipe], EPOCHS)
        steps = EPOCHS * side.answer()["steps_per_epoch"]
        side.train(steps, work / f"theirs-{name}" / "saved")
        checkpoints[recipe] = setting.converted(name)
        found[recipe] = validation_tau(folders, setting, checkpoints[recipe])
    best = max(found, key=found.__getitem__)
    shutil.copytree(checkpoints[best], record.parent / "best", dirs_exist_ok=True)
    write_json(record, found)
    return found


def best_recipes(kind: str) -> list[str]:
    """The library's best recipe by speculators.json; without that report, all recipes."""
    compared = read_json(REPORTS / "speculators.json").get("tau", {})
    sides = compared.get(kind, {}).get("sides", {})
    known = [recipe for recipe in RECIPES if f"speculators, {recipe}" in sides]
    best = sorted(known, key=lambda recipe: -float(sides[f"speculators, {recipe}"]["tau"]))
    return best[:1] or list(RECIPES)


def validation_tau(folders: Folders, setting: Setting, checkpoint: Path) -> float:
    """tau on the validation prompts, as our trainings measure it."""
    decode = DecodeConfig(temperature=0.0, depth=DEPTH, max_new_tokens=64, batch_size=8)
    prompts = load_prompts(folders.prompts / "validation.jsonl")[:24]
    done = decode_prompts(setting.model, checkpoint, prompts, decode)
    return tau_estimate(sum_up(done, prompts, DEPTH)).tau


def write_reports(
    folders: Folders, recipes: Mapping[str, Mapping[str, float]], out: Path, command: str
) -> None:
    """Write held_out.json and held_out.md."""
    measured = read_report(folders.run / "measure" / "report.json")
    kept = ("tau", "tau_ci95", "tar", "acceptance", "parameters", "speedup", "lossless", "domains")
    table = {one.name: {key: one.to_dict()[key] for key in kept} for one in measured.drafters}
    for name, entry in table.items():
        folder = folders.run / "train" / name
        if (folder / MANIFEST_FILE).is_file():
            manifest = read_manifest(folder, "train")
            facts = {key: manifest[key] for key in ("steps", "tokens", "seconds", "best")}
            entry["trained"] = facts | {"rate": RATES[name]}
        kind = name.removeprefix("speculators_")
        if kind != name:
            entry["validation_tau_by_recipe"] = dict(recipes[kind])
    tau = {one.name: one.tau for one in measured.drafters}
    order = [
        Order(above=above, below=below, holds=gap > 0, difference=gap)
        for above, below in ORDER
        if above in tau and below in tau
        for gap in [tau[above] - tau[below]]
    ]
    rivals = [
        Rivalry(kind=kind, ours=ours, speculators=theirs, holds=ours >= theirs)
        for kind in RIVALS
        if kind in tau and f"speculators_{kind}" in tau
        for ours, theirs in [(tau[kind], tau[f"speculators_{kind}"])]
    ]
    trained = read_json(folders.target / "training.json")
    facts = {key: trained[key] for key in ("steps", "tokens_seen", "training_seconds")}
    content = {
        "format": 1,
        "command": command,
        "target": {**measured.target.to_dict(), "id": "held_out/target"},
        "target_training": {**facts, "heldout": trained["evaluations"][-1]},
        "answers": read_manifest(folders.run / "generate", "generate")["counts"],
        "settings": measured.settings.to_dict(),
        "device": measured.device.to_dict(),
        "git": measured.git or {},
        "rows": table,
        "order": order,
        "against_speculators": rivals,
    }
    write_json(out.with_suffix(".json"), content)
    page: Content = read_json(out.with_suffix(".json"))
    write_page(out.with_suffix(".md"), markdown(page))


def markdown(content: Content) -> list[str]:
    """The lines of held_out.md."""
    rows = [
        [
            name,
            cell(entry["tau"], entry["tau_ci95"]),
            f"{entry['tar']:.2f}",
            " ".join(f"{value:.2f}" for value in entry["acceptance"]["unconditional"]),
            f"{entry['parameters'] / 1e6:.2f}",
        ]
        for name, entry in sorted(content["rows"].items(), key=lambda item: -item[1]["tau"])
    ]
    verdicts = [
        (f"{item['above']} above {item['below']}", item["difference"], item["holds"])
        for item in content["order"]
    ]
    verdicts += [
        (f"{item['kind']} at least speculators", item["ours"] - item["speculators"], item["holds"])
        for item in content["against_speculators"]
    ]
    shown = [[what, f"{gap:+.2f}", "yes" if holds else "no"] for what, gap, holds in verdicts]
    return [
        "# The held-out check",
        "",
        f"A second small target (Qwen3, {int(content['target']['parameters']) / 1e6:.2f} M "
        "parameters, own tokenizer, trained on C++ headers), the recipes and learning rates of "
        "the embedded target, two passes over its greedy answers; chain of 4 at temperature 0, "
        f"prompts of files that neither target nor drafters saw. Made by `{content['command']}`; "
        "numbers in full: held_out.json.",
        "",
        *markdown_table(["drafter", "tau", "TAR", "acceptance by depth", "M weights"], rows),
        "",
        *markdown_table(["expected", "difference in tau", "holds"], shown),
        "",
    ]


def report(given: argparse.Namespace) -> None:
    """Do all that is not done yet, and write."""
    torch.set_num_threads(given.threads)
    work = given.work.resolve()
    counts = {**held_out_target.PROMPTS, "training": given.training}
    folders = Folders(work, held_out_target.make(work, given.steps, counts))
    prompts = folders.prompts
    folders.stage("generate", "data=embedded", f"data.path={prompts / 'train.jsonl'}")
    for name in RATES:
        last = [LAST_LAYER] if name == "eagle3_copied" else []  # another number than the recipe's
        own = (*family_recipe(name), *last, f"optim.lr={RATES[name]}", f"run.drafter={name}")
        folders.stage("train", *own, f"train.prompts=[{prompts / 'validation.jsonl'}]")
    rivals = given.rivals if given.speculators else []
    recipes = {kind: train_rival(folders, kind, given) for kind in rivals}
    count = -(-given.measuring // len(cpp_headers.DOMAINS))
    bench = ["bench=jsonl", f"bench.prompts={prompts / 'measuring'}"]
    bench += [f"bench.prompts_per_domain={count}", f"decode.max_new_tokens={NEW_TOKENS}"]
    draft = f"measure.draft={{shape: chain, depth: {DEPTH}}}"
    folders.stage("measure", *bench, draft, "measure.kinds=[ngram]")
    command = "python -m scripts.evidence.held_out"
    command += " --speculators PYTHON" if given.speculators else ""
    write_reports(folders, recipes, given.out, command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do all that is not done yet; returns the exit status."""
    parser = make_parser("scripts.evidence.held_out", __doc__)
    python = "a python that has speculators; without it, only ours are trained"
    parser.add_argument("--speculators", metavar="PYTHON", help=python)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "held_out")
    steps = "of the target's training, 4,096 tokens each"
    parser.add_argument("--steps", type=int, default=800, help=steps)
    counts = held_out_target.PROMPTS
    add_options(
        parser, training=(counts["training"], "prompts"), measuring=(counts["measuring"], "prompts")
    )
    rivals = "drafters that speculators trains"
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS), help=rivals)
    add_options(parser, threads=1, out=(REPORTS / "held_out", "without its ending"))
    return run(parser, report, arguments)


if __name__ == "__main__":
    sys.exit(main())
