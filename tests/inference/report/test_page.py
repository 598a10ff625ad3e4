"""report.html without a browser: sound, small, self-contained, escaped, and readable without seeing
it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from heads.api.errors import UserError
from inference.report.model import write_report
from inference.report.page.charts import Chart, Dot, Dots, Figure, Line, Lines, Scale, spread, ticks
from inference.report.page.formats import clean, fit, number, to_json
from inference.report.page.gather import Page, gather, read_rounds, read_trainings
from inference.report.page.render import FILE, asset, environment, render, write_page
from inference.report.page.viewer import pack, select_answers
from tests.inference.example_report import example_report
from tests.inference.report.pages import HOSTILE, Reader, answer, folder


def written(root: Path, words: str) -> str:
    reports = [(words, root / "measure"), ("sampled", root / "sampled" / "report.json")]
    return write_page(reports, root / "out", root).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tame(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(folder(tmp_path_factory.mktemp("tame"), "medusa"), "measure")


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(folder(tmp_path_factory.mktemp("wild"), HOSTILE), HOSTILE)


@pytest.fixture(params=["tame", "wild"])
def page(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_the_page_is_sound_and_small(page: str) -> None:
    assert page.startswith('<!doctype html>\n<html lang="en">')
    reader = Reader(page)
    assert not reader.open
    assert len(page.encode()) < 3_000_000
    names = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(names) == len(set(names))


def test_nothing_is_fetched_from_anywhere(page: str) -> None:
    reader = Reader(page)
    assert not reader.all("link") and not reader.all("img") and not reader.all("iframe")
    assert not any("src" in attributes for _, attributes in reader.elements)
    links = [attributes["href"] for _, attributes in reader.elements if "href" in attributes]
    assert links and all(str(link).startswith("#") for link in links)
    assert "url(" not in page and "@import" not in page
    script = asset("script.js").replace("http://www.w3.org/2000/svg", "")
    for word in (
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "http:",
        "https:",
        "innerHTML",
        "eval(",
        "document.write",
    ):
        assert word not in script


def test_every_link_leads_somewhere(page: str) -> None:
    reader = Reader(page)
    names = {attributes.get("id") for _, attributes in reader.elements}
    for _, attributes in reader.elements:
        for key in ("href", "for", "aria-labelledby"):
            if key in attributes:
                assert str(attributes[key]).removeprefix("#") in names


def test_text_from_data_stays_text(wild: str) -> None:
    reader = Reader(wild)
    assert (
        len(reader.all("script")) == 2
    )  # one viewer's data and ours: the other measurement has no answers
    assert [attributes.get("type") for attributes in reader.all("script")] == [
        "application/json",
        None,
    ]
    handlers = [
        key for _, attributes in reader.elements for key in attributes if key.startswith("on")
    ]
    assert not handlers
    assert "alert(1)" in "".join(reader.text["th"]) + "".join(
        reader.text["td"]
    )  # it is shown, as text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", wild)
    data = json.loads("".join(reader.text["script"][:1]))
    assert data[0]["tokens"][0][0] == clean(HOSTILE.replace("\ud800", ""))


def test_a_browser_would_run_nothing_but_our_script(wild: str) -> None:
    reader = Reader(wild)
    policy = next(
        str(a["content"])
        for a in reader.all("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for name, kind in (("style.css", "style-src"), ("script.js", "script-src")):
        digest = base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert not any(
        "style" in attributes for _, attributes in reader.elements
    )  # the policy would drop it


def test_headings_descend_without_gaps(page: str) -> None:
    levels = [int(name[1]) for name, _ in Reader(page).elements if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_every_drawing_has_a_name_and_a_table_beside_it(tame: str) -> None:
    reader = Reader(tame)
    drawn = [a for a in reader.all("svg") if a.get("class") == "chart"]
    assert len(drawn) > 20 and all(a.get("role") == "img" and a.get("aria-label") for a in drawn)
    for part in re.findall(r"<section.*?</section>", tame, re.DOTALL):
        if 'class="chart"' in part:
            assert "<table" in part, part[:200]
    for table in re.findall(r"<table.*?</table>", tame, re.DOTALL):
        heads = len(re.findall(r'<th scope="col"', table))
        assert "<caption>" in table
        for row in re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1], re.DOTALL):
            assert len(re.findall(r"<t[hd]", row)) == heads, row


def test_the_report_command_needs_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no report was given"):
        write_page([], tmp_path)
    assert not (tmp_path / FILE).exists()


def test_what_is_said_is_what_was_measured(tame: str) -> None:
    report = example_report()["drafters"][0]
    text = re.sub(r"<[^>]+>", " ", tame)
    assert f"{report['speedup']:.2f}×" in text and "1.70 to 1.90" in text
    for words in ("ceiling", "drafter error", "rest of tau", "rest of time", "answers end"):
        assert words in text
    assert "1·1" in text  # the best tree's path of two first candidates


def test_contexts_are_drawn_where_they_differ(tame: str, tmp_path: Path) -> None:
    section = tame.split('id="contexts-0"')[1].split("</section>")[0]
    assert 'aria-label="Tokens per verification, 512 to 1023"' in section
    assert "no difference shown" in section  # 0.95 to 1.25
    assert 'href="#contexts-0"' in tame
    one_bin = example_report()
    del one_bin["drafters"][0]["contexts"][1:]
    write_report(one_bin, tmp_path / "report.json")
    page = write_page([("measure", tmp_path)], tmp_path / "out").read_text(encoding="utf-8")
    assert "contexts-0" not in page and "By context" not in page


def test_the_cost_of_a_step_is_drawn_without_cost_curves(tmp_path: Path) -> None:
    write_report(example_report(), tmp_path / "report.json")
    page = write_page([("measure", tmp_path)], tmp_path / "out").read_text(encoding="utf-8")
    section = page.split('id="costs-0"')[1].split("</section>")[0]
    assert 'aria-label="Milliseconds per verification by phase"' in section
    for phase, ms in example_report()["drafters"][0]["step_ms"].items():
        assert f"eagle3, {phase}: {ms:.2f} ms" in section
    assert "a step of plain decoding, 2.00 ms" in section


def test_a_measurement_is_named_by_its_conditions(tame: str) -> None:
    names = re.findall(r'<option value="\d">([^<]+)</option>', tame.split('id="run"')[1])[:2]
    assert names == ["Temperature 0, 64 prompts (measure)", "Temperature 1, 64 prompts (sampled)"]


@pytest.mark.parametrize(
    ("count", "even"), [(1, False), (3, False), (4, True), (6, False), (7, False), (10, True)]
)
def test_no_chart_of_four_stands_alone(count: int, even: bool) -> None:
    chart = Dots("t", [Dot("a", 1.0)], 1.0, "", (0.0, 2.0))
    parts = environment().get_template("parts.html.j2").module
    drawn = parts.grid([Figure("t", chart)] * count)  # type: ignore[attr-defined]
    assert ('class="grid even"' in drawn) == even


# Data


def test_trainings_are_read_though_a_line_is_cut(tmp_path: Path) -> None:
    root = folder(tmp_path, "medusa")
    (training,) = read_trainings(root / "train")
    assert [(point.at, point.tau) for point in training.points] == [(10, 2.1), (20, 2.2), (30, 2.3)]
    assert [point.best for point in training.points][-1]
    (rounds,) = read_rounds(root)
    assert [(point.at, point.tau) for point in rounds.points] == [(0, 2.1), (1, 2.2), (2, 2.3)]
    assert [point.best for point in rounds.points] == [False, True, False]


@pytest.mark.parametrize(
    "content", ["{", "[]", "3", '{"rounds": 4}', '{"rounds": [3, null, {"tau": "x"}]}']
)
def test_a_strange_summary_of_rounds_is_left_out(content: str, tmp_path: Path) -> None:
    (tmp_path / "loop.json").write_text(content)
    assert read_rounds(tmp_path) == []


def test_answers_beyond_the_room_are_left_out_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gather([("measure", folder(tmp_path, "medusa") / "measure")]).runs[0]
    whole = select_answers(run, 10_000)
    assert whole.size < 10_000 and not whole.left_out
    cut = select_answers(run, whole.size - 1)
    assert 0 < cut.size < whole.size and cut.left_out == 1
    assert cut.values("arm") == ["eagle3"]  # the faster one stays
    assert select_answers(run, 0).size == 0
    monkeypatch.setattr("inference.report.page.render.MOST_BYTES", whole.size - 1)
    assert "1 answers of slower drafters are left out" in render(Page([run]))


def test_packing_keeps_every_field() -> None:
    whole = answer("a", "p", "w")
    small = pack(whole)
    assert small["tokens"][3] == [
        "w",
        2,
        3,
        1,
        whole["tokens"][3]["target"],
        whole["tokens"][3]["draft"],
    ]


# Markup and drawings


def test_templates_escape_and_clean_every_value() -> None:
    """Text is escaped and cleaned, floats are coordinates, None is nothing; what is missing is an
    error."""
    made = environment()

    def written(template: str, value: object) -> str:
        return made.from_string(template).render(value=value)

    assert written('<p class="{{ value }}">{{ value }}</p>', '<b>"&\x00') == (
        '<p class="&lt;b&gt;&#34;&amp;\ufffd">&lt;b&gt;&#34;&amp;\ufffd</p>'
    )
    assert written("{{ value }}", None) == ""
    assert [written("{{ value }}", value) for value in (1.0, -0.25, 7)] == ["1", "-0.2", "7"]
    assert written("{{ value|number }}", -1234.5) == number(-1234.5) == "−1,234.50"
    with pytest.raises(UndefinedError):
        written("{{ value.nothing }}", "x")


def test_json_in_a_script_cannot_end_it() -> None:
    value = {"a": ["</script><!--", "\u202e&'\ud800", 1.5, None]}
    written = str(to_json(value))
    assert not set("<>&'") & set(written)
    assert json.loads(written) == {"a": ["</script><!--", "\\u202e&'\ufffd", 1.5, None]}


def test_ticks_are_round_and_cover() -> None:
    for low, high in ((0.0, 1.0), (0.3, 4.7), (-2.0, 13.0), (1000.0, 1001.0), (0.0, 0.003)):
        found = ticks(low, high)
        assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8
    assert ticks(1.0, 1.0) == [1.0, 2.0]
    assert ticks(0.0, float("inf")) == [0.0, 1.0]


def test_scales_stay_inside_the_paper() -> None:
    scale = Scale(1, 64, 10, 110, log=True)
    assert [scale(v) for v in (1, 8, 64)] == pytest.approx([10, 60, 110])
    assert scale(0) == 10 and scale(9999) == 110
    assert Scale(1, 1, 0, 10)(1) == 5


def test_names_at_line_ends_do_not_overlap() -> None:
    found = spread([50, 50, 51, 10, 99, 100], 12, 0, 100)
    assert all(b - a >= 12 - 1e-9 for a, b in pairwise(sorted(found)))
    assert min(found) >= 0 and max(found) <= 100
    assert fit("distilled_on_policy", 50).endswith("…")


def test_drawings_with_nothing_or_one_point_are_sound() -> None:
    drawn: list[Chart] = [
        Dots("t", [], 1.0, "", (0.0, 0.0)),
        Dots("t", [Dot("a", 1.0)], 1.0, "×", (1.0, 1.0)),
        Lines("t", [], "x", "y"),
        Lines("t", [Line("a", [(1.0, 2.0)]), Line("b", [], 1)], "x", "y", [1], log=True),
        Lines("t", [Line(str(i), [(1.0, 2.0)], i) for i in range(9)], "x", "y"),
    ]
    template = '{% import "charts.html.j2" as charts %}{{ charts[chart.kind](chart) }}'
    for chart in drawn:
        text = environment().from_string(template).render(chart=chart)
        assert not Reader(text).open and "nan" not in text and "inf" not in text


def test_coordinates_of_a_drawing() -> None:
    """Dots of 0.5 and 1.5 on an axis from 0.5 to 1.5; a line from the left edge to the right."""
    template = '{% import "charts.html.j2" as charts %}{{ charts[chart.kind](chart) }}'
    rows = [Dot("a", 0.5, (0.5, 1.5), strong=True), Dot("b", 1.5)]
    text = environment().from_string(template).render(chart=Dots("t", rows, 1.0, "×", (0.5, 1.5)))
    circles = [(a["cx"], a["cy"]) for a in Reader(text).all("circle")]
    assert circles == [("126", "18"), ("318", "38")]
    assert "a: 0.50×, 95% interval 0.50 to 1.50" in text and "<title>b: 1.50×</title>" in text
    line = Lines("t", [Line("a", [(1.0, 0.0), (3.0, 1.0)])], "x", "y", [1, 3])
    text = environment().from_string(template).render(chart=line)
    path = next(a["d"] for a in Reader(text).all("path") if a["class"] == "line")
    assert path == "M44 214L250 26"
