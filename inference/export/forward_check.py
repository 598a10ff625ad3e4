"""Whether an exported folder, run as its engine would run it, drafts what our drafter drafts; if not, which rule it breaks.

The target writes a few words of its own. At several places of that text our decoding path drafts a chain, and the engine's forward
pass (`engine_forward`) computes its logits for the same chain from the folder alone. They must agree. Where they do not, one rule
after the other is changed (layers, order of chunks, rotary base, vocabulary map, number of the head, recurrence) until they do:
that is what the folder has wrong. Without our checkpoint, the drafts are compared with what the target says next.

Legend: T positions, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_drafter
from heads.api.drafter import TargetStates
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.export import engine_forward
from inference.export.engine_forward import Context, Knobs
from inference.export.layouts.folder import Folder
from inference.export.layouts.llama import read_rope
from inference.manifest import file_sha256
from inference.target.model import TargetModel

TEXTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short function that adds two numbers.",
    "Name three animals that live in the sea and say what each of them eats.",
)
NEW = 24
"""Tokens that the target writes behind each text."""
ALONE = 4
"""So many times as many places where there is no checkpoint to compare with."""
EXACT, ROUNDED = 2e-3, 0.1
"""Largest difference of two logits, as a share of the largest in their row (at least 1): float32 weights, shorter ones."""
_WRITTEN: WeakKeyDictionary[TargetModel, dict[str, Tensor]] = WeakKeyDictionary()
BASES = (10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)


@dataclass(frozen=True)
class Place:
    """One place to draft from: what the target left there, and the tokens it says next itself [K]."""

    context: Context
    following: Tensor


@dataclass
class ForwardReport:
    """compared: logit rows; worst: the largest relative difference, or None without our checkpoint; accepted, ours: drafted tokens
    that the target says itself, by the folder and by our drafter, of `drafted`; faults: what is wrong, in words.
    """

    compared: int = 0
    worst: float | None = None
    accepted: int = 0
    drafted: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@torch.no_grad()
def places(target: TargetModel, count: int, depth: int) -> list[Place]:
    """Up to `count` places in texts that the target wrote itself, greedily."""
    found: list[Place] = []
    layers = target.info.num_layers
    needs = FeatureSpec(tuple(range(layers + 1)), last_hidden=True)
    texts = TEXTS[: max(1, min(count, len(TEXTS)))]
    for text in texts:
        tokens = written(target, text)
        states, last = see(target, tokens, needs)
        assert states is not None
        share = -(-count // len(texts))
        starts = torch.linspace(tokens.shape[1] - NEW, tokens.shape[1] - depth - 2, share).long().unique()
        for start in starts.tolist():
            context = Context(
                tokens[0, : start + 1].cpu(), states[0, :start].transpose(0, 1).cpu(), last[0, :start].cpu(),
                target.weights.embedding.cpu(), target.weights.lm_head.cpu(), head_of(target),
            )  # fmt: skip
            found.append(Place(context, tokens[0, start + 1 : start + 1 + depth].cpu()))
    return found[:count]


def written(target: TargetModel, text: str) -> Tensor:
    """Token ids [1, T] of a question and of the answer that the target gives to it, greedily; kept for the next check."""
    known = _WRITTEN.setdefault(target, {})
    if text not in known:
        tokens = torch.tensor([prompt(target.tokenizer, text)], device=target.device)
        for _ in range(NEW):
            _, last = see(target, tokens, FeatureSpec(last_hidden=True))
            tokens = torch.cat([tokens, target.weights.logits(last[:, -1]).argmax(-1)[:, None]], 1)
        known[text] = tokens
    return known[text]


def prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as a question in the target's chat format, where it has one."""
    if getattr(tokenizer, "chat_template", None):
        said = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(said, add_special_tokens=False)["input_ids"])
    return list(tokenizer(text)["input_ids"])


def see(target: TargetModel, tokens: Tensor, needs: FeatureSpec) -> tuple[Tensor | None, Tensor]:
    """The target's states over tokens [1, T]: taps [1, T, n, H] and the last one [1, T, H]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    taps, last = target.features(tokens, positions, torch.ones_like(tokens, dtype=torch.int32), needs)
    assert last is not None
    return taps, last


def head_of(target: TargetModel) -> Any:
    """The target's LM head, on states [..., H] on the CPU in float32."""

    def logits(states: Tensor) -> Tensor:
        out = target.weights.logits(states.to(target.device, target.dtype))
        return out.float().cpu()

    return logits


