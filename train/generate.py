"""`headstart generate`: the target answers prompts, and its answers become the training data.

Answers are sampled by our own decoder, optionally sped up by a drafter, which changes nothing in them. An
answer depends on its prompt, the sampling settings and the prompt's own seed: not on the number of processes,
nor on the order or the batch. (The last holds as far as the target's arithmetic does: in float32 a batch may
round differently by some 1e-6, which can turn a near-tie; in bfloat16 near-ties are common. Continuing after
a kill repeats nothing that was written, so a finished folder is consistent.)

Several processes (`accelerate launch`, `torchrun`) share the rows; each writes its own part files, see
`train/data/answers.py`. Running the same command again continues; another configuration in the same folder is
refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heads.api.checkpoint import load_drafter
from heads.api.errors import UserError, suggest
from inference.engine import DecodeConfig, Engine, Request
from inference.loading import TargetConfig
from inference.manifest import MANIFEST_FILE, read_manifest, verify_file, write_json, write_manifest
from inference.target import TargetModel
from train.data.answering import Refused, keep_answer, read_rows, request_of, sample_answers, sampled_answer
from train.data.answers import (
    DONE,
    FAILED,
    SETTINGS,
    SKIPPED,
    Answer,
    PartWriter,
    clear_output,
    merge_parts,
    output_lock,
    read_done,
    remove_parts,
)
from train.data.sources import DataConfig, Row, SkippedRow
from train.data.tables import BadRowError
from train.processes import join_processes, on_main, own_device, terminable

ANSWERS = ("sample", "dataset")
SHOWN_REASONS = 5


@dataclass(frozen=True)
class GenerateConfig:
    """Where answers come from and how they are written."""

    answers: str = "sample"
    """sample: the target answers. dataset: keep the dataset's own assistant turns (or spans) and only
    tokenise them."""
    drafter: str | None = None
    """Folder of a drafter checkpoint for this target that speeds decoding up; None decodes plainly. The
    answers are the same."""
    shard_rows: int = 4096
    """Most answers in one shard of the final output."""
    flush_rows: int = 256
    """Finished answers that are written together; a kill loses at most these, and they are generated
    again."""
    flush_seconds: float = 30.0
    """Longest time, in seconds, that a finished answer waits to be written (checked as answers finish)."""
    overwrite: bool = False
    """Replace what a different configuration left in the output folder, instead of refusing. The same one is
    still continued."""

    def __post_init__(self) -> None:
        if self.answers not in ANSWERS:
            raise UserError(
                f"generate.answers '{self.answers}' is not known.{suggest(self.answers, ANSWERS)}"
            )
        for name in ("shard_rows", "flush_rows"):
            if getattr(self, name) < 1:
                raise UserError(f"generate.{name} must be at least 1; given: {getattr(self, name)}.")


@dataclass(frozen=True)
class Job:
    """What was asked for, and this process's place among the others."""

    config: GenerateConfig
    data: DataConfig
    decode: DecodeConfig
    target: TargetConfig
    out: Path
    state: PartialState


