"""Builds the prepared folder: token streams, manifest, tokenizer, pairs for prompts.

Layout of a prepared folder:
    raw-NN.bin.xz, chat-NN.bin.xz      training tokens, uint16 little endian, xz; source documents and conversations
    heldout-raw.bin.xz, heldout-chat.bin.xz      group B, the same form
    tokenizer/      what `assets/tiny-target` gets
    manifest.json      sources, counts, hashes, held-out groups, package versions
The held-out pairs from which `prompts` chooses go to a folder of their own (A.jsonl.xz, B.jsonl.xz), since the prepared folder
travels to the training machine and they need not.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import lzma
import platform
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from scripts.tiny_target import corpus, groups
from scripts.tiny_target import tokenizer as tokens
from scripts.tiny_target.atomic import write_bytes, write_json
from scripts.tiny_target.conversations import pairs_of
from scripts.tiny_target.corpus import Document
from scripts.tiny_target.phrasing import DOMAINS, Messages, Pair, dialogue, question
from scripts.tiny_target.progress import note

SHARD_TOKENS = 4_000_000
MIN_ANSWER_TOKENS, MAX_ANSWER_TOKENS, MAX_QUESTION_TOKENS = 20, 400, 230
HELDOUT_BYTES = 3_000_000
HELDOUT_PAIRS_PER_DOMAIN = 700
BARE_CODE_SHARE = 0.35  # functions without a docstring teach less per token; most of them are left out


def prepare(
    documents: list[Document], out: Path, pairs_out: Path, seed: int = 0, workers: int = 2,
    vocabulary: int = tokens.VOCABULARY,
) -> None:  # fmt: skip
    """Write a prepared folder from `documents` (deduplicated, all groups) and the held-out pairs to `pairs_out`.

    The same documents, seed and package versions give the same bytes.
    """
    documents, dropped = corpus.drop_leaks(documents)
    note(f"{len(documents)} documents, {len(dropped)} training files dropped because they share text with held-out ones")
    with ProcessPoolExecutor(workers) as pool:
        pairs = [pair for found in pool.map(pairs_of, documents, chunksize=64) for pair in found]
        group_of = {document.name: document.group for document in documents}
        by_group = split_pairs(pairs, group_of)
        note("pairs: " + ", ".join(f"{group} {len(found)}" for group, found in by_group.items()))
        tokenizer = tokens.train_tokenizer(_sample(documents, by_group["train"], seed), vocabulary)
        tokens.wrap(tokenizer).save_pretrained(out / "tokenizer")
        by_group = {group: fitting(tokenizer, found) for group, found in by_group.items()}
        note("tokenizer trained; encoding")
        streams = {
            "raw": encode_documents(tokenizer, [d for d in documents if d.group == "train"], seed),
            "chat": encode_dialogues(tokenizer, dialogues(by_group["train"], seed)),
            "heldout-raw": encode_documents(tokenizer, heldout_documents(documents), seed),
            "heldout-chat": encode_dialogues(tokenizer, heldout_dialogues(by_group["B"], seed)),
        }
        note("encoded: " + ", ".join(f"{name} {len(ids) / 1e6:.1f}M tokens" for name, ids in streams.items()))
        files = {name: write_stream(pool, out, name, ids) for name, ids in streams.items()}
    for group in ("A", "B"):
        rows = "\n".join(json.dumps(dataclasses.asdict(pair)) for pair in by_group[group])
        write_bytes(pairs_out / f"{group}.jsonl.xz", lzma.compress(rows.encode(), preset=6))
    sizes = tokens.token_bytes(tokenizer)
    manifest = describe(documents, dropped, by_group, streams, files, sizes, seed)
    manifest["tokenizer_sha256"] = tokens.file_hash(out / "tokenizer" / "tokenizer.json")
    write_json(out / "manifest.json", manifest)


def split_pairs(pairs: Sequence[Pair], group_of: dict[str, groups.Group]) -> dict[str, list[Pair]]:
    """Return the pairs by group. Equal answers are kept once, held-out ones first, so that no answer stands in two groups."""
    found: dict[str, list[Pair]] = {"A": [], "B": [], "train": []}
    seen: set[str] = set()
    for group in ("B", "A", "train"):
        for pair in pairs:
            key = " ".join(pair.answer.split())
            if group_of[pair.module] == group and key not in seen and not corpus.SPECIAL.search(pair.shown + pair.answer):
                seen.add(key)
                found[group].append(pair)
    return found


def fitting(tokenizer: Tokenizer, pairs: list[Pair]) -> list[Pair]:
    """Return the pairs whose answer has 20 to 400 tokens and whose question has at most 230."""
    answers = tokenizer.encode_batch_fast([pair.answer for pair in pairs])
    questions = tokenizer.encode_batch_fast([question(pair, 0) for pair in pairs])
    return [
        pair
        for pair, answer, asked in zip(pairs, answers, questions, strict=True)
        if MIN_ANSWER_TOKENS <= len(answer.ids) <= MAX_ANSWER_TOKENS and len(asked.ids) <= MAX_QUESTION_TOKENS
    ]


def _sample(documents: list[Document], pairs: list[Pair], seed: int) -> Iterator[str]:
    """Yield about 30 MB of training text for the tokenizer: every eighth document and every tenth answer."""
    rng = random.Random(seed)
    chosen = [document for document in documents if document.group == "train"]
    yield from (document.text for document in rng.sample(chosen, max(1, len(chosen) // 8)))
    yield from (pair.answer for pair in rng.sample(pairs, len(pairs) // 10))


def dialogues(pairs: list[Pair], seed: int) -> list[Messages]:
    """Return shuffled training conversations: every pair once, and one pair in eight opens a conversation of two or three turns."""
    rng = random.Random(seed)
    result = []
    chosen = [p for p in pairs if p.domain != "code" or '"""' in p.shown or rng.random() < BARE_CODE_SHARE]
    index = 0
    while index < len(chosen):
        turns = rng.choice((2, 3)) if rng.random() < 0.125 else 1
        taken = [pair for pair in chosen[index : index + turns] if pair.module == chosen[index].module]
        result.append(dialogue(taken, rng))
        index += len(taken)
    rng.shuffle(result)
    return result


