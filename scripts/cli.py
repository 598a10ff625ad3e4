"""The `headstart` command: `headstart <stage> [group=option] [key=value] ...`.

Nothing heavy is imported here, so that help and mistakes in a stage's name answer at once; a
stage's own module is imported when it runs. A `UserError` is printed as one message and ends with
status 2; HEADSTART_DEBUG=1 shows where it came from.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from heads.api.errors import UserError, suggest
from scripts.config.stages import STAGES
from scripts.run.signals import leave_in_order

DEBUG_VARIABLE = "HEADSTART_DEBUG"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Of a full disk; libraries that wrap such an error (safetensors, pyarrow) spell it in words."""
USAGE = """\
Headstart trains drafters for speculative decoding and measures what each one is worth.

usage: headstart <stage> [group=option] [key=value] ...
       headstart <stage> --help          groups, options and keys of a stage
       headstart <stage> --show [...]    the composed configuration, without running it
       headstart train --plan [...]      what a training will take: memory, disk, hours
       headstart train --complete [...]  whether train (or generate) is complete: status 0, else 3
       headstart <stage> -m key=a,b      once for every combination of the listed values
       headstart --version

stages:
{stages}

First steps:  headstart loop experiment=demo     the whole loop on the embedded target
              headstart chat experiment=demo     talk to the result
Errors are one message; {debug}=1 adds the traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0, 1 failure, 2 mistake, 3 incomplete, 130 stopped."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return dispatch(given)
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has gone. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        complaint = str(error) if isinstance(error, UserError) else disk_complaint(error)
        if complaint is None or os.environ.get(DEBUG_VARIABLE):
            raise
        rank = os.environ.get("RANK", "0")
        speaker = "headstart" if rank == "0" else f"headstart (process {rank})"
        print(f"{speaker}: {complaint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        line = "interrupted; the same command continues where this one stopped."
        print(f"\nheadstart: {line}", file=sys.stderr)
        return 130


def dispatch(given: list[str]) -> int:
    """Find stage and flags and hand over; raises `UserError` for an unknown stage."""
    if not given or given[0] in ("--help", "-h", "help"):
        width = max(map(len, STAGES))
        stages = [f"  {stage.name:<{width}}  {stage.summary}" for stage in STAGES.values()]
        print(USAGE.format(stages="\n".join(stages), debug=DEBUG_VARIABLE))
        return 0
    if given[0] in ("--version", "-V"):
        print(f"headstart {version()}")
        return 0
    name, rest = given[0], given[1:]
    if name not in STAGES:
        raise UserError(f"there is no stage '{name}'.{suggest(name, STAGES)} See: headstart --help")
    flags, overrides, file = split_flags(rest)
    if "--plan" in flags:
        if name not in ("train", "plan"):
            raise UserError(f"--plan belongs to `headstart train`; 'headstart {name}' has no plan.")
        name = "plan"
    stage = STAGES[name]
    if "--complete" in flags and not stage.recorded:
        able = " and ".join(other.name for other in STAGES.values() if other.recorded)
        raise UserError(f"--complete belongs to {able}; 'headstart {name}' cannot be asked.")
    if "--help" in flags:
        helper = importlib.import_module("scripts.config.help")
        print(helper.stage_help(stage, overrides))
        return 0
    works = stage.continued and not flags & {"--show", "--complete"}
    with leave_in_order() if works else nullcontext():
        runner = importlib.import_module("scripts.run.runner")
        status: int = runner.run_stage(
            stage,
            stage.expand_short(overrides),
            multirun="--multirun" in flags,
            show="--show" in flags,
            ask="--complete" in flags,
            file=file,
        )
    return status


def split_flags(rest: list[str]) -> tuple[set[str], list[str], str]:
    """Separate flags, overrides and the file of `--config`; raises `UserError` for an unknown flag.
    `--config <file>` is how a loop starts a stage in another process: all settings stand in the
    file."""
    spellings = {name: name for name in ("--help", "--multirun", "--show", "--plan", "--complete")}
    spellings |= {"-h": "--help", "-m": "--multirun", "--cfg": "--show"}
    flags, overrides, file = set(), [], ""
    items = iter(rest)
    for item in items:
        if item == "--config":
            file = next(items, "")
            if not file:
                raise UserError("--config is to be followed by the file with the settings.")
        elif item in spellings:
            flags.add(spellings[item])
        elif item.startswith("-"):
            raise UserError(
                f"there is no flag '{item}'.{suggest(item, spellings)} Settings are given without "
                "dashes, as key=value."
            )
        else:
            overrides.append(item)
    if file and (overrides or "--multirun" in flags):
        raise UserError("--config holds all settings of a stage: give no others beside it.")
    return flags, overrides, file


def disk_complaint(error: BaseException | None) -> str | None:
    """The message for a full disk, also where a library wrapped the error; else None."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in FULL or any(os.strerror(full) in str(error) for full in FULL):
            name = getattr(error, "filename", None)
            where = f" while writing '{name}'" if name else ""
            return (
                f"the disk is full{where} ({error}). What was complete is kept. Free some space, "
                "or give another run.root; the same command then continues where this one stopped."
            )
        error = error.__cause__ or error.__context__
    return None


def version() -> str:
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version("headstart"))
    except metadata.PackageNotFoundError:
        return "(not installed; run `make install`)"


if __name__ == "__main__":
    sys.exit(main())
