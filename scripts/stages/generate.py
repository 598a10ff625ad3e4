"""`headstart generate`: lets the target answer the prompts of a dataset.

Writes <run>/generate/ with shards and a manifest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inference.measure.config import BenchConfig
from scripts.config.schema import Settings, load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import is_done, open_folder, with_later
from scripts.run.process import prepare_process
from scripts.run.prompts import prompt_files
from train.data.config import DataConfig, HeldOut
from train.generate.run import generate

OWN = "own"
"""The bench that holds its prompts out of the data."""
TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "additional_chat_templates/*",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
)
"""Patterns of a target's files that decide how prompts are rendered and split into tokens."""


def run(settings: Settings) -> None:
    """Generate answers, continuing an interrupted folder; a complete one is left unchanged."""
    out = folder_of(settings)
    files = inputs_of(settings, out)
    folder = open_folder(settings, out, files, stage_decides=True, may_refuse=True)
    if folder.skip():
        return
    prepare_process(settings.run)
    generate(
        settings.generate,
        data_of(settings),
        settings.sampling,
        settings.target,
        folder.path,
        provenance=folder.session,
        accepted=folder.write,
    )
    folder.finish()


def is_complete(settings: Settings) -> bool:
    """Whether the answers are complete and of these settings and inputs."""
    out = folder_of(settings)
    return is_done(settings, out, inputs_of(settings, out), stage_decides=True)


def folder_of(settings: Settings) -> Path:
    return settings.run.directory / "generate"


def inputs_of(settings: Settings, out: Path) -> list[Path]:
    """The input files of the answers in `out`: the data, the prompts that are held out of it, and
    the files from which a local target renders prompts. Its weights are recorded apart."""
    data, target = data_of(settings), Path(settings.target.path)
    sources = prompt_files(*(source.path for source in data.sources))
    held_out = [*data.reserve.prompts]
    if data.decontaminate != "none":
        held_out += [*data.held_out, *(one.path for one in data.held_out_prompts)]
    renders = sorted(path for name in TOKENIZER_FILES for path in target.glob(name))
    own = [path for path in renders if path.is_file()]
    return with_later(settings, out, sources, [*prompt_files(*held_out), *own])


def data_of(settings: Settings) -> DataConfig:
    """`data` with everything that is held out of it: prompts for validation, unless train.prompts
    names some; prompts for measuring, with bench=own; and the prompts of `data.benches`, on which
    the named files of conf/bench/ measure. Raises `UserError` for unknown names."""
    data, bench = settings.data, settings.choices.get("bench")
    reserve = replace(
        data.reserve,
        validation=0 if data.held_out else data.reserve.validation,
        bench=data.reserve.bench if bench == OWN else 0,
    )
    data = replace(data, reserve=reserve)
    if data.decontaminate == "none":
        return data
    benches = [load_settings(STAGES["measure"], [f"bench={name}"]).bench for name in data.benches]
    found = [held_out_of(one) for one in benches]
    more = [one for one in data.held_out_prompts if one not in found]
    return replace(data, held_out_prompts=(*more, *found))


def held_out_of(bench: BenchConfig) -> HeldOut:
    """The prompts of a benchmark, as `data` holds them out."""
    return HeldOut(str(bench.prompts), bench.dataset, tuple(bench.domains))
