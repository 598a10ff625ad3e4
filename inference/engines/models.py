"""Names of models: whether a server's model may be another one by its Hub id, path or served
name."""

from __future__ import annotations

import re

from inference.engines.client import Served


def same_model(served: Served, known: str) -> bool:
    """Whether a served model may be `known`, by its last name: Hub id, path, place in the Hub's
    cache or the name that it is served by."""
    return last_name(known) in {last_name(served.name), last_name(served.root)}


def last_name(model: str) -> str:
    """The last part of a Hub id or a path, in lower case."""
    cached = re.search(r"models--(?:.+?--)?([^/]+)/snapshots/", model)
    return (cached[1] if cached else model.rstrip("/").rpartition("/")[2]).lower()
