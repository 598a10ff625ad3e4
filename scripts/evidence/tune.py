"""Compares the tuner with an exhaustive search, and the traffic simulator with the real decoder.

    python -m scripts.evidence.tune NAME=FOLDER NAME=FOLDER --survey-only
    python -m scripts.evidence.tune NAME=FOLDER NAME=FOLDER
    python -m scripts.evidence.tune --page

For every drafter and batch size, the tuner chooses on validation prompts. Then every draft of the
grid is decoded on other prompts, all taking turns with plain decoding. docs/reports/tune.json has
the choice's loss relative to the best draft of the grid there. It also compares the predicted speed
with the measured one, on the tuner's prompts and on the others, and does the same for the speedup
over plain decoding, which does not change with the machine's pace. The first command measures only
acceptance, for which the machine may be busy; the second needs the machine to itself. Drafters may
be measured one at a time: the report keeps the others. The tables in docs/tuning.md are written
from the report at the end, and by the third command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
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
from inference.decoding.requests import PassRecord, Request
from inference.decoding.session import Session
from inference.kernels.packed_linear import packed_linears
from inference.manifest import file_sha256, write_json
from inference.measure import metrics
from inference.measure.metrics import divide
from inference.measure.profile import prompt_totals
from inference.measure.prompts import Prompt, load_prompts
from inference.report.markdown import markdown_table
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from inference.traffic.advice import Way, seen_by_users
from inference.traffic.arrivals import Arrival
from inference.traffic.server import kept_tokens, measure_prefill, server_costs
from inference.traffic.simulate import Served, simulate
from inference.tune.config import TuneConfig
from inference.tune.survey import Survey, Task
from inference.tune.tuner import Tuner
from scripts.evidence.common import DOCS, Facts, cell, read_json
from scripts.run import drafters
from scripts.tools.common import REPORTS, Section, command, cpu_target

PAGE = DOCS / "tuning.md"
SECTION = Section("tune", "scripts/evidence/tune.py")
GRID = TuneConfig(
    depths=(1, 2, 3, 4, 6),
    nodes=(8,),
    thresholds=(0.3,),
    prompts="assets/prompts/training/validation.jsonl",
    prompts_per_domain=8,
    max_new_tokens=48,
    repeats=5,
    finalists=3,
)
HELD_OUT = {1: 24, 4: 48, 16: 96}
"""Batch size -> number of prompts that every draft answers once; drafts close to the fastest answer
them three times."""
ROWS, REQUESTS, LOAD = 4, 48, 0.7
"""The traffic: rows, requests, and its share of plain decoding's capacity."""


def report(given: argparse.Namespace) -> None:
    """Measure all drafters, writing each as soon as it is done."""
    torch.set_num_threads(given.threads)
    if given.page:
        SECTION.write(PAGE, tables(read_json(given.out)))
        return
    if not given.drafters:
        raise UserError("name at least one drafter as NAME=FOLDER, or give --page.")
    target = cpu_target(given.target)
    for item in given.drafters:
        name, _, folder = item.partition("=")
        tuner = survey(target, Path(folder), given.surveys / f"{name}.json")
        if given.survey_only:
            continue
        found = compare(tuner, given.held_out)
        found["traffic"] = traffic(tuner, given.held_out)
        shared = {
            "target": {"id": target.info.id, "revision": target.info.revision},
            "device": device_facts(target.device),
            "grid": asdict(GRID),
            "held_out": {str(batch): count for batch, count in HELD_OUT.items()},
        }
        content = {"format": 1, "drafters": {}, **read_json(given.out)}
        drop_others(content, json.loads(json.dumps(shared)))
        content |= {**shared, "command": given.command}
        content["drafters"][name] = {"command": given.command, **found}
        write_json(given.out, content)
        SECTION.write(PAGE, tables(content))
        print(tables(content), flush=True)


def drop_others(content: Facts, shared: Facts) -> None:
    """Drop the drafters of an earlier report that were measured under other conditions."""
    if any(content.get(key) != value for key, value in shared.items()):
        content["drafters"] = {}


def survey(target: TargetModel, folder: Path, kept: Path) -> Tuner:
    """A tuner with its acceptance: from `kept`, if that has the same weights and grid, otherwise
    measured."""
    found = drafters.at(folder)
    assert found.checkpoint is not None, "`at` reads a checkpoint"
    config = replace(GRID, batches=tuple(HELD_OUT))
    prompts, drafter = load_prompts(config.prompts), drafters.load(found, target)
    tuner = Tuner.prepare(config, target, drafter, prompts, DecodeConfig(), print)
    weights = file_sha256(found.checkpoint / WEIGHTS_FILE)
    asked = [prompt.to_line() for prompt in prompts]
    key = {"grid": asdict(config) | {"batches": []}, "weights": weights, "prompts": asked}
    key["target"] = target.info.revision
    before = read_json(kept)
    if before.get("key") == json.loads(json.dumps(key)):
        tuner.surveys[0.0] = Survey.from_dict(before["survey"])
    else:
        write_json(kept, {"key": key, "survey": tuner.survey(0.0).to_dict()})
    return tuner


