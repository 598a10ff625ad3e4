"""Prompts out of datasets: every bench group reads a table of its dataset's columns; files of all
kinds; clear refusals.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from heads.api.errors import UserError
from inference.decoding.structured.constraint import Constraint
from inference.measure import datasets as bench_data
from inference.measure.config import BenchConfig
from inference.measure.datasets import (
    DatasetConfig,
    fill,
    load_bench_prompts,
    prompt_facts,
    prompt_hash,
    template_columns,
)
from inference.measure.prompts import Prompt
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES

ROWS: dict[str, list[dict[str, Any]]] = {
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x: int) -> int:\n    ",
            "canonical_solution": "return x",
            "test": "def check(f): ...",
            "entry_point": "f",
        }
    ],
    "mbpp": [
        {
            "task_id": 11,
            "text": "Write a function to add.",
            "code": "def add(a, b): return a + b",
            "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
    ],
    "gsm8k": [
        {"question": "Two and two?", "answer": "#### 4"},
        {"question": "Three?", "answer": "#### 3"},
    ],
    "math500": [
        {
            "problem": "What is $1+1$?",
            "solution": "2",
            "answer": "2",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        }
    ],
    "mtbench": [
        {
            "category": "writing",
            "prompt": ["Write a poem.", "Now shorter."],
            "reference": [],
            "prompt_id": 81,
        }
    ],
    "alpaca": [
        {"instruction": "Name a colour.", "input": "", "output": "Red", "text": "..."},
        {"instruction": "Sort these.", "input": "b, a", "output": "a, b", "text": "..."},
    ],
    "cnn_dailymail": [{"article": "Something happened.", "highlights": "It did.", "id": "abc"}],
    "xsum": [{"document": "A long story.", "summary": "A story.", "id": "123"}],
    "wmt": [{"translation": {"de": "Guten Tag.", "en": "Good day."}}],
    "spec_bench": [
        {"question_id": 1, "category": "qa", "turns": ["Who?", "And why?"], "reference": []},
        {
            "question_id": 2,
            "category": "translation",
            "turns": ["Say it in French."],
            "reference": [],
        },
    ],
    "speed_bench": [
        {
            "question_id": "q1",
            "category": "coding",
            "sub_category": "python",
            "turns": ["Write a loop.", "Now backwards."],
            "source": "s",
            "src_id": "1",
            "difficulty": "easy",
            "multiturn": False,
        },
        {
            "question_id": "q2",
            "category": "coding",
            "sub_category": "python",
            "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SOMETHING"],
            "source": "s",
            "src_id": "2",
            "difficulty": "easy",
            "multiturn": False,
        },
    ],
    "aime": [{"problem": "Find the sum.", "answer": "70", "id": "0"}],
    "livecodebench": [
        {
            "question_title": "Sum",
            "question_content": "Add the numbers.",
            "platform": "atcoder",
            "question_id": "abc_a",
            "starter_code": "def f(a, b):",
            "difficulty": "easy",
        }
    ],
    "arena_hard": [
        {
            "uid": "u1",
            "category": "hard_prompt",
            "subcategory": "coding",
            "prompt": "Draw it in SVG.",
        }
    ],
    "long": [
        {
            "_id": "66f3",
            "domain": "Single-Document QA",
            "sub_domain": "Academic",
            "difficulty": "easy",
            "length": "short",
            "question": "Who?",
            "choice_A": "Ada",
            "choice_B": "Bob",
            "choice_C": "Cleo",
            "choice_D": "Dan",
            "answer": "A",
            "context": "Ada was there.",
        }
    ],
}
"""Rows in the columns that each dataset has on the Hub."""
WANTED = {
    "humaneval": [
        (
            "HumanEval/0",
            "humaneval",
            "Complete the following Python function. Answer with the whole function.\n\n"
            "```python\ndef f(x: int) -> int:\n    \n```",
        )
    ],
    "mbpp": [
        (
            "11",
            "mbpp",
            "Write a function to add.\n\nYour code should pass these tests:\n\n"
            "assert add(1, 2) == 3\nassert add(0, 0) == 0",
        )
    ],
    "gsm8k": [
        (
            "gsm8k-0",
            "gsm8k",
            "Two and two?\nPlease reason step by step, and give your final answer at the end.",
        ),
        (
            "gsm8k-1",
            "gsm8k",
            "Three?\nPlease reason step by step, and give your final answer at the end.",
        ),
    ],
    "math500": [
        (
            "test/prealgebra/1.json",
            "Prealgebra",
            "What is $1+1$?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        )
    ],
    "mtbench": [("81", "writing", "Write a poem.")],
    "aime": [
        (
            "0",
            "aime",
            "Find the sum.\nPlease reason step by step, and put your final answer within \\boxed{}.",
        )
    ],
    "livecodebench": [
        (
            "abc_a",
            "easy",
            "Add the numbers.\n\ndef f(a, b):\n\n"
            "Write a Python program that solves the problem. Answer with the program.",
        )
    ],
    "arena_hard": [("u1", "hard_prompt", "Draw it in SVG.")],
    "alpaca": [
        ("alpaca-0", "alpaca", "Name a colour."),
        ("alpaca-1", "alpaca", "Sort these.\n\nb, a"),
    ],
    "cnn_dailymail": [
        (
            "abc",
            "cnn_dailymail",
            "Summarise the following article in a few sentences.\n\nSomething happened.",
        )
    ],
    "xsum": [("123", "xsum", "Summarise the following article in one sentence.\n\nA long story.")],
    "wmt": [
        (
            "wmt_de_en-0",
            "wmt_de_en",
            "Translate the following German text into English.\n\nGuten Tag.",
        )
    ],
    "spec_bench": [("1", "qa", "Who?"), ("2", "translation", "Say it in French.")],
    "speed_bench": [("q1", "coding", "Write a loop.")],
    "long": [
        (
            "66f3",
            "Single-Document QA",
            "Ada was there.\n\nWho?\n\nA: Ada\nB: Bob\nC: Cleo\nD: Dan\n\n"
            "Say which answer is right, and why.",
        )
    ],
}


FILES = ("spec_bench", "arena_hard")
"""Those whose file is fetched by hand."""
UNPINNED = ("livecodebench",)
"""Those read at the newest commit, which the report records."""
TURNS = {"mtbench": ["Now shorter."], "spec_bench": ["And why?"], "speed_bench": ["Now backwards."]}
"""Further turns of the first row."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def bench_of(name: str, *more: str) -> BenchConfig:
    bench: BenchConfig = load_settings(STAGES["measure"], [f"bench={name}", *more]).bench
    return bench


