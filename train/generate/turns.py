"""From rows to answers, turn by turn, either sampled or taken from the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from heads.api.target_info import TargetInfo
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion, Request
from inference.measure.prompts import encode_text, prompt_seed
from inference.target import chat
from inference.target.chat import Message, Span, closing_ids, render_prompt
from train.data.answers import StoredAnswer
from train.data.config import DataConfig
from train.data.conversation import (
    apply_reasoning,
    before_answer,
    beginning_of,
    fit_document,
    fit_prompt,
    places_to_answer,
)
from train.data.reserve import prompt_tokens
from train.data.sources import Row
from train.data.tables import BadRowError
from train.generate.target_facts import AnyTarget


@dataclass(frozen=True)
class Refused:
    """A request that the decoder or a server refused, with its reason."""

    request: Request
    reason: str


class Backend(Protocol):
    """A source of answers: the bundled decoder, servers over HTTP, or vLLM in this process."""

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
        """An answer or a refusal per request, in finishing order."""


class Talk:
    """The conversation of one row: a request per turn to answer, each with the earlier answers
    before it.

    If a turn's prompt begins with the document so far, token by token, the turn continues that
    document. If a template writes earlier turns differently once others follow (for example, drops
    their reasoning), the turn becomes a separate document. So the target sampled every supervised
    token after exactly the tokens before it; no text is tokenised again.
    """

    def __init__(self, row: Row, target: AnyTarget, data: DataConfig, decode: DecodeConfig) -> None:
        """Raises `BadRowError` or `UserError` with the reason why the row cannot be answered."""
        self.row, self.target, self.data, self.decode = row, target, data, decode
        self.messages: list[Message] = []
        self.places = [0]
        if row.messages is not None:
            self.places = places_to_answer(row.messages, data.turn)
            self.messages = before_answer(row.messages, max(self.places, default=0), data.reasoning)
        if not self.places:
            raise BadRowError("the conversation has no turn to answer")
        self.turn = 0
        self.cut = 0
        self.finish = ""
        self.documents: list[list[int]] = []
        self.spans: list[list[Span]] = []

    @property
    def done(self) -> bool:
        return self.turn >= len(self.places)

    @property
    def offset(self) -> int:
        """Where the document of the last answered turn begins in the row's tokens."""
        return sum(map(len, self.documents[:-1]))

    def request(self) -> Request:
        """The present turn's request; raises `BadRowError` or `UserError` if there is none."""
        tokens, cut = self._prompt()
        if not tokens:
            raise BadRowError("there is no prompt before the answer")
        self.cut += cut
        name = self.row.id if self.turn == 0 else f"{self.row.id}#{self.turn}"
        seed = prompt_seed(self.decode.seed, name)
        return Request(self.row.index, tuple(tokens), seed, self.decode.max_new_tokens)

    def take(self, completion: Completion) -> None:
        """Store the answer to the present turn and move to the next one."""
        prompt, said = list(completion.request.tokens), list(completion.tokens)
        if self.documents and prompt[: len(self.documents[-1])] == self.documents[-1]:
            self.documents[-1] = prompt + said
        else:
            self.documents.append(prompt + said)
            self.spans.append([])
        self.spans[-1].append((len(prompt), len(prompt) + len(said)))
        self.finish = completion.finish
        place = self.places[self.turn]
        self.turn += 1
        if self.done:
            return
        tokenizer = self.target.tokenizer
        # without the token that ended it
        words = said[:-1] if said and said[-1] in closing_ids(tokenizer) else said
        text = str(tokenizer.decode(words, skip_special_tokens=False))
        if completion.finish != "stop" or not text.strip():
            # further turns would continue an unfinished answer
            self.turn = len(self.places)
            return
        self.messages[place : place + 1] = [{"role": "assistant", "content": text}]
        if self.data.reasoning == "last":
            self.messages[: place + 1] = before_answer(self.messages, place + 1, "last")

    def answer(self, status: str = "done", reason: str = "") -> StoredAnswer:
        """The row's answer: done with at least one answered turn, even if later ones failed."""
        named = (self.row.id, self.row.index, self.row.domain)
        seed = prompt_seed(self.decode.seed, self.row.id)
        if not self.documents:
            return StoredAnswer(*named, seed=seed, status=status, reason=reason)
        tokens, spans, parts = join_documents(list(zip(self.documents, self.spans, strict=True)))
        return StoredAnswer(*named, tokens, spans, self.finish, seed, parts, cut=self.cut)

    def _prompt(self) -> tuple[list[int], int]:
        room = self.target.info.max_position_embeddings - self.decode.max_new_tokens
        asked = self.data.max_prompt_tokens
        longest = room if asked is None else min(room, asked)
        if self.row.messages is None:
            return self._ready_tokens(longest, room)
        messages = self.messages[: self.places[self.turn]]

        tokenizer, extra = self.target.tokenizer, (self.row.tools, self.data.template_arguments)

        def render(kept: Sequence[Message]) -> list[int]:
            return render_prompt(tokenizer, kept, *extra)

        if self.data.truncate == "skip":
            tokens = render(messages)
            self._require_room(len(tokens), room)
            return tokens, 0
        return fit_prompt(messages, longest, self.data.truncate, render, tokenizer)

    def _ready_tokens(self, longest: int, room: int) -> tuple[list[int], int]:
        if self.row.text is not None:
            prompt = encode_text(self.target.tokenizer, beginning_of(self.row.text))
        else:
            check_vocabulary(self.row.tokens or (), self.target.info)
            prompt = list(prompt_tokens(self.row, self.data.turn))
        if self.data.truncate == "skip":
            self._require_room(len(prompt), room)
            return prompt, 0
        kept, _, cut = fit_document(prompt, [(0, len(prompt))], longest, self.data.truncate)
        return kept, cut

    def _require_room(self, length: int, room: int) -> None:
        longest = self.data.max_prompt_tokens
        if longest is not None and length > longest:
            raise BadRowError(f"the prompt is longer than data.max_prompt_tokens={longest}")
        if length > room:
            positions = self.target.info.max_position_embeddings
            raise BadRowError(f"prompt and answer may exceed the target's {positions} positions")


