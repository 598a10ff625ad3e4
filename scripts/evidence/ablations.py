"""Measures the gain of each choice in a recipe: trainings with one change, on both small targets.

    python -m scripts.evidence.ablations [--targets embedded] [--studies eagle3] [--seeds 0 1 2]
        [--arms copied_layer adamw] [--rate 1e-2]

Every arm of a study (`STUDIES`) is the study's recipe with some settings changed; a kind that
peers.py compares has its recipe from there. All arms are
trained on the same answers for the same number of passes with every seed, and decoded on prompts
that no training saw (--arms: only these arms, beside the recipe; --rate: another learning rate for
all of them, such as a target's best one): chains of 7, at temperature 0 and, by block verification,
at 1. Writes docs/reports/ablations.{json,md}: tau of every arm and the ratio of its (tau - 1) to
the recipe's. Rows of the same target and study that were measured beside another recipe are
dropped. Trainings of one seed share the order of rows and, where the drafters are alike, initial
values, so that intervals of the ratio resample the same seeds on both sides. Every training and
measurement is kept under --work, and the command continues after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from heads.api.errors import UserError
from inference.measure.metrics import Totals
from inference.report.markdown import markdown_table
from scripts.evidence.common import Facts, cell
from scripts.evidence.peers import (
    DIVERGENCES,
    EAGLE3,
    FALL,
    FEATURE_LOSS,
    OURS,
    PEAGLE,
    PROMPTS_TOO,
    SMALL_START,
)
from scripts.evidence.small_targets import (
    PLACES,
    SEEDS,
    Bench,
    begin,
    chain,
    compared,
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
WARM_UP = {"no_warm_up": ["schedule.warmup=0"], "warm_up_20": ["schedule.warmup=0.2"]}
"""The share of all steps over which the rate rises; 0.04 in the recipes."""
AVERAGES = {f"average_{decay}": [f"train.average={decay}"] for decay in (0.9, 0.99)}
"""The running mean of the weights; off in the recipes."""
FORMATS = {f"features_{form}": [f"features.format={form}"] for form in ("bf16", "int8", "int4")}
"""Features as a store keeps them; fp32 in the recipes: the numbers that a training computes."""
START = {"initial_std_0": ["head.initial_std=0"], "initial_std_0.005": ["head.initial_std=0.005"]}
"""The largest standard deviation of random initial weights: without a limit, and a small one; 0.02
in the recipes."""
COSINE = ["schedule.kind=cosine", "schedule.min_ratio=0.1"]
TAP_NORMS = ["head.tap_norm=true", "head.norm_before_fc=false"]
PLAIN_RESIDUAL = ["head.norm_before_residual=false"]
QK_NORM = "head.qk_norm=true"
FORMER_EAGLE3 = [
    *("head.ttt_steps=5", "head.decay=0.8", "head.initial_std=0", "train.context_weight=0"),
    *(*TAP_NORMS, *PLAIN_RESIDUAL, *COSINE, "optim.weight_decay=0"),
]
FORMER_BLOCKS = ["head.num_anchors=64", "head.initial_std=0", "head.kl=0"]
"""Recipes without any of the choices that these studies are about."""
BLOCK_ARMS: dict[str, list[str]] = {
    **WARM_UP,
    **START,
    "linear_schedule": FALL,
    "weight_decay": ["optim.weight_decay=0.1"],
    "one_tap": ["head.taps=[{high}]"],
    "three_taps": ["head.taps=[2,{middle},{high}]"],
    "no_carry_root": ["head.carry_root=false"],
    "prompts": [PROMPTS_TOO],
}
"""Arms of every block drafter."""
RECIPE_ARMS: dict[str, list[str]] = {
    "adamw": ["optim=adamw", "optim.lr=1e-3"],
    "rate_1e-2": ["optim.lr=1e-2"],
    "anchors_64": ["head.num_anchors=64"],
    "anchors_128": ["head.num_anchors=128"],
    "d_pace": ["head.depth_weights=d_pace"],
    "random_layers": ["head.start_from=random"],
    "causal_block": ["head.in_block=causal"],
    "block_16": ["head.block_size=16"],
    **AVERAGES,
    **FORMATS,
}
"""Further arms of DFlash and DSpark, whose trainings are cheaper than LiLiCorr's."""
NONE = ["head.ce=0", "head.kl=0", "head.tv=0"]
LOSSES: dict[str, list[str]] = {
    "cross_entropy": [*NONE, "head.ce=1"],
    "divergence": [*NONE, "head.kl=1"],
    "total_variation": [*NONE, "head.ce=0.1", "head.tv=1.8"],
    "lk": [*NONE, "head.lk=1"],
    "annealed_lk": [*NONE, "head.annealed_lk=1"],
}
"""Objectives of a block drafter."""
OTHER_BLOCKS = ("jetspec", "domino", "dflash2", "treeflash")
"""Block drafters that peers.py does not compare; their recipes have the published objectives."""
BLOCK_RECIPE = ["head.num_anchors=128", SMALL_START, "optim.lr=3e-3"]
"""Overrides of these recipes and of DFlare's."""
STUDIES: dict[str, dict[str, list[str]]] = {
    "eagle3": {
        RECIPE: [*EAGLE3, "optim.lr=3e-3"],
        "former": FORMER_EAGLE3,
        "adamw": ["optim=adamw", "optim.lr=1e-3"],
        "rate_5e-3": ["optim.lr=5e-3"],
        "answers_only": ["train.context_weight=0"],
        "prompts_0.5": ["train.context_weight=0.5"],
        "no_weight_decay": ["optim.weight_decay=0"],
        "cosine_schedule": COSINE,
        **WARM_UP,
        "no_clipping": ["optim.clip=0"],
        "trained_lm_head": ["head.train_lm_head=true"],
        "copied_layer": ["head.from_target_layer={last}"],
        **START,
        "falling_weights": ["head.decay=0.8"],
        "five_falling_steps": ["head.ttt_steps=5", "head.decay=0.8"],
        "unrolled_5": ["head.ttt_steps=5"],
        "unrolled_7": ["head.ttt_steps=7"],
        "one_tap": ["head.taps=[{high}]"],
        "five_taps": ["head.taps=[1,2,{middle},{high},{last}]"],
        "last_tap": ["head.taps=[2,{middle},{high},{last}]"],
        "qk_norm": [QK_NORM],
        "tap_norms": TAP_NORMS,
        "plain_residual": PLAIN_RESIDUAL,
        "norms_of_3.1": [*TAP_NORMS, *PLAIN_RESIDUAL],
        "total_variation": ["head.tv=5"],
        "lk": ["head.lk=1"],
        "feature_loss": [FEATURE_LOSS],
        **AVERAGES,
        **FORMATS,
    },
    "fastmtp": {
        RECIPE: ["head=fastmtp", "optim.lr=1e-2"],
        "adamw": ["optim=adamw", "optim.lr=3e-3"],
        "rate_5e-3": ["optim.lr=5e-3"],
        "copied_layer": ["head.from_target_layer={last}"],
        "equal_weights": ["head.beta=1.0"],
        "unrolled_7": ["head.depths=7"],
        "prompts": [PROMPTS_TOO],
        "initial_std_0.02": [SMALL_START],
    },
    **{
        kind: {RECIPE: [f"head={kind}", "optim.lr=1e-2"], "prompts": [PROMPTS_TOO]}
        for kind in ("eagle", "mtp", "medusa", "hydra_heads")
    },
    "dflash": {
        RECIPE: [*OURS["dflash"], "optim.lr=3e-3"],
        "former": [*FORMER_BLOCKS, "head.ce=1", "head.tv=0"],
        **BLOCK_ARMS,
        **RECIPE_ARMS,
        **LOSSES,
    },
    "dspark": {
        RECIPE: [*OURS["dspark"], "optim.lr=3e-3"],
        "former": [*FORMER_BLOCKS, "head.block_size=7", "head.ce=0.1", "head.tv=1.8"],
        **BLOCK_ARMS,
        **RECIPE_ARMS,
        **LOSSES,
        "no_dependency": ["head.dependency=none"],
        "gated_dependency": ["head.dependency=gated"],
        "recurrent_dependency": ["head.dependency=rnn"],
        "no_confidence": ["head.confidence=false"],
        "base_share": ["head.base_share_start=0.5", "head.base_share_end=0.5"],
    },
    **{
        kind: {RECIPE: [f"head={kind}", *BLOCK_RECIPE], "divergences": DIVERGENCES, **START}
        for kind in OTHER_BLOCKS
    },
    "dflare": {
        RECIPE: ["head=dflare", *BLOCK_RECIPE, *DIVERGENCES],
        "cross_entropy": LOSSES["cross_entropy"],
        **START,
    },
    "lilicorr": {
        RECIPE: ["head=lilicorr", "head.num_anchors=64", SMALL_START, "optim.lr=5e-3"],
        **BLOCK_ARMS,
        **{name: own for name, own in LOSSES.items() if name != "cross_entropy"},
        "divergences": DIVERGENCES,
        "no_dependency": [
            *("head.dependency=none", "head.base_share_start=0", "head.base_share_end=0")
        ],
        "base_share_0": ["head.base_share_start=0", "head.base_share_end=0"],
        "base_share_falls": ["head.base_share_start=0.8", "head.base_share_end=0.2"],
        "no_distractor": ["head.correlator.distractor=0"],
        "one_layer": ["head.correlator.layers=1"],
        "candidates_8": ["head.selector_top_k=8"],
    },
    "peagle": {
        RECIPE: [*PEAGLE, "optim.lr=1e-2"],
        "adamw": ["optim=adamw", "optim.lr=3e-3"],
        "rate_3e-3": ["optim.lr=3e-3"],
        "answers_only": ["train.context_weight=0"],
        "initial_std_0": START["initial_std_0"],
        "trained_lm_head": ["head.train_lm_head=true"],
        "qk_norm": [QK_NORM],
        "feature_loss": [FEATURE_LOSS],
        "all_anchors": ["head.keep=1"],
        "falling_weights": ["head.decay=0.8"],
    },
}
"""Study -> arm -> overrides, where {last} is the target's last layer, {middle} half of its layers
and {high} its third last tap. The first arm is the recipe; the others are added to it. The recipes
of EAGLE-3 and P-EAGLE are those of peers.py without the feature loss, which is an arm."""


