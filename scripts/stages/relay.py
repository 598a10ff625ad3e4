"""`headstart serve serve.engine=URL`: a relay in front of an engine, which samples answers for a
learner (docs/learning.md). It loads no model."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from heads.api.checkpoint import read_config
from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.server.config import read_secret
from inference.server.front.server import bind, url_of
from inference.server.front.site import Site
from inference.server.front.tls import server_context
from inference.verifications import RecordFacts, target_facts
from inference.writers import hold
from scripts.config.schema import Settings
from scripts.run import drafters
from scripts.run.process import prepare_process, shown
from scripts.stages.learn import end_learner, learn_folder, start_learner

ROWS = 1024
"""Requests that an engine may be answering at a time: bodies are held for so many."""


def run(settings: Settings) -> int:
    """Listen and relay until SIGTERM or SIGINT; returns the exit status."""
    # what the server's package needs is an extra, whose absence `headstart serve` has reported
    from inference.server.relay import OPEN_PATHS, Relay, run_relay
    from inference.server.samples import TrafficSamples
    from train.learning.cycle import TRAFFIC

    config = settings.serve
    if not (config.learn or config.sample):
        raise UserError(
            "serve.engine passes requests on and samples answers for a learner: add "
            "serve.learn=true, which starts one, or serve.sample=true for one of your own."
        )
    found = drafters.find_trained("serve.drafter", config.drafter, settings.run)
    secret = read_secret(config)
    info = TargetInfo.from_dict(read_config(found.folder)["target"])
    folder = learn_folder(config.learn_folder, settings)
    with ExitStack() as stack:
        listening = stack.enter_context(bind("serve", config.host, config.port))
        prepare_process(settings.run)
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        hold(folder / TRAFFIC)  # until the stage ends
        size = int(config.learn_megabytes * 1e6)
        facts: RecordFacts = {"target": target_facts(info)}
        samples = TrafficSamples(folder / TRAFFIC, facts, size, config.learn_share)
        relay = Relay(config.engine, samples, config.domain)
        tls = server_context("serve", config.ssl_certfile, config.ssl_keyfile)
        site = Site(relay, config.limits(ROWS), secret, OPEN_PATHS, tls, relay.refused)

        def started() -> None:
            where = f"{url_of(listening, bool(config.ssl_certfile))}/v1"
            kept = f"samples go to {shown(folder / TRAFFIC)}"
            print(f"relaying at {where} to {relay.base}; {kept}", flush=True)
            if config.learn:
                whom = {"drafter": str(found.folder.resolve())}
                stack.callback(end_learner, start_learner(settings, folder, whom, {}))

        run_relay(relay, site, listening, config, started)
    return 0
