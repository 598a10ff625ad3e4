"""Is our plain decoding a fair baseline? `python -m scripts.compare_generate` puts it beside `transformers` generate.

Same weights, threads, dtype and prompts; greedy; the two alternate prompt by prompt so that a busy machine slows both alike. Writes
the seconds per token of each and their ratio, with the command, to docs/reports/plain_decoding.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from heads.api.errors import UserError
from inference.engine import DecodeConfig, Engine
from inference.loading import DTYPES, TargetConfig
from inference.prompts import load_prompts, to_requests
from inference.target import TargetModel

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and write the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.compare_generate", description=__doc__.split("\n")[0])
    parser.add_argument("--target", default=str(ROOT / "assets" / "tiny-target"))
    parser.add_argument("--prompts", type=Path, default=ROOT / "assets" / "prompts" / "code.jsonl")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reports" / "plain_decoding.json")
    given = parser.parse_args(arguments)
    try:
        report = compare(given.target, given.prompts, given.count, given.tokens, given.dtype)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    report["command"] = "python -m scripts.compare_generate " + " ".join(arguments or sys.argv[1:])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


def compare(path: str, prompts: Path, count: int, tokens: int, dtype: str) -> dict[str, Any]:
    """Decode `count` prompts both ways and return tokens, seconds and the ratio; the first prompt warms up and is not counted."""
    config = TargetConfig(path=path, dtype=dtype, device="cpu")
    target = TargetModel.load(config)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).eval()
    decode = DecodeConfig(shape="none", max_new_tokens=tokens)
    requests = to_requests(load_prompts(prompts)[: count + 1], target.tokenizer, decode)
    engine = Engine(target, None, decode)
    ours, theirs, decoded, same = 0.0, 0.0, 0, 0
    for number, request in enumerate(requests):
        begin = time.perf_counter()
        mine = next(iter(engine.run([request]))).tokens
        middle = time.perf_counter()
        text = torch.tensor([request.tokens])
        with torch.no_grad():
            generated = model.generate(
                text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=tokens
            )
        end = time.perf_counter()
        other = generated[0, text.shape[1] :].tolist()
        if number and len(mine) == len(other):
            ours, theirs = ours + middle - begin, theirs + end - middle
            decoded, same = decoded + len(mine), same + (mine == other)
    return {
        "target": path if not path.startswith(str(ROOT)) else str(Path(path).relative_to(ROOT)),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "prompts": count,
        "identical_texts": same,
        "tokens": decoded,
        "ours_seconds": round(ours, 4),
        "transformers_generate_seconds": round(theirs, 4),
        "generate_over_ours": round(theirs / ours, 4) if ours else None,
    }


if __name__ == "__main__":
    sys.exit(main())
