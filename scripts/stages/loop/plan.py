"""The stages of a round: the loop's settings with a different folder, start and prompts.

A round's folder <run>/round-<r>/ is a separate run, with the stages' usual folders;
<run>/round-<r>/trials/ is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from inference.decoding.draft_file import DRAFT_KEYS
from scripts.config.compose import parse
from scripts.config.schema import Settings, understands
from scripts.config.stage_configs import RoundConfig
from scripts.config.stages import STAGES, join
from scripts.run.folder import stage_folder
from scripts.run.process import shown
from scripts.stages.loop.steps import Step, derive_generation, derive_measurements, hold_out_benches
from train.data.answers import USES, held_out_prompts
from train.data.config import DataConfig, SourceConfig
from train.feedback.config import FeedbackConfig
from train.generate.sampling import backend_of

TRIALS = "trials"
MORE = ("variations", "branches")
"""Prompts that a round makes: switch of `feedback` -> name of the run, inside the round, that
answers them."""
PLAIN = "plain"
"""The trial without any switch."""
ROUND_STAGES = ("generate", "feedback", "train", "measure")
"""The stages whose groups a round reads. `feedback` is no stage of its own here: the round makes
prompts and weights with its settings."""
TOKEN_ROWS = {"kind": "tokens", "column": "tokens", "id_column": "id", "domain_column": "domain"}
"""How the prompt files of rounds are read."""


@dataclass
class RoundPlan:
    """The settings of every stage of every round; `settings` are the loop's. Raises `UserError` for
    settings that do not work with rounds."""

    settings: Settings

    def __post_init__(self) -> None:
        loop = self.settings.loop
        require_read(loop.round)
        self.recipe = loop.recipes[0] if loop.recipes else None
        rounds = range(len(loop.round.overrides))
        self.feedbacks = {
            own: self.settings.derive("feedback", self.recipe, more=own).feedback
            for own in {(), *(feedback_overrides(loop.round, number) for number in rounds)}
        }
        """Overrides of a round -> the values of `feedback` with them."""
        self.train = self.settings.derive("train", self.recipe)
        keys = {item.key_or_group for item in parse(loop.round.judge)}
        self.judge_has_prompts = "bench.prompts" in keys
        """Whether loop.round.judge names prompts; otherwise they are those for validation."""
        measures = derive_measurements(self.settings, self.recipe)
        self.benches = [step.settings.bench for step in measures]
        """Those of all measurements. Their prompts are held out of the data of every round."""
        if self.judge_has_prompts:
            self.benches.append(self.measurement(0, []).bench)
        self.generate = self.derive_generation()
        self.drafter = stage_folder(self.train).name
        self.shares = loop.round.prompts == "share" and loop.rounds > 1
        """Whether every round answers different prompts."""
        backend, answers = backend_of(self.generate.sampling), self.generate.generate.answers
        if backend != "own" or answers != "sample":
            raise UserError(
                "loop.rounds needs answers of our own decoder, whose rejected drafts are what the "
                "next round learns from. Use sampling.backend=own and generate.answers=sample; "
                f"given: {backend} and {answers}."
            )
        if self.train.joint.on:
            raise UserError(
                "loop.rounds trains a drafter for a target that stays what it is. Use joint=none."
            )
        if self.train.train.refresh.adapter:
            raise UserError(
                "loop.rounds continues every training from the best drafter so far, and an adapter "
                "cannot be the base of another one. Use train.refresh.adapter=false."
            )
        if self.train.decode.shape == "none":
            raise UserError(
                "decode.shape is 'none', so nothing is drafted. Use decode=chain or decode=tree."
            )

    # Places

    def folder(self, number: int) -> Path:
        return self.settings.run.directory / f"round-{number}"

    def training(self, number: int) -> Path:
        return self.folder(number) / "train" / self.drafter

    def made_prompts(self, number: int, switch: str) -> Path:
        return self.folder(number) / switch / f"{switch}.jsonl"

    def compose(self, stage: str, number: int) -> Settings:
        """The settings of a round's stage before further changes: its own overrides and its own
        folder."""
        own = self.own(stage, number)
        if stage == "generate":
            found = self.derive_generation(own)
        else:
            found = self.settings.derive(stage, self.recipe, more=own)
        return place(found, self.folder(number))

    def derive_generation(self, more: Sequence[str] = ()) -> Settings:
        """The generate stage without the prompts of the measurements. more: further overrides."""
        found = derive_generation(self.settings, self.recipe, more)
        return hold_out_benches(found, self.benches)

    def own(self, stage: str, number: int) -> list[str]:
        """The round's overrides (loop.round.overrides) that the stage reads."""
        texts = self.settings.loop.round.own_overrides(number)
        return [text for text in texts if understands(STAGES[stage], *parse([text]))]

    def change(self, number: int, settings: Settings, key: str, **values: object) -> Settings:
        """Settings with other values below `key` (a group, or a part of one: `generate.records`).
        The round's own overrides take precedence over these values."""
        texts = parse(self.settings.loop.round.own_overrides(number))
        own = {item.key_or_group for item in texts}
        free: dict[str, Any] = {
            name: value for name, value in values.items() if f"{key}.{name}" not in own
        }
        group, *below = key.split(".")
        part = getattr(settings, group)
        for name in below:
            free = {name: replace(getattr(part, name), **free)}
        return settings.put(**{group: replace(part, **free)})

    def feedback(self, number: int) -> FeedbackConfig:
        """The values of `feedback` for what round `number` makes from its records."""
        return self.feedbacks[feedback_overrides(self.settings.loop.round, number)]

    # Stages

    def generation(self, number: int, drafter: str, records: bool, hard: Path | None) -> Step:
        """Answers to this round's prompts, with the previous round's drafter (empty: plain
        decoding). hard: prompts to answer again."""
        found = self.answering(number, drafter, records)
        found = found.put(data=self.prompts(number, hard, found.data))
        return Step(f"round {number}: generate", found)

    def hold_out(self, settings: Settings) -> Settings:
        """A generate stage that holds out the same prompts as the first round."""
        files = [self.held_out(use) for use in USES]
        known = tuple(str(path) for path in files if path is not None)
        reserve = replace(settings.data.reserve, validation=0, bench=0, prompts=known)
        return settings.put(data=replace(settings.data, reserve=reserve))

    def held_out(self, use: str) -> Path | None:
        """The prompts that the first round held out of the data for `use`."""
        return held_out_prompts(self.folder(0) / "generate", use)

    def validation(self) -> tuple[str, ...]:
        """The prompts on which tau is measured in all rounds."""
        own = None if self.train.given("train.prompts") else self.held_out("validation")
        return self.train.train.prompts if own is None else (shown(own),)

    def answering(self, number: int, drafter: str, records: bool) -> Settings:
        """The generate stage of a round with its seed and the drafter that speeds it up (empty:
        none)."""
        found = self.compose("generate", number)
        if number:
            found = self.hold_out(found)
        seed = self.generate.sampling.seed + number
        found = self.change(number, found, "sampling", seed=seed)
        found = self.change(number, found, "generate", round=max(0, number - 1))
        if drafter:
            draft = {key: getattr(self.train.decode, key) for key in DRAFT_KEYS}
            found = self.change(number, found, "sampling", **draft)
            found = self.change(number, found, "generate", drafter=drafter)
            found = self.change(number, found, "generate.records", enabled=records)
        return found

    def answering_made(self, number: int, switch: str, drafter: str) -> Step:
        """Answers to all prompts that a round made, with a drafter (empty: plain decoding)."""
        found = self.answering(number, drafter, True)
        path = str(self.made_prompts(number, switch))
        whole = {"name": None, "mixture": (), "limit": None, "shuffle": False, "share": (0, 1)}
        # branches differ in a token or two, and their file has none twice
        data: Any = {"path": path, "deduplicate": "none", **whole, **TOKEN_ROWS}
        if number == 0:
            found = self.hold_out(found)
        run = replace(found.run, root=str(self.folder(number)), name=switch)
        found = found.put(data=replace(found.data, **data), run=run)
        return Step(f"round {number}: generate from {switch}", found)

    def prompts(self, number: int, hard: Path | None, data: DataConfig) -> DataConfig:
        """`data` with a round's prompts: its share of them, and `hard` ones."""
        sources = [source_of(item) for item in data.sources]
        own = parse(self.settings.loop.round.own_overrides(number))
        if self.shares and all(item.key_or_group != "data.share" for item in own):
            share = (number, self.settings.loop.rounds)
            sources = [replace(item, share=share) for item in sources]
        if not data.mixture and hard is None:
            return replace(data, share=sources[0].share)
        if hard is not None:
            form: Any = TOKEN_ROWS
            sources.append(SourceConfig(path=str(hard), **form))
        # what was said of the only source is now said of the first of several
        usual = {item.name: item.default for item in fields(SourceConfig) if item.name != "seed"}
        single: dict[str, Any] = {} if data.mixture else usual
        return replace(data, **single, mixture=tuple(sources))

    def training_step(self, number: int, answers: Path, start: str, on_policy: bool) -> Step:
        """The training on `answers` from checkpoint `start` (empty: as the recipe begins)."""
        found = self._training(number, answers, start, on_policy)
        if self.settings.loop.round.one_schedule:
            found = self.change(number, found, "schedule", **self.part(number, number + 1))
        return Step(f"round {number}: train", found)

    def trial(self, number: int, name: str, answers: Path, start: str, on_policy: bool) -> Step:
        """A short training at the end of the schedule, to test a switch."""
        loop = self.settings.loop
        found = self._training(number, answers, start, on_policy)
        found = self.change(number, found, "train", eval_every=0, save_every=0)
        found = found.put(train=replace(found.train, max_steps=loop.round.trial_steps))
        if loop.round.one_schedule:
            whole = self.part(number, loop.rounds)
            found = found.put(schedule=replace(found.schedule, **whole))
        run = replace(found.run, root=str(self.folder(number)), name=TRIALS, drafter=name)
        return Step(f"round {number}: trial of {name}", found.put(run=run))

    def part(self, first: int, last: int) -> dict[str, Any]:
        """Begin and end of the part of the loop's schedule from round `first` to before round
        `last`."""
        whole, rounds = self.train.schedule, self.settings.loop.rounds
        width = whole.end - whole.begin
        ends = zip(("begin", "end"), (first, last), strict=True)
        return {name: whole.begin + width * (place / rounds) for name, place in ends}

    def _training(self, number: int, answers: Path, start: str, on_policy: bool) -> Settings:
        """The train stage of a round with its seed, answers and start. on_policy: whether it may
        train on the drafter's own drafts."""
        found = self.compose("train", number)
        seed = self.train.train.seed + number
        found = self.change(number, found, "train", seed=seed, prompts=self.validation())
        run = replace(found.run, answers=str(answers))
        return begin(found.put(run=run), start, on_policy)

    def measurement(
        self, number: int, checkpoints: Sequence[str], folder: Path | None = None
    ) -> Settings:
        """The measurement that judges a round's drafter, or other checkpoints in the same way. It
        compares tau, for which one repeat is enough; a repeat on account of a busy machine would
        make the counts of the audit depend on the clock. folder: the run of the checkpoints; None:
        the round's."""
        judge, prompts = self.settings.loop.round.judge, self.validation()
        if len(prompts) != 1 and not self.judge_has_prompts:
            raise UserError(
                f"train.prompts names {len(prompts)} files, but a round is judged on one file or "
                "folder. Say which with loop.round.judge=['bench.prompts=<file>']."
            )
        more = ["bench.prompts=''", "bench.compare_noise=false", *judge]
        more += self.own("measure", number)
        before = ["bench=jsonl", "bench.repeats=1", "bench.retries=0"]
        found = self.settings.derive("measure", self.recipe, before=before, more=more)
        if not found.bench.prompts:
            found = found.put(bench=replace(found.bench, prompts=prompts[0]))
        none: Any = {"kinds": (), "heads": {}, "drafts": {}}
        measure = replace(found.measure, name="measure", drafters=tuple(checkpoints), **none)
        return place(found.put(measure=measure), folder or self.folder(number))


