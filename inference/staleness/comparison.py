"""Compares fresh traffic with a reference. Fresh traffic is answers decoded now, the records that a
server wrote, or the counters that it exposes to Prometheus.

Answers give their domain and the drafted tokens accepted in each of their passes; counters give
windows or totals (`scrapes`).
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from heads.api.checkpoint import load_drafter, read_config, weights_file
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft import DraftSettings
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.integrity import require_unchanged
from inference.manifest import file_sha256
from inference.measure.metrics import divide
from inference.measure.prompts import Prompt, to_requests
from inference.staleness.config import WatchConfig
from inference.staleness.evidence import Sums
from inference.staleness.reference import (
    NO_DOMAIN,
    SAMPLING,
    DomainAnswers,
    Reference,
    first_passes,
    passes_within,
)
from inference.staleness.scrapes import (
    LEAST_WINDOWS,
    Observation,
    Windows,
    follow,
    read_files,
    spread_of,
)
from inference.staleness.sequential_test import DriftTest
from inference.target.chat import Message
from inference.target.model import TargetModel
from inference.verifications import SEQUENCES, VERIFICATIONS, read_facts, read_table, recorded_rule

ANSWERS, WINDOWS, TOTALS = "answers", "windows", "totals"
"""The units that the test observes one by one."""
SAMPLING_REMARK = (
    "Records name only the temperature of their sampling settings. They are compared as if they "
    "had the reference's: {settings}."
)


@dataclass(frozen=True)
class Fresh:
    """One fresh answer: the drafted tokens accepted in each of its first passes."""

    domain: str
    passes: list[int]


@dataclass
class Comparison:
    """A reference, the test against it, and the fresh answers by domain."""

    config: WatchConfig
    reference: Reference
    answers: dict[str, DomainAnswers] = field(default_factory=dict)
    reached: dict[str, list[float]] = field(default_factory=dict)
    """Of counters: domain -> share of the passes that accepted each depth."""
    unit: str = ANSWERS
    remarks: list[str] = field(default_factory=list)
    """What limits the result."""
    guaranteed: bool = True
    """Off: the counters are not of the windows, so the test's rates do not hold."""
    nameless: bool = False
    """The traffic tells no domains apart."""
    ended: UserError | KeyboardInterrupt | None = None
    """Why a running server was not watched to the end."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start the test against the reference."""
        known, config = self.reference, self.config
        evidence = known.evidence()
        self.test = DriftTest(known.grid, known.most, evidence, config.tolerance, config.alarm_rate)

    def add(self, fresh: Iterable[Fresh], *, stop: bool = False) -> None:
        """Feed answers to the test, one by one. stop: end with the first alarm."""
        for answer in fresh:
            count(self.answers, answer)
            self.test.add(answer.domain, sum(answer.passes), len(answer.passes))
            if stop and self.test.alarms:
                break

    def add_decoded(
        self, prompts: Sequence[Prompt], checkpoint: Path, target: TargetModel, decode: DecodeConfig
    ) -> None:
        """Decode `prompts` now and feed the answers to the test."""
        fresh = decode_prompts(self.config, prompts, checkpoint, target, decode, changed=True)
        self.add(fresh, stop=self.config.stop)

    def add_records(self, folder: Path) -> None:
        """Feed the test the answers that a server, a measurement or a generation recorded."""
        found = read_recorded(folder, self.reference)
        self.choose_domains({one.domain for one in found})
        if settings := self.reference.sampled_with:
            named = ", ".join(f"{name} {value}" for name, value in settings.items())
            self.remarks.append(SAMPLING_REMARK.format(settings=named))
        self.add(replace(one, domain=self.domain_of(one.domain)) for one in found)

    def add_scrapes(self, paths: Sequence[str]) -> None:
        """Feed the test saved scrapes of a server's metrics: window by window if there are enough
        windows, otherwise their sum."""
        windows = Windows(self.config.window, self.reference.depth)
        for where, samples in read_files([Path(path) for path in paths]):
            windows.take(samples, where)
        totals = windows.totals()
        self.choose_domains(totals)
        self.heed(windows)
        for domain, total in totals.items():
            whole, name = windows.whole.get(domain, []), self.domain_of(domain)
            self.note(name, total)
            if len(whole) >= LEAST_WINDOWS:
                for window in whole:
                    self.add_window(name, window)
            else:
                self.add_total(name, total, spread_of(whole))

    def add_running(self, address: str) -> None:
        """Feed the test a running server's windows as they end. Stops under the same conditions as
        decoding. If the server cannot be watched any more, or Ctrl-C ends the watch, keeps the
        error beside the result so far; raises it if there is none. The test's error rate holds
        whenever it is stopped."""
        windows = Windows(self.config.window, self.reference.depth)
        begun = False
        try:
            for finished in follow(self.config, address, windows):
                if finished and not begun:
                    self.choose_domains(windows.before)
                    begun = True
                for domain in finished:
                    name = self.domain_of(domain)
                    self.add_window(name, windows.whole[domain][-1])
                    self.note(name, windows.totals()[domain])
                if self.config.stop and self.test.alarms:
                    break
        except (UserError, KeyboardInterrupt) as error:
            if not self.test.fresh:
                raise
            self.ended = error
            self.remarks.append(f"The watch ended early. {str(error) or 'It was interrupted.'}")
        self.heed(windows)

    def heed(self, windows: Windows) -> None:
        """Take over what the counters do not tell."""
        self.remarks += windows.remarks
        self.guaranteed = not windows.gauged

    def choose_domains(self, counted: Iterable[str]) -> None:
        """Map traffic without domains to one domain of the reference, or to all domains together:
        counters of an engine that has none, or requests none of which names one. Raises `UserError`
        if a domain is named although the counters have domains."""
        seen = set(counted)
        unnamed = seen == {NO_DOMAIN} and NO_DOMAIN not in self.reference.domains
        if seen == {""} or unnamed:
            self.nameless = True
            self.reference = self.reference.for_counters(self.config.domain)
            self.begin()
        elif self.config.domain:
            raise UserError(
                "watch.domain is for counters that do not tell domains apart; these count "
                f"{', '.join(sorted(counted))}. Leave it out."
            )

    def domain_of(self, domain: str) -> str:
        """The reference's domain for a domain of the traffic. Traffic without domains has one,
        which stands for the only domain of the reference."""
        return next(iter(self.test.reference)) if self.nameless else domain

    def add_window(self, domain: str, window: Observation) -> None:
        """Count a window as one answer of `test.most` passes with the window's acceptance."""
        most = self.test.most
        self.test.add(domain, window.accepted / window.passes * most, most)
        self.unit = WINDOWS

    def add_total(self, domain: str, total: Observation, spread: float) -> None:
        """Test a sum. spread: variance per pass, as observed in its parts."""
        test, reference = self.test, self.reference
        widest = max(reference.domains, key=reference.spread)
        known = domain if domain in test.reference else widest
        spread, prior = max(spread, reference.spread(known)), test.reference[known].passes
        test.replace(domain, Sums(test.grid, total.accepted, total.passes, spread, prior))
        self.unit = TOTALS

    def note(self, domain: str, total: Observation) -> None:
        """Keep the acceptance by depth over all counts so far."""
        if total.reached:
            self.reached[domain] = [divide(count, total.passes) for count in total.reached]

    def require_fresh(self) -> None:
        """Raise `UserError` if no answer was of a domain that the reference has."""
        if not self.test.fresh:
            seen = ", ".join(map(repr, self.test.unknown)) or "none"
            raise UserError(
                "no fresh answer is of a domain that the reference knows "
                f"({', '.join(self.reference.domains)}); found: {seen}. Give traffic of those "
                "domains, or make a reference with these by watch.learn=true."
            )

    def as_reference(self, target: dict[str, str], source: str) -> Reference:
        """The fresh answers as a reference: to be the next reference, or to be examined one by
        one."""
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
    """The reference of a drafter, for which its own target decodes `prompts`. Raises `UserError` if
    every domain has too few answers. source: where the reference is to be written, for messages."""
    answers: dict[str, DomainAnswers] = {}
    for fresh in decode_prompts(config, prompts, checkpoint, target, decode, changed=False):
        count(answers, fresh)
    weights = file_sha256(weights_file(checkpoint))
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
        sampling={name: getattr(decode, name) for name in SAMPLING},
    )
    reference.evidence()
    return reference


