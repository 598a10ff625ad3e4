"""Rounds against one open-loop training: `python -m scripts.loop_report` writes docs/reports/loop.json and loop.md.

    headstart loop experiment=families            # the open-loop trainings: two passes over the greedy answers of all prompts
    python -m scripts.loop_report                 # or some: --kinds distilled --rows loop ablation

Per kind the rows are: `open`, the open-loop training; `loop`, rounds as conf/experiment/embedded_loop.yaml says; `answers`, the
same rounds without any feedback; and `distinct`, one open-loop training on all answers that `loop` had, generated at once. All have
the same number of training tokens or fewer. `ablation` tries every switch alone (scripts/loop_ablation.py). Everything is measured
on held-out prompts that decided nothing. It continues where it was interrupted; what has not been played is left out.
`--few-prompts` plays and compares rounds from few prompts instead (scripts/loop_few.py). `--rows ablation` measures that alone and
keeps the report's other rows; `--few-prompts --seed 1` repeats it with other prompts. `--kills 10` adds a loop that is killed so
often.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.manifest import write_bytes
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.config import load_settings
from scripts.loop_ablation import STEPS, TRIED, ablate, merged, overrides, share_first_round
from scripts.loop_comparison import ABLATION, DISTINCT, LOOP, LOOPS, Comparison
from scripts.loop_few import ablate_few, opened, other, play_few, prompts
from scripts.loop_held_out import DECODE, HeldOut
from scripts.loop_kill import kill_and_compare
from scripts.loop_report_page import REPEATED, markdown
from scripts.rounds import GENERATED, LOOP_FILE, ON_POLICY, Rounds
from scripts.runner import run_one
from scripts.stages import STAGES
from train.feedback import build
from train.feedback.config import FeedbackConfig

SCRIPT = "python -m scripts.loop_report"
ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "docs" / "reports"
TARGET = "assets/tiny-target"
RECIPE = "experiment=embedded_loop"
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "eagle3": (
        "eagle3_copied@0.003",
        ("head=eagle3", "head.from_target_layer=7", "head.ttt_steps=4", "optim.lr=3e-3"),
    ),
    "dspark": ("dspark@0.001", ("head=dspark", "head.num_anchors=64", "optim.lr=1e-3")),
    "distilled": (
        "distilled@0.0015",
        ("head=distilled", "head.from_target_layers=[0,3,5]", "head.share_embeddings=true", "optim.lr=1.5e-3"),
    ),
}
"""Kind -> its training in the run of experiment=families, and what the recipe sets for it."""
MORE = {"distilled": ("train.on_policy.share=0.5", "train.on_policy.window=8")}
"""What rounds of a kind set besides: a switch that only this kind has."""
ORDER = (*LOOPS, DISTINCT, ABLATION)
MADE = 1
"""Prompts that variations and branches make per answer in the ablation: as many as were answered."""
OFF = ("feedback.token_weights=false", "feedback.anchor_weights=false", "train.on_policy.share=0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what is missing, measure, write both files; returns the exit status."""
    given = parse(arguments)
    try:
        content = known()
        if given.kills:
            content["killed"] = killed(given.kills)
            write(content)
        held_out = HeldOut(TargetModel.load(TargetConfig(path=TARGET, dtype="float32")), given.work)
        content["settings"] = settings(held_out)
        for kind in given.kinds:
            (few_prompts if given.few_prompts else all_prompts)(kind, given, held_out, content)
            write(content)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", nargs="*", choices=ORDER, default=ORDER)
    parser.add_argument("--switches", nargs="*", choices=TRIED, default=TRIED, help="of the ablation")
    parser.add_argument("--work", type=Path, default=Path("outputs/loop_report"), help="where runs are kept")
    parser.add_argument("--open", type=Path, default=Path("outputs/families/train"), help="open-loop trainings")
    parser.add_argument("--few-prompts", action="store_true", help="rounds from few prompts instead, with their own open loop")
    parser.add_argument("--seed", type=int, default=0, help="with --few-prompts: other prompts, and all draws anew")
    parser.add_argument("--only-measured", action="store_true", help="play nothing, report what is there")
    parser.add_argument("--kills", type=int, default=0, help="kill a small loop so many times, and compare")
    return parser.parse_args(arguments)


def known() -> dict[str, Any]:
    """What the report holds already."""
    path = REPORTS / "loop.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"format": 1}
    content.setdefault("kinds", {})
    return content


def write(content: dict[str, Any]) -> None:
    """Write loop.json and loop.md."""
    kills = " --kills 10" if "killed" in content else ""
    few = content.get("few_prompts", {"kinds": {}})["kinds"].values()
    seeds = sorted({int(seed) for entry in few for seed in entry.get(REPEATED, {})})
    commands = [f"{SCRIPT} --few-prompts{f' --seed {seed}' if seed else ''}" for seed in ([0, *seeds] if few else [])]
    content["command"] = " && ".join(["headstart loop experiment=families", f"{SCRIPT}{kills}", *commands])
    write_bytes(REPORTS / "loop.json", (json.dumps(content, indent=1) + "\n").encode())
    write_bytes(REPORTS / "loop.md", markdown(content).encode())


