"""Decodes held-out prompts with every drafter and without one, and writes what came out: report.json.

How the comparison is kept fair: one process, one engine class, batch size 1; plain decoding (our own loop
with one node) is always an arm; for every prompt all arms run one after another, each time another one first,
so that a machine that heats up or is shared slows all of them alike; prompts for warming up are not measured;
seconds exclude prefill; speedups are ratios of sums over the same prompts. Every measured answer is compared
with the baseline's, and differences are examined (audit.py).

Answers are appended to records.partial.jsonl as they come. The same call after an interruption continues
there; when the report is written the file becomes records.jsonl, and the next call measures afresh.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from heads.api.drafter import TrainableDrafter, forget
from heads.api.errors import UserError
from inference.audit.comparison import AuditReport, audit
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, PassRecord, Request
from inference.decoding.rules.registry import get_rule
from inference.decoding.sampling.noise import Stream
from inference.kernels.packed_linear import packed_linears
from inference.measure import metrics
from inference.measure.answers import AnswerLog, Record
from inference.measure.baselines import Peer, make_peers
from inference.measure.breakdown.block import Sample, lost_block
from inference.measure.breakdown.transcripts import discard_transcripts
from inference.measure.config import (
    BASELINE,
    BenchConfig,
    check_arms,
    process_facts,
    report_settings,
    split_prompts,
)
from inference.measure.datasets import Loaded, prompt_facts
from inference.measure.metrics import Outcome, TauEstimate, Totals
from inference.measure.optional_blocks import Loop, baseline_block, device_blocks, mean_length, served_loops
from inference.measure.prompts import Prompt, to_requests
from inference.measure.verifications import write_records
from inference.report.model import (
    FORMAT,
    REPORT_FILE,
    Baseline,
    DrafterResult,
    Report,
    parse_report,
    write_report,
)
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from inference.verifications import RecordsConfig

__all__ = ["Arm", "BenchConfig", "measure", "quick_tau"]

NOISE = {Stream.TARGET: "shared", Stream.DRAFT: "own", None: "none"}
"""A draft's `noise` by the stream that the rule draws drafts with: the target's, one of their own, or no noise."""


def quick_tau(
    target: TargetModel, drafter: Any, requests: Iterable[Request], decode: DecodeConfig
) -> TauEstimate:
    """tau of `drafter` over `requests`, untimed and batched as `decode` says: what training watches.

    Raises `UserError` when nothing was verified (every answer ended with its first token).
    """
    engine = Engine(target, drafter, decode)
    outcomes = [Outcome(str(c.request.index), "", c.passes) for c in engine.run(requests)]
    outcomes.sort(
        key=lambda outcome: int(outcome.prompt)
    )  # the interval must not depend on the finishing order
    return metrics.tau_estimate(Totals.collect(outcomes, engine.tree.max_depth))


def measure(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    out: Path,
    *,
    provenance: Mapping[str, Any] | None = None,
    console: Console | None = None,
    revision: str = "",
    recording: RecordsConfig | None = None,
) -> Report:
    """Measure `arms` and the baseline on `prompts`; writes `out`/report.json and returns its content.

    provenance: `command`, `versions`, `git` for the report (default: this process's). revision: the commit of
    the dataset that the prompts are from. recording: of the arms' verifications, in `out`/records/<arm>/.
    Raises `UserError` for arms that do not compare or prompts that do not suffice, `WeakBaselineError` when a
    speedup exceeds tau.
    """
    session = _Session.prepare(config, target, arms, prompts)
    records = AnswerLog.open(out, session.fingerprint(), session.names)
    with ExitStack() as stack:
        for (
            arm
        ) in arms:  # once for all prompts, as the target's weights are; else every answer would begin with it
            stack.enter_context(packed_linears(arm.drafter))
        session.warm_up()
        session.run(records, console)
    baseline, drafters = session.results(records)
    conditions = session.conditions(records)
    conditions["prompts"] = prompt_facts(Loaded([*prompts], config.prompts, revision), session.prompts)
    content = {
        "format": FORMAT,
        **session.facts(),
        "baseline": baseline,
        "drafters": drafters,
        **session.extras(records, baseline, drafters),
        **(provenance if provenance is not None else process_facts()),
        "run": conditions,
    }
    report = parse_report(content, "the new report")
    if recording is not None and recording.enabled:
        measured = {arm.name: records.of(arm.name) for arm in session.arms}
        write_records(recording, target, session.arms, session.requests, session.prompts, measured, out)
    write_report(report, out / REPORT_FILE)
    records.finish()
    return report


class _RateColumn(ProgressColumn):
    """Answers per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0.0:.1f} answers/s")


