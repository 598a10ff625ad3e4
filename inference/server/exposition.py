"""Counters, gauges and histograms with labels, written in Prometheus' text format (0.0.4). Safe to use from several threads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

Labels = tuple[str, ...]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric:
    """A family of numbers: one per combination of label values."""

    def __init__(self, kind: str, name: str, about: str, labels: Sequence[str], lock: threading.Lock) -> None:
        self.kind, self.name, self.about, self.labels = kind, name, about, tuple(labels)
        self._lock = lock
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Raise a number."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        """Replace a number."""
        with self._lock:
            self._values[labels] = value

    def values(self) -> dict[Labels, float]:
        """All numbers by their labels' values."""
        with self._lock:
            return dict(self._values)

    def lines(self) -> Iterable[str]:
        """The family as text."""
        yield from self._head()
        for labels, value in sorted(self.values().items()):
            yield f"{self.name}{_labelled(self.labels, labels)} {_number(value)}"

    def _head(self) -> Iterable[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} {self.kind}"


class Histogram(Metric):
    """How often a number fell into which range; ranges end at `bounds`, ascending."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], lock: threading.Lock) -> None:
        super().__init__("histogram", name, about, (), lock)
        self.bounds = tuple(bounds)
        self._counts, self._sum = [0] * (len(self.bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one number."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def lines(self) -> Iterable[str]:
        """The histogram as text: counts up to each bound, sum and count."""
        yield from self._head()
        with self._lock:
            counts, total = list(self._counts), self._sum
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            below += count
            yield f'{self.name}_bucket{{le="{_number(bound)}"}} {below}'
        yield f"{self.name}_sum {_number(total)}"
        yield f"{self.name}_count {below}"


class Registry:
    """All metrics of a process. before: called before they are written, to set what is only looked at then."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before
        self._lock = threading.Lock()
        self._all: list[Metric] = []

    def counter(self, name: str, about: str, *labels: str) -> Metric:
        """A number that only grows."""
        return self._keep(Metric("counter", name, about, labels, self._lock))

    def gauge(self, name: str, about: str, *labels: str) -> Metric:
        """A number that goes up and down."""
        return self._keep(Metric("gauge", name, about, labels, self._lock))

    def histogram(self, name: str, about: str, bounds: Sequence[float]) -> Histogram:
        """How a number is spread."""
        found = Histogram(name, about, bounds, self._lock)
        self._all.append(found)
        return found

    def text(self) -> str:
        """Everything, as Prometheus reads it."""
        self.before()
        return "\n".join(line for metric in self._all for line in metric.lines()) + "\n"

    def _keep(self, metric: Metric) -> Metric:
        self._all.append(metric)
        return metric


def _labelled(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
