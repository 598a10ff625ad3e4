"""Streams give the rows of tables and continue from any place; mixtures keep their shares, in an
order that nothing disturbs."""

from __future__ import annotations

import json
import time
from itertools import islice, pairwise
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heads.api.errors import UserError
from train.data.config import DataConfig, SourceConfig
from train.data.permute import unit_interval
from train.data.sources import Mixture, Row, Source
from train.data.streams import DatasetStream
from train.data.tables import MOST_OPEN, open_table


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def prompts(name, count):
    return [{"prompt": f"{name} asks {number}"} for number in range(count)]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return str(path)


def texts(rows):
    return [row.messages[0]["content"] for row in rows]


@pytest.mark.parametrize("form", [jsonl, parquet])
def test_a_stream_gives_the_rows_of_the_table(tmp_path, form):
    path = form(tmp_path / f"a.{form.__name__}", prompts("a", 50))
    table = texts(Source(SourceConfig(path)))
    assert texts(Source(SourceConfig(path, streaming=True))) == table
    shuffled = texts(Source(SourceConfig(path, streaming=True, shuffle=True, buffer=20)))
    assert shuffled != table
    for begin in (0, 20, 40):  # shuffled block by block, so no more than a block is held
        assert sorted(shuffled[begin : begin + 20]) == sorted(table[begin : begin + 20])
    assert texts(Source(SourceConfig(path, streaming=True, limit=9))) == table[:9]


def test_a_dataset_of_the_hub_continues_from_any_place():
    """What `datasets` streams is resumed by its own state, the number of the next row by ours."""
    rows = datasets.Dataset.from_list(prompts("hub", 20))
    whole = list(DatasetStream(rows.to_iterable_dataset(num_shards=3), "rows"))
    assert [number for number, _ in whole] == list(range(20))
    for count in (0, 1, 7, 19):
        stream = DatasetStream(rows.to_iterable_dataset(num_shards=3), "rows")
        begun = list(islice(stream, count))
        place = json.loads(json.dumps(stream.at))
        resumed = DatasetStream(rows.to_iterable_dataset(num_shards=3), "rows")
        resumed.at = place
        assert begun + list(resumed) == whole


@pytest.mark.parametrize("form", [jsonl, parquet])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_continues_from_any_place(tmp_path, form, shuffle):
    path = form(tmp_path / f"a.{form.__name__}", prompts("a", 33))
    config = SourceConfig(path, streaming=True, shuffle=shuffle, buffer=10, limit=30)
    whole = texts(Source(config))
    for stop in (1, 9, 10, 11, 29):
        source = Source(config)
        taken = texts(islice(source.read(None), stop))
        place = json.loads(json.dumps(source.place()))
        assert taken + texts(Source(config).read(place)) == whole


def test_a_parquet_stream_goes_through_files_and_is_not_read_ahead(tmp_path):
    rows = [{"prompt": f"{number} " + "long " * 20_000} for number in range(200)]
    for name, part in (("a", rows[:120]), ("b", rows[120:])):
        table = pa.Table.from_pylist(part)
        pq.write_table(
            table,
            tmp_path / f"{name}.parquet",
            row_group_size=10,
            compression="none",
            use_dictionary=False,
        )
    config = SourceConfig(str(tmp_path), streaming=True)
    before = pa.total_allocated_bytes()
    reading = Source(config).read(None)
    first = next(reading)
    time.sleep(0.5)  # whoever reads ahead does it now
    assert pa.total_allocated_bytes() - before < 6_000_000, (
        "a row group is a megabyte, all of it twenty"
    )
    whole = texts([first, *reading])
    assert [int(text.split()[0]) for text in whole] == list(range(200))
    source = Source(config)
    taken = texts(islice(source.read(None), 125))
    assert taken + texts(Source(config).read(source.place())) == whole


def test_a_broken_parquet_file_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", prompts("a", 50))
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"a\.parquet' cannot be read"):
        list(Source(SourceConfig(path, streaming=True)))


@pytest.mark.parametrize("content", ['[{"prompt": "x"}, {"prompt":', "no JSON"])
def test_a_broken_json_file_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    for streaming in (True, False):
        with pytest.raises(UserError, match=r"a\.json' cannot be read"):
            list(Source(SourceConfig(str(tmp_path / "a.json"), streaming=streaming)))


def test_a_folder_with_some_state_json_is_no_saved_dataset(tmp_path):
    jsonl(tmp_path / "a.jsonl", prompts("a", 3))
    for content in ("{}", "no JSON", '{"_data_files": []}'):
        (tmp_path / "state.json").write_text(content)
        for streaming in (True, False):
            with pytest.raises(UserError, match=r"cannot be opened as one: .*as a glob"):
                Source(SourceConfig(str(tmp_path), streaming=streaming))
    assert len(list(Source(SourceConfig(str(tmp_path / "*.jsonl"))))) == 3


