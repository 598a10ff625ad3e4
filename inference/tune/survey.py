"""What the tuner knows of acceptance: every draft walked along the target's answers to the tuning
prompts, at one temperature.

The prompts are cut into blocks that a batch decodes from beginning to end; a block is what speeds
are predicted for, what is run to check them, and what their intervals resample.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from heads.api.errors import UserError
from inference.decoding.adaptive.lengths import Limits
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import NONE, Draft, DraftSettings
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.kernels.packed_linear import packed_linears
from inference.measure.metrics import Outcome, TauEstimate, Totals, tau_estimate
from inference.measure.prompts import Prompt, prompt_seed, select_prompts, to_requests
from inference.target.model import TargetModel
from inference.tune.config import TuneConfig
from inference.tune.drafts import deepest, grid
from inference.tune.replay import Replay
from inference.tune.tree_search import RankStatistics, measure_ranks
from inference.tune.workload import Answered, Steps, batch_steps

REFILLS = 2
"""Prompts per row in a block, so that a batch is decoded as it is refilled."""
FEWEST_BLOCKS = 6
"""Blocks at least: intervals resample them."""


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
        """Choose prompts as `config` says, those that fit; raises `UserError` when fewer than two
        are left."""
        known = sorted({prompt.domain for prompt in prompts})
        unknown = [name for name in config.domains if name not in known]
        if unknown:
            raise UserError(
                f"tune.domains names {unknown}, but the prompts are of: {', '.join(known)}."
            )
        pool = [
            prompt for prompt in prompts if not config.domains or prompt.domain in config.domains
        ]
        chosen = select_prompts(pool, config.prompts_per_domain, config.seed)
        random.Random(config.seed).shuffle(chosen)
        room = (
            target.info.max_position_embeddings
            - max((*config.nodes, *config.depths))
            - config.tree_depth
            - 2
        )
        fitting = to_requests(chosen, target.tokenizer, decode, capacity=room, overlong="skip")
        if len(fitting) < 2:
            raise UserError(
                f"tuning needs at least two prompts that fit into {room} positions with "
                f"tune.max_new_tokens={decode.max_new_tokens}; {len(fitting)} do. Give other "
                "prompts (tune.prompts) or shorter answers."
            )
        kept = [chosen[request.index] for request in fitting]
        requests = tuple(replace(request, index=place) for place, request in enumerate(fitting))
        return cls(
            requests,
            tuple(item.id for item in kept),
            tuple(item.domain for item in kept),
            decode.seed,
        )

    @property
    def mean_prompt(self) -> int:
        """Tokens of a prompt, on average."""
        return round(sum(len(request.tokens) for request in self.requests) / len(self.requests))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(request.tokens) + request.max_new_tokens for request in self.requests)

    def blocks(self, batch: int, rounds: int) -> list[list[int]]:
        """Numbers of the prompts of each block: all prompts `rounds` times, a block twice as large
        as the batch."""
        count, size = len(self.requests), REFILLS * batch
        blocks = max(FEWEST_BLOCKS, -(-count // size)) * rounds
        return [
            [(block * size + place) % count for place in range(size)] for block in range(blocks)
        ]

    def block_requests(self, blocks: Sequence[Sequence[int]]) -> list[list[Request]]:
        """The requests of blocks. A prompt that comes again samples with another seed, so that its
        text is another."""
        visits = dict.fromkeys(range(len(self.requests)), 0)
        found = []
        for block in blocks:
            requests = []
            for place, number in enumerate(block):
                seed = prompt_seed(self.seed, f"{self.ids[number]}/{visits[number]}")
                requests.append(replace(self.requests[number], index=place, seed=seed))
                visits[number] += 1
            found.append(requests)
        return found


class SurveyedDraft(TypedDict):
    """A draft with its passes over every answer."""

    draft: DraftSettings
    answers: list[tuple[int, list[tuple[int, int, int, int]]]]
    """(tokens of the prompt, (accepted, committed, rejected, live) per pass)."""


class Ranks(TypedDict):
    """Acceptance by depth and rank; see `RankStatistics`."""

    tested: list[int]
    hits: list[list[int]]


class SurveyContent(TypedDict):
    """A `Survey` as JSON holds it."""

    temperature: float
    drafts: list[SurveyedDraft]
    ranks: Ranks
    refused: dict[str, str]


@dataclass
class Survey:
    """Acceptance of every draft at one temperature. answers: draft -> per prompt what answering it
    takes; ranks: by depth."""

    temperature: float
    answers: Mapping[Draft, list[Answered]]
    ranks: RankStatistics
    refused: Mapping[str, str]

    @property
    def drafts(self) -> list[Draft]:
        """All that are weighed, plain decoding first."""
        return list(self.answers)

    def steps(self, draft: Draft, blocks: Sequence[Sequence[int]], batch: int) -> Steps:
        """The steps in which a batch decodes the blocks."""
        total = Steps()
        for block in blocks:
            total += batch_steps([self.answers[draft][number] for number in block], batch)
        return total

    def estimate(self, draft: Draft, seed: int = 0) -> TauEstimate:
        """tau of a draft on the prompts, its interval, and the survival by depth."""
        outcomes = [
            Outcome(str(number), "", answer.passes)
            for number, answer in enumerate(self.answers[draft])
        ]
        return tau_estimate(Totals.collect(outcomes, draft.depth), seed)

    def to_dict(self) -> SurveyContent:
        """As JSON holds it. A survey is not timed, so it can be made beforehand on a busy
        machine."""
        drafts: list[SurveyedDraft] = [
            {
                "draft": draft.plain(),
                "answers": [
                    (
                        answer.prompt,
                        [(r.accepted, r.committed, int(r.rejected), r.live) for r in answer.passes],
                    )
                    for answer in answers
                ],
            }
            for draft, answers in self.answers.items()
        ]
        return {
            "temperature": self.temperature,
            "drafts": drafts,
            "ranks": {"tested": self.ranks.tested, "hits": self.ranks.hits},
            "refused": dict(self.refused),
        }

    @classmethod
    def from_dict(cls, values: SurveyContent) -> Survey:
        """Read back `to_dict`."""
        answers = {
            Draft.read(item["draft"]): [
                Answered(prompt, [PassRecord(a, c, bool(r), live=live) for a, c, r, live in passes])
                for prompt, passes in item["answers"]
            ]
            for item in values["drafts"]
        }
        ranks = RankStatistics(values["ranks"]["tested"], values["ranks"]["hits"])
        return cls(values["temperature"], answers, ranks, values["refused"])


def survey(
    config: TuneConfig, target: TargetModel, drafter: Any, task: Task, decode: DecodeConfig
) -> Survey:
    """Let the target answer all prompts once at `decode.temperature`, and walk every draft along
    the answers.

    Raises `UserError` for a drafter that learns from refused nodes, which only decoding shows it.
    """
    if drafter.needs.verified:
        raise UserError(
            f"kind '{drafter.kind}' learns from the verification of its whole draft, so its "
            "acceptance cannot be replayed. Measure its drafts with `headstart measure "
            "bench.profile.batches=[1,4,16]`."
        )
    requests = task.block_requests([list(range(len(task.requests)))])[0]
    longest = deepest(config, target, drafter)
    plain = replace(decode, shape="none", batch_size=min(16, len(requests)))
    texts = sorted(Engine(target, None, plain).run(requests), key=lambda done: done.request.index)
    ranks = RankStatistics.empty(longest, 1)
    if config.nodes:
        ranks = measure_ranks(
            target, drafter, requests, replace(decode, shape="chain", depth=longest)
        )
    drafts, refused = grid(config, target, drafter, ranks.accuracy() if config.nodes else [])
    replay = Replay(target, drafter, texts, decode.temperature)
    answers = {NONE: [Answered(len(done.request.tokens), done.passes) for done in texts]}
    with packed_linears(drafter):
        for draft in drafts[1:]:
            own = draft.on(decode)
            limits = None
            if draft.family == "adaptive":
                limits = Limits(
                    own.adaptive_settings(), own.temperature, draft.depth, None, target.device
                )
            passes = replay.passes(draft.tree(decode, target.device), limits)
            answers[draft] = [
                Answered(len(done.request.tokens), records)
                for done, records in zip(texts, passes, strict=True)
            ]
    return Survey(decode.temperature, answers, ranks, refused)
