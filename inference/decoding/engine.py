"""The decoder for users: it takes prompts and returns answers, with any drafter or none.

    engine = Engine.load("meta-llama/Llama-3.1-8B-Instruct", "outputs/demo/train/eagle3/best")
    for answer in engine.generate(["Why is the sky blue?", "Write a haiku."], max_new_tokens=64):
        print(answer.text, answer.tau)

`run` is the layer below: it takes requests of token ids and yields completions as they finish.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.api.tree import DraftShape, TokenTree
from heads.kernels.dispatch import choose
from inference.decoding.ahead import require_ahead, wanted_room
from inference.decoding.batch import BatchRun, OnTokens
from inference.decoding.buffers import Lanes
from inference.decoding.clock import StepClock
from inference.decoding.config import DecodeConfig
from inference.decoding.decode_file import advice
from inference.decoding.execution.layers import has_merged
from inference.decoding.loading import checkpoint_folder, load_drafter
from inference.decoding.pair import DrafterPair
from inference.decoding.placement import PlacedDrafter, unwrapped
from inference.decoding.requests import Completion, Request, require_known_tokens
from inference.decoding.sampling.distribution import pick_bytes
from inference.decoding.structured.constraint import Constraint
from inference.decoding.structured.grammars import Grammars
from inference.kernels.packed_linear import packed_linears
from inference.kernels.reference.attention import TREE_ATTENTION
from inference.kernels.reference.heads import decoding_kernels
from inference.target.chat import render_prompt
from inference.target.follow import Weights
from inference.target.hardware import device_facts
from inference.target.loading import TargetConfig
from inference.target.memory import (
    HEADROOM,
    drafter_state_bytes,
    free_bytes,
    gib,
    picking_bytes,
    plan_memory,
)
from inference.target.model import TargetModel
from inference.target.text_pieces import TextPieces

logger = logging.getLogger(__name__)
Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""A user's message, token ids, or a conversation of {"role", "content"} messages."""
SLOT_STEP = 64
"""Capacities are rounded up to this many slots, so that similar runs share buffers."""
SHOWN_CHARACTERS = 60
"""Characters of an answer's text in its `repr`."""


@dataclass(frozen=True, repr=False)
class Generation:
    """One answer as text, with its completion: tokens, passes and the reason it ended."""

    text: str
    completion: Completion

    @property
    def tau(self) -> float:
        """Committed tokens per verify pass; 1.0 if nothing was verified."""
        return self.completion.tau

    def __repr__(self) -> str:
        """One line: the beginning of the text, tau, tokens, passes and the reason it ended."""
        done = self.completion
        text = textwrap.shorten(self.text, SHOWN_CHARACTERS, placeholder=" ...")
        return (
            f"Generation({text!r}, tau={self.tau:.2f}, {len(done.tokens)} tokens, "
            f"{len(done.passes)} passes, {done.finish})"
        )


@dataclass
class _Kept:
    """Buffers of the last run, which an engine shares with its copies of other limits and seeds.
    made_of: the versions of the weights that they were built with; run: the run that uses them now;
    last_bytes: size of the last run's caches."""

    lanes: Lanes | None
    made_of: tuple[int, int, int]
    run: BatchRun | None = None
    last_bytes: int = 0


