"""`headstart generate`: the target answers prompts, and its answers become the training data.

Rows come from one dataset or a mixture. They are read once, and rows that repeat an earlier row or
a held-out prompt are left out (`train/data/ingest.py`). Answers are sampled by our own decoder,
optionally sped up by a drafter, by servers that return token ids, or by vLLM in this process. With
our decoder, an answer depends on its prompt, the sampling settings and the prompt's own seed, and
with an acceptance rule other than match above temperature 0 on the drafter. It does not depend on
processes, order or batch, as far as the target's arithmetic allows: in float32 a batch may round
differently by some 1e-6, which can turn a near-tie; in bfloat16 near-ties are common.

Several processes (`accelerate launch`, `torchrun`) share the rows; each writes its own part files,
see `train/data/answers.py`. Running the same command again continues the generation and repeats
nothing that was written. Another configuration in the same folder is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from numpy.typing import NDArray
from rich.console import Console

from heads.api.errors import UserError
from heads.api.reading import read_json, read_object
from inference.decoding.config import DecodeConfig
from inference.folders import discard, replace_part
from inference.manifest import (
    MANIFEST_FILE,
    FileEntry,
    file_entry,
    verify_file,
    write_json,
    write_manifest,
)
from inference.measure.prompts import Prompt
from inference.target.loading import TargetConfig
from inference.verifications import RECORDS
from inference.writers import only_writer
from train.data import answers
from train.data.answers import DONE, INPUT, RESERVED, SETTINGS, USES, AnswersManifest, read_answers
from train.data.config import DataConfig
from train.data.dedup.duplicates import HELD_OUT, REASONS
from train.data.held_out import load_held_out
from train.data.ingest import Input, ingest, is_input_of, remove_rows, require_own_input
from train.data.masks import mask_report
from train.data.pack import weighted_documents
from train.data.reserve import LEAST, VERDICTS, Decode
from train.data.states import STATES, settle
from train.generate.config import GenerateConfig, GenerateJob
from train.generate.loop import answer_rows, console_of, load_target
from train.generate.sampling import backend_of, kept_layers, sampling_of
from train.generate.target_facts import AnyTarget
from train.generate.turns import Backend
from train.memory import give_back_freed_memory
from train.processes import join_processes, on_main
from train.recording import count_records, drop_unanswered, require_drafts

SHOWN_REASONS = 5
REPORTED_DOCUMENTS = 256
SHOWN_ROWS = 25
"""Blocks of input after which the number of rows is printed."""


def generate(
    config: GenerateConfig,
    data: DataConfig,
    decode: DecodeConfig,
    target: TargetConfig,
    out: Path,
    provenance: Mapping[str, object] | None = None,
    *,
    backend: Backend | None = None,
    watch: answers.Watch = answers.ignore,
    accepted: Callable[[], None] = lambda: None,
) -> AnswersManifest:
    """Answer every row of `data` and return the manifest in `out`; continues an interrupted run of
    the same settings. Call it in every process of a launch. backend: samples instead of the one in
    `decode`; watch: called with the progress of each phase; accepted: called once `out` is known to
    be of these settings, before anything in it is replaced. Raises `UserError` for an unusable
    source or target, for another configuration's folder, or if nothing could be answered."""
    if config.records.enabled:
        require_drafts(decode, config.drafter)
    job = GenerateJob(config, data, decode, target, out, join_processes(target), backend, watch)
    state = job.state
    with ExitStack() as stack:
        on_main(state, lambda: stack.enter_context(only_writer(out)))
        if not state.is_main_process:
            stack.enter_context(only_writer(out))
        on_main(state, lambda: refuse_foreign(out))
        model = load_target(job)
        read = on_main(state, lambda: read_accepted(job, model))
        settings = settings_of(job, model, read)
        done = on_main(state, lambda: prepare_output(job, settings, read.total, accepted))
        manifest = on_main(state, lambda: finished_manifest(out))
        if manifest is None:
            # a finished folder has lost its rows
            on_main(state, lambda: read_input(job, model, out / INPUT, again=True))
            give_back_freed_memory()
            answer_rows(job, model, done)
            give_back_freed_memory()
            # returns once every process has written its last part
            gather_object([state.process_index])
            manifest = on_main(state, lambda: finish(job, model, settings, read, provenance))
            if state.is_main_process:
                show_sample(manifest, out, model)
        if state.is_main_process:
            console_of().print(summary(manifest, out), soft_wrap=True)
        return manifest


