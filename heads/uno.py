"""Uno: the target with a low-rank update that is switched on only while drafting (2609.04010).

Drafting and verification use the same weights: the target verifies as it is, and the same layers
with a LoRA added draft several tokens in one pass. From the paper's published code
(github.com/ifm-ai/uno) and SGLang's implementation of it:

- A pass reads [root, noise x (b - 1)], where noise is tokens drawn uniformly from the vocabulary
  (uniform discrete diffusion, denoised in one step).
- The update applies to the noise rows alone, so the root's row gives the target's own prediction.
- The row at position p predicts the token at p + 1 and sees the tokens before it (causal inside the
  block too).
- Only the update is trained, towards the target's distribution at the true tokens (diffusion
  distillation; the published recipe: total variation alone, rank 128, all seven linear layers,
  blocks growing in six equal stages to 16).
- A tree holds the best paths of the independent distributions.

Differences here: the noise of a drafted position follows from the position, so a draft depends on
the text alone. Training takes blocks behind randomly drawn roots, where the published code cuts a
noised copy of the sequence into blocks. `slots=mask` fills the rows with one trained vector
instead, as PARD (2504.18583) does with a mask token. Committed tokens have the target's own keys
and values (`heads.nn.target.drafting`), so the target itself never changes. A cycle reads the
target's weights twice and commits at least two tokens, the root's own prediction and the bonus; the
accepted tokens of the noise rows are the gain.

Legend: B rows, T positions, A anchors per row, M = B * A blocks, b tokens per block, S = b - 1
noise slots, K depths, R supervised (block, depth) pairs, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.checkpoint import unset_parameters
from heads.api.config import DepthFromTwo, NonEmpty, PositiveWeight, Rows, Size, Weight, config
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape
from heads.kernels.reference.row_losses import ROW_LOSSES, TOTAL_VARIATION
from heads.nn import init, losses
from heads.nn.anchors import Anchors
from heads.nn.block.attention import KeyValue, View, attend_blocks
from heads.nn.block.losses import Objective, by_row_and_depth, sum_over_blocks
from heads.nn.block.taught import Taught
from heads.nn.blocks import Attend
from heads.nn.checkpointing import network_part
from heads.nn.drafting.growth import fill
from heads.nn.drafting.state import Cached as State
from heads.nn.feature.base import teacher_logits
from heads.nn.rope import Rotation
from heads.nn.target.drafting import LayerDrafter
from heads.nn.target.layers import KeptLayer, TargetLayer
from heads.nn.target.updates import MODULES, LayerUpdates, LowRank, Module, updated_layers


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of Uno."""

    block_size: DepthFromTwo = 16
    """Tokens b drafted per pass in training, the first one by the root's row (>= 2); serving may
    draft fewer or more."""
    curriculum: tuple[DepthFromTwo, ...] = (2, 4, 6, 8, 12)
    """Block sizes (ascending) that training goes through before block_size, in stages of equal
    length; sizes that are not below block_size are left out. Empty: block_size from the start."""
    slots: Literal["noise", "mask"] = "noise"
    """Input of the rows after the root: noise (random tokens) or mask (a trained vector, which
    serving engines do not have)."""
    noise_tokens: Size = 0
    """Draw the noise from this many token ids, from 0 on; 0: from all. Set the tokenizer's length
    if the embedding has untrained rows after it."""
    modules: NonEmpty[Module] = MODULES
    """Linear layers of every decoder layer that are updated: q_proj, k_proj, v_proj, o_proj,
    gate_proj, up_proj, down_proj."""
    rank: Rows = 128
    """Rank of the updates (>= 1)."""
    alpha: PositiveWeight = 256.0
    """The updates are multiplied by alpha / rank (> 0). The published recipe uses 2048 at a
    learning rate of 1e-5."""
    num_anchors: Rows = 64
    """Blocks per training row, drawn among all positions where a response continues."""
    tv: Weight = 1.0
    """Weight of the total variation distance, which is half of the L1 distance."""
    kl: Weight = 0.0
    """Weight of KL(target || drafter)."""
    lk: Weight = 0.0
    """Weight of -log(acceptance rate), the LK loss."""
    annealed_lk: Weight = 0.0
    """Weight of the LK loss that changes from KL to total variation as the mean acceptance of a
    row's blocks at a depth rises."""
    ce: Weight = 0.0
    """Weight of the cross entropy against the answer's tokens."""

    def __post_init__(self) -> None:
        self.objective()
        if list(self.curriculum) != sorted(set(self.curriculum)):
            raise UserError(
                f"head.curriculum must ascend without repetition; given {list(self.curriculum)}."
            )
        if len(set(self.modules)) != len(self.modules):
            raise UserError(f"head.modules names a layer twice; given {list(self.modules)}.")

    def objective(self) -> Objective:
        """The training objective of a slot."""
        return Objective(self.ce, self.kl, self.tv, self.lk, self.annealed_lk)

    def size_at(self, progress: float) -> int:
        """The block size of the training after a share `progress` (0 to 1) of it."""
        stages = [*(size for size in self.curriculum if size < self.block_size), self.block_size]
        return stages[min(int(progress * len(stages)), len(stages) - 1)]


