"""Rounds against one open-loop training: `python -m scripts.loop_report` writes docs/reports/loop.json and loop.md.

    headstart loop experiment=families            # the open-loop trainings: two passes over the greedy answers of all prompts
    python -m scripts.loop_report                 # or some: --kinds distilled --rows loop answers

Per kind the rows are: `open`, the open-loop training; `loop`, rounds as conf/experiment/embedded_loop.yaml says; `answers`, the
same rounds without any feedback; one row per switch, alone; and `distinct`, one open-loop training on all answers that `loop` had,
generated at once. All have the same number of training tokens or fewer, and are measured on held-out prompts that decided nothing.
It continues where it was interrupted; rows that were not played are left out. `--kills 10` adds a loop that is killed ten times.
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
from inference.loading import TargetConfig
from inference.manifest import MANIFEST_FILE, read_manifest, write_bytes
from inference.metrics import gain, tau_estimate
from inference.target import TargetModel
from scripts.config import load_settings
from scripts.loop_held_out import DECODE, HeldOut, totals
from scripts.loop_kill import kill_and_compare
from scripts.loop_report_page import markdown
from scripts.rounds import LOOP_FILE, Rounds
from scripts.rounds_facts import plain
from scripts.stages import STAGES
from train.feedback import FeedbackConfig, build

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "docs" / "reports"
TARGET = "assets/tiny-target"
RECIPE = "experiment=embedded_loop"
OPEN, LOOP, DISTINCT = "open", "loop", "distinct"
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
NONE = ("feedback.token_weights=false", "feedback.anchor_weights=false")
ON_POLICY = ("train.on_policy.share=0.5", "train.on_policy.window=8")
SWITCHES: dict[str, tuple[str, ...]] = {
    "answers": (),
    "token_weights": ("feedback.token_weights=true",),
    "anchor_weights": ("feedback.anchor_weights=true",),
    "replay": ("feedback.replay=true",),
    "domain_weights": ("feedback.domain_weights=true",),
    "hard_prompts": ("feedback.hard_prompts=0.25",),
    "on_policy": ON_POLICY,
}
"""Rows of rounds with one switch alone; `answers` has none."""
FOR_ONE = {"on_policy": ("distilled",)}
"""Switches that only some kinds have."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what is missing, measure, write both files; returns the exit status."""
    given = parse(arguments)
    try:
        content = known() | {"command": "headstart loop experiment=families && python -m scripts.loop_report --kills 10"}
        if given.kills:
            content["killed"] = killed(given.kills)
            write(content)
        target = TargetModel.load(TargetConfig(path=TARGET, dtype="float32"))
        held_out = HeldOut(target, given.work)
        content["settings"] = settings(held_out)
        for kind in given.kinds:
            for row in rows_of(kind, given.rows):
                if not given.only_measured:
                    play(kind, row, given.work)
            content["kinds"][kind] = Comparison(kind, given.work, given.open, held_out).content()
            write(content)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.loop_report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", nargs="*", choices=[LOOP, DISTINCT, *SWITCHES], default=[LOOP, DISTINCT, *SWITCHES])
    parser.add_argument("--work", type=Path, default=Path("outputs/loop_report"), help="where runs are kept")
    parser.add_argument("--open", type=Path, default=Path("outputs/families/train"), help="open-loop trainings")
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
    write_bytes(REPORTS / "loop.json", (json.dumps(content, indent=1) + "\n").encode())
    write_bytes(REPORTS / "loop.md", markdown(content).encode())


def settings(held_out: HeldOut) -> dict[str, Any]:
    """What all rows are measured on."""
    info = held_out.target.info
    return {
        "target": {"id": info.id, "revision": info.revision, "parameters": info.parameters},
        "prompts": len(held_out.requests),
        "temperature": DECODE.temperature,
        "depth": DECODE.depth,
        "max_new_tokens": DECODE.max_new_tokens,
    }


# ---- playing -----------------------------------------------------------------------------------------------------------------


def rows_of(kind: str, wanted: Sequence[str]) -> list[str]:
    """The rows to play for a kind, those first that others build on."""
    order = [LOOP, *SWITCHES, DISTINCT]
    return [row for row in order if row in wanted and kind in FOR_ONE.get(row, (kind,))]


def overrides(kind: str, row: str) -> list[str]:
    """The loop's settings in a row."""
    own = ON_POLICY if kind == "distilled" else ()
    return [RECIPE, *KINDS[kind][1], *(own if row == LOOP else (*NONE, *SWITCHES[row]))]


def play(kind: str, row: str, work: Path) -> None:
    """Play a row to its end; one that has been played is left alone."""
    print(f"\n==== {kind}: {row}", flush=True)
    if row == DISTINCT:
        train_distinct(kind, work)
        return
    run = work / kind / row
    if row != LOOP:
        share_first_round(work / kind / LOOP, run)
    Rounds(load_settings(STAGES["loop"], [*overrides(kind, row), f"run.root={work / kind}", f"run.name={row}"])).run()


