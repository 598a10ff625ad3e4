"""decode.yaml: written and read back, refused where it does not belong, followed by all who were
told no draft."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.decode_file import (
    DECODE_FILE,
    TunedTarget,
    advice,
    draft_length,
    read_current,
    read_tuned,
    write_tuned,
)
from inference.decoding.draft import NONE, Draft
from inference.decoding.engine import Engine, _tuned
from inference.decoding.requests import Request
from inference.export.config import ExportConfig
from inference.export.engine_folder import prepare, write_layout
from inference.export.hub.card import card
from inference.export.hub.config import PushConfig
from inference.export.layouts.base import Target as ExportTarget
from inference.manifest import checkpoint_hash
from inference.report.model import parse_report
from inference.target.hardware import device_facts
from inference.target.model import TargetModel
from inference.target.settings import Loading
from scripts.config.schema import Settings, load_settings
from scripts.config.stages import STAGES
from scripts.run import drafters
from scripts.run.process import result_facts
from scripts.stages.chat import build_engine
from scripts.stages.measure import arm
from tests.inference.export.hub.example_folder import CONFIG, report_of
from tests.inference.tokenizers import save_micro_target
from tests.models import random_target

TREE = Draft("tree", 2, ((0,), (1,), (0, 0)))
STOPPED = Draft("chain", 3, adaptive="confidence", adaptive_threshold=0.4)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return random_target("llama")


def row(
    batch: int,
    draft: Draft,
    temperature: float = 0.0,
    speedup: float = 1.5,
    chain: Draft | None = None,
) -> dict[str, Any]:
    return {
        "batch_size": batch,
        "temperature": temperature,
        "draft": draft.plain(),
        "chain": (chain or draft.as_chain).plain(),
        "least_probability": None,
        "rule": "match" if temperature == 0 else "specinfer",
        "label": draft.label,
        "predicted_tokens_per_second": 140.0,
        "tokens_per_second": 150.0,
        "baseline_tokens_per_second": 100.0,
        "speedup": speedup,
        "speedup_ci95": [1.4, 1.6],
        "tau": 2.0,
        "measured": [],
        "predictions": [],
    }


ROWS = [
    row(1, TREE),
    row(4, STOPPED),
    row(16, NONE, speedup=1.0),
    row(4, Draft("dynamic", 4, (), 9, 8), 1.0),
]


def checkpoint(target: TargetModel, folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    medusa = new_drafter(
        "medusa", get_kind("medusa").config_class(), target.info, target.weights, seed=0
    )
    save_drafter(medusa, folder, target.info)
    facts = {"id": target.info.id, "revision": target.info.revision}
    write_tuned(
        folder,
        checkpoint_hash(folder),
        facts,
        device_facts(target.device),
        ROWS if rows is None else rows,
        "headstart tune",
    )
    return folder


def test_what_is_written_is_read_back(target: TargetModel, tmp_path: Path) -> None:
    folder = checkpoint(target, tmp_path)
    tuned = read_tuned(folder)
    assert tuned is not None
    assert [item.draft for item in tuned.rows] == [
        TREE,
        STOPPED,
        NONE,
        Draft("dynamic", 4, (), 9, 8),
    ]
    assert tuned.rows[0].numbers["baseline_tokens_per_second"] == 100.0
    assert tuned.target["revision"] == target.info.revision and tuned.device["kind"] == "cpu"
    for item in tuned.rows:
        decode = item.draft.on(DecodeConfig(depth=7, adaptive="entropy", batch_size=5))
        assert decode.batch_size == 5
        assert decode.adaptive == item.draft.adaptive
        assert decode.tree().num_nodes == item.draft.size
        assert decode.tree().max_depth == item.draft.depth
    assert list(tmp_path.glob("*.partial")) == []
    assert read_tuned(tmp_path / "elsewhere") is None


def test_nothing_is_said_of_weights_that_came_meanwhile(
    target: TargetModel, tmp_path: Path
) -> None:
    folder = checkpoint(target, tmp_path)
    before = (folder / DECODE_FILE).read_bytes()
    tuned = checkpoint_hash(folder)
    medusa = new_drafter(
        "medusa", get_kind("medusa").config_class(), target.info, target.weights, seed=1
    )
    next(medusa.parameters()).data.add_(1.0)
    save_drafter(medusa, folder, target.info)
    facts = {"id": target.info.id, "revision": target.info.revision}
    with pytest.raises(UserError, match="was replaced while it was tuned"):
        write_tuned(folder, tuned, facts, device_facts(target.device), ROWS[:1], "headstart tune")
    assert (folder / DECODE_FILE).read_bytes() == before


def test_the_nearest_row_is_taken_and_sampling_is_not_greedy_decoding(
    target: TargetModel, tmp_path: Path
) -> None:
    tuned = read_tuned(checkpoint(target, tmp_path))
    assert tuned is not None
    found = {(batch, t): tuned.row(batch, t) for batch in (1, 3, 9, 64) for t in (0.0, 0.6)}
    drafts = {key: None if item is None else item.draft.shape for key, item in found.items()}
    assert [drafts[batch, 0.0] for batch in (1, 3, 9, 64)] == ["tree", "chain", "none", "none"]
    assert {drafts[batch, 0.6] for batch in (1, 3, 9, 64)} == {"dynamic"}


def test_of_several_temperatures_the_nearest_is_taken_before_the_batch_size(
    target: TargetModel, tmp_path: Path
) -> None:
    rows = [row(1, TREE, 0.3), row(8, STOPPED, 1.0)]
    tuned = read_tuned(checkpoint(target, tmp_path, rows))
    assert tuned is not None
    for temperature, nearest in ((0.1, 0.3), (0.6, 0.3), (0.7, 1.0), (2.0, 1.0)):
        found = [tuned.row(batch, temperature) for batch in (1, 8)]
        assert [item and item.temperature for item in found] == [nearest, nearest]


def told(
    folder: Path, target: TargetModel, batch: int = 1, temperature: float = 0.0, **changes: Any
) -> Any:
    facts = {**device_facts(target.device), **changes.pop("device", {})}
    revision, loading = changes.pop("revision", target.info.revision), changes.pop("loading", {})
    return advice(folder, revision, facts, batch, temperature, loading=loading)


def test_a_draft_for_a_quantised_target_is_not_that_of_the_plain_one(
    target: TargetModel, tmp_path: Path
) -> None:
    plain = (checkpoint(target, tmp_path) / DECODE_FILE).read_text()
    assert "loading" not in plain
    quantised: Loading = {"quantization": "torchao-int8"}
    refused = told(tmp_path, target, loading=quantised)
    assert (
        refused.draft is None
        and (
            "it was tuned on the target loaded with the defaults, here it is loaded with "
            "quantization=torchao-int8"
        )
        in refused.line
    )
    of: TunedTarget = {"id": "x", "revision": target.info.revision, "loading": quantised}
    digest, device = checkpoint_hash(tmp_path), device_facts(target.device)
    write_tuned(tmp_path, digest, of, device, ROWS, "headstart tune")
    assert told(tmp_path, target, loading=quantised).draft == TREE
    assert told(tmp_path, target).draft is None


def test_whoever_reads_it_knows_how_the_target_was_loaded(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, settings = drafters.at(checkpoint(target, tmp_path)), load_settings(STAGES["chat"], [])
    assert drafters.decode_settings(found, settings, target, 1).shape == "tree"
    assert result_facts(settings, target)["target"].keys() == {"id", "revision"}
    monkeypatch.setattr(target, "loading", {"quantization": "torchao-int8"})
    assert drafters.decode_settings(found, settings, target, 1).shape == "chain"
    assert _tuned(tmp_path, target) is None
    assert result_facts(settings, target)["target"]["loading"] == target.loading


def test_it_is_used_only_where_it_belongs(target: TargetModel, tmp_path: Path) -> None:
    folder = checkpoint(target, tmp_path)
    assert (
        told(folder, target).line
        == "decode.yaml: tree 4, depth 2, chosen at batch size 1, temperature 0 (speedup 1.50)"
    )
    assert "batch size 4, temperature 1, rule specinfer" in told(folder, target, temperature=1).line
    assert told(folder, target, 16).draft == NONE
    assert (
        "no speculation, which was fastest at batch size 16, temperature 0"
        in told(folder, target, 16).line
    )
    assert told(folder, target, device={"name": "other"}).line.endswith(
        f", tuned on {device_facts(target.device)['name']}"
    )
    refused = told(folder, target, revision="another")
    assert refused.draft is None and "is not used: it was tuned on revision" in refused.line
    assert "is not used: it was tuned on cpu" in told(folder, target, device={"kind": "cuda"}).line
    assert told(tmp_path / "elsewhere", target) is None
    checkpoint(target, tmp_path / "greedy", ROWS[:2])
    assert "it has no row for sampling" in told(tmp_path / "greedy", target, temperature=0.7).line
    other = new_drafter(
        "medusa", get_kind("medusa").config_class(num_heads=3), target.info, target.weights, seed=1
    )
    save_drafter(other, folder, target.info)
    assert "the weights have changed since it was tuned" in told(folder, target).line


@pytest.mark.parametrize(
    "change",
    [
        {"format": 9},
        {"rows": [{"batch_size": 1}]},
        {"rows": 3},
        {"target": {}},
        {"rows": [{**ROWS[0], "draft": {"shape": "wedge"}}]},
        {"rows": [{**ROWS[0], "rule": "luck"}]},
    ],
)
def test_a_file_that_is_something_else_is_refused(
    target: TargetModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = checkpoint(target, tmp_path)
    content = yaml.safe_load((folder / DECODE_FILE).read_text())
    (folder / DECODE_FILE).write_text(yaml.safe_dump({**content, **change}))
    with pytest.raises(
        UserError,
        match=r"decode\.yaml' is not readable .* Write it again with `headstart tune`, or delete it",
    ):
        read_tuned(folder)
    (folder / DECODE_FILE).write_text("{rows: [")
    with pytest.raises(UserError, match=r"is not readable"):
        read_tuned(folder)


def test_the_engine_takes_it_when_nothing_is_said(
    target: TargetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(target, tmp_path)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(target, folder)
    assert engine.decode.choices == TREE.choices and "chosen at batch size 1" in caplog.text
    assert Engine.load(target, folder, DecodeConfig(depth=2)).decode.shape == "chain"
    assert len(list(engine.run([Request(0, (5, 6, 7), 0, 5)]))) == 1
    checkpoint(target, folder, [row(1, NONE)])
    assert Engine.load(target, folder).drafter is None


def test_an_engine_that_asks_for_one_number_gets_the_depth(
    target: TargetModel, tmp_path: Path
) -> None:
    assert draft_length(checkpoint(target, tmp_path)) == 2
    assert draft_length(checkpoint(target, tmp_path, ROWS[1:])) == 3
    assert draft_length(checkpoint(target, tmp_path, [ROWS[2]])) == 0
    assert draft_length(tmp_path / "elsewhere") == 0
    # where a tree was chosen: the best chain, if one is faster than plain decoding
    longer = row(1, TREE, chain=Draft("chain", 4))
    assert draft_length(checkpoint(target, tmp_path, [longer])) == 4
    no_chain = row(1, TREE, chain=NONE)
    assert draft_length(checkpoint(target, tmp_path, [no_chain, row(4, STOPPED)])) == 3


def test_a_file_of_an_earlier_version_has_chains_of_the_drafts_depth(
    target: TargetModel, tmp_path: Path
) -> None:
    folder = checkpoint(target, tmp_path)
    path = folder / "decode.yaml"
    content = yaml.safe_load(path.read_text())
    for entry in content["rows"]:
        del entry["chain"]
    path.write_text(path.read_text().split("\n")[0] + "\n" + yaml.safe_dump(content))
    tuned = read_tuned(folder)
    assert tuned is not None
    assert [entry.chain for entry in tuned.rows[:2]] == [Draft("chain", 2), Draft("chain", 3)]


def test_what_was_tuned_with_other_weights_leaves_no_machine(
    target: TargetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(target, tmp_path)
    assert read_current(folder) == read_tuned(folder) is not None
    other = new_drafter(
        "medusa", get_kind("medusa").config_class(num_heads=2), target.info, target.weights, seed=1
    )
    save_drafter(other, folder, target.info)
    assert read_current(folder) is None and draft_length(folder) == 0
    assert "decode.yaml is left out: the weights have changed since it was tuned" in caplog.text


def test_the_card_has_it_as_a_table(target: TargetModel, tmp_path: Path) -> None:
    digest, about = "d" * 64, PushConfig("someone/x")
    tuned = read_tuned(checkpoint(target, tmp_path))
    lines = card(
        {"greedy": parse_report(report_of(digest))}, digest, CONFIG, about, tuned=tuned
    ).splitlines()
    assert "| 1 | 0 | tree 4, depth 2 | 150 | 100 | 1.50 [1.40, 1.60] |" in lines
    assert any("none: plain decoding is fastest" in line for line in lines)
    assert "## How to draft" not in card(
        {"greedy": parse_report(report_of(digest))}, digest, CONFIG, about
    )


# The stages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target's folder, and a tuned checkpoint for it."""
    from inference.target.loading import TargetConfig

    place = save_micro_target(tmp_path_factory.mktemp("target"))
    model = TargetModel.load(TargetConfig(str(place), device="cpu"))
    return place, checkpoint(model, tmp_path_factory.mktemp("drafter"))


