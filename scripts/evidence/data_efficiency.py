"""Measures what a drafter gains from more answers, and from other uses of the same training tokens.

    python -m scripts.evidence.data_efficiency [--kinds eagle3] [--sizes 1000 3000] [--seeds 0 1]

The curve: every kind is trained with every seed on the first 1,000, 3,000, 10,000 and 30,000
answers of the embedded target. Each set is part of the next. The repository has 1,440 prompts to
train on. The target writes the other prompts from their beginnings, as `feedback.variations` does.
The prompts of a pool are in one random order, so every set up to its size is a sample of the same
mixture; larger sets add prompts that the target writes next (answer_sets.py).
All trainings make two passes by the kind's recipe and rate in experiment=families: **passes are
equal, and steps grow with the answers**, as they do for a user who generates more. (With equal
steps, the small sets would be passed sixty times, at the cost of the largest; the gain of more
passes is one of the arms.) A power law and a saturating curve of tau - 1 in the number of answers
are fitted (curves.py). The gain of a doubling follows from the better one.

The arms spend the training tokens of the second size in other ways (`ARMS`), most of them from the
answers of the first size or fewer. `rounds` has the prompts of the second size in three shares, so
that it differs from that size's own trainings in the rounds alone. Each arm is placed on the kind's
curve: the number of answers at which tau is the same is compared with the number whose two passes
have as many tokens.

All trainings on the first answers of a size read the target's features from one store; where the
disk has no room for it, the target runs in the trainings.

All drafters decode chains of 7 at temperature 0 on prompts that no training saw. Intervals resample
prompts, the same for all trainings, and seeds. Writes docs/reports/data_efficiency.{json,md} after
every size and arm of a kind. Finished work is kept under --work, and the command continues after an
interruption; other kinds, sizes, arms and seeds stay in the report, and the fits use all of them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

from heads.api.errors import UserError
from inference.folders import copy_plain
from inference.manifest import file_sha256
from inference.measure.metrics import Floats, Totals, ratios
from inference.report.markdown import markdown_table
from scripts.evidence.answer_sets import AnswerSets, rows_in
from scripts.evidence.common import (
    Facts,
    cell,
    family_overrides,
    family_recipe,
    read_json,
    run_on_target,
    settings_of,
)
from scripts.evidence.curves import FORMS, Curves, between, choose, fit
from scripts.evidence.rounds import answers_of
from scripts.evidence.small_targets import (
    EXPERIMENT,
    PLACES,
    SEEDS,
    UNMEASURED,
    Bench,
    Place,
    answers_facts,
    begin,
    chain,
    compared,
    decisive,
    digest,
    drawn,
    interval,
    options_of_bench,
    require_answers,
    save,
    some_of,
)
from scripts.stages.loop.plan import TOKEN_ROWS
from scripts.tools.common import command

KINDS = ("eagle3", "dspark", "lilicorr", "distilled")
"""Rows of experiment=families."""
SIZES = (1_000, 3_000, 10_000, 30_000)
PASSES = 2
DEPTH, BRANCHED_DEPTH = 7, 4
"""Levels of the measured chains, and of the chains whose rejected tokens are continued."""
ROUNDS = 3
JUDGED = 64
"""Validation prompts per domain that judge a round, at most: all of the embedded target's."""
FEW = 10
"""`variations` begins with one prompt in this many of the first size."""
BEYOND = 10.0
"""Places on the curve are reported up to this factor above the largest size and below the
smallest."""
REPEATED, IN_ROUNDS, BRANCHES, VARIATIONS, FLATTEST = ARMS = (
    "repeated",
    "rounds",
    "branches",
    "variations",
    "flattest",
)
LABELS = {
    REPEATED: "{start:,} answers, passed more often",
    IN_ROUNDS: "{equal:,} prompts in three rounds, each on other prompts and from the tokens that "
    "were rejected in its answers (weights of tokens and anchors)",
    BRANCHES: "{start:,} answers, and others from tokens that the target refused in them",
    VARIATIONS: "{few:,} answers, and those to prompts that the target writes from theirs",
    FLATTEST: "of {larger:,} answers the flattest {equal:,} (arXiv 2601.18902)",
}
SIZES_NEEDED = {FLATTEST: 3}
"""Number of sizes that an arm needs; the other arms need two."""


