"""Measures the gain of a drafter that follows its policy in reinforcement learning: `python -m
scripts.evidence.rl` writes rl.{json,md}.

The embedded target is trained by GRPO to answer with Python that compiles, three times at once:
without a drafter, with one that is frozen, and with one that is refreshed after every update
(train/policy). The ways take turns within a step, in a rotating order. Each has a separate policy,
engine and set of seeds. Rule `match` gives the policy's own text with any drafter, so all three
must see the same answers, rewards and updates. This is compared at every step.

Passes of different widths round differently, which could occasionally change a draw between two
nearly equal tokens. Targets therefore decode in float64 (`--dtype`), where that margin is some 1e-8
and never met, or token by token (`--exact`).

State is written to `--state` every `--save` steps, with all steps of the report so far; the same
command continues from there.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.loading import load_drafter
from inference.manifest import write_bytes
from inference.measure.config import process_facts
from inference.measure.prompts import Prompt, load_prompts
from inference.report.markdown import markdown_table
from inference.target.hardware import device_facts
from scripts.evidence.common import Facts, write_report
from scripts.evidence.grpo import Policy, advantages, python_reward
from scripts.tools.common import PROMPTS, REPORTS, ROOT, command, cpu_target
from train.optim import OptimConfig
from train.policy.follower import Follower
from train.policy.rollouts import Rollout
from train.policy.training import RefreshSettings

DRAFTER = ROOT / "outputs" / "demo" / "train" / "eagle3" / "best"
NONE, FROZEN, FOLLOWING = "none", "frozen", "following"
WAYS = (NONE, FROZEN, FOLLOWING)
PARTS = 8
"""Rows of the page's table of tau over the steps."""
SETTINGS = (
    *("drafter", "rate", "prompts", "group", "tokens", "batch", "depth", "refresh"),
    *("refresh_rate", "dtype", "exact", "seed"),
)
"""Options that a state depends on."""
ABOUT = (
    "Embedded target, GRPO, reward: Python that compiles. **rollout**: new tokens per second of "
    "decoding; **with upkeep**: the same with the seconds of taking over weights and refreshing "
    "the drafter; **wall**: hours of the way in all, the policy's updates included, which are the "
    "same work in all three. **tau**: committed tokens per verification, first and last eighth of "
    "the steps. **answers**: steps whose answers, token by token, are those without a drafter."
)


@dataclass
class Way:
    """One training of the policy."""

    name: str
    policy: Policy
    follower: Follower
    refresh: int

    def step(self, asked: Sequence[Prompt], group: int, seeds: Sequence[int]) -> Facts:
        """A rollout, an update of the policy, and the drafter's update."""
        tokenizer = self.follower.engine.target.tokenizer
        prompts = [ids for prompt in asked for ids in [prompt.render(tokenizer)] * group]
        rollout = self.follower.rollout(prompts, seeds)
        texts = [
            tokenizer.decode(one.tokens, skip_special_tokens=True) for one in rollout.completions
        ]
        rewards = [python_reward(text) for text in texts]
        began = time.perf_counter()
        self.policy.update(rollout.completions, advantages(rewards, group))
        updated = time.perf_counter()
        self.follower.follow(self.policy.model)
        followed = time.perf_counter()
        refreshed = self.follower.refresh(self.refresh) if self.refresh else None
        return {
            "reward": sum(rewards) / len(rewards),
            "answers": digest(rollout, rewards),
            "tokens": rollout.tokens,
            "tau": rollout.tau,
            "rollout_s": rollout.seconds,
            "update_s": updated - began,
            "follow_s": followed - updated,
            "refresh_s": refreshed.seconds if refreshed else 0.0,
            "refresh_loss": refreshed.loss if refreshed else None,
        }


