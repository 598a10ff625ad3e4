"""The prompts that a stage decodes: the given ones, or those held out of the run's data."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from heads.api.errors import UserError
from inference.measure.config import BenchConfig
from inference.measure.datasets import Loaded
from scripts.config.schema import Settings
from scripts.config.stage_configs import RunConfig
from scripts.config.stages import EMBEDDED
from scripts.run.process import shown
from train.data.answers import held_out_prompts
from train.data.held_out import load_any_prompts
from train.data.tables import local_files

EMBEDDED_BENCHES = (EMBEDDED, "profile", "thorough", "baselines", "embedded_long")
"""Benches that use the embedded target's prompts."""
FIRST_ROUND = "round-0"
"""Folder of a loop's first round, which holds out prompts for all rounds."""


def bench_of(settings: Settings) -> BenchConfig:
    """`bench` with its prompts filled in.

    Prompts that were held out of the run's own data take precedence over the embedded ones, unless
    bench=embedded was given. Benches that build on it (`EMBEDDED_BENCHES`) take the embedded ones
    only for the embedded data. Raises `UserError` if there are no prompts.
    """
    bench, chosen = settings.bench, settings.choices.get("bench")
    named = settings.given("bench.prompts")
    if chosen in EMBEDDED_BENCHES and named and not settings.given("bench.domains"):
        return replace(bench, domains=())  # its domains are those of the embedded prompts
    asked = chosen == EMBEDDED and settings.given("bench")
    if bench.prompts and (chosen not in EMBEDDED_BENCHES or named or asked):
        return bench
    found = held_out(settings.run, "bench")
    if found is not None:
        return replace(bench, prompts=shown(found), domains=())
    if bench.prompts and (chosen == EMBEDDED or settings.choices.get("data") == EMBEDDED):
        return bench
    raise UserError(
        f"there are no prompts to measure on: '{settings.run.directory}' holds none out of its "
        "data (`headstart generate` does, data.reserve.bench). Give prompts of your own, "
        "bench=jsonl bench.prompts=<file or folder>, or choose a benchmark, such as bench=mtbench."
    )


def load(settings: Settings) -> Loaded:
    """The prompts of `bench`, and the commit of their dataset."""
    bench = bench_of(settings)
    return load_any_prompts(bench.prompts, bench.dataset, bench.domains)


def prompt_files(*sources: str) -> list[Path]:
    """The local files of datasets or prompts, in order, without duplicates. There are none for a
    dataset of the Hub, and for a source that does not exist, which the stage refuses."""
    found: dict[Path, None] = {}
    for source in filter(None, sources):
        files = None
        with suppress(UserError):
            files = local_files(source)
        inside = sorted(files.rglob("*")) if isinstance(files, Path) else files or []
        found |= dict.fromkeys(path for path in inside if path.is_file())
    return list(found)


def validation_prompts(settings: Settings, key: str, given: str) -> str:
    """The prompts that the setting `key` names by the value `given`, or those that were held out of
    the run's data for validation. Raises `UserError` if there are none."""
    own = None if settings.given(key) else held_out(settings.run, "validation")
    if own is None and not given:
        raise UserError(
            f"{key} is empty, and '{settings.run.directory}' holds no prompts out of its data "
            f"(`headstart generate` does, data.reserve.validation). Set {key}=<file or folder>."
        )
    return given if own is None else shown(own)


def held_out(run: RunConfig, use: str) -> Path | None:
    """The file of prompts that a run held out of its data for a `use`: validation or bench."""
    own = Path(run.answers) if run.answers else run.directory / "generate"
    places = (own, run.directory / FIRST_ROUND / "generate")
    found = (held_out_prompts(place, use) for place in places)
    return next((path for path in found if path is not None), None)
