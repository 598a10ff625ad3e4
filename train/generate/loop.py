"""Answers all rows of a generation, a window of them in memory at a time.

In a window, prompts of similar length are decoded together (longest first). Conversations with
several turns to answer are answered in rounds: each answer is context of the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.integrity import require_unchanged
from inference.target.memory import BatchMemoryError
from inference.target.model import TargetModel
from inference.terminal import make_console
from train.data.answers import FAILED, INPUT, SKIPPED, PartWriter, StoredAnswer
from train.data.ingest import read_rows
from train.data.sources import Row, SkippedRow
from train.data.tables import BadRowError
from train.generate.backends.servers import ServerPool
from train.generate.backends.vllm import VllmBackend
from train.generate.config import GenerateJob
from train.generate.sampling import SamplingConfig, backend_of
from train.generate.target_facts import AnyTarget, TargetFacts
from train.generate.turns import Backend, Refused, Talk, keep_answer
from train.processes import own_device, terminable
from train.recording import PartRecords

logger = logging.getLogger(__name__)


class OwnDecoder:
    """The bundled decoder."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._told = False

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
        return sample_answers(self.engine, requests, self._tell)

    def _tell(self, rows: int, error: BatchMemoryError) -> None:
        """Say once that requests are decoded in fewer rows."""
        if not self._told:
            logger.warning(
                "prompts that do not fit into memory together are decoded in fewer rows at a time, "
                "here in %d: %s Here decode.batch_size is sampling.batch_size; the longest prompt "
                "decides what each row takes, and data.max_prompt_tokens leaves out longer ones",
                *(rows, error),
            )
        self._told = True


def load_target(job: GenerateJob) -> AnyTarget:
    """The target, with its weights only if our own decoder runs it."""
    if job.config.answers == "sample" and backend_of(job.decode) == "own" and job.backend is None:
        return TargetModel.load(own_device(job.target, job.state))
    return TargetFacts.load(job.target)


def open_backend(job: GenerateJob, target: AnyTarget) -> Backend:
    """The backend, ready to sample; raises `UserError` if it cannot be used."""
    if job.backend is not None:
        return job.backend
    if isinstance(target, TargetModel):
        drafter, records = None, job.config.records.enabled
        if job.config.drafter is not None:
            require_unchanged(Path(job.config.drafter))
            drafter = load_drafter(Path(job.config.drafter), target.info, target.weights)
        return OwnDecoder(Engine(target, drafter, job.decode, details=records))
    assert isinstance(job.decode, SamplingConfig)
    if backend_of(job.decode) == "vllm":
        return VllmBackend(job.decode, target, job.target)
    return ServerPool(job.decode, target, job.target, job.out)


def answer_rows(job: GenerateJob, target: AnyTarget, done: NDArray[np.bool_]) -> None:
    """Write an answer, a failure or a skip for each of this process's rows."""
    console = console_of(quiet=not job.state.is_main_process)
    already = int(done.sum())
    if already:
        console.print(f"continuing: {already} rows were finished before")
    rank, world = job.state.process_index, job.state.num_processes
    rows = read_rows(job.out / INPUT, rank, world, done)
    counted, speed = TextColumn("{task.description}"), TextColumn("{task.fields[speed]}")
    columns = (counted, BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn())
    progress = Progress(*columns, console=console)
    share = "" if world == 1 else f" (process 1 of {world})"
    left = int((~done[rank::world]).sum())
    progress.add_task(f"answers{share}", total=left, speed="")
    answering = Answering(job, target, progress)
    writer = answering.writer
    try:
        with terminable(), writer, progress:
            answering.run(rows)
    except (KeyboardInterrupt, SystemExit):
        console.print(
            f"interrupted: {writer.written} rows of this run are kept in '{job.out}'; the same "
            "command continues"
        )
        raise


