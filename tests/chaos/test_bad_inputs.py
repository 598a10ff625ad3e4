"""Every setting refuses what it cannot hold, with one message that names it."""

from __future__ import annotations

import pytest

from heads.api.config import PositiveInt
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from scripts.config.schema import group_classes
from tests.chaos import bad_inputs


@pytest.mark.parametrize("group", sorted(group_classes()))
def test_every_setting_of_a_group_refuses_every_bad_value(group: str) -> None:
    cases = [case for case in bad_inputs.every_input() if case.group == group]
    found = {
        f"{case.setting}={bad_inputs.spell(case.value)[:80]}": bad_inputs.failure_of_group(
            case, bad_inputs.base_values(case)
        )
        for case in cases
    }
    assert cases
    assert {key: words for key, words in found.items() if words} == {}


def test_every_setting_of_every_kind_of_drafter_refuses_every_bad_value() -> None:
    cases = list(bad_inputs.every_head_input())
    found = {
        f"{kind}: {case.setting}={bad_inputs.spell(case.value)[:80]}": bad_inputs.failure_of_group(
            case, {"kind": kind}
        )
        for kind, case in cases
    }
    assert len(cases) > 500
    assert {key: words for key, words in found.items() if words} == {}


def test_every_number_of_every_setting_has_limits() -> None:
    classes = {
        **group_classes(),
        **{f"head ({kind})": get_kind(kind).config_class for kind in kind_names()},
    }
    found = [name for group, cls in classes.items() for name in bad_inputs.unlimited_of(cls, group)]
    assert len(classes) > 40 and found == []
    # what is looked for is found
    assert bad_inputs.unlimited(tuple[int, ...]) == [int]
    assert bad_inputs.unlimited(float | None) == [float]
    assert bad_inputs.unlimited(PositiveInt | None) == []


def test_commands_refuse_a_sample_of_them() -> None:
    row = bad_inputs.attack(seed=18, count=12)
    assert (row.tried, row.words) == (12, [])
