"""Makes the embedded target, step by step: `python -m scripts.assets.tiny_target STEP`.

prepare   collect Python sources, train the tokenizer, write token streams and a manifest
train     train the model on a prepared folder; resumable
evaluate  held-out loss of a weights file on a prepared folder
export    write assets/tiny-target: weights, config, tokenizer, chat template, card
prompts   choose the prompts for measuring and for training drafters from the held-out groups
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import lzma
import platform
import random
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from heads.api.errors import UserError
from inference.manifest import write_bytes
from scripts.assets import export, prepared, python_sources
from scripts.assets.conversations import (
    DOMAINS,
    Messages,
    Pair,
    PromptRow,
    choose,
    dialogue,
    is_askable,
    pairs_of,
    prompt_rows,
    write_rows,
)
from scripts.assets.prepared import TokenizerSpec, encode_dialogues, encode_documents
from scripts.assets.python_sources import Document
from scripts.assets.training import (
    Intervals,
    Trainer,
    TrainSettings,
    build_model,
    fitting,
    hybrid_config,
    llama_config,
    note,
    resized,
)

ASSETS = Path(__file__).parents[2] / "assets"
TOKENIZER = TokenizerSpec(
    size=4096,
    special=("<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    # Line breaks include the next line's indentation. Words include one character before them
    # (blank, dot, bracket, underscore). Digits are separate tokens. Runs of blanks leave the last
    # blank to the word that follows.
    pattern=r"\n+ *|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+| +(?!\S)|\s+(?!\S)|\s+",
    longest=24,
    template=(
        "{{- bos_token }}"
        "{%- for message in messages %}"
        "{%- if message['role'] == 'assistant' %}"
        "{{- '<|assistant|>' }}{% generation %}{{- message['content'] + '<|end|>' }}"
        "{% endgeneration %}"
        "{%- elif message['role'] in ('user', 'system') %}"
        "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
        "{%- else %}"
        "{{- raise_exception('The roles are system, user and assistant; got ' + message['role']) }}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
    ),
)
CONFIG = llama_config(
    vocab_size=TOKENIZER.size,
    hidden_size=256,
    num_hidden_layers=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    mlp_bias=False,
)
"""12.86 million parameters in thin layers, so that one layer costs a twentieth of a pass."""
HYBRID = hybrid_config(
    vocab_size=TOKENIZER.size,
    hidden_size=256,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
)
"""8.9 million parameters, nine of twelve layers with a recurrent state."""
CONFIGS = {"llama": CONFIG, "hybrid": HYBRID}
ANSWER_TOKENS, MAX_QUESTION_TOKENS = range(20, 401), 230
HELDOUT_BYTES = 3_000_000
HELDOUT_PAIRS_PER_DOMAIN = 700
BARE_CODE_SHARE = 0.35
"""Share of the functions without a docstring that are kept, because they teach less per token."""
PER_MODULE = 4
VALIDATION = 96
"""Prompts of group A that are kept out of training, for choosing checkpoints: the measurement's
prompts must not decide this choice."""


def collect(max_package_bytes: int, extra_packages: Path | None = None) -> list[Document]:
    """Return the corpus from the installed packages and from pinned packages in a folder."""
    archives = python_sources.download(extra_packages) if extra_packages else []
    skip = {python_sources.archive_package(archive) for archive in archives}
    documents = [*python_sources.from_stdlib(), *python_sources.from_topics()]
    documents += python_sources.from_site_packages(skip=skip)
    for archive in archives:
        documents += python_sources.from_archive(archive)
    documents = python_sources.cap_sources(python_sources.deduplicate(documents), max_package_bytes)
    size = sum(len(document.text) for document in documents) / 1e6
    note(f"collected {len(documents)} documents, {size:.0f} MB")
    return documents


def prepare(
    documents: list[Document],
    out: Path,
    pairs_out: Path,
    seed: int = 0,
    workers: int = 2,
    spec: TokenizerSpec = TOKENIZER,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> None:
    """Write a prepared folder from deduplicated documents of all groups, and write to `pairs_out`
    the held-out pairs from which prompts are chosen (A.jsonl.xz, B.jsonl.xz). The same documents,
    seed and package versions give the same bytes."""
    documents, dropped = python_sources.drop_leaks(documents)
    note(f"{len(documents)} documents; {len(dropped)} that share text with held-out ones dropped")
    with ProcessPoolExecutor(workers) as pool:
        found = [pair for pairs in pool.map(pairs_of, documents, chunksize=64) for pair in pairs]
    pairs = split_pairs(found, documents)
    trained = [document for document in documents if document.group == "train"]
    tokenizer = tokenizer or spec.train(_sample(trained, pairs["train"], seed))
    pairs = {group: _fitting(tokenizer, found) for group, found in pairs.items()}
    note("pairs: " + ", ".join(f"{group} {len(found)}" for group, found in pairs.items()))
    random.Random(seed).shuffle(trained)
    token_streams = {
        "raw": encode_documents(tokenizer, (document.text for document in trained)),
        "chat": encode_dialogues(tokenizer, training_dialogues(pairs["train"], seed)),
        "heldout-raw": encode_documents(tokenizer, _heldout_texts(documents, seed)),
        "heldout-chat": encode_dialogues(tokenizer, heldout_dialogues(pairs["B"], seed)),
    }
    for group in ("A", "B"):
        rows = "\n".join(json.dumps(dataclasses.asdict(pair)) for pair in pairs[group])
        write_bytes(pairs_out / f"{group}.jsonl.xz", lzma.compress(rows.encode(), preset=6))
    prepared.write_prepared(
        out, tokenizer, token_streams, describe(documents, dropped, pairs, seed)
    )


def split_pairs(pairs: list[Pair], documents: list[Document]) -> dict[str, list[Pair]]:
    """Return the pairs by group. Equal answers are kept once, held-out ones first, so that no
    answer is in two groups."""
    group_of = {document.name: document.group for document in documents}
    found: dict[str, list[Pair]] = {"A": [], "B": [], "train": []}
    seen: set[str] = set()
    for group in ("B", "A", "train"):
        for pair in pairs:
            key = " ".join(pair.answer.split())
            special = python_sources.SPECIAL.search(pair.shown + pair.answer)
            if group_of[pair.module] == group and key not in seen and not special:
                seen.add(key)
                found[group].append(pair)
    return found


def _fitting(tokenizer: Any, pairs: list[Pair]) -> list[Pair]:
    """Return the pairs whose answer has 20 to 400 tokens and whose question has at most 230."""
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    answers = encode([pair.answer for pair in pairs])
    questions = encode([pair.question() for pair in pairs])
    return [
        pair
        for pair, answer, question in zip(pairs, answers, questions, strict=True)
        if len(answer.ids) in ANSWER_TOKENS and len(question.ids) <= MAX_QUESTION_TOKENS
    ]


def _sample(documents: list[Document], pairs: list[Pair], seed: int) -> Iterator[str]:
    """Yield an eighth of the training documents and a tenth of the answers, for the tokenizer."""
    rng = random.Random(seed)
    yield from (document.text for document in rng.sample(documents, max(1, len(documents) // 8)))
    yield from (pair.answer for pair in rng.sample(pairs, len(pairs) // 10))


def training_dialogues(pairs: list[Pair], seed: int) -> list[Messages]:
    """Return shuffled conversations over all pairs; one in eight has two or three turns."""
    rng = random.Random(seed)

    def kept(pair: Pair) -> bool:
        return pair.domain != "code" or '"""' in pair.shown or rng.random() < BARE_CODE_SHARE

    chosen = [pair for pair in pairs if kept(pair)]
    result, index = [], 0
    while index < len(chosen):
        turns = rng.choice((2, 3)) if rng.random() < 0.125 else 1
        following, module = chosen[index : index + turns], chosen[index].module
        taken = [pair for pair in following if pair.module == module]
        result.append(dialogue(taken, rng))
        index += len(taken)
    rng.shuffle(result)
    return result


