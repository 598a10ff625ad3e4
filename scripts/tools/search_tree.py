"""Search for the static tree that suits a drafter, by its acceptance on some prompts.

    python -m scripts.tools.search_tree outputs/demo/train/medusa --nodes 26
    HEADSTART_CONF=outputs/trees headstart measure decode=medusa_26 \\
        measure.drafters=[outputs/demo/train/medusa]

Chains on validation prompts show at every depth which of the drafter's candidates the target picks.
The tree takes the most likely nodes first (`inference.tune.tree_search`; Medusa, 2401.10774). It is
written as an option of the group `decode`, <out>/decode/<name>.yaml. The report contains the rates,
the tau that they predict, and the tau of the tree and of a chain on prompts that the search has not
seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.manifest import write_bytes, write_json
from inference.measure.prompts import Prompt, load_prompts, to_requests
from inference.measure.run import quick_tau
from inference.tune.tree_search import SearchedTree, measure_ranks, search_tree
from scripts.run import drafters
from scripts.tools.common import TARGET, VALIDATION, command, target_of
from scripts.tools.recording import split_prompts


def report(given: argparse.Namespace) -> None:
    """Search, measure the found tree, write and print the report."""
    found = drafters.at(given.drafter)
    name = given.name or f"{found.name}_{given.nodes}"
    target = target_of(given)
    drafter = drafters.load(found, target)
    chain = DecodeConfig(
        temperature=given.temperature, depth=given.depth, max_new_tokens=given.tokens, batch_size=8
    )

    def requests(prompts: Sequence[Prompt]) -> list[Request]:
        room = target.info.max_position_embeddings - chain.depth - 1
        return to_requests(prompts, target.tokenizer, chain, capacity=room, overlong="skip")

    parts = split_prompts(load_prompts(given.prompts), given.per_domain, given.held_out)
    searched_on, judged_on = map(requests, parts)
    statistics = measure_ranks(target, drafter, searched_on, chain, given.ranks)
    rates = statistics.accuracy()
    tree = search_tree(rates, given.nodes)
    content: dict[str, Any] = {
        "command": given.command,
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
        content["judged"] = {}
        for label, decode in shapes.items():
            judged = quick_tau(target, drafter, judged_on, decode)
            interval = [round(bound, 4) for bound in judged.ci95]
            content["judged"][label] = {"tau": round(judged.tau, 4), "tau_ci95": interval}
    write_bytes(given.out / "decode" / f"{name}.yaml", option(tree, content).encode())
    write_json(given.out / f"{name}.json", content)
    print(json.dumps(content, indent=2))


def option(tree: SearchedTree, content: dict[str, Any]) -> str:
    paths = ", ".join("[" + ", ".join(map(str, path)) + "]" for path in tree.choices)
    nodes, kind = len(tree.choices) + 1, content["kind"]
    return (
        f"# A static tree of {nodes} nodes, searched for a {kind} drafter: {content['command']}\n"
        f"# Expected tau {content['expected_tau']:.2f} under the measured rates.\n"
        f"defaults:\n  - chain\nshape: tree\ntemperature: {content['temperature']:g}\n"
        f"choices: [{paths}]\n"
    )


main = command(
    report,
    drafter={
        "positional": True,
        "type": Path,
        "help": "a checkpoint folder, or the folder of a train stage",
    },
    target=str(TARGET),
    dtype="float32",
    device="auto",
    prompts=VALIDATION,
    per_domain=(8, "prompts per domain to search on"),
    held_out=(8, "other prompts per domain to judge the tree on"),
    tokens=(96, "new tokens per prompt"),
    temperature=0.0,
    nodes=(26, "nodes of the tree, the root included"),
    depth=(4, "its deepest level"),
    ranks=(10, "candidates per node that are distinguished"),
    name={"help": "of the option; default: the drafter's name and the nodes"},
    out=(Path("outputs") / "trees", "folder for HEADSTART_CONF"),
)

if __name__ == "__main__":
    sys.exit(main())
