"""Checks whether the results of the embedded target hold on a second small target and other text.

    python -m scripts.evidence.held_out

Makes a small Qwen3 from C++ headers (scripts/assets), lets it answer prompts, trains drafters with
the settings of conf/experiment/families.yaml at the learning rates that were best on the embedded
target, and measures them on prompts of files that neither target nor drafters saw. Writes
docs/reports/held_out.{json,md}. Finished steps are skipped, so the command can be repeated after an
interruption. --answers-only makes the target and its answers, which other reports read
(scripts.evidence.small_targets).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from inference.manifest import MANIFEST_FILE, read_manifest
from inference.report.markdown import markdown_table
from inference.report.model import read_report
from scripts.assets import cpp_headers, held_out_target
from scripts.evidence import common
from scripts.evidence.common import Facts, cell, family_rate, family_recipe, read_json
from scripts.tools.common import REPORTS, ROOT, command

EPOCHS, DEPTH, NEW_TOKENS = 2, 4, 96
LAST_LAYER = f"head.from_target_layer={held_out_target.CONFIG['num_hidden_layers'] - 1}"
ROWS = ("medusa", "hydra_heads", "eagle", "eagle3", "eagle3_copied", "dflash", "dspark")
"""Rows of conf/experiment/families.yaml."""
ORDER = (
    ("dspark", "dflash"),
    ("dspark", "eagle3"),
    ("eagle3", "eagle"),
    ("eagle3_copied", "eagle"),
    ("eagle", "medusa"),
    ("hydra_heads", "medusa"),
)
"""Pairs of arms: the first is expected to have the higher tau."""


def collect(work: Path, command: str) -> Facts:
    """The content of held_out.json."""
    measured = read_report(work / "run" / "measure" / "report.json")
    kept = ("tau", "tau_ci95", "tar", "acceptance", "parameters", "speedup", "lossless", "domains")
    table = {one.name: {key: one.to_dict()[key] for key in kept} for one in measured.drafters}
    for name, entry in table.items():
        folder = work / "run" / "train" / name
        if (folder / MANIFEST_FILE).is_file():
            manifest = read_manifest(folder, "train")
            facts = {key: manifest[key] for key in ("steps", "tokens", "seconds", "best")}
            entry["trained"] = facts | {"rate": family_rate(name)}
    tau = {one.name: one.tau for one in measured.drafters}
    order = [
        {"above": above, "below": below, "holds": gap > 0, "difference": gap}
        for above, below in ORDER
        if above in tau and below in tau
        for gap in [tau[above] - tau[below]]
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
    shown = [[what, gap, "yes" if holds else "no"] for what, gap, holds in expected]
    return [
        "# The held-out check",
        "",
        f"A second small target (Qwen3, {int(content['target']['parameters']) / 1e6:.2f} M "
        "parameters, own tokenizer, trained on C++ headers), the recipes and learning rates that "
        "experiment=families had when this was measured, two passes over its greedy answers; chain "
        "of 4 at temperature 0, "
        f"prompts of files that neither target nor drafters saw. Made by `{content['command']}`; "
        "numbers in full: held_out.json.",
        "",
        *markdown_table(["drafter", "tau", "TAR", "acceptance by depth", "M weights"], rows),
        "",
        *markdown_table(["expected", "difference in tau", "holds"], shown),
        "",
    ]


def report(given: argparse.Namespace) -> None:
    """Run every step that is not yet done, and write the report."""
    torch.set_num_threads(given.threads)
    work = given.work.resolve()
    counts = {**held_out_target.PROMPTS, "training": given.training}
    target = held_out_target.make(work, given.steps, counts)
    prompts, own_run = work / "data" / "prompts", work / "run"

    def stage(name: str, *overrides: str) -> None:
        common.run_on_target(name, target, own_run, *overrides)

    stage("generate", "data=embedded", f"data.path={prompts / 'train.jsonl'}")
    if given.answers_only:
        return
    for name in ROWS:
        last = [LAST_LAYER] if name == "eagle3_copied" else []  # another layer than the recipe's
        own = (*family_recipe(name), *last, f"optim.lr={family_rate(name)}", f"run.drafter={name}")
        stage("train", *own, f"train.prompts=[{prompts / 'validation.jsonl'}]")
    command = "python -m scripts.evidence.held_out"
    count = -(-given.measuring // len(cpp_headers.DOMAINS))
    bench = ["bench=jsonl", f"bench.prompts={prompts / 'measuring'}"]
    bench += [f"bench.prompts_per_domain={count}", f"decode.max_new_tokens={NEW_TOKENS}"]
    draft = f"measure.draft={{shape: chain, depth: {DEPTH}}}"
    stage("measure", *bench, draft, "measure.kinds=[ngram]")
    content = collect(work, command)
    common.write_report(given.out, content, markdown(content))


main = command(
    report,
    work=ROOT / "outputs" / "held_out",
    steps=(800, "of the target's training, 4,096 tokens each"),
    answers_only=(False, "make the target and its answers, and end"),
    training=(held_out_target.PROMPTS["training"], "prompts"),
    measuring=(held_out_target.PROMPTS["measuring"], "prompts"),
    threads=1,
    out=(REPORTS / "held_out", "without its ending"),
)

if __name__ == "__main__":
    sys.exit(main())
