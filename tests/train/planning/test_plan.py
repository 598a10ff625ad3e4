"""Plans against what they predict: real steps of a small target, the allocator's records, the
engines' own tensors."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from heads.api.batch import TrainBatch
from heads.api.checkpoint import new_drafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from heads.nn import attention, losses
from heads.nn.packing import first_places
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.heads.micro import micro_target, packed_batch
from tests.heads.recipes import build
from tests.inference.tokenizers import save_micro_target
from tests.train.micro_run import settings
from tests.train.planning.test_footprint import allocator_peak
from train.config import TrainingJob
from train.distributed import World
from train.engines.base import EngineConfig, Objective
from train.engines.make import make_engine
from train.joint.config import JointConfig
from train.optim import OptimConfig
from train.planning import dry_run
from train.planning import plan as planning
from train.planning.devices import TERA, find_peak
from train.planning.dry_run import DryStep, dry_batch, dry_step, held_in_parts, plan_drafter
from train.planning.footprint import Footprint
from train.planning.plan import PlanConfig, Speed, bandwidth, make_plan, state_bytes, target_bytes
from train.planning.target import plan_target
from train.refresh import RefreshConfig
from train.target.parts import StoredWeights, load_parts

CONFIGS = Path(__file__).parents[3] / "assets" / "configs"
FLOAT32 = EngineConfig(name="torch", precision="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("target")
    save_micro_target(out / "target")
    return out


def described(folder: Path) -> TargetConfig:
    return TargetConfig(str(folder / "target"), device="cpu")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", 0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA GeForce RTX 3090 Ti", 0),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 0),
        ("NVIDIA H100 PCIe MIG 1g.10gb", 0),
    ],
)
def test_variants_of_a_gpu_have_peaks_of_their_own(
    name: str, tflops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = find_peak(torch.device("cuda"), torch.bfloat16)
    assert found.flops == tflops * TERA
    assert ("is not in the table" in found.source) is (tflops == 0)


def test_the_weights_of_real_targets_are_the_published_ones() -> None:
    llama = plan_target(TargetConfig(str(CONFIGS / "llama-3.1-8b"), dtype="bfloat16", device="cpu"))
    assert llama.info.parameters == 8_030_261_248
    assert llama.weight_bytes == 2 * llama.info.parameters
    qwen = plan_target(
        TargetConfig(str(CONFIGS / "qwen3-235b-a22b"), dtype="bfloat16", device="cpu")
    )
    assert round(qwen.info.parameters / 1e9, 1) == 235.1
    embeddings = 2 * qwen.info.vocab_size * qwen.info.hidden_size
    # what the name says: embedding and LM head are counted there
    assert round((qwen.active + embeddings) / 1e9) == 22


def test_the_target_is_counted_as_it_runs(folder: Path) -> None:
    plan, real = plan_target(described(folder)), TargetModel.load(described(folder))
    assert plan.info.parameters == real.info.parameters
    needs, rows, length = FeatureSpec((1, 2), last_hidden=True), 2, 64
    tokens = torch.randint(10, real.info.vocab_size, (rows, length))
    positions = torch.arange(length).repeat(rows, 1)
    with Footprint() as took:
        real.features(tokens, positions, torch.ones_like(tokens), needs)
    assert plan.flops(rows, length) == took.flops
    segments = (1 + (torch.arange(length) >= 40).int()).repeat(rows, 1)
    with Footprint() as packed:
        real.features(tokens, positions, segments, needs)
    assert packed.flops < took.flops
    # here the last features come after the layers are done with; it is exact where layers weigh
    # more (docs/scale.md)
    assert plan.activations(rows, length, needs) == pytest.approx(took.peak, rel=0.25)


@pytest.mark.parametrize("chunk", [1 << 26, 1 << 16])
def test_a_row_of_one_document_takes_the_most(
    folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan, which is made for such rows, holds for packed ones, recomputed attention included."""
    monkeypatch.setattr(attention, "CHUNK_ELEMENTS", chunk)
    plan = plan_target(described(folder))
    head = get_kind("eagle3").config_class(ttt_steps=3)
    drafter = plan_drafter("eagle3", head, plan)
    one = dry_step(drafter, plan, FLOAT32, 2, 160, 0.7)

    def several(*given: Any) -> TrainBatch:
        batch = dry_batch(*given)
        number = torch.tensor([0] * 20 + [1] * 10 + [2] * 100 + [3] * 30)
        batch.segments = (1 + number.int()).expand(2, -1)
        batch.positions = torch.arange(160) - first_places(batch.segments)
        return batch

    monkeypatch.setattr(dry_run, "dry_batch", several)
    packed = dry_step(drafter, plan, FLOAT32, 2, 160, 0.7)
    assert packed.flops < one.flops
    assert packed.peak <= 1.02 * one.peak


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_a_step_is_counted_as_it_runs(folder: Path, kind: str) -> None:
    plan, real = plan_target(described(folder)), TargetModel.load(described(folder))
    head = get_kind(kind).config_class()
    fake_one = plan_drafter(kind, head, plan)
    dry = dry_step(fake_one, plan, FLOAT32, 2, 64, 0.7)
    own = new_drafter(
        kind, head, real.info, real.weights, 0, torch.ones(real.info.vocab_size)
    ).float()
    batch = dry_batch(fake_one, plan, torch.float32, 2, 64, 0.7)
    if batch.taps is not None:
        batch.taps = torch.randn(batch.taps.shape)
    if batch.last_hidden is not None:
        batch.last_hidden = torch.randn(batch.last_hidden.shape)
    batch.target_logits = real.weights.logits if own.needs.logits else None
    for parameter in own.parameters():
        parameter.grad = torch.zeros_like(parameter)
    objective = Objective(own, FLOAT32, "cpu")

    def step() -> None:
        (objective(batch) / 100).backward()

    with Footprint() as took:
        step()
    assert dry.flops == took.flops
    assert dry.peak == pytest.approx(took.peak, rel=0.02)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        step()
    assert dry.peak == pytest.approx(allocator_peak(records), rel=0.15)


