"""The sections of one measurement: summary, domains, depths. Each chart stands with its table."""

from __future__ import annotations

from inference.decoding.rules.names import TEXT, rule_text
from inference.measure.metrics import efficiency
from inference.page.charts import SHAPES, Axes, Dot, Line, dots, lines
from inference.page.data import Entry, Run
from inference.page.markup import Content, Html, folded, interval, join, number, table, tag
from inference.report import draft_text, lossless_text, promise_of
from inference.report_schema import arm_name

DRAWN = SHAPES
"""Series of a line chart that are named; others are background."""


def section(key: str, place: int, title: str, *content: Content, lead: Content = None) -> Html:
    """A part of a measurement's page. key: what the navigation calls it; place: the measurement's number."""
    name = f"{key}-{place}"
    opening = tag("p", lead, class_="lead") if lead is not None else None
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        opening,
        content,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def figure(title: str, drawn: Html, note: Content = None, level: str = "h3") -> Html:
    """A chart under its heading."""
    below = tag("p", note, class_="note") if note is not None else None
    return tag("figure", tag(level, title), drawn, below)


def grid(*figures: Content, wide: bool = False) -> Html:
    """Charts beside one another as far as there is room."""
    return tag("div", figures, class_="grid wide" if wide else "grid")


# ---- summary -----------------------------------------------------------------------------------------------------


def summary(run: Run, place: int) -> Html:
    """What a reader must know: the fastest drafter in a sentence and four figures, then all of them."""
    best, report = run.best, run.report
    if best is None:
        return section("summary", place, "Summary", tag("p", "No drafter was measured."))
    name, settings = arm_name(best), report["settings"]
    tokens = report["baseline"]["tokens_per_second"]
    says = [
        tag("strong", name),
        f", drafting {_drafts(best)}, makes ",
        tag("span", report["target"]["id"], class_="path"),
        f" {number(best['speedup'])} times as fast at temperature {settings['temperature']:g}: "
        f"{number(best['tau'])} tokens per verification instead of one. ",
        _lossless(run),
    ]
    tiles = [
        _tile("Speedup", f"{number(best['speedup'])}×", f"95% interval {interval(*best['speedup_ci95'])}"),
        _tile("Tokens per verification", number(best["tau"]), f"τ, interval {interval(*best['tau_ci95'])}"),
        _tile(
            "Tokens per second",
            number(best["tokens_per_second"], 0),
            f"without a drafter {number(tokens, 0)}",
        ),
        _tile("Same text", lossless_text(best["lossless"], settings), "answers equal to plain decoding, token by token"),
    ]
    return section(
        "summary", place, "Summary", tag("dl", tiles, class_="tiles"), _ranking(run), lead=tag("span", says)
    )


def _drafts(entry: Entry) -> str:
    """What is drafted, inside a sentence."""
    draft = entry["draft"]
    if draft["shape"] == "chain":
        return f"chains of {draft['depth']}"
    return f"trees of {draft['nodes']} nodes, {draft['depth']} deep"


def _lossless(run: Run) -> str:
    settings = run.report["settings"]
    if promise_of(settings) != TEXT:
        return f"Drafts are kept by rule {rule_text(settings['rule'], settings['temperature'])}."
    wrong = [arm_name(entry) for entry in run.drafters if entry["lossless"]["mismatches"]]
    if wrong:
        return f"Answers differ from plain decoding for {', '.join(wrong)}: see the last column."
    return "No answer of any drafter differs from plain decoding beyond the number format's own ties."


def _tile(words: str, value: str, note: str) -> Html:
    return tag(
        "div",
        tag("dt", words),
        tag("dd", value, class_="figure"),
        tag("dd", note, class_="note"),
        class_="tile",
    )


def _ranking(run: Run) -> Html:
    """The drafters by speed; a bar beside each speedup shows it and its interval."""
    plain, entries = run.report["baseline"], run.drafters
    most = max((entry["speedup_ci95"][1] for entry in entries), default=1.0)
    rows: list[list[Content]] = []
    for entry in entries:
        rows.append(
            [
                arm_name(entry),
                draft_text(entry),
                join([tag("b", f"{number(entry['speedup'])}×"), _bar(entry, most)]),
                interval(*entry["speedup_ci95"]),
                number(entry["tau"]),
                interval(*entry["tau_ci95"]),
                f"{100 * entry['tar']:.0f}%",
                number(entry["tokens_per_second"], 1),
                f"{number(entry['ideal_speedup'])}×",
                f"{100 * efficiency(entry):.0f}%",
                number(entry["memory_bytes"]["drafter"] / 1e6, 1),
                lossless_text(entry["lossless"], run.report["settings"]),
            ]
        )
    plain_row = [
        "no drafter",
        "",
        "1.00×",
        "",
        "1.00",
        "",
        "",
        number(plain["tokens_per_second"], 1),
        "",
        "",
        "",
        "baseline",
    ]
    header = [
        "Drafter", "Draft", "Speedup", "95% interval", "τ", "95% interval", "TAR", "Tokens/s", "Ideal", "Efficiency", "MB",
        "Same text",
    ]  # fmt: skip
    caption = f"Drafters by speedup, {run.report['settings']['prompts']} prompts"
    return table(header, [*rows, plain_row], caption, texts=2)


