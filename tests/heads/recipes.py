"""Micro configurations of every recipe in conf/head/, for tiny random targets: recipe -> (kind, options).

The tests that hold for every kind run over this table; `test_contract.py` checks that no recipe and no kind is missing.
"""

from __future__ import annotations

from typing import Any

MICRO: dict[str, tuple[str, dict[str, Any]]] = {
    "distilled": ("distilled", {"from_target_layers": (0, 1)}),
    "eagle3": ("eagle3", {"draft_vocab_size": 31}),
    "medusa": ("medusa", {}),
    "ngram": ("ngram", {}),
}
