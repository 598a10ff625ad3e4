"""The `headstart` command: `headstart <stage> [group=option] [key=value] ...`.

This module imports nothing heavy, so that help and errors in a stage's name appear at once; the
module of a stage is imported when the stage runs. An error that the user can correct is printed as
one message and ends with status 2. A fault of Headstart is reported in three lines, its traceback
goes to a file, and the status is 4 (scripts/run/failures.py). HEADSTART_DEBUG=1 shows the traceback
of either.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from heads.api.errors import UserError, suggest
from scripts.config.flags import Flags, read_flags
from scripts.config.stages import EXTRA_VARIABLE, STAGES, Stage
from scripts.run import failures
from scripts.run.signals import continued_by, leave_in_order

DEBUG_VARIABLE = "HEADSTART_DEBUG"
SEARCH_PATH = "hydra.searchpath="
USAGE = """\
Headstart trains drafters for speculative decoding and measures what each one is worth.

usage: headstart <stage> [group=option] [key=value] ...
       headstart <stage> --help [group]  options and keys; --help all: every key
       headstart <stage> --show [...]    all settings, without running; --show=changed: without
                                         defaults
       headstart train --plan [...]      what a training will take: memory, disk, hours
       headstart train --complete [...]  whether train (or generate) is complete: status 0, else 3
       headstart <stage> -m key=a,b      once for every combination of the listed values; with
                                         hydra/launcher= in parallel, with hydra/sweeper=optuna
                                         searching
       headstart <stage> --cfg job       and --info, --config-dir <folder>, ~group: as in Hydra
       headstart -sc install=bash        completion for bash, zsh or fish: eval "$(...)"
       headstart --version

stages:
{stages}

First steps:  headstart loop experiment=demo     the whole loop on the embedded target
              headstart chat experiment=demo     talk to the result

{extra}=<folder>:<folder> adds folders with options and recipes of your own.
Errors are one message; {debug}=1 adds the traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0; 1 if the command found what it looks for (an
    alarm, a mismatch); 2 for a mistake of the user; 3 if incomplete; 4 for a fault of Headstart;
    130 if stopped; 141 if nobody reads its output any more (the status that shells give other
    programs)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        require_text(given)
        return dispatch(given)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and (gone := unread_outputs()):
            for output in gone:  # otherwise Python would complain when it flushes
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            return 141
        if os.environ.get(DEBUG_VARIABLE):
            raise
        complaint = failures.complaint(error)
        said = failures.report(error, given, version()) if complaint is None else complaint
        rank = os.environ.get("RANK", "0")
        speaker = "headstart" if rank in ("", "0") else f"headstart (process {rank})"
        print(f"{speaker}: {said}", file=sys.stderr)
        tell_torchrun(said)
        return 4 if complaint is None else 2
    except KeyboardInterrupt:
        line = f"interrupted; {continued_by(given)} continues where this one stopped."
        print(f"\nheadstart: {line}", file=sys.stderr)
        return 130


def unread_outputs() -> list[int]:
    """The outputs, of standard output and standard error, that are pipes without a reader (`|
    head`)."""
    outputs = select.poll()
    for output in (1, 2):
        outputs.register(output, 0)
    return [
        output for output, event in outputs.poll(0) if event & (select.POLLERR | select.POLLHUP)
    ]


