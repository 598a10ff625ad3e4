"""Speed by batch size, draft length, context length and temperature: the conditions under which a
drafter pays off.

Every point compares the same requests with and without drafter, in the same engine with continuous
refill: each block of requests is decoded by plain decoding and by every draft length in turn, and
the order rotates. Intervals resample prompts. A block contains `refills` prompts per row. Blocks
take different prompts as long as there are enough, so a batch of 32 sees the same prompts as a
batch of 1. Seconds exclude prefill, in both arms.

Legend: B rows decoded together, L tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from heads.api.config import Depth, Repeats, Rows, Temperature, Tokens, config
from heads.api.drafter import forget
from heads.api.errors import UserError
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.measure import metrics
from inference.measure.metrics import Outcome, Totals
from inference.measure.prompts import Requests, prompt_seed
from inference.report.model import BestDraft, Profile, ProfilePoint, ProfileSetting
from inference.target.model import TargetModel

Key = TypeVar("Key")
Blocks = Sequence[Sequence[Request]]
PLAIN = 0
"""The draft length that stands for no drafter."""
OWN = -1
"""Stands for the arm's own draft if that is not a chain."""


@config("bench.profile")
@dataclass(frozen=True)
class ProfileConfig:
    """The conditions to vary, one at a time; all empty: no profile."""

    batches: tuple[Rows, ...] = ()
    """Batch sizes, for instance [1,4,16,32]; each draft length is tried at each of them."""
    contexts: tuple[Tokens, ...] = ()
    """Prompt lengths in tokens; the prompts are joined from real ones and decoded one by one."""
    temperatures: tuple[Temperature, ...] = ()
    """Temperatures, for instance [0,1]; decoded one by one."""
    depths: tuple[Depth, ...] = ()
    """Draft lengths tried at each batch size; empty: 1 up to the drafter's own."""
    arms: tuple[str, ...] = ()
    """Drafters to profile; empty: all."""
    blocks: Repeats = 5
    """Blocks of requests per point."""
    refills: Repeats = 2
    """Prompts per row in a block; rows are refilled this often."""

    @property
    def wanted(self) -> bool:
        """Whether anything is to be profiled."""
        return bool(self.batches or self.contexts or self.temperatures)


@dataclass(frozen=True)
class Setting:
    """One condition: the varied setting, and the values of all settings that can be varied."""

    sweep: str
    batch: int
    context: int
    temperature: float


@dataclass(frozen=True)
class Turn:
    """One block decoded by one engine: completions in the order of requests, seconds by phase,
    steps of the batch."""

    completions: list[Completion]
    seconds: dict[str, float]
    steps: int


def prompt_totals(turns: Sequence[Turn], depth: int) -> Totals:
    """Sums over turns by prompt, which intervals resample: a prompt that repeats in several blocks
    is one unit. A block's seconds are divided among its answers by their passes, as all rows of a
    step take the same time. depth: deepest drafted level."""
    numbers: dict[tuple[int, ...], int] = {}
    outcomes = []
    for turn in turns:
        passes = sum(len(done.passes) for done in turn.completions)
        for done in turn.completions:
            number = numbers.setdefault(done.request.tokens, len(numbers))
            share = metrics.divide(len(done.passes), passes)
            seconds = {phase: share * spent for phase, spent in turn.seconds.items()}
            outcomes.append(Outcome(f"prompt-{number}", "", done.passes, seconds))
    return Totals.collect(outcomes, depth)


def take_turns(engines: Mapping[Key, Engine], blocks: Blocks, batch: int) -> dict[Key, list[Turn]]:
    """Every block decoded by every engine in turn; the order rotates. Drafters that remember
    answers forget them before each turn: engines may share one that has answered the same prompts.
    """
    names = list(engines)
    for name in names:  # not counted: buffers, thread pools and graphs settle
        list(engines[name].run(blocks[0][:batch]))
    found: dict[Key, list[Turn]] = {name: [] for name in names}
    for number, block in enumerate(blocks):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            engine = engines[name]
            forget(engine.drafter)
            engine.clock.reset()
            done = engine.completions(block)
            engine.clock.require_agreement()
            found[name].append(Turn(done, dict(engine.clock.seconds), engine.clock.passes))
    return found


def profile(
    config: ProfileConfig, target: TargetModel, arms: Sequence[Arm], requests: Requests, seed: int
) -> Profile:
    """The `profile` block of report.json.

    Raises `UserError` for an arm that is not measured or a context that the target cannot hold.
    """
    names = [arm.name for arm in arms]
    for name in config.arms:
        if name not in names:
            raise UserError(
                f"bench.profile.arms names '{name}', which is not measured. Measured: "
                f"{', '.join(names)}."
            )
    profiled = [arm for arm in arms if not config.arms or arm.name in config.arms]
    points: list[ProfilePoint] = []
    own = round(sum(len(request.tokens) for request in requests.values()) / len(requests))
    for setting in _settings(config, profiled[0].decode.temperature, own):
        for arm in profiled:
            blocks = make_blocks(config, target, setting, arm, requests)
            points += _measure(config, target, arm, setting, blocks, seed)
    return Profile(blocks=config.blocks, refills=config.refills, points=points, best=best(points))


