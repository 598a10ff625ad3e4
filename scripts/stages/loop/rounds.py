"""`headstart loop` with `loop.rounds`: one drafter, trained in rounds that learn from its rejected
drafts.

A round answers prompts, trains on the answers and is judged. From the second round on, the drafter
of the best round so far speeds up the answering. Its verifications are recorded, the records become
weights and choices of training data (`feedback`), and training continues from its weights. Switches
without a gain are turned off. All decisions follow from the rounds' folders, and <run>/loop.json
records each decision with its reason. So the same command continues after any interruption and
comes to the same end, unless measured time decides (docs/rounds.md).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from heads.api.errors import UserError
from heads.api.reading import read_object
from inference.folders import WRITTEN, copy_plain, delete_own, is_aside, is_temporary, replace_part
from inference.manifest import MANIFEST_FILE, checkpoint_hash, write_json
from inference.measure.metrics import Gain
from inference.target.model import TargetModel
from inference.verifications import RECORDS
from inference.writers import only_writer
from scripts.config.schema import Settings
from scripts.run.folder import (
    different,
    holds_results,
    in_words,
    name_of,
    named_file,
    overwrites,
    read_record,
)
from scripts.run.process import prepare_process, shown
from scripts.stages.loop import facts
from scripts.stages.loop.plan import (
    MORE,
    PLAIN,
    TRIALS,
    RoundPlan,
    begin,
    feedback_overrides,
    place,
)
from scripts.stages.loop.speed import measure_generation
from scripts.stages.loop.steps import Step, perform
from scripts.stages.loop.table import change, show
from scripts.stages.measure import measure_run
from train.feedback.branches import write_branches
from train.feedback.build import HARD_PROMPTS, build
from train.feedback.config import FeedbackConfig
from train.feedback.variations import write_variations

ON_POLICY, HARD = "on_policy", "hard_prompts"
VARIATIONS, BRANCHES = MORE
PREFIXES = {VARIATIONS: "variation", BRANCHES: "branch"}
"""Beginning of the names of the settings of `feedback` with which prompts are made."""
GENERATED = (HARD, *MORE)
"""Switches that determine which prompts are answered."""
SWITCHES = ("token_weights", "anchor_weights", "replay", "domain_weights", *GENERATED)
"""The switches of `feedback`; `train.on_policy.share` is an additional one."""
KEPT = ("best", "config.yaml", "run.json", "manifest.json", "summary.json", "log.jsonl")
"""Files of a round's training that are copied to <run>/train/<drafter>/: everything except its
states."""
OPEN_LOOP = "open-loop"
LIMITS = ("seconds", "tokens", "gpu_hours")
"""Costs that a budget can limit."""


@dataclass
class Rounds:
    """The rounds of one loop and their state."""

    settings: Settings
    done: list[facts.RoundRecord] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    """Switch that was turned off -> the reason."""
    best: int = 0
    stale: int = 0
    """Consecutive rounds without a rise of tau for which no switch was responsible."""
    open_loop: facts.OpenLoopRecord | None = None
    """The training with which the rounds are compared, once it is done."""
    known: int = 0
    """Rounds of an earlier command in loop.json, which stays as it is until this one has repeated
    them."""

    def __post_init__(self) -> None:
        self.plan = RoundPlan(self.settings)
        self.config = self.settings.loop
        self.run_folder = self.settings.run.directory
        self.kept = self.run_folder / "train" / self.plan.drafter

    def active(self, number: int) -> list[str]:
        """The switches that round `number` asks for, without those that were turned off."""
        config = self.plan.feedback(number)
        asked = [name for name in SWITCHES if getattr(config, name)]
        if self.plan.compose("train", number).train.on_policy.share:
            asked.append(ON_POLICY)
        return [name for name in asked if name not in self.off]

    def run(self) -> facts.LoopRecord:
        """Run all rounds that the settings allow, keep the best one as the run's drafter, and
        return the record."""
        self.require_own_place()
        self.require_same_settings()
        # this process decodes too, even where a round's stages are complete and prepare nothing
        prepare_process(self.settings.run)
        ended_by = ""
        while not ended_by:
            number = len(self.done)
            self.done.append(self.play(number))
            self.judge(number)
            if len(self.done) >= self.known:
                self.write("")
            ended_by = self.ends()
            show(self.record(ended_by))
        self.keep_best()
        if self.config.round.open_loop:
            self.open_loop = self.run_open_loop()
            show(self.record(ended_by))
        return self.write(ended_by)

    def ends(self) -> str:
        """Why there is no further round; empty if there is one."""
        if len(self.done) == self.config.rounds:
            return "rounds"
        if self.config.round.patience and self.stale >= self.config.round.patience:
            return "tau"
        budget, spent = self.config.budget, self.spent()
        for name in LIMITS:
            limit, used = getattr(budget, name), getattr(spent, name)
            highest = max(getattr(entry.spent, name) for entry in self.done)
            if limit and used + highest > limit:
                return f"budget ({name})"
        return ""

    def spent(self) -> facts.Spent:
        return sum((entry.spent for entry in self.done), facts.Spent())

    def training(self, number: int) -> facts.Trained:
        found = self.done[number].training
        assert found is not None, "every finished round has a training"
        return found

    # One round

    def play(self, number: int) -> facts.RoundRecord:
        """Run all parts of round `number` and return its record."""
        plan, folder, first = self.plan, self.plan.folder(number), number == 0
        entry = facts.RoundRecord(number, "" if first else self.training(self.best).checkpoint)
        asked = [] if first else self.active(number)
        learns = [name for name in asked if name != ON_POLICY]
        if overwrites(self.settings.run, folder / "generate"):
            self.remove_made(number)
        step = plan.generation(number, entry.start, bool(learns), self.hard_prompts(number))
        self.perform(step)
        entry.generated = facts.read_generation(folder / "generate")
        checked = self.config.round.checked_answers
        if entry.start and checked:
            entry.generation = measure_generation(step.settings, folder, checked)
        stages = [folder / "generate"]
        plain = answers_plainly(learns, entry.generation)
        for switch in MORE:
            if switch in learns and self.make(number, switch, entry.start, plain):
                stages.append(folder / switch / "generate")
                setattr(entry, switch, facts.read_generation(stages[-1]))
        if number == 1 and self.config.round.trial_steps and asked:
            entry.trials = self.try_switches(entry)
            stages += [*sorted((folder / TRIALS / "train").iterdir()), folder / TRIALS / "measure"]
        entry.switches = [name for name in asked if name not in self.off]
        training = plan.training(number)
        answers = self.feedback(entry, entry.switches, folder / "feedback", training)
        on_policy = not first and ON_POLICY in entry.switches
        self.perform(plan.training_step(number, answers, entry.start, on_policy))
        entry.training = facts.read_training(training)
        self.measure(plan.measurement(number, [entry.training.checkpoint]))
        entry.measured = facts.read_measurement(folder / "measure", plan.drafter)
        stages += [training, folder / "measure"]
        entry.spent = facts.spent(stages, facts.other_seconds(folder))
        return entry

    def perform(self, step: Step) -> None:
        print(f"\n[{step.title}]", flush=True)
        perform(self.config.launch, step)

    def measure(self, settings: Settings) -> None:
        """Measure without a table, because the loop prints a table."""
        print("\n[measure]", flush=True)
        measure_run(settings)

    def make(self, number: int, switch: str, start: str, plain: bool) -> bool:
        """Make prompts from this round's answers and answer them; returns whether there are any.
        Branches are also made from the answers to earlier branches. start: the drafter that helps
        to answer; plain: whether they are answered without it."""
        plan, own = self.plan, self.plan.folder(number) / "generate"
        config = plan.feedback(number)
        made = plan.made_prompts(number, switch)
        about = made.with_name(facts.MADE_FILE)
        asked = {k: v for k, v in asdict(config).items() if k.startswith(PREFIXES[switch])}
        if made.is_file():  # the file appears complete, and answers may already depend on it
            known = read_object(about) if about.is_file() else {}
            if not self.settings.run.accept_changes:
                require_same(made.parent, known.get("feedback") or {}, asked)
            plain = bool(known.get("plain", plain))
        else:
            begun = time.monotonic()
            earlier = [entry.round for entry in self.done if getattr(entry, switch) is not None]
            before = [plan.made_prompts(place, switch) for place in earlier]
            if switch == BRANCHES:
                answers = [own, *(path.parent / "generate" for path in before)]
                write_branches([(one, one / RECORDS) for one in answers], made, config, before)
            else:
                generate, pairs = plan.generate, [(own, own / RECORDS)]
                seed, arguments = generate.sampling.seed + number, generate.data.template_arguments
                target = TargetModel.load(generate.target)
                write_variations(target, pairs, made, config, seed, before, arguments)
            seconds = time.monotonic() - begun
            write_json(about, {"seconds": seconds, "feedback": asked, "plain": plain})
        if not made.stat().st_size:
            return False
        self.perform(plan.answering_made(number, switch, "" if plain else start))
        return True

    def remove_made(self, number: int) -> None:
        """Remove the prompts that an earlier loop made in a round, and their answers."""
        for switch in MORE:
            made = self.plan.made_prompts(number, switch)
            delete_own(made.parent / "generate", "generate", "run.overwrite")
            for path in (made, made.with_name(facts.MADE_FILE)):
                path.unlink(missing_ok=True)

    def answer_folders(self, entry: facts.RoundRecord) -> list[Path]:
        """The answers of a round. Folders of switches that were off in it may lie beside them, from
        an earlier loop with other switches."""
        folder = self.plan.folder(entry.round)
        made = [switch for switch in MORE if getattr(entry, switch) is not None]
        return [folder / "generate", *(folder / switch / "generate" for switch in made)]

    def hard_prompts(self, number: int) -> Path | None:
        """The prompts that round `number` answers again, if the round before chose any."""
        path = self.plan.folder(number - 1) / "feedback" / HARD_PROMPTS
        chosen = number > 1 and HARD in self.done[number - 1].switches and HARD not in self.off
        return path if chosen and path.is_file() else None

    def feedback(
        self, entry: facts.RoundRecord, switches: list[str], out: Path, training: Path
    ) -> Path:
        """The folder to train on: answers that are weighted and chosen by the records of their
        verifications. It is the round's generate folder if the records are not used and no other
        answers are read. training: the folder of the training that reads it; once this has begun,
        what it reads is not replaced."""
        run, played = self.settings.run, [*self.done, entry]
        own = [name for name in switches if name not in (ON_POLICY, *MORE)]
        read = reversed(played[-self.config.round.memory :])
        answers = [folder for each in read for folder in self.answer_folders(each)]
        if not own and len(answers) == 1:
            return answers[0]
        begun = not overwrites(run, training) and holds_results(training)
        if begun and run.accept_changes and (out / MANIFEST_FILE).is_file():
            return out  # changed settings count for what has not begun
        records = [folder / RECORDS for folder in answers]
        config = only_switches(self.plan.feedback(entry.round), own)
        build(records, answers, out, config, reader=training if begun else None)
        return out

    # Which switches pay off

    def try_switches(self, entry: facts.RoundRecord) -> dict[str, Gain]:
        """Run a short training with each switch of a round and with none; turn off the switches
        without a higher tau."""
        number, steps = entry.round, self.config.round.trial_steps
        folder = self.plan.folder(number) / TRIALS
        tried = [name for name in self.active(number) if name not in GENERATED]
        checkpoints = []
        for name in (PLAIN, *tried):
            own, training = [name] if name in SWITCHES else [], folder / "train" / name
            answers = self.feedback(entry, own, folder / f"feedback-{name}", training)
            self.perform(self.plan.trial(number, name, answers, entry.start, name == ON_POLICY))
            checkpoints.append(shown(training / "best"))
        self.measure(self.plan.measurement(number, checkpoints, folder))
        measured, found = folder / "measure", {}
        for name in tried:
            found[name] = facts.compare((measured, name), (measured, PLAIN))
            if found[name].tau <= 0:
                gave = f"gave tau {change(found[name])} against {steps} without"
                self.off[name] = f"{steps} steps with it {gave}"
        return found

    def judge(self, number: int) -> None:
        """Compare the last round with the best one before it, and act on the result."""
        if number == 0:
            return
        entry, drafter = self.done[number], self.plan.drafter
        own, best = (self.plan.folder(place) / "measure" for place in (number, self.best))
        found = facts.compare((own, drafter), (best, drafter))
        entry.over, entry.gain, entry.rises = self.best, found, found.tau_ci95[0] > 0
        if found.tau > 0:
            self.best = number
        if entry.rises:
            self.stale = 0
        elif not entry.switches:
            self.stale += 1
        for name in entry.switches if not entry.rises else ():
            self.off[name] = (
                f"round {number} with it changed tau by {change(found)}, which is no clear rise"
            )

    # The end

    def run_open_loop(self) -> facts.OpenLoopRecord:
        """The training with which the rounds are compared (`loop.round.open_loop`): one training
        without feedback, on as many tokens as all rounds had.

        Its answers are the target's to all prompts, generated once, as in a loop without rounds. If
        the first round has answered these prompts in the same way, its answers are read. The
        training is judged as the rounds are, and lies in <run>/open-loop/, a separate run. Complete
        stages are skipped.
        """
        plan, first, folder = self.plan, self.training(0), self.run_folder / OPEN_LOOP
        if plan.shares or plan.own("generate", 0):
            answers = folder / "generate"
            generation = place(plan.hold_out(plan.generate), folder)
            self.perform(Step("open loop: generate", generation))
        else:
            answers = plan.folder(0) / "generate"
        steps = max(1, round(self.spent().tokens * first.steps / first.tokens))
        training = begin(place(self.settings.derive("train", plan.recipe), folder), "", False)
        training = training.put(
            run=replace(training.run, answers=str(answers)),
            train=replace(training.train, max_steps=steps, prompts=plan.validation()),
        )
        self.perform(Step("open loop: train", training))
        out, measured = folder / "train" / plan.drafter, folder / "measure"
        trained = facts.read_training(out)
        self.measure(plan.measurement(self.best, [trained.checkpoint], folder))
        rival = plan.folder(self.best) / "measure"
        return facts.OpenLoopRecord(
            generated=facts.read_generation(answers),
            training=trained,
            measured=facts.read_measurement(measured, plan.drafter),
            gain=facts.compare((rival, plan.drafter), (measured, plan.drafter)),
            spent=facts.spent([folder / "generate", out, measured]),
        )

    @property
    def asked(self) -> facts.LoopSettings:
        """The settings of this command."""
        return facts.LoopSettings(
            self.config.rounds,
            self.config.round,
            self.config.budget,
            self.plan.feedbacks[()],
            self.plan.train.train.on_policy.share,
        )

    def record(self, ended_by: str) -> facts.LoopRecord:
        """loop.json. ended_by: rounds, tau, or budget (and which limit); empty while the loop
        runs."""
        measured = self.done[self.best].measured
        assert measured is not None, "every finished round was measured"
        return facts.LoopRecord(
            kind=self.plan.train.head.kind,
            settings=self.asked,
            rounds=self.done,
            best=facts.BestRound(self.best, self.training(self.best).checkpoint, measured.tau),
            off=self.off,
            ended_by=ended_by,
            spent=self.spent(),
            open_loop=self.open_loop,
            state="complete" if ended_by else "running",
        )

    def write(self, ended_by: str) -> facts.LoopRecord:
        record = self.record(ended_by)
        record.write(self.run_folder)
        return record

    def require_same_settings(self) -> None:
        """Raise `UserError` if the rounds in loop.json have learnt from their records with other
        settings than this command gives. All others are compared by the stages that read them."""
        run = self.settings.run
        if run.overwrite or not (self.run_folder / facts.LOOP_FILE).is_file():
            return
        with suppress(UserError):  # a damaged file is written anew, from the rounds' folders
            before = facts.LoopRecord.read(self.run_folder)
            self.known = len(before.rounds)
        if self.known < 2 or run.accept_changes:  # the first round learns from no records
            return
        old, new = (learning(one, self.known) for one in (before.settings, self.asked))
        changed = [f"{key} was {old[key]!r}, is {new[key]!r}" for key in different(old, new)]
        if changed:
            raise UserError(
                f"'{self.run_folder}' has {self.known} rounds, which were played with other "
                f"settings: {in_words(changed)}. Choose another run.name, start again with "
                "run.overwrite=true, or continue all the same with run.accept_changes=true."
            )

    def require_own_place(self) -> None:
        """Raise `UserError` if the run has rounds of another drafter, or if something else is in
        the best drafter's place."""
        found = (path.name for path in (self.plan.folder(0) / "train").glob("[!.]*"))
        others = {name for name in found if not is_aside(name) and not is_temporary(name)}
        if others := others - {self.plan.drafter}:
            raise UserError(
                f"'{self.run_folder}' has the rounds of {', '.join(sorted(others))}. Their answers "
                f"have that drafter's rejected drafts, which '{self.plan.drafter}' would learn "
                "from. Choose another run.name."
            )
        if self.kept.exists() and not is_copy(self.kept, self.run_folder):
            raise UserError(
                f"'{self.kept}' is the training of another loop or of `headstart train`, and the "
                "rounds' best drafter belongs there. Choose another run.name, or move that "
                "training away and repeat the command: the rounds are kept."
            )

    def keep_best(self) -> None:
        """Copy the best round's training to <run>/train/<drafter>/, for later stages."""
        source, out = self.plan.training(self.best), self.kept
        if checkpoint_hash(out / "best") == self.training(self.best).weights_sha256:
            return  # other stages may have added decode.yaml or watch.json since
        self.require_own_place()  # hours may have passed since the first check
        with only_writer(out), replace_part(out, WRITTEN["train"] + KEPT) as fresh:
            for name in KEPT:
                if (source / name).exists():
                    copy_plain(source / name, fresh / name)
            record = read_record(fresh)
            if record is not None:
                record.copied_from = str(source)
                # inputs are named from the record's folder, which is another one now
                record.inputs = {
                    name_of(named_file(name, source), out, self.run_folder): digest
                    for name, digest in record.inputs.items()
                }
                record.write(fresh)


