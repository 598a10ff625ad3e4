"""Trainings on weighted answers: weights of one change nothing, others do, from a store as well; a
deaf kind is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.errors import UserError
from heads.eagle3 import Drafter as Eagle3
from inference.manifest import file_entry, read_manifest, write_manifest
from tests.heads.micro import micro_target
from tests.train.micro_run import prepare, settings
from tests.train.test_on_policy import make, packed, rewriting
from train.data.loader import PackedBatch
from train.data.pack import PackedData
from train.on_policy import plan_cuts
from train.run import train


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return prepare(tmp_path_factory.mktemp("micro"))


def weighted(micro: Path, out: Path, spread: float, **columns: Any) -> Path:
    """The answers with random weights of this spread around 1 in both columns; columns: entries to
    put there instead."""
    rng = np.random.default_rng(0)
    table = pq.read_table(micro / "answers" / "shard.parquet")
    lengths = [len(row) for row in table.column("tokens").to_pylist()]
    for name in ("weights", "anchors"):
        values = columns.get(name) or [
            (1 + spread * rng.uniform(-1, 1, n)).astype(np.float32) for n in lengths
        ]
        table = table.append_column(name, pa.array(values, pa.list_(pa.float32())))
    out.mkdir()
    pq.write_table(table, out / "shard.parquet")
    facts = {"target": read_manifest(micro / "answers", "generate")["target"]}
    write_manifest(
        out,
        "generate",
        {**facts, "counts": {}, "shards": [file_entry(out, "shard.parquet", rows=len(lengths))]},
    )
    return out


def trained(micro: Path, out: Path, data: Path, **changes: Any) -> dict[str, Tensor]:
    arguments = settings(
        micro,
        kind="eagle3",
        head={"taps": (0, 1, 2), "ttt_steps": 2},
        max_steps=2,
        eval_every=0,
        **changes,
    )
    train(out=out, **{**arguments, "data": data})
    return load_file(out / "best" / "model.safetensors")


def test_weights_of_one_train_the_same_drafter_and_others_another(
    micro: Path, tmp_path: Path
) -> None:
    plain = trained(micro, tmp_path / "plain", micro / "answers")
    ones = trained(micro, tmp_path / "ones", weighted(micro, tmp_path / "one", 0.0))
    spread = trained(micro, tmp_path / "spread", weighted(micro, tmp_path / "wide", 0.9))
    assert all(torch.equal(ones[name], value) for name, value in plain.items())
    assert any(not torch.equal(spread[name], value) for name, value in plain.items())


def test_a_kind_that_does_not_heed_weights_is_not_trained_on_them(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Eagle3.loss

    def deaf(self: Eagle3, batch: TrainBatch) -> LossOutput:
        return plain(self, replace(batch, weights=None))

    monkeypatch.setattr(Eagle3, "loss", deaf)
    with pytest.raises(
        UserError, match="bring weights for the loss, but kind 'eagle3' does not heed them"
    ):
        trained(micro, tmp_path / "out", weighted(micro, tmp_path / "data", 0.5))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([1.0], "not one entry of 'weights' per token"),
        ([-1.0] * 60, "not one entry"),
        (None, "below 0 or no numbers"),
    ],
)
def test_columns_that_are_no_weights_are_refused(
    values: list[float] | None, match: str, micro: Path, tmp_path: Path
) -> None:
    info = settings(micro)["target"]
    lengths = [
        len(row)
        for row in pq.read_table(micro / "answers" / "shard.parquet").column("tokens").to_pylist()
    ]
    column = [[float("nan")] * n for n in lengths] if values is None else [values] * len(lengths)
    folder = weighted(micro, tmp_path / "data", 0.0, weights=column)
    from inference.target.model import TargetModel

    with pytest.raises(UserError, match=match):
        PackedData.from_manifest(folder, TargetModel.load(info).info, 64)


def test_tokens_that_the_drafter_wrote_weigh_one() -> None:
    target = micro_target()
    drafter = make(target)
    plain = packed()
    weights = torch.rand(plain.tokens.shape, generator=torch.Generator().manual_seed(2)) + 2.0
    given = PackedBatch(**{**plain.tensors(), "weights": weights})
    source = rewriting(target, drafter, window=3)
    found = source.batch(given).weights
    assert found is not None
    written = torch.zeros(plain.tokens.shape, dtype=torch.bool)
    for cut in plan_cuts(plain, source.config):
        written[cut.row, cut.last + 1 : cut.last + 1 + cut.room] = True
    assert written.any()
    assert (found[written] == 1.0).all() and torch.equal(found[~written], weights[~written])
    assert torch.equal(given.weights, weights), "the loader's own weights stay as they are"
    assert source.batch(plain).weights is None
