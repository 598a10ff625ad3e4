"""A drafter on another device than its target: a second GPU, or the CPU.

`PlacedDrafter` is a `Drafter` that stands between the decoding loop and the drafter. It sends the
drafter those of the target's states that it reads, and the noise's keys. It returns the drafted
tokens, and the tree if the drafter chose it. Noise is never sent: both sides compute it from the
keys, so drafts agree with the target's picks as on one device.

    weights = weights_on(target, torch.device("cuda:1"))
    drafter = PlacedDrafter(load_drafter(folder, target.info, weights), "cuda:1", target.device)

Copies between devices may wait for both, so such steps are not captured (`capturable`).

Legend: B rows, N nodes, T positions, n taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from heads.api.drafter import (
    Drafter,
    Noise,
    Proposal,
    TargetStates,
    TrainableDrafter,
    Verified,
    forget,
)
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetWeights
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.pair import DrafterPair
from inference.decoding.sampling.noise import Stream
from inference.decoding.sampling.row_settings import RowNoise, RowSettings
from inference.decoding.structured.leading import LedNoise
from inference.target.hardware import wait_for
from inference.target.model import TargetModel
from inference.target.shared import head_function

Copies = dict[str, tuple[Tensor, int, Tensor]]
"""Name -> a tensor, the version of it that was copied, the copy."""


@dataclass
class Transfer:
    """What crossed between target and drafter: tensors, bytes, and, if measured, seconds of
    copying."""

    moves_in: int = 0
    bytes_in: int = 0
    moves_out: int = 0
    bytes_out: int = 0
    seconds: float = 0.0


class PlacedDrafter:
    """`drafter` on `device`, used from `target_device`.

    measure: time the copies, which makes the host wait for both devices around each; otherwise
    `transfer.seconds` stays 0. `transfer` counts all data that crosses the boundary, even if both
    sides are the same device and nothing is copied.
    """

    capturable = False

    def __init__(
        self,
        drafter: Drafter,
        device: torch.device | str,
        target_device: torch.device | str,
        *,
        measure: bool = False,
    ) -> None:
        self.drafter, self.measure = drafter, measure
        self.device, self.target_device = torch.device(device), torch.device(target_device)
        self.kind: str = drafter.kind
        self.needs: FeatureSpec = drafter.needs
        self.weighs_trees: bool = getattr(drafter, "weighs_trees", True)
        self.transfer = Transfer()
        self._tree: tuple[DraftShape, DraftShape] | None = None
        self._proposed: TokenTree | None = None  # the last proposal's tree, on `device`
        self._noise: tuple[Noise, Any, Copies] | None = None
        if isinstance(drafter, nn.Module):
            drafter.to(self.device).eval()

    # The Drafter protocol

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        return self.drafter.start(self._states(seen), self._shape(tree), capacity)

    def propose(self, state: Any, noise: Noise) -> Proposal:
        """The drafter's proposal, copied to the target's device; see the protocol."""
        proposal = self.drafter.propose(state, self._keyed(noise))
        self._proposed = proposal.tree
        assert self._tree is not None
        given, placed = self._tree
        tree = proposal.tree
        if tree is placed:
            assert isinstance(given, TokenTree)
            tree = given
        else:
            parents, depth = self._back(tree.parents), self._back(tree.depth)
            tree = replace(tree, parents=parents, depth=depth, ancestors=self._back(tree.ancestors))
        parts = {name: part for name, part in vars(proposal).items() if isinstance(part, Tensor)}
        return replace(proposal, tree=tree, **{k: self._back(part) for k, part in parts.items()})

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        return self.drafter.commit(state, self._states(accepted))

    def guide(self, state: Any, forced: Tensor) -> None:
        """See `heads.api.drafter.Guided`."""
        guided: Any = self.drafter
        guided.guide(state, self._over(forced))

    def forget(self) -> None:
        """Make the drafter forget other answers, if it keeps any."""
        forget(self.drafter)

    def follow(self, target: TargetModel) -> None:
        """Continue with a target whose weights have changed: copy them again."""
        if isinstance(self.drafter, TrainableDrafter):
            self.drafter.follow(weights_on(target, self.device))

    # Crossing over

    def _states(self, seen: TargetStates) -> TargetStates:
        """The states on the drafter's device: small tensors in one copy, only features it reads."""
        small = [seen.tokens, seen.next_tokens, seen.positions, seen.valid.to(torch.int64)]
        tokens, following, positions, valid = self._over(torch.stack(small)).unbind(0)
        taps = seen.taps if self.needs.taps else None
        hidden = seen.last_hidden if self.needs.last_hidden or self.needs.logits else None
        taps, hidden = (None if part is None else self._over(part) for part in (taps, hidden))
        verified = None if seen.verified is None else self._verification(seen.verified)
        return TargetStates(tokens, following, positions, valid.bool(), taps, hidden, verified)

    def _verification(self, verified: Verified) -> Verified:
        """A verification on the drafter's device; its tree is still there."""
        assert self._proposed is not None
        tokens, picks = self._over(torch.stack([verified.tokens, verified.picks])).unbind(0)
        return Verified(tokens, picks, self._proposed, self._over(verified.path))

    def _shape(self, tree: DraftShape) -> DraftShape:
        """The shape to fill on the drafter's device; remembered, as it rarely changes."""
        if self._tree is None or self._tree[0] is not tree:
            self._tree = tree, tree.to(self.device) if isinstance(tree, TokenTree) else tree
        return self._tree[1]

    def _keyed(self, noise: Noise) -> Any:
        """The same noise on the drafter's device. Only what changed is copied."""
        if isinstance(noise, LedNoise):
            return noise.moved(self._keyed(noise.noise), self._over)
        if self._noise is None or self._noise[0] is not noise:
            twin: Any = copy.copy(noise)
            self._noise = noise, twin, {}
        _, placed, known = self._noise
        if isinstance(noise, RowNoise):
            placed.rows = self._settings(noise.rows, known)
        stream = getattr(noise, "drafts", None)
        if stream is None:  # drafts are ranked without noise: its keys are not read
            return placed
        for name, value in vars(noise).items():
            if isinstance(value, Tensor) and not (name == "roots" and stream is Stream.TARGET):
                setattr(placed, name, self._renewed(name, value, known))
        return placed

    def _settings(self, rows: RowSettings, known: Copies) -> RowSettings:
        """The rows' sampling settings, as they are now, on the drafter's device."""
        placed = copy.copy(rows)
        for name, value in vars(rows).items():
            if isinstance(value, Tensor):
                setattr(placed, name, self._renewed(f"rows.{name}", value, known))
        return placed

    def _renewed(self, name: str, value: Tensor, known: Copies) -> Tensor:
        """The copy of `value` in `known`; it is made anew if `value` has changed since."""
        last = known.get(name)
        if last is None or last[0] is not value or last[1] != value._version:
            last = known[name] = value, value._version, self._over(value)
        return last[2]

    def _over(self, value: Tensor) -> Tensor:
        self.transfer.moves_in += 1
        self.transfer.bytes_in += value.nbytes
        return self._move(value, self.device)

    def _back(self, value: Tensor) -> Tensor:
        self.transfer.moves_out += 1
        self.transfer.bytes_out += value.nbytes
        return self._move(value, self.target_device)

    def _move(self, value: Tensor, device: torch.device) -> Tensor:
        if not self.measure:
            return value.to(device)
        self._synchronise()
        began = time.perf_counter()
        moved = value.to(device)
        self._synchronise()
        self.transfer.seconds += time.perf_counter() - began
        return moved

    def _synchronise(self) -> None:
        for device in (self.device, self.target_device):
            wait_for(device)


