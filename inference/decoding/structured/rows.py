"""The grammars of a batch's rows: their masks on the device, and what they tell a drafter.

A step with a constrained row waits for the host once. The drafted tokens are copied to the host
(`ask`), the host computes the masks of all nodes while the target verifies (`fill`), and the
forbidden tokens are removed from the logits (`forbid`). The masks of rows without a grammar allow
everything. Steps of a batch without a constrained row skip all of this.

Legend: B rows, R rows that are decoded, N nodes, D deepest level, W = ceil(V / 32) words of 32
tokens each, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from heads.api.drafter import FORCED_TOKENS, Proposal
from heads.api.tree import DraftShape
from inference.decoding.rules.accept import children_lists
from inference.decoding.structured.leading import NO_TOKEN, Lead, unpacked
from inference.decoding.structured.matcher import Matcher


class RowGrammars:
    """See the module. forced: int64 [B, `FORCED_TOKENS`], the tokens that a row's grammar forces
    after its root, padded with -1; None if the drafter does not need them. lead: what drafts are
    led by (`leading`); None if the drafter draws no tokens.

    Buffers of masks are allocated with the first constrained request.
    """

    def __init__(self, rows: int, tree: DraftShape, vocab_size: int, device: torch.device) -> None:
        self.tree, self.vocab_size, self.device = tree, vocab_size, device
        self._matchers: list[Matcher | None] = [None] * rows
        self._buffers: _Buffers | None = None
        self.forced: Tensor | None = None
        self.lead: Lead | None = None
        self._leads = False

    def tell(self, forced: bool, leads: bool) -> None:
        """Keep `forced` and `lead` from now on, or not."""
        shape = len(self._matchers), FORCED_TOKENS
        self.forced = torch.full(shape, NO_TOKEN, device=self.device) if forced else None
        self._leads = leads and self.tree.max_depth > 0
        self.lead = None
        if self.active:
            self._allocate()

    @property
    def active(self) -> bool:
        """Whether any row has a grammar."""
        return any(matcher is not None for matcher in self._matchers)

    # Assignment of rows

    def put(self, row: int, matcher: Matcher | None) -> None:
        """Give a row its grammar, or none."""
        before, self._matchers[row] = self._matchers[row], matcher
        if matcher is not None:
            self._allocate()
        if before is not None and matcher is None:
            assert self._buffers is not None
            self._buffers.host[row] = -1
            if self.forced is not None:
                self.forced[row] = NO_TOKEN

    def _allocate(self) -> None:
        rows = len(self._matchers)
        if self._buffers is None:
            self._buffers = _Buffers(rows, self.tree.num_nodes, self._words, self.device)
        if self._leads and self.lead is None:
            self.lead = Lead.empty(rows, self.tree.max_depth, self._words, self.device)

    def move(self, source: int, target: int) -> None:
        """Continue a row's sequence in another row."""
        self.put(target, self._matchers[source])
        self.put(source, None)

    def clear(self) -> None:
        """Remove the grammars of all rows."""
        for row in range(len(self._matchers)):
            self.put(row, None)

    def accept(self, row: int, tokens: list[int]) -> None:
        """Advance a row's grammar past committed tokens."""
        matcher = self._matchers[row]
        if matcher is not None:
            matcher.accept(tokens)

    # Before a step

    def first_masks(self, rows: list[int]) -> Tensor | None:
        """The masks [R, 1, W] of the first tokens of `rows`; None if no row has a grammar."""
        matchers = [self._matchers[row] for row in rows]
        if not any(matchers):
            return None
        words = torch.full((len(rows), 1, self._words), -1, dtype=torch.int32)
        for matcher, own in zip(matchers, words, strict=True):
            if matcher is not None:
                matcher.masks(own, [0], [[]])
        return words.to(self.device)

    def look_ahead(self) -> None:
        """Update `forced` and `lead` with what every row's grammar says of the next tokens."""
        if self.forced is not None and self.active:
            found = []
            for matcher in self._matchers:
                tokens = [] if matcher is None else matcher.forced(FORCED_TOKENS)
                found.append(padded(tokens, FORCED_TOKENS))
            self.forced.copy_(torch.tensor(found))
        if self.lead is not None and self.active:
            size = self.tree.max_depth
            paths, words = [], torch.full(self.lead.words.shape, -1, dtype=torch.int32)
            for own, matcher in zip(words, self._matchers, strict=True):
                path = [] if matcher is None else matcher.path(own)
                paths.append(padded(path, size))
            self.lead.tokens.copy_(torch.tensor(paths))
            self.lead.words.copy_(words)

    # Within a step

    def ask(self, proposal: Proposal) -> None:
        """Start copying a draft of R rows to the host."""
        assert self._buffers is not None
        self._buffers.ask(proposal.tokens, proposal.tree.parents)

    def fill(self) -> None:
        """Wait for the draft, compute its masks and copy them to the device. It runs on the host
        and is not part of a traced step (`inference.decoding.execution.compiled`)."""
        assert self._buffers is not None
        with disable_proxy_modes_tracing():
            tokens, parents = self._buffers.asked()
            for row, matcher in enumerate(self._matchers[: len(tokens)]):
                if matcher is not None:
                    children = children_lists(parents[row])
                    words = self._buffers.host[row, : len(children)]
                    matcher.masks(words, tokens[row], children)
            self._buffers.send(len(tokens))

    def forbid(self, logits: Tensor) -> Tensor:
        """Logits [R, N, V] with -inf at tokens that the masks forbid."""
        assert self._buffers is not None
        rows, nodes, _ = logits.shape
        return forbid(logits, self._buffers.words[:rows, :nodes])

    @property
    def _words(self) -> int:
        return -(-self.vocab_size // 32)


class _Buffers:
    """Buffers for copies between host and device, at fixed addresses. words [B, N, W] int32: the
    masks; host: the same on the host; draft [2, B, N] int64: tokens and parents."""

    def __init__(self, rows: int, nodes: int, words: int, device: torch.device) -> None:
        self.words = torch.full((rows, nodes, words), -1, dtype=torch.int32, device=device)
        self.draft = torch.zeros(2, rows, nodes, dtype=torch.int64, device=device)
        self.host, self._read, self._event = self.words, self.draft, None
        if device.type == "cuda":
            self.host, self._read = (
                torch.full_like(part, -1, device="cpu").pin_memory()
                for part in (self.words, self.draft)
            )
            self._event = torch.cuda.Event()
        self._size = 0, 0

    def ask(self, tokens: Tensor, parents: Tensor) -> None:
        """Start copying tokens [R, N] and parents [1|R, N] to the host."""
        rows, nodes = self._size = tokens.shape[0], tokens.shape[1]
        self.draft[0, :rows, :nodes].copy_(tokens)
        self.draft[1, :rows, :nodes].copy_(parents.expand(rows, -1))
        if self._event is not None:
            self._read.copy_(self.draft, non_blocking=True)
            self._event.record()

    def asked(self) -> list[list[list[int]]]:
        """Wait for the draft's tokens and parents; returns them, [2][R][N]."""
        if self._event is not None:
            self._event.synchronize()
        rows, nodes = self._size
        found: list[list[list[int]]] = self._read[:, :rows, :nodes].tolist()
        return found

    def send(self, rows: int) -> None:
        """Copy the first `rows` masks to the device."""
        if self.host is not self.words:
            self.words[:rows].copy_(self.host[:rows], non_blocking=True)


def padded(tokens: list[int], size: int) -> list[int]:
    """`tokens` with `NO_TOKEN` behind them."""
    return [*tokens, *[NO_TOKEN] * (size - len(tokens))]


def forbid(logits: Tensor, words: Tensor) -> Tensor:
    """Logits [R, N, V] with -inf at tokens without a bit in words [R, N, W] int32."""
    allowed = unpacked(words, None)[..., : logits.shape[-1]]
    return logits.masked_fill(~allowed, float("-inf"))
