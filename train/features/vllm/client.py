"""Documents' states from vLLM servers: a request for each, and the file that the server leaves.

A request has the document as prompt and asks for one greedy token. The answer holds that token and
its log-probability; the document's last state, through the target's final norm and LM head, must
give the same. This check of every document finds states of another text, another model or another
layer. Before its first document, and again after a failure, since it may have been restarted, a
server is checked more closely: vocabulary, lengths and, if the trainer holds the whole target,
every layer.

Legend: N tokens, L layers, H hidden.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AliasPath, BaseModel, Field, ValidationError
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.reading import parse_json
from inference.engines.client import PROBE
from inference.target.model import TargetModel
from train.features.config import FeaturesConfig
from train.features.servers import Address, FailureError, Servers
from train.features.vllm.command import layers_of, serve_command
from train.features.vllm.last_state import agrees, gap
from train.features.vllm.states_file import NAME, evict_of, read_states, require_room, sweep
from train.generate.backends.protocols import same_tokenizer

MOST_AROUND, TOKEN_BYTES = 1 << 20, 256
"""Bytes that an answer may have besides its tokens, and per token."""
LONGEST_LOOK = 10.0
"""Seconds for a server's list of models, which also a busy one answers at once."""
LAYER_GAP = 0.1
"""Largest relative difference of a layer's states to the target's own."""


class Listed(BaseModel):
    """The part of /v1/models that is read: the first entry is the model that all others adapt."""

    name: Annotated[str, Field(validation_alias=AliasPath("data", 0, "id"))]
    longest: Annotated[int, Field(validation_alias=AliasPath("data", 0, "max_model_len"))]


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


