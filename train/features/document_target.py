"""A target whose states come document by document: rows of packed documents in, features out.

The states are computed by vLLM or SGLang servers, to which every document is a separate request
because engines do not support packed rows; or they were kept when servers generated the responses.
Documents of several rows are requested at once, in no particular order.

Legend: B rows, T positions, n taps, N tokens, L layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.nn.packing import Document, documents
from inference.target.model import TargetModel
from train.features.config import FeaturesConfig
from train.features.last_state import normed
from train.features.sglang import SglangClient
from train.features.vllm.client import VllmClient
from train.features.vllm.responses import ResponseStates
from train.features.workers import Workers

READERS = 8
"""Files that are read at once."""


class DocumentStates(Protocol):
    """A source of documents' states. Threads share it."""

    layers: tuple[int, ...]
    """The layers whose states it has, ascending, including the target's last one; none if it has
    only last hidden states."""

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The states [N, L, H] of a document on the CPU; raises `UserError` if they cannot be
        obtained."""

    def close(self) -> None:
        """Cancel open requests."""


def document_target(
    config: FeaturesConfig,
    answers: Path,
    target: TargetModel,
    needs: FeatureSpec,
    longest: int,
    domains: Sequence[str] = (),
) -> DocumentTarget:
    """The source that `features.mode` or `features.source` names: vllm, sglang or responses.
    answers: the folder of the responses; needs: all features ever needed; longest: tokens of a row;
    domains: those of the responses that are read; empty: all. Raises `UserError` for servers or
    states that do not fit."""
    if "responses" in (config.mode, config.source):
        states = ResponseStates(answers, target, needs, longest, domains)
        return DocumentTarget(states, target, READERS)
    whole = config.trainer_target == "whole"
    kind = SglangClient if "sglang" in (config.mode, config.source) else VllmClient
    client = kind(config, target, needs, longest, whole)
    return DocumentTarget(client, target, config.concurrency * len(config.servers))


class DocumentTarget:
    """A `FeatureTarget`. target: whole or in parts, for the tensors it shares with drafters, its
    final norm and its tokenizer; at_once: documents that are requested at once."""

    def __init__(self, source: DocumentStates, target: TargetModel, at_once: int) -> None:
        self.source, self.target = source, target
        self.info, self.weights = target.info, target.weights
        self.device, self.dtype = target.device, target.dtype
        self._workers: Workers[Tensor] = Workers(at_once, "documents")

    @torch.no_grad()
    def features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `TargetModel.features`; zeros on padding. Raises `UserError` if a document's states
        cannot be obtained."""
        layers = self.source.layers
        if strange := sorted({*needs.taps} - {*layers}):
            raise UserError(
                f"taps {strange} are not among the layers whose states there are: {list(layers)}. "
                "Set features.layers, and start the vLLM servers with them; SGLang has none."
            )
        rows = [layers.index(tap) for tap in needs.taps]
        lying = list(whole_documents(segments, positions))
        asked = [
            self._workers.submit(
                partial(self.source.states, tokens[one.row, one.first : one.end].tolist())
            )
            for one in lying
        ]
        zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
        shape, hidden = tokens.shape, self.info.hidden_size
        taps = zeros((*shape, len(rows), hidden)) if rows else None
        last = zeros((*shape, hidden)) if needs.last_hidden or needs.logits else None
        try:
            for one, coming in zip(lying, asked, strict=True):
                states = coming.result().to(self.device)
                if taps is not None:
                    taps[one.row, one.first : one.end] = states[:, rows]
                if last is not None:
                    found = states[:, -1]
                    last[one.row, one.first : one.end] = (
                        normed(self.target, found) if layers else found
                    )
        finally:
            for coming in asked:
                coming.cancel()
        return taps, last

    def close(self) -> None:
        """Cancel open requests."""
        self._workers.end()
        self.source.close()


def whole_documents(segments: Tensor, positions: Tensor) -> Iterator[Document]:
    """The documents of rows [B, T], without padding; raises `UserError` for one whose positions do
    not count from 0, as vLLM's do."""
    segments, positions = segments.cpu(), positions.cpu()
    for one in documents(segments, positions):
        counted = positions[one.row, one.first : one.end]
        if not segments[one.row, one.first]:
            continue
        if not torch.equal(counted, torch.arange(len(counted), dtype=counted.dtype)):
            raise UserError(
                "engines compute documents from their first token on, but a row holds one whose "
                "positions begin elsewhere. Use features=online or remote."
            )
        yield one
