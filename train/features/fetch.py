"""Features from elsewhere: fetched some steps ahead and assembled on the trainer's device.

All sources (a store on disk, feature servers, other processes of the launch) return the same
tensors (`train.features.store.batches`), except for the rounding of the requested form.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from heads.api.batch import TrainBatch
from heads.api.features import FeatureSpec
from train.data.loader import PackedBatch, StepLoader
from train.features.store.batches import Content, Form, Logits, decode_batch
from train.features.store.layout import row_digests
from train.features.workers import Workers

CLOSE_SECONDS = 2.0
SLICE_SECONDS = 0.2
"""Seconds of waiting between two checks whether to stop."""


class Coming(Protocol):
    """Requested features."""

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; returns whether they have arrived or failed."""

    def result(self) -> Content:
        """The features; waits for them, and raises `UserError` if they cannot be fetched."""


class Source(Protocol):
    """Where stored or computed features come from."""

    form: Form

    def ask(self, packed: PackedBatch) -> Coming:
        """Start to fetch the features of a batch. Called in the order of use."""

    def close(self) -> None:
        """Close files, connections and threads."""


@dataclass
class FetchedFeatures:
    """`Features` from a source. loader: gives the next batches; ahead: how many steps early they
    are requested; device, dtype: of the features for the drafter. `wait_seconds` is the total time
    spent waiting."""

    source: Source
    needs: FeatureSpec
    logits: Logits
    device: torch.device
    dtype: torch.dtype
    loader: StepLoader
    ahead: int
    last_step: int
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._coming: dict[str, Coming] = {}
        self._asked = -1

    def arrived(self, batches: list[PackedBatch], step: int, stopping: Callable[[], bool]) -> bool:
        """Wait for a step's features or their failure; returns False if `stopping` is true
        first."""
        self._look_ahead(step)
        begun = time.perf_counter()
        try:
            for packed in batches:
                key = key_of(packed)
                coming = self._coming[key] = self._coming.get(key) or self.source.ask(packed)
                while not coming.wait(SLICE_SECONDS):
                    if stopping():
                        return False
        finally:
            self.wait_seconds += time.perf_counter() - begun
        return True

    @torch.no_grad()
    def batch(self, packed: PackedBatch, step: int = 0) -> TrainBatch:
        """`packed` on the device with its features; waits for them if necessary."""
        self._look_ahead(step)
        coming = self._coming.pop(key_of(packed), None) or self.source.ask(packed)
        begun = time.perf_counter()
        content = coming.result()
        self.wait_seconds += time.perf_counter() - begun
        return decode_batch(
            packed, content, self.needs, self.source.form, self.device, self.dtype, self.logits
        )

    def _look_ahead(self, step: int) -> None:
        """Request the batches of this step and of the next `ahead` ones, each once."""
        if not self.ahead or step < self._asked - self.ahead:
            return
        end = min(step + self.ahead, self.last_step)
        for index in range(max(step, self._asked + 1), end + 1):
            for packed in self.loader.step(index):
                key = key_of(packed)
                if key not in self._coming:  # the same rows again, around the end of an epoch
                    self._coming[key] = self.source.ask(packed)
            self._asked = index

    def close(self) -> None:
        self._coming.clear()
        self.source.close()


class ThreadedSource:
    """A source whose `fetch` blocks and runs in separate threads. stop: makes a waiting `fetch`
    give up; called once. pinned: the threads put fetched features into pinned memory, from which a
    GPU copies while it computes."""

    def __init__(
        self,
        fetch: Callable[[PackedBatch], Content],
        form: Form,
        threads: int,
        stop: Callable[[], None],
        pinned: bool,
    ) -> None:
        self.fetch, self.form, self.stop, self.pinned = fetch, form, stop, pinned
        self._workers: Workers[Content] = Workers(threads, "features")

    def ask(self, packed: PackedBatch) -> Coming:
        return self._workers.submit(partial(self._work, packed))

    def _work(self, packed: PackedBatch) -> Content:
        content = self.fetch(packed)
        return pin(content) if self.pinned else content

    def close(self) -> None:
        """See `Source`. Waits for threads that compute, but not for those that wait for others."""
        self._workers.end()
        self.stop()
        self._workers.join(CLOSE_SECONDS)


def pin(content: Content) -> Content:
    """The same in pinned memory."""
    return {
        thing: {name: part.pin_memory() for name, part in parts.items()}
        for thing, parts in content.items()
    }


def key_of(packed: PackedBatch) -> str:
    """A key that identifies a batch within a training: the target's input in its rows."""
    return "".join(row_digests(packed))