class VllmClient:
    """States from the vLLM servers of `config`; safe to use from several threads. whole: whether
    `target` can run; longest: tokens of a document. Raises `UserError` if no server answers, or if
    one does not fit the target."""

    def __init__(
        self,
        config: FeaturesConfig,
        target: TargetModel,
        needs: FeatureSpec,
        longest: int,
        whole: bool,
    ) -> None:
        self.config, self.target, self.longest = config, target, longest
        self.layers = layers_of(config, needs, target.info)
        self._require_layers(needs)
        dtype = str(target.dtype).removeprefix("torch.")
        cpu = target.device.type == "cpu"
        self.command = serve_command(config, target.info, self.layers, dtype, longest, cpu)
        if not config.servers:
            raise UserError(
                f"features.servers names no vLLM server. Start one:\n    {self.command}\nand give "
                'its address, for instance "features.servers=[http://127.0.0.1:8000]".'
            )
        self.folder = Path(config.states)
        self.name, self._numbers = f"{NAME}{secrets.token_hex(6)}-", itertools.count()
        self._abandoned: set[str] = set()
        """Requests that failed here; a server may still write their files."""
        self.servers = Servers(config, "vLLM server", {"Content-Type": "application/json"})
        self._models: dict[Address, str] = {}
        """The model's name at servers that were checked."""
        self._looking = {server: threading.Lock() for server in self.servers.all}
        self._refused: dict[Address, tuple[float, FailureError]] = {}
        """The last look at a server that failed: when it ended (monotonic), and why."""
        self._require_room()
        # once, here: threads check servers while others may run the target
        self._text, self._tokens = self._probe()
        self._own = self._own_states() if whole else None
        sweep(self.folder, self.name)
        self.servers.greet(self._model_of, f"Start one with\n    {self.command}")

    def _require_layers(self, needs: FeatureSpec) -> None:
        """Raise `UserError` unless the servers' layers are the target's and include those
        needed."""
        last = self.target.info.num_layers
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

    def states(self, tokens: Sequence[int]) -> Tensor:
        """The states [N, L, H] of a document on the CPU, in the target's dtype, from one server
        after another; raises `UserError` if all attempts fail."""

        def ask(server: Address) -> Tensor:
            try:
                return self._ask(server, self._model_of(server), tokens)
            except FailureError:
                self._models.pop(server, None)  # it may be another one when it answers again
                raise

        return self.servers.in_turn(ask)

    def close(self) -> None:
        """Make waiting requests give up, and delete the files that servers left for them."""
        self.servers.stop()
        sweep(self.folder, self.name)

    def _model_of(self, server: Address) -> str:
        """The name of a server's model; raises `UserError` for one that does not fit. One thread
        looks at a server; those that come meanwhile share what it finds, also its failure, since
        a server that hangs would otherwise keep them waiting one after another."""
        came = time.monotonic()
        with self._looking[server]:
            if server in self._models:
                return self._models[server]
            ended, failure = self._refused.get(server, (-math.inf, None))
            if failure is not None and ended >= came:
                raise FailureError(str(failure)) from failure
            try:
                self._models[server] = self._look(server)
            except FailureError as error:
                self._refused[server] = time.monotonic(), error
                raise
            return self._models[server]

    def _look(self, server: Address) -> str:
        """Ask a server for its model, and for the states of a text."""
        content = self.servers.request(
            server, "GET", "/v1/models", most=MOST_AROUND, longest=LONGEST_LOOK
        )
        listed = self._read(Listed, server, content)
        if listed.longest <= self.longest:
            raise self._misfit(
                server,
                f"takes {listed.longest - 1} tokens and one more, but documents may have "
                f"{self.longest} (train.sequence_length)",
            )
        with self._request() as request:
            answer = self._complete(server, listed.name, self._text, len(self._tokens), request)
            subject = f"the server at {server} (features.servers)"
            same_tokenizer(subject, self._tokens, answer.prompt)
            states = self._collect(server, answer)
        if self._own is not None:
            self._require_same_layers(server, self._own, states)
        return listed.name

    def _probe(self) -> tuple[str, list[int]]:
        """A text on which tokenizers disagree, no longer than documents, and its tokens."""
        encode = partial(self.target.tokenizer.encode, add_special_tokens=False)
        texts = (PROBE[:end] for end in range(len(PROBE), 0, -1))
        text = next(text for text in texts if len(encode(text)) <= self.longest)
        return text, encode(text)

    def _own_states(self) -> Tensor:
        """The target's own states [N, L, H] of the probe, on the CPU."""
        device = self.target.device
        tokens = torch.tensor(self._tokens, device=device)[None]
        positions = torch.arange(len(self._tokens), device=device)[None]
        segments = torch.ones_like(tokens, dtype=torch.int32)
        own, _ = self.target.features(tokens, positions, segments, FeatureSpec(self.layers))
        assert own is not None
        return own[0].cpu()

    def _require_same_layers(self, server: Address, own: Tensor, states: Tensor) -> None:
        """Raise `UserError` if a server's states of the probe differ from the target's."""
        for layer, mine, theirs in zip(
            self.layers, own.float().unbind(1), states.float().unbind(1), strict=True
        ):
            gap = float((theirs - mine).norm() / mine.norm())
            if not gap <= LAYER_GAP:
                raise self._misfit(
                    server,
                    f"leaves states that differ from the target's at layer {layer} (by {gap:.0%}): "
                    "it runs other weights, or leaves other layers",
                )

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
        return self._read(Answer, server, content)

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
        if not agrees(self.target, found):
            raise self._misfit(
                server,
                f"gives a token another log-probability than its states do (by {found:.2g}): it "
                "runs another model, or its last layer is another",
            )
        return states

    def _read(self, model: Any, server: Address, content: bytes) -> Any:
        """An answer; raises `UserError` if it is not in vLLM's format."""
        try:
            return model.model_validate(parse_json(content, "the answer"))
        except (UserError, ValidationError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise FailureError(f"an answer that is none of vLLM's ({reason})") from error

    def _misfit(self, server: Address, what: str) -> UserError:
        return UserError(
            f"the vLLM server {server} does not fit this training: it {what}. Start it "
            f"with\n    {self.command}"
        )
