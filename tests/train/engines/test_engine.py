"""Engines: one gradient and one update whatever the engine, the number of processes and the
accumulation."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heads.api.errors import UserError
from tests.train import launch
from tests.train.toy import OPTIM, ROWS, Toy, rows, supervised, train_steps
from train.distributed import World
from train.engines import deepspeed
from train.engines.base import EngineConfig
from train.engines.make import make_engine
from train.engines.torch_engine import TorchEngine
from train.optim import OptimConfig, make_optimizer

DEEPSPEED = [f"deepspeed:{stage}:float32" for stage in range(4)]
OFFLOADED = [
    "deepspeed:2:float32:optimizer",
    "deepspeed:3:float32:optimizer",
    "deepspeed:3:float32:all",
]
FLOAT32 = ["torch:0:float32", *DEEPSPEED]
MUON = [f"muon-{name}" for name in FLOAT32[:-1]]  # not ZeRO 3
# ZeRO-3 in bfloat16 comes last on purpose: the process ends right after it, which used to abort
# (docs/decisions.md).
BFLOAT16 = ["torch:0:bfloat16", "deepspeed:1:bfloat16", "deepspeed:3:bfloat16"]


def alone(**settings: object) -> TorchEngine:
    engine = make_engine(
        Toy(), EngineConfig(name="torch", precision="float32"), OptimConfig(**settings), World()
    )  # type: ignore[arg-type]
    assert isinstance(engine, TorchEngine)
    return engine


def reference(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Plain torch, all rows in one batch, the mean over supervised tokens: what every engine must
    come to."""
    toy = Toy()
    optimizer = make_optimizer(toy, OPTIM)
    norms = []
    for step in range(steps):
        (toy.loss(rows(step, 0, ROWS)).loss_sum / supervised(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(toy.parameters(), OPTIM.clip)))
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return dict(toy.state_dict()), norms


