"""Documents' states from vLLM servers: a request for each, and the file that the server leaves.

A request has the document as prompt and asks for one greedy token, by which the document is checked
(`train.features.engine_client`). A server's vocabulary is checked with it, by a short text.

Legend: N tokens, L layers, H hidden.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import AliasPath, BaseModel, Field
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.model import TargetModel
from train.features.config import FeaturesConfig
from train.features.engine_client import MOST_AROUND, TOKEN_BYTES, EngineClient
from train.features.last_state import gap
from train.features.servers import Address, FailureError
from train.features.vllm.command import layers_of, serve_command
from train.features.vllm.states_file import NAME, evict_of, read_states, require_room, sweep
from train.generate.backends.protocols import same_tokenizer


class Answer(BaseModel):
    """The part of a completion of one token that is read."""

    prompt: Annotated[
        list[int], Field(validation_alias=AliasPath("choices", 0, "prompt_token_ids"))
    ]
    token: Annotated[int, Field(validation_alias=AliasPath("choices", 0, "token_ids", 0))]
    logprob: Annotated[
        float, Field(validation_alias=AliasPath("choices", 0, "logprobs", "token_logprobs", 0))
    ]
    path: Annotated[
        str | None, Field(validation_alias=AliasPath("kv_transfer_params", "hidden_states_path"))
    ] = None


class VllmClient(EngineClient):
    """States from the vLLM servers of `config`; safe to use from several threads. whole: whether
    `target` can run; longest: tokens of a document. Raises `UserError` if no server answers, or if
    one does not fit the target."""

    engine, port, spare = "vLLM", 8000, 1

    def __init__(
        self,
        config: FeaturesConfig,
        target: TargetModel,
        needs: FeatureSpec,
        longest: int,
        whole: bool,
    ) -> None:
        self.layers = layers_of(config, needs, target.info)
        self._require_layers(needs, target.info.num_layers)
        dtype = str(target.dtype).removeprefix("torch.")
        cpu = target.device.type == "cpu"
        command = serve_command(config, target.info, self.layers, dtype, longest, cpu)
        super().__init__(config, target, longest, FeatureSpec(self.layers), command)
        self.folder = Path(config.states)
        self.name, self._numbers = f"{NAME}{secrets.token_hex(6)}-", itertools.count()
        self._abandoned: set[str] = set()
        """Requests that failed here; a server may still write their files."""
        self._require_room()
        sweep(self.folder, self.name)
        self._greet(whole)

    def _require_layers(self, needs: FeatureSpec, last: int) -> None:
        """Raise `UserError` unless the servers' layers are the target's, up to `last`, and include
        those needed."""
        FeatureSpec(self.layers).check(last)
        missing = sorted({*needs.taps, last} - {*self.layers})
        if missing:
            raise UserError(
                f"features.layers={list(self.layers)} lacks {missing}, which are needed: the taps "
                f"that the heads read, and {last}, the target's last layer."
            )

    def _require_room(self) -> None:
        """Raise `UserError` if the folder has no room for the files that exist at the same time."""
        info, itemsize = self.target.info, self.target.dtype.itemsize
        document = self.longest * len(self.layers) * info.hidden_size * itemsize
        needed = document * self.config.concurrency * len(self.config.servers)
        require_room(self.folder, needed, "features", "documents")

    def close(self) -> None:
        """Make waiting requests give up, and delete the files that servers left for them."""
        super().close()
        sweep(self.folder, self.name)

    def _ask_probe(self, server: Address, model: str) -> Tensor:
        with self._request() as request:
            answer = self._complete(server, model, self._text, len(self._tokens), request)
            subject = f"the server at {server} (features.servers)"
            same_tokenizer(subject, self._tokens, answer.prompt)
            return self._collect(server, answer)

    def _ask(self, server: Address, model: str, tokens: Sequence[int]) -> Tensor:
        with self._request() as request:
            answer = self._complete(server, model, list(tokens), len(tokens), request)
            if answer.prompt != list(tokens):
                raise FailureError("it read another text than it was given")
            return self._collect(server, answer)

    @contextmanager
    def _request(self) -> Iterator[str]:
        """The id of a request. Deletes the files of earlier ones that failed, since a server may
        write them after the failure."""
        self._abandoned -= evict_of(self.folder, self.name, self._abandoned)
        request = f"{self.name}{next(self._numbers)}"
        try:
            yield request
        except FailureError:
            self._abandoned.add(request)
            raise

    def _complete(
        self, server: Address, model: str, prompt: str | list[int], count: int, request: str
    ) -> Answer:
        """One greedy token after a text or a document of `count` tokens. request: its id."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 1,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        content = self.servers.request(
            server,
            "POST",
            "/v1/completions",
            json.dumps(body).encode(),
            most=MOST_AROUND + count * TOKEN_BYTES,
            headers={"X-Request-Id": request},
        )
        return self._read(Answer, content)

    def _collect(self, server: Address, answer: Answer) -> Tensor:
        """The checked states [N, L, H] that belong to an answer; their file is deleted."""
        if answer.path is None:
            raise self._misfit(server, "leaves no states: it has no connector of hidden states")
        # only the name: this side sets the folder, since it reads and deletes there
        path = self.folder / Path(answer.path).name
        if self.name not in path.name:
            raise self._misfit(server, f"names its file '{path.name}', not after the request")
        seconds = self.config.timeout_seconds
        states, tokens = read_states(path, seconds, lambda: self.servers.stopped)
        if tokens.tolist() != answer.prompt:
            raise FailureError(f"'{path}' holds the states of another text")
        wanted = (len(answer.prompt), len(self.layers), self.target.info.hidden_size)
        if tuple(states.shape) != wanted:
            raise self._misfit(
                server,
                f"leaves states [tokens, layers, hidden] of {list(states.shape)}, not of "
                f"{list(wanted)}",
            )
        if states.dtype != self.target.dtype:
            raise self._misfit(
                server,
                f"leaves {str(states.dtype).removeprefix('torch.')} states, but target.dtype is "
                f"{str(self.target.dtype).removeprefix('torch.')}",
            )
        found = gap(self.target, states[-1, -1], answer.token, answer.logprob)
        self._require_agreement(server, found)
        return states
