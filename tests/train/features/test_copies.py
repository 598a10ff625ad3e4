"""Copies to a GPU have a stream of their own, for which its computations wait, and whose memory is
not reused before they are done. CUDA's streams are stand-ins that write down what is asked of
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.api.features import FeatureSpec
from train.data.loader import PackedBatch
from train.features.store import batches
from train.features.store.batches import Form, decode_batch, encode_batch
from train.features.store.copies import SideStream, copies_to

CPU = torch.device("cpu")
HIDDEN = 8


class Streams:
    """A CUDA device's streams: `events` are (what, on which stream)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.now = "compute"
        owner, to = self, Tensor.to

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name = name if isinstance(name, str) else "side"

            def wait_stream(self, other: Stream) -> None:
                owner.events.append((f"wait for {other.name}", self.name))

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, owner.now = owner.now, stream.name
            yield
            owner.now = before

        def moved(self: Tensor, *given: Any, **more: Any) -> Tensor:
            if given and isinstance(given[0], torch.device):
                assert more == {"non_blocking": True}
                owner.events.append(("copy", owner.now))
                return to(self, *given, **more, copy=True)
            return to(self, *given, **more)

        def kept(self: Tensor, stream: Stream) -> None:
            owner.events.append(("keep", stream.name))

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute"))
        monkeypatch.setattr(Tensor, "to", moved)
        monkeypatch.setattr(Tensor, "record_stream", kept)


def rows() -> PackedBatch:
    tokens, segments = torch.arange(1, 13).view(2, 6), torch.ones(2, 6, dtype=torch.int32)
    segments[1, 4:] = 0
    return PackedBatch.unsupervised(tokens, tokens, segments)


def test_copies_go_to_the_side_and_the_computation_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    parts = {"a": torch.ones(3), "b": torch.arange(2)}
    found = SideStream(CPU)(parts)
    assert found.keys() == parts.keys()
    assert all(torch.equal(found[name], part) for name, part in parts.items())
    side, waits, kept = ("copy", "side"), ("wait for side", "compute"), ("keep", "compute")
    assert streams.events == [side, side, waits, kept, kept]


@pytest.mark.parametrize("top", [0, 4])
def test_a_batch_is_copied_whole_before_it_is_used(
    top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens and everything that is stored of them, then nothing but computations; the numbers
    are those of a batch that is computed where it lies."""
    packed, form = rows(), Form("int8", HIDDEN, 11, top)
    needs, head = FeatureSpec((1, 3), last_hidden=not top, logits=True), torch.randn(11, HIDDEN)
    batch = batches.batch_on(packed, CPU)
    batch.taps, batch.last_hidden = torch.randn(2, 6, 2, HIDDEN), torch.randn(2, 6, HIDDEN)
    content = encode_batch(batch, needs.taps, form, lambda hidden: hidden @ head.T)
    given = needs, form, CPU, torch.float32, lambda hidden: hidden @ head.T
    plain = decode_batch(packed, content, *given)

    streams, side = Streams(monkeypatch), SideStream(CPU)
    monkeypatch.setattr(batches, "copies_to", lambda device: side)
    for name in ("decode", "packed_top"):
        used = getattr(batches, name)

        def noted(*given: Any, used: Any = used) -> Any:
            streams.events.append(("use", streams.now))
            return used(*given)

        monkeypatch.setattr(batches, name, noted)
    found = decode_batch(packed, content, *given)
    first = streams.events.index(("use", "compute"))
    before = streams.events[:first]
    # tokens, positions, segments, mask; values and scales of each state, or values, ids and sum
    copies = 4 + 2 * 2 + (3 if top else 2)
    assert before.count(("copy", "side")) == before.count(("keep", "compute")) == copies
    assert before[-1] == ("keep", "compute") and ("copy", "compute") not in streams.events
    assert [event for event in streams.events[first:] if event[0] != "use"] == []
    waits = [n for n, event in enumerate(before) if event == ("wait for side", "compute")]
    assert waits[-1] > max(n for n, event in enumerate(before) if event[0] == "copy")
    assert plain.taps is not None and found.taps is not None
    assert torch.equal(found.taps, plain.taps)
    assert plain.last_hidden is not None and found.last_hidden is not None
    assert torch.equal(found.last_hidden, plain.last_hidden)
    assert torch.equal(found.tokens, plain.tokens)


def test_only_cuda_devices_have_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    copies_to.cache_clear()
    one = copies_to(torch.device("cuda", 0))
    assert isinstance(one, SideStream) and copies_to(torch.device("cuda", 0)) is one
    assert copies_to(torch.device("cuda", 1)) is not one
    copies_to(CPU)({"a": torch.ones(2)})
    assert streams.events == [("copy", "compute")]
    copies_to.cache_clear()
