"""Settings of the datasets: which ones, how their columns are read, and how their rows are prepared
before the target answers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from heads.api.config import (
    Fraction,
    NonNegativeInt,
    PositiveInt,
    PositiveWeight,
    Seed,
    Tokens,
    config,
)
from heads.api.errors import UserError
from inference.measure.datasets import DatasetConfig


@config("data")
@dataclass(frozen=True)
class SourceConfig:
    """One dataset, and how its columns are read."""

    path: str = ""
    """Hub dataset id, or a local .jsonl, .json, .parquet, .arrow or .txt file (a prompt per line),
    a folder of one kind of them, a glob, or a saved dataset."""
    name: str | None = None
    """Configuration of a Hub dataset (its `name` in `datasets.load_dataset`)."""
    split: str = "train"
    """Split of a Hub or saved dataset; local files are one split."""
    revision: str | None = None
    """Git revision of a Hub dataset; None takes the newest, so name one where runs must be
    repeatable."""
    kind: Literal["auto", "messages", "prompt", "tokens", "text"] = "auto"
    """What the column holds: messages (OpenAI {role, content} or ShareGPT {from, value}), prompt
    (a user message), tokens (ids), text (plain text that is continued without the chat template),
    or auto."""
    column: str | None = None
    """Column with the content; None looks for messages, conversations, conversation, tokens,
    input_ids, prompt, instruction, question, text, in this order. A column that is named and holds
    text is a prompt."""
    spans_column: str = "spans"
    """Column with answer spans [[start, end), ...] of pre-tokenised rows; used when it exists. Else
    loss_mask, assistant_masks, completion_mask or labels tell the answers."""
    tools_column: str = "tools"
    """Column with descriptions of the tools that the assistant may call (a list, or its JSON); used
    when it exists."""
    id_column: str | None = None
    """Column with unique row ids; None makes ids from a hash of the content."""
    domain_column: str | None = None
    """Column with the row's domain (code, chat, ...); None reads `domain` where there is such a
    column and data.domain is not given."""
    domain: str = "general"
    """Domain of all rows when there is no `domain_column`, and of rows whose value there is
    empty."""
    weight: PositiveWeight = 1.0
    """Share of this source among those of a mixture, relative to the other weights."""
    limit: PositiveInt | None = None
    """Most rows to use, counted after shuffling; None uses all."""
    share: tuple[NonNegativeInt, NonNegativeInt] = (0, 1)
    """Part and number of parts: [1, 3] uses every third row (after shuffle and limit), beginning
    with the second. The parts of one dataset have no row in common; rounds of a loop take one
    each."""
    shuffle: bool = False
    """Whether rows are taken in a random order (fixed by `seed`)."""
    seed: Seed = 0
    """Seed of the shuffle, and of the interleaving of a mixture."""
    streaming: bool = False
    """Read rows one after the other, without downloading or indexing the dataset first."""
    buffer: PositiveInt = 10_000
    """Streaming: rows that are shuffled among each other; at most two buffers are held in
    memory."""

    def __post_init__(self) -> None:
        if self.share[0] >= self.share[1]:
            raise UserError(
                "data.share is [part, number of parts] with parts counted from 0, such as [0, "
                f"3]; given: {list(self.share)}."
            )


@config("data.held_out_prompts")
@dataclass(frozen=True)
class HeldOut:
    """Prompts that no training row may repeat: prompt files, or a dataset with the template that
    makes prompts of its rows."""

    path: str
    """Prompt file, folder of them, or dataset (see `bench.prompts`)."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """How the dataset's rows become prompts (see `bench.dataset`)."""
    domains: tuple[str, ...] = ()
    """Of a folder: which domains; empty: all."""


@config("data.reserve")
@dataclass(frozen=True)
class ReserveConfig:
    """Prompts that are held out of the data: whole conversations, chosen by a hash of what their
    users say. Rows that repeat one of them, exactly or nearly, are left out."""

    validation: NonNegativeInt = 0
    """Prompts for tau during training, where train.prompts names none."""
    bench: NonNegativeInt = 0
    """Prompts for measuring, with bench=own."""
    share: Fraction = 0.1
    """Largest part of the conversations that either may take."""
    seed: Seed = 0
    """Chooses other conversations."""
    prompts: tuple[str, ...] = ()
    """Files that an earlier `generate` wrote of what it held out: these are left out again, and
    no others are chosen. The rounds of a loop share the first round's."""


@config("data")
@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Where rows come from (one dataset or a mixture), which of them are left out, and what of them
    is answered."""

    mixture: tuple[SourceConfig, ...] = ()
    """Several datasets instead of one, interleaved by weight: [{path: a.jsonl, weight: 2}, {path:
    b.parquet, limit: 1000}]."""
    turn: Literal["first", "last", "all"] = "last"
    """Which turns the target answers: the first or the last user (or tool) message of a
    conversation, with what came before as context, or all of them one after the other, each with
    the target's own earlier answers as context."""
    supervise: Literal["all", "first", "last"] = "all"
    """With generate.answers=dataset: which assistant turns are supervised, all, the first or the
    last."""
    reasoning: Literal["keep", "drop", "last"] = "keep"
    """<think>...</think> in the dataset's assistant turns: keep, drop, or keep it in the last turn
    only, as templates of reasoning models do. What the target itself writes is never changed."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More values for the chat template, such as {enable_thinking: false}."""
    max_prompt_tokens: Tokens | None = None
    """Longest prompt; None allows what the target's positions allow."""
    max_tokens: Tokens | None = None
    """With generate.answers=dataset: longest document; None leaves cutting to the training's
    sequence length."""
    truncate: Literal["skip", "left", "right", "middle"] = "skip"
    """What happens to what is longer: skip the row, or cut it on the left (the oldest turns first),
    on the right or in the middle. Both are counted."""
    deduplicate: Literal["none", "exact", "near"] = "exact"
    """Rows that repeat an earlier one are skipped: exact (same text but for case, signs and
    spaces), near (also those that share most of their text), or none (only repeated ids)."""
    near_share: Fraction = 0.8
    """Deduplicate near: share of common text (Jaccard similarity of 12-character shingles,
    estimated by MinHash) from which on a row is skipped."""
    decontaminate: Literal["none", "exact", "overlap"] = "overlap"
    """Rows that repeat a held-out prompt are skipped: overlap (a run of 50 letters and digits of
    one, or a short one as a whole), exact (a whole prompt is repeated), or none."""
    reserve: ReserveConfig = field(default_factory=ReserveConfig)
    """Prompts that are held out of the data itself."""
    held_out: tuple[str, ...] = ()
    """Files and folders of prompts that are held out, such as those of `train.prompts`."""
    benches: tuple[str, ...] = ()
    """Names of conf/bench/ whose prompts are held out as well, such as [gsm8k, humaneval]."""
    held_out_prompts: tuple[HeldOut, ...] = ()
    """What `benches` stands for; filled in by `headstart generate`, or given for a benchmark
    without a name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path and not self.mixture:
            raise UserError(
                "data.path is missing: give a dataset as data.path, or several as data.mixture."
            )
        if self.path and self.mixture:
            raise UserError(
                f"data.path ('{self.path}') and data.mixture exclude each other; put the path "
                "into the mixture."
            )
        for source in self.mixture:
            if not source.path:
                raise UserError("data.mixture: every source needs a path.")

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The datasets: the mixture, or the only one."""
        return self.mixture or (self,)
