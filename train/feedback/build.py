"""`build(...)` makes training data from answers and the records of their verifications: the
drafter's errors get a higher weight.

    <out>/shards/               answers, as `headstart generate` writes them, with weights per token
                                (docs/formats.md)
    <out>/hard_prompts.jsonl    prompts to generate from again
    <out>/manifest.json         written last; its stage is "generate", because trainings read that

The records are read twice: once for the counts, once for writing. One shard, and the table of
verifications of one folder of answers, are in memory at a time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from heads.api.errors import UserError
from heads.api.reading import read_json_lines, require_object
from heads.api.target_info import TargetInfo
from inference.folders import discard
from inference.manifest import (
    MANIFEST_FILE,
    FileEntry,
    file_entry,
    file_sha256,
    verify_file,
    write_bytes,
    write_manifest,
)
from inference.verifications import SEQUENCES, read_facts, read_table
from train.data.answers import (
    DONE,
    PACKED,
    SETTINGS,
    SHARD_SCHEMA,
    SHARDS,
    AnswerRow,
    AnswersManifest,
    copy_held_out,
    parquet_bytes,
    read_answers,
)
from train.data.masks import mask_of
from train.data.pack import checked_shards
from train.data.parquet import readable
from train.feedback.config import FeedbackConfig
from train.feedback.evidence import TokenEvidence, VerificationRecords, evidence_of
from train.feedback.weights import Weighing, WeightTotals, replay_mask

logger = logging.getLogger(__name__)

SHARD_ROWS = 4096
HARD_PROMPTS = "hard_prompts.jsonl"
STAGE_KEYS = ("records", "answers")
"""Settings of the places to read; checksums identify what was read."""


class DomainReport(TypedDict):
    """A domain's supervised tokens and their share, verify passes, tau, and mean weight."""

    supervised: int
    share: float
    passes: int
    tau: float | None
    weight: float


class FeedbackFacts(TypedDict):
    """The manifest's entry `feedback`. key: everything that decides the result: the settings and,
    per source, the SHA-256 of every file read; acceptance, cost: by depth from 1 on; unfit:
    verifications left out."""

    key: dict[str, object]
    documents: int
    verifications: int
    unfit: int
    errors: int
    acceptance: list[float | None]
    cost: list[float]
    domains: dict[str, DomainReport]
    mean_weight: float
    hard_prompts: int


class FeedbackManifest(AnswersManifest):
    """A folder of answers with feedback."""

    feedback: NotRequired[FeedbackFacts]


@dataclass
class Document:
    """One answer (a row of `SHARD_SCHEMA`) with its evidence."""

    row: AnswerRow
    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    evidence: TokenEvidence

    @property
    def cost(self) -> float:
        """Verify passes per committed token; 0 without records."""
        return self.evidence.passes / max(1, self.evidence.committed)