def require_read(config: RoundConfig) -> None:
    """Raise `UserError` for an override of a round that no stage of a round reads."""
    for number, overrides in enumerate(config.overrides):
        for item in parse(overrides):
            if not any(understands(STAGES[stage], item) for stage in ROUND_STAGES):
                groups = join(*(" ".join(STAGES[stage].groups) for stage in ROUND_STAGES))
                raise UserError(
                    f"loop.round.overrides[{number}]: no round reads '{item.input_line}'. A round "
                    f"reads the groups {', '.join(groups)}. Leave it out, or give it for the whole "
                    "loop."
                )


def feedback_overrides(config: RoundConfig, number: int) -> tuple[str, ...]:
    """What round `number` sets of `feedback`."""
    own = config.own_overrides(number)
    return tuple(text for text in own if group_of(text) == "feedback")


def group_of(override: str) -> str:
    return parse([override])[0].key_or_group.split(".")[0]


def source_of(data: SourceConfig) -> SourceConfig:
    """Only the dataset of settings that may be a whole `DataConfig`."""
    return SourceConfig(**{item.name: getattr(data, item.name) for item in fields(SourceConfig)})


def place(settings: Settings, folder: Path) -> Settings:
    return settings.put(run=replace(settings.run, root=str(folder.parent), name=folder.name))


def begin(settings: Settings, start: str, on_policy: bool) -> Settings:
    """The settings of a training from checkpoint `start` (empty: as the recipe begins). on_policy:
    whether it may train on the drafter's own drafts."""
    train = settings.train
    if start:
        train = replace(train, refresh=replace(train.refresh, init_from=start))
    if not on_policy:
        train = replace(train, on_policy=replace(train.on_policy, share=0.0))
    return settings.put(train=train)