def saved(name: str, folder: Path) -> Path:
    """The rows of a bench group as its Hub repository holds them: parquet files by configuration
    and split."""
    dataset = bench_of(name, *(["bench.prompts=question.jsonl"] if name in FILES else [])).dataset
    if name in FILES:
        file = folder / "question.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]), encoding="utf-8")
        return file
    data = folder / "repository"
    data.mkdir()
    Dataset.from_list(ROWS[name]).to_parquet(str(data / f"{dataset.split}-00000-of-00001.parquet"))
    files = f"configs:\n- config_name: {dataset.name or 'default'}\n  data_files:\n  - split: {dataset.split}\n"
    card = f"---\n{files}    path: {dataset.split}-*.parquet\n---\n"
    (data / "README.md").write_text(card, encoding="utf-8")
    return data


@pytest.mark.parametrize("name", ROWS)
def test_every_bench_group_reads_its_datasets_columns(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    bench = bench_of(name, f"bench.prompts={source}")
    loaded = load_bench_prompts(bench.prompts, bench.dataset)
    found = [(p.id, p.domain, p.messages[0]["content"]) for p in loaded.prompts if p.messages]
    assert found == WANTED[name]
    assert all(len(p.messages or ()) == 1 for p in loaded.prompts)
    assert [*loaded.prompts[0].turns] == TURNS.get(name, [])


@pytest.mark.parametrize("name", [name for name in ROWS if name not in (*FILES, *UNPINNED)])
def test_hub_revisions_are_commits(name: str) -> None:
    bench = bench_of(name)
    assert len(bench.dataset.revision) == 40
    assert int(bench.dataset.revision, 16) > 0
    assert bench.prompts.count("/") == 1
    assert (
        bench_data.resolve_revision(bench.prompts, bench.dataset.revision) == bench.dataset.revision
    )


def test_a_hub_dataset_is_loaded_at_the_commit_that_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    class Hub:
        def dataset_info(self, dataset: str, revision: str) -> Any:
            asked.append((dataset, revision))
            return type("Info", (), {"sha": "c" * 40})

    def load(*where: Any, **how: Any) -> Dataset:
        asked.append((where, how))
        return Dataset.from_list(ROWS["gsm8k"])

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("datasets.load_dataset", load)
    config = DatasetConfig(template="{question}", name="main")
    loaded = load_bench_prompts("openai/gsm8k", config)
    assert (loaded.revision, [p.id for p in loaded.prompts]) == ("c" * 40, ["gsm8k-0", "gsm8k-1"])
    assert asked == [
        ("openai/gsm8k", "main"),
        (("openai/gsm8k", "main"), {"split": "test", "revision": "c" * 40}),
    ]


@pytest.mark.parametrize("kind", ["parquet", "csv", "json", "jsonl", "saved", "splits"])
def test_local_tables_of_every_kind(kind: str, tmp_path: Path) -> None:
    table, path = Dataset.from_list(ROWS["gsm8k"]), tmp_path / f"table.{kind}"
    if kind == "saved":
        table.save_to_disk(str(path))
    elif kind == "splits":
        DatasetDict(test=table, train=table.select([0])).save_to_disk(str(path))
    elif kind == "csv":
        table.to_csv(str(path), index=False)
    elif kind == "parquet":
        table.to_parquet(str(path))
    else:
        text = (
            json.dumps(ROWS["gsm8k"])
            if kind == "json"
            else "\n".join(map(json.dumps, ROWS["gsm8k"]))
        )
        path.write_text(text, encoding="utf-8")
    loaded = load_bench_prompts(str(path), DatasetConfig(template="Q: {question}", limit=1))
    assert [(p.id, p.domain) for p in loaded.prompts] == [("table-0", "table")]
    assert loaded.prompts[0].messages == ({"role": "user", "content": "Q: Two and two?"},)
    assert loaded.revision == ""


def test_prompt_files_are_read_as_before(tmp_path: Path) -> None:
    for domain in ("code", "prose", "training"):
        line = {"id": f"{domain}-1", "prompt": f"about {domain}"}
        (tmp_path / f"{domain}.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    loaded = load_bench_prompts(str(tmp_path), DatasetConfig(), ("code", "prose"))
    assert [p.id for p in loaded.prompts] == ["code-1", "prose-1"]
    assert len(load_bench_prompts(str(tmp_path / "code.jsonl"), DatasetConfig()).prompts) == 1


def test_hashes_name_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS["gsm8k"])), encoding="utf-8")
    loaded = load_bench_prompts(str(path), DatasetConfig(template="{question}"))
    facts = prompt_facts(loaded, loaded.prompts[:1])
    assert facts["source"] == str(path)
    assert facts["hashes"] == {"q-0": prompt_hash(loaded.prompts[0])}
    other = prompt_facts(loaded, loaded.prompts[1:])
    assert facts["sha256"] != other["sha256"]
    assert prompt_hash(loaded.prompts[0]) != prompt_hash(loaded.prompts[1])


