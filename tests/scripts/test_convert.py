"""Plain values to dataclasses: what fits is built, everything else is refused with path, value and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from heads.api.errors import UserError
from scripts.convert import to_dataclass


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5


@dataclass(frozen=True)
class Outer:
    count: int
    rate: float = 1.0
    name: str = ""
    on: bool = False
    mode: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    size: int | float = 1
    paths: tuple[tuple[int, ...], ...] = ()
    pair: tuple[int, str] = (1, "a")
    folder: Path = Path()
    extra: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UserError(f"count must be 0 or more; given: {self.count}.")


def test_every_type_is_built() -> None:
    values = {
        "count": 3,
        "rate": 2,
        "name": 1234567,
        "on": True,
        "mode": "slow",
        "limit": 5,
        "size": 2.5,
        "paths": [[0], [0, 1]],
        "pair": [4, "b"],
        "folder": "some/where",
        "extra": {"anything": [1, "two"]},
        "weights": {"code": 1},
        "inner": {"rate": 0.25},
    }
    built = to_dataclass(Outer, values, "outer")
    assert built == Outer(
        3, 2.0, "1234567", True, "slow", 5, 2.5, ((0,), (0, 1)), (4, "b"), Path("some/where"),
        {"anything": [1, "two"]}, {"code": 1.0}, Inner(0.25),
    )  # fmt: skip
    assert isinstance(built.rate, float)
    assert isinstance(built.weights["code"], float)
    hash((built.paths, built.pair))  # tuples all the way down, as frozen configurations need


def test_defaults_and_null() -> None:
    assert to_dataclass(Outer, {"count": 0, "limit": None}, "outer") == Outer(0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"count": 1, "rtae": 1.0},
            r"outer\.rtae: there is no such key\. Did you mean 'rate'\? Allowed: count, ",
        ),
        ({"count": "x"}, r"outer\.count: expected a whole number, given 'x' \(text\)"),
        ({"count": 2.5}, r"outer\.count: expected a whole number, given 2\.5"),
        ({"count": True}, r"outer\.count: expected a whole number, given True \(a switch\)"),
        ({"count": None}, r"outer\.count: expected a whole number, given null"),
        ({"count": 1, "rate": "fast"}, r"outer\.rate: expected a number, given 'fast'"),
        ({"count": 1, "name": 1.5}, r"outer\.name: expected text, given 1\.5"),
        ({"count": 1, "on": "yes"}, r"outer\.on: expected true or false, given 'yes'"),
        (
            {"count": 1, "mode": "fsat"},
            r"outer\.mode: given 'fsat' \(text\)\. Did you mean 'fast'\? Allowed: fast, slow",
        ),
        ({"count": 1, "limit": "all"}, r"outer\.limit: expected a whole number, given 'all'"),
        ({"count": 1, "size": "big"}, r"outer\.size: expected a whole number or a number, given 'big'"),
        ({"count": 1, "paths": [[0], ["x"]]}, r"outer\.paths\[1\]\[0\]: expected a whole number, given 'x'"),
        ({"count": 1, "paths": 3}, r"outer\.paths: expected a list .* given 3"),
        ({"count": 1, "pair": [1]}, r"outer\.pair: expected a list"),
        ({"count": 1, "weights": {"code": "x"}}, r"outer\.weights\.code: expected a number, given 'x'"),
        ({"count": 1, "weights": [1]}, r"outer\.weights: expected keys with a number each, given \[1\]"),
        (
            {"count": 1, "inner": {"rat": 1}},
            r"outer\.inner\.rat: there is no such key\. Did you mean 'rate'\?",
        ),
        ({"count": 1, "inner": 3}, r"outer\.inner: expected keys of Inner, given 3"),
        ({"count": "???"}, r"outer\.count is missing\. Give it as outer\.count=\.\.\. \(a whole number\)"),
        ({}, r"outer\.count is missing and has no default"),
        ({"count": -1}, r"outer: count must be 0 or more; given: -1"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        to_dataclass(Outer, values, "outer")
