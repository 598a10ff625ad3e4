"""The training that settings describe: how trackers tell it apart from others, and which files it
was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.manifest import MANIFEST_FILE
from scripts.config.compose import parse
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.folder import StageFolder, open_folder
from scripts.run.sweep import expand
from scripts.stages.train import inputs_of, is_complete, job_of
from train.tracking.tracker import TrackerConfig


def trackers(*overrides: str) -> list[TrackerConfig]:
    """Of every job of a command with `-m`."""
    jobs = expand(STAGES["train"], parse(["run.name=qwen", *overrides]))
    return [job_of(load_settings(STAGES["train"], job)).config.tracker for job in jobs]


def test_the_jobs_of_a_sweep_have_names_of_their_own_in_one_group() -> None:
    found = trackers("head=medusa,eagle3", "optim.lr=1e-3,1e-4", "train.seed=1,2")
    assert len({item.name for item in found}) == 8
    assert found[0].name == "qwen/medusa-lr=0.001-seed=1"
    assert {(item.group, item.job_type) for item in found} == {("qwen", "train")}


def test_names_that_are_given_stay() -> None:
    given = ["train.tracker.name=mine", "train.tracker.group=night"]
    for item in trackers("head=medusa,eagle3", *given):
        assert (item.name, item.group) == ("mine", "night")


@pytest.mark.parametrize(
    "changed", ["valid.jsonl", "start/model.safetensors", "small/part-2.safetensors"]
)
def test_a_training_is_made_from_its_prompts_and_the_weights_that_it_starts_from(
    in_folder: Path, changed: str
) -> None:
    answers = Path("outputs/r/generate") / MANIFEST_FILE
    weights = ("start/model", "small/part-1", "small/part-2", "former/model")
    given_files = [Path("valid.jsonl"), *(Path(f"{name}.safetensors") for name in weights)]
    for file in (answers, *given_files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("as it was")
    given = ["train.prompts=[valid.jsonl]", "train.refresh.init_from=start", "run.name=r"]
    given += ["target.path=somewhere", "head=distilled", "head.from_model=small"]
    given += ["head.token_share=0.5", "head.reference=former"]
    settings = load_settings(STAGES["train"], parse(given))
    job = job_of(settings)

    def opened(inputs: list[Path]) -> StageFolder:
        return open_folder(settings, job.out, inputs)

    folder = opened(inputs_of(settings, job))
    (job.out / "result").write_text("something")
    folder.finish()
    assert opened(inputs_of(settings, job)).complete
    assert is_complete(settings)
    other = [*given, "optim.lr=0.5"]
    assert not is_complete(load_settings(STAGES["train"], other))
    # what is accepted leaves a complete folder as it is
    assert is_complete(load_settings(STAGES["train"], [*other, "run.accept_changes=true"]))
    Path(changed).write_text("other")
    assert not is_complete(settings)
    with pytest.raises(UserError, match=rf"{Path(changed).name} has changed"):
        opened(inputs_of(settings, job))
    # what an earlier version recorded
    folder.record.inputs = {
        name: one for name, one in folder.record.inputs.items() if name.endswith(MANIFEST_FILE)
    }
    folder.record.all_inputs = False
    folder.record.write(job.out)
    assert opened(inputs_of(settings, job)).complete
    again = settings.put(run=replace(settings.run, overwrite=True))
    assert len(inputs_of(again, job)) == 6
