"""Branches: other answers to the same prompts, from the positions at which drafts were rejected.

The drafter proposed a token there that the target did not pick. Where the target gave that token a
high probability too, the target continues the text from it. That gives new text, in contexts that
the drafter produces itself, without new prompts. A branch is a prompt of token ids: the prompt, the
answer up to the first error, and the rejected token.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from heads.api.target_info import TargetInfo
from train.data.answers import AnswerRow, read_answers
from train.feedback.build import AnswerSource, read_lines, write_lines
from train.feedback.config import FeedbackConfig
from train.feedback.evidence import Verification, VerificationRecords

logger = logging.getLogger(__name__)

BRANCHES = "branches.jsonl"


class Branch(TypedDict):
    """A line of branches.jsonl; log_p: the target's log-probability (natural) of the last token."""

    id: str
    domain: str
    tokens: list[int]
    log_p: float


def write_branches(
    folders: Sequence[tuple[Path, Path]],
    out: Path,
    config: FeedbackConfig,
    known: Iterable[Path] = (),
) -> int:
    """Write branches to the file `out`, the likeliest rejected tokens first; returns how many.

    folders: pairs of answers and the records of their verifications; `config.branches` branches are
    written per answer of the first one, if there are so many. known: files of earlier branches,
    which are not written again. A line has `id` (the answer's id, the position and the rejected
    token), `domain`, `tokens` and `log_p`, the target's log-probability (natural) of the rejected
    token. Raises `UserError` for damaged input.
    """
    manifest = read_answers(folders[0][0])
    info = TargetInfo.from_dict(manifest["target"])
    before = {row["id"] for row in read_lines(known)}
    found: dict[str, Branch] = {}
    ends = set[int]()
    for answers, records in folders:
        verifications = VerificationRecords(records, info)
        for document in AnswerSource(answers, records).documents(info):
            if document.row["finish"] == "stop":
                ends.add(int(document.tokens[-1]))
            own = verifications.of(document.row["id"])
            found |= {item["id"]: item for item in branches_of(document.row, own, config)}
    wanted = config.branches * sum(entry["rows"] for entry in manifest["shards"])
    new = [item for name, item in found.items() if name not in before]
    fresh = [item for item in new if item["tokens"][-1] not in ends]
    chosen = heapq.nlargest(wanted, fresh, key=lambda item: (item["log_p"], item["id"]))
    if len(chosen) < wanted:
        logger.warning(
            "%d branches were asked for, '%s' holds %d new ones (of %d likely refused tokens). "
            "Redacted records, and those of drafters without probabilities, hold none; a lower "
            "feedback.branch_likely finds more.",
            wanted,
            folders[0][1],
            len(chosen),
            len(found),
        )
    write_lines(out, chosen)
    return len(chosen)


def branches_of(
    row: AnswerRow, verifications: list[Verification], config: FeedbackConfig
) -> Iterator[Branch]:
    """The branches of one answer (a row of answers), from its verifications: one at each first
    error within the first `config.branch_within` tokens of an answer, if the target gave the
    rejected token enough probability. A branch begins where its document does, since a row may
    hold several. A verification that the tokens contradict belongs to another answer to the same
    prompt, and is left out.
    """
    tokens, least = row["tokens"], math.log(config.branch_likely)
    places = [(low, min(high, low + config.branch_within)) for low, high in row["spans"]]
    for one in verifications:
        depth = one["error_depth"]
        at = one["position"] + depth
        if not depth or one["drafted"] is None or not any(low <= at < high for low, high in places):
            continue
        refused, log_p = one["drafted"][depth - 1], one["log_p"][depth - 1]
        if tokens[at] == one["pick"] and log_p is not None and log_p >= least:
            begin = max((part for part in row["parts"] if part <= at), default=0)
            name, whole = f"{row['id']}/{at}-{refused}", [*tokens[begin:at], refused]
            yield {"id": name, "domain": row["domain"], "tokens": whole, "log_p": log_p}
