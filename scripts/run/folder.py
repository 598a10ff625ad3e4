"""One stage's folder: its record of command, settings and inputs, and the rules for continuing it.

A stage folder contains `config.yaml` (all settings, defaults included) and `run.json` (command, git
revision and difference, package versions, seed, device, inputs and state). The same command
continues an interrupted folder and skips a complete one. Other settings or other inputs are
refused, never mixed in silently.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from heads.api.config import build
from heads.api.errors import UserError, missing_folder, suggest
from heads.api.reading import read_object, read_yaml_object, require_object
from inference.folders import RUN_FILE, delete_own, stage_of, sweep
from inference.manifest import (
    MANIFEST_FILE,
    PARTIAL,
    file_sha256,
    read_manifest,
    write_bytes,
    write_json,
)
from inference.target.loading import TargetConfig
from inference.target.revision import revision_of
from inference.writers import Hold, clear, hold, is_writer_file
from scripts.config.schema import Settings, complete
from scripts.config.stage_configs import RunConfig
from scripts.run.process import (
    Session,
    is_main_process,
    launch,
    now,
    restarted,
    say,
    shown,
    this_session,
)
from scripts.run.revision import without_diff

FORMAT = 1
CONFIG_FILE = "config.yaml"
HEADING = "# All settings of this stage, defaults included. The last line: sha256 of those above."
SEAL = "# sha256: "
"""Prefix of the last line of config.yaml. A truncated file may still be valid YAML with fewer
settings."""
FREE_GROUPS = ("run", "loop")
"""Groups that may change between the commands that fill one folder: the place of the run, and the
loop's calls."""
OTHER_DEFAULTS = ("decode.compile", "sampling.compile")
"""Settings whose default differs from earlier versions: not compared if a folder leaves them
out."""
FREE_KEYS = (
    "train.tracker.",
    "generate.overwrite",
    *(
        f"features.{name}"
        for name in "servers states concurrency retries timeout_seconds token_variable".split()
    ),
    "features.ssl_cafile",
)
"""Prefixes of other such settings: they determine where figures are shown, which servers are asked
and what is deleted first, not a folder's content."""


@dataclass
class RunRecord:
    """run.json: the stage that wrote a folder, its inputs, and the processes that worked on it."""

    format: int = FORMAT
    stage: str = ""
    state: str = "running"
    """running or complete."""
    inputs: dict[str, str] = field(default_factory=dict)
    """File -> sha256 of its content."""
    target: str = ""
    """Hash of the weights of a target in a local folder (`revision_of`); empty for others, and in
    records of earlier versions."""
    all_inputs: bool = False
    """Whether `inputs` has those that earlier versions did not record (`with_later`)."""
    drafters: dict[str, Any] = field(default_factory=dict)
    """Drafter without a checkpoint -> its configuration (`scripts.run.drafters.described`); empty
    in records of earlier versions, and of stages that read no such drafter."""
    choices: dict[str, Any] = field(default_factory=dict)
    """Option group -> chosen option."""
    seed: int = 0
    sessions: list[Session] = field(default_factory=list)
    finished: str = ""
    """When it was completed (UTC); empty until then."""
    copied_from: str = ""
    """For the copy of a round's training that a loop keeps: the round's training."""

    @property
    def complete(self) -> bool:
        return self.state == "complete"

    def is_of_device(self, device: Mapping[str, Any]) -> bool:
        """Whether the last process computed with `device` (`scripts.run.process.device`)."""
        return [one.device for one in self.sessions[-1:]] == [device]

    def write(self, folder: Path) -> None:
        content = asdict(self)
        for key in ("finished", "copied_from", "target", "all_inputs", "drafters"):
            if not content[key]:
                del content[key]
        write_json(folder / RUN_FILE, content)


