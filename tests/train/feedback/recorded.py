"""A finished generation of a random target with the records of its verifications, written as the
stages write them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.manifest import write_manifest
from inference.target.model import TargetModel
from inference.verifications import VerificationLog, record_facts
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import VOCAB, random_target
from train.data.answers import PartWriter, StoredAnswer, merge_parts

DOMAINS = ("code", "chat")
KIND = "layer_skip"


@cache
def target() -> TargetModel:
    return random_target()


@cache
def decoded(kind: str, temperature: float = 0.0, depth: int = 3) -> tuple[Completion, ...]:
    """Answers with details, by index."""
    generator = torch.Generator().manual_seed(4)
    requests = [
        Request(
            number,
            tuple(torch.randint(3, VOCAB, (4 + number,), generator=generator).tolist()),
            7 + number,
            18,
        )
        for number in range(8)
    ]
    decode = DecodeConfig(batch_size=3, temperature=temperature, shape="chain", depth=depth)
    found = Engine(target(), drafter_of(kind, target()), decode, details=True).run(requests)
    return tuple(sorted(found, key=lambda completion: completion.request.index))


def name_of(completion: Completion) -> str:
    return f"row-{completion.request.index}"


def domain_of(completion: Completion) -> str:
    return DOMAINS[completion.request.index % 2]


def tokens_of(completion: Completion) -> list[int]:
    return [*completion.request.tokens, *completion.tokens]


def write_answers(folder: Path, completions: tuple[Completion, ...]) -> Path:
    """A folder as `headstart generate` leaves it."""
    with PartWriter(folder, 100, 1000) as writer:
        for number, one in enumerate(completions):
            tokens, begin = tokens_of(one), len(one.request.tokens)
            spans = ((begin, len(tokens)),)
            writer.add(
                StoredAnswer(
                    name_of(one),
                    number,
                    domain_of(one),
                    tuple(tokens),
                    spans,
                    one.finish,
                    one.request.seed,
                )
            )
    merged = merge_parts(folder, len(completions), shard_rows=3)
    facts = {
        "round": 0,
        "target": target().info.to_dict(),
        "sampling": {"temperature": 0.0},
        "data": {},
        "counts": {},
        "shards": merged.shards,
    }
    write_manifest(folder, "generate", facts)
    return folder


def write_records(
    folder: Path, completions: tuple[Completion, ...], kind: str, redact: bool = False
) -> Path:
    """The records of these completions."""
    engine = Engine(
        target(), drafter_of(kind, target()), DecodeConfig(shape="chain", depth=3), details=True
    )
    log = VerificationLog(folder, record_facts(engine, kind), 10**8, redact)
    for one in completions:
        log.completion(name_of(one), domain_of(one), one, 0.0)
        request = one.request
        log.sequence(
            name_of(one), domain_of(one), request.tokens, one.tokens, request.seed, 0.0, one.finish
        )
    log.flush()
    return folder
