"""The journal: whole lines after any kill, one writer, nothing lost on a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heads.api.errors import UserError
from train.learning.journal import JOURNAL_FILE, Journal, read_journal, writing


def test_lines_are_appended_and_read_again(tmp_path: Path) -> None:
    with writing(tmp_path) as journal:
        journal.append("collected", 1, tokens=5)
        before = journal.path.read_bytes()
        journal.append("trained", 1, seconds=1.5)
        assert journal.path.read_bytes().startswith(before)
    found = read_journal(tmp_path)
    assert [(one.number, one.event, one.cycle) for one in found] == [
        (0, "collected", 1),
        (1, "trained", 1),
    ]
    assert found[1].facts == {"seconds": 1.5}
    journal = Journal(tmp_path)
    assert journal.entries == found
    last = journal.last("collected")
    assert last == found[0] and journal.last("collected", cycle=2) is None


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_line_that_a_kill_has_cut_is_not_there(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path)
    journal.append("collected", 1)
    whole = journal.path.read_bytes()
    journal.append("trained", 1, note="x" * 50)
    content = journal.path.read_bytes()
    journal.path.write_bytes(content[:-cut])
    again = Journal(tmp_path)
    assert [one.event for one in again.entries] == ["collected"]
    assert again.path.read_bytes() == whole
    again.append("trained", 1)
    assert [one.event for one in read_journal(tmp_path)] == ["collected", "trained"]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append("collected", 1)
    before = journal.path.read_bytes()

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.append("trained", 1)
    assert journal.path.read_bytes() == before and len(journal.entries) == 1
    journal.append("trained", 1)
    assert [one.number for one in read_journal(tmp_path)] == [0, 1]


def test_a_second_learner_is_refused(tmp_path: Path) -> None:
    program = (
        "from train.learning.journal import writing\nfrom pathlib import Path\nimport sys\n"
        f"with writing(Path({str(tmp_path)!r})):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process writes"), writing(tmp_path):
            pass
        other.kill()
        other.wait()
    with writing(tmp_path) as journal:  # its writer was killed
        journal.append("collected", 1)


@pytest.mark.parametrize(
    "content", ["x\n", '{"number": 0}\n', '{"number": 3, "time": 1, "event": "a", "cycle": 1}\n']
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / JOURNAL_FILE).write_text(content)
    with pytest.raises(UserError, match="line 1"):
        Journal(tmp_path)
