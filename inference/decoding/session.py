"""Open-ended decoding: requests come and go while others run. The server's worker uses it, and so
does any other open-ended decoding.

    with Session(engine, capacity=2048, on_tokens=show) as session:
        session.add(Request(0, tokens, seed=1, max_new_tokens=64, sampling=settings))
        while session.unfinished:
            for completion in session.step():
                ...

Differences from `Engine.run`: the buffers are allocated once, for `decode.batch_size` rows of
`capacity` slots; requests may set temperature, top_k, top_p and min_p; a step computes only the
rows in use. A request's text is that of `Engine.generate` for its prompt, seed, settings and rule;
at temperature 0 every rule decides like match.

The drafter may change while requests run (`change_drafter`), and a second one may draft for some of
them (`pair_with`, `settle`). Under rule match, or at temperature 0, this changes no token. Above
temperature 0, rules that weigh drafts keep the target's distribution.

Call everything from one thread, the one that made the session.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from heads.api.drafter import forget
from heads.api.errors import UserError
from inference.decoding.ahead import require_ahead
from inference.decoding.batch import BatchRun, OnTokens
from inference.decoding.engine import Engine
from inference.decoding.pair import DrafterPair, PairState, require_pair
from inference.decoding.requests import Completion, Request, require_known_tokens
from inference.decoding.rules.names import AUTO, LOSSLESS
from inference.decoding.sampling.row_settings import check_own


class Session:
    """See the module. details: passes report what was drafted (`PassRecord.details`).

    Raises `UserError` for a rule that does not keep the target's distribution, a capacity beyond
    the target's positions, and a batch that does not fit into memory.
    """

    def __init__(
        self,
        engine: Engine,
        capacity: int,
        on_tokens: OnTokens | None = None,
        *,
        details: bool = False,
    ) -> None:
        decode, limit = engine.decode, engine.target.info.max_position_embeddings
        if decode.rule not in (*LOSSLESS, AUTO):
            raise UserError(
                "requests with settings of their own need a rule that keeps the target's "
                f"distribution, one of {', '.join(LOSSLESS)} and auto; given: "
                f"decode.rule={decode.rule}."
            )
        if not 2 <= capacity <= limit:
            raise UserError(
                f"a session needs 2 to {limit} positions per request (target "
                f"'{engine.target.info.id}'); given: {capacity}."
            )
        self.engine, self.capacity = engine, capacity
        self._stack, self._tools = ExitStack(), ExitStack()
        self._late: list[Completion] = []
        """Completions that ended while the drafter was changed, and were not returned yet."""
        slots = capacity + engine.tree.num_nodes + 1
        engine.require_memory(decode.batch_size, slots, capacity, own=True)
        self.lanes = engine.new_lanes(decode.batch_size, slots, own_settings=True, details=details)
        lag = decode.steps_behind(engine.target.device)
        self._run = BatchRun(self.lanes, [], on_tokens, lag, narrow=True)

    def __enter__(self) -> Session:
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(self._tools)
        self._tools.enter_context(self.engine.decoding())
        self._allocate()
        self.engine.sessions.add(self._run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.sessions.discard(self._run)
        self._run.abandon()
        self._stack.close()

    def _allocate(self) -> None:
        """Read a token into every row, so that buffers have full size before the first request."""
        rows, device = self.lanes.count, self.engine.target.device
        ones = torch.ones(rows, dtype=torch.int64, device=device)
        zeros, index = torch.zeros_like(ones), torch.arange(rows, device=device)
        self.lanes.prefill(index, zeros[:, None], ones, ones, zeros)
        self.lanes.stop()
        forget(self.engine.drafter)

    # Drafters

    def change_drafter(self, drafter: Any) -> list[Completion]:
        """Let all rows draft with another drafter from the next step on; returns the completions
        that ended meanwhile. The state of running rows is rebuilt from their text; the target reads
        it again if the drafter needs its features.

        Raises `UserError`, and changes nothing, for plain decoding, for a drafter that cannot draft
        what `decode` asks for, and for one that does not fit into memory.
        """
        self.check_drafter(drafter)
        self._go_on(drafter, None)
        return self._take_late()

    def pair_with(
        self, drafter: Any, choose: Callable[[Request], bool] = lambda request: True
    ) -> list[Completion]:
        """Let another drafter draft for requests that get a row from now on, if `choose` returns
        True for them; running requests keep their drafter. Both draft for all rows in every step,
        and a row's draft is the one that is verified (`inference.decoding.pair`). Returns the
        completions that ended meanwhile.

        Raises `UserError`, and changes nothing, as `change_drafter` does, and if the two drafters
        cannot be verified together.
        """
        first, target = self.engine.drafter, self.engine.target
        if isinstance(first, DrafterPair):
            raise UserError("two drafters draft here already. Settle on one of them first.")
        pair = DrafterPair(first, drafter, target.info.vocab_size, choose)
        self.check_drafter(drafter)
        require_pair(pair, target, self.engine.decode, self.engine.tree)
        blank = self.lanes.blank_state(drafter)
        arms = torch.zeros(self.lanes.count, dtype=torch.bool, device=target.device)
        self._late += self._run.drain()
        self._go_on(pair, PairState(self.lanes.state, blank, arms))
        return self._take_late()

    def settle(self, second: bool) -> list[Completion]:
        """Continue with only one drafter of a pair, in all rows. The state of rows that drafted
        with the other is rebuilt. Returns the completions that ended meanwhile."""
        pair = self.engine.drafter
        assert isinstance(pair, DrafterPair), "one drafter drafts alone"
        self._late += self._run.drain()
        state = self.lanes.state
        kept = state.second if second else state.first
        drafter = pair.second if second else pair.first

        def lost(arm: int | None) -> bool:
            return bool(arm) != second

        self._go_on(drafter, kept, lost)
        return self._take_late()

    def check_drafter(self, drafter: Any) -> None:
        """Raise `UserError` for a drafter that cannot draft here."""
        engine = self.engine
        if engine.drafter is None:
            raise UserError(
                "nothing is drafted here, so there is no draft to change. Start with a drafter "
                "(ngram needs no weights) to change it later."
            )
        if engine.decode.ahead:
            require_ahead(drafter)
        engine.require_drafter_memory(drafter, self.lanes.count, self.lanes.capacity)

    def _go_on(
        self, drafter: Any, state: Any, lost: Callable[[int | None], bool] = lambda arm: False
    ) -> None:
        """If this fails, the drafter is the one before, and the next step returns what ended."""
        self._late += self._run.drain()
        engine = self.engine
        before = engine.drafter, self.lanes.state
        try:
            self._prepare(drafter)
            self._run.change_drafter(drafter, state, lost)
        except BaseException:
            self._prepare(before[0])
            self.lanes.change_drafter(*before, {})
            raise

    def _take_late(self) -> list[Completion]:
        late, self._late = self._late, []
        return late

    def _prepare(self, drafter: Any) -> None:
        """Make `drafter` the engine's, set up for decoding."""
        self._tools.close()
        self.engine.drafter = drafter
        self._tools.enter_context(self.engine.decoding())

    # Requests

    @property
    def unfinished(self) -> bool:
        """Whether any request runs or waits, or has ended without being returned."""
        return self._run.unfinished or bool(self._late)

    @property
    def running(self) -> int:
        """Requests in rows."""
        return sum(item is not None for item in self._run.running)

    @property
    def free(self) -> int:
        """Rows that no request holds or waits for."""
        return max(0, self.lanes.count - self.running - len(self._run.waiting))

    def check(self, request: Request) -> None:
        """Raise `UserError` for a request that cannot be decoded here."""
        total = len(request.tokens) + request.max_new_tokens
        if not request.tokens or request.max_new_tokens < 1:
            raise UserError("a prompt needs at least one token, and so does an answer.")
        require_known_tokens(request, self.engine.target.info.vocab_size)
        if total > self.capacity:
            raise UserError(
                f"prompt ({len(request.tokens)} tokens) and answer (up to "
                f"{request.max_new_tokens}) need {total} positions; {self.capacity} are there."
            )
        if request.sampling is not None:
            check_own(request.sampling, self.lanes.settings)
        self.engine.constrained(request)

    def add(self, request: Request) -> None:
        """Queue a request for a row; raises `UserError` (see `check`)."""
        self.check(request)
        self._run.waiting.append(self.engine.constrained(request))

    def cancel(self, index: int) -> None:
        """Stop the request with this index at the next step; unknown ones are ignored."""
        self._run.cancel(index)

    def step(self) -> list[Completion]:
        """Drop cancelled requests, or read prompts, or verify; returns the completions that
        ended."""
        run = self._run
        if not run.unfinished:
            run.forget_cancelled()
            return self._take_late()
        if not run.waiting:
            run.close_ranks()
        ended = self.engine.advance(run)
        return self._take_late() + ended
