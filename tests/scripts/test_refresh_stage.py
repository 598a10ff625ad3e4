"""`headstart refresh` from the command line: a drafter of one target made to fit another, resumed
after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heads.api.checkpoint import build_config, new_drafter, read_config, save_drafter
from inference.manifest import read_manifest
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.cli import main
from scripts.config.own import RunConfig
from scripts.run import drafters
from scripts.stages.refresh import stage
from tests.inference.tokenizers import save_micro_target

WORDS = ("add", "two", "numbers", "list", "items", "function")


def write_prompts(path: Path, count: int, start: int = 0) -> None:
    rows = [
        {
            "id": f"p{n}",
            "domain": "code",
            "messages": [{"role": "user", "content": f"{WORDS[n % 6]} {WORDS[n // 6 % 6]} {n}"}],
        }
        for n in range(start, start + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets of the same sizes, and a drafter that is the first one over again."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("place")
    save_micro_target(folder / "target")
    save_micro_target(folder / "changed")
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.3 * parameter.data.std() * torch.randn_like(parameter)
    model.save_pretrained(folder / "changed")
    target = TargetModel.load(
        TargetConfig(path=str(folder / "target"), dtype="float32", device="cpu")
    )
    config = build_config("distilled", {"from_target_layers": [0, 1]})
    save_drafter(
        new_drafter("distilled", config, target.info, target.weights, seed=0),
        folder / "drafter",
        target.info,
    )
    write_prompts(folder / "train.jsonl", 64)
    write_prompts(folder / "validation.jsonl", 6, 1000)
    write_prompts(folder / "bench.jsonl", 8, 2000)
    return folder


def command(place: Path, *more: str) -> list[str]:
    return [
        "refresh",
        f"target.path={place / 'changed'}",
        "target.device=cpu",
        f"refresh.drafter={place / 'drafter'}",
        "refresh.prompts=32",
        "refresh.until=budget",
        f"data.path={place / 'train.jsonl'}",
        "data.benches=[]",
        "sampling.temperature=0",
        "sampling.max_new_tokens=16",
        f"train.prompts=[{place / 'validation.jsonl'}]",
        "train.eval_tokens=8",
        "train.sequence_length=64",
        "train.tracker.wandb=disabled",
        "train.eval_every=4",
        "train.max_steps=8",
        "engine.name=torch",
        "engine.precision=float32",
        "optim.lr=3e-3",
        "bench=jsonl",
        f"bench.prompts={place / 'bench.jsonl'}",
        "bench.domains=[]",
        "decode.max_new_tokens=16",
        *more,
    ]


def result() -> dict[str, object]:
    content = json.loads(Path("outputs/refresh/refresh/refresh.json").read_text())
    assert isinstance(content, dict)
    return content


def test_a_drafter_fits_the_changed_target_again_and_the_cost_is_told(
    place: Path, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(place)) == 0
    content = result()
    before, after, cost = content["before"], content["after"], content["cost"]
    assert isinstance(before, dict) and isinstance(after, dict) and isinstance(cost, dict)
    assert after["tau"] > before["tau"]
    assert (cost["answers"], cost["steps"]) == (32, 8) and cost["training_tokens"] > 0
    assert set(cost["seconds"]) == {"generate", "train", "measure"}
    new = Path("outputs/refresh/train/distilled/best")
    assert content["drafter"] == {
        "old": str(place / "drafter"),
        "new": str(new),
        "kind": "distilled",
    }
    mine = read_config(new)
    theirs = read_config(place / "drafter")
    assert (
        mine["config"] == theirs["config"]
        and mine["target"]["revision"] != theirs["target"]["revision"]
    )
    shown = capsys.readouterr().out
    assert "tau on held-out prompts:" in shown and shown.splitlines()[-1] == str(new)
    # Repeated, it only shows what is there; the new drafter is found by the other stages.
    written = Path("outputs/refresh/refresh/refresh.json").stat().st_mtime_ns
    assert main(command(place)) == 0
    assert Path("outputs/refresh/refresh/refresh.json").stat().st_mtime_ns == written
    found = drafters.find("distilled", RunConfig(name="refresh"))
    assert found.checkpoint == new and found.stage_folder == new.parent
    # Damaged meanwhile, it is not shown as if it were whole.
    content_of_it = (new / "model.safetensors").read_bytes()
    (new / "model.safetensors").write_bytes(content_of_it[:-40])
    capsys.readouterr()
    assert main(command(place)) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_what_the_target_changed_by_is_carried_over(place: Path, in_folder: Path) -> None:
    """The drafter is its target over again, so with the target's change it is the new target over
    again, before any training."""
    given = (
        f"refresh.old_target={place / 'target'}",
        "train.max_steps=1",
        "optim.lr=1e-12",
        "run.root=carried",
    )
    assert main(command(place, *given)) == 0
    content = json.loads(Path("carried/refresh/refresh/refresh.json").read_text())
    assert content["before"]["tau"] < 2.0 and content["after"]["tau"] > 4.0


def test_a_stopped_refresh_goes_on_to_the_same_weights(
    place: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(place, "run.root=whole")) == 0
    measured = stage.measure_tau

    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "measure_tau", stop)
    assert main(command(place, "run.root=parts")) == 130
    monkeypatch.setattr(stage, "measure_tau", measured)
    assert main(command(place, "run.root=parts")) == 0
    weights = [
        Path(root, "refresh/train/distilled/best/model.safetensors").read_bytes()
        for root in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


def test_training_ends_where_tau_is_restored(place: Path, in_folder: Path) -> None:
    assert (
        main(command(place, "refresh.until=restored", "refresh.tau=1.01", "refresh.lora_rank=2"))
        == 0
    )
    content = result()
    assert content["ended_by"] == "goal" and content["goal"] == 1.01
    assert content["cost"]["steps"] == 4  # type: ignore[index]
    assert read_manifest(Path("outputs/refresh/train/distilled"), "train")["ended_by"] == "goal"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["refresh.drafter="], "refresh.drafter is missing"),
        (["refresh.drafter=ngram"], "has no trained weights"),
        (["refresh.until=restored"], "is not at hand, so the tau that it had is not known"),
        (["refresh.until=later"], "refresh.until 'later' is unknown"),
        (["refresh.restore=2"], "refresh.restore must be above 0 and at most 1"),
        (["head=eagle3"], "a refresh keeps the kind and settings"),
    ],
)
def test_what_cannot_be_refreshed_is_one_clear_error(
    place: Path, in_folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(command(place, *more)) == 2
    assert said in capsys.readouterr().err
