"""`headstart loop` with `loop.rounds`: one drafter, trained in rounds that learn from its own rejected drafts (docs/rounds.md).

A round answers prompts, trains on the answers and is judged. From the second one on, the drafter of the best round so far speeds up
the answering, its verifications are recorded, the records become weights and choices of training data (`feedback`), and training
goes on from its weights. What does not pay is turned off. Everything is decided by what lies in the rounds' folders, and
<run>/loop.json says what was decided and why; so the same command continues after any interruption and comes to the same end.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.api.errors import UserError
from inference.folders import RUN_FILE
from inference.manifest import MANIFEST_FILE, checkpoint_hash, write_json
from inference.target.model import TargetModel
from scripts import rounds_facts as facts
from scripts.loop import Step, perform
from scripts.measure import measured
from scripts.rounds_open import open_loop
from scripts.rounds_plan import HARD_PROMPTS, MORE, PLAIN, TRIALS, RoundPlan, text
from scripts.rounds_speed import generation_speed
from scripts.rounds_table import show
from scripts.run import shown
from train.feedback import build
from train.feedback.branches import write_branches
from train.feedback.config import FeedbackConfig
from train.feedback.variations import write_variations
from train.recording import RECORDS

if TYPE_CHECKING:
    from scripts.config import Settings

LOOP_FILE = "loop.json"
FORMAT = 1
ON_POLICY, HARD = "on_policy", "hard_prompts"
VARIATIONS, BRANCHES = MORE
GENERATED = (HARD, *MORE)
"""Switches that say what is answered."""
SWITCHES = ("token_weights", "anchor_weights", "replay", "domain_weights", *GENERATED)
"""The switches of `feedback`; `train.on_policy.share` is one more."""
COPIED = "copied_from"
"""Key of a copied training's run.json: the round's training."""
KEPT = ("best", "config.yaml", "run.json", "manifest.json", "summary.json", "log.jsonl")
"""What of a round's training is copied to <run>/train/<drafter>/: all but its states."""


def run_rounds(settings: Settings) -> dict[str, Any]:
    """Play all rounds that are worth it, keep the best one as the run's drafter, and return what loop.json holds."""
    return Rounds(settings).run()


