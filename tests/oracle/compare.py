"""Whether an exported folder, run as its engine would run it, drafts what our drafter drafts.

The target writes a few words of its own. At several places of that text our decoding path drafts a
chain, and the engine's forward pass (`engine_forward`) computes its logits for the same chain from
the folder alone. They must agree.

Legend: T positions, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from heads.api.checkpoint import load_drafter
from heads.api.drafter import TargetStates
from heads.api.features import FeatureSpec
from heads.api.tree import TokenTree
from inference.export.check.verify import find_layout
from inference.export.layouts.folder import Folder
from inference.target.chat import render_prompt
from inference.target.model import TargetModel
from tests.oracle import adapter, engine_forward
from tests.oracle.engine_forward import Context

TEXTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short function that adds two numbers.",
    "Name three animals that live in the sea and say what each of them eats.",
)
NEW = 24
"""Tokens that the target writes after each text."""
_WRITTEN: WeakKeyDictionary[TargetModel, dict[str, Tensor]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Place:
    """A place to draft from: what the target left there, and the tokens it writes next [K]."""

    context: Context
    following: Tensor


@torch.no_grad()
def places(target: TargetModel, count: int, depth: int) -> list[Place]:
    """Up to `count` places in texts that the target wrote itself, greedily."""
    needs = FeatureSpec(tuple(range(target.info.num_layers + 1)), last_hidden=True)
    embedding, lm_head = target.weights.embedding.cpu(), target.weights.lm_head.cpu()
    texts = TEXTS[: max(1, min(count, len(TEXTS)))]
    share, found = -(-count // len(texts)), []
    for text in texts:
        tokens = written(target, text)
        states, last = see(target, tokens, needs)
        assert states is not None
        ends = tokens.shape[1] - NEW, tokens.shape[1] - depth - 2
        for start in torch.linspace(*ends, share).long().unique().tolist():
            context = Context(
                tokens[0, : start + 1].cpu(),
                states[0, :start].transpose(0, 1).cpu(),
                last[0, :start].cpu(),
                embedding,
                lm_head,
                lambda rows: target.weights.logits(rows.to(target.dtype)).float(),
            )
            found.append(Place(context, tokens[0, start + 1 : start + 1 + depth].cpu()))
    return found[:count]


def written(target: TargetModel, text: str) -> Tensor:
    """Token ids [1, T] of a question and the target's greedy answer; kept for the next call."""
    known = _WRITTEN.setdefault(target, {})
    if text not in known:
        prompt = render_prompt(target.tokenizer, [{"role": "user", "content": text}])
        tokens = torch.tensor([prompt])
        for _ in range(NEW):
            _, last = see(target, tokens, FeatureSpec(last_hidden=True))
            tokens = torch.cat([tokens, target.weights.logits(last[:, -1]).argmax(-1)[:, None]], 1)
        known[text] = tokens
    return known[text]


def see(target: TargetModel, tokens: Tensor, needs: FeatureSpec) -> tuple[Tensor | None, Tensor]:
    """The target's states over tokens [1, T]: taps [1, T, n, H] and the last one [1, T, H]."""
    positions = torch.arange(tokens.shape[1])[None]
    taps, last = target.features(tokens, positions, torch.ones_like(tokens).int(), needs)
    assert last is not None
    return taps, last


class Listener:
    """Noise that lets the best token win and keeps the logits it is asked about, by position."""

    keeps_logits = False
    separate = False

    def __init__(self) -> None:
        self.heard: dict[int, Tensor] = {}

    def scores(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """log softmax; see `heads.api.drafter.Noise`."""
        for column, position in enumerate(positions[0].tolist()):
            self.heard.setdefault(position, logits[0, column].float())
        return logits.float().log_softmax(-1)

    def pick(self, logits: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The best column."""
        return self.scores(logits, positions, token_ids).argmax(-1)

    def tempered(self, logits: Tensor) -> Tensor:
        """Logits at temperature 0."""
        return logits.float()


@torch.no_grad()
def ours(drafter: Any, place: Place, depth: int) -> tuple[Tensor, Tensor]:
    """Our drafter's chain [K] at a place and its logits [K, V] along it, by the decoding path."""
    context, taps = place.context, list(drafter.needs.taps)
    length = context.last.shape[0]
    seen = TargetStates(
        tokens=context.tokens[None, :length],
        next_tokens=context.tokens[None, 1:],
        positions=torch.arange(length)[None],
        valid=torch.ones(1, length, dtype=torch.bool),
        taps=context.states[taps].transpose(0, 1)[None] if taps else None,
        last_hidden=context.last[None],
    )
    listener = Listener()
    state = drafter.start(seen, TokenTree.chain(depth, context.last.device), length + depth + 2)
    proposal = drafter.propose(state, listener)
    rows = torch.stack([listener.heard[length + 1 + step] for step in range(depth)])
    columns = getattr(drafter, "columns", None)
    if columns is not None:
        wide = rows.new_full((depth, context.embedding.shape[0]), float("-inf"))
        wide[:, columns] = rows
        rows = wide
    return proposal.tokens[0, 1:], rows


def difference(mine: Tensor, theirs: Tensor, candidates: bool = False) -> float:
    """The largest difference of logits [K, V], as a share of the largest of its row (at least 1).

    Infinite where other tokens can be drafted. candidates: the engine keeps some tokens only
    (DFlash 2, LiLiCorr) and is compared on those; ours lets the next ones fade out.
    """
    known = torch.isfinite(theirs)
    if not candidates and not torch.equal(known, torch.isfinite(mine)):
        return float("inf")
    gap = (mine - theirs).masked_fill(~known, 0.0)
    scale = mine.masked_fill(~known, 0.0).abs().amax(-1, keepdim=True).clamp(min=1.0)
    return float((gap.abs() / scale).max())


def forward_gap(folder: Path, target: TargetModel, checkpoint: Path, count: int = 3) -> float:
    """The largest `difference` between a folder as an engine runs it and our checkpoint."""
    found = Folder.read(folder)
    layout = found.export.layout or find_layout(found)
    depth = int(found.export.speculative_config.get("num_speculative_tokens", 3))
    drafter = load_drafter(checkpoint, target.info, target.weights)
    marks = {"candidate_selector.predecessor_codebook", "lilicorr.rank_embedding"}
    candidates = not marks.isdisjoint(found.tensors)
    gaps = []
    for place in places(target, count, depth):
        chain, rows = ours(drafter, place, depth)
        if layout == "adapter":
            noise = drafter.noise(len(place.context.tokens) + torch.arange(depth - 1))
            theirs = adapter.run(folder, target, place.context.tokens, noise)
        else:
            theirs = engine_forward.run(found, layout, place.context, chain, depth)
        gaps.append(difference(rows, theirs, candidates))
    return max(gaps)
