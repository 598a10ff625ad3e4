"""The configuration of a measurement: the prompts, the compared arms, and the machine."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

from heads.api.config import (
    Count,
    PositiveFloat,
    PositiveInt,
    Repeats,
    Rows,
    Seed,
    Temperature,
    config,
)
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.costs import CostConfig
from inference.decoding.rules.names import TEXT, promise
from inference.decoding.sampling.distribution import SamplingSettings
from inference.measure.baselines import BaselinesConfig
from inference.measure.datasets import DatasetConfig
from inference.measure.profile import ProfileConfig
from inference.measure.prompts import Prompt, select_prompts
from inference.measure.serving.config import ServingConfig
from inference.report.model import ReportSettings

BASELINE = "baseline"
OWN_NOISE = " (own noise)"
SHARED_SETTINGS = (
    *(item.name for item in fields(SamplingSettings)),
    "max_new_tokens",
    "seed",
    "rule",
    "typical_epsilon",
    "typical_delta",
    "exact",
)
"""Settings that all arms of one report must share: neither drafter nor rule may change the task."""
PACKAGES = ("torch", "transformers", "numpy", "headstart")


@config("bench.lost")
@dataclass(frozen=True)
class LostConfig:
    """The analysis of the missing speed."""

    enabled: bool = False
    """Write the block `lost` into report.json, and transcripts.json next to it."""
    prompts_per_domain: PositiveInt = 4
    """Measured prompts of each domain that every drafter decodes once more."""
    temperatures: tuple[Temperature, ...] = ()
    """Further temperatures at which these prompts are decoded, for instance [1]."""
    transcripts: Count = 2
    """Answers per domain that are stored token by token with the candidates of both models."""
    candidates: Rows = 5
    """Number of best candidates of each model in a transcript."""
    repeats: Repeats = 25
    """Timed calls per width if the cost of a wider verification is not among bench.costs."""


@config("bench")
@dataclass(frozen=True)
class BenchConfig:
    """The prompts, repeats and further parts of a measurement. Sampling, length and the draft's
    shape are each arm's `DecodeConfig`."""

    prompts: str = "assets/prompts"
    """A .jsonl file or a folder with one <domain>.jsonl per domain; with bench.dataset.template
    also a Hub dataset or any .parquet, .csv, .json or .jsonl file.
    """
    domains: tuple[str, ...] = ()
    """Domains to measure; empty: all."""
    prompts_per_domain: PositiveInt = 16
    """Maximum number of measured prompts of each domain."""
    contexts: tuple[PositiveInt, ...] = ()
    """Put as many other prompts of its domain before every prompt as fit into this many tokens;
    each length gives a separate prompt. Empty: prompts stay as they are. With `server` it needs
    bench.serving.api=completions. For real documents see bench=long."""
    warmup_prompts: PositiveInt = 2
    """Unmeasured prompts that every arm decodes first."""
    repeats: Repeats = 2
    """Number of measurements of every prompt; answers do not change. With two or more, the times of
    the repeats show whether the machine was disturbed."""
    spread: PositiveFloat = 0.1
    """Largest spread of an arm: how much longer its slowest repeat may take than its fastest one.
    Above it the machine counts as disturbed: another repeat is measured, and the fastest `repeats`
    are kept."""
    retries: Count = 2
    """Maximum number of further repeats on a disturbed machine; if it stays disturbed, the report
    says so."""
    compare_noise: bool = True
    """Rule match above temperature 0: measure trained drafters also without shared noise."""
    seed: Seed = 0
    """Seed that chooses the prompts and draws the bootstrap samples. The answers' seed is
    decode.seed."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """How the rows of a dataset become prompts; without a template, prompts are prompt files."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Speed by batch size, draft length, context and temperature; off by default."""
    costs: CostConfig = field(default_factory=CostConfig)
    """Cost curves of verification and drafting; off by default."""
    roofline: bool = False
    """Compare with the memory bandwidth of this device, which is measured."""
    baselines: BaselinesConfig = field(default_factory=BaselinesConfig)
    """Decoding loops of other projects on the same prompts; off by default."""
    lost: LostConfig = field(default_factory=LostConfig)
    """The parts of the missing speed, and answers token by token; off by default."""
    server: str = ""
    """Address of a running server (http://127.0.0.1:8000) to measure instead of drafters."""
    baseline_server: str = ""
    """Address of the same server without speculation, for the speedup."""
    serving: ServingConfig = field(default_factory=ServingConfig)
    """Requests to a running server, and the source of its acceptance."""

    def __post_init__(self) -> None:
        if self.baseline_server and not self.server:
            raise UserError(
                "bench.baseline_server is what bench.server is compared with: give both."
            )
        if self.server and self.contexts and self.serving.api != "completions":
            raise UserError(
                f"bench.contexts={list(self.contexts)} counts tokens, which of bench.server only "
                "bench.serving.api=completions does (by the tokenizer of target.path); given: "
                f"{self.serving.api}. Set it, or leave bench.contexts out: bench=long has real "
                "documents."
            )
        loaded = {
            "bench.profile": self.profile.wanted,
            "bench.costs.nodes": bool(self.costs.nodes),
            "bench.roofline": self.roofline,
            "bench.lost.enabled": self.lost.enabled,
        }
        if self.server and (asked := [name for name, wanted in loaded.items() if wanted]):
            raise UserError(
                f"bench.server measures a server from outside; {asked[0]} needs the target in this "
                "process. Leave one of them out."
            )


