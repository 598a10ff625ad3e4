"""Set-up of a training: target, data, drafter, and the functions that the loop calls."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.api.checkpoint import new_drafter, refuse_unset, save_adapter, save_drafter
from heads.api.drafter import TrainableDrafter
from heads.api.errors import UserError
from inference.cpu import multiplies_bfloat16
from inference.decoding.config import DecodeConfig
from inference.decoding.requests import Completion, Request
from inference.folders import CHECKPOINT, replace_part, restore
from inference.integrity import CHECKED
from inference.manifest import checkpoint_hash, file_entry, write_manifest
from inference.measure.metrics import TauEstimate
from inference.measure.prompts import Prompt, select_prompts, to_requests
from inference.measure.run import tau_in_rows_that_fit
from inference.parity import check_parity
from inference.target.memory import BatchMemoryError
from inference.target.settings import loading_text
from train.averaging import WeightAverage
from train.config import EVAL_BATCH, TrainConfig, TrainingJob, require_same, run_facts
from train.data.held_out import read_prompts
from train.data.loader import StepLoader
from train.data.masks import mask_report
from train.data.pack import PackedData, parity_documents, read_documents, token_counts
from train.distributed import World
from train.engines.base import TrainEngine
from train.engines.make import make_engine
from train.features.base import Features, in_use
from train.features.make import make_features, require_logits_only
from train.feedback.check import require_weighed
from train.loop import Evaluation, Progress, Trainer
from train.manifest import BestFacts, DataFacts, TrainManifest, TrainOutcome, read_training
from train.on_policy import OnPolicyFeatures
from train.optim import learning_rate
from train.refresh import merge_updates, prepare_start, require_reached, trial_loss, updates_of
from train.state import StateStore
from train.stopping import Stopped, StopRequest
from train.target.parts import loader, trial_batch
from train.target.sharding import load_target
from train.tracking.clock import Clock, timing_collectives
from train.tracking.display import Display
from train.tracking.meter import Meter
from train.tracking.services.base import Transcript
from train.tracking.summary import SUMMARY_FILE, summarise, write_summary
from train.tracking.tracker import LOG_FILE, Tracker

logger = logging.getLogger(__name__)

BEST, CHECKPOINTS = "best", "checkpoints"
PARITY_DOCUMENTS, REPORTED_DOCUMENTS = 2, 256


class Run:
    """A training with its target, data and drafter. begun: see `Meter`."""

    def __init__(self, job: TrainingJob, world: World, begun: float | None = None) -> None:
        self.job, self.world, self.begun = job, world, begun
        config, seed = job.config, job.config.seed
        random.seed(seed + world.rank)
        np.random.seed((seed + world.rank) % 2**32)  # libraries draw from the global state
        torch.manual_seed(seed + world.rank)
        self.target, self.access = load_target(job, world)
        info, weights = self.target.info, self.target.weights
        length, domains = config.sequence_length, config.domains
        self.data = PackedData.from_manifest(
            job.data, info, length, domains=domains, context_weight=config.context_weight
        )
        shape = (config.global_batch, config.micro_batch, world.size, world.rank)
        self.loader = StepLoader(self.data, *shape, seed)
        self.steps = config.steps(self.loader.steps_per_epoch)
        self.facts = run_facts(job, info, self.steps)
        counts = token_counts(self.data, info.vocab_size)
        self.drafter: TrainableDrafter = new_drafter(
            job.kind, job.head, info, weights, seed, counts
        ).float()
        prepare_start(self.drafter, config.refresh, info, seed, job.target, loader(job))
        self.requests = self.make_requests() if config.eval_every else []
        self.eval_rows = config.eval_batch
        """Rows of a measurement: train.eval_batch, or fewer if these did not fit into memory."""

    def make_requests(self) -> list[Request]:
        """The held-out prompts that every measurement decodes; raises `UserError` if none fits."""
        config, capacity = self.job.config, self.target.info.max_position_embeddings
        prompts = [one for path in config.prompts for one in read_prompts(path)]
        if config.domains:
            prompts = of_domains(prompts, config)
        each = max(1, config.eval_prompts // len({prompt.domain for prompt in prompts}))
        chosen = select_prompts(prompts, each, seed=config.seed)[: config.eval_prompts]
        decode = replace(self.job.decode, max_new_tokens=config.eval_tokens)
        given = (chosen, self.target.tokenizer, decode)
        requests = to_requests(*given, capacity=capacity, overlong="skip")
        if not requests:
            raise UserError(
                f"none of the prompts in {', '.join(config.prompts)} fits into the target's "
                f"{capacity} positions together with its answer. Give shorter prompts, or lower "
                "train.eval_tokens."
            )
        return requests

    def run(self, provenance: Mapping[str, object] | None) -> TrainManifest:
        """Train from the folder's newest state, run the checks, and write the manifest."""
        job, world, config = self.job, self.world, self.job.config
        store = StateStore(job.out / CHECKPOINTS, config.keep, world)
        snapshot = store.newest()
        if snapshot is not None:
            require_same(snapshot, self.facts)
            self.drafter.load_state_dict(snapshot.weights())
        progress = Progress.from_record(snapshot.record) if snapshot is not None else Progress()
        average = WeightAverage(config.average, config.average_every)
        if snapshot is not None:
            average.restore(snapshot.average() if world.is_main else {}, progress.averaged)
        if world.is_main:
            restore(job.out / BEST)
        self.forget_replaced_best(progress)
        title = f"training {job.kind}"
        with Display(title, self.steps, progress.step, active=world.is_main) as display:
            self.introduce(display, progress)
            self.check_updates()
            clock = Clock.of(world.device)
            with (
                timing_collectives(clock) if world.size > 1 else nullcontext(),
                closing(make_engine(self.drafter, job.engine, job.optim, world)) as engine,
            ):
                self.check(engine.weights(), display)
                if snapshot is not None:
                    snapshot.restore(engine, world)
                try:
                    reason = self.fit(engine, store, progress, average, display, clock)
                except Stopped as stopped:
                    if world.is_main:
                        with StopRequest():  # another signal must not change the exit status
                            self.conclude(progress, stopped.name, display)
                    raise
                with clock.part("evaluation"):
                    self.check(engine.weights(), display)
            if world.is_main:
                self.conclude(progress, reason, display)
        if world.is_main:
            write_manifest(job.out, "train", self.manifest(progress, reason), provenance)
        world.wait()
        return read_training(job.out)

    def forget_replaced_best(self, progress: Progress) -> None:
        """Count the best tau as not measured if best/ holds other weights, as those of a session
        that was killed before it saved its state. Collective."""
        known = progress.best_sha256  # "" in states of earlier versions
        own = known if not self.world.is_main else checkpoint_hash(self.job.out / BEST)
        if self.world.from_main([float(bool(known) and own != known)])[0]:
            if self.world.is_main:
                logger.warning(
                    "'%s' does not hold the weights of step %d, whose tau was the best up to the "
                    "state that is continued; the next measurement replaces them",
                    *(self.job.out / BEST, progress.best_step),
                )
            progress.tau, progress.tau_ci95, progress.best_step = None, (0.0, 0.0), 0

    def conclude(self, progress: Progress, reason: str, display: Display) -> None:
        self.meter.finish()
        out, packing, peak = self.job.out, self.data.report, self.meter.peak
        content = summarise(self.job, progress, reason, self.world, packing, peak, out / LOG_FILE)
        display.console.print(write_summary(content, out))

    def introduce(self, display: Display, progress: Progress) -> None:
        """Print the drafter, its data and the size of the training."""
        if not self.world.is_main:
            return
        if progress.step:
            display.say(f"continuing after step {progress.step} of {self.steps}")
            return
        documents = read_documents(self.job.data, self.target.info, self.job.config.domains)
        sample = list(islice(documents, REPORTED_DOCUMENTS))
        display.console.print(str(mask_report(sample, self.target.tokenizer)), soft_wrap=True)
        display.say(str(self.data.report))
        weights = sum(p.numel() for p in self.drafter.parameters() if p.requires_grad)
        display.say(
            f"{self.job.kind}: {weights:,} trained weights; {self.steps} steps of "
            f"{self.job.config.global_batch} rows on {self.world.size} x "
            f"{self.world.device.type}, {self.job.engine.name}, {self.job.engine.precision}"
        )
        if self.job.features.trainer_target == "parts":
            display.say(str(self.target.weights.state))
        emulated = self.world.device.type == "cpu" and not multiplies_bfloat16()
        if emulated and self.job.engine.precision == "bfloat16":
            display.say(
                "this CPU has no instructions for bfloat16 and emulates them, at a fifth of "
                "float32's speed or less; engine.precision=float32 is faster"
            )

    @property
    def alone(self) -> TrainableDrafter:
        """The trained drafter without what is trained with it."""
        return self.drafter

    def check_updates(self) -> None:
        """Refuse weights, low-rank updates and stored logits that would have no effect."""
        job, needs, device_type = self.job, self.drafter.needs, self.world.device.type
        bfloat16 = job.engine.precision == "bfloat16"
        if job.features.top_logits and job.features.mode != "online":
            require_logits_only(self.drafter, job.features, self.target, self.loader.step(0)[0])
        if self.data.weighed:
            batch = trial_batch(job, self.target, needs, self.loader.step(0)[0].rows(1))
            require_weighed(self.alone, batch, device_type, bfloat16)
        if job.config.refresh.lora_rank:
            batch = trial_batch(job, self.target, needs, self.loader.step(0)[0])
            require_reached(self.drafter, trial_loss(self.drafter, batch, device_type, bfloat16))

    def features(self) -> Features:
        """The source of batches; with `on_policy`, the drafter continues a share of the answers."""
        job, on_policy = self.job, self.job.config.on_policy
        plain = make_features(
            job.features,
            self.target,
            self.drafter.needs,
            job.engine.dtype,
            answers=job.data,
            loader=self.loader,
            steps=self.steps,
            on_policy=on_policy.share > 0,
            loading=loading_text(job.target.unusual),
        )
        if on_policy.share == 0:
            return plain
        eos = self.target.eos_token_ids
        return OnPolicyFeatures(plain, self.drafter, eos, on_policy, job.engine)

    def fit(
        self,
        engine: TrainEngine,
        store: StateStore,
        progress: Progress,
        average: WeightAverage,
        display: Display,
        clock: Clock,
    ) -> str:
        """Run the loop; returns why it ended."""
        job, config, main = self.job, self.job.config, self.world.is_main
        given: dict[str, Any] = {"length": progress.log_bytes, "settings": self.facts}
        with (
            # first, because it may refuse the settings, before anything is written
            in_use(self.features()) as features,
            Tracker(config.tracker, job.out, active=main, **given) as tracker,
        ):
            given = {"peak_tflops": config.peak_tflops, "clock": clock, "begun": self.begun}
            device, dtype = self.world.device, job.engine.dtype
            given["processes"] = self.world.size + self.world.helpers
            self.meter = Meter(device, dtype, progress.spent, main=main, **given)
            reason = Trainer(
                engine=engine,
                features=features,
                loader=self.loader,
                rate=lambda step: learning_rate(step, self.steps, job.optim.lr, job.schedule),
                evaluate=self.evaluate if self.requests else None,
                keep_best=self.keep_best,
                main_alone=self.access.main_alone,
                breakable=not self.access.served,
                store=store,
                tracker=tracker,
                display=display,
                world=self.world,
                config=config,
                schedule=job.schedule,
                steps=self.steps,
                run_facts=self.facts,
                progress=progress,
                meter=self.meter,
                average=average,
            ).run()
            if not self.requests:
                # an earlier session's tau is not of these weights
                progress.tau, progress.best_step = None, progress.step
                weights = average.weights(engine)
                with clock.part("saving"), self.access.main_alone():
                    if main:
                        self.keep_best(weights)
            tracker.keep(job.out / BEST)
            return reason

    def serving(self, weights: Mapping[str, Tensor]) -> TrainableDrafter:
        """The drafter with these weights, as loaded from a checkpoint and ready to decode."""
        return self.fresh(type(self.drafter), weights)

    def fresh(self, cls: type[TrainableDrafter], weights: Mapping[str, Tensor]) -> TrainableDrafter:
        cuda = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(cuda):  # measuring must not change the training's random numbers
            drafter = cls(self.drafter.config, self.target.info)
        drafter.to(device=self.target.device, dtype=self.target.dtype)
        drafter.load_state_dict(merge_updates(weights, self.job.config.refresh))
        refuse_unset(drafter)
        drafter.bind(self.target.weights)
        return drafter.eval()

    def evaluate(self, weights: dict[str, Tensor]) -> Evaluation:
        """tau of these weights with the bundled decoder on the held-out prompts."""
        config = self.job.config
        decode = replace(self.access.decode(self.job.decode), max_new_tokens=config.eval_tokens)
        drafter = self.serving(weights)
        found, answers = self.measured(drafter, decode)
        depths = {f"acceptance/depth{n}": rate for n, rate in enumerate(found.unconditional, 1)}
        figures = {"tar": found.tar, "verify_passes": found.verify_passes, **depths}
        shown = config.tracker.transcripts if config.tracker.on else 0
        answers = sorted(answers, key=lambda answer: answer.request.index)[:shown]
        return Evaluation(found.tau, found.ci95, figures, tuple(map(self.transcript, answers)))

    def measured(
        self, drafter: TrainableDrafter, decode: DecodeConfig
    ) -> tuple[TauEstimate, list[Completion]]:
        """tau and the answers, in as many of train.eval_batch rows as fit into memory. Raises
        `UserError` if not even one does."""
        answers: list[Completion] = []
        decode = replace(decode, batch_size=self.eval_rows)
        try:
            found, self.eval_rows = tau_in_rows_that_fit(
                self.target, drafter, self.requests, decode, EVAL_BATCH, answers
            )
        except BatchMemoryError as error:
            raise UserError(
                f"tau cannot be measured: {error} Here decode.max_new_tokens is "
                "train.eval_tokens, and the prompts are those of train.prompts; with "
                "train.eval_every=0 tau is not measured during the training."
            ) from error
        return found, answers

    def transcript(self, answer: Completion) -> Transcript:
        """An answer as text."""
        decode = self.target.tokenizer.decode
        prompt, text = decode(list(answer.request.tokens)), decode(answer.tokens)
        return Transcript(prompt, text, len(answer.tokens), answer.tau)

    def keep_best(self, weights: dict[str, Tensor]) -> str:
        """Replace <out>/best as a whole by a checkpoint with these weights; returns its hash."""
        with replace_part(self.job.out / BEST, CHECKPOINT) as fresh:
            self.write_checkpoint(weights, fresh)
        return checkpoint_hash(self.job.out / BEST)

    def write_checkpoint(self, weights: dict[str, Tensor], folder: Path) -> None:
        drafter, refresh = self.serving(weights), self.job.config.refresh
        if not refresh.adapter:
            save_drafter(drafter, folder, self.target.info)
            return
        updates, base = updates_of(weights, refresh), Path(refresh.init_from)
        save_adapter(drafter, updates, base, self.facts["base"], folder)

    def check(self, weights: dict[str, Tensor], display: Display) -> None:
        """Compare training with decoding in the main process; raises `ParityError`. Collective."""
        if not self.job.config.parity:
            return
        with self.access.main_alone():
            if self.world.is_main:
                self.compare_paths(weights, display)

    def compare_paths(self, weights: dict[str, Tensor], display: Display) -> None:
        """Print whether training and decoding agree; raises `ParityError` if they do not."""
        depth = self.job.decode.tree().max_depth
        documents = list(islice(parity_documents(self.data, depth + 4), PARITY_DOCUMENTS))
        if not documents:
            message = "no document is long enough (%d tokens) for the parity check; it is left out"
            logger.warning(message, depth + 4)
            return
        report = check_parity(self.target, self.serving(weights), documents, depth)
        display.say(
            f"parity: training and decoding agree at {report.compared} positions, depth 1 to "
            f"{depth} (largest relative difference {max(report.worst, default=0.0):.1e}, allowed "
            f"{report.tolerance:.0e})"
        )

    def manifest(self, progress: Progress, reason: str) -> TrainOutcome:
        """The content of the training's manifest."""
        best: BestFacts = {"step": progress.step, "tau": None, "tau_ci95": None}
        if progress.tau is not None:
            interval = list(progress.tau_ci95)
            best = {"step": progress.best_step, "tau": progress.tau, "tau_ci95": interval}
        facts, config = self.facts, self.job.config
        data: DataFacts = {
            "path": str(self.job.data),
            "manifest_sha256": facts["data"],
            "validation": list(config.prompts),
        }
        if config.domains:
            data["domains"] = list(config.domains)
        outcome: TrainOutcome = {
            "kind": self.job.kind,
            "head": facts["head"],
            "target": self.target.info.to_dict(),
            "data": data,
            "checkpoint": BEST,
            "files": [
                file_entry(self.job.out, f"{BEST}/{path.name}")
                for path in sorted((self.job.out / BEST).iterdir())
                if path.name in CHECKED
            ],
            "best": best,
            "steps": progress.step,
            "ended_by": reason,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "processes": self.world.size,
            "history": LOG_FILE,
            "summary": SUMMARY_FILE,
            "settings": {
                "engine": facts["engine"],
                "optim": facts["optim"],
                "schedule": facts["schedule"],
                "train": facts["train"],
            },
        }
        if config.refresh.adapter:
            outcome["adapter"] = {
                "base": config.refresh.init_from,
                "base_sha256": facts["base"],
                "rank": config.refresh.lora_rank,
                "alpha": config.refresh.alpha,
            }
        return outcome


def of_domains(prompts: Sequence[Prompt], config: TrainConfig) -> list[Prompt]:
    """The prompts of the domains that are trained on; raises `UserError` if there are none."""
    found = [prompt for prompt in prompts if prompt.domain in config.domains]
    if not found:
        known = ", ".join(sorted({prompt.domain for prompt in prompts}))
        raise UserError(
            f"train.domains: none of the prompts in {', '.join(config.prompts)} is of "
            f"{', '.join(config.domains)}; their domains are: {known}. Give prompts of these "
            "domains as train.prompts, or set train.eval_every=0."
        )
    return found