def digest(rollout: Rollout, rewards: Sequence[float]) -> str:
    """A hash of all answers' tokens and rewards."""
    text = repr(([one.tokens for one in rollout.completions], rewards))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def report(given: argparse.Namespace) -> None:
    """Continue the training from the state, writing the report at every save."""
    settings = {name: str(getattr(given, name)) for name in SETTINGS}
    ways = [make_way(name, given) for name in WAYS]
    steps = restore(given.state, settings, ways)
    prompts = [one for one in load_prompts(PROMPTS / "training") if one.domain == "code"]
    for number in range(len(steps), given.steps):
        first = number * given.prompts
        asked = [prompts[(first + i) % len(prompts)] for i in range(given.prompts)]
        count = given.prompts * given.group
        seeds = range(given.seed + number * count, given.seed + (number + 1) * count)
        found: dict[str, Facts] = {}
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            found[way.name] = way.step(asked, given.group, seeds)
        steps.append({name: found[name] for name in WAYS})
        told = {name: round(part["tau"], 2) for name, part in found.items()}
        same = len({part["answers"] for part in found.values()}) == 1
        print(f"step {number + 1}: reward {found[NONE]['reward']:.3f}, tau {told}, same {same}")
        if (number + 1) % given.save == 0 or number + 1 == given.steps:
            save(given.state, settings, ways, steps)
            write(given, steps)
    write(given, steps)


def make_way(name: str, given: argparse.Namespace) -> Way:
    """A policy with its rollouts, in the common initial state: without a drafter, with a fixed one,
    or with one that follows. Raises `UserError` without the drafter's folder."""
    target = cpu_target(dtype=given.dtype)
    drafter = None
    if name != NONE:
        if not given.drafter.is_dir():
            raise UserError(
                f"there is no drafter in '{given.drafter}'. `headstart loop experiment=demo` "
                "trains one; or give another folder as --drafter."
            )
        drafter = load_drafter(given.drafter, target)
    decode = DecodeConfig(
        shape="none" if drafter is None else "chain",
        depth=given.depth,
        temperature=1.0,
        batch_size=given.batch,
        max_new_tokens=given.tokens,
        exact=given.exact,
    )
    optim = OptimConfig(kind="muon", lr=given.refresh_rate)
    engine = Engine(target, drafter, decode)
    follower = Follower(engine, RefreshSettings(optim))
    steps = given.refresh if name == FOLLOWING else 0
    return Way(name, Policy.embedded(given.rate), follower, steps)


# State


