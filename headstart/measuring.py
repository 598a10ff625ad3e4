"""`headstart.measure` measures drafters on given prompts and returns the typed report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from heads.api.config import build
from heads.api.errors import UserError, suggest
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.draft_file import DRAFT_KEYS
from inference.decoding.engine import Engine, as_list
from inference.decoding.engine import Prompt as Given
from inference.decoding.loading import checkpoint_folder
from inference.measure import run
from inference.measure.config import BenchConfig
from inference.measure.prompts import Prompt, load_prompts
from inference.report.model import Report
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.run import drafters as found_by
from scripts.run.drafters import Found

Drafters = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
DOMAIN = "prompts"


def measure(
    target: str | Path | TargetConfig | TargetModel | Engine,
    drafters: Drafters,
    prompts: str | Path | Sequence[Given],
    *,
    out: str | Path | None = None,
    **settings: Any,
) -> Report:
    """Decode `prompts` with every drafter and without one, and return the report: tau, acceptance,
    speed with intervals, and whether every text equals the target's own.

    target: a Hub id or a folder (loaded in bfloat16 on a GPU, in float32 on a CPU), a
    `TargetConfig`, or a loaded target (also that of an `Engine`).
    drafters: checkpoint folders, names on the Hub, or head configs that need no training
    ("ngram"); a mapping gives them names. prompts: a list of texts, conversations or token ids, or
    a .jsonl file or folder of them. One prompt warms up and all others are measured, unless
    `prompts_per_domain` is smaller. out: folder for report.json and the single responses, from
    which an interrupted call continues; None: nothing is kept. settings: fields of `DecodeConfig`
    for all drafters (`max_new_tokens=64`, `temperature=1.0`) and of `BenchConfig` (`repeats=3`).
    Each drafter decodes with the draft that it was trained for, unless `shape`, `depth` or
    `choices` are given.

    Raises `UserError` for unknown settings (the message suggests the nearest one), drafters of
    another target, and fewer than two prompts.
    """
    decoding, bench = split_settings(settings)
    decode = build(DecodeConfig, decoding, "decode")
    loaded = load_target(target)
    arms = [arm(name, item, loaded, decode, decoding) for name, item in find(drafters).items()]
    chosen = load_given(prompts)
    source = str(prompts) if isinstance(prompts, (str, Path)) else f"{len(chosen)} given prompts"
    bench = {"prompts_per_domain": len(chosen), "warmup_prompts": 1, **bench}
    config = build(BenchConfig, {"prompts": source, **bench}, "bench")
    if out is not None:
        return run.measure(config, loaded, arms, chosen, Path(out))
    with tempfile.TemporaryDirectory(prefix="headstart-measure-") as folder:
        return run.measure(config, loaded, arms, chosen, Path(folder))


ELSEWHERE = {"prompts", "dataset", "server", "baseline_server", "serving"}
"""Settings of `bench` that are arguments here, or belong to a measurement of a running server."""


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of `DecodeConfig` and of `BenchConfig`; raises `UserError` for any other. Both have
    a seed; a given one is that of the answers."""
    decode = {item.name for item in fields(DecodeConfig)}
    bench = {item.name for item in fields(BenchConfig)} - decode - ELSEWHERE
    for name in settings:
        if name not in decode | bench:
            raise UserError(f"'{name}' is no setting here.{suggest(name, decode | bench)}")
    return (
        {name: value for name, value in settings.items() if name in decode},
        {name: value for name, value in settings.items() if name in bench},
    )


def load_target(given: str | Path | TargetConfig | TargetModel | Engine) -> TargetModel:
    """The target, loaded if it is not yet."""
    if isinstance(given, Engine):
        return given.target
    if isinstance(given, TargetModel):
        return given
    return TargetModel.load(given if isinstance(given, TargetConfig) else TargetConfig.named(given))


def find(given: Drafters) -> dict[str, Found]:
    """The drafters by the names that the report gives them."""
    if isinstance(given, Mapping):
        return {str(name): find_one(item) for name, item in given.items()}
    listed = [given] if isinstance(given, (str, Path)) else list(given)
    found: dict[str, Found] = {}
    for item in map(find_one, listed):
        if item.name in found:
            raise UserError(
                f"two drafters are called '{item.name}'. Give a mapping, such as "
                f"{{'first': '{found[item.name].checkpoint}', 'second': '{item.checkpoint}'}}."
            )
        found[item.name] = item
    return found


def find_one(source: str | Path) -> Found:
    """The drafter from a folder, a name on the Hub, or a head config that needs no training."""
    name = str(source)
    if Path(source).expanduser().is_dir():
        return found_by.at(Path(source).expanduser())
    if name not in found_by.untrained_recipes() and checkpoint_folder(source) is not None:
        return found_by.published(name)
    return found_by.untrained(name, {})


def arm(
    name: str, found: Found, target: TargetModel, decode: DecodeConfig, given: Mapping[str, Any]
) -> Arm:
    """The loaded drafter, with the draft that it was trained for, changed by the given settings."""
    changes = {key: value for key, value in given.items() if key in DRAFT_KEYS}
    own = found_by.draft_settings(found, decode, changes)
    path = "" if found.checkpoint is None else str(found.checkpoint)
    return Arm(name, found_by.load(found, target), own, path)


def load_given(prompts: str | Path | Sequence[Given]) -> list[Prompt]:
    """Prompts from a file or folder, or the given ones, numbered."""
    if isinstance(prompts, (str, Path)):
        if isinstance(prompts, str) and not Path(prompts).expanduser().exists():
            raise UserError(
                f"prompts: there is no file or folder '{prompts}'. Texts are given as a list: "
                "prompts=[...]."
            )
        return load_prompts(prompts)
    return [numbered(number, prompt) for number, prompt in enumerate(as_list(prompts), 1)]


def numbered(number: int, prompt: Any) -> Prompt:
    """A prompt with its number as its id."""
    name = f"{DOMAIN}-{number:04d}"
    if isinstance(prompt, str):
        return Prompt(name, DOMAIN, messages=({"role": "user", "content": prompt},))
    if prompt and isinstance(prompt[0], Mapping):
        return Prompt(name, DOMAIN, messages=tuple(prompt))
    return Prompt(name, DOMAIN, tokens=tuple(int(token) for token in prompt))
