"""The field's own clients work against `headstart serve` as they are: benchmarks get every answer at
the length that they ask for, and lm-eval's likelihoods and answers are those of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import forked
from tests.serve import clients
from tests.serve.clients import MODEL, run

pytestmark = [pytest.mark.serve, pytest.mark.slow]

REQUESTS, LENGTH = 3, 8
ROWS = [
    ("def add(a, b):\n    return a", [" + b", " in elephants"], 0),
    ("import os\nprint(os.", ["getcwd())", "sky blue"], 0),
    ("for i in", [" banana of", " range(10):"], 1),
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
target_delimiter: ""
doc_to_target: answer
metric_list: [{metric: acc}]
"""
WRITE = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def address(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`headstart serve` with the embedded target, as a process of its own."""
    process = forked.start(
        *("scripts.cli", "serve", "target=local", f"target.path={tiny_target}"),
        *("target.device=cpu", "serve.port=0", f"serve.name={MODEL}", "serve.drafter=ngram"),
        f"run.root={tmp_path_factory.mktemp('serve')}",
    )
    for line in process.stdout:
        if found := re.search(r"at (http://\S+)/v1", line):
            break
    else:
        raise AssertionError("the server did not start")
    yield found[1]
    process.terminate()
    process.wait(60)


def python_of(name: str) -> str:
    """The Python of a client; skips the test where it is not installed."""
    found = clients.python_of(name)
    if found is None:
        pytest.skip(f"needs {name} in an environment of its own: make client-envs")
    return found


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(
    engine_python: str, address: str, tiny_target: Path, tmp_path: Path, backend: str
) -> None:
    chat = backend == "openai-chat"
    more = [] if chat else ["--logprobs", "2"]
    run(
        [
            *(engine_python, "-c", clients.VLLM_BENCH, "--backend", backend),
            *("--endpoint", "/v1/chat/completions" if chat else "/v1/completions", *more),
            *("--base-url", address, "--model", MODEL, "--tokenizer", str(tiny_target)),
            *("--dataset-name", "random", "--random-input-len", "20", "--ignore-eos"),
            *("--random-output-len", str(LENGTH), "--num-prompts", str(REQUESTS)),
            *(
                "--save-result",
                "--save-detailed",
                "--result-filename",
                str(tmp_path / "bench.json"),
            ),
        ],
        tmp_path,
    )
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["output_lens"] == [LENGTH] * REQUESTS and not any(found["errors"])


def test_sglang_bench_serving(address: str, tiny_target: Path, tmp_path: Path) -> None:
    run(
        [
            *(python_of("sglang"), "-c", clients.SGLANG_BENCH, "--backend", "vllm"),
            *("--base-url", address, "--model", MODEL, "--tokenizer", str(tiny_target)),
            *("--dataset-name", "random-ids", "--random-input-len", "20", "--random-range-ratio"),
            *("1.0", "--random-output-len", str(LENGTH), "--num-prompts", str(REQUESTS)),
            *("--output-file", str(tmp_path / "bench.jsonl"), "--output-details"),
        ],
        tmp_path,
    )
    found = json.loads((tmp_path / "bench.jsonl").read_text())
    assert found["completed"] == REQUESTS and not any(found["errors"])
    assert found["total_output_tokens"] == REQUESTS * LENGTH


def test_guidellm(address: str, tiny_target: Path, tmp_path: Path) -> None:
    program = str(Path(python_of("guidellm")).with_name("guidellm"))
    data = f"kind=synthetic_text,prompt_tokens=20,output_tokens={LENGTH}"
    run(
        [
            *(program, "run", "--backend", f"kind=openai_http,target={address}"),
            *("--profile", "kind=synchronous", "--data", data, "--disable-progress"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tiny_target}"),
            *("--output", f"kind=json,path={tmp_path / 'bench.json'}"),
        ],
        tmp_path,
    )
    (found,) = json.loads((tmp_path / "bench.json").read_text())["benchmarks"]
    assert found["requests"]["errored"] == []
    answers = found["requests"]["successful"]
    assert [answer["output_metrics"]["text_tokens"] for answer in answers] == [LENGTH] * REQUESTS


def test_aiperf(address: str, tiny_target: Path, tmp_path: Path) -> None:
    program = str(Path(python_of("aiperf")).with_name("aiperf"))
    run(
        [
            *(program, "profile", "--model", MODEL, "--url", address, "--endpoint-type", "chat"),
            *("--streaming", "--tokenizer", str(tiny_target), "--isl", "20", "--ui", "none"),
            *("--osl", str(LENGTH), "--request-count", str(REQUESTS), "--concurrency", "2"),
            *("--workers-max", "1", "--artifact-dir", str(tmp_path / "aiperf")),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{LENGTH}"),
            "--use-server-token-count",
        ],
        tmp_path,
        offline=False,
    )
    (path,) = (tmp_path / "aiperf").rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not found.get("error_summary")
    lengths = found["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (LENGTH, LENGTH)


def write_tasks(folder: Path) -> list[str]:
    """lm-eval tasks over `ROWS`: which continuation is likelier, and write one."""
    names = ("question", "choices", "answer")
    rows = [json.dumps(dict(zip(names, row, strict=True))) for row in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    for name, rest in (("choice", CHOICE), ("write", WRITE)):
        head = TASK.format(name=f"own_{name}", rows=folder / "rows.jsonl")
        (folder / f"{name}.yaml").write_text(head + rest)
    return ["own_choice", "own_write"]


def likelihood(model: Any, tokenizer: Any, before: str, text: str) -> tuple[float, bool]:
    """The sum of the log-probabilities of `text` behind `before`, and whether every token of it is
    the most likely one; by transformers. As lm-eval does, `before` keeps the tokens that it has alone
    where the whole text would be divided otherwise."""
    context = tokenizer.encode(before)
    start, whole = len(context), [*context, *tokenizer.encode(before + text)[len(context) :]]
    with torch.no_grad():
        logs = model(torch.tensor([whole])).logits[0, start - 1 : -1].log_softmax(-1)
    own = torch.tensor(whole[start:])
    total = float(logs.gather(1, own[:, None]).sum())
    return total, bool((logs.argmax(-1) == own).all())


def chat_answer(model: Any, tokenizer: Any, text: str) -> str:
    """The most likely answer of `LENGTH` tokens to a message; by transformers."""
    talk = [{"role": "user", "content": text}]
    given = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt")
    ids = given["input_ids"]
    found = model.generate(ids, max_new_tokens=LENGTH, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(found, skip_special_tokens=True)).split("\n\n\n")[0]


def test_lm_eval_local_completions(address: str, tiny_target: Path, tmp_path: Path) -> None:
    python, tasks = python_of("lm_eval"), write_tasks(tmp_path)
    found = clients.lm_eval(python, "local-completions", address, tiny_target, tasks, tmp_path)
    assert set(found) == set(tasks)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for sample, (before, texts, _) in zip(clients.samples(tmp_path, tasks[0]), ROWS, strict=True):
        for response, text in zip(sample["resps"], texts, strict=True):
            value, greedy = response[0]
            wanted, best = likelihood(model, tokenizer, before, text)
            assert float(value) == pytest.approx(wanted, abs=1e-3)
            assert str(greedy) == str(best)


def test_lm_eval_local_chat_completions(address: str, tiny_target: Path, tmp_path: Path) -> None:
    python, tasks = python_of("lm_eval"), write_tasks(tmp_path)[1:]
    found = clients.lm_eval(python, "local-chat-completions", address, tiny_target, tasks, tmp_path)
    assert set(found) == set(tasks)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for sample, (before, *_) in zip(clients.samples(tmp_path, tasks[0]), ROWS, strict=True):
        assert sample["resps"][0][0] == chat_answer(model, tokenizer, before)
