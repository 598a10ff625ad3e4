"""Writes an exported drafter to a folder, with notes on how to serve it. The folder is complete or
absent.

`headstart_export.json` (`ExportNotes`) names kind, engine, layout, the source checkpoint and the
target's facts; `verify-export` and the model card read it. An import of such a folder takes the
exact configuration from it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shlex import quote

import torch

from heads.api.checkpoint import build_config, read_config
from heads.api.errors import UserError
from heads.api.reading import read_object
from heads.api.registry import get_kind
from heads.api.tensors import write_tensors
from inference.decoding.decode_file import DECODE_FILE, draft_length, read_current
from inference.engines import settings
from inference.export.config import ExportConfig
from inference.export.gguf_file import write_gguf
from inference.export.layouts import gguf, native
from inference.export.layouts.base import Checkpoint, Target, Written, read_checkpoint
from inference.export.layouts.folder import CONFIG, ExportNotes, Json
from inference.export.layouts.registry import LAYOUTS, find_route
from inference.export.quantised import linear_weights, quantise_folder
from inference.export.stitching import stitch
from inference.folders import EXPORT_FILE, replace_folder
from inference.integrity import require_unchanged
from inference.manifest import file_sha256

STAGE = "export"
NAMED = ("eagle", "eagle3", "dflash", "dspark")
"""Methods of vLLM for which the draft model's path does not matter."""
WORDS = ("eagle-", "eagle3", "dflash", "dspark")
"""Words in a path from which vLLM concludes the method, unless it is one of `NAMED`."""
ALGORITHMS = {
    "mtp": "EAGLE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "draft_model": "STANDALONE",
}
"""vLLM's name of a method -> SGLang's."""
LLAMA_TYPES = {
    "draft_model": "draft-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
"""vLLM's name of a method -> llama.cpp's `--spec-type`."""
NEAR_TIES = (
    "in bfloat16 the text of assisted generation may differ from generate's own where two tokens "
    "are nearly tied: passes of several tokens sum in another order"
)


def export(config: ExportConfig, checkpoint: Checkpoint, target: Target, out: Path) -> ExportNotes:
    """Write `out` and return its notes; raises `UserError` before anything is written. With
    config.overwrite, an existing `out` is replaced if an export wrote it and no files were added to
    it."""
    layout, written = write_layout(config, checkpoint, target)
    refuse_existing(config, out)
    if config.stitch and checkpoint.kind != native.KIND:
        raise UserError(
            f"export.stitch puts a target's own MTP block into the target; '{checkpoint.folder}' "
            f"is of kind {checkpoint.kind}. Leave it out: engines load this drafter beside the "
            "target."
        )
    require_plain_path(written.speculative, config.engine, out)
    tensors = {name: value.contiguous() for name, value in written.tensors.items()}
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    dtype = getattr(torch, config.dtype) if config.dtype else next(iter(floats.values())).dtype
    if config.dtype:
        tensors |= {name: value.to(dtype) for name, value in floats.items()}
    if config.quantise:
        pattern = linear_weights(LAYOUTS.get(layout), config.engine, config.quantise)
        quantise_folder(written, tensors, pattern, config.quantise)
    # peft has no such key; a target's own config.json names the dtype that the target is loaded in
    if written.described == CONFIG and not {"dtype", "torch_dtype"} & written.config.keys():
        written.config["dtype"] = str(dtype).removeprefix("torch.")
    engine, speculative, path = config.engine, written.speculative, target.config.path
    if engine == "transformers":
        written.notes.append(NEAR_TIES)
    tuned = {} if config.tokens else tuned_settings(config, checkpoint, speculative)
    if tuned:
        source = config.settings or DECODE_FILE
        written.notes.append(f"the serving command has what {source} says for this engine")
    notes = ExportNotes(
        kind=checkpoint.kind,
        method=checkpoint.method,
        engine=engine,
        layout=layout,
        source={
            "checkpoint": str(checkpoint.folder.resolve()),
            "sha256": checkpoint.sha256,
            **checkpoint.base,
        },
        config=asdict(checkpoint.config),
        taps=list(checkpoint.drafter.needs.taps),
        target=checkpoint.info.to_dict(),
        speculative_config=speculative,
        hf_overrides=target_overrides(engine, speculative),
        decode_settings=tuned,
        serve=serve(engine, str(out) if config.stitch else path, out, speculative, tuned),
        serve_as_custom_class=custom_class(path, out, speculative),
        kept=written.kept,
        notes=written.notes,
    )
    with replace_folder(
        out, STAGE, "export.overwrite" if config.overwrite else "export.out"
    ) as fresh:
        if config.stitch:
            of_block = partial(native.is_of_block, config=written.config)
            stitch(native.target_folder(target), tensors, of_block, fresh)
        elif written.weights == gguf.FILE:
            notes.notes += write_gguf(
                fresh / written.weights, written.config, tensors, target.tokenizer
            )
        else:
            write_tensors(tensors, fresh / written.weights, {"format": "pt"})
        for name, content in written.files.items():
            (fresh / name).write_bytes(content)
        if written.tokenizer:
            several = isinstance(getattr(target.tokenizer, "chat_template", None), dict)
            # several templates would be files in a folder of their own
            target.tokenizer.save_pretrained(str(fresh), save_jinja_files=not several)
        if written.described:
            write_text(fresh / written.described, written.config)
        notes.files = {path.name: file_sha256(path) for path in sorted(fresh.iterdir())}
        write_text(fresh / EXPORT_FILE, asdict(notes))
    return notes


def refuse_existing(config: ExportConfig, out: Path) -> None:
    """Raise `UserError` for an `out` that is not empty, unless it may be replaced."""
    if not config.overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise UserError(
            f"'{out}' is there already. Choose another export.out, or set export.overwrite=true."
        )


def write_text(path: Path, content: Json) -> None:
    """Write a JSON object, indented for readers."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_layout(
    config: ExportConfig, checkpoint: Checkpoint, target: Target
) -> tuple[str, Written]:
    """The layout and its files, with the requested draft length, or else the tuned one."""
    route = find_route(checkpoint.method, config.engine)
    if config.tokens:
        tuned = 0
    elif config.settings:
        found = given_settings(config, checkpoint.folder)
        tuned = next((found[name] for name in settings.LENGTH_NAMES if name in found), 0)
    else:
        tuned = draft_length(checkpoint.folder)
    if tuned:
        # A block whose slots see each other is always drafted whole. Other errors are raised again
        # below.
        with suppress(UserError):
            written = route.write(checkpoint, target, replace(config, tokens=tuned))
            written.notes.append(
                f"drafts {tuned} tokens per step, as {config.settings or DECODE_FILE} says; change "
                "it with export.tokens"
            )
            return route.layout, written
    return route.layout, route.write(checkpoint, target, config)


def prepare(folder: Path, engine: str) -> Checkpoint:
    """Read a checkpoint that can be exported to `engine`; raises `UserError` for any other."""
    require_unchanged(folder)
    content = read_config(folder)
    kind = get_kind(content["kind"])
    find_route(kind.export_method(build_config(kind.name, content["config"])), engine)
    return read_checkpoint(folder)


def require_plain_path(speculative: Json, engine: str, out: Path) -> None:
    """Raise `UserError` for a path from which vLLM would infer another method."""
    method = speculative.get("method")
    word = next((word for word in WORDS if word in str(out.resolve()).lower()), None)
    if engine == "vllm" and method not in NAMED and word is not None:
        raise UserError(
            f"export.out '{out}' holds the word '{word}', from which vLLM would conclude another "
            f"method than {method}. Choose a path without it."
        )


def custom_class(target: str, out: Path, speculative: Json) -> str:
    """The command for vLLM 0.33 and later, which runs Medusa through the proposer in the folder."""
    if speculative.get("method") != "medusa":
        return ""
    proposer = {"method": "custom_class", "model": "vllm_medusa.MedusaProposer"}
    return (
        f"PYTHONPATH={quote(str(out))} vllm serve {quote(target)} "
        f"--speculative-config {quote(json.dumps({**speculative, **proposer}))} "
        f"--additional-config {quote(json.dumps({'headstart_medusa': str(out)}))}"
    )


def target_overrides(engine: str, speculative: Json) -> Json:
    """The target's settings for vLLM (--hf-overrides), which looks there for the number of MTP
    blocks."""
    mtp = engine == "vllm" and speculative.get("method") == "mtp"
    return {"num_nextn_predict_layers": 1} if mtp else {}


def tuned_settings(config: ExportConfig, checkpoint: Checkpoint, speculative: Json) -> Json:
    """The settings beyond one draft length for an engine: of the file `export.settings`, or of the
    decode.yaml in the checkpoint."""
    engine, method, folder = config.engine, speculative.get("method"), checkpoint.folder
    if engine in ("vllm", "speculators"):
        fitting = method in settings.SCHEDULED and not speculative.get("parallel_drafting")
    elif engine == gguf.ENGINE:
        fitting = checkpoint.method in settings.STOPPABLE
    else:
        fitting = engine == "sglang" and method in settings.TREES
    if not fitting:
        return {}
    found = given_settings(config, folder) if config.settings else read_settings(folder, engine)
    if engine == gguf.ENGINE:
        # chosen for the length beside it
        same = found.get(settings.N_MAX) == speculative["num_speculative_tokens"]
        return {settings.P_MIN: found[settings.P_MIN]} if same and settings.P_MIN in found else {}
    return {} if engine != "sglang" and settings.LENGTHS not in found else found


def read_settings(folder: Path, engine: str) -> Json:
    """An engine's settings by the decode.yaml in `folder`; empty without one."""
    tuned = read_current(folder)
    if tuned is None:
        return {}
    places = [(row.batch_size, row.temperature) for row in tuned.rows]
    if engine == "sglang":
        drafts = ((*place, row.draft) for place, row in zip(places, tuned.rows, strict=True))
        return settings.sglang_settings(settings.greedy_drafts(drafts))
    chains = ((*place, row.chain) for place, row in zip(places, tuned.rows, strict=True))
    greedy = settings.greedy_drafts(chains)
    if engine == gguf.ENGINE:
        known = ((row.batch_size, row.least_probability) for row in tuned.rows)
        return settings.llama_cpp_settings(greedy, settings.known_least(known))
    return settings.vllm_settings(greedy)


def given_settings(config: ExportConfig, folder: Path) -> Json:
    """The settings of `config.engine` in the file `config.settings`: a tune.json, or a
    traffic.json, which has those of several drafters. Raises `UserError` if it has none for the
    drafter in `folder`, whose name is that of its training's folder, or of its row if a sweep
    (row@rate) has trained it."""
    path, name = Path(config.settings), "vllm" if config.engine == "speculators" else config.engine
    drafter = folder.parent.name if folder.name == "best" else folder.name
    engines = read_object(path, "Give a tune.json or traffic.json.").get("engines")
    own = engines if isinstance(engines, dict) else {}
    for known_as in (drafter, drafter.partition("@")[0]):
        if name not in own and isinstance(own.get(known_as), dict):
            own = own[known_as]
    found = own.get(name)
    if not isinstance(found, dict):
        known = ", ".join(map(str, own)) or "nothing"
        raise UserError(
            f"export.settings '{path}' has no settings of {name} for '{drafter}'; its `engines` "
            f"has: {known}. Give the tune.json of this drafter or a traffic.json that simulates "
            "it, or leave it out."
        )
    return found


def serve(engine: str, target: str, out: Path, speculative: Json, tuned: Json | None = None) -> str:
    """The command, in one line, that serves the target with the exported drafter. tuned: see
    `tuned_settings`."""
    tuned = tuned or {}
    count = speculative.get("num_speculative_tokens", 1)
    model, place = quote(target), quote(str(out))
    if engine in ("vllm", "speculators"):
        overrides = target_overrides(engine, speculative)
        tail = f" --hf-overrides {quote(json.dumps(overrides))}" if overrides else ""
        own = {} if target == str(out) else {"model": str(out)}  # stitched: the target's own block
        given = json.dumps({**speculative, **own, **tuned})
        return f"vllm serve {model} --speculative-config {quote(given)}{tail}"
    if engine == "sglang" and speculative["method"] == "uno":
        return (
            f"python -m sglang.launch_server --model-path {model} --attention-backend fa3 "
            f"--speculative-algorithm UNO --uno-lora-path {place} "
            f"--speculative-num-draft-tokens {count}"
        )
    if engine == "sglang":
        algorithm = ALGORITHMS[speculative["method"]]
        shape = tuned or {
            "--speculative-num-steps": count,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": count + 1,
        }
        chain = "".join(f" {name} {value}" for name, value in shape.items())
        return (
            f"python -m sglang.launch_server --model-path {model} "
            f"--speculative-algorithm {algorithm} --speculative-draft-model-path {place}"
            f"{'' if algorithm in ('DFLASH', 'DSPARK') else chain}"
        )
    if engine == gguf.ENGINE:
        kind = LLAMA_TYPES[speculative["method"]]
        shape = {settings.N_MAX: count, **tuned}
        options = "".join(f" {name} {value}" for name, value in shape.items())
        file = quote(str(out / gguf.FILE))
        return f"llama-server -m TARGET.gguf -md {file} --spec-type {kind}{options}"
    dflash = "speculation_type" in speculative
    loader = "AutoModel" if dflash else "AutoModelForCausalLM"
    option = "speculation_type='dflash'" if dflash else f"num_assistant_tokens={count}"
    return f"model.generate(..., assistant_model={loader}.from_pretrained({str(out)!r}), {option})"
