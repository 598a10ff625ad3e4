"""Engines' counters of speculation: a table of their names, and differences between two readings.

Three numbers describe a period of decoding: passes (verifications, of one request each), accepted
drafted tokens, and committed tokens. Every pass commits its accepted tokens and one token of the
target, so if an engine counts two of the numbers, the third follows. The first token of an answer
comes from the prompt's pass and does not count. tau = committed / passes.
`EngineCounters.definition` describes the differences between engines.

Counters only rise. If one fell, the server was restarted.

Legend: K drafted positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite

from prometheus_client.samples import Sample

from heads.api.errors import UserError

ANSWERED = ("stop", "length")
"""Outcomes of answered requests, for engines that distinguish outcomes."""
FIGURES = ("metrics", "headstart", "timings")
"""Fields of a response that may hold figures of speculation."""
QUOTED = 300
"""Most characters of them that an error quotes."""


@dataclass(frozen=True)
class EngineCounters:
    """The names of an engine's counters; empty if the engine does not have one.

    outcome: the label of `requests` that says how they ended (empty: all were answered).
    by_position: accepted drafted tokens by position, which is in the label `position` and begins at
    `first`; drafted_by_position: the same for drafted tokens. length: a gauge of tau.
    """

    name: str
    requests: str
    prompts: str
    tokens: str
    outcome: str = ""
    passes: str = ""
    committed: str = ""
    drafted: str = ""
    accepted: str = ""
    by_position: str = ""
    drafted_by_position: str = ""
    position: str = "position"
    first: int = 0
    length: str = ""
    definition: str = ""

    @property
    def speculation(self) -> set[str]:
        """Names of which at least one exists if the engine speculates."""
        return {self.passes, self.accepted, self.by_position, self.length} - {""}

    @property
    def names(self) -> set[str]:
        """All names of counters and gauges."""
        other = ("name", "outcome", "position", "first", "definition")
        found = {str(getattr(self, item.name)) for item in fields(self) if item.name not in other}
        return found - {""}


HEADSTART = EngineCounters(
    "headstart",
    "headstart_requests_total",
    "headstart_prompt_tokens_total",
    "headstart_generated_tokens_total",
    outcome="outcome",
    passes="headstart_verify_passes_total",
    committed="headstart_committed_tokens_total",
    drafted="headstart_tested_drafts_total",
    accepted="headstart_accepted_drafts_total",
    by_position="headstart_accepted_by_depth_total",
    position="depth",
    first=1,
    definition="committed tokens / verify passes; the last pass of an answer counts up to its end",
)
VLLM = EngineCounters(
    "vLLM",
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    outcome="finished_reason",
    passes="vllm:spec_decode_num_drafts_total",
    drafted="vllm:spec_decode_num_draft_tokens_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
    by_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    definition="1 + accepted / drafting steps; a step without a draft is none, and the last step "
    "of an answer counts beyond its end",
)
SGLANG = EngineCounters(
    "SGLang",
    "sglang:num_requests_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    passes="sglang:spec_verify_calls_total",
    definition="(generated tokens - requests) / verify calls, from its counters; its "
    "spec_accept_length is the mean of its last log interval, and avg_spec_accept_length that of "
    "the server's lifetime, the target's own token included",
)
SGLANG_GAUGE = EngineCounters(
    "SGLang",
    SGLANG.requests,
    SGLANG.prompts,
    SGLANG.tokens,
    length="sglang:spec_accept_length",
    definition="spec_accept_length, a mean over the server's last log interval and not over these "
    "requests: this version of SGLang does not count its verify calls",
)
TENSORRT = EngineCounters(
    "TensorRT-LLM",
    "trtllm_request_success_total",
    "trtllm_prompt_tokens_total",
    "trtllm_generation_tokens_total",
    by_position="trtllm_spec_decode_accepted_tokens_total",
    drafted_by_position="trtllm_spec_decode_drafted_tokens_total",
    position="token_position",
    definition="1 + accepted / drafting steps; a step is a token drafted at the first position",
)
TENSORRT_TOTALS = EngineCounters(
    "TensorRT-LLM",
    TENSORRT.requests,
    TENSORRT.prompts,
    TENSORRT.tokens,
    drafted="trtllm_spec_decode_num_draft_tokens_total",
    accepted="trtllm_spec_decode_num_accepted_tokens_total",
    definition="tokens / (tokens - accepted), the first token of every answer excluded: this "
    "version of TensorRT-LLM does not count its steps",
)
ENGINES = (HEADSTART, VLLM, SGLANG, SGLANG_GAUGE, TENSORRT, TENSORRT_TOTALS)
"""If an engine has two entries, the one with the better counters comes first."""
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""Paths of servers' metrics; TensorRT-LLM serves something else at the first."""


