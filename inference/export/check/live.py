"""`headstart verify-export verify.mode=live`: serves an export with vLLM and compares it with the
bundled decoder.

vLLM answers the same prompts with the exported drafter and without one, greedily. Per batch size,
the check asks three questions. Is the text the engine's own plain text, and ours? Is the acceptance
length that of our decoder? If not, from which drafted position on does it differ? An engine that
reads an export wrongly still gives the right text; only acceptance shows the error.

The acceptance length is the engine's: 1 + accepted drafts / drafting steps, where a step counts
what the target accepted even if the answer ends inside the step. Our records cut the last step
where the answer ends, so `count_steps` decodes every answer again without an end and counts the
steps that began before that end. Both programs then count the same steps of the same text.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.audit.comparison import Divergence, Known, audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.engines.settings import LENGTHS, length_at
from inference.export.check.config import LiveConfig
from inference.export.check.verify import find_source
from inference.export.importing import import_folder
from inference.export.layouts.folder import ExportNotes, Folder
from inference.export.quantised import KEY
from inference.integrity import require_unchanged
from inference.measure import vllm_process
from inference.measure.foreign.vllm_worker import ServedMode, ServingMode
from inference.measure.metrics import divide
from inference.measure.prompts import Prompt, select_prompts, to_requests
from inference.measure.vllm_process import EngineProcess
from inference.target.model import TargetModel

PLAIN = "plain"
TOLERANCE = 0.02
"""How far the engine's acceptance length may be from ours, as a share of ours."""
QUANTISED_TOLERANCE = 0.06
"""The same where the engine quantises activations, which our decoder does not."""
CORRECTED = {
    "grouped_rms_norm": "vLLM's CPU kernel of rms_norm gives all layers of DFlash's context keys "
    "layer 0's k_norm; corrected in the engine's process"
}
"""Faults of vLLM that a live check works around."""
_TAPS = (
    "the layers that are tapped (one off?), the order of fc's chunks, a norm per tap (fc_norm), "
    "the shift of the tokens, or the vocabulary map (d2t)"
)
_MODEL = "rotary frequencies, norms, a missing embedding or LM head, or another vocabulary"
_BLOCK = (
    "the layers that are tapped (one off?), the order of fc's chunks, the mask token's embedding, "
    "or causal against bidirectional attention in the block",
    "the embedding of the mask token, the attention within the block, or the positions of its "
    "slots (rope)",
)
CAUSES = {
    "eagle": (
        "the order of embedding and feature in fc, the shift of the tokens, or a norm on the "
        "feature",
        "what a drafted step passes to the next: its output, without another norm, at the next "
        "position (rope)",
    ),
    "eagle3": (
        _TAPS,
        "what a drafted step passes to the next: before or after the final norm (norm_output), and "
        "its position (rope)",
    ),
    "peagle": (
        _TAPS,
        "the embedding of the mask token, mask_hidden, or the positions of the mask tokens (rope)",
    ),
    "mtp": (
        "the order of token and state in input_proj, the shift of the tokens, or a norm on either",
        "what a drafted step passes to the next: after its final norm, at the next position (rope)",
    ),
    "medusa": (
        "which token a head predicts (head i at position t: t+2+i), the LM head, or a bias that "
        "was left out",
        "the order of the heads, or heads whose tensors have names that the engine does not know",
    ),
    "distilled": (_MODEL, "its cache: positions of drafted tokens (rope)"),
    "pard": (_MODEL, "the mask token (pard_token) or the positions of the mask tokens (rope)"),
    **dict.fromkeys(("dflash", "dflash2", "dspark", "domino", "lilicorr"), _BLOCK),
}
"""Method -> likely causes of a different acceptance: from the first drafted token on, or only
later."""
UNKNOWN = ("the layout of its tensors",) * 2


