"""Hidden states that vLLM servers leave with an answer (`sampling.states`), kept beside it.

A request with `include_output_tokens` makes vLLM's connector of hidden states (docs/features.md)
write the states of prompt and answer. They are read as soon as the answer arrives, checked against
its tokens, and kept under the document's name (train/data/states.py). Whether the last state gives
the last token the log-probability that the server reported is checked for every document by the
process that uses the states, and here for every probe: a server gets one at the start and after
each failure, since it may have been started again with another model. A request that failed may
still leave a file: it is deleted before a later request is sent.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import AliasPath, BaseModel, Field, ValidationError
from torch import Tensor

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.decoding.requests import Completion
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from train.data.states import write_states
from train.features.last_state import agrees, gap
from train.features.servers import FailureError
from train.features.vllm.states_file import NAME, evict_of, read_states, require_room, sweep
from train.generate.backends.protocols import Json
from train.generate.sampling import SamplingConfig
from train.target.parts import load_parts

logger = logging.getLogger(__name__)

LeftT = TypeVar("LeftT", bound="_Left")
ASKED: Json = {"kv_transfer_params": {"include_output_tokens": True}, "logprobs": 1}
"""The parameters with which a request asks for them."""
ADVICE = (
    "Start vLLM with the method extract_hidden_states and a connector of hidden states "
    "(docs/features.md has the command line), with sampling.state_layers as its layers."
)
LEAST_BYTES = 2
"""Bytes of a value of a state, at least: the dtype of the servers is not known before an answer."""


class _Left(BaseModel):
    """The part of an answer that is read."""

    path: str = Field(validation_alias=AliasPath("kv_transfer_params", "hidden_states_path"))
    logprob: float = Field(
        validation_alias=AliasPath("choices", 0, "logprobs", "token_logprobs", -1)
    )


class _Probed(_Left):
    """The part of the answer to a probe that is read."""

    token: int = Field(validation_alias=AliasPath("choices", 0, "token_ids", -1))


def _read(model: type[LeftT], answer: Json) -> LeftT:
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise UserError(f"it leaves no hidden states. {ADVICE}") from error


class StatesKeeper:
    """Keeps states in the responses' folder `out`. Threads share it, once a probe was checked.
    config: of the target; stopped: says whether to stop waiting for a file."""

    def __init__(
        self,
        sampling: SamplingConfig,
        info: TargetInfo,
        config: TargetConfig,
        out: Path,
        stopped: Callable[[], bool],
    ) -> None:
        """Raises `UserError` for layers that the target does not have, or without its last one, and
        for a folder without room."""
        layers = list(sampling.state_layers)
        if layers != sorted(set(layers)) or not layers or layers[-1] != info.num_layers:
            raise UserError(
                f"sampling.state_layers must be ascending and end with {info.num_layers}, the "
                f"target's last layer; given: {layers}."
            )
        self.shape = (len(layers), info.hidden_size)
        self.config, self.dtype = config, ""
        """dtype: of the states, once a server has left some."""
        self._target: TargetModel | None = None
        """Its final norm and LM head, if they can be read."""
        self.folder, self.out, self.stopped = Path(sampling.states), out, stopped
        self.seconds = sampling.timeout
        self._name, self._numbers = f"{NAME}{secrets.token_hex(6)}-", itertools.count()
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, str] = {}
        """The request that each thread sent last, until its states are kept."""
        self._abandoned: set[str] = set()
        """Requests that failed; a server may still write their files."""
        sweep(self.folder, self._name)
        self._require_room(sampling, info)

    def _require_room(self, sampling: SamplingConfig, info: TargetInfo) -> None:
        """Raise `UserError` if the folder has no room for the answers that are asked for at once.
        Prompts, which come on top, are not known yet."""
        longest = min(sampling.max_new_tokens, info.max_position_embeddings)
        answer = longest * self.shape[0] * self.shape[1] * LEAST_BYTES
        needed = answer * sampling.concurrency * len(sampling.servers)
        require_room(self.folder, needed, "sampling", "answers")

    def request_id(self) -> str:
        """A name for a request, after which its file is named. Deletes the files of earlier ones
        that failed, since a server may write them after the failure."""
        mine = threading.current_thread()
        with self._lock:
            # a thread that sends another request, or has ended, waits for no earlier one
            ended = [thread for thread in self._open if thread is mine or not thread.is_alive()]
            self._abandoned |= {self._open.pop(thread) for thread in ended}
            self._abandoned -= evict_of(self.folder, self._name, self._abandoned)
            request = self._open[mine] = f"{self._name}{next(self._numbers)}"
        return request

    def keep(self, answer: Json, completion: Completion) -> None:
        """Read and keep the states that the server left for an answer. Raises `UserError` for a
        server that leaves none, other layers or another dtype; `FailureError` for an incomplete
        file."""
        left = _read(_Left, answer)
        tokens = [*completion.request.tokens, *completion.tokens]
        write_states(self.out, tokens, self._states(left, tokens), left.logprob)

    def check(self, answer: Json, prompt: Sequence[int]) -> None:
        """Check the states of a probe and its answer of one token. Raises what `keep` raises, and
        `UserError` if the target gives the token another log-probability than the server."""
        left = _read(_Probed, answer)
        states = self._states(left, [*prompt, left.token])
        if not self.dtype:
            self.dtype = str(states.dtype).removeprefix("torch.")
            self._target = self._load()
        if self._target is None:
            return
        off = gap(self._target, states[-1, -1], left.token, left.logprob)
        if not agrees(self._target, off):
            raise UserError(
                "its states give a token another log-probability than it reports (by "
                f"{off:.2g}): it runs another model than the target, or its last layer is another. "
                f"{ADVICE}"
            )

    def _load(self) -> TargetModel | None:
        """The parts of the target that a check needs, on the CPU, since a server on this machine
        may fill the GPU. None, with a warning, if they cannot be read apart from the others."""
        try:
            return load_parts(replace(self.config, dtype=self.dtype, device="cpu"), norm=True)
        except UserError as error:
            logger.warning("the servers' states are not compared with the target: %s", error)
            return None

    def _states(self, left: _Left, tokens: Sequence[int]) -> Tensor:
        """The states [N-1, L, H] that a server left for a text of N tokens, in the dtype of those
        before; their file is deleted."""
        name = Path(left.path).name
        if self._name not in name:
            raise UserError(f"it names its file of hidden states '{name}', not after the request.")
        states, read = read_states(self.folder / name, self.seconds, self.stopped)
        if tuple(states.shape[1:]) != self.shape:
            raise UserError(
                f"it leaves states [tokens, layers, hidden] of {list(states.shape)}, not of "
                f"{[len(tokens) - 1, *self.shape]}. {ADVICE}"
            )
        if read.tolist() != tokens[:-1] or len(states) != len(tokens) - 1:
            raise FailureError(f"'{name}' holds the states of another text")
        dtype = str(states.dtype).removeprefix("torch.")
        if dtype != (self.dtype or dtype):
            raise UserError(
                f"it leaves {dtype} states, and those before were {self.dtype}, but a training "
                f"reads states of one dtype. Start it with --dtype {self.dtype}."
            )
        with self._lock:
            self._open.pop(threading.current_thread(), None)
        return states

    def close(self) -> None:
        """Delete files of requests that are no longer waited for."""
        sweep(self.folder, self._name)
