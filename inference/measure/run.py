"""Measures drafters against plain decoding on held-out prompts and writes report.json.

The comparison is fair: one process, one engine class, batch size 1; plain decoding (our own loop
with one node) is always an arm; for every prompt all arms run one after another in a rotating
order, so that a machine that heats up or is shared slows all of them alike; warm-up prompts are not
measured; seconds exclude prefill; speedups are ratios of sums over the same prompts. Every measured
answer is compared with the baseline's (`inference.audit.comparison`).

The whole measurement is repeated. On a quiet machine an arm's repeats take the same time. If they
do not, the machine was disturbed: more repeats are measured, and the fastest ones count. If it
stays disturbed, the report is written and says so (`Report.repeats`, `inference.report.claims`).

Answers are appended to records.partial.jsonl as they finish, and an interrupted measurement
continues from there. When the report is written, the file becomes records.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from heads.api.drafter import TrainableDrafter, forget, remembers
from heads.api.errors import UserError
from inference.audit.comparison import AuditReport, audit
from inference.decoding.adaptive.lengths import DEFAULT_THRESHOLDS
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.costs import measure_costs
from inference.decoding.engine import Engine
from inference.decoding.execution.compiled import NotCompiledError
from inference.decoding.execution.worth import settled
from inference.decoding.requests import Completion, Request
from inference.decoding.rules.names import TEXT, promise
from inference.decoding.rules.registry import get_rule
from inference.decoding.sampling.noise import Stream
from inference.kernels.packed_linear import packed_linears
from inference.measure import metrics
from inference.measure.answers import AnswerLog, Record
from inference.measure.baselines import Peer, make_peers
from inference.measure.breakdown.block import lost_block
from inference.measure.breakdown.transcripts import discard_transcripts
from inference.measure.config import (
    BASELINE,
    BenchConfig,
    LeakFacts,
    Provenance,
    check_arms,
    process_facts,
    report_settings,
    split_prompts,
)
from inference.measure.datasets import Loaded, prompt_facts
from inference.measure.loops import Loop, baseline_block, served_loops
from inference.measure.metrics import Outcome, TauEstimate, Totals, divide
from inference.measure.profile import profile
from inference.measure.prompts import Prompt, Requests, behind_others, to_requests
from inference.measure.roofline import roofline
from inference.measure.turns import every_turn
from inference.measure.verification_records import write_records
from inference.report import claims
from inference.report import model as schema
from inference.target.hardware import device_facts
from inference.target.memory import in_rows_that_fit
from inference.target.model import TargetModel
from inference.verifications import RecordsConfig
from inference.writers import only_writer

logger = logging.getLogger(__name__)
TEXT_TOKENS = 1 << 16
"""Most token ids of prompts that are concatenated as text for caches."""
ROOM = 64
"""Cache sizes are multiples of this number, so that measurements of similar prompts compile the
same steps."""
NOISE = {Stream.TARGET: "shared", Stream.DRAFT: "own", None: "none"}
"""The `noise` of a draft, by the stream that its rule draws drafts with."""


def quick_tau(
    target: TargetModel,
    drafter: Any,
    requests: Iterable[Request],
    decode: DecodeConfig,
    answers: list[Completion] | None = None,
) -> TauEstimate:
    """tau over `requests`, untimed and not compiled, since compiling would take longer than it
    saves. Raises `UserError` if nothing was verified. answers: receives the decoded answers."""
    engine = Engine(target, drafter, replace(decode, compile=False))
    done = list(engine.run(requests))
    outcomes = [Outcome(str(c.request.index), "", c.passes) for c in done]
    if answers is not None:
        answers += done
    # The interval must not depend on the order in which answers finish.
    outcomes.sort(key=lambda outcome: int(outcome.prompt))
    return metrics.tau_estimate(Totals.collect(outcomes, engine.tree.max_depth))


def tau_in_rows_that_fit(
    target: TargetModel,
    drafter: Any,
    requests: Sequence[Request],
    decode: DecodeConfig,
    setting: str,
    answers: list[Completion] | None = None,
) -> tuple[TauEstimate, int]:
    """`quick_tau` in decode.batch_size rows, or in as many as fit into memory, and the rows it
    took. setting: what gives the rows. Raises `BatchMemoryError` if not even one row fits."""

    def decoded(rows: int) -> TauEstimate:
        return quick_tau(target, drafter, requests, replace(decode, batch_size=rows), answers)

    return in_rows_that_fit(decoded, decode.batch_size, len(requests), setting)


def measure(
    config: BenchConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    out: Path,
    *,
    provenance: Provenance | None = None,
    console: Console | None = None,
    revision: str = "",
    recording: RecordsConfig | None = None,
    leaks: LeakFacts | None = None,
    accepted: Callable[[], None] = lambda: None,
) -> schema.Report:
    """Measure `arms` and the baseline on `prompts`; writes `out`/report.json and returns its
    content.

    provenance: `command`, `versions`, `git` for the report (default: this process's). revision: the
    commit of the dataset that the prompts are from. recording: settings of the records of the arms'
    verifications, in `out`/records/<arm>/. leaks: how the prompts were compared with the training
    data. accepted: called once arms and prompts are accepted, before anything in `out` is replaced.
    Raises `UserError` for arms that cannot be compared and for too few prompts. A disturbed
    machine is no error: `Report.repeats` reports it.
    """
    session = _prepare(config, target, arms, prompts)
    accepted()
    with only_writer(out):
        try:
            session.decode_all(out, console)
        except NotCompiledError as error:
            if any(arm.decode.compiles for arm in arms):
                raise  # raised only if it was requested
            logger.warning("measuring steps that are not compiled: %s", error)
            arms = [replace(arm, decode=replace(arm.decode, compile=False)) for arm in arms]
            session = _prepare(config, target, arms, prompts)
            session.decode_all(out, console)
        records = session.records
        baseline, drafters = session.results()
        content = {
            "format": schema.FORMAT,
            **session.facts(),
            "baseline": baseline,
            "drafters": drafters,
            "repeats": session.repeats,
            **session.optional_blocks(baseline, drafters),
            **(provenance if provenance is not None else process_facts()),
            "run": session.conditions(Loaded([*prompts], config.prompts, revision), leaks),
        }
        report = schema.parse_report(content, "the new report")
        if recording is not None and recording.enabled:
            measured = {arm.name: records.of(arm.name) for arm in session.arms}
            pairs = list(zip(session.prompts, session.requests, strict=True))
            write_records(recording, target, session.arms, pairs, measured, out)
        schema.write_report(report, out / schema.REPORT_FILE)
        records.finish()
        return report


class _RateColumn(bars.ProgressColumn):
    """Answers per second."""

    def render(self, task: bars.Task) -> Text:
        return Text(f"{task.speed or 0.0:.1f} answers/s")


def _columns(title: str, *rate: bars.ProgressColumn) -> tuple[bars.ProgressColumn, ...]:
    """The columns of a progress bar. rate: a column before the time left."""
    done = (bars.TextColumn(title), bars.BarColumn(), bars.MofNCompleteColumn())
    return (*done, *rate, bars.TimeRemainingColumn())


@dataclass
class _Session:
    """One measurement: the prompts, and an engine per arm, the baseline first."""

    config: BenchConfig
    target: TargetModel
    arms: list[Arm]
    prompts: list[Prompt]
    requests: list[Request]
    warmup: list[Request]
    engines: dict[str, Engine]
    peers: dict[str, Peer]
    records: AnswerLog = field(init=False)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    audits: dict[str, AuditReport] = field(default_factory=dict)
    repeats: schema.Repeats = field(init=False)

    @property
    def names(self) -> list[str]:
        return [*self.engines, *self.peers]

    @property
    def by_id(self) -> Requests:
        return dict(zip((prompt.id for prompt in self.prompts), self.requests, strict=True))

    @property
    def parts(self) -> dict[str, tuple[str, str]]:
        """The domain and the unit of every prompt, by its id."""
        return {prompt.id: (prompt.domain, prompt.unit) for prompt in self.prompts}

    def fingerprint(self) -> str:
        """A hash of everything that the records depend on."""
        arms = []
        for arm in self.arms:
            own = repr(getattr(arm.drafter, "config", ""))
            arms.append((arm.name, arm.drafter.kind, asdict(arm.decode), own, arm.digest()))
        content = [
            asdict(self.config),
            self.target.info.to_dict(),
            {name: block.to_dict() for name, block in self.facts().items()},
            arms,
            [(prompt.id, prompt.domain) for prompt in self.prompts],
            [asdict(request) for request in self.requests],
        ]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()

    # Running

    def decode_all(self, out: Path, console: Console | None) -> None:
        """Decode what is not yet on record in `out`."""
        self.records = AnswerLog.open(out, self.fingerprint(), self.names)
        with ExitStack() as stack:
            for arm in self.arms:  # pack weights once, not at the start of every answer
                stack.enter_context(packed_linears(arm.drafter))
            # compiled verifications with the same taps are compiled once
            compiled = [arm for arm in self.arms if arm.decode.compiles]
            taps = [tap for arm in compiled for tap in arm.drafter.needs.taps]
            stack.enter_context(self.target.taps.share(taps))
            self.warm_up(console)
            self.run(console)

    def warm_up(self, console: Console | None) -> None:
        """Decode the warm-up prompts with every arm: steps compile; allocations, thread pools and
        caches settle."""
        with bars.Progress(*_columns("preparing"), console=console, transient=True) as progress:
            task = progress.add_task("", total=len(self.names))
            for name, engine in self.engines.items():
                for request in self.warmup:
                    _answer(engine, request)
                self.memory[name] = engine.memory_bytes()
                progress.advance(task)
            for peer in self.peers.values():
                for request in self.warmup:
                    peer.answer(request)
                progress.advance(task)

    def run(self, console: Console | None) -> None:
        """Decode what is not yet on record, and further repeats on a disturbed machine."""
        config, each = self.config, len(self.requests) * len(self.names)
        with bars.Progress(*_columns("measuring", _RateColumn()), console=console) as progress:
            task = progress.add_task("", total=config.repeats * each, completed=len(self.records))
            for repeat in range(config.repeats):
                self.decode(repeat, lambda: progress.advance(task))
            self.repeats = self.compare_repeats(config.repeats)
            for repeat in range(config.repeats, config.repeats + config.retries):
                if not self.repeats.disturbed:
                    break
                why = claims.disturbance(self.repeats)
                progress.console.print(f"{why} Measuring again.", soft_wrap=True, highlight=False)
                progress.update(task, total=(repeat + 1) * each)
                self.decode(repeat, lambda: progress.advance(task))
                self.repeats = self.compare_repeats(repeat + 1)

    def decode(self, repeat: int, advance: Callable[[], None]) -> None:
        """One repeat: all arms for every prompt, in a rotating order. advance: called after each
        answer."""
        names, records = self.names, self.records
        done = {prompt.id for prompt in self.prompts if records.has(prompt.id, repeat)}
        if len(done) == len(self.prompts):
            return
        remembering = [arm.name for arm in self.arms if remembers(arm.drafter)]
        for arm in self.arms:  # a drafter's memory of the warm-up or of an earlier repeat
            forget(arm.drafter)
        for request, prompt in zip(self.requests, self.prompts, strict=True):
            if prompt.id in done:
                for name in remembering:  # again, as the process that had the answers is gone
                    self.record(name, request, prompt.id, repeat)
                continue
            turn = (request.index + repeat) % len(names)
            for name in (*names[turn:], *names[:turn]):
                records.add(self.record(name, request, prompt.id, repeat))
                advance()

    def compare_repeats(self, measured: int) -> schema.Repeats:
        """Which of the `measured` repeats count, and how much they differ."""
        seconds = {name: self.records.decode_seconds(name, range(measured)) for name in self.names}
        kept = metrics.fastest_repeats(seconds, self.config.repeats)
        spread = {name: metrics.repeat_spread(seconds[name], kept) for name in self.names}
        baseline, seed = self.totals(BASELINE, kept), self.config.seed
        return schema.Repeats(
            measured=measured,
            kept=kept,
            limit=self.config.spread,
            spread=spread if len(kept) > 1 else {},
            above_tau=[
                arm.name
                for arm in self.arms
                if metrics.exceeds_tau(self.totals(arm.name, kept), baseline, seed)
            ],
        )

    def record(self, name: str, request: Request, prompt: str, repeat: int) -> Record:
        """One answer of one arm or peer."""
        if name in self.peers:
            return Record(name, prompt, repeat, *self.peers[name].answer(request))
        engine = self.engines[name]
        completion, seconds = _answer(engine, request)
        passes = [(p.accepted, p.committed, p.rejected) for p in completion.passes]
        ahead = astuple(engine.clock.ahead) if engine.decode.ahead else None
        return Record(name, prompt, repeat, completion.tokens, passes, seconds, ahead)

    # The report

    def facts(self) -> dict[str, schema.Block]:
        """The blocks of report.json that are known before anything is measured."""
        info = self.target.info
        decodes = {name: engine.decode for name, engine in self.engines.items()}
        return {
            "target": schema.TargetFacts(
                id=info.id,
                revision=info.revision,
                dtype=str(self.target.dtype).removeprefix("torch."),
                parameters=info.parameters,
                **({"loading": self.target.loading} if self.target.loading else {}),
            ),
            "device": schema.DeviceFacts(**device_facts(self.target.device)),
            "settings": report_settings(decodes, len(self.requests)),
        }

    def timed(self, name: str) -> list[Record]:
        """An arm's records of the repeats that count."""
        return self.records.of(name, self.repeats.kept)

    def totals(self, name: str, repeats: Sequence[int] = ()) -> Totals:
        """The sums of an arm over some repeats; by default those that count."""
        parts = self.parts
        records = self.records.of(name, repeats) if repeats else self.timed(name)
        outcomes = [record.outcome(*parts[record.prompt]) for record in records]
        deepest = max((p.accepted for outcome in outcomes for p in outcome.passes), default=0)
        engine = self.engines.get(name)
        return Totals.collect(outcomes, engine.tree.max_depth if engine else deepest)

    def results(self) -> tuple[schema.Baseline, list[schema.DrafterResult]]:
        """The blocks `baseline` and `drafters`."""
        baseline, seed = self.totals(BASELINE), self.config.seed
        contexts = {name: len(request.tokens) for name, request in self.by_id.items()}
        drafters = []
        for arm in self.arms:
            totals = self.totals(arm.name)
            self.audits[arm.name] = self.audit(arm)
            trained = isinstance(arm.drafter, TrainableDrafter)
            parameters = arm.drafter.parameters() if trained else ()
            drafters.append(
                schema.DrafterResult(
                    kind=arm.drafter.kind,
                    path=arm.path,
                    parameters=sum(parameter.numel() for parameter in parameters),
                    draft=self.draft_facts(arm),
                    **metrics.summarise(totals, baseline, contexts, seed),
                    **self.ahead_facts(arm),
                    memory_bytes=schema.MemoryBytes(**self.memory[arm.name]),
                    lossless=schema.LosslessCounts(**self.audits[arm.name].counts()),
                )
            )
        numbers = schema.Baseline(
            tokens=int(baseline.committed.sum()),
            seconds=float(baseline.decode_seconds.sum()),
            tokens_per_second=metrics.tokens_per_second(baseline),
        )
        return numbers, drafters

    def optional_blocks(
        self, baseline: schema.Baseline, drafters: Sequence[schema.DrafterResult]
    ) -> dict[str, Any]:
        """The blocks that `bench` requests, measured after the arms."""
        config, target, arms, records = self.config, self.target, self.arms, self.records
        blocks: dict[str, Any] = {}
        requests = self.by_id
        text = [token for request in self.requests for token in request.tokens][:TEXT_TOKENS]
        lengths = {name: _mean_length(requests, records.of(name)) for name in self.engines}
        if config.profile.wanted:
            blocks["profile"] = profile(config.profile, target, arms, requests, config.seed)
        if config.costs.nodes:
            curves = measure_costs(config.costs, target, arms, text, config.seed)
            blocks["costs"] = schema.Costs.model_validate(curves.to_dict())
        if config.roofline:
            blocks["roofline"] = roofline(target, arms, baseline, drafters, text, lengths)
        served = served_loops(config, target, arms, requests, self.warmup, self.parts)
        if self.peers or served:
            ours = {name: Loop(self.totals(name), self.timed(name)) for name in self.names}
            blocks["baselines"] = baseline_block(ours[BASELINE], {**ours, **served}, config.seed)
        discard_transcripts(records.directory)  # from an earlier measurement
        if config.lost.enabled:
            totals = {name: self.totals(name) for name in self.engines}
            costs = blocks.get("costs")
            given = (self.prompts, requests, totals, lengths, costs, records.directory)
            blocks["lost"] = lost_block(config, target, arms, *given)
        return blocks

    def ahead_facts(self, arm: Arm) -> dict[str, Any]:
        """The savings of an arm from drafting ahead; empty for one that did not."""
        tallies = [record.ahead for record in self.timed(arm.name) if record.ahead is not None]
        if not tallies:
            return {}
        drafts, kept, hidden = (sum(column) for column in zip(*tallies, strict=True))
        hidden_ms = 1000.0 * divide(hidden, drafts)
        return {"ahead": schema.AheadResult(kept=divide(kept, drafts), hidden_ms=hidden_ms)}

    def draft_facts(self, arm: Arm) -> schema.DraftFacts:
        """The draft with which an arm is measured."""
        tree, decode, more = self.engines[arm.name].tree, arm.decode, dict[str, Any]()
        rule = get_rule(decode.acceptance, tree, share_noise=decode.share_noise)
        if weights := arm.weights_sha256:
            more["weights_sha256"] = weights
        return schema.DraftFacts(
            shape=decode.shape,
            depth=tree.max_depth,
            nodes=tree.num_nodes,
            name=arm.name,
            noise=NOISE[rule.drafts],
            **draft_details(decode),
            **more,
        )

    def audit(self, arm: Arm) -> AuditReport:
        """Compare an arm's answers with the baseline's."""
        plain = {(item.prompt, item.repeat): item.tokens for item in self.records.of(BASELINE)}
        found = self.records.of(arm.name)
        return audit(
            self.target,
            [self.engines[arm.name].constrained(self.by_id[record.prompt]) for record in found],
            [plain[record.prompt, record.repeat] for record in found],
            [record.tokens for record in found],
            arm.decode.sampling(),
            width=max(2, self.engines[arm.name].tree.num_nodes),
            examined=promise(arm.decode.acceptance, arm.decode.temperature) == TEXT,
            exact=arm.decode.exact,
            chunk=arm.decode.prefill_chunk,
        )

    def conditions(self, source: Loaded, leaks: LeakFacts | None) -> schema.Conditions:
        """The `run` block: the conditions of the measurement, and further details of each arm."""
        baseline, decode = self.totals(BASELINE), self.arms[0].decode
        typical = {"epsilon": decode.typical_epsilon, "delta": decode.typical_delta}
        arms = {}
        for arm in self.arms:
            totals, report = self.totals(arm.name), self.audits[arm.name]
            intervals = metrics.domain_speedup_ci95(totals, baseline, self.config.seed)
            arms[arm.name] = schema.DrafterConditions(
                prefill_seconds=float(totals.seconds["prefill"].sum()),
                speedup_ci95_by_domain=intervals,
                audited_tokens=report.tokens,
                flips=report.flips,
                divergences=[item.to_dict() for item in report.divergences],
            )
        found = schema.Conditions(
            bench=asdict(self.config),
            sampling=asdict(decode.sampling()),
            **({"typical": typical} if decode.acceptance == "typical" else {}),
            warmup_prompts=len(self.warmup),
            baseline_prefill_seconds=float(baseline.seconds["prefill"].sum()),
            arms=arms,
            prompts=prompt_facts(source, self.prompts),
        )
        return found if leaks is None else found.model_copy(update={"leaks": dict(leaks)})


def draft_details(decode: DecodeConfig) -> dict[str, Any]:
    """The settings of `DraftFacts` beside its sizes that matter for the draft."""
    found: dict[str, Any] = {}
    if decode.shape == "tree":
        found["choices"] = [list(path) for path in decode.choices]
    if decode.shape in ("dynamic", "dartree"):
        found["width"] = decode.width
    if decode.shape == "dartree":
        found |= {"candidates": decode.candidates, "depth_penalty": decode.depth_penalty}
    own = decode.adaptive_settings()
    if own.mode != "none":
        found["adaptive"] = own.mode
    if own.mode in DEFAULT_THRESHOLDS:
        found["adaptive_threshold"] = own.threshold
    more = {
        "adaptive_lengths": list(own.lengths),
        "adaptive_head": own.head,
        "adaptive_costs": list(decode.adaptive_costs),
    }
    return found | {name: value for name, value in more.items() if value and own.active}


def _prepare(
    config: BenchConfig, target: TargetModel, arms: Sequence[Arm], prompts: Sequence[Prompt]
) -> _Session:
    """Choose the prompts that fit, and build engines with the same cache capacity."""
    checked = check_arms(config, arms)
    decode, limit = checked[0].decode, target.info.max_position_embeddings
    measured, spare = (
        every_turn(behind_others(some, prompts, target.tokenizer, config.contexts), target, decode)
        for some in split_prompts(config, prompts)
    )
    requests, warmup = (
        to_requests(some, target.tokenizer, decode, capacity=limit, overlong="skip")
        for some in (measured, spare)
    )
    if not requests:
        raise UserError(
            f"no prompt fits: with decode.max_new_tokens={decode.max_new_tokens} all are longer "
            f"than the target's {limit} positions. Shorten the prompts or the answers."
        )
    checked = _settle(checked, target, config.repeats * sum(r.max_new_tokens for r in requests))
    kept = [measured[request.index] for request in requests]
    requests = [replace(request, index=place) for place, request in enumerate(requests)]
    warmup = warmup or requests[:1]
    most = max(len(item.tokens) + item.max_new_tokens for item in (*requests, *warmup))
    room = most + max(arm.decode.tree().num_nodes for arm in checked) + 1
    room = -(-room // ROOM) * ROOM
    plain = checked[0].decode.without_draft()  # compiled exactly if the arms are
    engines = {BASELINE: Engine(target, None, plain, capacity=room)}
    for arm in checked:
        engines[arm.name] = Engine(target, arm.drafter, arm.decode, capacity=room)
    peers = {peer.name: peer for peer in make_peers(config.baselines, target, checked, requests)}
    return _Session(config, target, checked, kept, requests, warmup, engines, peers)


def _settle(arms: Sequence[Arm], target: TargetModel, tokens: int) -> list[Arm]:
    """The arms with `decode.compile` settled, the same for all. tokens: of an arm's answers, which
    take half as many steps or fewer."""
    settled_ones = [settled(arm.decode, target, tokens / 2) for arm in arms]
    compiles = all(decode.compiles for decode in settled_ones)
    return [replace(arm, decode=replace(arm.decode, compile=compiles)) for arm in arms]


def _answer(engine: Engine, request: Request) -> tuple[Completion, dict[str, float]]:
    """Decode one request; its completion and the seconds it took per phase."""
    engine.clock.reset()
    (completion,) = engine.run([request])
    engine.clock.require_agreement()
    return completion, dict(engine.clock.seconds)


def _mean_length(requests: Requests, records: Sequence[Record]) -> float:
    """Mean number of cached tokens in a step of an arm."""
    cached, steps = 0, 0
    for record in records:
        length = len(requests[record.prompt].tokens)
        for _, committed, _ in record.passes:
            cached, steps, length = cached + length, steps + 1, length + committed
    return divide(cached, steps)