def draft_of(decode: DecodeConfig) -> DraftSettings:
    draft: DraftSettings = {"shape": decode.shape, "depth": decode.depth, "choices": []}
    if decode.shape in ("tree", "dynamic", "dartree"):
        draft["choices"] = [list(choice) for choice in decode.choices]
        draft |= {"nodes": decode.nodes, "width": decode.width}
    if decode.shape == "dartree":
        draft |= {"candidates": decode.candidates, "depth_penalty": decode.depth_penalty}
    return draft


# Decoded now


def decode_prompts(
    config: WatchConfig,
    prompts: Sequence[Prompt],
    checkpoint: Path,
    target: TargetModel,
    decode: DecodeConfig,
    changed: bool,
) -> Iterable[Fresh]:
    """Decode prompts in random order. changed: whether the target may be a version other than the
    one that the drafter was trained for. Raises `UserError` for a rule other than match above
    temperature 0: references do not record the rule, and others accept other drafts."""
    if decode.temperature > 0 and decode.acceptance != "match":
        raise UserError(
            f"a watch decodes by rule match, as references are made; decode.rule is "
            f"'{decode.rule}', which above temperature 0 accepts other drafts. Leave decode.rule "
            "out."
        )
    chosen = with_system(prompts, config.system)
    random.Random(config.seed).shuffle(chosen)
    chosen = chosen[: config.max_prompts]
    require_unchanged(checkpoint)
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