def unwrapped(drafter: Any) -> tuple[Any, ...]:
    """The drafters that draft for `drafter`: the parts of a pair, a placed one, or itself."""
    if isinstance(drafter, DrafterPair):
        return tuple(inner for part in drafter.parts for inner in unwrapped(part))
    return unwrapped(drafter.drafter) if isinstance(drafter, PlacedDrafter) else (drafter,)


def weights_on(target: TargetModel, device: torch.device | str) -> TargetWeights:
    """The target's shared weights on another device, for building or loading a drafter there.
    Embedding and LM head are copied, logits are computed there, and other tensors are copied on
    access."""
    device = torch.device(device)
    weights = target.weights
    embedding = weights.embedding.to(device)
    tied = weights.lm_head is weights.embedding
    lm_head = embedding if tied else weights.lm_head.to(device)
    bias = getattr(target.model.get_output_embeddings(), "bias", None)
    bias = None if bias is None else bias.detach().to(device)
    logits = head_function(target.model, lambda states: linear(states, lm_head, bias))
    state = _MovedState(weights.state, device)
    own = weights.rotary, weights.windows, weights.norm_offset
    return TargetWeights(embedding, lm_head, logits, state, *own)


class _MovedState(Mapping[str, Tensor]):
    """Named tensors, each moved to `device` on access."""

    def __init__(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        self._state, self._device = state, device

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)
