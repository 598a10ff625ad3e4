"""Hidden states that are kept with responses: <responses>/states/<digest>.safetensors, one file per
document, named after its tokens.

An engine that generates a response has computed the states of all tokens except the last one, which
it never reads. A file has `hidden_states` [N-1, L, H], `token_ids` [N] int32 and `logprob` [1]
float32, the engine's log-probability of the last token. The folder's manifest describes the files
under `states` (`StatesFacts`).

Legend: N tokens, L layers, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import TypedDict

from heads.api.errors import UserError
from heads.api.reading import refusing
from heads.api.tensors import BROKEN
from inference.manifest import write_bytes

STATES = "states"
ENDING = ".safetensors"


class StatesFacts(TypedDict):
    """The manifest's entry: layers (ascending; layer L is the output of L layers), files, their
    bytes, and documents without one."""

    layers: list[int]
    files: int
    bytes: int
    missing: int


class ResponseStatesFile:
    """The content of a file: states [N-1, L, H], tokens [N], and the last token's log-probability.
    Raises `UserError` for a file that is missing or damaged."""

    def __init__(self, path: Path) -> None:
        again = "Generate the responses again (run.overwrite=true)."
        with refusing(f"'{path}'", again, OSError, *BROKEN):
            parts = load(path.read_bytes())
            self.states: Tensor = parts["hidden_states"]
            self.tokens: list[int] = parts["token_ids"].tolist()
            self.logprob = float(parts["logprob"])
            fits = self.states.shape[0] == len(self.tokens) - 1
        if not fits:
            raise UserError(f"'{path}' does not hold the states of its tokens. {again}")


def digest(tokens: Sequence[int] | NDArray[np.int32]) -> str:
    """The name of a document: 32 hexadecimal digits."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16).hexdigest()


def path_of(responses: Path, name: str) -> Path:
    """The file of the document with this digest."""
    return responses / STATES / f"{name}{ENDING}"


def write_states(responses: Path, tokens: Sequence[int], states: Tensor, logprob: float) -> None:
    """Write the file of a document, completely or not at all."""
    parts = {
        "hidden_states": states.contiguous(),
        "token_ids": torch.tensor(tokens, dtype=torch.int32),
        "logprob": torch.tensor([logprob]),
    }
    write_bytes(path_of(responses, digest(tokens)), save(parts))


def settle(
    responses: Path, layers: Sequence[int], documents: Iterable[NDArray[np.int32]]
) -> StatesFacts:
    """Remove files that belong to none of the documents (those of turns that were continued, or of
    repeated requests), and return the manifest's entry."""
    wanted = {digest(tokens) for tokens in documents}
    found: set[str] = set()
    size = 0
    for path in sorted((responses / STATES).glob("*")):
        name = path.name.removesuffix(ENDING)
        if name in wanted and path.name.endswith(ENDING):
            found.add(name)
            size += path.stat().st_size
        else:
            path.unlink()
    missing = len(wanted) - len(found)
    return StatesFacts(layers=[*layers], files=len(found), bytes=size, missing=missing)
