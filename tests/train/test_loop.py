"""`train(...)` on a micro target: what it writes, how it chooses, why it ends, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from heads.medusa import Drafter as Medusa
from inference.decoding.config import DecodeConfig
from inference.folders import FORMER
from inference.integrity import require_unchanged
from inference.manifest import partial_of
from inference.measure import run as measuring
from inference.measure.run import quick_tau
from inference.parity import ParityError
from inference.target.memory import MemoryPlan
from inference.target.model import TargetModel
from tests.train.micro_run import settings
from train import setup
from train.config import TrainConfig, TrainingJob
from train.distributed import join_world
from train.engines.base import EngineConfig
from train.engines.torch_engine import TorchEngine
from train.loop import Evaluation
from train.on_policy import OnPolicyConfig
from train.optim import OptimConfig
from train.run import train
from train.stopping import Stopped
from train.tracking.tracker import LOG_FILE, read_log

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> list[dict[str, Tensor]]:
    """Replace the measurement by given values; the returned list receives the weights that were
    measured."""
    left, seen = iter(taus), []

    def evaluate(self: Any, weights: dict[str, Tensor]) -> Evaluation:
        seen.append(weights)
        tau = next(left)
        return Evaluation(tau, (tau - 0.1, tau + 0.1))

    monkeypatch.setattr(setup.Run, "evaluate", evaluate)
    return seen


def poison(
    monkeypatch: pytest.MonkeyPatch, call: int, effect: Callable[[LossOutput], LossOutput | None]
) -> None:
    """Let `effect` see (and change) the drafter's loss at its `call`-th call, counted from 1."""
    plain, calls = Medusa.loss, iter(range(1, 10_000))

    def loss(self: Medusa, batch: TrainBatch) -> LossOutput:
        output = plain(self, batch)
        return (effect(output) or output) if next(calls) == call else output

    monkeypatch.setattr(Medusa, "loss", loss)


def log_of(out: Path) -> list[dict[str, Any]]:
    return read_log(out / LOG_FILE)


def test_a_run_learns_measures_and_leaves_a_loadable_best(micro: Path, tmp_path: Path) -> None:
    arguments = settings(micro, kind="distilled", max_steps=24, eval_every=8, save_every=8)
    manifest = train(out=tmp_path, **arguments)
    lines = log_of(tmp_path)
    steps = [line for line in lines if "loss" in line]
    taus = {line["step"]: line["tau"] for line in lines if "tau" in line}
    assert [line["step"] for line in steps] == list(range(1, 25))
    assert sum(line["loss"] for line in steps[-5:]) < 0.9 * sum(line["loss"] for line in steps[:5])
    assert {"lr", "grad_norm", "tokens", "tokens_per_second", "accuracy/depth1"} <= set(steps[0])
    assert list(taus) == [8, 16, 24]
    assert manifest["best"]["tau"] == max(taus.values())
    assert taus[manifest["best"]["step"]] == manifest["best"]["tau"]
    assert (manifest["steps"], manifest["ended_by"], manifest["kind"]) == (24, "steps", "distilled")
    assert json.loads((tmp_path / "manifest.json").read_text())["stage"] == "train"
    # What lies in best/ is what was measured.
    target = TargetModel.load(arguments["target"])
    drafter = load_drafter(tmp_path / "best", target.info, target.weights)
    run = setup.Run(TrainingJob(**arguments, out=tmp_path), join_world("cpu"))
    decode = replace(arguments["decode"], batch_size=8, max_new_tokens=12)
    assert quick_tau(target, drafter, run.requests, decode).tau == manifest["best"]["tau"]


