"""`headstart measure`: what a measurement is made of, and when its folder is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.registry import get_kind
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.cli import main
from scripts.config.stages import EXTRA_VARIABLE
from scripts.run.folder import read_record
from tests.inference.tokenizers import save_micro_target

FILES = ("run.json", "config.yaml", "report.json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def command(target: Path, in_folder: Path) -> list[str]:
    """A measurement of `ngram`, into outputs/default/measure."""
    rows = [{"id": str(n), "prompt": f"add two numbers: {n}"} for n in range(3)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = "bench.warmup_prompts=1 bench.repeats=1 bench.retries=0 decode.max_new_tokens=8".split()
    given = [f"target.path={target}", "target.device=cpu", "run.threads=1", *few]
    return ["measure", *given, "bench=jsonl", "bench.prompts=prompts.jsonl"]


def test_a_refused_measurement_leaves_a_complete_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    out = Path("outputs/default/measure")
    before = [(out / name).read_bytes() for name in FILES]
    assert main([*command, "decode.max_new_tokens=3000"]) == 2
    assert "no prompt fits" in capsys.readouterr().err
    assert before == [(out / name).read_bytes() for name in FILES]
    assert main(command) == 0
    assert "is complete; nothing has changed" in capsys.readouterr().out
    assert main([*command, "decode.max_new_tokens=9"]) == 0
    assert "nothing has changed" not in capsys.readouterr().out
    assert before != [(out / name).read_bytes() for name in FILES]


@pytest.mark.parametrize("changed", ["head config", "part of a cascade"])
def test_a_changed_drafter_without_a_checkpoint_is_measured_again(
    command: list[str],
    target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
) -> None:
    part, own = Path("part"), Path("conf/head/own.yaml")
    own.parent.mkdir(parents=True)
    own.write_text("kind: ngram\nmax_n: 3\n")
    monkeypatch.setenv(EXTRA_VARIABLE, str(own.parents[1].resolve()))
    model = TargetModel.load(TargetConfig(str(target), device="cpu"))
    kind = get_kind("medusa")

    def train(seed: int) -> None:
        drafter = new_drafter("medusa", kind.config_class(), model.info, model.weights, seed=seed)
        drafter.residual_weight.data += seed
        save_drafter(drafter, part, model.info)

    train(1)
    parts = "[{checkpoint: part}, {kind: ngram}]"
    heads = f"measure.heads={{both: {{recipe: cascade_join, parts: {parts}, branches: [2]}}}}"
    command = [*command, "measure.kinds=[own,both]", heads]
    assert main(command) == 0
    assert main(command) == 0
    assert "is complete; nothing has changed" in capsys.readouterr().out
    if changed == "head config":
        own.write_text("kind: ngram\nmax_n: 4\n")
    else:
        train(2)
    out = Path("outputs/default/measure")
    earlier = read_record(out)
    assert earlier is not None
    assert main(command) == 0
    assert "nothing has changed" not in capsys.readouterr().out
    # an earlier version did not record these drafters
    earlier.drafters = {}
    earlier.write(out)
    assert main(command) == 0
    assert "is complete; nothing has changed" in capsys.readouterr().out
