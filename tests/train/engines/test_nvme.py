"""AdamW's state on an NVMe disk: refused before the first step where DeepSpeed cannot write there,
else resumed bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.errors import UserError
from tests.train.toy import OPTIM, Toy, train_steps
from train.distributed import World
from train.engines.base import EngineConfig
from train.engines.deepspeed import import_deepspeed, require_async_io
from train.engines.make import make_engine


class Wide(Toy):
    """A toy with one weight that is large enough to be moved (a mebibyte)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.full((600, 600), 0.01))

    def loss(self, batch: TrainBatch) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss_sum + self.wide.square().sum(), output.metrics)


def builder() -> type:
    import_deepspeed("cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder


def test_without_libaio_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder(), "is_compatible", lambda self, verbose=False: False)
    config = EngineConfig(
        zero_stage=3, precision="float32", offload="optimizer", offload_path=str(tmp_path)
    )
    with pytest.raises(
        UserError, match=r"async_io operation needs a C\+\+ compiler, ninja and libaio.*libaio-dev"
    ):
        make_engine(Toy(), config, OPTIM, World())


def test_a_folder_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder(), "is_compatible", lambda self, verbose=False: True)
    with pytest.raises(UserError, match="is no folder"):
        require_async_io(import_deepspeed("cpu"), str(tmp_path / "none"))


@pytest.mark.slow
def test_a_state_on_disk_is_saved_and_continued(tmp_path: Path) -> None:
    """Compiles DeepSpeed's operation on first use, which takes minutes."""
    if not builder()().is_compatible():
        pytest.skip("libaio is not there")
    plain = make_engine(Wide(), EngineConfig(name="torch", precision="float32"), OPTIM, World())
    train_steps(plain, World(), 4, 0, 4)
    config = EngineConfig(
        zero_stage=3, precision="float32", offload="optimizer", offload_path=str(tmp_path)
    )
    first = make_engine(Wide(), config, OPTIM, World())
    train_steps(first, World(), 4, 0, 2)
    weights, state = first.weights(), first.optimizer_state()
    assert torch.isfinite(state.tensors["wide.exp_avg"]).all()
    assert state.count("wide") == 360_000
    train_steps(first, World(), 4, 2, 4)
    whole = first.weights()
    first.close()
    toy = Wide()
    toy.load_state_dict(weights)
    second = make_engine(toy, config, OPTIM, World())
    second.load_optimizer_state([state])
    train_steps(second, World(), 4, 2, 4)
    assert all(torch.equal(second.weights()[name], value) for name, value in whole.items())
    assert all(
        torch.allclose(whole[name], value, atol=2e-5) for name, value in plain.weights().items()
    )
    second.close()
