"""`headstart serve`: an OpenAI-compatible server for the target, sped up by a drafter
(docs/server.md)."""

from __future__ import annotations

import logging
from pathlib import Path

from heads.api.errors import UserError
from inference.manifest import checkpoint_hash
from inference.server.config import read_admin_secret, read_secret
from inference.server.front.server import bind, url_of
from inference.writers import hold
from scripts.config.schema import Settings
from scripts.run.process import prepare_process, shown
from scripts.stages.chat import build_engine


def run(settings: Settings) -> int:
    """Load, listen, and answer until SIGTERM or SIGINT; returns the exit status."""
    try:  # what they need is an extra
        from inference.server.run import serve
        from inference.server.service import Service
    except ImportError as error:
        raise UserError(
            f"`headstart serve` needs {error.name}: pip install fastapi (Headstart's extra "
            "`serve`)."
        ) from error
    config = settings.serve
    secret, admin = read_secret(config), read_admin_secret(config)
    listening = bind("serve", config.host, config.port)
    try:
        prepare_process(settings.run)
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
        engine, found = build_engine(settings, config.drafter)
        drafter, records, weights = found.name if found else "no drafter", None, ""
        if config.log_rejections:
            records = Path(config.records or settings.run.directory / "records")
            hold(records)  # until the stage ends
            weights = checkpoint_hash(found.checkpoint or "") if found else ""
        checkpoint = str(found.checkpoint or "") if found else ""
        service = Service(config, engine, drafter, secret, records, weights, admin, checkpoint)
    except BaseException:
        listening.close()
        raise

    def started() -> None:
        where = f"{url_of(listening, bool(config.ssl_certfile))}/v1"
        guarded = "with a token" if secret else "without a token"
        kept = f"; records go to {shown(records)}" if records else ""
        print(f"serving '{service.name}' with {drafter} at {where} ({guarded}){kept}", flush=True)

    return serve(service, listening, started)
