"""Variations: prompts that the target writes itself, from the first tokens of existing prompts.

A chat model that is given the start of a user's turn continues it as a user would ("Magpie", Xu et
al., arXiv 2406.08464). Started with the first tokens of an existing prompt, it keeps to that
prompt's kind. Prompts are drawn in proportion to the verify passes per token of their answers, so
that most new ones are of the kinds that decode slowly. A variation is a prompt of token ids like
any other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.line_file import LineFile, parse_lines
from inference.target.chat import render_prompt
from inference.target.model import TargetModel
from inference.terminal import make_console
from train.feedback.build import AnswerSource, read_lines, write_lines
from train.feedback.config import FeedbackConfig

logger = logging.getLogger(__name__)

VARIATIONS = "variations.jsonl"
BATCH = 64
PROBES = ("x", "Another text, of 7 words or so.")


class KnownPrompt(NamedTuple):
    """A prompt of one user's text (token ids); cost: verify passes per token of its answer."""

    domain: str
    text: list[int]
    cost: float


class Variation(TypedDict):
    """A line of variations.jsonl."""

    id: str
    domain: str
    tokens: list[int]


@dataclass(frozen=True)
class Frame:
    """The token ids that the chat template writes before and after a single user's text."""

    head: tuple[int, ...]
    tail: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, arguments: Mapping[str, object] | None = None) -> Frame:
        """The common beginning and end of two renderings. arguments: those of the template."""
        one, two = (
            render_prompt(tokenizer, [{"role": "user", "content": text}], None, arguments)
            for text in PROBES
        )
        return cls(tuple(_common(one, two)), tuple(reversed(_common(one[::-1], two[::-1]))))

    def text_of(self, prompt: Sequence[int]) -> list[int]:
        """The user's text of a prompt [N]; empty for one of another form, such as several turns."""
        begin, end = len(self.head), len(prompt) - len(self.tail)
        if end <= begin or tuple(prompt[:begin]) != self.head or tuple(prompt[end:]) != self.tail:
            return []
        text = list(prompt[begin:end])
        return [] if self.tail and self.tail[0] in text else text


def _common(one: Sequence[int], two: Sequence[int]) -> list[int]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return [left for left, _ in pairs]


def write_variations(
    target: TargetModel,
    folders: Sequence[tuple[Path, Path]],
    out: Path,
    config: FeedbackConfig,
    seed: int,
    known: Iterable[Path] = (),
    arguments: Mapping[str, object] | None = None,
) -> int:
    """Let the target write `config.variations` prompts per answer of `folders` into the file `out`;
    returns how many there are.

    folders: pairs of answers and the records of their verifications. known: files of earlier
    variations; neither these nor the prompts themselves are written again. Texts that do not end
    are left out. arguments: the chat template's. A line has `id`, `domain` (that of the prompt with
    whose tokens it begins) and `tokens`. Texts that an interrupted command has completed lie beside
    `out`, as `<name>.partial.jsonl`, and the same command takes them from there. Raises `UserError`
    for damaged input.
    """
    frame = Frame.of(target.tokenizer, arguments)
    prompts = list(_prompts(folders, target, frame))
    seen: set[tuple[int, ...]] = {tuple(row["tokens"]) for row in read_lines(known)}
    found: list[Variation] = []
    unfinished = LineFile(out.with_suffix(".partial.jsonl"))
    if prompts and frame.tail and frame.tail[0] in target.eos_token_ids:
        seen |= {(*frame.head, *item.text, *frame.tail) for item in prompts}
        for item in _write(target, frame, prompts, config, seed, arguments, unfinished):
            if tuple(item["tokens"]) not in seen:
                seen.add(tuple(item["tokens"]))
                found.append(item)
    else:
        logger.warning(
            "the target writes no variations: %s",
            "a user's turn does not end with a token that ends its answers, so nothing says "
            "where a prompt is over"
            if prompts
            else "none of the prompts is a single user's text in the target's chat template",
        )
    write_lines(out, found)
    unfinished.remove()
    return len(found)


def _prompts(
    folders: Sequence[tuple[Path, Path]], target: TargetModel, frame: Frame
) -> Iterator[KnownPrompt]:
    for answers, records in folders:
        for document in AnswerSource(answers, records).documents(target.info):
            text = frame.text_of(document.row["tokens"][: document.row["spans"][0][0]])
            if text:
                yield KnownPrompt(document.row["domain"], text, document.cost or 1.0)


def _write(
    target: TargetModel,
    frame: Frame,
    prompts: list[KnownPrompt],
    config: FeedbackConfig,
    seed: int,
    arguments: Mapping[str, object] | None,
    unfinished: LineFile,
) -> Iterator[Variation]:
    """The texts that the target writes, in order. `config.variations` texts per prompt are started;
    those that do not end or that hold special tokens are left out. They are tokenised again, as a
    user's text is, because a model's own tokens need not be those that the tokenizer chooses."""
    draw = random.Random(f"variations {seed}")
    wanted = config.variations * len(prompts)
    chosen = draw.choices(prompts, [item.cost for item in prompts], k=wanted)
    requests = []
    for number, item in enumerate(chosen):
        begun = draw.randint(1, config.variation_begin)
        start = (*frame.head, *item.text[:begun])
        most = min(config.variation_tokens, target.info.max_position_embeddings - len(start))
        requests.append(Request(number, start, draw.getrandbits(63), most))
    special = set(target.tokenizer.all_special_ids)
    for one in _continued(target, requests, config, unfinished):
        ids = [*requests[one.number].tokens[len(frame.head) :], *one.tokens[:-1]]
        text = target.tokenizer.decode(ids)
        ends = one.finish == "stop" and one.tokens[-1] == frame.tail[0]
        if ends and text.strip() and not special & set(ids):
            message = {"role": "user", "content": text}
            tokens = render_prompt(target.tokenizer, [message], None, arguments)
            domain = chosen[one.number].domain
            yield {"id": f"variation-{seed}-{one.number}", "domain": domain, "tokens": tokens}


@dataclass(frozen=True)
class Continued:
    """What the target has added to the start of a text, and why it ended: a line of the unfinished
    file."""

    number: int
    tokens: list[int]
    finish: str


def _continued(
    target: TargetModel, requests: Sequence[Request], config: FeedbackConfig, unfinished: LineFile
) -> list[Continued]:
    """What the target adds to each of some starts, in their order. Each is in the unfinished file
    as soon as it is complete; those that an interrupted command left there are taken from it."""
    asked = [(one.tokens, one.seed, one.max_new_tokens) for one in requests]
    about = json.dumps([target.info.to_dict(), config.variation_temperature, asked])
    fingerprint = hashlib.sha256(about.encode()).hexdigest()
    found = parse_lines(Continued, unfinished.read(fingerprint), unfinished.path)
    unfinished.begin(fingerprint, [*map(asdict, found)])
    done = {one.number: one for one in found}
    decode = DecodeConfig(
        shape="none",
        temperature=config.variation_temperature,
        batch_size=BATCH,
        max_new_tokens=config.variation_tokens,
    )
    left = [one for one in requests if one.index not in done]
    columns = (TextColumn("variations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=make_console()) as progress:
        task = progress.add_task("", total=len(requests), completed=len(done))
        for one in Engine(target, None, decode).run(left):
            number = one.request.index
            done[number] = Continued(number, one.tokens, one.finish)
            unfinished.add(asdict(done[number]))
            progress.advance(task)
    return [done[one.index] for one in requests]
