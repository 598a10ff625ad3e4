"""On-policy training: the drafter continues answers and learns from the target on its own text.

The target's answers show the drafter only text that the target wrote, while its own drafts lead to
other text. Generalised knowledge distillation (GKD, 2306.13649) and DistillSpec (2310.08461) mix
both. Here a share of the packed rows is rewritten. In every document of such a row, an answer is
cut at a random place and the drafter continues from there as in serving: `start` on the target's
true states, then `propose` of one deep chain, with separate sampling noise. The target's features
are then computed again. Tokens after the window are not supervised unless `rest` is set.

All random numbers come from the rows' seeds, and the weights are those of the step. The rewritten
rows are therefore the same for any number of processes that train them, and after a restart.

Legend: B rows, T positions, D documents that are continued, W window, n taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from heads.api.batch import TrainBatch
from heads.api.config import NonNegativeInt, PositiveInt, Temperature, Tokens, UnitInterval, config
from heads.api.drafter import TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.sampling.noise import SharedNoise
from train.data.loader import PackedBatch
from train.engines.base import EngineConfig
from train.features.base import Features

# makes the random numbers differ from those that the loss draws with the same seeds
_OWN_STREAM = 0x2545F4914F6CDD1D
_MASK63 = (1 << 63) - 1


@config("train.on_policy")
@dataclass(frozen=True)
class OnPolicyConfig:
    """The share of text that the drafter itself writes in a training."""

    share: UnitInterval = 0.0
    """Probability that a row is rewritten (0 to 1); 0: never."""
    window: Tokens = 16
    """Maximum number of tokens that the drafter writes in one document (at least 1), as one chain;
    kinds with a largest depth draft no deeper than that."""
    temperature: Temperature = 1.0
    """Temperature of the drafter's sampling; 0: its most likely tokens."""
    rest: bool = False
    """Keep the answer's own tokens after the window supervised: the target then judges them after
    the drafter's text. Not where the drafter ended the text."""
    every: PositiveInt = 1
    """Interval in steps between steps with rewritten rows (at least 1)."""
    start: NonNegativeInt = 0
    """Steps before the first one with rewritten rows; an untrained drafter's text teaches
    little."""


@dataclass(frozen=True)
class Cut:
    """Where a document is continued. row, first: where it begins; last: the last true token kept,
    the root; room: most tokens to write; end: one past the document; seed: of the sampling
    noise."""

    row: int
    first: int
    last: int
    room: int
    end: int
    seed: int


class OnPolicyFeatures:
    """Features of rows, a share of which the drafter in training has rewritten. eos: end-of-text
    tokens. Raises `UserError` for drafters that cannot be trained like this."""

    def __init__(
        self,
        plain: Features,
        drafter: TrainableDrafter,
        eos: Sequence[int],
        config: OnPolicyConfig,
        engine: EngineConfig,
    ) -> None:
        require_possible(drafter, engine)
        self.plain, self.config = plain, config
        # for `start` and `propose`, which the base class leaves to the kinds
        self.drafter: Any = drafter
        self.eos = torch.tensor(list(eos), dtype=torch.int64)
        self.tree = longest_chain(drafter, config.window)

    def batch(self, packed: PackedBatch, step: int = 0) -> TrainBatch:
        """`packed` with features and with some of its rows rewritten."""
        batch, config = self.plain.batch(packed, step), self.config
        if step < config.start or (step - config.start) % config.every:
            return batch
        cuts = plan_cuts(packed, config)
        if not cuts:
            return batch
        written = self._continue(batch, cuts).cpu()
        tokens, mask = packed.tokens.clone(), packed.loss_mask.clone()
        weights = None if packed.weights is None else packed.weights.clone()
        anchors = None if packed.anchors is None else packed.anchors.clone()
        for cut, words in zip(cuts, written, strict=True):
            words = words[: cut.room]
            ends = torch.isin(words, self.eos).nonzero()
            length = int(ends[0]) + 1 if ends.numel() else words.shape[0]
            tokens[cut.row, cut.last + 1 : cut.last + 1 + length] = words[:length]
            # the weights of the answer's own tokens do not apply to the new ones
            if weights is not None:
                weights[cut.row, cut.last + 1 : cut.last + 1 + length] = 1.0
            # nor do those of drafts from the root on, which were drafts of the answer's own text
            if anchors is not None:
                anchors[cut.row, cut.last : cut.end] = 1.0
            if ends.numel() or not config.rest:
                mask[cut.row, cut.last + 1 + length : cut.end] = False
        rows = sorted({cut.row for cut in cuts})
        changed = replace(packed, tokens=tokens, loss_mask=mask, weights=weights, anchors=anchors)
        chosen = PackedBatch(**{name: part[rows] for name, part in changed.tensors().items()})
        return _replace_rows(batch, rows, self.plain.batch(chosen, step))

    @torch.no_grad()
    def _continue(self, batch: TrainBatch, cuts: Sequence[Cut]) -> Tensor:
        """The tokens [D, W] int64 that the drafter drafts after each cut."""
        device = batch.tokens.device
        rows, first, last = (
            torch.tensor([getattr(cut, name) for cut in cuts], device=device)
            for name in ("row", "first", "last")
        )
        width = max(cut.last - cut.first for cut in cuts)
        place = torch.arange(width, device=device)
        valid = place < (last - first)[:, None]
        at = (rows[:, None], torch.where(valid, first[:, None] + place, first[:, None]))
        dtype = next(parameter.dtype for parameter in self.drafter.parameters())
        seen = TargetStates(
            tokens=batch.tokens[at],
            next_tokens=batch.tokens[at[0], at[1] + 1],
            positions=batch.positions[at],
            valid=valid,
            taps=None if batch.taps is None else batch.taps[at].to(dtype),
            last_hidden=None if batch.last_hidden is None else batch.last_hidden[at].to(dtype),
        )
        seeds = torch.tensor([cut.seed for cut in cuts], device=device)
        settings = SamplingSettings(temperature=self.config.temperature)
        noise = SharedNoise(settings, seeds, self.drafter.info.vocab_size)
        was_training = self.drafter.training
        self.drafter.eval()
        try:
            state = self.drafter.start(seen, self.tree.to(device), width + 1)
            drafted: Tensor = self.drafter.propose(state, noise).tokens[:, 1:]
        finally:
            self.drafter.train(was_training)
        return drafted


