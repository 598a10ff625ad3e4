"""Targets and drafters with the shapes of real models and random weights, whose text is known.

A target's weights are arranged so that its greedy text is a known cycle with any rounding: the LM
head is the shifted embedding, and the layers add little to the residual stream. Drafters do their
real work. Their chains are accepted as in a recorded trajectory (`scripts/tools/replay.py`). So
measurements depend only on the decoder and the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from heads.api.checkpoint import new_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.distilled import Config as DistilledConfig
from heads.eagle3 import Config as Eagle3Config
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.target.loading import TargetConfig, describe, switch_attention
from inference.target.model import TargetModel

STRIDE = 7919
"""The text counts up by this number, modulo the vocabulary; it is prime, so the text does not
repeat for long."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a target; small_*: of the small model beside it, small_tied: whether its LM head is
    its embedding; draft_vocab: EAGLE-3's."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    small_layers: int
    small_hidden: int
    small_heads: int
    small_intermediate: int
    draft_vocab: int
    family: type = LlamaConfig
    small_tied: bool = True


LLAMA = Shape(128_256, 4096, 32, 32, 8, 14_336, 16, 2048, 32, 8192, 32_000)
QWEN = Shape(151_936, 4096, 36, 32, 8, 12_288, 28, 1024, 16, 3072, 32_000, family=Qwen3Config)
TOY = Shape(512, 128, 4, 4, 2, 256, 1, 64, 2, 128, 128)


@dataclass(frozen=True)
class Sizes:
    """The amount of work. shapes: targets by name; lengths: committed tokens in the attention
    check; head_sizes: of one head; nodes: of dynamic trees; contexts, rows: of the speed parts;
    tokens: of an answer; prompts: of every measurement; texts: prompts of the embedded target;
    train_length, train_steps: of the training parts."""

    shapes: dict[str, Shape]
    lengths: tuple[int, ...]
    head_sizes: tuple[int, ...]
    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: int
    prompts: int
    texts: int
    train_length: int
    train_steps: int
    tests: tuple[str, ...] = field(default=())
    """The arguments of pytest."""


FULL = Sizes(
    shapes={"llama31_8b": LLAMA, "qwen3_8b": QWEN},
    lengths=(300, 5_000, 20_000),
    head_sizes=(64, 128, 256),
    nodes=(26, 60),
    contexts=(512, 8_192, 32_768),
    rows=(1, 8, 32),
    tokens=128,
    prompts=2,
    texts=4,
    train_length=4096,
    train_steps=10,
    tests=(
        *("-m", "gpu", "tests/heads/kernels", "tests/inference/kernels"),
        *("tests/inference/decoding/test_cuda.py", "tests/inference/decoding/test_placement.py"),
    ),
)
TINY = Sizes(
    shapes={"llama31_8b": TOY, "qwen3_8b": Shape(**{**vars(TOY), "family": Qwen3Config})},
    lengths=(20, 300),
    head_sizes=(16,),
    nodes=(9,),
    contexts=(24, 48),
    rows=(1, 2),
    tokens=16,
    prompts=2,
    texts=2,
    train_length=64,
    train_steps=4,
    tests=("tests/heads/kernels/test_dispatch.py",),
)
SIZES = {"full": FULL, "tiny": TINY}


class NoTokenizer:
    """A stand-in for a tokenizer: these targets get only ids, and their text never ends by
    itself."""

    eos_token_id = None
    chat_template = None
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {}


def build_model(shape: Shape, device: torch.device, dtype: torch.dtype, positions: int) -> Any:
    """A model of a shape, with weights drawn as in its family."""
    config = shape.family(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=max(positions, 2048),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False).eval()


def as_target(model: Any) -> TargetModel:
    """A model as a target with Headstart's attention."""
    switch_attention(model)
    tokenizer = NoTokenizer()
    return TargetModel(
        model, tokenizer, describe(model, tokenizer, TargetConfig(path="random/weights"))
    )


def counting_model(shape: Shape, device: torch.device, dtype: torch.dtype, positions: int) -> Any:
    """A model whose greedy text counts up by `STRIDE`, robustly in every dtype."""
    model = build_model(shape, device, dtype, positions)
    make_counting(model, model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    return model


@torch.no_grad()
def make_counting(model: torch.nn.Module, embedding: Tensor, head: Tensor) -> None:
    """Make a model with these weights count up by `STRIDE`."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            quiet = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0, 1e-4 if quiet else 0.02)
    embedding.normal_(0, 1.0)
    head.copy_(embedding.roll(STRIDE, 0))


def new_head(kind: str, shape: Shape, target: TargetModel) -> TrainableDrafter:
    """A freshly initialised drafter: "distilled" (the small model) or "eagle3"."""
    counts = None
    if kind == "distilled":
        head: Any = DistilledConfig(
            num_layers=shape.small_layers,
            hidden_size=shape.small_hidden,
            num_attention_heads=shape.small_heads,
            num_key_value_heads=min(shape.kv_heads, shape.small_heads),
            head_dim=shape.small_hidden // shape.small_heads,
            intermediate_size=shape.small_intermediate,
            tie_embeddings=shape.small_tied,
        )
    else:
        head = Eagle3Config(draft_vocab_size=shape.draft_vocab)
        counts = torch.arange(shape.vocab, 0, -1)  # any vocabulary of the right size works
    more = {} if counts is None else {"token_counts": counts}
    drafter = new_drafter(kind, head, target.info, target.weights, seed=0, **more)
    return drafter.to(target.device, target.dtype)


def texts(target: TargetModel, requests: Sequence[Request]) -> list[list[int]]:
    """The texts of a counting target, including the prompts. Raises `UserError` if the target does
    not write the first one."""
    size = target.info.vocab_size
    made = []
    for request in requests:
        steps = range(1, request.max_new_tokens + 1)
        text = ((request.tokens[-1] + STRIDE * step) % size for step in steps)
        made.append([*request.tokens, *text])
    decode = DecodeConfig(shape="none", max_new_tokens=requests[0].max_new_tokens)
    done = next(iter(Engine(target, None, decode).run(requests[:1])))
    if [*requests[0].tokens, *done.tokens] != made[0]:
        raise UserError(
            "the random target does not write its known text in this dtype and size; choose a "
            "larger hidden size."
        )
    return made
