"""Features that come from somewhere else: fetched some steps ahead, put together on the trainer's device.

Where from is a `Source`: a store on disk, a feature server, another process of the launch. All of them give the same tensors
(`train.store.batches`), so that a training cannot tell them apart, but for the rounding of the form they were asked for in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from heads.api.batch import TrainBatch
from heads.api.features import FeatureSpec
from train.data.loader import PackedBatch, StepLoader
from train.store.batches import Content, Form, Logits, decode_batch
from train.store.layout import row_digests


class Source(Protocol):
    """Where stored or computed features come from."""

    form: Form

    def ask(self, packed: PackedBatch) -> Callable[[], Content]:
        """Begin to get the features of a batch; what is returned waits for them. Called in the order of use."""
        ...

    def close(self) -> None:
        """Let go of files, connections and threads."""
        ...


class FetchedFeatures:
    """`train.trainer.Features` from a source.

    loader: tells which batches come next; ahead: how many steps are asked for before they are needed (0: none). device, dtype:
    where and as what the drafter is given the features. `wait_seconds` adds up what the training had to wait for them.
    """

    def __init__(
        self,
        source: Source,
        needs: FeatureSpec,
        logits: Logits,
        device: torch.device,
        dtype: torch.dtype,
        loader: StepLoader | None = None,
        ahead: int = 0,
        last_step: int | None = None,
    ) -> None:
        self.source, self.needs, self.logits, self.device, self.dtype = source, needs, logits, device, dtype
        self.loader, self.ahead, self.last_step = loader, ahead, last_step
        self.wait_seconds = 0.0
        self._coming: dict[str, Callable[[], Content]] = {}
        self._asked = -1

    @torch.no_grad()
    def batch(self, packed: PackedBatch, step: int = 0) -> TrainBatch:
        """`packed` on the device with its features; waits for them if need be."""
        self._look_ahead(step)
        wait = self._coming.pop(key_of(packed), None) or self.source.ask(packed)
        begun = time.perf_counter()
        content = wait()
        self.wait_seconds += time.perf_counter() - begun
        return decode_batch(packed, content, self.needs, self.source.form, self.device, self.dtype, self.logits)

    def _look_ahead(self, step: int) -> None:
        """Ask for the batches of this step and of the next `ahead` ones, each once."""
        if self.loader is None or not self.ahead or step < self._asked - self.ahead:
            return
        end = step + self.ahead if self.last_step is None else min(step + self.ahead, self.last_step)
        for index in range(max(step, self._asked + 1), end + 1):
            for packed in self.loader.step(index):
                self._coming[key_of(packed)] = self.source.ask(packed)
            self._asked = index

    def close(self) -> None:
        """Close the source; what was asked for and not used is dropped."""
        self._coming.clear()
        self.source.close()


class ThreadedSource:
    """A source whose `fetch` blocks, run by threads of its own."""

    def __init__(self, fetch: Callable[[PackedBatch], Content], form: Form, threads: int) -> None:
        self.fetch, self.form = fetch, form
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="features")

    def ask(self, packed: PackedBatch) -> Callable[[], Content]:
        """See `Source`."""
        coming: Future[Content] = self._pool.submit(self.fetch, packed)
        return coming.result

    def close(self) -> None:
        """See `Source`."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def key_of(packed: PackedBatch) -> str:
    """What tells batches of one training apart: what the target reads in their rows."""
    return "".join(row_digests(packed))
