"""The stages of a round, as overrides of the loop's own settings: where it writes, what it starts from, which prompts it answers.

A round's folder <run>/round-<r>/ is a run of its own, with the stages' usual folders; <run>/round-<r>/trials/ is another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.api.errors import UserError
from scripts.config import load_settings
from scripts.drafters import DRAFT_KEYS
from scripts.loop import Step, stage_overrides
from scripts.stages import STAGES
from scripts.train import stage_folder
from train.data.config import SourceConfig
from train.generate.sampling import backend_of

if TYPE_CHECKING:
    from scripts.config import Settings

HARD_PROMPTS = "hard_prompts.jsonl"
TRIALS = "trials"
MORE = ("variations", "branches")
"""Prompts that a round makes: switch of `feedback`, and name of the run within the round that answers them."""
PLAIN = "plain"
"""The trial without any switch."""


@dataclass
class RoundPlan:
    """Overrides of every stage of every round; `settings` are the loop's."""

    settings: Settings

    def __post_init__(self) -> None:
        recipes = self.settings.loop.recipes
        self.recipe = recipes[0] if recipes else None
        self.train = load_settings(STAGES["train"], stage_overrides(self.settings, "train", self.recipe))
        self.generate = load_settings(STAGES["generate"], stage_overrides(self.settings, "generate", self.recipe))
        self.drafter = stage_folder(self.train).name
        self.require_possible()

    def require_possible(self) -> None:
        """Raise `UserError` for settings that rounds cannot be made with."""
        if backend_of(self.generate.sampling) != "own" or self.generate.generate.answers != "sample":
            raise UserError(
                "loop.rounds needs answers of our own decoder, whose rejected drafts are what the next round learns from. "
                f"Use sampling.backend=own and generate.answers=sample; given: {backend_of(self.generate.sampling)} and "
                f"{self.generate.generate.answers}."
            )
        if self.train.joint.on:
            raise UserError("loop.rounds trains a drafter for a target that stays what it is. Use joint=none.")
        if self.train.decode.shape == "none":
            raise UserError("decode.shape is 'none', so nothing is drafted. Use decode=chain or decode=tree.")

    # ---- places --------------------------------------------------------------------------------------------------------------

    def folder(self, number: int) -> Path:
        """<run>/round-<number>."""
        return self.settings.run.directory / f"round-{number}"

    def training(self, number: int) -> Path:
        """The train stage's folder of a round."""
        return self.folder(number) / "train" / self.drafter

    def made_prompts(self, number: int, switch: str) -> Path:
        """Where the prompts stand that a round made."""
        return self.folder(number) / switch / f"{switch}.jsonl"

    def step(self, stage: str, number: int, title: str, *more: str) -> Step:
        """A stage of a round. more: overrides that win over the loop's; those of the round itself win over these."""
        common = stage_overrides(self.settings, stage, self.recipe)
        own = [item for item in self.settings.loop.round.own_overrides(number) if reads(stage, item)]
        place = [f"run.root={text(self.settings.run.directory)}", f"run.name=round-{number}"]
        return Step(STAGES[stage], [*common, *more, *own, *place], f"round {number}: {title}")

    # ---- stages --------------------------------------------------------------------------------------------------------------

    def generation(self, number: int, drafter: str, records: bool, hard: Path | None) -> Step:
        """Answers to this round's prompts, with the last round's drafter (empty: plainly). hard: prompts to answer again."""
        return self.step("generate", number, "generate", *self.answering(number, drafter, records), *self.prompts(number, hard))

    def answering(self, number: int, drafter: str, records: bool) -> list[str]:
        """How a round answers."""
        more = [f"generate.round={max(0, number - 1)}", f"sampling.seed={self.generate.sampling.seed + number}"]
        if drafter:
            decode = self.train.decode
            more += [f"generate.drafter={text(drafter)}", f"generate.records.enabled={grammar(records)}"]
            more += [f"sampling.{key}={grammar(getattr(decode, key))}" for key in DRAFT_KEYS]
        return more

    def answering_made(self, number: int, switch: str, drafter: str) -> Step:
        """Answers to the prompts that a round made, all of them, with a drafter (empty: plainly)."""
        found = self.step("generate", number, f"generate from {switch}", *self.answering(number, drafter, True))
        columns = {"kind": "tokens", "column": "tokens", "id_column": "id", "domain_column": "domain"}
        usual = {"name": None, "mixture": [], "limit": None, "shuffle": False, "share": [0, 1], **columns}
        path = text(self.made_prompts(number, switch))
        only = [f"data.path={path}", *(f"data.{key}={grammar(value)}" for key, value in usual.items())]
        place = [f"run.root={text(self.folder(number))}", f"run.name={switch}"]
        return Step(found.stage, [*found.overrides, *only, *place], found.title)

    def prompts(self, number: int, hard: Path | None) -> list[str]:
        """Which prompts a round answers."""
        loop, data = self.settings.loop, self.generate.data
        share = {"share": [number, loop.rounds]} if loop.round.prompts == "share" and loop.rounds > 1 else {}
        if not data.mixture and hard is None:
            return [f"data.{key}={grammar(value)}" for key, value in share.items()]
        sources = [{**unusual(source), **share} for source in data.sources]
        if hard is not None:
            columns = {"column": "tokens", "id_column": "id", "domain_column": "domain"}
            sources.append({"path": str(hard), "kind": "tokens", **columns})
        single = [] if data.mixture else ["data.path=''", "data.limit=null"]
        return [*single, f"data.mixture={grammar(sources)}"]

    def training_step(self, number: int, answers: Path, start: str, on_policy: bool) -> Step:
        """The training of a round on `answers`, from checkpoint `start` (empty: as the recipe begins)."""
        rounds = self.settings.loop.rounds
        more = [f"run.answers={text(answers)}", f"train.seed={self.train.train.seed + number}"]
        if self.settings.loop.round.one_schedule:
            more += self.part(number / rounds, (number + 1) / rounds)
        return self.step("train", number, "train", *more, *self.started(start, on_policy))

    def trial(self, number: int, name: str, answers: Path, start: str, on_policy: bool) -> Step:
        """A short training that ends the schedule, to see what a switch does."""
        steps = self.settings.loop.round.trial_steps
        more = [
            f"run.answers={text(answers)}", f"train.seed={self.train.train.seed + number}", *self.started(start, on_policy),
            f"train.max_steps={steps}", "train.eval_every=0", "train.save_every=0",
        ]  # fmt: skip
        if self.settings.loop.round.one_schedule:
            more += self.part(number / self.settings.loop.rounds, 1.0)
        found = self.step("train", number, f"trial of {name}", *more)
        place = [f"run.root={text(self.folder(number))}", f"run.name={TRIALS}", f"run.drafter={text(name)}"]
        last = [item for item in more if item.startswith(("train.max_steps", "schedule."))]
        return Step(found.stage, [*found.overrides, *last, *place], found.title)

    def part(self, begin: float, end: float) -> list[str]:
        """This part of the part of the schedule that the loop was given."""
        given = self.train.schedule
        width = given.end - given.begin
        return [f"schedule.begin={given.begin + width * begin!r}", f"schedule.end={given.begin + width * end!r}"]

    def started(self, start: str, on_policy: bool) -> list[str]:
        """What a training begins with, and whether it may use the drafter's own words."""
        more = [f"train.refresh.init_from={text(start)}"] if start else []
        return more if on_policy else [*more, "train.on_policy.share=0"]

    def judged(self, number: int, checkpoints: Sequence[str], place: Sequence[str] = ()) -> Settings:
        """The settings of the measurement that judges a round's drafter, or others as that one. place: where, for these."""
        prompts = self.train.train.prompts
        if len(prompts) != 1 and not any(item.startswith("bench.prompts=") for item in self.settings.loop.round.judge):
            raise UserError(
                f"train.prompts names {len(prompts)} files, but a round is judged on one file or folder. Say which with "
                "loop.round.judge=['bench.prompts=<file>']."
            )
        more = [*(f"bench.prompts={text(prompts[0])}" for _ in prompts[:1]), "bench.compare_noise=false"]
        step = self.step("measure", number, "measure", *more, *self.settings.loop.round.judge)
        others = [item for item in step.overrides if not item.startswith("bench=")]  # a group is chosen once
        found = load_settings(step.stage, ["bench=jsonl", *others, *place])
        chosen = {"name": "measure", "drafters": list(checkpoints), "kinds": [], "heads": {}, "drafts": {}}
        found.resolved["measure"] = {**found.resolved["measure"], **chosen}
        found.measure = replace(
            found.measure, name="measure", drafters=tuple(checkpoints), kinds=(), heads={}, drafts={}
        )
        return found


def reads(stage: str, override: str) -> bool:
    """Whether a stage understands an override."""
    return override.split("=", 1)[0].lstrip("+").split(".")[0] in STAGES[stage].groups


def unusual(source: SourceConfig) -> dict[str, Any]:
    """A source's own settings where they are not the defaults."""
    usual = asdict(SourceConfig())
    found = {item.name: getattr(source, item.name) for item in fields(SourceConfig)}
    return {name: value for name, value in found.items() if value != usual[name]}


def text(value: object) -> str:
    """A string in the grammar of overrides, where backslashes mean something only before a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value))
    return f"'{escaped}'"


def grammar(value: Any) -> str:
    """Any plain value in the grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{grammar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(grammar, value)) + "]"
    return repr(value)