def _bar(entry: Entry, most: float) -> Html:
    """A speedup as a small bar with its interval, 100 units wide for the largest."""
    low, high = entry["speedup_ci95"]
    at = [min(100.0, 100.0 * value / most) for value in (entry["speedup"], low, high, 1.0)]
    return tag(
        "svg",
        tag("rect", x="0", y="3", width=f"{at[0]:.1f}", height="6", class_="bar measured"),
        tag("line", x1=f"{at[1]:.1f}", x2=f"{at[2]:.1f}", y1="6", y2="6", class_="whisker"),
        tag("line", x1=f"{at[3]:.1f}", x2=f"{at[3]:.1f}", y1="0", y2="12", class_="reference"),
        viewBox="0 0 100 12",
        class_="mini",
        aria_hidden="true",
    )


# ---- domains -----------------------------------------------------------------------------------------------------


def domains(run: Run, place: int) -> Html:
    """Speedup and tau by domain, with intervals."""
    entries, names = run.drafters, run.domains
    speeds = [
        value
        for e in entries
        for d, c in e["domains"].items()
        for value in (c["speedup"], *(run.domain_interval(e, d) or ()))
    ]
    taus = [value for e in entries for c in e["domains"].values() for value in c["tau_ci95"]]
    figures = []
    for name in names:
        found = [(e, e["domains"][name]) for e in entries if name in e["domains"]]
        rows = [Dot(arm_name(e), c["speedup"], run.domain_interval(e, name), e is run.best) for e, c in found]
        title = f"Speedup, {name}"
        figures.append(figure(title, dots(title, rows, 1.0, "×", (min(speeds), max(speeds)))))
    for name in names:
        found = [(e, e["domains"][name]) for e in entries if name in e["domains"]]
        rows = [Dot(arm_name(e), c["tau"], tuple(c["tau_ci95"]), e is run.best) for e, c in found]
        title = f"Tokens per verification, {name}"
        figures.append(figure(title, dots(title, rows, 1.0, "", (1.0, max(taus)))))
    lead = "Intervals are 95%, by bootstrap over prompts. The vertical line at 1 is plain decoding."
    return section("domains", place, "By domain", grid(*figures), _domain_table(run), lead=lead)


def _domain_table(run: Run) -> Html:
    rows = []
    for entry in run.drafters:
        for name, cell in entry["domains"].items():
            known = run.domain_interval(entry, name)
            rows.append(
                [
                    arm_name(entry),
                    name,
                    f"{number(cell['speedup'])}×",
                    interval(*known) if known else "",
                    number(cell["tau"]),
                    interval(*cell["tau_ci95"]),
                    f"{100 * cell['tar']:.0f}%",
                ]
            )
    header = ["Drafter", "Domain", "Speedup", "95% interval", "τ", "95% interval", "TAR"]
    return folded("Table: speedup and τ by domain", table(header, rows, "Speedup and τ by domain", texts=2))


# ---- depths ------------------------------------------------------------------------------------------------------


def depths(run: Run, place: int) -> Html:
    """Acceptance by depth, of all passes and given the depth before."""
    entries = run.drafters
    ranked = sorted(entries, key=lambda entry: -float(entry["tau"]))
    named = [arm_name(entry) for entry in ranked[:DRAWN]]
    deepest = max((len(entry["acceptance"]["unconditional"]) for entry in entries), default=0)
    figures = []
    for key, title, note in (
        ("unconditional", "Reached and accepted", "Share of all verifications in which a draft of that depth was accepted."),
        ("conditional", "Accepted, given the depth before", "How well the drafter does once it has come so far."),
    ):
        series = [
            Line(
                arm_name(entry),
                list(enumerate(entry["acceptance"][key], start=1)),
                named.index(arm_name(entry)) if arm_name(entry) in named else -1,
            )
            for entry in reversed(ranked)
        ]
        axes = Axes(
            "depth of the drafted token",
            "accepted",
            range(1, deepest + 1),
            top=1.0,
            percent=True,
            height=250.0,
        )
        figures.append(figure(title, lines(title, series, axes), note))
    rows = [
        [
            arm_name(entry),
            *(
                f"{100 * b:.0f}% ({100 * a:.0f}%)"
                for b, a in zip(
                    entry["acceptance"]["unconditional"], entry["acceptance"]["conditional"], strict=True
                )
            ),
            *[""] * (deepest - len(entry["acceptance"]["unconditional"])),
        ]
        for entry in ranked
    ]
    header = ["Drafter", *(f"Depth {i + 1}" for i in range(deepest))]
    caption = "Acceptance by depth (given the depth before)"
    others = f" The other {len(entries) - len(named)} are drawn in grey." if len(entries) > len(named) else ""
    lead = f"How far drafts are kept.{others}"
    return section(
        "depths",
        place,
        "Acceptance by depth",
        grid(*figures, wide=True),
        folded(f"Table: {caption}", table(header, rows, caption)),
        lead=lead,
    )