def show_sample(manifest: AnswersManifest, out: Path, target: AnyTarget) -> None:
    """Print the supervised share of the answers, and a coloured sample in which a wrong chat
    template shows."""
    shards = [out / entry["file"] for entry in manifest["shards"][:1]]
    rows = islice(weighted_documents(shards, target.info), REPORTED_DOCUMENTS)
    documents = [(tokens, spans) for tokens, spans, _ in rows]
    if any(spans for _, spans in documents):
        report = mask_report(documents, target.tokenizer)
        Console(stderr=True, highlight=False).print(str(report), soft_wrap=True)


def read_accepted(job: GenerateJob, target: AnyTarget) -> Input:
    """The input. The files that it replaces, which include prompts held out of the answers, stay
    until the folder's answers are known to be of these settings; raises `UserError` otherwise."""
    folder, held_out = job.out / INPUT, load_held_out(job.data, decoder(target))
    known = (folder, job.data, held_out, job.config.answers == "sample")
    if not (job.out / SETTINGS).is_file() or is_input_of(*known):
        return read_input(job, target, folder)
    with replace_part(folder, ("*",)) as fresh:
        read = read_input(job, target, fresh)
        refuse_other(job.out, settings_of(job, target, read), job.config.overwrite)
    return read


def decoder(target: AnyTarget) -> Decode:
    """What gives the text of token ids."""
    return lambda tokens: str(target.tokenizer.decode(tokens))


def read_input(job: GenerateJob, target: AnyTarget, folder: Path, again: bool = False) -> Input:
    """Read the sources once into `folder` and print what was left out. again: repeat, silently."""
    console = console_of(again)
    held_out = load_held_out(job.data, decoder(target))

    def progress(rows: int) -> None:
        if rows % (SHOWN_ROWS * 4096) == 0:
            console.print(f"{rows} rows read")
        job.watch("read", rows)

    finished = (job.out / MANIFEST_FILE).is_file() and not again
    read = ingest(
        job.data,
        folder,
        held_out,
        decoder(target),
        progress=progress,
        answered=finished,
        fits=lambda prompt: is_answerable(job, target, prompt),
        sampled=job.config.answers == "sample",
    )
    for source in read.report["sources"]:
        # Folders of earlier versions do not record how their rows were read.
        if "read_as" in source:
            line = f"data: {source['rows']} rows of {source['read_as']}"
            console.print(f"{line}; {use_of(job, source['kind'])}", soft_wrap=True)
        if source["ran_out_at"] is not None and len(read.report["sources"]) > 1:
            console.print(
                f"source '{source['name']}' ran out after {source['rows']} rows: it is "
                f"{source['share']:.1%} of the mixture, {source['share_asked']:.1%} were asked for"
            )
    for reason, count in read.report["left_out"].items():
        console.print(f"left out: {count} of {read.total} rows, {reason}", soft_wrap=True)
    if few := held_out_of_few(job.data, read):
        console.print(few, soft_wrap=True)
    if read.report["left_out"].get(REASONS[HELD_OUT]) == read.total:
        files = ", ".join(read.report["held_out"]["counts"])
        raise UserError(
            f"all {read.total} rows of the data repeat prompts that are held out ({files}): what "
            "is measured must not be trained on. Give other prompts, or none: bench=own and an "
            "empty train.prompts hold some of the data out."
        )
    return read


def held_out_of_few(data: DataConfig, read: Input) -> str:
    """A line for data so small that fewer prompts than usual were held out of it, else empty."""
    left_out = read.report["left_out"]
    found = {use: left_out.get(REASONS[VERDICTS[use]], 0) for use in USES}
    if not any(0 < found[use] < min(LEAST[use], getattr(data.reserve, use)) for use in found):
        return ""
    counts = " and ".join(f"{count} for {use}" for use, count in found.items() if count)
    return (
        f"few data: of {read.total} rows only {counts} could be held out, too few for numbers that "
        "mean anything. Give more data, or prompts of your own: train.prompts=[validation.jsonl], "
        "bench=jsonl bench.prompts=measured.jsonl"
    )


