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
from typing import Any

from heads.api.errors import UserError, suggest
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.structured.constraint import Constraint
from inference.server.errors import ApiError
from inference.server.structure import FIELDS, read_constraint

CHAT, TEXT = "chat", "text"
LARGEST_SEED = (1 << 63) - 1
LONGEST_NAME = 64
"""Characters of an unknown parameter's name that are compared with those there are, and quoted."""
MOST_STOPS, LONGEST_STOP = 16, 256
WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
SAMPLING = ("temperature", "top_p", "min_p", "top_k")
TYPES = {
    str: "model",
    int: "max_tokens seed top_k",
    float: "temperature top_p min_p",
    bool: "stream return_token_ids ignore_eos store",
    dict: "stream_options",
    object: "stop",
}
COMMON = {name: kind for kind, names in TYPES.items() for name in names.split()} | FIELDS
KNOWN: dict[str, dict[str, type]] = {
    CHAT: {"messages": list, "max_completion_tokens": int, "chat_template_kwargs": dict, **COMMON},
    TEXT: {"prompt": object, **COMMON},
}
"""Parameters of each endpoint and their types; object: checked where it is read."""
IGNORED = (
    "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity"
).split()
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), (1,)),
    **dict.fromkeys(("top_logprobs", "frequency_penalty", "presence_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("echo", "use_beam_search"), (False,)),
    **dict.fromkeys(("continue_final_message", "return_token_strs"), (False,)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids"), ([],)),
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "web_search_options"), ()),
    "moderation": (),
    "logprobs": (False, 0),
    "suffix": ("",),
    "logit_bias": ({},),
    "tool_choice": ("none", "auto"),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens"), (True,)),
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
}
"""Parameters that are not supported -> the values with which they ask for nothing."""

Json = dict[str, object]
"""A JSON object that is sent."""


@dataclass(frozen=True)
class Asked:
    """A request that was understood. content: messages (chat), text, or token ids. limit: None for
    the server's own. ids: the answer's token ids are wanted as well. ignore_eos: see `Request`.
    constraint: the parameter that asks for structured output, and what it asks for. store: whether
    anything of it may be recorded.
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
    ignore_eos: bool
    constraint: tuple[str, Constraint] | None
    store: bool


def parse(kind: str, body: Any, default: SamplingSettings, names: tuple[str, ...]) -> Asked:
    """Understand a request's JSON. default: the server's sampling; names: model names it answers
    to. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.")
    given = {
        name: _typed(name, value, KNOWN[kind][name])
        for name, value in body.items()
        if value is not None and _is_known(kind, name, value)
    }
    model = given.get("model")
    if model is None:
        raise ApiError(400, f"'model' is missing. This server serves '{names[0]}'.", "model")
    if model not in names:
        message = f"there is no model '{model}' here; served is '{names[0]}'."
        raise ApiError(404, message, "model", "model_not_found")
    limit, seed = given.get("max_completion_tokens", given.get("max_tokens")), given.get("seed")
    if limit is not None and limit < 1:
        raise ApiError(400, f"'max_tokens' must be at least 1; given {limit}.", "max_tokens")
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise ApiError(400, f"'seed' must be 0 to {LARGEST_SEED}; given {seed}.", "seed")
    stream, options = given.get("stream", False), given.get("stream_options", {})
    unknown = sorted(set(options) - {"include_usage", "include_obfuscation"})
    if unknown or (options and not stream):
        what = f"has no option '{unknown[0]}'" if unknown else "needs 'stream': true"
        raise ApiError(400, f"'stream_options' {what}.", "stream_options")
    return Asked(
        kind,
        _messages(given) if kind == CHAT else _prompt(given),
        _sampling(given, default),
        seed,
        limit,
        _stops(given),
        stream,
        bool(options.get("include_usage")),
        given.get("return_token_ids", False),
        given.get("chat_template_kwargs", {}),
        given.get("ignore_eos", False),
        read_constraint(given),
        given.get("store", True),
    )


def _is_known(kind: str, name: str, value: object) -> bool:
    """Whether a parameter counts; raises `ApiError` for one that is unknown or not supported."""
    if name in KNOWN[kind] or name in IGNORED:
        return name in KNOWN[kind]
    if name not in NEUTRAL:
        name = name[:LONGEST_NAME]
        message = f"'{name}' is not a parameter of this endpoint.{suggest(name, KNOWN[kind])}"
        raise ApiError(400, message, name, "unknown_parameter")
    neutral = NEUTRAL[name]
    if not any(value == each and type(value) in (type(each), float, int) for each in neutral):
        instead = repr(neutral[0] if neutral else "null")
        message = f"'{name}' is not supported here; leave it out or set it to {instead}."
        raise ApiError(400, message, name, "unsupported_parameter")
    return False


