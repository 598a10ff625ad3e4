"""`headstart learn`: learns from the traffic of a running server beside it (docs/learning.md).
Writes <run>/learn/: the journal, the candidates, and learn.html with tau over time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.api.errors import UserError
from inference.export.engine_folder import export, given_settings, prepare
from inference.export.layouts.base import Target
from inference.folders import discard
from inference.report.page.learning import write_learning_page
from scripts.config.schema import Settings, write_settings
from scripts.run import drafters
from scripts.run.process import prepare_process, say, shown
from scripts.stages.refresh.parts import refreshing_rate

if TYPE_CHECKING:
    from scripts.run.drafters import Found
    from train.learning.engine import ExportingServer
    from train.learning.journal import Journal
    from train.learning.server import HttpServer, Server
    from train.learning.work import CycleSettings

logger = logging.getLogger(__name__)
SETTINGS_FILE = "settings.yaml"
"""The command with which `headstart serve` starts its learner."""
SERVED = "only served answers are learnt from; of `feedback`, the weights and replay count"
UNREAD = {
    "train.domains": "all sampled traffic is learnt from",
    "train.prompts": "checkpoints are chosen on traffic that learn.held_out takes",
    "train.goal": "a training ends after train.max_steps or train.patience",
    "train.refresh": "a training continues from the drafter that serves (learn.drafter beside an "
    "engine)",
    "feedback.records": "what is learnt from is the traffic in learn.folder",
    "feedback.answers": "what is learnt from is the traffic in learn.folder",
    "feedback.sequences": "what is learnt from is the traffic in learn.folder",
    "feedback.hard_prompts": SERVED,
    "feedback.branch": SERVED,
    "feedback.variation": SERVED,
}
"""Beginning of settings that no cycle reads -> what counts instead."""


def run(settings: Settings) -> None:
    """Learn until `learn.cycles` cycles have ended, or until a signal arrives."""
    require_read(settings)
    try:  # the server's package needs an extra
        from train.learning.cycle import Learner
        from train.learning.journal import writing
        from train.learning.server import HttpServer
        from train.learning.work import end_with
    except ImportError as error:
        raise UserError(
            f"`headstart learn` needs {error.name}: pip install fastapi (Headstart's extra "
            "`serve`)."
        ) from error
    config = settings.learn
    if config.parent:
        end_with(config.parent)
    prepare_process(settings.run)
    logging.basicConfig(format="%(asctime)s learn: %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with suppress(OSError):
        os.nice(max(0, config.nice - os.nice(0)))
    server: Server
    whom: str
    draft = drafters.asked_draft(settings)
    if config.drafter:
        folder = learn_folder(config.folder, settings)
        server, whom = exporting(settings, folder), settings.export.engine
    else:
        server, whom = HttpServer(config), config.server
        wait_for(server, config.look_seconds)
        folder = sampled_folder(config.folder, server)
        draft = server.draft() or draft
    with writing(folder) as journal:
        cycle = cycle_settings(settings, folder, server, journal, draft)
        say(f"learning from the traffic in {shown(folder)} for {whom}")

        def show(written: Journal) -> None:
            write_learning_page(written.events(), folder)

        show(journal)
        Learner(cycle, server, journal, show=show).run()


def require_read(settings: Settings) -> None:
    """Raise `UserError` if a setting is given that learning from traffic does not read."""
    for key in (*(str(item.key_or_group) for item in settings.overrides), *settings.changed):
        for name, instead in UNREAD.items():
            if key.startswith(name):
                raise UserError(
                    f"{key} is given, but `headstart learn` does not read it: {instead}. Leave it "
                    "out."
                )


def learn_folder(given: str, settings: Settings) -> Path:
    """The folder of learning, which a server and its learner share."""
    return Path(given).expanduser() if given else settings.run.directory / "learn"


def exporting(settings: Settings, folder: Path) -> ExportingServer:
    """The engine that loads what is exported as `export.engine` says. The drafter that serves is
    exported once for a check, and deleted: every candidate would be refused after its training for
    settings with which nothing can be exported. Raises `UserError` for these, without
    samples of its traffic, and for a drafter that it does not load."""
    from train.learning.cycle import TRAFFIC
    from train.learning.engine import EXPORTS, ExportingServer

    config = settings.export
    found = drafters.find_trained("learn.drafter", settings.learn.drafter, settings.run)
    if not (folder / TRAFFIC).is_dir():
        raise UserError(
            f"'{folder}' has no samples to learn from. Start `headstart serve` with serve.engine "
            "and serve.sample=true in front of the engine, with the same serve.learn_folder."
        )

    def write(checkpoint: Path, out: Path) -> str:
        source = prepare(checkpoint, config.engine)
        own = replace(config, overwrite=True)  # what a kill has left there
        return export(own, source, Target.of(settings.target, source.info), out).serve

    def show(checkpoint: Path, out: Path) -> str:
        command = write(checkpoint, out)
        say(f"for {config.engine} to load: {shown(out)}")
        return command

    if config.settings:  # a traffic.json names drafters, and candidates are numbered
        given_settings(config, folder / "0001")
    trial = folder / EXPORTS / "0000"
    trial.parent.mkdir(parents=True, exist_ok=True)
    write(found.folder, trial)
    discard(trial, ("export",))
    server = ExportingServer(folder, found.folder, show)
    if (known := Path(server.current())) != found.folder.resolve():
        say(f"the drafter is {shown(known)}, which learning has exported last")
    return server


def wait_for(server: HttpServer, seconds: float) -> None:
    """Poll a server until it answers."""
    from train.learning.server import ServerGoneError

    while True:
        try:
            server.current()
            return
        except ServerGoneError as error:
            logger.warning("%s", error)
            time.sleep(seconds)


def sampled_folder(given: str, server: HttpServer) -> Path:
    """The folder of learning, which contains the server's samples. Raises `UserError` if another
    folder was given, and for a server that takes no samples or runs on another machine."""
    from train.learning.cycle import TRAFFIC

    samples = server.samples()
    if samples is None:
        raise UserError(
            f"the server at {server.base} samples no answers to learn from. Start it with "
            "serve.sample=true (or serve.learn=true, which starts a learner too)."
        )
    folder = Path(given).expanduser() if given else samples.parent
    if (folder / TRAFFIC).resolve() != samples:
        raise UserError(
            f"learn.folder is '{folder}', but the server at {server.base} samples into "
            f"'{samples}'. Leave learn.folder out, or give '{samples.parent}'."
        )
    if not samples.is_dir():
        raise UserError(
            f"the server at {server.base} samples into '{samples}', which is not on this machine. "
            "Start `headstart learn` where the server runs, or where it sees the same folder."
        )
    return folder


def cycle_settings(
    settings: Settings, folder: Path, server: Server, journal: Journal, draft: Mapping[str, Any]
) -> CycleSettings:
    """The settings of every cycle. The learning rate is that of the drafter that serves now; so is
    what `draft`, the settings of the server's draft, does not say."""
    from train.learning.work import CycleSettings

    found = drafters.find_trained("the server's drafter", server.current(), settings.run)
    target = settings.target
    if settings.learn.device:
        target = replace(target, device=settings.learn.device)
    return CycleSettings(
        folder=folder.resolve(),
        learn=settings.learn,
        target=target,
        train=settings.train,
        features=settings.features,
        feedback=settings.feedback,
        engine=settings.engine,
        optim=replace(settings.optim, lr=learning_rate(settings, found, journal)),
        schedule=settings.schedule,
        decode=drafters.draft_settings(found, settings.decode, draft),
    )


