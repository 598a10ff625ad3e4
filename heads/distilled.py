"""A small language model distilled from the target: a separate Llama, a few of the target's own
layers, or a smaller model of the target's family.

It reads tokens only; drafting needs no inner states of the target. It is trained against the
target's full distribution with forward KL, reverse KL, JSD, TV, the LK losses, plain cross entropy
on the target's answers, or any mix of them. The loss covers all supervised tokens, or those that a
reference drafter has shown to be learnable (AdaSPEC). Parameter names are Hugging Face's for Llama,
so an export is an ordinary checkpoint.

Legend: B rows, T positions, M selected positions, H hidden of the drafter, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import load_drafter
from heads.api.config import Fraction, config
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from heads.nn.distillation import ObjectiveConfig, Predictions, distillation_loss, furthest_behind
from heads.nn.small_lm.config import NetworkConfig
from heads.nn.small_lm.model import SmallLM


@config("head")
@dataclass(frozen=True)
class Config(NetworkConfig, ObjectiveConfig):
    """Configuration of a distilled drafter. Sizes of 0 follow the target."""

    token_share: Fraction = 1.0
    """Share of a document's supervised tokens to train on (AdaSPEC; the paper uses 0.4): those on
    which the drafter is furthest behind `reference`. 1: all of them."""
    reference: str = ""
    """Checkpoint folder of the reference drafter for `token_share` below 1: a distilled drafter of
    the same target, preferably of the same size, that was trained on all tokens."""

    def __post_init__(self) -> None:
        ObjectiveConfig.__post_init__(self)
        NetworkConfig.__post_init__(self)
        if (self.token_share < 1.0) != bool(self.reference):
            raise UserError(
                "head.token_share below 1 and head.reference belong together: the reference "
                f"drafter decides which tokens are kept. Given {self.token_share} and "
                f"'{self.reference}'."
            )
        if self.token_share < 1.0 and self.lk_annealed > 0:
            raise UserError(
                "head.lk_annealed weighs tokens by the acceptance of all of them, which says "
                "nothing of single tokens: use another objective with head.token_share below 1."
            )


class Drafter(SmallLM):
    """A small Llama that drafts for the target."""

    kind: ClassVar[str] = "distilled"
    label_weight: ClassVar[str] = "ce"
    language_model: ClassVar[bool] = True

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        self.needs = FeatureSpec(logits=config.soft)  # drafting takes tokens alone
        self._reference: tuple[SmallLM, ...] = ()  # in a tuple: no part of this module's weights

    def loss(self, batch: TrainBatch) -> LossOutput:
        """The weighted objectives at every supervised position, or the chosen share of them."""
        config: Config = self.config
        rows = batch.supervised(1).flatten().nonzero().squeeze(1)
        predictions = Predictions.next_token(self.sequence(batch), rows)
        if config.token_share < 1.0:
            predictions = predictions.only(self._learnable(batch, predictions))
        return distillation_loss(config, batch, predictions, self.logits, self.info.vocab_size)

    def _learnable(self, batch: TrainBatch, predictions: Predictions) -> Tensor:
        """Indices [M'] of the predictions to train on, chosen with the reference drafter."""
        reference = self._load_reference().to(batch.tokens.device)
        with torch.no_grad():
            theirs = Predictions.next_token(reference.sequence(batch), predictions.states)
        sides = (predictions, self.logits), (theirs, reference.logits)
        share, columns = self.config.token_share, self.info.vocab_size
        return furthest_behind(self.config, batch, *sides, share, columns)

    def _load_reference(self) -> SmallLM:
        """The reference drafter, loaded at the first loss because drafting does not need it."""
        if not self._reference:
            found = load_drafter(Path(self.config.reference), self.info, self.target)
            if not isinstance(found, Drafter):
                raise UserError(
                    f"head.reference: '{self.config.reference}' is of kind '{found.kind}'; a "
                    "distilled drafter is needed."
                )
            self._reference = (found.requires_grad_(False),)
        return self._reference[0]
