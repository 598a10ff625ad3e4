"""Prompts for measuring, chatting and evaluating: JSON lines with an id, a domain and the content
to answer.

One line is {"id": ..., "domain": ..., and one of "messages" (OpenAI style), "prompt" (one user
message), "tokens" (ids), "text" (continued as it is, without the chat template)}. Messages may come
with "tools" and "template_arguments" for the template, and with "turns", further user messages of
the conversation (inference.measure.turns); a "json_schema" constrains the answer (structured
output). In a .txt file every line is a user message. A folder holds one `<domain>.jsonl` per
domain. Ids are unique. Each prompt's sampling seed is derived from its id, so a prompt gets the
same answer in any order, batch or process.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from heads.api.reading import parse_json, read_text
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.decoding.structured.constraint import Constraint
from inference.target.chat import TURN_SEPARATOR, Message, check_messages, render_prompt

logger = logging.getLogger(__name__)

CONTENT_KEYS = ("messages", "prompt", "tokens", "text")
LINES = ".txt"
"""Suffix of files with one user message per line."""
Requests = Mapping[str, Request]
"""Texts by the ids of their prompts."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: `messages` for the chat template, token ids, or the beginning of a text. tools,
    arguments: what the template gets besides messages. constraint: the constraint on the answer.
    turns: user messages that follow the answer (inference.measure.turns). origin: the id of the
    prompt that this one was made from, as a further turn or at another length; empty: none."""

    id: str
    domain: str
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    tools: tuple[Mapping[str, object], ...] | None = None
    arguments: Mapping[str, object] | None = None
    constraint: Constraint | None = None
    turns: tuple[str, ...] = ()
    origin: str = ""

    @property
    def unit(self) -> str:
        """What intervals resample: prompts of one origin depend on one another."""
        return self.origin or self.id

    def render(self, tokenizer: Any) -> list[int]:
        """The token ids that the target continues."""
        if self.tokens is not None:
            return list(self.tokens)
        if self.text is not None:
            return encode_text(tokenizer, self.text)
        assert self.messages is not None
        return render_prompt(tokenizer, self.messages, self.tools, self.arguments)

    @property
    def asked(self) -> str:
        """The last message, or the beginning of the text; raises `UserError` for token ids."""
        if self.tokens is not None:
            raise UserError(
                f"prompt '{self.id}' is given as token ids, so nothing can be put before it. Leave "
                "bench.contexts out, or give its text."
            )
        return self.messages[-1]["content"] if self.messages else self.text or ""

    def asking(self, text: str) -> Prompt:
        """The same prompt with a different `asked`."""
        if not self.messages:
            return replace(self, text=text)
        return replace(self, messages=(*self.messages[:-1], {**self.messages[-1], "content": text}))

    def to_line(self) -> dict[str, object]:
        """The prompt as a line of a prompt file, as `load_prompts` reads it."""
        keys = ("messages", "tokens", "text", "tools", "turns")
        content = {name: getattr(self, name) for name in keys}
        content["template_arguments"] = self.arguments
        if self.constraint is not None:
            content["json_schema"] = json.loads(self.constraint.text)
        given = {name: value for name, value in content.items() if value}
        return {"id": self.id, "domain": self.domain, **given}


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text outside any chat, with the special tokens that its tokenizer puts before
    it."""
    tokens: list[int] = list(tokenizer(text).input_ids)
    return tokens[:-1] if tokens[-1:] == [tokenizer.eos_token_id] else tokens


