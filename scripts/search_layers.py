"""Which of the target's layers should draft for it? Searched on a domain's prompts, checked on others.

    python -m scripts.search_layers --evaluations 60 --out outputs/layers
    python -m scripts.search_layers --domain code --sublayers
    python -m scripts.search_layers --kind distilled        # layers to start a distilled drafter from

Sets of layers are tried by decoding (`inference.tune.layer_search`). The best by tau / (1 + gamma c), with c the share of
the target's weights that a drafted token reads (or the best by tau within a largest c), is written as a head's
recipe, ready for `head=` or `measure.heads`, beside a report of every trial. The search's prompts are not the ones
that the found set is judged on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads.api.checkpoint import build_config, new_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.measure.prompts import Prompt, load_prompts, select_prompts, to_requests
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.tune.layer_search import (
    OBJECTIVES,
    Chosen,
    SearchConfig,
    SearchResult,
    SkippablePart,
    Trial,
    ideal_speedup,
    measure_tau,
    parts_of,
    search_layers,
)

ROOT = Path(__file__).resolve().parent.parent
SETTING = {"early_exit": "layers", "quantized_self": "layers", "distilled": "from_target_layers"}
"""Kinds that are built from layers of the target, and the setting that names them."""


def main(arguments: list[str] | None = None) -> int:
    """Search, write the recipe and the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.search_layers", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kind", default="early_exit", choices=sorted(SETTING))
    parser.add_argument("--prompts", type=Path, default=ROOT / "assets" / "prompts")
    parser.add_argument("--domain", help="search for one domain's prompts alone")
    parser.add_argument("--per-domain", type=int, default=4, help="prompts per domain to search on")
    parser.add_argument(
        "--held-out", type=int, default=4, help="other prompts per domain to judge the result on"
    )
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--depth", type=int, default=4, help="tokens drafted per pass")
    parser.add_argument("--evaluations", type=int, default=48, help="sets that are tried")
    parser.add_argument("--objective", default="speedup", choices=OBJECTIVES)
    parser.add_argument(
        "--most-cost", type=float, default=1.0, help="largest share of the target's weights per drafted token"
    )
    parser.add_argument("--sublayers", action="store_true", help="leave out attention and MLP separately")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("outputs") / "layers", help="folder of the recipe and report"
    )
    given = parser.parse_args(arguments)
    try:
        report = run(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    report["command"] = "python -m scripts.search_layers " + " ".join(
        sys.argv[1:] if arguments is None else arguments
    )
    write(given.out, given.kind, report)
    print(json.dumps({key: value for key, value in report.items() if key != "trials"}, indent=2))
    return 0


def run(given: argparse.Namespace) -> dict[str, Any]:
    """The search and its check on held-out prompts."""
    if given.sublayers and given.kind != "early_exit":
        raise UserError(f"--sublayers goes with --kind early_exit: kind '{given.kind}' takes whole layers.")
    target = TargetModel.load(TargetConfig(path=given.target, dtype=given.dtype, device=given.device))
    parts, head_cost = parts_of(target, given.sublayers)
    known, unseen = choose(given)
    decode = DecodeConfig(
        temperature=given.temperature, depth=given.depth, max_new_tokens=given.tokens, batch_size=len(known)
    )

    def tau(kept: Chosen, prompts: Sequence[Prompt]) -> float:
        values = settings(given.kind, parts, kept)
        drafter = new_drafter(
            given.kind, build_config(given.kind, values), target.info, target.weights, given.seed
        )
        return measure_tau(target, drafter, to_requests(prompts, target.tokenizer, decode), decode).tau

    def tried(kept: Chosen) -> float:
        found = tau(kept, known)
        print(f"{describe(settings(given.kind, parts, kept))}: tau {found:.3f}", file=sys.stderr)
        return found

    config = SearchConfig(
        given.evaluations, given.depth, head_cost, given.most_cost, given.objective, given.seed
    )
    found = search_layers(parts, tried, config)
    return {
        "target": target.info.id,
        "kind": given.kind,
        "head": settings(given.kind, parts, found.best.kept),
        "searched_on": [prompt.id for prompt in known],
        "held_out_prompts": len(unseen),
        "held_out": judge(found, lambda kept: tau(kept, unseen), config) if unseen else {},
        "search": asdict(config),
        "trials": [as_row(given.kind, found, trial) for trial in found.trials],
    }


def choose(given: argparse.Namespace) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to search on, and other ones to judge by."""
    prompts = load_prompts(given.prompts)
    if given.domain is not None:
        domains = sorted({prompt.domain for prompt in prompts})
        prompts = [prompt for prompt in prompts if prompt.domain == given.domain]
        if not prompts:
            raise UserError(
                f"there are no prompts of domain '{given.domain}'; there are: {', '.join(domains)}."
            )
    known = select_prompts(prompts, given.per_domain, seed=1)
    used = {prompt.id for prompt in known}
    rest = [prompt for prompt in prompts if prompt.id not in used]
    return known, select_prompts(rest, given.held_out, seed=2) if rest and given.held_out else []


def settings(kind: str, parts: Sequence[SkippablePart], kept: Chosen) -> dict[str, Any]:
    """The head's settings for a set of parts."""
    chosen = [part for part, keep in zip(parts, kept, strict=True) if keep]
    values: dict[str, Any] = {SETTING[kind]: sorted({part.layer for part in chosen})}
    if any(part.what != "layer" for part in parts):
        there = {(part.layer, part.what) for part in chosen}
        for what in ("attention", "mlp"):
            values[f"without_{what}"] = [
                layer for layer in values[SETTING[kind]] if (layer, what) not in there
            ]
    return values


def describe(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def judge(found: SearchResult, tau: Any, config: SearchConfig) -> dict[str, Any]:
    """The found set on held-out prompts, beside what needs no search: as many layers for no higher cost, evenly spread or first."""
    layers = max(part.layer for part in found.parts) + 1

    def cost(kept: Chosen) -> float:
        return config.fixed_cost + sum(
            part.cost for part, keep in zip(found.parts, kept, strict=True) if keep
        )

    def among(chosen: set[int]) -> Chosen:
        return tuple(part.layer in chosen for part in found.parts)

    plain = [size for size in range(1, layers) if cost(among(set(range(size)))) <= found.best.cost + 1e-9]
    size = max(plain, default=1)
    spread = {round(place * (layers - 1) / max(1, size - 1)) for place in range(size)}
    sets = {"found": found.best.kept, "evenly spread": among(spread), "first layers": among(set(range(size)))}
    rows = {}
    for name, kept in sets.items():
        measured = tau(kept)
        estimate = ideal_speedup(measured, config.depth, cost(kept))
        rows[name] = {
            "tau": round(measured, 4),
            "cost": round(cost(kept), 4),
            "ideal_speedup": round(estimate, 4),
        }
    return rows


def as_row(kind: str, found: SearchResult, trial: Trial) -> dict[str, Any]:
    """A trial as the report holds it."""
    return settings(kind, found.parts, trial.kept) | {
        "cost": round(trial.cost, 4),
        "tau": round(trial.tau, 4),
        "ideal_speedup": round(trial.speedup, 4),
    }


def write(folder: Path, kind: str, report: dict[str, Any]) -> None:
    """<kind>_layers.yaml, a recipe as those of conf/head/, and report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# Found by: {report['command']}", f"kind: {kind}"]
    lines += [f"{name}: {value}" for name, value in report["head"].items() if value]
    (folder / f"{kind}_layers.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
