"""Drafters with scripted acceptance: the work of a real drafter, with the acceptance that another
measurement recorded.

A decoder's speed depends on acceptance. Acceptance depends on trained weights and, in half
precision, on numerical ties. `ReplayDrafter` removes both influences: it runs a real drafter and
then overwrites the drafted tokens. They equal the target's known text up to the recorded depth and
are wrong behind it. So decoders, sizes and machines can be compared on exactly the same work, with
random weights.

Legend: B rows, N nodes, S slots of text, P passes of the trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.api.drafter import Noise, Proposal, TargetStates
from heads.api.errors import UserError, suggest
from heads.api.reading import read_object
from heads.api.tree import DraftShape
from inference.decoding.requests import Completion
from inference.measure.answers import FINAL_FILE, read_records
from inference.report.model import read_report


@dataclass(frozen=True)
class Trajectory:
    """Accepted drafted tokens of consecutive passes, which are replayed in a cycle."""

    accepted: tuple[int, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.accepted or min(self.accepted) < 0:
            given = list(self.accepted)[:8]
            raise UserError(
                f"a trajectory needs one accepted length of at least 0 per pass; given: {given}."
            )

    @property
    def tau(self) -> float:
        """Committed tokens per pass: the accepted ones and the bonus."""
        return 1.0 + sum(self.accepted) / len(self.accepted)

    @classmethod
    def of_records(cls, folder: Path, arm: str, most: int = 512) -> Trajectory:
        """The acceptance of an arm of a finished measurement, without each answer's last pass,
        which may have been cut. most: passes to keep. Raises `UserError` if there are no such
        records."""
        file = folder / FINAL_FILE if folder.is_dir() else folder
        if not file.is_file():
            words = "Give the folder of a finished measurement."
            raise UserError(f"'{folder}' holds no {FINAL_FILE}. {words}")
        rows = read_records(file)
        names = sorted({row.arm for row in rows})
        if arm not in names:
            raise UserError(f"'{file}' has no records of an arm '{arm}'.{suggest(arm, names)}")
        own = [row.passes[:-1] for row in rows if row.arm == arm]
        accepted = tuple(item[0] for passes in own for item in passes)
        source = f"{arm}, {len(rows) // len(names)} answers{_conditions(file, arm)}"
        return cls(accepted[:most], source)


def _conditions(records: Path, arm: str) -> str:
    """What the report next to the records, if there is one, says about an arm."""
    if not (records.parent / "report.json").is_file():
        return ""
    report = read_report(records.parent)
    draft, temperature = report.drafter(arm).draft, report.settings.temperature
    return f" of {report.target.id}, {draft.shape} {draft.depth}, temperature {temperature:g}"


@dataclass
class State:
    """inner: the real drafter's state. text [B, S] prompt and known continuation, length [B]
    committed tokens (root included), done [B] passes so far, first [B] where the row began in the
    trajectory; all int64."""

    inner: Any
    text: Tensor
    length: Tensor
    done: Tensor
    first: Tensor


class ReplayDrafter(nn.Module):
    """Drafts chains like `drafter` at the same cost, and is accepted as `trajectory` says.

    texts: what the target writes, including the prompts, by which they are found
    (`prompt_lengths`). Every text begins at a different place of the trajectory. For an unknown
    prompt the drafts are token 0, no better than random.
    """

    kind: ClassVar[str] = "replay"

    def __init__(
        self,
        drafter: Any,
        texts: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        trajectory: Trajectory,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.drafter, self.trajectory, self.vocab_size = drafter, trajectory, vocab_size
        self.needs = drafter.needs
        stride = max(1, len(trajectory.accepted) // max(1, len(texts)))
        self.known: dict[tuple[int, ...], tuple[list[int], int]] = {
            tuple(text[:length]): (list(text), number * stride)
            for number, (text, length) in enumerate(zip(texts, prompt_lengths, strict=True))
        }
        self.accepted: Tensor | None = None  # the trajectory [P] on the device in use

    def start(self, seen: TargetStates, tree: DraftShape, capacity: int) -> State:
        """State after prefill; see the protocol."""
        if not tree.is_chain:
            raise UserError(
                "a replay drafts chains: a tree's acceptance is not one number per pass. Use "
                "decode.shape=chain."
            )
        device = seen.tokens.device
        if self.accepted is None or self.accepted.device != device:
            self.accepted = torch.tensor(self.trajectory.accepted, device=device)
        slots, rows, first = max(capacity, seen.tokens.shape[1]) + tree.max_depth + 2, [], []
        for tokens, length in zip(seen.tokens.tolist(), seen.lengths.tolist(), strict=True):
            text, place = self.known.get(tuple(tokens[:length]), (tokens[:length], 0))
            rows.append((text + [0] * slots)[:slots])
            first.append(place)
        return State(
            inner=self.drafter.start(seen, tree, capacity),
            text=torch.tensor(rows, dtype=torch.int64, device=device),
            length=seen.lengths + 1,
            done=torch.zeros(len(rows), dtype=torch.int64, device=device),
            first=torch.tensor(first, dtype=torch.int64, device=device),
        )

    def propose(self, state: State, noise: Noise) -> Proposal:
        """The real drafter's chain with its tokens overwritten; see the protocol."""
        assert self.accepted is not None
        proposal: Proposal = self.drafter.propose(state.inner, noise)
        depth = proposal.tree.depth
        places = (state.length[:, None] - 1 + depth).clamp(max=state.text.shape[1] - 1)
        text = state.text.gather(1, places)
        wanted = self.accepted[(state.first + state.done) % self.accepted.shape[0]][:, None]
        scripted = torch.where(depth <= wanted, text, (text + 1) % self.vocab_size)
        return replace(proposal, tokens=torch.where(depth == 0, proposal.tokens, scripted))

    def commit(self, state: State, accepted: TargetStates) -> State:
        """State after a verification; see the protocol."""
        inner = self.drafter.commit(state.inner, accepted)
        assert inner is state.inner, "a drafter updates its state in place"
        last = (accepted.lengths - 1)[:, None]
        state.length.copy_(accepted.positions.gather(1, last)[:, 0] + 2)
        state.done.add_(1)
        return state

    def followed(self, completions: Iterable[Completion], depth: int) -> bool:
        """Whether all passes follow the trajectory, except each answer's last, which may be cut."""
        wanted = self.trajectory.accepted
        return all(
            record.accepted == min(depth, wanted[place % len(wanted)])
            for done in completions
            for place, record in enumerate(done.passes[:-1], self.known[done.request.tokens][1])
        )


def read_trajectories(path: Path) -> dict[str, Trajectory]:
    """Trajectories of a JSON file: name -> {accepted, source}. Raises `UserError` for others."""
    try:
        content = read_object(path, "")
        return {k: Trajectory(tuple(v["accepted"]), v["source"]) for k, v in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = (
            f"'{path}' holds no trajectories ({error!r}). Record them with `python -m "
            "scripts.tools.record_trajectories`."
        )
        raise UserError(words) from error
