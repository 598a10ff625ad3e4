"""How to decode: sampling, acceptance, the draft's shape, the batch, how steps are run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le

from heads.api.config import (
    Depth,
    Fraction,
    Layers,
    LongSeed,
    PositiveFloat,
    Rank,
    Rows,
    Tokens,
    Weight,
    config,
    require_one_of,
)
from heads.api.errors import UserError
from heads.api.tree import DartreeShape, DraftShape, DynamicShape, TokenTree
from inference.decoding.adaptive.lengths import DEFAULT_THRESHOLDS, AdaptiveSettings
from inference.decoding.rules.names import AUTO, RULES, best_rule
from inference.decoding.rules.registry import check_shape
from inference.decoding.sampling.distribution import SamplingSettings

Shape = Literal["none", "chain", "tree", "dynamic", "dartree"]


@config("decode")
@dataclass(frozen=True)
class DecodeConfig(SamplingSettings):
    """How to decode: the target's sampling (inherited), the draft's shape, the batch."""

    rule: str = "match"
    """Acceptance rule: match (accept the target's own pick; same text with any drafter), rejection
    and block (chains), specinfer and traversal (chains and trees), typical (changes the text's
    distribution), or auto: match at temperature 0, and above it the rule that accepts the most
    drafts of the shape and keeps the text's distribution."""
    typical_epsilon: Fraction = 0.09
    """Rule typical: always accept a draft that is at least this likely."""
    typical_delta: Fraction = 0.3
    """Rule typical: accept a draft that is more likely than this times exp(-entropy)."""
    shape: Shape = "chain"
    """none (plain decoding), chain, tree (from `choices`), dynamic (new at every step), or dartree
    (new at every step, grown from the distributions of one drafting pass: DARTree)."""
    depth: Depth = 4
    """Drafted tokens of a chain; the deepest level of a dynamic tree or a dartree."""
    choices: tuple[tuple[Rank, ...], ...] = ()
    """Paths of a static tree, as sibling ranks: [[0], [1], [0, 0]]."""
    nodes: Rows = 17
    """Nodes of a dynamic tree or a dartree, including the root."""
    width: Rows = 8
    """Dynamic trees: nodes expanded per level, and children considered per node. Dartrees: nodes
    kept per level while the tree grows; with `nodes` - 1 or more, the tree is the best of its
    candidates."""
    candidates: Rows = 64
    """Dartrees: number of most likely tokens considered at each depth."""
    depth_penalty: Weight = 0.2
    """Dartrees: nats subtracted from a node's score for every level when the `nodes` to verify are
    chosen. 0 trusts the drafter's probabilities; larger values make the tree wider and
    shallower."""
    batch_size: Rows = 1
    """Rows decoded together; finished rows are refilled."""
    max_new_tokens: Tokens = 128
    """Maximum number of new tokens per answer, including the end-of-text token."""
    share_noise: bool = True
    """Rule match above temperature 0: rank drafts with shared Gumbel noise. Turn it off to
    compare."""
    seed: LongSeed = 0
    """Base of the per-prompt seeds."""
    prefill_chunk: Tokens = 2048
    """Prompt tokens read in one pass; longer prompts are read in several."""
    lag: Annotated[int, Ge(-1), Le(8)] = -1
    """Steps in flight before the host reads the result of one (0 to 8); -1: 2 on CUDA, else 0.
    Lossless."""
    graph: Literal["auto", "off"] = "auto"
    """auto: capture a step as a CUDA graph if there is CUDA; off: launch every operation."""
    adaptive: Literal["none", "entropy", "confidence", "throughput"] = "none"
    """Stop a chain early, row by row: entropy (the square root of the entropy of a draft's
    distribution exceeds the threshold; SVIP), confidence (the estimated probability that a draft is
    reached and accepted falls below the threshold), throughput (most expected tokens per second of
    the batch), or none. Never changes the text under match, nor its distribution under rejection
    and block."""
    adaptive_threshold: Annotated[float, Ge(-1), Le(1e6)] = -1.0
    """entropy: above 0, lower stops earlier; confidence: 0 to 1, higher stops earlier. -1: 2.0 for
    entropy and 0.3 for confidence, which gave a gain on the embedded target; measure for other
    drafters, above all with entropy."""
    adaptive_head: str = ""
    """File of a trained acceptance head (scripts/tools/fit_acceptance.py); empty: the drafter's own
    confidence, or its largest probability if it has none."""
    adaptive_lengths: tuple[Layers, ...] = ()
    """Draft lengths from which past acceptance and cost choose that of the next step, ascending up
    to `depth`; with length 0 a step drafts nothing. Empty: always `depth`."""
    adaptive_costs: tuple[PositiveFloat, ...] = ()
    """Cost of passes over 1, 2, ... depth + 1 nodes per row, in any unit; empty: measured."""
    ahead: bool = False
    """Draft while the target verifies (inference/decoding/ahead.py): the next draft assumes the
    likeliest outcome, and is used if that outcome comes true. Same drafts, same text. For chains
    and drafters that draft from tokens alone; not with `adaptive` or `compile`."""
    ahead_threads: Rows = 1
    """CPU threads of the drafter while it drafts ahead; those of the target do not change."""
    compile: bool | Literal["auto"] = "auto"
    """Compile all passes: this takes tens of seconds once and makes later steps faster. On a CPU,
    the compiled code is kept for later runs. auto: only measurements on a CPU that are long enough
    to gain from it (inference/decoding/execution/worth.py); set true for everything else."""
    exact: bool = False
    """Compute every token in shapes that do not depend on other tokens: plain and drafted text are
    the same in bfloat16 too, for any draft and batch (inference/target/exact.py). Slower. Not with
    `compile`, experts, recurrent layers or quantised weights."""
    structure: str = ""
    """Constraint that every answer follows: json (any JSON object), or a file with a JSON schema
    (.json), a regular expression (.regex) or a grammar (.ebnf). Empty: free text. Needs
    xgrammar."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("decode.rule", self.rule, (*RULES, AUTO))
        if self.shape == "tree" and not self.choices:
            raise UserError(
                "decode.shape is 'tree' but decode.choices is empty: give paths such as "
                "[[0],[1],[0,0]]."
            )
        if self.exact and self.compiles:
            raise UserError(
                "decode.exact and decode.compile do not go together: a compiler chooses the order "
                "of sums anew for every shape. Leave out one of them."
            )
        if self.ahead:
            self._check_ahead()
        check_shape(self.acceptance, self.tree())
        self.adaptive_settings().check(self.shape, self.depth, self.acceptance)
        if self.adaptive_costs and len(self.adaptive_costs) != self.depth + 1:
            raise UserError(
                f"decode.adaptive_costs must be {self.depth + 1} numbers above 0, one for each "
                f"number of nodes up to decode.depth + 1; given: {list(self.adaptive_costs)}."
            )

    def _check_ahead(self) -> None:
        """Raise `UserError` for settings that do not go with drafting ahead."""
        if self.shape != "chain" or self.adaptive_settings().active:
            given = f"adaptive={self.adaptive}"
            if self.shape != "chain":
                given = f"shape={self.shape}"
            elif self.adaptive_lengths:
                given = f"adaptive_lengths={list(self.adaptive_lengths)}"
            raise UserError(
                "decode.ahead=true drafts chains of one length ahead: it needs decode.shape=chain, "
                "decode.adaptive=none and no decode.adaptive_lengths; given: "
                f"decode.{given}. Change that, or leave out decode.ahead."
            )
        if self.compiles:
            raise UserError(
                "decode.ahead and decode.compile do not go together: a compiled step is one "
                "sequence of operations, with nothing beside it. Leave out one of them."
            )

    @property
    def compiles(self) -> bool:
        """Whether passes are compiled; auto must be resolved before."""
        return self.compile is True

    @property
    def acceptance(self) -> str:
        """The rule that is used: `rule`, or what auto resolves to."""
        return best_rule(self.shape, self.temperature) if self.rule == AUTO else self.rule

    def for_drafter(self, drafter: Any) -> DecodeConfig:
        """These settings, where auto is `match` for a drafter whose static trees have no
        probabilities: other rules take such drafts as certain, and accept fewer."""
        if (
            self.rule == AUTO
            and self.shape == "tree"
            and not getattr(drafter, "weighs_trees", True)
        ):
            return replace(self, rule="match")
        return self

    def without_draft(self) -> DecodeConfig:
        """These settings for plain decoding: no draft, and nothing that would adapt one."""
        bare = replace(self, ahead=False, adaptive="none", adaptive_head="", adaptive_lengths=())
        return replace(bare, shape="none")

    def adaptive_settings(self) -> AdaptiveSettings:
        """The settings of adaptive length."""
        threshold = self.adaptive_threshold
        if threshold == -1.0:
            threshold = DEFAULT_THRESHOLDS.get(self.adaptive, 0.0)
        return AdaptiveSettings(self.adaptive, threshold, self.adaptive_lengths, self.adaptive_head)

    def sampling(self) -> SamplingSettings:
        """The target's sampling settings, which carry the same names."""
        names = [item.name for item in fields(SamplingSettings)]
        return SamplingSettings(**{name: getattr(self, name) for name in names})

    def tree(self, device: torch.device | str = "cpu") -> DraftShape:
        """The shape that drafters fill."""
        if self.shape == "dynamic":
            return DynamicShape(self.nodes, self.depth, self.width)
        if self.shape == "dartree":
            own = self.width, self.candidates, self.depth_penalty
            return DartreeShape(self.nodes, self.depth, *own)
        if self.shape == "tree":
            return TokenTree.from_choices(self.choices, device)
        return TokenTree.chain(0 if self.shape == "none" else self.depth, device)

    def steps_behind(self, device: torch.device) -> int:
        """Steps the host may be behind the device."""
        if self.lag >= 0:
            return self.lag
        return 2 if device.type == "cuda" else 0