def heldout_dialogues(pairs: list[Pair], seed: int) -> list[Messages]:
    """Return single-turn conversations, at most 700 per domain, for the held-out loss."""
    rng = random.Random(seed)
    result = []
    for domain in DOMAINS:
        mine = [pair for pair in pairs if pair.domain == domain]
        for pair in rng.sample(mine, min(len(mine), HELDOUT_PAIRS_PER_DOMAIN)):
            result.append(pair.messages(rng.randrange(3)))
    rng.shuffle(result)
    return result


def _heldout_texts(documents: list[Document], seed: int) -> list[str]:
    """Return Python files of group B, shuffled, chosen in turn from its sources up to 3 MB."""
    queues = collections.defaultdict(list)
    for document in documents:
        if document.group == "B" and document.kind == "python":
            queues[document.source].append(document.text)
    chosen: list[str] = []
    while any(queues.values()) and sum(len(text.encode()) for text in chosen) < HELDOUT_BYTES:
        waiting = [queues[source] for source in sorted(queues) if queues[source]]
        chosen += [queue.pop(len(queue) // 2) for queue in waiting]
    random.Random(seed).shuffle(chosen)
    return chosen


def describe(
    documents: list[Document], dropped: list[str], pairs: Mapping[str, list[Pair]], seed: int
) -> dict[str, Any]:
    """Return the manifest's facts: the input, the held-out part and the output."""
    counts = collections.defaultdict[str, dict[str, int]](lambda: {"documents": 0, "bytes": 0})
    for document in documents:
        entry = counts[f"{document.group}:{document.source}"]
        entry["documents"] += 1
        entry["bytes"] += len(document.text.encode())
    held = {group: [d for d in documents if d.group == group] for group in python_sources.STDLIB}
    installed = sorted(metadata.distributions(), key=lambda package: package.name or "")
    return {
        "seed": seed,
        "python": platform.python_version(),
        "packages": {package.metadata["Name"]: package.version for package in installed},
        "sources": dict(sorted(counts.items())),
        "heldout": {
            group: {
                "stdlib": sorted(python_sources.STDLIB[group]),
                "packages": sorted(python_sources.PACKAGES[group]),
                "topics": sorted(d.path for d in found if d.source == "topics"),
                "documents": sorted(d.name for d in found),
            }
            for group, found in held.items()
        },
        "dropped_for_overlap": dropped,
        "pairs": {
            group: dict(sorted(collections.Counter(pair.domain for pair in found).items()))
            for group, found in pairs.items()
        },
    }


def write_prompts(pairs: Path, out: Path, measuring: int, training: int, seed: int) -> None:
    """Write `<domain>.jsonl` with `measuring` prompts of group B each, and below `training/` about
    `training` prompts of group A, shuffled; the last ones go to validation.jsonl, the others to
    train.jsonl."""
    askable = {group: [p for p in load_pairs(pairs, group) if is_askable(p)] for group in "AB"}
    used = {group: collections.Counter[str]() for group in askable}

    def rows(group: str, domain: str, count: int, prefix: str) -> list[PromptRow]:
        rng, queues = (
            random.Random(f"{seed}:{domain}"),
            collections.defaultdict[str, list[Pair]](list),
        )
        for pair in askable[group]:
            if pair.domain == domain:
                queues[pair.module.split("/")[0]].append(pair)
        for queue in queues.values():
            rng.shuffle(queue)
        chosen = choose(dict(sorted(queues.items())), count, PER_MODULE, used[group])
        return prompt_rows(chosen, f"{prefix}-{domain}", random.Random(f"{seed}:{prefix}"))

    mixed: list[PromptRow] = []
    for domain in reversed(DOMAINS):  # prose first: it has the fewest modules to choose from
        write_rows(out / f"{domain}.jsonl", rows("B", domain, measuring, "bench"))
        mixed += rows("A", domain, -(-training // len(DOMAINS)), "train")
    random.Random(seed).shuffle(mixed)
    write_rows(out / "training" / "train.jsonl", mixed[:-VALIDATION])
    write_rows(out / "training" / "validation.jsonl", mixed[-VALIDATION:])


def load_pairs(folder: Path, group: str) -> list[Pair]:
    path = folder / f"{group}.jsonl.xz"
    if not path.is_file():
        raise UserError(f"{path} does not exist. `prepare` writes it; name its folder: --pairs.")
    lines = lzma.decompress(path.read_bytes()).split(b"\n")
    return [Pair(**json.loads(line)) for line in lines if line]


def train(given: argparse.Namespace) -> None:
    """Train on a prepared folder, or continue a training."""
    device = torch.device(given.device)
    fast = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    values = {key: getattr(given, key, None) for key in TrainSettings.__dataclass_fields__}
    values["batch_tokens"] = batch = given.batch_tokens or (131_072 if fast else 16_384)
    values["micro_tokens"] = given.micro_tokens or min(batch, 131_072 if fast else 8_192)
    values["bf16"] = fast if given.bf16 is None else given.bf16
    # For a folder elsewhere on this machine, only the last part of its name is recorded.
    config = dict(CONFIGS[given.family])
    config["num_hidden_layers"] = layers = given.layers or config["num_hidden_layers"]
    start = given.start and resized(load_file(given.start / "model.safetensors"), layers)
    if start and _family_of(given.start) != config["model_type"]:
        start = fitting(start, config)
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    seconds = (given.log_every, given.eval_every, given.save_every, given.call_seconds)
    trainer = Trainer(
        given.data,
        given.state,
        given.out or given.state,
        TrainSettings(**{key: value for key, value in values.items() if value is not None}),
        config,
        device,
        compiled=fast if given.compile is None else given.compile,
        intervals=Intervals(*seconds),
        eval_tokens=given.eval_tokens or (None if fast else 32_768),
        command=" ".join(["python -m scripts.assets.tiny_target", *words]),
        start=start or None,
        started_from=given.start and _training_of(given.start),
    )
    ended = trainer.run()
    note("training is finished" if ended else "not finished: run the same command again to go on")


def _family_of(folder: Path) -> str:
    """Return the model type of the target in a folder."""
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def _training_of(folder: Path) -> dict[str, Any]:
    """Return how long the target in a folder was trained and what it started from, for the record
    of a training that starts from it."""
    record = json.loads((folder / "training.json").read_text())
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    known = ("tokens_seen", "training_seconds", "started_from")
    return {"layers": layers, **{key: record[key] for key in known if key in record}}


def evaluate(given: argparse.Namespace) -> None:
    beside = given.weights.with_name("config.json")
    config = json.loads(beside.read_text()) if beside.is_file() else CONFIG
    model = build_model(config)
    weights = {name: tensor.float() for name, tensor in load_file(given.weights).items()}
    model.load_state_dict(weights, strict=False)  # the tied output layer is not in the file
    heldout = prepared.load_heldout(given.data, 1024, given.eval_tokens)
    bf16 = torch.device(given.device).type == "cuda"
    found = prepared.evaluate(model.to(given.device), heldout, rows=8, bf16=bf16)
    for name, value in found.items():
        print(f"{name} {value:.4f}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the step and its options; options whose default depends on the device may be None."""
    root = argparse.ArgumentParser(
        prog="python -m scripts.assets.tiny_target",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = root.add_subparsers(dest="step", required=True)
    data = argparse.ArgumentParser(add_help=False)
    data.add_argument("--data", type=Path, default=Path(".corpus"), help="a prepared folder")
    pairs = argparse.ArgumentParser(add_help=False)
    pairs.add_argument("--pairs", type=Path, default=Path(".corpus-pairs"), help="held-out pairs")
    pairs.add_argument("--seed", type=int, default=0)
    device = argparse.ArgumentParser(add_help=False)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device.add_argument("--device", default=found, help="default: cuda if there is one")
    device.add_argument("--eval-tokens", type=int, help="per held-out stream (default: all)")

    add = steps.add_parser("prepare", parents=[pairs]).add_argument
    add("--out", type=Path, default=Path(".corpus"))
    add("--extra-packages", type=Path, metavar="FOLDER", help="for pinned packages to download")
    add("--max-package-mb", type=float, default=4.5, help="most text of one training package")
    add("--workers", type=int, default=2)
    add("--tokenizer", type=Path, metavar="FOLDER", help="keep this one (default: train one)")

    add = steps.add_parser("train", parents=[data, device]).add_argument
    add("--state", type=Path, default=Path(".tiny-target"), help="folder of the checkpoint")
    add("--out", type=Path, help="where weights and log go (default: the state folder)")
    add("--seconds", type=float, help="training time of the whole run; the schedule ends with it")
    add("--steps", type=int, help="steps of the whole run, instead of --seconds")
    add("--call-seconds", type=float, help="save and leave after so long; run again to go on")
    add("--start", type=Path, metavar="FOLDER", help="a target whose weights it starts from")
    add("--family", choices=CONFIGS, default="llama", help="which shape it has")
    counts = ", ".join(f"{name} {some['num_hidden_layers']}" for name, some in CONFIGS.items())
    add("--layers", type=int, help=f"default: {counts}")
    add("--schedule", choices=("cosine", "wsd"), default=TrainSettings.schedule)
    add("--batch-tokens", type=int, help="of one step (default: 131072 on cuda, 16384 on cpu)")
    add("--micro-tokens", type=int, help="of one forward pass (default on cpu: 8192)")
    for name in ("lr", "length", "chat_share", "final_chat_share", "seed"):
        default = getattr(TrainSettings, name)
        add(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for name in ("compile", "bf16"):
        add(f"--{name}", action=argparse.BooleanOptionalAction, help="default: on cuda")
    for name, seconds in (("eval", 90.0), ("save", 120.0), ("log", 10.0)):
        add(f"--{name}-every", type=float, default=seconds, metavar="SECONDS")

    add = steps.add_parser("evaluate", parents=[data, device]).add_argument
    add("--weights", type=Path, default=ASSETS / "tiny-target" / "model.safetensors")

    add = steps.add_parser("export", parents=[data]).add_argument
    add("--run", type=Path, default=Path(".tiny-target"), help="folder of the training")
    add("--out", type=Path, default=ASSETS / "tiny-target")

    add = steps.add_parser("prompts", parents=[pairs]).add_argument
    add("--out", type=Path, default=ASSETS / "prompts")
    add("--measuring", type=int, default=96, help="prompts per domain for measuring, group B")
    add("--training", type=int, default=1536, help="prompts over all domains, group A")
    return root.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one step; return the exit status (a UserError is printed as one line, status 2)."""
    given = parse(arguments)
    try:
        match given.step:
            case "prepare":
                documents = collect(int(given.max_package_mb * 1e6), given.extra_packages)
                kept = given.tokenizer and PreTrainedTokenizerFast.from_pretrained(given.tokenizer)
                prepare(
                    documents, given.out, given.pairs, given.seed, given.workers, tokenizer=kept
                )
            case "train":
                train(given)
            case "evaluate":
                evaluate(given)
            case "export":
                export.export(given.data, given.run, given.out)
            case "prompts":
                write_prompts(given.pairs, given.out, given.measuring, given.training, given.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