@dataclass
class StageFolder:
    """An opened stage folder. `complete`: nothing is left to do in it. settings: those of this
    process, for config.yaml; None if the folder has them. accepted: the changes, in words, that
    `run.accept_changes` accepted although the folder was complete before."""

    path: Path
    complete: bool
    record: RunRecord = field(default_factory=RunRecord)
    held: Hold | None = None
    settings: Settings | None = None
    accepted: Sequence[str] = ()

    @property
    def session(self) -> dict[str, Any]:
        """This process, for manifests. Only run.json has the code's difference and the launch."""
        found = asdict(self.record.sessions[-1])
        del found["launch"]
        return {**found, "git": without_diff(found["git"])}

    def skip(self) -> bool:
        """Whether nothing is left to do in the stage; if so, prints that."""
        if self.complete and self.accepted:
            say(
                f"{shown(self.path)} is complete and stays as it is: {in_words(self.accepted)}. "
                "run.accept_changes=true continues unfinished work; run.overwrite=true starts again"
            )
        elif self.complete:
            say(
                f"{shown(self.path)} is complete; nothing has changed (run.overwrite=true starts "
                "again)"
            )
        return self.complete

    def write(self) -> None:
        """Write the settings and the record of this process into the folder (main process only)."""
        if not is_main_process():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        if self.settings is not None:
            content = yaml.safe_dump(self.settings.with_defaults, sort_keys=False)
            write_bytes(self.path / CONFIG_FILE, sealed(content))
        self.record.write(self.path)

    def finish(self) -> None:
        self.record.state, self.record.finished = "complete", now()
        self.write()
        self.released()

    def released(self) -> StageFolder:
        """This folder, released so that other processes may write to it."""
        if self.held is not None:
            self.held.release()
            self.held = None
        return self


def open_folder(
    settings: Settings,
    path: Path,
    inputs: Sequence[Path] = (),
    *,
    drafters: Mapping[str, Any] | None = None,
    stage_decides: bool = False,
    may_refuse: bool = False,
    several: bool = False,
    repeats: bool = False,
) -> StageFolder:
    """Open `path` for the stage in `settings`, which reads the files `inputs` and the `drafters`
    without a checkpoint (`RunRecord.drafters`), and hold it until the stage ends
    (`inference.writers`).

    Writes run.json and config.yaml (main process only) before the stage starts, so that an
    interrupted run is on record as well. stage_decides: the stage knows which changes matter, so it
    receives a changed folder instead of an error. may_refuse: the stage may still refuse a folder
    with results, so it does the writing (`StageFolder.write`). several: processes share the folder
    by the stage's own rules. repeats: the stage's work is repeated in a complete folder, which is
    held and recorded as if it were new. Raises `UserError` if the folder belongs to another run or
    stage, contains files that no stage wrote, or another process writes to it.
    """
    config, overwrite = settings.run, overwrites(settings.run, path)
    hashes = hashes_of(settings, path, inputs)
    if not overwrite:
        done = complete_record(path, settings, hashes, stage_decides, drafters)
        if done is not None and not repeats:  # nothing is written, so the folder need not be held
            clear(path)  # left by a process that was killed while releasing it
            return done
    held = None if several else hold(path)
    if is_main_process():
        if overwrite:
            delete_own(path, settings.stage.name, "run.overwrite")
        require_free(path, settings.stage.name)
        sweep(path)
    if not overwrite:
        done = complete_record(path, settings, hashes, stage_decides, drafters)
        if done is not None and not repeats:  # completed by the process that held it until now
            return replace(done, held=held).released()
    previous = read_record(path)
    before = previous.sessions if previous and not (repeats and previous.complete) else []
    record = RunRecord(
        stage=settings.stage.name,
        inputs=hashes,
        target=target_weights(settings),
        all_inputs=not is_earlier(settings, path),
        drafters=dict(drafters or {}),
        choices=settings.choices,
        seed=config.seed,
        sessions=[*before, this_session(settings)],
    )
    folder = StageFolder(path, False, record, held, settings)
    kept = may_refuse and previous is not None and holds_results(path)
    if not kept:
        folder.write()
    return folder


def overwrites(config: RunConfig, path: Path) -> bool:
    """Whether `run.overwrite` deletes the folder `path`. It does so once in a launch: processes
    that the launcher starts again continue what the launch has begun."""
    if not config.overwrite or not restarted():
        return config.overwrite
    record = read_record(path)
    return record is None or all(one.launch != launch() for one in record.sessions)