class Listener:
    """Noise that lets the best token win and keeps the logits it is asked about, by position."""

    keeps_logits = False

    def __init__(self) -> None:
        self.heard: dict[int, Tensor] = {}

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """log softmax; see `heads.api.drafter.Noise`."""
        for column, position in enumerate(positions[0].tolist()):
            self.heard.setdefault(position, logits[0, column].float().cpu())
        return logits.float().log_softmax(-1)

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The best column."""
        return self.scores(logits, positions, token_ids).argmax(-1)


@torch.no_grad()
def ours(drafter: Any, target: TargetModel, place: Place, depth: int) -> tuple[Tensor, Tensor]:
    """Our drafter's chain [K] at a place and its logits [K, V] along it, by the path that decodes."""
    context, taps = place.context, list(drafter.needs.taps)
    length = context.last.shape[0]
    device = target.device
    seen = TargetStates(
        tokens=context.tokens[None, :length].to(device),
        next_tokens=context.tokens[None, 1:].to(device),
        positions=torch.arange(length, device=device)[None],
        valid=torch.ones(1, length, dtype=torch.bool, device=device),
        taps=context.states[taps].transpose(0, 1)[None].to(device) if taps else None,
        last_hidden=context.last[None].to(device),
    )
    listener = Listener()
    state = drafter.start(seen, TokenTree.chain(depth, device), length + depth + 2)
    proposal = drafter.propose(state, listener)
    rows = torch.stack([listener.heard[length + 1 + step] for step in range(depth)])
    columns = getattr(drafter, "columns", None)
    if columns is not None:
        wide = rows.new_full((depth, context.embedding.shape[0]), float("-inf"))
        wide[:, columns.cpu()] = rows
        rows = wide
    return proposal.tokens[0, 1:].cpu(), rows


def difference(mine: Tensor, theirs: Tensor, candidates: bool) -> float:
    """The largest difference of logits [K, V], as a share of the largest in its row; infinite where other tokens can be drafted.

    candidates: the engine keeps some tokens only (DFlash 2), and is compared on those; ours lets the next ones fade out.
    """
    known = torch.isfinite(theirs)
    if not candidates and not torch.equal(known, torch.isfinite(mine)):
        return float("inf")
    gap = (mine - theirs).masked_fill(~known, 0.0)
    scale = mine.masked_fill(~known, 0.0).abs().amax(-1, keepdim=True).clamp(min=1.0)
    return float((gap.abs() / scale).max())


def hypotheses(folder: Folder, layout: str, base: float) -> Iterator[tuple[str, Knobs]]:
    """What a folder may have wrong, and the deviation that would make up for it. base: the target's own of rotary positions."""
    tensors, config = folder.tensors, engine_forward.flat(folder)
    yield "the layers are one too high: the engine reads the state after one layer too many", Knobs(shift=-1)
    yield "the layers are one too low: the engine reads the state after one layer too few", Knobs(shift=1)
    engine = str(folder.export.get("engine", "vllm"))
    count = len(engine_forward.captured(config, 1_000_000, engine)) if "fc.weight" in tensors else 0
    orders = (
        list(permutations(range(count)))[1:] if count <= 4 else [swap(count, i) for i in range(count - 1)]
    )
    for order in orders:
        named = f"not in ascending order of the layers but as {[i + 1 for i in order]}"
        yield f"the chunks of fc.weight are {named}", Knobs(order=order)
        if "fc_norm.0.weight" in tensors or "input_norm.weight" in tensors:
            yield f"the norms before fc and its chunks are {named}", Knobs(order=order, norms=True)
    if "d2t" in tensors:
        yield "d2t holds token ids instead of offsets", Knobs(ids="absolute")
        yield "d2t holds offsets where none belong", Knobs(ids="zero")
    if layout == "medusa":
        yield "the heads are shifted by one: each predicts the token before its own", Knobs(heads=1)
        yield "the heads are shifted by one: each predicts the token behind its own", Knobs(heads=-1)
    known = {base, *BASES} - {float(read_rope(config)["rope_theta"])} if layout != "medusa" else set()
    for theta in sorted(known):
        yield f"rope_theta is wrong: with {theta:g} the folder agrees", Knobs(theta=theta)
    if "norm.weight" in tensors and layout.endswith("eagle3"):
        yield (
            "norm_output is wrong: the other recurrence agrees",
            Knobs(post_norm=not config.get("norm_output", False)),
        )


def swap(count: int, first: int) -> tuple[int, ...]:
    """The order of `count` chunks with two neighbours exchanged."""
    order = list(range(count))
    order[first], order[first + 1] = order[first + 1], order[first]
    return tuple(order)


