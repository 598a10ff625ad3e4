"""Hidden states that vLLM servers leave with an answer (`sampling.states`), kept beside it.

A request with `include_output_tokens` makes vLLM's connector of hidden states (docs/features.md)
write the states of prompt and answer. They are read as soon as the answer arrives, checked against
its tokens, and kept under the document's name (train/data/states.py). The last state and the last
token's log-probability are compared later, by the process that uses the states and has the LM head.
A request that failed may still leave a file: it is deleted before a later request is sent.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import AliasPath, BaseModel, Field, ValidationError

from heads.api.errors import UserError
from heads.api.target_info import TargetInfo
from inference.decoding.requests import Completion
from train.data.states import write_states
from train.features.servers import FailureError
from train.features.vllm.states_file import NAME, evict_of, read_states, require_room, sweep
from train.generate.backends.protocols import Json
from train.generate.sampling import SamplingConfig

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


class StatesKeeper:
    """Keeps states in the responses' folder `out`. Threads share it. stopped: says whether to stop
    waiting for a file."""

    def __init__(
        self, sampling: SamplingConfig, info: TargetInfo, out: Path, stopped: Callable[[], bool]
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
        self.folder, self.out, self.stopped = Path(sampling.states), out, stopped
        self.seconds = sampling.timeout
        self._name, self._numbers = f"{NAME}{secrets.token_hex(6)}-", itertools.count()
        self._lock, self._maker = threading.Lock(), threading.current_thread()
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
            # a thread that sends another request, or has ended, waits for no earlier one; the
            # thread that made this sends the probes, whose states nobody reads
            ended = [
                thread
                for thread in self._open
                if thread in (mine, self._maker) or not thread.is_alive()
            ]
            self._abandoned |= {self._open.pop(thread) for thread in ended}
            self._abandoned -= evict_of(self.folder, self._name, self._abandoned)
            request = self._open[mine] = f"{self._name}{next(self._numbers)}"
        return request

    def keep(self, answer: Json, completion: Completion) -> None:
        """Read and keep the states that the server left for an answer. Raises `UserError` for a
        server that leaves none, or other layers; `FailureError` for an incomplete file."""
        try:
            left = _Left.model_validate(answer)
        except ValidationError as error:
            raise UserError(f"it leaves no hidden states. {ADVICE}") from error
        name = Path(left.path).name
        if self._name not in name:
            raise UserError(f"it names its file of hidden states '{name}', not after the request.")
        tokens = [*completion.request.tokens, *completion.tokens]
        states, read = read_states(self.folder / name, self.seconds, self.stopped)
        if tuple(states.shape[1:]) != self.shape:
            raise UserError(
                f"it leaves states [tokens, layers, hidden] of {list(states.shape)}, not of "
                f"{[len(tokens) - 1, *self.shape]}. {ADVICE}"
            )
        if read.tolist() != tokens[:-1] or len(states) != len(tokens) - 1:
            raise FailureError(f"'{name}' holds the states of another text")
        write_states(self.out, tokens, states, left.logprob)
        with self._lock:
            self._open.pop(threading.current_thread(), None)

    def close(self) -> None:
        """Delete files of requests that are no longer waited for."""
        sweep(self.folder, self._name)