@dataclass(frozen=True)
class Trained:
    """A training, decoded. tokens: without padding; loop: how a loop of rounds ended."""

    steps: int
    tokens: int
    totals: Totals
    loop: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The trainings of a kind on the same answers by seed, which ascend. answers: different ones,
    the most of a training; recipe: `Study.recipe` of the trainings, empty in reports of earlier
    versions."""

    answers: int
    by_seed: dict[int, Trained]
    recipe: str = ""

    @property
    def steps(self) -> float:
        """The mean over seeds."""
        return float(np.mean([one.steps for one in self.by_seed.values()]))

    @property
    def tokens(self) -> float:
        """The mean over seeds."""
        return float(np.mean([one.tokens for one in self.by_seed.values()]))

    @property
    def totals(self) -> list[Totals]:
        return [one.totals for one in self.by_seed.values()]

    def joined(self, earlier: Measured | None) -> Measured:
        """These trainings and those of other seeds in `earlier`."""
        if earlier is None:
            return self
        by_seed = dict(sorted({**earlier.by_seed, **self.by_seed}.items()))
        return Measured(max(self.answers, earlier.answers), by_seed, self.recipe)


@dataclass
class Found:
    """The results of a kind: by size, and by arm."""

    curve: dict[int, Measured] = field(default_factory=dict)
    arms: dict[str, Measured] = field(default_factory=dict)


class Study(Bench):
    """The trainings on one target. sizes: ascending."""

    def __init__(
        self, place: Place, work: Path, threads: int, prompts: int, pool: int, sizes: Sequence[int]
    ) -> None:
        # one store for all kinds, whichever are given
        heads = [family_recipe(kind)[0].removeprefix("head=") for kind in KINDS]
        super().__init__(place, work, threads, prompts, heads)
        self.sets, self.sizes = AnswerSets(self, pool), sizes

    def recipe(self, kind: str) -> str:
        """A digest of the settings of a kind's trainings, with all defaults."""
        words = [*family_overrides(kind), *UNMEASURED]
        return digest(decisive(settings_of("train", EXPERIMENT, *words)))

    def measured(self, kind: str, checkpoints: Mapping[int, Path], answers: int) -> Measured:
        """The drafters of all seeds, decoded."""
        by_seed = {}
        for seed, checkpoint in sorted(checkpoints.items()):
            facts = self.facts(checkpoint)
            totals = self.totals(checkpoint, "T=0", self.measuring, chain(DEPTH))
            about = (facts["steps"], facts["tokens"], totals, facts.get("loop", {}))
            by_seed[seed] = Trained(*about)
        return Measured(answers, by_seed, self.recipe(kind))

    def on_curve(self, kind: str, size: int, seed: int) -> Path:
        """The checkpoint of a training on the first `size` answers."""
        words = [*family_overrides(kind), f"train.epochs={PASSES}", f"run.seed={seed}"]
        answers = self.sets.first(size)
        return self.train(f"{kind}-{size}-{seed}", *words, answers=answers, stored=True)

    def point(self, kind: str, size: int, seeds: Sequence[int]) -> Measured:
        return self.measured(kind, {seed: self.on_curve(kind, size, seed) for seed in seeds}, size)

    def arm(self, kind: str, arm: str, seeds: Sequence[int]) -> Measured:
        """An arm, with as many steps as a training on the second size."""
        steps = int(self.facts(self.on_curve(kind, self.sizes[1], seeds[0]))["steps"])
        if arm == IN_ROUNDS:
            loops = {seed: self.in_rounds(kind, seed, steps) for seed in seeds}
            most = max(self.facts(loop)["answers"] for loop in loops.values())
            return self.measured(kind, loops, most)
        answers = self.answers_of(kind, arm, seeds)
        words, stored = [*family_overrides(kind), f"train.max_steps={steps}"], arm == REPEATED
        checkpoints = {
            seed: self.train(
                f"{kind}-{arm}-{seed}", *words, f"run.seed={seed}", answers=answers, stored=stored
            )
            for seed in seeds
        }
        return self.measured(kind, checkpoints, rows_in(answers))

    def answers_of(self, kind: str, arm: str, seeds: Sequence[int]) -> Path:
        """The answers on which an arm is trained. Branches use the drafter of the first size and
        seed."""
        start, equal, *larger = self.sizes
        if arm == REPEATED:
            return self.sets.first(start)
        if arm == BRANCHES:
            drafter = self.on_curve(kind, start, seeds[0])
            return self.sets.branched(self.sets.first(start), drafter, BRANCHED_DEPTH, equal)
        if arm == VARIATIONS:
            return self.sets.from_few(few_of(start), equal)
        return self.sets.flattest(self.sets.first(larger[0]), equal)

    def in_rounds(self, kind: str, seed: int, steps: int) -> Path:
        """The drafter of a loop of rounds that share the prompts of the second size among them. All
        answers are greedy, as those of that size are."""
        start = self.sets.first(self.sizes[1])
        words = [*family_overrides(kind), f"loop.rounds={ROUNDS}", "loop.round.prompts=share"]
        words += [f"train.max_steps={math.ceil(steps / ROUNDS)}", "loop.round.patience=0"]
        words += ["loop.round.overrides=[]", "sampling.temperature=0"]
        words += ["loop.round.checked_answers=0", f"run.seed={seed}", f"sampling.seed={seed}"]
        words += [f"loop.round.judge=[bench.prompts_per_domain={JUDGED},decode.max_new_tokens=64]"]

        def run(out: Path) -> Facts:
            """Run the loop, keep its last drafter in `out`, and return its cost."""
            place, validation = self.work / "rounds" / out.parent.name, self.place.validation
            here = ["data=embedded", f"data.path={self.sets.prompts_of(start)}"]
            here += [f"data.{key}={value}" for key, value in TOKEN_ROWS.items()]
            here += [f"train.prompts=[{validation}]", "bench=jsonl", f"bench.prompts={validation}"]
            here += ["bench.prompts_per_domain=1", "measure.kinds=[]"]
            here += [f"run.threads={self.threads}"]
            target = self.place.target
            run_on_target("loop", target, place, *words, *here, experiment="embedded_loop")
            copy_plain(next((place / "train").glob("*/best")), out)
            loop = read_json(place / "loop.json")
            return {
                "steps": sum(entry["training"]["steps"] for entry in loop["rounds"]),
                "tokens": loop["spent"]["tokens"],
                "answers": sum(map(answers_of, loop["rounds"])),
                "loop": {"best_round": loop["best"]["round"], "off": loop["off"]},
            }

        settings = settings_of("loop", "experiment=[embedded_loop]", *words)
        # the draft decides which tokens are rejected
        key = [decisive(settings), settings.with_defaults["decode"], answers_facts(start)]
        # the prompts that judge the rounds decide which drafter is kept
        key.append(file_sha256(self.place.validation))
        return self.once(f"{kind}-{IN_ROUNDS}-{seed}", key, run)


