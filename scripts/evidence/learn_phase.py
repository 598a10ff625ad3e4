"""A phase of the report on learning. A learning server answers its traffic, the target alone
decodes the same traffic, and the drafters are compared on requests that no training has used.

Every fifth request is a probe: it has `"store": false`, so neither the server nor the training from
scratch learns from it. Finished steps are kept in the phase's folder.

    begin.json, served.json    what the server began and ended with: its drafter, its journal
    served.jsonl               its answers
    run/generate/, answers/    plain decoding of all requests; what is trained on
    run/train/retrained/       the training from scratch
    arms/<name>.json           what a drafter does with the probes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from inference.audit.comparison import audit
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.manifest import MANIFEST_FILE, read_manifest, write_json
from inference.measure.prompts import Prompt, load_prompts
from inference.staleness.reference import passes_within
from inference.target.model import TargetModel
from scripts.assets.drifting import is_probe
from scripts.evidence.answer_sets import write_set
from scripts.evidence.common import Facts, decode_prompts, family_rate, read_json, run_stage
from scripts.evidence.served import Answer, Ask, ask_all, read_answers, serving
from scripts.tools.common import cpu_target
from train.data.answers import AnswerRow
from train.feedback.build import AnswerSource
from train.learning.cycle import last_taken
from train.learning.journal import Entry, read_journal

DEPTH = 3
SERVER_THREADS = 1
"""Threads of the server, and of its learner's processes beside it."""
RECIPE: tuple[str, ...] = ("experiment=[embedded_distilled]",)
"""Overrides of the training from scratch, and of the server's learner and a refresh."""
RATE = family_rate("distilled")
"""Learning rate of a training from scratch, for a drafter that starts from trained weights; learner
and refresh use half of it."""
ROWS = (
    "data=jsonl",
    "data.kind=messages",
    "data.column=messages",
    "data.id_column=id",
    "data.domain_column=domain",
    "data.deduplicate=none",
    "data.decontaminate=none",
    "data.reserve.validation=0",
    "data.reserve.bench=0",
)
"""How the files of prompts are read."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of every phase. minutes: duration of the requests; steps: of a training from
    scratch; learner_steps, least_tokens, pairs, nice: of a cycle (`train.max_steps`,
    `learn.least_tokens`, `learn.most_pairs`, `learn.nice`); threads: of steps that run alone."""

    tokens: int
    minutes: float
    clients: int
    steps: int
    learner_steps: int
    least_tokens: int
    pairs: int
    nice: int
    threads: int

    @property
    def observed(self) -> int:
        """Passes of an answer that count in a comparison."""
        return passes_within(self.tokens, DEPTH)


def once(path: Path, make: Callable[[], Facts]) -> Facts:
    """The facts in a file, made and written if there is none."""
    found: Facts = read_json(path)
    if not found:
        found = make()
        write_json(path, found)
    return found


def words(target: Path, run: Path, threads: int, *own: str) -> list[str]:
    """The overrides of a stage on a target in the run's folder."""
    place = [f"run.root={run.parent}", f"run.name={run.name}", f"run.threads={threads}"]
    whole = ["target=local", f"target.path={target}", "target.dtype=float32", "target.device=cpu"]
    return [*RECIPE, *whole, *place, *own]


def generate(target: Path, run: Path, prompts: Path, sizes: Sizes) -> Path:
    """The target's greedy answers to a file of prompts, without any drafter."""
    sampling = [f"sampling.max_new_tokens={sizes.tokens}", "sampling.batch_size=32"]
    own = [*ROWS, f"data.path={prompts}", "sampling.temperature=0", *sampling]
    if not (run / "generate" / MANIFEST_FILE).is_file():
        run_stage("generate", *words(target, run, sizes.threads, *own))
    return run / "generate"


def train(target: Path, run: Path, answers: Path, name: str, sizes: Sizes) -> Path:
    """The checkpoint of a training from scratch by the recipe."""
    own = [f"run.answers={answers}", f"run.drafter={name}", f"train.max_steps={sizes.steps}"]
    own += [f"optim.lr={RATE}"]
    own += ["train.eval_every=0", "train.parity=false", "train.tracker.wandb=disabled"]
    run_stage("train", *words(target, run, sizes.threads, *own))
    return run / "train" / name / "best"


