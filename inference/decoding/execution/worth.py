"""Whether compiling the steps of a job pays: what `decode.compile=auto` stands for.

Compiling takes about two seconds for every layer of the target, and saves about a millisecond per
layer and step, whatever the model's width: what is saved is Python and dispatch. So it pays from
some thousand steps on. Where a layer's weights take longer than that to read, little is gained, and
memory is lost, because compiled steps hold the weights a second time, in the order in which their
products read them.
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
"""Steps of one engine for which its step is compiled."""
COMPILERS = ("g++", "clang++", "c++")


def settled(decode: DecodeConfig, target: TargetModel, steps: float) -> DecodeConfig:
    """`decode` with auto replaced by what it stands for. steps: how many an engine is to run."""
    if decode.compile != "auto":
        return decode
    return replace(decode, compile=steps >= LEAST_STEPS and can_compile(decode, target))


def can_compile(decode: DecodeConfig, target: TargetModel) -> bool:
    """Whether steps can be compiled for a CPU, as far as is known before it is tried."""
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