@dataclass(frozen=True)
class AnswerSource:
    """A folder of answers with its records (None: without), or a folder of records alone."""

    answers: Path | None
    records: Path | None

    def check(self, info: TargetInfo) -> dict[str, str]:
        """Name -> SHA-256 of each file read; raises `UserError` for damage or another target."""
        files = VerificationRecords(self.records, info).files
        if self.answers is not None:
            checked_shards(self.answers, info)
            files = [self.answers / MANIFEST_FILE, *files]
        return {
            f"{file.parent.parent.name}/{file.parent.name}/{file.name}": file_sha256(file)
            for file in files
        }

    def documents(self, info: TargetInfo) -> Iterator[Document]:
        records = VerificationRecords(self.records, info)
        for row in self._answers() if self.answers is not None else self._sequences(info):
            tokens = np.asarray(row["tokens"], np.int32)
            supervised = mask_of([(low, high) for low, high in row["spans"]], len(tokens))
            evidence = evidence_of(tokens, records.of(row["id"]), records.rule)
            yield Document(row, tokens, supervised, evidence)

    def _answers(self) -> Iterator[AnswerRow]:
        assert self.answers is not None
        for entry in read_answers(self.answers)["shards"]:
            path = verify_file(self.answers, entry)
            with readable(path), pq.ParquetFile(path) as file:
                known = [name for name in SHARD_SCHEMA.names if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=SHARD_ROWS, columns=known):
                    for row in batch.to_pylist():
                        whole = {name: row.get(name) for name in SHARD_SCHEMA.names}
                        yield cast(AnswerRow, whole | {"parts": row.get("parts") or []})

    def _sequences(self, info: TargetInfo) -> Iterator[AnswerRow]:
        assert self.records is not None
        if read_facts(self.records).get("redacted"):
            raise UserError(
                f"the records in '{self.records}' are redacted: they hold no text to train on. "
                "Record without redaction, or give the answers that they are of."
            )
        for number, row in enumerate(read_table(self.records, SEQUENCES).to_pylist()):
            tokens, begin = row["tokens"], row["prompt_length"]
            if begin < len(tokens) and max(tokens) < info.vocab_size:
                yield {
                    "id": row["sequence"],
                    "index": number,
                    "domain": row["domain"],
                    "tokens": tokens,
                    "spans": [[begin, len(tokens)]],
                    "finish": row["finish"],
                    "seed": row["seed"],
                    "parts": [],
                }


def build(
    records: Sequence[Path],
    answers: Sequence[Path],
    out: Path,
    config: FeedbackConfig,
    provenance: Mapping[str, object] | None = None,
    *,
    info: TargetInfo | None = None,
    reader: Path | None = None,
) -> FeedbackManifest:
    """Write the answers with weights from their records to `out` and return the manifest; a
    complete result there is left as it is, and one of other settings or inputs is replaced.

    records: folders of records, the first for the first folder of answers and so on; one may be
    missing, and answers without records weigh 1. info: the target, needed if config.sequences takes
    documents from records alone. reader: a training that has read what is in `out`, which is then
    not replaced. Call it in the main process only. Raises `UserError` for damaged input, input of
    several targets, for a result that is not replaced, or if nothing is left to train on.
    """
    sources, info, facts = _open(records, answers, config, info)
    settings = json.loads(json.dumps(asdict(config)))
    for name in STAGE_KEYS:
        del settings[name]
    key = {"settings": settings, "inputs": [source.check(info) for source in sources]}
    if (out / MANIFEST_FILE).is_file():
        manifest = cast(FeedbackManifest, read_answers(out))
        if "feedback" not in manifest:
            raise UserError(
                f"'{out}' holds answers that are no feedback, and is not overwritten. Give "
                "another folder."
            )
        known = manifest["feedback"].get("key")
        if known == key:
            for entry in manifest["shards"]:
                verify_file(out, entry)
            return manifest
        if reader is not None:
            raise UserError(
                f"'{reader}' has been trained on '{out}', which was made with other settings or "
                f"inputs: {differences(known, key)}. Give the former ones, choose another "
                "run.name, or start again with run.overwrite=true."
            )
        (out / MANIFEST_FILE).unlink()
    if (out / SETTINGS).is_file():
        raise UserError(
            f"'{out}' is a folder of `headstart generate`, whose answers are not replaced. Give "
            "another folder."
        )
    for name in (SHARDS, PACKED):
        discard(out / name)
    tally, costs, seen = _tally(sources, info, config)
    weighing = Weighing.of(config, tally)
    hardest = sorted(costs, key=lambda name: (-costs[name], name))
    hard = {name: costs[name] for name in hardest[: round(config.hard_prompts * len(costs))]}
    writer = _Writer(out, config, weighing, hard)
    for source in sources:
        for document in source.documents(info):
            writer.add(document)
    writer.finish()
    if not writer.rows:
        raise UserError(
            f"nothing is left to train on: {seen} documents, {tally.errors} first errors in them. "
            "Without errors there is nothing to replay: set feedback.replay=false."
        )
    content = {
        **facts,
        "counts": {
            "input": seen,
            DONE: writer.rows,
            "failed": 0,
            "skipped": seen - writer.rows,
            "tokens": writer.supervised,
        },
        "shards": writer.shards,
        "feedback": _report(key, tally, weighing, writer),
        "replay": config.replay,
        **copy_held_out(answers, out),
    }
    write_manifest(out, "generate", content, provenance)
    return cast(FeedbackManifest, read_answers(out))


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> str:
    """In words, how the key of a manifest (`FeedbackFacts`) differs from another one."""
    before, after = (old or {}).get("settings", {}), new["settings"]
    changed = [
        f"feedback.{name} was {before.get(name)!r}, is {value!r}"
        for name, value in after.items()
        if before.get(name) != value
    ]
    same = (old or {}).get("inputs") == new["inputs"]
    return "; ".join([*changed, *([] if same else ["other answers or records are given"])])