def report(given: argparse.Namespace) -> None:
    """Train, decode, and write the report after every arm."""
    settings = {"shared": SHARED, "depth": DEPTH}
    content = begin(given, settings)
    benches = {
        target: Bench(
            PLACES[target],
            given.work.resolve() / target,
            given.threads,
            given.prompts,
            [*STUDIES],  # one store, whichever studies are given
        )
        for target in given.targets
    }
    for target, bench in benches.items():
        for study in given.studies:
            arms = arms_of(study, given.arms)
            for row in rows_of(bench, study, arms, given.seeds, given.rate):
                row = {"target": target, "study": study, **row}
                drop_other_recipe(content, row)
                put_rows(content, [row], ("target", "study", "arm"))
                save(given, content, settings, markdown)
    print("\n".join(markdown(content)))


def drop_other_recipe(content: Facts, row: Facts) -> None:
    """Drop the rows of a recipe's target and study if they were measured beside another recipe,
    because their ratios are to that one. row: of any arm; only the recipe's changes something."""
    if row["arm"] != RECIPE:
        return
    same = [one for one in content.get("rows", []) if is_beside(one, row)]
    if any(one["arm"] == RECIPE and not is_of_recipe(one, row) for one in same):
        content["rows"] = [one for one in content["rows"] if not is_beside(one, row)]


