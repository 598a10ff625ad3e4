"""Checkpoints of other people: what is broken or asks for more than its file holds is refused
before it takes memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.api.checkpoint import load_drafter, read_config, save_drafter
from heads.api.errors import UserError
from tests.heads.micro import MicroTarget, micro_target
from tests.heads.recipes import build


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, MicroTarget]:
    target = micro_target()
    save_drafter(build("medusa", target), tmp_path, target.info)
    return tmp_path, target


def change(folder: Path, **values: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_heads": 1000, "num_layers": 1000}, "has shape .* expected|does not fit"),
        ({"num_heads": 6000}, r"head\.num_heads must lie in \[1, 1024\]; given: 6000"),
        ({"num_heads": 10**9}, r"head\.num_heads must lie in"),
        ({"decay": float("nan")}, r"head\.decay must be a finite number"),
        ({"num_heads": [1]}, r"head\.num_heads: expected a whole number"),
    ],
)
def test_sizes_beyond_the_file_are_refused(
    saved: tuple[Path, MicroTarget], config: dict[str, Any], words: str
) -> None:
    folder, target = saved
    change(folder, config=config)
    with pytest.raises(UserError, match=words):
        load_drafter(folder, target.info, target.weights)


def test_a_million_tensors_are_not_even_described(tmp_path: Path) -> None:
    target = micro_target()
    save_drafter(build("hydra_heads", target), tmp_path, target.info)
    change(tmp_path, config={"num_heads": 1024, "num_layers": 1024})
    with pytest.raises(UserError, match="asks for many more tensors than the file holds"):
        load_drafter(tmp_path, target.info, target.weights)


def test_shapes_that_no_memory_holds_are_compared(saved: tuple[Path, MicroTarget]) -> None:
    """A drafter of some petabytes, were it made."""
    folder, _ = saved
    target = micro_target()
    facts = {**target.info.to_dict(), "hidden_size": 2**20, "vocab_size": 2**24}
    info = type(target.info)(**facts)
    change(folder, config={"own_lm_head": True, "num_heads": 64}, target=facts)
    with pytest.raises(UserError, match=r"has shape .* expected|does not fit kind 'medusa'"):
        load_drafter(folder, info, target.weights)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is not readable as JSON"),
        (b"[" * 200_000, "is not readable as JSON"),
        (b"[]", "in place of keys"),
        (b"{}", "it lacks format, kind, config, needs, target"),
        (b'{"format": 2, "kind": 1, "config": 1, "needs": 1, "target": 1}', "checkpoint format 2"),
        (b'{"format": 1, "kind": 1, "config": 1, "needs": 1, "target": 1}', "its kind is 1"),
        (
            b'{"format": 1, "kind": "medusa", "config": {}, "needs": {}, "target": 5}',
            "its target is 5",
        ),
    ],
)
def test_a_broken_configuration_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_cut_weights_are_one_sentence(saved: tuple[Path, MicroTarget], kept: int) -> None:
    folder, target = saved
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors' cannot be read: "):
        load_drafter(folder, target.info, target.weights)


def test_a_target_of_other_types_is_refused(saved: tuple[Path, MicroTarget]) -> None:
    folder, target = saved
    change(folder, target={**target.info.to_dict(), "hidden_size": "large"})
    with pytest.raises(UserError, match=r"target\.hidden_size: expected a whole number"):
        load_drafter(folder, target.info, target.weights)