def few_of(start: int) -> int:
    return max(1, start // FEW)


# The report


def report(given: argparse.Namespace) -> None:
    """Train, decode, and write the report after every size and arm of a kind."""
    pool = given.pool or max(SIZES[-1], *given.sizes)
    if min(given.sizes) < 1:
        raise UserError(f"--sizes must be at least 1; given: {given.sizes}.")
    place = PLACES["embedded"]
    require_answers(place)
    settings = {"pool": pool, "passes": PASSES, "depth": DEPTH, "beyond": BEYOND}
    settings |= {"answers": digest(answers_facts(place.answers))}
    content = begin(given, settings)
    kinds: Facts = content.setdefault("kinds", {})
    found = {kind: found_in(entry) for kind, entry in kinds.items()}
    sizes = sorted({*given.sizes, *(size for one in found.values() for size in one.curve)})
    require_same_sizes(given.out, kinds, sizes)
    study = Study(place, given.work.resolve(), given.threads, given.prompts, pool, sizes)
    for kind in given.kinds:
        if left := drop_other_recipe(found.get(kind, Found()), study.recipe(kind)):
            print(
                f"{left} results of {kind} leave the report: they are of another recipe, or of a "
                "CPU with other number formats. To keep them, give another --out.",
                flush=True,
            )

    def write(kind: str) -> None:
        kinds[kind] = summary(kind, found[kind], sizes)
        save(given, content, settings, markdown)

    for size in sorted(set(given.sizes)):
        for kind in given.kinds:
            curve = found.setdefault(kind, Found()).curve
            curve[size] = study.point(kind, size, given.seeds).joined(curve.get(size))
            write(kind)
    for arm in (arm for arm in given.arms if len(sizes) >= SIZES_NEEDED.get(arm, 2)):
        for kind in given.kinds:
            curve, arms = found[kind].curve, found[kind].arms
            if sizes[1] not in curve:
                curve[sizes[1]] = study.point(kind, sizes[1], given.seeds)
            arms[arm] = study.arm(kind, arm, given.seeds).joined(arms.get(arm))
            write(kind)
    print("\n".join(markdown(content)))


def drop_other_recipe(found: Found, recipe: str) -> int:
    """Leave out the results of a kind that were trained by another recipe; returns their number."""
    before = len(found.curve) + len(found.arms)
    found.curve = {size: one for size, one in found.curve.items() if one.recipe in ("", recipe)}
    found.arms = {arm: one for arm, one in found.arms.items() if one.recipe in ("", recipe)}
    return before - len(found.curve) - len(found.arms)


def sizes_of(arm: str, sizes: Sequence[int]) -> list[int]:
    """The sizes of the curve on which an arm depends."""
    return [*sizes[: SIZES_NEEDED.get(arm, 2)]]


def require_same_sizes(out: Path, kinds: Facts, sizes: Sequence[int]) -> None:
    """Raise `UserError` if the arms of a report stand between other sizes than `sizes` gives."""
    for kind, entry in kinds.items():
        for arm, row in entry.get("arms", {}).items():
            if row["sizes"] != sizes_of(arm, sizes):
                raise UserError(
                    f"the arm {arm} of {kind} in '{out.with_suffix('.json')}' spends the training "
                    f"tokens of the sizes {row['sizes']}, and with these --sizes it would be "
                    f"{sizes_of(arm, sizes)}. Give sizes above {row['sizes'][-1]}, or another "
                    "--out."
                )


def seed_facts(seed: int, one: Trained) -> Facts:
    """A training, with its committed tokens and passes by prompt, from which a later command
    computes the fits again."""
    facts: Facts = {"seed": seed, "steps": one.steps, "tokens": one.tokens}
    facts |= {"committed": one.totals.committed.tolist(), "passes": one.totals.passes.tolist()}
    return facts | ({"loop": one.loop} if one.loop else {})


def trained_in(facts: Facts) -> Trained:
    """The training of a `seed_facts`."""
    names = [str(index) for index in range(len(facts["passes"]))]
    nothing = np.zeros(len(names))
    sums = (np.array(facts["committed"]), np.array(facts["passes"]), nothing, nothing)
    totals = Totals(names, names, *sums, np.zeros((1, 1)), seconds={})
    return Trained(facts["steps"], facts["tokens"], totals, facts.get("loop", {}))


def found_in(entry: Facts) -> Found:
    """The results that a report has of a kind."""

    def measured(row: Facts) -> Measured:
        by_seed = {one["seed"]: trained_in(one) for one in row["seeds"]}
        return Measured(row["answers"], by_seed, row["recipe"])

    curve = {row["size"]: measured(row) for row in entry["points"]}
    return Found(curve, {arm: measured(row) for arm, row in entry.get("arms", {}).items()})


def summary(kind: str, found: Found, sizes: Sequence[int]) -> Facts:
    """The entry of a kind: its points, the fits, the gains of doublings, and its arms."""
    curve, arms = dict(sorted(found.curve.items())), found.arms
    measured = [*curve.values(), *arms.values()]
    draws = drawn([one.totals for one in measured])
    rows: list[Facts] = [
        {
            "answers": one.answers,
            "steps": one.steps,
            "tokens": one.tokens,
            "tau": tau,
            "tau_ci95": interval(resamples),
            "seeds": [seed_facts(seed, trained) for seed, trained in one.by_seed.items()],
            "recipe": one.recipe,
        }
        for one, (tau, resamples) in zip(measured, draws, strict=True)
    ]
    points, others = rows[: len(curve)], rows[len(curve) :]
    for size, row in zip(curve, points, strict=True):
        row["size"] = size
    entry: Facts = {"overrides": family_overrides(kind), "points": points}
    if len(curve) < 2:
        return entry
    gains = np.stack([[tau, *resamples] for tau, resamples in draws], axis=1) - 1  # [1 + R, rows]
    amounts = [float(size) for size in curve]
    able = [form for form in FORMS if form.parameters <= len(amounts)]
    fits = {form: fit(form, amounts, gains[:, : len(amounts)]) for form in able}
    form = choose(amounts, list(gains[0, : len(amounts)]))
    entry["form"] = form.name
    entry["fits"] = {form.name: fit_facts(curves) for form, curves in fits.items()}
    entry["doublings"] = [{"answers": size, **doubling(fits[form], size)} for size in curve]
    entry["arms"] = {}
    equal = curve.get(sizes[1])
    for name, row, gain in zip(arms, others, gains[:, len(amounts) :].T, strict=True):
        assert equal is not None, "sizes come before arms"
        as_many = sizes[1] * arms[name].tokens / equal.tokens
        against = compared(arms[name].totals, equal.totals)
        entry["arms"][name] = {
            **row,
            "sizes": sizes_of(name, sizes),
            "way": label(name, sizes),
            "ratio": against["ratio"],
            "ratio_ci95": against["ratio_ci95"],
            "as_many_tokens": as_many,
            **worth(amounts, gains[:, : len(amounts)], gain, as_many),
        }
    return entry


def label(arm: str, sizes: Sequence[int]) -> str:
    """The description of an arm, in words."""
    start, equal, larger = (*sizes, 0)[:3]
    return LABELS[arm].format(start=start, equal=equal, larger=larger, few=few_of(start))


def estimate(values: Floats, name: str) -> Facts:
    """The first value, which is the measured one, with the interval of the others."""
    return {name: float(values[0]), f"{name}_ci95": interval(values[1:])}


def fit_facts(curves: Curves) -> Facts:
    """A fit of tau - 1: the first curve fits the measured values, the others fit resamples."""
    facts = estimate(curves.rate, "rate") | {"scale": float(curves.scale[0])}
    if curves.form.limited:
        facts |= estimate(curves.limit + 1, "limit_of_tau")
    return facts | {"squares": float(curves.error[0])}


def doubling(curves: Curves, size: float) -> Facts:
    """The factor on tau - 1 from `size` answers to twice as many."""
    return estimate(ratios(curves.at(2 * size), curves.at(size)), "factor")


def worth(amounts: Sequence[float], curve: Floats, gain: Floats, as_many: float) -> Facts:
    """The number of answers at which the measured points `curve` [1 + R, N] have `gain` [1 + R],
    within `BEYOND` of the measured sizes, and its ratio to `as_many`. Between points, because a
    fitted curve misses them by as much as arms differ."""
    bounds = (amounts[0] / BEYOND, amounts[-1] * BEYOND)
    place = np.clip(between(amounts, curve, gain), *bounds)
    return estimate(place, "worth") | estimate(place / as_many, "worth_ratio")


def loop_lines(kinds: Facts) -> list[str]:
    """A line for each kind that was trained in rounds: the rounds whose drafters were kept, and the
    switches that were turned off."""
    lines = []
    for kind, entry in kinds.items():
        trained = entry.get("arms", {}).get(IN_ROUNDS, {}).get("seeds", [])
        loops = [one["loop"] for one in trained if "loop" in one]
        if loops:
            best = ", ".join(str(one["best_round"]) for one in loops)
            off = sorted({switch for one in loops for switch in one["off"]})
            lines.append(
                f"{kind} in rounds: the drafter of round {best} (from 0, by seed) was best on the "
                f"validation prompts and is measured; turned off on the way: "
                f"{', '.join(off) or 'nothing'}."
            )
    return [*lines, ""] if lines else []


def markdown(content: Facts) -> list[str]:
    """The lines of data_efficiency.md."""
    settings, kinds = content["settings"], content["kinds"]
    points = [
        [
            kind,
            f"{row['answers']:,}",
            len(row["seeds"]),
            f"{row['steps']:,.0f}",
            f"{row['tokens']:,.0f}",
            cell(row["tau"], row["tau_ci95"]),
            cell(twice["factor"], twice["factor_ci95"]) if twice else "-",
        ]
        for kind, entry in kinds.items()
        for row, twice in zip_longest(entry["points"], entry.get("doublings", []))
    ]
    fits = [
        [
            kind,
            f"**{name}**" if name == entry["form"] else name,
            cell(found["rate"], found["rate_ci95"]),
            limit_cell(found),
            f"{found['squares']:.2g}",
        ]
        for kind, entry in kinds.items()
        for name, found in entry.get("fits", {}).items()
    ]
    arms = [
        [
            kind,
            row["way"],
            len(row["seeds"]),
            f"{row['answers']:,}",
            f"{row['tokens']:,.0f}",
            cell(row["tau"], row["tau_ci95"]),
            cell(row["ratio"], row["ratio_ci95"]),
            cell(row["worth"], row["worth_ci95"], ",.0f"),
            cell(row["worth_ratio"], row["worth_ratio_ci95"]),
        ]
        for kind, entry in kinds.items()
        for row in entry.get("arms", {}).values()
    ]
    return [
        "# Answers against tau",
        "",
        f"Trainings on the first answers of {settings['pool']:,} to different prompts of the "
        f"embedded target{beyond_pool(settings['pool'], kinds)}, {settings['passes']} passes each, "
        f"with as many seeds as the tables say; chains of {settings['depth']} at temperature 0 "
        f"on {settings['prompts']} prompts that no training saw. Intervals: 95% bootstrap over "
        "prompts and seeds. A doubling is the factor on tau - 1 from so many answers to twice as "
        "many, by the form of the curve that is printed bold below. Made by "
        f"`{content['command']}`, earlier rows by the same command with their kinds, sizes, seeds "
        "and arms; all figures: the JSON file of the same name.",
        "",
        *markdown_table(
            ["kind", "answers", "seeds", "steps", "training tokens", "tau", "a doubling"], points
        ),
        "",
        "tau - 1 = scale x answers^rate (power), or the same below a limit (saturating):",
        "",
        *markdown_table(["kind", "form", "rate", "limit of tau", "squares left"], fits),
        "",
        *(arm_lines(arms, settings["beyond"]) if arms else []),
        *loop_lines(kinds),
    ]


def beyond_pool(pool: int, kinds: Facts) -> str:
    """What sets above the pool have besides its answers; empty if no kind has such a set."""
    sizes = (row["size"] for entry in kinds.values() for row in entry["points"])
    larger = max(sizes, default=0) > pool
    return " (larger sets: and others, to prompts that it writes next)" * larger


def arm_lines(arms: Sequence[Sequence[str]], beyond: float) -> list[str]:
    """The table of the arms, and what its columns are."""
    return [
        "Other ways to spend the training tokens of the second size. The ratio of (tau - 1) is to "
        "that size's own trainings; worth: the answers for which tau is the same, by a power law "
        f"of tau - 1 between neighbouring sizes, at most {beyond:g} times as many as were "
        "measured, and the same over the answers whose passes have as many training tokens.",
        "",
        *markdown_table(
            [
                "kind",
                "trained on",
                "seeds",
                "different answers",
                "training tokens",
                "tau",
                "(tau - 1) ratio",
                "worth, answers",
                "over equal tokens",
            ],
            arms,
        ),
        "",
    ]


def limit_cell(found: Facts) -> str:
    """The limit of tau in a fit; a dash for a form without one."""
    if "limit_of_tau" not in found:
        return "-"
    return cell(found["limit_of_tau"], found["limit_of_tau_ci95"])


main = command(
    report,
    kinds=some_of(KINDS),
    arms=some_of(ARMS) | {"nargs": "*", "help": "without names: the curve alone"},
    sizes={"nargs": "+", "type": int, "default": SIZES, "help": "numbers of answers"},
    seeds={"nargs": "+", "type": int, "default": SEEDS},
    pool=(
        0,
        "different prompts in random order, of which sizes are the first; larger sizes add prompts "
        "that the target writes next; 0: 30000 or the largest size",
    ),
    **options_of_bench("data_efficiency"),
)

if __name__ == "__main__":
    sys.exit(main())
