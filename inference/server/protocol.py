"""Requests in the form of OpenAI's API: which parameters are supported, and which are refused.

A parameter that would change the answer but is not supported is refused, and the error names it;
otherwise the client would get a different answer than requested. Parameters that have no effect
here (`user`, `metadata`, ...) are accepted and ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from heads.api.errors import UserError, suggest
from inference.decoding.logprobs import MOST_TOP
from inference.decoding.sampling.distribution import SamplingSettings
from inference.decoding.structured.constraint import Constraint
from inference.server.errors import ApiError
from inference.server.structure import FIELDS, read_constraint

CHAT, TEXT = "chat", "text"
LARGEST_SEED = (1 << 63) - 1
"""Seeds are of this size; a request's may be negative (int64) and is taken modulo 2^63."""
LONGEST_NAME = 64
"""Characters of an unknown parameter's name that are compared with known names, and quoted."""
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
    int: "max_tokens min_tokens seed top_k n best_of",
    float: "temperature top_p min_p",
    bool: "stream return_token_ids ignore_eos store",
    dict: "stream_options",
    object: "stop",
}
COMMON = {name: kind for kind, names in TYPES.items() for name in names.split()} | FIELDS
KNOWN: dict[str, dict[str, type]] = {
    CHAT: {
        "messages": list,
        "max_completion_tokens": int,
        "chat_template_kwargs": dict,
        "logprobs": bool,
        "top_logprobs": int,
        **COMMON,
    },
    TEXT: {"prompt": object, "logprobs": int, "echo": bool, "add_special_tokens": bool, **COMMON},
}
"""Parameters of each endpoint and their types; object: the code that reads it checks its type."""
IGNORED = (
    "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity"
).split()
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message"), (False,)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids"), ([],)),
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "web_search_options"), ()),
    "moderation": (),
    "suffix": ("",),
    "logit_bias": ({},),
    "tool_choice": ("none", "auto"),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "add_special_tokens": (True, False),  # in a conversation the template decides
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
}
"""Unsupported parameters -> the values with which they have no effect."""

STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")


@dataclass(frozen=True)
class Asked:
    """A parsed request.

    prompts: the text, token ids or messages (chat) to continue, per prompt. choices: answers per
    prompt. limit: most new tokens; None: the server's default; 0: only the echo. usage: whether a
    stream ends with its usage; running_usage: every part has it too. ids: whether the answer's
    token ids are returned as well. special: text gets the tokenizer's beginning of text.
    ignore_eos, min_tokens: see `Request`. logprobs: how many of the most likely tokens are shown in
    every place; None: no log-probabilities. echo: the prompt comes before the answer. constraint:
    the parameter that asks for structured output, and its constraint. store: whether the request
    may be recorded.
    """

    kind: str
    prompts: tuple[Any, ...]
    choices: int
    sampling: SamplingSettings
    seed: int | None
    limit: int | None
    min_tokens: int
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    running_usage: bool
    ids: bool
    template: Mapping[str, object]
    special: bool
    ignore_eos: bool
    logprobs: int | None
    echo: bool
    constraint: tuple[str, Constraint] | None
    store: bool