def _open(
    records: Sequence[Path],
    answers: Sequence[Path],
    config: FeedbackConfig,
    info: TargetInfo | None,
) -> tuple[list[AnswerSource], TargetInfo, dict[str, object]]:
    if config.sequences:
        if info is None or not records:
            raise UserError(
                "feedback.sequences takes documents from records: give their folders, as "
                "feedback.records."
            )
        facts = {"round": 1, "target": info.to_dict(), "sampling": {}}
        sources = [AnswerSource(None, folder) for folder in records]
        return sources, info, {**facts, "data": {"answers": "records"}}
    if not answers:
        raise UserError(
            "there are no answers to make feedback of: give their folders, as feedback.answers."
        )
    if len(records) > len(answers):
        raise UserError(
            f"{len(records)} folders of records are given for {len(answers)} of answers: one for "
            "each, in order."
        )
    manifests = [read_answers(folder) for folder in answers]
    first, last_round = manifests[0], max(manifest.get("round", 0) for manifest in manifests)
    facts = {"round": 1 + last_round, "target": first["target"]}
    facts |= {"sampling": first.get("sampling", {}), "data": first.get("data", {})}
    sources = [AnswerSource(folder, own) for folder, own in zip_longest(answers, records)]
    return sources, TargetInfo.from_dict(first["target"]), facts


def _tally(
    sources: Sequence[AnswerSource], info: TargetInfo, config: FeedbackConfig
) -> tuple[WeightTotals, dict[str, float], int]:
    """The sums over all documents, the largest cost of every id with records, and the number of
    documents."""
    tally, costs, seen = WeightTotals(), dict[str, float](), 0
    for source in sources:
        for document in source.documents(info):
            seen += 1
            mask = replay_mask(document.evidence, document.supervised, config)
            tally.add(document.row["domain"], document.evidence, mask)
            if document.evidence.passes:
                name = document.row["id"]
                costs[name] = max(document.cost, costs.get(name, 0.0))
    if not tally.tested.any() and any(source.records for source in sources):
        logger.warning("no verification fits these answers: every token weighs the same")
    if tally.unfit:
        logger.warning("%d verifications do not fit the answers and are left out", tally.unfit)
    return tally, costs, seen


def _report(
    key: dict[str, object], tally: WeightTotals, weighing: Weighing, writer: _Writer
) -> FeedbackFacts:
    total = max(1, sum(one.supervised for one in tally.domains.values()))
    domains: dict[str, DomainReport] = {
        name: {
            "supervised": one.supervised,
            "share": one.supervised / total,
            "passes": one.passes,
            "tau": one.committed / one.passes if one.passes else None,
            "weight": weighing.domain_mean(name, one),
        }
        for name, one in sorted(tally.domains.items())
    }
    depths = range(1, tally.deepest + 1)
    return {
        "key": key,
        "documents": writer.rows,
        "verifications": sum(one.passes for one in tally.domains.values()),
        "unfit": tally.unfit,
        "errors": tally.errors,
        "acceptance": [
            tally.passed[d] / tally.tested[d] if tally.tested[d] else None for d in depths
        ],
        "cost": [float(weighing.cost[d]) for d in depths],
        "domains": domains,
        "mean_weight": writer.weight / max(1, writer.supervised),
        "hard_prompts": len(writer.hard),
    }


