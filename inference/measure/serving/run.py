"""Measures a running server and writes report.json. If `bench.baseline_server` is given, compares
with the same server without speculation.

Prompts go through the API that users call, streamed, at every concurrency of
`bench.serving.concurrency`. Both servers answer the same windows (`windows`) one after the other in
alternating order, so that a shared machine slows both alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.engines.client import Endpoint
from inference.measure.config import BenchConfig, Provenance, process_facts, split_prompts
from inference.measure.datasets import Loaded, prompt_facts
from inference.measure.metrics import context_bin, divide
from inference.measure.prompts import Prompt, prompt_seed
from inference.measure.serving.summary import cells
from inference.measure.serving.windows import CHUNKS, COUNTERS, Group, Side, api_of, body_of
from inference.measure.turns import conversations, next_turns
from inference.report import model as schema
from inference.writers import only_writer

TOKENIZER, ESTIMATE = "tokenizer", "estimate"
"""The sources of the prompts' lengths."""
GUESS = 4.0
"""Characters per token, if no answer gives the number of its prompt's tokens."""
CHUNK_DEFINITION = "(tokens - 1) / (steps - 1), estimated: pieces that arrive together are one step"
CHUNK_CAVEAT = (
    "An estimate from the times of streamed pieces: this server counts nothing that can be read. A "
    "proxy that holds pieces back, a server that sends several steps as one piece, and text held "
    "back for stop strings or half characters make tau look larger; a busy network makes it look "
    "smaller."
)
COUNTER_CAVEAT = (
    "Counters are the server's, of all its clients: nobody else may use it meanwhile. Windows are "
    "the units of the intervals of tau."
)


def measure_server(
    config: BenchConfig,
    decode: DecodeConfig,
    loaded: Loaded,
    out: Path,
    *,
    tokenizer: Any = None,
    provenance: Provenance | None = None,
    console: Console | None = None,
    texts: dict[str, str] | None = None,
) -> schema.Report:
    """Measure `config.server` on the prompts; writes `out`/report.json and returns its content.

    decode: sampling settings and length of the answers. tokenizer: renders messages where
    `bench.serving.api` is completions. texts: receives the server's last text for every prompt.
    Raises `UserError` for a server that cannot be measured.
    """
    session = _Session(config, decode, loaded, tokenizer)
    with only_writer(out):
        report = asyncio.run(_measured(session, provenance, console))
        schema.write_report(report, out / schema.REPORT_FILE)
    if texts is not None:
        texts |= session.texts
    return report


async def _measured(
    session: _Session, provenance: Provenance | None, console: Console | None
) -> schema.Report:
    config = session.config
    given = {"bench.server": config.server, "bench.baseline_server": config.baseline_server}
    sides = [
        Side(_endpoint(config, url, name), config.serving, speculates=name == "bench.server")
        for name, url in given.items()
        if url
    ]
    try:
        return await session.measure(sides, provenance, console)
    finally:
        for side in sides:
            await side.endpoint.close()


def _endpoint(config: BenchConfig, url: str, name: str) -> Endpoint:
    serving = config.serving
    metrics = serving.metrics if name == "bench.server" else ""
    return Endpoint(url, name, serving.key_variable, serving.timeout, metrics)


