"""docs/reports/loop.md from loop.json: per kind the rows, the ablation among them, and how the rounds went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.report.markdown import markdown_table
from scripts.rounds_facts import answers_of

REPEATED = "repeated"
"""Key of a kind from few prompts: seed -> the same with other prompts."""
LABELS = {
    "open": "open loop: one training on greedy answers, generated once",
    "loop": "**rounds, as the recipe says**",
    "answers": "rounds, fresh answers alone",
    "distinct": "one training on all answers that the rounds had",
}
HEADER = ["row", "steps", "training tokens", "answers", "tau", "accepted drafts per pass against the open loop", "lossless"]
FEW = (
    "Both sides have the same prompts and as many training tokens as above, by `python -m scripts.loop_report --few-prompts`. The "
    "open loop goes through its greedy answers again and again; in the rounds (`experiment=embedded_few_prompts`) the target also "
    "writes prompts of the same kind itself and answers them ([variations](../feedback.md))."
)
SWITCHES = ["switch alone", "steps", "training tokens", "tau", "accepted drafts per pass against none"]
ROUNDS = ["round", "answers", "generation", "training tokens", "tau, validation prompts", "gain", "learns from"]


def markdown(content: Mapping[str, Any]) -> str:
    """The page."""
    lines = ["# Rounds against one long training", "", *about(content)]
    for kind, entry in content["kinds"].items():
        lines += [f"## {kind}", "", *section(entry, content)]
    few = content.get("few_prompts")
    if few:
        lines += [f"# From {few['prompts']} prompts", "", FEW, ""]
        for kind, entry in few["kinds"].items():
            lines += [f"## {kind}, {few['prompts']} prompts", "", *section(entry, content)]
    if "killed" in content:
        lines += ["## Killed", "", killed(content["killed"]), ""]
    return "\n".join(lines)


def section(entry: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """A kind's tables."""
    lines = [f"`{' '.join(entry['overrides'])}`", ""]
    lines += markdown_table(HEADER, [line(name, row) for name, row in entry["rows"].items()])
    lines += ["", *remarks(entry), ""]
    for seed, again in entry.get(REPEATED, {}).items():
        lines += [f"Repeated with other prompts, as many, and seed {seed}:", ""]
        lines += markdown_table(HEADER, [line(name, row) for name, row in again["rows"].items()])
        lines += ["", *remarks(again), ""]
    if "ablation" in entry:
        lines += [f"Every switch alone: {content['settings']['ablation_steps']} steps from the drafter of round 0.", ""]
        lines += markdown_table(SWITCHES, [switch_line(name, row) for name, row in entry["ablation"].items()])
        lines += [""]
    loop = entry["rows"].get("loop")
    if loop:
        lines += ["The rounds of the recipe:", ""]
        lines += markdown_table(ROUNDS, [round_line(found) for found in loop["rounds"]])
        lines += [""]
    return lines


def about(content: Mapping[str, Any]) -> list[str]:
    """What the page is of."""
    found = content.get("settings")
    if not found:
        return []
    return [
        f"Written by `{content['command']}` from [loop.json](loop.json). Target `{found['target']['id']}` "
        f"({found['target']['parameters']:,} parameters), {found['prompts']} held-out prompts that took part in no decision, "
        f"temperature {found['temperature']:g}, chains of {found['depth']}, up to {found['max_new_tokens']} new tokens. Brackets: "
        "95% bootstrap intervals over prompts; gains are paired. Training tokens: without padding, trials included. "
        "How rounds work: [rounds.md](../rounds.md).",
        "",
    ]


def line(name: str, row: Mapping[str, Any]) -> list[str]:
    """One row of a kind's table."""
    gain, lossless = row["over_open"], row["lossless"]
    low, high = row["tau_ci95"]
    return [
        LABELS[name],
        str(row["steps"]),
        f"{row['tokens']:,.0f}",
        f"{row['answers']:,}",
        f"{row['tau']:.2f} [{low:.2f}, {high:.2f}]",
        "-" if name == "open" else percent(gain),
        f"{lossless['identical']}/{lossless['sequences']}"
        + (f", {lossless['near_ties']} near ties" if lossless["near_ties"] else ""),
    ]


def switch_line(name: str, row: Mapping[str, Any]) -> list[str]:
    """One row of the ablation."""
    low, high = row["tau_ci95"]
    return [
        "none" if name == "plain" else name,
        str(row["steps"]),
        f"{row['tokens']:,.0f}",
        f"{row['tau']:.2f} [{low:.2f}, {high:.2f}]",
        "-" if name == "plain" else percent(row["over_plain"]),
    ]


def percent(gain: Mapping[str, Any]) -> str:
    """A gain in accepted drafted tokens per pass (tau - 1)."""
    low, high = gain["accepted_ci95"]
    return f"{gain['accepted']:+.1%} [{low:+.1%}, {high:+.1%}]"


def remarks(entry: Mapping[str, Any]) -> list[str]:
    """What follows from the rows, in words."""
    found = []
    rows = entry["rows"]
    if "loop_over_distinct" in entry:
        found.append(
            "Rounds against one training on the same answers, generated at once: accepted drafts per pass "
            f"{percent(entry['loop_over_distinct'])}."
        )
    for name, row in rows.items():
        for switch, reason in row.get("off", {}).items():
            found.append(f"Row {name}: the loop turned {switch} off by itself: {reason}.")
    return [f"- {text}" for text in found]


def round_line(entry: Mapping[str, Any]) -> list[str]:
    """One round of a loop."""
    measured, gain, speed = entry["measured"], entry.get("gain"), entry.get("generation")
    low, high = measured["tau_ci95"]
    fast = "plain"
    if speed:
        lossless = speed["lossless"]
        fast = f"x {speed['speedup']:.2f}; {lossless['identical']}/{lossless['sequences']} as plain, {lossless['mismatches']} wrong"
    return [
        str(entry["round"]),
        f"{answers_of(entry):,}",
        fast,
        f"{entry['tokens']:,.0f}",
        f"{measured['tau']:.2f} [{low:.2f}, {high:.2f}]",
        f"{gain['tau']:+.2f} [{gain['tau_ci95'][0]:+.2f}, {gain['tau_ci95'][1]:+.2f}]" if gain else "-",
        ", ".join(entry["switches"]) or "answers",
    ]


def killed(found: Mapping[str, Any]) -> str:
    """The loop that was killed again and again."""
    same = "the same" if found["same_weights"] else "OTHER"
    summary = "the same" if found["same_summary"] else "ANOTHER"
    places = ", ".join(dict.fromkeys(found["places"]))
    return (
        f"A loop of {found['rounds']} rounds, killed {found['kills']} times at random points (in: {places}) and repeated: {same} "
        f"weights to the bit, {summary} loop.json but for times."
    )
