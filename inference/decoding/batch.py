"""One run over a list of requests: their rows, the waiting requests, and the results.

The host may be some steps behind the device (`DecodeConfig.lag`). A row that has ended commits
nothing more, so the host's knowledge is late but never wrong. The row is refilled when the host
has read that it ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inference.decoding.buffers import Lanes
from inference.decoding.execution.accelerator import Pending
from inference.decoding.logprobs import columns, prompt_logprobs, read_logprobs, token_logprobs
from inference.decoding.pair import DrafterPair
from inference.decoding.pass_details import read_details
from inference.decoding.requests import DEAD_END, Completion, PassRecord, Request
from inference.decoding.step import unpacked
from inference.decoding.structured.matcher import DeadEndError
from inference.target.model import TargetModel
from inference.target.taps import Seen

OnTokens = Callable[[Request, list[int], PassRecord | None], None]


class BatchRun:
    """The requests of one `Engine.run` in the lanes of its batch."""

    def __init__(
        self,
        lanes: Lanes,
        requests: list[Request],
        on_tokens: OnTokens | None,
        lag: int,
        narrow: bool = False,
    ) -> None:
        """narrow: requests come and go: compute only the rows in use, and keep them together
        (batches seldom full); a grammar's dead end ends its request alone."""
        self.lanes, self.on_tokens, self.lag, self.narrow = lanes, on_tokens, lag, narrow
        self.end_ids = set(lanes.target.eos_token_ids)
        self.version = lanes.target.version  # of the weights that filled all caches
        self.running: list[Completion | None] = [None] * lanes.count
        self.waiting = deque(requests)
        # steps whose results are unread, with the requests that their rows held then
        self.launched: deque[tuple[Pending, list[Completion | None]]] = deque()
        self.cancelled: set[int] = set()
        # requests whose grammar allows nothing more; they are cancelled, too
        self.dead: set[int] = set()
        lanes.stop()

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting) or any(item is not None for item in self.running)

    @property
    def can_refill(self) -> bool:
        return bool(self.waiting) and any(item is None for item in self.running)

    # Cancellation

    def cancel(self, index: int) -> None:
        """Stop the request with this index at the next step; it ends with finish "cancelled"."""
        self.cancelled.add(index)

    def drop_cancelled(self) -> list[Completion]:
        """Remove cancelled requests from rows and queue; returns their completions."""
        if not self.cancelled:
            return []
        dropped = []
        for row, completion in enumerate(self.running):
            if completion is not None and completion.request.index in self.cancelled:
                self.lanes.rows.active[row] = False
                dead = completion.request.index in self.dead
                completion.finish = DEAD_END if dead else "cancelled"
                self._leave(row)
                dropped.append(completion)
        for request in [request for request in self.waiting if request.index in self.cancelled]:
            self.waiting.remove(request)
            dropped.append(Completion(request, finish="cancelled"))
        self.forget_cancelled()
        return dropped

    def forget_cancelled(self) -> None:
        """Forget cancellations, once no request is left that they could concern."""
        self.cancelled.clear()
        self.dead.clear()

    # One verification of all rows

    def step(self) -> list[Completion]:
        """Launch a step if needed and read the oldest result that is due; returns the completions
        that ended."""
        if self._needs_another():
            self.launched.append((self._launch(), list(self.running)))
            if len(self.launched) <= self._lag:
                return []
        return self._read(*self.launched.popleft())

    @property
    def _lag(self) -> int:
        """Steps that may be unread: none if a row's grammar must know what was committed."""
        return 0 if self.lanes.grammars.active else self.lag

    def drain(self) -> list[Completion]:
        """Read the results of all steps under way; returns the completions that ended."""
        finished = []
        while self.launched:
            finished += self._read(*self.launched.popleft())
        return finished

    def abandon(self) -> None:
        """Stop decoding; results under way are not read."""
        self.launched.clear()
        self.lanes.runner.decoder.clock.abandon()
        self.lanes.stop()

    def _needs_another(self) -> bool:
        """False if the steps under way exhaust every row's budget even at one token each."""
        running, ahead = [item for item in self.running if item is not None], len(self.launched)
        return any(one.request.max_new_tokens - len(one.tokens) > ahead for one in running)

    def _launch(self) -> Pending:
        """Launch a step. While results are unread, the longest row's length is an upper bound."""
        self.lanes.grammars.look_ahead()
        running = [item for item in self.running if item is not None]
        self.lanes.wishes.logprobs = _asks_logprobs(running)
        # from the tokens that the host has read: true too often at worst
        early = [len(item.tokens) < item.request.min_tokens for item in running]
        self.lanes.wishes.ends = bool(self.end_ids) and any(early)
        known = max(len(item.request.tokens) + len(item.tokens) - 1 for item in running)
        ahead = known + len(self.launched) * (self.lanes.tree.max_depth + 1)
        longest = min(ahead, self.lanes.capacity - self.lanes.tree.num_nodes)
        if not self.narrow:
            return self.lanes.step(longest, exact=not self.launched)
        used = [row for row, item in enumerate(self.running) if item is not None]
        return self.lanes.step_rows(used, longest, exact=not self.launched)

    def close_ranks(self) -> None:
        """Move sequences into free rows before them, so that a step has only as many rows."""
        while True:
            used = [row for row, item in enumerate(self.running) if item is not None]
            free = self.running.index(None) if None in self.running else len(self.running)
            if not used or used[-1] < free:
                return
            self.lanes.move(used[-1], free)
            self.running[free], self.running[used[-1]] = self.running[used[-1]], None

    def _read(self, pending: Pending, sat: list[Completion | None]) -> list[Completion]:
        """Bring a step's outcome to the host and record it."""
        finished = []
        outcome = pending.read()
        wide = columns(self.lanes.target.info.vocab_size) if _asks_logprobs(sat) else 0
        for row, completion in enumerate(sat):
            if completion is None or completion.done:
                continue
            committed, accepted, rejected, ended, live, *rest = outcome[row]
            if committed == 0:
                continue
            details = None
            chain = self.lanes.tree.is_chain
            tokens, drafted, scores = unpacked(rest, self.lanes.details, wide)
            if self.lanes.details:
                pick = tokens[accepted]
                details = read_details(drafted, chain, accepted, bool(rejected), live, pick)
            if (asked := completion.request.logprobs) is not None:
                asked.answer += read_logprobs(scores, tokens[:committed], asked.most)
            nodes = len(tokens) if chain else self.lanes.tree.num_nodes
            given = accepted, committed, bool(rejected), nodes, live, details
            record = PassRecord(*given, completion.arm)
            if self.lanes.lengths is not None:
                self.lanes.lengths.observe(accepted, accepted + rejected)
            completion.passes.append(record)
            self._add(row, completion, tokens[:committed], record)
            if ended:
                finished.append(self._finish(completion))
        return finished

    def _add(
        self, row: int, completion: Completion, tokens: list[int], record: PassRecord | None
    ) -> None:
        completion.tokens += tokens
        # nothing is unread if a row has a grammar, so the request still has this row
        try:
            self.lanes.grammars.accept(row, tokens)
        except DeadEndError:
            if not self.narrow:
                raise
            self.dead.add(completion.request.index)  # other requests go on
            self.cancel(completion.request.index)
            return
        if self.on_tokens is not None:
            self.on_tokens(completion.request, tokens, record)

    def _finish(self, completion: Completion) -> Completion:
        stopped = self._is_end(completion.request, completion.tokens[-1])
        completion.finish = "stop" if stopped else "length"
        if completion.request.index in self.dead:
            completion.finish = DEAD_END
        # search for it, as it may have moved since the step was launched
        for row, item in enumerate(self.running):
            if item is completion:
                self._leave(row)
        return completion

    def _leave(self, row: int) -> None:
        self.running[row] = None
        self.lanes.grammars.put(row, None)

    def _is_end(self, request: Request, token: int) -> bool:
        return token in self.end_ids and not request.ignore_eos

    # Prefill of free rows

    def refill(self) -> list[Completion]:
        """Prefill waiting prompts into free rows; returns the completions that end with their first
        token."""
        free = [row for row, item in enumerate(self.running) if item is None][: len(self.waiting)]
        requests = [self.waiting.popleft() for _ in free]
        prompts = [torch.tensor(request.tokens) for request in requests]
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        device = self.lanes.target.device

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        index = column(free)
        self.lanes.constrain(free, requests)
        earliest = [len(request.tokens) + request.min_tokens for request in requests]
        self.lanes.rows.earliest[index] = column(earliest)
        held = any(request.min_tokens > 0 for request in requests)
        self.lanes.wishes.ends = bool(self.end_ids) and held

        def watch(logits: torch.Tensor, seen: Seen, picked: torch.Tensor) -> None:
            _keep_logprobs(self.lanes.target, requests, logits, seen, picked)

        asks = any(request.logprobs is not None for request in requests)
        first = self.lanes.prefill(
            index,
            tokens.to(device),
            column([len(request.tokens) for request in requests]),
            column([request.seed for request in requests]),
            column([request.max_new_tokens - 1 for request in requests]),
            (free, [request.sampling or self.lanes.settings for request in requests]),
            self.lanes.grammars.first_masks(free),
            watch if asks else None,
        )
        arms = self._assign(index, requests)
        finished, alive = [], []
        for row, request, token, arm in zip(free, requests, first.tolist(), arms, strict=True):
            completion = Completion(request, arm=arm)
            self.running[row] = completion
            self._add(row, completion, [token], None)
            ends = self._is_end(request, token) or request.max_new_tokens == 1
            alive.append(not ends)
            if ends:
                finished.append(self._finish(completion))
        endless = [request.ignore_eos for request in requests]
        self.lanes.rows.endless[index] = torch.tensor(endless, device=device)
        self.lanes.rows.active[index] = torch.tensor(alive, device=device)
        return finished

    def _assign(self, index: torch.Tensor, requests: list[Request]) -> list[int] | list[None]:
        """Which of a pair of drafters drafts for the requests in the rows `index` [R]."""
        pair = self.lanes.drafter
        if not isinstance(pair, DrafterPair):
            return [None] * len(requests)
        arms = [int(pair.choose(request)) for request in requests]
        chosen = self.lanes.state.second_drafts
        chosen[index] = torch.tensor(arms, dtype=torch.bool, device=chosen.device)
        return arms

    # Another drafter

    def change_drafter(
        self, drafter: Any, state: Any, lost: Callable[[int | None], bool] = lambda arm: False
    ) -> None:
        """Continue with another drafter. state: of all rows; None: a fresh one. lost: whether the
        state of a row, by its `Completion.arm`, is missing from `state` and must be rebuilt.
        Nothing may be unread (`drain`)."""
        assert not self.launched, "steps are under way"
        texts, seated = {}, [(row, one) for row, one in enumerate(self.running) if one is not None]
        for row, one in seated:
            if state is None or lost(one.arm):
                texts[row] = [*one.request.tokens, *one.tokens]
        self.lanes.change_drafter(drafter, state, texts)
        for _, one in seated:
            one.arm = None


def _asks_logprobs(some: Sequence[Completion | None]) -> bool:
    """Whether any of the requests asks for log-probabilities."""
    return any(item is not None and item.request.logprobs is not None for item in some)


def _keep_logprobs(
    target: TargetModel, requests: list[Request], logits: Tensor, seen: Seen, first: Tensor
) -> None:
    """Give requests the log-probabilities of their prompts and first tokens: logits [R, V] after
    the prompts, first [R]."""
    numbers, tokens = token_logprobs(logits[:, None], first[:, None]).tolist(), first.tolist()
    for row, request in enumerate(requests):
        if (asked := request.logprobs) is None:
            continue
        asked.answer += read_logprobs(numbers[row], tokens[row : row + 1], asked.most)
        if asked.of_prompt:
            hidden = seen.last_hidden[row, : len(request.tokens)]
            head = target.weights.logits
            asked.prompt += prompt_logprobs(head, hidden, request.tokens, asked.most)
