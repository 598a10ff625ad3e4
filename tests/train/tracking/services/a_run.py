"""A small training as the services see it: what each of them must show is compared with this."""

from __future__ import annotations

from pathlib import Path

from train.tracking.services.base import Transcript
from train.tracking.tracker import Tracker, TrackerConfig

SETTINGS = {"kind": "eagle3", "optim": {"lr": 1e-3}, "hub_token": "hf_abcdef"}
ANSWER = Transcript("What is a list?", "A row | of\nthings.", 7, 2.5)


def track(out: Path, *, length: int = 0, first: int = 1, **config: object) -> int:
    """Three steps, two measurements and a checkpoint; returns the log's length after the first
    step."""
    config = {"wandb": "disabled", "name": "demo/eagle3", "group": "demo", **config}
    (out / "best").mkdir(parents=True, exist_ok=True)
    (out / "best" / "config.json").write_text('{"kind": "eagle3"}')
    given = TrackerConfig(tags=("first-tag",), **config)  # type: ignore[arg-type]
    with Tracker(given, out, length=length, settings=SETTINGS) as tracker:
        kept = 0
        for step in range(first, 4):
            tracker.write(step, {"loss": 4.0 / step, "cost": {"mfu": 0.25}})
            kept = kept or tracker.flush()
            if step > 1:
                best = step == 2
                tau = 2.0 if best else 1.5
                tracker.write(step, {"tau": tau, "tau_ci95": [tau - 0.5, tau + 0.5], "best": best})
                if best:
                    tracker.show(step, [ANSWER])
        tracker.keep(out / "best")
    return kept
