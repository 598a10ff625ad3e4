"""PARD: a small language model that drafts all tokens in one pass, by mask tokens (2504.18583).

The network is that of `distilled`, and may start from one. It reads [.. x_t, MASK x (K - 1)]: the
output at x_t gives the first drafted token, the output at mask k the one k positions further, so
drafting K tokens costs one pass instead of K. The drafted tokens do not see each other, only their
positions, and a tree is filled from the independent distributions. All masks are one token of the
vocabulary and differ only in position, so a drafter trained for K tokens can draft more (PARD,
2504.18583). Serving engines read the mask's id as `pard_token` (vLLM: method `draft_model` with
`parallel_drafting`).

Training runs the true tokens and, beside them, masks after every position; deeper masks are kept at
a smaller share of positions (conditional drop). The objective is the same mix as in distillation,
summed over all kept predictions.

Legend: B rows, T positions, W width of a run, E mask tokens per row, K drafted tokens, H hidden of
the drafter, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.config import DepthFromTwo, Fraction, OptionalToken, UnitInterval, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.nn import attention
from heads.nn.attention import in_chunks, masked_attention, sequence_attention
from heads.nn.distillation import ObjectiveConfig, Predictions, distillation_loss
from heads.nn.drafting.growth import fill
from heads.nn.drafting.plan import Plan
from heads.nn.feature.masks import Masks
from heads.nn.packing import Packing
from heads.nn.small_lm.config import NetworkConfig
from heads.nn.small_lm.model import SmallLM, State


@config("head")
@dataclass(frozen=True)
class Config(NetworkConfig, ObjectiveConfig):
    """Configuration of PARD. Sizes of 0 follow the target."""

    depth: DepthFromTwo = 8
    """Tokens drafted per pass in training (K >= 2); serving may draft fewer or more."""
    keep: Fraction = 0.7
    """Conditional drop: the share of positions with mask k is keep^k (0 < keep <= 1), but at least
    `keep_least`."""
    keep_least: UnitInterval = 0.2
    """Smallest share of positions with mask k (0 to keep)."""
    pard_token: OptionalToken = -1
    """Token that serves as mask; -1: the rarest of the training data, of equals the highest id."""

    def __post_init__(self) -> None:
        ObjectiveConfig.__post_init__(self)
        NetworkConfig.__post_init__(self)
        if self.keep_least > self.keep:
            raise UserError(
                f"head.keep_least must not be above head.keep; given {self.keep_least} and "
                f"{self.keep}."
            )


class Drafter(SmallLM):
    """A small language model with mask tokens."""

    kind: ClassVar[str] = "pard"
    label_weight: ClassVar[str] = "ce"
    one_pass: ClassVar[bool] = True
    pard_token: Tensor

    def __init__(self, config: Config, info: TargetInfo) -> None:
        super().__init__(config, info)
        if not -1 <= config.pard_token < info.vocab_size:
            raise UserError(
                f"head.pard_token must be a token id of the target (0 to {info.vocab_size - 1}) "
                f"or -1; given {config.pard_token}."
            )
        self.needs = FeatureSpec(logits=config.soft)  # drafting takes tokens alone
        self.register_buffer("pard_token", torch.tensor(config.pard_token % info.vocab_size))

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Take the rarest token as mask, unless one was given."""
        if self.config.pard_token < 0:
            self.pard_token.fill_(counts.shape[0] - 1 - int(counts.flip(0).argmin()))

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """See `SmallLM`. Raises `UserError` for another mask than that of the PARD drafter that it
        starts from."""
        super().initialise(weights, generator)
        given, trained = self.config.pard_token, int(self.pard_token)
        if given not in (-1, trained):
            raise UserError(
                f"head.pard_token is {given}, but the drafter in head.from_model was trained with "
                f"the mask {trained}. Leave head.pard_token out, or give {trained}."
            )

    # Training

    def _outputs(self, batch: TrainBatch, masks: Masks) -> Tensor:
        """Normalised states [B, T + E, H]: the sequence's, then the masks'."""
        length = batch.tokens.shape[1]
        tokens = torch.cat([batch.tokens, self.pard_token.expand_as(masks.place)], 1)
        behind = batch.positions.gather(1, masks.place) + masks.step
        positions = torch.cat([batch.positions, behind], 1)
        packing, segments, count = Packing.of(batch), batch.segments, masks.place.shape[1]
        chunk = max(1, attention.CHUNK_ELEMENTS // tokens.numel())
        # visibility of all masks, for all layers, if it is small
        seen = masks.visible(segments, slice(0, count)) if count <= chunk else None

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            given = query[:, :length], key[:, :length], value[:, :length]

            def part(span: slice) -> Tensor:
                near = slice(length + masks.seen_from(span), length + span.stop)
                keys, values = (
                    torch.cat([each[:, :length], each[:, near]], 1) for each in (key, value)
                )
                asking = query[:, length + span.start : length + span.stop]
                visible = masks.visible(segments, span) if seen is None else seen
                return masked_attention(asking, keys, values, visible)

            text = sequence_attention(*given, packing)
            return torch.cat([text, in_chunks(part, count, chunk)], 1)

        return self._run(tokens, positions, attend)

    def loss(self, batch: TrainBatch) -> LossOutput:
        """The weighted objectives at supervised next tokens and at kept masks."""
        config: Config = self.config
        masks = Masks.sample(batch, config.depth, config.keep, config.keep_least)
        outputs = self._outputs(batch, masks)
        length, width = batch.tokens.shape[1], outputs.shape[1]
        row, place = batch.supervised(1).nonzero().unbind(1)
        mask_row, number = masks.supervised(batch).nonzero().unbind(1)
        step = masks.step[mask_row, number]
        at = torch.cat([row * width + place, mask_row * width + length + number])
        behind = mask_row * length + masks.place[mask_row, number] + step
        states, depth = (row * length + place, behind), (torch.zeros_like(place), step)
        where = at, torch.cat(states), torch.cat(depth), config.depth
        predictions = Predictions(outputs.flatten(0, 1), *where)
        return distillation_loss(config, batch, predictions, self.logits, self.info.vocab_size)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Depth 1 at t is the prediction from token t+1, depth k that of mask k-1 behind it [B, T,
        V]; entries past the end mean nothing."""
        length = batch.tokens.shape[1]
        outputs = self._outputs(batch, Masks.everywhere(batch.tokens, depth - 1))
        text, masks = outputs[:, :length], outputs[:, length:].unflatten(1, (length, depth - 1))
        found = [text, *masks.unbind(2)]
        return [self.logits(states).roll(-1, 1) for states in found]

    # Drafting

    def outputs(self, plan: Plan) -> int:
        """Outputs that a state keeps per row: one for every drafted depth."""
        return plan.max_depth

    def absorb(self, state: State, run: TargetStates, tokens: Tensor, first: Tensor) -> State:
        """Run `tokens` [B, W] at positions first [B, 1] and on, and the masks behind the root.

        Padded tokens share positions with masks; they are written to the last slot, unseen.
        """
        state.advance(run)
        (batch, width), end = tokens.shape, state.root_position[:, None]
        slots = first + torch.arange(width, device=tokens.device)
        slots = torch.where(slots <= end, slots, state.slots - 1)
        numbers = torch.arange(state.output.shape[1] - 1, device=tokens.device)
        all_tokens = torch.cat([tokens, self.pard_token.expand(batch, numbers.shape[0])], 1)
        wanted = torch.cat([end - first, (width + numbers).expand(batch, -1)], 1)
        all_slots = torch.cat([slots, end + 1 + numbers], 1)
        state.output.copy_(self.run(state, all_tokens, all_slots, wanted))
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """Fill the tree from the outputs at the root and its masks; see the protocol."""
        return fill(state, self.logits(state.output), noise)
