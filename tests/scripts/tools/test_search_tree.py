"""A searched tree becomes an option of the group `decode` that the command line takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from heads.api.checkpoint import new_drafter, save_drafter
from heads.api.tree import TokenTree
from heads.medusa import Config
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.tools.search_tree import main

TARGET = Path(__file__).parents[3] / "assets" / "tiny-target"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained Medusa heads: they repeat the target's own prediction, which a text sometimes
    does."""
    target = TargetModel.load(TargetConfig(str(TARGET), device="cpu"))
    folder = tmp_path_factory.mktemp("heads") / "mine"
    save_drafter(
        new_drafter("medusa", Config(), target.info, target.weights, 0), folder, target.info
    )
    return folder


def arguments(checkpoint: Path, out: Path, *more: str) -> list[str]:
    few = "--per-domain 1 --held-out 1 --tokens 24 --device cpu --nodes 9".split()
    return [str(checkpoint), *few, "--out", str(out), *more]


@pytest.mark.slow
def test_the_tree_is_an_option_that_decodes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments(checkpoint, tmp_path)) == 0
    report = json.loads((tmp_path / "mine_9.json").read_text())
    assert sum(report["tested"]) > 30
    assert 1 < report["expected_tau"] < 5
    # On the same model of acceptance the tree is worth more than a chain as deep.
    best = [level[0] for level in report["rates"]]
    reached, chain = 1.0, 1.0
    for rate in best:
        reached *= rate
        chain += reached
    assert report["expected_tau"] > chain
    assert report["judged"]["tree"]["tau"] >= report["judged"]["chain"]["tau"]
    monkeypatch.setenv("HEADSTART_CONF", str(tmp_path))
    decode = load_settings(STAGES["measure"], ["decode=mine_9"]).decode
    assert decode.shape == "tree"
    assert [list(path) for path in decode.choices] == report["choices"]
    tree = decode.tree()
    assert isinstance(tree, TokenTree)
    assert tree.num_nodes == len(report["choices"]) + 1 <= 9
    written = yaml.safe_load((tmp_path / "decode" / "mine_9.yaml").read_text())
    assert written["defaults"] == ["chain"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--nodes", "1"], "at least 2 nodes"),
        (["--depth", "6"], "4 heads cannot draft 6 tokens"),
        (["--target", "/nowhere"], "target folder '/nowhere' does not exist"),
    ],
)
def test_mistakes_end_in_one_sentence(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert main(arguments(checkpoint, tmp_path, *more)) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_drafter_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not a drafter checkpoint" in capsys.readouterr().err