def keep_answer(row: Row, target: AnyTarget, data: DataConfig) -> StoredAnswer:
    """The dataset's own answers, tokenised; raises `BadRowError` or `UserError` without any."""
    if row.messages is not None:
        if all(message["role"] != "assistant" for message in row.messages):
            raise BadRowError(
                "the row has no answer of its own: no assistant message, and no column completion, "
                "response, output or answer"
            )
        found = _kept_documents(apply_reasoning(row.messages, data.reasoning), row, target, data)
    elif row.text is not None:
        found = [text_document(target.tokenizer, row.text)]
    else:
        if not row.spans:
            raise BadRowError(
                "the pre-tokenised row has no answer: nothing in spans or a loss mask says which "
                "tokens are one"
            )
        assert row.tokens is not None
        check_vocabulary(row.tokens, target.info)
        chosen = {"all": row.spans, "first": row.spans[:1], "last": row.spans[-1:]}[data.supervise]
        found = [(list(row.tokens), list(chosen))]
    longest, limit = target.info.max_position_embeddings, "the target's max_position_embeddings"
    if data.max_tokens is not None and data.max_tokens <= longest:
        longest, limit = data.max_tokens, "data.max_tokens"
    fitted = [fit_document(*one, longest, data.truncate, limit) for one in found]
    cut = sum(removed for _, _, removed in fitted)
    tokens, spans, parts = join_documents([(tokens, spans) for tokens, spans, _ in fitted])
    named = (row.id, row.index, row.domain)
    return StoredAnswer(*named, tokens, spans, finish="dataset", parts=parts, cut=cut)


def text_document(tokenizer: Any, text: str) -> tuple[list[int], list[Span]]:
    """A plain text with the end-of-text token: all tokens but the first are supervised."""
    tokens = encode_text(tokenizer, text)
    end = tokenizer.eos_token_id
    if end is not None:
        tokens.append(end)
    if len(tokens) < 2:
        raise BadRowError("the text is a single token")
    return tokens, [(1, len(tokens))]


def join_documents(
    documents: Sequence[tuple[list[int], list[Span]]],
) -> tuple[tuple[int, ...], tuple[Span, ...], tuple[int, ...]]:
    """Documents as one row: tokens, their spans, and where the second and later ones begin."""
    tokens: list[int] = []
    spans: list[Span] = []
    parts: list[int] = []
    for number, (own, said) in enumerate(documents):
        if number:
            parts.append(len(tokens))
        spans += [(start + len(tokens), end + len(tokens)) for start, end in said]
        tokens += own
    return tuple(tokens), tuple(spans), tuple(parts)


def check_vocabulary(tokens: Sequence[int], info: TargetInfo) -> None:
    if max(tokens, default=0) >= info.vocab_size:
        raise BadRowError(f"token ids reach beyond the target's vocabulary of {info.vocab_size}")


def _kept_documents(
    messages: Sequence[Message], row: Row, target: AnyTarget, data: DataConfig
) -> list[tuple[list[int], list[Span]]]:
    """The conversation as one document, or one per turn if its template requires that."""
    extra = (row.tools, data.template_arguments)
    try:
        return [chat.render_conversation(target.tokenizer, messages, data.supervise, *extra)]
    except chat.TurnsDifferError:
        said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = {"all": said, "first": said[:1], "last": said[-1:]}[data.supervise]
        return [
            chat.render_conversation(target.tokenizer, messages[: place + 1], "last", *extra)
            for place in chosen
        ]