def tell_torchrun(complaint: str) -> None:
    """Leave the message where torchrun looks for it. Its failure report, some twenty lines at the
    end, then shows the message in place of a hint about tracebacks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        more = {"py_callstack": complaint, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            content = {"message": {"message": complaint, "extraInfo": more}}
            Path(file).write_text(json.dumps(content), encoding="utf-8")


def dispatch(given: list[str]) -> int:
    """Find the stage and the flags and run the stage; raises `UserError` for an unknown stage."""
    if given and given[0] == "help" and given[1:]:
        given = [given[1], "--help", *given[2:]]
    if not given or given[0] in ("--help", "-h", "help"):
        print_usage()
    elif given[0] in ("--version", "-V", "-v", "version"):
        print(f"headstart {version()}")
    elif given[0] in ("-sc", "--shell-completion"):
        importlib.import_module("scripts.config.completion").run(given[1:])
    elif given[0] not in STAGES:
        near = suggest(given[0], STAGES)
        raise UserError(f"there is no stage '{given[0]}'.{near} See: headstart --help")
    else:
        flags = read_flags(given[1:], (*STAGES[given[0]].groups, "all"))
        return run_stage(stage_of(given[0], flags), flags)
    return 0


def print_usage() -> None:
    """Print what `headstart --help` says."""
    width = max(map(len, STAGES))
    stages = [f"  {stage.name:<{width}}  {stage.summary}" for stage in STAGES.values()]
    names = {"debug": DEBUG_VARIABLE, "extra": EXTRA_VARIABLE}
    print(USAGE.format(stages="\n".join(stages), **names))


def stage_of(name: str, flags: Flags) -> Stage:
    """The named stage; raises `UserError` for flags that it does not have."""
    if "--plan" in flags:
        if name not in ("train", "plan"):
            raise UserError(f"--plan belongs to `headstart train`; 'headstart {name}' has no plan.")
        name = "plan"
    if "--complete" in flags and not STAGES[name].recorded:
        able = " and ".join(other.name for other in STAGES.values() if other.recorded)
        raise UserError(f"--complete belongs to {able}; 'headstart {name}' cannot be asked.")
    return STAGES[name]


def run_stage(stage: Stage, flags: Flags) -> int:
    """Run a stage, or print what the flags request; returns the exit status."""
    for folder in filter(None, flags.get("--config-dir").split(os.pathsep)):
        add_folder(folder)
    for item in flags.overrides:
        if item.startswith(SEARCH_PATH):
            for folder in item.removeprefix(SEARCH_PATH).strip("[]").split(","):
                add_folder(folder.strip().removeprefix("file://"), "hydra.searchpath")
    given = [item for item in flags.overrides if not item.startswith(SEARCH_PATH)]
    overrides = stage.expand_short(given)
    if "--help" in flags:
        helper = importlib.import_module("scripts.config.help")
        print(helper.stage_help(stage, overrides, flags.get("--help")))
        return 0
    if flags.values.keys() & {"--cfg", "--info", "--hydra-help"}:
        return show_as_hydra(stage, flags, overrides)
    shows = bool(flags.values.keys() & {"--show", "--complete"})
    if stage.name in ("chat", "serve") and not shows and sys.stderr.isatty():
        print("loading the target and the drafter ...", file=sys.stderr, flush=True)
    with leave_in_order() if stage.continued and not shows else nullcontext():
        runner = importlib.import_module("scripts.run.runner")
        status: int = runner.run_stage(
            stage,
            overrides,
            multirun="--multirun" in flags,
            show=flags.get("--show"),
            ask="--complete" in flags,
            file=flags.get("--config"),
        )
    return status


def show_as_hydra(stage: Stage, flags: Flags, overrides: list[str]) -> int:
    """Print what --cfg, --info or --hydra-help request."""
    view = importlib.import_module("scripts.config.hydra_view")
    parsed = importlib.import_module("scripts.config.compose").parse(overrides)
    if "--cfg" in flags:
        package, resolve = flags.get("--package"), "--resolve" in flags
        view.print_config(stage, parsed, flags.get("--cfg"), package, resolve)
    elif "--info" in flags:
        view.print_info(stage, parsed, flags.get("--info"))
    else:
        view.print_help(stage, parsed)
    return 0


def add_folder(folder: str, name: str = "--config-dir") -> None:
    """Add a folder with options, for this process and those that it starts."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise UserError(f"{name}: '{folder}' is not a folder.")
    more = os.environ.get(EXTRA_VARIABLE, "")
    os.environ[EXTRA_VARIABLE] = os.pathsep.join([str(path), *filter(None, [more])])


def require_text(given: Sequence[str]) -> None:
    """Raise `UserError` for an argument that is not valid text."""
    for place, text in enumerate(given, 1):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"argument {place} ({text!r}) is not text in UTF-8. Give names in UTF-8."
            ) from error


def version() -> str:
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version("headstart"))
    except metadata.PackageNotFoundError:
        return "(not installed; run `make install`)"


if __name__ == "__main__":
    sys.exit(main())
