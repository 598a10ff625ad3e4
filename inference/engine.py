"""The decoder for users: requests in, completions out, with any drafter or none, in batches whose rows are refilled.

    engine = Engine(target, drafter, DecodeConfig(depth=4))
    for completion in engine.run([Request(0, tuple(prompt_ids), seed=7, max_new_tokens=64)]):
        print(target.tokenizer.decode(completion.tokens))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from heads.api.drafter import TargetStates, TrainableDrafter
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.state import write_rows
from heads.api.tree import TokenTree
from inference.decode import Decoder, Rows, StepClock, StepResult
from inference.decode_config import DecodeConfig as DecodeConfig
from inference.kernels.packed_linear import packed_linears
from inference.kv_cache import KVCache
from inference.noise import SharedNoise
from inference.rules.base import Rule
from inference.rules.match import Match
from inference.target import Seen, TargetModel


@dataclass(frozen=True)
class Request:
    """One sequence to continue. `tokens` are the prompt's ids; `seed` keys its sampling noise (64-bit, non-negative)."""

    index: int
    tokens: tuple[int, ...]
    seed: int
    max_new_tokens: int


@dataclass(frozen=True)
class PassRecord:
    """One verify pass of one row: drafted tokens committed, tokens committed (bonus included), whether a draft was refused."""

    accepted: int
    committed: int
    rejected: bool


