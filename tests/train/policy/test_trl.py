"""TRL's GRPO trainer with our rollouts: a training runs, and its answers have the distribution of
the trainer's own generation. What needs no trainer is tested without TRL."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from heads.api.errors import UserError
from inference.audit.statistics import chi_square, exact_distribution
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.heads.recipes import build
from tests.inference.tokenizers import save_micro_target
from train.optim import OptimConfig
from train.policy.follower import Follower
from train.policy.training import RefreshSettings
from train.policy.trl import OWN_SEEDS, TrlRollouts, require_possible

SAMPLES, BATCH = 480, 32
PROMPT = "Why?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_target(tmp_path_factory.mktemp("policy"))


def make_trainer(folder: Path, rollouts: Any, out: Path) -> Any:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    args = trl.GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=3,
        learning_rate=0.02,
        max_completion_length=3,
        top_k=3,
        temperature=0.8,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    prompts = datasets.Dataset.from_dict({"prompt": [PROMPT, "Who?", "a b c", "Tell me."] * 4})
    given = {"reward_funcs": reward, "args": args, "train_dataset": prompts}
    return trl.GRPOTrainer(str(folder), rollout_func=rollouts, **given)


def make_rollouts(folder: Path, steps: int = 2) -> TrlRollouts:
    target = TargetModel.load(TargetConfig(str(folder), device="cpu"))
    drafter = build("distilled", target, changes={"from_target_layers": (0,)})
    engine = Engine(target, drafter, DecodeConfig(depth=2, batch_size=BATCH))
    return TrlRollouts(Follower(engine, RefreshSettings(OptimConfig(lr=1e-3))), steps)


def test_a_training_runs_and_its_answers_are_samples_of_the_policy(
    folder: Path, tmp_path: Path
) -> None:
    rollouts = make_rollouts(folder)
    trainer = make_trainer(folder, rollouts, tmp_path / "out")
    trainer.train()
    assert [one.step for one in rollouts.log] == [0, 1, 2]
    assert [one.refreshed is not None for one in rollouts.log] == [False, True, True]
    steps = {one["step"]: one for one in trainer.state.log_history if "reward" in one}
    assert steps or trainer.state.global_step == 3

    # ours and the trainer's own, after three updates, against all probabilities by enumeration
    prompts = [PROMPT] * SAMPLES
    ours = rollouts(prompts, trainer)
    target = rollouts.follower.engine.target
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], value), name
    sampling = rollouts.follower.engine.decode.sampling()
    exact = exact_distribution(target, ours["prompt_ids"][0], sampling, 3)
    torch.manual_seed(0)
    own, _ = trainer._generate_single_turn(ours["prompt_ids"], None, {}, 4)
    for samples in (ours["completion_ids"], own):
        assert chi_square(map(tuple, samples), exact).p_value > 1e-3
    for tokens, found in zip(ours["completion_ids"], ours["logprobs"], strict=True):
        if len(tokens) == 3 or tokens[-1] in target.eos_token_ids:
            share = exact[tuple(tokens)]
            assert sum(found) == pytest.approx(float(torch.tensor(share).log()), abs=1e-4)


def trainer_without_trl(rollouts: TrlRollouts, folder: Path, **changes: Any) -> Any:
    """What `TrlRollouts` reads of a trainer."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    settings |= {"repetition_penalty": 1.0, "max_completion_length": 3, "generation_kwargs": None}
    return SimpleNamespace(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=SimpleNamespace(**{**settings, **changes}),
        tools=None,
        eos_token_ids=list(rollouts.follower.engine.target.eos_token_ids),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model, process_index=1),
        processing_class=lambda text: {"input_ids": [[5, 6, 7] for _ in text]},
    )


def test_an_evaluation_neither_takes_a_refresh_nor_gives_answers_to_train_on(folder: Path) -> None:
    rollouts = make_rollouts(folder)
    trainer = trainer_without_trl(rollouts, folder)
    asked = [PROMPT] * 4
    trainer.model.train()
    rollouts(asked, trainer)
    trained = list(rollouts.follower._recent)
    trainer.state.global_step = 1
    trainer.model.eval()
    rollouts(asked, trainer)
    assert list(rollouts.follower._recent) == trained
    trainer.model.train()
    rollouts(asked, trainer)
    assert [one.refreshed is not None for one in rollouts.log] == [False, False, True]


def test_weights_that_change_without_a_step_and_another_trainer_are_followed(folder: Path) -> None:
    rollouts = make_rollouts(folder)
    trainer = trainer_without_trl(rollouts, folder)
    rollouts([PROMPT], trainer)
    first = rollouts.follower.seed
    assert first >= OWN_SEEDS
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(2.0)  # as when the best weights are restored
    rollouts([PROMPT], trainer)
    assert torch.equal(
        rollouts.follower.engine.target.weights.lm_head, trainer.model.lm_head.weight
    )
    other = trainer_without_trl(rollouts, folder, temperature=0.5)
    rollouts([PROMPT], other)
    assert rollouts.follower.engine.decode.temperature == 0.5
    assert torch.equal(rollouts.follower.engine.target.weights.lm_head, other.model.lm_head.weight)
    assert rollouts.follower.seed == first + 2


def stand_in(**changes: Any) -> Any:
    args = SimpleNamespace(generation_kwargs=changes.pop("generation_kwargs", None))
    return SimpleNamespace(args=args, **{"tools": None, "eos_token_ids": [2], **changes})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"tools": [len]}, "tools"),
        ({"eos_token_ids": [2, 7]}, r"\[2, 7\]"),
    ],
)
def test_trainers_that_generate_otherwise_are_refused(change: dict[str, Any], said: str) -> None:
    require_possible(stand_in(), [2])
    with pytest.raises(UserError, match=said):
        require_possible(stand_in(**change), [2])
