"""The page of the report on learning (`scripts.evidence.learn`)."""

from __future__ import annotations

from collections.abc import Sequence

from inference.report.markdown import markdown_table
from scripts.evidence.common import Facts, cell
from scripts.evidence.learn_figures import FROZEN, RETRAINED, SIDES

MIXED = (
    " in their phase. Most of those of the phases after a change of the target were learnt from in "
    "an earlier phase, by the server alone, which favours **learned** there."
)
LIVE = (FROZEN, "learning", RETRAINED)
"""The columns of tau over time."""


def page(content: Facts) -> list[str]:
    """The report as Markdown."""
    phases, totals = content["phases"], content["totals"]
    simulated, own = content["false_swaps"]["simulated"], content["false_swaps"]["in_this_run"]
    # reports of earlier versions dealt the prompts of the mixed phases anew
    apart = content["settings"].get("probes_in_all_phases", False)
    return [
        "# Learning from traffic",
        "",
        f"Written by `{content['command']}` from [learn.json](learn.json).",
        "",
        *(f"* **{phase['name']}**: {phase['about']}." for phase in phases),
        "",
        f"Of {totals['sent']} requests {totals['lost']} were lost. Of {totals['compared']} answers "
        f"{totals['identical']} are those of plain decoding token by token, {totals['near_ties']} "
        f"differ in near ties of float32, and {totals['mismatches']} otherwise.",
        "",
        "## tau",
        "",
        "On requests that neither the server nor the training from scratch has learnt from"
        f"{'.' if apart else MIXED} "
        "**frozen**: the drafter with which the first phase begins. **learned**: the one that "
        "serves at the phase's end. **retrained**: from scratch on the target's answers to the "
        "phase's other requests. **of retrained**: learned / retrained; **of accepted**: the same "
        "of tau - 1; **regained**: (learned - frozen) / (retrained - frozen), where retrained is "
        "better.",
        "",
        *shares_table(phases),
        "",
        "## Cost",
        "",
        "Tokens are positions of training rows; after a change of the target its refresh counts "
        "too. The learner trains at low priority beside the server, the training from scratch "
        "alone.",
        "",
        *cost_table(phases),
        "",
        "## tau over time",
        "",
        "The same requests by windows. **learning**: as the server answered, comparisons included.",
        "",
        *time_table(phases),
        "",
        "## False swaps",
        "",
        f"The test bounds the chance of taking a candidate that is not better by "
        f"{simulated['bound']:.0%} ([learning](../learning.md#the-test)). Of "
        f"{simulated['comparisons']} simulated comparisons of a drafter with itself, on up to "
        f"{simulated['pairs']} answers of each drawn from this run's, {simulated['swaps']} ended "
        f"with a swap. In the run itself {own['false']} of {own['swaps']} swaps did not raise tau "
        "on the requests above.",
        "",
    ]


def shares_table(phases: Sequence[Facts]) -> list[str]:
    """tau of the three drafters, and the learned drafter's share of the retrained one's."""
    header = ["phase", *SIDES, "of retrained", "of accepted", "regained"]
    rows = [
        [
            phase["name"],
            *(cell(phase["tau"][side]["tau"], phase["tau"][side]["tau_ci95"]) for side in SIDES),
            share(phase["tau"], "by_retrained"),
            share(phase["tau"], "accepted_by_retrained"),
            share(phase["tau"], "regained"),
        ]
        for phase in phases
    ]
    return markdown_table(header, rows)


def cost_table(phases: Sequence[Facts]) -> list[str]:
    """Cycles, and the cost of the cycles and of the training from scratch."""
    header = ["phase", "cycles", "swaps", "rejected", "learning tokens", "seconds"]
    header += ["retraining tokens", "seconds"]
    rows = [
        [
            phase["name"],
            f"{phase['learner']['begun']}",
            f"{phase['learner']['swapped']}",
            f"{len(phase['learner']['rejected'])}",
            f"{phase['cost']['tokens']:,}",
            f"{phase['cost']['seconds']:.0f}",
            f"{phase['retraining']['tokens']:,}",
            f"{phase['retraining']['seconds']:.0f}",
        ]
        for phase in phases
    ]
    return markdown_table(header, rows)


def time_table(phases: Sequence[Facts]) -> list[str]:
    """tau by windows of requests."""
    rows = [
        [phase["name"], str(row["through"]), *(f"{row[side]:.2f}" for side in LIVE)]
        for phase in phases
        for row in phase["over_time"]
    ]
    return markdown_table(["phase", "requests so far", *LIVE], rows, texts=2)


def share(facts: Facts, key: str) -> str:
    """A share with its interval in percent; a dash if there is none."""
    if facts[key] is None:
        return "-"
    low, high = facts[f"{key}_ci95"]
    return f"{facts[key]:.0%} [{low:.0%}, {high:.0%}]"
