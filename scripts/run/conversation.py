"""A conversation with a target in the terminal, printed token by token."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from heads.api.errors import UserError, suggest
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord, Request
from inference.measure.metrics import divide
from inference.measure.prompts import prompt_seed
from inference.target.chat import render_prompt
from inference.target.text_pieces import TextPieces

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/quit": "end (also Ctrl-D); Ctrl-C stops an answer",
}
COMMAND = re.compile(r"/\w*")
"""A command: a slash and one word. Paths and sentences do not match."""
HISTORY = 1000
"""Lines kept in the history."""
GREEN, PLAIN = "\033[32m", "\033[0m"


@dataclass
class Answer:
    """One answer: its text, its number of tokens, its verify passes, and its seconds, including
    prefill."""

    text: str
    tokens: int
    passes: list[PassRecord]
    seconds: float


class Chat:
    """A conversation: the messages so far, and the decoder that continues them."""

    def __init__(self, engine: Engine, system: str, seed: int) -> None:
        self.engine, self.seed = engine, seed
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)

    def clear(self) -> None:
        self.messages = list(self.opening)

    def answer(self, prompt: str) -> Answer:
        """Answer `prompt`, printing the text as it is decoded, and remember both."""
        target = self.engine.target
        messages = [*self.messages, {"role": "user", "content": prompt}]
        seed = prompt_seed(self.seed, f"chat-{len(messages)}")
        tokens = tuple(render_prompt(target.tokenizer, messages))
        request = Request(0, tokens, seed, self.engine.decode.max_new_tokens)
        stream = TextStream(target.tokenizer, target.eos_token_ids, colour=sys.stdout.isatty())
        start = time.perf_counter()

        def show(_: Request, new: list[int], record: PassRecord | None) -> None:
            stream.add(new, record.accepted if record is not None else 0)

        (completion,) = self.engine.run([request], on_tokens=show)
        seconds = time.perf_counter() - start
        stream.close()
        text = stream.pieces.text
        if text.strip():
            self.messages = [*messages, {"role": "assistant", "content": text}]
        return Answer(text, len(completion.tokens), completion.passes, seconds)


class TextStream:
    """Prints text while its tokens arrive. colour: print drafted and accepted tokens in green."""

    def __init__(self, tokenizer: Any, ends: tuple[int, ...], colour: bool = False) -> None:
        self.pieces, self.colour = TextPieces(tokenizer, ends), colour

    def add(self, new: list[int], drafted: int = 0) -> None:
        """Print what `new` tokens add; the first `drafted` of them are accepted drafts."""
        self._print(self.pieces.add(new[:drafted]), self.colour)
        self._print(self.pieces.add(new[drafted:]))

    def _print(self, piece: str, green: bool = False) -> None:
        if piece:
            print(f"{GREEN}{piece}{PLAIN}" if green else piece, end="", flush=True)

    def close(self) -> None:
        """Print the text held back, and end the line."""
        self._print(self.pieces.rest())
        print(flush=True)


def summary(answer: Answer, name: str) -> str:
    tau = divide(sum(item.committed for item in answer.passes), len(answer.passes))
    speed = divide(answer.tokens, answer.seconds)
    total = f"{answer.tokens} tokens in {answer.seconds:.2f} s"
    return f"[{name}: tau {tau:.2f}, {speed:.0f} tokens/s, {total}]"


def converse(chat: Chat, name: str) -> None:
    """Read prompts from the terminal and stream the answers until the input ends."""
    console = Console(highlight=False, markup=False)
    console.print(f"{chat.engine.target.info.id} with {name}. /help lists the commands.")
    with line_editing() as read:
        while True:
            try:
                prompt = read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            if prompt in ("/quit", "/exit"):
                return
            if COMMAND.fullmatch(prompt):
                console.print(obey(chat, prompt), style="dim")
                continue
            try:
                if prompt:
                    console.print(summary(chat.answer(prompt), name), style="dim")
            except UserError as error:  # usually a conversation that no longer fits
                console.print(f"{error} (/clear starts a new conversation)", style="red")
            except KeyboardInterrupt:
                console.print("\n(stopped)", style="dim")


def obey(chat: Chat, command: str) -> str:
    """Run a command; returns the message to print."""
    if command == "/clear":
        chat.clear()
        return "the conversation is forgotten"
    if command == "/help":
        width = max(map(len, COMMANDS))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"there is no command '{command}'.{suggest(command, COMMANDS)}"


@contextmanager
def line_editing() -> Iterator[Callable[[str], str]]:
    """Yield a function that reads a line with readline's keys and history, which is kept between
    chats; without readline in Python, plain input."""
    try:
        import readline
    except ImportError:  # Windows
        yield input
        return
    place = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(place) / "headstart" / "chat_history"
    readline.set_history_length(HISTORY)
    readline.set_completer(
        lambda text, state: [*(n for n in COMMANDS if n.startswith(text)), None][state]
    )
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    with suppress(OSError):  # there is no history yet
        readline.read_history_file(file)
    try:
        yield input
    finally:
        with suppress(OSError):  # the home folder is not writable
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
