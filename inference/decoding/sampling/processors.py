"""Logit bias, repetition penalty and bad words, at every node with the text before it.

A drafted node follows other drafted nodes. A penalty at it applies to the committed text and the
path from the root to it: the text that plain decoding would have there. With the committed text
alone, drafted tokens would escape the penalty, and the answer would depend on the draft.

Meaning and order follow `generate` of transformers 5: bias, then penalty, then bad words.
Everything has fixed shapes, and the constants are on the device beforehand, so that a captured step
can contain it.

Legend: B rows, N nodes, S slots, V vocabulary, W bad words, K length of the longest one less 1, U
different last tokens of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.tree import TokenTree
from inference.decoding.sampling.distribution import SamplingSettings


@dataclass
class Prefix:
    """The text before every node.

    history [B, S] int64, S at least 1: committed tokens; the first `lengths` [B] are before the
    root. tokens [B, N]: the nodes, root first. tree: the draft's tree. A node's text is the history
    and the path from the root to the node, itself included.
    """

    history: Tensor
    lengths: Tensor
    tokens: Tensor
    tree: TokenTree


class Processors:
    """The processors of `settings` for `vocab_size` columns, built once and called in every step.

    active: whether calling does anything. Raises `UserError` for unknown token ids.
    """

    def __init__(
        self, settings: SamplingSettings, vocab_size: int, device: torch.device | str
    ) -> None:
        self.settings, self.active = settings, settings.changes_logits
        _check_ids("logit_bias", [token for token, _ in settings.logit_bias], vocab_size)
        words = [token for word in settings.bad_words for token in word]
        _check_ids("bad_words", words, vocab_size)
        self._bias: Tensor | None = None  # [V] float32, as in transformers
        if settings.logit_bias:
            bias = torch.zeros(vocab_size)
            for token, value in settings.logit_bias:
                bias[token] = value
            self._bias = bias.to(device)
        self._words = _BadWords(settings.bad_words, device) if settings.bad_words else None

    def __call__(self, logits: Tensor, prefix: Prefix | None) -> Tensor:
        """The target's logits [B, N, V] after the processors, at least float32 if any.

        prefix may be None when `settings.uses_prefix` is False.
        """
        if not self.active:
            return logits
        assert prefix is not None or not self.settings.uses_prefix
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._bias is not None:
            logits = logits + self._bias
        if prefix is not None and self.settings.repetition_penalty != 1:
            logits = penalise(logits, self.settings.repetition_penalty, prefix)
        return logits if self._words is None else self._words(logits, prefix)


def process(logits: Tensor, settings: SamplingSettings, prefix: Prefix | None) -> Tensor:
    """Logits [B, N, V] after the processors of `settings`: `Processors` in one call."""
    return _processors(settings, logits.shape[-1], str(logits.device))(logits, prefix)


_processors = lru_cache(maxsize=16)(Processors)


def penalise(logits: Tensor, penalty: float, prefix: Prefix) -> Tensor:
    """Logits [B, N, V] with the repetition penalty: those of tokens in a node's text are divided by
    it if positive and multiplied if negative.

    Keskar et al., 1909.05858, section 4.1, with the sign rule of transformers; a token counts once,
    even if it occurs several times.
    """
    rows, nodes, vocab = logits.shape
    changed = torch.where(logits < 0, logits * penalty, logits / penalty)
    # the root is in every node's text: it replaces slots and nodes that are not part of the text
    root = prefix.tokens[:, :1]
    place = torch.arange(prefix.history.shape[1], device=logits.device)
    committed = torch.where(place < prefix.lengths[:, None], prefix.history, root)
    seen = torch.zeros(rows, vocab, dtype=torch.bool, device=logits.device)
    seen = seen.scatter(1, committed, True)
    penalised = torch.where(seen[:, None], changed, logits)
    # [B, N, N]
    path = torch.where(prefix.tree.ancestors, prefix.tokens[:, None, :], root[:, :, None])
    path = path.expand(rows, nodes, nodes)
    return penalised.scatter(2, path, changed.gather(2, path))  # duplicates write equal values


def last_tokens(prefix: Prefix, count: int) -> Tensor:
    """The last `count` tokens of every node's text [B, N, count] int64; -1 before its beginning."""
    rows, nodes = prefix.tokens.shape
    depth = prefix.tree.depth.expand(rows, nodes)
    parents = prefix.tree.parents.expand(rows, nodes)
    node = torch.arange(nodes, device=prefix.tokens.device).expand(rows, nodes)
    found = []
    for back in range(count):
        slot = prefix.lengths[:, None] + depth - back  # its slot, if it is before the root
        old = prefix.history.gather(1, slot.clamp(0, prefix.history.shape[1] - 1))
        old = torch.where(slot < 0, -1, old)
        found.append(torch.where(back <= depth, prefix.tokens.gather(1, node), old))
        node = parents.gather(1, node)  # the root is its own parent
    return torch.stack(found[::-1], -1) if found else node.new_empty(rows, nodes, 0)


class _BadWords:
    """Forbids the last token of every word whose other tokens are the end of the text."""

    def __init__(self, words: tuple[tuple[int, ...], ...], device: torch.device | str) -> None:
        self.longest = max(len(word) for word in words) - 1
        ends = sorted({word[-1] for word in words})
        starts = [(*[-1] * (self.longest - len(word) + 1), *word[:-1]) for word in words]
        found = torch.tensor(starts, dtype=torch.int64, device=device)
        self.starts = found.view(len(words), self.longest)  # [W, K]
        self.any_token = self.starts < 0  # shorter words do not look that far back
        self.ends = torch.tensor(ends, device=device)  # [U]
        ends_with = [[word[-1] == end for end in ends] for word in words]
        self.ends_with = torch.tensor(ends_with, device=device)  # [W, U]

    def __call__(self, logits: Tensor, prefix: Prefix | None) -> Tensor:
        if prefix is None or self.longest == 0:
            return logits.index_fill(2, self.ends, float("-inf"))
        kept = logits.index_select(2, self.ends)
        text = last_tokens(prefix, self.longest)[:, :, None]
        begun = ((text == self.starts) | self.any_token).all(-1)  # [B, N, W]
        forbidden = (begun[..., None] & self.ends_with).any(2)  # [B, N, U]
        return logits.index_copy(2, self.ends, kept.masked_fill(forbidden, float("-inf")))


def _check_ids(name: str, tokens: list[int], vocab_size: int) -> None:
    """Raise `UserError` for token ids outside the vocabulary."""
    for token in tokens:
        if token >= vocab_size:
            raise UserError(
                f"decode.{name} names token {token}, but the target's vocabulary has {vocab_size} "
                f"tokens: ids go from 0 to {vocab_size - 1}."
            )
