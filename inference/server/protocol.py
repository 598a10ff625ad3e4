"""Requests and answers in the form of OpenAI's API: what is understood, what is refused and why,
what is sent back.

A parameter that would change the answer and is not supported is refused by name; silence would hand
out something else than what was asked for. Parameters that change nothing here (`user`, `metadata`,
...) are taken and ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from heads.api.errors import UserError, suggest
from inference.decoding.sampling.distribution import SamplingSettings
from inference.server.errors import ApiError

CHAT, TEXT = "chat", "text"
LARGEST_SEED = (1 << 63) - 1
MOST_STOPS, LONGEST_STOP = 16, 256
COMMON = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "return_token_ids",
)
KNOWN = {
    CHAT: ("messages", "max_completion_tokens", "chat_template_kwargs", *COMMON),
    TEXT: ("prompt", *COMMON),
}
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "moderation": (),
    "repetition_penalty": (1,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "guided_json": (),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
"""Parameters that are not supported -> the values with which they ask for nothing."""

Json = dict[str, object]
"""A JSON object that is sent."""
Ids = tuple[int, ...] | None


@dataclass(frozen=True)
class Asked:
    """A request that was understood. content: messages (chat), text, or token ids. limit: None for
    the server's own. ids: the answer's token ids are wanted as well.
    """

    kind: str
    content: Any
    sampling: SamplingSettings
    seed: int | None
    limit: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    ids: bool
    template: Mapping[str, object]


def parse(kind: str, body: Any, default: SamplingSettings, names: tuple[str, ...]) -> Asked:
    """Understand a request's JSON. default: the server's sampling; names: model names it answers
    to. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.")
    given = {key: value for key, value in body.items() if value is not None}
    _refuse_unsupported(kind, given)
    model = _take(given, "model", str, None)
    if model is None:
        raise ApiError(400, f"'model' is missing. This server serves '{names[0]}'.", "model")
    if model not in names:
        raise ApiError(
            404,
            f"there is no model '{model}' here; served is '{names[0]}'.",
            "model",
            "model_not_found",
        )
    limit = _take(given, "max_tokens", int, None)
    limit = _take(given, "max_completion_tokens", int, limit)
    if limit is not None and limit < 1:
        raise ApiError(400, f"'max_tokens' must be at least 1; given {limit}.", "max_tokens")
    seed = _take(given, "seed", int, None)
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise ApiError(400, f"'seed' must be 0 to {LARGEST_SEED}; given {seed}.", "seed")
    stream = _take(given, "stream", bool, False)
    options = _take(given, "stream_options", dict, {})
    unknown = sorted(set(options) - {"include_usage", "include_obfuscation"})
    if unknown or (options and not stream):
        what = f"has no option '{unknown[0]}'" if unknown else "needs 'stream': true"
        raise ApiError(400, f"'stream_options' {what}.", "stream_options")
    content = _messages(given) if kind == CHAT else _prompt(given)
    template = _take(given, "chat_template_kwargs", dict, {})
    return Asked(
        kind,
        content,
        _sampling(given, default),
        seed,
        limit,
        _stops(given),
        stream,
        bool(options.get("include_usage")),
        _take(given, "return_token_ids", bool, False),
        template,
    )