def _settings(config: ProfileConfig, temperature: float, own: int) -> Iterator[Setting]:
    """All conditions. temperature, own: the values if they are not varied; own is the mean length
    of the prompts."""
    for batch in config.batches:
        yield Setting("batch", batch, own, temperature)
    for context in config.contexts:
        yield Setting("context", 1, context, temperature)
    for varied in config.temperatures:
        yield Setting("temperature", 1, own, float(varied))


def make_blocks(
    config: ProfileConfig, target: TargetModel, setting: Setting, arm: Arm, requests: Requests
) -> Blocks:
    """The requests of each block. Prompts repeat in their order, each time with a different seed.
    Raises `UserError` for a context that the target cannot hold."""
    limit, answer = target.info.max_position_embeddings, arm.decode.max_new_tokens
    if setting.sweep == "context" and setting.context + answer > limit:
        raise UserError(
            f"bench.profile.contexts holds {setting.context}; with decode.max_new_tokens={answer} "
            f"that exceeds the {limit} positions of target '{target.info.id}'. Give at most "
            f"{max(limit - answer, 0)}."
        )
    size, asked = setting.batch * config.refills, list(requests.items())

    def made(block: int, place: int) -> Request:
        visit, number = divmod(block * size + place, len(asked))
        name, request = asked[number]
        seed, tokens = prompt_seed(arm.decode.seed, f"{name}/{visit}"), request.tokens
        if setting.sweep == "context":
            tokens = context_of(list(requests.values()), number, setting.context)
        return replace(request, index=place, tokens=tokens, seed=seed)

    return [[made(block, place) for place in range(size)] for block in range(config.blocks)]


def context_of(requests: Sequence[Request], number: int, length: int) -> tuple[int, ...]:
    """A prompt of exactly `length` tokens that ends with prompt `number`, behind others."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < length:
        tokens = (*requests[number].tokens, *tokens)
        number = (number - 1) % len(requests)
    return tokens[-length:]


def _measure(
    config: ProfileConfig,
    target: TargetModel,
    arm: Arm,
    setting: Setting,
    blocks: Blocks,
    seed: int,
) -> list[ProfilePoint]:
    """One setting: plain decoding and every draft length over the same blocks, taking turns."""
    engines = _engines(config, target, arm, setting, blocks)
    turns = take_turns(engines, blocks, setting.batch)
    plain = prompt_totals(turns.pop(PLAIN), 0)
    points = []
    for name, taken in turns.items():
        tree = engines[name].tree
        totals = prompt_totals(taken, tree.max_depth)
        speedup, interval = metrics.speedup(totals, plain, seed)
        points.append(
            ProfilePoint(
                arm=arm.name,
                **vars(setting),
                shape=engines[name].decode.shape,
                depth=tree.max_depth,
                nodes=tree.num_nodes,
                answers=sum(len(block) for block in blocks),
                tau=metrics.tau_estimate(totals, seed).tau,
                tokens_per_second=metrics.tokens_per_second(totals),
                baseline_tokens_per_second=metrics.tokens_per_second(plain),
                speedup=speedup,
                speedup_ci95=interval,
            )
        )
    return points


def _engines(
    config: ProfileConfig, target: TargetModel, arm: Arm, setting: Setting, blocks: Blocks
) -> dict[int, Engine]:
    """An engine without drafter and one per draft, all with the same capacity per row."""
    decode = replace(arm.decode, batch_size=setting.batch, temperature=setting.temperature)
    shape = arm.decode.tree()
    chains = config.depths or tuple(range(1, shape.max_depth + 1))
    drafts: dict[int, DecodeConfig] = {}
    if setting.sweep == "batch":
        depths = [depth for depth in chains if depth <= shape.max_depth]
        bare: dict[str, Any] = {"choices": (), "adaptive_lengths": (), "adaptive_costs": ()}
        drafts = {depth: replace(decode, shape="chain", depth=depth, **bare) for depth in depths}
    if setting.sweep != "batch" or not shape.is_chain:
        drafts[OWN] = decode
    if not drafts:
        raise UserError(
            f"bench.profile.depths {list(config.depths)} holds none that '{arm.name}' can draft; "
            f"its deepest draft has {shape.max_depth} tokens."
        )
    room = max(len(item.tokens) + item.max_new_tokens for block in blocks for item in block)
    capacity = room + max(draft.tree().num_nodes for draft in drafts.values()) + 1
    engines = {PLAIN: Engine(target, None, decode.without_draft(), capacity=capacity)}
    for name, draft in drafts.items():
        engines[name] = Engine(target, arm.drafter, draft, capacity=capacity)
    return engines


def best(points: Sequence[ProfilePoint]) -> list[BestDraft]:
    """The draft with the largest speedup per arm and setting, or plain decoding at depth 0."""
    groups: dict[tuple[Any, ...], list[ProfilePoint]] = {}
    for point in points:
        groups.setdefault(point.key[:5], []).append(point)
    found = []
    for key, group in groups.items():
        top = max(group, key=lambda point: point.speedup)
        draft, speed, speedup = (top.shape, top.depth), top.tokens_per_second, top.speedup
        if speedup <= 1.0:
            draft, speed, speedup = ("none", 0), top.baseline_tokens_per_second, 1.0
        setting = dict(zip(ProfileSetting.model_fields, (*key, *draft), strict=True))
        found.append(BestDraft(**setting, tokens_per_second=speed, speedup=speedup))
    return found
