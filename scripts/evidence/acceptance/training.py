"""Checks the speed and the correctness of training on a device: the parts of `python -m
scripts.evidence.gpu training`.

EAGLE-3 (seven unrolled steps) and DSpark learn from a target with the shape of Llama-3.1-8B and
random weights. Features are computed online, as in `headstart train`. Before that, losses of
logits, which a GPU computes in fused kernels, are compared with plain torch. Gradients of small
drafters in float32 are compared with those of a CPU, because attention over blocks runs on a GPU as
a fused kernel that no CPU can run backward.

Legend: T positions of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from heads.api.checkpoint import new_drafter
from heads.api.drafter import TrainableDrafter
from heads.dflash import Config as BlockConfig
from heads.eagle3 import Config as Eagle3Config
from heads.kernels.reference.row_losses import NAMES, ROW_LOSSES, RowLosses
from heads.medusa import Config as MedusaConfig
from inference.decoding.placement import weights_on
from inference.parity import check_parity
from inference.target.model import TargetModel
from scripts.evidence.acceptance.parts import Check, Found, Part, Setting
from scripts.evidence.acceptance.shapes import TOY, as_target, build_model
from train.data.loader import PackedBatch
from train.distributed import World
from train.engines.base import EngineConfig
from train.engines.torch_engine import TorchEngine
from train.features.base import OnlineFeatures
from train.optim import OptimConfig
from train.planning.devices import find_peak
from train.planning.footprint import FlopCount

LLAMA = "llama31_8b"
GRADIENT_GAP = 2e-2
"""Largest difference of a gradient from a CPU's, as a share of its largest value; float32 products
may be TF32 on a GPU."""
LOSS_GAP = 1e-4
"""Largest difference of losses from float64's, over all rows together, as a share of their norm.
The same limit holds for the gradients, which are rounded to the logits' dtype."""
LOSS_ROWS = 8
DOCUMENTS = 4
"""Documents of a packed row."""
UTILISATION = 0.30
"""Share of the dense bfloat16 peak that training must reach on a GPU with an 8B target."""
RATE = 1e-3


def heads(vocab: int, draft_vocab: int) -> dict[str, tuple[str, Any, Tensor | None]]:
    """Recipe -> kind, configuration and token counts."""
    counts = torch.arange(vocab, 0, -1)
    dspark = BlockConfig(
        block_size=7, sample_from_anchor=True, dependency="markov", confidence=True, ce=0.1, tv=1.8
    )
    eagle = Eagle3Config(ttt_steps=7, draft_vocab_size=draft_vocab)
    return {
        "eagle3": ("eagle3", eagle, counts),
        "dspark": ("dflash", dspark, None),
        "medusa": ("medusa", MedusaConfig(), None),
    }


def build(
    recipe: str,
    target: TargetModel,
    vocab: int,
    draft_vocab: int,
    device: torch.device | str | None = None,
) -> TrainableDrafter:
    """A new drafter of a recipe, in float32, on the given device or the target's."""
    kind, config, counts = heads(vocab, draft_vocab)[recipe]
    more = {} if counts is None else {"token_counts": counts}
    weights = target.weights if device is None else weights_on(target, device)
    drafter = new_drafter(kind, config, target.info, weights, seed=0, **more)
    return drafter.to(device or target.device, torch.float32)


def packed(rows: int, length: int, vocab: int, documents: int = DOCUMENTS) -> PackedBatch:
    """Rows of random documents with supervision at all positions."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(1, vocab, (rows, length), generator=generator)
    each = -(-length // documents)
    places = torch.arange(length).expand(rows, -1)
    return PackedBatch(
        tokens,
        places % each,
        (places // each + 1).int(),
        torch.ones_like(tokens, dtype=torch.bool),
        torch.arange(rows),
    )


# Correctness


def gradients(setting: Setting) -> Found:
    """Loss and gradients in float32 on this device, compared with a CPU's, from the same
    features."""
    rows, checks = [], []
    for recipe in ("eagle3", "dspark", "medusa"):
        here, there = (gradients_on(recipe, device) for device in (setting.device, "cpu"))
        worst = max(
            float((here[name] - there[name]).abs().max() / there[name].abs().max().clamp(min=1e-6))
            for name in there
        )
        rows.append({"recipe": recipe, "gap": worst, "weights": len(there)})
        checks.append(Check(f"gradients against a CPU's, {recipe}", worst, most=GRADIENT_GAP))
    return Found({"rows": rows}, checks)


def row_losses(setting: Setting) -> Found:
    """Losses of logits as wide as Llama's, and their gradients, as this device computes them,
    compared with plain torch in float64."""
    vocab, rows, checks = setting.sizes.shapes[LLAMA].vocab, [], []
    generator = torch.Generator().manual_seed(0)
    wanted = 10 + 4 * torch.randn(LOSS_ROWS, vocab, generator=generator)
    drafted = wanted + torch.randn(2, LOSS_ROWS, vocab, generator=generator)
    labels = torch.randint(vocab, (2, LOSS_ROWS), generator=generator).to(setting.device)
    upstream = torch.rand(2, LOSS_ROWS, generator=generator).to(setting.device)
    for dtype in (torch.float32, torch.bfloat16):
        logits, target = (part.to(setting.device, dtype) for part in (drafted, wanted))
        exact, worst = (logits.double(), target.double(), labels), {"value": 0.0, "gradient": 0.0}
        for name in NAMES:
            for temperature in (1.0, 0.7):
                here = graded(ROW_LOSSES, (logits, target, labels), name, temperature, upstream)
                there = graded(ROW_LOSSES.reference, exact, name, temperature, upstream)
                gaps = [
                    float((a.double() - b).norm() / b.norm())
                    for a, b in zip(here, there, strict=True)
                ]
                rows.append({"loss": name, "temperature": temperature, "gaps": gaps})
                worst = {k: max(worst[k], gap) for k, gap in zip(worst, gaps, strict=True)}
        kind = str(dtype).removeprefix("torch.")
        most = {"value": LOSS_GAP, "gradient": {torch.float32: LOSS_GAP}.get(dtype, 2.0**-7)}
        checks += [Check(f"{k}s in {kind}", gap, most=most[k]) for k, gap in worst.items()]
    return Found({"rows": rows, "vocab": vocab}, checks)


def graded(
    losses: Callable[..., RowLosses],
    given: tuple[Tensor, Tensor, Tensor],
    name: str,
    temperature: float,
    upstream: Tensor,
) -> tuple[Tensor, Tensor]:
    """A loss of logits, with the target's logits and labels, and the gradient of the logits."""
    logits = given[0].clone().requires_grad_()
    values = losses(logits, given[1], given[2], (name,), temperature)[name]
    (values * upstream).sum().backward()
    assert logits.grad is not None
    return values.detach(), logits.grad


