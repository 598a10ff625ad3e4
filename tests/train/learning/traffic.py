"""Real samples of a micro target's traffic, a drafter for it, and a stand-in for the server that a
learner talks to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from heads.api.checkpoint import build_config, load_drafter, new_drafter, save_drafter
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.session import Session
from inference.server.samples import SampledAnswer, TrafficSamples
from inference.server.trial import ArmAnswer, ArmState, TrialState
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.verifications import record_facts
from tests.inference.tokenizers import save_micro_target
from tests.train.micro_run import settings as train_settings
from train.feedback.config import FeedbackConfig
from train.learning.config import LearnConfig
from train.learning.work import CycleSettings

ANSWER_TOKENS = 16
CLIENTS = 4


def prepare(folder: Path) -> Path:
    """Write target/, drafter/ and traffic/ (60 answers of 4 clients) into `folder`."""
    save_micro_target(folder / "target")
    target = TargetModel.load(TargetConfig(str(folder / "target"), device="cpu", dtype="float32"))
    config = build_config("distilled", {"from_target_layers": [0, 1]})
    fresh = new_drafter("distilled", config, target.info, target.weights, seed=0)
    torch.manual_seed(
        1
    )  # of the target itself, and then worse, so that there is something to learn
    worse = {
        name: value + 0.4 * value.std() * torch.randn_like(value) if value.ndim > 1 else value
        for name, value in fresh.state_dict().items()
    }
    save_drafter(fresh, folder / "drafter", target.info, worse)
    drafter = load_drafter(folder / "drafter", target.info, target.weights)
    engine = Engine(target, drafter, DecodeConfig(batch_size=16, depth=3))
    samples = TrafficSamples(folder / "traffic", record_facts(engine, "d"), 10**9, 1.0)
    for answer in decode(engine, 60):
        samples.add(answer)
    samples.flush()
    return folder


def decode(engine: Engine, count: int) -> list[SampledAnswer]:
    """Answers to random prompts, with the details of their passes."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 5)
    drawn = torch.randint(10, engine.target.info.vocab_size, shape, generator=generator).tolist()
    found = []
    with Session(engine, 64, lambda *_: None, details=True) as session:
        waiting = [Request(n, tuple(p), n, ANSWER_TOKENS) for n, p in enumerate(drawn)]
        while waiting or session.unfinished:
            while waiting and session.free:
                session.add(waiting.pop())
            found += session.step()
    return [
        SampledAnswer(
            f"s{one.request.index}",
            "d",
            f"client {one.request.index % CLIENTS}",
            one.request.tokens,
            one.tokens,
            one.passes,
            0.0,
            one.finish,
        )
        for one in found
    ]


def cycle_settings(place: Path, folder: Path, **learn: Any) -> CycleSettings:
    """A short refresh. place: of `prepare`; folder: of the learner."""
    given = train_settings(
        place, kind="distilled", max_steps=8, eval_every=4, save_every=8, lr=5e-3
    )
    own = {
        "least_tokens": 100,
        "look_seconds": 0.01,
        "pause_seconds": 0.01,
        "free_megabytes": 0.0,
        "held_out": 0.4,
        "most_pairs": 200,
        "nice": 0,
        **learn,
    }
    return CycleSettings(
        folder=folder,
        learn=LearnConfig(**own),
        target=given["target"],
        train=replace(given["config"], prompts=()),
        features=given["features"],
        feedback=FeedbackConfig(token_weights=True),
        engine=given["engine"],
        optim=given["optim"],
        schedule=given["schedule"],
        decode=given["decode"],
    )


class StandIn:
    """A server's drafters without a server. gain: what the candidate's answers accept more of per
    pass; answers: of each drafter in a trial; swaps: every drafter that came to serve; lost: a
    restart forgets the trial."""

    tries = True

    def __init__(self, drafter: Path, gain: float = 1.0, answers: int = 200) -> None:
        self.drafter, self.gain, self.answers = str(drafter), gain, answers
        self.swaps: list[str] = []
        self.trials: list[str] = []
        self.running: str | None = None

    def current(self) -> str:
        return self.drafter

    def install(self, checkpoint: Path) -> None:
        self.drafter = str(checkpoint)
        self.swaps.append(str(checkpoint))

    def describe(self) -> dict[str, str]:
        return {}

    def start_trial(self, checkpoint: Path, share: float) -> None:
        assert self.running is None and 0 < share < 1
        self.running = str(checkpoint)
        self.trials.append(self.running)

    def trial(self) -> TrialState | None:
        if self.running is None:
            return None

        def arm(name: str, accepted: int) -> ArmState:
            count = self.answers
            answers = tuple(ArmAnswer("d", accepted, 10) for _ in range(count))
            tokens = (10 + accepted) * count, accepted * count
            return ArmState(name, count, 10 * count, *tokens, answers)

        plain = 10
        own = arm(self.drafter, plain), arm(self.running, round(plain + 10 * self.gain))
        return TrialState(*own, 0.5, 10, 3)

    def end_trial(self, keep: bool) -> None:
        assert self.running is not None
        if keep:
            self.install(Path(self.running))
        self.running = None

    def restart(self, drafter: Path) -> None:
        """As after kill -9: the trial is gone, and the drafter is the one it is started with."""
        self.running, self.drafter = None, str(drafter)