def _refuse_unsupported(kind: str, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if name in KNOWN[kind] or name in IGNORED:
            continue
        if name in NEUTRAL:
            if any(
                value == neutral and type(value) in (type(neutral), float, int)
                for neutral in NEUTRAL[name]
            ):
                continue
            neutral = NEUTRAL[name][0] if NEUTRAL[name] else "null"
            raise ApiError(
                400,
                f"'{name}' is not supported here; leave it out or set it to {neutral!r}.",
                name,
                "unsupported_parameter",
            )
        hint = suggest(name, KNOWN[kind])
        raise ApiError(
            400, f"'{name}' is not a parameter of this endpoint.{hint}", name, "unknown_parameter"
        )


def _take(given: Mapping[str, object], name: str, kind: type, default: Any) -> Any:
    """A value of the right type, or `default` where none is given. Whole numbers may be written as
    5.0 (as JavaScript may)."""
    if name not in given:
        return default
    value = given[name]
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        words = {
            str: "text",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            dict: "an object",
        }
        raise ApiError(
            422, f"'{name}' must be {words[kind]}; given {_short(value)}.", name, "wrong_type"
        )
    return value


def _sampling(given: Mapping[str, object], default: SamplingSettings) -> SamplingSettings:
    """The server's settings with the request's own."""
    changes: dict[str, Any] = {}
    for name, kind in (("temperature", float), ("top_p", float), ("min_p", float), ("top_k", int)):
        value = _take(given, name, kind, None)
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ApiError(400, f"'{name}' must be finite.", name)
        # -1 is off in other engines
        changes[name] = 0 if name == "top_k" and value == -1 else value
    try:
        return replace(default, **changes)
    except UserError as error:
        message = str(error).removeprefix("decode.")
        raise ApiError(400, message, message.split(" ")[0]) from error


def _stops(given: Mapping[str, object]) -> tuple[str, ...]:
    value = given.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ApiError(
            422,
            f"'stop' must be text or a list of texts; given {_short(value)}.",
            "stop",
            "wrong_type",
        )
    if len(stops) > MOST_STOPS or any(not 1 <= len(item) <= LONGEST_STOP for item in stops):
        raise ApiError(
            400, f"'stop' takes up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters.", "stop"
        )
    return tuple(stops)


def _messages(given: Mapping[str, object]) -> Any:
    """The conversation; its form is checked by the chat template's owner
    (`inference.target.chat`)."""
    messages = given.get("messages")
    if messages is None:
        raise ApiError(400, "'messages' is missing.", "messages")
    if not isinstance(messages, list):
        raise ApiError(
            422, f"'messages' must be a list; given {_short(messages)}.", "messages", "wrong_type"
        )
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "developer":
            message["role"] = "system"  # OpenAI's newer word for it
    return messages


def _prompt(given: Mapping[str, object]) -> str | tuple[int, ...]:
    """Text or token ids; a list of one of them is taken as well."""
    prompt = given.get("prompt")
    if prompt is None:
        raise ApiError(400, "'prompt' is missing.", "prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise ApiError(
                400,
                f"one prompt per request; given {len(prompt)}.",
                "prompt",
                "unsupported_parameter",
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in prompt
    ):
        return tuple(prompt)
    raise ApiError(
        422,
        f"'prompt' must be text or a list of token ids; given {_short(prompt)}.",
        "prompt",
        "wrong_type",
    )


def _short(value: Any) -> str:
    """The type of a value, which may be a person's text, and of numbers the value."""
    return (
        repr(value)
        if isinstance(value, (int, float, bool))
        else f"a value of type {type(value).__name__}"
    )


# Answers


class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Drafting(TypedDict):
    """What only this server returns: the seed that gives this answer again, and drafting's
    figures."""

    seed: int
    verify_passes: int
    accepted_drafts: int
    tau: float


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer have in common. created: seconds since 1970."""

    kind: str
    id: str
    model: str
    created: int

    def whole(
        self, text: str, finish: str, usage: Usage, drafting: Drafting, ids: Ids = None
    ) -> Json:
        """An answer in one piece. ids: its token ids, where they are wanted."""
        message = {"role": "assistant", "content": text, "refusal": None}
        chat = self.kind == CHAT
        name = "chat.completion" if chat else "text_completion"
        choice = _choice({"message": message} if chat else {"text": text}, finish, ids)
        return self._body(name, [choice], usage=usage, headstart=drafting)

    def piece(
        self, text: str | None, finish: str | None = None, first: bool = False, ids: Ids = None
    ) -> Json:
        """A part of a stream: its beginning (first), more text, or the end (text None) with the
        ids."""
        if self.kind == CHAT:
            role = {"role": "assistant"} if first else {}
            content: Json = {"delta": role if text is None else {**role, "content": text}}
        else:
            content = {"text": text or ""}
        return self._body(self._streamed, [_choice(content, finish, ids)])

    def usage(self, usage: Usage, drafting: Drafting) -> Json:
        """The last part of a stream that asked for it."""
        return self._body(self._streamed, [], usage=usage, headstart=drafting)

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.kind == CHAT else "text_completion"

    def _body(self, name: str, choices: list[Json], **more: object) -> Json:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def _choice(content: Json, finish: str | None, ids: Ids) -> Json:
    known: Json = {} if ids is None else {"token_ids": list(ids)}
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish, **known}
