"""The typed form of report.json: the schema, the reader and the writer of a measurement's results.

`inference.measure` fills a `Report`; tables, plots, the page, model cards and Hub pushes read it.
Fields are in the order in which they are written. Intervals are 95% bootstrap intervals over
prompts, seconds exclude prefill unless a field says otherwise, and a depth counts from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from heads.api.config import shown
from heads.api.errors import UserError
from heads.api.reading import read_json
from inference.decoding.rules.names import LOSSY, TEXT, promise, rule_text
from inference.manifest import write_bytes
from inference.measure.metrics import GAP, PHASES, divide
from inference.target.settings import loading_text

FORMAT = 1
REPORT_FILE = "report.json"
SERVER_RULE = "server"
"""The rule of a running server above temperature 0, which its API does not tell."""
OTHER = "another drafter"
"""In a report of some drafters (`Report.only`), the name of all others."""
PLOTS = ("acceptance", "speedup", "step_time", "by_context", "speedup_by_batch", "server")
"""Names of the plots' files, without .png. The first three are for drafters, followed by contexts
(if they differ), a profile, and running servers."""


def _check_order(interval: tuple[float, float]) -> tuple[float, float]:
    if interval[0] > interval[1]:
        raise PydanticCustomError("interval", "[low, high] with low <= high")
    return interval


Count = Annotated[int, Field(ge=0)]
Interval = Annotated[tuple[float, float], Field(strict=False), AfterValidator(_check_order)]
"""(low, high)."""


class Block(BaseModel):
    """A part of a report. Numbers are finite and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    whole: ClassVar[str] = "a report"
    """What the block is a part of, in messages."""
    stage: ClassVar[str] = "measure"
    """The stage that writes the block."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        unknown = set(content) - set(cls.model_fields) if isinstance(content, Mapping) else set()
        if unknown:
            allowed = ", ".join(sorted(cls.model_fields))
            message = "{key} is not part of {whole}. Allowed: {allowed}."
            facts = {"key": min(unknown), "whole": cls.whole, "allowed": allowed}
            raise PydanticCustomError("unknown_key", message, facts)
        return content

    def to_dict(self) -> dict[str, Any]:
        """The block as JSON values; optional keys that were not given are left out."""
        return self.model_dump(mode="json", exclude_unset=True)


# What was measured


class TargetFacts(Block):
    """The target model."""

    id: str
    """Hub id or path."""
    revision: str
    """Commit of the Hub repository, or a hash of the files."""
    dtype: str
    """Number format of the weights, for instance "bfloat16"."""
    parameters: Count
    loading: dict[str, str | bool] = {}
    """Other settings of loading that change what the target computes (`quantization`,
    `long_context`), where they differ from the defaults."""

    @property
    def label(self) -> str:
        """The id, followed in brackets by unusual settings of loading."""
        return f"{self.id} ({loading_text(self.loading)})" if self.loading else self.id

    @property
    def numbers(self) -> str:
        """The number format, followed by unusual settings of loading."""
        return ", ".join(filter(None, (self.dtype, loading_text(self.loading))))


class DeviceFacts(Block):
    """The machine."""

    kind: str
    """Type of torch device, for instance "cuda"."""
    name: str
    threads: Count
    """CPU threads of torch."""


class ReportSettings(Block):
    """The settings that all drafters of a report share."""

    temperature: float
    max_new_tokens: Count
    batch_size: Count
    rule: str
    """Acceptance rule (`decode.rule`); match in all reports from before version 0.1.0."""
    seed: Count
    prompts: Count
    """Measured prompts."""
    compile: bool | None = None
    """Whether all arms, plain decoding included, ran compiled steps (`decode.compile`)."""

    @property
    def promise(self) -> str:
        """How the rule preserves the target's text; see `inference.decoding.rules.names`."""
        return promise(self.rule, self.temperature)

    @property
    def rule_text(self) -> str:
        """The rule, followed in brackets by what it does not preserve."""
        if self.rule == SERVER_RULE:
            return f"{SERVER_RULE} (its own)"
        return rule_text(self.rule, self.temperature)