@dataclass(frozen=True)
class Served:
    """An export and the drafter that it was made from.

    kind: its method; folder: what the engine loads, None for a method without a model (ngram);
    speculative: the engine's `speculative_config` without `model`; compared: whether acceptance
    must agree; additional, corrections, overrides: see `ServingMode`; original: of a folder with
    quantised weights, the drafter before it was quantised.
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
    original: Any = None

    @property
    def depth(self) -> int:
        """Most drafted tokens per step."""
        return int(self.speculative["num_speculative_tokens"])

    def depths(self, batch: int) -> tuple[int, int]:
        """Fewest and most drafted tokens per step with up to `batch` requests at once."""
        schedule = self.speculative.get(LENGTHS)
        if schedule is None:
            return self.depth, self.depth
        found = [length_at(schedule, rows) for rows in range(1, batch + 1)]
        return min(found), max(found)

    def mode(self) -> ServingMode:
        """The engine's settings for it."""
        model = {} if self.folder is None else {"model": str(self.folder.resolve())}
        settings = {**model, **self.speculative}
        return ServingMode(self.name, settings, self.additional, self.corrections, self.overrides)


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
    """One program's answers: tokens and accepted tokens per step of every prompt, and its counts.
    tokens_per_second: of the whole pass over the prompts, including prefill."""

    tokens: list[list[int]]
    steps: list[list[int]]
    counts: Counts
    tokens_per_second: float


