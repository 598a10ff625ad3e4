"""Training a drafter and its target together: what is trained, what is measured, what lies on disk,
and that it resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.registry import get_kind
from inference.measure.run import quick_tau
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.models import random_target
from tests.train import launch
from tests.train.micro_run import settings
from train import setup
from train.config import TrainingJob
from train.data.loader import StepLoader
from train.distributed import join_world
from train.joint.backbone import Backbone
from train.joint.config import JointConfig
from train.joint.objective import JointDrafter, PlainTokens
from train.joint.run import JointRun
from train.on_policy import OnPolicyConfig
from train.refresh import RefreshConfig
from train.run import train
from train.tracking.tracker import LOG_FILE, read_log

LORA = JointConfig("lora", rank=4, heads_first=0.25, ramp=0.25)


pytestmark = pytest.mark.usefixtures("one_thread")


def joint_settings(micro: Path, joint: JointConfig = LORA, **changes: Any) -> dict[str, Any]:
    return {**settings(micro, **changes), "joint": joint}


def loaded(micro: Path) -> TargetModel:
    return TargetModel.load(TargetConfig(str(micro / "target"), device="cpu"))


def drafter_of(micro: Path, kind: str, joint: JointConfig, **head: Any) -> tuple[JointDrafter, Any]:
    """A joint drafter with updates that are no longer zero, and one batch."""
    arguments = joint_settings(micro, joint, kind=kind, head=head)
    run = JointRun(TrainingJob(**arguments, out=micro / "nowhere"), join_world("cpu"))
    with torch.no_grad():
        for name, value in run.backbone.parameters.items():
            value += 0.02 * torch.randn(
                value.shape, generator=torch.Generator().manual_seed(len(name))
            )
    loader = StepLoader(run.data, 4, 4, 1, 0, 0)
    _, (packed,) = next(iter(loader.iterate(0, 1)))
    return run.drafter, PlainTokens(torch.device("cpu")).batch(packed)


def features(target: TargetModel) -> Tensor:
    return target.last_states(torch.arange(20)[None] + 11)


# The target with updates


def test_updates_change_nothing_until_they_are_trained_and_merging_is_undone_to_the_bit(
    micro: Path,
) -> None:
    target = loaded(micro)
    before = features(target)
    named = {name: value.clone() for name, value in target.weights.state.items()}
    backbone = Backbone(target, LORA, seed=0)
    torch.testing.assert_close(features(target), before)
    with torch.no_grad():
        for value in backbone.parameters.values():
            value += 0.05
    trained = features(target)
    assert (trained - before).abs().max() > 0.05
    with backbone.original():
        torch.testing.assert_close(features(target), before)
    with backbone.merged():
        torch.testing.assert_close(features(target), trained, rtol=1e-4, atol=1e-4)
        changed = [
            name
            for name, value in target.weights.state.items()
            if not torch.equal(value, named[name])
        ]
        assert set(changed) == {f"{name}.weight" for name in backbone.layers}
    assert torch.equal(features(target), trained)
    assert all(torch.equal(value, named[name]) for name, value in target.weights.state.items())


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "phi3"])
def test_other_families_are_updated_and_merged_alike(family: str) -> None:
    target = random_target(family)
    before = features(target)
    backbone = Backbone(target, LORA, seed=0)
    with torch.no_grad():
        for value in backbone.parameters.values():
            value += 0.05
    trained = features(target)
    assert (trained - before).abs().max() > 0.01
    with backbone.merged():
        torch.testing.assert_close(features(target), trained, rtol=1e-4, atol=1e-4)
    assert torch.equal(features(target), trained)


def test_the_same_seed_draws_the_same_updates_and_leaves_the_global_generator_alone(
    micro: Path,
) -> None:
    states = []
    for noise in (0, 3):
        target = loaded(micro)
        torch.rand(noise)
        before = torch.get_rng_state()
        states.append(Backbone(target, LORA, seed=5).parameters)
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_modules_may_be_chosen_and_misspelt_ones_are_refused(micro: Path) -> None:
    chosen = Backbone(loaded(micro), replace(LORA, modules=("q_proj", "v_proj")), seed=0)
    assert {name.split(".")[-1] for name in chosen.layers} == {"q_proj", "v_proj"}
    with pytest.raises(
        UserError, match=r"joint.modules \['qproj'\] names no linear layer.*It has: down_proj"
    ):
        Backbone(loaded(micro), replace(LORA, modules=("qproj",)), seed=0)


# The objective


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("medusa", {"num_heads": 3}),
        ("eagle", {}),
        ("hydra_heads", {"num_heads": 3, "hard_label_weight": 0.5}),
        ("eagle3", {"ttt_steps": 3}),
        ("early_exit", {"exit_layer": 1}),
    ],
)
def test_the_objective_is_the_drift_plus_the_drafters_loss_on_updated_features(
    micro: Path, kind: str, head: dict[str, Any]
) -> None:
    joint, batch = drafter_of(micro, kind, LORA, **head)
    batch.progress = 1.0
    output = joint.loss(batch)
    target = joint.backbone.target
    needs = FeatureSpec(joint.needs.taps, True, True)
    arguments = (batch.tokens, batch.positions, batch.segments, needs)
    with joint.backbone.original():
        _, before = target.features(*arguments)
    taps, after = target.features(*arguments)
    p, q = (target.weights.logits(hidden).log_softmax(-1) for hidden in (before, after))
    kl = ((p.exp() * (p - q)).sum(-1) * batch.supervised(1)).sum()
    own = joint.drafter.loss(
        replace(batch, taps=taps, last_hidden=after, target_logits=target.weights.logits)
    )
    torch.testing.assert_close(output.loss_sum, kl + own.loss_sum, rtol=1e-4, atol=1e-3)
    total, count = output.metrics["target_kl"]
    torch.testing.assert_close(total, kl, rtol=1e-3, atol=1e-3)
    assert int(count) == int(batch.supervised(1).sum())
    assert total > 0
    with torch.autocast("cpu", torch.bfloat16):  # of the drafter; the target's dtype is float32
        total, _ = joint.loss(batch).metrics["target_kl"]
    torch.testing.assert_close(total, kl, rtol=1e-3, atol=1e-3)


def test_weighted_answers_are_heeded_although_the_drift_is_not_weighted(micro: Path) -> None:
    """`heads_first=0`: the first loss already has a distance to the original, by rounding."""
    config = joint_settings(micro, replace(LORA, heads_first=0.0), context_weight=0.5)
    run = JointRun(TrainingJob(**config, out=micro / "nowhere"), join_world("cpu"))
    with torch.no_grad():
        for value in run.backbone.parameters.values():
            value += 0.02
    assert run.data.weighed
    run.check_updates()


def gradients(joint: JointDrafter, batch: Any, progress: float) -> tuple[Tensor, Tensor]:
    """Of the drafter and of the updates, laid end to end."""
    joint.zero_grad()
    batch.progress = progress
    joint.loss(batch).loss_sum.backward()
    drafter = [p.grad.flatten() for p in joint.drafter.parameters() if p.grad is not None]
    updates = [p.grad.flatten() for p in joint.updates.values() if p.grad is not None]
    assert len(updates) == len(joint.updates)
    return torch.cat(drafter), torch.cat(updates)


def test_the_drafters_weight_stands_on_what_flows_into_the_target_alone(micro: Path) -> None:
    joint, batch = drafter_of(
        micro, "medusa", replace(LORA, heads_weight=0.4, ramp=0.5), num_heads=3
    )
    assert [joint.joint.weight_at(at) for at in (0.0, 0.24, 0.25, 0.5, 0.75, 1.0)] == [
        None,
        None,
        0.0,
        pytest.approx(0.2),
        pytest.approx(0.4),
        pytest.approx(0.4),
    ]
    kl_only, half, full = (gradients(joint, batch, at) for at in (0.25, 0.5, 1.0))
    torch.testing.assert_close(half[0], full[0])
    torch.testing.assert_close(kl_only[0], full[0])
    # The updates' gradient is KL's plus weight times the drafter's.
    torch.testing.assert_close(
        half[1] - kl_only[1], 0.5 * (full[1] - kl_only[1]), rtol=1e-3, atol=1e-3
    )
    assert (full[1] - kl_only[1]).abs().max() > 1e-3


def test_the_drafter_is_trained_first_with_the_target_still(micro: Path) -> None:
    joint, batch = drafter_of(micro, "medusa", LORA, num_heads=3)
    drafter, updates = gradients(joint, batch, 0.0)
    assert drafter.abs().max() > 0
    assert updates.abs().max() == 0


# Whole trainings


@pytest.fixture(scope="module")
def finished(
    micro: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("joint")
    arguments = joint_settings(micro, max_steps=12, eval_every=4, save_every=4)
    return out, arguments, train(out=out, **arguments)


def test_a_joint_training_leaves_a_new_target_with_its_drafter(
    micro: Path, finished: tuple[Path, dict[str, Any], dict[str, Any]]
) -> None:
    out, arguments, manifest = finished
    original = loaded(micro)
    changed = TargetModel.load(TargetConfig(str(out / "target"), device="cpu"))
    assert changed.info.revision != original.info.revision
    assert manifest["target"]["revision"] == changed.info.revision
    assert manifest["joint"]["original"]["revision"] == original.info.revision
    drafter = load_drafter(out / "best", changed.info, changed.weights)
    with pytest.raises(UserError, match="was trained for target"):
        load_drafter(out / "best", original.info, original.weights)
    # What lies there is what was measured.
    run = setup.Run(
        TrainingJob(**{**arguments, "joint": JointConfig()}, out=out), join_world("cpu")
    )
    decode = replace(arguments["decode"], batch_size=8, max_new_tokens=12)
    assert quick_tau(changed, drafter, run.requests, decode).tau == manifest["best"]["tau"]
    # Same architecture, same tensors, other values in the layers alone.
    before, after = original.weights.state, changed.weights.state
    assert set(before) == set(after)
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved
    assert all(".layers." in name and name.endswith("proj.weight") for name in moved)


def test_the_new_target_says_what_it_is_and_how_far_it_has_moved(
    micro: Path, finished: tuple[Path, dict[str, Any], dict[str, Any]]
) -> None:
    out, _, manifest = finished
    drift = json.loads((out / "target" / "drift.json").read_text())
    config = json.loads((out / "target" / "config.json").read_text())
    card = (out / "target" / "README.md").read_text()
    assert config["headstart"]["changed_from"] == str(micro / "target")
    assert config["headstart"]["revision"] == loaded(micro).info.revision
    assert config["headstart"]["lora"]["rank"] == 4
    assert config["headstart"]["drift"] == manifest["joint"]["drift"]
    assert drift["kl"] > 0
    assert f"{drift['kl']:.4f}" in card
    assert "This is not" in card
    assert "headstart_long_context" not in config
    own = json.loads((micro / "target" / "config.json").read_text())
    assert {key: value for key, value in config.items() if key in own} == own


def test_the_updates_learn_at_a_rate_of_their_own(micro: Path, tmp_path: Path) -> None:
    arguments = joint_settings(micro, replace(LORA, rate_ratio=8.0))
    run = JointRun(TrainingJob(**arguments, out=tmp_path), join_world("cpu"))
    engine = setup.make_engine(run.drafter, arguments["engine"], arguments["optim"], run.world)
    engine.step(0.4)
    rates = {id(p): group["lr"] for group in engine.optimizer.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in run.drafter.updates.values()} == {0.4 / 8}
    assert {rates[id(p)] for p in run.drafter.drafter.parameters()} == {0.4}


def test_a_stronger_pull_of_the_drafter_moves_the_target_further(
    micro: Path, tmp_path: Path
) -> None:
    drifts = []
    for weight in (0.01, 30.0):
        joint = replace(LORA, heads_weight=weight, heads_first=0.0, ramp=0.0)
        arguments = joint_settings(micro, joint, max_steps=12, eval_every=0, lr=3e-2)
        drifts.append(train(out=tmp_path / str(weight), **arguments)["joint"]["drift"])
    assert drifts[1]["kl"] > 2 * drifts[0]["kl"]
    assert drifts[1]["agreement"] <= drifts[0]["agreement"]


@pytest.mark.parametrize(
    "engine", [{"name": "torch"}, {"name": "deepspeed", "zero_stage": 2}], ids=lambda e: e["name"]
)
def test_resuming_is_equal_to_the_bit(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict
) -> None:
    """A measurement (which merges and takes back) lies before the kill in one run and behind it in
    none."""
    arguments = joint_settings(micro, max_steps=8, eval_every=3, save_every=5, **engine)
    whole = train(out=tmp_path / "whole", **arguments)
    plain, calls = JointDrafter.loss, iter(range(1, 100))

    def killed(self: JointDrafter, batch: Any) -> Any:
        if next(calls) > 13:  # in step 7
            raise KeyboardInterrupt
        return plain(self, batch)

    monkeypatch.setattr(JointDrafter, "loss", killed)
    with pytest.raises(KeyboardInterrupt):
        train(out=tmp_path / "run", **arguments)
    monkeypatch.setattr(JointDrafter, "loss", plain)
    assert not (tmp_path / "run" / "target").exists()
    original = loaded(micro)
    with pytest.raises(UserError, match="unfinished joint training"):
        load_drafter(tmp_path / "run" / "best", original.info, original.weights)
    again = train(out=tmp_path / "run", **arguments)
    for manifest in (whole, again):
        for key in ("seconds", "target", "data"):
            manifest.pop(key)
    assert again["joint"]["drift"] == whole["joint"]["drift"]
    assert again["best"] == whole["best"]
    for name in ("best/model.safetensors", "best/updates.safetensors", "target/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (
            name
        )
    states = [
        load_file(tmp_path / name / "checkpoints" / "step_00000008" / "model.safetensors")
        for name in ("run", "whole")
    ]
    assert any(name.startswith("updates.") for name in states[0])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_target_in_bfloat16_is_trained_in_its_own_dtype(micro: Path, tmp_path: Path) -> None:
    arguments = joint_settings(
        micro, precision="bfloat16", dtype="bfloat16", max_steps=8, eval_every=4
    )
    manifest = train(out=tmp_path, **arguments)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert manifest["joint"]["drift"]["kl"] < 1.0


def test_both_engines_train_the_same(micro: Path, tmp_path: Path) -> None:
    losses = []
    for name in ("torch", "deepspeed"):
        train(out=tmp_path / name, **joint_settings(micro, name=name, max_steps=4, eval_every=0))
        losses.append(
            [line["loss"] for line in read_log(tmp_path / name / LOG_FILE) if "loss" in line]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_early_exit_is_accepted_more_often_after_its_target_has_learnt_it(
    micro: Path, tmp_path: Path
) -> None:
    """LayerSkip: nothing of the drafter's own is trained, and what the exit predicts still comes
    closer to the target."""
    joint = JointConfig("lora", rank=8, heads_weight=1.0, heads_first=0.0, ramp=0.1)
    arguments = joint_settings(
        micro,
        joint,
        kind="early_exit",
        head={"exit_layer": 1},
        max_steps=40,
        eval_every=40,
        lr=4e-2,
    )
    assert get_kind("early_exit").drafter_class.works_untrained(arguments["head"])
    manifest = train(out=tmp_path, **arguments)
    steps = [line for line in read_log(tmp_path / LOG_FILE) if "loss" in line]
    accuracy = [line["accuracy/depth1"] for line in steps]
    assert sum(accuracy[-5:]) > 1.5 * sum(accuracy[:5])
    original = loaded(micro)
    untrained = setup.new_drafter(
        "early_exit", arguments["head"], original.info, original.weights, 0
    )
    run = setup.Run(
        TrainingJob(**{**arguments, "joint": JointConfig()}, out=tmp_path), join_world("cpu")
    )
    decode = replace(arguments["decode"], batch_size=8, max_new_tokens=12)
    assert manifest["best"]["tau"] > quick_tau(original, untrained, run.requests, decode).tau
    changed = TargetModel.load(TargetConfig(str(tmp_path / "target"), device="cpu"))
    drafter = load_drafter(tmp_path / "best", changed.info, changed.weights)
    assert quick_tau(changed, drafter, run.requests, decode).tau == manifest["best"]["tau"]


def test_two_processes_train_what_one_does(micro: Path, tmp_path: Path) -> None:
    changes = {
        "joint": {"mode": "lora", "rank": 4, "heads_first": 0.3},
        "max_steps": 6,
        "eval_every": 3,
    }
    pairs = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    logs, manifests = [], []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        launch.run(processes, "tests.train.micro_run", micro, out, *pairs)
        logs.append([line["loss"] for line in read_log(out / LOG_FILE) if "loss" in line])
        manifests.append(json.loads((out / "manifest.json").read_text()))
    assert logs[0] == pytest.approx(logs[1], rel=1e-3)
    assert manifests[1]["processes"] == 2
    assert manifests[1]["joint"]["drift"]["kl"] == pytest.approx(
        manifests[0]["joint"]["drift"]["kl"], rel=0.05
    )


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "deepspeed", "zero_stage": 3}, "zero_stage=3 is not supported"),
        ({"prompts": (), "eval_every": 0}, "give them with train.prompts"),
        (
            {"kind": "early_exit", "head": {"layers": (1,)}},
            "layers left out cannot be trained jointly",
        ),
        ({"kind": "ngram"}, "has no weights"),
        ({"on_policy": OnPolicyConfig(share=0.5)}, "train.on_policy.share=0 or joint=none"),
        ({"refresh": RefreshConfig(init_from="x", lora_rank=2)}, "train.refresh.lora_rank keeps"),
    ],
)
def test_what_cannot_be_trained_jointly_is_refused(
    micro: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(out=tmp_path, **joint_settings(micro, **changes))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "lorra"}, "joint.mode 'lorra' is unknown"),
        ({"rank": 0}, r"joint.rank must lie in \[1, 65536\]"),
        ({"rate_ratio": 0.0}, r"joint.rate_ratio must lie in \[0.001, 1000\]"),
        ({"heads_weight": -1.0}, r"joint.heads_weight must lie in \[1e-09, "),
        ({"heads_first": 1.0}, r"joint.heads_first must lie in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        JointConfig(**values)


def test_a_plain_training_is_not_continued_jointly(micro: Path, tmp_path: Path) -> None:
    train(out=tmp_path, **settings(micro, max_steps=2, eval_every=0))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match="the state of another training: joint was None"):
        train(out=tmp_path, **joint_settings(micro, max_steps=2, eval_every=0))
