"""A target that is run by vLLM servers: rows of packed documents in, features out.

Every document is a request of its own, since vLLM knows no packed rows; documents of several rows
are asked for at once, in no particular order.

Legend: B rows, T positions, n taps, N tokens, L layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.nn.packing import Document, documents
from inference.target.model import TargetModel
from train.features.config import FeaturesConfig
from train.features.vllm.client import VllmClient
from train.features.workers import Workers


class VllmTarget:
    """A `FeatureTarget`. target: whole or in parts, for what it shares with drafters, its final
    norm and its tokenizer; needs: all that is ever asked of it; longest: tokens of a row. Raises
    `UserError` for servers that do not fit."""

    def __init__(
        self, config: FeaturesConfig, target: TargetModel, needs: FeatureSpec, longest: int
    ) -> None:
        self.info, self.weights = target.info, target.weights
        self.device, self.dtype = target.device, target.dtype
        whole = config.trainer_target == "whole"
        self.client = VllmClient(config, target, needs, longest, whole)
        at_once = config.concurrency * len(config.servers)
        self._workers: Workers[Tensor] = Workers(at_once, "vllm")

    @torch.no_grad()
    def features(
        self, tokens: Tensor, positions: Tensor, segments: Tensor, needs: FeatureSpec
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `TargetModel.features`; zeros on padding. Raises `UserError` when a document's states
        cannot be had."""
        layers = self.client.layers
        if strange := sorted({*needs.taps} - {*layers}):
            raise UserError(
                f"taps {strange} are not among the layers whose states the vLLM servers leave: "
                f"{list(layers)}. Set features.layers, and start the servers with them."
            )
        rows = [layers.index(tap) for tap in needs.taps]
        lying = list(whole_documents(segments, positions))
        asked = [
            self._workers.submit(
                partial(self.client.states, tokens[one.row, one.first : one.end].tolist())
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
                    last[one.row, one.first : one.end] = self.client.normed(states[:, -1])
        finally:
            for coming in asked:
                coming.cancel()
        return taps, last

    def close(self) -> None:
        """Give up what is under way."""
        self._workers.end()
        self.client.close()


def whole_documents(segments: Tensor, positions: Tensor) -> Iterator[Document]:
    """The documents of rows [B, T], padding aside; raises `UserError` for one whose positions do
    not count from 0, as vLLM's do."""
    segments, positions = segments.cpu(), positions.cpu()
    for one in documents(segments, positions):
        counted = positions[one.row, one.first : one.end]
        if not segments[one.row, one.first]:
            continue
        if not torch.equal(counted, torch.arange(len(counted), dtype=counted.dtype)):
            raise UserError(
                "vLLM computes documents from their first token on, but a row holds one whose "
                "positions begin elsewhere. Use features=online or remote."
            )
        yield one
