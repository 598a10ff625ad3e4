"""Proves an export by serving it: vLLM answers the same prompts with the exported drafter and without one, greedily.

Three questions, each answered per batch size. Is the text the engine's own plain text, and ours? Is the acceptance length that of
our decoder? At which drafted position does acceptance part, if it does? An engine that reads an export wrongly still gives the
right text; only acceptance tells.

Definition, the engine's: acceptance length = 1 + accepted drafts / drafting steps, where a step counts what the target accepted
even when the answer ends inside it. Our records cut the last step where the answer ends, so `our_counts` decodes every answer a
second time without an end and counts the steps that began before it. Both programs then count the same steps of the same text.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.audit.comparison import Divergence, Known, audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.measure.metrics import divide
from inference.measure.vllm_process import (
    EngineProcess,
    ServedMode,
    ServingMode,
    require_folder,
    serve,
    vllm_request,
)
from inference.target.model import TargetModel

PLAIN = "plain"
TOLERANCE = 0.02
"""How far the engine's acceptance length may be from ours, as a share of ours."""
SAID = ("verify.live.python", "verify.live.seconds")
CORRECTED = {
    "grouped_rms_norm": "vLLM's CPU kernel of rms_norm gives all layers of DFlash's context keys layer 0's k_norm; corrected in "
    "the engine's process"
}
"""Faults of vLLM that a live check works around, in words."""
FIRST_DRAFT = {
    "eagle": "the order of embedding and feature in fc, the shift of the tokens, or a norm on the feature",
    "eagle3": "the layers that are tapped (one off?), the order of fc's chunks, a norm per tap (fc_norm), the shift of the tokens, "
    "or the vocabulary map (d2t)",
    "peagle": "the layers that are tapped (one off?), the order of fc's chunks, a norm per tap (fc_norm), the shift of the tokens, "
    "or the vocabulary map (d2t)",
    "dflash": "the layers that are tapped (one off?), the order of fc's chunks, the mask token's embedding, or causal against "
    "bidirectional attention in the block",
    "mtp": "the order of token and state in input_proj, the shift of the tokens, or a norm on either",
    "medusa": "which token a head predicts (head i at position t: t+2+i), the LM head, or a bias that was left out",
    "distilled": "rotary frequencies, norms, a missing embedding or LM head, or another vocabulary",
    "pard": "rotary frequencies, norms, a missing embedding or LM head, or another vocabulary",
}
"""Kind -> what is likely when the first drafted token already is accepted at another rate."""
LATER_DRAFTS = {
    "eagle": "what a drafted step hands to the next: its output, without another norm, at the next position (rope)",
    "eagle3": "what a drafted step hands to the next: before or behind the final norm (norm_output), and its position (rope)",
    "peagle": "the embedding of the mask token, mask_hidden, or the positions of the mask tokens (rope)",
    "dflash": "the embedding of the mask token, the attention within the block, or the positions of its slots (rope)",
    "mtp": "what a drafted step hands to the next: behind its final norm, at the next position (rope)",
    "medusa": "the order of the heads, or heads whose tensors have names that the engine does not know",
    "distilled": "its cache: positions of drafted tokens (rope)",
    "pard": "the mask token (pard_token) or the positions of the mask tokens (rope)",
}
"""Kind -> what is likely when only later ones are."""


