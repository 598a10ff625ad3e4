"""Readers with a model of their own: conversations in JSON lines, rows that another trainer's tools
prepared, and a head that another trainer made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.inference.export.foreign import specforge_eagle3
from tests.inference.export.ground import load_target
from tests.newcomer.pages import DOCS, FIRST, command, commands, page_name
from tests.newcomer.reader import Reader, give_files, give_model, reader_in

pytestmark = pytest.mark.slow
MODEL = "target.path=my/model"
OWN = f"target=local {MODEL}"
ON_OWN = {
    page: [line for line in commands(page) if line.startswith("headstart") and MODEL in line]
    for page in FIRST
}
"""The commands for a model of one's own on the first pages."""


HEADS = ("third_party_head", "vllm")
"""How-to pages that begin with a head of another trainer."""
STAND_INS = {
    "target=qwen3_8b": OWN,
    "head.draft_vocab_size=32000": "head.draft_vocab_size=1000",
    "train.sequence_length=4096": "train.sequence_length=256",
    "train.global_batch=32": "train.global_batch=2",
    "sampling.max_new_tokens=1024": "sampling.max_new_tokens=24",
    "sampling.server=http://localhost:8000": "",
}
"""What is too large for a small target, or needs the server of a large one."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader who has run quickstart's last command."""
    reader = reader_in(tmp_path_factory.mktemp("own"))
    give_model(reader.home)
    (line,) = ON_OWN[FIRST[1]]
    give_files(reader.home, line)
    (reader.home / "said.txt").write_text(reader.run(line))
    return reader


@pytest.mark.parametrize(
    "page",
    [page for page, lines in ON_OWN.items() if lines and page.stem != "quickstart"],
    ids=page_name,
)
def test_other_pages_commands_for_it_run(page: Path, reader: Reader) -> None:
    """In their order, in one folder."""
    give_model(reader.home)
    script = "\n".join(ON_OWN[page])
    give_files(reader.home, script)
    reader.run(script)
    report = reader.json("outputs/own/report.json")
    assert {one["lossless"]["mismatches"] for one in report["drafters"]} == {0}


def test_own_prompts_are_divided_and_reported_by_domain(home: Reader) -> None:
    said = (home.home / "said.txt").read_text()
    assert "OpenAI messages (column 'messages'), domains from 'domain'" in said
    assert "not read: column 'ticket'" in said
    assert "cannot teach a drafter" in said  # debug=fast
    inputs = "outputs/own/generate/input"
    validation, bench = (home.prompts(f"{inputs}/{use}.jsonl") for use in ("validation", "bench"))
    assert validation and bench and not validation & bench
    import pyarrow.parquet as pq

    shards = pq.read_table(home.home / "outputs" / "own" / "generate" / "shards")
    trained = set(shards["id"].to_pylist())
    rows = [
        json.loads(line)
        for use in ("validation", "bench")
        for line in (home.home / inputs / f"{use}.jsonl").read_text().splitlines()
    ]
    assert trained and not trained & {row["id"] for row in rows}
    report = home.json("outputs/own/report.json")
    assert report["target"]["id"] == "my/model"
    domains = {domain for one in report["drafters"] for domain in one["domains"]}
    assert domains and domains <= {"support", "code"}
    assert report["run"]["leaks"]["left_out"] == [] and report["run"]["leaks"]["rows"]
    assert Path(report["run"]["bench"]["prompts"]).name == "bench.jsonl"


def test_measuring_on_the_training_file_is_refused(home: Reader) -> None:
    line = f"headstart measure {OWN} run.name=own bench=jsonl bench.prompts=prompts.jsonl measure.name=leak"
    said = home.run(line, status=2)
    assert "were trained on" in said and "eagle3" in said
    assert not (home.home / "outputs" / "own" / "leak" / "report.json").exists()


def test_a_misspelt_run_is_not_measured(home: Reader) -> None:
    said = home.run(f"headstart measure {OWN} run.name=onw", status=2)
    assert "'own'" in said
    assert not (home.home / "outputs" / "onw").exists()


def test_rows_of_token_ids_with_a_loss_mask(reader: Reader) -> None:
    give_model(reader.home)
    line = command("docs/data.md", OWN, ".parquet", "generate.answers=dataset")
    give_files(reader.home, line)
    said = reader.run(line)
    assert "column 'input_ids'" in said and "loss_mask" in said
    (share,) = set(re.findall(r"loss mask: .* tokens supervised \(([\d.]+)%\)", said))
    assert 0 < float(share) < 100
    reader.run(f"headstart train {OWN}\nheadstart measure {OWN}")
    report = reader.json("outputs/default/measure/report.json")
    assert "medusa" in {one["kind"] for one in report["drafters"]}
    assert report["run"]["leaks"]["left_out"] == []


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_trainer(name: str, reader: Reader) -> None:
    """The commands of the page in their order: imported, measured on prompts of one's own, trained
    further, compared, exported, checked."""
    printed = commands(DOCS / "howto" / f"{name}.md", "bash gpu")
    script = "\n".join(
        " ".join(STAND_INS.get(word, word) for word in line.split())
        for line in printed
        if line.startswith("headstart") and "verify.mode=live" not in line
    )
    model = give_model(reader.home)
    (source,) = re.findall(r"import\.source=(\S+)", script)
    specforge_eagle3(load_target(model), reader.home / source)
    give_files(reader.home, script)
    said = reader.run(script)
    assert "nothing wrong found" in said and "vllm serve my/model --speculative-config" in said
    measured = []
    for path in (reader.home / "outputs").glob("*/*/report.json"):
        report = json.loads(path.read_text())
        assert {one["lossless"]["mismatches"] for one in report["drafters"]} == {0}
        assert report["run"]["leaks"]["unknown"], "nobody knows what it was trained on"
        measured.append(sum(bool(one["path"]) for one in report["drafters"]))
    assert sorted(measured) == [1, 2], "theirs alone, then theirs and the one trained further"
