"""Settings of the datasets: which ones, how their columns are read, and how their rows are prepared
before the target answers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
    """One dataset, and how to read its columns."""

    path: str = ""
    """Hub dataset id, or a local .jsonl, .json, .parquet, .arrow or .txt file (a prompt per line),
    a folder of one kind of them, a glob, or a saved dataset."""
    name: str | None = None
    """Configuration of a Hub dataset (its `name` in `datasets.load_dataset`)."""
    split: str = "train"
    """Split of a Hub or saved dataset; local files are one split."""
    revision: str | None = None
    """Git revision of a Hub dataset; None: the newest. Set it if runs must be repeatable."""
    kind: Literal["auto", "messages", "prompt", "tokens", "text"] = "auto"
    """What the column holds: messages (OpenAI {role, content} or ShareGPT {from, value}), prompt
    (a user message), tokens (ids), text (plain text that is continued without the chat template),
    or auto."""
    column: str | None = None
    """Column with the content; None looks for messages, conversations, conversation, tokens,
    input_ids, prompt, instruction, question, text, in this order. A column that is given here and
    holds text is a prompt."""
    spans_column: str = "spans"
    """Column with answer spans [[start, end), ...] of pre-tokenised rows; used if it exists.
    Otherwise loss_mask, assistant_masks, completion_mask or labels mark the answers."""
    tools_column: str = "tools"
    """Column with descriptions of the tools that the assistant may call (a list, or its JSON); used
    if it exists."""
    id_column: str | None = None
    """Column with unique row ids; None makes ids from a hash of the content."""
    domain_column: str | None = None
    """Column with the row's domain (code, chat, ...); None reads `domain` if that column exists and
    data.domain is not given."""
    domain: str = "general"
    """Domain of all rows if there is no `domain_column`, and of rows whose value there is empty."""
    weight: PositiveWeight = 1.0
    """Weight of this source in a mixture, relative to the other weights."""
    limit: PositiveInt | None = None
    """Maximum number of rows to use, counted after shuffling; None: all."""
    share: tuple[NonNegativeInt, NonNegativeInt] = (0, 1)
    """Part and number of parts: [1, 3] uses every third row (after shuffle and limit), beginning
    with the second. The parts of a dataset have no rows in common; each round of a loop takes
    one."""
    shuffle: bool = False
    """Take rows in a random order (fixed by `seed`)."""
    seed: Seed = 0
    """Seed of the shuffle, and of the interleaving of a mixture."""
    streaming: bool = False
    """Read rows one after the other, without downloading or indexing the dataset first."""
    buffer: PositiveInt = 10_000
    """Streaming: number of rows that are shuffled together; at most two such buffers are held in
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
    """For a folder: domains to read; empty: all."""


@config("data.reserve")
@dataclass(frozen=True)
class ReserveConfig:
    """Prompts that are held out of the data: whole conversations, chosen by a hash of what their
    users say. Rows that repeat one of them, exactly or nearly, are left out."""

    validation: NonNegativeInt = 0
    """Prompts for tau during training if train.prompts is empty."""
    bench: NonNegativeInt = 0
    """Prompts for measuring, with bench=own."""
    share: Fraction = 0.1
    """Largest share of the conversations that each of validation and bench may take."""
    seed: Seed = 0
    """Seed of the choice of conversations."""
    prompts: tuple[str, ...] = ()
    """Files of held-out prompts that an earlier `generate` wrote: the same prompts are held out,
    and no others are chosen. All rounds of a loop share those of the first round."""


@config("data")
@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The source of rows (one dataset or a mixture), the rows to leave out, and the turns to
    answer."""

    mixture: tuple[SourceConfig, ...] = ()
    """Several datasets instead of one, interleaved by weight: [{path: a.jsonl, weight: 2}, {path:
    b.parquet, limit: 1000}]."""
    turn: Literal["first", "last", "all"] = "last"
    """Turns that the target answers: the first or the last user (or tool) message of a
    conversation, with the turns before it as context, or all of them one after the other, each with
    the target's own earlier answers as context."""
    supervise: Literal["all", "first", "last"] = "all"
    """With generate.answers=dataset: assistant turns to supervise: all, the first or the last."""
    reasoning: Literal["keep", "drop", "last"] = "keep"
    """<think>...</think> in the dataset's assistant turns: keep, drop, or last (keep it only in the
    last turn, as templates of reasoning models do). What the target writes is never changed."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further values for the chat template, such as {enable_thinking: false}."""
    max_prompt_tokens: Tokens | None = None
    """Longest prompt in tokens; None: as long as the target's positions allow."""
    max_tokens: Tokens | None = None
    """With generate.answers=dataset: longest document in tokens; None: as long as the target's
    positions allow, and the training cuts at its sequence length."""
    truncate: Literal["skip", "left", "right", "middle"] = "skip"
    """What to do with rows beyond these limits: skip the row, or cut it on the left (the oldest
    turns first), on the right or in the middle. Both are counted."""
    deduplicate: Literal["none", "exact", "near"] = "exact"
    """Skip rows that repeat an earlier one: exact (same text except for case, punctuation and
    spaces), near (also those that share most of their text), or none (only repeated ids)."""
    near_share: Fraction = 0.8
    """Deduplicate near: smallest share of common text (Jaccard similarity of 12-character shingles,
    estimated by MinHash) at which a row is skipped."""
    decontaminate: Literal["none", "exact", "overlap"] = "overlap"
    """Skip rows that repeat a held-out prompt: overlap (a run of 50 letters and digits of one, or a
    short one as a whole), exact (a whole prompt is repeated), or none."""
    reserve: ReserveConfig = field(default_factory=ReserveConfig)
    """Prompts that are held out of the data itself."""
    held_out: tuple[str, ...] = ()
    """Files and folders of prompts to hold out, such as those of `train.prompts`."""
    benches: tuple[str, ...] = ()
    """Names of conf/bench/ whose prompts are held out too, such as [gsm8k, humaneval]."""
    held_out_prompts: tuple[HeldOut, ...] = ()
    """The prompts of `benches`; filled in by `headstart generate`, or given for a benchmark without
    a name."""

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
        alone = {item.name: item.default for item in fields(SourceConfig)}
        for name in ("path", "limit", "seed"):  # these are the mixture's too
            del alone[name]
        unread = [name for name, usual in alone.items() if getattr(self, name) != usual]
        if self.mixture and unread:
            raise UserError(
                f"data.{unread[0]}={getattr(self, unread[0])} has no effect beside data.mixture, "
                "whose sources have their own settings. Put it into each source that it is for: "
                f"data.mixture=[{{path: a.jsonl, {unread[0]}: ...}}, ...]."
            )

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The datasets: the mixture, or the only one."""
        return self.mixture or (self,)