def hashes_of(settings: Settings, path: Path, inputs: Sequence[Path]) -> dict[str, str]:
    """Name in the record of the folder `path` -> sha256, for input files."""
    return {name_of(file, path, settings.run.directory): file_sha256(file) for file in inputs}


def is_done(
    settings: Settings, path: Path, inputs: Sequence[Path], *, stage_decides: bool = False
) -> bool:
    """Whether nothing is left to do in a folder, as `open_folder` decides; False for one of other
    settings or inputs that it would refuse."""
    hashes = hashes_of(settings, path, [file for file in inputs if file.is_file()])
    decides = stage_decides or not settings.run.accept_changes
    return complete_record(path, settings, hashes, decides) is not None


def complete_record(
    path: Path,
    settings: Settings,
    hashes: Mapping[str, str],
    stage_decides: bool,
    drafters: Mapping[str, Any] | None = None,
) -> StageFolder | None:
    """The folder if nothing is left to do in it, else None. Raises `UserError` for a folder of
    another stage, or of other settings unless the stage decides or they are accepted."""
    require_free(path, settings.stage.name)
    previous = read_record(path)
    if previous is None:
        return None
    accepted = settings.run.accept_changes
    if not holds_results(path) or (accepted and not previous.complete):
        changed = []
    else:
        changed = changes(path, previous, settings, hashes, drafters)
    if changed and not stage_decides and not accepted:
        raise UserError(
            f"'{path}' was made with other settings: {in_words(changed)}. Choose "
            "another run.name (or run.drafter), start again with run.overwrite=true, or "
            "continue all the same with run.accept_changes=true."
        )
    if not previous.complete or (changed and stage_decides):
        return None
    return StageFolder(path, True, previous, accepted=changed)


def in_words(changed: Sequence[str]) -> str:
    """Up to five changes, and the number of others."""
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    return "; ".join(changed[:5]) + more


def target_weights(settings: Settings) -> str:
    """Hash of the weights of the target that a stage reads; empty if it reads none, or one that is
    not in a local folder."""
    target = getattr(settings, "target", None)
    if not isinstance(target, TargetConfig) or not Path(target.path).is_dir():
        return ""
    return revision_of(target.path, target.revision)


def name_of(file: Path, folder: Path, run: Path) -> str:
    """The name of an input file in a stage's record. It is relative to the stage's folder if both
    lie in one run, so that a run can be moved."""
    whole = file.resolve()
    if whole.is_relative_to(run.resolve()) and folder.resolve().is_relative_to(run.resolve()):
        return Path(os.path.relpath(whole, folder.resolve())).as_posix()
    return shown(file)


def named_file(name: str, folder: Path) -> Path:
    """The file that a record in `folder` names; see `name_of`. Records of earlier versions name all
    files relative to the working directory."""
    inside = Path(os.path.normpath(folder / name))
    return inside if inside.is_file() or name.startswith("..") else Path(name)


def with_later(
    settings: Settings, path: Path, inputs: Sequence[Path], later: Sequence[Path]
) -> list[Path]:
    """`inputs` and `later`, the input files that earlier versions did not record: a folder `path`
    of theirs has `inputs` only, and is compared with these."""
    return [*inputs, *(() if is_earlier(settings, path) else later)]


def is_earlier(settings: Settings, path: Path) -> bool:
    """Whether a folder has results of a version that did not record all inputs."""
    continued = not settings.run.overwrite and holds_results(path)
    previous = read_record(path) if continued else None
    return previous is not None and not previous.all_inputs


def holds_results(path: Path) -> bool:
    """Whether a stage wrote any results. A refused start does not block a corrected one."""
    return any(
        file.name not in (RUN_FILE, CONFIG_FILE)
        and file.suffix != PARTIAL
        and not is_writer_file(file.name)
        and file.is_file()
        and file.stat().st_size
        for file in path.rglob("*")
    )