@torch.no_grad()
def check_forward(
    folder: Folder, layout: str, target: TargetModel, source: Path | None, count: int
) -> ForwardReport:
    """Compare the folder's forward pass with our checkpoint's, or with the target's own words; name what disagrees."""
    depth = int(folder.export.get("speculative_config", {}).get("num_speculative_tokens", 3))
    found = places(target, count if source is not None else ALONE * count, depth)
    report = ForwardReport()
    drafter = load_drafter(source, target.info, target.weights) if source is not None else None
    try:
        if drafter is None:
            _by_acceptance(folder, layout, found, target.info.rope_theta, report)
        else:
            _by_logits(
                folder,
                layout,
                [(place, *ours(drafter, target, place, depth)) for place in found],
                target.info.rope_theta,
                report,
            )
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        report.faults.append(
            f"forward: the engine's forward pass fails on this folder ({str(error).splitlines()[0]})"
        )
    return report


def _by_logits(
    folder: Folder,
    layout: str,
    drafts: list[tuple[Place, Tensor, Tensor]],
    base: float,
    report: ForwardReport,
) -> None:
    depth = drafts[0][1].shape[0]
    rounded = any(value.dtype in (torch.bfloat16, torch.float16) for value in folder.tensors.values())
    tolerance, candidates = (
        ROUNDED if rounded else EXACT,
        "candidate_selector.predecessor_codebook" in folder.tensors,
    )

    def worst(knobs: Knobs, some: list[tuple[Place, Tensor, Tensor]]) -> float:
        knobs = replace(knobs, blank=False)  # a known difference, told of elsewhere
        return max(
            difference(
                rows, engine_forward.run(folder, layout, place.context, chain, depth, knobs), candidates
            )
            for place, chain, rows in some
        )

    for place, _, rows in drafts:
        report.accepted += accepted(rows.argmax(-1), place.following)
        report.drafted += depth
    report.compared, report.worst = len(drafts) * depth, worst(Knobs(), drafts)
    if report.worst <= tolerance:
        return
    for words, knobs in hypotheses(folder, layout, base):
        try:
            if worst(knobs, drafts[:2]) <= tolerance and worst(knobs, drafts) <= tolerance:
                report.faults.append(f"forward: {words}")
                return
        except (UserError, RuntimeError, IndexError):
            continue
    report.faults.append(
        f"forward: logits differ from the checkpoint's by {report.worst:.3g} of the largest (allowed: {tolerance}), and none of "
        "the usual mistakes explains it: weights were changed"
    )


def _by_acceptance(
    folder: Folder, layout: str, found: list[Place], base: float, report: ForwardReport
) -> None:
    depth = found[0].following.shape[0]

    def right(knobs: Knobs) -> int:
        total = 0
        for place in found:
            chain = place.following
            rows = engine_forward.run(folder, layout, place.context, chain, depth, knobs)
            total += accepted(rows.argmax(-1), place.following)
        return total

    report.accepted, report.drafted = right(Knobs()), len(found) * depth
    best, words = report.accepted, ""
    for reason, knobs in hypotheses(folder, layout, base):
        try:
            count = right(knobs)
        except (UserError, RuntimeError, IndexError):
            continue
        if count > best:
            best, words = count, reason
    if words and best >= 1.5 * report.accepted + 2:
        report.faults.append(
            f"forward: {words} (drafts that the target says itself: {report.accepted} as the folder is, {best} then)"
        )
    elif report.accepted == 0:
        report.faults.append(
            "forward: not one draft is what the target says, and none of the usual mistakes explains it"
        )


def accepted(drafts: Tensor, following: Tensor) -> int:
    """How many drafts [K] in a row are the target's own next tokens [K]."""
    same = (drafts == following).long()
    return int(same.cumprod(0).sum())


def source_of(folder: Folder, given: str) -> tuple[Path | None, str]:
    """The checkpoint that a folder was made of, and why there is none: absent, or changed since."""
    said = folder.export.get("source", {})
    path = Path(given) if given else folder.path / str(said.get("checkpoint", ""))
    if not given and not said:
        return None, "the folder does not say which checkpoint it was made of"
    if not (path / CONFIG_FILE).is_file() or not (path / WEIGHTS_FILE).is_file():
        if given:
            raise UserError(f"verify.source: '{path}' is not a drafter checkpoint.")
        return None, f"the checkpoint '{path}' is not there any more"
    if said.get("sha256") and file_sha256(path / WEIGHTS_FILE) != said["sha256"]:
        return None, f"the weights of '{path}' have changed since the export"
    return path, ""