class Baseline(Block):
    """The same decoding loop without a drafter."""

    tokens: Count
    """Committed tokens, the first one of every answer excluded."""
    seconds: float
    tokens_per_second: float

    @property
    def step_ms(self) -> float:
        """Milliseconds per pass, which commits one token."""
        return 1000.0 * divide(self.seconds, self.tokens)


class DraftFacts(Block):
    """The draft that a drafter was measured with."""

    shape: str
    """"chain" or "tree"."""
    depth: Count
    """Drafted tokens on the longest path."""
    nodes: Count
    """Tokens of a verification, the root included."""
    name: str | None = None
    """Name in the report; the drafter's kind where it is missing."""
    noise: str | None = None
    """"shared": drafts are ranked with shared Gumbel noise; "own": their own; "none"."""
    choices: list[list[Count]] | None = None
    """Paths of a static tree, by rank of the candidates."""
    width: Count | None = None
    """Of a dynamic tree or a dartree. This and the settings below are named as in `decode`, and are
    absent where they do not matter and in earlier reports."""
    candidates: Count | None = None
    depth_penalty: float | None = None
    """`candidates` and `depth_penalty`: of a dartree."""
    adaptive: str | None = None
    """How chains were stopped early. Absent: not; this holds for the settings below too."""
    adaptive_threshold: float | None = None
    adaptive_lengths: list[Count] | None = None
    """The lengths that were chosen among from step to step."""
    adaptive_head: str | None = None
    adaptive_costs: list[float] | None = None
    weights_sha256: str | None = None
    """Hash of the measured checkpoint's weights file."""

    @property
    def label(self) -> str:
        """ "chain 4", "chain 8 (confidence 0.3)" or "tree 4 (12 nodes)", the first number being the
        depth."""
        sized = f" ({self.nodes} nodes)" if self.shape != "chain" else ""
        return f"{self.shape} {self.depth}{sized}" + (f" ({self.stops})" if self.stops else "")

    @property
    def stops(self) -> str:
        """How the length of chains was adapted; empty if it was not."""
        words = []
        if self.adaptive is not None:
            given = self.adaptive_threshold
            words.append(self.adaptive + (f" {given:g}" if given else ""))
        if self.adaptive_lengths:
            words.append(f"lengths {', '.join(map(str, self.adaptive_lengths))}")
        return "; ".join(words)

    @property
    def words(self) -> str:
        """The draft as part of a sentence."""
        if self.shape == "chain":
            return f"chains of {self.depth}" + (f" ({self.stops})" if self.stops else "")
        return f"trees of {self.nodes} nodes, {self.depth} deep"


class Acceptance(Block):
    """Acceptance by depth, as shares in [0, 1]."""

    unconditional: list[float]
    """Share of passes in which the depth was accepted."""
    conditional: list[float]
    """The same share among passes in which the depth before was accepted."""


class DomainResult(Block):
    """The results of one drafter on the prompts of one domain; see `DrafterResult`."""

    tau: float
    tau_ci95: Interval
    tar: float
    speedup: float


class Span(Block):
    """Places [first, end) of tokens."""

    first: Count
    end: Count
    """0: no end."""

    @property
    def label(self) -> str:
        """ "1 to 16" or "257 and on"."""
        return f"{self.first} to {self.end - 1}" if self.end else f"{self.first} and on"


class ContextResult(DomainResult, Span):
    """The results on the prompts of [first, end) tokens: by the context at the answer's start."""

    prompts: Count
    speedup_ci95: Interval


class PhaseValues(Block):
    """One number per phase of a decoding step."""

    draft: float
    verify: float
    commit: float
    other: float
    gap: float | None = None
    """Time between two steps, where the clock measures it."""

    def items(self) -> Iterator[tuple[str, float]]:
        """(phase, value) of the phases that were measured."""
        return ((phase, value) for phase, value in self if value is not None)


class MemoryBytes(Block):
    """Bytes that are allocated while decoding."""

    target: Count
    drafter: Count
    kv: Count
    """Caches of keys and values."""


