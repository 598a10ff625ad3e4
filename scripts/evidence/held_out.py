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
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from inference.decoding.config import DecodeConfig
from inference.folders import copy_plain
from inference.manifest import MANIFEST_FILE, read_manifest, write_json
from inference.measure.metrics import tau_estimate
from inference.measure.prompts import load_prompts
from inference.report.markdown import markdown_table
from inference.report.model import read_report
from scripts.assets import cpp_headers, held_out_target
from scripts.evidence import common
from scripts.evidence.common import Facts, cell, family_recipe, read_json
from scripts.evidence.speculators import PLACES, RECIPES, Setting
from scripts.tools.common import REPORTS, ROOT, command

EPOCHS, DEPTH, NEW_TOKENS = 2, 4, 96
LAST_LAYER = f"head.from_target_layer={held_out_target.CONFIG['num_hidden_layers'] - 1}"
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


def train_rival(work: Path, kind: str, setting: Setting) -> dict[str, float]:
    """Let the library train a kind on the same answers; returns tau on the validation prompts, as
    our trainings measure it, by recipe.

    It uses the recipe that was best on the embedded target, or each of its recipes where that is
    not known; the one with the best tau becomes `speculators_<kind>`.
    """
    record = work / "run" / "train" / f"speculators_{kind}" / "recipes.json"
    found: dict[str, float] = read_json(record)
    if found:
        return found
    setting.write_rows()
    checkpoints: dict[str, Path] = {}
    decode = DecodeConfig(temperature=0.0, depth=DEPTH, max_new_tokens=64, batch_size=8)
    prompts = load_prompts(work / "data" / "prompts" / "validation.jsonl")[:24]
    for number, recipe in enumerate(best_recipes(kind)):
        name = f"{kind}-{number}"
        side = setting.theirs(kind, name, PLACES, RECIPES[recipe], EPOCHS)
        steps = EPOCHS * side.answer()["steps_per_epoch"]
        side.train(steps, setting.work / f"theirs-{name}" / "saved")
        folder = checkpoints[recipe] = setting.converted(name)
        totals = common.decode_totals(setting.model, folder, prompts, decode)
        found[recipe] = tau_estimate(totals).tau
    best = max(found, key=found.__getitem__)
    copy_plain(checkpoints[best], record.parent / "best")
    write_json(record, found)
    return found


def best_recipes(kind: str) -> list[str]:
    """The library's best recipe by speculators.json; without that report, all recipes."""
    compared = read_json(REPORTS / "speculators.json").get("tau", {})
    sides = compared.get(kind, {}).get("sides", {})
    known = [recipe for recipe in RECIPES if f"speculators, {recipe}" in sides]
    best = sorted(known, key=lambda recipe: -float(sides[f"speculators, {recipe}"]["tau"]))
    return best[:1] or list(RECIPES)


def collect(work: Path, recipes: Mapping[str, Mapping[str, float]], command: str) -> Facts:
    """The content of held_out.json."""
    measured = read_report(work / "run" / "measure" / "report.json")
    kept = ("tau", "tau_ci95", "tar", "acceptance", "parameters", "speedup", "lossless", "domains")
    table = {one.name: {key: one.to_dict()[key] for key in kept} for one in measured.drafters}
    for name, entry in table.items():
        folder = work / "run" / "train" / name
        if (folder / MANIFEST_FILE).is_file():
            manifest = read_manifest(folder, "train")
            facts = {key: manifest[key] for key in ("steps", "tokens", "seconds", "best")}
            entry["trained"] = facts | {"rate": RATES[name]}
        kind = name.removeprefix("speculators_")
        if kind != name:
            entry["validation_tau_by_recipe"] = dict(recipes[kind])
    tau = {one.name: one.tau for one in measured.drafters}
    order = [
        {"above": above, "below": below, "holds": gap > 0, "difference": gap}
        for above, below in ORDER
        if above in tau and below in tau
        for gap in [tau[above] - tau[below]]
    ]
    rivals = [
        {"kind": kind, "ours": ours, "speculators": theirs, "holds": ours >= theirs}
        for kind in RIVALS
        if kind in tau and f"speculators_{kind}" in tau
        for ours, theirs in [(tau[kind], tau[f"speculators_{kind}"])]
    ]
    trained = read_json(work / "target" / "training.json")
    facts = {key: trained[key] for key in ("steps", "tokens_seen", "training_seconds")}
    return {
        "format": 1,
        "command": command,
        "target": {**measured.target.to_dict(), "id": "held_out/target"},
        "target_training": {**facts, "heldout": trained["evaluations"][-1]},
        "answers": read_manifest(work / "run" / "generate", "generate")["counts"],
        "settings": measured.settings.to_dict(),
        "device": measured.device.to_dict(),
        "git": measured.git or {},
        "rows": table,
        "order": order,
        "against_speculators": rivals,
    }


