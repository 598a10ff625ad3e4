"""Measures a running server and writes report.json. If `bench.baseline_server` is given, compares
with the same server without speculation.

Prompts go through the API that users call, streamed, at every concurrency of
`bench.serving.concurrency`. Both servers answer the same windows (`windows`) one after the other in
alternating order, so that a shared machine slows both alike.

Prompts that do not fit into a server's context with their answers are left out, as in a measurement
in this process. If the server names its context and counts tokens, they are not even sent.

Finished windows are appended to windows.partial.jsonl, and a measurement that ended early continues
from there (`log`). When the report is written, the file becomes windows.jsonl.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.structured.constraint import Constraint
from inference.engines.client import TEXT, Answer, Endpoint, OverlongError
from inference.engines.models import last_name
from inference.measure.config import BenchConfig, Provenance, process_facts, split_prompts
from inference.measure.datasets import Loaded, prompt_facts
from inference.measure.metrics import context_bin, divide
from inference.measure.prompts import Prompt, behind_others, prompt_seed
from inference.measure.serving.log import FINAL_FILE, WindowLog
from inference.measure.serving.structure import ASKED, ASKED_TOKENS, opening, require_opening
from inference.measure.serving.summary import cells
from inference.measure.serving.windows import (
    CHUNKS,
    COUNTERS,
    Group,
    OverlongWindowError,
    Side,
    api_of,
    body_of,
)
from inference.measure.turns import conversations, next_turns
from inference.report import model as schema
from inference.writers import only_writer

logger = logging.getLogger(__name__)

TOKENIZER, ESTIMATE = "tokenizer", "estimate"
"""The sources of the prompts' lengths."""
COUNTED = ("prompt", "messages", "tools", "chat_template_kwargs")
"""The fields of a request that make up its prompt."""
GUESS = 4.0
"""Characters per token, if no answer gives the number of its prompt's tokens."""
CHUNK_DEFINITION = "(tokens - 1) / (steps - 1), estimated: pieces that arrive together are one step"
CHUNK_CAVEAT = (
    "An estimate from the times of streamed pieces: this server counts nothing that can be read. "
    "Pieces less than 2 ms apart count as one step, all others as a step each. What holds pieces "
    "back and passes them on together (a proxy, a busy network), steps shorter than 2 ms, a server "
    "that sends several steps as one piece, and text held back for stop strings or half characters "
    "make tau look larger. Pieces of one step that arrive one by one make it look smaller, down to "
    "1. Responses in which steps cannot be told apart are left out of tau."
)
METRICS_ADVICE = (
    "Give the address of its metrics as bench.serving.metrics, or set "
    "bench.serving.acceptance=chunks, which needs none."
)
RESTARTED = (
    "The server was started again during the measurement. It named the same model afterwards; its "
    "drafter is not named."
)
NAMED_IN_FULL = ("vllm", "sglang")
"""Engines that take all sampling settings, as they call themselves in /v1/models. Where a request
leaves one out, they take the model's own (generation_config.json)."""
DEFAULTS_CAVEAT = (
    "Requests name the temperature, and of top_p, top_k and min_p those in use. For the others, "
    "and for penalties, the server's own defaults apply."
)
PATIENCE = ("timeout", "retries", "backoff")
"""Settings of `bench.serving` that do not change what is measured."""
COUNTER_CAVEAT = (
    "Counters are the server's, of all its clients: nobody else may use it meanwhile. Windows are "
    "the units of the intervals of tau."
)


def require_sent(decode: DecodeConfig) -> None:
    """Raise `UserError` for sampling settings that no request to a server contains."""
    own, plain = decode.sampling(), SamplingSettings()
    names = ("repetition_penalty", "logit_bias", "bad_words")
    if given := [name for name in names if getattr(own, name) != getattr(plain, name)]:
        raise UserError(
            f"decode.{given[0]} is not sent to a running server: bench.server takes temperature, "
            "top_p, top_k and min_p. Leave it out."
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
    accepted: Callable[[], None] = lambda: None,
) -> schema.Report:
    """Measure `config.server` on the prompts; writes `out`/report.json and returns its content.

    decode: sampling settings and length of the answers. tokenizer: renders messages where
    `bench.serving.api` is completions, and counts the tokens of `bench.contexts`. texts: receives
    the server's last text for every prompt. accepted: called once the server and the prompts are
    accepted, before anything in `out` is replaced. Raises `UserError` for a server that cannot be
    measured.
    """
    require_sent(decode)
    session = _Session(config, decode, loaded, tokenizer, out, accepted)
    with only_writer(out):
        report = asyncio.run(_measured(session, provenance, console))
        schema.write_report(report, out / schema.REPORT_FILE)
        session.log.file.finish(FINAL_FILE)
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
    return Endpoint(url, name, serving.key_variable, serving.timeout, metrics, METRICS_ADVICE)