def learning_rate(settings: Settings, found: Found, journal: Journal) -> float:
    """The learning rate of the cycles: that of the earlier cycles, if there are any, since a
    drafter from a cycle does not record how it was trained; otherwise as in `refreshing_rate`."""
    from train.learning.cycle import TRAINED

    before = journal.last(TRAINED)
    if before is not None and "rate" in before.facts and not settings.given("optim.lr"):
        return float(before.facts["rate"])
    return refreshing_rate(settings, found)


# Beside `headstart serve`


def start_learner(
    settings: Settings, folder: Path, whom: Mapping[str, Any], tokens: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a learner with the server's own settings and `serve.learn_settings`. whom: settings
    of `learn` that say for which server; tokens: environment variables that it needs. Raises
    `UserError` for settings that it does not read."""
    derived = settings.derive("learn", before=settings.serve.learn_settings)
    # as values and not as overrides, in whose text a path may mean something else
    own = {**whom, "folder": str(folder.resolve()), "parent": os.getpid()}
    derived = derived.put(learn=replace(derived.learn, **own))
    require_read(derived)
    path = folder / SETTINGS_FILE
    write_settings(derived, path)
    command = [sys.executable, "-m", "headstart", "learn", "--config", str(path)]
    return subprocess.Popen(command, env={**os.environ, **tokens}, stdin=subprocess.DEVNULL)


def end_learner(learner: subprocess.Popen[bytes]) -> None:
    """End a learner. Its journal names the steps that are finished, so it may be in any state."""
    learner.terminate()
    try:
        learner.wait(10.0)
    except subprocess.TimeoutExpired:
        learner.kill()
        learner.wait()
