"""Finds prompts of a measurement that were trained on, exactly or nearly, by reading the answers
that a drafter learned from once more.

It works on tokens, because folders of answers hold nothing else. A text is cut at special tokens
into the segments of its chat template, so a prompt is also found under another system message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from heads.api.errors import UserError
from inference.measure.prompts import Prompt
from inference.target.chat import closing_ids
from train.data.answers import read_answers
from train.data.dedup.overlap import SAMPLE, Asked, PromptIndex, joined
from train.data.dedup.shingles import Bytes, normalise, whole
from train.data.parquet import readable

NEAR_SHARE = 0.8
"""Share of a prompt's own text that makes a row a near repeat; as `data.near_share`."""
ROWS = 256
"""Rows of a shard that are read together."""


@dataclass
class Leaks:
    """The prompts that were trained on, by id, and how many rows were compared."""

    rows: int = 0
    exact: set[str] = field(default_factory=set)
    near: set[str] = field(default_factory=set)

    @property
    def all(self) -> set[str]:
        """Both kinds."""
        return self.exact | self.near


def find_leaks(prompts: Sequence[Prompt], folders: Sequence[Path], tokenizer: Any) -> Leaks:
    """Compare prompts with all rows of folders of answers."""
    cutter, found = Segments(tokenizer), Leaks()
    rendered = [(prompt, cutter.of_prompt(prompt)) for prompt in prompts]
    known = [(prompt.id, one) for prompt, one in rendered if one is not None]
    index = PromptIndex([one for _, one in known], NEAR_SHARE)
    shards = [
        folder / entry["file"] for folder in folders for entry in read_answers(folder)["shards"]
    ]
    each = -(-SAMPLE // max(1, len(shards)))
    index.learn(cutter.of_row(*row) for path in shards for row in islice(rows_of(path), each))
    for path in shards:
        for row in rows_of(path):
            found.rows += 1
            exact, near = index.find(cutter.of_row(*row), whole_rows=False)
            found.exact |= {known[number][0] for number in exact}
            found.near |= {known[number][0] for number in near}
    found.near -= found.exact
    return found


def rows_of(path: Path) -> Iterator[tuple[list[int], list[list[int]], list[int]]]:
    """Tokens, answer spans and beginnings of later documents of a shard's rows."""
    with readable(path), pq.ParquetFile(path) as file:
        names = [name for name in ("tokens", "spans", "parts") if name in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS, columns=names):
            for row in batch.to_pylist():
                yield row["tokens"], row["spans"], row.get("parts") or []


class Segments:
    """Cuts tokens at special tokens into normalised texts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = np.array(sorted(closing_ids(tokenizer)))

    def cut(self, tokens: Sequence[int]) -> list[Bytes]:
        """The texts between special tokens that have letters or digits."""
        ids = np.asarray(tokens, dtype=np.int64)
        parts = np.split(ids, np.flatnonzero(np.isin(ids, self.special)))
        texts = (self.tokenizer.decode(part.tolist(), skip_special_tokens=True) for part in parts)
        return [content for content in map(normalise, texts) if len(content)]

    def of_prompt(self, prompt: Prompt) -> Asked | None:
        """The compared parts of a prompt; None if it cannot be rendered. Its keys are the prompt as
        a whole and, if it has a single user message, that message in its segment."""
        try:
            segments = self.cut(prompt.render(self.tokenizer))
        except UserError:
            return None
        keys = {whole(joined(segments))}
        if prompt.messages is None:
            return Asked(tuple(keys), tuple(segments))
        said = [normalise(one["content"]) for one in prompt.messages if one["role"] == "user"]
        said = [content for content in said if len(content)]
        if len(said) == 1:
            ending = said[0].tobytes()
            keys |= {whole(one) for one in segments if one.tobytes().endswith(ending)}
        return Asked(tuple(keys), tuple(said))

    def of_row(self, tokens: list[int], spans: list[list[int]], parts: list[int]) -> Asked:
        """The compared parts of a row of answers: everything before its last answer (the whole row
        if it is all answer), every segment, and every beginning that was answered."""
        keys, texts = set[int](), list[Bytes]()
        for begin, end in prompt_ranges(tokens, spans, parts):
            texts = self.cut(tokens[begin:end])
            keys |= {whole(joined(texts)), *map(whole, texts)}
        every = self.cut(tokens[: spans[-1][0]]) if parts and spans else texts
        return Asked(tuple(keys), tuple(every))


def prompt_ranges(
    tokens: Sequence[int], spans: Iterable[Sequence[int]], parts: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """[begin, end) of the tokens before each answer in its document."""
    for start, end in spans:
        begin = max((part for part in parts if part <= start), default=0)
        yield (begin, start) if start - begin > 1 else (begin, end)
