"""Compares our drafters with those of vLLM's `speculators`, each by its best recipe.

    python -m scripts.evidence.peers --python PYTHON [--targets embedded held_out] [--kinds eagle3]
        [--engine-python .venv-serve/bin/python] [--controls 0 1 2]

PYTHON is an interpreter that has speculators. Both sides read the same documents of the same target
for the same number of passes, 1,024 tokens a step, with drafters of the same number of layers,
blocks or depths, in the same dtype. Both read the target's features from a store. The library keeps
its own recipe (the layers of the target that it reads, its loss, optimiser, schedule and norms, and
of the documents the target's answers in its loss); ours is that of conf/head with the overrides
`OURS`. Both sweep the same learning rates (the library for Muon and for AdamW alike): the two in
the middle of `RATES`, and those beyond the better one until one is worse. Each keeps the rate with
the best mean tau on the validation prompts at temperatures 0 and 1. That rate is trained with two
further seeds. Our decoder decodes the three drafters of both sides on other prompts: chains of 3, 5
and 7, at temperature 0 and at 1, there by every rule that keeps the target's distribution.

The library's own validation loss, on the target's greedy answers to the validation prompts, is
recorded for each of its rates. A best rate at the edge of the grid is marked: a rate beyond may be
better.

Ours has more of the same documents in its loss: EAGLE-3 and P-EAGLE the tokens of prompts, DFlash
and DSpark more anchors a step than the library (`ANCHORS`, twice its default share of the tokens).
With --controls, the library's drafters are therefore trained once more with what ours has
(`CONTROL`), at the rate that is best without, with the given seeds: a control that tells what a
recipe is worth apart from that.

With --engine-python, an interpreter that has vLLM, the first seed's drafters of both sides are also
served (peers_served.py).

Writes docs/reports/peers.{json,md}. Every training and every measurement is kept under --work, and
the command continues after an interruption; the report is written after every kind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from inference.decoding.config import DecodeConfig
from inference.folders import copy_plain
from inference.manifest import write_json
from inference.measure.metrics import Totals
from inference.measure.prompts import Prompt, load_prompts, select_prompts
from inference.report.markdown import markdown_table
from scripts.evidence.common import Facts, cell, decode_prompts, read_json, settings_of
from scripts.evidence.peers_served import DEPTH, serve_both, served_lines
from scripts.evidence.sides import FLAGS, LENGTH, VERSION, Row, Setting, their_sizes
from scripts.evidence.small_targets import (
    EXPERIMENT,
    PLACES,
    SEEDS,
    Bench,
    Place,
    answers_facts,
    begin,
    chain,
    compared,
    digest,
    options_of_bench,
    put_rows,
    save,
    some_of,
)
from scripts.tools.common import command

TOKENS, EPOCHS = 1024, 2
"""Tokens of a step, and passes over the answers."""
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
DEPTHS = (3, 5, 7)
RULES = ((0.0, "match"), (1.0, "match"), (1.0, "rejection"), (1.0, "block"))
"""Temperature and rule. At temperature 0, all rules accept the same drafts."""
CONFIRMED = ((0.0, "match", 3), (0.0, "match", 7), (1.0, "block", 7))
"""The ways that are measured on further prompts too."""
ANCHORS = 128
"""Blocks per step from which a block drafter of the library learns."""
ANSWER_TOKENS = 128
"""New tokens of an answer to a validation prompt, as those of experiment=families."""
ROWS = TOKENS // LENGTH
SMALL_START = "head.initial_std=0.02"
"""Random weights of at most this standard deviation, with which the library starts too."""
ALL_ANCHORS = f"head.num_anchors={LENGTH // 2}"
"""Blocks of a row: more than half of the places where one can begin."""
PROMPTS_TOO = "train.context_weight=1"
"""The tokens of prompts are in the loss too; the library's has those of answers alone."""
LIBRARY, CONTROL = "speculators", "speculators_control"
"""The library's side, and its control, which has the prompts or anchors that ours has."""
SAVED = "saved"
"""The folder beside a checkpoint of the library's side that holds it as the library saved it."""
THEIR_NORMS = ["head.tap_norm=false", "head.norm_before_fc=true", "head.norm_before_residual=true"]
FALL = ["schedule.kind=linear", "schedule.min_ratio=0"]
THEIR_SCHEDULE = [*FALL, "optim.weight_decay=0.1"]
"""Norms and schedule of the library's EAGLE-3."""
DIVERGENCES = ["head.ce=0", "head.kl=0.5", "head.tv=0.9"]
"""The objective of our block drafters: half KL, and total variation."""
FEATURE_LOSS = "head.feature_weight=1"
"""EAGLE's feature loss beside the cross entropy."""
EAGLE3 = [
    *("head=eagle3", "head.ttt_steps=3", "head.decay=1.0", SMALL_START, PROMPTS_TOO),
    *(*THEIR_NORMS, *THEIR_SCHEDULE),
]
PEAGLE = [
    *("head=peagle", "head.num_layers=4", "head.depths=8", "head.own_embedding=true"),
    *(SMALL_START, PROMPTS_TOO, *THEIR_NORMS, *THEIR_SCHEDULE),
]
OURS: dict[str, list[str]] = {
    "eagle3": [*EAGLE3, FEATURE_LOSS],
    "dflash": [*("head=dflash", ALL_ANCHORS, SMALL_START, *DIVERGENCES)],
    "dspark": [*("head=dspark", "head.block_size=8", ALL_ANCHORS, SMALL_START, *DIVERGENCES)],
    "peagle": [*PEAGLE, FEATURE_LOSS],
}
"""Kind -> its overrides, except for the rate and the seed."""
BLOCK_KINDS = ("dflash", "dspark")
"""Kinds that learn from anchors."""