def use_of(job: GenerateJob, kind: str) -> str:
    """The use of the rows of a kind (`train.data.forms`), in words."""
    plain = kind == "text"
    if job.config.answers == "dataset":
        return "all of it is learned" if plain else "the answers in it are kept"
    if plain:
        return "the target continues the beginning of each, without its chat template"
    turns = {"first": "the first turn", "last": "the last turn", "all": "every turn"}
    return f"the target answers {turns[job.data.turn]} of each"


def is_answerable(job: GenerateJob, target: AnyTarget, prompt: Prompt) -> bool:
    """Whether the target's template accepts a prompt, and its positions hold it with an answer."""
    room = target.info.max_position_embeddings - job.decode.max_new_tokens
    try:
        length = len(prompt.render(target.tokenizer))
    except UserError:
        return False
    return 0 < length <= min(room, job.data.max_prompt_tokens or room)


def settings_of(job: GenerateJob, model: AnyTarget, read: Input) -> dict[str, Any]:
    """All settings an answer depends on; batch size, processes and paths may change, and the
    drafter too. Above temperature 0, with a rule other than match, another drafter gives other
    samples; the rule is part of the settings. Raises `UserError` for a structure that cannot be
    read."""
    template = str(model.tokenizer.chat_template or "")
    settings: dict[str, Any] = {
        "answers": job.config.answers,
        "target": {
            "revision": model.info.revision,
            "tokenizer_hash": model.info.tokenizer_hash,
            "chat_template": hashlib.sha256(template.encode()).hexdigest()[:32],
        },
        "data": {
            "rows": read.fingerprint,
            "turn": job.data.turn,
            "max_prompt_tokens": job.data.max_prompt_tokens,
            **({"left_out": read.left_out} if read.left_out else {}),
            **_unusual(job.data),
        },
    }
    if job.config.answers == "sample":
        settings["target"]["dtype"] = job.target.dtype_name
        own = backend_of(job.decode) == "own"
        if own:
            settings["target"] |= job.target.unusual
        settings["sampling"] = sampling_of(job.decode, own and job.config.drafter is not None)
    return settings


def refuse_foreign(out: Path) -> None:
    """Raise `UserError` for a folder that another stage has written."""
    if (out / MANIFEST_FILE).exists() and not (out / SETTINGS).is_file():
        raise UserError(
            f"'{out}' belongs to another stage: it has a {MANIFEST_FILE} that generation did not "
            "write. Give another folder."
        )
    require_own_input(out / INPUT)


def prepare_output(
    job: GenerateJob, settings: dict[str, Any], total: int, accepted: Callable[[], None]
) -> NDArray[np.bool_]:
    """Make the output folder ready for `settings` and return which rows are done; raises
    `UserError` for another configuration's answers, unless they may be overwritten."""
    out = job.out
    other = refuse_other(out, settings, job.config.overwrite)
    accepted()
    if other:
        answers.clear_output(out)
        discard(out / RECORDS)
        discard(out / STATES)
    write_json(out / SETTINGS, settings)
    if not (out / MANIFEST_FILE).is_file():
        drop_unanswered(out)
    done = np.zeros(total, dtype=bool)
    found = answers.read_done(out)
    # others are refused when the parts are merged
    done[found[(found >= 0) & (found < total)]] = True
    return done


def refuse_other(out: Path, settings: dict[str, Any], overwrite: bool) -> bool:
    """Whether `out` holds answers of other settings; raises `UserError` for them, unless
    `overwrite`."""
    path = out / SETTINGS
    differences = _differences(read_object(path), settings) if path.is_file() else []
    if differences and not overwrite:
        raise UserError(
            f"'{out}' holds answers of another configuration: {'; '.join(differences)}. Choose "
            "another run.name, restore the configuration to continue, or replace them with "
            "run.overwrite=true."
        )
    return bool(differences)