def is_of_recipe(one: Facts, row: Facts) -> bool:
    """Whether two rows have the same recipe; rows of earlier versions name no digest."""
    same = one.get("recipe") in (None, row.get("recipe"))
    return same and one["overrides"] == row["overrides"]


def is_beside(one: Facts, other: Facts) -> bool:
    """Whether two rows are of the same target and study."""
    return all(one[key] == other[key] for key in ("target", "study"))


def arms_of(study: str, named: Sequence[str]) -> list[str]:
    """The recipe and the named arms of a study; none named: all. Raises `UserError` for an arm that
    the study does not have."""
    arms = [*STUDIES[study]]
    unknown = sorted({*named} - {*arms})
    if unknown:
        raise UserError(
            f"--arms {unknown[0]}: the study {study} has no such arm. Its arms: {', '.join(arms)}. "
            "Name one study with --studies for arms that others lack."
        )
    return [arm for arm in arms if arm == arms[0] or arm in named or not named]


def words_of(study: str, arm: str, layers: int, rate: float = 0.0) -> list[str]:
    """The overrides of an arm on a target of `layers` layers. rate: in place of the recipe's; 0:
    that one."""
    recipe = next(iter(STUDIES[study]))
    own = STUDIES[study][arm] if arm != recipe else []
    named = {"last": layers - 1, "middle": layers // 2, "high": layers - 3}
    shared = [*SHARED, *STUDIES[study][recipe], *([f"optim.lr={rate}"] if rate else [])]
    return [word.format(**named) for word in (*shared, *own)]


def rows_of(
    bench: Bench, study: str, arms: Sequence[str], seeds: Sequence[int], rate: float = 0.0
) -> Iterator[Facts]:
    """The rows of these arms of a study whose trainings are done; the recipe is the first arm, and
    all rows have its `Bench.identity`."""
    base: dict[str, list[Totals]] = {}
    layers = bench.model.info.num_layers
    recipe = bench.identity(*words_of(study, arms[0], layers, rate))
    for arm in arms:
        overrides = words_of(study, arm, layers, rate)
        ways: dict[str, list[Totals]] = {way: [] for way in WAYS}
        for seed in seeds:
            checkpoint = bench.train(f"{study}-{arm}-{seed}", *overrides, f"run.seed={seed}")
            for way, (temperature, rule) in WAYS.items():
                decode = chain(DEPTH, temperature, rule)
                ways[way].append(bench.totals(checkpoint, way, bench.measuring, decode))
        base = base or ways
        figures = {way: compared(ways[way], base[way], paired=True) for way in WAYS}
        row: Facts = {"arm": arm, "overrides": overrides, "recipe": recipe, "seeds": [*seeds]}
        yield {**row, "figures": figures}


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
    recipes = [
        f"* {row['target']}, {row['study']}: `{' '.join(row['overrides'])}`"
        for row in content["rows"]
        if row["arm"] == RECIPE
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
        "over prompts and seeds, the same on both sides. Made by "
        f"`{content['command']}`, earlier rows by the same command with their targets, studies, "
        "arms and --rate; overrides: ablations.json.",
        "",
        *markdown_table([*header, "seeds"], shown),
        "",
        "The recipes:",
        "",
        *recipes,
        "",
    ]


main = command(
    report,
    targets=some_of(sorted(PLACES)),
    studies=some_of(sorted(STUDIES)),
    arms={"nargs": "+", "default": [], "help": "arms beside the recipe; none named: all"},
    seeds={"nargs": "+", "type": int, "default": SEEDS},
    rate=(0.0, "learning rate of all arms but those that change it; 0: the recipe's"),
    **options_of_bench("ablations"),
)

if __name__ == "__main__":
    sys.exit(main())