@dataclass
class LiveRow:
    """An export at one batch size; `problems` is empty if it agrees with our decoder.

    answers: by program, "ours" and "engine"; empty if the engine refuses the export; plain: those
    without a drafter; original: our counts with the drafter before it was quantised.
    """

    name: str
    kind: str
    engine: str
    batch: int
    answers: dict[str, Decoded] = field(default_factory=dict)
    plain: dict[str, Decoded] = field(default_factory=dict)
    lossless: dict[str, int] = field(default_factory=dict)
    divergences: list[Divergence] = field(default_factory=list)
    corrected: tuple[str, ...] = ()
    original: Counts | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def difference(self) -> float:
        """(engine's acceptance length - ours) / ours."""
        ours, theirs = (self.answers[side].counts.length for side in ("ours", "engine"))
        return divide(theirs, ours) - 1.0

    def count_equal(self, what: str) -> int:
        """The number of answers for which both programs gave the same tokens or steps."""
        pairs = zip(*(getattr(side, what) for side in self.answers.values()), strict=True)
        return sum(ours == theirs for ours, theirs in pairs)

    def to_dict(self) -> dict[str, Any]:
        """The values that reports keep: everything except the texts."""
        shared = {"name": self.name, "kind": self.kind, "engine": self.engine, "batch": self.batch}
        if not self.answers:
            return {**shared, "problems": self.problems}
        counts = {side: found.counts for side, found in self.answers.items()}
        rates = {side: found.tokens_per_second for side, found in self.answers.items()}
        plain = {f"{side}_plain": found.tokens_per_second for side, found in self.plain.items()}
        kept = ("identical", "sequences", "near_ties", "mismatches")
        return {
            **shared,
            **{name: self.lossless[name] for name in kept},
            "near_tie_margins": [item.margin for item in self.divergences if item.near_tie],
            "identical_to_ours": self.count_equal("tokens"),
            "answers_with_equal_steps": self.count_equal("steps"),
            **{f"tau_{side}": found.length for side, found in counts.items()},
            **({"tau_unquantised": self.original.length} if self.original else {}),
            "difference": self.difference,
            "steps": {side: found.steps for side, found in counts.items()},
            "positions": {side: found.rates for side, found in counts.items()},
            "tokens_per_second": rates | plain,
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
    """Serve every export (one engine after another, in one process) and compare.

    Returns a row per export and batch size. positions: the number that the engine allocates;
    default: the target's. Raises `UserError` if vLLM cannot be run at all or its plain decoding
    fails. An export that vLLM refuses gives a row with a problem.
    """
    vllm_process.require_folder(target, "a live check")
    if not requests:
        raise UserError(
            "a live check needs prompts: none fits the target's positions with its answer."
        )
    named = [(str(request.index), 0, request) for request in requests]
    modes = [ServingMode(PLAIN), *(export.mode() for export in exports)]
    asked = vllm_process.vllm_request(target, modes, named, requests[:1], batches)
    asked["max_model_len"] = positions or asked["max_model_len"]
    served = vllm_process.serve(process, asked, target.device, "the live check's vLLM")
    by_mode = {(mode.name, mode.batch): mode for mode in served}
    rows, known, counted = list[LiveRow](), Known(), dict[str, Counts]()
    for batch in batches:
        theirs = by_mode[PLAIN, batch]
        if theirs.error:
            raise UserError(
                f"vLLM cannot serve the target '{target.info.id}' by itself: {theirs.error}"
            )
        ours = decode(target, None, requests, 0, batch)
        plain = {"ours": ours, "engine": read_answers(theirs, requests, 0)}
        for export in exports:
            found, (least, depth) = by_mode[export.name, batch], export.depths(batch)
            row = LiveRow(export.name, export.kind, f"vllm {found.version}", batch, plain=plain)
            rows.append(row)
            if found.error:
                row.problems.append(f"the engine refuses it: {found.error}")
                continue
            row.corrected = tuple(found.corrected)
            name = f"{export.name} {depth}"
            counts = counted.get(name)  # They do not depend on the batch.
            ours = decode(target, export.drafter, requests, depth, batch, counts)
            counted[name] = ours.counts
            row.answers = {"ours": ours, "engine": read_answers(found, requests, depth)}
            if export.original is not None:
                row.original = decode(target, export.original, requests, depth, batch).counts
            one = replace(export, compared=export.compared and least == depth)
            judge(row, one, target, requests, known)
            row.problems += unused(found, export, batch)
    return rows


def unused(found: ServedMode, export: Served, batch: int) -> Iterator[str]:
    """Draft lengths per batch size that the engine does not have, or did not draft with."""
    asked = export.speculative.get(LENGTHS)
    if asked is None:
        return
    held = [list(each) for each in found.taken.get(LENGTHS) or ()]
    if held != [list(each) for each in asked]:
        yield f"the engine's configuration says {LENGTHS} {held}, asked for {list(asked)}"
    steps, drafted = found.acceptance.get("drafts", 0), found.acceptance.get("draft_tokens", 0)
    least, most = export.depths(batch)
    if least and not steps:
        yield (
            f"the engine drafted nothing, and {LENGTHS} asks for {least} to {most} tokens per step "
            f"with up to {batch} requests"
        )
    if steps and not max(least, 1) <= drafted / steps <= most:
        yield (
            f"the engine drafted {drafted / steps:.2f} tokens per step, and {LENGTHS} asks for "
            f"{least} to {most} with up to {batch} requests"
        )


def judge(
    row: LiveRow, export: Served, target: TargetModel, requests: Sequence[Request], known: Known
) -> None:
    """Fill in a row's verdict. known: see `audit`."""
    plain, answers = row.plain["engine"].tokens, row.answers["engine"].tokens
    width, settings = export.depth + 1, SamplingSettings()
    found = audit(target, requests, plain, answers, settings, width, known)
    row.lossless, row.divergences = found.counts(), found.divergences
    row.problems += [
        f"prompt {item.prompt}, token {item.place}: with the drafter the engine gives "
        f"{item.found}, without it {item.expected}, which our target prefers by {item.margin:.3g}"
        for item in found.divergences
        if not item.near_tie
    ]
    tolerance = TOLERANCE if export.original is None else QUANTISED_TOLERANCE
    if export.compared and abs(row.difference) > tolerance:
        row.problems.append(describe_difference(row, requests))


def describe_difference(row: LiveRow, requests: Sequence[Request]) -> str:
    """Where acceptance begins to differ, and the likely cause."""
    ours, theirs = row.answers["ours"].counts, row.answers["engine"].counts
    place = first_position(ours.rates, theirs.rates)
    rates = f"ours {ours.rates[place]:.3f}, the engine's {theirs.rates[place]:.3f}"
    return (
        f"acceptance length {theirs.length:.3f} where ours is {ours.length:.3f} "
        f"({row.difference:+.1%}). They part at drafted position {place + 1} ({rates})"
        f"{first_step(row, requests)}. Likely: {CAUSES.get(row.kind, UNKNOWN)[place > 0]}."
    )


def first_position(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """The first drafted position at which acceptance differs by more than the tolerance; if there
    is none, the one that differs most."""
    pairs = zip(ours, theirs, strict=True)
    gaps = [abs(one - other) - TOLERANCE * max(one, 1e-9) for one, other in pairs]
    return next((place for place, gap in enumerate(gaps) if gap > 0), gaps.index(max(gaps)))


def first_step(row: LiveRow, requests: Sequence[Request]) -> str:
    """The first step of an answer in which the programs accept a different number of tokens."""
    steps = (row.answers[side].steps for side in ("ours", "engine"))
    for request, ours, theirs in zip(requests, *steps, strict=True):
        place = 1
        for mine, other in zip(ours, theirs, strict=False):
            if mine != other:
                return (
                    f"; first in prompt {request.index} behind answer token {place} ours took "
                    f"{mine} tokens, the engine {other}"
                )
            place += mine
    return ""


# The two programs


def read_answers(mode: ServedMode, requests: Sequence[Request], depth: int) -> Decoded:
    """vLLM's answers, in the order of the requests."""
    by_id = {answer["id"]: answer for answer in mode.answers}
    answers = [by_id[str(request.index)] for request in requests]
    counted = mode.acceptance
    counts = Counts(
        counted.get("drafts", 0),
        counted.get("draft_tokens", 0),
        counted.get("accepted_tokens", 0),
        [*counted.get("accepted_by_position", []), *[0] * depth][:depth],
    )
    tokens = [answer["tokens"] for answer in answers]
    rate = divide(sum(map(len, tokens)), mode.wall)
    return Decoded(tokens, [answer["steps"] for answer in answers], counts, rate)


def decode(
    target: TargetModel,
    drafter: Any,
    requests: Sequence[Request],
    depth: int,
    batch: int,
    counts: Counts | None = None,
) -> Decoded:
    """Our decoder's answers: greedy, a chain of `depth`. counts: of these answers, if known."""
    settings = DecodeConfig(depth=depth) if depth else DecodeConfig(shape="none", depth=1)
    settings = replace(settings, batch_size=batch)
    engine = Engine(target, drafter, settings)
    list(engine.run(requests[:1]))  # Allocations and thread pools settle.
    begin = time.perf_counter()
    answers = engine.completions(requests)
    seconds = time.perf_counter() - begin
    tokens = [list(answer.tokens) for answer in answers]
    steps = [[item.committed for item in answer.passes] for answer in answers]
    if counts is None:
        wide = replace(settings, batch_size=max(batch, min(8, len(requests))))
        counts = count_steps(target, drafter, answers, depth, wide)
    return Decoded(tokens, steps, counts, divide(sum(map(len, tokens)), seconds))


def count_steps(
    target: TargetModel,
    drafter: Any,
    answers: Sequence[Completion],
    depth: int,
    settings: DecodeConfig,
) -> Counts:
    """The engine's counts, computed with our decoder: steps that began before the answer ended.

    An answer's last step is cut in our records. So every answer is decoded again with more new
    tokens and no token that ends it; up to the answer's end the text is the same.
    """
    accepted: list[int] = []
    if depth:
        endless = copy.copy(target)
        endless.eos_token_ids = ()
        ends = [len(item.tokens) for item in answers]
        longer = [
            replace(item.request, max_new_tokens=end + depth)
            for item, end in zip(answers, ends, strict=True)
        ]
        again = Engine(endless, drafter, settings).completions(longer)
        for end, answer in zip(ends, again, strict=True):
            starts = accumulate((item.committed for item in answer.passes), initial=1)
            pairs = zip(starts, answer.passes, strict=False)
            accepted += [item.accepted for start, item in pairs if start < end]
    by_position = [sum(count > place for count in accepted) for place in range(depth)]
    return Counts(len(accepted), depth * len(accepted), sum(accepted), by_position)


# One folder


def check_folder(
    config: LiveConfig, target: TargetModel, path: Path, prompts: Sequence[Prompt], source: str = ""
) -> list[LiveRow]:
    """Serve an exported folder and compare. source: its checkpoint, if not the one that the folder
    names.

    Raises `UserError` without that checkpoint, for a folder of another engine, and if vLLM cannot
    be run.
    """
    if not config.python:
        raise UserError(
            "a live check serves the folder with vLLM: give the Python of an environment that has "
            "it with verify.live.python=<path>. `make serve-env` makes one "
            "(.venv-serve/bin/python)."
        )
    names = ("verify.live.python", "verify.live.seconds")
    process = EngineProcess(config.python, config.seconds, names)
    served = read_served(path, target, source)
    requests, exports = make_requests(config, prompts, target, served.depth), [served]
    lengths = Folder.read(path).export.decode_settings
    if lengths:
        told = {**served.speculative, **lengths}
        exports.append(replace(served, name=f"{served.name} as tuned", speculative=told))
    return live_check(target, exports, requests, process, config.batches)


def make_requests(
    config: LiveConfig, prompts: Sequence[Prompt], target: TargetModel, depth: int
) -> list[Request]:
    """The prompts of each domain that fit into the target together with their answers and a
    draft."""
    prompts = select_prompts(prompts, config.prompts_per_domain, 0)
    decode = DecodeConfig(max_new_tokens=config.max_new_tokens)
    room = target.info.max_position_embeddings - depth - 1
    return to_requests(prompts, target.tokenizer, decode, capacity=room, overlong="skip")


def require_vllm(path: Path) -> None:
    """Raise `UserError` for a folder that was exported for an engine other than vLLM. Not all of
    them can be read as vLLM's."""
    engine = ExportNotes.read(path).engine
    if engine not in ("vllm", "speculators"):
        raise UserError(
            f"'{path}' is for {engine}; a live check serves with vLLM (export.engine=vllm)."
        )


def read_served(path: Path, target: TargetModel, source: str = "") -> Served:
    """An exported folder with the drafter that it was made from."""
    require_vllm(path)
    folder = Folder.read(path)
    notes = folder.export
    method = notes.speculative_config.get("method")
    if not method:
        raise UserError(
            f"'{path}' does not say how it is served: `headstart export` did not write it. Check "
            "it with verify.mode=static."
        )
    checkpoint, why = find_source(folder, source)
    if checkpoint is None:
        raise UserError(
            f"a live check compares with our own decoder, but {why}. Give verify.source="
            "<checkpoint folder>."
        )
    require_unchanged(checkpoint)
    drafter = load_drafter(checkpoint, target.info, target.weights)
    unpacked = unpack(folder, target) if KEY in folder.config else None
    return Served(
        path.name,
        notes.method,
        unpacked or drafter,
        path,
        notes.speculative_config,
        corrections=("grouped_rms_norm",) if method in ("dflash", "dspark") else (),
        overrides=notes.hf_overrides,
        original=drafter if unpacked else None,
    )


def unpack(folder: Folder, target: TargetModel) -> Any:
    """Our drafter with the dequantised weights of a folder."""
    with TemporaryDirectory() as scratch:
        import_folder(folder, target, Path(scratch) / "plain")
        return load_drafter(Path(scratch) / "plain", target.info, target.weights)


def lines(rows: Sequence[LiveRow]) -> list[str]:
    """The comparison as lines for the user."""
    found = []
    for row in rows:
        name = f"{row.name}, {row.engine}, batch {row.batch}"
        if not row.answers:
            found.append(f"{name}: {'; '.join(row.problems)}")
            continue
        ours, theirs, counts = row.answers["ours"], row.answers["engine"], row.lossless
        speeds = {side: f"{item.tokens_per_second:.0f}" for side, item in row.plain.items()}
        found.append(
            f"{name}: text identical {counts['identical']}/{counts['sequences']} (near ties "
            f"{counts['near_ties']}), acceptance length {theirs.counts.length:.3f}, ours "
            f"{ours.counts.length:.3f} ({row.difference:+.2%}), equal steps in "
            f"{row.count_equal('steps')} answers; tokens/s {theirs.tokens_per_second:.0f} (engine "
            f"without drafter {speeds['engine']}), ours {ours.tokens_per_second:.0f} "
            f"({speeds['ours']})"
        )
        places = (f"{place + 1:5d}" for place in range(len(ours.counts.rates)))
        found.append("  position   " + "  ".join(places))
        for label, side in (("engine", theirs), ("ours  ", ours)):
            found.append(
                f"  {label}     " + "  ".join(f"{rate:5.3f}" for rate in side.counts.rates)
            )
        if row.original:
            found.append(f"  before it was quantised: acceptance length {row.original.length:.3f}")
        found += [f"  note: {CORRECTED[name]}" for name in row.corrected]
        found += [
            f"  near tie: prompt {item.prompt}, token {item.place}, {item.margin:.2g} apart"
            for item in row.divergences
        ]
        found += [f"  PROBLEM: {problem}" for problem in row.problems]
    return found
