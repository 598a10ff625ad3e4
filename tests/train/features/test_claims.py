"""Claims on shards: of any number of processes that find the same dead one, exactly one gets it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from heads.api.errors import UserError
from tests import forked
from tests.train.launch import environment
from train.features.store.claims import Claims

NAMES, WRITERS = 400, 4
WRITER = f"""
import sys
from pathlib import Path
from train.features.store.claims import Claims
claims = Claims(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(*[n for n in range({NAMES}) if claims.take(f"rows-{{n:05d}}")], flush=True)
sys.stdin.readline()  # alive until all have tried
"""


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def tell(writers: list[forked.Process]) -> None:
    """Give each process a line to read."""
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()


def test_of_many_that_find_a_dead_claim_one_takes_it_over(tmp_path: Path, gone: int) -> None:
    folder = tmp_path / "claims"
    folder.mkdir()
    for number in range(NAMES):
        (folder / f"rows-{number:05d}.json").write_text(
            json.dumps({"host": socket.gethostname(), "pid": gone})
        )
    writers = [forked.start("-c", WRITER, tmp_path, env=environment()) for _ in range(WRITERS)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    tell(writers)  # to begin
    won = [writer.stdout.readline() for writer in writers]
    tell(writers)  # to end, now that all have tried
    taken = {
        int(number): writer.pid
        for writer, line in zip(writers, won, strict=True)
        for number in line.split()
    }
    assert sorted(int(number) for line in won for number in line.split()) == list(range(NAMES))
    for number, pid in taken.items():
        assert json.loads((folder / f"rows-{number:05d}.json").read_text())["pid"] == pid
    assert [writer.wait() for writer in writers] == [0] * WRITERS


def test_a_claim_that_was_taken_over_is_not_given_up_by_its_first_owner(tmp_path: Path) -> None:
    slow, other = Claims(tmp_path), Claims(tmp_path)
    assert slow.take("rows-00000")
    path = slow.path("rows-00000")
    path.unlink()  # as whoever thinks it dead does
    assert other.take("rows-00000")
    slow.drop("rows-00000")
    assert path.is_file()
    other.drop("rows-00000")
    assert not path.exists()


def test_claims_of_writers_that_are_gone_are_cleared_and_others_are_not(
    tmp_path: Path, gone: int
) -> None:
    living, claims = Claims(tmp_path), Claims(tmp_path)
    assert living.take("rows-00000")
    dead = json.dumps({"host": socket.gethostname(), "pid": gone})
    claims.path("rows-00001").write_text(dead)
    claims.clear()
    assert [path.name for path in claims.folder.iterdir()] == ["rows-00000.json"]


def test_a_claim_that_the_disk_refuses_leaves_no_half_of_one(tmp_path: Path) -> None:
    """Half of a claim would be waited for as for a living writer's."""
    import resource

    claims = Claims(tmp_path)
    assert claims.take("rows-00000")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written: .*larger than the system allows"):
            claims.take("rows-00001")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(claims.all()) == ["rows-00000"]
    assert claims.take("rows-00001")
