"""From rows to answers: the decoder's requests, the answers it samples, and answers that the dataset brings
itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from heads.api.errors import UserError
from inference.chat import render_conversation, render_prompt
from inference.engine import Completion, DecodeConfig, Engine, Request
from inference.prompts import prompt_seed
from inference.target import TargetModel
from train.data.answers import Answer
from train.data.sources import DataConfig, Row, SkippedRow, Source, content_hash, prompt_of
from train.data.tables import BadRowError


@dataclass(frozen=True)
class Refused:
    """A request that the decoder refused, with its reason."""

    request: Request
    reason: str


def read_rows(data: DataConfig, rank: int, world: int) -> tuple[list[Row | SkippedRow], int, str]:
    """This process's rows (index % world == rank), the number of all rows, and a hash of all rows in their
    order."""
    source = Source(data)
    digest = hashlib.sha256()
    mine = []
    for row in source:
        content = (
            {}
            if isinstance(row, SkippedRow)
            else {"messages": row.messages, "tokens": row.tokens, "spans": row.spans}
        )
        digest.update(f"{row.id}\0{row.domain}\0{content_hash(content)}\n".encode("utf-8", "surrogatepass"))
        if row.index % world == rank:
            mine.append(row)
    return mine, len(source), digest.hexdigest()


def sample_answers(engine: Engine, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
    """Decode all requests, in finishing order. A request that the engine refuses becomes `Refused`; the
    others go on without it."""
    waiting = {request.index: request for request in requests}
    while waiting:
        try:
            for completion in engine.run(list(waiting.values())):
                del waiting[completion.request.index]
                yield completion
        except UserError:
            # One of them is at fault; the engine does not say which in a form to rely on, so they are tried
            # alone up to that one.
            yield from _until_refused(engine, waiting)


def _until_refused(engine: Engine, waiting: dict[int, Request]) -> Iterator[Completion | Refused]:
    for index, request in list(waiting.items()):
        try:
            completions = list(engine.run([request]))
        except UserError as error:
            del waiting[index]
            yield Refused(request, str(error))
            return
        del waiting[index]
        yield from completions


def request_of(row: Row, model: TargetModel, data: DataConfig, decode: DecodeConfig) -> Request:
    """The decoder's request for a row; raises `BadRowError` or `UserError` with the reason why there can be
    none."""
    if row.messages is not None:
        tokens = render_prompt(model.tokenizer, prompt_of(row.messages, data.turn))
    else:
        assert row.tokens is not None
        _check_vocabulary(row.tokens, model)
        end = len(row.tokens) if not row.spans else row.spans[0 if data.turn == "first" else -1][0]
        tokens = list(row.tokens[:end])
    if not tokens:
        raise BadRowError("there is no prompt before the answer")
    if data.max_prompt_tokens is not None and len(tokens) > data.max_prompt_tokens:
        raise BadRowError(f"the prompt is longer than data.max_prompt_tokens={data.max_prompt_tokens}")
    if len(tokens) + decode.max_new_tokens > model.info.max_position_embeddings:
        raise BadRowError(
            f"prompt and answer may exceed the target's {model.info.max_position_embeddings} positions"
        )
    return Request(row.index, tuple(tokens), prompt_seed(decode.seed, row.id), decode.max_new_tokens)


def keep_answer(row: Row, model: TargetModel) -> Answer:
    """A row with the dataset's own answers, tokenised; raises `BadRowError` or `UserError` when it has none
    that can be located."""
    if row.messages is not None:
        tokens, spans = render_conversation(model.tokenizer, row.messages)
        return Answer(row.id, row.index, row.domain, tuple(tokens), tuple(spans), finish="dataset")
    if not row.spans:
        raise BadRowError("the pre-tokenised row has no answer spans")
    assert row.tokens is not None
    _check_vocabulary(row.tokens, model)
    return Answer(row.id, row.index, row.domain, row.tokens, row.spans, finish="dataset")


def sampled_answer(row: Row, completion: Completion) -> Answer:
    request = completion.request
    tokens = (*request.tokens, *completion.tokens)
    spans = ((len(request.tokens), len(tokens)),)
    return Answer(row.id, row.index, row.domain, tokens, spans, completion.finish, request.seed)


def _check_vocabulary(tokens: Sequence[int], model: TargetModel) -> None:
    if max(tokens) >= model.info.vocab_size:
        raise BadRowError(f"token ids reach beyond the target's vocabulary of {model.info.vocab_size}")
