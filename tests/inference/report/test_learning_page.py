"""The learner's page: figures of a journal, escaped, without a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference.report.page.learning import (
    MOST_POINTS,
    gather_learning,
    tau_of,
    tau_points,
    write_learning_page,
)

BEGIN = 1_700_000_000.0


def traffic(count: int, tokens: int = 120) -> list[dict[str, Any]]:
    return [
        {
            "event": "traffic",
            "cycle": 1,
            "time": BEGIN + 60 * n,
            "answers": 10,
            "tokens": tokens,
            "passes": 50,
        }
        for n in range(count)
    ]


def cycle(number: int, result: str, **facts: Any) -> list[dict[str, Any]]:
    tau = {"before": {"tau": 2.0}, "after": {"tau": 2.51}}
    lines = [
        {"event": "collected", "tokens": 900, "clients": 3, "largest_client": 0.4},
        {"event": "trained", "seconds": 12.5},
        {"event": "measured", **tau},
        {"event": "compared", "pairs": 77, "acceptance": [1.0, 1.51]},
        {"event": result, **facts},
    ]
    return [
        {"cycle": number, "time": BEGIN + 1000 * number + n, **one} for n, one in enumerate(lines)
    ]


def test_tau_is_a_ratio_of_sums() -> None:
    few, many = traffic(1, tokens=60), traffic(1, tokens=160)
    assert tau_of(few) == 1.0 and tau_of([*few, *many]) == 2.0
    assert tau_of([]) == 1.0


def test_long_journals_keep_few_points() -> None:
    points = tau_points(traffic(1000))
    assert len(points) <= MOST_POINTS and points[-1][0] == BEGIN + 60 * 999
    assert all(tau == 2.2 for _, tau in points)


def test_the_page_shows_every_cycle_and_says_why_one_was_rejected(tmp_path: Path) -> None:
    why = "tau on held-out <b>traffic</b> is lower"
    events = [*traffic(5), *cycle(1, "swapped"), *traffic(5, 200), *cycle(2, "rejected", why=why)]
    found = gather_learning(events)
    assert [row[:3] for row in found.cycles] == [["1", "taken", "900"], ["2", "rejected", "900"]]
    assert found.taken == 1 and found.answers == 100
    text = write_learning_page(events, tmp_path).read_text(encoding="utf-8")
    assert "2.51" in text and "&lt;b&gt;traffic" in text and "<b>" not in text
    assert "<script" not in text and 'class="line"' in text


def test_a_journal_without_lines_makes_a_page(tmp_path: Path) -> None:
    assert "0 cycles" in write_learning_page([], tmp_path).read_text(encoding="utf-8")


def test_a_cycle_under_way_leaves_cells_empty() -> None:
    (row,) = gather_learning([*traffic(1), *cycle(1, "swapped")[:1]]).cycles
    assert row[1] == "under way" and row[-1] == ""


def test_for_an_engine_the_page_shows_exports_and_no_tau(tmp_path: Path) -> None:
    command = 'vllm serve target --speculative-config \'{"model": "<x>"}\''
    known = [{**line, "passes": 0} for line in traffic(5)]
    events = [*known, *cycle(1, "swapped", export="x", command=command)]
    found = gather_learning(events)
    assert found.tau is None and found.answers == 50 and found.commands == {1: command}
    text = write_learning_page(events, tmp_path).read_text(encoding="utf-8")
    assert "of the latest traffic" not in text and "vllm serve target" in text and "<x>" not in text
    assert "of the latest traffic" in write_learning_page(traffic(5), tmp_path).read_text("utf-8")
