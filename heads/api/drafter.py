"""The two contracts of a drafter and the values they exchange.

Decoding (`Drafter`): `start` after prefill, then `propose` and `commit` once per verification. The
decoding loop knows only tokens and parents. Training (`TrainableDrafter`): `loss(batch)`.

A drafter always gets the target's states in the same form, a `TargetStates`: a run of tokens, each
with the target's TRUE states at it and with the token that was committed after it. After prefill
the run is the prompt; after a verification it is the root and the accepted drafts. A drafter never
reads its own approximations of states that the target has since computed.

Legend: B rows, N nodes, T positions, H hidden, V vocabulary, n taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from heads.api.batch import LossOutput, TrainBatch
from heads.api.features import FeatureSpec
from heads.api.starts import OtherKind
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape, TokenTree

FORCED_TOKENS = 32
"""Largest number of tokens that a drafter gets as forced next by a row's grammar."""


@dataclass
class Verified:
    """A whole verification, for drafters that also learn from rejected nodes.

    tokens [B, N] int64: the drafted nodes, root first; picks [B, N] int64: the token the target
    chose after each node (by the match rule, whatever rule decides); tree: their parents; path
    [B, D+1] int64: the committed nodes, root first, of which `TargetStates.lengths` count.
    """

    tokens: Tensor
    picks: Tensor
    tree: TokenTree
    path: Tensor


@dataclass
class TargetStates:
    """A run of committed tokens and the target's states at them, right-padded to T.

    tokens [B, T] int64; next_tokens [B, T] int64, the token committed after each; positions [B, T]
    int64; valid [B, T] bool, False on padding; taps [B, T, n, H] in the order of
    `FeatureSpec.taps`, or None; last_hidden [B, T, H] or None. Valid entries are a prefix of every
    row, and every row has at least one. verified: the verification that committed this run, for
    drafters whose `FeatureSpec.verified` asks for it; None after prefill.
    """

    tokens: Tensor
    next_tokens: Tensor
    positions: Tensor
    valid: Tensor
    taps: Tensor | None = None
    last_hidden: Tensor | None = None
    verified: Verified | None = None

    @property
    def lengths(self) -> Tensor:
        """Valid entries per row [B] int64."""
        return self.valid.sum(1)


def select_states(states: TargetStates, needs: FeatureSpec, all_needs: FeatureSpec) -> TargetStates:
    """`states`, recorded for `all_needs`, as one of several drafters reads them: with its own m of
    the n taps, [B, T, m, H]."""
    taps = None
    if needs.taps:
        assert states.taps is not None
        taps = states.taps
        if needs.taps != all_needs.taps:
            taps = torch.stack([taps[:, :, all_needs.taps.index(tap)] for tap in needs.taps], 2)
    return replace(states, taps=taps, verified=states.verified if needs.verified else None)


@dataclass
class Proposal:
    """Drafted tokens [B, N] with the root first, and their tree.

    logits [B, N, V'] float: row i holds the logits from which the children of node i were drawn
    (rows of leaves are meaningless), for rules that weigh drafts by their probability; None if
    `Noise.keeps_logits` is off or the drafts are certain (n-gram). token_ids [V'] int64: target ids
    of its columns when the draft vocabulary is reduced. confidence [B, N] float32 in [0, 1]: the
    drafter's own estimate that node i is accepted given that its parent was; the root's is
    meaningless. It may depend on the tokens above node i, never on the token of node i itself (see
    `inference.decoding.adaptive.lengths`), unless drafts are certain: then the text alone decides
    the token. None from drafters that have none. limit [B] int64: the deepest level of each row
    that counts; deeper nodes are dead: neither kept nor tested. None: all levels. It may depend on
    the tokens down to that level and on nothing deeper.
    """

    tokens: Tensor
    tree: TokenTree
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    confidence: Tensor | None = None
    limit: Tensor | None = None


