"""The evidence of records of verifications for each token of a document: whether its draft was
right, at which depth, and with which probability.

A verification begins at its root; the token d positions after it was tested at depth d, up to the
first error. Each token of an answer comes after exactly one root, so it was tested at most once. An
answer's first token was not tested, nor was the token that the target adds after a draft of which
nothing was rejected.

Legend: N tokens of a document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.verifications import FACTS_FILE, VERIFICATIONS, read_facts, read_table, recorded_rule


class Verification(TypedDict):
    """One verification of a sequence: position of its root, drafted tokens, accepted ones, depth of
    the first error (0: none), the target's token there, and log-probabilities (natural) of drafter
    (q) and target (p)."""

    position: int
    drafted: list[int] | None
    accepted: int
    error_depth: int
    pick: int | None
    log_q: list[float | None]
    log_p: list[float | None]
    pick_log_q: float | None
    pick_log_p: float | None
    temperature: float


COLUMNS = tuple(Verification.__annotations__)


@dataclass
class TokenEvidence:
    """The evidence of one document. depth [N] int16: the depth at which a token was tested (0: it
    was not); failed [N] bool: it was the first error there; chance [N] float32: the chance that
    rejection sampling would have kept it, min(1, q / p) (1 if not tested); roots [N] int16: error
    depth of the draft behind a root, -1 if nothing failed, 0 if no draft began; passes, committed:
    verifications, and tokens that they committed within the document; unfit: verifications that do
    not fit the document.
    """

    depth: NDArray[np.int16]
    failed: NDArray[np.bool_]
    chance: NDArray[np.float32]
    roots: NDArray[np.int16]
    passes: int = 0
    committed: int = 0
    unfit: int = 0

    @classmethod
    def nothing(cls, length: int) -> TokenEvidence:
        depth, roots = np.zeros(length, np.int16), np.zeros(length, np.int16)
        return cls(depth, np.zeros(length, bool), np.ones(length, np.float32), roots)


def evidence_of(
    tokens: NDArray[np.int32], rows: list[Verification], rule: str = "match"
) -> TokenEvidence:
    """The evidence of the verifications `rows` of one sequence for its tokens [N]. A verification
    that the tokens contradict is left out and counted: it belongs to another answer to the same
    prompt.

    rule: the acceptance rule above temperature 0. Rules other than `match` have already applied the
    chance, so it is 0 for a draft that they rejected.
    """
    found, length = TokenEvidence.nothing(len(tokens)), len(tokens)
    for row in rows:
        root, kept, error = row["position"], row["accepted"], row["error_depth"]
        at = root + kept + 1
        pick = row["pick"]
        if not 0 <= root < length or (pick is not None and at < length and tokens[at] != pick):
            found.unfit += 1
            continue
        found.passes += 1
        end = min(at + 1, length)
        found.committed += end - root - 1
        found.roots[root] = error or -1
        for level in range(1, min(kept, length - 1 - root) + 1):
            found.depth[root + level] = level
            found.chance[root + level] = _chance(row["log_q"][level - 1], row["log_p"][level - 1])
        if error and at < length:
            found.depth[at], found.failed[at] = error, True
            weighed = rule != "match" and row["temperature"] > 0
            left = 0.0 if weighed else _chance(row["pick_log_q"], row["pick_log_p"])
            found.chance[at] = left
    return found


def _chance(log_q: float | None, log_p: float | None) -> float:
    """min(1, q / p); 0 without a distribution of the drafter, whose probability for this token is
    then unknown."""
    if log_q is None or log_p is None:
        return 0.0
    return math.exp(min(0.0, log_q - log_p))


class VerificationRecords:
    """The verifications of a folder by sequence. A missing folder counts as empty. Raises
    `UserError` for damaged records, or those of a target with another tokenizer."""

    def __init__(self, folder: Path | None, info: TargetInfo) -> None:
        self._table = pa.table({})
        self._places: dict[str, NDArray[np.int64]] = {}
        self.files: list[Path] = []
        self.rule = "match"
        if folder is None or not (folder / FACTS_FILE).is_file():
            return
        facts = read_facts(folder)
        self.rule, theirs = recorded_rule(facts), facts.get("target", {})
        if theirs.get("tokenizer_hash") != info.tokenizer_hash:
            raise UserError(
                f"the records in '{folder}' are of target '{theirs.get('id')}', whose tokenizer "
                f"differs from that of '{info.id}', which gave the answers. Give the records of "
                "these answers."
            )
        self.files = sorted([folder / FACTS_FILE, *folder.glob("*.parquet")])
        table = read_table(folder, VERIFICATIONS)
        order = table.column("sequence").combine_chunks().dictionary_encode()
        codes, names = order.indices.to_numpy(), order.dictionary.to_pylist()
        places = np.lexsort((table.column("position").to_numpy(), codes))
        bounds = np.searchsorted(codes[places], np.arange(len(names) + 1))
        self._table = table.select(COLUMNS)
        self._places = {
            name: places[bounds[code] : bounds[code + 1]] for code, name in enumerate(names)
        }

    def of(self, sequence: str) -> list[Verification]:
        places = self._places.get(sequence)
        if places is None:
            return []
        return cast(list[Verification], self._table.take(pa.array(places)).to_pylist())
