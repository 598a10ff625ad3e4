"""The launchers, run for real: one process, torchrun, DeepSpeed's launcher with a hostfile, and
SLURM's script under an srun that starts its tasks as processes of this machine. All come to the
same drafter.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loopback import free_port
from tests.train.launch import REPOSITORY, environment
from train.tracking.tracker import LOG_FILE, read_log

LAUNCH = REPOSITORY / "scripts" / "launch"
PROGRAMS = Path(sys.executable).parent  # of the environment that runs the tests
SRUN = """#!/usr/bin/env bash
# Starts SLURM_NTASKS tasks, or one where --ntasks=1 says so; fails the first launch when BREAK_ONCE names a file that is not there.
# Pre-empts as many clusters do, once the file TERM_WHEN is there: the tasks get SIGTERM, the batch script does not.
tasks="$SLURM_NTASKS"
while [[ "$1" == --* ]]; do
  [[ "$1" == --ntasks=1 ]] && tasks=1
  shift
done
if [[ -n "${BREAK_ONCE:-}" && ! -f "$BREAK_ONCE" ]]; then
  touch "$BREAK_ONCE"
  exit 137
fi
pids=()
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=$tasks "$@" &
  pids+=($!)
done
if [[ -n "${TERM_WHEN:-}" ]]; then
  until [[ -e "$TERM_WHEN" ]]; do sleep 0.1; done
  kill -TERM "${pids[@]}"
