"""`headstart serve`: runs an OpenAI-compatible server for the target, sped up by a drafter
(docs/server.md)."""

from __future__ import annotations

import logging
import secrets
from contextlib import ExitStack
from pathlib import Path

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.manifest import checkpoint_hash
from inference.server.config import (
    ADMIN_VARIABLE,
    TOKEN_VARIABLE,
    ServeConfig,
    read_admin_secret,
    read_secret,
)
from inference.server.front.secret import Secret
from inference.server.front.server import bind, url_of
from inference.verifications import RECORDS
from inference.writers import hold
from scripts.config.schema import Settings
from scripts.run.process import prepare_process, shown
from scripts.stages import relay
from scripts.stages.chat import build_engine
from scripts.stages.learn import end_learner, learn_folder, start_learner


def run(settings: Settings) -> int:
    """Load, listen, and answer until SIGTERM or SIGINT; returns the exit status."""
    try:  # the server's packages are an extra
        from inference.server.run import serve
        from inference.server.service import Service
    except ImportError as error:
        raise UserError(
            f"`headstart serve` needs {error.name}: pip install fastapi (Headstart's extra "
            "`serve`)."
        ) from error
    config = settings.serve
    if config.engine:
        return relay.run(settings)
    secret, admin = read_secret(config), admin_for(config)
    samples: Path | None = None
    with ExitStack() as stack:
        listening = stack.enter_context(bind("serve", config.host, config.port))
        prepare_process(settings.run)
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
        given = config.drafter
        if config.learn or config.sample:
            samples, given = prepare_learning(settings)
        engine, found = build_engine(settings, given)
        if samples is not None:
            require_trials(engine.decode)
        drafter, records, weights = found.name if found else "no drafter", None, ""
        if config.log_rejections:
            records = Path(config.records or settings.run.directory / RECORDS)
            hold(records)  # held until the stage ends
            weights = checkpoint_hash(found.checkpoint or "") if found else ""
        checkpoint = str(found.checkpoint.absolute()) if found and found.checkpoint else ""
        own = (secret, records, weights, admin, checkpoint)
        service = Service(config, engine, drafter, *own, samples=samples)

        def started() -> None:
            address = url_of(listening, bool(config.ssl_certfile))
            guarded = "with a token" if secret else "without a token"
            kept = f"; records go to {shown(records)}" if records else ""
            kept += f"; samples go to {shown(samples)}" if samples else ""
            where = f"{address}/v1 ({guarded}){kept}"
            print(f"serving '{service.name}' with {drafter} at {where}", flush=True)
            if config.learn and samples is not None:
                tokens = {ADMIN_VARIABLE: admin.value.decode()} if admin else {}
                tokens |= {TOKEN_VARIABLE: secret.value.decode()} if secret else {}
                # the certificate need not name this machine's own address
                whom = {"server": address, "verify": False}
                learner = start_learner(settings, samples.parent, whom, tokens)
                stack.callback(end_learner, learner)

        return serve(service, listening, started)


def require_trials(decode: DecodeConfig) -> None:
    """Raise `UserError` for settings under which no candidate can be tried beside the drafter: a
    learner would train one after another that the server refuses."""
    chain = f"decode.shape={decode.shape} decode.depth={decode.depth}"
    for given, what, instead in (
        (decode.ahead, "decode.ahead drafts with one drafter", "Leave it out"),
        (decode.compiles, "decode.compile compiles the step of one drafter", "Leave it out"),
        (
            decode.adaptive_settings().active,
            "decode.adaptive, given or from the drafter's decode.yaml, adapts the draft of one "
            "drafter",
            f"Leave it out, or give the draft ({chain}), which decode.yaml then does not choose",
        ),
    ):
        if given:
            raise UserError(
                f"serve.learn and serve.sample compare a candidate with the drafter side by side, "
                f"but {what}. {instead}; or serve without learning."
            )


def admin_for(config: ServeConfig) -> Secret | None:
    """The admin token, generated if the server starts a learner and none is given. Raises
    `UserError` if a separate learner needs one."""
    given = read_admin_secret(config)
    if given is None and config.sample:
        raise UserError(
            "serve.sample=true samples for a learner that changes the drafter, which needs an "
            f"admin token: set {ADMIN_VARIABLE}, for `headstart learn` too. `openssl rand -hex 24` "
            "makes one."
        )
    return Secret(secrets.token_hex(24).encode()) if given is None and config.learn else given


def prepare_learning(settings: Settings) -> tuple[Path, str]:
    """The folder of a learner's samples, held until the stage ends, and the first drafter: the last
    accepted one, if any."""
    from train.learning.cycle import TRAFFIC, last_taken
    from train.learning.journal import read_journal

    config = settings.serve
    folder = learn_folder(config.learn_folder, settings)
    samples, taken = folder / TRAFFIC, last_taken(read_journal(folder))
    hold(samples)
    if taken is not None:
        print(f"the drafter is {shown(taken)}, which learning has taken last", flush=True)
    return samples, str(taken or config.drafter)
