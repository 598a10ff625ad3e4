"""TensorBoard's event file of a run. It can only grow, so a new one is made from the log at every
start."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.tracking.services.base import COLUMNS, TRANSCRIPTS, Transcript, missing, rows

TEXT = "text"
"""TensorBoard's plugin that renders markdown."""
STRING = 7
"""DT_STRING of its tensors."""


class TensorBoard:
    """The event file in `folder`, replacing older ones. lines: steps and figures so far."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, folder: Path, lines: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise missing("tensorboard", "tensorboard", "tracking", "false") from error
        self._event, self._summary, self._tensor = event_pb2, summary_pb2, tensor_pb2
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(folder))
        for step, figures in lines:
            self._add_figures(step, figures)
        self._writer.flush()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._add_figures(step, figures)
        self._writer.flush()

    def summarise(self, step: int, best: Mapping[str, float]) -> None:
        """Nothing: TensorBoard shows curves, and tau is one of them."""

    def show(self, step: int, transcripts: Sequence[Transcript]) -> None:
        """Add the transcripts as a table in markdown, which the tab "Text" renders."""
        lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows(transcripts)]
        text = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in lines)
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name=TEXT)
        value = self._summary.Summary.Value(
            tag=TRANSCRIPTS,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor.TensorProto(dtype=STRING, string_val=[text.encode()]),
        )
        self._add(step, [value])
        self._writer.flush()

    def keep(self, checkpoint: Path) -> None:
        """Nothing: the checkpoint lies beside the event file."""

    def close(self) -> None:
        self._writer.close()

    def _add_figures(self, step: int, figures: Mapping[str, float]) -> None:
        value = self._summary.Summary.Value
        self._add(step, [value(tag=name, simple_value=item) for name, item in figures.items()])

    def _add(self, step: int, values: list[Any]) -> None:
        if values:
            summary = self._summary.Summary(value=values)
            event = self._event.Event(wall_time=time.time(), step=step, summary=summary)
            self._writer.add_event(event)


def _cell(value: object) -> str:
    """A value as a cell of a markdown table."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
