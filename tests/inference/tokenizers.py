"""Real, small tokenizers for tests: a byte-level BPE trained on a few lines, with the chat
templates of several families."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content "
    "| trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Reasoning models' way: the thinking of a turn is dropped from the text as soon as another turn
# follows.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.content "
    "}}<|im_end|>{% endfor %}"
)

FAMILIES = {
    "marked": (MARKED, "<s>", "<|end|>", ["<|user|>", "<|assistant|>", "<|system|>"]),
    "chatml": (CHATML, None, "<|im_end|>", ["<|im_start|>"]),
    "llama3": (
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
    ),
    "forgetful": (FORGETFUL, None, "<|im_end|>", ["<|im_start|>"]),
    "alternating": (ALTERNATING, None, "<|im_end|>", ["<|im_start|>"]),
    "plain": (None, "<s>", "</s>", []),
    "bare": (None, None, None, []),
}

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "Write a function that adds two numbers.",
    "What is a list? A list is a sequence of items.",
    "user assistant system Hello! Hi there. Bye now.",
]


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of a few hundred entries with the named family's template and special tokens."""
    template, bos, eos, extra = FAMILIES[family]
    named = {
        key: token for key, token in (("bos_token", bos), ("eos_token", eos)) if token is not None
    }
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*named.values(), *extra],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    base.train_from_iterator(TEXT * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, extra_special_tokens=extra, **named)
    tokenizer.chat_template = template
    return tokenizer


def save_micro_target(
    folder: Path, family: str = "marked", positions: int = 128, head_dim: int = 16, seed: int = 5
) -> Path:
    """A random two-layer Llama with a tiny tokenizer, saved as a Hugging Face folder. positions:
    the longest sequence that it takes; seed: of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(family)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        initializer_range=0.2,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