def heldout_dialogues(pairs: list[Pair], seed: int) -> list[Messages]:
    """Return single-turn conversations of group B, at most 700 per domain, for the held-out loss."""
    rng = random.Random(seed)
    result = []
    for domain in DOMAINS:
        mine = [pair for pair in pairs if pair.domain == domain]
        for pair in rng.sample(mine, min(len(mine), HELDOUT_PAIRS_PER_DOMAIN)):
            messages = [{"role": "user", "content": question(pair, rng.randrange(3))}]
            result.append([*messages, {"role": "assistant", "content": pair.answer}])
    rng.shuffle(result)
    return result


def heldout_documents(documents: list[Document]) -> list[Document]:
    """Return the Python files of group B, chosen by turns over its sources up to 3 MB, for bits per byte."""
    queues = collections.defaultdict(list)
    for document in documents:
        if document.group == "B" and document.kind == "python":
            queues[document.source].append(document)
    chosen, size = [], 0
    while queues and size < HELDOUT_BYTES:
        for source in sorted(queues):
            document = queues[source].pop(len(queues[source]) // 2)
            chosen.append(document)
            size += len(document.text.encode())
            if not queues[source]:
                del queues[source]
    return chosen


def encode_documents(tokenizer: Tokenizer, documents: list[Document], seed: int) -> np.ndarray:
    """Return [tokens] uint16: shuffled documents, each after <|bos|>."""
    shuffled = documents[:]
    random.Random(seed).shuffle(shuffled)
    parts = []
    for start in range(0, len(shuffled), 512):
        for encoded in tokenizer.encode_batch_fast([document.text for document in shuffled[start : start + 512]]):
            parts.append(np.array([tokens.BOS_ID, *encoded.ids], dtype="<u2"))
    return np.concatenate(parts) if parts else np.zeros(0, dtype="<u2")


def encode_dialogues(tokenizer: Tokenizer, conversations: list[Messages]) -> np.ndarray:
    """Return [tokens] uint16: the conversations one after the other, as the chat template renders them."""
    roles = {"user": tokens.USER_ID, "assistant": tokens.ASSISTANT_ID, "system": tokens.SYSTEM_ID}
    ids: list[np.ndarray] = []
    for start in range(0, len(conversations), 4096):
        batch = conversations[start : start + 4096]
        encoded = iter(tokenizer.encode_batch_fast([message["content"] for messages in batch for message in messages]))
        for messages in batch:
            flat = [tokens.BOS_ID]
            for message in messages:
                flat += [roles[message["role"]], *next(encoded).ids, tokens.END_ID]
            ids.append(np.array(flat, dtype="<u2"))
    return np.concatenate(ids) if ids else np.zeros(0, dtype="<u2")


def _compress(job: tuple[Path, bytes]) -> None:
    path, raw = job
    write_bytes(path, lzma.compress(raw, preset=6))


def write_stream(pool: ProcessPoolExecutor, out: Path, name: str, ids: np.ndarray) -> list[str]:
    """Write one token stream as xz files of at most 4M tokens; return their names in order."""
    starts = range(0, max(1, len(ids)), SHARD_TOKENS)
    several = name in ("raw", "chat")
    paths = [out / (f"{name}-{i:02d}.bin.xz" if several else f"{name}.bin.xz") for i in range(len(starts))]
    list(pool.map(_compress, [(p, ids[s : s + SHARD_TOKENS].tobytes()) for p, s in zip(paths, starts, strict=True)]))
    return [path.name for path in paths]


def describe(
    documents: list[Document], dropped: list[str], by_group: dict[str, list[Pair]], streams: dict[str, np.ndarray],
    files: dict[str, list[str]], sizes: list[int], seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the manifest: what went in, what was held out, what came out."""
    counts: dict[str, dict[str, int]] = {}
    for document in documents:
        entry = counts.setdefault(f"{document.group}:{document.source}", {"documents": 0, "bytes": 0})
        entry["documents"] += 1
        entry["bytes"] += len(document.text.encode())
    heldout = {
        group: {
            "stdlib": sorted(groups.STDLIB_A if group == "A" else groups.STDLIB_B),
            "packages": sorted(groups.PACKAGES_A if group == "A" else groups.PACKAGES_B),
            "topics": sorted(d.path for d in documents if d.source == "topics" and d.group == group),
            "documents": sorted(d.name for d in documents if d.group == group),
        }
        for group in ("A", "B")
    }
    table = np.array(sizes)
    return {
        "format": 1,
        "seed": seed,
        "python": platform.python_version(),
        "packages": {d.metadata["Name"]: d.version for d in sorted(metadata.distributions(), key=lambda d: d.name or "")},
        "sources": dict(sorted(counts.items())),
        "heldout": heldout,
        "dropped_for_overlap": dropped,
        "pairs": {g: dict(sorted(collections.Counter(p.domain for p in ps).items())) for g, ps in by_group.items()},
        "streams": {
            name: {"files": files[name], "tokens": len(ids), "text_bytes": int(table[ids].sum())}
            for name, ids in streams.items()
        },
        "token_bytes": sizes,
    }
