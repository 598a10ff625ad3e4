"""Measures transformers' decoding loops on the same prompts.

Each loop is an arm of the same measurement: it alternates with our loop prompt by prompt, with the
same weights, dtype, threads and greedy decoding. Seconds are split at the same point as ours:
prefill ends with the first committed token, the rest is decoding. Serving engines run in separate
environments; `inference.measure.vllm_process` measures them without interleaving.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from heads.api.config import Depth, Seconds, config
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Request
from inference.decoding.sampling.distribution import SamplingSettings
from inference.export.config import ExportConfig
from inference.export.layouts import causal
from inference.export.layouts.base import Checkpoint, Target
from inference.manifest import write_json
from inference.target.hardware import wait_for
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel

Mode = Literal["generate", "assisted", "assisted_constant", "prompt_lookup"]
ServingMode = Literal["plain", "ngram", "draft_model"]


@config("bench.baselines")
@dataclass(frozen=True)
class BaselinesConfig:
    """Decoding loops of other projects to measure as well; only at temperature 0 and batch size
    1."""

    transformers: tuple[Mode, ...] = ()
    """Loops to measure: generate, assisted, assisted_constant (always the drafter's depth),
    prompt_lookup."""
    assistant: str = ""
    """Drafter used as the draft model; empty: the first one that is a Llama (kind distilled)."""
    lookup_tokens: Depth = 10
    """Tokens that prompt lookup proposes."""
    vllm_python: str = ""
    """Python of an environment with vLLM; empty: vLLM is not measured."""
    vllm: tuple[ServingMode, ...] = ("plain", "ngram", "draft_model")
    """vLLM's modes to measure: plain, ngram, draft_model."""
    vllm_drafted: Depth = 4
    """Tokens that vLLM drafts per step."""
    vllm_seconds: Seconds = 1800.0
    """Time limit of one vLLM mode in seconds."""


PeerAnswer = tuple[list[int], list[tuple[int, int, bool]], dict[str, float]]
"""Tokens, (accepted, committed, rejected) of every step after the first, seconds by phase."""


class _Clock(StoppingCriteria):
    """Records when each step of a `generate` call ended and how long the text was then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self.marks:
            wait_for(self.device)  # prefill ends here
        self.marks.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass
class Peer:
    """One way of calling `generate`. assistant_settings: of the assistant's generation config."""

    name: str
    model: Any
    end_ids: tuple[int, ...]
    options: dict[str, object] = field(default_factory=dict)
    assistant_settings: dict[str, object] = field(default_factory=dict)

    @torch.no_grad()
    def answer(self, request: Request) -> PeerAnswer:
        """Decode one request greedily."""
        device = self.model.device
        prompt = torch.tensor([request.tokens], device=device)
        assistant: Any = self.options.get("assistant_model")
        if assistant is not None:
            vars(assistant.generation_config).update(self.assistant_settings)
        clock, ends = _Clock(device), list(self.end_ids)
        begin, verbosity = time.perf_counter(), transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # its advice would be printed for every prompt
        try:
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=request.max_new_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **self.options,
            )
        finally:
            transformers_logging.set_verbosity(verbosity)
        tokens = out[0, prompt.shape[1] :].tolist()
        end = time.perf_counter()
        first, lengths = clock.marks[0][0], [length for _, length in clock.marks]
        steps = [(later - before - 1, later - before, False) for before, later in pairwise(lengths)]
        return tokens, steps, {"prefill": first - begin, "other": end - first}


def make_peers(
    config: BaselinesConfig,
    target: TargetModel,
    arms: Sequence[Arm],
    requests: Sequence[Request] = (),
) -> list[Peer]:
    """The peers that `config` requests, with a second copy of the target's weights. requests: what
    is measured.

    Raises `UserError` above temperature 0, for settings that other loops (vLLM's too) do not take,
    if the target cannot be loaded a second time, or if no drafter can assist.
    """
    if config.transformers or config.vllm_python:
        require_plain_greedy(target, arms[0].decode, requests)
    if not config.transformers:
        return []
    if arms[0].decode.temperature > 0:
        raise UserError(
            "bench.baselines.transformers are compared token by token and need "
            f"decode.temperature=0; given: {arms[0].decode.temperature}. Leave them out of "
            "sampled measurements."
        )
    model, assistant = _load_again(target), None
    found = []
    for mode in config.transformers:
        peer = Peer(f"transformers_{mode}", model, target.eos_token_ids)
        if mode == "prompt_lookup":
            peer.options = {"prompt_lookup_num_tokens": config.lookup_tokens}
        elif mode.startswith("assisted"):
            arm = assistant_arm(config, arms)
            if assistant is None:
                with TemporaryDirectory() as folder:
                    assistant = _load(write_llama(arm.drafter, target, Path(folder)), target)
            constant = {**CONSTANT, "num_assistant_tokens": arm.decode.tree().max_depth}
            peer.options = {"assistant_model": assistant}
            peer.assistant_settings = ASSISTED if mode == "assisted" else constant
        found.append(peer)
    return found