def _typed(name: str, value: Any, kind: type) -> Any:
    """A value of the right type. Whole numbers may be written as 5.0 (as JavaScript may)."""
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        raise _wrong_type(name, WORDS[kind], value)
    return value


def _wrong_type(name: str, wanted: str, value: object) -> ApiError:
    """Shows numbers, and of other values, which may be a person's text, the type alone."""
    number, kind = isinstance(value, (int, float)), type(value).__name__
    shown = repr(value) if number else f"a value of type {kind}"
    return ApiError(422, f"'{name}' must be {wanted}; given {shown}.", name, "wrong_type")


def _sampling(given: Mapping[str, Any], default: SamplingSettings) -> SamplingSettings:
    """The server's settings with the request's own."""
    changes = {name: given[name] for name in SAMPLING if name in given}
    for name, value in changes.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ApiError(400, f"'{name}' must be finite.", name)
    if changes.get("top_k") == -1:  # -1 is off in other engines
        changes["top_k"] = 0
    try:
        return replace(default, **changes)
    except UserError as error:
        message = str(error).removeprefix("decode.")
        raise ApiError(400, message, message.split(" ")[0].rstrip(":")) from error


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise _wrong_type("stop", "text or a list of texts", value)
    if len(stops) > MOST_STOPS or any(not 1 <= len(item) <= LONGEST_STOP for item in stops):
        message = f"'stop' takes up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters."
        raise ApiError(400, message, "stop")
    return tuple(stops)


def _messages(given: Mapping[str, Any]) -> Any:
    """The conversation; `inference.target.chat`, which owns the template, checks its form."""
    if "messages" not in given:
        raise ApiError(400, "'messages' is missing.", "messages")
    for message in given["messages"]:
        if isinstance(message, dict) and message.get("role") == "developer":
            message["role"] = "system"  # OpenAI's newer word for it
    return given["messages"]


def _prompt(given: Mapping[str, Any]) -> str | tuple[int, ...]:
    """Text or token ids; a list of one of them is taken as well."""
    prompt = given.get("prompt")
    if prompt is None:
        raise ApiError(400, "'prompt' is missing.", "prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            message = f"one prompt per request; given {len(prompt)}."
            raise ApiError(400, message, "prompt", "unsupported_parameter")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return tuple(prompt)
    raise _wrong_type("prompt", "text or a list of token ids", prompt)


# Answers


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer have in common. created: seconds since 1970; ids: whether the
    answer's token ids are wanted."""

    kind: str
    id: str
    model: str
    created: int
    ids: bool

    def whole(self, text: str, finish: str, tokens: tuple[int, ...], figures: Json) -> Json:
        """An answer in one piece. figures: `usage`, and `headstart` (only this server has it)."""
        message = {"role": "assistant", "content": text, "refusal": None}
        content: Json = {"message": message} if self.kind == CHAT else {"text": text}
        name = "chat.completion" if self.kind == CHAT else "text_completion"
        return self._body(name, [self._choice(content, finish, tokens)]) | figures

    def piece(self, text: str, **more: str) -> Json:
        """A part of a stream. more: keys of a conversation's delta beside the text."""
        delta = {**more, "content": text}
        content: Json = {"delta": delta} if self.kind == CHAT else {"text": text}
        return self._body(self._streamed, [self._choice(content, None)])

    def end(self, finish: str, tokens: tuple[int, ...]) -> Json:
        """The end of a stream's text."""
        content: Json = {"delta": {}} if self.kind == CHAT else {"text": ""}
        return self._body(self._streamed, [self._choice(content, finish, tokens)])

    def usage(self, figures: Json) -> Json:
        """The last part of a stream that asked for it."""
        return self._body(self._streamed, []) | figures

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self.kind == CHAT else "text_completion"

    def _body(self, name: str, choices: list[Json]) -> Json:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def _choice(self, content: Json, finish: str | None, tokens: tuple[int, ...] = ()) -> Json:
        known: Json = {"token_ids": list(tokens)} if self.ids and finish else {}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish, **known}