class Drafter(LayerDrafter):
    """All layers of the target, with an update for every row but the root's."""

    kind: ClassVar[str] = "uno"
    label_weight: ClassVar[str] = "ce"
    runs_target_layers = True

    def __init__(self, config: Config, info: TargetInfo) -> None:
        every = range(info.num_layers)
        super().__init__(config, info, tuple(KeptLayer(layer) for layer in every))
        if config.noise_tokens > info.vocab_size:
            raise UserError(
                f"head.noise_tokens must not be above the vocabulary of {info.vocab_size}; given "
                f"{config.noise_tokens}."
            )
        self.needs = FeatureSpec(tuple(every), last_hidden=True, logits=True)
        self.layers = nn.ModuleList(
            [LayerUpdates(info, config.modules, config.rank) for _ in every]
        )
        own = config.slots == "mask"
        self.mask_embedding = nn.Parameter(torch.empty(info.hidden_size)) if own else None
        self._training: list[TargetLayer] = []
        self._drafting: list[TargetLayer] = []
        unset_parameters(self)

    def bind(self, weights: TargetWeights) -> None:
        """See `LayerDrafter`; the updates join the layers of drafted rows."""
        super().bind(weights)
        scale = self.config.alpha / self.config.rank
        plain = [layer for layer in self._blocks if isinstance(layer, TargetLayer)]
        updates = [layer for layer in self.layers if isinstance(layer, LayerUpdates)]
        self._training = updated_layers(plain, updates, scale, bare=0)
        self._drafting = updated_layers(plain, updates, scale, bare=1)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Updates start at zero: every row predicts as the target would after noise."""
        for part in self.modules():
            if isinstance(part, LowRank):
                part.initialise(generator)
        if self.mask_embedding is not None:
            spread = float(weights.embedding.float().std())
            init.normal(self.mask_embedding, spread, generator)

    # Noise

    def noise(self, positions: Tensor) -> Tensor:
        """The noise tokens of drafted positions of any shape, in serving."""
        return noise_at(positions, self._noise_ids)

    @property
    def _noise_ids(self) -> int:
        """How many token ids noise is drawn from."""
        return self.config.noise_tokens or self.info.vocab_size

    def _fill(self, tokens: Tensor) -> Tensor:
        """Inputs [..., H] of noise slots, given their noise tokens [...]."""
        if self.mask_embedding is None:
            return self.target.embed(tokens)
        mask = self.mask_embedding.to(self.target.embedding.dtype)
        return mask.expand(*tokens.shape, -1)

    def _draw(self, generators: Sequence[torch.Generator], blocks: int, slots: int) -> Tensor:
        """Noise tokens [B, A, S] for training: each row's come from its own generator, whatever the
        number of blocks in other rows."""
        shape = self.config.num_anchors, slots
        drawn = [torch.randint(self._noise_ids, shape, generator=one) for one in generators]
        return torch.stack(drawn)[:, :blocks].to(self.target.embedding.device)

    # Training

    def loss(self, batch: TrainBatch) -> LossOutput:
        """The objective at every noise slot of blocks drawn from every row, scaled to all roots."""
        config: Config = self.config
        slots = config.size_at(batch.progress) - 1
        generators = batch.generators()
        # the root is part of the answer, and so is what the first slot predicts
        eligible = batch.supervised(1) & batch.supervised(3)
        chunk = self._chunk(batch, slots)
        anchors = Anchors.sample(eligible, config.num_anchors, generators, batch.anchors)
        anchors = anchors.in_chunks(chunk)
        noise = self._draw(generators, anchors.last.shape[1], slots)
        contexts = self._true_pairs(batch)

        def part(first: int) -> losses.Sums:
            piece = anchors.piece(first, chunk)
            outputs = self._outputs(batch, contexts, piece, noise[:, first : first + chunk])
            return self._sums(batch, outputs, Taught.of(batch, piece, slots + 1))

        sums = sum_over_blocks(part, anchors.last.shape[1], chunk)
        weighed, plain, distance, correct, counts = sums
        mixed = partial(config.objective().mixed, distance=distance, counts=counts)
        total, values = mixed(weighed), mixed(plain)
        found = values.sum(0), correct.sum(0), counts.sum(0)
        return LossOutput(total.sum(), losses.depth_metrics(*found, first=2))

    def _chunk(self, batch: TrainBatch, slots: int) -> int:
        """Blocks per row that are run at once, so that logits and attention scores stay small."""
        rows, length = batch.tokens.shape
        scores = self.info.num_attention_heads * slots * (length + slots)
        widest = max(slots * self.info.vocab_size, scores)
        return max(1, losses.chunk_elements(batch.tokens.device) // (rows * max(1, widest)))

    def _outputs(
        self, batch: TrainBatch, contexts: list[KeyValue], anchors: Anchors, noise: Tensor
    ) -> Tensor:
        """The LM head's input [M, S, H] at the noise slots behind the roots of `anchors`;
        noise [B, A, S]."""
        root_at = (anchors.last + 1).clamp(max=batch.tokens.shape[1] - 1)
        blocks, slots = noise.shape[:2], noise.shape[2]
        behind = torch.arange(1, slots + 1, device=noise.device)
        positions = batch.positions.gather(1, root_at)[..., None] + behind
        states = self._fill(noise).flatten(0, 1)
        rotation = self._rope.at(positions.flatten(0, 1), self.target.embedding.dtype)
        flex = states.is_cuda and states.dtype != torch.float64
        views = {
            window: View.of(batch.segments, root_at, slots, True, flex, window)
            for window in {layer.window for layer in self._training}
        }

        def attend(context: KeyValue, view: View, *parts: Tensor) -> Tensor:
            query, key, value = (part.unflatten(0, blocks) for part in parts)
            return attend_blocks(query, context, (key, value), view).flatten(0, 1)

        for layer, context in zip(self._training, contexts, strict=True):
            attends: Attend = partial(attend, context, views[layer.window])
            states = run_layer(layer, states, rotation, attends)
        return self._normalise(states)

    def _sums(self, batch: TrainBatch, outputs: Tensor, taught: Taught) -> losses.Sums:
        """For outputs [M, S, H], by row and depth 2..block_size: the ends of the objective [E, B,
        K], weighted with gradient and unweighted; total variation (0 if the losses lack it), right
        tokens and counts [B, K]."""
        config: Config = self.config
        # the root's row, depth 1, has nothing to learn
        block, slot = taught.mask[:, 1:].nonzero(as_tuple=True)  # [R] each
        labels, states_at = taught.labels[block, slot + 1], taught.states_at[block, slot + 1]
        logits = self._logits(outputs[block, slot])
        wanted = teacher_logits(batch, states_at)
        objective = config.objective()
        found = ROW_LOSSES(logits, wanted, labels, objective.names)
        values = objective.ends(found)
        weights = taught.scale[block].to(values.dtype)
        if batch.weights is not None:
            weights = weights * batch.weights.flatten()[states_at + 1].to(weights.dtype)
        distance = found.values.get(TOTAL_VARIATION, torch.zeros_like(values[0])).detach()
        hits = objective.hits(found, labels).long()
        rows = batch.tokens.shape[0]
        size = rows, taught.mask.shape[0] // rows, config.block_size - 1
        return tuple(
            by_row_and_depth(items, block, slot, size)
            for items in (weights * values, values.detach(), distance, hits, torch.ones_like(slot))
        )

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Depth 1 at t is the target's own prediction from token t+1, depth k that of the slot k-1
        behind it, with the noise of serving [B, T, V]; entries past the end mean nothing."""
        assert batch.last_hidden is not None, "uno needs the target's last hidden state"
        first = self._logits(batch.last_hidden).roll(-1, 1)
        if depth == 1:
            return [first]
        anchors, contexts = Anchors.everywhere(batch.tokens), self._true_pairs(batch)
        chunk, found = self._chunk(batch, depth - 1), []
        behind = torch.arange(2, depth + 1, device=batch.tokens.device)
        noise = self.noise(batch.positions[..., None] + behind)
        for start in range(0, batch.tokens.shape[1], chunk):
            piece = anchors.piece(start, chunk)
            outputs = self._outputs(batch, contexts, piece, noise[:, start : start + chunk])
            found.append(self._logits(outputs).unflatten(0, piece.last.shape))
        return [first, *torch.cat(found, 1).unbind(2)]

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        return self.commit(self._new_state(seen, tree, capacity, 0), seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Keys and values of the run from its true states, in place of the drafted ones."""
        self._store(state, accepted)
        return state

    def propose(self, state: State, noise: Noise) -> Proposal:
        """One pass over the root and the noise slots behind it fills the tree; see the protocol."""
        ahead = torch.arange(state.plan.max_depth, device=state.root.device)
        positions = state.root_position[:, None] + ahead  # [B, K]
        slots = self._fill(self.noise(positions[:, 1:]))
        states = torch.cat([self.target.embed(state.root[:, None]), slots], 1)
        output = self._run(state, states, self._chain(state, positions), self._drafting)
        return fill(state, self._logits(output), noise)


@network_part
def run_layer(layer: TargetLayer, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
    """States [M, S, H] through one layer."""
    return layer.finish(states, attend(*layer.project(states, rotation)))


def noise_at(positions: Tensor, ids: int) -> Tensor:
    """Noise tokens below `ids` for positions of any shape: evenly distributed and deterministic.

    Two rounds of multiplying by an odd number and folding the high bits down; the products wrap
    around in int64 on every device.
    """
    mixed = (positions + 1) * -7046029254386353131  # 2^64 divided by the golden ratio
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    return (mixed ^ (mixed >> 29)) % ids
