"""What is said to serving engines and what they answer: prompts as token ids, answers as token ids.

openai: vLLM's /v1/completions takes `prompt` as a list of ids; with `return_token_ids` a choice carries `token_ids` and
`prompt_token_ids`. sglang: /generate takes `input_ids` and answers with `output_ids`. A server that gives no ids is refused: its
text, tokenised again, is often not what its model sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion, Request

PROBE = "Headstart probe: naïve 数学 — def f(x):\n    return x**2  # 12345 <b>&amp;</b>"
"""A text that tokenizers disagree on."""


class BadAnswerError(Exception):
    """A server's answer that cannot be used, with the reason; the server is at fault, not the request."""


@dataclass(frozen=True)
class Ended:
    """How an answer ended, in a server's words: `stop` or `length`, and the token that stopped it, if it says so."""

    finish: str
    token: int | None


class OpenAI:
    """vLLM's completions."""

    name = "openai"
    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self.model = model

    def request(self, request: Request, decode: DecodeConfig) -> dict[str, Any]:
        """The body for one request. Everything that a server may have a default for is said."""
        return {
            "model": self.model,
            "prompt": list(request.tokens),
            "max_tokens": request.max_new_tokens,
            "temperature": decode.temperature,
            "top_p": decode.top_p,
            "top_k": decode.top_k,
            "min_p": decode.min_p,
            "repetition_penalty": decode.repetition_penalty,
            **({"logit_bias": {str(token): bias for token, bias in decode.logit_bias}} if decode.logit_bias else {}),
            "seed": request.seed,
            "n": 1,
            "add_special_tokens": False,
            "return_token_ids": True,
        }

    def probe(self, text: str) -> dict[str, Any]:
        """A body that makes the server show how it tokenises a text."""
        return {
            "model": self.model,
            "prompt": text,
            "max_tokens": 1,
            "temperature": 0.0,
            "add_special_tokens": False,
            "return_token_ids": True,
        }

    def probed(self, answer: Mapping[str, Any]) -> list[int]:
        """Token ids of the probe's text; raises `BadAnswerError` when the server gives none."""
        choice = _choice(answer)
        _ids(choice.get("token_ids"), _NO_IDS)
        return _ids(choice.get("prompt_token_ids"), _NO_IDS)

    def answer(self, answer: Mapping[str, Any], request: Request) -> tuple[list[int], Ended]:
        """Sampled token ids and how they ended."""
        choice = _choice(answer)
        if _ids(choice.get("prompt_token_ids"), _NO_IDS) != list(request.tokens):
            raise BadAnswerError("the server read another prompt than the token ids that were sent")
        stop = choice.get("stop_reason")
        ended = Ended(str(choice.get("finish_reason")), stop if isinstance(stop, int) else None)
        return _ids(choice.get("token_ids"), _NO_IDS), ended


class SGLang:
    """SGLang's own /generate."""

    name = "sglang"
    path = "/generate"

    def request(self, request: Request, decode: DecodeConfig) -> dict[str, Any]:
        """The body for one request. Seeds are left out: SGLang honours them in its deterministic mode only."""
        return {
            "input_ids": list(request.tokens),
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens,
                "temperature": decode.temperature,
                "top_p": decode.top_p,
                "top_k": decode.top_k or -1,
                "min_p": decode.min_p,
                "repetition_penalty": decode.repetition_penalty,
                **({"logit_bias": {str(token): bias for token, bias in decode.logit_bias}} if decode.logit_bias else {}),
            },
        }

    def probe(self, text: str) -> dict[str, Any]:
        """A body that makes the server show how it tokenises a text: by the log-probabilities of the prompt."""
        parameters = {"max_new_tokens": 1, "temperature": 0.0}
        return {"text": text, "sampling_params": parameters, "return_logprob": True, "logprob_start_len": 0}

    def probed(self, answer: Mapping[str, Any]) -> list[int]:
        """Token ids of the probe's text; raises `BadAnswerError` when the server gives none."""
        _ids(answer.get("output_ids"), _NO_IDS)
        entries = _meta(answer).get("input_token_logprobs")
        if not isinstance(entries, Sequence):
            raise BadAnswerError(_NO_IDS)
        return _ids([entry[1] for entry in entries], _NO_IDS)

    def answer(self, answer: Mapping[str, Any], request: Request) -> tuple[list[int], Ended]:
        """Sampled token ids and how they ended."""
        meta = _meta(answer)
        if meta.get("prompt_tokens", len(request.tokens)) != len(request.tokens):
            raise BadAnswerError("the server read another prompt than the token ids that were sent")
        reason = meta.get("finish_reason") or {}
        matched = reason.get("matched")
        ended = Ended(str(reason.get("type")), matched if isinstance(matched, int) else None)
        return _ids(answer.get("output_ids"), _NO_IDS), ended


Protocol = OpenAI | SGLang


def completion_of(
    request: Request, tokens: Sequence[int], ended: Ended, eos: Sequence[int], vocab_size: int
) -> Completion:
    """A server's answer as our decoder would have handed it out: the end-of-text token included, and nothing behind it.

    Raises `BadAnswerError` for an answer that our decoder could not have given.
    """
    found = list(tokens)
    if any(not 0 <= token < vocab_size for token in found):
        raise BadAnswerError(f"the server's token ids reach beyond the target's vocabulary of {vocab_size}")
    if ended.finish not in ("stop", "length"):
        raise BadAnswerError(f"the server ended an answer with '{ended.finish}', which is neither stop nor length")
    if ended.finish == "stop" and not (found and found[-1] in eos):
        # Some servers leave the token out that ended the answer; it was sampled, and drafters have to learn it.
        closing = ended.token if ended.token is not None else eos[0] if len(eos) == 1 else None
        if closing is None or closing not in eos:
            raise BadAnswerError("the server stopped an answer at something that is no end-of-text token of the target")
        found.append(closing)
    if not found or len(found) > request.max_new_tokens + 1:
        raise BadAnswerError(f"the server answered with {len(found)} tokens")
    return Completion(request, found, ended.finish)


def same_tokenizer(address: str, mine: Sequence[int], theirs: Sequence[int]) -> None:
    """Raise `UserError` unless a server reads the probe as the target does."""
    if list(mine) != list(theirs):
        raise UserError(
            f"the server at {address} has another tokenizer than the target: it reads the probe as {list(theirs)[:12]}..., the "
            f"target as {list(mine)[:12]}.... Serve the target itself, or set target.path to what is served."
        )


_NO_IDS = (
    "it returns no token ids. Text is never tokenised again here, since that changes answers: use vLLM 0.10.2 or newer "
    "(return_token_ids) or SGLang's /generate"
)


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, Sequence) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise BadAnswerError("its answer has no choice")
    return choices[0]


def _meta(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = answer.get("meta_info")
    return meta if isinstance(meta, Mapping) else {}


def _ids(value: Any, reason: str) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadAnswerError(reason)
    if any(not isinstance(token, int) or isinstance(token, bool) for token in value):
        raise BadAnswerError("its token ids are not all whole numbers")
    return list(value)