@dataclass
class _Session:
    """The settings and clients of one measurement. sizes: tokens by prompt, as far as they are
    counted; uncounted: the server does not count them; left_out: prompts that are too long; groups:
    what is measured together."""

    config: BenchConfig
    decode: DecodeConfig
    loaded: Loaded
    tokenizer: Any
    out: Path
    accepted: Callable[[], None]
    log: WindowLog = field(init=False)
    sides: Sequence[Side] = ()
    groups: Sequence[Group] = ()
    lengths: str = ESTIMATE
    texts: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    uncounted: bool = False
    left_out: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.structure = Constraint.read(self.decode.structure)

    def body(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        """(endpoint, request) of a prompt."""
        given = (self.config.serving, prompt, self.sampling(prompt), self.tokenizer)
        return body_of(*given, self.constraint(prompt), self.sides[0].endpoint.served)

    def constraint(self, prompt: Prompt) -> Constraint | None:
        """The constraint on a prompt's answer: its own, or that of `decode.structure`."""
        return prompt.constraint if prompt.constraint is not None else self.structure

    def sampling(self, prompt: Prompt) -> dict[str, Any]:
        """The sampling settings of a request. vLLM and SGLang get all of them, as they have other
        defaults than ours. Other servers get only the filters in use, so that servers without them
        accept the request."""
        own = self.decode.sampling()
        found: dict[str, Any] = {
            "temperature": own.temperature,
            "max_tokens": self.decode.max_new_tokens,
        }
        if own.temperature > 0:  # 31 bits: some servers accept no larger seed
            found["seed"] = prompt_seed(self.decode.seed, prompt.id) >> 32
        if self.named_in_full:
            filters = {"top_p": own.top_p, "top_k": own.top_k or -1, "min_p": own.min_p}
            return found | filters | {"repetition_penalty": own.repetition_penalty}
        extra = {"top_p": (own.top_p, 1.0), "top_k": (own.top_k, 0), "min_p": (own.min_p, 0.0)}
        return found | {name: value for name, (value, off) in extra.items() if value != off}

    @property
    def named_in_full(self) -> bool:
        """Whether requests name all sampling settings. All servers get the same requests."""
        return all(side.endpoint.served.owner in NAMED_IN_FULL for side in self.sides)

    async def measure(
        self, sides: Sequence[Side], provenance: Provenance | None, console: Console | None
    ) -> schema.Report:
        """Connect, warm up, measure every window at every server, and report."""
        self.sides, config = sides, self.config
        for side in sides:
            await side.connect()
            if config.serving.api == TEXT and self.tokenizer is not None:
                advice = "set target.path to the model that is served, or bench.serving.api=chat"
                check = side.endpoint.require_tokenizer
                await side.patiently("the probe of its tokenizer", check, self.tokenizer, advice)
        require_same_root(sides)
        measured, spare = (
            behind_others(some, self.loaded.prompts, self.tokenizer, config.contexts)
            for some in split_prompts(config, self.loaded.prompts)
        )
        await self.require_structure([*spare, *measured])
        await self.count_tokens([*spare, *measured])
        warm, per_token = await self.warm_up(spare, measured)
        self.accepted()
        self.log = WindowLog.open(self.out, self.fingerprint(measured), sides)
        measured = await self.every_turn(measured)
        self.groups = await self.group(measured, per_token)
        if fewer := self.fewer_sentence():
            logger.warning("%s", fewer)
        jobs = [
            (repeat, rows, group, number, prompts)
            for repeat in range(config.repeats)
            for rows in config.serving.concurrency
            for group in self.groups
            for number, prompts in enumerate(self.split(group.prompts, rows))
        ]
        columns = (bars.TextColumn("measuring"), bars.BarColumn(), bars.MofNCompleteColumn())
        with bars.Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(jobs))
            for turn, (repeat, rows, group, number, prompts) in enumerate(jobs):
                ordered = sides[:: 1 if turn % 2 == 0 else -1]
                await self.window(ordered, group, prompts, rows, repeat, number)
                progress.advance(task)
        self.require_some(self.fitting(measured))
        if left_out := self.left_out_sentence(measured):
            logger.warning("%s", left_out)
        return self.report(sides, measured, warm, provenance)

    def fingerprint(self, measured: Sequence[Prompt]) -> str:
        """A hash of everything that the windows depend on. measured: the first turns."""
        config = asdict(self.config)
        for name in PATIENCE:
            del config["serving"][name]
        models = [(one.endpoint.served.name, one.endpoint.served.root) for one in self.sides]
        sources = [(one.source, one.said) for one in self.sides]
        asked = [(one.id, one.domain, one.turns, self.body(one)) for one in measured]
        content = json.dumps([config, models, sources, asked], default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    async def window(
        self,
        sides: Sequence[Side],
        group: Group,
        prompts: Sequence[Prompt],
        rows: int,
        repeat: int,
        number: int,
    ) -> None:
        """Measure a window at the servers in this order, without prompts that are too long for one
        of them, unless an earlier command has."""
        place = group.domain, group.first, group.end, rows, repeat, number
        if (record := self.log.restore(place, group, prompts, self.sides)) is not None:
            self.left_out |= {prompt.id for prompt in prompts} - set(record.prompts)
            self.keep_texts(record.prompts)
            return
        while kept := self.fitting(prompts):
            bodies = [self.body(prompt) for prompt in kept]
            units = [prompt.unit for prompt in kept]
            measured, refused = list[Side](), set[str]()
            for side in sides:
                try:
                    await side.measure(group, bodies, rows, repeat, number, units)
                    measured.append(side)
                except OverlongWindowError as error:
                    refused |= {kept[place].id for place in error.places}
            if not refused:
                names = [prompt.id for prompt in kept]
                self.keep_texts(names)
                self.log.add_window(place, names, self.sides)
                return
            self.left_out |= refused
            for side in measured:  # all servers answer the same windows
                side.windows.pop()

    def keep_texts(self, names: Sequence[str]) -> None:
        """Keep the first server's texts of its last window. names: of the prompts."""
        answers = self.sides[0].windows[-1].answers
        self.texts |= {name: answer.text for name, answer in zip(names, answers, strict=True)}

    # Prompts that fit

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt with its answer at all servers; None if none says it."""
        known = [side.endpoint.served.context for side in self.sides]
        return min((one for one in known if one is not None), default=None)

    def fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that are not left out."""
        return [prompt for prompt in prompts if prompt.id not in self.left_out]

    def require_some(self, left: Sequence[object]) -> None:
        """Raise `UserError` if there is no prompt left."""
        if not left:
            context = f" of {self.context} tokens" if self.context else ""
            raise UserError(
                f"no prompt fits: with decode.max_new_tokens={self.decode.max_new_tokens} all are "
                f"longer than the context{context} of {self.sides[0].endpoint.base}. Shorten the "
                "prompts or the answers, or serve with a larger context."
            )

    def left_out_sentence(self, prompts: Sequence[Prompt]) -> str:
        """How many of the prompts are left out; empty if none is."""
        dropped = len(prompts) - len(self.fitting(prompts))
        context = f" of {self.context} tokens" if self.context else ""
        if not dropped:
            return ""
        return (
            f"{dropped} of {len(prompts)} prompts were left out: with their answers they are "
            f"longer than the server's context{context}."
        )

    async def count_tokens(self, prompts: Sequence[Prompt]) -> None:
        """Count the prompts' tokens, if the server does, and leave out those that do not fit."""
        side, context = self.sides[0], self.context
        for prompt in prompts:
            if prompt.id in self.sizes or prompt.id in self.left_out:
                continue
            _, body = self.body(prompt)
            asked = {name: body[name] for name in COUNTED if name in body}
            size: int | None = None
            if isinstance(asked.get("prompt"), list):
                size = len(asked["prompt"])
            elif not self.uncounted:
                act, what = side.endpoint.count_tokens, "counting a prompt's tokens"
                try:
                    size = await side.patiently(what, act, asked)
                except OverlongError:
                    self.left_out.add(prompt.id)
                    continue
                self.uncounted = size is None
            if size is None:
                continue
            self.sizes[prompt.id] = size
            if context is not None and size + self.decode.max_new_tokens > context:
                self.left_out.add(prompt.id)

    async def ask(self, what: str, prompt: Prompt, sides: Sequence[Side]) -> list[Answer]:
        """The servers' answers to a prompt; none if it is too long for one of them."""
        if prompt.id in self.left_out:
            return []
        body = self.body(prompt)
        try:
            return [await side.patiently(what, side.endpoint.ask, *body) for side in sides]
        except OverlongError:
            self.left_out.add(prompt.id)
            return []

    # Before the windows

    async def warm_up(
        self, spare: Sequence[Prompt], measured: Sequence[Prompt]
    ) -> tuple[int, float]:
        """Send the warm-up prompts and choose the sources of acceptance; if none of them fits, a
        measured one warms up. Returns the number of prompts that did, and characters per token."""
        answers: list[list[Answer]] = []
        characters = 0
        for number, prompt in enumerate((*spare, *measured)):
            if number >= len(spare) and answers:
                break
            if found := await self.ask("a warm-up prompt", prompt, self.sides):
                answers.append(found)
                characters += _characters(prompt)
        self.require_some(answers)
        for side, own in zip(self.sides, zip(*answers, strict=True), strict=True):
            await side.choose_source(own)
        tokens = sum(found[0].prompt_tokens for found in answers)
        return len(answers), divide(characters, tokens) or GUESS

    async def require_structure(self, prompts: Sequence[Prompt]) -> None:
        """Raise `UserError` if a server ignores the JSON schemas of the prompts."""
        structured = (one for one in prompts if opening(self.constraint(one)))
        prompt = next(structured, None)
        if prompt is None:
            return
        if prompt.messages is not None:
            asked = replace(prompt, messages=({"role": "user", "content": ASKED},))
        else:
            asked = replace(prompt, text=ASKED, tokens=None)
        api, body = self.body(asked)
        body |= {"max_tokens": ASKED_TOKENS}
        for side in self.sides:
            what, ask = "a question with a JSON schema", side.endpoint.ask
            answer = await side.patiently(what, ask, api, body)
            where = f"{side.endpoint.setting}: {side.endpoint.base}"
            require_opening(answer, opening(self.constraint(prompt)), where)

    async def every_turn(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts of all turns of conversations, behind the first server's answers. A
        conversation ends at a turn that is too long. All servers answer the turns, so that all have
        them in a prefix cache alike."""
        found, asked = list(prompts), conversations(prompts)
        for number in count(2):
            if not asked:
                break
            await self.count_tokens(asked)
            answers: dict[str, str] = {}
            for prompt in asked:
                if (known := self.log.turns.get(prompt.id)) is not None:
                    answers[prompt.id] = known
                elif said := await self.ask("a turn", prompt, self.sides):
                    answers[prompt.id] = said[0].text
                    self.log.add_turn(prompt.id, said[0].text)
            turns = next_turns(asked, answers, number)
            found += turns
            asked = conversations(turns)
        return found

    def split(self, prompts: Sequence[Prompt], rows: int) -> list[Sequence[Prompt]]:
        """The prompts of a group as windows for `rows` clients."""
        size = rows * self.config.serving.window if rows > 1 else 1
        return [prompts[start : start + size] for start in range(0, len(prompts), size)]

    async def group(self, measured: Sequence[Prompt], per_token: float) -> list[Group]:
        """The prompts that fit, by domain and range of tokens. per_token: characters per token, for
        servers that do not count tokens."""
        await self.count_tokens(measured)
        prompts = self.fitting(measured)
        self.require_some(prompts)
        exact = all(prompt.id in self.sizes for prompt in prompts)
        self.lengths = TOKENIZER if exact else ESTIMATE
        groups: dict[tuple[str, int, int], list[Prompt]] = {}
        for prompt in prompts:
            size = self.sizes[prompt.id] if exact else round(_characters(prompt) / per_token)
            groups.setdefault((prompt.domain, *context_bin(size)), []).append(prompt)
        return [Group(*key, tuple(found)) for key, found in sorted(groups.items())]

    def fewer_sentence(self) -> str:
        """That groups have fewer prompts than there are clients; empty if none has."""
        sizes = [size for group in self.groups if (size := len(self.fitting(group.prompts)))]
        found = [
            f"{fewer} of {len(sizes)} groups (domain and range of lengths) with {rows} clients"
            for rows in self.config.serving.concurrency
            if (fewer := sum(size < rows for size in sizes))
        ]
        if not found:
            return ""
        return (
            f"Fewer prompts than clients: {', '.join(found)}. The smallest group has {min(sizes)}, "
            "and no more requests are in progress than a group has prompts ('running' is their "
            "mean). Give more prompts (bench.prompts_per_domain) or fewer clients."
        )

    # The report

    def report(
        self,
        sides: Sequence[Side],
        measured: Sequence[Prompt],
        warmup: int,
        provenance: Provenance | None,
    ) -> schema.Report:
        """The content of report.json. sides: the measured server and the one that it is compared
        with; measured: all prompts, also those that were left out; warmup: prompts that do not
        count. Raises `UserError` if nothing was drafted."""
        config, decode = self.config, self.decode
        remarks = [self.fewer_sentence(), self.left_out_sentence(measured)]
        overlong = sorted(one.id for one in measured if one.id in self.left_out)
        measured = self.fitting(measured)
        side, plain = sides[0], sides[1] if len(sides) > 1 else None
        apis = sorted({api_of(config.serving, prompt) for prompt in measured})
        compared = plain is not None and decode.temperature == 0
        found = cells(side, plain, config.seed, compared)
        if not any(cell.tau for cell in found):
            reason = (
                "sends its answers in pieces whose times do not tell steps apart"
                if side.source == CHUNKS
                else "drafted nothing for any of the prompts"
            )
            raise UserError(
                f"bench.server: {side.endpoint.base} {reason}, so there is no acceptance to "
                "report. Give other prompts or longer answers (decode.max_new_tokens)."
            )
        defaults = [] if self.named_in_full else [DEFAULTS_CAVEAT]
        theirs = [_side(one, cells(one, None, config.seed, False), defaults) for one in sides[1:]]
        server = schema.ServerMeasurement(
            api=" and ".join(apis),
            lengths=self.lengths,
            speculative=_side(side, found, [*defaults, *remarks]),
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
                prompts=prompt_facts(self.loaded, measured) | {"overlong": overlong},
            ),
        }
        return schema.parse_report(content, "the new report")


def require_same_root(sides: Sequence[Side]) -> None:
    """Raise `UserError` if two servers name different models as what they loaded."""
    first, *others = ((one.endpoint.served.root, one.endpoint) for one in sides)
    for root, endpoint in others:
        if root and first[0] and last_name(root) != last_name(first[0]):
            raise UserError(
                f"{endpoint.setting}: {endpoint.base} serves '{root}', but {first[1].base} "
                f"({first[1].setting}) serves '{first[0]}'. Give two servers of the same model, "
                "loaded from the same place or from folders of the same name."
            )


def _side(
    side: Side, found: Sequence[schema.ServerCell], remarks: Sequence[str] = ()
) -> schema.ServerSide:
    """The block of one server. remarks: sentences to add to its caveat."""
    engine, definition = side.said
    caveat = {COUNTERS: COUNTER_CAVEAT, CHUNKS: CHUNK_CAVEAT}.get(side.source, "")
    restarted = RESTARTED if side.restarts else ""
    return schema.ServerSide(
        url=side.endpoint.base,
        model=side.endpoint.model,
        engine=engine,
        source=side.source,
        definition=CHUNK_DEFINITION if side.source == CHUNKS else definition,
        caveat=" ".join(filter(None, (caveat, restarted, *remarks))),
        repeated=side.repeated,
        restarts=side.restarts,
        cells=list(found),
    )


def _characters(prompt: Prompt) -> int:
    """Length of a prompt's text."""
    if prompt.messages is not None:
        return sum(len(str(message["content"])) for message in prompt.messages)
    return len(prompt.text) if prompt.text is not None else len(prompt.tokens or ())
