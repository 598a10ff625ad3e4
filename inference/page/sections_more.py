"""Sections that belong to the whole page: tau over training and rounds, measurements side by side, how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference.decoding.rules.names import rule_text
from inference.page.charts import Axes, Dot, Line, dots, lines
from inference.page.data import Page, Run, Training
from inference.page.markup import Content, Html, folded, interval, number, table, tag
from inference.page.scale import ticks
from inference.page.sections import figure, grid
from inference.report import draft_text
from inference.report_schema import arm_name

WORDS = (
    (
        "τ",
        "Tokens committed per verification: the accepted drafts and the target's own token. Plain decoding has 1.",
    ),
    ("TAR", "Accepted drafted tokens over those that were tested."),
    (
        "speedup",
        "Tokens per second over those of the same loop without a drafter: same engine, prompts and run, prefill excluded.",
    ),
    (
        "ideal",
        "What would be left if verifying many nodes cost no more than verifying one, and only drafting took time.",
    ),
    ("efficiency", "Speedup over ideal."),
    (
        "same text",
        "Answers equal to plain decoding's, token by token; a near tie lies within the number format's own error.",
    ),
    (
        "TV",
        "Total variation: half the sum of the differences of both models' probabilities. 1 − TV is what they have in common.",
    ),
    ("ECE", "Mean difference of confidence and accepted share over ten bins, by the drafts in them."),
    ("interval", "95%, by bootstrap over prompts."),
)


def whole(key: str, title: str, *content: Content, lead: Content = None) -> Html:
    """A section of the page that belongs to no single measurement."""
    opening = tag("p", lead, class_="lead") if lead is not None else None
    return tag(
        "section",
        tag("h2", title, id=f"{key}-title"),
        opening,
        content,
        id=key,
        aria_labelledby=f"{key}-title",
    )


# ---- training ----------------------------------------------------------------------------------------------------


def training(page: Page) -> Html | None:
    """tau while training, a drawing per drafter on one scale; tau by round. None where nothing was trained here."""
    if not page.trainings and not page.rounds:
        return None
    top = max(point.high for one in (*page.trainings, *page.rounds) for point in one.points)
    parts: list[Content] = []
    if page.rounds:
        parts += [
            tag("h3", "Over rounds"),
            grid(*(_course(one, "round", top, "h4") for one in page.rounds), wide=True),
        ]
        parts.append(_course_table(page.rounds, "Round"))
    if page.trainings:
        ranked = sorted(page.trainings, key=lambda one: -max(point.tau for point in one.points))
        if page.rounds:
            parts.append(tag("h3", "Over training"))
        parts += [
            grid(*(_course(one, "step", top, "h4" if page.rounds else "h3") for one in ranked)),
            _course_table(ranked, "Step"),
        ]
    lead = "τ on validation prompts, measured by decoding them; the checkpoint with the best one is kept (ringed)."
    return whole("training", "τ over training and rounds", parts, lead=lead)


def _course(one: Training, unit: str, top: float, level: str) -> Html:
    points = [(point.at, point.tau) for point in one.points]
    best = max(one.points, key=lambda point: (point.best, point.tau))
    steps = [point.at for point in one.points]
    marks = (
        steps
        if len(steps) <= 6
        else [m for m in ticks(min(steps), max(steps), 5) if min(steps) <= m <= max(steps)]
    )
    rings = [(best.at, best.tau, number(best.tau))]
    axes = Axes(unit, "τ", marks, top=top, height=190.0, rings=rings)
    drawn = Line("", points, 0, [(point.low, point.high) for point in one.points])
    return figure(
        one.name, lines(f"τ of {one.name} by {unit}", [Line("", drawn.points, 0, drawn.intervals)], axes)
    )


def _course_table(courses: Sequence[Training], unit: str) -> Html:
    rows = [
        [
            one.name,
            f"{point.at:g}",
            number(point.tau),
            interval(point.low, point.high),
            "best" if point.best else "",
        ]
        for one in courses
        for point in one.points
    ]
    caption = f"τ by {unit.lower()}"
    return folded(f"Table: {caption}", table(["Drafter", unit, "τ", "95% interval", ""], rows, caption))


# ---- several measurements ----------------------------------------------------------------------------------------


def comparison(page: Page) -> Html | None:
    """Every drafter across the measurements; None where there is only one."""
    if len(page.runs) < 2:
        return None
    names = list(dict.fromkeys(arm_name(entry) for run in page.runs for entry in run.drafters))
    entries = {run.label: {arm_name(entry): entry for entry in run.drafters} for run in page.runs}
    speeds = [value for found in entries.values() for e in found.values() for value in e["speedup_ci95"]]
    taus = [value for found in entries.values() for e in found.values() for value in e["tau_ci95"]]
    parts: list[Content] = []
    for key, title, unit, bounds in (
        ("speedup", "Speedup", "×", (min(speeds, default=1.0), max(speeds, default=1.0))),
        ("tau", "Tokens per verification", "", (1.0, max(taus, default=1.0))),
    ):
        figures = []
        for run in page.runs:
            found = entries[run.label]
            rows = [
                Dot(name, found[name][key], tuple(found[name][f"{key}_ci95"]), found[name] is run.best)
                for name in names
                if name in found
            ]
            figures.append(
                figure(
                    run.label,
                    dots(f"{title}, {run.label}", rows, 1.0, unit, bounds),
                    _conditions(run),
                    level="h4",
                )
            )
        parts += [tag("h3", title), grid(*figures)]
    rows_ = [[name, *(_cell(entries[run.label].get(name)) for run in page.runs)] for name in names]
    caption = "Draft, speedup and τ by measurement"
    return whole(
        "compare",
        "Measurements side by side",
        parts,
        folded(f"Table: {caption}", table(["Drafter", *(run.label for run in page.runs)], rows_, caption)),
        lead="The same drafters in the same order under other settings; one scale for all.",
    )


def _conditions(run: Run) -> str:
    """What sets a measurement apart."""
    settings = run.report["settings"]
    drafts = sorted({draft_text(entry) for entry in run.drafters})
    shapes = drafts[0] if len(drafts) == 1 else f"{len(drafts)} kinds of drafts"
    rule = "" if settings["rule"] == "match" else f"rule {rule_text(settings['rule'], settings['temperature'])}, "
    return f"Temperature {settings['temperature']:g}, {rule}{shapes}, {settings['prompts']} prompts."


def _cell(entry: Any) -> str:
    if entry is None:
        return "–"
    return f"{draft_text(entry)}: {number(entry['speedup'])}×, τ {number(entry['tau'])}"


# ---- how it was measured -----------------------------------------------------------------------------------------


def method(page: Page) -> Html:
    """Definitions, and under which conditions every measurement was made."""
    parts: list[Content] = [
        tag("h3", "Words"),
        tag("dl", [(tag("dt", word), tag("dd", said)) for word, said in WORDS]),
    ]
    for run in page.runs:
        report = run.report
        target, device, settings = report["target"], report["device"], report["settings"]
        rule = rule_text(settings["rule"], settings["temperature"])
        facts = [
            ("Target", f"{target['id']}, {target['parameters']:,} parameters, {target['dtype']}"),
            ("Revision", target["revision"]),
            ("Device", f"{device['name']} ({device['kind']}, {device['threads']} threads)"),
            ("Settings", f"temperature {settings['temperature']:g}, up to {settings['max_new_tokens']} new tokens, batch size "
             f"{settings['batch_size']}, rule {rule}, {settings['prompts']} prompts, seed {settings['seed']}"),
            ("Command", report.get("command", "")),
            ("Versions", ", ".join(f"{name} {value}" for name, value in _pairs(report.get("versions")))),
        ]  # fmt: skip
        parts += [
            tag("h3", run.label),
            tag(
                "dl",
                [(tag("dt", name), tag("dd", said, class_="path")) for name, said in facts if said],
                class_="facts",
            ),
        ]
    return whole("method", "How it was measured", parts)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
