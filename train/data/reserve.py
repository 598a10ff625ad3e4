"""Holds prompts out of the data itself: some for tau during training, some for measuring.

Whole conversations are chosen by a hash of their users' texts. So the same ones are chosen whatever
the order of the rows, and rows of one conversation are never on both sides. Rows that repeat a
chosen one, exactly or nearly (`train.data.dedup.overlap`), are not trained on either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heads.api.errors import UserError
from inference.measure.prompts import Prompt, load_prompts
from train.data.config import DataConfig, ReserveConfig
from train.data.conversation import before_answer, beginning_of, places_to_answer
from train.data.dedup.duplicates import BENCH, KEPT, REPEATS_HELD, VALIDATION
from train.data.dedup.overlap import SAMPLE, Asked, PromptIndex, asked, joined
from train.data.dedup.shingles import normalise, whole
from train.data.permute import mix
from train.data.sources import Row
from train.data.tables import BadRowError

UNUSABLE = (1 << 64) - 1
"""Stands for the conversation of a row that has no prompt."""
LEAST = {"bench": 2, "validation": 2}
"""Prompts that a measurement needs: one of them warms up. (Rounds measure on validation
prompts.)"""
FEWEST = {"bench": 2, "validation": 1}
"""The same if half of the conversations are fewer than `LEAST`: tau alone needs no warm-up."""
VERDICTS = {"bench": BENCH, "validation": VALIDATION}
TOGETHER = 1024
"""Rows that are loaded together."""

Decode = Callable[[tuple[int, ...]], str]
Fits = Callable[[Prompt], bool]


@dataclass
class StoredRows:
    """The rows that were read: their number, conversations by row, and how to load them."""

    total: int
    conversations: NDArray[np.uint64]
    load: Callable[[Sequence[int]], list[Row]]
    """Usable rows by number, in ascending order."""


@dataclass
class Reserved:
    """The prompts that were held out, by use: validation, bench."""

    prompts: dict[str, list[Prompt]] = field(default_factory=dict)


def conversation_of(row: Row, data: DataConfig, decode: Decode) -> int:
    """Hash of a row's conversation; `UNUSABLE` for a row without a prompt."""
    try:
        prompt_of(row, data)
    except (BadRowError, UserError):
        return UNUSABLE
    content = joined([normalise(text) for text in user_texts(row, decode)])
    return UNUSABLE if not len(content) else min(whole(content), UNUSABLE - 1)


def prompt_of(row: Row, data: DataConfig) -> Prompt:
    """The part of a row that the target answers; raises `BadRowError` if there is none."""
    named: tuple[str, str] = (row.id, row.domain)
    if row.text is not None:
        return Prompt(*named, text=beginning_of(row.text))
    if row.messages is None:
        tokens = prompt_tokens(row, data.turn)
        if not tokens:
            raise BadRowError("there is no prompt before the answer")
        return Prompt(*named, tokens=tokens)
    end = places_to_answer(row.messages, "first" if data.turn == "first" else "last")[0]
    messages = before_answer(row.messages, end, data.reasoning)
    given: dict[str, Any] = {"tools": row.tools, "arguments": dict(data.template_arguments) or None}
    return Prompt(*named, messages=tuple(messages), **given)


def prompt_tokens(row: Row, turn: str) -> tuple[int, ...]:
    """The tokens of a pre-tokenised row before its last answer (turn first: the first one)."""
    tokens, spans = row.tokens or (), row.spans
    return tokens if not spans else tokens[: spans[0 if turn == "first" else -1][0]]


def user_texts(row: Row, decode: Decode) -> list[str]:
    """The texts of a row's users."""
    if row.text is not None:
        return [row.text]
    if row.messages is None:
        return [decode(prompt_tokens(row, "last"))]
    return [message["content"] for message in row.messages if message["role"] == "user"]


def reserve(
    data: DataConfig, rows: StoredRows, verdict: NDArray[np.uint8], decode: Decode, fits: Fits
) -> Reserved:
    """Choose the prompts and mark their rows, and those that repeat them, in `verdict` [total].
    Raises `UserError` if there are too few conversations. fits: whether the target can answer."""
    config, found = data.reserve, Reserved()
    if config.prompts:
        known = load_prompts(config.prompts)
        index = PromptIndex([asked_prompt(one, decode) for one in known], data.near_share)
    else:
        chosen = choose(data, rows, verdict, fits)
        compared = []
        for use, pairs in chosen.items():
            found.prompts[use] = [prompt for _, prompt in pairs]
            verdict[[row.index for row, _ in pairs]] = VERDICTS[use]
            for row, prompt in pairs:
                own, texts = asked_prompt(prompt, decode), user_texts(row, decode)
                keys = (*own.keys, whole(joined([normalise(text) for text in texts])))
                compared.append(Asked(keys, own.texts))
        index = PromptIndex(compared, data.near_share)
    mark_repeats(index, rows, verdict, decode)
    return found