def markdown(content: Facts) -> list[str]:
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
    expected = [
        [f"{x['above']} above {x['below']}", f"{x['difference']:+.2f}", x["holds"]]
        for x in content["order"]
    ]
    expected += [
        [f"{x['kind']} at least speculators", f"{x['ours'] - x['speculators']:+.2f}", x["holds"]]
        for x in content["against_speculators"]
    ]
    shown = [[what, gap, "yes" if holds else "no"] for what, gap, holds in expected]
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
    """Run every step that is not done yet, and write the report."""
    torch.set_num_threads(given.threads)
    work = given.work.resolve()
    counts = {**held_out_target.PROMPTS, "training": given.training}
    target = held_out_target.make(work, given.steps, counts)
    prompts, own_run = work / "data" / "prompts", work / "run"

    def stage(name: str, *overrides: str) -> None:
        common.run_on_target(name, target, own_run, *overrides)

    stage("generate", "data=embedded", f"data.path={prompts / 'train.jsonl'}")
    for name, rate in RATES.items():
        last = [LAST_LAYER] if name == "eagle3_copied" else []  # another number than the recipe's
        own = (*family_recipe(name), *last, f"optim.lr={rate}", f"run.drafter={name}")
        stage("train", *own, f"train.prompts=[{prompts / 'validation.jsonl'}]")
    recipes, command = {}, "python -m scripts.evidence.held_out"
    if given.speculators:
        command += " --speculators PYTHON"
        answers, theirs = own_run / "generate", work / "speculators"
        setting = Setting(given.speculators, answers, target, theirs, given.threads)
        recipes = {kind: train_rival(work, kind, setting) for kind in given.rivals}
    count = -(-given.measuring // len(cpp_headers.DOMAINS))
    bench = ["bench=jsonl", f"bench.prompts={prompts / 'measuring'}"]
    bench += [f"bench.prompts_per_domain={count}", f"decode.max_new_tokens={NEW_TOKENS}"]
    draft = f"measure.draft={{shape: chain, depth: {DEPTH}}}"
    stage("measure", *bench, draft, "measure.kinds=[ngram]")
    content = collect(work, recipes, command)
    common.write_report(given.out, content, markdown(content))


main = command(
    report,
    speculators={
        "metavar": "PYTHON",
        "help": "a python that has speculators; without it, only ours are trained",
    },
    work=ROOT / "outputs" / "held_out",
    steps=(800, "of the target's training, 4,096 tokens each"),
    training=(held_out_target.PROMPTS["training"], "prompts"),
    measuring=(held_out_target.PROMPTS["measuring"], "prompts"),
    rivals={
        "nargs": "+",
        "choices": RIVALS,
        "default": RIVALS,
        "help": "drafters that speculators trains",
    },
    threads=1,
    out=(REPORTS / "held_out", "without its ending"),
)

if __name__ == "__main__":
    sys.exit(main())
