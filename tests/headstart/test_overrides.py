"""Python values as overrides: what Hydra reads back is what was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from headstart.overrides import name_or_path, spell, spell_groups
from scripts.config.compose import parse

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\x00"), max_size=12)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS)


def read(override: str) -> Any:
    """The value that Hydra reads and OmegaConf resolves."""
    (found,) = parse([override])
    node = OmegaConf.create({"value": plain(found.value())})
    return OmegaConf.to_container(node, resolve=True)["value"]


def plain(value: Any) -> Any:
    """Hydra's quoted texts as texts."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.text if hasattr(value, "text") else value


@settings(deadline=None)
@given(st.one_of(VALUES, st.lists(VALUES, max_size=4)))
def test_values_come_back(value: Any) -> None:
    found = read(spell("a.b", value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("null", "true", "1e-4", "12", "a b", "", 'say "x"', "back\\", 'a\\"b', "[1]", "{a}"),
        *("~/x.jsonl", "${y}", "x\\${y}", "\\\\${", 'a "${run.name}"'),
    ],
)
def test_texts_stay_texts(text: str) -> None:
    assert read(spell("a", text)) == text
    assert read(spell("a", [text])) == [text]


def test_groups() -> None:
    chosen = {"engine": "torch", "optim": {"lr": 1e-4, "betas": (0.9, 0.95)}}
    assert list(spell_groups(chosen)) == [
        "engine=torch",
        "optim.lr=0.0001",
        "optim.betas=[0.9,0.95]",
    ]
    nested = {"train": {"tracker": {"wandb": "disabled"}, "prompts": [Path("a b.jsonl")]}}
    assert list(spell_groups(nested)) == [
        "train.tracker.wandb=disabled",
        'train.prompts=["a b.jsonl"]',
    ]


def test_an_option_by_name_a_mapping_by_key_and_anything_else_by_path() -> None:
    assert name_or_path("data", "jsonl", {"limit": 10, "benches": []}) == [
        "data.limit=10",
        "data.benches=[]",
    ]
    assert name_or_path("target", "local", "qwen3_8b") == ["target=qwen3_8b"]
    assert name_or_path("target", "local", "Qwen/Qwen3-8B") == [
        "target=local",
        "target.path=Qwen/Qwen3-8B",
    ]
