"""Changing the drafter of a running server, and trying a candidate beside it.

    service.swaps.install(Path("outputs/new/train/eagle3/best"))
    service.swaps.start_trial(candidate, share=0.5)
    state = service.swaps.trial()          # sums and observations of both, at any time
    service.swaps.end_trial(keep=True)

No request is dropped and no token changes: the text never depends on the drafter. Loading and
checking happen on the caller's thread, the change itself between two steps of the worker.
"""

from __future__ import annotations

from pathlib import Path

from inference.server.trial import TrialState


class DrafterSwaps:
    """The drafters of one server. All methods may be called from any thread, and take turns."""

    def install(self, checkpoint: Path | str) -> None:
        """Draft with `checkpoint` (a folder, or a kind without weights) from now on.

        Raises `UserError` and keeps what there is where it cannot be taken: files that are missing,
        damaged or not finite, another target, vocabulary or revision, a drafter that fails to draft
        a short text or does not fit into memory, a trial that runs.
        """
        raise NotImplementedError

    def start_trial(self, checkpoint: Path | str, share: float = 0.5) -> None:
        """Let `share` (0 to 1, both excluded) of the requests that begin from now on draft with
        `checkpoint`. Raises `UserError` as `install` does."""
        raise NotImplementedError

    def trial(self) -> TrialState | None:
        """What both drafters have done so far; None where no trial runs."""
        raise NotImplementedError

    def end_trial(self, keep: bool) -> None:
        """End the trial: with the candidate as drafter (keep), or without it. Raises `UserError`
        where none runs (also after a failed step, which ends a trial without the candidate)."""
        raise NotImplementedError

    def current(self) -> str:
        """The drafter's checkpoint folder, or its kind; during a trial that of the other rows."""
        raise NotImplementedError
