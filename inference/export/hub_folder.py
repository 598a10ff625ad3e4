"""The Hub folder of a drafter: its weights, its measured reports, plots and card, and a folder for every engine it was exported to.

    README.md config.json model.safetensors report.json *.png     what `headstart pull` and `load_drafter` read
    vllm/ sglang/ speculators/ transformers/                      what `headstart export` wrote, each loadable by that engine
    manifest.json                                                 SHA-256 of every other file; written last

It is complete or absent, and it does not leave without a report that measured exactly these weights.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.api.checkpoint import CONFIG_FILE, WEIGHTS_FILE, read_config
from heads.api.errors import UserError
from inference.decoding.decode_file import DECODE_FILE, read_current
from inference.export.card import CardFacts, Engine, Training, base_model, card, measured_entries
from inference.export.engine_folder import serve
from inference.folders import EXPORT_FILE, replaced
from inference.manifest import (
    MANIFEST_FILE,
    file_entry,
    file_sha256,
    read_manifest,
    verify_file,
    write_json,
    write_manifest,
)
from inference.report_schema import read_report

CARD_FILE, REPORT_FILE = "README.md", "report.json"
STAGE = "push"
TEXTS = (".json", ".md", ".jinja", ".txt", ".yaml")
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{30,}")


@dataclass(frozen=True)
class Sources:
    """What a Hub folder is made of. reports: report.json files; engines: engine -> folder that `headstart export` wrote."""

    checkpoint: Path
    reports: Sequence[Path]
    engines: Mapping[str, Path]


def build_folder(sources: Sources, out: Path, facts: CardFacts) -> Path:
    """Write the Hub folder to `out` and return it; it is built beside and renamed, so that it is complete or absent.

    Raises `UserError` for a kind without weights, a missing report, one of other weights, a drafter that was not lossless, or an
    engine's folder that was exported from other weights.
    """
    description = read_config(sources.checkpoint)
    digest = _require(sources, description)
    loaded = _titled([read_report(path) for path in sources.reports])
    for title, report in loaded.items():
        _check_target(title, report, description["target"])
    own = {title: {**report, "drafters": measured_entries(report, digest, title)} for title, report in loaded.items()}
    exports = {name: _export(name, folder, digest, description, facts) for name, folder in sorted(sources.engines.items())}
    from inference.plots import plot_all  # matplotlib takes a second to import

    with replaced(out, STAGE, "push") as fresh:
        images = [path.name for path in plot_all(own, fresh)]
        engines = [Engine(name, told["serve"]) for name, told in exports.items()]
        tuned = read_current(sources.checkpoint)
        text = card(loaded, digest, description, facts, images, engines, _training(sources.checkpoint), tuned)
        for name in (WEIGHTS_FILE, CONFIG_FILE, *((DECODE_FILE,) if tuned else ())):
            shutil.copyfile(sources.checkpoint / name, fresh / name)
        for number, report in enumerate(loaded.values(), 1):
            name = REPORT_FILE if number == 1 else f"report_{number}.json"
            (fresh / name).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for name, told in exports.items():
            shutil.copytree(sources.engines[name], fresh / name)
            write_json(fresh / name / EXPORT_FILE, told)
        (fresh / CARD_FILE).write_text(text, encoding="utf-8")
        files = [file_entry(fresh, name) for name in sorted(_plain_files(fresh))]
        write_manifest(fresh, STAGE, {"kind": description["kind"], "repo": facts.repo, "files": files})
        check_folder(fresh)
    return out


def _require(sources: Sources, description: Mapping[str, Any]) -> str:
    """The weights' SHA-256, when there are weights and a report."""
    weights = sources.checkpoint / WEIGHTS_FILE
    if not weights.is_file():
        raise UserError(
            f"'{sources.checkpoint}' has no {WEIGHTS_FILE}: kind '{description['kind']}' has no weights, there is nothing to push."
        )
    if not sources.reports:
        raise UserError(
            f"'{sources.checkpoint}' has no measured report. Run `headstart measure`, then push with its report.json."
        )
    return file_sha256(weights)


