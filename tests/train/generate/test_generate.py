"""Generation: real answers of a micro target, counted, resumable after any kill, the same for any
number of processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.errors import UserError
from heads.ngram import Config
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Completion, Request
from inference.manifest import read_manifest, verify_file
from inference.measure.prompts import prompt_seed
from inference.target.chat import render_prompt
from inference.target.loading import TargetConfig
from inference.target.memory import HEADROOM, MemoryPlan
from inference.target.model import TargetModel
from inference.target.settings import loading_text
from tests import forked
from tests.inference.tokenizers import save_micro_target
from train.data.answers import SHARD_SCHEMA, read_answers
from train.data.config import DataConfig, ReserveConfig
from train.data.masks import mask_report
from train.data.pack import PackedData, read_documents
from train.generate.config import GenerateConfig
from train.generate.loop import OwnDecoder, sample_answers
from train.generate.run import generate
from train.generate.sampling import SamplingConfig, sampling_of
from train.generate.turns import Refused

ROOT = Path(__file__).parents[3]
DECODE = {"temperature": 1.0, "max_new_tokens": 12, "batch_size": 4, "seed": 5, "shape": "none"}
PROMPTS = [f"Add {i} and {i * i % 17} in {'a list' * (i % 4)}." for i in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return TargetConfig(
        str(save_micro_target(tmp_path_factory.mktemp("target"))), dtype="float64", device="cpu"
    )


@pytest.fixture(scope="module")
def loaded(target):
    return TargetModel.load(target)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [
        {"name": f"p{i}", "prompt": text, "domain": ["code", "chat"][i % 2]}
        for i, text in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(str(path), id_column="name", domain_column="domain")


@pytest.fixture(scope="module")
def reference(target, prompts, tmp_path_factory):
    """The folder of an undisturbed run of one process."""
    out = tmp_path_factory.mktemp("reference")
    generate(GenerateConfig(shard_rows=8), prompts, DecodeConfig(**DECODE), target, out)
    return out


def answers(out):
    """Shard rows by index."""
    manifest = read_manifest(out, "generate")
    return [
        row
        for shard in manifest["shards"]
        for row in pq.read_table(out / shard["file"]).to_pylist()
    ]


def same_files(one, two):
    shards = [entry["file"] for entry in read_manifest(one, "generate")["shards"]]
    assert shards == [entry["file"] for entry in read_manifest(two, "generate")["shards"]]
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in shards)


def test_answers_are_what_the_target_says_alone(reference, loaded):
    """Each stored document is the rendered prompt and the answer the engine gives to it alone, with
    its span and seed."""
    rows = answers(reference)
    assert [row["index"] for row in rows] == list(range(20))
    alone = Engine(loaded, None, DecodeConfig(**{**DECODE, "batch_size": 1}))
    for row, text in zip(rows, PROMPTS, strict=True):
        prompt = render_prompt(loaded.tokenizer, [{"role": "user", "content": text}])
        request = Request(row["index"], tuple(prompt), prompt_seed(5, row["id"]), 12)
        (completion,) = alone.run([request])
        assert row["tokens"] == [*prompt, *completion.tokens]
        assert row["spans"] == [[len(prompt), len(row["tokens"])]]
        assert (row["finish"], row["seed"]) == (completion.finish, request.seed)
        assert row["domain"] == ["code", "chat"][row["index"] % 2]
    assert {row["finish"] for row in rows} <= {"stop", "length"}


def test_manifest_says_what_made_the_answers(reference, loaded, prompts):
    manifest = read_manifest(reference, "generate")
    tokens = sum(end - start for row in answers(reference) for start, end in row["spans"])
    assert manifest["counts"] == {
        "input": 20,
        "done": 20,
        "failed": 0,
        "skipped": 0,
        "tokens": tokens,
    }
    assert manifest["target"] == loaded.info.to_dict()
    assert manifest["sampling"]["temperature"] == 1.0
    assert (manifest["sampling"]["seed"], manifest["sampling"]["max_new_tokens"]) == (5, 12)
    assert manifest["data"]["path"] == prompts.path
    assert [shard["rows"] for shard in manifest["shards"]] == [8, 8, 4]
    assert pq.read_schema(reference / "shards" / "shard-00000.parquet").equals(SHARD_SCHEMA)
    assert not (reference / "parts").exists()


def test_generated_answers_can_be_packed_and_looked_at(reference, loaded):
    data = PackedData.from_manifest(reference, loaded.info, 64)
    counts = read_manifest(reference, "generate")["counts"]
    assert int(data.supervised.sum()) == counts["tokens"]
    report = mask_report(list(read_documents(reference, loaded.info)), loaded.tokenizer)
    assert report.supervised == counts["tokens"]


def test_batch_size_and_speculation_do_not_change_answers(
    reference, loaded, target, prompts, tmp_path
):
    save_drafter(
        new_drafter("ngram", Config(), loaded.info, loaded.weights, 0),
        tmp_path / "drafter",
        loaded.info,
    )
    config = GenerateConfig(shard_rows=8, drafter=str(tmp_path / "drafter"), flush_rows=3)
    decode = DecodeConfig(**{**DECODE, "batch_size": 3, "shape": "chain", "depth": 2})
    generate(config, prompts, decode, target, tmp_path / "out")
    assert same_files(reference, tmp_path / "out")


def test_every_input_row_is_accounted_for(target, tmp_path, capsys):
    lines = [
        json.dumps({"prompt": "Hello!"}),
        "{",
        json.dumps({"prompt": ""}),
        json.dumps({"prompt": "word " * 200}),
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    data = DataConfig(str(tmp_path / "p.jsonl"))
    manifest = generate(GenerateConfig(), data, DecodeConfig(**DECODE), target, tmp_path / "out")
    counts = manifest["counts"]
    assert (counts["input"], counts["done"], counts["failed"], counts["skipped"]) == (4, 1, 0, 3)
    assert "1 done + 0 failed + 3 skipped = 4 input rows" in capsys.readouterr().err.replace(
        "\n", " "
    )
    skipped = [
        json.loads(line) for line in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()
    ]
    assert [(row["index"], row["status"]) for row in skipped] == [
        (1, "skipped"),
        (2, "skipped"),
        (3, "skipped"),
    ]
    assert skipped[2]["reason"] == "prompt and answer may exceed the target's 128 positions"
    assert sum(manifest["reasons"].values()) == 3

    strict = DataConfig(str(tmp_path / "p.jsonl"), max_prompt_tokens=3)
    with pytest.raises(
        UserError, match=r"none of the 4 rows could be answered: .*data.max_prompt_tokens=3 .2 rows"
    ):
        generate(GenerateConfig(), strict, DecodeConfig(**DECODE), target, tmp_path / "none")


def test_a_request_the_decoder_refuses_fails_alone(loaded):
    engine = Engine(loaded, None, DecodeConfig(**DECODE), capacity=32)
    requests = [Request(i, tuple(range(2, 2 + n)), i, 12) for i, n in enumerate([4, 40, 6, 5, 50])]
    outcomes = list(sample_answers(engine, requests))
    assert sorted(o.request.index for o in outcomes) == [0, 1, 2, 3, 4]
    refused = {o.request.index: o.reason for o in outcomes if isinstance(o, Refused)}
    assert sorted(refused) == [1, 4]
    assert "capacity 32" in refused[1]
    assert all(isinstance(o, Completion) for o in outcomes if o.request.index not in refused)


@pytest.mark.parametrize(("share", "rows"), [(0.8, 2), (0.28, 1)])
def test_requests_that_do_not_fit_into_memory_are_decoded_in_fewer_rows(
    loaded, monkeypatch, caplog, share, rows
):
    """Only the longest ones, in as many rows as a share of the memory for three rows allows."""
    decode = DecodeConfig(**{**DECODE, "batch_size": 3})
    first, decoder = (OwnDecoder(Engine(loaded, None, decode)) for _ in range(2))
    requests = [Request(i, tuple(range(2, 2 + n)), i, 12) for i, n in enumerate([100, *[10] * 9])]
    needed = []
    with monkeypatch.context() as roomy:
        roomy.setattr(MemoryPlan, "require", lambda plan, *_: needed.append(plan.total))
        expected = {done.request.index: done.tokens for done in first.sample(requests)}
    free = int(share * needed[0] / HEADROOM)
    monkeypatch.setattr("inference.decoding.engine.free_bytes", lambda device: free)
    decoded, run = [], Engine.run

    def watched(engine, asked):
        decoded.append((len(asked), engine.decode.batch_size))
        yield from run(engine, asked)

    monkeypatch.setattr(Engine, "run", watched)
    outcomes = {done.request.index: done for done in decoder.sample(requests)}
    refused = [index for index, done in outcomes.items() if isinstance(done, Refused)]
    for index in set(expected) - set(refused):
        assert outcomes[index].tokens == expected[index]
    assert set(outcomes) == set(expected)
    if rows == 2:
        assert not refused
        assert decoded == [(10, 3), (3, 2), (7, 3)]
    else:
        assert refused == [0]
        assert "not even one row fits" in outcomes[0].reason
        assert decoded == [(10, 3), (3, 1), (1, 3), (9, 3)]
    (told,) = (record.getMessage() for record in caplog.records if "fewer rows" in record.msg)
    assert f"here in {rows}: a batch of 3 rows" in told
    assert "sampling.batch_size" in told
    list(decoder.sample(requests))
    assert sum("fewer rows" in record.msg for record in caplog.records) == 1


def test_an_unfinished_or_finished_folder_is_only_continued_with_its_own_settings(
    target, prompts, reference, tmp_path
):
    out, decode = tmp_path / "out", DecodeConfig(**DECODE)
    generate(GenerateConfig(shard_rows=8), prompts, decode, target, out)
    before = (out / "manifest.json").stat().st_mtime_ns
    generate(
        GenerateConfig(shard_rows=8),
        prompts,
        DecodeConfig(**{**DECODE, "batch_size": 1}),
        target,
        out,
    )
    assert (out / "manifest.json").stat().st_mtime_ns == before, "a finished run is left as it is"

    warmer = DecodeConfig(**{**DECODE, "temperature": 0.5})
    with pytest.raises(
        UserError, match=r"sampling.temperature was 1.0 and is now 0.5.*overwrite=true"
    ):
        generate(GenerateConfig(), prompts, warmer, target, out)
    fewer = DataConfig(prompts.path, id_column="name", domain_column="domain", limit=5)
    with pytest.raises(UserError, match=r"the rows of the data have changed"):
        generate(GenerateConfig(), fewer, decode, target, out)
    assert same_files(reference, out)

    manifest = generate(GenerateConfig(overwrite=True), fewer, decode, target, out)
    assert manifest["counts"]["done"] == 5
    assert [row["tokens"] for row in answers(out)] == [
        row["tokens"] for row in answers(reference)[:5]
    ]

    shard = out / "shards" / "shard-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="changed or damaged"):
        generate(GenerateConfig(), fewer, decode, target, out)


def test_a_folder_is_not_continued_with_other_settings_that_change_the_text(
    loaded, target, prompts, tmp_path
):
    drafter = tmp_path / "drafter"
    save_drafter(
        new_drafter("ngram", Config(), loaded.info, loaded.weights, 0), drafter, loaded.info
    )
    config = GenerateConfig(drafter=str(drafter))
    decode = DecodeConfig(**{**DECODE, "shape": "chain", "rule": "match"})
    few, out = replace(prompts, limit=2), tmp_path / "out"
    generate(config, few, decode, target, out)
    before = contents(out)
    (tmp_path / "form.regex").write_text("[a-z]*")
    form = str(tmp_path / "form.regex")
    for changed, long, said in (
        ({"structure": "json"}, False, r'sampling\.structure was null and is now "json"'),
        ({"structure": form}, False, r"sampling\.structure was null and is now .regex "),
        ({"rule": "block"}, False, r'sampling\.acceptance was null and is now "block"'),
        ({"rule": "typical"}, False, r"sampling\.typical_delta was null and is now 0\.3"),
        ({}, True, r"target\.long_context was null and is now true"),
    ):
        other = replace(target, long_context=long)
        with pytest.raises(UserError, match=said):
            generate(config, few, replace(decode, **changed), other, out)
        assert contents(out) == before
    for changed in ({"rule": "auto", "shape": "none"}, {"share_noise": False, "depth": 2}):
        generate(config, few, replace(decode, **changed), target, out)  # the same text
    assert contents(out) == before


def test_the_settings_of_the_text_tell_forms_rules_and_engines_apart(tmp_path):
    plain = sampling_of(DecodeConfig(**DECODE), drafts=False)
    assert not {"structure", "acceptance", "vllm_arguments"} & set(plain), "as in earlier versions"
    form, copy = tmp_path / "form.regex", tmp_path / "copy.regex"
    form.write_text("[a-z]*")
    copy.write_text("[a-z]*")
    first = sampling_of(DecodeConfig(**DECODE, structure=str(form)), drafts=False)
    assert first == sampling_of(DecodeConfig(**DECODE, structure=str(copy)), drafts=False)
    form.write_text("[0-9]*")
    assert first != sampling_of(DecodeConfig(**DECODE, structure=str(form)), drafts=False)

    typical = DecodeConfig(**{**DECODE, "shape": "chain", "rule": "typical"})
    looser = replace(typical, typical_epsilon=0.5)
    assert sampling_of(typical, drafts=True) != sampling_of(looser, drafts=True)
    assert sampling_of(typical, drafts=False) == sampling_of(looser, drafts=False) == plain
    greedy = replace(typical, temperature=0.0)
    assert sampling_of(greedy, True) == sampling_of(replace(greedy, rule="match"), True)

    engine = {"backend": "vllm", "shape": "none"}
    found = [
        SamplingConfig(**engine),
        SamplingConfig(**engine, vllm_arguments={"quantization": "fp8"}),
    ]
    assert sampling_of(found[0], False) != sampling_of(found[1], False)


def test_quantised_answers_have_another_identity(target):
    assert target.unusual == replace(target, quantization="none").unusual == {}
    quantised = replace(target, quantization="bnb-4bit")
    assert quantised.unusual == {"quantization": "bnb-4bit"}
    assert loading_text(replace(quantised, long_context=True).unusual) == (
        "quantization=bnb-4bit, long_context=true"
    )


def test_a_refused_generate_leaves_the_prompts_that_were_held_out(target, prompts, tmp_path):
    reserve = ReserveConfig(validation=2, bench=2)
    data = replace(prompts, reserve=reserve)
    out, decode = tmp_path / "out", DecodeConfig(**DECODE)
    generate(GenerateConfig(), data, decode, target, out)
    before = contents(out)
    assert {"input/validation.jsonl", "input/bench.jsonl"} <= set(before)
    for other in (replace(data, limit=9), replace(data, reserve=replace(reserve, seed=5))):
        with pytest.raises(UserError, match=r"rows of the data have changed|left_out was"):
            generate(GenerateConfig(), other, decode, target, out)
        assert contents(out) == before
        generate(GenerateConfig(overwrite=True), other, decode, target, out)
        assert verify_file(out, read_answers(out)["held_out"]["bench"]).is_file()
        generate(GenerateConfig(overwrite=True), data, decode, target, out)
        assert contents(out)["input/bench.jsonl"] == before["input/bench.jsonl"]
        before = contents(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_output_of_another_stage_is_not_touched(target, prompts, tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 1, "stage": "train"}')
    with pytest.raises(UserError, match="belongs to another stage"):
        generate(GenerateConfig(overwrite=True), prompts, DecodeConfig(**DECODE), target, tmp_path)


def test_two_runs_cannot_write_into_one_folder(target, prompts, tmp_path):
    other = {"host": socket.gethostname(), "pid": os.getppid(), "token": "x"}
    (tmp_path / ".writer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=f"another process writes to .*: process {os.getppid()} on"):
        generate(GenerateConfig(), prompts, DecodeConfig(**DECODE), target, tmp_path)


def test_wrong_settings_are_refused():
    with pytest.raises(UserError, match="Did you mean 'dataset'"):
        GenerateConfig(answers="datset")
    with pytest.raises(UserError, match=r"generate\.shard_rows must lie in \[1, \d+\]; given: 0"):
        GenerateConfig(shard_rows=0)


def test_a_datasets_own_answers_are_kept_without_decoding(target, loaded, tmp_path):
    talk = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]
    rows = [{"messages": talk}, {"messages": talk[:1]}]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = GenerateConfig(answers="dataset")
    manifest = generate(
        config, DataConfig(str(tmp_path / "talks.jsonl")), DecodeConfig(), target, tmp_path / "out"
    )
    assert (manifest["counts"]["done"], manifest["counts"]["skipped"]) == (1, 1)
    (reason,) = manifest["reasons"]
    assert reason.startswith("the row has no answer of its own: no assistant message")
    (row,) = answers(tmp_path / "out")
    start, end = row["spans"][0]
    assert loaded.tokenizer.decode(row["tokens"][start:end]) == "Hi.<|end|>"

    rows = [
        {"tokens": [5, 6, 7, 8], "spans": [[2, 4]]},
        {"tokens": [5]},
        {"tokens": [99999], "spans": [[0, 1]]},
    ]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(str(tmp_path / "tokens.jsonl"))
    manifest = generate(config, data, DecodeConfig(), target, tmp_path / "ids")
    assert (manifest["counts"]["done"], manifest["counts"]["skipped"]) == (1, 2)
    assert answers(tmp_path / "ids")[0]["tokens"] == [5, 6, 7, 8]

    manifest = generate(
        GenerateConfig(), data, DecodeConfig(**DECODE), target, tmp_path / "sampled"
    )
    rows = answers(tmp_path / "sampled")
    assert [row["tokens"][: row["spans"][0][0]] for row in rows] == [[5, 6], [5]], (
        "old answers are answered anew"
    )


@pytest.mark.parametrize(("answers", "left_out"), [("sample", 1), ("dataset", 0)])
def test_answers_of_the_data_are_compared_if_they_are_kept(target, tmp_path, answers, left_out):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "Add 1 and 2.", "response": said} for said in ("It is three.", "3, I think.")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    decode = DecodeConfig(**{**DECODE, "max_new_tokens": 2})
    config = GenerateConfig(answers=answers)
    found = generate(config, DataConfig(str(path)), decode, target, tmp_path / "out")
    assert sum(found["input"]["left_out"].values()) == left_out


# Kills and several processes


def job(out, prompts, target, kills, **config):
    data = {"path": prompts.path, "id_column": "name", "domain_column": "domain"}
    config = {"shard_rows": 8, "flush_rows": 3, **config}
    return {
        "out": str(out),
        "data": data,
        "decode": DECODE,
        "target": target.path,
        "config": config,
        "kills": kills,
    }


KILLS = {
    # While reading the input (rows, state, verdict, summary): before anything, with rows, with a
    # verdict. While answering: after one part, after three, after a SIGTERM, early once more.
    "answering": [
        ["before", 1],
        ["after", 2],
        ["before", 2],
        ["before", 5],
        ["after", 4],
        ["term", 4],
        ["before", 2],
        None,
        None,
    ],
    # While merging: with all answers in one part, the files are four of the input, settings, part,
    # three shards, failures, manifest.
    "merging": [
        ["after", 6],
        ["before", 3],
        ["after", 4],
        ["before", 5],
        ["before", 6],
        ["after", 6],
        None,
    ],
    # A SIGTERM before anything was written.
    "terminated": [["term", 7]],
}


@pytest.fixture(scope="module")
def killed(prompts, target, tmp_path_factory):
    """Runs killed as `KILLS` says, in a program of their own: exit statuses, folder of the outputs,
    what was printed."""
    out = tmp_path_factory.mktemp("killed")
    whole = {"flush_rows": 1000, "flush_seconds": 1000}
    jobs = [
        job(out / name, prompts, target, kills, **({} if name == "answering" else whole))
        for name, kills in KILLS.items()
    ]
    done = forked.run("tests.train.generate_worker", json.dumps(jobs))
    assert done.returncode == 0, done.stderr
    return dict(zip(KILLS, json.loads(done.stdout), strict=True)), out, done.stderr


@pytest.mark.parametrize("phase", ["answering", "merging"])
def test_killed_anywhere_the_same_command_continues(killed, reference, phase):
    """Nothing is lost and nothing doubled: the shards are those of an undisturbed run, byte for
    byte."""
    statuses, out, printed = killed
    expected = {"before": -9, "after": -9, "term": 0}
    assert statuses[phase] == [0 if kill is None else expected[kill[0]] for kill in KILLS[phase]], (
        printed
    )
    assert same_files(reference, out / phase)
    assert (
        read_manifest(out / phase, "generate")["counts"]
        == read_manifest(reference, "generate")["counts"]
    )
    assert not (out / phase / "parts").exists()
    assert "continuing: " in printed


def test_a_terminated_run_writes_what_was_finished(killed):
    statuses, out, printed = killed
    assert statuses["terminated"] == [0]
    (part,) = (out / "terminated" / "parts").glob("*.parquet")
    assert pq.read_metadata(part).num_rows == 7
    assert "7 rows of this run are kept" in printed.replace("\n", " ")


def test_two_processes_give_the_answers_of_one_even_after_a_kill(
    reference, prompts, target, tmp_path
):
    """One of two processes is killed (the launcher ends the other); two finish it; so does one
    alone."""

    def launch(out, kills):
        arguments = json.dumps([job(out, prompts, target, kills)])
        return forked.run("tests.train.ranks", 2, "tests.train.generate_worker", arguments)

    killed = launch(tmp_path / "out", [["after", 2]])
    assert killed.returncode != 0
    assert not (tmp_path / "out" / "manifest.json").exists()
    parts = [
        pq.read_metadata(part).num_rows for part in (tmp_path / "out" / "parts").glob("*.parquet")
    ]
    assert 0 < sum(parts) < 20

    shutil.copytree(tmp_path / "out", tmp_path / "alone")
    finished = launch(tmp_path / "out", [])
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("20 done + 0 failed + 0 skipped = 20 input rows") == 1
    assert same_files(reference, tmp_path / "out")
    generate(
        GenerateConfig(shard_rows=8), prompts, DecodeConfig(**DECODE), target, tmp_path / "alone"
    )
    assert same_files(reference, tmp_path / "alone")