def known_engines() -> str:
    """The engines' names, for messages."""
    return ", ".join(dict.fromkeys(engine.name for engine in ENGINES))


def identify(samples: Iterable[Sample]) -> EngineCounters | None:
    """The engine that has these counters: one that speculates, otherwise one of whose names any
    exists; None for metrics of something else."""
    seen = {sample.name for sample in samples}
    found = [engine for engine in ENGINES if engine.names & seen]
    return next((one for one in found if one.speculation & seen), next(iter(found), None))


class ResetError(Exception):
    """A counter has fallen: the server was restarted."""


@dataclass(frozen=True)
class Look:
    """An engine's counters at one time, for one domain or for all. Numbers that are not counted are
    None; by_position, drafted_by_position: [K]."""

    requests: float | None = None
    tokens: float | None = None
    passes: float | None = None
    committed: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    by_position: tuple[float, ...] = ()
    drafted_by_position: tuple[float, ...] = ()
    length: float | None = None

    def since(self, before: Look) -> Look:
        """The differences from `before`; for the gauge, its current value. Raises `ResetError` if a
        counter fell."""
        changes: dict[str, float | tuple[float, ...] | None] = {"length": self.length}
        for name in (item.name for item in fields(Look) if item.name != "length"):
            now, then = getattr(self, name), getattr(before, name)
            if isinstance(now, tuple):
                then = (*then, *[0.0] * len(now))
                difference = tuple(one - other for one, other in zip(now, then, strict=False))
                if len(now) < len(getattr(before, name)) or min(difference, default=0.0) < 0:
                    raise ResetError(name)
                changes[name] = difference
            elif now is None:
                if then is not None:
                    raise ResetError(name)
                changes[name] = None
            else:
                if now < (then or 0.0):
                    raise ResetError(name)
                changes[name] = now - (then or 0.0)
        return Look(**changes)  # type: ignore[arg-type]


def read_look(samples: Sequence[Sample], engine: EngineCounters) -> Look:
    """The counters of all domains, ranks and models of a server together."""
    return Look(
        **{
            name: _total(samples, getattr(engine, name), engine)
            for name in (
                *("requests", "tokens", "passes", "committed", "drafted", "accepted", "length"),
            )
        },
        by_position=_by_position(samples, engine.by_position, engine),
        drafted_by_position=_by_position(samples, engine.drafted_by_position, engine),
    )


def read_domains(samples: Sequence[Sample], engine: EngineCounters) -> dict[str, Look]:
    """The counters by the label `domain`; "" for an engine without domains."""
    split: dict[str, list[Sample]] = {}
    for sample in samples:
        split.setdefault(sample.labels.get("domain", ""), []).append(sample)
    return {name: read_look(part, engine) for name, part in split.items()}


def _total(samples: Iterable[Sample], name: str, engine: EngineCounters) -> float | None:
    values = [
        float(sample.value)
        for sample in samples
        if sample.name == name
        and (name != engine.requests or not engine.outcome or _answered(sample, engine))
    ]
    if not values or not all(map(isfinite, values)):
        return None
    if name == engine.length:  # 0 if nothing is drafted
        return sum(values) / len(values) or None
    return sum(values)


def _answered(sample: Sample, engine: EngineCounters) -> bool:
    return sample.labels.get(engine.outcome) in ANSWERED


def _by_position(samples: Iterable[Sample], name: str, engine: EngineCounters) -> tuple[float, ...]:
    found: dict[int, float] = {}
    for sample in samples:
        if name and sample.name == name:
            label = sample.labels.get(engine.position, "")
            if label.isdecimal() and int(label) >= engine.first:
                place = int(label) - engine.first
                found[place] = found.get(place, 0.0) + float(sample.value)
    return tuple(found.get(place, 0.0) for place in range(max(found, default=-1) + 1))


