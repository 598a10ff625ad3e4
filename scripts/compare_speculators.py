"""Training side by side with vLLM's `speculators`: speed, memory, and tau after equally many steps.

    python -m scripts.compare_speculators --python <python that has speculators> --answers outputs/families/generate

Same target, same answers (cut alike), same architecture, 2 threads; each side in a process of its own, all of them alive at
once and timed in turns. One step reads 4,096 places on both sides: 8 rows of 512 here, one packed row there. Since that library
packs everything into one row, whose attention is dense on a CPU, it is timed with shorter rows too, and compared at its fastest.
Memory is compared where both hold equally many places at once: 4,096, and 512 (ours adding up the gradients of 8 rows).
Its features are made beforehand and not timed with its steps; ours are made in the step, so that comparison is against us. What
making theirs costs with plain transformers is reported beside it.

`--only timing` or `--only tau` renews one half of the report: tau does not depend on who else uses the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.manifest import write_json
from inference.measure.config import process_facts
from inference.measure.prompts import load_prompts, select_prompts, to_requests
from inference.measure.run import quick_tau
from inference.target.hardware import device_facts
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.config import load_settings
from scripts.stages import STAGES
from train.data.pack import PackedData

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "scripts" / "speculators_worker.py"
VERSION = "0.9.0"
LENGTH, ROWS = 512, 8
PLACES = LENGTH * ROWS
SHORTER = (2048, 1024, 512)
ROW_BY_ROW = "ours, one row at a time"


@dataclass(frozen=True)
class Kind:
    """One architecture on both sides: our overrides, the library's flags, and its recipes for tau by name."""

    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    rate: float


KINDS = {
    "eagle3": Kind(
        ("head=eagle3", "head.ttt_steps=4"),
        ("--ttt-steps", "4", "--no-norm-before-residual", "--no-norm-before-fc", "--fc-norm", "--norm-output"),
        1e-2,
    ),
    "dspark": Kind(
        ("head=dspark", "head.num_anchors=64"),
        ("--num-layers", "5", "--block-size", "7", "--full-attention-indices", "0", "1", "2", "3", "4", "--max-anchors", "512"),
        1e-3,
    ),
    "dflash": Kind(
        ("head=dflash", "head.num_anchors=64"),
        ("--num-layers", "5", "--block-size", "8", "--full-attention-indices", "0", "1", "2", "3", "4", "--max-anchors", "512"),
        1e-3,
    ),
}
RECIPES = {
    "as it comes": (),  # Muon at 1e-3, linear decay
    "AdamW 3e-3": ("--optimizer", "adamw", "--lr", "3e-3"),
}
"""The library's optimisers that are tried for tau; the best one counts. Timed with AdamW, which is the cheaper one."""


