"""The simulator's traffic: when requests arrive, how long their prompts and answers are, and their
domains.

There are two sources. A .jsonl has one request per line: `timestamp` (seconds, or ISO 8601), the
prompt (`prompt`, `messages` or `tokens`, or its length as `prompt_tokens`), the answer's length as
`answer_tokens` if known, and optionally `domain`. The text of a server's /metrics (of an engine in
`inference.engines.counters`) has only sums. In this case requests are drawn at random: they arrive
at the server's rate (a Poisson process), with its mean lengths (geometrically distributed) and its
domains' shares of the answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.samples import Sample

from heads.api.config import shown
from heads.api.errors import UserError
from heads.api.reading import parse_json, read_text
from inference.engines.counters import ANSWERED, HEADSTART, identify, known_engines
from inference.engines.scrape import read_samples
from inference.measure.metrics import divide
from inference.target.chat import check_messages, render_prompt
from inference.traffic.config import TrafficConfig


@dataclass(frozen=True)
class Arrival:
    """A request: seconds since the first one, tokens of prompt and answer, domain (empty if
    unknown)."""

    time: float
    prompt: int
    answer: int
    domain: str = ""


def read_traffic(config: TrafficConfig, tokenizer: Any, context: int) -> list[Arrival]:
    """The requests of `config.file`, in order of arrival; raises `UserError` with file and line.
    context: positions of a row; lengths drawn at random are cut there, as the counting server cut
    them."""
    name, wanted = config.file, "a .jsonl of requests with times, or a server's /metrics as text."
    if not name:
        raise UserError(f"traffic.file is not set: give {wanted}")
    try:
        text = read_text(Path(name).expanduser(), f"Give {wanted}")
    except UserError as error:
        raise UserError(f"traffic.file: {error}") from error
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise UserError(f"traffic.file '{name}' is empty.")
    if not text.lstrip().startswith("{"):
        try:
            samples = list(read_samples(text))
        except ValueError as error:
            raise UserError(f"traffic.file '{name}', {error}. Give {wanted}") from error
        return drawn(config, samples, context)
    found = [_request(lines[n], f"{name}, line {n}", config, tokenizer) for n in lines]
    found.sort(key=lambda arrival: arrival.time)
    return [replace(item, time=item.time - found[0].time) for item in found]


def needed_context(config: TrafficConfig, arrivals: Sequence[Arrival], limit: int) -> int:
    """Positions per row. Raises `UserError` for traffic that does not fit into them, or into the
    target's `limit`."""
    longest = max(item.prompt + item.answer for item in arrivals)
    context = config.context or longest
    if longest > context or context > limit:
        raise UserError(
            f"a request of the traffic takes {longest} positions (prompt and answer); "
            f"traffic.context is {context} and the target has {limit}. Leave such requests out, or "
            "say shorter answers."
        )
    return context


# A log of requests


def _request(line: str, where: str, config: TrafficConfig, tokenizer: Any) -> Arrival:
    row = parse_json(line, where, "Each line is a JSON object.")
    if not isinstance(row, dict) or row.get("timestamp") is None:
        raise UserError(
            f"{where}: a request needs a `timestamp` (seconds, or a time such as "
            "2026-01-31T12:00:00+00:00)."
        )
    answer = row.get("answer_tokens", config.answer_tokens)
    prompt = row.get("prompt_tokens")
    if prompt is None:
        prompt = _prompt_length(row, where, tokenizer)
    for name, value in (("prompt_tokens", prompt), ("answer_tokens", answer)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"{where}: {name} must be a whole number of at least 1; given: {shown(value)}."
            )
    return Arrival(_seconds(row["timestamp"], where), prompt, answer, str(row.get("domain") or ""))


def _seconds(value: Any, where: str) -> float:
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"{where}: timestamp {shown(value)} is neither seconds nor a time such as "
            "2026-01-31T12:00:00+00:00."
        ) from error


def _prompt_length(row: Mapping[str, Any], where: str, tokenizer: Any) -> int:
    if isinstance(row.get("tokens"), list):
        return len(row["tokens"])
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if messages is None:
        raise UserError(
            f"{where}: a request needs prompt_tokens, or its prompt as `prompt`, `messages` or "
            "`tokens`."
        )
    try:
        return len(render_prompt(tokenizer, check_messages(messages)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


# The text of /metrics


def drawn(config: TrafficConfig, read: Sequence[Sample], context: int) -> list[Arrival]:
    """Random requests with the rate, mean lengths and domains that a server counted; see the
    module."""

    def by(label: str, name: str) -> dict[str, float]:
        found = defaultdict[str, float](float)
        for sample in read:
            if sample.name == name:
                found[sample.labels.get(label, "")] += float(sample.value)
        return found

    names = identify(read) or HEADSTART
    outcomes = by(names.outcome, names.requests)
    ends = ANSWERED if names.outcome else list(outcomes)
    answered = sum(outcomes.get(end, 0.0) for end in ends)
    prompts, answers = by("domain", names.prompts), by("domain", names.tokens)
    if not answered or not sum(prompts.values()) or not sum(answers.values()):
        raise UserError(
            f"traffic.file '{config.file}' counts no answered requests ({names.requests}, "
            f"{names.prompts}, {names.tokens}). Take /metrics of a server ({known_engines()}) that "
            "has answered some."
        )
    seconds = config.seconds or sum(by("phase", "headstart_engine_seconds_total").values())
    if seconds <= 0:
        raise UserError(
            "traffic.seconds is not set, and the file does not say how long its engine was busy. "
            "Set it."
        )
    rng = np.random.default_rng(config.seed)
    count, rate = config.requests, divide(answered, seconds)
    times = np.cumsum(rng.exponential(1.0, count)) * divide(1.0, rate)
    known = sorted(answers)
    shares = np.array([answers[name] for name in known])
    domains = rng.choice(len(known), count, p=shares * divide(1.0, float(shares.sum())))
    long_prompts, long_answers = (
        rng.geometric(divide(1.0, max(1.0, divide(sum(tokens.values()), answered))), count)
        for tokens in (prompts, answers)
    )
    # lengths beyond a row were refused or cut when they were counted
    prompt_lengths = np.minimum(long_prompts, context - 1)
    answer_lengths = np.minimum(long_answers, context - prompt_lengths)
    columns = (times - times[0], prompt_lengths, answer_lengths, domains)
    return [
        Arrival(time, prompt, answer, known[domain])
        for time, prompt, answer, domain in zip(*(c.tolist() for c in columns), strict=True)
    ]