def save(folder: Path, settings: Facts, ways: Sequence[Way], steps: list[Facts]) -> None:
    """Replace the state, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    content: Facts = {"settings": settings, "steps": steps, "ways": {}}
    for way in ways:
        content["ways"][way.name] = {**way.policy.state(), "follower": way.follower.state()}
    written = io.BytesIO()
    torch.save(content, written)
    write_bytes(folder / "state.pt", written.getvalue())


def restore(folder: Path, settings: Facts, ways: Sequence[Way]) -> list[Facts]:
    """Restore the ways and return the steps of a state; none if there is no state. Raises
    `UserError` for a state of other settings, or a damaged one."""
    file = folder / "state.pt"
    if not file.is_file():
        return []
    try:
        content: Any = torch.load(file, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise UserError(f"'{file}' cannot be read ({error}). Delete it to begin anew.") from error
    changed = [name for name, value in settings.items() if content["settings"].get(name) != value]
    if changed:
        raise UserError(
            f"the state in '{folder}' was made with other values of {', '.join(changed)}. Give "
            "those, another --state, or delete it."
        )
    for way in ways:
        part = content["ways"][way.name]
        way.policy.load(part)
        way.follower.follow(way.policy.model)
        way.follower.load_state(part["follower"])
    steps: list[Facts] = content["steps"]
    return steps


# The report


def write(given: argparse.Namespace, steps: list[Facts]) -> None:
    """Write both files. `steps` contains the facts of earlier parts."""
    if not steps:
        return
    content: Facts = {"format": 1, "command": given.command}
    content |= {"device": device_facts(torch.device("cpu"))}
    content |= {"threads": torch.get_num_threads(), "versions": process_facts()["versions"]}
    content |= {"settings": {name: str(getattr(given, name)) for name in SETTINGS}}
    content |= {"steps": len(steps), "of": given.steps}
    content["ways"] = {name: summary(name, steps) for name in WAYS}
    content["series"] = {
        name: {key: [step[name][key] for step in steps] for key in steps[0][name]} for name in WAYS
    }
    write_report(given.out, content, page(content))
    print(f"{given.out}.json, {given.out}.md")


def summary(name: str, steps: Sequence[Facts]) -> Facts:
    """Sums of one way over all steps."""
    own, plain = [step[name] for step in steps], [step[NONE] for step in steps]
    tokens = sum(step["tokens"] for step in own)
    spent = {
        key: sum(step[key] for step in own)
        for key in ("rollout_s", "update_s", "follow_s", "refresh_s")
    }
    upkeep = spent["rollout_s"] + spent["follow_s"] + spent["refresh_s"]
    part = max(1, len(own) // PARTS)
    same = [one["answers"] == other["answers"] for one, other in zip(own, plain, strict=True)]
    return {
        **spent,
        "tokens": tokens,
        "tokens_per_second": tokens / spent["rollout_s"],
        "tokens_per_second_with_upkeep": tokens / upkeep,
        "wall_s": sum(spent.values()),
        "first_tau": mean_tau(own[:part]),
        "last_tau": mean_tau(own[-part:]),
        "first_reward": sum(step["reward"] for step in own[:part]) / part,
        "last_reward": sum(step["reward"] for step in own[-part:]) / part,
        "same_answers": sum(same),
        "first_difference": same.index(False) + 1 if False in same else None,
    }


def mean_tau(steps: Sequence[Facts]) -> float:
    return sum(float(step["tau"]) for step in steps) / len(steps)


def page(content: Facts) -> list[str]:
    """The report as Markdown."""
    ways, count = content["ways"], content["steps"]
    plain = ways[NONE]
    header = ["drafter", "rollout tokens/s", "over none", "with upkeep", "over none", "wall h"]
    header += ["tau first", "tau last", "reward first", "reward last", "answers"]
    body = []
    for name, way in ways.items():
        rate, upkeep = way["tokens_per_second"], way["tokens_per_second_with_upkeep"]
        body.append(
            [
                name,
                f"{rate:.1f}",
                f"{rate / plain['tokens_per_second']:.2f}",
                f"{upkeep:.1f}",
                f"{upkeep / plain['tokens_per_second_with_upkeep']:.2f}",
                f"{way['wall_s'] / 3600:.2f}",
                f"{way['first_tau']:.2f}",
                f"{way['last_tau']:.2f}",
                f"{way['first_reward']:.3f}",
                f"{way['last_reward']:.3f}",
                f"{way['same_answers']}/{count}",
            ]
        )
    part = max(1, -(-count // PARTS))
    series, rows = content["series"], []
    for first in range(0, count, part):
        span = slice(first, min(first + part, count))
        taus = [series[name]["tau"][span] for name in (FROZEN, FOLLOWING)]
        rewards = series[NONE]["reward"][span]
        means = [f"{sum(values) / len(values):.2f}" for values in taus]
        rows.append([f"{first + 1} to {span.stop}", f"{sum(rewards) / len(rewards):.3f}", *means])
    return [
        "# A drafter that follows its policy",
        "",
        f"{count} of {content['of']} steps, `{content['command']}`.",
        "",
        ABOUT,
        "",
        *markdown_table(header, body),
        "",
        "tau over the steps:",
        "",
        *markdown_table(["steps", "reward", f"tau {FROZEN}", f"tau {FOLLOWING}"], rows),
        "",
    ]


main = command(
    report,
    steps=(200, "policy updates in all"),
    drafter=(DRAFTER, "drafter that frozen and following begin with"),
    prompts=(4, "prompts of a step"),
    group=(4, "answers of a prompt"),
    tokens=(64, "most new tokens of an answer"),
    batch=(4, "answers decoded together"),
    depth=(2, "drafted tokens"),
    rate=(3e-5, "learning rate of the policy (AdamW)"),
    refresh=(2, "training steps of the following drafter per update of the policy"),
    refresh_rate=(1e-3, "their learning rate (Muon)"),
    dtype=("float64", "of the decoding targets"),
    exact=False,
    seed=0,
    save=(10, "steps between two states"),
    state=(ROOT / "outputs" / "rl", "folder of the state"),
    out=(REPORTS / "rl", "stem of the report's files"),
)

if __name__ == "__main__":
    sys.exit(main())
