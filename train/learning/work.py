"""The heavy parts of a cycle, each in a separate process at low priority: weights from records, a
short training from the drafter that serves, tau on held-out traffic.

A process leaves its result in files, so that finished work is found again after a kill: feedback
and training continue their own folders. A process ends with the learner that started it.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from heads.api.checkpoint import build_config, load_drafter, read_config
from heads.api.errors import UserError
from heads.api.system_errors import FULL, WORDS
from heads.api.target_info import TargetInfo
from inference.decoding.config import DecodeConfig
from inference.decoding.draft_file import write_draft
from inference.decoding.requests import Completion
from inference.folders import CHECKPOINT, copy_plain, replace_part
from inference.manifest import checkpoint_hash
from inference.measure.metrics import TauEstimate
from inference.measure.prompts import load_prompts, to_requests
from inference.measure.run import tau_in_rows_that_fit
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.verifications import RECORDS
from train.config import EVAL_BATCH, TrainConfig
from train.engines.base import EngineConfig
from train.features.config import FeaturesConfig
from train.feedback.build import build
from train.feedback.config import FeedbackConfig
from train.learning.comparison import conversations, paired
from train.learning.config import LearnConfig
from train.learning.traffic import MEASURING, VALIDATION
from train.optim import OptimConfig, ScheduleConfig
from train.refresh import RefreshConfig
from train.run import train

logger = logging.getLogger(__name__)
FEEDBACK, TRAINING = "feedback", "train"
"""Folders of a cycle."""
LOOK_SECONDS = 0.5


class CrashError(Exception):
    """A process of a cycle has ended without a result."""


@dataclass(frozen=True)
class CycleSettings:
    """The settings of all cycles. folder: the learner's; decode: draft, sampling and length with
    which tau is measured."""

    folder: Path
    learn: LearnConfig
    target: TargetConfig
    train: TrainConfig
    features: FeaturesConfig
    feedback: FeedbackConfig
    engine: EngineConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    decode: DecodeConfig

    def cycle(self, number: int) -> Path:
        """The folder of a cycle's work, which is removed at its end."""
        return self.folder / "cycles" / f"{number:04d}"

    def candidate(self, number: int) -> Path:
        """The checkpoint that a cycle produces."""
        return self.folder / "drafters" / f"{number:04d}"


# The parts


