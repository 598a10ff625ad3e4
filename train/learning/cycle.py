"""The learner: a sequence of steps, each of which ends with a line of the journal.

    traffic*  ->  collected  ->  weighed  ->  trained  ->  measured  ->  trial  ->  compared
                                                                          ->  swapped | rejected

A server that tries no candidates has no line `trial`: the held-out prompts decide
(`train.learning.engine`).

The next step follows only from the journal's last line of the cycle, and every step can be repeated
from its beginning. A learner that was killed between two lines repeats the step that has no line
yet, and no other. Folders that a step left unfinished are continued (training) or overwritten. The
swap itself is one call of the server, which afterwards has the candidate or has not; a learner that
does not know asks the server. If a candidate's comparison ends open and its tau is higher so far,
the candidate does not serve, but the next cycle continues from it: small gains add up until one is
shown.

    <folder>/journal.jsonl     see `train.learning.journal`
    <folder>/traffic/          samples (`inference.server.samples`)
    <folder>/cycles/0003/      the work of a cycle; removed at its end
    <folder>/drafters/0003/    its candidate; kept while it serves or a cycle continues from it, and
                               `learn.keep` in all
    <folder>/learn.html        tau over time
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads.api.checkpoint import weights_file
from heads.api.errors import UserError
from inference.folders import RUN_FILE, delete_own, discard
from inference.manifest import checkpoint_hash, write_json
from inference.server.samples import batches, remove_batch
from train.learning import work
from train.learning.comparison import BETTER, OPEN, TrialTest, needed_evidence
from train.learning.journal import Entry, Journal
from train.learning.server import Server, ServerGoneError
from train.learning.traffic import choose, largest_share, read_samples, split, write_cycle
from train.learning.work import CrashError, CycleSettings, Part, is_full

logger = logging.getLogger(__name__)
TRAFFIC, STAGE = "traffic", "learn"
SEEN, COLLECTED = "traffic", "collected"
WEIGHED, TRAINED, MEASURED = "weighed", "trained", "measured"
TRIAL, COMPARED, SWAPPED, REJECTED = "trial", "compared", "swapped", "rejected"
CRASHED = "crashed"
ENDS = (SWAPPED, REJECTED)
STEPS = (COLLECTED, WEIGHED, TRAINED, MEASURED, TRIAL, COMPARED, *ENDS)
MOST_CRASHES = 3
"""How many processes of one part of a cycle may end without a result before its candidate is given
up."""


MOST_TRIES = 5
"""How many comparisons of one candidate may be lost to restarts of the server or failed steps."""


class CandidateError(Exception):
    """The cycle's candidate cannot be used."""


Run = Callable[[Part, CycleSettings, int, Path], dict[str, Any]]


