"""The settings of a training run and its schedule."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from heads.api.errors import UserError


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """What shapes the trained weights; a resumed run must be given the same.

    Exactly one of `seconds` (training time, without compilation and evaluation) and `steps` is set; the learning rate follows the
    share of it that is used up.
    """

    seconds: float | None = None
    steps: int | None = None
    lr: float = 3e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: float = 0.01  # share of the run over which the learning rate rises
    decay: float = 0.3  # share of the run over which it falls, wsd only
    final_lr: float = 0.0  # share of `lr` that is left at the end
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    z_loss: float = 1e-5
    batch_tokens: int = 131_072
    micro_tokens: int = 131_072
    length: int = 1024
    bf16: bool = False  # matrix products in bfloat16 (autocast), weights and optimiser in float32
    chat_share: float = 0.4  # share of conversations among the rows of a batch
    final_chat_share: float = 0.7  # the same in the last quarter of the run, when the learning rate is low
    seed: int = 0
    optimiser: Literal["muon", "adamw"] = "muon"  # muon: for the layers' matrices; embeddings and norms take AdamW either way

    def __post_init__(self) -> None:
        """Check the sizes that must divide each other; UserError names the flag."""
        if (self.seconds is None) == (self.steps is None):
            raise UserError(f"give one of --seconds and --steps; got seconds={self.seconds}, steps={self.steps}.")
        if self.micro_tokens % self.length or self.batch_tokens % self.micro_tokens:
            raise UserError(
                f"--batch-tokens {self.batch_tokens} must be a multiple of --micro-tokens {self.micro_tokens}, "
                f"and that one of --length {self.length}."
            )

    def used(self, step: int, seconds: float) -> float:
        """Return the share of the run that is over, 0 to 1."""
        whole = seconds / self.seconds if self.seconds is not None else step / max(1, self.steps or 1)
        return min(1.0, whole)

    def rate(self, used: float) -> float:
        """Return the learning rate when the share `used` of the run is over."""
        if used < self.warmup:
            return self.lr * max(0.01, used / self.warmup)
        if self.schedule == "wsd":
            left = min(1.0, (1.0 - used) / self.decay)
            return self.lr * (self.final_lr + (1 - self.final_lr) * left)
        wave = 0.5 * (1 + math.cos(math.pi * (used - self.warmup) / (1 - self.warmup)))
        return self.lr * (self.final_lr + (1 - self.final_lr) * wave)

    def chat_rows(self, used: float) -> int:
        """Return how many rows of a micro-batch are conversations."""
        share = self.final_chat_share if used >= 0.75 else self.chat_share
        return round(share * (self.micro_tokens // self.length))
