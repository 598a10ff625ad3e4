"""Fills the templates: one HTML file that contains its style and its script and makes no network
requests.

Everything that a template writes is escaped. The Content-Security-Policy in the page's head allows
only its own style and script, so that a browser runs or fetches nothing else even if markup slipped
through.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from inference.manifest import write_bytes
from inference.report import claims
from inference.report.markdown import server_sheets
from inference.report.page import figures, formats
from inference.report.page.charts import TERMS
from inference.report.page.gather import Page, gather
from inference.report.page.viewer import MOST_BYTES, select_answers

FILE = "report.html"
PACKAGE = "inference.report.page"


def write_page(
    reports: Sequence[tuple[str, Path]], out: Path, run_folder: Path | None = None
) -> Path:
    """Write `out`/report.html from labelled report.json files (or folders), the main one first.

    run_folder: the run whose trainings and rounds are shown. Returns the path of the page. Raises
    `UserError` for a report or transcripts that cannot be read.
    """
    path = out / FILE
    write_bytes(path, render(gather(reports, run_folder)).encode("utf-8"))
    return path


def render(page: Page) -> str:
    """The whole file."""
    answers, room = [], MOST_BYTES
    for run in page.runs:
        answers.append(select_answers(run, room))
        room -= answers[-1].size
    style, script = asset("style.css"), asset("script.js")
    template = environment().get_template("page.html.j2")
    return template.render(
        page=page,
        answers=answers,
        style=Markup(style),
        script=Markup(script),
        style_hash=content_hash(style),
        script_hash=content_hash(script),
    )


def environment() -> Environment:
    """The templates' environment with the functions that they call."""
    made = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        finalize=formats.finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("claimed", "fit", "interval", "number", "percent", "share", "tick", "to_json"):
        made.filters[name] = getattr(formats, name)
    made.globals.update(claims=claims, figures=figures, numbered=formats.numbered, TERMS=TERMS)
    made.globals.update(server_sheets=server_sheets)
    return made


def asset(name: str) -> str:
    """A file of this package, as text."""
    return resources.files(PACKAGE).joinpath(name).read_text(encoding="utf-8")


def content_hash(content: str) -> str:
    """The hash by which a Content-Security-Policy identifies inline content."""
    return base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
