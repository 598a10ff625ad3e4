"""The tuner's survey of acceptance: every draft of its grid on the tuning prompts, at one
temperature. If the rule keeps the target's text, drafts are walked along the target's own answers
(`inference.tune.replay`). If it keeps only the text's distribution, every draft decodes.

The prompts are divided into blocks that a batch decodes from beginning to end. Speeds are predicted
for blocks and checked by running blocks. Blocks repeat prompts, so intervals resample prompts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from heads.api.drafter import forget
from heads.api.errors import UserError
from heads.api.tree import DartreeShape
from inference.decoding.adaptive.lengths import Limits
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.decoding.rules.names import TEXT, promise
from inference.engines.settings import STOPPABLE
from inference.kernels.packed_linear import packed_linears
from inference.measure.metrics import Outcome, TauEstimate, Totals, tau_estimate
from inference.measure.prompts import Prompt, prompt_seed, select_prompts, to_requests
from inference.target.memory import drafter_state_bytes
from inference.target.model import TargetModel
from inference.tune.confidence import method_of
from inference.tune.config import TuneConfig
from inference.tune.replay import Replay
from inference.tune.tree_search import RankStatistics, measure_ranks, search_tree
from inference.tune.workload import Answered, Steps, batch_steps

REFILLS = 2
"""Prompts per row in a block, so that rows are refilled."""
FEWEST_BLOCKS = 6
"""Fewest blocks, so that drafts take several turns."""


@dataclass(frozen=True)
class Task:
    """The tuning prompts as requests, in an order that mixes domains, with their ids and
    domains."""

    requests: tuple[Request, ...]
    ids: tuple[str, ...]
    domains: tuple[str, ...]
    seed: int

    @classmethod
    def of(
        cls,
        config: TuneConfig,
        target: TargetModel,
        prompts: Sequence[Prompt],
        decode: DecodeConfig,
    ) -> Task:
        """Choose prompts as `config` says, among those that fit; raises `UserError` if fewer than
        two are left."""
        known = sorted({prompt.domain for prompt in prompts})
        wanted = config.domains or known
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise UserError(
                f"tune.domains names {unknown}, but the prompts are of: {', '.join(known)}."
            )
        pool = [prompt for prompt in prompts if prompt.domain in wanted]
        chosen = select_prompts(pool, config.prompts_per_domain, config.seed)
        random.Random(config.seed).shuffle(chosen)
        widest = max((*config.nodes, *config.depths)) + config.tree_depth + 2
        room = target.info.max_position_embeddings - widest
        fitting = to_requests(chosen, target.tokenizer, decode, capacity=room, overlong="skip")
        if len(fitting) < 2:
            raise UserError(
                f"tuning needs at least two prompts that fit into {room} positions with "
                f"tune.max_new_tokens={decode.max_new_tokens}; {len(fitting)} do. Give other "
                "prompts (tune.prompts) or shorter answers."
            )
        kept = [chosen[request.index] for request in fitting]
        requests = tuple(replace(request, index=place) for place, request in enumerate(fitting))
        ids, domains = tuple(item.id for item in kept), tuple(item.domain for item in kept)
        return cls(requests, ids, domains, decode.seed)

    @property
    def mean_prompt(self) -> int:
        """Tokens of a prompt, on average."""
        return round(sum(len(request.tokens) for request in self.requests) / len(self.requests))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(request.tokens) + request.max_new_tokens for request in self.requests)

    def blocks(self, batch: int, rounds: int) -> list[list[int]]:
        """Numbers of the prompts of each block: all prompts at least `rounds` times, in blocks
        twice as large as the batch."""
        count, size = len(self.requests), REFILLS * batch
        blocks = max(FEWEST_BLOCKS, -(-count // size)) * rounds
        starts = range(0, blocks * size, size)
        return [[place % count for place in range(start, start + size)] for start in starts]

    def block_requests(self, blocks: Sequence[Sequence[int]]) -> list[list[Request]]:
        """The requests of blocks. A repeated prompt samples with another seed, so that its text
        differs."""
        visits, found = Counter[int](), []
        for block in blocks:
            requests = []
            for place, number in enumerate(block):
                seed = prompt_seed(self.seed, f"{self.ids[number]}/{visits[number]}")
                requests.append(replace(self.requests[number], index=place, seed=seed))
                visits[number] += 1
            found.append(requests)
        return found


@dataclass
class Survey:
    """Acceptance of every draft at one temperature. answers: for each draft, the passes of every
    prompt's answer; ranks: by depth; everywhere: for each greedy chain that an engine may end
    early, a pass at every position of every answer."""

    temperature: float
    answers: Mapping[Draft, list[Answered]]
    ranks: RankStatistics
    refused: Mapping[str, str]
    everywhere: Mapping[Draft, list[list[PassRecord]]] = field(default_factory=dict, compare=False)

    @property
    def drafts(self) -> list[Draft]:
        """All compared drafts, plain decoding first."""
        return list(self.answers)

    def steps(self, draft: Draft, blocks: Sequence[Sequence[int]], batch: int) -> Steps:
        """The steps that a batch takes to decode the blocks."""
        answers = self.answers[draft]
        each = (batch_steps([answers[number] for number in block], batch) for block in blocks)
        return sum(each, Steps())

    def estimate(self, draft: Draft, seed: int = 0) -> TauEstimate:
        """tau of a draft on the prompts, its interval, and the survival by depth."""
        numbered = enumerate(self.answers[draft])
        outcomes = [Outcome(str(number), "", answer.passes) for number, answer in numbered]
        return tau_estimate(Totals.collect(outcomes, draft.depth), seed)

    def to_dict(self) -> dict[str, object]:
        """The survey for JSON. A survey is not timed, so it can be made beforehand on a busy
        machine. drafts[].answers: (tokens of the prompt, (accepted, committed, rejected, live) per
        pass). Without `everywhere`."""
        drafts = []
        for draft, answers in self.answers.items():
            rows = [(answer.prompt, [_numbers(r) for r in answer.passes]) for answer in answers]
            drafts.append({"draft": draft.plain(), "answers": rows})
        facts = {"temperature": self.temperature, "refused": dict(self.refused)}
        return {**facts, "drafts": drafts, "ranks": vars(self.ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Survey:
        """Read the result of `to_dict`."""
        answers = {
            Draft.read(item["draft"]): [
                Answered(prompt, [PassRecord(a, c, bool(r), live=live) for a, c, r, live in passes])
                for prompt, passes in item["answers"]
            ]
            for item in values["drafts"]
        }
        ranks = RankStatistics(**values["ranks"])
        return cls(values["temperature"], answers, ranks, values["refused"])


def _numbers(record: PassRecord) -> tuple[int, int, int, int]:
    return record.accepted, record.committed, int(record.rejected), record.live


def grid(
    config: TuneConfig, target: TargetModel, drafter: Any, accuracy: Sequence[Sequence[float]]
) -> tuple[list[Draft], dict[str, str]]:
    """All drafts to compare, plain decoding first, and those left out: their labels and why the
    drafter refused them.

    accuracy [D][R]: measured rates by depth and rank, for searching static trees; empty: no static
    trees.
    """
    wanted = [Draft("chain", depth) for depth in sorted(set(config.depths))]
    depth, width = config.tree_depth, config.width
    for nodes in sorted(set(config.nodes)):
        if accuracy and accuracy[0][0] > 0:
            found = search_tree(accuracy[:depth], nodes)
            levels = max(len(path) for path in found.choices)
            if levels < len(found.choices):  # not a chain, which is included already
                wanted.append(Draft("tree", levels, found.choices))
        if nodes <= 1 + width + (depth - 1) * width**2:
            wanted.append(Draft("dynamic", min(depth, nodes - 1), (), nodes, width))
        least = DartreeShape(2, min(depth, nodes - 1), width, config.candidates)
        if nodes <= 1 + sum(least.level_sizes()):
            sizes = least.max_depth, (), nodes, width, config.candidates
            penalties = sorted(set(config.depth_penalties))
            wanted += [Draft("dartree", *sizes, penalty) for penalty in penalties]
    reasons = {draft: refusal(target, drafter, draft) for draft in dict.fromkeys(wanted)}
    kept = [NONE, *(draft for draft, why in reasons.items() if not why)]
    refused = {draft.label: why for draft, why in reasons.items() if why}
    longest = max(draft.depth if draft.shape == "chain" else 0 for draft in kept)
    if longest > 1 and not drafter.needs.verified:
        kept += [
            Draft("chain", longest, adaptive="confidence", adaptive_threshold=threshold)
            for threshold in sorted(set(config.thresholds))
        ]
    if len(kept) == 1:
        raise UserError(
            f"kind '{drafter.kind}' can draft none of the shapes to choose from: "
            f"{next(iter(refused.values()))} Give shorter ones in tune.depths."
        )
    return kept, refused


def refusal(target: TargetModel, drafter: Any, draft: Draft) -> str:
    """Why `drafter` cannot fill a draft; empty if it can."""
    try:
        tree = draft.tree(DecodeConfig(), target.device)
        drafter_state_bytes(drafter, tree, 1, 64, target.info, target.weights.embedding)
    except UserError as error:
        return str(error)
    return ""


def deepest(config: TuneConfig, target: TargetModel, drafter: Any) -> int:
    """The longest chain of the grid, including trees' levels, that the drafter can draft; at least
    1."""
    asked = sorted({*config.depths, config.tree_depth}, reverse=True)
    return next((d for d in asked if not refusal(target, drafter, Draft("chain", d))), 1)


def survey(
    config: TuneConfig, target: TargetModel, drafter: Any, task: Task, decode: DecodeConfig
) -> Survey:
    """The passes of every draft on all prompts, at `decode.temperature`, under the rule that
    `decode.rule` selects for the draft's shape. Every draft decodes if answers follow a grammar,
    which leads drafts, or if the noise is not shared (`decode.share_noise=false`).

    Raises `UserError` for a drafter that learns from rejected nodes, which only decoding provides.
    """
    if drafter.needs.verified:
        raise UserError(
            f"kind '{drafter.kind}' learns from the verification of its whole draft, so its "
            "acceptance cannot be replayed. Measure its drafts with `headstart measure "
            "bench.profile.batches=[1,4,16]`."
        )
    requests = task.block_requests([list(range(len(task.requests)))])[0]
    longest = deepest(config, target, drafter)
    plain = replace(decode.without_draft(), batch_size=min(16, len(requests)))
    texts = Engine(target, None, plain).completions(requests)
    ranks, accuracy = RankStatistics.empty(longest, 1), list[list[float]]()
    if config.nodes:
        chain = replace(decode, shape="chain", depth=longest)
        ranks = measure_ranks(target, drafter, requests, chain)
        accuracy = ranks.accuracy()
    drafts, refused = grid(config, target, drafter, accuracy)
    replay = Replay(target, drafter, texts, decode.temperature)
    passes: dict[Draft, Sequence[Sequence[PassRecord]]] = {NONE: [done.passes for done in texts]}
    free = not any(done.request.constraint for done in texts)
    known = free and (decode.share_noise or decode.temperature == 0)
    with packed_linears(drafter):
        for draft in drafts[1:]:
            if known and promise(draft.on(decode).acceptance, decode.temperature) == TEXT:
                passes[draft] = replayed(replay, draft, decode)
            else:
                passes[draft] = decoded(target, drafter, draft, requests, plain)
        stoppable = known and decode.temperature == 0 and method_of(drafter) in STOPPABLE
        everywhere = {
            draft: replay.passes(draft.tree(decode, target.device), everywhere=True)
            for draft in drafts
            if stoppable and draft.family == "chain"
        }
    lengths = [len(done.request.tokens) for done in texts]
    answers = {
        draft: [Answered(*pair) for pair in zip(lengths, found, strict=True)]
        for draft, found in passes.items()
    }
    return Survey(decode.temperature, answers, ranks, refused, everywhere)


def replayed(replay: Replay, draft: Draft, decode: DecodeConfig) -> list[list[PassRecord]]:
    """The passes of a draft along the target's texts, per prompt."""
    limits, device = None, replay.target.device
    if draft.family == "adaptive":
        stops = draft.on(decode).adaptive_settings()
        limits = Limits(stops, decode.temperature, draft.depth, None, device)
    return replay.passes(draft.tree(decode, device), limits)


def decoded(
    target: TargetModel,
    drafter: Any,
    draft: Draft,
    requests: Sequence[Request],
    decode: DecodeConfig,
) -> list[list[PassRecord]]:
    """The passes in which `draft` answers `requests` (numbered 0, 1, ...), per request. It is
    needed for rules whose text depends on the draft. A drafter that remembers answers forgets those
    to other drafts."""
    forget(drafter)
    engine = Engine(target, drafter, draft.on(decode))
    return [done.passes for done in engine.completions(requests)]
