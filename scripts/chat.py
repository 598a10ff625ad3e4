"""`headstart chat`: talk to the target through a drafter. Works on a terminal and with a piped prompt.

Piped: all of standard input is one prompt, the answer goes to standard output and the numbers to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heads.api.errors import UserError
from scripts import drafters
from scripts.run import prepare_process

if TYPE_CHECKING:
    from inference.engine import Engine
    from scripts.config import Settings

NO_DRAFTER = "none"
REPLACEMENT = "\ufffd"
"""What a tokenizer prints for bytes that are not yet a whole character."""


@dataclass(frozen=True)
class ChatConfig:
    """Who answers, and how the conversation starts."""

    drafter: str = ""
    """Name of a drafter of this run, checkpoint folder, kind without weights, or none; empty: the run's only or first one."""
    system: str = ""
    """System message put before the conversation; empty for none."""


@dataclass
class Answer:
    """One answer: its text and what it took. `passes` counts verify passes, `committed` the tokens they committed."""

    text: str
    committed: int
    passes: int
    seconds: float


def run(settings: Settings) -> None:
    """Load target and drafter, then answer until the input ends."""
    prepare_process(settings.run)
    engine, name = build_engine(settings)
    chat = Chat(engine, settings.chat.system, settings.decode.seed)
    if sys.stdin.isatty():
        converse(chat, name)
        return
    prompt = sys.stdin.read().strip()
    if not prompt:
        raise UserError(
            "standard input is empty. Pipe a prompt in (`echo 'What is a list?' | headstart chat`) or use a terminal."
        )
    answer = chat.answer(prompt)
    print(summary(answer, name), file=sys.stderr)


def build_engine(settings: Settings) -> tuple[Engine, str]:
    """The decoder with the chosen drafter, and the drafter's name."""
    from inference.engine import Engine
    from inference.target import TargetModel

    given = settings.chat.drafter
    if not given:
        known = drafters.trained(settings.run)
        given = next(iter(known), NO_DRAFTER)
    found = None if given == NO_DRAFTER else drafters.find(given, settings.run)
    target = TargetModel.load(settings.target)
    if found is None:
        return Engine(target, None, settings.decode), "no drafter"
    decode = drafters.draft_settings(found, settings.decode)
    return Engine(target, drafters.load(found, target), decode), found.name


class Chat:
    """A conversation: messages so far, and the decoder that continues them."""

    def __init__(self, engine: Engine, system: str, seed: int) -> None:
        self.engine, self.seed = engine, seed
        self.opening: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)

    def clear(self) -> None:
        """Forget the conversation, but not the system message."""
        self.messages = list(self.opening)

    def answer(self, prompt: str) -> Answer:
        """Answer `prompt`, printing the text as it is decoded, and remember both."""
        from inference.chat import render_prompt
        from inference.engine import Request
        from inference.prompts import prompt_seed

        tokenizer = self.engine.target.tokenizer
        messages = [*self.messages, {"role": "user", "content": prompt}]
        seed = prompt_seed(self.seed, f"chat-{len(messages)}")
        tokens = tuple(render_prompt(tokenizer, messages))
        request = Request(0, tokens, seed, self.engine.decode.max_new_tokens)
        counts = [0, 0]
        start = time.perf_counter()
        text = ""
        for piece in decode_stream(
            tokenizer, self.engine.stream(request), self.engine.target.eos_token_ids, counts
        ):
            print(piece, end="", flush=True)
            text += piece
        print(flush=True)
        if text.strip():
            self.messages = [*messages, {"role": "assistant", "content": text}]
        return Answer(text, counts[0], counts[1], time.perf_counter() - start)


def decode_stream(
    tokenizer: Any, stream: Iterator[list[int]], ends: tuple[int, ...], counts: list[int]
) -> Iterator[str]:
    """Text piece by piece from the tokens of each pass; `counts` receives [committed tokens, verify passes], prefill's excluded."""
    tokens: list[int] = []
    shown = ""
    for number, new in enumerate(stream):
        if number:
            counts[0] += len(new)
            counts[1] += 1
        tokens += [token for token in new if token not in ends]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith(REPLACEMENT) and len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if len(text) > len(shown):
        yield text[len(shown) :]


def summary(answer: Answer, name: str) -> str:
    """One line of numbers about an answer."""
    from inference.metrics import divide

    tau, speed = divide(answer.committed, answer.passes), divide(answer.committed, answer.seconds)
    return f"[{name}: tau {tau:.2f}, {speed:.0f} tokens/s, {answer.committed + 1} tokens in {answer.seconds:.2f} s]"


def converse(chat: Chat, name: str) -> None:
    """The terminal loop."""
    from rich.console import Console

    console = Console()
    console.print(
        f"{chat.engine.target.info.id} with {name}. /clear forgets the conversation, /quit or Ctrl-D ends it."
    )
    while True:
        try:
            prompt = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if prompt in ("/quit", "/exit"):
            return
        if prompt == "/clear":
            chat.clear()
        elif prompt:
            try:
                console.print(summary(chat.answer(prompt), name), style="dim", highlight=False, markup=False)
            except UserError as error:  # most often a conversation that no longer fits
                console.print(f"{error} (/clear starts a new conversation)", style="red", markup=False)
            except KeyboardInterrupt:
                console.print("\n(stopped)", style="dim")
