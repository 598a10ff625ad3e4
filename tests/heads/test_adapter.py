"""Adapters on disk: what they compute with their base, what they hold, and which are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heads.api.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Updates
from heads.api.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_drafter,
    new_drafter,
    read_config,
    save_adapter,
    save_drafter,
)
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from inference.manifest import checkpoint_hash
from tests.heads.explicit import PAIR
from tests.heads.micro import MicroTarget, packed_batch
from tests.heads.recipes import recipe

RANK, ALPHA = 3, 5.0


def make(target: MicroTarget, name: str = "distilled") -> TrainableDrafter:
    kind, config = recipe(name)
    counts = torch.arange(target.info.vocab_size)
    made: TrainableDrafter = new_drafter(
        kind, config, target.info, target.weights, 0, counts
    ).eval()
    return made


def random_updates(drafter: TrainableDrafter, seed: int = 3) -> Updates:
    """Updates of every linear layer, float32 as training leaves them."""
    generator, layers = torch.Generator().manual_seed(seed), {}
    for name, part in drafter.named_modules():
        if type(part) is nn.Linear:
            sizes = (RANK, part.in_features), (part.out_features, RANK)
            down, up = (0.3 * torch.randn(size, generator=generator) for size in sizes)
            layers[name] = (down, up)
    return Updates(RANK, ALPHA, layers)


def save_pair(target: MicroTarget, place: Path, name: str = "distilled") -> tuple[Path, Updates]:
    """A base in place/base and an adapter of it in place/code; returns the adapter's folder."""
    drafter = make(target, name)
    save_drafter(drafter, place / "base", target.info)
    updates = random_updates(drafter)
    digest = checkpoint_hash(place / "base")
    save_adapter(drafter, updates, place / "base", digest, place / "code")
    return place / "code", updates


def add_slowly(weight: Tensor, down: Tensor, up: Tensor) -> None:
    """weight[o, i] += alpha / r * sum over k of up[o, k] * down[k, i], one number at a time."""
    down_rows, up_rows = down.double().tolist(), up.double().tolist()
    for o, row in enumerate(up_rows):
        for i in range(weight.shape[1]):
            product = sum(row[k] * down_rows[k][i] for k in range(RANK))
            weight[o, i] += ALPHA / RANK * product


@pytest.mark.parametrize("name", ["distilled", "eagle3", "dspark"])
def test_a_loaded_adapter_computes_with_the_base_and_the_product(
    target: MicroTarget, tmp_path: Path, name: str
) -> None:
    folder, updates = save_pair(target, tmp_path, name)
    slow = load_drafter(tmp_path / "base", target.info, target.weights)
    batch = packed_batch(target, slow.needs, [PAIR])
    before = slow.train_logits(batch, 2)
    with torch.no_grad():
        for layer, (down, up) in updates.layers.items():
            add_slowly(slow.get_submodule(layer).weight, down, up)
    merged = load_drafter(folder, target.info, target.weights)
    assert merged.config == slow.config
    for known, found, plain in zip(
        slow.train_logits(batch, 2), merged.train_logits(batch, 2), before, strict=True
    ):
        torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-9)
        assert float((found - plain).detach().abs().max()) > 0.1, "the updates change nothing"


