"""A small GRPO (2402.03300) for the embedded target: one update of the policy per rollout, in
float32 on this process's device, and a reward that a machine can check.

With one update per rollout, the ratio between new and old policy is 1, so clipping has no effect:
the gradient is that of advantage times log-probability, per token of all answers (2503.14476).
There is no reference model. Everything is a function of the rollout's tokens: two policies with the
same rollouts have the same weights, bit by bit.

Legend: B answers, T positions, V vocabulary.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inference.decoding.requests import Completion
from scripts.tools.common import TARGET

FENCE = "```"


def python_reward(text: str) -> float:
    """How much of an answer is valid Python: 1 if its code compiles, else up to 0.5 by the share of
    its lines, from the first on, that compile; 0 without code. The code is the content of the first
    fence, or the whole text."""
    code = text
    if FENCE in text:
        inside = text.split(FENCE)[1]
        code = inside.partition("\n")[2] if inside[:6].lower().startswith("python") else inside
    lines = code.strip("\n").split("\n")
    if not code.strip():
        return 0.0
    if _compiles(lines):
        return 1.0
    good = max((n for n in range(1, len(lines)) if _compiles(lines[:n])), default=0)
    return 0.5 * good / len(lines)


def _compiles(lines: Sequence[str]) -> bool:
    code = "\n".join(lines)
    if not code.strip():
        return False
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def advantages(rewards: Sequence[float], group: int) -> Tensor:
    """Rewards [B] minus their group's mean, over the group's deviation; groups are consecutive."""
    found = torch.tensor(rewards, dtype=torch.float32).view(-1, group)
    spread = found.std(1, keepdim=True, correction=0)
    return ((found - found.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()


@dataclass
class Policy:
    """The model in training, and its optimiser."""

    model: Any
    optimizer: torch.optim.Optimizer
    clip: float = 1.0

    @classmethod
    def embedded(cls, rate: float) -> Policy:
        """The embedded target in float32, with AdamW."""
        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        return cls(model, torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0))

    def update(self, completions: Sequence[Completion], weights: Tensor) -> float:
        """One step on answers with their advantages `weights` [B]; returns the gradient's norm."""
        texts = [[*one.request.tokens, *one.tokens] for one in completions]
        width = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
        place = torch.arange(width)
        lengths = torch.tensor([len(text) for text in texts])[:, None]
        begins = torch.tensor([len(one.request.tokens) for one in completions])[:, None]
        answer = ((place >= begins) & (place < lengths))[:, 1:]
        attended = (place < lengths).long()
        logits = self.model(input_ids=tokens, attention_mask=attended, use_cache=False).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(chosen * weights[:, None] * answer).sum() / answer.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip))
        self.optimizer.step()
        return norm

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