class Phase:
    """A phase in its folder. target: its folder; serve: folder of the server's run, whose learner
    continues from an earlier phase of the same target; start: the server's first drafter; prompts:
    a file of the requests in their order."""

    def __init__(
        self, folder: Path, target: Path, serve: Path, start: Path, prompts: Path, sizes: Sizes
    ) -> None:
        self.folder, self.target, self.serve, self.start = folder, target, serve, start
        self.file, self.sizes = prompts, sizes
        self.prompts = load_prompts(prompts)
        self.decode = DecodeConfig(
            temperature=0.0, depth=DEPTH, max_new_tokens=sizes.tokens, batch_size=16
        )

    @cached_property
    def model(self) -> TargetModel:
        return cpu_target(self.target)

    @cached_property
    def rendered(self) -> list[tuple[int, ...]]:
        """The requests' token ids."""
        return [tuple(prompt.render(self.model.tokenizer)) for prompt in self.prompts]

    @property
    def probes(self) -> list[Prompt]:
        return [prompt for n, prompt in enumerate(self.prompts) if is_probe(n)]

    # Serving

    def answer(self) -> list[Answer]:
        """The server's answers; sends the requests that it has not received yet."""
        out, learn = self.folder / "served.jsonl", self.serve / "learn"
        once(self.folder / "begin.json", lambda: self._now(learn))
        done = {one.number for one in read_answers(out)}
        rest = [
            Ask(number, prompt, self.sizes.tokens, store=not is_probe(number))
            for number, prompt in enumerate(self.rendered)
            if number not in done
        ]
        if rest:
            seconds = 60 * self.sizes.minutes * len(rest) / len(self.prompts)
            log = self.folder / "server.log"
            with serving(self._server_words(), log, SERVER_THREADS) as server:
                ask_all(server.base, server.model, rest, self.sizes.clients, seconds, out)
        once(self.folder / "served.json", lambda: self._now(learn))
        return read_answers(out)

    def _now(self, learn: Path) -> Facts:
        """The position in the journal, and the drafter that serves according to it."""
        entries = read_journal(learn)
        drafter = last_taken(entries) or self.start
        return {"entries": len(entries), "drafter": str(drafter), "time": time.time()}

    def _server_words(self) -> list[str]:
        sizes = self.sizes
        settings = {
            "learn.least_tokens": sizes.least_tokens,
            "learn.most_pairs": sizes.pairs,
            "learn.look_seconds": 1,
            "learn.held_out": 0.3,
            "learn.held_out_prompts": 32,
            "learn.nice": sizes.nice,
            "learn.keep": 1000,  # all are measured afterwards
            "train.max_steps": sizes.learner_steps,
            "train.global_batch": 1,
            "train.micro_batch": 1,
            "train.eval_every": max(1, sizes.learner_steps // 3),
            "train.eval_tokens": sizes.tokens,
            "train.parity": "false",
            "optim.lr": RATE / 2,
        }
        learner = ",".join(f"{key}={value}" for key, value in settings.items())
        own = [f"serve.drafter={self.start}", "serve.port=0", "serve.context=1024"]
        own += ["serve.learn=true", "serve.learn_seconds=2", f"serve.learn_settings=[{learner}]"]
        own += [f"decode.max_new_tokens={sizes.tokens}", f"decode.depth={DEPTH}"]
        own += ["decode.rule=match", f"decode.batch_size={sizes.clients}"]
        return words(self.target, self.serve, SERVER_THREADS, *own)

    @property
    def begun(self) -> Facts:
        return {**read_json(self.folder / "begin.json")}

    @property
    def ended(self) -> Facts:
        return {**read_json(self.folder / "served.json")}

    @property
    def learned(self) -> Path:
        """The drafter that serves at the end of the phase."""
        return Path(self.ended["drafter"])

    def entries(self) -> list[Entry]:
        """The learner's journal entries of the phase."""
        whole = read_journal(self.serve / "learn")
        return whole[self.begun["entries"] : self.ended["entries"]]

    # Plain decoding

    def plain(self) -> list[AnswerRow]:
        """The target's own answers to all requests, in their order."""
        answers = generate(self.target, self.folder / "run", self.file, self.sizes)
        documents = AnswerSource(answers, None).documents(self.model.info)
        return sorted((one.row for one in documents), key=lambda row: row["index"])

    def compare_texts(self, answers: Sequence[Answer], plain: Sequence[AnswerRow]) -> Facts:
        """How many served answers equal plain decoding, token by token, and why others differ."""
        own = {row["index"]: answer_tokens(row) for row in plain}
        kept = [one for one in answers if not one.failure and one.number in own]
        requests = [
            Request(one.number, self.rendered[one.number], one.number, self.sizes.tokens)
            for one in kept
        ]
        expected, found = [own[one.number] for one in kept], [one.tokens for one in kept]
        verdict = audit(self.model, requests, expected, found, SamplingSettings(temperature=0.0))
        return {
            "compared": len(kept),
            "identical": verdict.identical,
            "near_ties": len(kept) - verdict.identical - verdict.mismatches,
            "mismatches": verdict.mismatches,
        }

    def retrain(self, plain: Sequence[AnswerRow]) -> tuple[Path, Facts]:
        """A training from scratch on the answers that the server was allowed to learn from, and its
        cost."""
        answers = self.folder / "answers"
        if not (answers / MANIFEST_FILE).is_file():
            stored = (row for row in plain if not is_probe(row["index"]))
            write_set(answers, stored, self.folder / "run" / "generate")
        made = train(self.target, self.folder / "run", answers, "retrained", self.sizes)
        manifest = read_manifest(made.parent, "train")
        return made, {key: manifest[key] for key in ("steps", "tokens", "seconds")}

    # Drafters

    def arm(self, name: str, drafter: Path) -> Facts:
        """A drafter's results on the probes: `committed` and `passes` by probe, and for its first
        passes (as many as a comparison observes) their number and their `accepted`."""

        def decode() -> Facts:
            done = decode_prompts(
                self.model, drafter, self.probes, self.decode, changed_target=True
            )
            assert len(done) == len(self.probes), "every request fits into the target's positions"
            first = [one.passes[: self.sizes.observed] for one in done]
            return {
                "drafter": str(drafter),
                "committed": [sum(each.committed for each in one.passes) for one in done],
                "passes": [len(one.passes) for one in done],
                "observed": [[sum(p.accepted for p in own), len(own)] for own in first],
            }

        return once(self.folder / "arms" / f"{name}.json", decode)


def answer_tokens(row: AnswerRow) -> tuple[int, ...]:
    """The tokens that the target wrote."""
    ((begin, end),) = row["spans"]
    return tuple(row["tokens"][begin:end])