def generate(
    config: GenerateConfig,
    data: DataConfig,
    decode: DecodeConfig,
    target: TargetConfig,
    out: Path,
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Answer every row of `data` and return the manifest written to `out`; continues an interrupted run of
    the same settings.

    Call it in every process of a distributed launch. Raises `UserError` for an unusable source or target, for
    a folder that holds another configuration's answers, or when nothing at all could be answered.
    """
    job = Job(config, data, decode, target, out, join_processes(target))
    state = job.state
    with ExitStack() as stack:
        on_main(state, lambda: stack.enter_context(output_lock(out, exclusive=True)))
        if not state.is_main_process:
            stack.enter_context(output_lock(out, exclusive=False))
        rows, total, fingerprint = read_rows(data, state.process_index, state.num_processes)
        model = TargetModel.load(own_device(target, state))
        settings = settings_of(job, model, fingerprint)
        done = set(on_main(state, lambda: prepare_output(out, settings, config.overwrite)))
        manifest = on_main(state, lambda: finished_manifest(out))
        if manifest is None:
            answer_rows(job, model, [row for row in rows if row.index not in done], already=len(done))
            gather_object([state.process_index])  # returns once every process has written its last part
            manifest = on_main(state, lambda: finish(job, model, settings, total, provenance))
        if state.is_main_process:
            _console().print(summary(manifest, out))
        return manifest


# ---- the input, and whether the output folder belongs to it ------------------------------------------------


def settings_of(job: Job, model: TargetModel, fingerprint: str) -> dict[str, Any]:
    """Everything an answer depends on. Batch size, drafter, processes and paths are absent: they may change
    between resumptions."""
    template = str(model.tokenizer.chat_template or "")
    settings: dict[str, Any] = {
        "answers": job.config.answers,
        "target": {
            "revision": model.info.revision,
            "tokenizer_hash": model.info.tokenizer_hash,
            "chat_template": hashlib.sha256(template.encode()).hexdigest()[:32],
        },
        "data": {"rows": fingerprint, "turn": job.data.turn, "max_prompt_tokens": job.data.max_prompt_tokens},
    }
    if job.config.answers == "sample":
        settings["target"]["dtype"] = job.target.dtype
        settings["sampling"] = sampling_of(job.decode)
    return settings


def sampling_of(decode: DecodeConfig) -> dict[str, Any]:
    """The part of a decode configuration that decides the text."""
    return {
        **json.loads(json.dumps(asdict(decode.sampling()))),  # as it is read back: lists, not tuples
        "max_new_tokens": decode.max_new_tokens,
        "seed": decode.seed,
    }


def prepare_output(out: Path, settings: Mapping[str, Any], overwrite: bool) -> list[int]:
    """Make `out` ready for `settings` and return the indices of rows that are done already.

    Raises `UserError` naming the differences when the folder holds another configuration's answers, unless
    `overwrite`.
    """
    path = out / SETTINGS
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        differences = _differences(stored, settings)
        if differences and not overwrite:
            raise UserError(
                f"'{out}' holds answers of another configuration: {'; '.join(differences)}. Give another "
                "output folder, restore the "
                "configuration to continue, or set overwrite=true to replace them."
            )
        if differences:
            clear_output(out)
    elif (out / MANIFEST_FILE).exists():
        raise UserError(
            f"'{out}' belongs to another stage: it has a {MANIFEST_FILE} that generation did not write. Give "
            "another folder."
        )
    write_json(path, settings)
    return read_done(out)


def finished_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest of a folder whose generation is complete and undamaged, None when there is work left."""
    if not (out / MANIFEST_FILE).is_file():
        return None
    manifest = read_manifest(out, "generate")
    for entry in manifest["shards"]:
        verify_file(out, entry)
    remove_parts(out)
    return manifest


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            line
            for key in sorted({*old, *new})
            for line in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    shown = (f"{path} was {_short(old)} and is now {_short(new)}",)
    return [] if old == new else list(shown)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 20 else text[:14] + '..."'


# ---- answering ---------------------------------------------------------------------------------------------


def answer_rows(job: Job, model: TargetModel, rows: Sequence[Row | SkippedRow], already: int) -> None:
    """Write an answer, a failure or a skip for each row to this process's part files; an interruption writes
    what is finished."""
    writer = PartWriter(job.out, job.config.flush_rows, job.config.flush_seconds)
    console = _console(quiet=not job.state.is_main_process)
    if already:
        console.print(f"continuing: {already} rows were finished before")
    try:
        with terminable(), writer, _progress(console) as progress:
            waiting = _render_rows(job, model, rows, writer, progress)
            _sample_rows(job, model, waiting, writer, progress)
    except (KeyboardInterrupt, SystemExit):
        console.print(
            f"interrupted: {writer.written} rows of this run are kept in '{job.out}'; the same command "
            "continues"
        )
        raise


def _render_rows(
    job: Job, model: TargetModel, rows: Sequence[Row | SkippedRow], writer: PartWriter, progress: Progress
) -> dict[int, tuple[Row, Request]]:
    """Requests by index for all rows that need an answer; the others are written at once."""
    waiting: dict[int, tuple[Row, Request]] = {}
    task = progress.add_task("rendering prompts", total=len(rows), speed="")
    for row in rows:
        try:
            if isinstance(row, SkippedRow):
                raise BadRowError(row.reason)
            if job.config.answers == "dataset":
                writer.add(keep_answer(row, model))
            else:
                waiting[row.index] = (row, request_of(row, model, job.data, job.decode))
        except (BadRowError, UserError) as error:
            writer.add(Answer(row.id, row.index, row.domain, status=SKIPPED, reason=str(error)))
        progress.advance(task)
    progress.remove_task(task)
    return waiting


def _sample_rows(
    job: Job,
    model: TargetModel,
    waiting: Mapping[int, tuple[Row, Request]],
    writer: PartWriter,
    progress: Progress,
) -> None:
    """Sample an answer for each request and write it."""
    if not waiting:
        return
    drafter = None
    if job.config.drafter is not None:
        drafter = load_drafter(Path(job.config.drafter), model.info, model.weights)
    engine = Engine(model, drafter, job.decode)
    share = "" if job.state.num_processes == 1 else f" (process 1 of {job.state.num_processes})"
    task = progress.add_task(f"answers{share}", total=len(waiting), speed="")
    tokens = 0
    for outcome in sample_answers(engine, [request for _, request in waiting.values()]):
        row, request = waiting[outcome.request.index]
        if isinstance(outcome, Refused):
            writer.add(
                Answer(row.id, row.index, row.domain, seed=request.seed, status=FAILED, reason=outcome.reason)
            )
        else:
            writer.add(sampled_answer(row, outcome))
            tokens += len(outcome.tokens)
        elapsed = progress.tasks[-1].elapsed or 0.0
        progress.update(task, advance=1, speed=f"{tokens / elapsed:,.0f} tokens/s" if elapsed else "")


# ---- the end -----------------------------------------------------------------------------------------------


def finish(
    job: Job,
    model: TargetModel,
    settings: Mapping[str, Any],
    total: int,
    provenance: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Merge all part files into shards, write the manifest, remove the parts. Raises `UserError` when nothing
    was answered."""
    merged = merge_parts(job.out, total, job.config.shard_rows)
    if not merged.counts[DONE]:
        raise UserError(f"none of the {total} rows could be answered: {_reasons(merged.reasons)}.")
    content = {
        "round": 0,
        "target": model.info.to_dict(),
        "sampling": settings.get("sampling", {}),
        "data": {**asdict(job.data), "answers": job.config.answers, "fingerprint": settings["data"]["rows"]},
        "counts": merged.counts,
        "reasons": merged.reasons,
        "shards": merged.shards,
        "failures": merged.failures,
    }
    write_manifest(job.out, "generate", content, provenance)
    remove_parts(job.out)
    return read_manifest(job.out, "generate")


def summary(manifest: Mapping[str, Any], out: Path) -> str:
    """One or two lines for people: done + failed + skipped = input, and the most frequent reasons."""
    counts = manifest["counts"]
    line = (
        f"{counts['done']} done + {counts['failed']} failed + {counts['skipped']} skipped = "
        f"{counts['input']} input rows; "
        f"{counts['tokens']} answer tokens in {len(manifest['shards'])} shards under '{out}'"
    )
    return line + (f"\nnot answered: {_reasons(manifest['reasons'])}" if manifest["reasons"] else "")


def _reasons(reasons: Mapping[str, int]) -> str:
    shown = [f"{reason} ({count} rows)" for reason, count in list(reasons.items())[:SHOWN_REASONS]]
    return "; ".join(shown) + ("; ..." if len(reasons) > SHOWN_REASONS else "")


def _console(quiet: bool = False) -> Console:
    return Console(stderr=True, quiet=quiet, markup=False, highlight=False)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )
