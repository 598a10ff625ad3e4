"""How many drafted tokens a drafter has accepted on the held-out prompts (assets/prompts): for the rows of docs/reports/loop.json.

Acceptance does not depend on the batch, so prompts are decoded together and no clock runs. Every answer is compared with plain
decoding of the same prompt. What was found is kept beside the drafter, and only measured again for other weights.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.api.checkpoint import WEIGHTS_FILE, load_drafter
from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.manifest import file_sha256, write_json
from inference.measure.metrics import Outcome, Totals
from inference.measure.prompts import load_prompts, to_requests
from inference.target.model import TargetModel

PROMPTS = Path(__file__).resolve().parents[1] / "assets" / "prompts"
DOMAINS = ("code", "explain", "reference")
DECODE = DecodeConfig(temperature=0.0, shape="chain", depth=4, batch_size=16, max_new_tokens=96)
PLAIN_FILE = "plain.json"


class HeldOut:
    """The prompts, the target's own answers to them (kept in `work`), and what drafters do with them."""

    def __init__(self, target: TargetModel, work: Path, decode: DecodeConfig = DECODE, prompts: Path = PROMPTS) -> None:
        self.target, self.decode = target, decode
        self.prompts = load_prompts([prompts / f"{name}.jsonl" for name in DOMAINS])
        capacity = target.info.max_position_embeddings
        self.requests = to_requests(self.prompts, target.tokenizer, decode, capacity=capacity, overlong="skip")
        self.plain = self._plain(work / PLAIN_FILE)

    def _plain(self, path: Path) -> list[list[int]]:
        """The target's answers without a drafter, in the order of the requests."""
        key = [self.target.info.revision, self.decode.max_new_tokens, len(self.requests)]
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["key"] == key:
                answers: list[list[int]] = found["answers"]
                return answers
        done = self._decoded(Engine(self.target, None, replace(self.decode, shape="none")))
        answers = [done[request.index][0] for request in self.requests]
        write_json(path, {"key": key, "answers": answers})
        return answers

    def _decoded(self, engine: Engine) -> dict[int, tuple[list[int], list[PassRecord]]]:
        return {item.request.index: (item.tokens, item.passes) for item in engine.run(self.requests)}

    def measure(self, checkpoint: Path, path: Path) -> dict[str, Any]:
        """Passes of the drafter in `checkpoint` per prompt, and its losslessness; kept in the file `path`."""
        weights = file_sha256(checkpoint / WEIGHTS_FILE)
        key = [weights, self.decode.depth, self.decode.max_new_tokens, len(self.requests)]
        if path.is_file():
            known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if known["key"] == key:
                return known
        drafter = load_drafter(checkpoint, self.target.info, self.target.weights)
        done = self._decoded(Engine(self.target, drafter, self.decode))
        answers = [done[request.index][0] for request in self.requests]
        sampling, width = self.decode.sampling(), self.decode.depth + 1
        found = {
            "key": key,
            "weights_sha256": weights,
            "lossless": audit(self.target, self.requests, self.plain, answers, sampling, width).counts(),
            "prompts": [self._row(request, done[request.index][1]) for request in self.requests],
        }
        write_json(path, found)
        return found

    def _row(self, request: Request, passes: list[PassRecord]) -> dict[str, Any]:
        prompt = self.prompts[request.index]
        counts = [[item.accepted, item.committed, int(item.rejected)] for item in passes]
        return {"id": prompt.id, "domain": prompt.domain, "passes": counts}


def totals(found: dict[str, Any], depth: int = DECODE.depth) -> Totals:
    """Sums per prompt of what `HeldOut.measure` found."""
    return Totals.collect(
        [
            Outcome(row["id"], row["domain"], [PassRecord(a, c, bool(r)) for a, c, r in row["passes"]])
            for row in found["prompts"]
        ],
        depth,
    )
