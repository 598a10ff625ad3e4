"""Finds which of a few hundred prompts are repeated in other rows, exactly or nearly.

Letters and digits are compared, as shingles of 12 letters. A row repeats a prompt exactly if they
share a key (the hash of a whole text). It repeats a prompt nearly if it contains most of the
prompt's own shingles, or if most of the row is in the prompt. Shingles of many rows belong to a
template (instructions around the actual question) and are not specific to one prompt: they are
learned from a sample of the rows and do not count. A prompt with less own text than a run of
`WIDTH` letters is only compared exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.data.dedup import shingles
from train.data.dedup.shingles import Bytes

WIDTH = 50
"""Letters and digits of a run; about eight words."""
OWN = WIDTH - shingles.WIDTH + 1
"""Shingles of such a run."""
SAMPLE = 4096
"""Rows from which templates are learned."""
FEW, SOME = 3, 10
TEMPLATE_SHARE = 0.01
"""A shingle in more rows of the sample than this share of them, and than SOME (of small samples a
quarter, at least FEW), belongs to a template."""


@dataclass(frozen=True)
class Asked:
    """The compared parts of a prompt or row. keys: hashes of whole texts; texts: normalised."""

    keys: tuple[int, ...]
    texts: tuple[Bytes, ...]

    def shingles(self) -> NDArray[np.uint64]:
        """The distinct shingles of all texts."""
        found = [shingles.shingles(text, shingles.WIDTH) for text in self.texts]
        return np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *found]))


def asked(messages: Sequence[str]) -> Asked:
    """The compared parts of a row or prompt with these user messages: each of them, and every
    beginning of the conversation as a whole."""
    texts = tuple(map(shingles.normalise, messages))
    whole = [shingles.whole(joined(texts[:count])) for count in range(1, len(texts) + 1)]
    return Asked(tuple({*whole, *map(shingles.whole, texts)}), texts)


def joined(texts: Sequence[Bytes]) -> Bytes:
    """Normalised texts one after the other."""
    return np.concatenate([np.zeros(0, dtype=np.uint8), *texts])


class PromptIndex:
    """An index of prompts to find in rows. It takes about ten bytes of memory per letter of
    them."""

    def __init__(self, prompts: Sequence[Asked], share: float) -> None:
        """share: the part of a prompt's own shingles from which on a row repeats it nearly."""
        self.share, self.count = share, len(prompts)
        self._keys: dict[int, list[int]] = {}
        owners, values = [], []
        for number, prompt in enumerate(prompts):
            for key in prompt.keys:
                self._keys.setdefault(key, []).append(number)
            values.append(prompt.shingles())
            owners.append(np.full(len(values[-1]), number))
        every = np.concatenate([np.zeros(0, dtype=np.uint64), *values])
        self._hashes, self._hash = np.unique(every, return_inverse=True)
        self._owner = np.concatenate([np.zeros(0, dtype=np.int64), *owners])
        self._own = np.ones(len(self._hashes), dtype=bool)
        self._sizes = self._owned(self._own)

    def learn(self, sample: Iterable[Asked]) -> None:
        """Learn from a sample of rows which shingles belong to templates."""
        seen, rows = np.zeros(len(self._hashes), dtype=np.int64), 0
        for row in sample:
            seen[self._hits(row.shingles())] += 1
            rows += 1
        most = max(FEW, min(SOME, rows // 4), int(rows * TEMPLATE_SHARE))
        self._own = seen <= most
        self._sizes = self._owned(self._own)

    def find(self, row: Asked, whole_rows: bool = True) -> tuple[set[int], set[int]]:
        """Numbers of the prompts that a row repeats exactly, and of others that it repeats nearly.
        whole_rows: whether a row that lies within a prompt counts as well."""
        exact = {number for key in row.keys for number in self._keys.get(key, ())}
        content = row.shingles()
        hits = self._hits(content)
        own = hits[self._own[hits]]
        if len(own) < OWN:
            return exact, set()
        marked = np.zeros(len(self._hashes), dtype=bool)
        marked[own] = True
        common = self._owned(marked)
        near = common >= np.maximum(OWN, self.share * self._sizes)
        if whole_rows:
            marked[hits] = True
            near |= (common >= OWN) & (self._owned(marked) >= self.share * len(content))
        return exact, set(np.flatnonzero(near).tolist()) - exact

    def _hits(self, content: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Places in the index of those distinct shingles that it contains."""
        if not len(self._hashes):
            return np.zeros(0, dtype=np.int64)
        places = np.minimum(np.searchsorted(self._hashes, content), len(self._hashes) - 1)
        return places[self._hashes[places] == content]

    def _owned(self, marked: NDArray[np.bool_]) -> NDArray[np.int64]:
        """How many marked shingles each prompt has [count]."""
        return np.bincount(self._owner[marked[self._hash]], minlength=self.count)
