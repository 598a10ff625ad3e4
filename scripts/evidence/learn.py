"""Measures what a server gains by learning while it serves: docs/reports/learn.{json,md}.

    python -m scripts.evidence.learn

Four phases of traffic reach a real `headstart serve serve.learn=true` on the embedded target, over
HTTP, from clients with separate addresses. The phases are: Python prompts and documentation in
English; C++ headers and JSON instead; both mixed, after the target was fine-tuned on C++ headers;
both mixed, after a LoRA for JSON was merged into it. Prompts are made from this machine's standard
library and torch's headers (scripts/assets/drifting.py). A server refuses a drafter of other target
weights. So after each change, a short `headstart refresh` adapts the drafter that was accepted last
to the new target (docs/learning.md); its cost is counted as part of learning.

Three drafters are compared in each phase on the same requests, a fifth of all, which have `"store":
false`: `frozen`, with which the first phase begins; `learned`, which serves at the end;
`retrained`, trained by the recipe from scratch on the target's answers to all other requests. In
between, tau over time comes from the server's answers. Every answer is compared with plain decoding
of the same target. Finished steps are kept in --work, and the report is written after every phase.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE
from inference.measure.config import process_facts
from inference.target.hardware import device_facts
from scripts.assets import changed_targets, cpp_headers, drifting
from scripts.assets.conversations import read_rows, write_rows
from scripts.evidence.common import Facts, read_json, run_stage, write_report
from scripts.evidence.learn_figures import (
    FROZEN,
    LEARNED,
    RETRAINED,
    cycles,
    over_time,
    shares,
    swaps_of_itself,
    tau,
)
from scripts.evidence.learn_page import page
from scripts.evidence.learn_phase import (
    DEPTH,
    RATE,
    ROWS,
    Phase,
    Sizes,
    generate,
    once,
    train,
    words,
)
from scripts.run.revision import git_state
from scripts.tools.common import PROMPTS, REPORTS, ROOT, TARGET, command, named
from train.learning.config import LearnConfig
from train.learning.cycle import SWAPPED

FIRST_PROMPTS, REFRESH_PROMPTS, REFRESH_STEPS = 480, 96, 40
"""Prompts on which the first drafter is trained; prompts that a changed target answers for a
refresh, and the steps of the refresh."""
RECIPES = {
    "finetuned": changed_targets.Recipe(steps=60),
    "merged": changed_targets.Recipe(steps=30, lr=2e-3, lora_rank=16),
}
"""Each target is made from the previous one."""
COMPARISONS, WINDOWS = 200, 8
"""Simulated comparisons of a drafter with itself; points of tau over time in a phase."""
LEAST_COMPARED, LEAST_SHARE = 2000, 0.9
"""Requirements: answers compared with plain decoding, and the share of the retrained tau."""


@dataclass(frozen=True)
class Traffic:
    """One phase: its target's name, and its description."""

    name: str
    target: str
    about: str


PHASES = (
    Traffic("python", "embedded", "Python prompts and documentation in English"),
    Traffic("drift", "embedded", "C++ headers and JSON instead"),
    Traffic("finetuned", "finetuned", "both mixed; the target was fine-tuned on C++ headers"),
    Traffic("merged", "merged", "both mixed; a LoRA for JSON was merged into the target"),
)