@dataclass
class _Session:
    """The settings and clients of one measurement."""

    config: BenchConfig
    decode: DecodeConfig
    loaded: Loaded
    tokenizer: Any
    lengths: str = ESTIMATE
    texts: dict[str, str] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        """(endpoint, request) of a prompt."""
        return body_of(self.config.serving, prompt, self.sampling(prompt), self.tokenizer)

    def sampling(self, prompt: Prompt) -> dict[str, Any]:
        """The sampling settings of a request. Filters are sent only if they are in use, so that
        servers without them accept the request."""
        own = self.decode.sampling()
        found: dict[str, Any] = {
            "temperature": own.temperature,
            "max_tokens": self.decode.max_new_tokens,
        }
        if own.temperature > 0:  # 31 bits: some servers accept no larger seed
            found["seed"] = prompt_seed(self.decode.seed, prompt.id) >> 32
        extra = {"top_p": (own.top_p, 1.0), "top_k": (own.top_k, 0), "min_p": (own.min_p, 0.0)}
        return found | {name: value for name, (value, off) in extra.items() if value != off}

    async def measure(
        self, sides: Sequence[Side], provenance: Provenance | None, console: Console | None
    ) -> schema.Report:
        """Connect, warm up, measure every window at every server, and report."""
        config = self.config
        measured, spare = split_prompts(config, self.loaded.prompts)
        warm = [self.body(prompt) for prompt in spare]
        tokens = []
        for side in sides:
            await side.connect()
            answers = await side.warm_up(warm)
            tokens.append(sum(answer.prompt_tokens for answer in answers))
        measured = await self.every_turn(sides[0], measured)
        per_token = divide(sum(map(_characters, spare)), tokens[0]) or GUESS
        groups = await self.group(sides[0], measured, per_token)
        jobs = [
            (repeat, rows, group, number, prompts)
            for repeat in range(config.repeats)
            for rows in config.serving.concurrency
            for group in groups
            for number, prompts in enumerate(self.split(group.prompts, rows))
        ]
        columns = (bars.TextColumn("measuring"), bars.BarColumn(), bars.MofNCompleteColumn())
        with bars.Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(jobs) * len(sides))
            for turn, (repeat, rows, group, number, prompts) in enumerate(jobs):
                bodies = [self.body(prompt) for prompt in prompts]
                for side in sides[:: 1 if turn % 2 == 0 else -1]:
                    await side.measure(group, bodies, rows, repeat, number)
                    progress.advance(task)
                answers = sides[0].windows[-1].answers
                pairs = zip(prompts, answers, strict=True)
                self.texts |= {prompt.id: answer.text for prompt, answer in pairs}
        return self.report(sides, measured, len(warm), provenance)

    async def every_turn(self, side: Side, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts of all turns of conversations, behind the answers of `side`'s server."""
        found, asked = list(prompts), conversations(prompts)
        for number in count(2):
            if not asked:
                break
            answers = {
                prompt.id: (
                    await side.patiently("a turn", side.endpoint.ask, *self.body(prompt))
                ).text
                for prompt in asked
            }
            turns = next_turns(asked, answers, number)
            found += turns
            asked = conversations(turns)
        return found

    def split(self, prompts: Sequence[Prompt], rows: int) -> list[Sequence[Prompt]]:
        """The prompts of a group as windows for `rows` clients."""
        size = rows * self.config.serving.window if rows > 1 else 1
        return [prompts[start : start + size] for start in range(0, len(prompts), size)]

    async def group(self, side: Side, prompts: Sequence[Prompt], per_token: float) -> list[Group]:
        """Prompts by domain and range of tokens. per_token: characters per token, for servers that
        do not count tokens."""
        counted: list[int | None] = []
        for prompt in prompts:
            _, body = self.body(prompt)
            asked: dict[str, Any] = {
                name: body[name] for name in ("prompt", "messages") if name in body
            }
            if isinstance(asked.get("prompt"), list):
                counted.append(len(asked["prompt"]))
                continue
            count_tokens = side.endpoint.count_tokens
            found = await side.patiently("counting a prompt's tokens", count_tokens, asked)
            if found is None:
                break
            counted.append(found)
        exact = len(counted) == len(prompts)
        self.lengths = TOKENIZER if exact else ESTIMATE
        sizes = counted if exact else [round(_characters(one) / per_token) for one in prompts]
        found_groups: dict[tuple[str, int, int], list[Prompt]] = {}
        for prompt, size in zip(prompts, sizes, strict=True):
            key = (prompt.domain, *context_bin(size or 0))
            found_groups.setdefault(key, []).append(prompt)
        return [Group(*key, tuple(found)) for key, found in sorted(found_groups.items())]

    # The report

    def report(
        self,
        sides: Sequence[Side],
        measured: Sequence[Prompt],
        warmup: int,
        provenance: Provenance | None,
    ) -> schema.Report:
        """The content of report.json. sides: the measured server and the one that it is compared
        with; warmup: prompts that do not count. Raises `UserError` if nothing was drafted."""
        config, decode = self.config, self.decode
        side, plain = sides[0], sides[1] if len(sides) > 1 else None
        apis = sorted({api_of(config.serving, prompt) for prompt in measured})
        compared = plain is not None and decode.temperature == 0
        found = cells(side, plain, config.seed, compared)
        if not any(cell.tau for cell in found):
            raise UserError(
                f"bench.server: {side.endpoint.base} drafted nothing for any of the prompts, so "
                "there is no acceptance to report. Give other prompts or longer answers "
                "(decode.max_new_tokens)."
            )
        theirs = [_side(one, cells(one, None, config.seed, False)) for one in sides[1:]]
        server = schema.ServerMeasurement(
            api=" and ".join(apis),
            lengths=self.lengths,
            speculative=_side(side, found),
            baseline=theirs[0] if theirs else None,
        )
        served = server.baseline.overall()[0] if server.baseline else None
        content: Mapping[str, Any] = {
            "format": schema.FORMAT,
            "target": schema.TargetFacts(
                id=side.endpoint.model, revision="", dtype="", parameters=0
            ),
            "device": schema.DeviceFacts(kind="server", name=side.endpoint.base, threads=0),
            "settings": schema.ReportSettings(
                temperature=decode.temperature,
                max_new_tokens=decode.max_new_tokens,
                batch_size=max(config.serving.concurrency),
                rule="match" if decode.temperature == 0 else schema.SERVER_RULE,
                seed=decode.seed,
                prompts=len(measured),
            ),
            "baseline": schema.Baseline(
                tokens=served.tokens if served else 0,
                seconds=served.seconds if served else 0.0,
                tokens_per_second=served.tokens_per_second if served else 0.0,
            ),
            "drafters": [],
            "server": server,
            **(provenance if provenance is not None else process_facts()),
            "run": schema.Conditions(
                bench=asdict(config),
                sampling=asdict(decode.sampling()),
                warmup_prompts=warmup,
                prompts=prompt_facts(self.loaded, measured),
            ),
        }
        return schema.parse_report(content, "the new report")


def _side(side: Side, found: Sequence[schema.ServerCell]) -> schema.ServerSide:
    engine, definition = side.said
    if side.engine is not None:
        engine, definition = side.engine.name, side.engine.definition
    caveat = {COUNTERS: COUNTER_CAVEAT, CHUNKS: CHUNK_CAVEAT}.get(side.source, "")
    return schema.ServerSide(
        url=side.endpoint.base,
        model=side.endpoint.model,
        engine=engine,
        source=side.source,
        definition=CHUNK_DEFINITION if side.source == CHUNKS else definition,
        caveat=caveat,
        repeated=side.repeated,
        restarts=side.restarts,
        cells=list(found),
    )


def _characters(prompt: Prompt) -> int:
    """Length of a prompt's text."""
    if prompt.messages is not None:
        return sum(len(str(message["content"])) for message in prompt.messages)
    return len(prompt.text) if prompt.text is not None else len(prompt.tokens or ())
