"""Which static tree suits a drafter? Searched from the acceptance it showed on some prompts, judged on others (Medusa).

    python -m scripts.search_tree outputs/demo/train/medusa --nodes 26
    HEADSTART_CONF=outputs/trees headstart measure decode=medusa_26 measure.drafters=[outputs/demo/train/medusa]

Chains on validation prompts show at every depth which of the drafter's candidates the target picks; the tree takes the likeliest
nodes first (`inference.tune.tree_search`). It is written as an option of the group `decode`, <out>/decode/<name>.yaml, beside a report
with the rates, the tau that they promise, and the tau of the tree and of a chain on prompts that the search has not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.manifest import write_bytes, write_json
from inference.measure.prompts import Prompt, load_prompts, select_prompts, to_requests
from inference.measure.run import quick_tau
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.tune.tree_search import SearchedTree, measure_ranks, search_tree
from scripts import drafters

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Search, write the option and the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.search_tree", description=__doc__.split("\n")[0])
    parser.add_argument("drafter", type=Path, help="a checkpoint folder, or the folder of a train stage")
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--prompts", type=Path, default=ROOT / "assets" / "prompts" / "training" / "validation.jsonl"
    )
    parser.add_argument("--per-domain", type=int, default=8, help="prompts per domain to search on")
    parser.add_argument(
        "--held-out", type=int, default=8, help="other prompts per domain to judge the tree on"
    )
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--nodes", type=int, default=26, help="nodes of the tree, the root included")
    parser.add_argument("--depth", type=int, default=4, help="its deepest level")
    parser.add_argument("--ranks", type=int, default=10, help="candidates per node that are told apart")
    parser.add_argument("--name", help="of the option; default: the drafter's name and the nodes")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs") / "trees", help="folder for HEADSTART_CONF"
    )
    given = parser.parse_args(arguments)
    command = "python -m scripts.search_tree " + " ".join(sys.argv[1:] if arguments is None else arguments)
    try:
        report = run(given, command)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2))
    return 0


def run(given: argparse.Namespace, command: str) -> dict[str, Any]:
    """Search, judge and write; returns the report."""
    found = drafters.at(given.drafter)
    name = given.name or f"{found.name}_{given.nodes}"
    target = TargetModel.load(TargetConfig(given.target, dtype=given.dtype, device=given.device))
    drafter = drafters.load(found, target)
    chain = DecodeConfig(
        temperature=given.temperature, depth=given.depth, max_new_tokens=given.tokens, batch_size=8
    )
    searched_on, judged_on = two_sets(given, target, chain)
    statistics = measure_ranks(target, drafter, searched_on, chain, given.ranks)
    rates = statistics.accuracy()
    tree = search_tree(rates, given.nodes)
    report = {
        "command": command,
        "kind": found.kind,
        "drafter": str(given.drafter),
        "target": {"id": target.info.id, "revision": target.info.revision},
        "temperature": given.temperature,
        "prompts": {"searched": len(searched_on), "judged": len(judged_on)},
        "tested": statistics.tested,
        "rates": [[round(rate, 4) for rate in level] for level in rates],
        "choices": [list(path) for path in tree.choices],
        "expected_tau": round(tree.tau, 4),
    }
    if judged_on:
        shapes = {"tree": replace(chain, shape="tree", choices=tree.choices), "chain": chain}
        report["judged"] = {
            label: {"tau": round(judged.tau, 4), "tau_ci95": [round(bound, 4) for bound in judged.ci95]}
            for label, decode in shapes.items()
            for judged in [quick_tau(target, drafter, judged_on, decode)]
        }
    write_bytes(given.out / "decode" / f"{name}.yaml", option(tree, found.kind, report).encode("utf-8"))
    write_json(given.out / f"{name}.json", report)
    return report


def two_sets(
    given: argparse.Namespace, target: TargetModel, decode: DecodeConfig
) -> tuple[list[Request], list[Request]]:
    """Requests to search on, and others to judge on (none where the prompts do not suffice, or none were asked for)."""
    everything = load_prompts(given.prompts)
    first = select_prompts(everything, given.per_domain, seed=1)
    taken = {prompt.id for prompt in first}
    left = [prompt for prompt in everything if prompt.id not in taken]
    others = select_prompts(left, given.held_out, seed=2) if left and given.held_out else []

    def requests(prompts: Sequence[Prompt]) -> list[Request]:
        room = target.info.max_position_embeddings - decode.depth - 1
        return to_requests(prompts, target.tokenizer, decode, capacity=room, overlong="skip")

    return requests(first), requests(others)


def option(tree: SearchedTree, kind: str, report: dict[str, Any]) -> str:
    """The text of the decode option."""
    paths = ", ".join("[" + ", ".join(map(str, path)) + "]" for path in tree.choices)
    return (
        f"# A static tree of {len(tree.choices) + 1} nodes, searched for a {kind} drafter: {report['command']}\n"
        f"# Expected tau {report['expected_tau']:.2f} under the measured rates; the report beside it has more.\n"
        f"defaults:\n  - chain\nshape: tree\ntemperature: {report['temperature']:g}\nchoices: [{paths}]\n"
    )


if __name__ == "__main__":
    sys.exit(main())