@dataclass
class Evidence:
    """All phases in the folder `work`. base: the first target; drafter: the drafter at the start of
    the first phase, None: it is trained; requests: per phase."""

    work: Path
    base: Path
    drafter: Path | None
    requests: int
    sizes: Sizes

    # Making

    def prompts(self, name: str) -> Path:
        """The requests of a phase."""
        drifting.write_prompts(self.work / "prompts", self.requests)
        return self.work / "prompts" / f"{name}.jsonl"

    def target(self, name: str) -> Path:
        """The folder of a version of the target."""
        out = self.work / "targets" / name
        if name not in RECIPES:
            return self.base
        if (out / changed_targets.MADE_FILE).is_file():
            return out
        if name == "finetuned":
            before, pairs = self.base, cpp_headers.split_pairs(cpp_headers.operators())["train"]
        else:
            before, pairs = self.target("finetuned"), drifting.json_pairs()
        changed_targets.finetune(before, out, pairs, RECIPES[name])
        return out

    def first(self) -> Path:
        """The drafter at the start of the first phase: trained by the recipe, on answers to Python
        prompts that are not among the requests."""
        if self.drafter is not None:
            return self.drafter
        run = self.work / "first"
        if not (run / "train" / FROZEN / MANIFEST_FILE).is_file():
            rows = read_rows(PROMPTS / "training" / "train.jsonl")
            own = [row for row in rows if row["domain"] in drifting.ENGLISH][:FIRST_PROMPTS]
            write_rows(run / "prompts.jsonl", own)
            answers = generate(self.base, run, run / "prompts.jsonl", self.sizes)
            train(self.base, run, answers, FROZEN, self.sizes)
        return run / "train" / FROZEN / "best"

    def refresh(self, drafter: Path, target: str, known: Path) -> tuple[Path, Facts]:
        """The last accepted drafter, adapted to a changed target, and the cost of that. known: a
        file of earlier requests."""
        run = self.work / "serve" / target
        if not (run / "refresh" / "refresh.json").is_file():
            rows = read_rows(known)
            probes = [drifting.is_probe(number) for number in range(len(rows))]
            learnt = [row for row, probe in zip(rows, probes, strict=True) if not probe]
            held = [row for row, probe in zip(rows, probes, strict=True) if probe]
            write_rows(run / "refresh.jsonl", learnt[:REFRESH_PROMPTS])
            write_rows(run / "measuring.jsonl", held[:8])
        own = [*ROWS, f"data.path={run / 'refresh.jsonl'}", f"refresh.drafter={drafter}"]
        own += ["refresh.until=budget", f"refresh.prompts={REFRESH_PROMPTS}", "train.eval_every=0"]
        own += [f"train.max_steps={min(REFRESH_STEPS, self.sizes.steps)}", "train.parity=false"]
        own += ["train.global_batch=1", "train.micro_batch=1", f"optim.lr={RATE / 2}"]
        own += ["sampling.temperature=0"]
        own += [f"sampling.max_new_tokens={self.sizes.tokens}", "run.drafter=refreshed"]
        own += [f"decode.max_new_tokens={self.sizes.tokens}", "train.tracker.wandb=disabled"]
        own += ["bench=jsonl", f"bench.prompts={run / 'measuring.jsonl'}"]
        run_stage("refresh", *words(self.target(target), run, self.sizes.threads, *own))
        cost = read_json(run / "refresh" / "refresh.json")["cost"]
        facts = {"answers": cost["answers"], "tokens": cost["training_tokens"]}
        seconds = {"seconds": cost["training_seconds"]}
        return run / "train" / "refreshed" / "best", facts | seconds

    # Phases

    def run(self, traffic: Traffic, before: tuple[Traffic, Path] | None) -> tuple[Path, Facts]:
        """Run a phase; returns the drafter that serves at its end, and its facts. before: the
        previous phase and the drafter that served at its end; None for the first phase."""
        known, start = before or (PHASES[0], self.first())
        refreshed = None
        if traffic.target != known.target:
            asked = self.prompts(known.name)
            start, refreshed = self.refresh(start, traffic.target, asked)
        folder = self.work / "phases" / traffic.name
        serve, prompts = self.work / "serve" / traffic.target, self.prompts(traffic.name)
        target = self.target(traffic.target)
        phase = Phase(folder, target, serve, start, prompts, self.sizes)
        phase.answer()
        facts = once(folder / "facts.json", lambda: self.measure(phase, traffic, refreshed))
        return phase.learned, facts

    def measure(self, phase: Phase, traffic: Traffic, refreshed: Facts | None) -> Facts:
        """The results of a phase whose requests were answered."""
        answers, plain = phase.answer(), phase.plain()
        lost = [one.failure for one in answers if one.failure]
        retrained, cost = phase.retrain(plain)
        drafters = {
            FROZEN: self.first(),
            RETRAINED: retrained,
            "start": Path(phase.begun["drafter"]),
        }
        taken = [entry for entry in phase.entries() if entry.event == SWAPPED]
        names = [f"taken-{entry.cycle:04d}" for entry in taken]
        for name, entry in zip(names, taken, strict=True):
            drafters[name] = Path(entry.facts["checkpoint"])
        arms = {name: phase.arm(name, folder) for name, folder in drafters.items()}
        arms[LEARNED] = arms[names[-1]] if names else arms["start"]
        learner = cycles(phase.entries())
        spent = [learner, *([refreshed] if refreshed else [])]
        probes = [one for one in answers if drifting.is_probe(one.number)]
        levels = [tau(arms[name]) for name in ("start", *names)]
        return {
            **asdict(traffic),
            "requests": {
                "sent": len(answers),
                "answered": len(answers) - len(lost),
                "lost": len(lost),
                "failures": sorted(set(lost))[:5],
                "seconds": phase.ended["time"] - phase.begun["time"],
            },
            "texts": phase.compare_texts(answers, plain),
            "probes": len(probes),
            "tau": shares(arms),
            "over_time": over_time(probes, arms, WINDOWS),
            "learner": learner,
            "refresh": refreshed,
            "cost": {key: sum(one[key] for one in spent) for key in ("tokens", "seconds")},
            "retraining": cost,
            "swaps": [
                {
                    "cycle": entry.cycle,
                    "after_requests": sum(one.at < entry.time for one in answers),
                    "tau_before": old,
                    "tau": new,
                    "false": new <= old,
                }
                for entry, old, new in zip(taken, levels, levels[1:], strict=False)
            ],
            "observed": arms[LEARNED]["observed"],
        }


