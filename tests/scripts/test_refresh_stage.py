"""`headstart refresh` from the command line: a drafter of one target made to fit another, resumed
after a stop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from heads.api.checkpoint import read_config
from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.draft_file import write_draft
from inference.manifest import read_manifest
from scripts.cli import main
from scripts.config.schema import load_settings
from scripts.config.stage_configs import RunConfig
from scripts.config.stages import STAGES
from scripts.run import drafters
from scripts.run.folder import read_config as read_stage_config
from scripts.stages.refresh import parts, stage
from tests.scripts.pairs import save_pair

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
    """A pair of targets with a drafter (`save_pair`), and prompts."""
    folder = tmp_path_factory.mktemp("place")
    save_pair(folder, 0.3)
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


@pytest.fixture(scope="module")
def trained(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that `headstart train` has trained on prompts of its own, in chains of 2."""
    run = tmp_path_factory.mktemp("runs") / "first"
    write_prompts(run.parent / "own.jsonl", 24, 500)
    common = [f"run.root={run.parent}", "run.name=first", f"target.path={place / 'target'}"]
    common.append("target.device=cpu")
    data = [f"data.path={run.parent / 'own.jsonl'}", "data.benches=[]", "data.reserve.bench=0"]
    data += ["data.reserve.validation=0", "sampling.temperature=0", "sampling.max_new_tokens=16"]
    assert main(["generate", *common, *data]) == 0
    training = ["head=distilled", "head.from_target_layers=[0,1]", "train.max_steps=2"]
    training += ["train.eval_every=0", "train.sequence_length=64", "train.tracker.wandb=disabled"]
    training += ["engine.name=torch", "engine.precision=float32", "optim.lr=4e-3"]
    assert main(["train", *common, *training, "decode.depth=2"]) == 0
    return run / "train" / "distilled" / "best"


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


def test_what_later_stages_read_of_a_refresh_is_what_it_used(
    place: Path, trained: Path, in_folder: Path
) -> None:
    given = [text for text in command(place) if not text.startswith("optim.lr")]
    assert main([*given, f"refresh.drafter={trained}"]) == 0
    new = Path("outputs/refresh/train/distilled")
    settings = read_stage_config(new)
    assert settings["optim"]["lr"] == pytest.approx(2e-3) and settings["decode"]["depth"] == 2
    assert settings["train"]["refresh"]["init_from"] == str(trained)
    # a second refresh halves the rate again and drafts alike
    assert main([*given, f"refresh.drafter={new / 'best'}", "run.name=again"]) == 0
    again = read_stage_config(Path("outputs/again/train/distilled"))
    assert again["optim"]["lr"] == pytest.approx(1e-3) and again["decode"]["depth"] == 2
    found = drafters.answers_of(drafters.at(new))
    assert found is not None
    assert {one.resolve() for one in found} == {
        trained.parents[2] / "generate",
        Path("outputs/refresh/generate").resolve(),
    }


@pytest.mark.parametrize(("given", "depth"), [([], 6), (["decode.depth=2"], 2)])
def test_a_draft_that_is_asked_for_is_used(
    given: list[str], depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, seen = drafters.Found("old", "distilled", tmp_path), list[int]()
    write_draft(tmp_path, asdict(DecodeConfig(depth=6)))

    def stop(settings: object, old: object, decode: DecodeConfig, *rest: object) -> None:
        seen.append(decode.depth)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "answer", stop)
    settings = load_settings(STAGES["refresh"], [f"run.root={tmp_path}", *given])
    with pytest.raises(KeyboardInterrupt):
        stage.refresh(settings, old, tmp_path / "train", tmp_path / "seconds.json", {})
    assert seen == [depth]


def test_tau_is_measured_on_prompts_that_no_training_read(
    place: Path, trained: Path, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (place / "bench.jsonl").read_text() + (place / "train.jsonl").read_text()
    Path("rows.jsonl").write_text(rows)
    given = command(place, "data.path=rows.jsonl", "refresh.prompts=64", "train.max_steps=4")
    assert main(given) == 0
    counts = read_manifest(Path("outputs/refresh/generate"), "generate")["counts"]
    assert counts["done"] <= 56 and counts["skipped"] >= 8
    # the old drafter's own prompts, refused before the training
    write_prompts(Path("measured.jsonl"), 8, 500)
    given = command(place, f"refresh.drafter={trained}", "bench.prompts=measured.jsonl")
    assert main([*given, "run.name=leaking"]) == 2
    assert "of the 8 prompts of 'measured.jsonl' were trained on" in capsys.readouterr().err
    assert not Path("outputs/leaking/train").exists()


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


def test_the_seconds_of_a_part_are_those_of_all_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, path = iter((0.0, 10.0, 16.0, 20.0, 22.0, 30.0, 31.0)), tmp_path / "seconds.json"
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    with pytest.raises(UserError), parts.clock(path, "generate"):
        raise UserError("no such data")
    assert not path.exists(), "else the corrected command were refused"
    with pytest.raises(KeyboardInterrupt), parts.clock(path, "generate"):
        raise KeyboardInterrupt
    with parts.clock(path, "generate"):
        pass
    with pytest.raises(UserError), parts.clock(path, "train"):
        raise UserError("diverged")
    assert parts.read_seconds(path) == {"generate": 8.0, "train": 1.0}


def test_training_ends_where_tau_is_restored(place: Path, in_folder: Path) -> None:
    assert (
        main(
            command(
                place,
                "refresh.until=restored",
                "refresh.tau=1.01",
                "train.refresh.lora_rank=2",
                f"train.refresh.init_from={place / 'drafter'}",
            )
        )
        == 0
    )
    content = result()
    assert content["settings"]["lora_rank"] == 2  # type: ignore[index]
    head = read_manifest(Path("outputs/refresh/train/distilled"), "train")["head"]
    assert head["refresh"]["lora_rank"] == 2
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
        (["train.refresh.init_from=elsewhere"], "but a refresh starts from refresh.drafter"),
    ],
)
def test_what_cannot_be_refreshed_is_one_clear_error(
    place: Path, in_folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(command(place, *more)) == 2
    assert said in capsys.readouterr().err