def load_prompts(path: str | Path | Sequence[str | Path]) -> list[Prompt]:
    """Read prompts from a .jsonl or .txt file, a folder of <domain>.jsonl, or a list of these.

    Raises `UserError` for a missing or empty source, a broken line or a duplicate id; the message
    names file and line.
    """
    prompts: list[Prompt] = []
    for file in _files(path):
        lines = read_text(file, "Save it as text in UTF-8.").split("\n")
        full = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        parse = _parse_text if file.suffix == LINES else _parse
        prompts += [parse(line, file, number) for number, line in full]
    if twice := [name for name, count in Counter(one.id for one in prompts).items() if count > 1]:
        raise UserError(
            f"prompt id '{twice[0]}' occurs twice in {path}. Ids must be unique: an answer's seed "
            "comes from its id."
        )
    if not prompts:
        raise UserError(
            f"there are no prompts in {path}. Each line must be a JSON object with one of "
            f"{', '.join(CONTENT_KEYS)}."
        )
    return prompts


def select_prompts(
    prompts: Sequence[Prompt], per_domain: int, seed: int | None = None
) -> list[Prompt]:
    """At most `per_domain` prompts of every domain, in the given order.

    seed None takes the first ones. Otherwise the choice is random but reproducible by the seed, and
    adding prompts to a domain changes it only by the added prompts that it includes. Raises
    `UserError` unless per_domain is positive.
    """
    if per_domain < 1:
        raise UserError(f"prompts per domain must be at least 1; given: {per_domain}.")
    ranked = list(prompts)
    if seed is not None:
        ranked.sort(key=lambda prompt: prompt_seed(seed, prompt.id))
    by_domain: dict[str, list[str]] = {}
    for prompt in ranked:
        by_domain.setdefault(prompt.domain, []).append(prompt.id)
    chosen = {name for names in by_domain.values() for name in names[:per_domain]}
    return [prompt for prompt in prompts if prompt.id in chosen]


def prompt_seed(seed: int, prompt_id: str) -> int:
    """The sampling seed of one prompt: 63 bits of a stable hash of (seed, id)."""
    digest = hashlib.blake2b(f"{seed}:{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def behind_others(
    prompts: Sequence[Prompt], others: Sequence[Prompt], tokenizer: Any, lengths: Sequence[int]
) -> list[Prompt]:
    """Every prompt once per length, behind as many other prompts of its domain as fit into that
    many tokens. They stand for documents; the answer is about the last one. Ids become
    "<id>@<length>".

    others: all prompts, including `prompts`; taken in their order, starting at the prompt's own
    place, each at most once. Without lengths, prompts stay as they are. Raises `UserError` for
    prompts of token ids, because text cannot be put before them.
    """
    if not lengths:
        return list(prompts)
    sizes = {one.id: len(one.render(tokenizer)) for one in others}
    domains: dict[str, list[Prompt]] = {}
    for one in others:
        domains.setdefault(one.domain, []).append(one)
    longer = []
    for length in lengths:
        for prompt in prompts:
            mates = domains[prompt.domain]
            own = mates.index(prompt)
            before, room = list[str](), length - sizes[prompt.id]
            for one in (*mates[own + 1 :], *mates[:own]):
                if sizes[one.id] <= room:
                    before.append(one.asked)
                    room -= sizes[one.id]
            text = TURN_SEPARATOR.join([*before, prompt.asked])
            made = replace(prompt.asking(text), id=f"{prompt.id}@{length}", origin=prompt.unit)
            longer.append(made)
    return longer


def to_requests(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    decode: DecodeConfig,
    *,
    capacity: int | None = None,
    overlong: str = "refuse",
) -> list[Request]:
    """Render prompts as requests; `Request.index` is the place in `prompts`.

    capacity: most positions that prompt and answer may take together; None disables the check.
    overlong: "refuse" raises `UserError` for the first prompt that does not fit; "skip" leaves such
    prompts out and logs how many (their indices are absent from the result).
    """
    assert overlong in ("refuse", "skip"), overlong
    requests, skipped = [], []
    for index, prompt in enumerate(prompts):
        tokens = tuple(prompt.render(tokenizer))
        if capacity is not None and len(tokens) + decode.max_new_tokens > capacity:
            if overlong == "refuse":
                raise UserError(
                    f"prompt '{prompt.id}' has {len(tokens)} tokens; with "
                    f"max_new_tokens={decode.max_new_tokens} it exceeds the "
                    f"{capacity} positions available. Shorten it or lower decode.max_new_tokens."
                )
            skipped.append(prompt.id)
            continue
        seed = prompt_seed(decode.seed, prompt.id)
        limit, follows = decode.max_new_tokens, prompt.constraint
        requests.append(Request(index, tokens, seed, limit, constraint=follows))
    if skipped:
        logger.warning(
            "%d of %d prompts skipped: longer than %s positions with their answers",
            *(len(skipped), len(prompts), capacity),
        )
    return requests