# The report


def report(given: argparse.Namespace) -> None:
    """Run every step that is not yet done, and write the report after every phase."""
    torch.set_num_threads(given.threads)
    sizes = Sizes(**{one.name: getattr(given, one.name) for one in fields(Sizes)})
    drafter = Path(given.drafter).resolve() if given.drafter else None
    if drafter is not None and not drafter.is_dir():
        raise UserError(f"--drafter: there is no folder '{given.drafter}'.")
    evidence = Evidence(given.work.resolve(), given.target, drafter, given.requests, sizes)
    asked = {"requests": given.requests, "drafter": named(drafter) if drafter else ""}
    asked |= {**asdict(sizes), "target": named(given.target.resolve())}
    known = once(evidence.work / "settings.json", lambda: asked)
    if changed := [key for key, value in asked.items() if known.get(key) != value]:
        raise UserError(
            f"'{given.work}' was begun with other values of {', '.join(changed)}. Give those, "
            "another --work, or delete it."
        )
    before, found = None, []
    for traffic in PHASES:
        if traffic.name in given.phases:
            learned, facts = evidence.run(traffic, before)
            before = (traffic, learned)
            found.append(facts)
            content = collect(found, sizes, asked, given.command)
            write_report(given.out, content, page(content))
            print(f"{given.out}.json after phase '{traffic.name}'", flush=True)


def collect(phases: Sequence[Facts], sizes: Sizes, settings: Facts, asked: str) -> Facts:
    """The content of the report."""
    pools = [{"observed": phase["observed"], "depth": DEPTH} for phase in phases]
    simulated = swaps_of_itself(pools, COMPARISONS, sizes.pairs, sizes.clients)
    swaps = [swap for phase in phases for swap in phase["swaps"]]

    def total(part: str, key: str) -> int:
        return sum(phase[part][key] for phase in phases)

    totals = {key: total("requests", key) for key in ("sent", "answered", "lost")}
    totals |= {key: total("texts", key) for key in ("compared", "identical", "near_ties")}
    totals["mismatches"] = total("texts", "mismatches")
    totals |= {"swaps": len(swaps), "rejected": sum(len(p["learner"]["rejected"]) for p in phases)}
    moved = [phase["tau"]["by_retrained"] for phase in phases if phase["name"] != PHASES[0].name]
    return {
        "format": 1,
        "command": asked,
        "git": git_state().get("revision", ""),
        "settings": {
            **settings,
            "depth": DEPTH,
            "probes_in_all_phases": True,  # a probe of one phase is a probe in the others
            **process_facts(),
        },
        "device": device_facts(torch.device("cpu")),
        "phases": [{key: phase[key] for key in phase if key != "observed"} for phase in phases],
        "totals": totals,
        "false_swaps": {
            "simulated": simulated,
            "in_this_run": {"swaps": len(swaps), "false": sum(swap["false"] for swap in swaps)},
        },
        "holds": {
            "no_request_lost": totals["lost"] == 0,
            "all_answers_as_plain_decoding": totals["compared"] >= LEAST_COMPARED
            and totals["compared"] == totals["identical"],
            "90_percent_of_the_retrained_tau": all(share >= LEAST_SHARE for share in moved),
            "false_swaps_at_most_1_percent": simulated["swaps"] <= 0.01 * COMPARISONS,
        },
    }


main = command(
    report,
    requests=(2000, "of each phase"),
    phases={
        "nargs": "+",
        "choices": [one.name for one in PHASES],
        "default": [one.name for one in PHASES],
    },
    minutes=(14.0, "over which the requests of a phase come"),
    clients=(8, "each with an address of its own, where loopback has several"),
    tokens=(48, "most new tokens of an answer"),
    drafter=("", "folder of the drafter to begin with; empty: one is trained"),
    target=(TARGET, "the first target"),
    steps=(120, "of a training from scratch"),
    learner_steps=(240, "of the training of a cycle"),
    least_tokens=(16000, "of answers with which a cycle begins"),
    pairs=(400, "answers of each drafter after which a comparison ends"),
    nice=(LearnConfig().nice, "priority of the learner's processes; 0 where others use the cores"),
    threads=(2, "of what runs alone; the server and its learner have one each"),
    work=ROOT / "outputs" / "learn_evidence",
    out=(REPORTS / "learn", "without its ending"),
)

if __name__ == "__main__":
    sys.exit(main())
