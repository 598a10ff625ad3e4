"""From prompts to a measured drafter in Python, on a micro target."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headstart
from heads.api.errors import UserError
from headstart.measuring import load_target
from headstart.training import compose
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import read_config
from tests.inference.tokenizers import save_micro_target

SMALL: dict[str, Any] = {
    "engine": "torch",
    "optim": {"lr": 0.02},
    "train": {
        "max_steps": 4,
        "global_batch": 2,
        "micro_batch": 1,
        "sequence_length": 96,
        "eval_every": 2,
        "eval_prompts": 3,
        "eval_tokens": 8,
        "tracker": {"wandb": "disabled"},
    },
    "decode": {"depth": 2, "max_new_tokens": 16},
    "sampling": {"temperature": 0.0, "max_new_tokens": 16, "batch_size": 4},
    "overrides": ["data.benches=[]", "target.dtype=float32"],
}


def prompts(folder: Path, name: str, count: int) -> Path:
    rows = [
        {"id": f"{name}{n}", "prompt": f"Write {name} {n} and {n * n % 17}."} for n in range(count)
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, headstart.Trained, dict[str, Any]]:
    """The target, a training, and the arguments that it was made with."""
    folder = tmp_path_factory.mktemp("made")
    target = save_micro_target(folder / "target")
    valid = prompts(folder, "valid", 6)
    given = {
        "target": target,
        "data": prompts(folder, "train", 16),
        "run": "mine",
        "root": folder / "runs",
        **SMALL,
        "train": {**SMALL["train"], "prompts": [valid]},
    }
    return target, headstart.train("medusa", **given), given


def test_the_prompts_that_tau_is_measured_on_are_held_out_of_the_data(made: Any) -> None:
    _, trained, given = made
    generated = read_config(trained.folder.parents[1] / "generate")
    assert generated["data"]["held_out"] == [str(path) for path in given["train"]["prompts"]]


def test_a_training_tells_what_came_out(made: Any) -> None:
    _, trained, given = made
    assert (trained.kind, trained.steps) == ("medusa", 4)
    assert trained.folder == given["root"] / "mine" / "train" / "medusa"
    assert trained.checkpoint == trained.folder / "best"
    low, high = trained.tau_ci95
    assert low <= trained.tau <= high


def test_the_same_call_skips_and_another_setting_is_refused(
    made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, trained, given = made
    assert headstart.train("medusa", **given) == trained
    assert capsys.readouterr().out.count("is complete; nothing has changed") == 2
    with pytest.raises(headstart.UserError, match=r"optim\.lr was 0\.02, is 0\.01"):
        headstart.train("medusa", **{**given, "optim": {"lr": 0.01}})


def test_what_is_misspelt_is_named_before_anything_runs(made: Any, in_folder: Path) -> None:
    for wrong, message in (
        ({"optm": {"lr": 1}}, "Did you mean 'optim'"),
        ({"optim": {"lrr": 1}}, r"optim\.lrr: there is no such key\. Did you mean 'lr'"),
        ({"engine": "tosch"}, "Did you mean 'torch'"),
    ):
        with pytest.raises(headstart.UserError, match=message):
            headstart.train("medusa", **wrong)
    with pytest.raises(headstart.UserError, match="Did you mean 'medusa'"):
        headstart.train("medussa")
    assert not list(in_folder.iterdir())


def test_drafters_are_measured_on_given_prompts(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, trained, _ = made
    # three prompts on a busy machine: no statement on speed
    monkeypatch.setattr("inference.measure.metrics.TIMING_NOISE", 100.0)
    engine = headstart.Engine.load(target, trained.checkpoint)
    texts = [f"Write {n} times {n}." for n in range(4)]
    report = headstart.measure(
        engine, [trained.checkpoint, "ngram"], texts, out=tmp_path / "out", max_new_tokens=12
    )
    assert [(one.draft.name, one.kind) for one in report.drafters] == [
        ("medusa", "medusa"),
        ("ngram", "ngram"),
    ]
    assert report.drafters[0].draft.depth == 2  # the draft that it was trained for
    assert report.settings.prompts == 3 and report.settings.max_new_tokens == 12
    assert all(one.lossless.mismatches == 0 for one in report.drafters)
    assert headstart.read_report(tmp_path / "out").drafters[0].tau == report.drafters[0].tau

    named = headstart.measure(
        engine.target,
        {"deep": trained.checkpoint},
        texts,
        depth=1,
        prompts_per_domain=2,
        max_new_tokens=8,
    )
    assert [(one.draft.name, one.draft.depth) for one in named.drafters] == [("deep", 1)]
    assert named.settings.prompts == 2


def test_a_target_given_as_text_is_loaded_as_by_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16 on a GPU, for which a large target's memory is planned."""
    asked = []

    def load(config: TargetConfig) -> None:
        asked.append(config)
        raise UserError("asked")

    monkeypatch.setattr(TargetModel, "load", load)
    calls: list[Callable[[str], object]] = [headstart.Engine.load, load_target]
    for call in calls:
        with pytest.raises(UserError, match="asked"):
            call("some/model")
    given = ["target=local", "target.path=some/model"]
    assert asked == 2 * [load_settings(STAGES["chat"], given).target]