class LosslessCounts(Block):
    """Answers compared with those of plain decoding, token by token."""

    sequences: Count
    identical: Count
    near_ties: Count
    """Answers that differ within the measured numerical gap of the number format."""
    mismatches: Count
    """Answers that differ by more."""

    @model_validator(mode="after")
    def _check_sum(self) -> LosslessCounts:
        if self.sequences != self.identical + self.near_ties + self.mismatches:
            message = "does not add up: sequences must be identical + near_ties + mismatches."
            raise PydanticCustomError("inconsistent", message)
        return self

    def describe(self, kept: str = TEXT) -> str:
        """ "64/64", "63/64, 1 near tie" or "60/64, 4 MISMATCHES".

        kept: what the rule preserves (`ReportSettings.promise`). If that is not the baseline's
        text: "LOSSY, 3/64 same text" or "distribution kept, 3/64 same text".
        """
        text = f"{self.identical}/{self.sequences}"
        if kept != TEXT:
            return f"{'LOSSY' if kept == LOSSY else 'distribution kept'}, {text} same text"
        if self.near_ties:
            text += f", {self.near_ties} near tie{'s' if self.near_ties > 1 else ''}"
        if self.mismatches:
            text += f", {self.mismatches} MISMATCH{'ES' if self.mismatches > 1 else ''}"
        return text


class AheadResult(Block):
    """The savings from drafting during verifications (`decode.ahead`)."""

    kept: float
    """Share of verified drafts that had been made ahead."""
    hidden_ms: float
    """Milliseconds of making these drafts that passed during a verification, per draft; not part of
    `step_ms`."""


class DrafterResult(Block):
    """One drafter with one draft."""

    kind: str
    path: str
    """Checkpoint folder; empty for a kind without weights."""
    parameters: Count
    draft: DraftFacts
    tau: float
    """Committed tokens per verify pass."""
    tau_ci95: Interval
    tokens: Count
    """Committed tokens, the first one of every answer excluded."""
    verify_passes: Count
    tar: float
    """Accepted drafted tokens / tested drafted tokens."""
    acceptance: Acceptance
    domains: dict[str, DomainResult]
    contexts: list[ContextResult] = []
    """Bins that hold a prompt, the shortest first; empty in reports from before version 0.1.0."""
    tokens_per_second: float
    speedup: float
    """tokens_per_second / the baseline's."""
    speedup_ci95: Interval
    ideal_speedup: float
    """tau / (1 + draft time per pass / the baseline's time per pass)."""
    step_ms: PhaseValues
    """Milliseconds per verify pass."""
    memory_bytes: MemoryBytes
    lossless: LosslessCounts
    ahead: AheadResult | None = None
    """Only for a drafter that drafted ahead."""

    @property
    def name(self) -> str:
        """The drafter's name in the report, which is unique there."""
        return self.draft.name or self.kind

    @property
    def efficiency(self) -> float:
        """speedup / ideal_speedup."""
        return divide(self.speedup, self.ideal_speedup)

    @property
    def trained(self) -> bool:
        """Whether it has trained weights: it was loaded from a checkpoint."""
        return bool(self.path or self.draft.weights_sha256)


