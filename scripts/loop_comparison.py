"""What the rows of docs/reports/loop.json came to on the held-out prompts, for one kind (scripts/loop_report.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.manifest import MANIFEST_FILE, read_manifest
from inference.measure.metrics import gain, tau_estimate
from scripts.loop_held_out import HeldOut, totals
from scripts.rounds import LOOP_FILE
from scripts.rounds_facts import answers_of, plain
from scripts.rounds_plan import PLAIN, TRIALS

OPEN, LOOP, DISTINCT, ABLATION = "open", "loop", "distinct", "ablation"
LOOPS = (LOOP, "answers")
KEYS = ("round", "generated", "branches", "variations", "generation", "trials", "switches", "measured", "gain", "rises")
"""What is said of a round. Of its measurement not the speedup: rounds are played beside other work, on a machine that pauses."""


@dataclass
class Comparison:
    """The rows of a kind that have been played. work: their folders; opened: the open-loop training, on `answers` answers."""

    work: Path
    opened: Path
    held_out: HeldOut
    answers: int = 1440

    def content(self) -> dict[str, Any]:
        """`rows`, each against the open loop; `loop_over_distinct`."""
        open_loop = self.measured(OPEN, self.opened / "best")
        rows = {OPEN: self.row(open_loop, open_loop) | self.training(self.opened) | {"answers": self.answers}}
        for name in LOOPS:
            if (self.work / name / LOOP_FILE).is_file():
                rows[name] = self.loop_row(name, open_loop)
        content: dict[str, Any] = {"rows": rows}
        trained = next(iter((self.work / DISTINCT / "train").glob(f"*/{MANIFEST_FILE}")), None)
        if trained is not None and LOOP in rows:
            found = self.measured(DISTINCT, trained.parent / "best")
            answers = read_manifest(self.work / DISTINCT / "answers", "generate")["counts"]["done"]
            rows[DISTINCT] = self.row(found, open_loop) | self.training(trained.parent) | {"answers": answers}
            content["loop_over_distinct"] = plain(gain(totals(self.measured(LOOP, self.best(LOOP))), totals(found)))
        return content

    def ablation(self) -> dict[str, Any]:
        """The trainings with one switch and with none, by switch; empty where they have not been played."""
        folder = self.work / ABLATION / "round-1" / TRIALS / "train"
        done = {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{MANIFEST_FILE}"))}
        if PLAIN not in done:
            return {}
        found = {name: self.measured(f"{ABLATION}-{name}", path / "best") for name, path in done.items()}
        order = [PLAIN, *(name for name in found if name != PLAIN)]
        return {
            name: self.estimate(found[name])
            | self.training(done[name])
            | {"over_plain": plain(gain(totals(found[name]), totals(found[PLAIN])))}
            for name in order
        }

    def best(self, name: str) -> Path:
        """The best drafter of a loop."""
        return next(iter((self.work / name / "train").glob("*/best")))

    def measured(self, name: str, checkpoint: Path) -> dict[str, Any]:
        """A drafter on the held-out prompts."""
        return self.held_out.measure(checkpoint, self.work / f"{name}.json")

    def estimate(self, found: dict[str, Any]) -> dict[str, Any]:
        """tau with its interval, losslessness."""
        estimate = tau_estimate(totals(found))
        return {
            "tau": estimate.tau,
            "tau_ci95": list(estimate.ci95),
            "tar": estimate.tar,
            "unconditional": list(estimate.unconditional),
            "lossless": found["lossless"],
            "weights_sha256": found["weights_sha256"],
        }

    def row(self, found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
        """A row of the comparison: also its gain over the open loop."""
        return self.estimate(found) | {"over_open": plain(gain(totals(found), totals(base)))}

    def training(self, folder: Path) -> dict[str, Any]:
        """Steps and tokens of a training in one piece."""
        manifest = read_manifest(folder, "train")
        return {"steps": manifest["steps"], "tokens": manifest["tokens"]}

    def loop_row(self, name: str, base: dict[str, Any]) -> dict[str, Any]:
        """A loop: its best drafter on the held-out prompts, and what its rounds were."""
        content = json.loads((self.work / name / LOOP_FILE).read_text(encoding="utf-8"))
        rounds = [
            {key: entry[key] for key in KEYS if key in entry}
            | {"measured": {key: value for key, value in entry["measured"].items() if not key.startswith("speedup")}}
            | {"tokens": entry["spent"]["tokens"], "steps": entry["training"]["steps"]}
            for entry in content["rounds"]
        ]
        return self.row(self.measured(name, self.best(name)), base) | {
            "steps": sum(entry["steps"] for entry in rounds),
            "tokens": content["spent"]["tokens"],
            "answers": sum(answers_of(entry) for entry in rounds),
            "best_round": content["best"]["round"],
            "ended_by": content["ended_by"],
            "off": content["off"],
            "rounds": rounds,
        }
