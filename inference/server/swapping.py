"""Changing the drafter of a running server, and trying a candidate in a trial.

    service.swaps.install(Path("outputs/new/train/eagle3/best"))
    service.swaps.start_trial(candidate, share=0.5)
    state = service.swaps.trial()          # sums and observations of both, at any time
    service.swaps.end_trial(keep=True)

No request is dropped. Under rule match, and at temperature 0, no token changes; above temperature
0, rules that weigh drafts keep the target's distribution. The drafter is loaded on the caller's
thread; the worker checks and installs it between two steps.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from heads.api.kinds import kind_names
from inference.decoding.draft_file import DRAFT_KEYS
from inference.decoding.engine import Engine
from inference.decoding.loading import checkpoint_folder, load_drafter
from inference.decoding.pair import DrafterPair
from inference.decoding.placement import PlacedDrafter
from inference.decoding.requests import Completion, Request
from inference.decoding.session import Session
from inference.server.scheduler import Scheduler, Work
from inference.server.swap_metrics import SwapMetrics
from inference.server.trial import TrialCounts, TrialState, drafts_with_candidate
from inference.staleness.reference import passes_within

logger = logging.getLogger(__name__)
CHECKED_TOKENS = 8
"""Tokens of the prompt, and of the answer, that a new drafter is checked with."""


class DrafterSwaps:
    """The drafters of one server. All methods may be called from any thread; changes run one at a
    time."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, name: str, metrics: SwapMetrics
    ) -> None:
        """name: of the engine's drafter."""
        self.engine, self.scheduler, self.metrics = engine, scheduler, metrics
        self._current, self._candidate = name, ""
        self._turn = threading.Lock()
        scheduler.step_failed = self._step_failed
        metrics.shows(name)

    def install(self, checkpoint: Path | str) -> None:
        """Draft with `checkpoint` (a folder, or a kind without weights) from now on, also in
        requests under way.

        Raises `UserError` and keeps the current drafter if the new one cannot be installed: files
        that are missing, damaged or not finite; another target, vocabulary or revision; a drafter
        that fails to draft a short text or does not fit into memory; a running trial.
        """

        def change(session: Session, drafter: Any, name: str) -> list[Completion]:
            ended = session.change_drafter(drafter)
            self._current = name
            return ended

        with self._turn:
            name = self._take(checkpoint, change)
            self.metrics.swaps.labels("installed").inc()
            self.metrics.shows(name)
            logger.info("the drafter is '%s' now", name)

    def start_trial(self, checkpoint: Path | str, share: float = 0.5) -> None:
        """Let `share` (0 to 1, both excluded) of the requests that begin from now on draft with
        `checkpoint`. Raises `UserError` as `install` does, and if the two drafters cannot be
        verified together."""
        if not 0.0 < share < 1.0:
            raise UserError(f"a trial's share lies between 0 and 1, both excluded; given: {share}.")
        engine = self.engine
        depth = engine.tree.max_depth
        most = passes_within(engine.decode.max_new_tokens, depth)
        choose = partial(drafts_with_candidate, share, secrets.token_bytes(16))

        def pair(session: Session, drafter: Any, name: str) -> list[Completion]:
            ended = session.pair_with(drafter, choose)
            self._candidate, names = name, (self._current, name)
            self.scheduler.trial = TrialCounts(*names, share, most, depth, self.metrics.booked)
            self.metrics.trial.set(1)  # on the worker's thread, as the end after a failed step
            return ended

        with self._turn:
            name = self._take(checkpoint, pair)
            logger.info("'%s' is tried beside '%s', share %g", name, self._current, share)

    def trial(self) -> TrialState | None:
        """The results of both drafters so far; None if no trial runs."""
        counts = self.scheduler.trial
        return None if counts is None else counts.state()

    def end_trial(self, keep: bool) -> None:
        """End the trial, with the candidate as drafter (keep) or without it. Raises `UserError` if
        no trial runs (a failed step also ends a trial, without the candidate)."""

        def settle(session: Session) -> list[Completion]:
            if self.scheduler.trial is None:
                raise UserError("no trial runs, so there is none to end.")
            ended = session.settle(second=keep)
            self.scheduler.trial = None
            return ended

        with self._turn:
            self._call(settle, self._candidate)
            self.metrics.trial.set(0)
            if keep:
                self._current = self._candidate
                self.metrics.swaps.labels("installed").inc()
                self.metrics.shows(self._current)
            logger.info("the trial has ended; the drafter is '%s'", self._current)

    def current(self) -> str:
        """The drafter's checkpoint folder or kind; during a trial, not the candidate's."""
        return self._current

    def draft(self) -> dict[str, Any]:
        """The settings of the draft that every drafter fills, by name."""
        decode = asdict(self.engine.decode)
        return {key: decode[key] for key in DRAFT_KEYS}

    # One change

    def _take(
        self, checkpoint: Path | str, change: Callable[[Session, Any, str], list[Completion]]
    ) -> str:
        """Load a drafter and let the worker check it and make the change; returns its name."""
        began = time.perf_counter()
        try:
            if self.scheduler.trial is not None:
                raise UserError("a trial of another drafter runs. End it first.")
            drafter, name = self._load(checkpoint)

            def work(session: Session) -> list[Completion]:
                begun = time.perf_counter()
                check_drafts(self.engine, drafter)
                ended = change(session, drafter, name)
                self.metrics.pause.observe(time.perf_counter() - begun)
                return ended

            self._call(work, checkpoint)
        except UserError as error:
            self.metrics.swaps.labels("refused").inc()
            logger.warning("'%s' is not taken as drafter: %s", checkpoint, error)
            raise
        logger.info("'%s' was loaded and taken in %.1f s", name, time.perf_counter() - began)
        return name

    def _load(self, checkpoint: Path | str) -> tuple[Any, str]:
        """A verified drafter and its name."""
        try:
            there = str(checkpoint) in kind_names() or Path(checkpoint).is_dir()
        except (OSError, ValueError):  # no name of a folder: too long, or with a zero
            there = False
        if not there:
            raise UserError(
                f"there is no folder '{checkpoint}' here. Give the folder of a checkpoint on the "
                "server's machine, or a kind without weights such as ngram."
            )
        now = self.engine.drafter
        device = str(now.device) if isinstance(now, PlacedDrafter) else None
        name = str(checkpoint_folder(checkpoint) or checkpoint)
        try:
            return load_drafter(checkpoint, self.engine.target, device=device), name
        # a full device, or files that change while they are read
        except (RuntimeError, MemoryError, OSError) as error:
            raise UserError(f"'{checkpoint}' cannot be loaded: {first_line(error)}.") from error

    def _call(self, work: Work, checkpoint: Path | str) -> None:
        """Let the worker run `work`; a lack of memory becomes a `UserError`."""
        try:
            self.scheduler.call(work)
        except (RuntimeError, MemoryError) as error:
            logger.exception("'%s' cannot be taken as drafter", checkpoint)
            raise UserError(f"'{checkpoint}' cannot be taken: {first_line(error)}.") from error

    def _step_failed(self) -> None:
        """End a trial after a failed step, as the candidate may be the cause. Called on the
        worker's thread."""
        pair = self.engine.drafter
        if isinstance(pair, DrafterPair):
            self.engine.drafter = pair.first
            self.scheduler.trial = None
            self.metrics.trial.set(0)
            logger.error("a step failed during a trial, which ends without '%s'", self._candidate)


def check_drafts(engine: Engine, drafter: Any) -> None:
    """Decode a short text with `drafter` under the engine's settings, with one row in separate
    buffers. Raises `UserError` if that fails. The target must not be in use meanwhile."""
    plain = {"adaptive": "none", "adaptive_head": "", "adaptive_lengths": (), "structure": ""}
    decode = replace(engine.decode, batch_size=1, graph="off", compile=False, **plain)  # type: ignore[arg-type]
    vocab = engine.target.info.vocab_size
    prompt = tuple(token % vocab for token in range(3, 3 + CHECKED_TOKENS))
    request = Request(0, prompt, 0, CHECKED_TOKENS, ignore_eos=True)
    try:
        (done,) = Engine(engine.target, drafter, decode).run([request])
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        words = first_line(error)
        raise UserError(f"the drafter fails to draft a short text: {words}.") from error
    if len(done.tokens) != CHECKED_TOKENS:
        raise UserError("the drafter fails to draft a short text: tokens are missing.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