def require_free(path: Path, stage: str) -> None:
    """Raise `UserError` for a folder that another stage or program has written to."""
    found = stage_of(path)
    if found and found != stage:
        raise UserError(
            f"'{path}' was written by stage '{found}'; '{stage}' does not write into it. Choose "
            "another name (run.name, run.drafter, or the stage's own)."
        )
    if not found and holds_results(path):
        raise UserError(
            f"'{path}' holds files, but no record of stage '{stage}', which does not write between "
            "other files. Choose another name (run.name, run.drafter, or the stage's own), or move "
            "the files away."
        )


ADVICE = (
    "Restore it, or choose another name (run.name, run.drafter); results beside it, such as best/, "
    "are as they were."
)
"""Advice about a damaged record of a stage."""


def read_record(path: Path) -> RunRecord | None:
    """The run.json of a folder, or None if no run has started."""
    file = path / RUN_FILE
    if not file.is_file():
        return None
    content = read_object(file, ADVICE)
    if content.get("format") != FORMAT:
        raise UserError(
            f"'{file}' is not a run record of format {FORMAT}. Choose another run.name."
        )
    return build(RunRecord, content, RUN_FILE)


def sealed(content: str) -> bytes:
    """The bytes of config.yaml for settings as YAML."""
    lines = f"{HEADING}\n{content}".encode()
    return lines + f"{SEAL}{hashlib.sha256(lines).hexdigest()}\n".encode()


def require_whole(file: Path) -> None:
    """Raise `UserError` for a config.yaml that was changed after the stage wrote it. Earlier
    versions wrote no seal."""
    found = file.read_bytes()
    if not found.startswith(HEADING.encode()):
        return
    lines, seal, _ = found.rpartition(SEAL.encode())
    whole = seal and found == lines + f"{SEAL}{hashlib.sha256(lines).hexdigest()}\n".encode()
    if not whole:
        raise UserError(
            f"'{file}' is damaged: its last line must hold the sha256 of those above. {ADVICE}"
        )


def read_config(path: Path) -> dict[str, Any]:
    """The resolved settings of a stage folder, with the keys of every group; raises `UserError` if
    there are none, or if they were changed after the stage wrote them."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"'{path}' is not a stage folder: it has no {CONFIG_FILE}.")
    content = read_yaml_object(file, ADVICE)
    require_whole(file)
    for group, values in content.items():
        require_object(values or {}, f"'{file}': {group}", ADVICE)
    return content


def changes(
    path: Path,
    previous: RunRecord,
    settings: Settings,
    hashes: Mapping[str, str],
    drafters: Mapping[str, Any] | None = None,
) -> list[str]:
    """The differences from the settings and inputs that a folder was made with, in words."""
    old = read_config(path)
    before, after = comparable(old, settings.resolved)
    if previous.drafters:
        before |= flatten(previous.drafters, "drafters")
        after |= flatten(drafters or {}, "drafters")
    before["run.seed"], after["run.seed"] = previous.seed, settings.run.seed
    known = previous.sessions[-1].working_directory if previous.sessions else ""
    run = old.get("run") or {}
    own = (
        RunConfig(str(run.get("name") or RunConfig().name), str(run.get("root", "")))
        if known
        else settings.run
    )
    then, now = (Path(known), own.directory), (Path.cwd(), settings.run.directory)
    moved = {
        key
        for key in different(before, after)
        if moved_with(then, before.get(key), now, after.get(key))
    }
    found = [
        f"{key} was {before.get(key)!r}, is {after.get(key)!r}"
        for key in different(before, after)
        if key not in moved
    ] + [f"{name} has changed" for name in other_inputs(previous.inputs, hashes)]
    weights = target_weights(settings)
    if previous.target and weights and previous.target != weights:
        found.append("the target's weights have changed")
    return found


def moved_with(then: tuple[Path, Path], before: Any, now: tuple[Path, Path], after: Any) -> bool:
    """Whether a setting has changed only because the run was moved, alone or with the folder that
    it lies in (a round reads the rounds beside it). then, now: the working directory, and the run's
    folder relative to it."""
    runs = ((then[1], now[1]), (then[1].parent, now[1].parent))
    return any(placed(before, then[0], own) == placed(after, now[0], new) for own, new in runs)


def placed(value: Any, here: Path, run: Path) -> Any:
    """A setting whose texts are replaced by the paths that they may be: absolute, or relative to
    a folder if they lie in it. here: the working directory; run: the folder, relative to it."""
    if isinstance(value, list | tuple):
        return [placed(item, here, run) for item in value]
    if not isinstance(value, str) or not value:
        return value
    whole, folder = (Path(os.path.normpath(here / path)) for path in (value, run))
    return ("run", whole.relative_to(folder)) if whole.is_relative_to(folder) else whole


def other_inputs(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The inputs whose content has changed. A file with the name and the content of an earlier one
    counts as that file, wherever the run lies now."""
    sides = [Counter((Path(name).name, each[name]) for name in each) for each in (before, after)]
    missing, new = sides[0] - sides[1], sides[1] - sides[0]
    found = [name for name in sorted(after) if new[Path(name).name, after[name]]]
    names = {Path(name).name for name in found}
    gone = (name for name in sorted(before) if missing[Path(name).name, before[name]])
    return found + [name for name in gone if Path(name).name not in names]


