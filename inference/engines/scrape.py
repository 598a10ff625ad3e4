"""Reads a server's /metrics, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def read_samples(text: str) -> Iterator[Sample]:
    """The samples in `text`, in order; raises `ValueError` with the number of an invalid line."""
    for number, line in enumerate(text.split("\n"), 1):
        # Line by line, as the parser's errors do not contain a line number.
        try:
            families = list(text_string_to_metric_families(line))
        except ValueError as error:
            raise ValueError(
                f"line {number}: not a sample in Prometheus' text format ({error})"
            ) from error
        for family in families:
            yield from family.samples