# The tuner


def compare(tuner: Tuner, held_out: Path) -> Facts:
    """Tune, then decode every draft of the grid on other prompts, at every batch size."""
    rows = []
    for row in tuner.tune():
        batch = row["batch_size"]
        print(f"batch size {batch}: chose {row['label']}; running the whole grid", flush=True)
        everything = search_exhaustively(tuner, held_out, batch)
        rows.append({**judge(row, everything), "tuned": row, "exhaustive": everything})
    return {"rows": rows, **{key: value for key, value in tuner.facts().items() if key != "config"}}


def search_exhaustively(tuner: Tuner, held_out: Path, batch: int) -> list[Facts]:
    """Every draft of the grid, decoded on prompts that are new to the tuner, the fastest first.

    Each draft has its speed relative to the fastest, with an interval over prompts. Drafts close to
    the fastest run longer, as the tuner's finalists do.
    """
    prompts = load_prompts(held_out)
    count = per_domain(prompts, HELD_OUT[batch])
    grid = replace(tuner.config, prompts_per_domain=count, rounds=1, close_rounds=2)
    other = Tuner.prepare(grid, tuner.target, tuner.drafter, prompts, tuner.decode)
    turns = other.compare(tuner.survey(0.0).drafts, 0.0, batch)
    found = other.speeds(turns)
    longest = max(row.turns for row in found)
    best = next(row.draft for row in found if row.turns == longest)
    compared: list[Facts] = []
    for row in found:
        taken = turns[row.draft]
        beside = turns[best][: len(taken)]
        own, fastest = prompt_totals(taken, row.draft.depth), prompt_totals(beside, best.depth)
        ratio, interval = metrics.speedup(own, fastest, grid.seed)
        compared.append({**row.to_dict(), "of_best": ratio, "of_best_ci95": list(interval)})
    return sorted(compared, key=lambda row: -float(row["of_best"]))