def settings_of(stage: str, folders: tuple[Path, Path], *more: str) -> Settings:
    given = [f"target.path={folders[0]}", "target.device=cpu", *more]
    return load_settings(STAGES[stage], given)


def test_chat_and_serve_decode_as_it_says(
    folders: tuple[Path, Path], in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = settings_of("chat", folders)
    engine, found = build_engine(chat, str(folders[1]))
    assert engine.decode.choices == TREE.choices and found and found.name == folders[1].name
    assert "decode.yaml: tree 4, depth 2" in capsys.readouterr().err
    engine, found = build_engine(settings_of("serve", folders), str(folders[1]))  # sixteen rows
    assert engine.drafter is None and found is None
    assert "no speculation" in capsys.readouterr().err
    engine, _ = build_engine(settings_of("chat", folders, "decode.depth=2"), str(folders[1]))
    assert (engine.decode.shape, engine.decode.depth) == ("chain", 2)
    engine, _ = build_engine(settings_of("chat", folders, "decode=dynamic"), str(folders[1]))
    assert engine.decode.shape == "dynamic"
    engine, _ = build_engine(
        settings_of("chat", folders, "decode=adaptive", "decode.depth=4"), str(folders[1])
    )
    assert engine.decode.adaptive == "confidence"
    # whoever says how to draft is obeyed, silently
    assert "decode.yaml" not in capsys.readouterr().err
    engine, _ = build_engine(settings_of("chat", folders, "decode=sampled"), str(folders[1]))
    assert (engine.decode.shape, engine.decode.temperature) == ("dynamic", 1.0)


def test_a_measurement_drafts_as_it_says(
    folders: tuple[Path, Path], in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of("measure", folders)
    found = drafters.find(str(folders[1]), settings.run)
    model = TargetModel.load(settings.target)
    assert arm(found, model, settings).decode.choices == TREE.choices
    asked = settings_of("measure", folders, "measure.draft={shape: dynamic, nodes: 9}")
    assert arm(found, model, asked).decode.shape == "dynamic"
    assert arm(drafters.find("ngram", settings.run), model, settings).decode.shape == "chain"
    assert capsys.readouterr().err.count("decode.yaml") == 1


def test_an_export_drafts_as_many_as_it_says(folders: tuple[Path, Path]) -> None:
    from inference.target.loading import TargetConfig

    checkpoint_read = prepare(folders[1], "vllm")
    target = ExportTarget.of(TargetConfig(str(folders[0]), device="cpu"), checkpoint_read.info)
    _, written = write_layout(ExportConfig(), checkpoint_read, target)
    assert written.speculative["num_speculative_tokens"] == 2
    assert any("as decode.yaml says" in note for note in written.notes)
    _, written = write_layout(ExportConfig(tokens=3), checkpoint_read, target)
    assert written.speculative["num_speculative_tokens"] == 3
    assert not any("decode.yaml" in note for note in written.notes)


def test_what_the_file_says_may_be_no_draft_at_all() -> None:
    with pytest.raises(
        UserError,
        match=r"a draft has the settings shape, depth, .* given: \{'shape': 'chain', 'colour': 3\}",
    ):
        Draft.read({"shape": "chain", "colour": 3})
    with pytest.raises(UserError, match=r"decode\.depth must lie in \[1, 1024\]"):
        Draft.read({"shape": "chain", "depth": 0})