def answers_plainly(learns: list[str], speed: facts.HelpedGeneration | None) -> bool:
    """Whether made prompts are answered without a drafter: it is slower, and no records are
    read."""
    return speed is not None and speed.speedup < 1.0 and set(learns) == {VARIATIONS}


def require_same(folder: Path, made: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise `UserError` if the prompts in a folder were made with other settings."""
    for key, value in asked.items():
        if made.get(key, value) != value:
            raise UserError(
                f"'{folder}' was made with feedback.{key}={made[key]}, and {value} is given. "
                "Give the former value, choose another run.name, or start again with "
                "run.overwrite=true."
            )


def learning(settings: facts.LoopSettings, rounds: int) -> dict[str, Any]:
    """The settings, by name, of what the first `rounds` rounds learn from records and how."""
    own = {
        f"loop.round.overrides[{number}]": feedback_overrides(settings.round, number)
        for number in range(1, rounds)
    }
    return {
        **{f"feedback.{key}": value for key, value in asdict(settings.feedback).items()},
        "loop.round.memory": settings.round.memory,
        "loop.round.trial_steps": settings.round.trial_steps,
        "train.on_policy.share": settings.on_policy,
        **own,
    }


def is_copy(training: Path, run: Path) -> bool:
    """Whether a training is a round's copy: by its record, or by weights in <run>/loop.json."""
    if not (run / facts.LOOP_FILE).is_file():
        return False
    record = read_record(training)
    if record is not None and record.copied_from:
        return True
    rounds = facts.LoopRecord.read(run).rounds
    known = {entry.training.weights_sha256 for entry in rounds if entry.training is not None}
    return checkpoint_hash(training / "best") in known


def only_switches(config: FeedbackConfig, names: list[str]) -> FeedbackConfig:
    """`config` with only the switches `names` on."""
    usual = FeedbackConfig()
    off = {name: getattr(usual, name) for name in SWITCHES if name not in names}
    if "domain_weights" not in names:
        off["traffic"] = usual.traffic
    return replace(config, records=(), answers=(), **off)