class Noise(Protocol):
    """The target's sampling noise, shared with the drafter: keyed by (seed, sequence, absolute
    position, target token id).

    keeps_logits: whether `Proposal.logits` is needed, by rules that accept by probability.
    separate: whether nodes of one depth draw their children independently of each other, for rules
    that test the children of several of them.
    """

    keeps_logits: bool
    separate: bool

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Rank drafted candidates as the target will pick: log softmax(logits / T) + g, or log
        softmax(logits) at T = 0.

        logits [B, M, V'] float, positions [B, M] absolute positions of the tokens being chosen,
        token_ids [V'] the target ids of the columns when the draft vocabulary is reduced. Returns
        float32 [B, M, V'].
        """
        ...

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Column of the best score [B, M] int64: `scores(...).argmax(-1)`, not normalised."""
        ...

    def tempered(self, logits: Tensor) -> Tensor:
        """A difference of logits [B, M, V'] on the scale of `scores`: float32 logits / T, or the
        logits at T = 0."""
        ...


class Drafter(Protocol):
    """The methods that the decode loop calls. A state is a dataclass of tensors with leading size
    B."""

    kind: ClassVar[str]
    needs: FeatureSpec

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        """State after prefill, to fill `tree`; capacity: most positions a row can ever reach."""
        ...

    def propose(self, state: Any, noise: Noise) -> Proposal:
        """Fill the tree behind each row's root (the last of `next_tokens` in the state)."""
        ...

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        """State after a verification: `accepted` holds the root, the accepted drafts and the bonus
        (as the last next token)."""
        ...


class Rememberer(Drafter, Protocol):
    """A drafter that remembers more than a row's state: earlier answers (`heads/suffix.py`)."""

    def forget(self) -> None:
        """Drop everything kept from other answers, which would distort repeated measurements."""
        ...


def remembers(drafter: Any) -> bool:
    """Whether `drafter` may be a `Rememberer`; drafters made of others count as one."""
    return hasattr(drafter, "forget")


def forget(drafter: Any) -> None:
    """Make `drafter` forget, if it is a `Rememberer`; drafters made of others pass the call on."""
    drop = getattr(drafter, "forget", None)
    if drop is not None:
        drop()


class Guided(Drafter, Protocol):
    """A drafter that drafts the tokens that a row's grammar forces (`heads/jump_forward.py`); its
    `FeatureSpec.forced` is set."""

    def guide(self, state: Any, forced: Tensor) -> None:
        """Take over, before every `propose`, the tokens that must follow each row's root: forced
        [B, `FORCED_TOKENS`] int64, -1 after them and in rows without a grammar. In place."""
        ...


class Reader(Drafter, Protocol):
    """A drafter that can check drafted tokens itself: a separate language model (or a part of the
    target), which another drafter may speed up (`heads/cascade.py`)."""

    def root_logits(self, state: Any) -> Tensor:
        """Logits [B, V] of the token after the root."""
        ...

    def read(self, state: Any, tokens: Tensor, offset: Tensor) -> Tensor:
        """Run drafted tokens [B, W] as a chain -> logits [B, W, V] of the token after each.

        Token i of row b stands at position root_position + 1 + offset[b] + i; offset [B] int64. It
        sees the committed tokens, the root, and tokens read before at smaller offsets; reading a
        position again replaces the token there. The state must have been started with a tree deep
        enough for all tokens read (offset + W <= the tree's depth). Nothing read here outlives the
        next `commit`. No host synchronisation.
        """
        ...


class TrainableDrafter(nn.Module):
    """Base of the kinds with weights: sharing with the target, initialisation, training.

    A kind implements the `Drafter` methods and the ones below. Parameters are created unset (NaN),
    so that a weight that is neither initialised nor loaded is noticed.
    """

    kind: ClassVar[str]
    needs: FeatureSpec
    trains: ClassVar[bool] = True
    """False for kinds that hold weights but train none (cascades, through their parts)."""
    label_weight: ClassVar[str] = ""
    """The key of `Config` that weighs the tokens of a batch as labels, besides the target's
    distribution; empty: none does."""
    additions: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names of weights that a kind has only in some of its configurations: a
    training may start from a checkpoint that lacks them, or has others
    (`heads.api.checkpoint.load_start_weights`)."""
    starts_from: ClassVar[Mapping[str, OtherKind]] = {}
    """Other kinds whose checkpoints a training may start from, and how."""
    one_pass: ClassVar[bool] = False
    """Whether one pass gives the distributions of all depths before a token is drafted, so that
    trees may grow from them (`heads.nn.drafting.dartree`, decode.shape=dartree)."""
    weighs_trees: bool = True
    """Whether `Proposal.logits` come with the drafts of a static tree if `Noise.keeps_logits`."""
    runs_target_layers: bool = False
    """Whether the loss runs layers of the target itself. Joint training is then refused, because
    these layers would run without their updates."""
    language_model: ClassVar[bool] = False
    """Whether it is by itself a causal language model that drafts token by token, with its tensors
    under Hugging Face's names for Llama and its sizes in `shape` (see
    `heads.nn.small_lm.model.SmallLM`)."""

    def __init__(self, config: Any, info: TargetInfo) -> None:
        super().__init__()
        self.config = config
        self.info = info
        self._target: TargetWeights | None = None

    @classmethod
    def works_untrained(cls, config: Any) -> bool:
        """Whether it drafts without any training (it consists of the target's own parts)."""
        return False

    @property
    def taught_labels(self) -> str:
        """The key of `Config` by which the loss takes the tokens of a batch as labels, besides
        the target's distribution; empty: none does. With one, on-policy training is refused,
        because the tokens may be the drafter's own."""
        key = self.label_weight
        return key if key and getattr(self.config, key) > 0 else ""

    @classmethod
    def export_method(cls, config: Any) -> str:
        """The method under which serving engines run a drafter of this configuration.

        It is a row of `inference.export.layouts.registry.ROUTES`, by default the kind's own name. A
        kind that shares another one's layout returns that one's name: its tensors and the keys of
        its configuration must be those that the layout's `write` reads.
        """
        return cls.kind

    def bind(self, weights: TargetWeights) -> None:
        """Remember the target's frozen tensors, which are shared. Called before any use."""
        self._target = weights

    @property
    def target(self) -> TargetWeights:
        """The weights given to `bind`."""
        assert self._target is not None, "bind was not called"
        return self._target

    def follow(self, weights: TargetWeights) -> None:
        """Continue with a target whose weights have changed. Everything derived from them without
        training (packed layers, a frozen copy of the LM head) is made again; trained weights stay.
        """
        self.bind(weights)

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Fix a reduced draft vocabulary by token counts [V]; called before `initialise`.

        Kinds that draft from the whole vocabulary ignore it.
        """
        return

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Set every parameter for a fresh training run."""
        raise NotImplementedError(f"{type(self).__name__} must implement initialise")

    def require_start(self, config: Any) -> None:
        """Raise `UserError` if a training cannot start from a drafter of this kind that was trained
        with `config`, although its weights have the shapes of this one's."""
        return

    def loss(self, batch: TrainBatch) -> LossOutput:
        """The training objective on one packed batch: sums and counts, never means of means."""
        raise NotImplementedError(f"{type(self).__name__} must implement loss")

    def forward(self, batch: TrainBatch) -> LossOutput:
        """`loss`, under the name that training engines call."""
        return self.loss(batch)

    def train_logits(self, batch: TrainBatch, depth: int) -> list[Tensor]:
        """Logits [B, T, V'] of depths k = 1..depth as the loss sees them, for the parity check.

        Entry [b, t] of depth k is computed from the target's states up to t and the true tokens up
        to t+k, and predicts token t+k+1. This is what `propose` computes at depth k for a row whose
        last seen position is t.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement train_logits")
