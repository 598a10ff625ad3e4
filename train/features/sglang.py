"""Documents' last hidden states from SGLang servers, which return them as numbers in the answer.

A server started with `--enable-return-hidden-states` answers POST /generate with
`meta_info.hidden_states`: a list per forward pass, first that of the prompt with a list of H
numbers per token. They are the LM head's input, which is after the final norm; the states of inner
layers are not among them. Tokens that the server did not compute in the request's last pass have
none: those of cached prefixes and of earlier chunks of the prompt. The format is that of sglang
0.5.23; `output_token_logprobs` has [log-probability, token, text] per generated token.

Legend: N tokens, H hidden.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import AliasPath, BaseModel, Field
from torch import Tensor

from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.target_info import TargetInfo
from inference.target.model import TargetModel
from train.features.config import FeaturesConfig
from train.features.engine_client import MOST_AROUND, TOKEN_BYTES, EngineClient, model_words
from train.features.last_state import gap_of
from train.features.servers import Address, FailureError

SPARE = 7
"""SGLang takes prompts that are shorter than its context by at least this many positions."""
NUMBER_BYTES = 32
"""Bytes that a number of a state may have, with its comma."""


class Answer(BaseModel):
    """The part of an answer with one token that is read."""

    states: Annotated[Any, Field(validation_alias=AliasPath("meta_info", "hidden_states", 0))] = (
        None
    )
    """Not checked by pydantic: there are millions of numbers."""
    logprob: Annotated[
        float, Field(validation_alias=AliasPath("meta_info", "output_token_logprobs", 0, 0))
    ]
    token: Annotated[
        int, Field(validation_alias=AliasPath("meta_info", "output_token_logprobs", 0, 1))
    ]


class SglangClient(EngineClient):
    """Last hidden states from the SGLang servers of `config`; safe to use from several threads.
    whole: whether `target` can run; longest: tokens of a document. Raises `UserError` if the heads
    read more than the last hidden state, if no server answers, or if one does not fit the
    target."""

    engine, port, spare = "SGLang", 30000, SPARE
    layers: tuple[int, ...] = ()

    def __init__(
        self,
        config: FeaturesConfig,
        target: TargetModel,
        needs: FeatureSpec,
        longest: int,
        whole: bool,
    ) -> None:
        config.require_returned(needs)
        dtype = str(target.dtype).removeprefix("torch.")
        command = launch_command(config, target.info, dtype, longest)
        super().__init__(config, target, longest, FeatureSpec(last_hidden=True), command)
        self._greet(whole)

    def _ask(self, server: Address, model: str, tokens: Sequence[int]) -> Tensor:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_hidden_states": True,
            "return_logprob": True,
        }
        width = self.target.info.hidden_size
        most = MOST_AROUND + len(tokens) * (TOKEN_BYTES + width * NUMBER_BYTES)
        try:
            content = self.servers.request(
                server, "POST", "/generate", json.dumps(body).encode(), most=most
            )
        except UserError as error:
            raise UserError(f"{error} Start it with\n    {self.command}") from error
        answer = self._read(Answer, content)
        states = self._checked(server, answer.states, (len(tokens), width))
        found = gap_of(self.target, states[-1], answer.token, answer.logprob)
        self._require_agreement(server, found)
        return states[:, None]

    def _checked(self, server: Address, rows: Any, wanted: tuple[int, int]) -> Tensor:
        """The states [N, H] of a document as a tensor of this shape."""
        if rows is None:
            raise FailureError("it answered without hidden states")
        try:
            states = torch.tensor(rows, dtype=self.target.dtype)
        except (TypeError, ValueError, RuntimeError) as error:  # of null, which stands for NaN
            raise FailureError(f"its hidden states are no rows of numbers ({error})") from error
        if states.dim() != 2 or states.shape[1] != wanted[1]:
            raise self._misfit(
                server,
                f"returns states [tokens, hidden] of {list(states.shape)}, not of {list(wanted)}",
            )
        if len(states) != wanted[0]:
            raise self._misfit(
                server,
                f"returns the states of {len(states)} tokens of {wanted[0]}: it caches prefixes "
                "or divides prompts into chunks, of which it returns the last one",
            )
        if not states.isfinite().all():
            raise FailureError("its hidden states hold numbers that are not finite")
        return states


def launch_command(config: FeaturesConfig, info: TargetInfo, dtype: str, length: int) -> str:
    """The command that starts a server for documents of at most `length` tokens. dtype: of the
    target, such as `float32`."""
    longest = length + SPARE
    words = ["python", "-m", "sglang.launch_server", "--model-path", *model_words(info)]
    words += ["--dtype", dtype, "--context-length", str(longest), "--enable-return-hidden-states"]
    words += ["--disable-radix-cache", "--chunked-prefill-size", "-1"]
    command = shlex.join(words)
    if config.token():
        command += f' --api-key "${config.token_variable}"'
    if longest > info.max_position_embeddings:
        command = f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 {command}"
    return command
