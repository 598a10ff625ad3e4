"""Fresh traffic against a reference: from records, from a server's metrics, or decoded now."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from heads.api.checkpoint import WEIGHTS_FILE, load_drafter, read_config
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import DraftSettings
from inference.decoding.engine import Engine
from inference.manifest import file_sha256
from inference.measure.prompts import Prompt, to_requests
from inference.staleness.config import WatchConfig
from inference.staleness.evidence import Sums
from inference.staleness.reference import DomainAnswers, Reference, passes_within
from inference.staleness.sequential_test import DriftTest
from inference.staleness.sources import (
    Fresh,
    decode_fresh,
    read_recorded,
    read_scrapes,
    with_system,
)
from inference.target.model import TargetModel


@dataclass
class Comparison:
    """A reference, the test against it, and the fresh answers by domain."""

    config: WatchConfig
    reference: Reference
    answers: dict[str, DomainAnswers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known, config = self.reference, self.config
        evidence = known.evidence()
        self.test = DriftTest(known.grid, known.most, evidence, config.tolerance, config.alarm_rate)

    def add(self, fresh: Iterable[Fresh], *, stop: bool = False) -> None:
        """Give the test one answer after the other. stop: end with the first alarm."""
        for answer in fresh:
            count(self.answers, answer)
            self.test.add(answer.domain, sum(answer.passes), len(answer.passes))
            if stop and self.test.alarms:
                break

    def add_records(self, folder: Path) -> None:
        self.add(read_recorded(folder, self.reference))

    def add_metrics(self, paths: Sequence[str]) -> None:
        """Give the test one look per scrape of a server's metrics."""
        test, reference = self.test, self.reference
        widest = max(reference.domains, key=reference.spread)
        for totals in read_scrapes([Path(path) for path in paths]):
            for domain, (accepted, passes) in totals.items():
                known = domain if domain in test.reference else widest
                spread, prior = reference.spread(known), test.reference[known].passes
                test.replace(domain, Sums(test.grid, accepted, passes, spread, prior))

    def require_fresh(self) -> None:
        """Raise `UserError` where no answer was of a domain that the reference knows."""
        if not self.test.fresh:
            seen = ", ".join(map(repr, self.test.unknown)) or "none"
            raise UserError(
                "no fresh answer is of a domain that the reference knows "
                f"({', '.join(self.reference.domains)}); found: {seen}. Give traffic of those "
                "domains, or make a reference with these by watch.learn=true."
            )

    def as_reference(self, target: dict[str, str], source: str) -> Reference:
        """The fresh answers as a reference: to be the next one, or to be looked at one by one."""
        return replace(
            self.reference,
            target=target,
            tallies=self.answers,
            system=self.config.system,
            source=source,
            figures={},
        )


def count(answers: dict[str, DomainAnswers], fresh: Fresh) -> None:
    answers.setdefault(fresh.domain, DomainAnswers()).answers.append(fresh.passes)


def learn_reference(
    config: WatchConfig,
    prompts: Sequence[Prompt],
    checkpoint: Path,
    target: TargetModel,
    decode: DecodeConfig,
    source: str,
) -> Reference:
    """The reference of a drafter, whose own target decodes `prompts`; raises `UserError` for too
    few of every domain. source: where the reference is to lie, for messages."""
    answers: dict[str, DomainAnswers] = {}
    for fresh in decode_prompts(config, prompts, checkpoint, target, decode, changed=False):
        count(answers, fresh)
    weights = file_sha256(checkpoint / WEIGHTS_FILE)
    reference = Reference(
        target={"id": target.info.id, "revision": target.info.revision},
        drafter={"kind": str(read_config(checkpoint)["kind"]), "weights_sha256": weights},
        draft=draft_of(decode),
        temperature=decode.temperature,
        tokens=decode.max_new_tokens,
        tallies=answers,
        depth=decode.tree().max_depth,
        source=source,
        system=config.system,
    )
    reference.evidence()
    return reference


def decode_prompts(
    config: WatchConfig,
    prompts: Sequence[Prompt],
    checkpoint: Path,
    target: TargetModel,
    decode: DecodeConfig,
    changed: bool,
) -> Iterable[Fresh]:
    """Decode prompts in random order.

    changed: whether the target may be another version of the one that the drafter was trained for.
    """
    chosen = with_system(prompts, config.system)
    random.Random(config.seed).shuffle(chosen)
    chosen = chosen[: config.max_prompts]
    drafter = load_drafter(checkpoint, target.info, target.weights, changed_target=changed)
    limit = target.info.max_position_embeddings
    requests = to_requests(chosen, target.tokenizer, decode, capacity=limit, overlong="skip")
    if not requests:
        raise UserError(
            f"no prompt fits into the target's {limit} positions together with an answer of "
            f"{decode.max_new_tokens} tokens. Give shorter prompts."
        )
    most = passes_within(decode.max_new_tokens, decode.tree().max_depth)
    return decode_fresh(Engine(target, drafter, decode), requests, chosen, most)


def draft_of(decode: DecodeConfig) -> DraftSettings:
    draft: DraftSettings = {"shape": decode.shape, "depth": decode.depth, "choices": []}
    if decode.shape in ("tree", "dynamic"):
        draft["choices"] = [list(choice) for choice in decode.choices]
        draft |= {"nodes": decode.nodes, "width": decode.width}
    return draft
