"""What the attacks are made of: damage that is damage, stages that are compared, rows that are kept.
The attacks themselves: `make test-chaos`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos import damage, disks
from tests.chaos.ground import Ended
from tests.chaos.rows import Areas, Row, content, save
from tests.chaos.stages import SUBJECTS, Calm, Site, Subject, alone, spoken


@pytest.mark.parametrize("way", damage.WAYS)
@pytest.mark.parametrize("whole", [b'{"a": [1, {"b": "c"}], "d": 2.5}', bytes(range(256))])
def test_every_way_of_damage_damages_and_follows_from_the_seed(
    tmp_path: Path, way: str, whole: bytes
) -> None:
    left = []
    for _ in range(2):
        path = tmp_path / "file"
        path.write_bytes(whole)
        damage.WAYS[way](path, random.Random(3))
        left.append(path.read_bytes() if path.is_file() else None)
    assert left[0] == left[1] != whole


def test_another_json_is_json_with_another_value_somewhere() -> None:
    whole = {"a": [1, {"b": "c"}], "d": 2.5}
    found = [damage.replace(whole, random.Random(seed)) for seed in range(200)]
    assert all(one != whole for one in found)
    assert {"a", "d"} <= {key for one in found if isinstance(one, dict) for key in one}
    assert whole == {"a": [1, {"b": "c"}], "d": 2.5}


def test_a_message_for_people_is_told_from_a_crash() -> None:
    assert spoken(Ended(0, "done")) == spoken(Ended(2, "x\nheadstart: no room")) == ""
    assert "status 4" in spoken(Ended(4, "headstart: KeyError"))
    assert "status -9" in spoken(Ended(-9, ""))
    assert "no message" in spoken(Ended(2, "usage"))
    assert "no message" in spoken(Ended(2, "Traceback ...\nheadstart: x"))
    fine = Ended(2, "headstart: the disk is full")
    assert disks.told(fine, "disk is full") == ""
    assert "does not say" in disks.told(fine, "read-only")
    assert "as if nothing were" in disks.told(Ended(0, ""), "read-only", required=True)


def test_another_result_and_what_is_left_behind_are_seen(tmp_path: Path) -> None:
    subject = Subject("x", "generate", "generate", lambda run: (run / "out").read_text())
    run = tmp_path / "run"
    run.mkdir()
    (run / "out").write_text("right")
    site = Site(tmp_path, {"x": Calm(tmp_path, "right", 1.0)})
    assert site.finished(subject, run, Ended(0, "")) == ""
    assert "status 2" in site.finished(subject, run, Ended(2, ""))
    (run / "part.1-12345678@host.partial").touch()
    assert "has left part" in site.finished(subject, run, Ended(0, ""))
    (run / "part.1-12345678@host.partial").rename(run / ".writer.json")
    assert "has left .writer.json" in site.finished(subject, run, Ended(0, ""))
    (run / ".writer.json").unlink()
    (run / "out").write_text("wrong")
    assert "another result" in site.finished(subject, run, Ended(0, ""))
    (run / "out").unlink()
    assert "cannot be read" in site.finished(subject, run, Ended(0, ""))


def test_every_subject_has_what_it_needs(tmp_path: Path) -> None:
    names = list(SUBJECTS)
    for place, subject in enumerate(SUBJECTS.values()):
        assert all(need in names[:place] for need in subject.needs)
    assert len(alone()) == len(names) - 3


def test_rows_count_and_keep_the_first_failures() -> None:
    rows = Areas("part")
    rows["a"].note("")
    rows["a"].note("wrong", 3)
    rows["never hit"].note("another result", 0)
    assert (rows["never hit"].tried, rows["never hit"].failed) == (1, 1)
    assert rows["a"] == Row("part", "a", 4, 3, ["wrong"])
    for number in range(100):
        rows["b"].note(str(number))
    assert rows["b"].failed == 100 and len(rows["b"].words) == 20


def test_newer_rows_take_the_place_of_theirs(tmp_path: Path) -> None:
    def lines(*areas: str, part: str = "disks", tried: int = 1) -> list[dict[str, object]]:
        return [content(Row(part, area, tried), 1, "command") for area in areas]

    out = tmp_path / "chaos.json"
    save(out, lines("a", "b"), {"disks"})
    save(out, lines("one", "two", part="faults"), set())
    save(out, lines("two", part="faults", tried=5), set())  # a fault alone
    save(out, lines("c"), {"disks"})  # a part as a whole
    rows = [(row["part"], row["area"], row["tried"]) for row in json.loads(out.read_text())["rows"]]
    assert rows == [("disks", "c", 1), ("faults", "one", 1), ("faults", "two", 5)]


def test_the_command_runs_what_is_asked_for_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def attack(seed: int, count: int, folder: Path) -> list[Row]:
        assert folder.is_dir() and not list(folder.iterdir())
        asked.append((seed, count))
        return [Row("disks", "full", count, 1 if seed == 9 else 0)]

    monkeypatch.setattr(chaos, "PARTS", {"disks": chaos.Part(attack, 50, 2)})
    out = tmp_path / "chaos.json"
    monkeypatch.setattr(chaos, "REPORT", out)
    assert chaos.main(["--only", "disks", "--sample"]) == 0 and not out.exists()
    assert chaos.main(["--only", "disks", "--count", "7"]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["tried"], row["failed"], row["seed"]) == (7, 0, 1)
    assert row["command"] == "python -m tests.chaos --only disks --seed 1 --count 7"
    assert chaos.main(["--seed", "9"]) == 1
    assert asked == [(1, 2), (1, 7), (9, 50)]
