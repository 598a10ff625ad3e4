"""The result of tuning as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from inference.report.claims import ratio_text
from inference.terminal import make_table
from inference.tune.tuner import TuneRow


def tune_table(name: str, rows: Sequence[TuneRow]) -> Table:
    """The chosen drafts, one line per batch size and temperature."""
    found = make_table(name)
    titles = "batch size|temperature|draft|predicted tokens/s|measured|without|speedup"
    for title in titles.split("|"):
        found.add_column(title, justify="left" if title == "draft" else "right")
    for row in rows:
        low, high = row["speedup_ci95"]
        found.add_row(
            str(row["batch_size"]),
            f"{row['temperature']:g}",
            row["label"],
            f"{row['predicted_tokens_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['baseline_tokens_per_second']:.0f}",
            ratio_text(row["speedup"], (low, high)),
        )
    return found
