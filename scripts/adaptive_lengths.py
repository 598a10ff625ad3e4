"""Fixed against adaptive draft lengths: tau, and tokens verified per committed token.

    python -m scripts.adaptive_lengths outputs/demo/train/distilled/best --head outputs/demo/acceptance.json

A longer draft raises tau and wastes more verified tokens; adaptive length buys tau for fewer of them. Every arm decodes the same
prompts with the same seeds, one row at a time on the CPU, where a chain is cut before it is verified. Per arm: tau with
its 95% interval over prompts and verified tokens (the root's included) per committed token. Both count passes and tokens, no
seconds, so they do not depend on the machine's load. `throughput` and `lengths` get costs that rise with every verified token
(`--slope`: share of a pass that one more token costs), the same on every machine. Each family's threshold is the one with the best
goodput on prompts of their own (`--choose-on`); reported are the chosen ones and all fixed lengths, on other prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.measure.metrics import Outcome, Totals, tau_estimate
from inference.measure.prompts import Prompt, load_prompts, select_prompts, to_requests
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

ROOT = Path(__file__).parents[1]
FIXED = (1, 2, 3, 4, 6, 8)
LENGTHS = (0, 1, 2, 3, 4, 6, 8)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.adaptive_lengths", description=__doc__.split("\n")[0]
    )
    parser.add_argument("drafter", type=Path, metavar="FOLDER")
    parser.add_argument("--head", default="", help="file of scripts.fit_acceptance")
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument("--prompts", type=Path, default=ROOT / "assets" / "prompts")
    validation = ROOT / "assets" / "prompts" / "training" / "validation.jsonl"
    parser.add_argument("--choose-on", type=Path, default=validation, help="prompts on which thresholds are chosen")
    parser.add_argument("--per-domain", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slope", type=float, default=0.15)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "adaptive_lengths.json")
    given = parser.parse_args(arguments)
    try:
        report = measure(given)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    report["command"] = "python -m scripts.adaptive_lengths " + " ".join(arguments or sys.argv[1:])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


def arms(head: str, slope: float) -> dict[str, dict[str, Any]]:
    """Name -> decode settings; a family's members differ in the last word of the name."""
    costs = tuple(1 + slope * extra for extra in range(FIXED[-1] + 1))
    found: dict[str, dict[str, Any]] = {f"fixed {depth}": {"depth": depth} for depth in FIXED}
    for threshold in (0.4, 0.8, 1.2, 1.6, 2.0):
        found[f"entropy {threshold}"] = {"adaptive": "entropy", "adaptive_threshold": threshold}
    for threshold in (0.1, 0.2, 0.3, 0.5, 0.7):
        found[f"confidence {threshold}"] = {"adaptive": "confidence", "adaptive_threshold": threshold}
        if head:
            found[f"head {threshold}"] = {**found[f"confidence {threshold}"], "adaptive_head": head}
    found["scheduler alone"] = {"adaptive": "throughput", "adaptive_costs": costs}
    if head:
        found["scheduler with head"] = {**found["scheduler alone"], "adaptive_head": head}
    found["between steps"] = {"adaptive_lengths": LENGTHS, "adaptive_costs": costs}
    return {name: {"depth": FIXED[-1], **settings} for name, settings in found.items()}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Choose every family's threshold, then measure what was chosen and all fixed lengths; all texts must be the same."""
    target = TargetModel.load(TargetConfig(path=given.target, dtype="float32", device="cpu"))
    drafter = load_drafter(given.drafter, target.info, target.weights)
    common = {"temperature": given.temperature, "max_new_tokens": given.tokens}

    def run(names: Iterable[str], path: Path) -> tuple[dict[str, dict[str, Any]], int, int]:
        """Numbers of arms on prompts of `path`, the number of different texts, and of prompts."""
        prompts = select_prompts(load_prompts(path), given.per_domain, seed=1)
        found, texts = {}, set()
        for name in names:
            config = DecodeConfig(**common, **settings[name])
            found[name], text = decode(target, drafter, config, prompts, given.slope)
            texts.add(text)
        return found, len(texts), len(prompts)

    settings = arms(given.head, given.slope)
    tried, _, chosen_on = run(settings, given.choose_on)
    kept = chosen({name: numbers["goodput"] for name, numbers in tried.items()})
    found, texts, prompts = run([name for name in settings if name.startswith("fixed") or name in kept.values()], given.prompts)
    return {
        "drafter": drafter.kind, "prompts": prompts, "chosen_on": chosen_on, "max_new_tokens": given.tokens,
        "temperature": given.temperature, "slope": given.slope, "different_texts": texts, "chosen": kept,
        "goodput_where_chosen": {name: numbers["goodput"] for name, numbers in tried.items()}, "arms": found,
    }  # fmt: skip


def chosen(goodput: dict[str, float]) -> dict[str, str]:
    """Family -> its arm with the best goodput."""
    best: dict[str, str] = {}
    for name in goodput:
        family = name.rpartition(" ")[0]
        if family not in best or goodput[name] > goodput[best[family]]:
            best[family] = name
    return best


def decode(
    target: TargetModel, drafter: Any, config: DecodeConfig, prompts: list[Prompt], slope: float
) -> tuple[dict[str, Any], tuple[tuple[int, ...], ...]]:
    """One arm: its numbers and its texts. goodput: tokens per unit of cost, where a pass over n nodes costs 1 + slope * (n - 1)."""
    done = sorted(
        Engine(target, drafter, config).run(to_requests(prompts, target.tokenizer, config)),
        key=lambda completion: completion.request.index,
    )
    outcomes = [Outcome(prompts[c.request.index].id, "", c.passes) for c in done]
    tau = tau_estimate(Totals.collect(outcomes, config.depth))
    records = [record for completion in done for record in completion.passes]
    committed, nodes = sum(record.committed for record in records), sum(record.nodes for record in records)
    numbers = {
        "tau": round(tau.tau, 3), "tau_ci95": [round(value, 3) for value in tau.ci95],
        "verified_per_committed": round(nodes / committed, 3),
        "goodput": round(committed / (len(records) + slope * (nodes - len(records))), 3),
        "committed": committed, "passes": len(records), "verified": nodes,
    }  # fmt: skip
    return numbers, tuple(tuple(completion.tokens) for completion in done)


if __name__ == "__main__":
    sys.exit(main())
