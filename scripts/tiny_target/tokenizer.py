"""The embedded target's tokenizer: byte-level BPE of 4,096 tokens with a chat template that marks assistant spans."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.tiny_target.vocabulary import (
    ASSISTANT,
    ASSISTANT_ID,
    BOS,
    BOS_ID,
    END,
    END_ID,
    MAX_LENGTH,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    SYSTEM_ID,
    USER,
    USER_ID,
    VOCABULARY,
)

# Line breaks take the next line's indentation along; words take one character before them (blank, dot, bracket, underscore);
# every digit stands alone; runs of blanks leave the last one to the word that follows.
PATTERN = r"\n+ *|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+| +(?!\S)|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' }}{% generation %}{{- message['content'] + '<|end|>' }}{% endgeneration %}"
    "{%- elif message['role'] in ('user', 'system') %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- else %}"
    "{{- raise_exception('The roles are system, user and assistant; got ' + message['role']) }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return a byte-level BPE tokenizer of exactly `vocabulary` tokens, special tokens first.

    All 256 bytes are in the vocabulary, so that every text round-trips.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    assert size == vocabulary or vocabulary > size, f"{size} tokens were trained, {vocabulary} asked for"
    return tokenizer


def wrap(tokenizer: Tokenizer) -> Any:
    """Return the transformers tokenizer around `tokenizer`, with special tokens and chat template set."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Return the number of bytes that each token id decodes to (0 for special tokens), the exact divisor of bits per byte."""
    vocabulary = tokenizer.get_vocab()
    sizes = [0] * len(vocabulary)
    for token, index in vocabulary.items():
        sizes[index] = 0 if token in SPECIAL_TOKENS else len(token)  # byte level: one character stands for one byte
    return sizes


def encode_dialogue(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of a whole conversation, equal to the chat template's; contents must not hold special tokens."""
    ids = [BOS_ID]
    roles = {"user": USER_ID, "assistant": ASSISTANT_ID, "system": SYSTEM_ID}
    for message in messages:
        ids += [roles[message["role"]], *tokenizer.encode(message["content"]).ids, END_ID]
    return ids


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
