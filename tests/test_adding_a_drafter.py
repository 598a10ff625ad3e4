"""docs/adding_a_drafter.md, executed: its one Python file and its one YAML compose, train, save,
load and decode."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import heads
from heads.api.checkpoint import load_drafter, new_drafter, save_drafter
from heads.api.errors import UserError
from heads.api.kinds import kind_names
from heads.api.registry import get_kind
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import Request
from inference.export.check.config import VerifyConfig
from inference.export.check.verify import verify
from inference.export.engine_folder import prepare
from inference.export.importing import import_folder
from inference.export.layouts.folder import Folder
from inference.measure.baselines import is_llama
from inference.parity import check_parity
from scripts.config.help import stage_help
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from tests.inference.export.ground import load_target, save_target, target_config, write
from tests.models import random_target
from tests.newcomer.pages import ROOT, file_block
from tests.oracle.compare import forward_gap
from train.data.loader import PackedBatch
from train.engines.base import EngineConfig
from train.features.base import OnlineFeatures
from train.on_policy import require_possible

PAGE = ROOT / "docs" / "adding_a_drafter.md"
NAMES = ("bigram", "twin")


@pytest.fixture
def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's files, in folders that are searched after the project's own."""
    (tmp_path / "kinds").mkdir()
    (tmp_path / "conf" / "head").mkdir(parents=True)
    for name in NAMES:
        (tmp_path / "kinds" / f"{name}.py").write_text(
            file_block(PAGE, f"heads/{name}.py"), encoding="utf-8"
        )
    (tmp_path / "conf" / "head" / "bigram.yaml").write_text(
        file_block(PAGE, "conf/head/bigram.yaml"), encoding="utf-8"
    )
    monkeypatch.setattr(heads, "__path__", [*heads.__path__, str(tmp_path / "kinds")])
    monkeypatch.setenv("HEADSTART_CONF", str(tmp_path / "conf"))
    importlib.invalidate_caches()
    yield
    for name in NAMES:
        sys.modules.pop(f"heads.{name}", None)
        vars(heads).pop(name, None)


def batch_of(documents: list[list[int]]) -> PackedBatch:
    """One row per document, right-padded; everything after the first token is supervised."""
    rows = [torch.tensor(document) for document in documents]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    inside = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True
    )
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    seeds = torch.arange(len(documents))
    return PackedBatch(tokens, positions, inside.int(), (positions >= 1) & inside.bool(), seeds)


@pytest.mark.usefixtures("kinds")
def test_one_python_file_and_one_yaml_make_a_kind(tmp_path: Path) -> None:
    assert "bigram" in kind_names()
    settings = load_settings(STAGES["train"], ["head=bigram", "head.start_std=0.05"])
    assert settings.head.kind == "bigram"
    assert settings.head.config == get_kind("bigram").config_class(start_std=0.05)
    assert "head.start_std = 0.02" in stage_help(STAGES["train"], ["head=bigram"], "head")
    with pytest.raises(
        UserError, match=r"head\.start_sdt: there is no such key\. Did you mean 'start_std'"
    ):
        load_settings(STAGES["train"], ["head=bigram", "head.start_sdt=1"])

    target = random_target("llama")
    drafter = new_drafter("bigram", settings.head.config, target.info, target.weights, seed=1)
    plain = decode(target, None)
    documents = [[*prompt(i), *plain[i]] for i in range(4)]
    check_parity(target, drafter, documents, depth=4)
    batch = OnlineFeatures(target, drafter.needs, torch.float64).batch(batch_of(documents))
    before, after = train(drafter, batch)
    assert after < 0.5 * before

    save_drafter(drafter, tmp_path / "checkpoint", target.info)
    loaded = load_drafter(tmp_path / "checkpoint", target.info, target.weights)
    torch.testing.assert_close(
        loaded.matrix.float(), drafter.matrix.float(), rtol=1e-6, atol=0
    )  # checkpoints are float32
    check_parity(target, loaded, documents, depth=4)
    tree = DecodeConfig(
        shape="tree", choices=((0,), (1,), (0, 0), (0, 1), (1, 0)), max_new_tokens=20, batch_size=3
    )
    for config in (
        DecodeConfig(depth=4, max_new_tokens=20),
        tree,
        DecodeConfig(temperature=1.0, max_new_tokens=20),
    ):
        assert decode(target, loaded, config) == decode(target, None, config)
    passes = sum(
        len(item.passes) for item in Engine(target, loaded, DecodeConfig(depth=4)).run(requests())
    )
    assert passes < 0.8 * sum(len(tokens) - 1 for tokens in plain)  # it learnt the answers by heart


@pytest.mark.usefixtures("kinds")
def test_a_kind_with_an_existing_layout_exports_without_another_line(tmp_path: Path) -> None:
    target = load_target(save_target(tmp_path / "target"))
    config = get_kind("twin").config_class(num_layers=1, forward_kl=1.0, ce=0.5)
    drafter = new_drafter("twin", config, target.info, target.weights, seed=1)
    save_drafter(drafter, tmp_path / "mine", target.info)
    for engine in ("vllm", "sglang", "transformers"):
        out = tmp_path / engine
        notes = write(target, tmp_path / "mine", out, engine)
        assert (notes.kind, notes.method, notes.layout) == ("twin", "distilled", "causal")
        assert verify(VerifyConfig(str(out)), target_config(target), target).faults == []
    assert forward_gap(tmp_path / "vllm", target, tmp_path / "mine") < 1e-4
    found = import_folder(Folder.read(tmp_path / "vllm"), target, tmp_path / "back")
    assert found.kind == "twin"
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "mine" / file).read_bytes()
    with pytest.raises(UserError, match="the library has no stand-alone drafters"):
        write(target, tmp_path / "mine", tmp_path / "no", "speculators")
    assert is_llama(drafter)
    with pytest.raises(UserError, match=r"head\.ce takes tokens as labels"):
        require_possible(drafter, EngineConfig())


@pytest.mark.usefixtures("kinds")
def test_a_kind_without_a_layout_is_refused_with_the_reason(tmp_path: Path) -> None:
    target = random_target("llama")
    config = get_kind("bigram").config_class()
    drafter = new_drafter("bigram", config, target.info, target.weights, seed=1)
    save_drafter(drafter, tmp_path / "mine", target.info)
    with pytest.raises(UserError, match="method 'bigram' cannot be exported for vllm: no layout"):
        prepare(tmp_path / "mine", "vllm")
    assert not is_llama(drafter)


def train(drafter: torch.nn.Module, batch: object) -> tuple[float, float]:
    """Loss before and after sixty plain steps on one batch."""
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=0.02)
    values = []
    for _ in range(60):
        loss = drafter(batch).loss_sum / batch.supervised(1).sum()  # type: ignore[attr-defined]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(float(loss.detach()))
    return values[0], values[-1]


def prompt(number: int) -> tuple[int, ...]:
    """A short prompt of its own for each number."""
    return tuple((7 * number + 3 * place) % 90 + 5 for place in range(8))


def requests(length: int = 20) -> list[Request]:
    return [
        Request(number, prompt(number), seed=number, max_new_tokens=length) for number in range(4)
    ]


def decode(target: object, drafter: object, config: DecodeConfig | None = None) -> list[list[int]]:
    """Answers to the four prompts, in their order."""
    engine = Engine(target, drafter, config or DecodeConfig(max_new_tokens=20))  # type: ignore[arg-type]
    found = sorted(engine.run(requests()), key=lambda item: item.request.index)
    return [item.tokens for item in found]