@dataclass
class Rounds:
    """The rounds of one loop, and where they stand."""

    settings: Settings
    done: list[dict[str, Any]] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    """Switches that were turned off, and why."""
    best: int = 0
    stale: int = 0
    """Rounds in a row that brought no rise, for which no switch could be blamed."""

    open_loop: dict[str, Any] = field(default_factory=dict)
    """What the rounds are compared with, once that is known."""

    def __post_init__(self) -> None:
        self.plan = RoundPlan(self.settings)
        self.config = self.settings.loop
        self.wanted = [name for name in SWITCHES if getattr(self.settings.feedback, name)]
        if self.plan.train.train.on_policy.share:
            self.wanted.append(ON_POLICY)

    @property
    def active(self) -> list[str]:
        """The switches that are on."""
        return [name for name in self.wanted if name not in self.off]

    def run(self) -> dict[str, Any]:
        """Play the rounds; see the module."""
        self.require_own()
        ended_by = ""
        while not ended_by:
            number = len(self.done)
            self.done.append(self.play(number))
            self.judge(number)
            self.write("")
            ended_by = self.ends()
            show(self.content(ended_by))
        self.keep_best()
        if self.config.round.open_loop:
            self.open_loop = open_loop(self.plan, self.done, self.best, self.perform, self.measure)
            show(self.content(ended_by))
        return self.write(ended_by)

    def ends(self) -> str:
        """Why there is no further round; empty where there is one."""
        if len(self.done) == self.config.rounds:
            return "rounds"
        if self.config.round.patience and self.stale >= self.config.round.patience:
            return "tau"
        budget, spent = asdict(self.config.budget), self.spent()
        for name in facts.SPENT:
            dearest = max(entry["spent"][name] for entry in self.done)
            if budget[name] and spent[name] + dearest > budget[name]:
                return f"budget ({name})"
        return ""

    def require_own(self) -> None:
        """Raise `UserError` where the best drafter's place is taken by another training."""
        out = self.settings.run.directory / "train" / self.plan.drafter
        if out.exists() and not is_copy(out, self.settings.run.directory / LOOP_FILE):
            raise UserError(
                f"'{out}' is the training of another loop, and the rounds' best drafter belongs there. Choose another run.name."
            )

    def spent(self) -> dict[str, float]:
        """What all rounds have cost together."""
        return {name: sum(entry["spent"][name] for entry in self.done) for name in facts.SPENT}

    # ---- one round -----------------------------------------------------------------------------------------------------------

    def play(self, number: int) -> dict[str, Any]:
        """Do everything that round `number` consists of, and return its entry in loop.json."""
        plan, folder, first = self.plan, self.plan.folder(number), number == 0
        start = "" if first else self.done[self.best]["training"]["checkpoint"]
        asked = [] if first else self.active
        learns = [name for name in asked if name != ON_POLICY]
        step = plan.generation(number, start, bool(learns), self.hard_prompts(number))
        self.perform(step)
        entry: dict[str, Any] = {"round": number, "start": start, "generated": facts.answered(folder / "generate")}
        if start and self.config.round.checked_answers:
            entry["generation"] = self.speed(step, folder)
        stages = [folder / "generate"]
        helper = self.helper(start, learns, entry.get("generation"))
        for switch in (name for name in MORE if name in learns and self.make(number, name, helper)):
            stages.append(folder / switch / "generate")
            entry[switch] = facts.answered(stages[-1])
        if number == 1 and self.config.round.trial_steps and asked:
            entry["trials"] = self.try_switches(number, start)
            stages += [*sorted((folder / TRIALS / "train").iterdir()), folder / TRIALS / "measure"]
        entry["switches"] = [name for name in asked if name in self.active]
        answers = self.feedback(number, entry["switches"], folder / "feedback")
        self.perform(plan.training_step(number, answers, start, not first and ON_POLICY in entry["switches"]))
        training = plan.training(number)
        entry["training"] = facts.trained(training)
        self.measure(plan.judged(number, [entry["training"]["checkpoint"]]))
        entry["measured"] = facts.measured(folder / "measure", plan.drafter)
        entry["spent"] = facts.spent([*stages, training, folder / "measure"], facts.other_seconds(folder))
        return entry

    def perform(self, step: Step) -> None:
        """Run a stage and say which."""
        print(f"\n[{step.title}]", flush=True)
        perform(self.config.launch, step)

    def measure(self, settings: Settings) -> None:
        """Measure, without a table: the loop has one of its own."""
        print("\n[measure]", flush=True)
        measured(settings)

    def speed(self, step: Step, folder: Path) -> dict[str, Any]:
        """What the drafter gained while it helped to generate."""
        from scripts.config import load_settings

        return generation_speed(load_settings(step.stage, step.overrides), folder, self.config.round.checked_answers)

    def helper(self, start: str, learns: list[str], generation: Mapping[str, Any] | None) -> str:
        """The drafter that answers made prompts: the round's, unless it slows the machine down and nobody reads its records."""
        slower = generation is not None and generation["speedup"] < 1.0
        return "" if slower and set(learns) == {VARIATIONS} else start

    def make(self, number: int, switch: str, start: str) -> bool:
        """Make prompts from this round's answers (branches: also from the answers to earlier branches) and answer them, with
        the drafter `start` (empty: plainly); returns whether there are any.
        """
        plan, own, config = self.plan, self.plan.folder(number) / "generate", self.settings.feedback
        made = plan.made_prompts(number, switch)
        if not made.is_file():  # it appears whole, and answers may depend on it already
            begun = time.monotonic()
            before = [plan.made_prompts(place, switch) for place in range(number)]
            before = [path for path in before if path.is_file() and path.stat().st_size]
            if switch == BRANCHES:
                answers = [own, *(path.parent / "generate" for path in before)]
                write_branches([(one, one / RECORDS) for one in answers], made, config, before)
            else:
                generate = plan.generate
                seed, arguments = generate.sampling.seed + number, generate.data.template_arguments
                target = TargetModel.load(generate.target)
                write_variations(target, [(own, own / RECORDS)], made, config, seed, before, arguments)
            write_json(made.with_name(facts.MADE_FILE), {"seconds": time.monotonic() - begun})
        if not made.stat().st_size:
            return False
        self.perform(plan.answering_made(number, switch, start))
        return True

    def answered(self, number: int) -> list[Path]:
        """The folders of a round's answers."""
        folder = self.plan.folder(number)
        own = [folder / "generate", *(folder / switch / "generate" for switch in MORE)]
        return [place for place in own if (place / MANIFEST_FILE).is_file()]

    def hard_prompts(self, number: int) -> Path | None:
        """The prompts that round `number` answers once more, if the round before it has chosen any."""
        path = self.plan.folder(number - 1) / "feedback" / HARD_PROMPTS
        return path if number > 1 and HARD in self.active and path.is_file() else None

    def feedback(self, number: int, switches: list[str], out: Path) -> Path:
        """The folder to train on: answers weighed and chosen by the records of their verifications.

        It is the round's own generate folder where nothing is asked of the records and no other answers are read.
        """
        memory = self.config.round.memory
        read = range(0 if memory == 0 else max(0, number + 1 - memory), number + 1)
        own = [name for name in switches if name not in (ON_POLICY, *MORE)]
        answers = [folder for place in reversed(read) for folder in self.answered(place)]
        if not own and len(answers) == 1:
            return answers[0]
        build([folder / RECORDS for folder in answers], answers, out, switched(self.settings.feedback, own))
        return out

    # ---- what pays -----------------------------------------------------------------------------------------------------------

    def try_switches(self, number: int, start: str) -> dict[str, Any]:
        """Train shortly with every switch alone and with none; turn off what has no higher tau than none. Returns the gains."""
        folder = self.plan.folder(number) / TRIALS
        tried = [name for name in self.active if name not in GENERATED]
        checkpoints = {}
        for name in (PLAIN, *tried):
            own = [name] if name in SWITCHES else []
            answers = self.feedback(number, own, folder / f"feedback-{name}")
            self.perform(self.plan.trial(number, name, answers, start, name == ON_POLICY))
            checkpoints[name] = shown(folder / "train" / name / "best")
        place = [f"run.root={text(self.plan.folder(number))}", f"run.name={TRIALS}"]
        self.measure(self.plan.judged(number, list(checkpoints.values()), place))
        found = {}
        for name in tried:
            gain = facts.gained((folder / "measure", name), (folder / "measure", PLAIN))
            found[name] = facts.plain(gain)
            if gain.tau <= 0:
                steps = self.config.round.trial_steps
                self.off[name] = f"{steps} steps with it gave tau {change(found[name])} against {steps} without"
        return found

    def judge(self, number: int) -> None:
        """Compare the last round with the best one before it, and draw the consequences."""
        if number == 0:
            return
        entry, place = self.done[number], (self.plan.folder(number) / "measure", self.plan.drafter)
        found = facts.gained(place, (self.plan.folder(self.best) / "measure", self.plan.drafter))
        entry["over"], entry["gain"] = self.best, facts.plain(found)
        entry["rises"] = found.tau_ci95[0] > 0
        if found.tau > 0:
            self.best = number
        if entry["rises"]:
            self.stale = 0
        elif entry["switches"]:
            for name in entry["switches"]:
                self.off[name] = f"round {number} with it changed tau by {change(entry['gain'])}, which is no clear rise"
        else:
            self.stale += 1

    # ---- the end -------------------------------------------------------------------------------------------------------------

    def content(self, ended_by: str) -> dict[str, Any]:
        """loop.json. ended_by: rounds, tau, or budget (what of it); empty while it runs."""
        best = self.done[self.best]
        return {
            "format": FORMAT,
            "stage": "loop",
            "state": "complete" if ended_by else "running",
            "kind": self.plan.train.head.kind,
            "settings": {
                "rounds": self.config.rounds,
                "round": asdict(self.config.round),
                "budget": asdict(self.config.budget),
                "feedback": asdict(self.settings.feedback),
                "on_policy": self.plan.train.train.on_policy.share,
            },
            "rounds": self.done,
            "best": {"round": self.best, "checkpoint": best["training"]["checkpoint"], "tau": best["measured"]["tau"]},
            **({"open_loop": self.open_loop} if self.open_loop else {}),
            "off": self.off,
            "ended_by": ended_by,
            "spent": self.spent(),
        }

    def write(self, ended_by: str) -> dict[str, Any]:
        """Write loop.json and return what it holds."""
        content = self.content(ended_by)
        write_json(self.settings.run.directory / LOOP_FILE, content)
        return content

    def keep_best(self) -> None:
        """Copy the best round's training to <run>/train/<drafter>/, whole: it is the run's drafter for every later stage."""
        source = self.plan.training(self.best)
        out = self.settings.run.directory / "train" / self.plan.drafter
        if checkpoint_hash(out / "best") == self.done[self.best]["training"]["weights_sha256"]:
            return  # with what other stages have put beside it since: decode.yaml, watch.json
        fresh, old = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.old")
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir(parents=True)
        for name in KEPT:
            if (source / name).is_dir():
                shutil.copytree(source / name, fresh / name)
            elif (source / name).is_file():
                shutil.copy2(source / name, fresh / name)
        if (fresh / RUN_FILE).is_file():
            record = json.loads((fresh / RUN_FILE).read_text(encoding="utf-8"))
            write_json(fresh / RUN_FILE, record | {COPIED: str(source)})
        if out.exists():
            out.rename(old)
        fresh.rename(out)
        shutil.rmtree(old, ignore_errors=True)


def is_copy(training: Path, loop_file: Path) -> bool:
    """Whether a training's folder is a copy that rounds made: its record says so, or its weights are those of a round in
    `loop_file`.
    """
    if not loop_file.is_file():
        return False
    record = training / RUN_FILE
    if record.is_file() and COPIED in json.loads(record.read_text(encoding="utf-8")):
        return True
    rounds = json.loads(loop_file.read_text(encoding="utf-8"))["rounds"]
    return checkpoint_hash(training / "best") in {entry["training"]["weights_sha256"] for entry in rounds}


def switched(config: FeedbackConfig, names: list[str]) -> FeedbackConfig:
    """`config` with only the switches `names` on."""
    usual = FeedbackConfig()
    changes: dict[str, Any] = {name: getattr(usual, name) for name in SWITCHES if name not in names}
    if "domain_weights" not in names:
        changes["traffic"] = usual.traffic
    known = {item.name for item in fields(FeedbackConfig)}
    assert set(changes) <= known
    return replace(config, records=(), answers=(), **changes)


def change(gain: Mapping[str, Any]) -> str:
    """A gain of tau with its interval."""
    low, high = gain["tau_ci95"]
    return f"{gain['tau']:+.3f} [{low:+.3f}, {high:+.3f}]"
