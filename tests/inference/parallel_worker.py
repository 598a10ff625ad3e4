"""One process of a split target, started by torchrun from test_tensor_parallel.py: decodes and
writes down what it found.

torchrun --nproc-per-node 2 -m tests.inference.parallel_worker <folder of models> <folder for
results>
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from heads.api.features import FeatureSpec
from inference.decoding.config import DecodeConfig
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from inference.target.parallel import gather_whole, join_ranks
from tests.fakes import SometimesRight
from tests.inference.decoding.test_lossless import SHAPES, answers, decode, requests
from tests.inference.decoding.test_lossless_kinds import drafter_of
from tests.models import VOCAB

SETTINGS: dict[str, dict[str, Any]] = {"plain": {"shape": "none"}, **SHAPES}
TEMPERATURES = (0.0, 1.0)


def texts_of(target: TargetModel) -> dict[str, list[list[int]]]:
    """Tokens of every request by shape, drafter and temperature: a fake drafter that knows the
    text, and a real one."""
    found = {}
    items = requests(3, new=12)
    for temperature in TEMPERATURES:
        plain = decode(target, None, DecodeConfig(temperature=temperature), items)
        for name, shape in SETTINGS.items():
            config = DecodeConfig(temperature=temperature, batch_size=2, **shape)
            drafters: dict[str, Any] = {"none": None} if name == "plain" else {}
            if name != "plain":
                drafters["fake"] = SometimesRight(answers(plain), VOCAB)
            if name == "chain":
                drafters["medusa"] = drafter_of("medusa", target)
            for kind, drafter in drafters.items():
                done = decode(target, drafter, config, items)
                found[f"{name} {kind} {temperature}"] = [done[item.index].tokens for item in items]
    return found


def facts_of(target: TargetModel) -> dict[str, Any]:
    """How the target is split, and a few logits to the last bit."""
    model = target.model
    keys = model.model.layers[0].self_attn.k_proj.weight
    tokens = torch.arange(3, 13)[None]
    cache = target.new_cache(1, 16)
    logits, _ = target.prefill(cache, torch.tensor([0]), tokens, torch.tensor([10]), FeatureSpec())
    shape = cache.shapes()[0]
    assert shape is not None
    return {
        "split": sorted(
            name for name, value in model.named_parameters() if isinstance(value, DTensor)
        ),
        "local keys": list((keys.to_local() if isinstance(keys, DTensor) else keys).shape),
        "cached heads": shape.heads,
        "whole": [
            list(value.shape) for value in (target.weights.embedding, target.weights.lm_head)
        ],
        "plain tensors": not isinstance(target.weights.embedding, DTensor)
        and not isinstance(target.weights.state["model.layers.0.self_attn.k_proj.weight"], DTensor),
        "key sum": float(gather_whole(keys).sum()),
        "logits": [value.hex() for value in logits[0].double().tolist()],
    }


def require_agreement(tokens: Sequence[int], what: str) -> None:
    """Raise `RuntimeError` unless all processes hold the same `tokens`. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest)
    odd = [rank for rank, value in enumerate(found) if value != found[0]]
    if odd:
        raise RuntimeError(
            f"processes {odd} decoded other tokens than process 0 for {what}: their devices or "
            "libraries compute differently, so this target cannot be split over them."
        )


@contextmanager
def only_main_prints(rank: int) -> Iterator[None]:
    """Swallow what other processes than the main one print inside the block."""
    if rank == 0:
        yield
        return
    sys.stdout.flush()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def main() -> None:
    models, results = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    join_ranks("cpu")
    rank = dist.get_rank()
    found = {}
    with only_main_prints(rank):
        print(f"speaking: {rank}")
        for folder in sorted(models.iterdir()):
            config = TargetConfig(
                path=str(folder), dtype="float64", device="cpu", tensor_parallel=True
            )
            target = TargetModel.load(config)
            texts = texts_of(target)
            for name, rows in texts.items():
                require_agreement([token for row in rows for token in row], name)
            found[folder.name] = {"texts": texts, "facts": facts_of(target)}
    try:
        require_agreement([rank], "what differs on purpose")
    except RuntimeError as error:
        found["disagreement"] = {"message": str(error)}
    (results / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