@pytest.mark.parametrize(
    ("name", "stage"),
    [("torch", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)],
)
def test_states_are_what_the_engines_hold(name: str, stage: int) -> None:
    target = micro_target(torch.float32)
    drafter = build("eagle3", target).float()
    engine_config = EngineConfig(name=name, zero_stage=stage, precision="float32")
    batch = packed_batch(target, drafter.needs, [[list(range(3, 35))]])
    weights = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    # AdamW's step counters, padding of flat parts, the loss's scalars
    small = 8 * len(list(drafter.parameters())) + 4096
    with Footprint() as count:
        engine = make_engine(drafter, engine_config, OptimConfig(), World())
        engine.forward_backward(batch, 10, True)
        engine.step(1e-3)
        # everything is there: weights, gradients, both moments
        engine.forward_backward(batch, 10, True)
        gc.collect()
        held = count.live
    planned = state_bytes(weights, engine_config, 1)
    # torch and stage 0 train the weights where they are; the others put them into flat parts of
    # their own, which are counted
    outside = planned["weights"] if stage == 0 else 0
    engine.close()
    assert planned["weights"] == planned["gradients"] == 4 * weights
    assert planned["adam"] == 8 * weights
    assert abs(sum(planned.values()) - outside - held) <= small


def test_zero_divides_what_it_says() -> None:
    def by_stage(stage: int) -> dict[str, int]:
        return state_bytes(1000, EngineConfig(zero_stage=stage), 4)

    whole, part = 4000, 1000
    assert by_stage(0) == {
        "weights": whole,
        "gradients": whole,
        "adam": 2 * whole,
        "working": whole,
    }
    many = 10**9  # gradients are copied in parts for their all-reduce
    assert state_bytes(many, EngineConfig(zero_stage=0), 4)["working"] == 4 * 500_000_000
    assert state_bytes(many, EngineConfig(zero_stage=0), 1)["working"] == 0
    assert by_stage(1) == {
        "weights": whole,
        "gradients": whole,
        "adam": 2 * part,
        "working": part + whole,
    }
    assert by_stage(2) == {
        "weights": whole,
        "gradients": part,
        "adam": 2 * part,
        "working": part + whole,
    }
    assert by_stage(3) == {
        "weights": part,
        "gradients": part,
        "adam": 2 * part,
        "working": part + 2 * whole,
    }
    offloaded = state_bytes(1000, EngineConfig(zero_stage=2, offload="optimizer"), 4)
    assert (offloaded["adam"], offloaded["working"]) == (0, whole)
    assert state_bytes(1000, EngineConfig(zero_stage=3, offload="all"), 4)["weights"] == 0