class Side:
    """A worker process: `ask` sends a command and returns its answer."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT
            )

    def answer(self) -> dict[str, Any]:
        """The next answer; UserError with the end of its log when the process has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = self.log.read_text(encoding="utf-8")[-1500:]
            raise UserError(f"a side of the comparison ended early ({self.log}):\n{tail}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)


@dataclass(frozen=True)
class Setting:
    """What one comparison is told."""

    python: str
    answers: Path
    target: Path
    work: Path
    threads: int
    shorter: tuple[int, ...] = SHORTER
    seed: int = 0

    def ours(self, kind: Kind, name: str, steps: int, at_once: int = ROWS) -> Side:
        """Our side of a training of `steps` steps, `at_once` rows per forward pass."""
        out = fresh(self.work / f"ours-{name}")
        overrides = [
            "experiment=[families]", *kind.overrides, f"optim.lr={kind.rate}", f"train.max_steps={steps}", "train.eval_every=0",
            "target=local", f"target.path={self.target}", "target.dtype=float32", f"train.seed={self.seed}",
            "train.parity=false", f"train.micro_batch={at_once}",
        ]  # fmt: skip
        job = {"overrides": overrides, "answers": str(self.answers), "out": str(out), "threads": self.threads}
        write_json(out / "job.json", job)
        return Side([sys.executable, "-m", "scripts.speculators_ours", str(out / "job.json")], out / "log.txt")

    def theirs(self, kind: str, name: str, places: int, flags: tuple[str, ...], epochs: int) -> Side:
        """The library's side; makes its data set first where there is none."""
        out = fresh(self.work / f"theirs-{name}")
        made = KINDS[kind]
        data = self.data(kind)
        job = {
            "kind": kind, "target": str(self.target), "rows": str(self.work / "rows.jsonl"), "data": str(data), "out": str(out),
            "taps": self.taps(kind), "tokens_per_step": places, "epochs": epochs, "seed": self.seed, "threads": self.threads,
            "flags": [*made.flags, *flags],
        }  # fmt: skip
        write_json(out / "job.json", job)
        command = [self.python, str(WORKER), str(out / "job.json")]
        if not (data / "made.json").is_file():
            maker = Side(command, out / "data.txt")
            maker.answer()
            maker.end()
        return Side(command, out / "log.txt")

    def taps(self, kind: str) -> list[int]:
        """The layers that our drafter of this kind reads by default."""
        settings = load_settings(STAGES["train"], ["experiment=[families]", *KINDS[kind].overrides])
        info = self.model.info
        drafter = get_kind(settings.head.kind).drafter_class(settings.head.config, info)
        return list(drafter.needs.taps)

    @cached_property
    def model(self) -> TargetModel:
        """The target, in float32."""
        return TargetModel.load(TargetConfig(str(self.target), dtype="float32", device="cpu"))

    def making(self, kind: str) -> dict[str, float]:
        """Tokens and seconds that making the library's features took, with plain transformers."""
        found: dict[str, float] = json.loads((self.data(kind) / "made.json").read_text(encoding="utf-8"))
        return found

    def data(self, kind: str) -> Path:
        """Where the library's data set lies: it belongs to these documents, this target and these layers."""
        layers = "-".join(map(str, self.taps(kind)))
        rows = (self.work / "rows.jsonl").read_bytes() + self.model.info.revision.encode()
        return self.work / f"data-{layers}-{hashlib.sha256(rows).hexdigest()[:12]}"


def name_of(places: int) -> str:
    """What the library's side with rows of so many places is called."""
    return f"speculators, rows of {places}"


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_rows(setting: Setting) -> int:
    """Write the documents, cut as our training cuts them, for the other side; returns their tokens."""
    data = PackedData.from_manifest(setting.answers, setting.model.info, LENGTH)
    lines, tokens = [], 0
    for index in range(len(data)):
        row = data.row(index)
        for segment in range(1, int(row.segments.max()) + 1):
            inside = row.segments == segment
            tokens += int(inside.sum())
            lines.append({"tokens": row.tokens[inside].tolist(), "mask": row.loss_mask[inside].astype(int).tolist()})
    setting.work.mkdir(parents=True, exist_ok=True)
    (setting.work / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return tokens


def timing(setting: Setting, name: str, warm: int, rounds: int) -> dict[str, Any]:
    """Tokens per second and peak memory of all sides, timed in turns; one round is two steps of ours, and as many places."""
    kind = KINDS[name]
    adamw = RECIPES["AdamW 3e-3"]
    sides: dict[str, tuple[Side, int]] = {
        "ours": (setting.ours(kind, name, 1000), 2),
        ROW_BY_ROW: (setting.ours(kind, f"{name}-1", 1000, at_once=1), 2),
    }
    for places in (PLACES, *setting.shorter):
        side = setting.theirs(name, f"{name}-{places}", places, adamw, 1000)
        sides[name_of(places)] = (side, 2 * PLACES // places)
    facts = {label: side.answer() for label, (side, _) in sides.items()}
    sums = {label: {"tokens": 0, "seconds": 0.0, "peak_bytes": 0} for label in sides}
    for turn in range(warm + rounds):
        for label, (side, count) in sides.items():
            found = side.ask(do="steps", count=count)
            entry = sums[label]
            entry["peak_bytes"] = found["peak_bytes"]
            if turn >= warm:
                entry["tokens"] += found["tokens"]
                entry["seconds"] += found["seconds"]
    for side, _ in sides.values():
        side.end()
    rows = {
        label: {
            "trained_weights": facts[label]["trained_weights"],
            **entry,
            "tokens_per_second": entry["tokens"] / entry["seconds"],
        }
        for label, entry in sums.items()
    }
    made = setting.making(name)
    fastest = max((label for label in rows if not label.startswith("ours")), key=lambda label: rows[label]["tokens_per_second"])
    theirs, ours = rows[fastest], rows["ours"]
    whole = 1 / (1 / theirs["tokens_per_second"] + made["seconds"] / made["tokens"])
    same = rows[name_of(PLACES)]
    return {
        "sides": rows, "their_features_tokens_per_second": made["tokens"] / made["seconds"], "their_fastest": fastest,
        "speed_ratio": ours["tokens_per_second"] / theirs["tokens_per_second"],
        "speed_ratio_at_equal_steps": ours["tokens_per_second"] / same["tokens_per_second"],
        "speed_ratio_with_their_features": ours["tokens_per_second"] / whole,
        "memory_ratio": {
            str(places): rows[label]["peak_bytes"] / rows[name_of(places)]["peak_bytes"]
            for places, label in ((PLACES, "ours"), (LENGTH, ROW_BY_ROW)) if name_of(places) in rows
        },
    }  # fmt: skip


def tau(setting: Setting, name: str, steps: int, prompts: Path, count: int, tokens: int) -> dict[str, Any]:
    """tau of both sides after `steps` steps of 4,096 places, one decoder and the same held-out prompts for all of them."""
    target = setting.model
    decode = DecodeConfig(temperature=0.0, depth=4, max_new_tokens=tokens, batch_size=8)
    found = load_prompts((str(prompts),))
    domains = len({prompt.domain for prompt in found})
    chosen = select_prompts(found, max(1, count // domains), seed=setting.seed)
    requests = to_requests(chosen, target.tokenizer, decode, capacity=target.info.max_position_embeddings, overlong="skip")

    def judged(folder: Path) -> dict[str, Any]:
        estimate = quick_tau(target, load_drafter(folder, target.info, target.weights), requests, decode)
        return {"tau": estimate.tau, "tau_ci95": list(estimate.ci95), "acceptance": list(estimate.unconditional)}

    ours = setting.ours(KINDS[name], name, steps)
    ours.answer()
    ours.ask(do="steps", count=steps)
    ours.ask(do="save", to=str(setting.work / f"ours-{name}" / "saved"))
    ours.end()
    rows = {"ours": judged(setting.work / f"ours-{name}" / "saved")}
    for number, (recipe, flags) in enumerate(RECIPES.items()):
        label = f"{name}-tau-{number}"
        side = setting.theirs(name, label, PLACES, (*flags, "--scheduler-total-steps", str(steps)), 1000)
        side.answer()
        side.ask(do="steps", count=steps)
        out = setting.work / f"theirs-{label}"
        side.ask(do="save", to=str(out / "saved"))
        side.end()
        import_folder(Folder.read(out / "saved"), target, out / "converted")
        rows[f"speculators, {recipe}"] = judged(out / "converted")
    best = max((row for label, row in rows.items() if label != "ours"), key=lambda row: row["tau"])
    return {"steps": steps, "prompts": len(requests), "sides": rows, "difference": rows["ours"]["tau"] - best["tau"]}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="python -m scripts.compare_speculators", description=(__doc__ or "").split("\n")[0])
    root.add_argument("--python", required=True, help=f"a python that has speculators {VERSION}")
    root.add_argument("--answers", type=Path, required=True, help="folder of `headstart generate`")
    root.add_argument("--target", type=Path, default=ROOT / "assets" / "tiny-target")
    root.add_argument("--prompts", type=Path, default=ROOT / "assets" / "prompts", help="held-out prompts for tau")
    root.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=["eagle3", "dspark"])
    root.add_argument("--only", choices=("timing", "tau"))
    root.add_argument("--threads", type=int, default=2)
    root.add_argument("--warm", type=int, default=1, help="rounds that are not counted")
    root.add_argument("--rounds", type=int, default=4, help="rounds of two steps that are timed")
    root.add_argument("--rows", nargs="*", type=int, default=SHORTER, help="shorter rows of the library to time, in tokens")
    root.add_argument("--steps", type=int, default=61, help="steps before tau is measured")
    root.add_argument("--count", type=int, default=24, help="prompts for tau")
    root.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    root.add_argument("--work", type=Path, default=ROOT / "outputs" / "speculators")
    root.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "speculators.json")
    return root


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Compare and write the report; returns it."""
    answers, target, work = given.answers.resolve(), given.target.resolve(), given.work.resolve()
    setting = Setting(given.python, answers, target, work, given.threads, tuple(given.rows))
    report: dict[str, Any] = {"format": 1}
    if given.only and given.out.is_file():
        report = json.loads(given.out.read_text(encoding="utf-8"))
    tokens = write_rows(setting)
    command = "python -m scripts.compare_speculators --python PYTHON --answers outputs/families/generate"
    facts = {**process_facts(), "device": device_facts(torch.device("cpu")) | {"threads": given.threads}}
    facts["command"] = command
    for part in ("timing", "tau"):
        if given.only not in (None, part):
            continue
        found: dict[str, Any] = {"facts": facts, "places_per_step": PLACES, "tokens": tokens}
        for name in given.kinds:
            if part == "timing":
                found[name] = timing(setting, name, given.warm, given.rounds)
            else:
                found[name] = tau(setting, name, given.steps, given.prompts, given.count, given.tokens)
        report[part] = {**report.get(part, {}), **found}
        write_json(given.out, report)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Compare; returns the exit status."""
    try:
        report = run(parser().parse_args(arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
