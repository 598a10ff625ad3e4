"""Disks that are read-only, full, or limit what a process may write, under every stage.

A stage must end with one message that says which limit it met, or come to its end where it never
met it. Once there is room the same command must give the result of the calm run. Disks are small
tmpfs mounts, and for quotas Btrfs in a file; both need root, without which those rows stay at 0.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.chaos.ground import Ended, UnsurvivedError, grow_disk, limit_disk, quota_disk, small_disk
from tests.chaos.rows import Areas, Row
from tests.chaos.stages import Site, Subject, alone, spoken

PART = "disks"
ROOM_KIB = 512 * 1024
PAGE_KIB = 4
FULL = r"disk is full|the disk of '.*' has .* free"
"""How a disk without room is named: by the system when it is met, or by a stage that looks before it
writes."""
QUOTA = r"quota of this disk is used up"
SUBVOLUME_KIB = 64
"""What an empty part of a file system counts, generously."""
LIMITED = """
import resource, sys
from scripts.cli import main
resource.setrlimit(resource.{limit}, ({value}, {value}))
sys.exit(main(sys.argv[1:]))
"""
"""A stage under a limit of the system."""


def attack(seed: int, count: int, folder: Path) -> list[Row]:
    """`count` stages on such disks, each way in turn for every stage: a row for each way."""
    order, site, rows = random.Random(seed), Site(folder), Areas(PART)
    ways = list(WAYS)
    disks = small_disk(folder / "mounted", ROOM_KIB), quota_disk(folder / "counted")
    for names, disk in zip((MOUNTED, COUNTED), disks, strict=True):
        try:
            with disk:
                pass
        except UnsurvivedError as error:
            ways = [way for way in ways if way not in names]
            for way in names:
                rows[way].words = [f"not tried: {error}"]
    pairs = [(way, subject) for subject in alone() for way in ways]
    order.shuffle(pairs)
    for number in range(count):
        way, subject = pairs[number % len(pairs)]
        try:
            wrong = WAYS[way](site, subject, folder / f"disk-{number}", order)
        except UnsurvivedError as error:
            wrong = str(error)
        rows[way].note(f"{subject.name}: {wrong}" if wrong else "")
    return list(rows.values())


def read_only(site: Site, subject: Subject, at: Path, order: random.Random) -> str:
    """Nothing can be written from the start."""
    site.calm(subject)
    with small_disk(at, ROOM_KIB) as disk:
        run = site.run(subject, "run", disk)
        remount(disk, "ro")
        ended = site.start(subject, run)
        remount(disk, "rw")
        return told(ended, "read-only", required=True) or continued(site, subject, run)


def full(site: Site, subject: Subject, at: Path, order: random.Random) -> str:
    """The disk has room for a part of what is written, a part that is drawn."""
    calm = site.calm(subject)
    with small_disk(at, ROOM_KIB) as disk:
        run = site.run(subject, "run", disk)
        before, after = taken(run), taken(calm.folder)
        grow_disk(disk, before + int(order.random() * max(PAGE_KIB, after - before)))
        ended = site.start(subject, run)
        grow_disk(disk, ROOM_KIB)
        return told(ended, FULL) or continued(site, subject, run)


def quota(site: Site, subject: Subject, at: Path, order: random.Random) -> str:
    """The quota holds a part of what is written, a part that is drawn."""
    calm = site.calm(subject)
    with quota_disk(at) as disk:
        run = site.run(subject, "run", disk)
        before, after = taken(run), taken(calm.folder)
        room = int(order.random() * max(PAGE_KIB, after - before))
        limit_disk(disk, before + SUBVOLUME_KIB + room)
        ended = site.start(subject, run)
        limit_disk(disk, None)
        return told(ended, QUOTA) or continued(site, subject, run)


def small_files(site: Site, subject: Subject, at: Path, order: random.Random) -> str:
    """No file may become larger than a size that is drawn (`ulimit -f`)."""
    calm = site.calm(subject)
    largest = max(path.stat().st_size for path in calm.folder.rglob("*") if path.is_file())
    limit = order.randint(0, largest)
    return limited(site, subject, at, "RLIMIT_FSIZE", limit, "larger than the system allows")


def few_files(site: Site, subject: Subject, at: Path, order: random.Random) -> str:
    """Few files may be open at a time (`ulimit -n`)."""
    return limited(site, subject, at, "RLIMIT_NOFILE", order.randint(8, 40), "")


def limited(site: Site, subject: Subject, at: Path, limit: str, value: int, words: str) -> str:
    """A stage under a limit of the system, then without."""
    site.calm(subject)
    run = site.run(subject, "run", at)
    wrapper = ["-c", LIMITED.format(limit=limit, value=value)]
    ended = site.start(subject, run, wrapper=wrapper)
    return told(ended, words) or continued(site, subject, run)


def told(ended: Ended, words: str, *, required: bool = False) -> str:
    """What is wrong with how a stage met a limit; empty where it says so, in `words` (a pattern).
    required: it cannot have come to its end."""
    wrong = spoken(ended)
    if not wrong and required and ended.status == 0:
        return "it ended as if nothing were"
    if not wrong and ended.status and not re.search(words, " ".join(ended.words.split())):
        return f"the message does not say '{words}': {ended.complaint}"
    return wrong


def continued(site: Site, subject: Subject, run: Path) -> str:
    """What is wrong with the same command's end, now that there is room."""
    wrong = site.finished(subject, run, site.start(subject, run))
    return f"continued: {wrong}" if wrong else ""


def taken(folder: Path) -> int:
    """KiB that a folder takes on a tmpfs, about."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return sum(-(-size // (PAGE_KIB * 1024)) * PAGE_KIB for size in sizes) + PAGE_KIB


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


MOUNTED, COUNTED = ("read-only", "full"), ("quota",)
WAYS: dict[str, Callable[[Site, Subject, Path, random.Random], str]] = {
    "read-only": read_only,
    "full": full,
    "quota": quota,
    "limit on the size of files": small_files,
    "limit on open files": few_files,
}
