"""Drafting while the target verifies (`decode.ahead`).

While a draft is verified, the drafter assumes an outcome: the whole draft is accepted, and the
bonus is the drafter's own next choice. It drafts from this outcome in a separate thread (with
separate CPU threads on a CPU, a separate stream on CUDA). If the verification ends as assumed, the
next draft is ready; otherwise the drafter's state is restored and it drafts as usual. The idea is
that of PEARL (2408.11850), AMUSD (2410.17375) and speculative speculative decoding (2603.03251);
the last assumes many outcomes, this module assumes one.

The assumed outcome is committed to the drafter with the operations, kernels, shapes and noise of a
real commit. A kept draft is therefore bit for bit the one that would have been made afterwards, and
the verified draft does not depend on whether it was made ahead. So every acceptance rule keeps its
guarantee: `decode.ahead` changes only when drafts are made.

The guess of the bonus is the last token of a chain that is one longer than the verified one, so a
draft after an outcome that was not assumed takes one more step. Under rules that weigh drafts, the
guess is drawn with the noise that the rule will use for the bonus, and is only compared with the
bonus.

Legend: B rows, D drafted tokens that are verified, V' the drafted part of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import Drafter, Proposal, TargetStates, forget
from heads.api.errors import UserError
from heads.api.state import Snapshot
from heads.api.tree import DraftShape, TokenTree
from inference.decoding.clock import StepClock
from inference.decoding.placement import PlacedDrafter
from inference.decoding.sampling.noise import SharedNoise, Stream
from inference.kernels.drafter_attention import drafter_kernel


def require_ahead(drafter: Drafter) -> None:
    """Raise `UserError` for a drafter that cannot draft before its last draft is verified."""
    needs = drafter.needs
    if needs.drafts_from_states:
        what = "drafts from the target's inner states at the newest tokens"
    elif needs.verified:
        what = "learns from every verification"
    elif needs.forced:
        what = "drafts what the grammar forces behind the newest tokens"
    else:
        return
    raise UserError(
        f"decode.ahead=true needs a drafter that drafts from tokens alone, but '{drafter.kind}' "
        f"{what}, which are not there before a verification ends. Such drafters are ngram, suffix, "
        "distilled, pard, and cascades of these. Use one of them, or leave out decode.ahead."
    )


def wanted_room(chain: TokenTree, capacity: int) -> tuple[TokenTree, int]:
    """The chain and capacity to start a drafter with, so that it can draft ahead of `chain` in rows
    of `capacity` positions: the chain with the guess, and room for an assumed run."""
    longer = TokenTree.chain(chain.max_depth + 1, chain.parents.device)
    return longer, capacity + longer.num_nodes


@dataclass
class Foreseen:
    """An assumed outcome to draft from.

    run: the states that the drafter receives if the assumption holds; active [B] bool: the rows for
    which it must hold; noise: the noise of the next draft.
    """

    run: TargetStates
    active: Tensor
    noise: SharedNoise

    def is_true(self, accepted: TargetStates) -> bool:
        """Whether a verification ended as assumed. Waits for its result."""
        run, valid = self.run, self.run.valid
        same = (accepted.next_tokens == run.next_tokens) | ~valid
        alike = same.all(1) & (accepted.valid == valid).all(1)
        return bool((alike | ~self.active).all())


@dataclass
class _Job:
    """A draft under way: the assumption, and the worker's result, which is the state before it, the
    draft and its seconds."""

    foreseen: Foreseen
    future: Future[tuple[Snapshot, Proposal, float]]


class AheadDrafter:
    """A `Drafter` that lets `drafter` draft ahead, for one batch (`Lanes`) at a time.

    chain: the chain that is verified, on `device`, the target's; threads: CPU threads of the
    drafter while it drafts ahead. A step calls `propose`, then `begin` with the outcome that it
    derives from `guess`, then `commit`. `drop` discards the draft under way; a batch calls it when
    its rows change hands.
    """

    capturable = False

    def __init__(
        self,
        drafter: Drafter,
        chain: TokenTree,
        device: torch.device,
        clock: StepClock,
        threads: int,
    ) -> None:
        require_ahead(drafter)
        if isinstance(drafter, PlacedDrafter):
            drafter = copy(drafter)  # counts into the same `transfer`
            drafter.measure = False  # timing copies waits for the verification too
        self.drafter, self.chain, self.device, self.clock = drafter, chain, device, clock
        self.kind: str = drafter.kind
        self.needs = drafter.needs
        self._proposed: Proposal | None = None  # the draft under verification, with the guess
        self._kept: tuple[Proposal, float] | None = None  # a draft that came true, hidden seconds
        self._job: _Job | None = None
        self._started: tuple[tuple[TokenTree, int], int] | None = None
        self._noise: tuple[SharedNoise, SharedNoise] | None = None
        self._worker = ThreadPoolExecutor(1, "drafting-ahead")
        self._streams: tuple[Any, ...] = ()
        own = torch.get_num_threads()
        # The number of threads is the calling thread's, and that of threads which start later.
        self._worker.submit(_use_threads, threads).result()
        torch.set_num_threads(own)

    # The Drafter protocol

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> Any:
        """State after prefill, with room for drafting ahead; see the protocol."""
        self.drop()
        if self._started is None or self._started[1] != capacity:
            self._started = wanted_room(self.chain, capacity), capacity
        return self.drafter.start(seen, *self._started[0])

    def propose(self, state: Any, noise: SharedNoise) -> Proposal:
        """The draft that was made ahead, if its assumption held; otherwise a new one."""
        kept, self._kept = self._kept, None
        tally = self.clock.ahead
        tally.drafts += 1
        if kept is not None and kept[0].tokens.shape[0] == noise.seeds.shape[0]:
            tally.kept += 1
            tally.hidden += kept[1]
            self._proposed = kept[0]
        else:
            self._proposed = self._propose(state, self._keyed(noise, noise.roots))
        return self._cut(self._proposed)

    def commit(self, state: Any, accepted: TargetStates) -> Any:
        """Keep the draft made ahead if its assumption held; otherwise restore the state and commit
        what was accepted."""
        job, self._job = self._job, None
        if job is None:
            return self.drafter.commit(state, accepted)
        began = time.perf_counter()
        before, proposal, seconds = job.future.result()
        waited = time.perf_counter() - began
        if job.foreseen.is_true(accepted):
            self._kept = proposal, max(0.0, seconds - waited)
            return state
        before.restore()
        return self.drafter.commit(state, accepted)

    def forget(self) -> None:
        """Make the drafter forget other answers, if it keeps any."""
        self.drop()
        forget(self.drafter)

    # Drafting ahead

    @property
    def guess(self) -> tuple[Tensor, Tensor]:
        """What the drafter assumes that the verification under way commits: tokens [B, D+1] int64,
        of which the first `length` [B] int64 count, the bonus last."""
        assert self._proposed is not None, "nothing was proposed"
        return self._proposed.tokens[:, 1:], self._assumed(self._proposed) + 1

    def begin(
        self, state: Any, run: TargetStates, active: Tensor, roots: Tensor, noise: SharedNoise
    ) -> None:
        """Draft from the assumed `run` while the caller verifies.

        roots [B] int64: the positions of the roots after `run`; active [B] bool: the rows that are
        decoded. The worker owns `state` until `commit` or `drop`.
        """
        foreseen = Foreseen(run, active, self._keyed(noise, roots))
        work = self._on_own_stream(lambda: self._draft(state, foreseen))
        self._job = _Job(foreseen, self._worker.submit(work))

    def drop(self) -> None:
        """Discard the draft made ahead. If one is under way, wait for it and undo it."""
        self._kept = None
        job, self._job = self._job, None
        if job is not None and job.future.exception() is None:
            job.future.result()[0].restore()

    @torch.no_grad()
    def _draft(self, state: Any, foreseen: Foreseen) -> tuple[Snapshot, Proposal, float]:
        """Commit the assumed run and draft from it. Runs in the worker."""
        began = time.perf_counter()
        before = Snapshot(state)
        with drafter_kernel():  # a block of the thread that verifies does not hold here
            after = self.drafter.commit(state, foreseen.run)
            assert after is state, "a drafter must update its state in place to draft ahead"
            proposal = self._propose(state, foreseen.noise)
        return before, proposal, time.perf_counter() - began

    def _propose(self, state: Any, noise: SharedNoise) -> Proposal:
        """A draft with the guess appended."""
        longer = self.drafter.propose(state, noise)
        assert longer.tree.is_chain, "a drafter that is given a chain drafts one"
        if longer.logits is None or noise.drafts is not Stream.DRAFT:
            return longer
        assert noise.roots is not None
        last = self._assumed(longer)[:, None]
        rows = torch.arange(last.shape[0], device=last.device)[:, None]
        like_bonus = copy(noise)
        like_bonus.drafts = Stream.RESIDUAL
        positions = noise.roots[:, None] + last + 1
        guess = like_bonus.pick(longer.logits[rows, last], positions, longer.token_ids)
        guess = guess if longer.token_ids is None else longer.token_ids[guess]
        return replace(longer, tokens=longer.tokens.scatter(1, last + 1, guess))

    def _assumed(self, longer: Proposal) -> Tensor:
        """How many drafts [B] int64 are assumed to be kept: all that count."""
        whole = torch.full_like(longer.tokens[:, 0], self.chain.max_depth)
        return whole if longer.limit is None else torch.minimum(longer.limit, whole)

    def _on_own_stream(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """`work` on separate CUDA streams: it starts after what the caller has launched, and is
        complete when it returns."""
        devices = {self.device, getattr(self.drafter, "device", self.device)}
        used = [device for device in devices if device.type == "cuda"]
        if not used:
            return work
        if not self._streams:
            self._streams = tuple(torch.cuda.Stream(device) for device in used)
        launched = [torch.cuda.current_stream(device).record_event() for device in used]

        def on_streams() -> Any:
            for stream in self._streams:
                for event in launched:
                    stream.wait_event(event)
            first, *more = self._streams
            with torch.cuda.stream(first), torch.cuda.stream(more[0]) if more else nullcontext():
                found = work()
            for stream in self._streams:
                stream.synchronize()
            return found

        return on_streams

    def _keyed(self, noise: SharedNoise, roots: Tensor | None) -> SharedNoise:
        """`noise` of a pass whose roots are at `roots` [B]."""
        if self._noise is None or self._noise[0] is not noise:
            self._noise = noise, copy(noise)
        keyed = self._noise[1]
        keyed.roots = roots
        return keyed

    def _cut(self, longer: Proposal) -> Proposal:
        """A draft without the guess."""
        nodes, limit = self.chain.num_nodes, longer.limit
        return replace(
            longer,
            tokens=longer.tokens[:, :nodes],
            tree=self.chain,
            logits=None if longer.logits is None else longer.logits[:, :nodes],
            confidence=None if longer.confidence is None else longer.confidence[:, :nodes],
            limit=None if limit is None else limit.clamp(max=self.chain.max_depth),
        )


def _use_threads(count: int) -> None:
    """Give the calling thread `count` CPU threads. A thread takes over the process's number when it
    first asks for it, so it asks before the number is set."""
    torch.get_num_threads()
    torch.set_num_threads(count)