def test_what_cannot_be_measured_is_refused(made: Any) -> None:
    target, trained, _ = made
    engine = headstart.Engine.load(target)
    for arguments, settings, message in (
        ((trained.checkpoint, ["a", "b"]), {"max_tokens": 3}, "Did you mean 'max_new_tokens'"),
        ((trained.checkpoint, "why?"), {}, "there is no file or folder 'why\\?'.*as a list"),
        ((trained.checkpoint, ["one"]), {}, "at least two prompts"),
        (([trained.checkpoint] * 2, ["a", "b"]), {}, "two drafters are called 'medusa'"),
        (("nowhere", ["a", "b"]), {}, "there is no checkpoint folder 'nowhere'"),
        ((trained.checkpoint, ["a", "b"]), {"server": "http://h"}, "'server' is no setting here"),
    ):
        with pytest.raises(headstart.UserError, match=message):
            headstart.measure(engine, *arguments, **settings)


def test_a_single_prompt_and_a_short_repr(made: Any) -> None:
    target, trained, _ = made
    engine = headstart.Engine.load(target, trained.checkpoint)
    (answer,) = engine.generate("Write one.", max_new_tokens=8)
    assert [answer.text] == [a.text for a in engine.generate(["Write one."], max_new_tokens=8)]
    same = headstart.Engine.load(target, trained.folder)  # a training's folder: its best checkpoint
    assert same.generate("Write one.", max_new_tokens=8)[0].tau == answer.tau
    talk = [{"role": "user", "content": "Write one."}]
    assert engine.generate(talk, max_new_tokens=8)[0].text == answer.text
    tokens = list(answer.completion.request.tokens)
    assert engine.generate(tokens, max_new_tokens=8)[0].text == answer.text
    shown = repr(answer)
    assert shown.startswith("Generation('") and len(shown) < 160
    assert shown.endswith(
        f"tau={answer.tau:.2f}, 8 tokens, {len(answer.completion.passes)} passes, length)"
    )
    with pytest.raises(headstart.UserError, match=r"max_tokens.*Did you mean 'max_new_tokens'"):
        engine.generate("Write one.", max_tokens=8)


@pytest.mark.slow
def test_the_example_of_the_page_runs(
    repository: Path, in_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("inference.measure.metrics.TIMING_NOISE", 100.0)
    page = (repository / "docs" / "api.md").read_text(encoding="utf-8")
    first, _ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(first, "api.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Generation('" in printed and "\nngram 1." in printed


def test_the_call_for_a_model_of_ones_own_composes(repository: Path) -> None:
    """As printed on the page."""
    page = (repository / "docs" / "api.md").read_text(encoding="utf-8")
    _, second = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (assignment,) = ast.parse(second).body
    assert isinstance(assignment, ast.Assign) and isinstance(assignment.value, ast.Call)
    call = assignment.value
    given = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    own = {key: given.pop(key) for key in ("target", "data", "run", "overrides")}
    head = ast.literal_eval(call.args[0])
    found = compose(
        head, own["target"], own["data"], None, own["run"], None, own["overrides"], given
    )
    assert (found.head.kind, found.target.path) == ("eagle3", "Qwen/Qwen3-8B")
    assert (found.train.max_steps, found.sampling.temperature) == (2000, 0.7)
    assert found.run.directory == Path("outputs/qwen3-8b")


def test_keys_of_the_target_and_the_data_are_given_as_mappings() -> None:
    found = compose("medusa", {"dtype": "float32"}, {"limit": 10}, None, None, None, (), {})
    plain = compose("medusa", None, None, None, None, None, (), {})
    assert (found.target.dtype, found.data.limit) == ("float32", 10)
    assert (found.target.path, found.data.path) == (plain.target.path, plain.data.path)


def test_a_recipe_keeps_its_run_unless_another_is_named() -> None:
    recipe = {"experiment": "demo"}
    for run, expected in ((None, "demo"), ("mine", "mine")):
        assert compose("medusa", None, None, None, run, None, (), recipe).run.name == expected