class Answering:
    """One process's work on its rows."""

    def __init__(self, job: GenerateJob, target: AnyTarget, progress: Progress) -> None:
        self.job, self.target, self.progress = job, target, progress
        self.tokens = self.seen = 0
        self._backend: Backend | None = None
        self._records: PartRecords | None = None
        config = job.config
        self.writer = PartWriter(job.out, config.flush_rows, config.flush_seconds, self._before)

    @property
    def backend(self) -> Backend:
        """The backend, opened at the first request: rows without requests need no engine."""
        if self._backend is None:
            job, config = self.job, self.job.config
            self._backend = backend = open_backend(job, self.target)
            if config.records.enabled:
                assert isinstance(backend, OwnDecoder) and config.drafter is not None
                given = (config.records, backend.engine, config.drafter)
                self._records = PartRecords(job.out, *given, job.state.num_processes)
        return self._backend

    def _before(self, name: str, answers: list[StoredAnswer]) -> None:
        if self._records is not None:
            self._records.write(name, answers)

    def run(self, rows: Iterator[Row | SkippedRow]) -> None:
        while window := list(islice(rows, self.job.config.window_rows)):
            talks = self._start(window)
            while talks:
                talks = self._round(talks)
            self.seen += len(window)
            self.job.watch("answer", self.seen)

    def _start(self, window: list[Row | SkippedRow]) -> dict[int, Talk]:
        """The rows of a window that need answers, by index; other rows are written at once."""
        talks: dict[int, Talk] = {}
        for row in window:
            try:
                if isinstance(row, SkippedRow):
                    raise BadRowError(row.reason)
                if self.job.config.answers == "dataset":
                    self._write(keep_answer(row, self.target, self.job.data))
                else:
                    talks[row.index] = Talk(row, self.target, self.job.data, self.job.decode)
            except (BadRowError, UserError) as error:
                self._write(
                    StoredAnswer(row.id, row.index, row.domain, status=SKIPPED, reason=str(error))
                )
        return talks

    def _round(self, talks: Mapping[int, Talk]) -> dict[int, Talk]:
        """Answer one turn of each row; returns the rows that have more turns."""
        requests: list[Request] = []
        for talk in talks.values():
            try:
                requests.append(talk.request())
            except (BadRowError, UserError) as error:
                self._write(talk.answer(SKIPPED, str(error)))
        requests.sort(key=lambda request: (-len(request.tokens), request.index))
        going_on: dict[int, Talk] = {}
        for outcome in self.backend.sample(requests) if requests else ():
            talk = talks[outcome.request.index]
            if isinstance(outcome, Refused):
                self._write(talk.answer(FAILED, outcome.reason))
                continue
            self.tokens += len(outcome.tokens)
            try:
                talk.take(outcome)
                done = talk.done
            except BadRowError:
                done = True  # its tokens leave no room for the next turn; its own turns are good
            if self._records is not None:
                self._records.take(talk, outcome)
            if done:
                self._write(talk.answer())
            else:
                going_on[outcome.request.index] = talk
        return going_on

    def _write(self, answer: StoredAnswer) -> None:
        self.writer.add(answer)
        task = self.progress.tasks[-1]
        rate = self.tokens / task.elapsed if task.elapsed else 0.0
        self.progress.update(task.id, advance=1, speed=f"{rate:,.0f} tokens/s" if rate else "")


def sample_answers(
    engine: Engine,
    requests: Iterable[Request],
    tell: Callable[[int, BatchMemoryError], None] = lambda rows, error: None,
) -> Iterator[Completion | Refused]:
    """Decode all requests, in finishing order; those that the engine refuses become `Refused`. The
    longest come first: if they do not fit into memory together, some of them are decoded in fewer
    rows before the others, and `tell` is called with these rows and the reason."""
    waiting = {request.index: request for request in requests}
    fewer, count, longest = engine, len(waiting), engine.decode.batch_size
    while waiting:
        asked = list(islice(waiting.values(), count))
        rows = min(fewer.decode.batch_size, len(asked))
        try:
            for completion in fewer.run(asked):
                del waiting[completion.request.index]
                yield completion
        except UserError as error:
            if isinstance(error, BatchMemoryError) and rows > 1:
                if fewer is engine:  # more of them each time, since new buffers take time
                    count, longest = longest, 2 * longest
                rows = max(1, min(error.fits, rows - 1))
                fewer = copy(engine)  # it shares the buffers, so that only one set is in memory
                fewer.decode = replace(engine.decode, batch_size=rows)
                tell(rows, error)
                continue
            # One of them is at fault, but the engine does not reliably say which. So they are tried
            # one by one up to that one.
            yield from _until_refused(engine, waiting)
        fewer, count = engine, len(waiting)


def _until_refused(engine: Engine, waiting: dict[int, Request]) -> Iterator[Completion | Refused]:
    for index, request in list(waiting.items()):
        try:
            completions = list(engine.run([request]))
        except UserError as error:
            del waiting[index]
            yield Refused(request, str(error))
            return
        del waiting[index]
        yield from completions


def console_of(quiet: bool = False) -> Console:
    """The console for progress and results."""
    return make_console(stderr=True, quiet=quiet, markup=False, highlight=False)