def test_hashes_tell_apart_what_is_asked_of_the_answer() -> None:
    plain = Prompt("q", "code", text="def")
    pattern, schema = Constraint("regex", "[a-z]+"), Constraint("json_schema", "{}")
    others = [
        replace(plain, constraint=pattern),
        replace(plain, constraint=schema),
        replace(plain, turns=("and then?",)),
    ]
    assert len({prompt_hash(one) for one in [plain, *others]}) == 4


def test_templates() -> None:
    row = {"turns": ["a", "b"], "pair": {"de": "x"}, "none": None, "n": 3}
    assert fill("{turns[1]}-{pair[de]}-{none}-{n}-{{}}", row) == "b-x--3-{}"
    assert fill("{turns}", row) == "a\nb"
    assert template_columns("{turns[0]} and {pair[de]}") == ["turns", "pair"]
    with pytest.raises(UserError, match="does not fit a row: IndexError"):
        fill("{turns[5]}", row)
    with pytest.raises(UserError, match="does not fit a row: KeyError"):
        fill("{pair[en]}", row)
    for wrong in ("no column", "{}", "{turns.__class__}"):
        with pytest.raises(UserError, match="must name columns in braces"):
            template_columns(wrong)
    with pytest.raises(UserError, match="cannot be read"):
        template_columns("{open")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"template": "{qestion}"},
            r"no column 'qestion' \(bench.dataset.template\).*Did you mean 'question'",
        ),
        (
            {"template": "{question}", "id_column": "key"},
            r"no column 'key' \(bench.dataset.id_column\)",
        ),
        (
            {"template": "{question}", "domain_column": "kind"},
            r"no column 'kind' \(bench.dataset.domain_column\)",
        ),
        ({"template": "{question}", "id_column": "same"}, "id 'x' occurs twice"),
        ({"template": "{empty}"}, "no row of .* gives a prompt"),
        ({"turns_column": "turn"}, r"no column 'turn' \(bench.dataset.turns_column\)"),
        ({"turns_column": "question"}, "'question' must hold lists of texts"),
        ({"template": "{question}", "turns_column": "same"}, "give one of them"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{**row, "same": "x", "empty": ""} for row in ROWS["gsm8k"]]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(UserError, match=problem):
        load_bench_prompts(str(path), DatasetConfig(**config))