def different(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]


def comparable(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings, on both sides, that determine a folder's content, by dotted path. A key that
    one side leaves out has its default, so that a folder of an earlier version is refused only for
    actual differences. A group that can no longer be read is compared as it was written."""
    sides: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for group in {*before, *after} - {*FREE_GROUPS}:
        both = [before.get(group) or {}, after.get(group) or {}]
        with suppress(UserError, KeyError):
            both = [complete(group, values) for values in both]
        for side, values in zip(sides, both, strict=True):
            kept = flatten(values, group)
            side.update((key, value) for key, value in kept if not key.startswith(FREE_KEYS))
    for group, key in (name.split(".") for name in OTHER_DEFAULTS):
        if key not in (before.get(group) or {}):
            for side in sides:
                side.pop(f"{group}.{key}", None)
    return sides


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of nested settings; lists count as values."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values


def missing_run(run: RunConfig) -> str:
    """A message that a run does not exist, with the nearest names; empty if it exists. A run that
    the user did not name may be new."""
    if run.directory.is_dir() or run.name == RunConfig().name:
        return ""
    root = Path(run.root)
    names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    near = suggest(run.name, names).replace("Allowed:", f"Runs in '{root}':")
    return f"there is no run '{run.name}' in '{root}'.{near}"


def require_run(run: RunConfig, instead: str = "") -> None:
    """Raise `UserError` for a run that does not exist. instead: advice for working without a
    run."""
    missing = missing_run(run)
    if missing:
        raise UserError(f"{missing} {instead}".rstrip())


def require_answers(settings: Settings) -> Path:
    """The folder with the answers to train on; raises `UserError`, which names the command that
    makes them, unless they are complete."""
    run, folder = settings.run, answers_folder(settings)
    if run.answers and not folder.is_dir():
        raise UserError(f"run.answers: {missing_folder(folder)}")
    if not run.answers and not (folder / MANIFEST_FILE).is_file():
        root = f" run.root={run.root}" if run.root != RunConfig().root else ""
        problem = missing_run(run) or f"'{folder}' holds no complete answers."
        raise UserError(
            f"{problem} To train there run `headstart generate run.name={run.name}{root}` first, "
            "with the same target and data; answers elsewhere are given as run.answers=<folder>."
        )
    read_manifest(folder, "generate")
    return folder


def stage_folder(settings: Settings) -> Path:
    """<root>/<name>/train/<drafter>; the chosen head names the drafter unless run.drafter does."""
    name = settings.run.drafter or str(settings.choices["head"])
    return settings.run.directory / "train" / name


def answers_folder(settings: Settings) -> Path:
    """The folder with the answers to train on: this run's, unless another one was given."""
    return Path(settings.run.answers or settings.run.directory / "generate")