def job_for(folder: Path, **changes: Any) -> TrainingJob:
    arguments = settings(
        folder, **{"prompts": (), "eval_every": 0, "max_steps": 0, "global_batch": 8, **changes}
    )
    return TrainingJob(**arguments, out=folder / "out")


def test_a_plan_for_a_gpu_needs_neither_weights_nor_answers(folder: Path) -> None:
    config = PlanConfig(gpu="h100", count=4, tokens=64 * 80)
    plan = make_plan(job_for(folder), config, Speed.of(config))
    assert plan["steps"] == 10
    assert plan["fits"] is True
    assert plan["memory_bytes"]["total"] == sum(
        v for k, v in plan["memory_bytes"].items() if k != "total"
    )
    assert plan["hours"] == pytest.approx(10 * plan["step_seconds"]["total"] / 3600)
    assert plan["device_hours"] == 4 * plan["hours"]
    assert "assumed" in plan["speed"]["source"]
    halved = replace(config, mfu=0.7)
    faster = make_plan(job_for(folder), halved, Speed.of(halved))
    assert faster["step_seconds"]["drafter"] == pytest.approx(plan["step_seconds"]["drafter"] / 2)
    json.dumps(plan)
    prompts_too = make_plan(job_for(folder, context_weight=0.5), config, Speed.of(config))
    assert (plan["supervised"], prompts_too["supervised"]) == (config.supervised, 1.0)


def planned(folder: Path, count: int, mode: str, **changes: Any) -> dict[str, Any]:
    config = PlanConfig(gpu="h100", count=count, tokens=64 * 80)
    features = {"mode": mode, **changes.pop("features", {})}
    return make_plan(
        job_for(folder, features=features, parity=False, **changes), config, Speed.of(config)
    )


def test_communication_follows_the_stage_and_the_micro_batches(folder: Path) -> None:
    def seconds(engine: EngineConfig, micro: int) -> float:
        job = replace(job_for(folder, global_batch=8 * micro, micro_batch=2), engine=engine)
        config = PlanConfig(gpu="h100", count=4, tokens=64 * 80)
        plan = make_plan(job, config, Speed.of(config))
        once = 3 / 4 * 4 * plan["drafter"]["trained_weights"] / bandwidth(config)
        return plan["step_seconds"]["communication"] / once

    one, five = (
        [seconds(EngineConfig(zero_stage=stage), micro) for stage in range(4)] for micro in (1, 5)
    )
    # once for a gathering or a reduce-scatter, twice for an all-reduce
    assert one == pytest.approx([2, 3, 3, 3])
    assert five == pytest.approx([2, 3, 11, 15])
    assert seconds(EngineConfig(name="torch"), 5) == pytest.approx(2)


def test_states_on_disk_hold_the_running_mean(folder: Path) -> None:
    plain, averaged = (planned(folder, 1, "online", average=decay) for decay in (0.0, 0.99))
    weights, kept = plain["drafter"]["trained_weights"], 1 + job_for(folder).config.keep
    assert plain["disk_bytes"]["states"] == 12 * weights * kept
    assert averaged["disk_bytes"]["states"] == 16 * weights * kept