def test_a_table_of_many_files_holds_few_of_them_open(tmp_path):
    for number in range(50):
        jsonl(tmp_path / f"{number:02d}.jsonl", prompts(f"f{number}", 2))
    before = len(list(Path("/dev/fd").iterdir()))
    table = open_table(SourceConfig(str(tmp_path)))
    assert [table[index]["prompt"].split()[0] for index in (0, 99, 1, 50, 98)] == [
        "f0",
        "f49",
        "f0",
        "f25",
        "f49",
    ]
    assert len([table[index] for index in range(100)]) == 100
    assert len(list(Path("/dev/fd").iterdir())) - before <= MOST_OPEN
    del table
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_broken_lines_of_a_stream_are_rows_with_a_reason(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n\n{broken\n[1]\n{"prompt": "y"}')
    rows = list(Source(SourceConfig(str(tmp_path / "a.jsonl"), streaming=True)))
    assert [getattr(row, "reason", "") for row in rows] == [
        "",
        "the line is not valid JSON",
        "the line is not a JSON object",
        "",
    ]


def mixed(tmp_path, **options):
    files = [
        jsonl(tmp_path / "one.jsonl", prompts("one", 600)),
        jsonl(tmp_path / "two.jsonl", prompts("two", 600)),
    ]
    sources = (
        SourceConfig(files[0], weight=3, domain="code"),
        SourceConfig(files[1], weight=1, domain="chat", streaming=True, shuffle=True, buffer=50),
    )
    return DataConfig(mixture=sources, **options)


def test_a_mixture_keeps_its_shares_everywhere(tmp_path):
    rows = [row for _, row in Mixture(mixed(tmp_path, limit=700)).read()]
    assert [row.index for row in rows] == list(range(700))
    for begin in range(0, 700, 100):
        share = sum(row.domain == "code" for row in rows[begin : begin + 100])
        assert 72 <= share <= 78, "evenly spread, not only on average"
    assert texts(rows) == texts(row for _, row in Mixture(mixed(tmp_path, limit=700)).read())
    assert texts(rows) != texts(
        row for _, row in Mixture(mixed(tmp_path, limit=700, seed=1)).read()
    )


def test_a_mixture_continues_from_any_place_and_says_what_ran_out(tmp_path):
    data = mixed(tmp_path)
    whole = Mixture(data)
    rows = [row.id for _, row in whole.read()]
    assert len(set(rows)) == 1200
    first, second = whole.report()
    assert (first["rows"], second["rows"]) == (600, 600)
    assert 790 <= first["ran_out_at"] <= 810, "600 rows are three quarters of 800"
    assert (first["share_asked"], first["share"]) == (0.75, 0.5)
    for stop in (1, 333, 850, 1200):
        mixture = Mixture(data)
        taken = [row.id for _, row in islice(mixture.read(), stop)]
        place = json.loads(json.dumps(mixture.place()))
        again = Mixture(data)
        assert taken + [row.id for _, row in again.read(place)] == rows
        assert again.report() == whole.report()
        assert json.loads(json.dumps(again.place()))["index"] == 1200


def test_caps_and_ids_of_a_mixture(tmp_path):
    rows = [{"key": str(number), "prompt": f"p{number}"} for number in range(5)]
    one, two = jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", rows)
    data = DataConfig(
        mixture=(SourceConfig(one, id_column="key", limit=2), SourceConfig(two, id_column="key"))
    )
    found = [row for _, row in Mixture(data).read()]
    assert sorted(row.id for row in found) == ["a/0", "a/1", "b/0", "b/1", "b/2", "b/3", "b/4"]
    assert all(isinstance(row, Row) for row in found)


def test_sources_of_equal_names_have_labels_of_their_own(tmp_path):
    paths = []
    for number, name in enumerate(("chat", "chat", "chat0")):
        (tmp_path / str(number)).mkdir()
        paths.append(jsonl(tmp_path / str(number) / f"{name}.jsonl", prompts(name, 1)))
    assert Mixture(DataConfig(mixture=tuple(map(SourceConfig, paths)))).labels == [
        "chat1",
        "chat2",
        "chat0",
    ]


def test_the_interval_is_evenly_filled_for_every_seed():
    for seed in (0, 1, 99):
        places = sorted(unit_interval(seed, index) for index in range(1000))
        assert max(b - a for a, b in pairwise(places)) < 0.003


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "data.path is missing"),
        ({"path": "a", "mixture": (SourceConfig("b"),)}, "exclude each other"),
        ({"mixture": (SourceConfig(),)}, "every source needs a path"),
        ({"mixture": (SourceConfig("b"),), "shuffle": True}, "data.shuffle=True has no effect"),
        ({"mixture": (SourceConfig("b"),), "domain": "code"}, "data.domain=code has no effect"),
        ({"path": "a", "weight": 0}, r"data.weight must lie in \[1e-09, "),
        ({"path": "a", "truncate": "middel"}, "Did you mean 'middle'"),
        ({"path": "a", "reasoning": "kep"}, "Did you mean 'keep'"),
        ({"path": "a", "near_share": 0.0}, "data.near_share must be above 0"),
        ({"path": "a", "max_tokens": 0}, r"data.max_tokens must lie in \[1, "),
    ],
)
def test_wrong_settings_are_refused(options, problem):
    with pytest.raises(UserError, match=problem):
        DataConfig(**options)