@dataclass(frozen=True)
class Acceptance:
    """The results of speculation over a period of decoding. drafted: None if not counted;
    by_position: passes that accepted position i + 1 [K], empty if unknown."""

    passes: float
    committed: float
    accepted: float
    drafted: float | None = None
    by_position: tuple[float, ...] = ()


def acceptance(change: Look, answers: int, tokens: int) -> Acceptance | None:
    """The acceptance over a period, from its counters; None if speculation was not counted.
    answers, tokens: the clients' counts for the period, for engines that do not count them."""
    generated = tokens if change.tokens is None else change.tokens
    ended = answers if change.requests is None else change.requests
    passes, committed, accepted = change.passes, change.committed, change.accepted
    if passes is None and change.drafted_by_position:
        passes = change.drafted_by_position[0]
    if accepted is None and change.by_position:
        accepted = sum(change.by_position)
    if passes is None and accepted is None and change.length is None:
        return None
    if committed is None:
        known = passes is not None and accepted is not None
        committed = (passes or 0.0) + (accepted or 0.0) if known else max(0.0, generated - ended)
    if passes is None:
        length = change.length
        passes = committed / length if accepted is None and length else committed - (accepted or 0)
    accepted = committed - passes if accepted is None else accepted
    drafted = change.drafted
    if drafted is None and change.drafted_by_position:
        drafted = sum(change.drafted_by_position)
    return Acceptance(passes, committed, max(0.0, accepted), drafted, change.by_position)


def of_response(content: Mapping[str, object]) -> tuple[str, str, Acceptance] | None:
    """(engine, definition, acceptance) of a single response, or of the last event of a streamed
    one; None if it has no figures of speculation.

    vLLM: `metrics.speculative_decoding` (--per-request-spec-decode-metrics); llama.cpp: `timings`;
    `headstart serve`: `headstart`. Raises `UserError` for figures that are not as these engines
    write them.
    """
    try:
        return _figures(content)
    except (KeyError, TypeError, ValueError) as error:
        found = {name: content[name] for name in FIGURES if name in content}
        raise UserError(
            f"a response has figures of speculation that cannot be read ({error!r}): "
            f"{str(found)[:QUOTED]}. Serve with an engine that writes them as docs/serving.md says "
            "(vLLM: --per-request-spec-decode-metrics=detailed), or without them."
        ) from error


def _figures(content: Mapping[str, object]) -> tuple[str, str, Acceptance] | None:
    """See `of_response`; raises the error of whatever is missing or has another type."""
    metrics = content.get("metrics")
    if isinstance(metrics, Mapping) and isinstance(metrics.get("speculative_decoding"), Mapping):
        return "vLLM", VLLM.definition, _of_vllm(metrics["speculative_decoding"])
    own = content.get("headstart")
    if isinstance(own, Mapping) and "verify_passes" in own:
        passes = float(own["verify_passes"])
        found = Acceptance(passes, float(own["tau"]) * passes, float(own["accepted_drafts"]))
        return "headstart", HEADSTART.definition, found
    timings = content.get("timings")
    if isinstance(timings, Mapping) and timings.get("draft_n"):
        accepted, committed = float(timings["draft_n_accepted"]), float(timings["predicted_n"]) - 1
        drafted = float(timings["draft_n"])
        found = Acceptance(max(0.0, committed - accepted), committed, accepted, drafted)
        return "llama.cpp", LLAMA_DEFINITION, found
    return None


LLAMA_DEFINITION = (
    "(predicted_n - 1) / (predicted_n - 1 - draft_n_accepted): every pass commits what it accepted "
    "and one token; passes without a draft count"
)


def _of_vllm(found: Mapping[str, object]) -> Acceptance:
    histogram = found["acceptance_histogram"]
    if not isinstance(histogram, list):
        raise TypeError("acceptance_histogram is no list")
    numbers = [float(count) for count in histogram]
    reached = tuple(sum(numbers[depth:]) for depth in range(1, len(numbers)))
    passes, accepted = sum(numbers), sum(reached)
    drafted = float(str(found["num_draft_tokens"]))
    return Acceptance(passes, passes + accepted, accepted, drafted, reached)