def muon_reference(steps: int) -> dict[str, Tensor]:
    """The same with torch's own Muon, which takes one matrix at a time."""
    toy = Toy()
    found = [toy.linear.weight, *toy.direct]
    copies = [nn.Parameter(matrix.detach().clone()) for matrix in found]
    settings = {"weight_decay": OPTIM.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(copies, momentum=0.95, **settings)  # type: ignore[arg-type]
    rest = [p for name, p in toy.named_parameters() if name not in ("linear.weight", "direct")]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": OPTIM.weight_decay},
            {"params": [p for p in rest if p.ndim == 1 and p.requires_grad], "weight_decay": 0.0},
        ],
        betas=OPTIM.betas,
    )
    for step in range(steps):
        (toy.loss(rows(step, 0, ROWS)).loss_sum / supervised(step)).backward()
        nn.utils.clip_grad_norm_(toy.parameters(), OPTIM.clip)
        for copy, part in zip(copies, [toy.linear.weight.grad, *toy.direct.grad], strict=True):
            copy.grad = part.clone()
        for group in [*muon.param_groups, *adamw.param_groups]:
            group["lr"] = 1e-2 / (step + 1)
        muon.step(), adamw.step()
        toy.zero_grad()
        with torch.no_grad():
            toy.linear.weight.copy_(copies[0])
            toy.direct.copy_(torch.stack(copies[1:]))
    return dict(toy.state_dict())


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize(
    ("processes", "micro"),
    [
        (2, 1),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_processes_times_accumulation_give_the_same_weights_under_every_engine(
    tmp_path: Path, processes: int, micro: int
) -> None:
    extra = OFFLOADED if processes == 1 else []
    configs = (
        [*FLOAT32, *MUON, *extra, *BFLOAT16]
        if processes < 4
        else ["torch:0:float32", "deepspeed:2:float32", *MUON]
    )
    output = launch.run(processes, "tests.train.toy", tmp_path, micro, *configs)
    assert "Error" not in output
    expected, norms = reference(6)
    found = {
        config: load_file(tmp_path / f"{config.replace(':', '-')}.safetensors")
        for config in configs
    }
    turned = muon_reference(6)
    for config in MUON:
        found[config].pop("norms")
        assert difference(found[config], turned) < 1e-3, config  # matrices turn in bfloat16
    assert difference(turned, expected) > 1e-2
    for config in [name for name in configs if "float32" in name and name not in MUON]:
        assert torch.allclose(found[config].pop("norms"), torch.tensor(norms), rtol=1e-5), config
        assert difference(found[config], expected) < 2e-5, config
    halves = [found[name] for name in configs if "bfloat16" in name]
    if halves:  # the same arithmetic under each engine; all of it near, but not equal to, float32
        assert all(difference(half, halves[0]) < 1e-5 for half in halves[1:])
        assert (
            1e-4 < difference({k: v for k, v in halves[0].items() if k != "norms"}, expected) < 0.1
        )


CHUNKED = ["eagle3", "eagle3+train_lm_head=True", "dflash", "distilled+lk_annealed=1", "uno"]


def test_processes_with_different_numbers_of_chunks_divide_weights(tmp_path: Path) -> None:
    """ZeRO-3 gathers the weights of a module at every call of it, so all processes have to call it
    equally often, although a loss runs more chunks for a row with more supervised tokens."""
    worker = "tests.train.chunks_worker"
    launch.run(1, worker, tmp_path, "torch:0:float32", *CHUNKED)
    launch.run(2, worker, tmp_path, "deepspeed:3:float32", *CHUNKED)
    for recipe in CHUNKED:
        expected = load_file(tmp_path / f"torch-{recipe}.safetensors")
        found = load_file(tmp_path / f"deepspeed-{recipe}.safetensors")
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-5, atol=2e-5), (recipe, name)


def test_one_process_trains_on_the_device_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed moves the drafter to the CUDA device of LOCAL_RANK."""
    found = []

    class Begun(Exception):  # noqa: N818
        pass

    def initialize(**_: object) -> None:
        found.append(os.environ["LOCAL_RANK"])
        raise Begun

    fake = SimpleNamespace(initialize=initialize)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(deepspeed, "import_deepspeed", lambda _: fake)
    monkeypatch.setattr(deepspeed, "join_world", lambda *_, **__: None)
    for index in (None, 1):
        world = World(device=torch.device("cuda", index) if index else torch.device("cpu"))
        with pytest.raises(Begun):
            deepspeed.DeepSpeedEngine(Toy(), EngineConfig(), OPTIM, world)
        monkeypatch.delenv("LOCAL_RANK")
    assert found == ["0", "1"]


def test_accumulation_in_plain_torch_is_exact() -> None:
    expected, norms = reference(4)
    for micro in (1, 2, 4):
        engine = alone(lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, clip=OPTIM.clip)
        assert train_steps(engine, World(), micro, 0, 4) == pytest.approx(norms, rel=1e-5)
        assert difference(engine.weights(), expected) < 1e-5


def test_a_mean_of_means_would_be_noticed() -> None:
    """The rows have different numbers of supervised tokens, so averaging per micro-batch gives
    another gradient."""
    counts = [int(rows(0, row, 1).loss_mask.sum()) for row in range(ROWS)]
    assert len(set(counts)) > 1
    engine = alone(clip=0.0)
    for row, count in enumerate(counts):
        engine.forward_backward(rows(0, row, 1), count * ROWS, row == ROWS - 1)
    assert abs(engine.step(0.0) - reference(1)[1][0]) > 1e-2


def test_frozen_weights_stay_and_are_saved() -> None:
    engine = alone()
    before = engine.weights()
    train_steps(engine, World(), 4, 0, 2)
    after = engine.weights()
    assert torch.equal(after["frozen"], before["frozen"])
    assert torch.equal(after["ids"], torch.arange(5))
    assert not torch.equal(after["linear.weight"], before["linear.weight"])


def test_a_gradient_that_is_no_number_updates_nothing() -> None:
    engine = alone()
    before = engine.weights()
    batch = rows(0, 0, ROWS)
    engine.drafter.out.bias.grad = torch.full_like(engine.drafter.out.bias, math.nan)  # type: ignore[union-attr]
    engine.forward_backward(batch, 10, True)
    assert math.isnan(engine.step(0.1))
    assert difference(engine.weights(), before) == 0.0


def test_the_loss_and_its_metrics_are_detached_sums() -> None:
    output = alone().forward_backward(rows(0, 0, 2), 10, True)
    assert not output.loss_sum.requires_grad
    correct, count = output.metrics["accuracy"]
    assert int(count) == int(rows(0, 0, 2).loss_mask.sum()) >= int(correct)


def test_optimiser_state_of_another_drafter_is_refused() -> None:
    engine = alone()
    train_steps(engine, World(), 4, 0, 1)
    state = engine.optimizer_state()
    state.runs["other"] = (0, (1,))
    with pytest.raises(UserError, match=r"another drafter: unknown weights \['other'"):
        alone().load_optimizer_state([state])


def test_a_weight_that_no_row_uses_is_updated_as_beside_a_process_that_uses_it() -> None:
    """AdamW leaves weights without a gradient alone, but decays those whose gradient is zero: the
    number of processes must not decide."""
    engine = alone(weight_decay=0.1)
    engine.drafter.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))  # type: ignore[union-attr]
    engine = TorchEngine(
        engine.drafter, EngineConfig(name="torch", precision="float32"), OPTIM, World()
    )
    train_steps(engine, World(), 4, 0, 1)
    assert torch.allclose(
        engine.weights()["unused"], torch.full((2, 2), 1 - 1e-2 * OPTIM.weight_decay)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "deepsped"}, "engine.name 'deepsped' is unknown. Did you mean 'deepspeed'?"),
        ({"precision": "float16"}, "engine.precision 'float16' is unknown"),
        ({"zero_stage": 4}, "engine.zero_stage 4 is unknown"),
        ({"name": "torch", "offload": "optimizer"}, "engine.offload needs engine.name=deepspeed"),
        ({"zero_stage": 2, "offload": "all"}, "needs engine.zero_stage=3; given: 2"),
        (
            {"zero_stage": 3, "offload_path": "disk"},
            "engine.offload_path needs engine.offload=optimizer or all",
        ),
        ({"zero_stage": 3, "compile": True}, "Use zero_stage 0, 1 or 2, or compile=false"),
        ({"target_sharding": "zero2"}, "engine.target_sharding 'zero2' is unknown"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        EngineConfig(**values)  # type: ignore[arg-type]
    assert message in str(caught.value)
