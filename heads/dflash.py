"""Block drafters: one forward pass drafts a whole block (DFlash and what came after it).

Taps of the target are fused into one feature per position. Every draft layer computes its own keys
and values from the features of the committed positions (KV injection), and the slots of a block
attend to these and to each other. Slot 0 holds the embedding of the root, the last committed token;
every other slot holds the same mask embedding. The shared, frozen LM head reads one drafted token
from every slot. The state is a cache of the features' keys and values. It only grows, because
nothing that is rejected is written as a feature (DFlash, 2602.06036). Options turn this into the
published methods: the mask inside the block (JetSpec), drafting from slot 0 on, tables that tell a
slot which token came before it and a confidence head (DSpark), a recurrent correction (Domino),
local convolutions and a path selector (DFlash 2), scores of neighbouring candidates (LiLiCorr),
states conditioned on the parent (TreeFlash), a mixture of taps per layer (DFlare).
Dependent slots are drafted level by level along every path of a tree, from the same pass, so every
node is conditioned on its parents (PC-Tree, DARTree). Parameter names are those of serving engines
(vLLM and SGLang).

Legend: B rows, T positions, A anchors per row, M = B * A blocks, b slots per block, K depths, R
supervised (block, depth) pairs, H hidden, V vocabulary, n taps, W width of a committed run, S cache
slots, N nodes, P nodes of one level, C carry of a dependency, g key/value heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError
from heads.api.tree import DartreeShape, DraftShape
from heads.kernels.reference.row_losses import CROSS_ENTROPY, ROW_LOSSES, TOTAL_VARIATION, RowLosses
from heads.nn import losses
from heads.nn.anchors import Anchors
from heads.nn.block import confidence as block_confidence
from heads.nn.block.attention import KeyValue, View, attend_blocks
from heads.nn.block.config import Config as Config
from heads.nn.block.lattice import Lattice
from heads.nn.block.losses import by_row_and_depth, sum_over_blocks
from heads.nn.block.model import BlockModel
from heads.nn.block.taught import Taught
from heads.nn.blocks import Attend
from heads.nn.drafting.dartree import grow_from_pass
from heads.nn.drafting.growth import fill, grow
from heads.nn.drafting.places import CachePlace
from heads.nn.drafting.plan import DartreePlan
from heads.nn.drafting.sight import UpTo
from heads.nn.drafting.state import Cached as State
from heads.nn.drafting.state import run_slots
from heads.nn.feature.base import teacher_logits
from heads.nn.rope import Rotation, look_up


class Drafter(BlockModel):
    """A block drafter."""

    kind: ClassVar[str] = "dflash"
    label_weight: ClassVar[str] = "ce"
    one_pass: ClassVar[bool] = True

    @property
    def taught_labels(self) -> str:
        """See `TrainableDrafter`; also what chooses candidates or weighs depths by the tokens."""
        config: Config = self.config
        if config.dependency in ("selector", "lilicorr"):
            return "dependency"
        return "depth_weights" if config.weighting().by_probability else super().taught_labels

    @classmethod
    def export_method(cls, config: Config) -> str:
        """The published method that the options describe, or `mixed` for parts of several."""
        if config.layer_fusion:
            return "dflare"
        if config.dependency == "parent":
            return "treeflash"
        if config.dependency in ("markov", "gated", "rnn"):
            return "mixed" if config.convolution else "dspark"
        if config.dependency == "gru":
            return "mixed" if config.convolution or config.confidence else "domino"
        if config.dependency == "lilicorr":
            return "mixed" if config.confidence else "lilicorr"
        if (config.dependency == "selector") != config.convolution or config.confidence:
            return "mixed"
        return "dflash2" if config.convolution else "dflash"

    # Training

    def loss(self, batch: TrainBatch) -> LossOutput:
        """The weighted objective over blocks drawn from every row, scaled to all positions."""
        config: Config = self.config
        # the root is part of the answer, and so is what follows
        eligible = batch.supervised(1) & batch.supervised(2)
        most = config.blocks(batch.tokens.shape[1])
        anchors = Anchors.sample(eligible, most, batch.generators(), batch.anchors)
        features = self._features(batch)
        contexts = self._contexts(features, self._rotation(batch))
        chunk = self._chunk(batch, self.depths)
        anchors = anchors.in_chunks(chunk)

        def part(first: int) -> losses.Sums:
            piece = anchors.piece(first, chunk)
            raw = self._states(batch, contexts, piece, self.depths)
            return self._sums(
                batch, raw, Taught.of(batch, piece, self.depths), at_anchors(features, piece)
            )

        sums = sum_over_blocks(part, anchors.last.shape[1], chunk)
        weighed, plain, distance, correct, counts, doubt = sums
        mixed = partial(config.objective().mixed, distance=distance, counts=counts)
        total, values = mixed(weighed), mixed(plain)
        metrics = losses.depth_metrics(values.sum(0), correct.sum(0), counts.sum(0))
        if self.confidence_head is not None:
            metrics["loss/confidence"] = (doubt.detach(), counts.sum().detach())
        return LossOutput(total.sum(), metrics)

    def _features(self, batch: TrainBatch) -> list[Tensor]:
        """The fused features [B, T, H] of the context, per layer."""
        assert batch.taps is not None, "a block drafter needs the target's taps"
        return self._fused(batch.taps)

    def _rotation(self, batch: TrainBatch) -> Rotation:
        return self._rope.at(batch.positions, self.norm.weight.dtype)

    def _chunk(self, batch: TrainBatch, depths: int) -> int:
        """Blocks per row that are run at once, so that logits and attention scores stay small."""
        rows, length = batch.tokens.shape
        slots = self.config.block_size
        scores = self.shape.num_attention_heads * slots * (length + slots)
        widest = max(depths * self.info.vocab_size, scores, self.config.candidate_scores(depths))
        return max(1, losses.chunk_elements(batch.tokens.device) // (rows * widest))

    def _states(
        self, batch: TrainBatch, contexts: list[KeyValue], anchors: Anchors, depths: int
    ) -> Tensor:
        """States before the final norm [M, depths, H] of the blocks behind `anchors`."""
        config: Config = self.config
        rows, blocks = anchors.last.shape
        slots = config.block_size
        root_at = (anchors.last + 1).clamp(max=batch.tokens.shape[1] - 1)
        roots = batch.tokens.gather(1, root_at).flatten()
        inputs = self._slots(roots, slots)
        first = batch.positions.gather(1, anchors.last).flatten()[:, None] + 1
        rotation = self._rope.at(first + torch.arange(slots, device=roots.device), inputs.dtype)
        flex = inputs.is_cuda and inputs.dtype != torch.float64
        view = View.of(batch.segments, anchors.last, slots, self.causal, flex)

        def attend(context: KeyValue, *parts: Tensor) -> Tensor:
            query, key, value = (part.unflatten(0, (rows, blocks)) for part in parts)
            return attend_blocks(query, context, (key, value), view).flatten(0, 1)

        attends: list[Attend] = [partial(attend, context) for context in contexts]
        return self._depths(self._run(inputs, rotation, attends), depths)

    def _sums(self, batch: TrainBatch, raw: Tensor, taught: Taught, anchor: Tensor) -> losses.Sums:
        """For states [M, K, H] and anchors [M, H], by row and depth: the ends of the objective [E,
        B, K], weighted with gradient and unweighted; total variation (0 if the losses lack it),
        right tokens and counts [B, K]; the confidence's loss."""
        config: Config = self.config
        rule, (block, depth) = self.dependency, taught.mask.nonzero(as_tuple=True)  # [R] each
        rise = config.base_share_end - config.base_share_start
        share = config.base_share_start + batch.progress * rise
        normed = self.norm(raw)
        given = raw if rule.raw else normed
        labels, states = taught.labels[block, depth], normed[block, depth]
        base, lattice, among = None, None, None
        if rule.whole:
            whole = self.target.project(normed)
            lattice = rule.lattice(whole, normed, anchor, self._embed)
            base = whole[block, depth]
        elif rule.needs_base or share > 0:
            base = self.target.project(states)
        carry = self._carries(taught.parents, given, lattice)[block, depth]
        among = None if lattice is None else lattice.tokens[block, depth]
        logits = self._dependent(base, given[block, depth], carry, depth + 1, among)
        states_at = taught.states_at[block, depth]
        target_logits = teacher_logits(batch, states_at) if self.needs.logits else None
        objective = config.objective()
        found = ROW_LOSSES(logits, target_logits, labels, config.losses())
        values = objective.ends(found)
        if config.distractor > 0:
            assert target_logits is not None
            penalty = losses.distractor_penalty(logits, target_logits, labels)
            values = values + config.distractor * penalty
        teaches = rule.teaches(base, labels)
        if lattice is not None:
            teaches = lattice.holds(taught.labels)[block, depth]
        if teaches is not None:
            values = torch.where(teaches, values, torch.zeros_like(values))
        if share > 0:
            assert base is not None
            alone = ROW_LOSSES(base, target_logits, labels, objective.names)
            # annealed together, by the acceptance of the final logits, which are those drafted from
            values = (1 - share) * values + share * objective.ends(alone)
        weights = self._weights(taught, found, values)[block, depth]
        if batch.weights is not None:
            weights = weights * batch.weights.flatten()[states_at + 1].to(weights.dtype)
        doubt = torch.zeros_like(values[0])
        if self.confidence_head is not None:
            odds = self.confidence_head(states, rule.hint(taught.parents[block, depth]))
            acceptance = 1.0 - found[TOTAL_VARIATION].detach()
            doubt = block_confidence.confidence_loss(odds, acceptance)
        weighed = weights * (values + config.confidence_weight * doubt)
        distance = found.values.get(TOTAL_VARIATION, torch.zeros_like(doubt)).detach()
        hits = objective.hits(found, labels).long()
        rows = batch.tokens.shape[0]
        size = rows, taught.mask.shape[0] // rows, self.depths
        sums = (
            by_row_and_depth(items, block, depth, size)
            for items in (weighed, values.detach(), distance, hits, torch.ones_like(depth))
        )
        return *sums, doubt.detach().sum()

    def _weights(self, taught: Taught, found: RowLosses, values: Tensor) -> Tensor:
        """The weight of each depth of each block [M, K]. found: results of the supervised ones;
        values: their losses."""
        weighting, scale = self.config.weighting(), taught.scale[:, None]
        right = values.new_full(taught.mask.shape, float("-inf"))
        if weighting.by_probability:
            right = right.masked_scatter(taught.mask, -found[CROSS_ENTROPY].detach())
        weights: Tensor = weighting(right, taught.mask)
        return weights * scale.to(weights.dtype)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V] of depths 1..depth of a block behind each position; see the contract."""
        assert depth <= self.depths, f"{depth} depths asked of a block of {self.depths}"
        features, anchors = self._features(batch), Anchors.everywhere(batch.tokens)
        contexts = self._contexts(features, self._rotation(batch))
        run = self.depths if self.dependency.whole else depth
        chunk, found = self._chunk(batch, run), []
        for first in range(0, batch.tokens.shape[1], chunk):
            piece = anchors.piece(first, chunk)
            raw = self._states(batch, contexts, piece, run)
            given, base, lattice = self._given(raw, at_anchors(features, piece))
            parents = Taught.of(batch, piece, self.depths).parents[:, :run]
            carry = self._carries(parents, given, lattice)
            depths = torch.arange(1, run + 1, device=raw.device).expand(raw.shape[:2])
            among = None if lattice is None else lattice.tokens
            logits = self._dependent(base, given, carry, depths, among)[:, :depth]
            found.append(logits.unflatten(0, piece.last.shape))  # [B, A, K, V]
        return list(torch.cat(found, 1).unbind(2))

    def _given(self, raw: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor | None, Lattice | None]:
        """From states before the final norm [M, K, H] and anchors [M, H]: the states that the
        dependency reads, the base logits [M, K, V] if it needs them, and its lattice."""
        rule, normed = self.dependency, self.norm(raw)
        base = self.target.project(normed) if rule.needs_base else None
        lattice = None
        if rule.whole:
            assert base is not None
            lattice = rule.lattice(base, normed, anchor, self._embed)
        return raw if rule.raw else normed, base, lattice

    def _carries(self, parents: Tensor, given: Tensor, lattice: Lattice | None) -> Tensor:
        """The carries [M, K, C] of all depths after given tokens [M, K]."""
        if lattice is not None:
            return lattice.along(parents)
        return self.dependency.unroll(parents, given, self._embed)

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; raises `UserError` when the tree is deeper than the block."""
        if tree.max_depth > self.depths:
            needed = tree.max_depth + self.config.block_size - self.depths
            raise UserError(
                f"blocks of {self.config.block_size} draft {self.depths} tokens at most, not "
                f"{tree.max_depth}. Set decode.depth to {self.depths} or less, or train with "
                f"head.block_size={needed}."
            )
        (batch, width), plan, shape = seen.tokens.shape, self.plans.of(tree), self.shape
        slots = max(capacity, width) + max(self.config.block_size, plan.max_depth + 1) + 1
        cache = batch, slots, shape.num_key_value_heads, shape.head_dim
        caches = [self.norm.weight.new_zeros(cache) for _ in self.layers]
        width = self.info.hidden_size if self.dependency.whole else 0
        anchor = self.norm.weight.new_zeros(batch, width)
        state = State.empty(seen, plan, anchor, caches)
        return self.commit(state, seen)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Append the run's keys and values to the cache.

        Padded entries are written after the run and overwritten before anything reads them.
        """
        assert accepted.taps is not None, "a block drafter needs the target's taps"
        (rows, last), slots = state.advance(accepted), run_slots(accepted)
        features = self._fused(accepted.taps)
        contexts = self._contexts(features, look_up(state.rotations(self._rope), slots))
        for layer, (key, value) in enumerate(contexts):
            state.store(layer, rows, slots, key, value)
        if self.dependency.whole:
            state.output.copy_(features[0][rows, last][:, 0])
        return state

    def _draft(self, state: State, depth: int) -> Tensor:
        """One pass over the block behind each root: states before the final norm [B, depth, H].

        The block's own keys and values lie in the cache after the context. Slots that see each
        other are all run, as in training, however few are needed.
        """
        shift = self.config.block_size - self.depths
        slots = depth + shift if self.causal else self.config.block_size
        inputs = self._slots(state.root, slots)
        rows = state.rows
        places = state.root_position[:, None] + torch.arange(slots, device=inputs.device)  # [B, b]
        # where slots see each other, each sees what the last one sees
        sight = UpTo.run(places, None if self.causal else torch.full_like(places, slots - 1))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            state.store(layer, rows, places, key, value)
            return state.attend(layer, query, sight)

        attends: list[Attend] = [partial(attend, layer) for layer in range(len(self.layers))]
        return self._depths(
            self._run(inputs, look_up(state.rotations(self._rope), places), attends), depth
        )

    def propose(self, state: State, noise: Noise) -> Proposal:
        """One pass, then the tree: at once if slots are independent, else level by level."""
        depth = self.depths if self.dependency.whole else state.plan.max_depth
        raw = self._draft(state, depth)
        given, base, lattice = self._given(raw, state.output)
        if self.config.dependency == "none":
            assert base is not None
            proposal = fill(state, base, noise)
        elif isinstance(state.plan, DartreePlan):
            base = self._project_given(given) if base is None else base
            proposal = self._grow_from_pass(state, state.plan.shape, base, given, lattice, noise)
        else:
            proposal = self._grow(state, base, given, lattice, noise)
        if self.confidence_head is not None:
            proposal.confidence = self._confidence(proposal, self.norm(raw))
        return proposal

    def _grow(
        self,
        state: State,
        base: Tensor | None,
        given: Tensor,
        lattice: Lattice | None,
        noise: Noise,
    ) -> Proposal:
        """Grow every path: a node's children continue from its token and the carry before it."""
        rule, depth = self.dependency, 0

        def step(place: CachePlace, tokens: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal depth
            depth += 1  # of the children; levels come in order
            states = given[:, depth - 1 : depth].expand(-1, tokens.shape[1], -1)
            slot = None if base is None else base[:, depth - 1 : depth]
            among = None if lattice is None else lattice.tokens[:, depth - 1 : depth]
            if lattice is not None:
                carry = lattice.follow(depth, tokens)
            else:
                carry = rule.read(tokens, states, carry, self._embed)
            logits = self._dependent(slot, states, carry, depth, among)
            return logits.expand(-1, tokens.shape[1], -1), carry

        nothing = given.new_zeros(given.shape[0], 1, rule.size)
        logits, carry = step(CachePlace.nowhere(given.device), state.root[:, None], nothing)
        return grow(state, logits, carry, step, noise)

    def _grow_from_pass(
        self,
        state: State,
        shape: DartreeShape,
        base: Tensor,
        given: Tensor,
        lattice: Lattice | None,
        noise: Noise,
    ) -> Proposal:
        """As `_grow`, from the candidates of every slot (`heads.nn.drafting.dartree`)."""
        rule = self.dependency

        def along(
            depth: int, columns: Tensor, tokens: Tensor, carry: Tensor
        ) -> tuple[Tensor, Tensor]:
            if lattice is not None:
                carry = lattice.follow(depth, tokens)
                return carry - lattice.log_probs[:, depth - 1, None], carry
            states = given[:, depth - 1 : depth].expand(-1, tokens.shape[1], -1)
            carry = rule.read(tokens, states, carry, self._embed)
            if depth < rule.first:
                return carry.new_zeros(carry.shape[0], 1, columns.shape[1]), carry
            slot = base[:, depth - 1 : depth]
            return rule.added(columns, slot, states, carry, self._project_given), carry

        nothing = given.new_zeros(given.shape[0], 1, rule.size)
        among = None if lattice is None else lattice.tokens[:, : shape.max_depth]
        drafted = base[:, : shape.max_depth]
        return grow_from_pass(shape, state, drafted, noise, None, along, nothing, among)

    def _confidence(self, proposal: Proposal, normed: Tensor) -> Tensor:
        """Calibrated confidence [B, N] of every node; the root's is 1. normed [B, K, H]."""
        assert self.confidence_head is not None
        rows = torch.arange(normed.shape[0], device=normed.device)[:, None]
        depth = proposal.tree.depth.clamp(min=1).expand(proposal.tokens.shape)
        parents = proposal.tokens.gather(1, proposal.tree.parents.expand(proposal.tokens.shape))
        odds = self.confidence_head(normed[rows, depth - 1], self.dependency.hint(parents))
        sure = self.confidence_head.calibrated(odds, depth)
        return torch.where(proposal.tree.depth == 0, torch.ones_like(sure), sure)

    def calibrate(self, log_odds: Tensor, accepted: Tensor) -> tuple[list[float], list[float]]:
        """Fit the confidence's temperatures to recorded chains: log_odds [M, K] as `ConfidenceHead`
        gave them, accepted [M] drafts.

        Returns the calibration errors per depth before and after. Stored with the weights.
        """
        if self.confidence_head is None:
            raise UserError(
                "this drafter has no confidence to calibrate; train it with head.confidence=true."
            )
        fitted = block_confidence.fit_temperatures(log_odds, accepted)
        kept = self.confidence_head.temperatures
        before = block_confidence.calibration_errors(log_odds, accepted, kept[: len(fitted)].cpu())
        kept[: len(fitted)] = fitted.to(kept)
        return before, block_confidence.calibration_errors(log_odds, accepted, fitted)


def at_anchors(features: list[Tensor], anchors: Anchors) -> Tensor:
    """The first layer's features [B, T, H] at the anchors [B, A] -> [M, H]."""
    first = features[0]
    return first.gather(1, anchors.last[..., None].expand(-1, -1, first.shape[-1])).flatten(0, 1)
