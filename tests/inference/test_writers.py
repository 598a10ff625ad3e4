"""One writer per folder: a second process is refused by name, a dead one's place is taken at once,
and the processes of one launch are one writer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference import writers
from inference.manifest import partial_of
from inference.writers import SILENT_SECONDS, Writer, clear, hold, only_writer, releasing, turn
from tests import forked
from tests.waiting import until

HOLDER = """
import sys
from pathlib import Path
from inference.writers import hold
hold(Path(sys.argv[1]))
print("holds", flush=True)
sys.stdin.readline()
"""
RANKS = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[forked.Process]:
    """Another process, which holds the folder `out`."""
    process = forked.start("-c", HOLDER, tmp_path / "out")
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_with_host_process_and_start(
    tmp_path: Path, holder: forked.Process
) -> None:
    words = rf"process {holder.pid} on {socket.gethostname()} since 20\d\d-.*Wait for it or end it"
    with pytest.raises(UserError, match=words):
        hold(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".writer.json"]


def test_the_place_of_a_killed_process_is_taken_at_once(
    tmp_path: Path, holder: forked.Process
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with only_writer(tmp_path / "out"):
        content = json.loads((tmp_path / "out" / ".writer.json").read_text())
        assert content["pid"] == os.getpid()
    assert not list((tmp_path / "out").iterdir())


def test_a_killed_process_whose_parent_has_not_asked_for_it_is_gone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    left = writer_file(tmp_path, pid=child.pid)
    stat = Path(f"/proc/{child.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    with only_writer(tmp_path):
        assert json.loads(left.read_text())["pid"] == os.getpid()
    child.wait()


def test_a_process_that_ends_gives_its_folder_up(tmp_path: Path, holder: forked.Process) -> None:
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.wait(120) == 0
    assert not (tmp_path / "out").exists()  # it was made for the file alone


def writer_file(folder: Path, age: float = 0.0, **fields: object) -> Path:
    """The file of another writer, which touched it `age` seconds ago."""
    path = folder / ".writer.json"
    known = {"host": socket.gethostname(), "pid": os.getppid(), "started": "then", "token": "x"}
    path.write_text(json.dumps(known | fields))
    os.utime(path, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize(
    ("fields", "age", "lives"),
    [
        ({"host": "elsewhere", "pid": 1}, 0.0, True),
        ({"host": "elsewhere", "pid": 1}, SILENT_SECONDS + 60, False),
        # the same name, but another start of the machine or another container: ids mean nothing
        ({"machine": "another", "pid": 2**22 + 1}, 0.0, True),
        ({"machine": "another"}, SILENT_SECONDS + 60, False),
        ({"ticks": 1}, 0.0, False),  # the id was given to another process since
        ({}, SILENT_SECONDS + 60, True),  # stopped, but there
    ],
)
def test_who_counts_as_gone(
    tmp_path: Path, fields: dict[str, object], age: float, lives: bool
) -> None:
    path = writer_file(tmp_path, age, **fields)
    if lives:
        before = path.read_bytes()
        with pytest.raises(UserError, match="another process writes to"):
            hold(tmp_path)
        assert path.read_bytes() == before
    else:
        with only_writer(tmp_path):
            assert json.loads(path.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "content",
    ["{", "[" * 50_000, '{"host": "x", "pid": 1e999}', '{"host": "x", "pid": [1]}', '["x"]', ""],
)
def test_a_file_that_is_no_writers_is_respected_until_it_is_old(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / ".writer.json"
    path.write_text(content)
    with pytest.raises(UserError, match="an unknown machine"):
        hold(tmp_path)
    os.utime(path, (time.time() - 1000,) * 2)
    hold(tmp_path).release()


def test_a_number_that_no_process_has_is_nobodys(tmp_path: Path) -> None:
    content = {"host": socket.gethostname(), "pid": 2**62, "token": "x"}
    (tmp_path / ".writer.json").write_text(json.dumps(content))
    hold(tmp_path).release()


def test_a_process_may_hold_a_folder_again(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        with only_writer(tmp_path):
            pass
        assert (tmp_path / ".writer.json").is_file()
        with releasing():
            hold(tmp_path / "inner")
        assert not (tmp_path / "inner").exists()
        assert (tmp_path / ".writer.json").is_file()
    assert not (tmp_path / ".writer.json").exists()


def test_two_names_in_one_folder_do_not_exclude_each_other(
    tmp_path: Path, holder: forked.Process
) -> None:
    with only_writer(tmp_path / "out", ".report.writer.json"):
        pass


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        (".writer.json", True),
        (".writer-12.json", True),
        (".best.writer.json", True),
        (".turn.json", True),
        ("writer.json", False),
        (".notes.json", False),
        ("my.writer.json", False),
    ],
)
def test_files_of_writers_are_told_from_others(name: str, ours: bool) -> None:
    assert writers.is_writer_file(name) == ours


def test_where_there_are_no_links_the_file_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    with only_writer(tmp_path):
        assert json.loads((tmp_path / ".writer.json").read_text())["pid"] == os.getpid()
        found = writers.take(tmp_path / ".writer.json", Writer.this())
        assert found is not None
        assert found.pid == os.getpid()


def test_a_writer_shows_signs_of_life_and_notices_when_it_was_thought_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One round of the thread that touches the files."""

    class EndOfRoundError(Exception):
        pass

    waits = iter([None])

    def wait(_: float) -> None:
        if next(waits, EndOfRoundError) is EndOfRoundError:
            raise EndOfRoundError

    held = hold(tmp_path)
    os.utime(held.path, (0, 0))
    monkeypatch.setattr(writers.time, "sleep", wait)
    with pytest.raises(EndOfRoundError):
        writers._beat()
    assert held.path.stat().st_mtime > 1e9
    writer_file(tmp_path, host="elsewhere", pid=7)
    waits = iter([None])
    with pytest.raises(EndOfRoundError):
        writers._beat()
    assert "process 7 on elsewhere" in caplog.text
    held.release()
    assert json.loads(held.path.read_text())["pid"] == 7  # the other one's


