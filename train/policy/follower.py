"""A drafter that follows a policy: rollouts by an engine whose target changes its weights between
them.

    follower = Follower(Engine.load("policy", "drafter", DecodeConfig(temperature=1.0)))
    for prompts in batches:
        rollout = follower.rollout(prompts, logprobs=True)
        update(policy, rollout)       # any trainer
        follower.follow(policy)       # a model, its state dict, or low-rank updates
        print(follower.refresh(steps=4).tau)

The text never depends on the drafter: with rule `match`, a rollout has the tokens that the policy
alone would have sampled for its seeds, whatever the drafter. So a refresh changes only the speed of
rollouts.

A refresh recomputes its training data: the current target reads the answers of the last rollouts
once more. The states from decoding belong to the weights before the update, but the drafter has to
draft for the weights after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.checkpoint import save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from inference.decoding.engine import Engine, Prompt, as_list
from inference.decoding.placement import PlacedDrafter
from inference.target.follow import Weights
from inference.target.revision import revision_of
from train.policy.rollouts import Rollout, require_rollouts, token_logprobs
from train.policy.training import DrafterTraining, Refreshed, RefreshSettings


class Follower:
    """An engine whose target follows a policy, and its drafter, refreshed between rollouts.

    seed: the first answer's; every further answer has the next one, over all rollouts. Raises
    `UserError` for a rule that does not keep the policy's distribution.
    """

    def __init__(self, engine: Engine, settings: RefreshSettings | None = None) -> None:
        require_rollouts(engine.decode, logprobs=False)
        self.engine, self.settings = engine, settings or RefreshSettings()
        self.seed = engine.decode.seed
        self._recent: deque[Rollout] = deque(maxlen=self.settings.rollouts)
        self._training: DrafterTraining | None = None

    @property
    def drafter(self) -> Any:
        """The drafter, or None."""
        drafter = self.engine.drafter
        return drafter.drafter if isinstance(drafter, PlacedDrafter) else drafter

    def rollout(
        self,
        prompts: Prompt | Sequence[Prompt],
        seeds: Sequence[int] | None = None,
        *,
        logprobs: bool = False,
        learn: bool = True,
    ) -> Rollout:
        """Answer all prompts, in their order. For a group of answers, give a prompt several times.

        prompts: as `Engine.generate` takes them. seeds: one for every answer; None: the next ones.
        logprobs: also compute those of the answers' tokens (`token_logprobs`), with one more pass.
        learn: let the next refresh train on these answers; False: for an evaluation.
        """
        engine = self.engine
        require_rollouts(engine.decode, logprobs)
        asked = as_list(prompts)
        if seeds is None:
            seeds = range(self.seed, self.seed + len(asked))
            self.seed += len(asked)
        requests = engine.requests(asked, seeds)
        began = time.perf_counter()
        done = sorted(engine.run(requests), key=lambda one: one.request.index)
        seconds = time.perf_counter() - began
        sampling = engine.decode.sampling()
        found = token_logprobs(engine.target, done, sampling) if logprobs else None
        rollout = Rollout(tuple(done), seconds, found)
        if learn:
            self._recent.append(rollout)
        return rollout

    def follow(self, weights: Weights) -> None:
        """Take over the policy's weights in place (`Engine.follow`); the drafter's stay."""
        self.engine.follow(weights)
        if self._training is not None:
            self._training.follow()

    def refresh(self, steps: int) -> Refreshed:
        """Train the drafter on the last rollouts, which the current target reads again.

        Raises `UserError` without a drafter that trains, without a rollout, and for a loss or
        gradient that is not finite: the drafter then keeps its weights.
        """
        if steps < 1:
            raise UserError(f"a refresh has at least 1 step; given: {steps}.")
        drafter = self.drafter
        if not isinstance(drafter, TrainableDrafter):
            what = "no drafter" if drafter is None else f"a drafter of kind '{drafter.kind}'"
            raise UserError(f"this engine has {what}, which has no weights to refresh.")
        documents = [item for rollout in self._recent for item in rollout.documents()]
        if not documents:
            raise UserError("there is nothing to refresh a drafter on: call rollout before.")
        training = self._trained(drafter)
        longest = max(len(tokens) for tokens, _ in documents)
        began = time.perf_counter()
        found = training.train(documents, self.settings.length or longest, steps)
        judged = found["judged"]
        return Refreshed(
            steps=steps,
            seconds=time.perf_counter() - began,
            tokens=int(found["tokens"]),
            tau=self._recent[-1].tau,
            loss=found["loss"],
            last_loss=found["last_loss"],
            accuracy=found["right"] / judged if judged else None,
        )

    def state(self) -> dict[str, Any]:
        """The state for `load_state` in another process: plain values and tensors, without the
        rollouts and without the target's weights, which are the policy's."""
        training = self._training
        return {"seed": self.seed, "training": None if training is None else training.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` of a follower with the same drafter and settings."""
        self.seed = state["seed"]
        if state["training"] is not None:
            self._trained(self.drafter).load(state["training"])

    def _trained(self, drafter: TrainableDrafter) -> DrafterTraining:
        if self._training is None or self._training.served is not drafter:
            self._training = DrafterTraining(drafter, self.engine.target, self.settings)
        return self._training

    def save(self, folder: Path, policy: Path) -> None:
        """Write the drafter as a checkpoint for the policy saved in the folder `policy`. The
        checkpoint then loads with that policy."""
        if not isinstance(self.drafter, TrainableDrafter):
            raise UserError("this engine has no drafter with weights to save.")
        info = replace(
            self.engine.target.info, id=str(policy), revision=revision_of(str(policy), None)
        )
        save_drafter(self.drafter, folder, info)