def require_plain_greedy(
    target: TargetModel, decode: DecodeConfig, requests: Sequence[Request]
) -> None:
    """Raise `UserError` for settings that change the target's text and that loops of other projects
    are not given."""
    off = SamplingSettings()
    names = ("repetition_penalty", "logit_bias", "bad_words")
    given = [f"decode.{name}" for name in names if getattr(decode, name) != getattr(off, name)]
    given += ["decode.structure"] if decode.structure else []
    given += ["json_schema of prompts"] if any(one.constraint for one in requests) else []
    given += [f"target.{name}" for name in target.loading]
    if given:
        raise UserError(
            "bench.baselines decode greedily with the target as its files have it; they do not "
            f"take {', '.join(given)}, and would write another text. Leave that out, or measure "
            "without bench.baselines.transformers and bench.baselines.vllm_python."
        )


ASSISTED: dict[str, object] = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
"""The defaults of transformers 5, restored before every call because calls change them."""
CONSTANT: dict[str, object] = {
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}


def _load_again(target: TargetModel) -> Any:
    """The target as transformers loads it, with its own attention and unpacked weights."""
    info = target.info
    revision = None if Path(info.id).is_dir() else info.revision
    try:
        return _load(info.id, target, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"bench.baselines.transformers: target '{info.id}' cannot be loaded a second time "
            f"({error}). Measure without them."
        ) from error


def _load(path: str | Path, target: TargetModel, **options: Any) -> Any:
    """A model without the sampling settings in its files, which our loops do not take either."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype, **options)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    kept = {name: getattr(model.generation_config, name) for name in special}
    model.generation_config = GenerationConfig(**kept)
    return model.requires_grad_(False).eval().to(target.device)


# A drafter as a separate model


def assistant_arm(config: BaselinesConfig, arms: Sequence[Arm]) -> Arm:
    """The arm whose drafter assists; raises `UserError` if no drafter is a complete Llama."""
    able = {arm.name: arm for arm in arms if is_llama(arm.drafter)}
    chosen = config.assistant or next(iter(able), "")
    if chosen in able:
        return able[chosen]
    names = ", ".join(able) or "none"
    raise UserError(
        "bench.baselines needs an assistant that transformers can load, a drafter of kind "
        f"distilled; asked for: '{config.assistant or 'any'}', measured and able: {names}. "
        "Measure one, or leave assisted modes out."
    )


def is_llama(drafter: Any) -> bool:
    """Whether a drafter is a Llama (or with norms or biases a Qwen) that drafts token by token."""
    if not isinstance(drafter, TrainableDrafter) or not drafter.language_model:
        return False
    shape: Any = drafter.shape
    return not (shape.qk_norm and shape.attention_bias)  # Qwen3's biases are on the output too


def write_llama(drafter: Any, target: TargetModel, folder: Path) -> Path:
    """Write a drafter as the Hugging Face folder of a Llama, Qwen2 or Qwen3. Returns `folder`."""
    assert is_llama(drafter)
    info, dtype = target.info, str(target.dtype).removeprefix("torch.")
    source = Target(TargetConfig(info.id, info.revision))
    source.weights = target.weights
    checkpoint = Checkpoint(folder, drafter.kind, "draft_model", drafter.config, info, drafter, "")
    written = causal.write(checkpoint, source, ExportConfig(engine="transformers"))
    ends = list(target.eos_token_ids) or None
    write_json(folder / "config.json", {**written.config, "eos_token_id": ends, "dtype": dtype})
    tensors = {name: value.detach().cpu().clone() for name, value in written.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
