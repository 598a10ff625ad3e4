"""Cascades: one drafter that speeds up another, or several drafters in one verification.

`speed_up` (vertical; Cascade Speculative Drafting, 2312.11462; TriForce, 2404.11912): the upper of
two levels drafts a chain, and the lower one drafts for it as the upper one drafts for the target.
`join` (horizontal): the trees of all parts share one root and are verified together, for instance a
neural tree and the result of a lookup.

A part can be of any kind, including a cascade, from a checkpoint or without weights. A cascade is
not trained: its parts are trained separately. Its checkpoint holds all of them.

Legend: B rows, N nodes, W tokens that the upper level reads per round, R rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from heads.api.batch import LossOutput, TrainBatch
from heads.api.config import Depth, NonEmpty, config
from heads.api.drafter import Noise, Proposal, TargetStates, TrainableDrafter, forget, select_states
from heads.api.errors import UserError
from heads.api.features import FeatureSpec, union
from heads.api.one_pass import refuse_dartree
from heads.api.target_info import TargetInfo, TargetWeights
from heads.api.tree import DraftShape, TokenTree, one_path
from heads.nn.cascade.chain import Quiet, draft_chain, fill_tree
from heads.nn.cascade.join import join, split_shape
from heads.nn.cascade.parts import build_part, initialise_part, modules_of
from heads.nn.drafting.plan import LastShape, TreePlan
from heads.nn.drafting.state import last_valid


@config("head")
@dataclass(frozen=True)
class Config:
    """Configuration of a cascade."""

    mode: Literal["speed_up", "join"] = "speed_up"
    """speed_up: the first part drafts for the second one, which drafts for the target. join: all
    parts draft for the target."""
    parts: tuple[Mapping[str, Any], ...] = ()
    """The parts, each as {checkpoint: FOLDER}, or {kind: NAME, ...settings} for a kind that needs
    no training. speed_up: two, the smaller one first. join: two or more; the first one drafts the
    requested shape, the others draft branches beside it."""
    proposed: Depth = 3
    """speed_up: tokens that the lower level proposes per inner round (>= 1)."""
    rounds: Depth = 2
    """speed_up: passes of the upper level per draft (>= 1). The first one drafts 2 to proposed + 2
    tokens, each further one 1 to proposed + 1."""
    branches: NonEmpty[Depth] = (5,)
    """join: number of tokens that each part after the first one drafts (>= 1); the last number
    repeats."""

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or (self.mode == "speed_up" and len(self.parts) != 2):
            raise UserError(
                "head.parts of a cascade must list two parts (head.mode=speed_up: the smaller "
                f"first) or more (head.mode=join); given: {len(self.parts)}. Longer chains are "
                "cascades of cascades."
            )


@dataclass(frozen=True, eq=False)
class Plan:
    """The shape that each part fills. With speed_up, the cascade fills `tree` in at most `rounds`
    rounds; with join, the parts `asked` draft, and no node is left for the others. Shared between
    the rows of a batch."""

    shapes: list[DraftShape]
    asked: tuple[int, ...] = ()
    tree: TreePlan | None = None
    rounds: int = 0
    shared_between_rows: ClassVar[bool] = True


@dataclass
class State:
    """The parts' states; root, root_position [B] int64. drafted, passes [B] int64 (speed_up): live
    tokens drafted since prefill and the upper level's passes for them, from which the savings by
    the lower level can be measured."""

    parts: list[Any]
    root: Tensor
    root_position: Tensor
    drafted: Tensor
    passes: Tensor
    plan: Plan


class Drafter(TrainableDrafter):
    """A cascade of other drafters; see the module."""

    kind: ClassVar[str] = "cascade"
    trains: ClassVar[bool] = False

    def __init__(self, config: Config, info: TargetInfo) -> None:
        parts = [build_part(given, info) for given in config.parts]
        super().__init__(replace(config, parts=tuple(part.described for part in parts)), info)
        self._parts = parts
        self.drafters = [part.drafter for part in parts]
        self.parts = modules_of(parts)
        specs = [drafter.needs for drafter in self.drafters]
        self._check(specs)
        self.needs = union(specs)
        self.weighs_trees = config.mode != "join"
        self._plans: LastShape[Plan] = LastShape()

    def _check(self, specs: list[FeatureSpec]) -> None:
        """Refuse parts that cannot do what this mode asks of them."""
        for number, drafter in enumerate(self.drafters):
            if drafter.needs.verified:
                raise UserError(
                    f"head.parts[{number}] is of kind '{drafter.kind}', which learns from the "
                    "verification of its own tree alone; in a cascade it would be shown another "
                    "one. Use it by itself."
                )
        if self.config.mode == "join":
            return
        lower, upper = self.drafters
        if specs[0].taps or specs[0].last_hidden:
            raise UserError(
                f"head.parts[0], kind '{lower.kind}', reads the target's inner states, which do "
                "not exist for what the level above drafts. The lower level must draft from "
                "tokens alone: ngram, suffix, distilled, pard, or a cascade of those."
            )
        if not (hasattr(upper, "read") and hasattr(upper, "root_logits")):
            raise UserError(
                f"head.parts[1], kind '{upper.kind}', cannot judge tokens that another level "
                "drafted. The upper level must be a language model of its own or a part of the "
                "target: distilled, early_exit, quantized_self."
            )

    @classmethod
    def works_untrained(cls, config: Config) -> bool:
        """A cascade trains nothing of its own."""
        return True

    # Weights

    def bind(self, weights: TargetWeights) -> None:
        """Attach the target's tensors to every part."""
        for part in self._parts:
            if isinstance(part.drafter, TrainableDrafter):
                part.drafter.bind(weights)

    def follow(self, weights: TargetWeights) -> None:
        """Let every part follow."""
        for part in self._parts:
            if isinstance(part.drafter, TrainableDrafter):
                part.drafter.follow(weights)

    def choose_vocabulary(self, counts: Tensor) -> None:
        """Fix the draft vocabularies of the parts that have no checkpoint."""
        for part in self._parts:
            if part.folder is None and isinstance(part.drafter, TrainableDrafter):
                part.drafter.choose_vocabulary(counts)

    def initialise(self, weights: TargetWeights, generator: torch.Generator) -> None:
        """Load the parts' checkpoints, and set the weights of the parts that have none."""
        for part in self._parts:
            initialise_part(part, weights, generator)

    def loss(self, batch: TrainBatch) -> LossOutput:
        """Raises `UserError`: the parts are trained separately."""
        raise UserError(
            "a cascade has nothing of its own to train: train its parts (`headstart train "
            "head=...`) and give their folders as head.parts=[{checkpoint: FOLDER}, ...]."
        )

    # Drafting

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        plan = self._plans.get(tree, lambda: self._new_plan(tree, seen.tokens.device))
        # parts get runs of the whole tree's depth, and the lower level also the tokens that the
        # upper one chose beyond the root
        room = capacity + tree.max_depth + 1
        if plan.tree is not None:
            room += plan.shapes[1].max_depth + self.config.proposed + 2
        states = [
            drafter.start(select_states(seen, drafter.needs, self.needs), shape, room)
            for drafter, shape in zip(self.drafters, plan.shapes, strict=True)
        ]
        _, _, root, position = last_valid(seen)
        counts = torch.zeros_like(root)
        return State(states, root.clone(), position.clone(), counts, counts.clone(), plan)

    def _new_plan(self, shape: DraftShape, device: torch.device) -> Plan:
        if self.config.mode == "join":
            more = len(self.drafters) - 1
            branches = (*self.config.branches, *[self.config.branches[-1]] * more)[:more]
            shapes = split_shape(shape, branches, device)
            asked = tuple(i for i, part in enumerate(shapes) if part.num_nodes > 1)
            # a part that is not asked still needs a shape that its kind can fill
            unasked = TokenTree.chain(1, device)
            return Plan([part if i in asked else unasked for i, part in enumerate(shapes)], asked)
        refuse_dartree(shape)
        shape = one_path(shape, device)
        # every round adds at least one token
        rounds = max(0, min(self.config.rounds, shape.max_depth - 1))
        lower = TokenTree.chain(self.config.proposed, device)
        upper = TokenTree.chain(max(1, rounds * (self.config.proposed + 1)), device)
        return Plan([lower, upper], tree=TreePlan.of(shape), rounds=rounds)

    def propose(self, state: State, noise: Noise) -> Proposal:
        """See the protocol. With speed_up, the upper level's own chain as far as it was drafted."""
        if state.plan.tree is None:
            return self._joined(state, noise)
        plan, (lower, upper) = state.plan.tree, self.drafters
        (below, above), at = state.parts, (state.root, state.root_position)
        keep = noise.keeps_logits or plan.max_rank > 0
        drafted = draft_chain(lower, below, upper, above, *at, state.plan.rounds, noise, keep)
        state.drafted.add_(drafted.live.clamp(max=plan.max_depth))
        state.passes.add_(state.plan.rounds)
        return fill_tree(plan, drafted, state.root_position, noise)

    def _joined(self, state: State, noise: Noise) -> Proposal:
        """The drafts of all parts with a share of the nodes; a single one drafts as if alone."""
        asked = state.plan.asked
        heard = noise if len(asked) == 1 else Quiet(noise)
        return join([self.drafters[i].propose(state.parts[i], heard) for i in asked])

    def guide(self, state: State, forced: Tensor) -> None:
        """Pass forced tokens to the parts that draft them; see `heads.api.drafter.Guided`."""
        for drafter, part in zip(self.drafters, state.parts, strict=True):
            if drafter.needs.forced:
                drafter.guide(part, forced)

    def forget(self) -> None:
        """Make the parts that remember other answers forget them."""
        for drafter in self.drafters:
            forget(drafter)

    def commit(self, state: State, accepted: TargetStates) -> State:
        """Tell every part what was committed; see the protocol."""
        for drafter, part in zip(self.drafters, state.parts, strict=True):
            drafter.commit(part, select_states(accepted, drafter.needs, self.needs))
        _, _, root, position = last_valid(accepted)
        state.root.copy_(root)
        state.root_position.copy_(position)
        return state