def per_domain(prompts: Sequence[Prompt], wanted: int) -> int:
    """Number of prompts per domain, for `wanted` in total."""
    return -(-wanted // len({prompt.domain for prompt in prompts}))


def judge(row: Mapping[str, Any], everything: Sequence[Facts]) -> Facts:
    """The loss of the choice relative to the grid's best, and the error of the prediction."""
    here = next(item for item in everything if item["draft"] == row["label"])
    predicted, measured = row["predicted_tokens_per_second"], row["tokens_per_second"]
    low, high = here["of_best_ci95"]
    return {
        "batch_size": row["batch_size"],
        "chosen": row["label"],
        "best": everything[0]["draft"],
        "loss": 1.0 - here["of_best"],
        "loss_ci95": [1.0 - high, 1.0 - low],
        "predicted_tokens_per_second": predicted,
        "measured_tokens_per_second": measured,
        "prediction_error": error(predicted, measured),
        "measured_on_other_prompts": here["tokens_per_second"],
        "prediction_error_on_other_prompts": error(predicted, here["tokens_per_second"]),
    }


def error(predicted: float, measured: float) -> float:
    return divide(predicted, measured) - 1.0


# The page

COLUMNS = (
    ("batch size", "batch_size", "d"),
    ("chosen", "chosen", "s"),
    ("best of the grid", "best", "s"),
    ("loss", "loss", ""),
    ("predicted tokens/s", "predicted_tokens_per_second", ".0f"),
    ("measured", "measured_tokens_per_second", ".0f"),
    ("error", "prediction_error", "+.1%"),
    ("on other prompts", "prediction_error_on_other_prompts", "+.1%"),
    ("predicted speedup", "predicted_speedup", ".2f"),
    ("measured", "measured_speedup", ".2f"),
    ("error", "speedup_error", "+.1%"),
)
"""Title, key and format of the table's columns."""
SIMULATED = ("tokens_per_second", "latency_p50", "latency_p95")


def tables(content: Mapping[str, Any]) -> str:
    """The report as markdown."""
    rows, simulated, errors = [], [], []
    for name, item in content["drafters"].items():
        for row in item["rows"]:
            tuned = row["tuned"]
            predicted = {one["label"]: one["speedup"] for one in tuned["predictions"]}
            expected, measured = predicted[tuned["label"]], tuned["speedup"]
            shown = {**row, "loss": cell(row["loss"], row["loss_ci95"], ".1%")}
            shown |= {"predicted_speedup": expected, "measured_speedup": measured}
            shown["speedup_error"] = error(expected, measured)
            rows.append([name, *(f"{shown[key]:{form}}" for _, key, form in COLUMNS)])
            ran = [one for one in tuned["measured"] if one["draft"] != NONE.label]
            errors += [error(predicted[one["draft"]], one["speedup"]) for one in ran]
        for way in item.get("traffic", {}).get("ways", []):
            shares = [f"{way['error'][key]:+.1%}" for key in SIMULATED]
            simulated.append([name, way["draft"], *shares])
    spread = float(np.std(np.log1p(errors)))
    device = content["device"]
    header = ["drafter", "draft", "tokens/s", "latency p50", "latency p95"]
    lines = [
        *markdown_table(["drafter", *(title for title, _, _ in COLUMNS)], rows),
        "",
        f"Of all {len(errors)} drafts that were checked the speedup was predicted within "
        f"{min(errors):+.1%} to {max(errors):+.1%}, with a standard deviation of {spread:.1%}.",
        "",
        "The simulator against the real decoder, relative error:",
        "",
        *markdown_table(header, simulated),
        "",
        f"On {device['name']}, {device['threads']} thread(s): [tune.json](reports/tune.json), "
        f"by `{content['command']}`.",
    ]
    return "\n".join(["", *lines, ""])


# The simulator


def traffic(tuner: Tuner, held_out: Path) -> Facts:
    """The same arrivals, sent through the real decoder and through the simulator.

    Once without a drafter and once with a short chain.
    """
    costs, known = tuner.step_costs(), tuner.survey(0.0)
    prompts = load_prompts(held_out)
    config = replace(tuner.config, prompts_per_domain=per_domain(prompts, REQUESTS))
    task = Task.of(config, tuner.target, prompts, tuner.decode)
    requests = task.block_requests([list(range(min(REQUESTS, len(task.requests))))])[0]
    lengths = (tuner.task.mean_prompt, tuner.task.longest)
    gaps = np.random.default_rng(0).exponential(1.0, len(requests))
    found, arrivals, times = [], None, list[float]()
    for draft in (NONE, Draft("chain", 2)):
        drafter = None if draft == NONE else tuner.drafter
        prefill = measure_prefill(tuner.target, tuner.drafter, draft, tuner.decode, tuner.task, 5)
        server = server_costs(costs, draft, ROWS, prefill, lengths)
        if not times:
            step = server.step(ROWS, task.longest)
            capacity = divide(ROWS, step * tuner.config.max_new_tokens)
            moments = np.cumsum(gaps) * divide(1.0, LOAD * capacity)
            times = (moments - moments[0]).tolist()
        engine = Engine(tuner.target, drafter, draft.on(replace(tuner.decode, batch_size=ROWS)))
        with packed_linears(tuner.drafter):
            served, arrived = play(engine, requests, times, task.longest)
        arrivals = arrivals or arrived
        kept = kept_tokens(known, draft, tuner.task)
        jobs = Way(draft.label, draft, server, kept, {}).jobs(arrivals, 0)
        real, simulated = seen_by_users(jobs, served), seen_by_users(jobs, simulate(jobs, server))
        speed = error(simulated["tokens_per_second"], real["tokens_per_second"])
        errors = {"tokens_per_second": speed}
        for name, latency in real["latency"].items():
            errors[f"latency_{name}"] = error(simulated["latency"][name], latency)
        results = {"real": real, "simulated": simulated, "error": errors}
        found.append({"draft": draft.label, **results})
    return {"rows": ROWS, "requests": len(requests), "load": LOAD, "ways": found}


def play(
    engine: Engine, requests: Sequence[Request], times: Sequence[float], capacity: int
) -> tuple[list[Served], list[Arrival]]:
    """Submit every request at its time (seconds since the start, ascending) and decode. Returns
    when each was served, and the actual arrivals with the lengths of their answers.
    `requests[i].index` is i."""
    first, end = [0.0] * len(requests), [0.0] * len(requests)
    lengths = [0] * len(requests)
    start = 0.0

    def shown(request: Request, tokens: list[int], record: PassRecord | None) -> None:
        if record is None:
            first[request.index] = time.perf_counter() - start

    with Session(engine, capacity, shown) as session:
        _settle(session, requests[0])
        start, coming = time.perf_counter(), 0
        while coming < len(requests) or session.unfinished:
            now = time.perf_counter() - start
            while coming < len(requests) and times[coming] <= now:
                session.add(requests[coming])
                coming += 1
            if not session.unfinished:
                time.sleep(max(0.0, times[coming] - now))
                continue
            for done in session.step():
                end[done.request.index] = time.perf_counter() - start
                lengths[done.request.index] = len(done.tokens)
    arrivals = [
        Arrival(when, len(request.tokens), length)
        for when, request, length in zip(times, requests, lengths, strict=True)
    ]
    return [Served(*moments) for moments in zip(first, end, strict=True)], arrivals


def _settle(session: Session, request: Request) -> None:
    """Answer a request that does not count, so that buffers and thread pools are created."""
    session.add(request)
    while session.unfinished:
        session.step()


main = command(
    report,
    drafters={"positional": True, "nargs": "*", "metavar": "NAME=FOLDER"},
    target="assets/tiny-target",
    held_out=Path("assets/prompts"),
    surveys=(Path("outputs/tune_report"), "folder of what needs no quiet machine"),
    page=(False, "only write the page's tables"),
    survey_only=False,
    threads=1,
    out=REPORTS / "tune.json",
)

if __name__ == "__main__":
    sys.exit(main())
