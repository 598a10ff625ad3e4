"""A target split over two processes (gloo, CPU): the same tokens as in one, with and without
drafts, on both ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.api.errors import UserError
from inference.target import parallel
from inference.target.loading import TargetConfig, load_model
from inference.target.model import TargetModel
from inference.target.parallel import join_ranks, require_divisible
from tests import forked
from tests.inference.parallel_worker import facts_of, require_agreement, texts_of
from tests.inference.tokenizers import tiny_tokenizer
from tests.models import random_model, save_random_target

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},  # tied embedding, soft-capped scores and logits, sliding windows
}


split_on_cpu = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None,
    reason="transformers splits over the accelerator there is",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family, changes in FAMILIES.items():
        save_random_target(folder / family, tiny_tokenizer("plain"), family, **changes)
    return folder


@pytest.fixture(scope="module")
def ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    results = tmp_path_factory.mktemp("results")
    done = forked.run("tests.train.ranks", 2, "tests.inference.parallel_worker", models, results)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "speaking: 0" in done.stdout and "speaking: 1" not in done.stdout
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(models: Path) -> dict[str, TargetModel]:
    return {
        family: TargetModel.load(
            TargetConfig(path=str(models / family), dtype="float64", device="cpu")
        )
        for family in FAMILIES
    }


@split_on_cpu
@pytest.mark.parametrize("family", FAMILIES)
def test_split_and_whole_targets_write_the_same_text(
    family: str, ranks: list[dict[str, Any]], alone: dict[str, TargetModel]
) -> None:
    expected = texts_of(alone[family])
    assert len(expected) == 2 * (1 + 2 + 1)
    for found in ranks:
        assert found[family]["texts"] == expected


@split_on_cpu
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_really_split_and_the_ranks_agree_to_the_last_bit(
    family: str, ranks: list[dict[str, Any]], alone: dict[str, TargetModel]
) -> None:
    whole = facts_of(alone[family])
    assert whole["split"] == []
    for found in ranks:
        facts = found[family]["facts"]
        assert "model.layers.0.self_attn.k_proj.weight" in facts["split"]
        assert facts["local keys"] == [whole["local keys"][0] // 2, whole["local keys"][1]]
        assert facts["cached heads"] * 2 == whole["cached heads"]
        assert facts["whole"] == whole["whole"] and facts["plain tensors"]
        assert facts["key sum"] == pytest.approx(whole["key sum"])
    first, second = (found[family]["facts"]["logits"] for found in ranks)
    assert first == second
    close = (
        [float.fromhex(value) for value in first],
        [float.fromhex(value) for value in whole["logits"]],
    )
    torch.testing.assert_close(torch.tensor(close[0]), torch.tensor(close[1]), rtol=0, atol=1e-5)


@split_on_cpu
def test_disagreement_is_noticed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (
            "processes [1] decoded other tokens than process 0" in found["disagreement"]["message"]
        )


# Refusals, in one process


def test_a_single_process_is_told_to_use_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="torchrun --nproc-per-node"):
        join_ranks("auto")
    require_agreement([1, 2], "a single process")


def test_the_device_must_be_the_one_that_is_split_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"target\.device is 'cpu'.*target\.device=auto"):
        join_ranks("cpu")


def test_heads_must_divide() -> None:
    config = random_model("llama").config  # 4 heads, 2 key/value heads
    require_divisible(config, 2)
    with pytest.raises(
        UserError, match=r"2 key/value heads cannot be split over 4 processes; possible: 2\."
    ):
        require_divisible(config, 4)
    # of the divisors of 4, only 2 divides the key/value heads
    with pytest.raises(
        UserError, match=r"4 attention heads cannot be split over 3 processes; possible: 2\."
    ):
        require_divisible(config, 3)


def test_families_without_a_plan_are_refused_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_target(tmp_path / "gpt2", tiny_tokenizer("plain"), "gpt2")
    for file in (tmp_path / "gpt2").glob("*.safetensors"):
        file.unlink()
    alone = parallel.Ranks(2, torch.device("cpu"))
    monkeypatch.setattr(parallel, "join_ranks", lambda wanted: alone)
    with pytest.raises(
        UserError, match="a gpt2 target cannot be split: transformers has no tensor-parallel plan"
    ):
        load_model(TargetConfig(path=str(tmp_path / "gpt2"), device="cpu", tensor_parallel=True))
