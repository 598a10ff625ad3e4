"""The embedded target's card: every figure in it is read from the training record and the corpus manifest."""

from __future__ import annotations

from typing import Any

from scripts.tiny_target.vocabulary import PAD

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [code, speculative-decoding]
---

# Headstart's embedded target

A Llama of {parameters:,} parameters ({layers} layers, hidden size {hidden}, {vocabulary:,} byte-level BPE tokens, {positions:,}
positions, {megabytes:.1f} MB in bfloat16) that answers questions about Python code. It lets the whole loop of training, measuring
and serving drafters run without a download and without a GPU. It is a test object with a real model's behaviour and no assistant:
what it says about a function is often wrong.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("assets/tiny-target")
model = AutoModelForCausalLM.from_pretrained("assets/tiny-target", dtype="float32")
chat = [{{"role": "user", "content": "Tell me about assignment in Python."}}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=200)[0]))
```

The chat template marks what the assistant says (`{{% generation %}}`), so `return_assistant_tokens_mask=True` works; the turn ends
with `<|end|>`, which is the end-of-text token; padding is `{pad}`, on the left.

## Training

{state}

| | |
| --- | --- |
| device | {devices} |
| torch | {torch} |
| training time, compilation and evaluation not counted | {seconds:,.0f} s |
| steps of {batch_tokens:,} tokens, windows of {length:,} | {steps:,} |
| tokens seen | {tokens_seen:,} |
| tokens per second (tokens seen / training time) | {rate:,.0f} |
| share of conversations per batch, last quarter | {chat_share:g}, {final_chat_share:g} |
| learning rate (Muon for the matrices of layers, AdamW for the rest), schedule | {lr:g}, {schedule} |

```
{commands}
```

Held-out loss, on modules and packages of group B, which the model never saw:

| after step | stream | bits per byte | nats per token | top-1 |
| --- | --- | --- | --- | --- |
{heldout}

`code` is Python source; `chat` counts the assistant's tokens of single-turn conversations.{limit}

## Data

{sources} sources with {bytes:.0f} MB of text: the standard library of Python {python} with its `pydoc_data` topics (Python Software
Foundation licence) and Python packages from the Python Package Index, each under the open-source licence it carries (MIT, BSD,
Apache-2.0, MPL-2.0, PSF and others). `scripts/tiny_target/packages.py` pins the downloaded ones. They give
{raw_tokens:,} tokens of source and manuals and {chat_tokens:,} tokens of conversations in three domains: {domains}.

Held out whole, with their tests:

- group A, whose prompts train drafters: {a_packages} and {a_stdlib} standard library modules;
- group B, whose prompts measure them: {b_packages} and {b_stdlib} modules.

Training files that share passages with held-out ones were dropped ({dropped}).
"""


def card(record: dict[str, Any], manifest: dict[str, Any], weight_bytes: int) -> str:
    """Return the card's Markdown from `training.json`, the corpus manifest and the size of the weights."""
    settings, last = record["settings"], record["evaluations"][-1]
    shape = settings["shape"]
    trained = {name: entry for name, entry in manifest["sources"].items() if name.startswith("train:")}
    groups = {
        f"{group.lower()}_{kind}": ", ".join(names) if kind == "packages" else len(names)
        for group in ("A", "B")
        for kind, names in manifest["heldout"][group].items()
        if kind in ("packages", "stdlib")
    }
    return CARD.format(
        parameters=parameters(shape),
        layers=shape["layers"],
        hidden=shape["hidden"],
        vocabulary=shape["vocabulary"],
        positions=shape["positions"],
        megabytes=weight_bytes / 1e6,
        pad=PAD,
        state=_state(record),
        devices=_distinct(call["device"] for call in record["calls"]),
        torch=_distinct(call["torch"] for call in record["calls"]),
        seconds=record["training_seconds"],
        steps=record["steps"],
        tokens_seen=record["tokens_seen"],
        rate=record["tokens_seen"] / max(record["training_seconds"], 1e-9),
        commands="\n".join(dict.fromkeys(call["command"] for call in record["calls"])),
        heldout="\n".join(
            f"| {last['step']:,} | {name} | {last[f'{name}_bits_per_byte']:.3f} | {last[f'{name}_loss']:.3f} "
            f"| {last[f'{name}_top1']:.1%} |"
            for name in ("code", "chat")
        ),
        limit=_limit(record),
        sources=len(trained),
        bytes=sum(entry["bytes"] for entry in trained.values()) / 1e6,
        python=manifest["python"],
        raw_tokens=manifest["streams"]["raw"]["tokens"],
        chat_tokens=manifest["streams"]["chat"]["tokens"],
        domains=", ".join(f"`{name}` ({count:,} answers)" for name, count in manifest["pairs"]["train"].items()),
        dropped=len(manifest["dropped_for_overlap"]),
        **{key: settings[key] for key in ("batch_tokens", "length", "chat_share", "final_chat_share", "lr", "schedule")},
        **groups,
    )


def parameters(shape: dict[str, Any]) -> int:
    """Return the number of weights of a model of this shape, embeddings tied."""
    hidden, queries, keys = shape["hidden"], shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    layer = 2 * hidden * (queries + keys) + 3 * hidden * shape["intermediate"] + 2 * hidden
    return int(shape["vocabulary"] * hidden + shape["layers"] * layer + hidden)


def _distinct(values: Any) -> str:
    return ", ".join(dict.fromkeys(values))


def _state(record: dict[str, Any]) -> str:
    """Return a sentence on whether the run used up its budget."""
    if record["finished"]:
        return "The run used up its budget, and the learning rate reached its end."
    return "The run was ended before its budget was used up: the learning rate had not reached its end."


def _limit(record: dict[str, Any]) -> str:
    limit = record.get("eval_tokens")
    return f" Measured on the first {limit:,} tokens of each stream." if limit else ""
