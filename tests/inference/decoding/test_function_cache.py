"""A compiled function that an earlier process kept does the same, is taken only for the very same
graph and weights, and is made anew where what was kept is damaged or gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from inference.decoding.execution import function_cache
from inference.decoding.execution.inductor import compile_graph
from scripts.tools.common import ROOT

TWICE = """
import sys, torch._inductor.compile_fx as compile_fx
from inference.decoding.config import DecodeConfig
from tests.inference.decoding.test_compiled import compiled_engine
from tests.inference.decoding.test_lossless import requests
from tests.models import random_target

compiled, before = [], compile_fx.compile_fx
compile_fx.compile_fx = lambda *given: compiled.append(given) or before(*given)
config = DecodeConfig(depth=2, temperature=1.0, seed=int(sys.argv[1]))
engine, _ = compiled_engine(random_target(), sys.argv[2], config)
print([done.tokens for done in engine.run(requests(2, new=8))], len(compiled))
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    function_cache._constants.clear()
    return tmp_path / "headstart"


class Counting:
    """How often inductor compiles a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch._inductor.compile_fx as inductor

        self.calls, before = 0, inductor.compile_fx

        def compile_fx(*given: Any) -> Any:
            self.calls += 1
            return before(*given)

        monkeypatch.setattr(inductor, "compile_fx", compile_fx)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def layer(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(48, 32).requires_grad_(False)


def step(layer: nn.Linear) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A part of a step as the decoder has them: a product, and a buffer that is updated in
    place."""

    def run(states: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        found = layer(states).relu()
        sums[1:].add_(found[1:])
        return found * 2, found.argmax(1)

    return run


@torch.no_grad()
def compiled(linear: nn.Linear, rows: int = 3) -> Any:
    inputs = [torch.zeros(rows, 48), torch.zeros(rows, 32)]
    return compile_graph(make_fx(step(linear))(*inputs), inputs)


@torch.no_grad()
def check(function: Any, linear: nn.Linear, rows: int = 3) -> None:
    states, sums = torch.randn(rows, 48), torch.randn(rows, 32)
    expected_sums = sums.clone()
    expected = step(linear)(states, expected_sums)
    for found, wanted in zip(function(states, sums), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(sums, expected_sums)


def test_what_was_compiled_is_taken_from_disk(counting: Counting, own_folder: Path) -> None:
    check(compiled(layer()), layer())
    function_cache._constants.clear()
    kept = compiled(layer())
    assert counting.calls == 1
    for _ in range(3):
        check(kept, layer())
    assert len([*own_folder.glob("*.json")]) == 1


def test_nothing_is_kept_before_the_compiler_has_ended(own_folder: Path) -> None:
    compiled(layer())
    assert not own_folder.exists()


@pytest.mark.slow
def test_other_weights_shapes_and_threads_are_compiled_anew(counting: Counting) -> None:
    check(compiled(layer()), layer())
    check(compiled(layer(1)), layer(1))
    check(compiled(layer(), 4), layer(), 4)
    assert counting.calls == 3
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        check(compiled(layer()), layer())
    finally:
        torch.set_num_threads(threads)
    assert counting.calls == 4


def test_a_single_result_stays_a_tensor(counting: Counting) -> None:
    values = torch.arange(4.0)
    for _ in range(2):
        function = compile_graph(make_fx(lambda x: x * 3)(values), [values])
        assert torch.equal(function(values), values * 3)
    assert counting.calls == 1


@pytest.mark.parametrize("show", ["plain", "expanded", "transposed", "column", "none"])
def test_constants_of_every_layout_come_back(show: str, own_folder: Path) -> None:
    numbers = torch.arange(12.0).view(3, 4)
    shown = {
        "plain": numbers,
        "expanded": numbers[:, :1].expand(3, 5),
        "transposed": numbers.t(),
        "column": numbers[1:, 2],
        "none": numbers[:0],
    }[show]
    entry = {"code": "", "takes": [], "gives": [], "single": False}
    function_cache._store("0", entry, {"it": shown})
    kept = json.loads((own_folder / "0.json").read_text())["constants"]["it"]
    found = function_cache._constant(kept)
    assert torch.equal(found, shown) and found.stride() == shown.stride()


@pytest.mark.parametrize("damage", ["constant", "no constant", "entry", "no entry"])
def test_what_is_damaged_or_gone_is_compiled_anew(
    damage: str, counting: Counting, own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(compiled(layer()), layer())
    kind = "bin" if "constant" in damage else "json"
    for file in own_folder.glob(f"*.{kind}"):
        if damage.startswith("no"):
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    function_cache._constants.clear()
    check(compiled(layer()), layer())
    assert counting.calls == 2
    assert ("made anew" in caplog.text) == (not damage.startswith("no"))
    function_cache._constants.clear()
    check(compiled(layer()), layer())
    assert counting.calls == 2


def test_a_full_disk_costs_the_entry_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function_cache, "write_bytes", full)
    check(compiled(layer()), layer())
    assert "not kept for later runs: [Errno 28] No space left" in caplog.text


def test_functions_share_constants_in_memory_and_on_disk(own_folder: Path) -> None:
    check(compiled(layer()), layer())
    files = {file.name for file in own_folder.glob("*.bin")}
    check(compiled(layer(), 4), layer(), 4)
    assert {file.name for file in own_folder.glob("*.bin")} == files
    assert len([*own_folder.glob("*.json")]) == 2


def test_room_is_made_by_what_was_used_longest_ago(own_folder: Path) -> None:
    own_folder.mkdir()
    for number, constants in enumerate([["a", "b"], ["b", "c"], ["c"]]):
        entry = own_folder / f"entry-{number}.json"
        named = {name: {"sha256": name} for name in constants}
        entry.write_text(json.dumps({"constants": named}))
        os.utime(entry, (number, number))
        for name in constants:
            (own_folder / f"{name}.bin").write_bytes(bytes(1000))
    sizes = [file.stat().st_size for file in sorted(own_folder.glob("*.json"))]
    function_cache.make_room(2000 + sizes[1] + sizes[2])
    assert sorted(file.name for file in own_folder.iterdir()) == [
        "b.bin",
        "c.bin",
        "entry-1.json",
        "entry-2.json",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "distilled", "domino"])
def test_a_second_process_compiles_nothing(kind: str, tmp_path: Path) -> None:
    def run(seed: int) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", TWICE, str(seed), kind],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip().rsplit(" ", 1)

    text, count = run(3)
    assert int(count) > 0
    assert run(3) == [text, "0"]
