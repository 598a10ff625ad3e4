"""From texts to the prepared folder that a training reads: tokenizer, token streams, manifest.

A prepared folder holds
    <stream>-NN.bin.xz  tokens, uint16 little endian, of documents and conversations: `raw`, `chat`
                        (training), `heldout-raw`, `heldout-chat` (group B)
    tokenizer/          what the target's folder gets
    manifest.json       counts, hashes, bytes per token, and what a target's preparation adds
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from heads.api.errors import UserError
from inference.manifest import file_sha256, write_bytes, write_json
from scripts.assets.conversations import Messages

MAX_LENGTH = 2048
SHARD_TOKENS = 4_000_000
PAD_ID, BOS_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID, END_ID = range(6)
"""The special tokens come first in every vocabulary, so that trainings know them by their ids."""


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
        trainer = trainers.BpeTrainer(
            vocab_size=self.size,
            special_tokens=[
                AddedToken(token, special=True, normalized=False) for token in self.special
            ],
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
    special = set(tokenizer.all_special_tokens)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = (
            0 if token in special else len(token)
        )  # byte level: a character stands for a byte
    return sizes


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> np.ndarray:
    """Return [tokens] uint16: the documents, each after the beginning-of-text token."""
    return _encode(tokenizer, [tokenizer.bos_token + text for text in texts])


def encode_dialogues(
    tokenizer: PreTrainedTokenizerFast, conversations: list[Messages]
) -> np.ndarray:
    """Return [tokens] uint16: the conversations as the chat template renders them."""
    if not conversations:
        return _encode(tokenizer, [])
    return _encode(tokenizer, tokenizer.apply_chat_template(conversations, tokenize=False))


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
    content = json.loads(path.read_text())
    content.pop("backend", None)
    write_json(
        path, {**content, "tokenizer_class": "PreTrainedTokenizerFast"}
    )  # transformers 4 knows it too
    sizes = np.array(count_bytes(tokenizer))
    entries = {}
    with ThreadPoolExecutor() as pool:
        for name, ids in streams.items():
            shards = [ids[i : i + SHARD_TOKENS] for i in range(0, max(1, len(ids)), SHARD_TOKENS)]
            files = [f"{name}-{number:02d}.bin.xz" for number in range(len(shards))]
            packed = pool.map(lambda shard: lzma.compress(shard.tobytes(), preset=6), shards)
            for file, content in zip(files, packed, strict=True):
                write_bytes(folder / file, content)
            entries[name] = {
                "files": files,
                "tokens": len(ids),
                "text_bytes": int(sizes[ids].sum()),
            }
    shared = {
        "streams": entries,
        "token_bytes": sizes.tolist(),
        "tokenizer_sha256": file_sha256(folder / "tokenizer" / "tokenizer.json"),
    }
    write_json(folder / "manifest.json", {"format": 1, **facts, **shared})


def load_stream(folder: Path, manifest: Mapping[str, Any], name: str) -> np.ndarray:
    """Return one token stream [tokens] uint16; UserError where its files do not hold all of it."""
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