class Engine:
    """Decodes requests with one target and at most one drafter; reusable, one `run` at a time.

    `clock` accumulates the time per phase over all runs; call `clock.reset()` before a measurement.
    capacity: slots of every row, the draft's nodes included; None sizes them by the requests.
    details: passes report what was drafted (`PassRecord.details`).
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Any = None,
        decode: DecodeConfig | None = None,
        *,
        capacity: int | None = None,
        details: bool = False,
    ) -> None:
        self.target, self.drafter, self.details = target, drafter, details
        self.decode = (decode or DecodeConfig()).for_drafter(drafter)
        if drafter is not None and self.decode.ahead:
            require_ahead(drafter)
        device, plain = target.device, drafter is None
        tree: DraftShape = TokenTree.chain(0, device) if plain else self.decode.tree(device)
        self.tree, self.capacity = tree, capacity
        self.constraint = Constraint.read(self.decode.structure)
        self.clock = StepClock(target.device)
        self._kept = _Kept(None, self._versions)
        self.sessions = set[BatchRun]()
        """The runs of open sessions."""
        if isinstance(drafter, TrainableDrafter):
            drafter.eval()

    @classmethod
    def load(
        cls,
        target: str | Path | TargetConfig | TargetModel,
        head: str | Path | None = None,
        decode: DecodeConfig | None = None,
        *,
        capacity: int | None = None,
        head_device: str | None = None,
    ) -> Engine:
        """Load a target (Hub id or folder, in bfloat16 on a GPU, or a config) and a drafter for it.

        head: a checkpoint folder, a name on the Hub ("user/drafter", fetched once), a kind without
        weights ("ngram"), or None for plain decoding. decode: None uses the settings in
        decode.yaml, if `headstart tune` wrote one for this device. head_device: the drafter's
        device, if it is not the target's; `engine.drafter.transfer` then counts the data copied
        between them. Raises `UserError` if either cannot be loaded, or if the drafter was not made
        for the target.
        """
        if isinstance(target, (str, Path)):
            target = TargetConfig.named(target)
        model = target if isinstance(target, TargetModel) else TargetModel.load(target)
        drafter = None
        if head is not None:
            head = checkpoint_folder(head) or head
            drafter = load_drafter(head, model, device=head_device)
            decode = _tuned(head, model) if decode is None else decode
        if decode is not None and decode.shape == "none":
            drafter = None
        return cls(model, drafter, decode, capacity=capacity)

    # Text in, text out

    def generate(
        self, prompts: Prompt | Sequence[Prompt], seeds: Sequence[int] | None = None, **changes: Any
    ) -> list[Generation]:
        """Answer all prompts, in their order. A single prompt may be given without a list.

        seeds: one per prompt (default: ascending from decode.seed). changes: decode settings for
        this call, such as temperature=0.7 or max_new_tokens=64.
        """
        engine = self.with_settings(**changes)
        requests = engine.requests(as_list(prompts), seeds)
        return [engine._answer(done) for done in engine.completions(requests)]

    def stream(self, prompt: Prompt, seed: int | None = None, **changes: Any) -> Iterator[str]:
        """Answer a prompt piece by piece; leaving the loop stops decoding. changes: see
        `generate`."""
        engine = self.with_settings(**changes)
        requests = engine.requests([prompt], None if seed is None else [seed])
        new: list[int] = []
        text = TextPieces(self.target.tokenizer, self.target.eos_token_ids)
        completions = engine.run(
            requests, lambda _request, tokens, _record: new.extend(tokens), yield_steps=True
        )
        with closing(completions):
            for _ in completions:
                piece = text.add(new)
                new.clear()
                if piece:
                    yield piece
        rest = text.add(new) + text.rest()
        if rest:
            yield rest

    def with_settings(self, **changes: Any) -> Engine:
        """This engine with other decode settings; it shares buffers where possible."""
        decode = replace(self.decode, **changes) if changes else self.decode
        if decode == self.decode:
            return self
        now = self.decode
        if replace(decode, max_new_tokens=now.max_new_tokens, seed=now.seed) == now:
            other = copy(self)  # limits and seeds belong to requests: buffers are shared
            other.decode = decode
            return other
        kept = {"capacity": self.capacity, "details": self.details}
        return Engine(self.target, self.drafter, decode, **kept)  # type: ignore[arg-type]

    def requests(self, prompts: Sequence[Prompt], seeds: Sequence[int] | None) -> list[Request]:
        """The requests for `run` of prompts as `generate` takes them, numbered from 0."""
        if seeds is not None and len(seeds) != len(prompts):
            raise UserError(f"{len(prompts)} prompts need as many seeds; given: {len(seeds)}.")
        base, limit = self.decode.seed, self.decode.max_new_tokens
        given = range(base, base + len(prompts)) if seeds is None else seeds
        numbered = enumerate(zip(prompts, given, strict=True))
        return [Request(i, self._tokens(prompt), seed, limit) for i, (prompt, seed) in numbered]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if prompt and isinstance(prompt[0], Mapping):
            return tuple(render_prompt(self.target.tokenizer, prompt))  # type: ignore[arg-type]
        return tuple(int(token) for token in prompt)  # type: ignore[arg-type]

    def _answer(self, completion: Completion) -> Generation:
        ends = self.target.eos_token_ids
        tokens = [token for token in completion.tokens if token not in ends]
        text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
        return Generation(text, completion)

    @property
    def captured(self) -> bool:
        """Whether a step of the last run's buffers was captured and replayed after that."""
        return self._kept.lanes is not None and self._kept.lanes.runner.captured

    # Token ids in, completions out

    def completions(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of all requests, in the order of the requests; see `run`."""
        done = {completion.request.index: completion for completion in self.run(requests)}
        return [done[request.index] for request in requests]

    @torch.no_grad()
    def run(
        self,
        requests: Iterable[Request],
        on_tokens: OnTokens | None = None,
        *,
        yield_steps: bool = False,
    ) -> Generator[Completion, None, None]:
        """Decode all requests, yielding completions as they end. Raises `UserError` if one does not
        fit, or while another run of this engine has not ended.

        on_tokens(request, tokens, record): called with every batch of newly committed tokens and
        the record of their pass (None for the first token, which comes from prefill). yield_steps:
        also yield unfinished completions, after every step.
        """
        waiting = [self.constrained(request) for request in requests]
        if not waiting:
            return
        if self._kept.run is not None:
            raise UserError(
                "this engine runs other requests, and it decodes one run at a time. End that run "
                "(finish or close its loop), or make another engine for the same target."
            )
        lanes, lag = self._lanes_for(waiting), self.decode.steps_behind(self.target.device)
        self._kept.run = run = BatchRun(lanes, waiting, on_tokens, lag)
        try:
            with self.decoding():
                while run.unfinished:
                    yield from self.advance(run)
                    if yield_steps:
                        yield from [item for item in run.running if item is not None]
        finally:
            self._kept.run = None
            run.abandon()
            self._kept.last_bytes = run.lanes.bytes()

    def constrained(self, request: Request) -> Request:
        """The request with the constraint of its answer: its own, or the engine's. Raises
        `UserError` for a constraint that cannot be kept."""
        constraint = request.constraint or self.constraint
        if constraint is None:
            return request
        if request.ignore_eos or request.min_tokens:
            name = "ignore_eos does" if request.ignore_eos else "min_tokens does"
            raise UserError(
                f"an answer that follows a grammar ends where the grammar does: {name} not go with "
                "it."
            )
        if self.decode.bad_words:
            raise UserError(
                "structured output does not go with decode.bad_words: a place may be left at which "
                "no token is allowed."
            )
        Grammars.of(self.target).compile(constraint)
        return replace(request, constraint=constraint)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Set up the drafter for decoding within the block."""
        drafter = self.drafter
        with ExitStack() as stack:
            for part in drafter.parts if isinstance(drafter, DrafterPair) else (drafter,):
                stack.enter_context(packed_linears(part))
                stack.enter_context(decoding_kernels(part))
            yield

    def advance(self, run: BatchRun) -> list[Completion]:
        """Drop cancelled requests, or refill free rows, or launch a step, and count the time.
        Raises `UserError` if the target's weights have changed since the run began."""
        if run.version != self.target.version:
            raise UserError(
                "the target's weights have changed while requests run: their caches are of the old "
                "ones. Begin a new run or session."
            )
        dropped = run.drop_cancelled()
        if dropped:
            return dropped
        clock, finished = self.clock, []
        if run.can_refill:
            finished = run.drain()  # steps under way are not part of the prefill's time
            clock.start()
            finished += run.refill()
            clock.mark("prefill")
        elif clock.times is not None:
            finished = run.step()  # its time is counted when it is read
        else:
            clock.start()
            finished = run.step()
            clock.mark("other")
        return finished if run.unfinished else [*finished, *run.drain()]

    def cancel(self, index: int) -> None:
        """Stop the request with this index in the current `run` (from `on_tokens` or between
        completions). Its completion ends with finish "cancelled". Unknown indices are ignored, as
        the request may just have finished."""
        if self._kept.run is not None:
            self._kept.run.cancel(index)

    # Changed weights

    def follow(self, weights: Weights) -> None:
        """Continue with new weights of the target, taken over in place
        (inference/target/follow.py). The drafter keeps its own weights and rebuilds what it derived
        from the target's.

        weights: a model, its state dict, or low-rank updates. Raises `UserError` while requests
        run, and for weights that do not fit; the target then keeps its weights.
        """
        if self._kept.run is not None or any(run.unfinished for run in self.sessions):
            raise UserError(
                "the target's weights cannot change while requests run: their caches are of the "
                "old ones. Finish the run, or leave its loop."
            )
        self.target.follow(weights)
        if isinstance(self.drafter, PlacedDrafter):
            self.drafter.follow(self.target)
        elif isinstance(self.drafter, TrainableDrafter):
            self.drafter.follow(self.target.weights)

    def _refer_to_merged_weights(self) -> None:
        """If compiling has moved weights of the target, let the drafter refer to them where they
        are now: what it was bound to before keeps the old ones in memory. Only once per drafter,
        since steps that are captured later read what it holds."""
        drafter, done = self.drafter, self.target.drafters_after_merge
        if done is not None and isinstance(drafter, TrainableDrafter) and drafter not in done:
            drafter.bind(self.target.weights)
            done.add(drafter)

    @property
    def _versions(self) -> tuple[int, int, int]:
        """Versions of the target's and the drafter's weights, and whether another engine's
        compilation has moved the target's. Captured and compiled steps are valid for one
        version."""
        drafter = getattr(self.drafter, "drafter", self.drafter)
        own = drafter.parameters() if isinstance(drafter, TrainableDrafter) else ()
        changes = sum(parameter._version for parameter in own)
        return self.target.version, changes, int(has_merged(self.target))

    # Buffers

    def _lanes_for(self, requests: list[Request]) -> Lanes:
        """Buffers for these requests: those of the last run if they fit."""
        rows = min(self.decode.batch_size, len(requests))
        capacity = self._capacity(requests)
        lanes = self._kept.lanes
        fits = lanes is not None and lanes.count == rows and lanes.capacity >= capacity
        if lanes is None or not fits or self._kept.made_of != self._versions:
            self._kept.lanes = lanes = None  # free the old buffers before new ones are allocated
            longest = max(len(request.tokens) for request in requests)
            self.require_memory(rows, capacity, longest)
            lanes = self.new_lanes(rows, capacity, details=self.details)
            self._kept.lanes, self._kept.made_of = lanes, self._versions
        return lanes

    def new_lanes(self, rows: int, capacity: int, **more: Any) -> Lanes:
        """Buffers of `rows` x `capacity`; more: further arguments of `Lanes`."""
        parts = self.target, self.drafter, self.decode, self.tree
        lanes = Lanes(*parts, rows, capacity, self.clock, **more)
        self._refer_to_merged_weights()
        return lanes

    def require_memory(self, rows: int, capacity: int, longest: int, own: bool = False) -> None:
        """Raise `UserError` for a batch that will not fit, before anything is allocated. longest:
        tokens of the longest prompt; own: rows have separate sampling settings."""
        free = free_bytes(self.target.device)
        if free is None:
            return
        target, nodes = self.target, self.tree.num_nodes
        info, dtype = target.info, target.dtype
        state = self._state_bytes(self.drafter, rows, capacity)
        kernel = choose(TREE_ATTENTION, target.device, dtype).implementation == "triton"
        widest = min(self.decode.prefill_chunk, longest)
        taps = 0 if self.drafter is None else len(self.drafter.needs.taps)
        plan = plan_memory(
            *(info, dtype, target.cache_sizes(), rows, capacity, nodes, state, widest, kernel),
            sampling=picking_bytes(pick_bytes(self.decode.sampling(), own), target.device, dtype),
            features=longest * (taps + 1) * info.hidden_size,
        )
        plan.require(free, target.device)

    def require_drafter_memory(self, drafter: Any, rows: int, capacity: int) -> None:
        """Raise `UserError` for a drafter whose state does not fit into the free memory."""
        free, info = free_bytes(self.target.device), self.target.info
        if free is None:
            return
        needed = self._state_bytes(drafter, rows, capacity)
        if drafter.needs.drafts_from_states:  # a row's text is read again, with a separate cache
            taken = self.target.cache_sizes()
            taps, size = len(drafter.needs.taps) + 1, torch.finfo(self.target.dtype).bits // 8
            needed += capacity * (taken.slot + taps * info.hidden_size * size) + taken.row
        if needed > int(free * HEADROOM):
            raise UserError(
                f"the drafter of kind '{drafter.kind}' needs {gib(needed)} on {self.target.device} "
                f"for {rows} rows of {capacity} tokens, but {gib(free)} are free, of which "
                f"{HEADROOM:.0%} may be used. Start with fewer rows (decode.batch_size), shorter "
                "ones, or this drafter alone."
            )

    def _state_bytes(self, drafter: Any, rows: int, capacity: int) -> int:
        shape, room = self.tree, capacity
        if self.decode.ahead and isinstance(shape, TokenTree):
            shape, room = wanted_room(shape, capacity)
        target = self.target
        like = target.weights.embedding
        return drafter_state_bytes(drafter, shape, rows, room, target.info, like)

    def _capacity(self, requests: list[Request]) -> int:
        """Slots that a row needs: prompt, answer and a draft. Raises `UserError` for requests that
        do not fit."""
        most, limit = 0, self.target.info.max_position_embeddings
        for request in requests:
            if request.sampling is not None:
                raise UserError(
                    f"request {request.index} has sampling settings of its own, which only a "
                    "session takes (inference/decoding/session.py)."
                )
            if not request.tokens or request.max_new_tokens < 1:
                raise UserError(
                    f"request {request.index} is empty: a prompt needs at least one token, an "
                    "answer too."
                )
            require_known_tokens(request, self.target.info.vocab_size)
            length = len(request.tokens) + request.max_new_tokens
            if length > limit:
                raise UserError(
                    f"request {request.index} needs {length} positions ({len(request.tokens)} of "
                    f"prompt), but target '{self.target.info.id}' has {limit}. Shorten the prompt "
                    "or decode.max_new_tokens."
                )
            most = max(most, length)
        needed = most + self.tree.num_nodes + 1
        if self.capacity is not None and needed > self.capacity:
            raise UserError(
                f"a request needs {needed} cache slots, but the engine was built with capacity "
                f"{self.capacity}."
            )
        return self.capacity or -(-needed // SLOT_STEP) * SLOT_STEP

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of the target's weights, the drafter's own weights, and the last run's caches.

        A drafter's copies of the target's weights count; weights that it shares do not.
        """
        shared = {parameter.data_ptr() for parameter in self.target.model.parameters()}
        parts = [part for part in unwrapped(self.drafter) if isinstance(part, TrainableDrafter)]
        own = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
        drafter = sum(tensor.nbytes for tensor in own if tensor.data_ptr() not in shared)
        weights = sum(parameter.nbytes for parameter in self.target.model.parameters())
        return {"target": weights, "drafter": drafter, "kv": self._kept.last_bytes}


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts as a list; a text, a conversation or a list of token ids is one prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (Mapping, int))):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _tuned(head: str | Path, target: TargetModel) -> DecodeConfig | None:
    """How to decode greedily with the checkpoint `head`, by its decode.yaml, or None."""
    device, loading = device_facts(target.device), target.loading
    told = advice(Path(str(head)), target.info.revision, device, 1, 0.0, loading=loading)
    if told is None:
        return None
    logger.info("%s: %s", head, told.line)
    return None if told.draft is None else told.draft.on(DecodeConfig())
