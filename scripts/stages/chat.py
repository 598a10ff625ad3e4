"""`headstart chat`: talk to the target through a drafter. Works on a terminal and with a piped
prompt.

On a terminal, tokens that were drafted and accepted are green; the target's own picks are plain.
Piped: all of standard input is one prompt, the answer goes to standard output and the numbers to
standard error.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.conversation import Chat, converse, summary
from scripts.run.drafters import Found
from scripts.run.folder import require_run
from scripts.run.process import prepare_process


def run(settings: Settings) -> None:
    """Load target and drafter, then answer prompts until the input ends."""
    prepare_process(settings.run)
    engine, found = build_engine(settings, settings.chat.drafter)
    name = found.name if found else "no drafter"
    chat = Chat(engine, settings.chat.system, settings.decode.seed)
    if sys.stdin.isatty():
        converse(chat, name)
        return
    prompt = sys.stdin.read().strip()
    if not prompt:
        raise UserError(
            "standard input is empty. Pipe a prompt in (`echo 'What is a list?' | headstart chat`) "
            "or use a terminal."
        )
    print(summary(chat.answer(prompt), name), file=sys.stderr)


def build_engine(settings: Settings, given: str) -> tuple[Engine, Found | None]:
    """The decoder with the drafter `given`, and that drafter; None if nothing is drafted.

    A recipe's decode.compile is meant for its measurements: compiling takes a minute before the
    first token. Here it must be given explicitly.
    """
    if not given:
        plain = f"{settings.stage.name}.drafter={drafters.NO_DRAFTER}"
        require_run(settings.run, f"Or decode without a drafter: {plain}.")
        given, why = drafters.preferred(settings.run)
        print(why, file=sys.stderr, flush=True)
    found = None if given == drafters.NO_DRAFTER else drafters.find(given, settings.run)
    if not settings.given("decode.compile"):
        settings = settings.put(decode=replace(settings.decode, compile=False))
    target, decode = TargetModel.load(settings.target), settings.decode
    if found is not None:
        decode = drafters.decode_settings(found, settings, target, decode.batch_size)
        if decode.shape != "none":
            return Engine(target, drafters.load(found, target), decode), found
    return Engine(target, None, decode), None
