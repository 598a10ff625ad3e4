"""Trains a small target on a prepared folder: one device, resumable, limited by a budget.

The model is transformers' own. The learning rate follows the used share of the budget, so a run of
a given number of seconds or steps always completes its schedule. With a budget in steps, an
interrupted run continues bit by bit as if it had not been interrupted.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads.api.errors import UserError
from inference.manifest import write_bytes, write_json
from scripts.assets import prepared
from scripts.assets.prepared import BOS_ID, END_ID, MAX_LENGTH, PAD_ID
from train.muon import MuonAdamW
from train.stopping import StopRequest

START = time.monotonic()
INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
"""Suffixes of the names of projections into the residual stream."""


def note(message: str) -> None:
    print(f"[{time.monotonic() - START:7.1f}s] {message}", flush=True)


def llama_config(**sizes: Any) -> dict[str, Any]:
    """Return the content of a `config.json` for a Llama with tied embeddings.

    sizes: keys of the configuration that replace the values here. The rotary settings are given in
    both spellings that transformers has used.
    """
    return _config("LlamaForCausalLM", "llama", {"rope_theta": 10_000.0, **sizes})


def hybrid_config(**sizes: Any) -> dict[str, Any]:
    """Return the same for a Qwen3.5 without vision: every fourth layer is attention, the others are
    gated delta rules (Yang et al., 2412.06464)."""
    content = _config("Qwen3_5ForCausalLM", "qwen3_5_text", sizes)
    # The family's share of rotated dimensions, which transformers would otherwise fill in.
    content["rope_parameters"]["partial_rotary_factor"] = 0.25
    return content


def _config(architecture: str, model_type: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    content = {
        "architectures": [architecture],
        "model_type": model_type,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        **sizes,
    }
    rope = {"rope_type": "default", "rope_theta": content.get("rope_theta", 10_000.0)}
    return {**content, "rope_parameters": rope}


def build_model(config: Mapping[str, Any]) -> Any:
    """Return a float32 model of this configuration with fresh weights from torch's generator.

    transformers draws them with deviation `initializer_range`; projections into the residual stream
    are scaled down by the square root of twice the number of layers, as in GPT-2.
    """
    # A copy, because some configurations of transformers modify the dicts that they are given.
    described = AutoConfig.for_model(**copy.deepcopy(dict(config)))
    model = AutoModelForCausalLM.from_config(described, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(INTO_RESIDUAL):
                parameter.mul_(1.0 / math.sqrt(2 * config["num_hidden_layers"]))
    return model


def resized(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the weights of a model of `layers` layers that starts from another one.

    A deeper model initially computes the same as the other one: every layer is followed by copies
    of itself, evenly over the depth, whose projections into the residual stream are zero until they
    are trained (block expansion, Wu et al., 2401.02415). A shallower model has layers of the other
    one, evenly from the first to the last.
    """
    given = 1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    if layers >= given:
        origin = [index * given // layers for index in range(layers)]
    else:
        origin = [round(index * (given - 1) / max(1, layers - 1)) for index in range(layers)]
    grown = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    for index, source in enumerate(origin):
        copied = index > 0 and origin[index - 1] == source
        prefix = f"model.layers.{source}."
        for name, tensor in weights.items():
            if name.startswith(prefix):
                zero = copied and name.endswith(INTO_RESIDUAL)
                own = torch.zeros_like(tensor) if zero else tensor.clone()
                grown[f"model.layers.{index}.{name.removeprefix(prefix)}"] = own
    return grown


def fitting(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return those of a Llama's weights that a model of another family can use: the tensors with
    the same names and shapes (embeddings, MLPs, some of the attention's). A Qwen3.5 stores the
    weights of its norms minus one."""
    less = 1.0 if config["model_type"] == "qwen3_5_text" else 0.0
    shapes = {name: tensor.shape for name, tensor in build_model(config).named_parameters()}
    return {
        name: tensor - less if name.endswith("norm.weight") else tensor
        for name, tensor in weights.items()
        if tensor.shape == shapes.get(name)
    }


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """The settings that determine the trained weights; a resumed run must be given the same ones.

    Exactly one of `seconds` (training time, without compilation and evaluation) and `steps` is set.
    """

    seconds: float | None = None
    steps: int | None = None
    lr: float = 3e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: float = 0.01  # share of the run over which the learning rate rises
    decay: float = 0.3  # share of the run over which it falls, wsd only
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    z_loss: float = 1e-5
    batch_tokens: int = 131_072
    micro_tokens: int = 131_072
    length: int = 1024
    bf16: bool = False  # matrix products in bfloat16 (autocast), weights and optimiser in float32
    chat_share: float = 0.4  # share of conversations among the rows of a batch
    final_chat_share: float = 0.7  # the same in the last quarter of the run
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that sizes divide each other as required; the UserError names the flag."""
        if (self.seconds is None) == (self.steps is None):
            given = f"seconds={self.seconds}, steps={self.steps}"
            raise UserError(f"give one of --seconds and --steps; got {given}.")
        if self.micro_tokens % self.length or self.batch_tokens % self.micro_tokens:
            raise UserError(
                f"--batch-tokens {self.batch_tokens} must be a multiple of --micro-tokens "
                f"{self.micro_tokens}, and that one of --length {self.length}."
            )

    def used(self, step: int, seconds: float) -> float:
        """Return the share of the run that is over, 0 to 1."""
        whole = step / max(1, self.steps or 1) if self.seconds is None else seconds / self.seconds
        return min(1.0, whole)

    def rate(self, used: float) -> float:
        """Return the learning rate when the share `used` of the run is over."""
        if used < self.warmup:
            return self.lr * max(0.01, used / self.warmup)
        if self.schedule == "wsd":
            return self.lr * min(1.0, (1.0 - used) / self.decay)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (used - self.warmup) / (1 - self.warmup)))

    def chat_rows(self, used: float) -> int:
        """Return how many rows of a micro-batch are conversations."""
        share = self.final_chat_share if used >= 0.75 else self.chat_share
        return round(share * (self.micro_tokens // self.length))


@dataclasses.dataclass
class Intervals:
    """When a run reports, in seconds of wall time; none of it changes the weights."""

    log: float = 10.0
    evaluate: float = 90.0
    save: float = 120.0
    call: float | None = None  # seconds after the start of the process at which it saves and ends


class Trainer:
    """One training run over a prepared folder.

    folder: prepared; state: folder of `checkpoint.pt`; out: receives `model.safetensors` (bfloat16)
    and `training.json`; config: content of the model's config.json; eval_tokens: of each held-out
    stream, None for all; command: for the record; start: the first weights, by name (None: fresh);
    started_from: facts about their training, for the record.
    """

    def __init__(
        self,
        folder: Path,
        state: Path,
        out: Path,
        settings: TrainSettings,
        config: Mapping[str, Any],
        device: torch.device,
        compiled: bool = False,
        intervals: Intervals | None = None,
        eval_tokens: int | None = None,
        command: str = "",
        start: Mapping[str, Tensor] | None = None,
        started_from: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.device, self.out, self.eval_tokens = settings, device, out, eval_tokens
        self.intervals = intervals or Intervals()
        self.path = state / "checkpoint.pt"
        manifest = prepared.load_manifest(folder)
        self.heldout = prepared.load_heldout(folder, settings.length, eval_tokens)
        self.streams = {}
        for name in ("raw", "chat"):
            ids = prepared.load_stream(folder, manifest, name)
            self.streams[name] = prepared.Stream(ids, settings.length, device)
        torch.manual_seed(settings.seed)
        self.model = build_model(config).to(device)
        if start is not None:  # tied weights are in the file once
            wide = {name: tensor.float() for name, tensor in start.items()}
            self.model.load_state_dict(wide, strict=False)
        self.optimiser = self._optimiser()
        self.generator = torch.Generator(device).manual_seed(settings.seed + 1)
        self.step, self.seconds = 0, 0.0
        self.started_from = started_from
        self.log: dict[str, list[dict[str, Any]]] = {"history": [], "evaluations": [], "calls": []}
        self.identity = {
            **dataclasses.asdict(settings),
            "betas": list(settings.betas),
            "config": dict(config),
            "tokenizer_sha256": manifest["tokenizer_sha256"],
        }
        if self.path.is_file():
            self._restore()
        cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu"
        call = {"command": command, "from_step": self.step, "device": name}
        self.log["calls"].append({**call, "torch": str(torch.__version__), "compiled": compiled})
        self.compute = torch.compile(self._losses, dynamic=False) if compiled else self._losses

    def _optimiser(self) -> torch.optim.Optimizer:
        """Muon for the layers' matrices, AdamW for the rest (Liu et al., 2502.16982). It needs
        about two thirds of AdamW's tokens."""
        settings = self.settings
        named = list(self.model.named_parameters())
        inner = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        outer = [p for name, p in named if p.ndim == 2 and ".layers." not in name]
        vectors = [p for _, p in named if p.ndim != 2]
        groups = [
            {"params": inner, "weight_decay": settings.weight_decay, "muon": True},
            {"params": outer, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return MuonAdamW(groups, settings.lr, momentum=0.95, betas=settings.betas, eps=1e-8)

    def _restore(self) -> None:
        """Continue from the checkpoint; raises UserError if it was made with other settings."""
        content = torch.load(self.path, map_location=self.device, weights_only=True)
        then, now = content["settings"], self.identity
        other = [f"{k}: {then.get(k)} then, {v} now" for k, v in now.items() if then.get(k) != v]
        if other:
            raise UserError(
                f"{self.path} was made with other settings ({', '.join(other)}). Give the same "
                "ones, or choose another --state folder."
            )
        self.model.load_state_dict(content["model"])
        self.optimiser.load_state_dict(content["optimiser"])
        self.generator.set_state(content["generator"].cpu())
        self.step, self.seconds, self.log = content["step"], content["seconds"], content["log"]
        note(f"resumed at step {self.step}, {self.seconds:.0f} training seconds")

    def _losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (objective, mean negative log likelihood) of windows [rows, length + 1]."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.settings.bf16):
            logits = self.model(ids[:, :-1], use_cache=False).logits
        losses, normaliser = prepared.token_losses(logits, ids[:, 1:])
        mean = losses.mean()
        return mean + self.settings.z_loss * normaliser.square().mean(), mean

    def _batch(self, used: float) -> Tensor:
        """Return the windows of one forward pass [rows, length + 1], documents first."""
        chat = self.settings.chat_rows(used)
        rows = {"raw": self.settings.micro_tokens // self.settings.length - chat, "chat": chat}
        drawn = [self.streams[name].windows(n, self.generator) for name, n in rows.items()]
        return torch.cat(drawn)

    def _update(self) -> Tensor:
        """Take one optimiser step; return the mean loss as a device scalar (no synchronisation)."""
        settings = self.settings
        used = settings.used(self.step, self.seconds)
        for group in self.optimiser.param_groups:
            group["lr"] = settings.rate(used)
        parts = settings.batch_tokens // settings.micro_tokens
        mean = torch.zeros((), device=self.device)
        for _ in range(parts):
            objective, loss = self.compute(self._batch(used))
            (objective / parts).backward()
            mean += loss.detach() / parts
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimiser.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        return mean

    def run(self) -> bool:
        """Train until the budget, the call's limit or a signal ends it, then save everything;
        return whether the budget is used up."""
        with StopRequest() as stop:
            self._warm_up()
            finished = self._loop(stop)
        self.evaluate()
        self.save(finished)
        return finished

    def _warm_up(self) -> None:
        """Compile outside the training clock; weights, gradients and generator keep their state."""
        kept = self.generator.get_state()
        self.compute(self._batch(0.0))[0].backward()
        self.model.zero_grad(set_to_none=True)
        self.generator.set_state(kept)
        self._synchronise()
        note(f"ready: {self.model.num_parameters():,} parameters on {self.device}")

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _loop(self, stop: StopRequest) -> bool:
        every, settings = self.intervals, self.settings
        now = logged = evaluated = saved = time.monotonic()
        since = self.step
        total = torch.zeros((), device=self.device)
        while settings.used(self.step, self.seconds) < 1.0:
            total += self._update()
            if self.step % 8 == 0:
                self._synchronise()  # bounds how far the host runs ahead
            before, now = now, time.monotonic()
            self.seconds += now - before
            if now - logged >= every.log:
                steps = self.step - since
                self._report(total.item() / steps, steps / (now - logged))
                total.zero_()
                logged, since = now, self.step
            if now - evaluated >= every.evaluate:
                self.evaluate()
                evaluated = now
            if now - saved >= every.save:
                self.save(False)
                saved = now
            if stop.name or (every.call is not None and now - START > every.call):
                break
            shift = time.monotonic() - now  # reports do not count into the training clock
            now, logged = now + shift, logged + shift
        return settings.used(self.step, self.seconds) >= 1.0

    def _report(self, loss: float, steps_per_second: float) -> None:
        used = self.settings.used(self.step, self.seconds)
        figures = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "loss": round(loss, 4),
            "lr": round(self.settings.rate(used), 7),
            "tokens_per_second": round(steps_per_second * self.settings.batch_tokens),
        }
        self.log["history"].append(figures)
        left = (1 - used) * self.seconds / max(used, 1e-9)
        shown = "  ".join(f"{name} {value:,}" for name, value in figures.items())
        note(f"{shown}  {used:.1%} done, {left:.0f} s left")

    def evaluate(self) -> None:
        """Append the held-out figures to the log."""
        found = prepared.evaluate(self.model, self.heldout, bf16=self.settings.bf16)
        facts = {"step": self.step, "seconds": round(self.seconds, 1)}
        self.log["evaluations"].append({**facts, **found})
        note("held out: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))

    def save(self, finished: bool) -> None:
        """Write checkpoint, bfloat16 weights and `training.json`."""
        content = {
            "settings": self.identity,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_bytes(self.path, buffer.getvalue())
        weights = {
            name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
            for name, parameter in self.model.named_parameters()  # tied weights once
        }
        packed = safetensors.torch.save(weights, metadata={"format": "pt"})
        write_bytes(self.out / "model.safetensors", packed)
        summary = {
            "format": 1,
            "finished": finished,
            "steps": self.step,
            "training_seconds": round(self.seconds, 1),
            "tokens_seen": self.step * self.settings.batch_tokens,
            "eval_tokens": self.eval_tokens,  # per held-out stream, None for all
            "settings": self.identity,
        }
        if self.started_from:
            summary["started_from"] = dict(self.started_from)
        write_json(self.out / "training.json", {**summary, **self.log})
        note(f"saved step {self.step} ({'finished' if finished else 'unfinished'})")