@dataclass
class _Session:
    """One measurement: the prompts, and an engine per arm, the baseline first."""

    config: BenchConfig
    target: TargetModel
    arms: list[Arm]
    prompts: list[Prompt]
    requests: list[Request]
    warmup: list[Request]
    engines: dict[str, Engine] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    audits: dict[str, AuditReport] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls, config: BenchConfig, target: TargetModel, arms: Sequence[Arm], prompts: Sequence[Prompt]
    ) -> _Session:
        """Check the arms, choose the prompts that fit, and build an engine per arm; raises `UserError` when nothing is left."""
        checked = check_arms(config, arms)
        decode = checked[0].decode
        limit = target.info.max_position_embeddings
        measured, spare = split_prompts(config, prompts)
        requests = to_requests(measured, target.tokenizer, decode, capacity=limit, overlong="skip")
        warmup = to_requests(spare, target.tokenizer, decode, capacity=limit, overlong="skip")
        if not requests:
            raise UserError(
                f"no prompt fits: with decode.max_new_tokens={decode.max_new_tokens} all are longer than the target's "
                f"{limit} positions. Shorten the prompts or the answers."
            )
        kept = [measured[request.index] for request in requests]
        requests = [replace(request, index=place) for place, request in enumerate(requests)]
        session = cls(config, target, checked, kept, requests, warmup or requests[:1])
        session.build_engines()
        session.peers = {peer.name: peer for peer in make_peers(config.baselines, target, checked)}
        return session

    def build_engines(self) -> None:
        """An engine per arm, all with the same room in their caches."""
        plain = replace(self.arms[0].decode, shape="none")
        most = max(len(request.tokens) + request.max_new_tokens for request in (*self.requests, *self.warmup))
        nodes = max(arm.decode.tree().num_nodes for arm in self.arms)
        self.engines = {BASELINE: Engine(self.target, None, plain, capacity=most + nodes + 1)}
        for arm in self.arms:
            self.engines[arm.name] = Engine(self.target, arm.drafter, arm.decode, capacity=most + nodes + 1)

    @property
    def names(self) -> list[str]:
        return [*self.engines, *self.peers]

    def fingerprint(self) -> str:
        """A hash of everything that the records depend on: an interrupted measurement continues only if it is
        unchanged.
        """
        arms = [
            (
                arm.name,
                arm.drafter.kind,
                asdict(arm.decode),
                repr(getattr(arm.drafter, "config", "")),
                arm.digest(),
            )
            for arm in self.arms
        ]
        content = [
            asdict(self.config),
            self.target.info.to_dict(),
            self.facts(),
            arms,
            [(prompt.id, prompt.domain) for prompt in self.prompts],
            [asdict(request) for request in self.requests],
        ]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()

    # ---- running
    # -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Let every arm answer the warm-up prompts: lazy allocations, thread pools and caches settle."""
        for name, engine in self.engines.items():
            for request in self.warmup:
                _answer(engine, request)
            self.memory[name] = engine.memory_bytes()
        for peer in self.peers.values():
            for request in self.warmup:
                peer.answer(request)

    def run(self, records: AnswerLog, console: Console | None) -> None:
        """Decode what is not on record yet: all arms in turn for every prompt, the order rotating."""
        columns = (
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
        )
        total = self.config.repeats * len(self.requests) * len(self.names)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=total, completed=len(records))
            for repeat in range(self.config.repeats):
                self.forget()
                for request, prompt in zip(self.requests, self.prompts, strict=True):
                    if records.has(prompt.id, repeat):
                        continue
                    turn = (request.index + repeat) % len(self.names)
                    for name in (*self.names[turn:], *self.names[:turn]):
                        records.add(self.record(name, request, prompt.id, repeat))
                        progress.advance(task)

    def forget(self) -> None:
        """Let drafters that remember answers (`heads/suffix.py`) forget those of the warm-up and of the repeat before."""
        for arm in self.arms:
            forget(arm.drafter)

    def record(self, name: str, request: Request, prompt: str, repeat: int) -> Record:
        """One answer of one arm or peer."""
        if name in self.peers:
            answer = self.peers[name].answer(request)
            steps = [(count - 1, count, False) for count in answer.steps]
            return Record(name, prompt, repeat, answer.tokens, steps, answer.seconds)
        completion, seconds = _answer(self.engines[name], request)
        passes = [(p.accepted, p.committed, p.rejected) for p in completion.passes]
        return Record(name, prompt, repeat, completion.tokens, passes, seconds)

    # ---- the report
    # --------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """The blocks of report.json that are known before anything is measured."""
        info = self.target.info
        decodes = {name: engine.decode for name, engine in self.engines.items()}
        return {
            "target": {
                "id": info.id,
                "revision": info.revision,
                "dtype": str(self.target.dtype).removeprefix("torch."),
                "parameters": info.parameters,
            },
            "device": device_facts(self.target.device),
            "settings": report_settings(decodes, len(self.requests)).to_dict(),
        }

    def totals(self, records: AnswerLog, name: str) -> Totals:
        domains = {prompt.id: prompt.domain for prompt in self.prompts}
        outcomes = [
            Outcome(
                record.prompt, domains[record.prompt], [PassRecord(*p) for p in record.passes], record.seconds
            )
            for record in records.of(name)
        ]
        deepest = max((p.accepted for outcome in outcomes for p in outcome.passes), default=0)
        engine = self.engines.get(name)
        return Totals.collect(outcomes, engine.tree.max_depth if engine else deepest)

    def results(self, records: AnswerLog) -> tuple[Baseline, list[DrafterResult]]:
        """The blocks `baseline` and `drafters`. Raises `WeakBaselineError` instead of reporting the
        impossible.
        """
        baseline, seed = self.totals(records, BASELINE), self.config.seed
        drafters = []
        for arm in self.arms:
            totals = self.totals(records, arm.name)
            metrics.require_speedup_within_tau(arm.name, totals, baseline, seed)
            self.audits[arm.name] = self.audit(records, arm)
            entry = {
                **self.describe(arm),
                **metrics.summarise(totals, baseline, seed),
                "memory_bytes": self.memory[arm.name],
                "lossless": self.audits[arm.name].counts(),
            }
            drafters.append(DrafterResult.model_validate(entry))
        return Baseline.model_validate(metrics.baseline_numbers(baseline)), drafters

    def extras(
        self, records: AnswerLog, baseline: Baseline, drafters: Sequence[DrafterResult]
    ) -> dict[str, Any]:
        """The optional blocks that `bench` asks for, measured now that the arms are done."""
        requests = {prompt.id: request for prompt, request in zip(self.prompts, self.requests, strict=True)}
        lengths = {name: mean_length(requests, records.of(name)) for name in self.engines}
        blocks = device_blocks(
            self.config, self.target, self.arms, requests, lengths, baseline, drafters
        )
        served = served_loops(self.config, self.target, self.arms, requests, self.warmup)
        if self.peers or served:
            ours = {name: Loop(self.totals(records, name), records.of(name)) for name in self.names}
            blocks["baselines"] = baseline_block(ours[BASELINE], {**ours, **served}, self.config.seed)
        discard_transcripts(records.directory)  # of an earlier measurement
        if self.config.lost.enabled:
            sample = Sample.choose(self.config.lost, self.prompts, self.requests)
            totals = {arm.name: self.totals(records, arm.name) for arm in self.arms}
            plain, costs = self.totals(records, BASELINE), blocks.get("costs")
            blocks["lost"] = lost_block(
                self.config, self.target, self.arms, sample, totals, plain, lengths, costs, records.directory
            )
        return blocks

    def describe(self, arm: Arm) -> dict[str, Any]:
        """What an entry of `drafters` says about the drafter itself."""
        tree, drafter = self.engines[arm.name].tree, arm.drafter
        trained = isinstance(drafter, TrainableDrafter)
        draft: dict[str, Any] = {
            "shape": arm.decode.shape,
            "depth": tree.max_depth,
            "nodes": tree.num_nodes,
            "name": arm.name,
            "noise": NOISE[get_rule(arm.decode.rule, tree, share_noise=arm.decode.share_noise).drafts],
        }
        if arm.decode.shape == "tree":
            draft["choices"] = [list(path) for path in arm.decode.choices]
        if arm.weights_sha256:
            draft["weights_sha256"] = arm.weights_sha256
        parameters = sum(p.numel() for p in drafter.parameters()) if trained else 0
        return {"kind": drafter.kind, "path": arm.path, "parameters": parameters, "draft": draft}

    def audit(self, records: AnswerLog, arm: Arm) -> AuditReport:
        """Compare an arm's answers with the baseline's."""
        place = {prompt.id: number for number, prompt in enumerate(self.prompts)}
        plain = {(record.prompt, record.repeat): record.tokens for record in records.of(BASELINE)}
        found = records.of(arm.name)
        return audit(
            self.target,
            [self.requests[place[record.prompt]] for record in found],
            [plain[record.prompt, record.repeat] for record in found],
            [record.tokens for record in found],
            arm.decode.sampling(),
            width=max(2, self.engines[arm.name].tree.num_nodes),
        )

    def conditions(self, records: AnswerLog) -> dict[str, Any]:
        """The `run` block: how it was measured, and details that the agreed keys have no place for."""
        baseline, decode = self.totals(records, BASELINE), self.arms[0].decode
        typical = {"epsilon": decode.typical_epsilon, "delta": decode.typical_delta}
        arms = {}
        for arm in self.arms:
            totals, report = self.totals(records, arm.name), self.audits[arm.name]
            arms[arm.name] = {
                "prefill_seconds": float(totals.seconds["prefill"].sum()),
                "speedup_ci95_by_domain": metrics.domain_speedup_ci95(totals, baseline, self.config.seed),
                "audited_tokens": report.tokens,
                "flips": report.flips,
                "divergences": [_finite(asdict(item)) for item in report.divergences],
            }
        return {
            "bench": asdict(self.config),
            "sampling": asdict(decode.sampling()),
            **({"typical": typical} if decode.rule == "typical" else {}),
            "warmup_prompts": len(self.warmup),
            "baseline_prefill_seconds": float(baseline.seconds["prefill"].sum()),
            "arms": arms,
        }


def _answer(engine: Engine, request: Request) -> tuple[Completion, dict[str, float]]:
    """Decode one request; its completion and the seconds it took per phase."""
    engine.clock.reset()
    completion = next(iter(list(engine.run([request]))))
    return completion, dict(engine.clock.seconds)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with infinities as None: JSON knows no infinity."""
    return {key: None if value == float("inf") else value for key, value in values.items()}
