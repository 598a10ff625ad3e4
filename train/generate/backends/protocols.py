"""Requests to serving engines and their answers: prompts as token ids, answers as token ids.

openai: vLLM's /v1/completions takes `prompt` as a list of ids; with `return_token_ids` a choice has
`token_ids` and `prompt_token_ids`. sglang: /generate takes `input_ids` and answers with
`output_ids`. A server that returns no ids is refused: its text, tokenised again, is often not what
its model sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import AliasPath, BaseModel, Field, StrictInt, ValidationError

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion, Request
from inference.engines.client import Served

Json = dict[str, Any]
"""The body of a request, or an answer before any check."""


class BadAnswerError(Exception):
    """A server's answer that cannot be used: the server is at fault, not the request."""


@dataclass(frozen=True)
class Ended:
    """How an answer ended: the server's `stop` or `length`, and the token that stopped it."""

    finish: str
    token: int | None


class _Completions(BaseModel):
    """The part of vLLM's answer that is read."""

    tokens: list[StrictInt] = Field(validation_alias=AliasPath("choices", 0, "token_ids"))
    prompt: list[StrictInt] = Field(validation_alias=AliasPath("choices", 0, "prompt_token_ids"))
    finish: Any = Field(None, validation_alias=AliasPath("choices", 0, "finish_reason"))
    stop: Any = Field(None, validation_alias=AliasPath("choices", 0, "stop_reason"))


class _Generated(BaseModel):
    """The part of SGLang's answer that is read."""

    tokens: list[StrictInt] = Field(validation_alias="output_ids")
    length: Any = Field(None, validation_alias=AliasPath("meta_info", "prompt_tokens"))
    finish: Any = Field(None, validation_alias=AliasPath("meta_info", "finish_reason", "type"))
    stop: Any = Field(None, validation_alias=AliasPath("meta_info", "finish_reason", "matched"))


class _Probed(_Generated):
    """SGLang's answer to the probe: log-probability, id and text of each token of the prompt."""

    prompt: list[tuple[Any, StrictInt, Any]] = Field(
        validation_alias=AliasPath("meta_info", "input_token_logprobs")
    )


Answer = TypeVar("Answer", bound=BaseModel)


def _read(model: type[Answer], answer: Json) -> Answer:
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadAnswerError(
            f"it returns no token ids ({where}: {first['msg']}). Text is never tokenised again "
            "here, since that changes answers: use vLLM 0.10.2 or newer "
            "(return_token_ids) or SGLang's /generate"
        ) from error


def _read_end(finish: Any, stop: Any, same_prompt: bool) -> Ended:
    if not same_prompt:
        raise BadAnswerError("the server read another prompt than the token ids that were sent")
    return Ended(str(finish), stop if isinstance(stop, int) else None)


class OpenAI:
    """vLLM's completions."""

    name = "openai"
    path = "/v1/completions"
    models = "/v1/models"
    adds_special_tokens = False

    def __init__(self, model: str) -> None:
        self.model = model

    def served(self, answer: Json) -> Served:
        """The model that is asked, by the server's list of models. If it is not in the list, the
        first that is."""
        found = served_in(answer)
        own = (one for one in found if one.name == self.model)
        return next(own, found[0] if found else Served(""))

    def request(self, request: Request, decode: DecodeConfig) -> Json:
        """The body for one request. It sets everything for which a server may have a default."""
        body = self._body(list(request.tokens), request.max_new_tokens)
        return {**body, **_sampling(decode), "top_k": decode.top_k, "seed": request.seed, "n": 1}

    def probe(self, text: str) -> Json:
        """A body that makes the server show how it tokenises a text."""
        return {**self._body(text, 1), "temperature": 0.0}

    def read_probe(self, answer: Json) -> tuple[list[int], Ended]:
        """Token ids of the probe's text, and how its answer ended; raises `BadAnswerError` if the
        server returns none."""
        found = _read(_Completions, answer)
        return found.prompt, _read_end(found.finish, found.stop, True)

    def answer(self, answer: Json, request: Request) -> tuple[list[int], Ended]:
        """Sampled token ids and how they ended."""
        found = _read(_Completions, answer)
        same = found.prompt == list(request.tokens)
        return found.tokens, _read_end(found.finish, found.stop, same)

    def _body(self, prompt: str | list[int], limit: int) -> Json:
        given = {"model": self.model, "prompt": prompt, "max_tokens": limit}
        return {**given, "add_special_tokens": False, "return_token_ids": True}