def choose(
    data: DataConfig, rows: StoredRows, verdict: NDArray[np.uint8], fits: Fits
) -> dict[str, list[tuple[Row, Prompt]]]:
    """The rows to hold out and their prompts, by use."""
    config, keys = data.reserve, rows.conversations
    usable = np.flatnonzero((verdict == KEPT) & (keys != np.uint64(UNUSABLE)))
    ranks = mix(keys[usable] ^ mix(np.array([config.seed + 1], dtype=np.uint64)))
    _, firsts = np.unique(ranks, return_index=True)
    order = usable[firsts]
    if not len(order):  # generation reports why no row can be used
        return {}
    wanted = counts_of(config, len(order))
    found = list(islice(candidates(data, rows, order.tolist(), fits), sum(wanted.values())))
    if len(found) < sum(wanted.values()):  # these are all that the target can answer
        wanted = counts_of(config, len(found), f", of {len(order)}, whose prompts fit the target")
    pairs = iter(found)
    return {use: list(islice(pairs, count)) for use, count in wanted.items()}


def counts_of(config: ReserveConfig, conversations: int, which: str = "") -> dict[str, int]:
    """How many prompts are held out, by use. If there are few conversations, as many as a
    measurement needs at least; raises `UserError` if none would be left to train on. which: says
    for the error what is special about these conversations."""
    wanted = {
        use: min(most, max(LEAST[use], int(conversations * config.share)))
        for use in LEAST
        if (most := getattr(config, use))
    }
    too_few = 2 * sum(wanted.values()) > conversations
    if too_few and all(count <= LEAST[use] for use, count in wanted.items()):
        wanted = {use: min(count, FEWEST[use]) for use, count in wanted.items()}
        too_few = sum(wanted.values()) >= conversations
    if too_few:
        counts = " and ".join(f"{count} for {use}" for use, count in wanted.items())
        raise UserError(
            f"the data has {conversations} usable conversations{which}: too few to hold prompts "
            f"out of it ({counts}). Give more data, or prompts of your own: "
            "train.prompts=[validation.jsonl], and bench=jsonl bench.prompts=measured.jsonl "
            "(data.reserve.validation=0 and data.reserve.bench=0 hold nothing out)."
        )
    return wanted


def candidates(
    data: DataConfig, rows: StoredRows, order: Sequence[int], fits: Fits
) -> Iterator[tuple[Row, Prompt]]:
    """Yield the rows whose prompts the target can answer, in the given order, one at a time."""
    for numbers in slices(order):
        loaded = {row.index: row for row in rows.load(sorted(numbers))}
        for number in numbers:
            prompt = prompt_of(loaded[number], data)
            if fits(prompt):
                yield loaded[number], prompt


def mark_repeats(
    index: PromptIndex, rows: StoredRows, verdict: NDArray[np.uint8], decode: Decode
) -> None:
    """Mark the kept rows that repeat a prompt of the index."""

    def compared(numbers: Sequence[int]) -> Iterator[tuple[int, Asked]]:
        for part in slices(numbers):
            for row in rows.load(part):
                yield row.index, asked(user_texts(row, decode))

    some = np.unique(np.linspace(0, rows.total - 1, min(rows.total, SAMPLE)).astype(np.int64))
    index.learn(one for _, one in compared(some.tolist()))
    for number, one in compared(np.flatnonzero(verdict == KEPT).tolist()):
        if any(index.find(one)):
            verdict[number] = REPEATS_HELD


def slices(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """`TOGETHER` of them at a time."""
    return (numbers[at : at + TOGETHER] for at in range(0, len(numbers), TOGETHER))


def asked_prompt(prompt: Prompt, decode: Decode) -> Asked:
    """The compared parts of a prompt: all its user's texts, as one text and by shingles."""
    if prompt.tokens is not None:
        said = [decode(prompt.tokens)]
    elif prompt.text is not None:
        said = [prompt.text]
    else:
        messages = prompt.messages or ()
        said = [message["content"] for message in messages if message["role"] == "user"]
    texts = tuple(map(normalise, said))
    return Asked((whole(joined(texts)),), texts)