def _files(path: str | Path | Sequence[str | Path]) -> list[Path]:
    if not isinstance(path, (str, Path)):
        return [file for entry in path for file in _files(entry)]
    found = Path(path).expanduser()
    if found.is_file():
        return [found]
    if not found.is_dir():
        raise UserError(
            f"there is no prompt file or folder '{found}'. Give a .jsonl or .txt file, or a "
            "folder of <domain>.jsonl files."
        )
    if files := sorted(found.glob("*.jsonl")):
        return files
    words = "It should hold one <domain>.jsonl per domain."
    raise UserError(f"the folder '{found}' has no .jsonl files. {words}")


def _parse(line: str, file: Path, number: int) -> Prompt:
    where = f"{file}, line {number}"
    row = parse_json(line, where, "Each line is a JSON object.")
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}.")
    given = [key for key in CONTENT_KEYS if row.get(key) is not None]
    if len(given) != 1:
        raise UserError(
            f"{where}: needs exactly one of {', '.join(CONTENT_KEYS)}; found: "
            f"{', '.join(given) or 'none'}."
        )
    follows = _constraint(row.get("json_schema"), where)
    own = row.get("id")
    name = f"{file.stem}-{number}" if own is None else str(own)
    domain = str(row.get("domain") or file.stem)
    if given == ["tokens"]:
        tokens = row["tokens"]
        if not tokens or not isinstance(tokens, list) or not all(map(_is_id, tokens)):
            words = "tokens must be a non-empty list of non-negative integers."
            raise UserError(f"{where}: {words}")
        return Prompt(name, domain, tokens=tuple(tokens), constraint=follows)
    if given == ["text"]:
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise UserError(f"{where}: text must be text that is not empty.")
        return Prompt(name, domain, text=row["text"], constraint=follows)
    asked = [{"role": "user", "content": row.get("prompt")}]
    try:
        checked = check_messages(row["messages"] if given == ["messages"] else asked)
    except UserError as error:
        raise UserError(f"{where}: {error}.") from error
    # Answers in the file are not part of the prompt.
    while len(checked) > 1 and checked[-1]["role"] == "assistant":
        checked.pop()
    tools, arguments = row.get("tools"), row.get("template_arguments")
    if not (tools is None or isinstance(tools, list)) or not isinstance(arguments or {}, Mapping):
        raise UserError(f"{where}: tools must be a list, template_arguments an object.")
    described = tuple(tools) if tools else None
    content = tuple(checked), None, None, described, arguments or None
    return Prompt(name, domain, *content, follows, _turns(row.get("turns"), where))


def _turns(turns: Any, where: str) -> tuple[str, ...]:
    if turns is None:
        return ()
    if not isinstance(turns, list) or not all(isinstance(x, str) and x.strip() for x in turns):
        raise UserError(f"{where}: turns must be a list of user messages that are not empty.")
    return tuple(turns)


def _constraint(schema: Any, where: str) -> Constraint | None:
    if schema is None:
        return None
    try:
        return Constraint.schema(schema)
    except UserError as error:
        raise UserError(f"{where}: json_schema: {error}") from error


def _parse_text(line: str, file: Path, number: int) -> Prompt:
    message: Message = {"role": "user", "content": line.strip()}
    return Prompt(f"{file.stem}-{number}", file.stem, messages=(message,))


def _is_id(token: Any) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