def test_a_finished_run_is_left_alone(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(out=tmp_path, **settings(micro, max_steps=1, eval_every=0, save_every=0))
    monkeypatch.setattr("train.run.Run", None)
    assert train(out=tmp_path, **settings(micro, max_steps=1, eval_every=0, save_every=0)) == first


@pytest.mark.parametrize("kind", ["eagle3", "distilled"])
def test_every_kind_trains_in_bfloat16(micro: Path, tmp_path: Path, kind: str) -> None:
    head = {"draft_vocab_size": 64} if kind == "eagle3" else {}
    manifest = train(
        out=tmp_path,
        **settings(micro, kind=kind, head=head, precision="bfloat16", dtype="bfloat16"),
    )
    assert manifest["best"]["tau"] >= 1.0
    assert all(line["loss"] > 0 for line in log_of(tmp_path) if "loss" in line)


def test_the_best_is_the_best_tau_and_patience_ends_the_run(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = planned(monkeypatch, [1.2, 1.5, 1.5, 1.4, 9.9])
    arguments = settings(micro, max_steps=20, eval_every=2, patience=2)
    manifest = train(out=tmp_path, **arguments)
    assert (manifest["steps"], manifest["ended_by"]) == (8, "patience")  # an equal tau is no rise
    assert manifest["best"] == {"step": 4, "tau": 1.5, "tau_ci95": [1.4, 1.6]}
    target = TargetModel.load(arguments["target"])
    best = load_drafter(tmp_path / "best", target.info, target.weights).state_dict()
    assert all(torch.equal(value, seen[1][name]) for name, value in best.items())


def test_a_measurement_takes_as_many_rows_as_fit_into_memory(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = settings(micro, max_steps=2, eval_every=1)
    needed: list[int] = []
    with monkeypatch.context() as roomy:
        roomy.setattr(MemoryPlan, "require", lambda plan, *_: needed.append(plan.total))
        best = train(out=tmp_path / "roomy", **arguments)["best"]
    free = needed[0] // 2
    monkeypatch.setattr("inference.decoding.engine.free_bytes", lambda device: free)
    assert train(out=tmp_path / "tight", **arguments)["best"] == best
    (told,) = (line for line in caplog.messages if line.startswith("decoding 2 rows"))
    assert "2 rows at a time, not train.eval_batch=8: a batch of 6 rows" in told
    monkeypatch.setattr("inference.decoding.engine.free_bytes", lambda device: free // 4)
    with pytest.raises(UserError, match=r"not even one row fits.*train\.eval_tokens"):
        train(out=tmp_path / "none", **arguments)


def test_a_stopped_run_stays_stopped_by_patience(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the last save and the manifest must not make it train on."""
    planned(monkeypatch, [1.5, 1.4])
    arguments = settings(micro, max_steps=20, eval_every=2, patience=1)
    first = train(out=tmp_path, **arguments)
    (tmp_path / "manifest.json").unlink()
    again = train(out=tmp_path, **arguments)
    assert (again["steps"], again["ended_by"], again["best"]) == (4, "patience", first["best"])


def test_without_evaluation_the_last_weights_are_kept_and_no_tau_is_claimed(
    micro: Path, tmp_path: Path
) -> None:
    manifest = train(
        out=tmp_path, **settings(micro, max_steps=3, eval_every=0, save_every=0, prompts=())
    )
    assert manifest["best"] == {"step": 3, "tau": None, "tau_ci95": None}
    assert (tmp_path / "best" / "model.safetensors").is_file()


def test_a_time_limit_ends_the_run(micro: Path, tmp_path: Path) -> None:
    manifest = train(out=tmp_path, **settings(micro, max_steps=500, eval_every=0, max_seconds=0.05))
    assert manifest["ended_by"] == "seconds"
    assert 1 <= manifest["steps"] < 500


def test_epochs_count_steps(micro: Path, tmp_path: Path) -> None:
    manifest = train(
        out=tmp_path, **settings(micro, max_steps=0, epochs=0.5, global_batch=8, eval_every=0)
    )
    assert manifest["steps"] == round(0.5 * -(-58 // 8))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_save_and_leave(
    micro: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = settings(micro, max_steps=9, save_every=100, eval_every=0)
    whole = train(out=tmp_path / "whole", **arguments)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    poison(monkeypatch, 5, lambda output: os.kill(os.getpid(), number))  # in the third step
    with pytest.raises(Stopped) as caught:
        train(out=tmp_path / "run", **arguments)
    assert (caught.value.code, caught.value.step) == (status, 3)
    assert "step 3 saved; the same command continues there" in capsys.readouterr().err
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert not (tmp_path / "run" / "manifest.json").exists()
    manifest = train(out=tmp_path / "run", **arguments)
    assert manifest["steps"] == whole["steps"]
    expected = (tmp_path / "whole" / "best" / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("fast", [False, True])
def test_a_training_in_emulated_bfloat16_names_the_faster_precision(
    micro: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fast: bool,
) -> None:
    monkeypatch.setattr(setup, "multiplies_bfloat16", lambda: fast)
    arguments = settings(micro, max_steps=1, eval_every=0, precision="bfloat16")
    train(out=tmp_path / "run", **arguments)
    said = "engine.precision=float32 is faster" in " ".join(capsys.readouterr().err.split())
    assert said == (not fast)


@pytest.mark.parametrize("spoilt", [2, 3])
def test_a_signal_breaks_a_measurement_off_and_it_is_made_again(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: int
) -> None:
    """spoilt: the second measurement comes on the way, the third at the end. A long one must not
    outlast a scheduler's patience."""
    arguments = settings(micro, max_steps=8, save_every=100, eval_every=3)
    train(out=tmp_path / "whole", **arguments)
    plain, calls = measuring.quick_tau, iter(range(1, 100))

    def struck(*given: Any) -> Any:
        if next(calls) == spoilt:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("the measurement went on")
        return plain(*given)

    monkeypatch.setattr(measuring, "quick_tau", struck)
    with pytest.raises(Stopped) as caught:
        train(out=tmp_path / "run", **arguments)
    assert (caught.value.code, caught.value.step) == (0, {2: 6, 3: 8}[spoilt])
    train(out=tmp_path / "run", **arguments)
    figures = [
        [(line["step"], line.get("loss"), line.get("tau")) for line in log_of(tmp_path / at)]
        for at in ("run", "whole")
    ]
    assert figures[0] == figures[1]
    best = [(tmp_path / at / "best" / "model.safetensors").read_bytes() for at in ("run", "whole")]
    assert best[0] == best[1]


def test_a_loss_that_is_no_number_names_the_step_and_keeps_the_state(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(
        monkeypatch, 7, lambda output: LossOutput(output.loss_sum * float("nan"), output.metrics)
    )
    with pytest.raises(UserError, match=r"the loss is nan at step 4.*The state of step 2 is kept"):
        train(out=tmp_path, **settings(micro, save_every=2, eval_every=0))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_the_engine_is_closed_also_when_a_training_fails(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TorchEngine] = []
    plain = TorchEngine.close
    monkeypatch.setattr(TorchEngine, "close", lambda self: (closed.append(self), plain(self))[1])
    poison(
        monkeypatch, 1, lambda output: LossOutput(output.loss_sum * float("nan"), output.metrics)
    )
    with pytest.raises(UserError, match="the loss is nan at step 1"):
        train(out=tmp_path, **settings(micro, eval_every=0))
    assert len(closed) == 1


def test_training_that_would_not_serve_is_refused_before_the_first_step(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Medusa.train_logits
    monkeypatch.setattr(
        Medusa,
        "train_logits",
        lambda self, batch, depth: [x + 1 for x in plain(self, batch, depth)],
    )
    with pytest.raises(ParityError, match="depth 1, position"):
        train(out=tmp_path, **settings(micro))
    assert not (tmp_path / "checkpoints").exists()


def test_a_state_of_another_training_is_refused(
    micro: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(out=tmp_path, **settings(micro, max_steps=2, eval_every=0))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"the state of another training: head was .*'num_heads': 3"
    ):
        train(out=tmp_path, **settings(micro, max_steps=2, eval_every=0, head={"num_heads": 4}))
    other = settings(micro, max_steps=3, eval_every=0)
    other["target"] = replace(other["target"], long_context=True)
    with pytest.raises(UserError, match=r"another training: target was .*'long_context': True"):
        train(out=tmp_path, **other)
    train(out=tmp_path, **settings(micro, max_steps=3, eval_every=0, lr=1e-3))
    assert "continuing although 'optim' has changed" in caplog.text


def test_a_state_of_another_optimiser_is_refused(micro: Path, tmp_path: Path) -> None:
    muon = {"optim": OptimConfig(kind="muon")}
    train(out=tmp_path, **{**settings(micro, max_steps=2, save_every=1), **muon})
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"optim\.kind was muon, is adamw"):
        train(out=tmp_path, **settings(micro, max_steps=3))


def test_a_best_lost_between_two_renames_is_put_back(micro: Path, tmp_path: Path) -> None:
    train(out=tmp_path, **settings(micro, max_steps=3))
    (tmp_path / "best").rename(partial_of(tmp_path / "best").with_suffix(FORMER))
    (tmp_path / "manifest.json").unlink()
    train(out=tmp_path, **settings(micro, max_steps=3))
    assert (tmp_path / "best" / "config.json").is_file()
    assert not list(tmp_path.glob(f"*{FORMER}"))


def test_the_manifest_lists_the_checkpoint_and_what_people_put_there_is_kept(
    micro: Path, tmp_path: Path
) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "notes.txt").write_text("mine")
    manifest = train(out=tmp_path, **settings(micro, max_steps=2))
    assert [entry["file"] for entry in manifest["files"]] == [
        "best/config.json",
        "best/model.safetensors",
    ]
    require_unchanged(tmp_path / "best")
    with (tmp_path / "best" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(UserError, match="was changed or damaged since it was written"):
        require_unchanged(tmp_path / "best")
    assert [path.read_text() for path in tmp_path.glob("best.aside-*/notes.txt")] == ["mine"]


def test_a_second_process_does_not_train_in_the_same_folder(micro: Path, tmp_path: Path) -> None:
    other = {"host": socket.gethostname(), "pid": os.getppid(), "token": "x"}
    (tmp_path / ".writer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=f"another process writes to .*: process {os.getppid()} on"):
        train(out=tmp_path, **settings(micro, max_steps=2))
    assert [path.name for path in tmp_path.iterdir()] == [".writer.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "ngram"}, "has no weights of its own, so there is nothing to train"),
        ({"global_batch": 5}, "cannot be dealt to 1 processes"),
        ({"head": {"num_heads": 2}}, "of 2 heads cannot draft 3 tokens"),
        ({"prompts": ("nowhere.jsonl",)}, "there is no prompt file or folder 'nowhere.jsonl'"),
        ({"prompts": ()}, "train.prompts is empty"),
        ({"eval_tokens": 500}, "none of the prompts"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    micro: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        train(out=tmp_path, **settings(micro, **changes))
    assert message in str(caught.value)


def test_decoding_without_a_draft_is_refused(micro: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"decode.shape is 'none'"):
        train(out=tmp_path, **{**settings(micro), "decode": DecodeConfig(shape="none")})


@pytest.mark.parametrize(
    "divided", [{"zero_stage": 3}, {"zero_stage": 2, "offload": "optimizer"}], ids=str
)
def test_muon_where_no_process_has_whole_matrices_is_refused(
    micro: Path, tmp_path: Path, divided: dict[str, Any]
) -> None:
    given = settings(micro, max_steps=1)
    given |= {"optim": OptimConfig(kind="muon"), "engine": EngineConfig("deepspeed", **divided)}
    with pytest.raises(UserError, match=r"optim\.kind=muon multiplies whole matrices"):
        train(out=tmp_path, **given)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval_every": 0, "epochs": 0.0}, "train.epochs must be above 0"),
        ({"eval_every": 0, "keep": 0}, r"train\.keep must lie in \[1, \d+\]; given: 0"),
        (
            {"context_weight": 0.5, "on_policy": OnPolicyConfig(share=0.5)},
            "would let the drafter continue those in place of answers",
        ),
        ({"eval_every": -1}, r"train\.eval_every must lie in \[0, \d+\]; given: -1"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig(**values)


def test_three_trainings_in_one_process_do_not_disturb_each_other(
    micro: Path, tmp_path: Path
) -> None:
    """As the loop does it; deepspeed keeps process-wide state, and other stages must find the
    environment as it was."""
    environment = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"}
    arguments = {"max_steps": 2, "eval_every": 2, "name": "deepspeed"}
    train(out=tmp_path / "a", **settings(micro, **arguments, zero_stage=1))
    train(out=tmp_path / "b", **settings(micro, **arguments, zero_stage=3))
    train(out=tmp_path / "c", **settings(micro, **arguments, zero_stage=1))
    first, last = (tmp_path / name / "best" / "model.safetensors" for name in ("a", "c"))
    assert first.read_bytes() == last.read_bytes()
    assert {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"} == environment
    shutil.rmtree(tmp_path)
