"""Search for the target's layers that should draft for it, on a domain's prompts.

    python -m scripts.tools.search_layers --evaluations 60 --out outputs/layers
    python -m scripts.tools.search_layers --domain code --sublayers
    python -m scripts.tools.search_layers --kind distilled   # where a distilled one starts
    HEADSTART_CONF=outputs/layers headstart measure measure.kinds=[early_exit_layers]

Sets of layers are tried by decoding (`scripts.tools.layers.search`). The search begins with the
sets that remain when whole layers are removed one after another
(`scripts.tools.layers.elimination`). The best set by tau / (1 + gamma c), with c the share of the
target's weights that a drafted token reads (or the best by tau within a largest c), is written as
an option of the group `head`, <out>/head/<kind>_layers.yaml, with a report of every trial. The
result is judged on prompts other than those of the search; both are prompts for validation unless
others are given, so that a measurement has prompts that the search has not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads.api.checkpoint import build_config, new_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.manifest import write_bytes, write_json
from inference.measure.prompts import Prompt, load_prompts, to_requests
from inference.measure.run import quick_tau
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.tools.common import TARGET, VALIDATION, command
from scripts.tools.layers.elimination import Divergence, nested_sets
from scripts.tools.layers.search import (
    OBJECTIVES,
    Chosen,
    SearchConfig,
    SearchResult,
    SkippablePart,
    ideal_speedup,
    parts_of,
    search_layers,
)
from scripts.tools.recording import split_prompts

SETTING = {"early_exit": "layers", "quantized_self": "layers", "distilled": "from_target_layers"}
"""Kinds that are built from the target's layers -> the setting that names the layers."""


def report(given: argparse.Namespace) -> None:
    """Search, write head/<kind>_layers.yaml and report.json, and print the report."""
    content = {**search(given), "command": given.command}
    lines = [f"# SearchResult by: {given.command}", f"kind: {given.kind}"]
    lines += [f"{name}: {value}" for name, value in content["head"].items() if value]
    file = given.out / "head" / f"{given.kind}_layers.yaml"
    write_bytes(file, ("\n".join(lines) + "\n").encode())
    write_json(given.out / "report.json", content)
    shown = {key: value for key, value in content.items() if key != "trials"}
    print(json.dumps(shown, indent=2))


def search(given: argparse.Namespace) -> dict[str, Any]:
    """The search and its check on held-out prompts."""
    kind, depth = given.kind, given.depth
    if given.sublayers and kind != "early_exit":
        raise UserError(
            f"--sublayers goes with --kind early_exit: kind '{kind}' takes whole layers."
        )
    target = TargetModel.load(TargetConfig(given.target, dtype=given.dtype, device=given.device))
    parts, head_cost = parts_of(target, given.sublayers)
    prompts = load_prompts(given.prompts)
    if given.domain is not None:
        domains = sorted({prompt.domain for prompt in prompts})
        prompts = [prompt for prompt in prompts if prompt.domain == given.domain]
        if not prompts:
            known = ", ".join(domains)
            raise UserError(f"there are no prompts of domain '{given.domain}'; there are: {known}.")
    searched, unseen = split_prompts(prompts, given.per_domain, given.held_out)
    decode = DecodeConfig(
        temperature=given.temperature,
        depth=depth,
        max_new_tokens=given.tokens,
        batch_size=len(searched),
    )

    def tau(kept: Chosen, prompts: Sequence[Prompt]) -> float:
        config = build_config(kind, settings(kind, parts, kept))
        drafter = new_drafter(kind, config, target.info, target.weights, given.seed)
        requests = to_requests(prompts, target.tokenizer, decode)
        return quick_tau(target, drafter, requests, decode).tau

    def tried(kept: Chosen) -> float:
        found = tau(kept, searched)
        print(f"{settings(kind, parts, kept)}: tau {found:.3f}", file=sys.stderr)
        return found

    limits = (given.most_cost, given.objective, given.seed)
    config = SearchConfig(given.evaluations, depth, head_cost, *limits)
    first: list[Chosen] = []
    if not given.sublayers:
        requests = to_requests(searched, target.tokenizer, decode)
        first = eliminated(target, requests, decode)
    found = search_layers(parts, tried, config, first)
    return {
        "target": target.info.id,
        "kind": kind,
        "head": settings(kind, parts, found.best.kept),
        "searched_on": [prompt.id for prompt in searched],
        "held_out_prompts": len(unseen),
        "held_out": judge(found, lambda kept: tau(kept, unseen), config) if unseen else {},
        "search": asdict(config),
        "trials": [
            settings(kind, found.parts, trial.kept)
            | rounded(cost=trial.cost, tau=trial.tau, ideal_speedup=trial.speedup)
            for trial in found.trials
        ],
    }


