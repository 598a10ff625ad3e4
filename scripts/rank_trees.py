"""What makes a dynamic tree good? Measured on drafters of a small target.

    python -m scripts.rank_trees eagle3=FOLDER medusa=FOLDER distilled=FOLDER --per-domain 8 --tokens 96

The folders hold drafters of the embedded target, as `make demo` trains them (outputs/demo/train/<kind>/best). Three
questions, three parts of docs/reports/tree_ranking.json:

* `rankings`: by what should nodes be compared (`heads.api.tree.Ranking`), with the target's noise shared and
  at temperature 0;
* `shapes`: the accepted length of dynamic trees beside a chain and a searched static tree of the same depth;
* `rules`: with shared noise the plain `match` rule needs no draft probabilities; what do rejection rules
  accept on the same chains?

The first two replay: the match rule never changes the text, so the target decodes every prompt once and gives
its states once, and any shape is then walked along the known text. That is the accepted length of decoding,
exactly, without the target's passes.

Legend: B prompts, N nodes, T positions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from heads.api.tree import DraftShape, DynamicShape, Ranking, TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.measure import metrics
from inference.measure.metrics import Outcome, Totals
from inference.measure.prompts import Prompt, load_prompts, select_prompts, to_requests
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.tune.replay import Replay
from inference.tune.tree_search import measure_ranks, search_tree

ROOT = Path(__file__).resolve().parent.parent
DEPTH = 4
TEMPERATURES = (0.0, 1.0)
SIZES = ((17, 8), (26, 8))
"""Nodes and width of the measured trees."""
PARTS = ("rankings", "shapes", "rules")
VALIDATION = 4
"""Prompts per domain that static trees are searched on; they are not among the measured ones."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.rank_trees", description=__doc__.split("\n")[0])
    parser.add_argument("drafters", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument("--prompts", type=Path, default=ROOT / "assets" / "prompts")
    parser.add_argument("--per-domain", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rules", nargs="+", default=["match", "rejection", "block"])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "tree_ranking.json")
    given = parser.parse_args(arguments)
    try:
        report = measure(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    report["command"] = "python -m scripts.rank_trees " + " ".join(arguments or sys.argv[1:])
    if given.out.exists():  # parts and drafters may be measured one at a time
        before = json.loads(given.out.read_text(encoding="utf-8"))
        for part in PARTS:
            if part in before:
                report[part] = before[part] | report.get(part, {})
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All parts asked for, per drafter."""
    target = TargetModel.load(TargetConfig(path=given.target, dtype="float32", device="cpu"))
    everything = load_prompts(given.prompts)
    prompts = select_prompts(everything, given.per_domain, seed=1)
    folders = dict(item.split("=", 1) for item in given.drafters)
    drafters = {
        name: load_drafter(Path(folder), target.info, target.weights).eval()
        for name, folder in folders.items()
    }
    report: dict[str, Any] = {"prompts": len(prompts), "max_new_tokens": given.tokens, "depth": DEPTH}
    measured = {item.id for item in prompts}
    validation = select_prompts([item for item in everything if item.id not in measured], VALIDATION, seed=2)
    texts = {
        temperature: write(target, prompts, temperature, given.tokens)
        for temperature in (TEMPERATURES if {"rankings", "shapes"} & set(given.parts) else ())
    }
    for part in given.parts:
        if part == "rules":
            report[part] = {
                name: rules(target, drafter, prompts, given.rules, given.tokens)
                for name, drafter in drafters.items()
            }
        else:
            report[part] = {name: {} for name in drafters}
            for name, drafter in drafters.items():
                for temperature, written in texts.items():
                    replay = Replay(target, drafter, written, temperature)
                    found = rankings(replay) if part == "rankings" else shapes(replay, validation)
                    report[part][name][f"temperature {temperature:g}"] = found
    return report


def write(
    target: TargetModel, prompts: Sequence[Prompt], temperature: float, tokens: int
) -> list[Completion]:
    """The target's own answers, in the order of the prompts."""
    decode = DecodeConfig(temperature=temperature, shape="none", max_new_tokens=tokens, batch_size=12)
    requests = to_requests(prompts, target.tokenizer, decode)
    return sorted(Engine(target, None, decode).run(requests), key=lambda item: item.request.index)


def rankings(replay: Replay) -> dict[str, Any]:
    """Every ranking at every size."""
    return {
        f"{nodes} nodes, width {width}": {
            ranking.value: tau(replay, DynamicShape(nodes, DEPTH, width, ranking)) for ranking in Ranking
        }
        for nodes, width in SIZES
    }


def shapes(replay: Replay, validation: Sequence[Prompt]) -> dict[str, Any]:
    """A chain, a static tree searched on other prompts, and dynamic trees, all of one depth."""
    found = {"chain": tau(replay, TokenTree.chain(DEPTH))}
    decode = DecodeConfig(temperature=replay.temperature, depth=DEPTH, max_new_tokens=64)
    requests = to_requests(validation, replay.target.tokenizer, decode)
    accuracy = measure_ranks(replay.target, replay.drafter, requests, decode).accuracy()
    for nodes, width in SIZES:
        searched = search_tree(accuracy, nodes)
        found[f"searched, {nodes} nodes"] = tau(replay, TokenTree.from_choices(searched.choices)) | {
            "expected_tau": round(searched.tau, 4)
        }
        found[f"dynamic, {nodes} nodes"] = tau(replay, DynamicShape(nodes, DEPTH, width))
    return found


def rules(
    target: TargetModel, drafter: Any, prompts: Sequence[Prompt], names: Sequence[str], tokens: int
) -> dict[str, Any]:
    """Chains at temperature 1 under several acceptance rules; `match` with the shared noise and without."""
    settings: dict[str, dict[str, Any]] = {name: {"rule": name} for name in names}
    if "match" in settings:
        settings["match, own noise"] = {"rule": "match", "share_noise": False}
    found = {}
    for label, changes in settings.items():
        decode = DecodeConfig(temperature=1.0, depth=DEPTH, max_new_tokens=tokens, batch_size=8, **changes)
        done = Engine(target, drafter, decode).run(to_requests(prompts, target.tokenizer, decode))
        found[label] = estimate([Outcome(str(item.request.index), "", item.passes) for item in done])
    return found


def tau(replay: Replay, shape: DraftShape) -> dict[str, Any]:
    """tau of decoding the replayed texts with drafts of a shape."""
    return estimate(replay.outcomes(shape), shape.max_depth)


def estimate(outcomes: list[Outcome], depth: int = DEPTH) -> dict[str, Any]:
    """tau with its interval, as reports hold them."""
    outcomes.sort(key=lambda outcome: int(outcome.prompt))
    found = metrics.tau_estimate(Totals.collect(outcomes, depth))
    return {
        "tau": round(found.tau, 4),
        "ci95": [round(bound, 4) for bound in found.ci95],
        "passes": found.verify_passes,
    }


if __name__ == "__main__":
    sys.exit(main())