def gradients_on(recipe: str, device: torch.device | str) -> dict[str, Tensor]:
    """Loss and gradients by weight, on the CPU. Features and initial weights are computed on a CPU,
    so that only the drafter's work differs."""
    target = as_target(build_model(TOY, torch.device("cpu"), torch.float32, 256))
    initial = build(recipe, target, TOY.vocab, TOY.draft_vocab).state_dict()
    drafter = build(recipe, target, TOY.vocab, TOY.draft_vocab, device)
    drafter.load_state_dict(initial)
    batch = OnlineFeatures(target, drafter.needs).batch(packed(2, 96, TOY.vocab, 2))
    moved = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    for name, value in moved.items():
        setattr(batch, name, value.to(device))
    if batch.target_logits is not None:
        head = target.weights.lm_head.to(device)
        batch.target_logits = lambda hidden: hidden @ head.t()
    output = drafter.train().loss(batch)
    output.loss_sum.backward()
    found = {name: w.grad.cpu() for name, w in drafter.named_parameters() if w.grad is not None}
    return {"loss": output.loss_sum.detach().cpu(), **found}


# Speed


def training(setting: Setting, recipe: str) -> Found:
    """Steps of one row each: tokens per second, utilisation and memory. Checks that the loss falls
    on one row, and the parity of training and decoding afterwards."""
    sizes, shape = setting.sizes, setting.sizes.shapes[LLAMA]
    if LLAMA not in setting.targets:
        setting.release()
        model = build_model(shape, setting.device, setting.dtype, sizes.train_length)
        setting.targets[LLAMA] = as_target(model)
    target = setting.targets[LLAMA]
    drafter = build(recipe, target, shape.vocab, shape.draft_vocab)
    config = EngineConfig(name="torch", precision="bfloat16" if setting.on_gpu else "float32")
    world = World(device=setting.device)
    engine = TorchEngine(drafter, config, OptimConfig(lr=RATE), world)
    features = OnlineFeatures(target, drafter.needs, config.dtype)
    row = packed(1, sizes.train_length, shape.vocab)
    supervised = int(row.loss_mask.sum())
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    losses, spent, flops = [], {"target": 0.0, "drafter": 0.0}, 0
    warm = 2
    for step in range(sizes.train_steps + warm):
        counter = FlopCount() if step == 0 else None
        with counter or nullcontext():
            begin = now(setting)
            batch = features.batch(row, step)
            between = now(setting)
            output = engine.forward_backward(batch, supervised, True)
        engine.step(RATE)
        end = now(setting)
        if counter is not None:
            flops = counter.flops
        if step >= warm:
            spent["target"] += between - begin
            spent["drafter"] += end - between
        losses.append(float(output.loss_sum) / supervised)
    seconds = sum(spent.values())
    peak = find_peak(setting.device, torch.bfloat16 if setting.on_gpu else torch.float32)
    rate = sizes.train_steps * sizes.train_length / seconds
    used = sizes.train_steps * flops / seconds / peak.flops if peak.flops else 0.0
    depth = 3
    drafter.to(setting.dtype)
    parity = check_parity(target, drafter, [row.tokens[0, : depth + 12].tolist()], depth)
    facts = {
        "recipe": recipe,
        "tokens_per_second": rate,
        "flops_per_step": flops,
        "utilisation": used,
        "peak": {"flops": peak.flops, "source": peak.source},
        "seconds_per_step": {k: v / sizes.train_steps for k, v in spent.items()},
        "losses": losses,
        "parity": {"compared": parity.compared, "worst": list(parity.worst)},
    }
    checks = [Check("last loss over the first", losses[-1] / losses[0], least=0, most=0.999)]
    checks.append(Check("logits compared for parity", parity.compared, least=1))
    if setting.on_gpu:
        facts["peak_bytes"] = torch.cuda.max_memory_allocated(setting.device)
        checks.append(Check("utilisation", used, least=UTILISATION))
    return Found(facts, checks)


def now(setting: Setting) -> float:
    """The host's clock after the device's work is done."""
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)
    return time.perf_counter()


PARTS: Sequence[Part] = (
    Part("losses", row_losses, 30),
    Part("gradients", gradients, 60),
    Part("eagle3", lambda setting: training(setting, "eagle3"), 120, timed=True),
    Part("dspark", lambda setting: training(setting, "dspark"), 120, timed=True),
)