def test_frozen_weights_take_memory_and_disk(folder: Path) -> None:
    def of(engine: EngineConfig, **changes: Any) -> dict[str, Any]:
        head = get_kind("eagle3").config_class(ttt_steps=1, **changes.pop("head", {}))
        config = PlanConfig(gpu="h100", count=2, tokens=64 * 80)
        job = replace(job_for(folder, **changes), kind="eagle3", head=head, engine=engine)
        return make_plan(job, config, Speed.of(config))

    trained, still = (of(FLOAT32, head={"train_lm_head": way}) for way in (True, False))
    target = plan_target(described(folder))
    head = target.info.vocab_size * target.info.hidden_size
    weights, kept = still["drafter"]["trained_weights"], 1 + job_for(folder).config.keep
    assert trained["drafter"]["trained_weights"] == weights + head
    assert trained["memory_bytes"]["drafter frozen weights"] == 0
    assert still["memory_bytes"]["drafter frozen weights"] == 4 * head
    assert still["disk_bytes"]["states"] == (12 * weights + 4 * head) * kept
    averaged = of(FLOAT32, head={"train_lm_head": False}, average=0.99)
    assert averaged["disk_bytes"]["states"] == (16 * weights + 8 * head) * kept
    assert still["disk_bytes"]["best"] == trained["disk_bytes"]["best"]
    divided = of(EngineConfig(zero_stage=3), head={"train_lm_head": False})
    assert divided["memory_bytes"]["drafter frozen weights"] == 2 * head


def test_a_store_of_top_logits_is_planned_as_it_is_read(folder: Path) -> None:
    plan = planned(folder, 1, "store", features={"top_logits": 5})
    tokens = plan["tokens"]
    per_token = plan["reading"]["bytes_per_token"]
    assert plan["disk_bytes"]["feature_store"]["bf16"] == pytest.approx(per_token * tokens, rel=0.5)
    assert per_token == 6 * 5 + 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joint": JointConfig(mode="lora")}, "joint=lora also trains updates of the target"),
        ({"refresh": RefreshConfig("drafter", lora_rank=4)}, "train.refresh.lora_rank=4 trains"),
    ],
)
def test_trainings_that_are_not_counted_are_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    config = PlanConfig(gpu="h100", tokens=64 * 80)
    job = job_for(folder)
    start = changes.get("refresh", job.config.refresh)
    changed = replace(job, config=replace(job.config, refresh=start))
    changed = replace(changed, joint=changes.get("joint", job.joint))
    with pytest.raises(UserError, match=message):
        make_plan(changed, config, Speed.of(config))


def test_losses_are_counted_in_the_chunks_of_the_planned_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def counted(*given: Any) -> DryStep:
        seen.append(losses.chunk_elements(torch.device("cpu")))  # where fake tensors claim to be
        return dry_step(*given)

    monkeypatch.setattr(planning, "dry_step", counted)
    for name in ("h100", "h200"):
        config = PlanConfig(gpu=name, tokens=64 * 80)
        make_plan(job_for(folder, sequence_length=48), config, Speed.of(config))
    assert seen == [1 << 27, 1 << 28]
    assert losses.chunk_elements(torch.device("cpu")) == losses.CHUNK_ELEMENTS == 1 << 25


def test_the_target_is_counted_as_the_trainer_holds_it(folder: Path) -> None:
    whole, parts = (
        planned(folder, 2, "store", features={"trainer_target": way}) for way in ("whole", "parts")
    )
    real = load_parts(described(folder)).weights.state
    assert isinstance(real, StoredWeights)
    assert parts["memory_bytes"]["target"] == sum(real.files.read_so_far.values())
    assert (
        whole["memory_bytes"]["target"]
        == whole["target"]["bytes"]
        > parts["memory_bytes"]["target"]
    )
    assert whole["step_seconds"] == parts["step_seconds"]
    assert parts["step_seconds"]["target"] == 0
    with pytest.raises(UserError, match=r"measuring tau decodes with them"):
        planned(
            folder, 2, "store", features={"trainer_target": "parts"}, eval_every=3, prompts=("x",)
        )


