"""The transcript viewer: answers token by token, who produced each, and both models' candidates.

script.js fills it from the data here.

The data is cut to what a page may weigh: drafters by speed, so that the fastest are always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.measure.breakdown.transcripts import SOURCES
from inference.page.data import Run
from inference.page.markup import Content, Html, data, tag
from inference.page.sections import section
from inference.report_schema import arm_name

MOST_BYTES = 1_500_000
"""Of all transcripts on a page."""
LEGEND = (
    ("drafted", "drafted and accepted; stronger, the deeper in the draft"),
    ("corrected", "by the target, in place of a refused draft"),
    ("bonus", "by the target, behind the last draft"),
    ("first", "by reading the prompt"),
)


def viewer(run: Run, place: int, room: int) -> tuple[Html, int]:
    """The section of a measurement, and the bytes of data in it. room: bytes that are left for it."""
    order = {arm_name(entry): number for number, entry in enumerate(run.drafters)}
    answers = sorted(run.answers, key=lambda answer: order.get(answer["arm"], len(order)))
    packed: list[dict[str, Any]] = []
    used = left_out = 0
    for answer in answers:
        small = pack(answer)
        size = len(data(small).encode())
        if used + size > room:
            left_out += 1
            continue
        packed.append(small)
        used += size
    title = "Answers, token by token"
    if not packed:
        how = tag(
            "p",
            "None were kept. Ask for them with ",
            tag("code", "headstart measure bench.lost.enabled=true"),
            ".",
            class_="note",
        )
        return section("answers", place, title, how), 0
    lead = (
        "Tokens that one verification committed stand together. Move over a token, or into the text and on with the arrow keys, "
        "to see what both models held likely there."
    )
    note = f"{left_out} answers of slower drafters are left out to keep the page small." if left_out else None
    return section("answers", place, title, _frame(packed, place, note), lead=lead), used


def _frame(packed: list[dict[str, Any]], place: int, note: str | None) -> Html:
    """What script.js fills, with the data beside it."""
    legend = [
        tag("li", tag("span", "token", class_=f"token {key}", aria_hidden="true"), f" {said}")
        for key, said in LEGEND
    ]
    choices = [
        _choice(f"arm-{place}", "Drafter", "arm", dict.fromkeys(answer["arm"] for answer in packed)),
        _choice(f"prompt-{place}", "Prompt", "prompt", dict.fromkeys(answer["prompt"] for answer in packed)),
        tag(
            "label",
            tag("input", type="checkbox", class_="marks", checked=True),
            " depths as digits",
            class_="check",
        ),
    ]
    parts: list[Content] = [
        tag("div", choices, class_="controls"),
        tag("ul", legend, class_="legend", aria_label="Who produced a token"),
        tag("p", "This part needs JavaScript.", class_="needs"),
        tag(
            "div",
            tag(
                "div",
                tag("details", tag("summary", "Prompt"), tag("pre", class_="question"), class_="asked"),
                tag("p", class_="counts note"),
                tag("div", class_="answer", role="listbox", aria_label="Tokens of the answer", aria_orientation="horizontal"),
                class_="text",
            ),
            tag("aside", class_="candidates", aria_label="Candidates at the chosen token", aria_live="polite"),
            class_="reader",
        ),
        tag(
            "details",
            tag("summary", "Table: the answer by verification"),
            tag("div", class_="passes scroll", tabindex="0", role="region", aria_label="The answer by verification"),
        ),
        tag("p", note, class_="note") if note else None,
        tag("script", data(packed), type="application/json"),
    ]  # fmt: skip
    return tag("div", parts, class_="viewer")


def _choice(name: str, words: str, class_: str, values: Mapping[str, Any]) -> Html:
    options = [tag("option", value, value=value) for value in values]
    return tag("label", tag("span", words), tag("select", options, id=name, class_=class_), for_=name)


def pack(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with short lists in place of names: tokens are [text, place in `SOURCES`, depth, pass, target, draft]."""
    tokens = [
        [
            token["text"],
            SOURCES.index(token["by"]),
            token["depth"],
            token["pass"],
            token["target"],
            token["draft"],
        ]
        for token in answer["tokens"]
    ]
    names = {name: answer[name] for name in ("arm", "prompt", "domain", "question", "finish")}
    return {**names, "tokens": tokens}
