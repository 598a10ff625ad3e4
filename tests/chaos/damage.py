"""Files of a finished run, damaged in eight ways, and every stage that reads them run on it.

A stage must come to its end or say in one message of its own why not. Where it comes to its end
with new work, the result must be that of the calm run: damage that is not noticed may not matter.
(A file with another JSON in it is another file, and a report shows what it is given.)
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.ground import UnsurvivedError, flip_bit, truncate
from tests.chaos.rows import Areas, Row
from tests.chaos.stages import Site, Subject, alone, spoken

PART = "damage"
Way = Callable[[Path, random.Random], None]
OTHER = "another JSON"
SKIPPED = "is complete; nothing has changed"
STRANGE: tuple[Any, ...] = (
    None,
    [],
    {},
    "",
    "../../x",
    -1,
    1.5,
    10**30,
    float("nan"),
    float("inf"),
    True,
    [[]],
    "\udc80",
)
"""Values in place of others."""


def attack(seed: int, count: int, folder: Path) -> list[Row]:
    """Damage `count` files of runs, in turn of all stages that read some: a row for each way."""
    order, site, rows = random.Random(seed), Site(folder), Areas(PART)
    subjects = alone()
    for number in range(count):
        subject = subjects[number % len(subjects)]
        try:
            area, wrong = damaged(site, subject, f"{subject.stage}-{number}", order)
        except UnsurvivedError as error:
            area, wrong = subject.name, str(error)
        rows[area].note(wrong)
    return list(rows.values())


def damaged(site: Site, subject: Subject, name: str, order: random.Random) -> tuple[str, str]:
    """Run a subject on a run with one damaged file, of those that it reads or, in half of the
    cases, of those that it has left there before. Returns the way, and what is wrong."""
    calm = site.calm(subject)
    again = not subject.needs or order.random() < 0.5
    run = site.run(subject, name) if not again else site.copy(calm.folder, name)
    way = order.choice(list(WAYS))
    path = order.choice(sorted(found for found in run.rglob("*") if found.is_file()))
    WAYS[way](path, order)
    ended = site.start(subject, run)
    wrong = spoken(ended)
    skipped = again and SKIPPED in ended.words  # what lies there is checked by who reads it
    if not wrong and ended.status == 0 and subject.exact and not skipped and way != OTHER:
        wrong = site.finished(subject, run, ended)
    where = f"{subject.name} with '{path.relative_to(run)}' {way}"
    return way, f"{where}: {wrong}" if wrong else ""


def another_json(path: Path, order: random.Random) -> None:
    """A JSON file with one value replaced; any other one becomes JSON that nobody means."""
    try:
        lines = path.read_text(encoding="utf-8")
        content = json.loads(lines)
    except ValueError:
        texts = [b"[]", b"{}", b"null", b"[" * 100_000, b'{"format": 1}', b"\xff\xfe"]
        path.write_bytes(order.choice(texts))
        return
    replaced = replace(content, order)
    path.write_text(json.dumps(replaced), encoding="utf-8")


def replace(content: Any, order: random.Random) -> Any:
    """A copy of a value with one that is drawn in place of one inside."""
    keys: list[Any] = []
    if isinstance(content, dict):
        keys = list(content)
    elif isinstance(content, list):
        keys = list(range(len(content)))
    if not keys or order.random() < 0.1:
        return order.choice([one for one in STRANGE if one != content])
    key, copy = order.choice(keys), content.copy()
    if order.random() < 0.15:
        del copy[key]
    else:
        copy[key] = replace(copy[key], order)
    return copy


def noise(path: Path, order: random.Random) -> None:
    path.write_bytes(order.randbytes(max(1, path.stat().st_size)))


def zeros(path: Path, order: random.Random) -> None:
    path.write_bytes(bytes(max(1, path.stat().st_size)))


def flipped(path: Path, order: random.Random) -> None:
    if path.stat().st_size:
        flip_bit(path, order.random())


def emptied(path: Path, order: random.Random) -> None:
    path.write_bytes(b"")


def cut(path: Path, order: random.Random) -> None:
    truncate(path, order.uniform(0.05, 0.95))


def gone(path: Path, order: random.Random) -> None:
    path.unlink()


def shorter(path: Path, order: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:-1])


WAYS: dict[str, Way] = {
    "empty": emptied,
    "cut": cut,
    "a byte short": shorter,
    "a bit flipped": flipped,
    "all zeros": zeros,
    "noise": noise,
    "gone": gone,
    OTHER: another_json,
}
"""What can happen to a file."""