def plan_cuts(packed: PackedBatch, config: OnPolicyConfig) -> list[Cut]:
    """Draw, from the rows' seeds alone, which documents are continued and where."""
    cuts = []
    for row, seed in enumerate(packed.seeds.tolist()):
        generator = torch.Generator().manual_seed((seed ^ _OWN_STREAM) & _MASK63)
        if float(torch.rand((), generator=generator)) >= config.share:
            continue
        segments, mask = packed.segments[row], packed.loss_mask[row]
        for number in segments.unique().tolist():
            if number == 0:
                continue
            places = (segments == number).nonzero().squeeze(1)
            first, end = int(places[0]), int(places[-1]) + 1
            # Tokens that may be replaced: supervised, with the root and one seen token before them.
            targets = (mask[first + 2 : end].nonzero().squeeze(1) + first + 2).tolist()
            if not targets:
                continue
            start = targets[int(torch.randint(len(targets), (), generator=generator))]
            stops = (~mask[start:end]).nonzero()
            room = min(config.window, int(stops[0]) if stops.numel() else end - start)
            noise = int(torch.randint(_MASK63, (), generator=generator))
            cuts.append(Cut(row, first, start - 1, room, end, noise))
    return cuts


def require_possible(drafter: TrainableDrafter, engine: EngineConfig) -> None:
    """Raise `UserError` for drafters that would be taught their own tokens, and for divided
    weights."""
    if not drafter.needs.logits:
        raise UserError(
            f"train.on_policy.share is above 0, but kind '{drafter.kind}', as configured, learns "
            "from tokens and not from the target's distribution: it would be taught its own "
            "mistakes. Set train.on_policy.share=0, or give head an objective that compares "
            "distributions."
        )
    if labels := drafter.taught_labels:
        raise UserError(
            f"train.on_policy.share is above 0, but head.{labels} takes tokens as labels, and "
            f"these would be the drafter's own. Change head.{labels} (a weight to 0), or set "
            "train.on_policy.share=0."
        )
    if engine.name == "deepspeed" and engine.zero_stage == 3:
        raise UserError(
            "train.on_policy.share is above 0, but engine.zero_stage=3 divides the drafter's "
            "weights, so that it cannot draft while it is trained. Use engine.zero_stage 0, 1 or "
            "2."
        )


@torch.no_grad()
def longest_chain(drafter: TrainableDrafter, most: int) -> TokenTree:
    """The longest chain of at most `most` tokens that a drafter can fill. Raises `UserError` for a
    drafter that can fill none."""
    parameter, needs, size = next(drafter.parameters()), drafter.needs, drafter.info.hidden_size
    one, places = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device), len(needs.taps)
    states = torch.zeros(1, 1, size, dtype=parameter.dtype, device=parameter.device)
    seen = TargetStates(
        *(one, one, one, one == 0),
        taps=states[:, :, None].expand(-1, -1, places, -1) if places else None,
        last_hidden=states if needs.last_hidden else None,
    )

    def fills(length: int) -> bool:
        try:
            cast(Any, drafter).start(seen, TokenTree.chain(length, one.device), length + 2)
        except UserError:
            if length == 1:
                raise
            return False
        return True

    if fills(most):
        return TokenTree.chain(most)
    longest, short = 0, most  # a chain of `longest` fits, one of `short` does not
    while short - longest > 1:
        middle = (longest + short) // 2
        longest, short = (middle, short) if fills(middle) else (longest, middle)
    return TokenTree.chain(longest)


def _replace_rows(batch: TrainBatch, rows: Sequence[int], fresh: TrainBatch) -> TrainBatch:
    """`batch` with the given rows' tokens, mask, features and weights taken from `fresh`."""
    at = torch.tensor(rows, device=batch.tokens.device)
    changed: dict[str, Tensor] = {}
    for name in ("tokens", "loss_mask", "taps", "last_hidden", "weights", "anchors"):
        value = getattr(batch, name)
        if value is not None:  # a copy: on the CPU the batch still holds the loader's own tensors
            changed[name] = value.index_copy(0, at, getattr(fresh, name))
    return replace(batch, **changed)  # type: ignore[arg-type]