Way = tuple[float, str, int]
"""Temperature, rule and depth."""
Ways = dict[Way, list[Totals]]
"""Results of a side's drafters, one per seed."""


class Contest(Bench):
    """The trainings of both sides on one target."""

    def __init__(self, python: str, place: Place, work: Path, threads: int, prompts: int) -> None:
        super().__init__(place, work, threads, prompts, [*OURS])
        self.setting = Setting(
            python, place.answers, place.target, work / LIBRARY, threads, own_taps=True
        )
        self.prompted = replace(self.setting, work=work / CONTROL, prompts_too=True)

    def best(self, kind: str, side: str) -> tuple[dict[float, float], list[Path]]:
        """The score by rate, and the checkpoints of all seeds at the best."""
        score = swept(RATES, lambda rate: self.score(self.trained(kind, side, rate, SEEDS[0])))
        rate = best_rate(score)
        return score, [self.trained(kind, side, rate, seed) for seed in SEEDS]

    def losses(self, kind: str, rates: Iterable[float]) -> dict[str, float | None]:
        """The library's own validation loss at each of some rates."""
        each = {rate: self.trained(kind, LIBRARY, rate, SEEDS[0]) for rate in rates}
        return {f"{rate:g}": loss_of(self.facts(path)) for rate, path in each.items()}

    def trained(self, kind: str, side: str, rate: float, seed: int) -> Path:
        """The checkpoint of a training, which runs now if it does not exist."""
        name = f"{kind}-{side}-{rate:g}-{seed}"
        if side in (LIBRARY, CONTROL):
            prompts_too = side == CONTROL and PROMPTS_TOO in OURS[kind]
            setting = self.prompted if prompts_too else self.setting
            words = [*self.their_flags(kind, side), "--lr", f"{rate}", "--muon-lr", f"{rate}"]
            key = {
                "version": VERSION,
                "kind": kind,
                "flags": [*FLAGS, *words],
                "tokens": TOKENS,
                "epochs": EPOCHS,
                "seed": seed,
                "taps": setting.taps(kind),
                "length": setting.length,
                "dtype": setting.dtype,
                "answers": answers_facts(self.place.answers),
                "validation": [prompt.to_line() for prompt in self.validation],
                **({"prompts_too": True} if setting.prompts_too else {}),
            }

            def train(out: Path) -> Facts:
                return self.train_theirs(setting, kind, name, words, seed, out)

            return self.once(name, key, train)
        words = [*OURS[kind], f"optim.lr={rate}", f"run.seed={seed}", f"train.epochs={EPOCHS}"]
        words += [f"train.global_batch={ROWS}", f"train.micro_batch={ROWS}"]
        return self.train(name, *words)

    def taps(self, kind: str, side: str) -> list[int]:
        """The layers of the target that a side's drafter reads."""
        if side == LIBRARY:
            return self.setting.taps(kind)
        head = settings_of("train", EXPERIMENT, *OURS[kind]).head
        return [*self.drafter(head).needs.taps]

    def train_theirs(
        self, setting: Setting, kind: str, name: str, words: Sequence[str], seed: int, out: Path
    ) -> Facts:
        """Train the library's kind with the flags `words`, and convert the saved checkpoint."""
        setting.write_rows(self.held_out)
        side = setting.theirs(kind, name, TOKENS, words, EPOCHS, seed)
        steps = EPOCHS * int(side.about["steps_per_epoch"])
        found = side.train(steps, setting.saved(name))
        copy_plain(setting.converted(name), out)
        copy_plain(setting.saved(name), out.with_name(SAVED))
        told = {key: side.about[key] for key in ("trained_weights", "settings")}
        return {"steps": steps, **found, **told}

    @cached_property
    def held_out(self) -> list[Row]:
        """The target's greedy answers to the validation prompts, for the library's validation."""
        decode = DecodeConfig(
            temperature=0.0, shape="none", max_new_tokens=ANSWER_TOKENS, batch_size=16
        )
        return [
            (
                [*done.request.tokens, *done.tokens],
                [0] * len(done.request.tokens) + [1] * len(done.tokens),
            )
            for done in decode_prompts(self.model, None, self.validation, decode)
        ]

    def their_flags(self, kind: str, side: str) -> list[str]:
        """The sizes that both sides share and the anchors, as flags of the library; all other
        settings are the library's own."""
        head = settings_of("train", EXPERIMENT, *OURS[kind]).head
        return their_sizes(head, self.model.info, self.anchors(kind, side) or TOKENS)

    def anchors(self, kind: str, side: str) -> int:
        """Blocks per step; 0 for a kind that learns from every token."""
        if kind not in BLOCK_KINDS:
            return 0
        if side == LIBRARY:
            return ANCHORS
        return ROWS * int(settings_of("train", EXPERIMENT, *OURS[kind]).head.config.num_anchors)

    @cached_property
    def further(self) -> list[Prompt]:
        """As many prompts as are measured, and none of those."""
        seen = {prompt.id for prompt in self.measuring}
        found = [one for one in load_prompts(self.place.measuring) if one.id not in seen]
        domains = len({prompt.domain for prompt in self.measuring})
        return select_prompts(found, len(self.measuring) // domains, seed=0)

    def confirmed(self, checkpoints: Sequence[Path]) -> Ways:
        """The results of some drafters on the further prompts."""
        return {
            (temperature, rule, depth): [
                self.totals(
                    checkpoint,
                    f"further-{rule}-{temperature:g}-{depth}",
                    self.further,
                    chain(depth, temperature, rule),
                )
                for checkpoint in checkpoints
            ]
            for temperature, rule, depth in CONFIRMED
        }

    def ways(self, checkpoints: Sequence[Path]) -> Ways:
        """The results of some drafters on the measured prompts."""
        found: Ways = {}
        for checkpoint in checkpoints:
            for way, totals in self.measured(checkpoint):
                found.setdefault(way, []).append(totals)
        return found

    def measured(self, checkpoint: Path) -> Iterator[tuple[Way, Totals]]:
        """A drafter's results on the measured prompts."""
        for temperature, rule in RULES:
            for depth in DEPTHS:
                decode = chain(depth, temperature, rule)
                name = f"{rule}-{temperature:g}-{depth}"
                found = self.totals(checkpoint, name, self.measuring, decode)
                yield (temperature, rule, depth), found

    def served(self, kind: str, python: str) -> list[Facts]:
        """What vLLM accepts of the first seed's drafter of each side."""
        (ours, *_), (theirs, *_) = (self.best(kind, side)[1] for side in ("ours", LIBRARY))
        names = [checkpoint.parent.name for checkpoint in (ours, theirs)]  # with their digests
        prompts = [prompt.to_line() for prompt in load_prompts(self.place.measuring)]
        kept = ours.parent / f"served-{digest([*names, python, DEPTH, prompts])}.json"
        rows = read_json(kept).get("rows")
        if rows is None:
            rows = serve_both(python, self.place, self.model, kind, ours, theirs.with_name(SAVED))
            write_json(kept, {"rows": rows})
        return [*rows]


# The report


def report(given: argparse.Namespace) -> None:
    """Train, decode, and write the report after every kind."""
    settings = {
        "speculators": VERSION,
        "tokens_per_step": TOKENS,
        "passes": EPOCHS,
        "rates": RATES,
        "seeds": SEEDS,
    }
    content = begin(given, settings)
    contests = {
        target: Contest(
            given.python,
            PLACES[target],
            given.work.resolve() / target,
            given.threads,
            given.prompts,
        )
        for target in given.targets
    }
    for target, contest in contests.items():
        for kind in given.kinds:
            rows, facts = compare(contest, kind)
            put_rows(content, named(rows, target, kind), ("target", "kind"))
            content.setdefault("trainings", {}).setdefault(target, {})[kind] = facts
            put_rows(
                content,
                named(confirm(contest, kind), target, kind),
                ("target", "kind"),
                "confirmed",
            )
            save(given, content, settings, markdown)
            if given.controls:
                rows = controls(contest, kind, given.controls)
                put_rows(content, named(rows, target, kind), ("target", "kind"), "controls")
                save(given, content, settings, markdown)
            if given.engine_python:
                served = contest.served(kind, given.engine_python)
                served = [{"target": target, **row} for row in served]
                put_rows(content, served, ("target", "kind"), "served")
                save(given, content, settings, markdown)
    print("\n".join(table(content["rows"])))


def named(rows: Sequence[Facts], target: str, kind: str) -> list[Facts]:
    """Rows with their target and kind."""
    return [{"target": target, "kind": kind, **row} for row in rows]


def swept(rates: Sequence[float], score: Callable[[float], float]) -> dict[float, float]:
    """The scores of the two middle ones of some ascending rates, and of those beyond the better one
    until one is worse. If the score has one maximum over `rates`, it is among them."""
    middle = len(rates) // 2
    found = {rate: score(rate) for rate in rates[middle - 1 : middle + 1]}
    below, above = found
    higher = found[above] > found[below]
    for rate in rates[middle + 1 :] if higher else reversed(rates[: middle - 1]):
        highest = max(found.values())
        found[rate] = score(rate)
        if found[rate] < highest:
            break
    return dict(sorted(found.items()))


def best_rate(score: Mapping[float, float]) -> float:
    """The rate with the highest score."""
    return max(score, key=score.__getitem__)


def compare(contest: Contest, kind: str) -> tuple[list[Facts], Facts]:
    """The rows of a kind on a target, and facts about its trainings."""
    found: dict[str, Ways] = {}
    trainings: Facts = {}
    for side in ("ours", LIBRARY):
        score, checkpoints = contest.best(kind, side)
        rate = best_rate(score)
        trainings[side] = {
            **contest.facts(checkpoints[0]),
            "rate": rate,
            "at_edge": rate in (min(RATES), max(RATES)),
            "seeds": [contest.facts(checkpoint) for checkpoint in checkpoints],
            "validation_tau_by_rate": {f"{rate:g}": tau for rate, tau in score.items()},
            "taps": contest.taps(kind, side),
            "anchors": contest.anchors(kind, side),
            "dtype": contest.setting.dtype,
        }
        found[side] = contest.ways(checkpoints)
    trainings["ours"]["recipe"] = OURS[kind]
    trainings[LIBRARY]["validation_loss_by_rate"] = contest.losses(
        kind, map(float, trainings[LIBRARY]["validation_tau_by_rate"])
    )
    rows = [
        described(way) | compared(ours, found[LIBRARY][way]) for way, ours in found["ours"].items()
    ]
    return rows, trainings


def confirm(contest: Contest, kind: str) -> list[Facts]:
    """The rows of a kind on the further prompts."""
    ours, library = (contest.confirmed(contest.best(kind, side)[1]) for side in ("ours", LIBRARY))
    return [described(way) | compared(totals, library[way]) for way, totals in ours.items()]


def controls(contest: Contest, kind: str, seeds: Sequence[int]) -> list[Facts]:
    """The rows of the library's drafters that have what ours has: ours against them, and they
    against the library's own."""
    _, ours = contest.best(kind, "ours")
    score, library = contest.best(kind, LIBRARY)
    rate = best_rate(score)
    control = [contest.trained(kind, CONTROL, rate, seed) for seed in seeds]
    mine, theirs, own = map(contest.ways, (ours, control, library))
    return [
        described(way)
        | {"seeds": [*seeds]}
        | {"against_ours": compared(mine[way], totals), "against_own": compared(totals, own[way])}
        for way, totals in theirs.items()
    ]


def described(way: Way) -> Facts:
    """The keys of a row that say how it was decoded."""
    temperature, rule, depth = way
    return {"temperature": temperature, "rule": rule, "depth": depth}


def table(rows: Sequence[Facts]) -> list[str]:
    """The lines of the comparison's table, a row for each target, kind, rule and depth."""
    header = [
        "target",
        "kind",
        "T",
        "rule",
        "K",
        "tau, ours",
        "tau, speculators",
        "(tau - 1) ratio",
    ]
    return markdown_table(
        header,
        [
            [
                *(row[key] for key in ("target", "kind", "temperature", "rule", "depth")),
                cell(row["ours"]["tau"], row["ours"]["tau_ci95"]),
                cell(row["theirs"]["tau"], row["theirs"]["tau_ci95"]),
                cell(row["ratio"], row["ratio_ci95"]),
            ]
            for row in rows
        ],
    )


def markdown(content: Facts) -> list[str]:
    """The lines of peers.md."""
    trainings = [
        [
            *(target, kind, side),
            f"{found['rate']:g}{' (edge)' if found['at_edge'] else ''}",
            f"{found['steps']:,}",
            f"{found['tokens']:,}",
            f"{found['trained_weights'] / 1e6:.2f} M",
            found["dtype"],
            ", ".join(map(str, found["taps"])),
            found.get("anchors") or "-",
            loss_cell(found),
            recipe_cell(found),
        ]
        for target, kinds in content["trainings"].items()
        for kind, sides in kinds.items()
        for side, found in sides.items()
    ]
    header = (
        "target, kind, side, best rate, steps, training tokens, trained weights, dtype, "
        "layers read, anchors a step"
    )
    return [
        "# Headstart and speculators on the same answers",
        "",
        f"speculators {VERSION} by its own recipe, Headstart by conf/head with the overrides in "
        "the last column of the table of trainings. Ours has more of the documents in its loss: "
        "with `train.context_weight=1` the tokens of prompts, and more anchors in a step. The "
        "section on controls shows what the library gains by them. The same "
        f"documents, {EPOCHS} passes, {TOKENS:,} tokens a step, both sides in the same dtype, "
        "equal numbers of layers and sizes of blocks (P-EAGLE: 4 layers, 8 depths). Both had "
        f"the rates {', '.join(f'{rate:g}' for rate in RATES)}: the two in the middle were tried, "
        "and those beyond the better one until one was worse (earlier rows: all four). Each kept "
        "the one with the best mean tau on the validation prompts at temperatures 0 and 1; three "
        "seeds. A rate marked as edge is the first or last one, and one beyond it may be better. "
        "All drafters are decoded by "
        "Headstart, on prompts that neither side saw. Our recipes were chosen by ablations.md, "
        "which decodes the same prompts; the second table is of others. "
        f"Intervals: 95% bootstrap over prompts and seeds. Made by `{content['command']}`, earlier "
        "rows by the same command with their targets, kinds, --controls and --engine-python, and "
        "with our overrides of that time, which the table of trainings shows; all figures: "
        "peers.json.",
        "",
        *table(content["rows"]),
        "",
        *confirmed_lines(content.get("confirmed", [])),
        "The trainings at the best rate, first seed. Tokens: without padding, and those of the "
        "library's EAGLE-3 and P-EAGLE without the first of each document. The loss is the "
        "library's own, on the target's answers to the validation prompts.",
        "",
        *markdown_table(
            [*header.split(", "), "the library's validation loss", "recipe"], trainings
        ),
        "",
        *control_lines(content.get("controls", [])),
        *served_lines(content.get("served", [])),
    ]


def confirmed_lines(rows: Sequence[Facts]) -> list[str]:
    """The table of the further prompts; empty without any."""
    if not rows:
        return []
    return [
        "The same drafters on as many further prompts, on which no recipe was chosen:",
        "",
        *table(rows),
        "",
    ]


def control_lines(rows: Sequence[Facts]) -> list[str]:
    """The lines of the section on controls; empty without any."""
    if not rows:
        return []
    header = "target, kind, T, rule, K, tau, ours / control, control / library, seeds".split(", ")
    return [
        "## Controls",
        "",
        "The library's drafters with what ours has: the tokens of prompts in the loss (EAGLE-3, "
        "P-EAGLE), or as many anchors (DFlash, DSpark); at the rate that is best without. Ratios "
        "of (tau - 1): ours to these drafters, and these to the library's own. The intervals of a "
        "control with one seed hold no variation between its trainings.",
        "",
        *markdown_table(
            header,
            [
                [
                    *(row[key] for key in ("target", "kind", "temperature", "rule", "depth")),
                    cell(mine["theirs"]["tau"], mine["theirs"]["tau_ci95"]),
                    *(cell(each["ratio"], each["ratio_ci95"]) for each in (mine, own)),
                    str(len(row["seeds"])),
                ]
                for row in rows
                for mine, own in [(row["against_ours"], row["against_own"])]
            ],
        ),
        "",
    ]


def loss_of(found: Facts) -> float | None:
    """The library's validation loss; None for our side."""
    loss: float | None = found.get("validation", {}).get("loss_epoch")
    return loss


def loss_cell(found: Facts) -> str:
    """The library's validation loss; a dash for our side."""
    loss = loss_of(found)
    return "-" if loss is None else f"{loss:.3f}"


def recipe_cell(found: Facts) -> str:
    """Our overrides; optimiser, schedule and loss as the library resolved them."""
    told = found.get("settings", {})
    if "recipe" in found:
        return f"`{' '.join(found['recipe'])}`"
    names = ("optimizer", "scheduler_type", "loss_fn")
    return ", ".join(str(told[name]) for name in names if name in told) or "-"


main = command(
    report,
    python={"required": True, "help": f"a python that has speculators {VERSION}"},
    targets=some_of(sorted(PLACES)),
    kinds=some_of(sorted(OURS)),
    controls={
        "nargs": "+",
        "type": int,
        "default": [],
        "help": "seeds of the library's drafters with what ours has; none: no control",
    },
    engine_python=("", "a python that has vLLM; empty: nothing is served"),
    **options_of_bench("peers"),
)

if __name__ == "__main__":
    sys.exit(main())