def weigh(settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    """Write the cycle's answers with weights; returns their figures. start: the drafter that
    serves, which names its target."""
    folder = settings.cycle(number)
    info = TargetInfo.from_dict(read_config(start)["target"])
    config = replace(settings.feedback, sequences=True, records=(), answers=())
    made = build([folder / RECORDS], [], folder / FEEDBACK, config, info=info)["feedback"]
    return {key: made[key] for key in ("documents", "verifications", "errors")}


def refresh(settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    """Train from `start` on the cycle's answers and keep the candidate; returns its checkpoint, the
    hash of its weights, the cost of the training and its learning rate."""
    folder, out = settings.cycle(number), settings.candidate(number)
    content = read_config(start)
    begin = RefreshConfig(init_from=str(start), other_target=True)
    config = replace(
        settings.train, refresh=begin, prompts=(str(folder / VALIDATION),), domains=(), goal=0.0
    )
    made = train(
        content["kind"],
        build_config(content["kind"], content["config"]),
        target=settings.target,
        data=folder / FEEDBACK,
        out=folder / TRAINING,
        config=config,
        features=settings.features,
        engine=settings.engine,
        optim=settings.optim,
        schedule=settings.schedule,
        decode=settings.decode,
    )
    with replace_part(out, CHECKPOINT) as fresh:
        copy_plain(folder / TRAINING / made["checkpoint"], fresh)
        write_draft(fresh, asdict(settings.decode))
    cost = {"steps": made["steps"], "tokens": made["tokens"], "seconds": made["seconds"]}
    facts = {"checkpoint": str(out), "weights_sha256": checkpoint_hash(out)}
    return {**facts, **cost, "rate": settings.optim.lr}


def measure(settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    """tau of the drafter that serves and of the candidate on held-out traffic, and the result of
    comparing both on each conversation (`paired`). Raises `UserError` for a candidate with weights
    that are not finite, and for one that does not fit the target."""
    candidate = settings.candidate(number)
    prompts = load_prompts(settings.cycle(number) / MEASURING)
    target = TargetModel.load(settings.target)
    tokens = settings.train.eval_tokens
    decode = replace(settings.decode, batch_size=settings.train.eval_batch, max_new_tokens=tokens)
    limit = target.info.max_position_embeddings
    requests = to_requests(prompts, target.tokenizer, decode, capacity=limit, overlong="skip")

    def decoded(checkpoint: Path) -> tuple[TauEstimate, dict[int, float]]:
        """tau, and each prompt's acceptance."""
        drafter = load_drafter(checkpoint, target.info, target.weights, changed_target=True)
        answers: list[Completion] = []
        found, _ = tau_in_rows_that_fit(target, drafter, requests, decode, EVAL_BATCH, answers)
        accepted = {
            one.request.index: sum(record.accepted for record in one.passes) / len(one.passes)
            for one in answers
            if one.passes
        }
        return found, accepted

    (before, own), (after, new) = decoded(start), decoded(candidate)
    both = sorted(own.keys() & new.keys())
    if not both:
        raise UserError("no held-out prompt was verified with both drafters")
    acceptances = [own[n] for n in both], [new[n] for n in both]
    asked = {request.index: request.tokens for request in requests}
    units = conversations([asked[n] for n in both])
    shown = paired(*acceptances, len(before.unconditional), settings.learn.error_rate, units)
    tau = {"before": asdict(before), "after": asdict(after)}
    return {"prompts": len(requests), **tau, "paired": asdict(shown)}


# In a separate process

Part = Callable[[CycleSettings, int, Path], dict[str, Any]]
"""A part of a cycle: (settings, number of the cycle, the drafter that serves) -> figures."""


def in_own_process(part: Part, settings: CycleSettings, number: int, start: Path) -> dict[str, Any]:
    """Run a part at low priority and pass on its `UserError`, or `OSError` for a full disk. Raises
    `CrashError` if it ends without a result."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    arguments = (part, settings, number, start, os.getpid(), sending)
    process = context.Process(target=_run, args=arguments, daemon=True)
    process.start()
    sending.close()
    try:
        how, value = receiving.recv()
    except EOFError:
        process.join()
        words = f"the process that was to {part.__name__} ended with status {process.exitcode}"
        raise CrashError(words) from None
    except BaseException:  # a signal that this process alone has got
        process.terminate()
        raise
    finally:
        receiving.close()
        process.join()
    if how == "full":
        raise OSError(errno.ENOSPC, value)
    if how != "done":
        raise (UserError if how == "refused" else CrashError)(value)
    found: dict[str, Any] = value
    return found


def _run(
    part: Part, settings: CycleSettings, number: int, start: Path, learner: int, out: Connection
) -> None:
    end_with(learner)
    with suppress(OSError):
        os.nice(max(0, settings.learn.nice - os.nice(0)))
    answer: tuple[str, Any]
    try:
        answer = ("done", part(settings, number, start))
    except UserError as error:
        answer = ("full" if is_full(error) else "refused", str(error))
    except Exception as error:
        logger.exception("part '%s' of cycle %d failed", part.__name__, number)
        answer = ("full" if is_full(error) else "failed", f"{type(error).__name__}: {error}")
    out.send(answer)
    out.close()


def end_with(parent: int) -> None:
    """Make this process end once `parent`, which started it, has ended, also by kill -9."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="headstart-parent", daemon=True).start()


def is_full(error: BaseException) -> bool:
    """Whether an error, or its cause, says that the disk is full. Libraries written in other
    languages raise their own errors, with the system's words; ours for people have ours."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    words = [text for number in FULL for text in (os.strerror(number), WORDS[number][0])]
    if any(text.lower() in str(error).lower() for text in words):
        return True
    return error.__cause__ is not None and is_full(error.__cause__)
