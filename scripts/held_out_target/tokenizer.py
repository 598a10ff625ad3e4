"""The held-out target's tokenizer: byte-level BPE of 2,048 tokens, text split as GPT-2 splits it, own tokens around turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
MAX_LENGTH = 2048
# In the order of scripts/tiny_target/vocabulary.py, since the training code knows the special tokens by their ids.
SPECIAL = PAD, BOS, USER, ASSISTANT, SYSTEM, END = ("<pad>", "<text>", "<ask>", "<say>", "<rule>", "</turn>")

CHAT_TEMPLATE = (
    "{{- '<text>' }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<say>' }}{% generation %}{{- message['content'] + '</turn>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}"
    "{{- ('<ask>' if message['role'] == 'user' else '<rule>') + message['content'] + '</turn>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<say>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most `vocabulary` tokens, special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer) -> Any:
    """Return the transformers tokenizer around `tokenizer`, chat template set."""
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


def conversation(asked: str, answer: str) -> str:
    """Return one question and its answer as the chat template renders them."""
    return f"{BOS}{USER}{asked}{END}\n{ASSISTANT}{answer}{END}\n"


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Return the bytes that each token decodes to, 0 for special tokens."""
    sizes = [0] * tokenizer.get_vocab_size()
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if token in SPECIAL else len(token)
    return sizes