def with_system(prompts: Sequence[Prompt], system: str) -> list[Prompt]:
    """The prompts with another system message; raises `UserError` for token ids."""
    if not system:
        return list(prompts)
    found: list[Prompt] = []
    first: Message = {"role": "system", "content": system}
    for prompt in prompts:
        if prompt.messages is None:
            raise UserError(
                f"watch.system: prompt '{prompt.id}' is given as token ids, so no system prompt "
                "can be put before it. Give messages."
            )
        rest = [message for message in prompt.messages if message["role"] != "system"]
        found.append(replace(prompt, messages=(first, *rest)))
    return found


def decode_fresh(
    engine: Engine, requests: Sequence[Request], prompts: Sequence[Prompt], most: int
) -> Iterator[Fresh]:
    """Decode `requests` (whose index is the place in `prompts`) and yield their answers in the
    order of the requests. Short answers finish first; a test that stops early must not see them
    first. most: passes that count."""
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
    """The finished answers in a folder of records, in the order in which they ended. Raises
    `UserError` if there are none, or if they were decoded with another draft or at another
    temperature."""
    facts = read_facts(folder)
    drafter: Mapping[str, Any] = facts.get("drafter") or {}
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
    rule = recorded_rule(facts)
    if reference.temperature > 0 and rule != "match":
        raise UserError(
            f"'{folder}' holds records by rule '{rule}', which above temperature 0 accepts other "
            "drafts than rule match, by which references are made. Record with decode.rule=match, "
            "or watch a reference at temperature 0."
        )
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
    """Raise `UserError` if the records have another draft than the reference."""
    shape, choices = reference.draft.get("shape"), reference.draft.get("choices")
    chosen = reference.draft.get("nodes")
    nodes = {"chain": reference.depth + 1, "dynamic": chosen, "dartree": chosen}
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
