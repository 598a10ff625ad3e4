"""Measure what makes a dynamic tree good, on drafters of a small target.

    python -m scripts.tools.rank_trees eagle3=FOLDER medusa=FOLDER --per-domain 8 --tokens 96

The folders hold drafters of the embedded target, as `make demo` trains them
(outputs/demo/train/<kind>/best). Three questions, three parts of docs/reports/tree_ranking.json:

* `rankings`: by what nodes should be compared (`heads.api.tree.Ranking`), with the target's noise
  shared and at temperature 0;
* `shapes`: the accepted length of dynamic trees, of a chain, and of a searched static tree of the
  same depth;
* `rules`: with shared noise the plain `match` rule needs no draft probabilities; what rejection
  rules accept on the same chains.

The first two replay: the match rule never changes the text, so the target decodes every prompt once
and gives its states once, and any shape is then followed along the known text. That is the accepted
length of decoding, exactly, without the target's passes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from heads.api.checkpoint import load_drafter
from heads.api.tree import DraftShape, DynamicShape, Ranking, TokenTree
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion
from inference.manifest import write_json
from inference.measure import metrics
from inference.measure.metrics import Outcome, Totals
from inference.measure.prompts import Prompt, load_prompts, to_requests
from inference.target.model import TargetModel
from inference.tune.replay import Replay
from inference.tune.tree_search import measure_ranks, search_tree
from scripts.tools.common import PROMPTS, ROOT, TARGET, add_options, make_parser, run
from scripts.tools.recording import cpu_target, split_prompts

DEPTH = 4
TEMPERATURES = (0.0, 1.0)
SIZES = ((17, 8), (26, 8))
"""Nodes and width of the measured trees."""
PARTS = ("rankings", "shapes", "rules")
VALIDATION = 4
"""Other prompts per domain, on which static trees are searched."""


class TauRow(TypedDict, total=False):
    """tau with its interval; expected_tau: of a searched tree, under the measured rates."""

    tau: float
    ci95: list[float]
    passes: int
    expected_tau: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the report; returns the exit status."""
    parser = make_parser("scripts.tools.rank_trees", __doc__)
    parser.add_argument("drafters", nargs="+", metavar="NAME=FOLDER")
    add_options(parser, target=str(TARGET), prompts=PROMPTS, per_domain=12, tokens=128)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rules", nargs="+", default=["match", "rejection", "block"])
    out = ROOT / "docs" / "reports" / "tree_ranking.json"
    parser.add_argument("--out", type=Path, default=out)
    return run(parser, report, arguments)


def report(given: argparse.Namespace) -> None:
    """Measure, write and print; parts and drafters of an earlier report stay."""
    content: dict[str, Any] = {**measure(given), "command": given.command}
    if given.out.exists():
        before = json.loads(given.out.read_text(encoding="utf-8"))
        for part in PARTS:
            if part in before:
                content[part] = {**before[part], **content.get(part, {})}
    write_json(given.out, content)
    print(json.dumps(content, indent=2))


def measure(given: argparse.Namespace) -> dict[str, object]:
    """All parts asked for, per drafter."""
    target = cpu_target(given.target)
    everything = load_prompts(given.prompts)
    prompts, validation = split_prompts(everything, given.per_domain, VALIDATION)
    drafters = {}
    for item in given.drafters:
        name, _, folder = item.partition("=")
        drafters[name] = load_drafter(Path(folder), target.info, target.weights).eval()
    texts = {}
    if {"rankings", "shapes"} & set(given.parts):
        texts = {x: decode_plainly(target, prompts, x, given.tokens) for x in TEMPERATURES}
    content = {"prompts": len(prompts), "max_new_tokens": given.tokens, "depth": DEPTH}
    parts = dict[str, dict[str, object]]()
    for part in given.parts:
        parts[part] = {}
        for name, drafter in drafters.items():
            if part == "rules":
                parts[part][name] = rules(target, drafter, prompts, given.rules, given.tokens)
                continue
            replays = {x: Replay(target, drafter, written, x) for x, written in texts.items()}
            parts[part][name] = {
                f"temperature {x:g}": rankings(one)
                if part == "rankings"
                else shapes(one, validation)
                for x, one in replays.items()
            }
    return content | parts


def decode_plainly(
    target: TargetModel, prompts: Sequence[Prompt], temperature: float, tokens: int
) -> list[Completion]:
    """The target's own answers, in the order of the prompts."""
    decode = DecodeConfig(
        temperature=temperature, shape="none", max_new_tokens=tokens, batch_size=12
    )
    requests = to_requests(prompts, target.tokenizer, decode)
    return sorted(Engine(target, None, decode).run(requests), key=lambda item: item.request.index)


def rankings(replay: Replay) -> dict[str, dict[str, TauRow]]:
    """Every ranking at every size."""
    return {
        f"{nodes} nodes, width {width}": {
            ranking.value: tau(replay, DynamicShape(nodes, DEPTH, width, ranking))
            for ranking in Ranking
        }
        for nodes, width in SIZES
    }


def shapes(replay: Replay, validation: Sequence[Prompt]) -> dict[str, TauRow]:
    """A chain, a static tree searched on other prompts, and dynamic trees, all of one depth."""
    found = {"chain": tau(replay, TokenTree.chain(DEPTH))}
    decode = DecodeConfig(temperature=replay.temperature, depth=DEPTH, max_new_tokens=64)
    requests = to_requests(validation, replay.target.tokenizer, decode)
    accuracy = measure_ranks(replay.target, replay.drafter, requests, decode).accuracy()
    for nodes, width in SIZES:
        searched = search_tree(accuracy, nodes)
        static = tau(replay, TokenTree.from_choices(searched.choices))
        static["expected_tau"] = round(searched.tau, 4)
        found[f"searched, {nodes} nodes"] = static
        found[f"dynamic, {nodes} nodes"] = tau(replay, DynamicShape(nodes, DEPTH, width))
    return found


def rules(
    target: TargetModel, drafter: Any, prompts: Sequence[Prompt], names: Sequence[str], tokens: int
) -> dict[str, TauRow]:
    """Chains at temperature 1 under several acceptance rules; `match` also without shared noise."""
    base = DecodeConfig(temperature=1.0, depth=DEPTH, max_new_tokens=tokens, batch_size=8)
    settings = {name: replace(base, rule=name) for name in names}
    if "match" in settings:
        settings["match, own noise"] = replace(base, rule="match", share_noise=False)
    found = {}
    for label, decode in settings.items():
        requests = to_requests(prompts, target.tokenizer, decode)
        done = Engine(target, drafter, decode).run(requests)
        outcomes = [Outcome(str(item.request.index), "", item.passes) for item in done]
        found[label] = estimate(outcomes)
    return found


def tau(replay: Replay, shape: DraftShape) -> TauRow:
    """tau of decoding the replayed texts with drafts of a shape."""
    return estimate(replay.outcomes(shape), shape.max_depth)


def estimate(outcomes: list[Outcome], depth: int = DEPTH) -> TauRow:
    """tau with its interval, as reports hold them."""
    outcomes.sort(key=lambda outcome: int(outcome.prompt))
    found = metrics.tau_estimate(Totals.collect(outcomes, depth))
    interval = [round(bound, 4) for bound in found.ci95]
    return {"tau": round(found.tau, 4), "ci95": interval, "passes": found.verify_passes}


if __name__ == "__main__":
    sys.exit(main())