def test_sources_that_do_not_exist_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DatasetConfig(template="{question}")
    with pytest.raises(UserError, match="there is no prompt file or folder") as error:
        load_bench_prompts("questions.csv", config)
    assert "bench.dataset.split" not in str(error.value)
    with pytest.raises(UserError, match="there is no prompt file or folder"):
        load_bench_prompts(str(tmp_path / "nowhere"), config)
    table = tmp_path / "q.parquet"
    Dataset.from_list(ROWS["gsm8k"]).to_parquet(str(table))
    with pytest.raises(UserError, match=r"is a table; say how its rows become prompts"):
        load_bench_prompts(str(table), DatasetConfig())
    (tmp_path / "odd.xml").write_text("<a/>", encoding="utf-8")
    with pytest.raises(UserError, match=r"must end in \.parquet, \.csv"):
        load_bench_prompts(str(tmp_path / "odd.xml"), config)
    DatasetDict(train=Dataset.from_list(ROWS["gsm8k"])).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=r"no split 'test' \(bench\.dataset\.split\)"):
        load_bench_prompts(str(tmp_path / "saved"), config)

    class Offline:
        def dataset_info(self, dataset: str, revision: str) -> Any:
            raise ConnectionError("the Hub cannot be reached\nat all")

    monkeypatch.setattr("huggingface_hub.HfApi", Offline)
    with pytest.raises(
        UserError,
        match=r"dataset 'owner/questions' cannot be read: the Hub cannot be reached\. Check the id",
    ):
        load_bench_prompts("owner/questions", config)