def all_prompts(kind: str, given: argparse.Namespace, held_out: HeldOut, content: dict[str, Any]) -> None:
    """Play and compare the rows of a kind."""
    for row in () if given.only_measured else (name for name in ORDER if name in given.rows):
        play(kind, row, given)
    name, own = KINDS[kind]
    comparison = Comparison(given.work / kind, given.open / name, held_out)
    content["kinds"][kind] = compared(content["kinds"].get(kind, {}), comparison, [*own, *MORE.get(kind, ())], given.rows)


def few_prompts(kind: str, given: argparse.Namespace, held_out: HeldOut, content: dict[str, Any]) -> None:
    """Play and compare rounds from few prompts, for one kind."""
    work = given.work / "few_prompts" / (f"{kind}-{given.seed}" if given.seed else kind)
    own = [*KINDS[kind][1], *other(given.seed)]
    if LOOP in given.rows and not given.only_measured:
        play_few(own, work)
    if ABLATION in given.rows and not given.only_measured:
        ablate_few(own, work, [name for name in given.switches if name in GENERATED])
    part = content.setdefault("few_prompts", {"prompts": prompts(), "kinds": {}})
    comparison = Comparison(work, opened(work), held_out, prompts())
    if given.seed:
        repeated = part["kinds"].setdefault(kind, {}).setdefault(REPEATED, {})
        repeated[str(given.seed)] = compared({}, comparison, own, given.rows)
    else:
        part["kinds"][kind] = compared(part["kinds"].get(kind, {}), comparison, own, given.rows)


def compared(known: dict[str, Any], comparison: Comparison, own: list[str], rows: Sequence[str]) -> dict[str, Any]:
    """What the report says of a kind: `known`, with what has been played of `rows`. own: the kind's overrides."""
    content = {**known, "overrides": own}
    if set(rows) != {ABLATION}:
        content |= comparison.content()
    if found := comparison.ablation():
        content[ABLATION] = merged(known.get(ABLATION, {}), found)
    return content


def settings(held_out: HeldOut) -> dict[str, Any]:
    """What everything is measured on."""
    info = held_out.target.info
    return {
        "target": {"id": info.id, "revision": info.revision, "parameters": info.parameters},
        "prompts": len(held_out.requests),
        "temperature": DECODE.temperature,
        "depth": DECODE.depth,
        "max_new_tokens": DECODE.max_new_tokens,
        "ablation_steps": STEPS,
    }


def play(kind: str, row: str, given: argparse.Namespace) -> None:
    """Play a row to its end; one that has been played is left alone."""
    print(f"\n==== {kind}: {row}", flush=True)
    work: Path = given.work / kind
    if row == DISTINCT:
        train_distinct(kind, work)
    elif row == ABLATION:
        switches = [name for name in given.switches if name != ON_POLICY or kind in MORE]
        ablate(rounds_of(kind, work, ABLATION, *overrides(MADE)), switches)
    else:
        rounds_of(kind, work, row, *(() if row == LOOP else OFF)).run()


def rounds_of(kind: str, work: Path, name: str, *more: str) -> Rounds:
    """The rounds of a kind in the run `name`; the first one is that of the main loop."""
    if name != LOOP:
        share_first_round(work / LOOP, work / name)
    place = [f"run.root={work}", f"run.name={name}", "run.threads=1"]
    return Rounds(load_settings(STAGES["loop"], [RECIPE, *KINDS[kind][1], *MORE.get(kind, ()), *more, *place]))


def train_distinct(kind: str, work: Path) -> None:
    """One training on all answers that the rounds had, with as many steps as they together."""
    rounds = loop_file(work)["rounds"]
    answers = [work / LOOP / f"round-{entry['round']}" / "generate" for entry in rounds]
    run = work / DISTINCT
    build([], answers, run / "answers", FeedbackConfig())
    steps = sum(entry["training"]["steps"] for entry in rounds)
    place = [f"run.root={work}", f"run.name={DISTINCT}", f"run.answers={run / 'answers'}", "run.threads=1"]
    run_one(load_settings(STAGES["train"], [RECIPE, *KINDS[kind][1], f"train.max_steps={steps}", *place]))


def loop_file(work: Path) -> dict[str, Any]:
    """What the main loop of a kind came to; raises `UserError` before it has."""
    path = work / LOOP / LOOP_FILE
    if not path.is_file():
        raise UserError(f"'{path}' is not there: the row '{LOOP}' has to be played first.")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def killed(kills: int) -> dict[str, Any]:
    """A loop on the embedded target, a few prompts and steps, killed so often."""
    few = [
        RECIPE, *KINDS["distilled"][1], "debug=fast", "sampling.batch_size=1", "loop.round.overrides=[]",
        "loop.round.prompts=share", "loop.round.patience=0", "train.save_every=2", "train.parity=false", "data.limit=24",
        "run.threads=1",
    ]  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="headstart-kills-"))
    try:
        return {"settings": few, **kill_and_compare(few, folder, kills)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
