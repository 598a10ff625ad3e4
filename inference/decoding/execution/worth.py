"""Whether compiling the steps of a job pays: the meaning of `decode.compile=auto`.

Compiling takes about two seconds per layer of the target. It saves about a millisecond per layer
and step, independent of the model's width, because it removes Python and dispatch. So it pays from
some thousand steps on. If a layer's weights take longer than that to read, little is gained. It
also costs memory, because compiled steps hold a second copy of the weights, in the order in which
their products read them.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import torch

from inference.decoding.config import DecodeConfig
from inference.decoding.execution.function_cache import MOST_WEIGHTS
from inference.target.model import TargetModel

LEAST_STEPS = 2000
"""Fewest steps of one engine for which its step is compiled."""
COMPILERS = ("g++", "clang++", "c++")


def settled(decode: DecodeConfig, target: TargetModel, steps: float) -> DecodeConfig:
    """`decode` with `compile=auto` resolved. steps: how many an engine will run."""
    if decode.compile != "auto":
        return decode
    return replace(decode, compile=steps >= LEAST_STEPS and can_compile(decode, target))


def can_compile(decode: DecodeConfig, target: TargetModel) -> bool:
    """Whether steps can be compiled for a CPU, as far as is known before trying."""
    if target.device.type != "cpu" or target.dtype is not torch.float32:
        return False
    if decode.exact or decode.ahead or decode.adaptive != "none" or decode.adaptive_lengths:
        return False
    weights = [*target.model.parameters()]
    if any(type(weight) is not torch.nn.Parameter for weight in weights):
        return False
    if sum(weight.nbytes for weight in weights) > MOST_WEIGHTS:
        return False
    return any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS)))
