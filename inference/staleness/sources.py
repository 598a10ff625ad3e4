"""Fresh traffic to watch: answers decoded now, the records that a server wrote, or the counters
that it shows Prometheus.

All give one thing per answer: its domain and the drafted tokens that each of its passes accepted.
Counters give totals only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.measure.prompts import Prompt
from inference.server.scrape import read_samples
from inference.staleness.reference import Reference, first_passes
from inference.verifications import SEQUENCES, VERIFICATIONS, read_facts, read_table

ACCEPTED, PASSES = "headstart_accepted_drafts_total", "headstart_verify_passes_total"
Totals = dict[str, tuple[float, float]]
"""Domain -> (accepted drafted tokens, passes)."""
NOTHING = (0.0, 0.0)


@dataclass(frozen=True)
class Fresh:
    """One fresh answer: the drafted tokens that each of its first passes accepted."""

    domain: str
    passes: list[int]


# Decoded now


def with_system(prompts: Sequence[Prompt], system: str) -> list[Prompt]:
    """The prompts with another system message; raises `UserError` for token ids."""
    if not system:
        return list(prompts)
    found, first = [], {"role": "system", "content": system}
    for prompt in prompts:
        if prompt.messages is None:
            raise UserError(
                f"watch.system: prompt '{prompt.id}' is given as token ids, so no system prompt "
                "can be put before it. Give messages."
            )
        rest = [message for message in prompt.messages if message["role"] != "system"]
        found.append(Prompt(prompt.id, prompt.domain, messages=(first, *rest)))
    return found


def decode_fresh(
    engine: Engine, requests: Sequence[Request], prompts: Sequence[Prompt], most: int
) -> Iterator[Fresh]:
    """Decode `requests` (whose index is the place in `prompts`) and yield their answers in the
    order of the requests.

    most: passes that count. Short answers finish first; a test that stops early must not see them
    first.
    """
    waiting: dict[int, Fresh] = {}
    due = deque(request.index for request in requests)
    for completion in engine.run(requests):
        place, accepted = completion.request.index, (one.accepted for one in completion.passes)
        passes = first_passes(accepted, engine.tree.max_depth, most)
        waiting[place] = Fresh(prompts[place].domain, passes)
        while due and due[0] in waiting:
            yield waiting.pop(due.popleft())


# Records


def read_recorded(folder: Path, reference: Reference) -> list[Fresh]:
    """The finished answers in a folder of records, in the order in which they ended.

    Raises `UserError` where there are none, or where they were decoded with another draft or at
    another temperature.
    """
    facts = read_facts(folder)
    drafter = facts.get("drafter") or {}
    kind, weights = drafter.get("kind"), drafter.get("weights_sha256")
    expected = reference.drafter.get("weights_sha256")
    if kind != reference.drafter.get("kind"):
        raise UserError(
            f"'{folder}' holds records of a drafter of kind '{kind}'; the reference is of kind "
            f"'{reference.drafter.get('kind')}'."
        )
    if weights and weights != expected:
        raise UserError(
            f"'{folder}' holds records of another drafter of kind '{kind}': its weights are "
            f"{weights[:12]}..., the reference's {str(expected)[:12]}.... Watch the drafter that "
            "was recorded."
        )
    require_same_draft(folder, facts.get("draft") or {}, reference)
    ended = read_table(folder, SEQUENCES)
    if not ended.num_rows:
        raise UserError(
            f"'{folder}' has no finished answer yet. Let the server answer some requests first."
        )
    same = np.abs(ended["temperature"].to_numpy() - reference.temperature) < 1e-3
    fitting = ended.filter(same).filter(pc.field("finish") != "cancelled")
    if not fitting.num_rows:
        found = sorted({round(value, 3) for value in ended["temperature"].to_pylist()})
        raise UserError(
            f"'{folder}' has no finished answer at the reference's temperature "
            f"{reference.temperature:g}; its answers were given at "
            f"{', '.join(f'{value:g}' for value in found[:5])}. Make a reference at that "
            "temperature with watch.learn=true."
        )
    table = read_table(folder, VERIFICATIONS).select(["sequence", "position", "accepted"])
    passes = defaultdict[str, list[int]](list)
    for row in table.sort_by([("sequence", "ascending"), ("position", "ascending")]).to_pylist():
        passes[row["sequence"]].append(row["accepted"])
    return [
        Fresh(name, first_passes(passes[sequence], reference.depth, reference.most))
        for sequence, name in zip(
            *fitting.sort_by("time").select(["sequence", "domain"]).to_pydict().values(),
            strict=True,
        )
    ]


def require_same_draft(folder: Path, draft: Mapping[str, object], reference: Reference) -> None:
    """Raise `UserError` where records are of another draft than the reference."""
    shape, choices = reference.draft.get("shape"), reference.draft.get("choices")
    nodes = {"chain": reference.depth + 1, "dynamic": reference.draft.get("nodes")}
    known = {
        "shape": shape,
        "depth": reference.depth,
        "nodes": nodes.get(str(shape), len(choices) + 1 if choices else None),
        "adaptive": "none",
    }
    for name, value in known.items():
        if None not in (value, draft.get(name)) and draft[name] != value:
            raise UserError(
                f"'{folder}' holds records of drafts with {name} {draft[name]}; the reference's "
                f"had {name} {value}, so they cannot be compared. Make a reference of that draft "
                "with watch.learn=true, or record with the reference's."
            )


# Prometheus


def read_scrapes(paths: Sequence[Path]) -> list[Totals]:
    """Per look, the totals since the first server started.

    paths: files with what /metrics showed, or folders of such files, in the order of time (of names
    in a folder). Counters that fall belong to a server that was started again. Raises `UserError`
    for a file that cannot be read or has none of the counters.
    """
    files: list[Path] = []
    for path in paths:
        files += sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if not files:
        raise UserError(f"watch.metrics: there are no files in {', '.join(map(str, paths))}.")
    looks: list[Totals] = []
    before: Totals = {}
    base: Totals = {}
    for file in files:
        now = read_counters(file)
        if any(now.get(domain, NOTHING)[1] < passes for domain, (_, passes) in before.items()):
            base = _sum(base, before)
        before = now
        looks.append(_sum(base, now))
    return looks


def _sum(one: Totals, other: Totals) -> Totals:
    pairs = {name: (one.get(name, NOTHING), other.get(name, NOTHING)) for name in {*one, *other}}
    return {name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in pairs.items()}


def read_counters(path: Path) -> Totals:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"watch.metrics: '{path}' cannot be read as text ({error}). Give what the server "
            "shows at /metrics."
        ) from error
    found: dict[str, dict[str, float]] = {ACCEPTED: {}, PASSES: {}}
    try:
        for sample in read_samples(text):
            if sample.name in found:
                found[sample.name][sample.labels.get("domain", "")] = float(sample.value)
    except ValueError as error:
        raise UserError(
            f"watch.metrics: '{path}', {error}. Give what a server of Headstart shows at /metrics."
        ) from error
    if not found[PASSES]:
        raise UserError(
            f"watch.metrics: '{path}' has no {PASSES}. Give what a server of Headstart shows at "
            "/metrics, as text (format 0.0.4)."
        )
    counted = {domain: passes for domain, passes in found[PASSES].items() if passes}
    return {name: (found[ACCEPTED].get(name, 0.0), passes) for name, passes in counted.items()}