def _export(name: str, folder: Path, digest: str, description: Mapping[str, Any], facts: CardFacts) -> dict[str, Any]:
    """What `headstart export` noted in an engine's folder, with paths as they are in the repository; refused when other weights
    were exported.
    """
    try:
        told: dict[str, Any] = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
        found, speculative = str(told["source"]["sha256"]), told["speculative_config"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"'{folder}' is no folder of `headstart export` ({type(error).__name__}: {EXPORT_FILE}). Export the drafter again."
        ) from error
    if found != digest:
        raise UserError(
            f"'{folder}' was exported from other weights ({found[:12]}...) than the drafter that is pushed "
            f"({digest[:12]}...). Run `headstart export` again."
        )
    target = base_model(description, facts) or description["target"]["id"]
    return {**told, "source": {"checkpoint": "..", "sha256": found}, "serve": serve(name, target, Path(name), speculative)}


def _training(checkpoint: Path) -> Training | None:
    """How the drafter was trained, from the manifest of the training that wrote `checkpoint`; None when it lies alone."""
    folder = checkpoint.parent
    if not (folder / MANIFEST_FILE).is_file():
        return None
    told = read_manifest(folder, "train")
    git = told.get("provenance", {}).get("git", {})
    return Training(told["steps"], told["tokens"], told["seconds"], str(git.get("revision", "")), told["best"]["tau"] is not None)


def _check_target(title: str, report: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Refuse a report that was measured with another target than the drafter's own."""
    if report["target"]["revision"] != target["revision"]:
        raise UserError(
            f"the report '{title}' was measured with target '{report['target']['id']}' (revision "
            f"{report['target']['revision']}), but the drafter belongs to '{target['id']}' (revision {target['revision']}). "
            "Measure it with its own target."
        )


def _titled(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Reports under a title that says how they were measured; equal titles are numbered."""
    named: dict[str, dict[str, Any]] = {}
    for report in reports:
        title = f"temperature {report['settings']['temperature']:g}, {report['device']['name']}"
        named[title if title not in named else f"{title} ({len(named) + 1})"] = dict(report)
    return named


def check_folder(folder: Path) -> dict[str, int]:
    """Files of a Hub folder with their sizes in bytes, or `UserError` when it must not leave.

    It needs weights, card, a report that measured exactly these weights, and files as its manifest lists them; no file may hold an
    access token.
    """
    for name in (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE, REPORT_FILE, MANIFEST_FILE):
        if not (folder / name).is_file():
            what = "a measured report (report.json)" if name == REPORT_FILE else name
            raise UserError(f"'{folder}' is not pushed: it lacks {what}. Build the folder with `headstart push`.")
    digest = file_sha256(folder / WEIGHTS_FILE)
    for path in sorted(folder.glob("report*.json")):
        measured_entries(read_report(path), digest, f"'{path}'")
    files = {}
    for name in sorted(_plain_files(folder)):
        path = folder / name
        if path.suffix in TEXTS and SECRET.search(path.read_text(encoding="utf-8")):
            raise UserError(
                f"'{path}' holds what looks like a Hub access token. Revoke it, and measure without it on the command line."
            )
        files[name] = path.stat().st_size
    check_listed(folder, files)
    return files


def check_listed(folder: Path, names: Iterable[str]) -> None:
    """Raise `UserError` unless each of these files, the manifest aside, is in the folder's manifest and is as listed there."""
    listed = {entry["file"]: entry for entry in read_manifest(folder, STAGE)["files"]}
    for name in names:
        if name == MANIFEST_FILE:
            continue
        if name not in listed:
            raise UserError(f"'{folder / name}' is not in the folder's {MANIFEST_FILE}. Build it again with `headstart push`.")
        verify_file(folder, listed[name])


def _plain_files(folder: Path) -> list[str]:
    """Relative paths of all files; refused when there is a link or something else that is no plain file."""
    names = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"'{path}' is not a plain file; a Hub folder holds nothing else. Remove it.")
        if path.is_file():
            names.append(path.relative_to(folder).as_posix())
    return names
