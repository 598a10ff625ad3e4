"""Readers with a model of their own: conversations in JSON lines, rows that another trainer's tools
prepared, and a head that another trainer made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.inference.export.foreign import specforge_eagle3
from tests.inference.export.ground import load_target
from tests.newcomer.pages import FIRST, README, command, commands, page_name
from tests.newcomer.reader import Reader, give_files, give_model, reader_in

pytestmark = pytest.mark.slow
OWN = "target=local target.path=my/model"
ON_OWN = {
    page: [line for line in commands(page) if line.startswith("headstart") and OWN in line]
    for page in FIRST
}
"""The commands for a model of one's own on the first pages. Servers of other programs are not
there."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader who has run quickstart's last command."""
    reader = reader_in(tmp_path_factory.mktemp("own"))
    give_model(reader.home)
    (line,) = ON_OWN[FIRST[1]]
    give_files(reader.home, line)
    (reader.home / "said.txt").write_text(reader.run(line))
    return reader


def test_the_readme_prints_the_same_command() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    (line,) = re.findall(r"`(headstart loop target=local [^`]+)`", text)
    assert [line.replace("<folder or Hub id>", "my/model")] == ON_OWN[FIRST[1]]


@pytest.mark.parametrize(
    "page",
    [page for page, lines in ON_OWN.items() if lines and page.stem != "quickstart"],
    ids=page_name,
)
def test_other_pages_commands_for_it_run(page: Path, reader: Reader) -> None:
    """In their order, in one folder."""
    model = give_model(reader.home)
    script = "\n".join(line for line in ON_OWN[page] if "://" not in line)
    give_files(reader.home, script)
    for source in re.findall(r"import\.source=(\S+)", script):
        specforge_eagle3(load_target(model), reader.home / source)
    reader.run(script)


def test_own_prompts_are_divided_and_reported_by_domain(home: Reader) -> None:
    said = (home.home / "said.txt").read_text()
    assert "OpenAI messages (column 'messages'), domains from 'domain'" in said
    assert "not read: column 'ticket'" in said
    assert "cannot teach a drafter" in said  # debug=fast
    inputs = "outputs/default/generate/input"
    validation, bench = (home.prompts(f"{inputs}/{use}.jsonl") for use in ("validation", "bench"))
    assert validation and bench and not validation & bench
    import pyarrow.parquet as pq

    shards = pq.read_table(home.home / "outputs" / "default" / "generate" / "shards")
    trained = set(shards["id"].to_pylist())
    rows = [
        json.loads(line)
        for use in ("validation", "bench")
        for line in (home.home / inputs / f"{use}.jsonl").read_text().splitlines()
    ]
    assert trained and not trained & {row["id"] for row in rows}
    report = home.json("outputs/default/report.json")
    assert report["target"]["id"] == "my/model"
    domains = {domain for one in report["drafters"] for domain in one["domains"]}
    assert domains and domains <= {"support", "code"}
    assert report["run"]["leaks"]["left_out"] == [] and report["run"]["leaks"]["rows"]
    assert Path(report["run"]["bench"]["prompts"]).name == "bench.jsonl"


def test_measuring_on_the_training_file_is_refused(home: Reader) -> None:
    line = f"headstart measure {OWN} bench=jsonl bench.prompts=prompts.jsonl measure.name=leak"
    said = home.run(line, status=2)
    assert "were trained on" in said and "medusa" in said
    assert not (home.home / "outputs" / "default" / "leak" / "report.json").exists()


def test_a_misspelt_run_is_not_measured(home: Reader) -> None:
    said = home.run(f"headstart measure {OWN} run.name=defualt", status=2)
    assert "default" in said.replace("defualt", "")
    assert not (home.home / "outputs" / "defualt").exists()


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


def test_a_head_of_another_trainer(reader: Reader) -> None:
    """Imported, measured on prompts of one's own, trained further, exported, checked."""
    model = give_model(reader.home)
    line = command("docs/serving.md", "headstart import ")
    (source,) = re.findall(r"import\.source=(\S+)", line)
    specforge_eagle3(load_target(model), reader.home / source)
    said = reader.run(line.replace("target=qwen3_8b", OWN))
    assert "eagle3 of" in said
    give_files(reader.home, "prompts.jsonl held_out.jsonl")
    bench = "bench=jsonl bench.prompts=held_out.jsonl bench.prompts_per_domain=2"
    run = f"{OWN} run.name=theirs"
    reader.run(f"headstart measure {run} {bench}")
    report = reader.json("outputs/theirs/measure/report.json")
    (theirs,) = [one for one in report["drafters"] if one["path"]]
    assert theirs["kind"] == "eagle3" and theirs["lossless"]["mismatches"] == 0
    assert report["run"]["leaks"]["unknown"], "nobody knows what it was trained on"

    reader.run(f"headstart generate {run} data=jsonl data.path=prompts.jsonl")
    further = f"headstart train {run} head=eagle3 run.drafter=mine "
    further += "train.refresh.init_from=outputs/theirs/train/eagle3/best"
    said = " ".join(reader.run(further, status=2).split())
    settings = said.partition("to go on with it, give them: ")[2]
    assert settings.startswith("head.taps=[")
    reader.run(
        f"{further} {settings}\n"
        f"headstart export {run} run.drafter=mine engine=vllm\n"
        f"headstart verify-export {OWN} verify.dir=outputs/theirs/export/mine/vllm\n"
    )