def ranks(monkeypatch: pytest.MonkeyPatch, rank: int, **more: str) -> None:
    for name, value in (RANKS | {"RANK": str(rank)} | more).items():
        monkeypatch.setenv(name, value)


def test_the_processes_of_a_launch_are_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(monkeypatch, 1)
    second = hold(tmp_path)  # it may come first
    ranks(monkeypatch, 0)
    first = hold(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer-1.json", ".writer.json"]
    second.release()
    first.release()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_replaces_one_of_a_lost_machine_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(monkeypatch, 1)
    held = hold(tmp_path)
    content = json.loads(held.path.read_text())
    held.release()
    held.path.write_text(json.dumps({**content, "host": "lost", "machine": "", "token": "x"}))
    os.utime(held.path, (time.time() - writers.SILENT_SECONDS + 1.0,) * 2)
    begun = time.monotonic()
    hold(tmp_path).release()
    assert time.monotonic() - begun > 0.9
    held.path.write_text(json.dumps({**content, "host": "lost", "launch": "another"}))
    begun = time.monotonic()
    with pytest.raises(UserError, match=f"process {os.getpid()} on lost"):
        hold(tmp_path)
    assert time.monotonic() - begun < 5.0


def test_no_process_of_another_launch_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(monkeypatch, 0)
    hold(tmp_path)
    ranks(monkeypatch, 1, MASTER_PORT="29501")
    with pytest.raises(UserError, match="another process writes to"):
        hold(tmp_path)
    writers._give_all_up()


def test_what_was_left_by_a_process_killed_while_it_took_a_folder_goes(
    tmp_path: Path, holder: forked.Process
) -> None:
    """The file that it was about to give its name to; one of a living process stays."""
    out = tmp_path / "run"
    out.mkdir()
    mine = partial_of(out / ".writer.json")
    mine.touch()
    left = mine.with_name(mine.name.replace(f".{os.getpid()}-", f".{holder.pid}-"))
    left.touch()
    with only_writer(out):
        assert left.exists()
    holder.kill()
    holder.wait()
    with only_writer(out):
        assert not left.exists() and mine.exists()


def test_a_process_that_outlives_its_launch_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed launcher may leave one behind, which still writes."""
    ranks(monkeypatch, 1, TORCHELASTIC_RUN_ID="earlier")
    left = hold(tmp_path)
    for name in (*RANKS, "RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=f"process {os.getpid()} on"):
        hold(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".writer-1.json"]
    left.release()
    hold(tmp_path).release()


def test_what_a_killed_writer_left_is_cleared_and_a_running_one_stays(
    tmp_path: Path, holder: forked.Process
) -> None:
    out = tmp_path / "out"
    (out / "result").write_text("x")
    clear(out)
    assert (out / ".writer.json").is_file()
    holder.kill()
    holder.wait()
    clear(out)
    clear(tmp_path / "absent")
    assert [path.name for path in out.iterdir()] == ["result"]


def test_a_turn_is_waited_for(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from inference.writers import turn\n"
        "for _ in range(20):\n"
        "    with turn(Path(sys.argv[1])):\n"
        "        path = Path(sys.argv[1]) / 'count'\n"
        "        count = int(path.read_text())\n"
        "        time.sleep(0.002)\n"
        "        path.write_text(str(count + 1))\n"
    )
    (tmp_path / "count").write_text("0")
    processes = [forked.start("-c", program, tmp_path) for _ in range(3)]
    assert [process.wait(300) for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "60"
    with turn(tmp_path):
        assert (tmp_path / ".turn.json").is_file()


def test_a_long_turn_gives_signs_of_life(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from inference import writers\n"
        "writers.BEAT_SECONDS = 0.02\n"
        "with writers.turn(Path(sys.argv[1])):\n"
        "    path = Path(sys.argv[1]) / '.turn.json'\n"
        "    begun = path.stat().st_mtime_ns\n"
        "    while path.stat().st_mtime_ns == begun:\n"
        "        time.sleep(0.02)\n"
    )
    assert forked.start("-c", program, tmp_path).wait(120) == 0
    assert not list(tmp_path.iterdir())