@dataclass
class _Writer:
    """Writes shards and hard prompts. costs: of the hard prompts, by id."""

    out: Path
    config: FeedbackConfig
    weighing: Weighing
    costs: Mapping[str, float]
    rows: int = 0
    supervised: int = 0
    weight: float = 0.0
    shards: list[FileEntry] = field(default_factory=list)
    hard: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Id -> line of hard_prompts.jsonl."""
    _waiting: list[AnswerRow] = field(default_factory=list)

    @property
    def schema(self) -> pa.Schema:
        own = {"weights": self.config.weighs, "anchors": self.config.anchor_weights}
        fields = [pa.field(name, pa.list_(pa.float32())) for name, there in own.items() if there]
        return pa.schema([*SHARD_SCHEMA, *fields])

    def add(self, document: Document) -> None:
        """Take a document; the part of it that is kept waits for its shard."""
        self._note_prompt(document)
        row, length = document.row.copy(), len(document.tokens)
        mask = replay_mask(document.evidence, document.supervised, self.config)
        if self.config.replay:
            if not mask.any():
                return
            length = int(np.flatnonzero(mask)[-1]) + 1
            row |= {
                "tokens": row["tokens"][:length],
                "spans": spans_of(mask),
                "parts": [begin for begin in row["parts"] if begin < length],
            }
        weights = self.weighing.tokens(row["domain"], document.evidence)[:length]
        if self.config.weighs:
            row["weights"] = weights
        if self.config.anchor_weights:
            row["anchors"] = self.weighing.roots(document.evidence)[:length]
        self.rows += 1
        self.supervised += int(mask.sum())
        self.weight += float(weights[mask[:length]].sum(dtype=np.float64))
        self._waiting.append(row)
        if len(self._waiting) == SHARD_ROWS:
            self._flush()

    def _note_prompt(self, document: Document) -> None:
        row, cost = document.row, document.cost
        if document.evidence.passes and cost == self.costs.get(row["id"]):
            prompt = list(row["tokens"][: row["spans"][0][0]])
            line = {"id": row["id"], "domain": row["domain"], "tokens": prompt, "cost": cost}
            self.hard.setdefault(row["id"], line)

    def _flush(self) -> None:
        name = f"{SHARDS}/shard-{len(self.shards):05d}.parquet"
        table = pa.Table.from_pylist(self._waiting, self.schema)
        write_bytes(self.out / name, parquet_bytes(table))
        self.shards.append(file_entry(self.out, name, rows=len(self._waiting)))
        self._waiting = []

    def finish(self) -> None:
        if self._waiting:
            self._flush()
        path = self.out / HARD_PROMPTS
        path.unlink(missing_ok=True)
        if self.hard:
            write_lines(path, [self.hard[name] for name in self.costs])


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_bytes(path, "".join(lines).encode())


def read_lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for number, row in read_json_lines(path):
            yield require_object(row, f"'{path}' line {number}")


def summary(manifest: FeedbackManifest) -> str:
    """Lines for the terminal about a finished build."""
    found = manifest["feedback"]
    depths = ["-" if share is None else f"{share:.2f}" for share in found["acceptance"]]
    lines = [
        f"{found['documents']} of {manifest['counts']['input']} documents, "
        f"{found['verifications']} verifications, {found['errors']} first errors; acceptance by "
        f"depth {' '.join(depths)}"
    ]
    for name, one in found["domains"].items():
        tau = "-" if one["tau"] is None else f"{one['tau']:.2f}"
        share, weight = one["share"], one["weight"]
        lines.append(f"  {name}: tau {tau}, {share:.0%} of the tokens, mean weight {weight:.2f}")
    return "\n".join(lines)


def spans_of(mask: NDArray[np.bool_]) -> list[list[int]]:
    """The [start, end) runs of a mask [N]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).tolist()
