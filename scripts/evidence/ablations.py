"""Measures the gain of each choice in a recipe: trainings with one change, on both small targets.

    python -m scripts.evidence.ablations [--targets embedded] [--studies eagle3] [--seeds 0 1 2]

Every arm of a study (`STUDIES`) is the study's recipe with some settings changed. All arms are
trained on the same answers for the same number of passes with every seed, and decoded on prompts
that no training saw: chains of 7, at temperature 0 and, by block verification, at 1. Writes
docs/reports/ablations.{json,md}: tau of every arm and the ratio of its (tau - 1) to the recipe's.
Every training and measurement is kept under --work, and the command continues after an
interruption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from inference.measure.metrics import Totals
from inference.report.markdown import markdown_table
from scripts.evidence.common import Facts, cell
from scripts.evidence.small_targets import (
    PLACES,
    SEEDS,
    Bench,
    chain,
    compared,
    earlier,
    options_of_bench,
    put_rows,
    save,
    some_of,
)
from scripts.tools.common import command

RECIPE = "recipe"
DEPTH = 7
WAYS = {"T=0": (0.0, "match"), "T=1": (1.0, "block")}
SHARED = ["train.epochs=2", "train.global_batch=2", "train.micro_batch=2"]
"""Two rows of 512 tokens a step, two passes over the answers."""
STUDIES: dict[str, dict[str, list[str]]] = {
    "eagle3": {
        RECIPE: ["head=eagle3", "optim=muon", "optim.lr=1e-2"],
        "adamw": ["optim=adamw", "optim.lr=3e-3"],
        "rate_5e-3": ["optim.lr=5e-3"],
        "rate_2e-2": ["optim.lr=2e-2"],
        "weight_decay": ["optim.weight_decay=0.1"],
        "linear_schedule": ["schedule.kind=linear", "schedule.min_ratio=0"],
        "no_clipping": ["optim.clip=0"],
        "trained_lm_head": ["head.train_lm_head=true"],
        "copied_layer": ["head.from_target_layer={last}"],
        "equal_weights": ["head.decay=1.0"],
        "unrolled_3": ["head.ttt_steps=3", "head.decay=1.0"],
        "unrolled_7": ["head.ttt_steps=7", "head.decay=1.0"],
        "joint_norm": ["head.tap_norm=false", "head.norm_before_fc=true"],
        "normed_residual": ["head.norm_before_residual=true"],
    },
    "fastmtp": {
        RECIPE: ["head=fastmtp", "optim=muon", "optim.lr=1e-2"],
        "adamw": ["optim=adamw", "optim.lr=3e-3"],
        "rate_5e-3": ["optim.lr=5e-3"],
        "copied_layer": ["head.from_target_layer={last}"],
        "equal_weights": ["head.beta=1.0"],
        "unrolled_7": ["head.depths=7", "head.beta=1.0"],
    },
    "dflash": {
        RECIPE: ["head=dflash", "optim=muon", "optim.lr=5e-3", "head.num_anchors=64"],
        "adamw": ["optim=adamw", "optim.lr=1e-3"],
        "rate_1e-2": ["optim.lr=1e-2"],
        "weight_decay": ["optim.weight_decay=0.1"],
        "anchors_256": ["head.num_anchors=256"],
        "d_pace": ["head.depth_weights=d_pace"],
        "distribution": ["head.ce=0", "head.kl=1"],
        "random_layers": ["head.start_from=random"],
        "causal_block": ["head.in_block=causal"],
        "block_8": ["head.block_size=8"],
    },
    "peagle": {
        RECIPE: ["head=peagle", "optim=muon", "optim.lr=1e-2"],
        "adamw": ["optim=adamw", "optim.lr=3e-3"],
        "trained_lm_head": ["head.train_lm_head=true"],
    },
}
"""Study -> arm -> overrides, where {last} is the target's last layer. The first arm is the recipe;
the others are added to it."""


def report(given: argparse.Namespace) -> None:
    """Train, decode, and write the report after every arm."""
    content = earlier(given.out)
    for target in given.targets:
        work = given.work.resolve() / target
        bench = Bench(PLACES[target], work, given.threads, given.prompts, [*STUDIES])
        for study in given.studies:
            for row in rows_of(bench, study, given.seeds):
                row = {"target": target, "study": study, **row}
                put_rows(content, [row], ("target", "study", "arm"))
                save(given, content, {"shared": SHARED, "depth": DEPTH}, markdown)
    print("\n".join(markdown(content)))


def rows_of(bench: Bench, study: str, seeds: Sequence[int]) -> Iterator[Facts]:
    """The rows of a study whose trainings are done, the recipe first."""
    recipe, *_ = arms = STUDIES[study]
    base: dict[str, list[Totals]] = {}
    for arm in arms:
        overrides = [*SHARED, *STUDIES[study][recipe]]
        overrides += STUDIES[study][arm] if arm != recipe else []
        ways: dict[str, list[Totals]] = {way: [] for way in WAYS}
        for seed in seeds:
            words = [word.format(last=bench.model.info.num_layers - 1) for word in overrides]
            checkpoint = bench.train(f"{study}-{arm}-{seed}", *words, f"run.seed={seed}")
            for way, (temperature, rule) in WAYS.items():
                decode = chain(DEPTH, temperature, rule)
                ways[way].append(bench.totals(checkpoint, way, bench.measuring, decode))
        base = base or ways
        figures = {way: compared(ways[way], base[way]) for way in WAYS}
        yield {"arm": arm, "overrides": overrides, "seeds": [*seeds], "figures": figures}


def markdown(content: Facts) -> list[str]:
    """The lines of ablations.md."""
    shown = [
        [
            *(row[key] for key in ("target", "study", "arm")),
            *(
                text
                for way in WAYS
                for found in [row["figures"][way]]
                for text in (
                    cell(found["ours"]["tau"], found["ours"]["tau_ci95"]),
                    cell(found["ratio"], found["ratio_ci95"]),
                )
            ),
            len(row["seeds"]),
        ]
        for row in content["rows"]
    ]
    header = ["target", "study", "arm"]
    for way in WAYS:
        header += [f"tau, {way}", "(tau - 1) ratio"]
    return [
        "# Ablations",
        "",
        "Trainings with one choice of the recipe changed, on the same answers for two passes of "
        f"1,024 tokens a step; chains of {DEPTH} on prompts that no training saw, at temperature "
        "1 by block verification. The ratio is to the study's recipe; intervals: 95% bootstrap "
        f"over prompts and seeds. Made by `{content['command']}`; overrides: ablations.json.",
        "",
        *markdown_table([*header, "seeds"], shown),
        "",
    ]


main = command(
    report,
    targets=some_of(sorted(PLACES)),
    studies=some_of(sorted(STUDIES)),
    seeds={"nargs": "+", "type": int, "default": SEEDS},
    **options_of_bench("ablations"),
)

if __name__ == "__main__":
    sys.exit(main())
