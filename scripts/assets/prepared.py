"""The prepared folder between texts and a training: tokenizer, token streams, held-out loss.

<stream>-NN.bin.xz  tokens, uint16 little endian, of documents and conversations: `raw`, `chat`
                    (training), `heldout-raw`, `heldout-chat` (group B)
tokenizer/          as the target's folder has it
manifest.json       counts, hashes, bytes per token, and what a target's preparation adds
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from heads.api.errors import UserError
from inference.manifest import file_sha256, write_bytes, write_json
from scripts.assets.conversations import Messages

MAX_LENGTH = 2048
SHARD_TOKENS = 4_000_000
PAD_ID, BOS_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID, END_ID = range(6)
"""The special tokens come first in every vocabulary, so that trainings know their ids."""
SNAP = 384
"""A window starts at the next document if one begins within this many tokens."""


# Writing


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """A byte-level BPE tokenizer with a chat template.

    size: tokens; special: the tokens of PAD_ID, BOS_ID, ..., in that order; template: Jinja, with
    the assistant's spans marked by `generation`; pattern: a regular expression that cuts a text
    into words (None: GPT-2's); longest: most characters of a token (None: no limit).
    """

    size: int
    special: tuple[str, str, str, str, str, str]
    template: str
    pattern: str | None = None
    longest: int | None = None

    def train(self, texts: Iterable[str]) -> PreTrainedTokenizerFast:
        """Return a tokenizer of at most `size` tokens, trained on `texts`.

        All 256 bytes are in the vocabulary, so that every text round-trips.
        """
        byte_level = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=self.pattern is None
        )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = byte_level
        if self.pattern is not None:
            words = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        special = [AddedToken(token, special=True, normalized=False) for token in self.special]
        trainer = trainers.BpeTrainer(
            vocab_size=self.size,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            max_token_length=self.longest,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=self.special[PAD_ID],
            bos_token=self.special[BOS_ID],
            eos_token=self.special[END_ID],
            additional_special_tokens=list(self.special[USER_ID:END_ID]),
            chat_template=self.template,
            clean_up_tokenization_spaces=False,
            model_max_length=MAX_LENGTH,
            padding_side="left",
        )


def count_bytes(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the number of bytes that each token decodes to, 0 for special tokens."""
    sizes = [0] * len(tokenizer)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = len(token)  # byte level: a character stands for a byte
    for index in tokenizer.all_special_ids:
        sizes[index] = 0
    return sizes


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> np.ndarray:
    """Return [tokens] uint16: the documents, each after the beginning-of-text token."""
    return _encode(tokenizer, [tokenizer.bos_token + text for text in texts])


def encode_dialogues(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Messages]
) -> np.ndarray:
    """Return [tokens] uint16: the conversations as the chat template renders them."""
    texts = tokenizer.apply_chat_template(conversations, tokenize=False) if conversations else []
    return _encode(tokenizer, texts)


def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    parts = [np.zeros(0, dtype="<u2")]
    for start in range(0, len(texts), 512):
        found = tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 512])
        parts += [np.array(encoding.ids, dtype="<u2") for encoding in found]
    return np.concatenate(parts)


def write_prepared(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    streams: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
) -> None:
    """Write the prepared folder. streams: name -> [tokens] uint16; facts: added to the manifest."""
    tokenizer.save_pretrained(folder / "tokenizer")
    path = folder / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)
    # a class that transformers 4 also has
    write_json(path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    sizes = np.array(count_bytes(tokenizer))
    entries = {}
    with ThreadPoolExecutor() as pool:
        for name, ids in streams.items():
            shards = [ids[i : i + SHARD_TOKENS] for i in range(0, max(1, len(ids)), SHARD_TOKENS)]
            files = [f"{name}-{number:02d}.bin.xz" for number in range(len(shards))]
            packed = pool.map(lambda shard: lzma.compress(shard.tobytes(), preset=6), shards)
            for file, content in zip(files, packed, strict=True):
                write_bytes(folder / file, content)
            size = int(sizes[ids].sum())
            entries[name] = {"files": files, "tokens": len(ids), "text_bytes": size}
    shared = {
        "streams": entries,
        "token_bytes": sizes.tolist(),
        "tokenizer_sha256": file_sha256(folder / "tokenizer" / "tokenizer.json"),
    }
    write_json(folder / "manifest.json", {"format": 1, **facts, **shared})


# Reading


def load_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder; raises UserError if there is none."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(
            f"{folder} is not a prepared folder: it has no manifest.json. Make one with "
            f"`prepare --out {folder}`."
        )
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


def load_stream(folder: Path, manifest: Mapping[str, Any], name: str) -> np.ndarray:
    """Return one token stream [tokens] uint16; raises UserError if its files are incomplete."""
    entry = manifest["streams"][name]
    with ThreadPoolExecutor() as pool:
        read = pool.map(lambda file: lzma.decompress((folder / file).read_bytes()), entry["files"])
        ids = np.frombuffer(b"".join(read), dtype="<u2")
    if len(ids) != entry["tokens"]:
        raise UserError(
            f"stream {name} in {folder} has {len(ids)} tokens, its manifest says "
            f"{entry['tokens']}: prepare again."
        )
    return ids


