"""The speed that a drafter gained while it helped to generate: a sample of the answers is decoded
plainly and with it.

The two ways must agree token by token (`inference.audit` examines differences), and both must agree
with the generated answers.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq

from heads.api.checkpoint import load_drafter
from heads.api.config import build
from heads.api.reading import read_object
from inference.audit.comparison import audit
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.decoding.rules.names import TEXT, promise
from inference.integrity import require_unchanged
from inference.manifest import MANIFEST_FILE, file_sha256, write_json
from inference.measure.metrics import divide
from inference.target.model import TargetModel
from scripts.config.schema import Settings
from scripts.stages.loop.facts import SPEED_FILE, HelpedGeneration
from train.data.answers import read_answers
from train.data.parquet import readable


def measure_generation(settings: Settings, folder: Path, count: int) -> HelpedGeneration:
    """The content of <round>/speed.json, measured if it does not exist or is of another sample.
    settings: of the round's generate stage; folder: the round's; count: answers in the sample, or
    all if there are fewer."""
    path, key = folder / SPEED_FILE, file_sha256(folder / "generate" / MANIFEST_FILE)
    if path.is_file():
        stored = read_object(path)
        whole = sum(shard["rows"] for shard in read_answers(folder / "generate")["shards"])
        same = stored.get("answers") == min(count, whole)
        if stored.pop("generation", None) == key and same:
            return build(HelpedGeneration, stored, str(path))
    target = TargetModel.load(settings.target)
    checkpoint = Path(str(settings.generate.drafter))
    require_unchanged(checkpoint)
    drafter = load_drafter(checkpoint, target.info, target.weights)
    sampling = settings.sampling
    requests, written = sample(folder / "generate", sampling.max_new_tokens, count)
    plain_engine = Engine(target, None, sampling.without_draft())
    plain, plain_seconds, _ = decode_timed(plain_engine, requests)
    engine = Engine(target, drafter, sampling)
    drafted, drafted_seconds, passes = decode_timed(engine, requests)
    width = max(2, engine.tree.num_nodes)
    given = target, requests, plain, drafted, sampling.sampling(), width
    found = audit(
        *given,
        examined=promise(engine.decode.acceptance, sampling.temperature) == TEXT,
        exact=sampling.exact,
        chunk=sampling.prefill_chunk,
    )
    result = HelpedGeneration(
        answers=len(requests),
        tokens=sum(map(len, plain)),
        plain_seconds=plain_seconds,
        drafted_seconds=drafted_seconds,
        speedup=divide(plain_seconds, drafted_seconds),
        tau=divide(sum(map(len, drafted)) - len(drafted), passes),
        lossless=found.counts(),
        stored=sum(one == two for one, two in zip(plain, written, strict=True)),
    )
    write_json(path, {"generation": key, **asdict(result)})
    return result


def sample(
    generated: Path, max_new_tokens: int, count: int
) -> tuple[list[Request], list[list[int]]]:
    """Requests for the first answer of `count` rows, spread evenly over all rows, and these
    answers."""
    shards = read_answers(generated)["shards"]
    total = sum(shard["rows"] for shard in shards)
    wanted = {place * total // min(count, total) for place in range(min(count, total))}
    requests: list[Request] = []
    answers: list[list[int]] = []
    at = 0
    for shard in shards:
        path = generated / shard["file"]
        with readable(path):
            table = pq.read_table(path, columns=["tokens", "spans", "seed"])
        own = [place - at for place in sorted(wanted) if at <= place < at + len(table)]
        for row in table.take(own).to_pylist():
            (begin, end), tokens = row["spans"][0], row["tokens"]
            prompt = tuple(tokens[:begin])
            requests.append(Request(len(requests), prompt, row["seed"], max_new_tokens))
            answers.append(tokens[begin:end])
        at += len(table)
    return requests, answers


def decode_timed(engine: Engine, requests: list[Request]) -> tuple[list[list[int]], float, int]:
    """Answers in order, their total seconds including prefill, and verify passes."""
    list(engine.run(requests[:1]))  # lazy allocations settle
    begun = time.perf_counter()
    done = {completion.request.index: completion for completion in engine.run(requests)}
    seconds = time.perf_counter() - begun
    passes = sum(len(completion.passes) for completion in done.values())
    return [done[item.index].tokens for item in requests], seconds, passes