@dataclass
class Completion:
    """A finished answer: its new tokens (the end-of-text token included), why it ended ("stop" or "length"), its passes.

    The first token comes from prefill, so len(tokens) == 1 + sum of committed tokens over the passes.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: str = "length"
    passes: list[PassRecord] = field(default_factory=list)


class Engine:
    """Decodes requests with one target and at most one drafter; reusable, one `run` at a time.

    `clock` accumulates the time split over runs; `clock.reset()` before a measurement.
    """

    def __init__(
        self, target: TargetModel, drafter: Any = None, decode: DecodeConfig | None = None, *, capacity: int | None = None
    ) -> None:
        self.target, self.drafter = target, drafter
        self.decode = decode or DecodeConfig()
        plain = drafter is None
        self.tree = TokenTree.chain(0, target.device) if plain else self.decode.tree(target.device)
        self.needs = FeatureSpec() if plain else drafter.needs
        self.capacity = capacity
        self.clock = StepClock(target.device)
        self._cache: KVCache | None = None
        self._last_bytes = 0
        if isinstance(drafter, TrainableDrafter):
            drafter.eval()

    # ---- the public loop -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(
        self, requests: Iterable[Request], on_tokens: Callable[[Request, list[int]], None] | None = None
    ) -> Iterator[Completion]:
        """Decode all requests, yielding completions as they finish. Raises `UserError` for a request that cannot fit.

        on_tokens: called with every batch of newly committed tokens of a request, for streaming.
        """
        waiting = list(requests)
        if not waiting:
            return
        run = _Run(self, waiting, on_tokens)
        with packed_linears(self.drafter):
            while run.unfinished:
                self.clock.start()
                if run.can_refill:
                    finished = run.refill()
                    self.clock.mark("prefill")
                else:
                    finished = run.step()
                    self.clock.mark("other")
                yield from finished
        self._last_bytes = run.bytes()

    def cache_for(self, rows: int, capacity: int) -> KVCache:
        """The target's cache, kept between runs while it is large enough."""
        cache = self._cache
        if cache is None or cache.rows != rows or cache.capacity < capacity:
            self._cache = cache = self.target.new_cache(rows, capacity)
        return cache

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the target's weights, the drafter's own weights, and the target's and drafter's caches of the last run."""
        drafter = 0
        if isinstance(self.drafter, TrainableDrafter):
            drafter = sum(value.numel() * value.element_size() for value in self.drafter.state_dict().values())
        weights = sum(p.numel() * p.element_size() for p in self.target.model.parameters())
        return {"target": weights, "drafter": drafter, "kv": self._last_bytes}


class _Run:
    """One call of `Engine.run`: the rows, who sits in them, and who waits."""

    def __init__(
        self, engine: Engine, requests: list[Request], on_tokens: Callable[[Request, list[int]], None] | None
    ) -> None:
        self.target, self.drafter, self.tree, self.needs = engine.target, engine.drafter, engine.tree, engine.needs
        self.on_tokens = on_tokens
        device = engine.target.device
        count = min(engine.decode.batch_size, len(requests))
        self.capacity = self._capacity(requests, engine.capacity)
        self.cache = engine.cache_for(count, self.capacity)
        self.rows = Rows.empty(count, device)
        self.settings = engine.decode.sampling()
        self.rule: Rule = Match(engine.decode.share_noise)
        noise = self._noise(self.rows.seeds)
        eos = torch.tensor(engine.target.eos_token_ids, dtype=torch.int64, device=device)
        self.decoder = Decoder(self.target, self.drafter, self.tree, noise, self.rule, self.needs, engine.clock, eos)
        self.end_ids = set(engine.target.eos_token_ids)
        self.running: list[Completion | None] = [None] * count
        self.waiting = requests[::-1]
        self.state: Any = None

    def _noise(self, seeds: Tensor) -> SharedNoise:
        return SharedNoise(
            self.settings, seeds, self.target.info.vocab_size, self.rule.drafts, self.rule.keeps_logits
        )

    def _capacity(self, requests: list[Request], fixed: int | None) -> int:
        """Slots a row needs: prompt, answer and one tree. Refuses requests that the target or a fixed capacity cannot hold."""
        most = 0
        for request in requests:
            if not request.tokens or request.max_new_tokens < 1:
                raise UserError(f"request {request.index} is empty: a prompt needs at least one token, an answer too.")
            length = len(request.tokens) + request.max_new_tokens
            limit = self.target.info.max_position_embeddings
            if length > limit:
                raise UserError(
                    f"request {request.index} needs {length} positions ({len(request.tokens)} of prompt), but target "
                    f"'{self.target.info.id}' has {limit}. Shorten the prompt or decode.max_new_tokens."
                )
            most = max(most, length)
        needed = most + self.tree.num_nodes + 1
        if fixed is not None and needed > fixed:
            raise UserError(f"a request needs {needed} cache slots, but the engine was built with capacity {fixed}.")
        return fixed or -(-needed // 64) * 64

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting) or any(item is not None for item in self.running)

    @property
    def can_refill(self) -> bool:
        return bool(self.waiting) and any(item is None for item in self.running)

    def bytes(self) -> int:
        return self.cache.bytes() + _tensor_bytes(self.state)

    # ---- one verification of all rows ------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """Advance every row; returns the completions that ended."""
        lengths = [len(c.request.tokens) + len(c.tokens) - 1 for c in self.running if c is not None]
        result, self.state = self.decoder.step(self.cache, self.rows, self.state, max(lengths))
        return self._read(result)

    def _read(self, result: StepResult) -> list[Completion]:
        """Bring a step's outcome to the host and book it."""
        tokens, committed = result.tokens.tolist(), result.committed.tolist()
        accepted, rejected, ended = result.accepted.tolist(), result.rejected.tolist(), result.ended.tolist()
        finished = []
        for row, completion in enumerate(self.running):
            if completion is None:
                continue
            completion.passes.append(PassRecord(accepted[row], committed[row], rejected[row]))
            self._add(completion, tokens[row][: committed[row]])
            if ended[row]:
                finished.append(self._finish(row, completion))
        return finished

    def _add(self, completion: Completion, tokens: list[int]) -> None:
        completion.tokens += tokens
        if self.on_tokens is not None:
            self.on_tokens(completion.request, tokens)

    def _finish(self, row: int, completion: Completion) -> Completion:
        completion.finish = "stop" if completion.tokens[-1] in self.end_ids else "length"
        self.running[row] = None
        return completion

    # ---- prefill of free rows --------------------------------------------------------------------------------------------

    def refill(self) -> list[Completion]:
        """Prefill waiting prompts into the free rows; returns those that already ended with their first token."""
        free = [row for row, item in enumerate(self.running) if item is None][: len(self.waiting)]
        requests = [self.waiting.pop() for _ in free]
        device = self.target.device
        index = torch.tensor(free, device=device)
        lengths = torch.tensor([len(request.tokens) for request in requests], device=device)
        tokens = torch.zeros(len(free), int(max(len(r.tokens) for r in requests)), dtype=torch.int64)
        for place, request in enumerate(requests):
            tokens[place, : len(request.tokens)] = torch.tensor(request.tokens)
        tokens = tokens.to(device)
        seeds = torch.tensor([request.seed for request in requests], dtype=torch.int64, device=device)
        logits, seen = self.target.prefill(self.cache, index, tokens, lengths, self.needs)
        noise = self._noise(seeds)
        first = noise.target_pick(logits[:, None], lengths[:, None])[:, 0]
        self._start_drafter(index, tokens, lengths, first, seen)
        self.rows.lengths[index], self.rows.root[index], self.rows.seeds[index] = lengths, first, seeds
        budgets = torch.tensor([request.max_new_tokens - 1 for request in requests], device=device)
        self.rows.budget[index] = budgets
        finished = []
        alive = []
        for row, request, token in zip(free, requests, first.tolist(), strict=True):
            completion = Completion(request)
            self.running[row] = completion
            self._add(completion, [token])
            ends = token in self.end_ids or request.max_new_tokens == 1
            alive.append(not ends)
            if ends:
                finished.append(self._finish(row, completion))
        self.rows.active[index] = torch.tensor(alive, device=device)
        return finished

    def _start_drafter(self, index: Tensor, tokens: Tensor, lengths: Tensor, first: Tensor, seen: Seen) -> None:
        """Tell the drafter about fresh prompts: at once for the whole batch, or into the rows that were refilled."""
        if self.drafter is None:
            return
        place = torch.arange(tokens.shape[1], device=tokens.device)[None]
        following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        following = torch.where(place == lengths[:, None] - 1, first[:, None], following)
        states = TargetStates(
            tokens, following, place.expand_as(tokens), place < lengths[:, None], seen.taps, seen.last_hidden
        )
        fresh = self.drafter.start(states, self.tree, self.capacity)
        if self.state is None:
            self.state = fresh
        else:
            write_rows(self.state, index, fresh)


def _tensor_bytes(state: Any) -> int:
    """Bytes of all tensors in a drafter's state, nested dataclasses and lists included."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if is_dataclass(state):
        return sum(_tensor_bytes(getattr(state, item.name)) for item in fields(state))
    if isinstance(state, (list, tuple)):
        return sum(_tensor_bytes(item) for item in state)
    return 0
