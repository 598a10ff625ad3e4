"""The pictures of the README: drawn so that other fonts do not break them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

from matplotlib.font_manager import FontProperties, findfont, get_font

LOOP = Path(__file__).parents[1] / "assets" / "loop.svg"
SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"name": 15.0, "small": 12.5}
Box = tuple[float, float, float, float]


def boxes(root: ET.Element) -> list[Box]:
    """(left, top, right, bottom) of every rectangle, the background left out."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class") != "paper":
            x, y, width, height = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


def wide_width(text: str, size: float, weight: str) -> float:
    """Of a text in DejaVu Sans, the widest of the fonts that systems fall back to."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight=weight)))
    font.set_size(size, 72)
    font.set_text(text, 0.0)
    return float(font.get_width_height()[0]) / 64


def test_texts_stay_in_their_boxes_in_a_wide_font() -> None:
    root = ET.parse(LOOP).getroot()
    checked = 0
    for text in root.iter(f"{SVG}text"):
        words, kind = str(text.text), str(text.get("class"))
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        half = wide_width(words, SIZES[kind], "bold" if kind == "name" else "normal") / 2
        around = [box for box in boxes(root) if box[0] < x < box[2] and box[1] < y < box[3]]
        for left, top, right, bottom in around:
            assert left + 4 < x - half and x + half < right - 4, words
            assert top + SIZES[kind] < y < bottom - 4, words
        if not around:  # the label of an arrow, between two boxes
            for left, top, right, bottom in boxes(root):
                beside = y < top or y > bottom or x + half < left or x - half > right
                assert beside, words
        checked += 1
    assert checked > 12


def test_arrows_begin_at_a_box() -> None:
    root = ET.parse(LOOP).getroot()
    arrows = [p for p in root.iter(f"{SVG}path") if p.get("class") in ("line", "back")]
    assert len(arrows) == 7
    for arrow in arrows:
        x, y = map(float, re.findall(r"M([\d.]+),([\d.]+)", str(arrow.get("d")))[0])
        assert any(
            left <= x <= right and top <= y <= bottom for left, top, right, bottom in boxes(root)
        ), arrow.get("d")


def test_every_colour_has_one_for_dark_pages() -> None:
    style = str(ET.parse(LOOP).getroot().find(f"{SVG}style").text)  # type: ignore[union-attr]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    coloured = re.findall(r"\.([\w-]+) \{[^}]*#", light)
    assert coloured and set(coloured) == set(re.findall(r"\.([\w-]+) \{[^}]*#", dark))
