"""Fetches a published drafter: its own checkpoint, or what an engine loads, checked against the SHA-256 it was published with.

A folder appears when it is complete. Files that arrived before something broke are kept beside it; pulling again fetches
the others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from heads.api.checkpoint import WEIGHTS_FILE, read_config
from heads.api.errors import UserError, suggest
from inference.export.hub import REPO_NAME, hub_address, transfer_for
from inference.export.hub_errors import Exchange, explained
from inference.export.hub_folder import check_listed
from inference.folders import EXPORT_FILE, require_folder_name
from inference.manifest import MANIFEST_FILE, write_json

OWN = "headstart"
"""Of `pull.what`: the checkpoint of our own."""
EVERYTHING = "all"
PARTIAL_FILE = ".headstart-pull.json"
"""Marks a folder in which a pull's files arrive; it goes when they are all there."""


@dataclass(frozen=True)
class PullConfig:
    """Which published drafter is fetched, and to where."""

    repo: str = ""
    """Repository on the Hub, "user/name"."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest."""
    what: str = OWN
    """headstart (the checkpoint: for chat, measure and train), an engine's folder (vllm, sglang, speculators, transformers), or
    all."""
    out: Path | None = None
    """Folder to write; empty: <run.root>/pulled/<user>--<name>."""

    def __post_init__(self) -> None:
        if self.repo and not REPO_NAME.fullmatch(self.repo):
            raise UserError(f"pull.repo must look like 'user/name'; given: '{self.repo}'.")
        require_folder_name("pull.what", self.what)


def pull(config: PullConfig, out: Path, *, console: Console | None = None) -> Path:
    """Fetch the repository, or the asked part of it, into `out` and return it.

    Raises `UserError` for a repository, revision or part that is not there, a token without rights, a connection that broke, a
    file that is not what was published, and a folder that exists already.
    """
    console = console or Console()
    if not config.repo:
        raise UserError("pull.repo is not set: give the repository as 'user/name'.")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"'{out}' exists already and is left alone. Delete it, or choose another folder with pull.out.")
    partial = partial_folder(out)
    endpoint = hub_address()
    names, commit = _listing(config, endpoint)
    if not {WEIGHTS_FILE, MANIFEST_FILE} <= set(names):
        raise UserError(
            f"'{config.repo}' was not published by `headstart push` (it lacks {WEIGHTS_FILE} or {MANIFEST_FILE}). "
            "Fetch it with `hf download` and read it with `headstart import`."
        )
    wanted = _part(config, names)
    write_json(partial / PARTIAL_FILE, {"stage": "pull", "repo": config.repo})
    _fetch(config, endpoint, commit, wanted, partial)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes on what it has fetched
    check_listed(partial, wanted)
    if config.what in (OWN, EVERYTHING):
        read_config(partial)
    (partial / PARTIAL_FILE).unlink()
    os.replace(partial, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    console.print(f"{config.repo} at {commit[:12]}: {len(wanted)} files, {size:,} bytes, in {out}", soft_wrap=True)
    return out


def partial_folder(out: Path) -> Path:
    """The folder next to `out` in which files arrive; raises `UserError` when it is there and no pull has made it."""
    if out.name in ("", ".."):
        raise UserError(f"pull.out: '{out}' is not a name for a new folder. Give a folder with a name.")
    partial = out.with_name(out.name + ".partial")
    taken = partial.is_symlink() or partial.is_file() or (partial.is_dir() and any(partial.iterdir()))
    if taken and not (partial / PARTIAL_FILE).is_file():
        raise UserError(
            f"'{partial}', where the files are to arrive, exists and was not made by `headstart pull`. Remove it, or choose "
            "another folder with pull.out."
        )
    return partial


def _part(config: PullConfig, names: Sequence[str]) -> list[str]:
    """The files of the asked part, the manifest with them; an engine's folder is one that holds an export."""
    engines = sorted({name.split("/")[0] for name in names if name.endswith("/" + EXPORT_FILE)})
    known = [OWN, *engines, EVERYTHING]
    if config.what not in known:
        raise UserError(
            f"pull.what: '{config.repo}' holds no '{config.what}'.{suggest(config.what, known)}"
        )
    hidden = [name for name in names if not name.startswith(".")]  # .gitattributes, which the Hub adds
    if config.what == EVERYTHING:
        return hidden
    if config.what == OWN:
        return [name for name in hidden if "/" not in name]
    return [name for name in hidden if name.startswith(config.what + "/") or name == MANIFEST_FILE]


def _listing(config: PullConfig, endpoint: str) -> tuple[list[str], str]:
    """All file names of the repository, and the commit they are of."""
    import huggingface_hub

    token = huggingface_hub.get_token() or ""
    api = huggingface_hub.HfApi(endpoint=endpoint, token=token or False, library_name="headstart")
    with explained(_exchange(config, endpoint, token)):
        info = api.model_info(config.repo, revision=config.revision or None)
    return sorted(file.rfilename for file in info.siblings or ()), str(info.sha)


def _fetch(config: PullConfig, endpoint: str, commit: str, names: Sequence[str], partial: Path) -> None:
    """Fetch files of one commit; those that are there already are not fetched again. A connection that breaks is taken up some
    times where it ended.

    One by one: the library's download of a whole snapshot takes what lies in the folder for an answer when the Hub gives none.
    """
    import huggingface_hub

    token = huggingface_hub.get_token() or ""
    with explained(_exchange(config, endpoint, token)), transfer_for(endpoint):
        for name in names:
            huggingface_hub.hf_hub_download(
                config.repo, name, revision=commit, local_dir=partial, token=token or False, endpoint=endpoint,
                library_name="headstart",
            )  # fmt: skip


def _exchange(config: PullConfig, endpoint: str, token: str) -> Exchange:
    kept = "Files that have arrived are kept; pull again to go on."
    missing = f"Check pull.repo{f' and pull.revision={config.revision}' if config.revision else ''}; a private one needs a token."
    return Exchange(config.repo, endpoint, token, "pull.repo", "pull", "read", missing, kept)
