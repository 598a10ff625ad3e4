"""A scheduler's signal outside of the loops that save: status 0 wherever it comes, and the same
command continues to the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from scripts.cli import main
from scripts.run.signals import leave_in_order
from tests import forked
from tests.train.launch import environment
from tests.train.micro_run import prepare

LINE = "nothing is lost; the same command continues where this one stopped."
TRAIN = [
    "scripts.run.runner:load_settings",
    "train.setup:load_target",
    "train.data.packed_file:write_packed",
    "train.setup:make_engine",
    "train.setup:Run.compare_paths",
    "train.setup:summarise",
    "train.setup:write_manifest",
]
"""Places before, and the last two after, the loop."""
GENERATE = [
    "train.generate.run:load_target",
    "train.generate.run:ingest",
    "train.data.answers:_write_failures",
    "train.generate.run:write_manifest",
]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("micro"))
    rows = [
        {"id": str(n), "domain": "d", "prompt": f"Write function number {n}."} for n in range(6)
    ]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return folder


def train(micro: Path, root: Path, name: str) -> list[str]:
    """The command line of a short training."""
    return [
        "train",
        "head=medusa",
        "head.num_heads=3",
        "engine=torch",
        "engine.precision=float32",
        f"target.path={micro / 'target'}",
        "target.device=cpu",
        f"run.root={root}",
        f"run.name={name}",
        "run.threads=1",
        f"run.answers={micro / 'answers'}",
        f"train.prompts=[{micro / 'prompts.jsonl'}]",
        "train.max_steps=3",
        "train.global_batch=4",
        "train.micro_batch=2",
        "train.sequence_length=64",
        "train.eval_every=3",
        "train.eval_prompts=4",
        "train.eval_tokens=8",
        "decode.depth=3",
        "train.tracker.wandb=disabled",
    ]


def generate(micro: Path, root: Path, name: str) -> list[str]:
    """The command line of a short generate."""
    return [
        "generate",
        f"target.path={micro / 'target'}",
        "target.device=cpu",
        "data=jsonl",
        f"data.path={micro / 'rows.jsonl'}",
        "data.reserve.validation=0",
        "data.reserve.bench=0",
        f"run.root={root}",
        f"run.name={name}",
        "run.threads=1",
        "sampling.max_new_tokens=4",
        "generate.shard_rows=2",
    ]


def worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests/scripts/leaving_worker.py."""
    return forked.run("tests.scripts.leaving_worker", *arguments, env=environment())


@pytest.mark.slow
def test_a_signal_anywhere_outside_of_the_loops_ends_with_status_0_and_loses_nothing(
    micro: Path, tmp_path: Path
) -> None:
    jobs = [
        [command, place, ("SIGTERM", "SIGUSR1")[number % 2]]
        for command, places in (
            (generate(micro, tmp_path, "struck"), GENERATE),
            (train(micro, tmp_path, "struck"), TRAIN),
        )
        for number, place in enumerate([*places, None])
    ]
    calm = [[make(micro, tmp_path, "calm"), None, ""] for make in (generate, train)]
    done = worker("signals", json.dumps([*jobs, *calm]))
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * (len(jobs) + 2), done.stderr[-4000:]
    assert done.stderr.count(LINE) == len(TRAIN) + len(GENERATE), done.stderr[-4000:]
    for file in ("generate/manifest.json", "train/medusa/run.json"):
        assert (tmp_path / "struck" / file).is_file()
    shards = [
        json.loads((tmp_path / name / "generate/manifest.json").read_text())["shards"]
        for name in ("struck", "calm")
    ]
    assert shards[0] == shards[1]
    weights = [
        (tmp_path / name / "train/medusa/best/model.safetensors").read_bytes()
        for name in ("struck", "calm")
    ]
    assert weights[0] == weights[1]
    assert not list((tmp_path / "struck").rglob("*.partial*"))


@pytest.mark.slow
def test_a_process_that_waits_for_another_one_leaves_too(micro: Path, tmp_path: Path) -> None:
    """The second process waits in a collective, where Python calls no handlers, for a first one
    that does not come."""
    command = train(micro, tmp_path, "two")
    done = worker("ranks", str(tmp_path), json.dumps(command), "train.setup:Run.compare_paths")
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0], done.stderr[-4000:]
    assert done.stderr.count(LINE) == 1  # the main process speaks
    assert not (tmp_path / "two/train/medusa/checkpoints").exists()


def test_handlers_are_put_back_and_children_die_of_their_own_signals() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with leave_in_order():
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


FINALISED = """
import os, signal, time
from scripts.run.signals import leave_in_order

class Engine:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass

with leave_in_order():
    engine = Engine()
    del engine
    time.sleep(4)
    print("went on")
"""


def test_a_signal_while_an_object_is_finalised_is_not_lost() -> None:
    """Python would drop an exception there, and show it."""
    ended = forked.run("-c", FINALISED, timeout=60)
    assert ended.returncode == 0 and "went on" not in ended.stdout
    assert "Traceback" not in ended.stderr and "nothing is lost" in ended.stderr


def test_a_stage_can_be_asked_whether_it_is_complete(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["train", "head=medusa", "run.name=r", "--complete"]
    assert main(asked) == 3
    assert "outputs/r/train/medusa is not complete" in capsys.readouterr().out
    record = in_folder / "outputs/r/train/medusa/run.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"format": 1, "state": "running"}))
    assert main(asked) == 3
    record.write_text(json.dumps({"format": 1, "state": "complete"}))
    assert main(asked) == 0
    assert main(["generate", "run.name=r", "--complete"]) == 3
    assert main(["train", "-m", "head=medusa,eagle3", "run.name=r", "--complete"]) == 3
    assert main(["measure", "--complete"]) == 2
    assert "--complete belongs to generate and train" in capsys.readouterr().err
