"""How near to the memory's speed the decoder runs: `python -m scripts.tools.bench_gpu`.

The target has the shape of Llama-3.1-8B (or any other, by flags) and random weights, arranged so
that its greedy text is a known cycle whatever the rounding: the LM head is the shifted embedding,
and the layers add little to the residual stream. Drafters of real shapes do their real work and are
accepted as a recorded trajectory says (`inference/measure/replay.py`), so what is measured depends
on the decoder and the machine alone. Writes the whole report with its roofline, and the few numbers
that it is judged by, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from heads.api.checkpoint import new_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from heads.distilled import Config as DistilledConfig
from heads.eagle3 import Config as Eagle3Config
from inference.decoding.arm import Arm
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.manifest import write_bytes, write_json
from inference.measure.config import BenchConfig
from inference.measure.prompts import Prompt, to_requests
from inference.measure.replay import ReplayDrafter, Trajectory, read_trajectories
from inference.measure.run import measure
from inference.report.model import Report
from inference.target.loading import DTYPES, TargetConfig, describe, pick_device, switch_attention
from inference.target.model import TargetModel
from scripts.tools.common import REPORTS, command

SIZES = "vocab hidden layers heads kv_heads intermediate".split()
SIZES += "small_layers small_hidden small_heads small_intermediate draft_vocab".split()
LLAMA = (128_256, 4096, 32, 32, 8, 14_336, 16, 2048, 32, 8192, 32_000)
TOY = (512, 128, 4, 4, 2, 256, 1, 64, 2, 128, 128)
SHAPES = {
    "llama31_8b": dict(zip(SIZES, LLAMA, strict=True)),
    "toy": dict(zip(SIZES, TOY, strict=True)),
}
"""Sizes of the target, the distilled drafter (small_*: Llama-3.2-1B) and EAGLE-3's draft
vocabulary."""
STRIDE = 7919
"""The text counts up by this much, modulo the vocabulary; prime, so that it does not repeat for
long."""
WANTED = {"plain_share": 0.65, "synchronisations_per_step": 0.0, "gap_share": 0.05}
"""What a GPU of the H100/H200 class must reach: at least the first, at most the others."""


class NoTokenizer:
    """In place of a tokenizer: this target gets ids only, and its text never ends by itself."""

    eos_token_id = None
    chat_template = None
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {}


def report(given: argparse.Namespace) -> None:
    """Measure, write and print; or only record trajectories."""
    if given.record:
        record(given.record, given.trajectories)
        return
    sizes = {name: getattr(given, name) or size for name, size in SHAPES[given.shape].items()}
    content = {**bench(given, sizes), "command": given.command}
    write_json(given.out, content)
    shown = ("command", "device", "measured", "wanted")
    print(json.dumps({key: content[key] for key in shown}, indent=2))


def record(sources: Sequence[str], path: Path) -> None:
    """Write trajectories of arms of finished measurements."""
    found = {}
    for source in sources:
        arm, equals, folder = source.partition("=")
        if not equals:
            raise UserError(
                "--record takes ARM=FOLDER, such as eagle3=outputs/demo/measure; given: "
                f"'{source}'."
            )
        trajectory = Trajectory.of_records(Path(folder), arm)
        found[arm] = {"accepted": list(trajectory.accepted), "source": trajectory.source}
    lines = (f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in found.items())
    write_bytes(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    print(path)


# What is measured


def random_target(
    sizes: dict[str, int], device: torch.device, dtype: torch.dtype, positions: int
) -> TargetModel:
    """A Llama of the given sizes whose greedy text counts up by `STRIDE`, robustly in every
    dtype."""
    config = LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=max(positions, 2048),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                quiet = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0, 1e-4 if quiet else 0.02)
        embedding = model.get_input_embeddings().weight.normal_(0, 1.0)
        model.get_output_embeddings().weight.copy_(embedding.roll(STRIDE, 0))
    model.generation_config.eos_token_id = None
    model = model.requires_grad_(False).eval()
    switch_attention(model)
    tokenizer = NoTokenizer()
    return TargetModel(
        model, tokenizer, describe(model, tokenizer, TargetConfig(path="random/llama"))
    )


def drafters(sizes: dict[str, int], target: TargetModel) -> dict[str, TrainableDrafter]:
    """Freshly initialised drafters of the two shapes, by the names of their trajectories."""
    distilled = DistilledConfig(
        num_layers=sizes["small_layers"],
        hidden_size=sizes["small_hidden"],
        num_attention_heads=sizes["small_heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["small_hidden"] // sizes["small_heads"],
        intermediate_size=sizes["small_intermediate"],
        tie_embeddings=True,
    )
    counts = torch.arange(sizes["vocab"], 0, -1)  # any vocabulary of the right size
    eagle = Eagle3Config(draft_vocab_size=sizes["draft_vocab"])
    info, weights = target.info, target.weights
    return {
        "distilled": new_drafter("distilled", distilled, info, weights, seed=0),
        "eagle3": new_drafter("eagle3", eagle, info, weights, seed=0, token_counts=counts),
    }


def texts(target: TargetModel, requests: Sequence[Request]) -> list[list[int]]:
    """What the target writes, prompts included, by construction. Raises `UserError` when one of
    them is not what it writes.
    """
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
            "larger --hidden."
        )
    return made


def bench(given: argparse.Namespace, sizes: dict[str, int]) -> dict[str, object]:
    """Build, measure, and collect what the report says."""
    device, dtype = pick_device(given.device), DTYPES[given.dtype]
    known = read_trajectories(given.trajectories)
    target = random_target(sizes, device, dtype, given.context + given.tokens + 64)
    generator = torch.Generator().manual_seed(1)
    shape = (given.prompts + 1, given.context)
    drawn = torch.randint(0, sizes["vocab"], shape, generator=generator).tolist()
    prompts = [Prompt(f"random-{n}", "random", tokens=tuple(row)) for n, row in enumerate(drawn)]
    decode = DecodeConfig(max_new_tokens=given.tokens)
    requests = to_requests(prompts, target.tokenizer, decode)
    written, lengths, arms = texts(target, requests), [given.context] * len(requests), []
    for name, inner in drafters(sizes, target).items():
        recorded = name if given.trajectory == "own" else given.trajectory
        if recorded not in known:
            raise UserError(
                f"'{given.trajectories}' holds no trajectory '{recorded}'. Record it with "
                f"--record {recorded}=FOLDER."
            )
        trajectory = known[recorded]
        depth = given.depth or max(trajectory.accepted)
        replay = ReplayDrafter(inner, written, lengths, trajectory, target.info.vocab_size)
        arms.append(Arm(name, replay, DecodeConfig(depth=depth, max_new_tokens=given.tokens)))
    config = BenchConfig(
        prompts="random",
        prompts_per_domain=given.prompts,
        warmup_prompts=1,
        repeats=given.repeats,
        roofline=True,
    )
    with TemporaryDirectory() as scratch:
        report = measure(config, target, arms, prompts, Path(scratch))
    return {
        "format": 1,
        "device": report.device.to_dict(),
        "sizes": sizes,
        "trajectories": {
            arm.name: {"tau": arm.drafter.trajectory.tau, "source": arm.drafter.trajectory.source}
            for arm in arms
        },
        "measured": judged(target, arms, requests, report),
        "wanted": WANTED if device.type == "cuda" else {},
        "report": report.to_dict(),
    }


def judged(
    target: TargetModel, arms: Sequence[Arm], requests: Sequence[Request], report: Report
) -> dict[str, object]:
    """The numbers that a run is judged by. Gap and synchronisations only where there is CUDA."""
    roofline, found = report.roofline, {}
    assert roofline is not None, "the measurement asks for it"
    for arm in arms:
        done = list(Engine(target, arm.drafter, arm.decode).run(requests))
        entry, numbers = report.drafter(arm.name), roofline.arms[arm.name]
        found[arm.name] = {
            "tau": entry.tau,
            "speedup": entry.speedup,
            "speedup_ci95": entry.speedup_ci95,
            "efficiency": numbers.efficiency,
            "share": numbers.share,
            "split": dict(numbers.split.items()),
            "trajectory_followed": arm.drafter.followed(done, arm.decode.depth),
            "synchronisations_per_step": synchronisations(
                target, arm.drafter, arm.decode, requests[0]
            ),
        }
    plain = DecodeConfig(shape="none", max_new_tokens=requests[0].max_new_tokens)
    return {
        "plain_share": roofline.baseline.share,
        "plain_tokens_per_second": report.baseline.tokens_per_second,
        "bandwidth": roofline.bandwidth.used_bytes_per_second,
        "plain_synchronisations_per_step": synchronisations(target, None, plain, requests[0]),
        "arms": found,
    }


def synchronisations(
    target: TargetModel, drafter: Any, decode: DecodeConfig, request: Request
) -> float | None:
    """Blocking synchronisations per step, by CUDA's own debug mode: those of a long answer beyond
    those of a short one.
    """
    if target.device.type != "cuda":
        return None
    room = len(request.tokens) + request.max_new_tokens + 64
    engine = Engine(target, drafter, decode, capacity=room)
    counts, steps = [], []
    for share in (1, 2, 1):  # the first one captures
        asked = Request(0, request.tokens, 0, max(2, request.max_new_tokens * share // 2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                done = next(iter(list(engine.run([asked]))))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(item.message) for item in caught))
        steps.append(len(done.passes))
    return (counts[1] - counts[2]) / max(1, steps[1] - steps[2])


main = command(
    report,
    shape={"choices": sorted(SHAPES), "default": "llama31_8b"},
    **dict.fromkeys(SIZES, (0, "instead of the shape's")),
    device="auto",
    dtype={"choices": sorted(DTYPES), "default": "bfloat16"},
    depth=(0, "draft length; default: the trajectory's deepest"),
    prompts=8,
    context=(512, "tokens of a prompt"),
    tokens=(256, "new tokens of an answer"),
    repeats=3,
    trajectories=REPORTS / "trajectories.json",
    trajectory=("distilled", "which one all drafters replay; own: each the one of its name"),
    record={
        "nargs": "*",
        "metavar": "ARM=FOLDER",
        "help": "write --trajectories from finished measurements",
    },
    out=REPORTS / "gpu_decoder.json",
)

if __name__ == "__main__":
    sys.exit(main())