def eliminated(
    target: TargetModel, requests: Sequence[Request], decode: DecodeConfig
) -> list[Chosen]:
    """The sets that elimination finds on the target's answers to the requests, the smaller ones
    first. These are the sets that a search looks for."""
    done = Engine(target, None, decode.without_draft()).run(requests)
    documents = [[*item.request.tokens, *item.tokens] for item in done]
    layers = target.info.num_layers
    found = nested_sets(layers, Divergence(target, documents))
    return [tuple(one in kept for one in range(layers)) for kept in reversed(found)]


def rounded(**values: float) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def settings(kind: str, parts: Sequence[SkippablePart], kept: Chosen) -> dict[str, Any]:
    """The head's settings for a set of parts."""
    chosen = [part for part, keep in zip(parts, kept, strict=True) if keep]
    layers = sorted({part.layer for part in chosen})
    values: dict[str, Any] = {SETTING[kind]: layers}
    if any(part.what != "layer" for part in parts):
        there = {(part.layer, part.what) for part in chosen}
        for what in ("attention", "mlp"):
            values[f"without_{what}"] = [layer for layer in layers if (layer, what) not in there]
    return values


def judge(
    found: SearchResult, tau: Callable[[Chosen], float], config: SearchConfig
) -> dict[str, Any]:
    """The found set on held-out prompts, and two sets of no higher cost that need no search."""
    layers = max(part.layer for part in found.parts) + 1

    def cost(kept: Chosen) -> float:
        chosen = zip(found.parts, kept, strict=True)
        return config.fixed_cost + sum(part.cost for part, keep in chosen if keep)

    def among(chosen: set[int]) -> Chosen:
        return tuple(part.layer in chosen for part in found.parts)

    limit = found.best.cost + 1e-9
    plain = [size for size in range(1, layers) if cost(among(set(range(size)))) <= limit]
    size = max(plain, default=1)
    spread = {round(place * (layers - 1) / max(1, size - 1)) for place in range(size)}
    first = set(range(size))
    rows = {}
    sets = {"found": found.best.kept, "evenly spread": among(spread), "first layers": among(first)}
    for name, kept in sets.items():
        measured, price = tau(kept), cost(kept)
        estimate = ideal_speedup(measured, config.depth, price)
        rows[name] = rounded(tau=measured, cost=price, ideal_speedup=estimate)
    return rows


main = command(
    report,
    target=str(TARGET),
    dtype="float32",
    device="auto",
    kind={"default": "early_exit", "choices": sorted(SETTING)},
    prompts=VALIDATION,
    domain={"help": "search for one domain's prompts alone"},
    per_domain=(4, "prompts per domain to search on"),
    held_out=(4, "other prompts per domain to judge the result on"),
    tokens=(48, "new tokens per prompt"),
    temperature=0.0,
    depth=(4, "tokens drafted per pass"),
    evaluations=(48, "sets that are tried"),
    objective={"default": "speedup", "choices": OBJECTIVES},
    most_cost=(1.0, "largest share of the target's weights per drafted token"),
    sublayers=(False, "leave out attention and MLP separately"),
    seed=0,
    out=(Path("outputs") / "layers", "folder for HEADSTART_CONF"),
)

if __name__ == "__main__":
    sys.exit(main())