class Learner:
    """See the module. run: runs a heavy part; show: called when the journal has a new line."""

    def __init__(
        self,
        settings: CycleSettings,
        server: Server,
        journal: Journal,
        run: Run = work.in_own_process,
        show: Callable[[Journal], None] = lambda journal: None,
    ) -> None:
        self.settings, self.config, self.server = settings, settings.learn, server
        self.journal, self.run_part, self.show = journal, run, show
        self.samples = settings.folder / TRAFFIC
        self._test: tuple[int, TrialTest] | None = None
        self._steps: dict[str, Callable[[Entry], bool]] = {
            COLLECTED: self._weigh,
            WEIGHED: self._train,
            TRAINED: self._measure,
            MEASURED: self._begin_trial,
            TRIAL: self._compare,
            COMPARED: self._finish,
        }

    # The loop

    def run(self) -> None:
        """Run until `learn.cycles` cycles have ended."""
        last = self.journal.last(*STEPS)
        if last is not None and last.event in ENDS:
            with suppress(ServerGoneError):  # the next cycle cleans up, too
                self._clean(last.cycle)
        while not self.done:
            if not self.attempt():
                time.sleep(self.config.look_seconds)

    @property
    def done(self) -> bool:
        """Whether `learn.cycles` cycles have ended."""
        ended = sum(entry.event in ENDS for entry in self.journal.entries)
        return 0 < self.config.cycles <= ended

    def attempt(self) -> bool:
        """Do a step; returns False if there is nothing to do now. For a temporary problem (a full
        disk, a server that does not answer), log it and wait."""
        try:
            self._require_room()
            return self.step()
        except (OSError, ServerGoneError) as error:
            if isinstance(error, OSError) and not is_full(error):
                raise
            full = f"the disk of '{self.settings.folder}' is full; nothing written is lost"
            why = full if isinstance(error, OSError) else str(error)
            self._pause(why)
            return False

    def _pause(self, why: str) -> None:
        seconds = self.config.pause_seconds
        logger.warning("learning pauses for %g s: %s", seconds, why)
        time.sleep(seconds)

    def _require_room(self) -> None:
        free = shutil.disk_usage(self.settings.folder).free
        if free < self.config.free_megabytes * 1e6:
            raise OSError(errno.ENOSPC, "less free than learn.free_megabytes")

    def step(self) -> bool:
        """Do the next step; returns False if there is nothing to do now."""
        last = self.journal.last(*STEPS)
        if last is None or last.event in ENDS:
            return self._collect(last.cycle + 1 if last else 1)
        try:
            return self._steps[last.event](last)
        except CandidateError as error:
            return self._reject(last.cycle, str(error))

    def _note(self, event: str, cycle: int, **facts: Any) -> bool:
        entry = self.journal.append(event, cycle, **facts)
        logger.info("cycle %d: %s %s", cycle, entry.event, facts)
        self.show(self.journal)
        return True

    # Traffic

    def _collect(self, cycle: int) -> bool:
        """Choose the cycle's training data once enough traffic is noted, else note new traffic."""
        begun = self.journal.last(COLLECTED)
        through = begun.facts["through"] if begun else ""
        self._remove_read(through)
        start = begun.number if begun else -1
        waiting = [one for one in self.journal.entries[start + 1 :] if one.event == SEEN]
        until = max([through, *(one.facts["through"] for one in waiting)])
        tokens, budget = sum(one.facts["tokens"] for one in waiting), self._budget()
        # choose before noting new traffic: traffic that never pauses always brings something
        enough = tokens >= self.config.least_tokens and budget > 0
        if enough and self._choose(cycle, through, until, budget):
            return True
        new = read_samples(self.samples, until)
        if not new.names:
            return False
        facts = {"through": new.names[-1], "drafter": self.server.current()}
        return self._note(SEEN, cycle, **facts, **asdict(new.totals()))

    def _budget(self) -> int:
        """Tokens that the cycle may learn from."""
        config = self.config
        if not config.all_tokens:
            return config.most_tokens
        used = sum(
            entry.facts["tokens"] for entry in self.journal.entries if entry.event == COLLECTED
        )
        return min(config.most_tokens, config.all_tokens - used)

    def _choose(self, cycle: int, after: str, until: str, budget: int) -> bool:
        """after, until: the last batch that was read before, and the last one that was noted."""
        sampled = read_samples(self.samples, after, until)
        rows = choose(sampled.sequences, self.config.client_share, budget)
        parts = split(rows, self.config)
        if not parts.usable:
            return False
        serves = Path(self.server.current())
        if not weights_file(serves).is_file():
            raise UserError(
                f"the server drafts with '{serves}', which has no trained weights on this machine, "
                "so there is nothing to refresh. Serve a trained drafter's checkpoint folder."
            )
        folder = self.settings.cycle(cycle)
        write_json(folder / RUN_FILE, {"stage": STAGE})
        write_cycle(self.samples, sampled, parts, folder)
        self._note(
            COLLECTED,
            cycle,
            through=sampled.names[-1],
            serves=str(serves.resolve()),
            start=str((self._promising(serves) or serves).resolve()),
            answers=len(rows),
            tokens=sum(row["answer_length"] for row in rows),
            trained_on=len(parts.train),
            held_out={name: len(prompts) for name, prompts in parts.held_out.items()},
            clients=len({row["client"] for row in rows}),
            largest_client=largest_share(rows),
        )
        self._remove_read(sampled.names[-1])
        return True

    def _promising(self, serves: Path) -> Path | None:
        """The last cycle's candidate, if its comparison with the drafter that still serves ended
        open and its tau was higher."""
        begun, compared, ended = (self.journal.last(e) for e in (COLLECTED, COMPARED, REJECTED))
        last = self.journal.last(*STEPS)
        if begun is None or compared is None or ended is None or last is not ended:
            return None
        if not begun.cycle == compared.cycle == ended.cycle:
            return None
        taus, trained = compared.facts["tau"], self.journal.last(TRAINED, cycle=ended.cycle)
        open_ended = compared.facts["verdict"] == OPEN and taus["after"] > taus["before"]
        if trained is None or not open_ended or not same_folder(served_by(begun), serves):
            return None
        folder = Path(trained.facts["checkpoint"])
        there = weights_file(folder).is_file()
        return folder if there and self._is_as_trained(trained) else None

    def _remove_read(self, through: str) -> None:
        for name in batches(self.samples):
            if name <= through:
                remove_batch(self.samples, name)

    # The candidate

    def _part(self, part: Part, event: str, cycle: int) -> bool:
        """Run a part of the cycle and note its figures. If it is refused or crashes too often, the
        cycle ends."""
        begun = self.journal.last(COLLECTED, cycle=cycle)
        assert begun is not None, "a cycle begins with its traffic"
        start = served_by(begun) if event == MEASURED else begun.facts["start"]
        try:
            facts = self.run_part(part, self.settings, cycle, Path(start))
        except UserError as error:
            raise CandidateError(str(error)) from error
        except CrashError as error:
            self._note(CRASHED, cycle, part=part.__name__, why=str(error))
            own = [one for one in self.journal.entries if one.event == CRASHED]
            count = sum(one.cycle == cycle and one.facts["part"] == part.__name__ for one in own)
            if count >= MOST_CRASHES:
                raise CandidateError(f"{count} processes have failed: {error}") from error
            self._pause(str(error))
            return True
        return self._note(event, cycle, **facts)

    def _weigh(self, last: Entry) -> bool:
        return self._part(work.weigh, WEIGHED, last.cycle)

    def _train(self, last: Entry) -> bool:
        return self._part(work.refresh, TRAINED, last.cycle)

    def _measure(self, last: Entry) -> bool:
        return self._part(work.measure, MEASURED, last.cycle)

    # The comparison

    def _candidate(self, cycle: int) -> Path:
        """The cycle's candidate; raises `CandidateError` if its weights have changed since."""
        trained = self.journal.last(TRAINED, cycle=cycle)
        assert trained is not None, "a candidate was trained"
        folder = Path(trained.facts["checkpoint"])
        if not self._is_as_trained(trained):
            raise CandidateError(f"the weights in '{folder}' have changed since they were trained")
        return folder

    def _is_as_trained(self, trained: Entry) -> bool:
        """Whether a candidate on disk still has the weights of its training."""
        digest = checkpoint_hash(Path(trained.facts["checkpoint"]))
        return bool(digest == trained.facts["weights_sha256"])

    def _begin_trial(self, last: Entry) -> bool:
        before, after = (last.facts[name]["tau"] for name in ("before", "after"))
        least = before + self.config.least_gain
        if not after > least:
            return self._reject(
                last.cycle, f"tau on held-out traffic is {after:.3f}, not above {least:.3f}"
            )
        if self.server.tries:
            return self._start_trial(last.cycle, 1)
        taus = {"before": before, "after": after}
        return self._note(COMPARED, last.cycle, tau=taus, **last.facts["paired"])

    def _start_trial(self, cycle: int, attempt: int) -> bool:
        """Note a try, then start it: every try that may have started uses its part of the error
        rate."""
        if attempt > MOST_TRIES:
            raise CandidateError(f"{MOST_TRIES} comparisons were lost with their server")
        if self.server.trial() is not None:  # started by others, or by a learner killed since
            with suppress(UserError):  # it has ended meanwhile
                self.server.end_trial(keep=False)
        candidate = self._candidate(cycle)
        self._note(TRIAL, cycle, attempt=attempt)
        try:
            self.server.start_trial(candidate, self.config.trial_share)
        except UserError as error:
            raise CandidateError(str(error)) from error
        return True

    def _compare(self, last: Entry) -> bool:
        """Look at the trial; returns True once it has shown something."""
        state = self.server.trial()
        attempt = int(last.facts["attempt"])
        if state is None or not same_folder(state.candidate.drafter, self._candidate(last.cycle)):
            return self._start_trial(last.cycle, attempt + 1)  # the server was restarted
        if self._test is None or self._test[0] != last.number:
            needed = needed_evidence(self.config.error_rate, attempt)
            self._test = last.number, TrialTest(needed, state.depth, self.config.client_share)
        found = self._test[1].look(state)
        if found.verdict == OPEN and found.answers < self.config.most_pairs:
            return False
        taus = {"before": state.current.tau, "after": state.candidate.tau}
        return self._note(COMPARED, last.cycle, tau=taus, **asdict(found))

    def _finish(self, last: Entry) -> bool:
        """Take or reject the candidate with one call, after which the server has it or has not."""
        state = self.server.trial()
        candidate = self._candidate(last.cycle)
        own = state is not None and same_folder(state.candidate.drafter, candidate)
        if last.facts["verdict"] != BETTER:
            shown, pairs = last.facts["verdict"], last.facts["pairs"]
            words = f"the comparison says '{shown}' after {pairs} pairs"
            if (answers := last.facts.get("answers", pairs)) > pairs:
                words += f", of {answers}: others are of clients beyond learn.client_share"
            raise CandidateError(words)
        begun = self.journal.last(COLLECTED, cycle=last.cycle)
        assert begun is not None, "a cycle begins with its traffic"
        try:
            if own:
                self.server.end_trial(keep=True)
            elif not same_folder(serves := self.server.current(), candidate):
                if not self.server.tries and not same_folder(serves, Path(served_by(begun))):
                    raise CandidateError(
                        f"'{serves}' serves now, with which the candidate was not compared"
                    )
                self.server.install(candidate)
        except UserError as error:
            raise CandidateError(str(error)) from error
        told = self.server.describe()
        self._note(SWAPPED, last.cycle, checkpoint=str(candidate.resolve()), **told)
        self._clean(last.cycle)
        return True

    def _reject(self, cycle: int, why: str) -> bool:
        self._end_trial_of(cycle)
        self._note(REJECTED, cycle, why=why)
        self._clean(cycle)
        return True

    def _end_trial_of(self, cycle: int) -> None:
        """End the comparison of the cycle's candidate, if it still runs."""
        state = self.server.trial()
        if state and same_folder(state.candidate.drafter, self.settings.candidate(cycle)):
            with suppress(UserError):  # it has ended meanwhile
                self.server.end_trial(keep=False)

    # What is kept

    def _clean(self, cycle: int) -> None:
        """Remove the work of ended cycles, and drafters that are not kept."""
        for folder in sorted((self.settings.folder / "cycles").glob("[0-9]*")):
            if folder.name.isdigit() and int(folder.name) <= cycle:
                try:
                    delete_own(folder, STAGE, "learn")
                except UserError as error:  # what is left there harms no later cycle
                    logger.warning("%s", error)
        taken = [one for one in self.journal.entries if one.event == SWAPPED]
        kept = {Path(one.facts["checkpoint"]).name for one in taken[-self.config.keep :]}
        serves = self.server.current()
        if (promising := self._promising(Path(serves))) is not None:
            kept.add(promising.name)
        for folder in sorted((self.settings.folder / "drafters").glob("[0-9]*")):
            ours = folder.name.isdigit()  # files moved aside are not
            if ours and folder.name not in kept and not same_folder(serves, folder):
                discard(folder)


def served_by(begun: Entry) -> str:
    """The drafter that served when a cycle was collected, with which its candidate is compared."""
    return str(begun.facts.get("serves", begun.facts["start"]))


def same_folder(given: str, folder: Path) -> bool:
    """Whether a server's name for a drafter refers to `folder`."""
    return Path(given).resolve() == folder.resolve()


def last_taken(entries: list[Entry]) -> Path | None:
    """The drafter that was taken last, if it still exists."""
    for entry in reversed(entries):
        if entry.event == SWAPPED:
            folder = Path(entry.facts["checkpoint"])
            return folder if weights_file(folder).is_file() else None
    return None