fi
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
SCONTROL = "#!/usr/bin/env bash\necho localhost\n"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with `srun` and `scontrol`."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def overrides(micro: Path, root: Path, name: str) -> list[str]:
    """The command line of a short training."""
    return [
        "head=medusa",
        "head.num_heads=3",
        f"target.path={micro / 'target'}",
        "target.device=cpu",
        "engine.precision=float32",
        f"run.root={root}",
        f"run.name={name}",
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


def start(command: list[str], **variables: str) -> str:
    """Run a command line with the environment's programs first in PATH; fails the test unless it
    ends well."""
    path = os.pathsep.join([variables.pop("TOOLS", ""), str(PROGRAMS), os.environ["PATH"]])
    done = subprocess.run(
        command,
        env={
            **environment(),
            "PATH": path,
            "DS_ACCELERATOR": "cpu",
            "STAGES": "train",
            **variables,
        },
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def curve(root: Path, name: str) -> list[dict[str, float]]:
    lines = read_log(root / name / "train" / "medusa" / LOG_FILE)
    return [
        {key: line[key] for key in ("step", "loss", "grad_norm", "tau") if key in line}
        for line in lines
    ]


@pytest.fixture(scope="module")
def alone(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """`headstart train` in one process."""
    root = tmp_path_factory.mktemp("alone")
    start(["headstart", "train", *overrides(micro, root, "one")])
    return curve(root, "one")


def same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for mine, whole in zip(found, expected, strict=True):
        assert mine == pytest.approx(whole, rel=3e-5)


@pytest.mark.slow
def test_torchrun(micro: Path, tmp_path: Path, alone: list[dict[str, float]]) -> None:
    start([str(LAUNCH / "torchrun.sh"), *overrides(micro, tmp_path, "two")], GPUS="2")
    same(curve(tmp_path, "two"), alone)


@pytest.mark.slow
def test_deepspeed_with_a_hostfile(
    micro: Path, tmp_path: Path, alone: list[dict[str, float]]
) -> None:
    """One machine: more than one needs ssh and pdsh, which tests do not have."""
    (tmp_path / "hostfile").write_text("localhost slots=2\n", encoding="utf-8")
    command = [str(LAUNCH / "deepspeed.sh"), *overrides(micro, tmp_path, "two")]
    start(command, HOSTFILE=str(tmp_path / "hostfile"), PORT=str(free_port()))
    same(curve(tmp_path, "two"), alone)


@pytest.mark.slow
def test_slurm(micro: Path, tmp_path: Path, tools: Path, alone: list[dict[str, float]]) -> None:
    """The first launch loses its processes, the second one trains."""
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_NTASKS": "2",
        "VENV": str(PROGRAMS.parent),
        "TOOLS": str(tools),
        "BREAK_ONCE": str(tmp_path / "broken"),
    }
    output = start([str(LAUNCH / "train.slurm"), *overrides(micro, tmp_path, "two")], **job)
    assert "starting again from the newest state (1 of 2)" in output
    same(curve(tmp_path, "two"), alone)


@pytest.mark.slow
def test_slurm_begins_no_training_on_answers_that_are_not_complete(
    micro: Path, tmp_path: Path, tools: Path
) -> None:
    """The signal reaches generate alone, which ends with status 0."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"id": "{n}", "prompt": "Write function number {n}."}}\n' for n in range(2000)),
        encoding="utf-8",
    )
    out = tmp_path / "r"
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "1",
        "VENV": str(PROGRAMS.parent),
        "TOOLS": str(tools),
        "STAGES": "generate train",
        "TERM_WHEN": str(out / "generate" / "parts"),
    }
    given = [
        f"target.path={micro / 'target'}",
        "target.device=cpu",
        "data=jsonl",
        f"data.path={rows}",
        f"run.root={tmp_path}",
        "run.name=r",
        "generate.flush_rows=2",
        "sampling.batch_size=2",
        "sampling.max_new_tokens=32",
    ]
    output = start([str(LAUNCH / "train.slurm"), *given], **job)
    assert (
        "'generate' was interrupted and has saved; submit the job again to continue with it"
        in output
    )
    assert "rows of this run are kept" in output.replace("\n", " ")
    assert not (out / "train").exists()


def test_slurm_tells_the_tasks_how_often_they_were_started_again(
    tmp_path: Path, tools: Path
) -> None:
    """`run.overwrite` must not delete what the job has begun."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f'export PATH="{tools}:$PATH"\n', encoding="utf-8")
    stage = '#!/usr/bin/env bash\necho "restarts: ${HEADSTART_RESTARTS:-none}"\n'
    stage += '[[ "${HEADSTART_RESTARTS:-1}" == 1 ]]\n'  # the first start fails
    (tools / "headstart").write_text(stage, encoding="utf-8")
    (tools / "headstart").chmod(0o755)
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "1",
        "VENV": str(tmp_path),
        "TOOLS": str(tools),
    }
    said = start([str(LAUNCH / "train.slurm"), "run.overwrite=true"], **job).splitlines()
    found = [line for line in said if line.startswith("restarts: ")]
    assert found == ["restarts: 0", "restarts: 1", "restarts: none"]  # the last: --complete


@pytest.mark.parametrize("script", ["train.slurm", "sweep.slurm"])
def test_slurm_gives_every_task_the_cores_of_the_job(
    tmp_path: Path, tools: Path, script: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f'export PATH="{tools}:$PATH"\n', encoding="utf-8")
    stage = '#!/usr/bin/env bash\necho "cores: $SRUN_CPUS_PER_TASK"\n'
    (tools / "headstart").write_text(stage, encoding="utf-8")
    (tools / "headstart").chmod(0o755)
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_ARRAY_TASK_ID": "0",
        "VENV": str(tmp_path),
        "TOOLS": str(tools),
    }
    said = start([str(LAUNCH / script), "run.name=r"], **job)
    assert said.count("cores: 8") >= 2


def test_slurm_begins_nothing_when_the_time_is_over(tmp_path: Path, tools: Path) -> None:
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "VENV": str(PROGRAMS.parent),
        "TOOLS": str(tools),
        "SLURM_JOB_END_TIME": "1000",
    }
    assert "submit it again to continue with 'train'" in start([str(LAUNCH / "train.slurm")], **job)


def test_deepspeed_without_a_hostfile_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(LAUNCH / "deepspeed.sh")],
        env={**os.environ, "HOSTFILE": str(tmp_path / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "does not exist" in done.stderr


@pytest.mark.slow
def test_a_setting_that_one_stage_does_not_read_is_refused_before_the_first(tmp_path: Path) -> None:
    given = ["data.limit=3", f"run.root={tmp_path}"]
    done = subprocess.run(
        [str(LAUNCH / "torchrun.sh"), *given],
        env={**environment(), "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "GPUS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "stage 'train' does not read 'data'" in done.stderr


def test_the_scripts_can_be_run() -> None:
    for script in LAUNCH.iterdir():
        assert script.stat().st_mode & stat.S_IXUSR, script