def finished_manifest(out: Path) -> AnswersManifest | None:
    """The manifest of a complete and undamaged folder, None when there is work left."""
    if not (out / MANIFEST_FILE).is_file():
        return None
    manifest = read_answers(out)
    for entry in manifest["shards"]:
        verify_file(out, entry)
    answers.remove_parts(out)
    remove_rows(out / INPUT)
    return manifest


def _unusual(data: DataConfig) -> dict[str, object]:
    """Settings of rendering that differ from the defaults; older versions did not have them."""
    names = ("supervise", "reasoning", "template_arguments", "max_tokens", "truncate")
    usual = asdict(DataConfig("-"))
    chosen = asdict(data)
    return {name: chosen[name] for name in names if chosen[name] != usual[name]}


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        inner = {key: f"{path}.{key}" if path else key for key in sorted({*old, *new})}
        found = [_differences(old.get(key), new.get(key), name) for key, name in inner.items()]
        return list(chain.from_iterable(found))
    if path == "data.rows" and old != new:  # their hash
        return ["the rows of the data have changed"]
    return [] if old == new else [f"{path} was {_short(old)} and is now {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 20 else text[:14] + '..."'


def finish(
    job: GenerateJob,
    model: AnyTarget,
    settings: dict[str, Any],
    read: Input,
    provenance: Mapping[str, object] | None,
) -> AnswersManifest:
    """Merge parts into shards and write the manifest; raises `UserError` without any answer."""
    total = read.total
    merged = answers.merge_parts(job.out, total, job.config.shard_rows, job.watch)
    if not merged.counts[DONE]:
        raise UserError(f"none of the {total} rows could be answered: {_reasons(merged.reasons)}.")
    content = {
        "round": job.config.round,
        "target": model.info.to_dict(),
        "sampling": settings.get("sampling", {}),
        "data": asdict(job.data) | {"answers": job.config.answers, "fingerprint": read.fingerprint},
        "input": read.report,
        "counts": merged.counts,
        "truncated": merged.truncated,
        "reasons": merged.reasons,
        "shards": merged.shards,
        "failures": merged.failures,
        **held_out_files(job.out),
    }
    if (job.out / RECORDS).is_dir():
        content["records"] = count_records(job.out, merged.counts[DONE])
    if (job.out / answers.SERVED).is_file():
        content["served"] = read_json(job.out / answers.SERVED)
    if layers := kept_layers(job.decode):
        shards = [job.out / entry["file"] for entry in merged.shards]
        documents = (tokens for tokens, _, _ in weighted_documents(shards, model.info))
        content["states"] = settle(job.out, layers, documents)
    write_manifest(job.out, "generate", content, provenance)
    answers.remove_parts(job.out)
    remove_rows(job.out / INPUT)
    return read_answers(job.out)


def held_out_files(out: Path) -> dict[str, dict[str, FileEntry]]:
    """The manifest's entry of prompts that were held out of the data, by use; empty for none."""
    found = {}
    for use in USES:
        name = f"{INPUT}/{RESERVED.format(use)}"
        if (out / name).is_file():
            found[use] = file_entry(out, name, rows=(out / name).read_bytes().count(b"\n"))
    return {"held_out": found} if found else {}


def summary(manifest: AnswersManifest, out: Path) -> str:
    """done + failed + skipped = input, and the most frequent reasons, for people."""
    counts = manifest["counts"]
    line = (
        f"{counts['done']} done + {counts['failed']} failed + {counts['skipped']} skipped = "
        f"{counts['input']} input rows; "
        f"{counts['tokens']} answer tokens in {len(manifest['shards'])} shards under '{out}'"
    )
    cut, reasons = manifest.get("truncated", {}), manifest["reasons"]
    if cut.get("rows"):
        line += f"; {cut['rows']} rows were cut by {cut['tokens']} tokens"
    return f"{line}\nnot answered: {_reasons(reasons)}" if reasons else line


def _reasons(reasons: Mapping[str, int]) -> str:
    shown = [f"{reason} ({count} rows)" for reason, count in list(reasons.items())[:SHOWN_REASONS]]
    return "; ".join(shown) + ("; ..." if len(reasons) > SHOWN_REASONS else "")