def test_an_adapter_holds_the_updates_alone(target: MicroTarget, tmp_path: Path) -> None:
    folder, updates = save_pair(target, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        (CONFIG_FILE, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    )
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    assert len(tensors) == 2 * len(updates.layers)
    assert sum(value.numel() for value in tensors.values()) == sum(
        RANK * (down.shape[1] + up.shape[0]) for down, up in updates.layers.values()
    )
    assert (folder / ADAPTER_WEIGHTS).stat().st_size < (
        tmp_path / "base" / WEIGHTS_FILE
    ).stat().st_size / 2
    described = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert (described["r"], described["lora_alpha"]) == (RANK, ALPHA)
    assert described["base_model_name_or_path"] == str(tmp_path / "base")
    entry = read_config(folder)["adapter"]
    assert entry["sha256"] == checkpoint_hash(tmp_path / "base")


def test_base_and_adapter_move_together_and_the_adapter_alone(
    target: MicroTarget, tmp_path: Path
) -> None:
    folder, _ = save_pair(target, tmp_path / "here")
    known = load_drafter(folder, target.info, target.weights).state_dict()
    shutil.copytree(folder, tmp_path / "elsewhere" / "deep" / "code")
    (tmp_path / "elsewhere" / "deep" / "base").mkdir()  # beside it by chance, and no drafter
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    alone = load_drafter(tmp_path / "elsewhere" / "deep" / "code", target.info, target.weights)
    shutil.rmtree(tmp_path / "here")
    both = load_drafter(tmp_path / "there" / "code", target.info, target.weights)
    for name, value in known.items():
        assert torch.equal(alone.state_dict()[name], value), name
        assert torch.equal(both.state_dict()[name], value), name


def test_an_adapter_without_its_base_is_refused(target: MicroTarget, tmp_path: Path) -> None:
    folder, _ = save_pair(target, tmp_path)
    tensors = load_file(tmp_path / "base" / WEIGHTS_FILE)
    first = next(iter(tensors))
    tensors[first] = tensors[first] + 1e-3
    save_file(tensors, tmp_path / "base" / WEIGHTS_FILE, {"format": "pt"})
    with pytest.raises(UserError, match=r"weights are others by now.*train the adapter again"):
        load_drafter(folder, target.info, target.weights)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match=r"base drafter '.*base', which is not there.*SHA-256"):
        load_drafter(folder, target.info, target.weights)


def test_adapters_of_two_bases_have_two_hashes(target: MicroTarget, tmp_path: Path) -> None:
    """Though their updates are the same, as they are before the first step."""
    drafter = make(target)
    updates, found = random_updates(drafter), set()
    for base in ("1" * 64, "2" * 64):
        save_adapter(drafter, updates, tmp_path / "base", base, tmp_path / "code")
        found.add(checkpoint_hash(tmp_path / "code"))
    assert len(found) == 2


Damage = Callable[[dict[str, Any], dict[str, Tensor], dict[str, Any]], object]
LAYER = "base_model.model.lm_head"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda config, tensors, own: config.update(r=4), "are not of rank 4"),
        (lambda config, tensors, own: config.update(r="3"), "describes no low-rank updates"),
        (lambda config, tensors, own: config.update(peft_type="IA3"), "no low-rank updates"),
        (lambda config, tensors, own: config.update(use_dora=True), "sets use_dora"),
        (
            lambda config, tensors, own: tensors.pop(f"{LAYER}.lora_A.weight"),
            "does not hold two matrices per layer",
        ),
        (
            lambda config, tensors, own: tensors.update(other=torch.zeros(2)),
            "does not hold two matrices per layer",
        ),
        (
            lambda config, tensors, own: tensors.update(
                {f"{LAYER}.lora_A.weight": torch.zeros(RANK, 5)}
            ),
            r"layer 'lm_head', \[41, 5\], but in its base its shape is \[41, 16\]",
        ),
        (
            lambda config, tensors, own: tensors.update(
                {
                    "base_model.model.new.lora_A.weight": torch.zeros(RANK, 5),
                    "base_model.model.new.lora_B.weight": torch.zeros(5, RANK),
                }
            ),
            "layer 'new', .* in its base there is none",
        ),
        (
            lambda config, tensors, own: tensors.update(
                {f"{LAYER}.lora_B.weight": torch.full((41, RANK), float("nan"))}
            ),
            "not finite",
        ),
        (lambda config, tensors, own: own.update(adapter="base"), "its adapter is 'base'"),
        (lambda config, tensors, own: own["adapter"].pop("sha256"), "sha256"),
    ],
    ids=range(11),
)
def test_a_damaged_adapter_is_refused(
    target: MicroTarget, tmp_path: Path, damage: Damage, said: str
) -> None:
    folder, _ = save_pair(target, tmp_path)
    config, own = (
        json.loads((folder / name).read_text()) for name in (ADAPTER_CONFIG, CONFIG_FILE)
    )
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    damage(config, tensors, own)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    (folder / CONFIG_FILE).write_text(json.dumps(own))
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    with pytest.raises(UserError, match=said):
        load_drafter(folder, target.info, target.weights)
