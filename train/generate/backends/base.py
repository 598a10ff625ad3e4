"""Who samples answers: the bundled decoder, servers over HTTP, or vLLM in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from inference.decoding.requests import Completion, Request
from train.generate.turns import Refused


class Backend(Protocol):
    """Whoever samples answers."""

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
        """An answer or a refusal per request, in finishing order."""