@dataclass(frozen=True)
class Served:
    """An export and our drafter that it was made of. folder: what the engine loads, empty for a method without a model (ngram);
    speculative: the engine's `speculative_config` but for `model`; compared: whether acceptance must agree; corrections, overrides:
    see `ServingMode`.
    """

    name: str
    kind: str
    drafter: Any
    folder: Path | None
    speculative: Mapping[str, Any]
    additional: Mapping[str, Any] = field(default_factory=dict)
    compared: bool = True
    corrections: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Drafted tokens per step."""
        return int(self.speculative["num_speculative_tokens"])

    def mode(self) -> ServingMode:
        """The engine that serves it."""
        where = {} if self.folder is None else {"model": str(self.folder.resolve())}
        return ServingMode(self.name, {**where, **self.speculative}, self.additional, self.corrections, self.overrides)


@dataclass
class Counts:
    """Drafting steps, drafted tokens, accepted ones, and accepted ones by position [K]."""

    steps: int
    drafted: int
    accepted: int
    by_position: list[int]

    @property
    def length(self) -> float:
        """1 + accepted / steps."""
        return 1.0 + divide(self.accepted, self.steps)

    @property
    def rates(self) -> list[float]:
        """Share of steps that accepted position i (unconditional)."""
        return [divide(count, self.steps) for count in self.by_position]


@dataclass(frozen=True)
class Decoded:
    """One program's answers: tokens and accepted tokens per step, prompt by prompt, its counts, and tokens per second of the whole
    pass over the prompts (reading them included).
    """

    tokens: list[list[int]]
    steps: list[list[int]]
    counts: Counts
    tokens_per_second: float


@dataclass
class LiveRow:
    """An export at one batch size; `problems` is empty when it is proved."""

    name: str
    kind: str
    engine: str
    batch: int
    ours: Decoded | None = None
    theirs: Decoded | None = None
    plain_tokens_per_second: dict[str, float] = field(default_factory=dict)
    lossless: dict[str, int] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    same_as_ours: int = 0
    same_steps: int = 0
    corrected: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def difference(self) -> float:
        """(engine's acceptance length - ours) / ours."""
        assert self.ours is not None and self.theirs is not None
        return divide(self.theirs.counts.length, self.ours.counts.length) - 1.0

    def to_dict(self) -> dict[str, Any]:
        """What reports keep of it: no texts."""
        shared = {"name": self.name, "kind": self.kind, "engine": self.engine, "batch": self.batch}
        if self.ours is None or self.theirs is None:
            return {**shared, "problems": self.problems}
        return {
            **shared,
            "identical": self.lossless["identical"],
            **{key: self.lossless[key] for key in ("sequences", "near_ties", "mismatches")},
            "near_tie_margins": [item.margin for item in self.divergences if item.near_tie],
            "identical_to_ours": self.same_as_ours,
            "answers_with_equal_steps": self.same_steps,
            "tau_ours": self.ours.counts.length,
            "tau_engine": self.theirs.counts.length,
            "difference": self.difference,
            "steps": {"ours": self.ours.counts.steps, "engine": self.theirs.counts.steps},
            "positions": {"ours": self.ours.counts.rates, "engine": self.theirs.counts.rates},
            "tokens_per_second": {
                "ours": self.ours.tokens_per_second,
                "engine": self.theirs.tokens_per_second,
                "ours_plain": self.plain_tokens_per_second["ours"],
                "engine_plain": self.plain_tokens_per_second["engine"],
            },
            "corrected": [CORRECTED[name] for name in self.corrected],
            "problems": self.problems,
        }


def live_check(
    target: TargetModel,
    exports: Sequence[Served],
    requests: Sequence[Request],
    process: EngineProcess,
    batches: Sequence[int] = (1, 8),
    positions: int | None = None,
) -> list[LiveRow]:
    """Serve every export (one engine after another in one process) and compare; a row per export and batch size. positions: those
    that the engine makes room for, default the target's.

    Raises `UserError` when vLLM cannot be run at all or its plain decoding fails; an export that it refuses is a row with a
    problem.
    """
    require_folder(target, "a live check")
    if not requests:
        raise UserError("a live check needs prompts: none fits the target's positions with its answer.")
    named = [(str(request.index), 0, request) for request in requests]
    modes = [ServingMode(PLAIN), *(export.mode() for export in exports)]
    asked = vllm_request(target, modes, named, requests[:1], batches)
    asked["max_model_len"] = positions or asked["max_model_len"]
    served = serve(process, asked, target.device, "the live check's vLLM")
    by_mode = {(mode.name, mode.batch): mode for mode in served}
    rows, known, counted = [], Known(), dict[str, Counts]()
    for batch in batches:
        plain = by_mode[PLAIN, batch]
        if plain.error:
            raise UserError(f"vLLM cannot serve the target '{target.info.id}' by itself: {plain.error}")
        ours_plain = decode(target, None, requests, 0, batch)
        for export in exports:
            found = by_mode[export.name, batch]
            row = LiveRow(export.name, export.kind, f"vllm {found.version}", batch)
            rows.append(row)
            if found.error:
                row.problems.append(f"the engine refuses it: {found.error}")
                continue
            row.corrected = found.corrected
            row.theirs = of_engine(found, requests, export.depth)
            row.ours = decode(target, export.drafter, requests, export.depth, batch, counted.get(export.name))
            counted[export.name] = row.ours.counts  # they do not depend on the batch
            theirs_plain = of_engine(plain, requests, 0)
            row.plain_tokens_per_second = {
                "ours": ours_plain.tokens_per_second,
                "engine": theirs_plain.tokens_per_second,
            }
            judge(row, export, target, requests, theirs_plain.tokens, known)
    return rows


def judge(
    row: LiveRow,
    export: Served,
    target: TargetModel,
    requests: Sequence[Request],
    plain: Sequence[Sequence[int]],
    known: Known,
) -> None:
    """Fill a row's verdict. plain: the engine's own answers without a drafter; known: see `audit`."""
    assert row.ours is not None and row.theirs is not None
    found = audit(target, requests, plain, row.theirs.tokens, SamplingSettings(), export.depth + 1, known)
    row.lossless, row.divergences = found.counts(), found.divergences
    row.same_as_ours = sum(one == other for one, other in zip(row.ours.tokens, row.theirs.tokens, strict=True))
    row.same_steps = sum(one == other for one, other in zip(row.ours.steps, row.theirs.steps, strict=True))
    for item in found.divergences:
        if not item.near_tie:
            row.problems.append(
                f"prompt {item.prompt}, token {item.place}: with the drafter the engine gives {item.found}, without it "
                f"{item.expected}, which our target prefers by {item.margin:.3g}"
            )
    if export.compared and abs(row.difference) > TOLERANCE:
        row.problems.append(disagreement(row, requests))


def disagreement(row: LiveRow, requests: Sequence[Request]) -> str:
    """One sentence on where acceptance parts and what is likely behind it."""
    assert row.ours is not None and row.theirs is not None
    place = first_position(row.ours.counts.rates, row.theirs.counts.rates)
    rates = f"ours {row.ours.counts.rates[place]:.3f}, the engine's {row.theirs.counts.rates[place]:.3f}"
    causes = (LATER_DRAFTS if place else FIRST_DRAFT).get(row.kind, "the layout of its tensors")
    lengths = f"acceptance length {row.theirs.counts.length:.3f} where ours is {row.ours.counts.length:.3f}"
    return (
        f"{lengths} ({row.difference:+.1%}). They part at drafted position {place + 1} ({rates}){first_step(row, requests)}. "
        f"Likely: {causes}."
    )


def first_position(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """The first drafted position at which acceptance differs by more than the tolerance; the one that differs most if none does."""
    gaps = [abs(one - other) - TOLERANCE * max(one, 1e-9) for one, other in zip(ours, theirs, strict=True)]
    return next((place for place, gap in enumerate(gaps) if gap > 0), max(range(len(gaps)), key=gaps.__getitem__))


def first_step(row: LiveRow, requests: Sequence[Request]) -> str:
    """The first step of an answer in which the programs accept another number of tokens."""
    assert row.ours is not None and row.theirs is not None
    for request, ours, theirs in zip(requests, row.ours.steps, row.theirs.steps, strict=True):
        place = 1
        for mine, other in zip(ours, theirs, strict=False):
            if mine != other:
                where = f"first in prompt {request.index} behind answer token {place}"
                return f"; {where} ours took {mine} tokens, the engine {other}"
            place += mine
    return ""


# ---- the two programs --------------------------------------------------------------------------------------------------


def of_engine(mode: ServedMode, requests: Sequence[Request], depth: int) -> Decoded:
    """What vLLM gave, in the order of the requests."""
    keys = [(str(request.index), 0) for request in requests]
    counted = mode.acceptance
    counts = Counts(
        counted.get("drafts", 0),
        counted.get("draft_tokens", 0),
        counted.get("accepted_tokens", 0),
        (list(counted.get("accepted_by_position", [])) + [0] * depth)[:depth],
    )
    tokens = [mode.tokens[key] for key in keys]
    return Decoded(tokens, [mode.steps[key] for key in keys], counts, divide(sum(map(len, tokens)), mode.wall))


def decode(
    target: TargetModel, drafter: Any, requests: Sequence[Request], depth: int, batch: int, counts: Counts | None = None
) -> Decoded:
    """The same prompts with our decoder: greedy, a chain of `depth`. counts: those of these answers, where they are known."""
    settings = DecodeConfig(shape="chain" if depth else "none", depth=max(depth, 1), batch_size=batch)
    engine = Engine(target, drafter, settings)
    list(engine.run(requests[:1]))  # allocations and thread pools settle
    begin = time.perf_counter()
    done = {item.request.index: item for item in engine.run(requests)}
    seconds = time.perf_counter() - begin
    answers = [done[request.index] for request in requests]
    tokens = [list(answer.tokens) for answer in answers]
    steps = [[item.committed for item in answer.passes] for answer in answers]
    if counts is None:
        wide = replace(settings, batch_size=max(batch, min(8, len(requests))))
        counts = our_counts(target, drafter, answers, depth, wide) if depth else Counts(0, 0, 0, [])
    return Decoded(tokens, steps, counts, divide(sum(map(len, tokens)), seconds))


def our_counts(
    target: TargetModel, drafter: Any, answers: Sequence[Completion], depth: int, settings: DecodeConfig
) -> Counts:
    """The engine's counts from our decoder: steps that began before the answer ended, with all that they accepted.

    An answer's last step is cut in our records, so that every answer is decoded again with room behind its end and no token that
    ends it; up to there the text is the same.
    """
    endless = copy.copy(target)
    endless.eos_token_ids = ()
    longer = [replace(item.request, max_new_tokens=len(item.tokens) + depth) for item in answers]
    again = {item.request.index: item for item in Engine(endless, drafter, settings).run(longer)}
    counts = Counts(0, 0, 0, [0] * depth)
    for answer in answers:
        there = 1
        for item in again[answer.request.index].passes:
            if there >= len(answer.tokens):
                break
            there += item.committed
            counts.steps += 1
            counts.drafted += depth
            counts.accepted += item.accepted
            for place in range(item.accepted):
                counts.by_position[place] += 1
    return counts
