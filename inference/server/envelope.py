"""Answers in the form of OpenAI's API: in one piece and as the parts of a stream, with
log-probabilities if requested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inference.decoding.logprobs import TokenLogprobs
from inference.server.protocol import CHAT, Asked
from inference.server.token_text import TokenTexts
from inference.target.text_pieces import TextPieces

Json = dict[str, object]
"""A JSON object that is sent."""
LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


@dataclass(frozen=True)
class Envelope:
    """The fields that all parts of one response share. created: seconds since 1970."""

    kind: str
    id: str
    model: str
    created: int

    def whole(self, choices: list[Json], figures: Json) -> Json:
        """A response in one piece. figures: `usage`, and `headstart` (specific to this server)."""
        name = "chat.completion" if self.kind == CHAT else "text_completion"
        return self._body(name, choices) | figures

    def part(self, choices: list[Json], figures: Json | None = None) -> Json:
        """A part of a stream. If usage was requested, the last part has no choice."""
        name = "chat.completion.chunk" if self.kind == CHAT else "text_completion"
        return self._body(name, choices) | (figures or {})

    def _body(self, name: str, choices: list[Json]) -> Json:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": choices}


class ChoiceWriter:
    """Writes one choice of a response to `asked`. index: its number; prompt: its token ids; echo:
    the prompt's text, which comes first if requested; ends: end-of-text tokens, which are not
    shown."""

    def __init__(
        self,
        asked: Asked,
        index: int,
        prompt: tuple[int, ...],
        echo: str,
        texts: TokenTexts,
        ends: Sequence[int],
    ) -> None:
        self.asked, self.index, self.prompt = asked, index, prompt
        self.echo, self.texts = echo, texts
        # the text of the tokens whose log-probabilities were written so far, of prompt and answer
        given = asked.prompts[index // asked.choices] if asked.echo else ()
        self._read = TextPieces(texts.tokenizer, (), special=not isinstance(given, str))
        self._pieces = TextPieces(texts.tokenizer, ends)
        self._left = len(prompt) if asked.echo else 0
        """Tokens of an echoed prompt that were not written yet."""

    def whole(
        self,
        text: str,
        finish: str,
        tokens: tuple[int, ...],
        scores: Iterable[TokenLogprobs],
        of_prompt: Iterable[TokenLogprobs],
    ) -> Json:
        """The choice in one piece. scores: of the answer's tokens; of_prompt: of the prompt's."""
        logprobs = self._logprobs([*of_prompt, *scores], opens=self.asked.echo)
        if self.asked.kind == CHAT:
            message = {"role": "assistant", "content": text, "refusal": None}
            return self._choice({"message": message}, logprobs, finish, tokens)
        return self._choice({"text": self.echo + text}, logprobs, finish, tokens)

    def opening(self, of_prompt: Iterable[TokenLogprobs]) -> Json | None:
        """The beginning of a stream: the role for a conversation, the echo for a text."""
        if self.asked.kind == CHAT:
            delta = {"role": "assistant", "content": ""}
            return self._choice({"delta": delta}, None, None)
        if not self.asked.echo:
            return None
        logprobs = self._logprobs(of_prompt, opens=True)
        return self._choice({"text": self.echo}, logprobs, None)

    def piece(self, text: str, scores: Iterable[TokenLogprobs]) -> Json:
        """A part of a stream's text."""
        content: Json = {"delta": {"content": text}} if self.asked.kind == CHAT else {"text": text}
        return self._choice(content, self._logprobs(scores), None)

    def end(self, finish: str, tokens: tuple[int, ...], scores: Iterable[TokenLogprobs]) -> Json:
        """The end of a stream's text. scores: of tokens that no piece had."""
        content: Json = {"delta": {}} if self.asked.kind == CHAT else {"text": ""}
        return self._choice(content, self._logprobs(scores), finish, tokens)

    def _choice(
        self, content: Json, logprobs: Json | None, finish: str | None, tokens: tuple[int, ...] = ()
    ) -> Json:
        known: Json = {}
        if self.asked.ids and finish:
            known["token_ids"] = list(tokens)
            if self.asked.kind != CHAT:  # a conversation's stand beside its choices
                known["prompt_token_ids"] = list(self.prompt)
        return {
            "index": self.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": finish,
            **known,
        }

    # Log-probabilities

    def _logprobs(self, scores: Iterable[TokenLogprobs], opens: bool = False) -> Json | None:
        """The log-probabilities in the form of the endpoint. opens: the prompt's first token, which
        has none, comes before them."""
        if self.asked.logprobs is None:
            return None
        if self.asked.kind == CHAT:
            return {"content": [self._chat_token(score) for score in scores], "refusal": None}
        return self._text_tokens(list(scores), self.prompt[:1] if opens else ())

    def _chat_token(self, score: TokenLogprobs) -> Json:
        top = [self._entry(token, value) for token, value in score.top]
        return {**self._entry(score.token, score.logprob), "top_logprobs": top}

    def _entry(self, token: int, value: float) -> Json:
        held = list(self.texts.bytes_of(token))
        return {"token": self.texts.text(token), "logprob": max(value, LOWEST), "bytes": held}

    def _text_tokens(self, scores: list[TokenLogprobs], first: tuple[int, ...]) -> Json:
        """Lists with an entry per token; a token is included in its most likely tokens."""
        name, offsets = self.texts.name, []
        for token in (*first, *(score.token for score in scores)):
            if self._left:
                self._left -= 1
                offsets.append(min(len(self._read.text), len(self.echo)))
                self._read.add([token])
            else:
                offsets.append(len(self.echo) + len(self._pieces.text))
                self._pieces.add([token])
        none = [None] * len(first)
        shown = [
            {name(token): max(value, LOWEST) for token, value in (*s.top, (s.token, s.logprob))}
            for s in scores
        ]
        return {
            "tokens": [*map(name, first), *(name(score.token) for score in scores)],
            "token_logprobs": [*none, *(max(score.logprob, LOWEST) for score in scores)],
            "top_logprobs": [*none, *shown],
            "text_offset": offsets,
        }
