"""Puts the page together: one HTML file with its style and its script inside, which asks nothing of any network.

The Content-Security-Policy in its head allows exactly that style and that script and nothing else, so a browser would refuse to run
or fetch anything even if markup slipped through.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from inference.manifest import write_bytes
from inference.page.data import Page, Run, gather
from inference.page.markup import Content, Html, tag
from inference.page.sections import depths, domains, summary
from inference.page.sections_costs import costs
from inference.page.sections_lost import lost
from inference.page.sections_more import comparison, method, training
from inference.page.viewer import MOST_BYTES, viewer

FILE = "report.html"
RUN_SECTIONS = (
    ("summary", "Summary"),
    ("domains", "By domain"),
    ("depths", "By depth"),
    ("lost", "Where the speed goes"),
    ("costs", "Cost of a step"),
    ("answers", "Token by token"),
)


def write_page(reports: Sequence[tuple[str, Path]], out: Path, run_folder: Path | None = None) -> Path:
    """Write `out`/report.html from labelled report.json files (or folders), the main one first; returns its path.

    run_folder: the run whose trainings and rounds are shown. Raises `UserError` for reports or transcripts that are not ours.
    """
    path = out / FILE
    write_bytes(path, render(gather(reports, run_folder)).encode("utf-8"))
    return path


def render(page: Page) -> str:
    """The whole file."""
    style, script = asset("style.css"), asset("script.js")
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{_hash(style)}'; script-src 'sha256-{_hash(script)}'"
    title = f"{page.runs[0].report['target']['id']}: drafters measured by Headstart"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content=f"{policy}; base-uri 'none'; form-action 'none'",
        ),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="Headstart"),
        tag("title", title),
        tag("style", Html(style)),
    )
    extra = {"training": training(page), "compare": comparison(page), "method": method(page)}
    room, articles = MOST_BYTES, []
    for place, run in enumerate(page.runs):
        article, used = _article(run, place, room)
        room -= used
        articles.append(article)
    main = tag(
        "main", articles, [part for part in extra.values() if part is not None], id="content", tabindex="-1"
    )
    body = tag(
        "body",
        tag("a", "To the content", href="#content", class_="skip"),
        _header(page),
        tag(
            "div",
            _navigation(page, [key for key, part in extra.items() if part is not None]),
            main,
            class_="columns",
        ),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def asset(name: str) -> str:
    """A file of this package as text."""
    return resources.files("inference.page").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()


def _article(run: Run, place: int, room: int) -> tuple[Html, int]:
    """The sections of one measurement, and the bytes of its transcripts."""
    answers, used = viewer(run, place, room)
    parts: list[Content] = [summary(run, place)]
    if run.drafters:
        parts += [domains(run, place), depths(run, place), lost(run, place), costs(run, place), answers]
    return tag("article", parts, aria_label=f"Measurement {run.label}", data_run=place), used


def _header(page: Page) -> Html:
    target = page.runs[0].report["target"]
    facts = f"{target['parameters']:,} parameters, {target['dtype']}, {page.runs[0].report['device']['name']}"
    names = tag(
        "div",
        tag("p", "Headstart report", class_="over"),
        tag("h1", target["id"]),
        tag("p", facts, class_="note"),
    )
    return tag(
        "header", names, tag("button", "Theme: system", type="button", id="theme", hidden=True), class_="top"
    )


def _navigation(page: Page, extra: Sequence[str]) -> Html:
    """Links to the sections; with several measurements, a choice of the one that is shown."""
    titles = {"training": "Training and rounds", "compare": "Side by side", "method": "How it was measured"}
    choice: Content = None
    if len(page.runs) > 1:
        options = [tag("option", run.label, value=place) for place, run in enumerate(page.runs)]
        choice = tag(
            "label",
            tag("span", "Measurement"),
            tag("select", options, id="run"),
            for_="run",
            class_="which",
            hidden=True,
        )
    shown = RUN_SECTIONS if page.runs[0].drafters else RUN_SECTIONS[:1]
    links = [tag("li", tag("a", title, href=f"#{key}-0", data_section=key)) for key, title in shown]
    links += [tag("li", tag("a", titles[key], href=f"#{key}")) for key in extra]
    return tag("nav", choice, tag("ol", links), aria_label="Sections")