def report_settings(decodes: Mapping[str, DecodeConfig], prompts: int) -> ReportSettings:
    """The settings that all arms, by name, share; raises `UserError` where they differ."""
    require_same_task(decodes)
    drafting = [decode for decode in decodes.values() if decode.shape != "none"]
    decode = (drafting or list(decodes.values()))[0]
    names = [name for name in ReportSettings.model_fields if name != "prompts"]
    assert len({other.batch_size for other in decodes.values()}) == 1
    return ReportSettings(**{name: _shared(decode, name) for name in names}, prompts=prompts)


def require_same_task(decodes: Mapping[str, DecodeConfig]) -> None:
    """Raise `UserError` unless all arms agree on `SHARED_SETTINGS`, and the drafting ones also on
    the rule. decodes: by the arm's name."""
    for key in SHARED_SETTINGS:
        found = [
            (name, _shared(decode, key))
            for name, decode in decodes.items()
            if key != "rule" or decode.shape != "none"  # plain decoding has none
        ]
        for name, other in found[1:]:
            first, one = found[0]
            if one != other:
                shapes = (
                    " decode.rule=auto is another rule for another shape of draft, and for the "
                    "static tree of a joined cascade."
                )
                raise UserError(
                    f"'{first}' decodes with {key}={one}, '{name}' with {key}={other}. One report "
                    "compares drafters on the same task: give all the same."
                    f"{shapes if key == 'rule' else ''}"
                )


def _shared(decode: DecodeConfig, key: str) -> Any:
    """A setting that all arms share; for rule and compile, the value that auto resolves to."""
    own = {"rule": "acceptance", "compile": "compiles"}
    return getattr(decode, own.get(key, key))


def check_arms(config: BenchConfig, arms: Sequence[Arm]) -> list[Arm]:
    """The arms at batch size 1; trained drafters also with their own noise, if requested."""
    if not arms:
        raise UserError("there is no drafter to measure. Name at least one.")
    for arm in arms:
        require_same_task({arms[0].name: arms[0].decode, arm.name: arm.decode})
    decode = arms[0].decode
    if config.lost.enabled and promise(decode.acceptance, decode.temperature) != TEXT:
        raise UserError(
            "bench.lost splits what rule match reaches, but decode.rule is "
            f"'{decode.acceptance}' at temperature {decode.temperature:g}. "
            "Set decode.rule=match, or leave bench.lost out."
        )
    compiles = any(arm.decode.compiles for arm in arms)  # no arm runs in a slower mode
    result = []
    for arm in arms:
        if arm.decode.shape == "none":
            words = "which drafts nothing. Give it a chain or a tree."
            raise UserError(f"'{arm.name}' has decode.shape 'none', {words}")
        own = replace(arm.decode, batch_size=1, compile=compiles or arm.decode.compile)
        result.append(replace(arm, decode=own))
        # other rules share no noise
        sampled = arm.decode.temperature > 0 and arm.decode.acceptance == "match"
        both = config.compare_noise and sampled and arm.decode.share_noise
        if both and isinstance(arm.drafter, TrainableDrafter):
            own = replace(own, share_noise=False)
            result.append(replace(arm, name=arm.name + OWN_NOISE, decode=own))
    names = [BASELINE, *(arm.name for arm in result)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        words = f"Every arm needs a name of its own ('{BASELINE}' is taken)."
        raise UserError(f"two arms are called {twice}. {words}")
    return result


def split_prompts(
    config: BenchConfig, prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[Prompt]]:
    """(measured, warm-up) prompts, disjoint. Raises `UserError` for an unknown domain or fewer than
    two prompts."""
    known = sorted({prompt.domain for prompt in prompts})
    if unknown := [name for name in config.domains if name not in known]:
        words = f"but the prompts are of: {', '.join(known)}."
        raise UserError(f"bench.domains names {unknown}, {words}")
    pool = [prompt for prompt in prompts if not config.domains or prompt.domain in config.domains]
    if len(pool) < 2:
        raise UserError(
            f"measuring needs at least two prompts, one of them to warm up; given: {len(pool)}."
        )
    chosen = {prompt.id for prompt in select_prompts(pool, config.prompts_per_domain, config.seed)}
    spare = [prompt for prompt in pool if prompt.id not in chosen][: config.warmup_prompts]
    measured = [prompt for prompt in pool if prompt.id in chosen]
    # if all are requested for measuring, the last one becomes the warm-up prompt
    return (measured, spare) if spare else (measured[:-1], measured[-1:])


class Provenance(TypedDict, total=False):
    """The process that wrote a file."""

    command: str
    versions: dict[str, str]
    git: object
    """Commit of the working tree and whether it had changes."""


class LeakFacts(TypedDict):
    """The comparison of the prompts with the drafters' training data."""

    trained_on: dict[str, list[str]]
    """Folders of answers by drafter."""
    unknown: list[str]
    """Drafters whose training data is not at hand, so that they were not compared."""
    rows: int
    """Rows of answers that were compared."""
    prompts: int
    """Prompts that were compared."""
    exact: int
    near: int
    """Prompts that were trained on: as they are, or nearly."""
    left_out: list[str]
    """Their ids; they are not measured."""


def process_facts() -> Provenance:
    """Command and versions of this process."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    # `python -m headstart` and `python -m scripts.cli` are the same command.
    program = re.sub(r"^(cli|__main__)\.py$", "headstart", Path(sys.argv[0]).name)
    return {"command": shlex.join([program, *sys.argv[1:]]), "versions": versions}
