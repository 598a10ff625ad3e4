"""Two domains from the command line: one base, an adapter for each, measured, shown and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from inference.report.model import read_report
from scripts.cli import main
from tests.inference.tokenizers import save_micro_target

WORDS = ("add", "two", "numbers", "list", "items", "function")
DOMAINS = ("chat", "code")


def write_prompts(path: Path, count: int) -> None:
    rows = [
        {
            "id": f"{path.stem}{n}",
            "domain": DOMAINS[n % 2],
            "prompt": f"{WORDS[n % 6]} {WORDS[n // 6 % 6]} {path.stem} {n}",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_one_base_serves_two_domains(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_micro_target(in_folder / "target")
    for name, count in (("train", 24), ("valid", 6), ("bench", 4)):
        write_prompts(in_folder / f"{name}.jsonl", count)
    target = ["target.path=target", "target.device=cpu", "target.dtype=float32"]
    training = [
        "head=distilled",
        "head.from_target_layers=[0,1]",
        *("train.prompts=[valid.jsonl]", "train.eval_tokens=8", "train.sequence_length=64"),
        *("train.global_batch=2", "train.micro_batch=2", "train.max_steps=4"),
        *("train.eval_every=4", "train.tracker.wandb=disabled", "engine.name=torch"),
        *("engine.precision=float32", "optim.lr=3e-3"),
    ]
    base = "outputs/default/train/base/best"
    adapter = [f"train.refresh.init_from={base}", "train.refresh.lora_rank=2"]
    adapter.append("train.refresh.adapter=true")
    data = ["data=jsonl", "data.path=train.jsonl", "data.id_column=id", "data.benches=[]"]
    sampling = ["sampling.temperature=0", "sampling.max_new_tokens=16"]
    assert main(["generate", *target, *data, *sampling]) == 0
    assert main(["train", *target, *training, "run.drafter=base"]) == 0
    for name in DOMAINS:
        domain = [f"run.drafter={name}", f"train.domains=[{name}]"]
        assert main(["train", *target, *training, *adapter, *domain]) == 0
    bench = ["bench=jsonl", "bench.prompts=bench.jsonl", "bench.domains=[]", "bench.repeats=1"]
    decode = ["decode.max_new_tokens=8", "measure.kinds=[]", "bench.warmup_prompts=1"]
    assert main(["measure", *target, *bench, *decode]) == 0
    report = read_report(Path("outputs/default/measure/report.json"))
    assert {item.name for item in report.drafters} == {"base", *DOMAINS}
    assert all(item.lossless.mismatches == 0 for item in report.drafters)
    hashes = {item.draft.weights_sha256 for item in report.drafters}
    assert len(hashes) == 3 and "" not in hashes

    capsys.readouterr()
    assert main(["export", *target, "run.drafter=code"]) == 0
    assert "export.merge=true writes the merged drafter for vllm" in capsys.readouterr().out
    exported = Path("outputs/default/export/code")
    assert (exported / "adapter" / "adapter_model.safetensors").is_file()
    assert main(["export", *target, "run.drafter=code", "export.merge=true"]) == 0
    assert main(["verify-export", *target, f"verify.dir={exported / 'vllm'}"]) == 0

    shutil.rmtree("outputs/default/train/base")
    capsys.readouterr()
    assert main(["measure", *target, *bench, *decode, "measure.name=without"]) == 2
    assert "base drafter" in capsys.readouterr().err
