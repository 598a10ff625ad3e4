"""The tuner against an exhaustive search, and the traffic simulator against the real decoder: docs/reports/tune.json.

    python -m scripts.tune_report distilled=<folder> eagle3_copied=<folder> --surveys outputs/tune_report --survey-only
    python -m scripts.tune_report distilled=<folder> eagle3_copied=<folder> --surveys outputs/tune_report
    python -m scripts.tune_report --page

For every drafter and batch size the tuner chooses on validation prompts; then every draft of the grid is decoded on other prompts,
all taking turns with plain decoding. Reported are the choice's loss against the best of the grid there, and the predicted speed
against the measured one: on the tuner's own prompts, and on the others; and the same for the speedup over plain decoding, which
does not change with the machine's pace. The first command measures acceptance alone, which a busy
machine can do as well; the second needs the machine to itself. Drafters may be measured one at a time: the report keeps the others.
The tables in docs/tuning.md are written from the report at the end, and by the third command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heads.api.checkpoint import WEIGHTS_FILE
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft
from inference.decoding.engine import Engine
from inference.kernels.packed_linear import packed_linears
from inference.manifest import file_sha256, write_bytes, write_json
from inference.measure import metrics
from inference.measure.metrics import divide
from inference.measure.prompts import load_prompts
from inference.target.hardware import device_facts
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.traffic.advice import Way, seen_by_users
from inference.traffic.play import play
from inference.traffic.server import kept_tokens, measure_prefill, server_costs
from inference.traffic.simulate import simulate
from inference.tune.config import TuneConfig
from inference.tune.survey import Survey, Task
from inference.tune.tuner import Tuner, summed
from scripts import drafters

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tuning.md"
BEGIN, END = "<!-- tune: written by scripts/tune_report.py -->", "<!-- end of tune -->"
GRID = TuneConfig(
    depths=(1, 2, 3, 4, 6),
    nodes=(8,),
    thresholds=(0.3,),
    prompts="assets/prompts/training/validation.jsonl",
    prompts_per_domain=8,
    max_new_tokens=48,
    repeats=7,
    finalists=3,
)
HELD_OUT = {1: 48, 4: 96, 16: 192}
"""Batch size -> other prompts that every draft answers once, and those close to the fastest three times."""
ROWS, REQUESTS, LOAD = 4, 48, 0.7
"""The played traffic: rows, requests, and the share of plain decoding's capacity that it asks for."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.tune_report", description=__doc__.split("\n")[0])
    parser.add_argument("drafters", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--target", default="assets/tiny-target")
    parser.add_argument("--held-out", type=Path, default=Path("assets/prompts"))
    parser.add_argument("--surveys", type=Path, default=Path("outputs/tune_report"), help="keeps what needs no quiet machine")
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, default=None, help="only write the tables of a page")
    parser.add_argument("--survey-only", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=list(HELD_OUT))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-traffic", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "tune.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    if not given.drafters and given.page is None:
        parser.error("name at least one drafter, or --page")
    try:
        run(given, "python -m scripts.tune_report " + " ".join(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(given: argparse.Namespace, command: str) -> None:
    """All drafters, each written down as soon as it is done."""
    if not given.drafters:
        write_page(given.page, read(given.out))
        return
    target = TargetModel.load(TargetConfig(path=given.target, dtype="float32", device="cpu"))
    for item in given.drafters:
        name, _, folder = item.partition("=")
        tuner = surveyed(target, Path(folder), given.surveys / f"{name}.json", tuple(given.batches))
        if given.survey_only:
            continue
        report = read(given.out)
        found = measured(tuner, given.held_out)
        if not given.no_traffic:
            found["traffic"] = played(tuner, given.held_out)
        report |= {
            "format": 1,
            "target": {"id": target.info.id, "revision": target.info.revision},
            "device": device_facts(target.device),
            "grid": asdict(GRID),
            "held_out": {str(batch): count for batch, count in HELD_OUT.items()},
        }
        report.setdefault("drafters", {})[name] = {"command": command, **found}
        report["command"] = command
        report["summary"] = summary(report["drafters"])
        write_json(given.out, report)
        write_page(given.page or PAGE, report)
        print(json.dumps(report["summary"][name], indent=1), flush=True)


def read(path: Path) -> dict[str, Any]:
    """The report so far; empty where there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def surveyed(target: TargetModel, folder: Path, kept: Path, batches: tuple[int, ...]) -> Tuner:
    """A tuner that knows its acceptance: from `kept`, if that is of the same weights and grid, else measured now."""
    found = drafters.at(folder)
    assert found.checkpoint is not None, "`at` reads a checkpoint"
    config = replace(GRID, batches=batches)
    tuner = Tuner.prepare(
        config, target, drafters.load(found, target), load_prompts(config.prompts), DecodeConfig(),
        lambda line: print(line, flush=True),
    )  # fmt: skip
    key = {"grid": asdict(config) | {"batches": []}, "weights": file_sha256(found.checkpoint / WEIGHTS_FILE)}
    before = read(kept)
    if before.get("key") == json.loads(json.dumps(key)):
        tuner.surveys[0.0] = Survey.from_dict(before["survey"])
    else:
        write_json(kept, {"key": key, "survey": tuner.survey(0.0).to_dict()})
    return tuner


# ---- the tuner ---------------------------------------------------------------------------------------------------------------


def measured(tuner: Tuner, held_out: Path) -> dict[str, Any]:
    """Tune, then decode every draft of the grid on other prompts, at every batch size."""
    rows = []
    for row in tuner.tune():
        batch = row["batch_size"]
        print(f"batch size {batch}: chose {row['label']}; running the whole grid", flush=True)
        everything = exhaustive(tuner, held_out, batch)
        rows.append({**judged(row, everything), "tuned": row, "exhaustive": everything})
    return {"rows": rows, **{key: value for key, value in tuner.facts().items() if key != "config"}}


def exhaustive(tuner: Tuner, held_out: Path, batch: int) -> list[dict[str, Any]]:
    """Every draft of the grid on prompts that the tuner has not seen, the fastest first; and each one's speed relative to the
    fastest, with an interval over blocks. Those close to the fastest run longer, as the tuner's finalists do.
    """
    grid = replace(tuner.config, prompts_per_domain=-(-HELD_OUT[batch] // 3), rounds=1, close_rounds=2)
    other = Tuner.prepare(grid, tuner.target, tuner.drafter, load_prompts(held_out), tuner.decode)
    turns = other.compared(tuner.survey(0.0).drafts, 0.0, batch)
    found = other.measured(turns)
    longest = max(row["turns"] for row in found)
    best = next(row["draft"] for row in found if row["turns"] == longest)
    for row in found:
        draft = row["draft"]
        taken = turns[draft]
        ratio, interval = metrics.speedup(summed(draft, taken), summed(best, turns[best][: len(taken)]), grid.seed)
        row |= {"draft": draft.label, "of_best": ratio, "of_best_ci95": list(interval)}
    return sorted(found, key=lambda row: -float(row["of_best"]))


def judged(row: Mapping[str, Any], everything: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the judge asks: the loss of the choice against the grid's best, and how far the prediction is off."""
    by_draft = {item["draft"]: item for item in everything}
    here = by_draft[row["label"]]
    return {
        "batch_size": row["batch_size"],
        "chosen": row["label"],
        "best": everything[0]["draft"],
        "loss": 1.0 - here["of_best"],
        "loss_ci95": [1.0 - here["of_best_ci95"][1], 1.0 - here["of_best_ci95"][0]],
        "predicted_tokens_per_second": row["predicted_tokens_per_second"],
        "measured_tokens_per_second": row["tokens_per_second"],
        "prediction_error": divide(row["predicted_tokens_per_second"], row["tokens_per_second"]) - 1.0,
        "measured_on_other_prompts": here["tokens_per_second"],
        "prediction_error_on_other_prompts": divide(row["predicted_tokens_per_second"], here["tokens_per_second"]) - 1.0,
    }


def speedups(row: Mapping[str, Any]) -> dict[str, float]:
    """The chosen draft's speedup over plain decoding, predicted and measured: it does not change with the machine's pace."""
    expected = next(item["speedup"] for item in row["predictions"] if item["label"] == row["label"])
    return {
        "predicted_speedup": expected,
        "measured_speedup": row["speedup"],
        "speedup_error": divide(expected, row["speedup"]) - 1.0,
    }


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per drafter what `judged` says, and the traffic's errors, without the details."""
    kept: dict[str, Any] = {}
    for name, item in found.items():
        rows = [
            {key: value for key, value in row.items() if key not in ("tuned", "exhaustive")} | speedups(row["tuned"])
            for row in item["rows"]
        ]
        kept[name] = {"rows": rows}
        if "traffic" in item:
            kept[name]["traffic_errors"] = {way["draft"]: way["error"] for way in item["traffic"]["ways"]}
    return kept


# ---- the page ----------------------------------------------------------------------------------------------------------------


def write_page(page: Path, report: Mapping[str, Any]) -> None:
    """Put the report's tables between the page's marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    if not after:
        raise UserError(f"'{page}' has no place for the tables: the lines '{BEGIN}' and '{END}'.")
    write_bytes(page, "\n".join([before + BEGIN, "", *tables(report), "", END + after]).encode("utf-8"))


def tables(report: Mapping[str, Any]) -> list[str]:
    """The report as markdown."""
    lines = [
        "| drafter | batch size | chosen | best of the grid | loss | predicted tokens/s | measured | error | on other prompts | "
        "predicted speedup | measured | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, item in report["summary"].items():
        for row in item["rows"]:
            low, high = row["loss_ci95"]
            lines.append(
                f"| {name} | {row['batch_size']} | {row['chosen']} | {row['best']} | {row['loss']:.1%} [{low:.1%}, {high:.1%}] | "
                f"{row['predicted_tokens_per_second']:.0f} | {row['measured_tokens_per_second']:.0f} | "
                f"{row['prediction_error']:+.1%} | {row['prediction_error_on_other_prompts']:+.1%} | "
                f"{row['predicted_speedup']:.2f} | {row['measured_speedup']:.2f} | {row['speedup_error']:+.1%} |"
            )
    errors = finalists(report)
    lines += [
        "",
        f"Of all {len(errors)} drafts that were checked the speedup was predicted within {min(errors):+.1%} to {max(errors):+.1%}, "
        f"with a standard deviation of {float(np.std(np.log1p(errors))):.1%}.",
    ]
    lines += ["", "The simulator against the real decoder, relative error:", ""]
    lines += ["| drafter | draft | tokens/s | latency p50 | latency p95 |", "|---|---|---|---|---|"]
    for name, item in report["summary"].items():
        for draft, error in item.get("traffic_errors", {}).items():
            values = " | ".join(f"{error[key]:+.1%}" for key in ("tokens_per_second", "latency_p50", "latency_p95"))
            lines.append(f"| {name} | {draft} | {values} |")
    device = report["device"]
    where = f"On {device['name']}, {device['threads']} thread(s)"
    return [*lines, "", f"{where}: [tune.json](reports/tune.json), by `{report['command']}`."]


def finalists(report: Mapping[str, Any]) -> list[float]:
    """Relative errors of the predicted speedups of all drafts that the tuner ran, plain decoding excepted."""
    found = []
    for item in report["drafters"].values():
        for row in item["rows"]:
            expected = {one["label"]: one["speedup"] for one in row["tuned"]["predictions"]}
            ran = [one for one in row["tuned"]["measured"] if one["draft"] != NONE.label]
            found += [divide(expected[one["draft"]], one["speedup"]) - 1.0 for one in ran]
    return found


# ---- the simulator -----------------------------------------------------------------------------------------------------------


def played(tuner: Tuner, held_out: Path) -> dict[str, Any]:
    """The same arrivals through the real decoder and through the simulator, without drafter and with the best short chain."""
    costs, survey = tuner.step_costs(), tuner.survey(0.0)
    tokens = replace(tuner.config, prompts_per_domain=-(-REQUESTS // 3))
    task = Task.of(tokens, tuner.target, load_prompts(held_out), tuner.decode)
    requests = task.block_requests([list(range(min(REQUESTS, len(task.requests))))])[0]
    lengths = (tuner.task.mean_prompt, tuner.task.longest)
    rng, found, times = np.random.default_rng(0), [], list[float]()
    arrivals = None
    for draft in (NONE, Draft("chain", 2)):
        prefill = measure_prefill(tuner.target, tuner.drafter, draft, tuner.decode, tuner.task, 5)
        server = server_costs(costs, draft, ROWS, prefill, lengths)
        if not times:
            capacity = divide(ROWS, server.step(ROWS, task.longest) * tuner.config.max_new_tokens)
            times = (np.cumsum(rng.exponential(1.0, len(requests))) * divide(1.0, LOAD * capacity)).tolist()
            times = [moment - times[0] for moment in times]
        engine = Engine(tuner.target, None if draft == NONE else tuner.drafter, draft.on(replace(tuner.decode, batch_size=ROWS)))
        with packed_linears(tuner.drafter):
            served, arrived = play(engine, requests, times, task.longest)
        arrivals = arrivals or arrived
        way = Way(draft.label, draft, server, kept_tokens(survey, draft, tuner.task), {})
        jobs = way.jobs(arrivals, 0)
        real, simulated = seen_by_users(jobs, served), seen_by_users(jobs, simulate(jobs, server))
        error = {
            "tokens_per_second": divide(simulated["tokens_per_second"], real["tokens_per_second"]) - 1.0,
            **{f"latency_{name}": divide(simulated["latency"][name], real["latency"][name]) - 1.0 for name in real["latency"]},
        }
        found.append({"draft": draft.label, "real": real, "simulated": simulated, "error": error})
    return {"rows": ROWS, "requests": len(requests), "load": LOAD, "ways": found}


if __name__ == "__main__":
    sys.exit(main())
