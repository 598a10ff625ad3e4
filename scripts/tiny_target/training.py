"""The training loop of the embedded target: one device, resumable, its schedule bound to a budget of seconds or steps.

Needs torch, numpy and safetensors only, so that it runs on a bare GPU image.
"""

from __future__ import annotations

import dataclasses
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from scripts.tiny_target.atomic import write_json
from scripts.tiny_target.data import Stream, load_manifest, load_stream
from scripts.tiny_target.evaluation import HeldOut, evaluate, load_heldout
from scripts.tiny_target.model import ModelShape, TinyLlama, token_losses
from scripts.tiny_target.progress import START, Bar, note
from scripts.tiny_target.settings import TrainSettings
from scripts.tiny_target.state import load_checkpoint, save_checkpoint, save_weights


@dataclasses.dataclass
class Intervals:
    """When a run reports, in seconds of wall time unless said otherwise; none of it changes the weights."""

    log: float = 10.0
    evaluate: float = 90.0
    save: float = 120.0
    call: float | None = None  # seconds since the process started after which it saves and leaves
    stop_after_steps: int | None = None  # steps of this call, for tests


class Trainer:
    """One training run over a prepared folder; `run` goes on until the budget, the call's limit or a signal ends it."""

    architecture: type[TinyLlama] = TinyLlama

    def __init__(
        self, folder: Path, state: Path, out: Path, settings: TrainSettings, shape: ModelShape, device: torch.device,
        compiled: bool = False, intervals: Intervals | None = None, eval_tokens: int | None = None, command: str = "",
    ) -> None:  # fmt: skip
        self.settings, self.device, self.out, self.eval_tokens = settings, device, out, eval_tokens
        self.intervals = intervals or Intervals()
        self.path = state / "checkpoint.pt"
        self.stopped = False
        manifest = load_manifest(folder)
        self.heldout: dict[str, HeldOut] = load_heldout(folder, manifest, settings.length, eval_tokens)
        self.streams = {name: Stream(load_stream(folder, manifest, name), settings.length, device) for name in ("raw", "chat")}
        torch.manual_seed(settings.seed)
        self.model = self.architecture(shape).to(device)
        self.optimisers = self._optimisers()
        self.generator = torch.Generator(device).manual_seed(settings.seed + 1)
        self.step, self.seconds = 0, 0.0
        self.log: dict[str, Any] = {"history": [], "evaluations": [], "calls": []}
        self.identity = {**dataclasses.asdict(settings), "shape": dataclasses.asdict(shape), "betas": list(settings.betas)}
        self.identity["tokenizer_sha256"] = manifest.get("tokenizer_sha256", "")
        if self.path.is_file():
            self._restore(load_checkpoint(self.path, self.identity, device))
        self.log["calls"].append(
            {
                "command": command,
                "from_step": self.step,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
                "torch": str(torch.__version__),
                "compiled": compiled,
            }
        )
        self.compute: Callable[[Tensor], tuple[Tensor, Tensor]] = self._losses
        if compiled:
            self.compute = torch.compile(self._losses, dynamic=False)

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        """Muon for the layers' matrices, whose update is scaled to AdamW's size so that one learning rate serves both (Liu et al.,
        2502.16982); AdamW for the rest. It needs about two thirds of AdamW's tokens, which counts on a CPU."""
        muon = self.settings.optimiser == "muon"
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and not (muon and ".layers." in n)]
        vectors = [p for p in self.model.parameters() if p.ndim != 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        lr, decay = self.settings.lr, self.settings.weight_decay
        adamw = torch.optim.AdamW(groups, lr=lr, betas=self.settings.betas, fused=self.device.type == "cuda")
        if not muon:
            return [adamw]
        inner = [p for n, p in self.model.named_parameters() if p.ndim == 2 and ".layers." in n]
        return [adamw, torch.optim.Muon(inner, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")]

    def _restore(self, content: dict[str, Any]) -> None:
        self.model.load_state_dict(content["model"])
        for optimiser, state in zip(self.optimisers, content["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.generator.set_state(content["generator"].cpu())
        self.step, self.seconds, self.log = content["step"], content["seconds"], content["log"]
        note(f"resumed at step {self.step}, {self.seconds:.0f} training seconds")

    def _losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (objective, mean negative log likelihood) of windows [rows, length + 1]."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.settings.bf16):
            logits = self.model(ids[:, :-1])
        losses, normaliser = token_losses(logits, ids[:, 1:])
        mean = losses.mean()
        return mean + self.settings.z_loss * normaliser.square().mean(), mean

    def _batch(self, used: float) -> Tensor:
        rows = self.settings.micro_tokens // self.settings.length
        chat = self.settings.chat_rows(used)
        parts = [self.streams["raw"].windows(rows - chat, self.generator), self.streams["chat"].windows(chat, self.generator)]
        return torch.cat(parts)

    def _update(self) -> Tensor:
        """Take one optimiser step and return the mean loss as a device scalar (no host synchronisation)."""
        settings = self.settings
        used = settings.used(self.step, self.seconds)
        for group in [group for optimiser in self.optimisers for group in optimiser.param_groups]:
            group["lr"] = settings.rate(used)
        parts = settings.batch_tokens // settings.micro_tokens
        mean = torch.zeros((), device=self.device)
        for _ in range(parts):
            objective, loss = self.compute(self._batch(used))
            (objective / parts).backward()
            mean += loss.detach() / parts
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        return mean

    def run(self) -> bool:
        """Train until the end of budget, call or patience; save everything; return True when the budget is used up."""
        previous = {name: signal.signal(name, self._stop) for name in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._warm_up()
            with Bar("training") as bar:
                finished = self._loop(bar)
        finally:
            for name, handler in previous.items():
                signal.signal(name, handler)
        self._evaluate()
        self.save(finished)
        return finished

    def _stop(self, number: int, frame: FrameType | None) -> None:
        note(f"signal {number}: saving after this step")
        self.stopped = True

    def _warm_up(self) -> None:
        """Compile outside the training clock; leaves weights, gradients and the generator as they were."""
        kept = self.generator.get_state()
        self.compute(self._batch(0.0))[0].backward()
        self.model.zero_grad(set_to_none=True)
        self.generator.set_state(kept)
        self._synchronise()
        note(f"ready: {sum(p.numel() for p in self.model.parameters()):,} parameters on {self.device}")

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _loop(self, bar: Bar) -> bool:
        every, settings = self.intervals, self.settings
        now = logged = evaluated = saved = time.monotonic()
        first_step = since = self.step
        total = torch.zeros((), device=self.device)
        while settings.used(self.step, self.seconds) < 1.0:
            total += self._update()
            if (self.step & 7) == 0:
                self._synchronise()  # bounds how far the host runs ahead of the clock
            before, now = now, time.monotonic()
            self.seconds += now - before
            if now - logged >= every.log:
                self._report(bar, total.item() / (self.step - since), (self.step - since) / (now - logged))
                total.zero_()
                logged, since = now, self.step
            if now - evaluated >= every.evaluate:
                self._evaluate()
                evaluated = now
            if now - saved >= every.save:
                self.save(False)
                saved = now
            if self.stopped or (every.call is not None and now - START > every.call):
                break
            if every.stop_after_steps is not None and self.step - first_step >= every.stop_after_steps:
                break
            shift = time.monotonic() - now  # reports stand outside the training clock
            now, logged = now + shift, logged + shift
        return settings.used(self.step, self.seconds) >= 1.0

    def _report(self, bar: Bar, loss: float, steps_per_second: float) -> None:
        settings = self.settings
        used = settings.used(self.step, self.seconds)
        rate = steps_per_second * settings.batch_tokens
        left = (1 - used) * self.seconds / max(used, 1e-9)
        lr = settings.rate(used)
        entry = {"step": self.step, "seconds": round(self.seconds, 1), "loss": round(loss, 4), "lr": round(lr, 7)}
        self.log["history"].append({**entry, "tokens_per_second": round(rate)})
        bar.show(used, left, f"step {self.step}  loss {loss:.4f}  lr {lr:.2e}  {rate / 1e3:,.1f}k tokens/s")

    def _evaluate(self) -> None:
        found = evaluate(self.model, self.heldout, self.device, bf16=self.settings.bf16)
        self.log["evaluations"].append({"step": self.step, "seconds": round(self.seconds, 1), **found})
        note("held out: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))

    def save(self, finished: bool) -> None:
        """Write checkpoint, bfloat16 weights and `training.json`."""
        content = {
            "settings": self.identity,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
        }
        save_checkpoint(self.path, content)
        save_weights(self.out / "model.safetensors", self.model)
        summary = {
            "format": 1,
            "finished": finished,
            "steps": self.step,
            "training_seconds": round(self.seconds, 1),
            "tokens_seen": self.step * self.settings.batch_tokens,
            "eval_tokens": self.eval_tokens,  # per held-out stream, None for all
            "settings": self.identity,
        }
        write_json(self.out / "training.json", {**summary, **self.log})
        note(f"saved step {self.step} ({'finished' if finished else 'unfinished'})")
