"""One pass of the target for several trainings: the answers that a feature server keeps.

Trainings of different heads on the same responses, with the same seed and batch, ask for the same
rows in the same order, each for the features that its head reads. A server that knows all the heads
computes all of these once, and keeps them in memory until newer answers displace them. The other
trainings are answered from memory. A training that is too far behind the others only costs a pass
of its own.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from heads.api.features import FeatureSpec
from train.features.remote.wire import Ask
from train.features.store.batches import Content
from train.features.store.layout import LAST, TOP


class SharedPasses:
    """The answers of a server to several trainings. needs: what all their heads read together;
    room: bytes of answers that are kept.

    answers: number of answers given; passes: how often the target ran for them.
    """

    def __init__(self, needs: FeatureSpec, room: int) -> None:
        self.needs, self.room = needs, room
        self.answers = self.passes = 0
        self._kept: OrderedDict[tuple[bytes, Ask], Content] = OrderedDict()
        self._held = 0
        self._running, self._looking = threading.Lock(), threading.Lock()

    def answer(self, body: bytes, ask: Ask, compute: Callable[[Ask], Content]) -> Content:
        """The features of the rows in `body` that `ask` names: from memory, or computed now, by one
        thread at a time. compute: computes all features that an `Ask` names; if it raises, the
        error is passed on and nothing is kept."""
        whole = self.widened(ask)
        key = hashlib.sha256(body).digest(), whole
        content = self._find(key)
        if content is None:
            with self._running:
                content = self._find(key)  # another training may have asked meanwhile
                if content is None:
                    content = compute(whole)
                    self.passes += 1
                    self._keep(key, content)
        with self._looking:
            self.answers += 1
        return {name: content[name] for name in things(ask)}

    def widened(self, ask: Ask) -> Ask:
        """The features to compute for `ask`: those that all heads read, in the same form."""
        taps = tuple(sorted({*ask.taps, *self.needs.taps}))
        last = ask.last_hidden or self.needs.last_hidden or self.needs.logits
        return replace(ask, taps=taps, last_hidden=last)

    def _find(self, key: tuple[bytes, Ask]) -> Content | None:
        with self._looking:
            content = self._kept.get(key)
            if content is not None:
                self._kept.move_to_end(key)
            return content

    def _keep(self, key: tuple[bytes, Ask], content: Content) -> None:
        """Keep an answer, and drop the oldest until all fit; one that never fits is not kept."""
        size = bytes_of(content)
        if size > self.room:
            return
        with self._looking:
            self._kept[key] = content
            self._held += size
            while self._held > self.room:
                _, oldest = self._kept.popitem(last=False)
                self._held -= bytes_of(oldest)


def things(ask: Ask) -> list[str]:
    """The names of the requested features, as in `Content`."""
    last = [TOP if ask.top_logits else LAST] if ask.last_hidden else []
    return [*(f"tap.{tap}" for tap in ask.taps), *last]


def bytes_of(content: Content) -> int:
    """The memory in bytes of an answer's tensors."""
    return sum(part.nbytes for parts in content.values() for part in parts.values())
