"""Plain values to configuration classes: what fits is built, all else is refused with path, value
and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from heads.api.config import (
    Fraction,
    NonEmpty,
    OpenFraction,
    PositiveInt,
    Temperature,
    UnitInterval,
    build,
    config,
)
from heads.api.errors import UserError


@config("outer.inner")
@dataclass(frozen=True)
class Inner:
    rate: float = 0.5


@config("outer")
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
    steps: PositiveInt = 1
    share: Fraction = 1.0
    chance: OpenFraction = 0.5
    unit: UnitInterval = 0.0
    rows: NonEmpty[PositiveInt] = (1,)
    warmth: Temperature = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UserError(f"count must be 0 or more; given: {self.count}.")


@dataclass(frozen=True)
class PlainInner:
    rate: float = 0.5


@dataclass(frozen=True)
class Plain:
    """A class of somebody who knows nothing of `config`: a kind of drafter from another folder."""

    count: int
    mode: Literal["fast", "slow"] = "fast"
    paths: tuple[tuple[int, ...], ...] = ()
    inner: PlainInner = field(default_factory=PlainInner)

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
    built = build(Outer, values, "outer")
    assert built == Outer(
        3,
        2.0,
        "1234567",
        True,
        "slow",
        5,
        2.5,
        ((0,), (0, 1)),
        (4, "b"),
        Path("some/where"),
        {"anything": [1, "two"]},
        {"code": 1.0},
        Inner(0.25),
    )
    assert isinstance(built.rate, float)
    assert isinstance(built.weights["code"], float)
    hash((built.paths, built.pair))  # tuples all the way down, as frozen configurations need


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": NAN}, r"outer\.rate must be a finite number; given: nan"),
        ({"rate": INFINITY}, r"outer\.rate must be a finite number; given: inf"),
        ({"share": NAN}, r"outer\.share must be a finite number"),
        (
            {"inner": {"rate": -INFINITY}},
            r"outer\.inner\.rate must be a finite number; given: -inf",
        ),
        ({"weights": {"code": NAN}}, r"outer\.weights\.code must be a finite number"),
        ({"rate": 10**400}, r"outer\.rate: expected a number, given 1000"),
        (
            {"count": 2**63},
            r"outer\.count must lie in \[-9223372036854775808, 9223372036854775807\]",
        ),
        ({"count": 10**5000}, "given: a value that is too long to show"),
        (
            {"rate": 1e308},
            r"outer\.rate must lie in \[-1000000000000\.0, 1000000000000\.0\]; given: 1e",
        ),
        ({"rate": 10**20}, r"outer\.rate must lie in \[-1000000000000\.0"),
        ({"warmth": 1e308}, r"outer\.warmth must lie in \[0, 1000\]; given: 1e\+308"),
        ({"warmth": 1e-300}, r"outer\.warmth: a number above 0 must be at least 1e-09 here; given"),
        ({"name": "a\0b"}, r"outer\.name: 'a\\x00b' holds a character that no text may"),
        ({"name": "\ud800"}, r"outer\.name: '\\ud800' holds a character"),
        ({"folder": "a\0b"}, r"outer\.folder: .* holds a character"),
        ({"name": ["x" * 9000]}, r"\.\.\. \(9004 characters\) \(a list\)"),
    ],
)
def test_numbers_and_texts_that_mean_nothing_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(Outer, {"count": 1, **values}, "outer")


def test_values_nested_deeply_are_refused() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UserError, match="outer: the values are nested too deeply"):
        build(Outer, {"count": deep}, "outer")


def test_plain_classes_have_the_same_limits() -> None:
    with pytest.raises(UserError, match=r"plain\.count must lie in"):
        build(Plain, {"count": 2**63}, "plain")


def test_defaults_and_null() -> None:
    assert build(Outer, {"count": 0, "limit": None}, "outer") == Outer(0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"count": 1, "rtae": 1.0},
            r"outer\.rtae: there is no such key\. Did you mean 'rate'\? Allowed: chance, count, ",
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
            r"outer\.mode 'fsat' is unknown\. Did you mean 'fast'\? Allowed: fast, slow",
        ),
        ({"count": 1, "limit": "all"}, r"outer\.limit: expected a whole number, given 'all'"),
        (
            {"count": 1, "size": "big"},
            r"outer\.size: expected a whole number or a number, given 'big'",
        ),
        (
            {"count": 1, "paths": [[0], ["x"]]},
            r"outer\.paths\[1\]\[0\]: expected a whole number, given 'x'",
        ),
        ({"count": 1, "paths": 3}, r"outer\.paths: expected a list .* given 3"),
        ({"count": 1, "pair": [1]}, r"outer\.pair: expected a list"),
        (
            {"count": 1, "weights": {"code": "x"}},
            r"outer\.weights\.code: expected a number, given 'x'",
        ),
        (
            {"count": 1, "weights": [1]},
            r"outer\.weights: expected keys with a number each, given \[1\]",
        ),
        (
            {"count": 1, "inner": {"rat": 1}},
            r"outer\.inner\.rat: there is no such key\. Did you mean 'rate'\?",
        ),
        ({"count": 1, "inner": 3}, r"outer\.inner: expected keys of Inner, given 3"),
        (
            {"count": "???"},
            r"outer\.count is missing\. Give it as outer\.count=\.\.\. \(a whole number\)",
        ),
        ({}, r"outer\.count is missing and has no default"),
        ({"count": -1}, r"outer: count must be 0 or more; given: -1"),
        ({"count": 1, "steps": 0}, r"outer\.steps must lie in \[1, "),
        ({"count": 1, "share": 0}, r"outer\.share must be above 0 and at most 1; given: 0"),
        ({"count": 1, "share": 1.5}, r"outer\.share must be above 0 and at most 1; given: 1\.5"),
        ({"count": 1, "chance": 1}, r"outer\.chance must lie between 0 and 1; given: 1"),
        ({"count": 1, "unit": 2}, r"outer\.unit must lie in \[0, 1\]; given: 2"),
        ({"count": 1, "rows": []}, r"outer\.rows is empty\. Give at least one value"),
        ({"count": 1, "rows": [1, 0]}, r"outer\.rows\[1\] must lie in \[1, "),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Outer, values, "outer")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "x"}, r"head\.count: expected a whole number, given 'x'"),
        ({"count": 1, "mode": "fsat"}, r"head\.mode 'fsat' is unknown\. Did you mean 'fast'"),
        ({"count": 1, "inner": {"rat": 1}}, r"head\.inner\.rat: there is no such key"),
        ({"count": 1, "more": 1}, r"head\.more: there is no such key"),
        ({"count": -1}, r"head: count must be 0 or more"),
        ({}, r"head\.count is missing and has no default"),
    ],
)
def test_a_plain_dataclass_is_checked_when_it_is_built(
    values: dict[str, Any], message: str
) -> None:
    built = build(Plain, {"count": 1, "paths": [[1], [2]], "inner": {"rate": 1}}, "head")
    assert built == Plain(1, "fast", ((1,), (2,)), PlainInner(1.0)) and type(built) is Plain
    with pytest.raises(UserError, match=message):
        build(Plain, values, "head")


def test_construction_and_replacement_in_python_are_checked_alike() -> None:
    with pytest.raises(UserError, match=r"outer\.steps must lie in \[1, "):
        Outer(1, steps=0)
    with pytest.raises(UserError, match=r"outer\.mode 'fsat' is unknown"):
        replace(Outer(1), mode="fsat")
    with pytest.raises(UserError, match=r"outer\.inner\.rate: expected a number"):
        Inner("x")
    assert replace(Outer(1), inner=Inner(0.1)).inner.rate == 0.1


@dataclass(frozen=True)
class PlainHeir(Inner):
    """A plain dataclass with a checked base: a kind from elsewhere that extends one of ours."""

    more: int = 0


def test_a_plain_heir_of_a_checked_class_is_built_with_its_own_fields() -> None:
    assert build(PlainHeir, {"rate": 2, "more": 3}, "head") == PlainHeir(2.0, 3)
    with pytest.raises(UserError, match=r"head\.more: expected a whole number"):
        build(PlainHeir, {"more": "x"}, "head")