def share_first_round(source: Path, run: Path) -> None:
    """The first round, and the second one's answers, are the same in every row of a kind: they are played once."""
    for name in ("round-0", "round-1/generate", "round-1/speed.json"):
        if (source / name).exists() and not (run / name).exists():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).symlink_to((source / name).resolve())


def train_distinct(kind: str, work: Path) -> None:
    """One training on all answers that the rounds had, with as many steps as they together."""
    loop = work / kind / LOOP
    rounds = json.loads((loop / LOOP_FILE).read_text(encoding="utf-8"))["rounds"]
    answers = [loop / f"round-{entry['round']}" / "generate" for entry in rounds]
    run = work / kind / DISTINCT
    build([], answers, run / "answers", FeedbackConfig())
    steps = sum(entry["training"]["steps"] for entry in rounds)
    given = [f"run.root={work / kind}", f"run.name={DISTINCT}", f"run.answers={run / 'answers'}", f"train.max_steps={steps}"]
    stage = STAGES["train"]
    from scripts.runner import run_one

    run_one(load_settings(stage, [RECIPE, *KINDS[kind][1], *given]))


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


# ---- what came out -----------------------------------------------------------------------------------------------------------


class Comparison:
    """All rows of a kind that have been played, on the held-out prompts."""

    def __init__(self, kind: str, work: Path, trained: Path, held_out: HeldOut) -> None:
        self.kind, self.work, self.held_out = kind, work / kind, held_out
        self.open = trained / KINDS[kind][0]

    def content(self) -> dict[str, Any]:
        """The kind's entry in loop.json."""
        rows: dict[str, Any] = {}
        base = self.measured(OPEN, self.open / "best")
        rows[OPEN] = self.row(base, base) | self.training(self.open)
        for name in (LOOP, *SWITCHES):
            if (self.work / name / LOOP_FILE).is_file():
                rows[name] = self.loop_row(name, base)
        distinct = next(iter((self.work / DISTINCT / "train").glob(f"*/{MANIFEST_FILE}")), None)
        if distinct is not None:
            found = self.measured(DISTINCT, distinct.parent / "best")
            rows[DISTINCT] = self.row(found, base) | self.training(distinct.parent)
            rows[DISTINCT]["answers"] = read_manifest(self.work / DISTINCT / "answers", "generate")["counts"]["done"]
        content: dict[str, Any] = {"overrides": list(KINDS[self.kind][1]), "rows": rows}
        if LOOP in rows and DISTINCT in rows:
            loop = self.measured(LOOP, self.best(LOOP))
            content["loop_over_distinct"] = plain(gain(totals(loop), totals(found)))
        return content

    def best(self, name: str) -> Path:
        """The best drafter of a loop."""
        return next(iter((self.work / name / "train").glob("*/best")))

    def measured(self, name: str, checkpoint: Path) -> dict[str, Any]:
        """The row on the held-out prompts."""
        return self.held_out.measure(checkpoint, self.work / f"{name}.json")

    def row(self, found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
        """tau with its interval, the gain over the open loop, losslessness."""
        estimate = tau_estimate(totals(found))
        return {
            "tau": estimate.tau,
            "tau_ci95": list(estimate.ci95),
            "tar": estimate.tar,
            "unconditional": list(estimate.unconditional),
            "over_open": plain(gain(totals(found), totals(base))),
            "lossless": found["lossless"],
            "weights_sha256": found["weights_sha256"],
        }

    def training(self, folder: Path) -> dict[str, Any]:
        """Steps and tokens of a training in one piece."""
        manifest = read_manifest(folder, "train")
        return {"steps": manifest["steps"], "tokens": manifest["tokens"]}

    def loop_row(self, name: str, base: dict[str, Any]) -> dict[str, Any]:
        """A loop: its best drafter on the held-out prompts, and what its rounds were."""
        content = json.loads((self.work / name / LOOP_FILE).read_text(encoding="utf-8"))
        rounds = [
            {
                key: entry[key]
                for key in ("round", "generated", "generation", "trials", "switches", "measured", "gain", "rises")
                if key in entry
            }
            | {"tokens": entry["spent"]["tokens"], "steps": entry["training"]["steps"]}
            for entry in content["rounds"]
        ]
        return self.row(self.measured(name, self.best(name)), base) | {
            "steps": sum(entry["steps"] for entry in rounds),
            "tokens": content["spent"]["tokens"],
            "answers": sum(entry["generated"]["answers"] for entry in rounds),
            "best_round": content["best"]["round"],
            "ended_by": content["ended_by"],
            "off": content["off"],
            "rounds": rounds,
        }


if __name__ == "__main__":
    sys.exit(main())