def test_layers_that_a_drafter_runs_are_held_in_parts(folder: Path) -> None:
    target = plan_target(described(folder))
    ends = target.weights.embedding.nbytes + target.weights.lm_head.nbytes
    norm = target.weights.state["model.norm.weight"].nbytes
    kangaroo = get_kind("early_exit").config_class(exit_layer=1, adapter="attention")
    assert held_in_parts("early_exit", kangaroo, target) - ends in (
        target.largest_layer,
        target.largest_layer + norm,
    )
    assert held_in_parts("medusa", get_kind("medusa").config_class(num_heads=2), target) == ends


def test_features_from_elsewhere_say_what_they_take(folder: Path) -> None:
    online, store = planned(folder, 2, "online"), planned(folder, 2, "store")
    assert online["reading"] is None
    hidden, seconds = 32, store["step_seconds"]["total"]
    # medusa reads the last hidden state, in bf16
    assert store["reading"]["bytes_per_token"] == 2 * hidden
    assert store["reading"]["total_bytes_per_second"] == pytest.approx(
        2 * hidden * 8 * 64 / seconds
    )
    assert store["reading"]["process_bytes_per_second"] == pytest.approx(
        2 * hidden * 4 * 64 / seconds
    )
    # one pass over all tokens is what the steps online spend on the target, there and here
    spent = online["steps"] * 2 * online["step_seconds"]["target"] / 3600
    assert store["target_pass"]["device_hours"] == pytest.approx(spent, rel=1e-6)
    assert "not in the time" in store["target_pass"]["where"]


def test_processes_that_run_the_target_for_others_do_not_train(folder: Path) -> None:
    plan = planned(folder, 6, "group", features={"targets": 2, "trainer_target": "parts"})
    alone = planned(folder, 4, "store", features={"trainer_target": "parts"})
    assert (plan["settings"]["processes"], plan["settings"]["trainers"]) == (6, 4)
    assert plan["memory_bytes"] == alone["memory_bytes"]
    assert plan["target_process_bytes"]["target"] == plan["target"]["bytes"]
    assert alone["target_process_bytes"] is None
    # each target process serves two trainers; what it needs longer than they do is waited for
    online = planned(folder, 4, "online")["step_seconds"]
    drafter = plan["step_seconds"]["drafter"]
    assert plan["step_seconds"]["target"] == pytest.approx(max(0.0, 2 * online["target"] - drafter))
    slow = planned(folder, 6, "group", features={"targets": 2, "ahead": 0})
    assert slow["step_seconds"]["target"] == pytest.approx(2 * online["target"])
    assert plan["device_hours"] == 6 * plan["hours"]
    with pytest.raises(UserError, match=r"leaves 0 to train"):
        planned(folder, 2, "group", features={"targets": 2})


def test_links_and_divided_targets(folder: Path) -> None:
    assert bandwidth(PlanConfig(gpu="h100", count=8)) == pytest.approx(0.8 * 450e9)
    assert bandwidth(PlanConfig(gpu="h100", count=16)) == pytest.approx(0.8 * 400e9)
    target = plan_target(described(folder))
    divided = target_bytes(target, EngineConfig(target_sharding="zero3"), 2)
    assert (
        divided
        == target.weight_bytes
        - target.layer_bytes
        + target.layer_bytes // 2
        + 2 * target.largest_layer
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpu": "h1000"}, "plan.gpu 'h1000' is unknown"),
        ({"mfu": 0.0}, r"plan.mfu must lie in \[0.001, 1\]"),
        ({"count": 0}, r"plan.count must lie in \[1, "),
    ],
)
def test_senseless_plans_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PlanConfig(**values)


def test_what_cannot_be_planned_says_why(folder: Path, tmp_path: Path) -> None:
    config = PlanConfig(gpu="h100", count=3, tokens=1000)
    with pytest.raises(UserError, match="cannot be dealt to 3 processes"):
        make_plan(job_for(folder), config, Speed.of(config))
    with pytest.raises(UserError, match=r"Give plan\.tokens"):
        make_plan(job_for(folder), PlanConfig(gpu="h100"), Speed(1e12, ""))
    with pytest.raises(UserError, match="no training to plan"):
        plan_drafter("ngram", get_kind("ngram").config_class(), plan_target(described(folder)))