class Stream:
    """One token stream [tokens] on a device, from which windows of `length` + 1 tokens are drawn.

    The whole stream is resident (some 150 MB), so a batch costs one gather and no copy from the
    host.
    """

    def __init__(self, ids: np.ndarray, length: int, device: torch.device) -> None:
        # ids < 4096 fit; int16 indexes on every backend
        signed = torch.from_numpy(ids.astype(np.int16))
        if len(signed) <= length + 1:
            signed = signed.repeat(-(-(length + 2) // max(1, len(signed))))
        self.ids = signed.to(device)
        starts = (signed == BOS_ID).nonzero().squeeze(-1)
        self.last = len(signed) - length - 1
        self.starts = torch.cat((starts[starts <= self.last], torch.tensor([self.last]))).to(device)
        self.offsets = torch.arange(length + 1, device=device)

    def windows(self, rows: int, generator: torch.Generator) -> Tensor:
        """Return [rows, length + 1] int64, each row from a random place or the document that begins
        soon after it."""
        start = torch.randint(self.last + 1, (rows,), generator=generator, device=self.ids.device)
        soon = self.starts[torch.searchsorted(self.starts, start)]
        start = torch.where(soon - start < SNAP, soon, start)
        return self.ids[start.unsqueeze(1) + self.offsets].long()


def assistant_mask(ids: np.ndarray) -> np.ndarray:
    """Return [tokens] bool: the assistant's tokens and the end of its turn, for whole
    conversations."""
    position = np.arange(len(ids))
    opened = np.maximum.accumulate(np.where(ids == ASSISTANT_ID, position, -1))
    closed = np.maximum.accumulate(np.where(ids == END_ID, position, -1))
    before = np.concatenate(([-1], closed[:-1])) if len(ids) else closed
    return (opened > before) & (opened < position)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A held-out stream: ids [windows, length + 1] int64, `counted` [windows, length] bool on the
    targets.

    Windows overlap by one token, so every token except the first is predicted once. `bytes` is the
    number of bytes that the counted targets decode to.
    """

    ids: Tensor
    counted: Tensor
    bytes: int


def load_heldout(folder: Path, length: int, limit: int | None) -> dict[str, HeldOut]:
    """Return the windows of group B: `code` (tokens of documents), `chat` (assistant tokens).
    limit: most tokens of each."""
    manifest = load_manifest(folder)
    sizes = np.array(manifest["token_bytes"])

    def cut(ids: np.ndarray, counted: np.ndarray) -> HeldOut:
        if limit is not None:
            ids, counted = ids[: limit + 1], counted[: limit + 1]
        windows = max(1, -(-(len(ids) - 1) // length))
        padded = np.zeros(windows * length + 1, dtype=np.int64)
        marks = np.zeros(windows * length + 1, dtype=bool)
        padded[: len(ids)], marks[: len(ids)] = ids, counted
        marks[0] = False
        at = np.arange(windows)[:, None] * length + np.arange(length + 1)
        total = int(sizes[padded[marks]].sum())
        return HeldOut(torch.from_numpy(padded[at]), torch.from_numpy(marks[at][:, 1:]), total)

    code, chat = (load_stream(folder, manifest, name) for name in ("heldout-raw", "heldout-chat"))
    return {"code": cut(code, sizes[code] > 0), "chat": cut(chat, assistant_mask(chat))}


def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (negative log likelihood, log normaliser), both [B, T] float32, of logits [B, T, V]
    and targets [B, T] int64."""
    wide = logits.float()
    normaliser = torch.logsumexp(wide, dim=-1)
    return normaliser - wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1), normaliser


@torch.no_grad()
def evaluate(
    model: Any, heldout: Mapping[str, HeldOut], rows: int = 32, bf16: bool = False
) -> dict[str, float]:
    """Return each stream's `_bits_per_byte`, `_loss` (nats per token) and `_top1` (share right)."""
    device, result = model.device, {}
    for name, part in heldout.items():
        total = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.float64, device=device)
        for ids, counted in zip(part.ids.split(rows), part.counted.split(rows), strict=True):
            ids, counted = ids.to(device), counted.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
                logits = model(ids[:, :-1], use_cache=False).logits
            total += (token_losses(logits, ids[:, 1:])[0] * counted).sum()
            right += ((logits.argmax(-1) == ids[:, 1:]) & counted).sum()
        tokens = max(1, int(part.counted.sum()))
        result[f"{name}_bits_per_byte"] = total.item() / math.log(2) / max(1, part.bytes)
        result[f"{name}_loss"] = total.item() / tokens
        result[f"{name}_top1"] = right.item() / tokens
    return {key: round(value, 5) for key, value in result.items()}
