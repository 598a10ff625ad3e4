"""`headstart chat`: talk to the target through a drafter. Works on a terminal and with a piped
prompt.

On a terminal, tokens that were drafted and accepted are green; the target's own picks are plain.
Piped: all of standard input is one prompt, the answer goes to standard output and the numbers to
standard error.
"""

from __future__ import annotations

import sys

from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.conversation import Chat, converse, summary
from scripts.run.drafters import Found
from scripts.run.process import prepare_process

NO_DRAFTER = "none"


def run(settings: Settings) -> None:
    """Load target and drafter, then answer until the input ends."""
    prepare_process(settings.run)
    engine, name = build_engine(settings, settings.chat.drafter)
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
    answer = chat.answer(prompt)
    print(summary(answer, name), file=sys.stderr)


def chosen(settings: Settings, given: str) -> Found | None:
    """The drafter `given` (see `ChatConfig.drafter`); None where none is wanted, or trained."""
    given = given or next(iter(drafters.trained(settings.run)), NO_DRAFTER)
    return None if given == NO_DRAFTER else drafters.find(given, settings.run)


def build_engine(settings: Settings, given: str) -> tuple[Engine, str]:
    """The decoder with the drafter `given` (see `ChatConfig.drafter`), and that drafter's name."""
    found = chosen(settings, given)
    target = TargetModel.load(settings.target)
    if found is None:
        return Engine(target, None, settings.decode), "no drafter"
    decode = drafters.decode_settings(found, settings, target, settings.decode.batch_size)
    if decode.shape == "none":
        return Engine(target, None, decode), "no drafter"
    return Engine(target, drafters.load(found, target), decode), found.name