class Repeats(Block):
    """How much the repeats of the measurement differ, which shows whether the machine was quiet.

    Every repeat decodes the same text with every arm. Speeds are computed from the kept repeats."""

    measured: Count
    """Number of decoded repeats."""
    kept: list[Count]
    """Indices of those that count, from 0."""
    limit: float
    """Spread above which the machine counts as disturbed (`bench.spread`)."""
    spread: dict[str, float]
    """Arm (plain decoding included) to slowest kept repeat / fastest - 1; empty for one repeat."""
    above_tau: list[str]
    """Drafters with a speedup above tau, which is impossible: plain decoding was slowed down."""

    @property
    def largest(self) -> tuple[str, float]:
        """The arm whose repeats differ most, and by how much; ("", 0.0) for one repeat."""
        return max(self.spread.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def disturbed(self) -> bool:
        """Whether the speeds are not reliable."""
        return self.largest[1] > self.limit or bool(self.above_tau)


# Blocks that `bench` requests


class ProfileSetting(Block):
    """One condition of the profile."""

    arm: str
    """Name of the drafter."""
    sweep: str
    """The varied setting: "batch", "context" or "temperature"."""
    batch: Count
    """Sequences that are decoded together."""
    context: Count
    """Tokens of the prompt."""
    temperature: float
    shape: str
    """Shape of the draft; "none" for plain decoding."""
    depth: Count

    @property
    def key(self) -> tuple[Any, ...]:
        """Condition and draft."""
        return tuple(getattr(self, name) for name in ProfileSetting.model_fields)


class ProfilePoint(ProfileSetting):
    """The speed of one draft under one condition."""

    nodes: Count
    answers: Count
    tau: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    speedup_ci95: Interval
    """Interval by resampling blocks of requests."""


class BestDraft(ProfileSetting):
    """The fastest draft under one condition; depth 0 where plain decoding is fastest."""

    tokens_per_second: float
    speedup: float


class Profile(Block):
    """Speed by batch size, context, temperature and draft (`bench.profile`)."""

    blocks: Count
    """Blocks of requests, each decoded by every drafter in turn."""
    refills: Count
    """Requests of a block per sequence of the batch."""
    points: list[ProfilePoint]
    best: list[BestDraft]


class CostPoint(Block):
    """The median time of one call."""

    nodes: Count
    """Nodes of a verification or a drafted chain, root included, or committed tokens."""
    rows: Count
    """Sequences of the batch."""
    length: Count
    """Cached tokens per sequence."""
    seconds: float
    low: float
    high: float
    """`low` and `high`: first and third quartile, in seconds."""


class Costs(Block):
    """Time per call (`bench.costs`); `inference.decoding.costs.CostCurves` interpolates it."""

    target: str
    device: str
    dtype: str
    launch: str
    """"eager", or "graph" where calls were captured and replayed."""
    repeats: Count
    """Timed calls per point."""
    verify: list[CostPoint]
    draft: dict[str, list[CostPoint]]
    commit: dict[str, list[CostPoint]]
    """`draft` and `commit`: by drafter."""

    @property
    def sizes(self) -> list[int]:
        """All numbers of nodes, ascending."""
        return sorted({nodes for row in self.rows() for nodes in row.ms})

    def rows(self) -> list[CostRow]:
        """Every curve: verification, then drafting and committing by drafter."""
        curves = {"verify": self.verify}
        curves |= {f"draft: {name}": points for name, points in self.draft.items()}
        curves |= {f"commit: {name}": points for name, points in self.commit.items()}
        found: dict[tuple[str, int, int], dict[int, float]] = {}
        for name, points in curves.items():
            for point in points:
                times = found.setdefault((name, point.rows, point.length), {})
                times[point.nodes] = 1000 * point.seconds
        return [CostRow(*place, times) for place, times in found.items()]


class CostRow(NamedTuple):
    """One curve of the costs at one batch size and number of cached tokens."""

    name: str
    rows: int
    length: int
    ms: dict[int, float]
    """Milliseconds by nodes."""


class BandwidthFacts(Block):
    """Memory bandwidth of the device as measured by probes, in bytes per second."""

    device: str
    copy_bytes_per_second: float
    """Bytes read and written by a copy."""
    gemv_bytes_per_second: float
    """Bytes read by a matrix-vector product."""
    used_bytes_per_second: float
    """The larger of the two."""


class RooflineStep(Block):
    """A step without a drafter, compared with the bandwidth."""

    bytes_per_step: Count
    step_ms: float
    share: float
    """bytes_per_step / (bandwidth * step time)."""


class RooflineDraft(Block):
    """A drafter's step, compared with the bandwidth; see `RooflineStep`."""

    bytes_per_step: Count
    drafter_bytes: Count
    """Bytes that the drafter reads in all its passes of a step."""
    step_ms: float
    share: float
    efficiency: float
    """speedup / ideal_speedup."""
    split: PhaseValues
    """Shares of the step."""


class Roofline(Block):
    """The bytes that a step must move (`bench.roofline`)."""

    bandwidth: BandwidthFacts
    target_bytes: Count
    """Weights that a step reads: without the embedding table, with the LM head."""
    expert_bytes: Count
    kv_bytes_per_token: Count
    baseline: RooflineStep
    arms: dict[str, RooflineDraft]
    """By drafter."""


class LoopResult(Block):
    """Another decoding loop; its ratios refer to our loop without a drafter."""

    tokens_per_second: float
    tokens_per_second_ci95: Interval
    ratio: float
    ratio_ci95: Interval
    end_to_end_tokens_per_second: float
    end_to_end_ratio: float
    """End to end, including prefill."""
    tau: float
    """Tokens per pass."""
    sequences: Count
    identical: Count
    """Answers that equal ours."""
    interleaved: bool
    """False for an engine that ran in a separate process, before or after the others."""
    version: str | None = None
    """Version of a foreign engine."""


class LossTerm(Block):
    """One factor between the ceiling and the measured speedup; see docs/report_page.md."""

    name: str
    factor: float
    ci95: Interval


class LossSplit(Block):
    """ceiling * the product of all factors = speedup."""

    ceiling: float
    """depth + 1."""
    speedup: float
    tau: float
    terms: list[LossTerm]


class CalibrationGap(Block):
    """How far confidences differ from the accepted shares."""

    ece: float
    """Expected calibration error, over ten bins."""
    ece_ci95: Interval | None = None


class DomainLoss(LossSplit):
    """The split of one domain."""

    calibration: CalibrationGap | None = None


class DraftStates(Block):
    """Shares over a group of drafted tokens, each with its interval."""

    tested: Count
    """Drafted tokens that were compared with the target's."""
    accepted: float
    accepted_ci95: Interval
    overlap: float
    """1 - total variation of both models' distributions as decoding uses them."""
    overlap_ci95: Interval
    own_overlap: float
    """The same value for the models' own distributions."""
    own_overlap_ci95: Interval
    missed: float
    """Probability that the target gives to tokens outside the draft vocabulary."""
    missed_ci95: Interval


class PositionStates(DraftStates, Span):
    """The drafted tokens at some positions of the answers."""

    calibration: CalibrationGap | None = None


class _TemperatureTau(Block):
    temperature: float
    tau: float
    tau_ci95: Interval


class TemperatureStates(DraftStates, CalibrationGap, _TemperatureTau):
    """The sample, decoded at one temperature."""


class TreeComparison(Block):
    """The measured draft, compared with the best static tree of the same size."""

    nodes: Count
    own: float
    best: float
    """tau of the measured draft and of the best tree under the sample's acceptance by rank."""
    choices: list[list[Count]]
    """Paths of the best tree, by rank of the candidates."""

    @property
    def paths(self) -> list[str]:
        """ "1", "1·2": the best tree's paths with ranks from 1."""
        return ["·".join(str(rank + 1) for rank in path) for path in self.choices]


class CalibrationBin(Block):
    """The drafted tokens of one of ten equal ranges of confidence."""

    count: Count
    confidence: float
    """Mean confidence."""
    accepted: float
    """Accepted share."""


class Calibration(Block):
    """How well a drafter's confidence predicts acceptance."""

    estimate: str
    """"head": a trained confidence; "probability": that of the best candidate."""
    ece: float
    ece_ci95: Interval | None = None
    bins: list[CalibrationBin]


class _Widening(Block):
    widening: float
    """Time of a verification of the draft / time of one node, by the cost curves."""


class DrafterLoss(LossSplit, _Widening):
    """The terms of one drafter's lost speed."""

    domains: dict[str, DomainLoss]
    depths: dict[str, list[DraftStates]]
    """Group ("all" or a domain) to its states by depth."""
    positions: list[PositionStates]
    temperatures: list[TemperatureStates]
    tree: TreeComparison
    calibration: Calibration | None = None
    """Missing if drafts have no confidence."""


class Losses(Block):
    """The terms of the lost speed (`bench.lost`)."""

    prompts: Count
    """Prompts that were decoded once more."""
    arms: dict[str, DrafterLoss]
    """By drafter."""


# A running server


class ServerCell(Block):
    """A running server on some prompts at one concurrency. Intervals are 95% bootstraps; they are
    missing for fewer than two units."""

    concurrency: Count
    """Clients: most requests in progress at once."""
    domain: str
    """Empty for all."""
    first: Count
    end: Count
    """Prompts of [first, end) tokens; end 0: all."""
    requests: Count
    windows: Count
    """Stretches between two reads of the counters, which intervals of tokens/s resample."""
    prompt_tokens: float
    """Mean tokens of a prompt."""
    tokens: Count
    """Generated tokens, the first one of every answer included."""
    seconds: float
    """From the first request of a window to the end of its last answer, prompts included."""
    running: float
    """Mean number of requests in progress; below the number of clients where a window has fewer
    prompts, and towards its end."""
    tokens_per_second: float
    tokens_per_second_ci95: Interval | None = None
    first_token_ms: float
    """Median time to the first token, in the first repeat."""
    first_token_ms_ci95: Interval | None = None
    first_token_ms_p99: float
    token_ms: float
    """Inter-token latency: time after the first token / tokens after it."""
    token_ms_ci95: Interval | None = None
    gap_ms_p99: float
    """99th percentile of the time between two pieces of a stream."""
    tau: float | None = None
    """Missing if the server does not speculate."""
    tau_ci95: Interval | None = None
    units: Count | None = None
    """The units that the intervals of tau and acceptance resample: prompts or windows."""
    passes: Count | None = None
    accepted: Count | None = None
    drafted: Count | None = None
    accepted_share: float | None = None
    """accepted / drafted."""
    acceptance: list[float] | None = None
    acceptance_ci95: list[Interval] | None = None
    """Share of passes in which each position was accepted."""
    baseline_tokens_per_second: float | None = None
    """Of the server without speculation."""
    speedup: float | None = None
    speedup_ci95: Interval | None = None
    identical: Count | None = None
    """Answers with the text of the server without speculation, at temperature 0."""

    @property
    def label(self) -> str:
        """ "all prompts", "code", "512 to 1023 tokens"."""
        span = f"{self.first} to {self.end - 1} tokens" if self.end else ""
        return ", ".join(filter(None, (self.domain, span))) or "all prompts"


class ServerSide(Block):
    """One running server."""

    url: str
    model: str
    engine: str
    """Empty if unknown."""
    source: str
    """The source of acceptance: "responses", "counters", "chunks" or "none"."""
    definition: str
    """The definition of its tau."""
    caveat: str
    """A caveat; empty if there is none."""
    repeated: Count
    """Windows that failed and were measured again."""
    restarts: Count
    """How often the server restarted during the measurement, as far as its counters show."""
    cells: list[ServerCell]

    def overall(self) -> list[ServerCell]:
        """The cells of all prompts, one per concurrency."""
        return [cell for cell in self.cells if not cell.domain and not cell.end]


class ServerMeasurement(Block):
    """A running server, measured through its API (`bench.server`)."""

    api: str
    """"chat", "completions", or both by prompt."""
    lengths: str
    """How prompts were assigned to ranges of tokens: "tokenizer" (the server's) or "estimate"."""
    speculative: ServerSide
    baseline: ServerSide | None = None
    """The same server without speculation."""


# How it was measured


class DrafterConditions(BaseModel):
    """Details of one drafter's measurement. Further keys are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    prefill_seconds: float | None = None
    speedup_ci95_by_domain: dict[str, Interval] = {}
    audited_tokens: Count | None = None
    """Tokens of the answers that the audit compared."""
    flips: Count | None = None
    """Tokens at which the target's choice depends on the width of the verification."""
    divergences: list[dict[str, Any]] = []
    """Positions at which answers differ from the baseline's."""


class Conditions(BaseModel):
    """The conditions of the measurement. Further keys are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    bench: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """Settings: the group `bench` of the configuration, and of sampling."""
    typical: dict[str, float] | None = None
    """`epsilon` and `delta` of rule typical."""
    warmup_prompts: Count | None = None
    baseline_prefill_seconds: float | None = None
    arms: dict[str, DrafterConditions] = {}
    """By drafter."""
    prompts: dict[str, Any] = {}
    """The prompts' source, its commit, and a hash of each prompt."""
    leaks: dict[str, Any] | None = None
    """How the prompts were compared with the drafters' training data, and which prompts were left
    out; see `inference.measure.config.LeakFacts`."""

    @property
    def leak_line(self) -> str:
        """A sentence about the comparison with the training data; empty if there is nothing to
        report."""
        if self.leaks is None:
            return ""
        found, parts = self.leaks, []
        if found["left_out"]:
            parts.append(
                f"{len(found['left_out'])} of {found['prompts']} prompts were left out, because "
                f"they were trained on ({found['exact']} exactly, {found['near']} nearly)"
            )
        if found["unknown"]:
            parts.append(
                f"not compared with the prompts: what {', '.join(found['unknown'])} was trained on"
            )
        return "; ".join(parts)


class Report(Block):
    """A whole report.json."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    target: TargetFacts
    device: DeviceFacts
    settings: ReportSettings
    baseline: Baseline
    drafters: list[DrafterResult]
    repeats: Repeats | None = None
    """Missing in reports from before version 0.1.0."""
    profile: Profile | None = None
    costs: Costs | None = None
    roofline: Roofline | None = None
    baselines: dict[str, LoopResult] | None = None
    """Other decoding loops (`bench.baselines`), by name."""
    lost: Losses | None = None
    server: ServerMeasurement | None = None
    """In place of drafters and a baseline of ours."""
    command: str | None = None
    versions: dict[str, str] = {}
    """Versions of Python and of packages."""
    git: Any = None
    """Commit of the working tree and whether it had changes."""
    run: Conditions = Conditions()

    @model_validator(mode="after")
    def _check_names(self) -> Report:
        names = [drafter.name for drafter in self.drafters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            message = (
                "drafters holds {twice} more than once; every drafter needs its own draft.name."
            )
            raise PydanticCustomError("inconsistent", message, {"twice": str(twice)})
        return self

    @property
    def phases(self) -> list[str]:
        """The phases of a step that some drafter has."""
        gaps = any(drafter.step_ms.gap is not None for drafter in self.drafters)
        return [*PHASES, GAP] if gaps else list(PHASES)

    @property
    def version_list(self) -> str:
        """ "torch 2.13.0, numpy 2.3.0"."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    @property
    def domains(self) -> list[str]:
        """All domains in alphabetical order."""
        return sorted({domain for drafter in self.drafters for domain in drafter.domains})

    @property
    def contexts(self) -> list[str]:
        """Labels of the bins of contexts, the shortest first. Empty if all prompts are in one bin,
        whose numbers equal those of the whole."""
        bins = {(one.first, one.label) for drafter in self.drafters for one in drafter.contexts}
        return [label for _, label in sorted(bins)] if len(bins) > 1 else []

    @property
    def ranked(self) -> list[DrafterResult]:
        """The drafters: trained ones first, then those without weights, each group by descending
        speed."""
        return sorted(self.drafters, key=lambda one: (not one.trained, -one.speedup))

    def drafter(self, name: str) -> DrafterResult:
        """The drafter of this name; raises `UserError` if it was not measured."""
        for drafter in self.drafters:
            if drafter.name == name:
                return drafter
        known = ", ".join(drafter.name for drafter in self.drafters) or "nothing"
        raise UserError(f"the report has no drafter '{name}'. It measured: {known}.")

    def only(self, kept: Sequence[DrafterResult]) -> Report:
        """The report with no drafters but these, in all its blocks. That the repeats of another one
        differ stays, without its name: the machine was disturbed for all."""
        others = {one.name for one in self.drafters} - {one.name for one in kept}

        def known(by_drafter: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in by_drafter.items() if name not in others}

        changes: dict[str, Any] = {"drafters": list(kept)}
        if (was := self.repeats) is not None:
            names = {
                name: OTHER if name in others else name for name in (*was.spread, *was.above_tau)
            }
            by_size = sorted(was.spread.items(), key=lambda item: item[1])
            spread = {names[name]: size for name, size in by_size}  # of several others the largest
            above = list(dict.fromkeys(names[name] for name in was.above_tau))
            changes["repeats"] = was.model_copy(update={"spread": spread, "above_tau": above})
        if (profile := self.profile) is not None:
            points = [point for point in profile.points if point.arm not in others]
            best = [point for point in profile.best if point.arm not in others]
            changes["profile"] = profile.model_copy(update={"points": points, "best": best})
        if (costs := self.costs) is not None:
            curves = {"draft": known(costs.draft), "commit": known(costs.commit)}
            changes["costs"] = costs.model_copy(update=curves)
        if (roofline := self.roofline) is not None:
            changes["roofline"] = roofline.model_copy(update={"arms": known(roofline.arms)})
        if self.baselines is not None:
            changes["baselines"] = known(self.baselines)
        if (lost := self.lost) is not None:
            changes["lost"] = lost.model_copy(update={"arms": known(lost.arms)})
        run: dict[str, Any] = {"arms": known(self.run.arms)}
        if (leaks := self.run.leaks) is not None:
            unknown = [name for name in leaks["unknown"] if name not in others]
            trained_on = known(leaks.get("trained_on", {}))
            run["leaks"] = {**leaks, "trained_on": trained_on, "unknown": unknown}
        changes["run"] = self.run.model_copy(update=run)
        return self.model_copy(update=changes)

    def domain_intervals(self, name: str) -> Mapping[str, tuple[float, float]]:
        """Domain to the 95% interval of a drafter's speedup; empty if the report has none."""
        return self.run.arms.get(name, DrafterConditions()).speedup_ci95_by_domain


# Reading and writing

WANTED = {
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "int_type": "a whole number, 0 or more",
    "greater_than_equal": "a whole number, 0 or more",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "tuple_type": "[low, high] with low <= high",
    "too_long": "[low, high] with low <= high",
}
"""Type of a pydantic error -> what is allowed."""


Whole = TypeVar("Whole", bound=Block)


def parse_report(content: Any, source: str = "report") -> Report:
    """`content`, the object that a report.json holds, as a `Report`.

    Raises `UserError`, which names `source` and the dotted key at fault.
    """
    return parse(Report, content, source)


def read_report(path: Path) -> Report:
    """The report in a file, or in the report.json of a folder.

    Raises `UserError` if there is none, or if it is broken or incomplete.
    """
    return read(Report, path, REPORT_FILE)


def parse(kind: type[Whole], content: Any, source: str) -> Whole:
    """`content` as a block that fills a whole file; see `parse_report`."""
    found = content.get("format") if isinstance(content, Mapping) else None
    if isinstance(found, int) and found != FORMAT:
        again = f"this version reads format {FORMAT}. {kind.stage.capitalize()} again."
        raise UserError(f"{source}: format is {found}; {again}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {_explain(error.errors()[0], kind)}") from None


def read(kind: type[Whole], path: Path, name: str) -> Whole:
    """The block in a file, or in the file `name` of a folder; see `read_report`."""
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"'{path}' holds no {name}. Run `headstart {kind.stage}` first, or give the folder it "
            "wrote."
        )
    return parse(kind, read_json(file, f"{kind.stage.capitalize()} again."), f"'{file}'")


def _explain(error: ErrorDetails, kind: type[Block]) -> str:
    """One pydantic error as a sentence for the user."""
    key = ".".join(map(str, error["loc"])) or "the whole file"
    advice = f"{kind.whole.split()[-1].capitalize()}s are written by `headstart {kind.stage}`"
    if error["type"] == "missing":
        return f"{key} is missing. {advice}; {kind.stage} again."
    if error["type"] == "unknown_key":
        return ".".join([*map(str, error["loc"]), error["msg"]])
    if error["type"] == "inconsistent":
        return " ".join([*([key] if error["loc"] else []), error["msg"]])
    wanted = WANTED.get(error["type"], error["msg"])
    return f"{key} must be {wanted}; given: {shown(error['input'])}. {advice}."


def write_report(report: Report | Mapping[str, Any], path: Path) -> None:
    """Check a report, then write it atomically."""
    checked = parse_report(report, "the new report")
    write_bytes(path, (json.dumps(checked.to_dict(), indent=2) + "\n").encode())
