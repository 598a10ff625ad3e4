"""TRL's GRPO trainer with Headstart as its rollout backend.

    follower = Follower(Engine.load("policy", "drafter"))
    rollouts = TrlRollouts(follower, steps=4)
    GRPOTrainer("policy", reward_funcs=..., args=..., rollout_func=rollouts).train()

Answers have the distribution of the trainer's own `generate` but not its tokens, because the noise
differs. Written for TRL 1.16, which calls its `rollout_func` experimental. This module does not
import TRL: the trainer passes itself when it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from heads.api.errors import UserError
from train.policy.follower import Follower
from train.policy.training import Refreshed

OWN_SEEDS = 1 << 40
"""Seeds of a process of the trainer; the next process has the next ones."""


@dataclass(frozen=True)
class Generated:
    """The cost of one call. step: the trainer's; refreshed: the refresh before the rollout, if
    any."""

    step: int
    tau: float
    tokens: int
    seconds: float
    refreshed: Refreshed | None


@dataclass
class TrlRollouts:
    """A `rollout_func`: takes over the trainer's policy whenever it has changed, refreshes the
    drafter with `steps` training steps (0: it stays as it is), and answers the prompts.

    Sampling is the trainer's (temperature, top_k, top_p, min_p, repetition_penalty,
    max_completion_length); the draft and the batch are the engine's. log: the cost of every call.
    Raises `UserError` for settings in which the decoder differs from the trainer:
    `generation_kwargs`, tools, other end-of-text tokens, images.
    """

    follower: Follower
    steps: int = 0
    log: list[Generated] = field(default_factory=list)
    _trainer: Any = None
    """The trainer whose settings are in use."""
    _taken: tuple[int, int] | None = None
    """The trainer's step, and the number of writes to its weights, when they were taken over."""
    _trained: int | None = None
    """The trainer's step at the last rollout for training."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """TRL's contract: token ids of prompts and answers, log-probabilities of the latter, one
        answer for every listed prompt."""
        follower, training, refreshed = self.follower, trainer.model.training, None
        if trainer is not self._trainer:
            self._adopt(trainer)
        step = int(trainer.state.global_step)
        model = trainer.accelerator.unwrap_model(trainer.model)
        # weights may change without a step, as when a trainer restores its best ones
        now = step, sum(parameter._version for parameter in model.parameters())
        if now != self._taken:
            follower.follow(model)
            self._taken = now
        if training:
            if self.steps and self._trained is not None and step != self._trained:
                refreshed = follower.refresh(self.steps)
            self._trained = step
        asked = prompt_ids(prompts, trainer)
        rollout = follower.rollout(asked, logprobs=True, learn=training)
        found = Generated(step, rollout.tau, rollout.tokens, rollout.seconds, refreshed)
        self.log.append(found)
        assert rollout.logprobs is not None
        return {
            "prompt_ids": asked,
            "completion_ids": [list(one.tokens) for one in rollout.completions],
            "logprobs": [list(part) for part in rollout.logprobs],
        }

    def _adopt(self, trainer: Any) -> None:
        """Take over the sampling settings of another trainer than before."""
        follower, args = self.follower, trainer.args
        self._trainer, self._taken, self._trained = trainer, None, None
        require_possible(trainer, follower.engine.target.eos_token_ids)
        follower.engine = follower.engine.with_settings(
            temperature=float(args.temperature),
            top_k=int(args.top_k or 0),
            top_p=float(args.top_p),
            min_p=float(args.min_p or 0.0),
            repetition_penalty=float(args.repetition_penalty),
            max_new_tokens=int(args.max_completion_length),
        )
        first = OWN_SEEDS * int(trainer.accelerator.process_index)
        if follower.seed < first:  # a state that was loaded has the process's own seeds
            follower.seed += first


def require_possible(trainer: Any, ends: Sequence[int]) -> None:
    """Raise `UserError` for a trainer whose own generation differs from the decoder's. ends: the
    engine's end-of-text tokens."""
    args = trainer.args
    if getattr(args, "generation_kwargs", None):
        raise UserError(
            f"generation_kwargs={args.generation_kwargs} of the trainer is for its own generation. "
            "Leave it out, or set the like in the engine's DecodeConfig."
        )
    if getattr(trainer, "tools", None):
        raise UserError("tools of the trainer are not for this rollout backend. Leave them out.")
    theirs = trainer.eos_token_ids
    if set(theirs) != set(ends):
        raise UserError(
            f"the trainer ends answers at tokens {sorted(theirs)}, the engine at {sorted(ends)}. "
            "Give both the same generation_config.eos_token_id."
        )


def prompt_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Token ids of prompts, conversations or texts, as the trainer makes them."""
    if isinstance(prompts[0], str):
        found: list[list[int]] = trainer.processing_class(text=list(prompts))["input_ids"]
        return found
    if any(not isinstance(message["content"], str) for prompt in prompts for message in prompt):
        raise UserError("prompts of this rollout backend are text: a message has other content.")
    templated: Any = trainer.processing_class.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    ids: list[list[int]] = templated["input_ids"]
    return ids