def parse(kind: str, body: Any, default: SamplingSettings, names: tuple[str, ...]) -> Asked:
    """Parse a request's JSON. default: the server's sampling; names: the model names that it
    accepts. Raises `ApiError`."""
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
    limit, echo = given.get("max_completion_tokens", given.get("max_tokens")), given.get("echo")
    least = 0 if echo else 1
    if limit is not None and limit < least:
        raise ApiError(400, f"'max_tokens' must be at least {least}; given {limit}.", "max_tokens")
    for name, smallest in (("n", 1), ("min_tokens", 0)):
        if given.get(name, smallest) < smallest:
            message = f"'{name}' must be at least {smallest}; given {given[name]}."
            raise ApiError(400, message, name)
    choices, seed = given.get("n", 1), given.get("seed")
    if given.get("best_of", choices) != choices:
        message = f"'best_of' is supported only as 'n', which is {choices}; leave it out."
        raise ApiError(400, message, "best_of", "unsupported_parameter")
    if seed is not None and not ~LARGEST_SEED <= seed <= LARGEST_SEED:
        message = f"'seed' must be {~LARGEST_SEED} to {LARGEST_SEED}; given {seed}."
        raise ApiError(400, message, "seed")
    stream, options = given.get("stream", False), given.get("stream_options", {})
    unknown = sorted(set(options) - {*STREAM_OPTIONS})
    if unknown or (options and not stream):
        what = f"has no option '{unknown[0]}'" if unknown else "needs 'stream': true"
        raise ApiError(400, f"'stream_options' {what}.", "stream_options")
    running_usage = bool(options.get("continuous_usage_stats"))
    return Asked(
        kind,
        prompts=(_messages(given),) if kind == CHAT else _prompts(given),
        choices=choices,
        sampling=_sampling(given, default),
        seed=None if seed is None else seed % (LARGEST_SEED + 1),
        limit=limit,
        min_tokens=given.get("min_tokens", 0),
        stops=_stops(given),
        stream=stream,
        usage=bool(options.get("include_usage")) or running_usage,
        running_usage=running_usage,
        ids=given.get("return_token_ids", False),
        template=given.get("chat_template_kwargs", {}),
        special=given.get("add_special_tokens", True),
        ignore_eos=given.get("ignore_eos", False),
        logprobs=_logprobs(kind, given),
        echo=bool(echo),
        constraint=read_constraint(given),
        store=given.get("store", True),
    )


def _is_known(kind: str, name: str, value: object) -> bool:
    """Whether a parameter has an effect; raises `ApiError` if it is unknown or not supported."""
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
    """A value of the right type. Whole numbers may be written as 5.0, as JavaScript may do."""
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        raise _wrong_type(name, WORDS[kind], value)
    return value


def _wrong_type(name: str, wanted: str, value: object) -> ApiError:
    """The error for a value of the wrong type. It shows numbers; of other values, which may be a
    person's text, it shows only the type."""
    number, kind = isinstance(value, (int, float)), type(value).__name__
    shown = repr(value) if number else f"a value of type {kind}"
    return ApiError(422, f"'{name}' must be {wanted}; given {shown}.", name, "wrong_type")


def _sampling(given: Mapping[str, Any], default: SamplingSettings) -> SamplingSettings:
    """The server's settings with the request's changes."""
    changes = {name: given[name] for name in SAMPLING if name in given}
    for name, value in changes.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ApiError(400, f"'{name}' must be finite.", name)
    if changes.get("top_k") == -1:  # -1 means off in other engines
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


def _logprobs(kind: str, given: Mapping[str, Any]) -> int | None:
    """How many of the most likely tokens are shown besides the answer's; None: no
    log-probabilities. A conversation uses two parameters for this, a text one."""
    most, name = given.get("logprobs"), "logprobs"
    if kind == CHAT:
        asked, most, name = bool(most), given.get("top_logprobs"), "top_logprobs"
        if most and not asked:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", name)
        most = (most or 0) if asked else None
    if most is not None and not 0 <= most <= MOST_TOP:
        raise ApiError(400, f"'{name}' must be 0 to {MOST_TOP}; given {most}.", name)
    return most


def _messages(given: Mapping[str, Any]) -> Any:
    """The conversation; `inference.target.chat`, which owns the template, checks its form."""
    if "messages" not in given:
        raise ApiError(400, "'messages' is missing.", "messages")
    for message in given["messages"]:
        if isinstance(message, dict) and message.get("role") == "developer":
            message["role"] = "system"  # OpenAI's newer name for it
    return given["messages"]


def _prompts(given: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    """Texts or token ids, of one prompt or a list of prompts."""
    prompt = given.get("prompt")
    if prompt is None:
        raise ApiError(400, "'prompt' is missing.", "prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    return tuple(_prompt(item) for item in (prompt if several else [prompt]))


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        return tuple(prompt)
    raise _wrong_type("prompt", "text, a list of token ids, or a list of these", prompt)
