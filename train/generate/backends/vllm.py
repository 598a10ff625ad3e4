"""Sampling with vLLM in this process: `sampling.backend=vllm`, where vLLM is installed. Prompts and
answers are token ids."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from heads.api.errors import UserError
from inference.decoding.requests import Completion, Request
from inference.target.loading import TargetConfig
from train.generate.backends.protocols import BadAnswerError, Ended, completion_of
from train.generate.sampling import SamplingConfig
from train.generate.target_facts import TargetFacts
from train.generate.turns import Refused

TOGETHER = 2048
"""Requests that vLLM gets at once; finished answers are written after each such group."""


class VllmBackend:
    """vLLM's own engine around the target."""

    def __init__(self, sampling: SamplingConfig, facts: TargetFacts, target: TargetConfig) -> None:
        """Raises `UserError` where vLLM is not installed."""
        self.sampling, self.facts = sampling, facts
        try:
            self.vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise UserError(
                f"sampling.backend is 'vllm', but vLLM cannot be imported here ({error}). Install "
                "it in this environment, or start `vllm serve` in one of its own and give its "
                "address: sampling.server=http://host:8000."
            ) from error
        names = ("revision", "trust_remote_code")
        given = {"model": target.path, **{name: getattr(target, name) for name in names}}
        given["dtype"] = target.dtype_name
        self.engine = self.vllm.LLM(**given | dict(sampling.vllm_arguments))
        self.longest = self.engine.llm_engine.model_config.max_model_len - 1
        """Tokens of a prompt that leave room for one of the answer."""

    def sample(self, requests: Iterable[Request]) -> Iterator[Completion | Refused]:
        """An answer or a refusal for every request, in groups of `TOGETHER`, the refusals of a
        group first. A prompt that leaves no room for an answer (`longest`) is refused."""
        waiting = iter(requests)
        while asked := list(islice(waiting, TOGETHER)):
            lot = [request for request in asked if len(request.tokens) <= self.longest]
            for request in asked:
                if (length := len(request.tokens)) > self.longest:
                    why = f"vLLM takes {self.longest} tokens of a prompt, which has {length}"
                    yield Refused(request, f"{why} (sampling.vllm_arguments.max_model_len)")
            prompts = [{"prompt_token_ids": list(request.tokens)} for request in lot]
            settings = [self._settings(request) for request in lot]
            outputs = self.engine.generate(prompts, settings, use_tqdm=False)
            for request, output in zip(lot, outputs, strict=True):
                yield self._completion(request, output.outputs[0])

    def _settings(self, request: Request) -> Any:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return self.vllm.SamplingParams(
            max_tokens=request.max_new_tokens,
            **{name: getattr(self.sampling, name) for name in names},
            logit_bias=dict(self.sampling.logit_bias) or None,
            seed=request.seed,
            detokenize=False,
        )

    def _completion(self, request: Request, output: Any) -> Completion | Refused:
        stop, facts = output.stop_reason, self.facts
        ended = Ended(str(output.finish_reason), stop if isinstance(stop, int) else None)
        known = (facts.eos_token_ids, facts.info.vocab_size)
        try:
            return completion_of(request, list(output.token_ids), ended, *known)
        except BadAnswerError as error:
            return Refused(request, f"vLLM: {error}")
