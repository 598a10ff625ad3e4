"""The special tokens, their ids and the sizes that tokenizer, model and training share (no imports, so training stays lean)."""

from __future__ import annotations

VOCABULARY = 4096
MAX_LENGTH = 2048
PAD, BOS, USER, ASSISTANT, SYSTEM, END = SPECIAL_TOKENS = (
    "<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
)  # fmt: skip
PAD_ID, BOS_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID, END_ID = range(len(SPECIAL_TOKENS))
