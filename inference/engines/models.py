"""Names of models: whether a server's model may be another one by its Hub id, path or served name,
and how messages name it."""

from __future__ import annotations

import re

from inference.engines.client import Served


def same_model(served: Served, known: str) -> bool:
    """Whether a served model may be `known`, by its last name: Hub id, path, place in the Hub's
    cache or the name that it is served by."""
    return last_name(known) in {last_name(served.name), last_name(served.root)}


def may_be_same(one: Served, other: Served) -> bool:
    """Whether two served models may be the same: by the last name of what they were loaded from or,
    where one of them does not say, of what they are called."""
    if one.root and other.root:
        return last_name(one.root) == last_name(other.root)
    return last_name(one.name) == last_name(other.name)


def last_name(model: str) -> str:
    """The last part of a Hub id or a path, in lower case."""
    cached = re.search(r"models--(?:.+?--)?([^/]+)/snapshots/", model)
    return (cached[1] if cached else model.rstrip("/").rpartition("/")[2]).lower()


def described(served: Served) -> str:
    """A served model in words: its name and what it was loaded from."""
    name = f"'{served.name}' " if served.name else ""
    where = f"from '{served.root}'" if served.root else ""
    return f"{name}{where}".rstrip() or "one that it does not name"