class SGLang:
    """SGLang's own /generate."""

    name = "sglang"
    path = "/generate"
    models = "/get_model_info"
    adds_special_tokens = True
    """Whether the probe's text is tokenised with the tokenizer's special tokens: /generate has no
    option for it."""

    def served(self, answer: Json) -> Served:
        """The model by the path that it was loaded from."""
        return Served("", str(answer.get("model_path") or ""))

    def request(self, request: Request, decode: DecodeConfig) -> Json:
        """The body for one request. No seed: SGLang honours it in its deterministic mode only."""
        limit, top_k = request.max_new_tokens, decode.top_k or -1
        parameters = {"max_new_tokens": limit, **_sampling(decode), "top_k": top_k}
        return {"input_ids": list(request.tokens), "sampling_params": parameters}

    def probe(self, text: str) -> Json:
        """A body that makes the server return the token ids of a text, with log-probabilities."""
        parameters = {"max_new_tokens": 1, "temperature": 0.0}
        shown = {"return_logprob": True, "logprob_start_len": 0}
        return {"text": text, "sampling_params": parameters, **shown}

    def read_probe(self, answer: Json) -> tuple[list[int], Ended]:
        found = _read(_Probed, answer)
        prompt = [token for _, token, _ in found.prompt]
        return prompt, _read_end(found.finish, found.stop, True)

    def answer(self, answer: Json, request: Request) -> tuple[list[int], Ended]:
        found = _read(_Generated, answer)
        same = found.length in (None, len(request.tokens))
        return found.tokens, _read_end(found.finish, found.stop, same)


Protocol = OpenAI | SGLang


def _sampling(decode: DecodeConfig) -> Json:
    """The settings that have the same names in both."""
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    biases = {str(token): bias for token, bias in decode.logit_bias}
    given = {name: getattr(decode, name) for name in names}
    return {**given, "logit_bias": biases} if biases else given


def completion_of(
    request: Request, tokens: Sequence[int], ended: Ended, eos: Sequence[int], vocab_size: int
) -> Completion:
    """A server's answer as our decoder would have returned it, the end-of-text token included;
    raises `BadAnswerError` for an impossible answer."""
    found = list(tokens)
    if any(not 0 <= token < vocab_size for token in found):
        raise BadAnswerError(
            f"the server's token ids reach beyond the target's vocabulary of {vocab_size}"
        )
    if ended.finish not in ("stop", "length"):
        raise BadAnswerError(
            f"the server ended an answer with '{ended.finish}', which is neither stop nor length"
        )
    if ended.finish == "stop" and not (found and found[-1] in eos):
        # Some servers omit the token that ended the answer, which drafters have to learn.
        closing = ended.token if ended.token is not None else eos[0] if len(eos) == 1 else None
        if closing is None or closing not in eos:
            raise BadAnswerError(
                "the server stopped an answer at no end-of-text token of the target"
            )
        found.append(closing)
    if not found or len(found) > request.max_new_tokens + 1:
        raise BadAnswerError(f"the server answered with {len(found)} tokens")
    return Completion(request, found, ended.finish)


def same_tokenizer(server: str, mine: Sequence[int], theirs: Sequence[int]) -> None:
    """Raise `UserError` unless a server reads the probe as the target does. server: the subject of
    the message."""
    if list(mine) != list(theirs):
        raise UserError(
            f"{server} has another tokenizer than the target: it reads the probe as "
            f"{list(theirs)[:12]}..., the target as {list(mine)[:12]}.... Serve the target itself, "
            "or set target.path to what is served."
        )


def served_in(answer: Json) -> list[Served]:
    """The models in a list of models, by name and what they were loaded from."""
    rows = answer.get("data")
    return [
        Served(str(row["id"]), str(row.get("root") or ""))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and row.get("id")
    ]
