"""Fetches a published drafter and checks it against the SHA-256 sums that it was published with,
except its card and plots, which may be edited on the Hub.

It fetches the checkpoint, an engine's folder, or both. The folder appears when it is complete.
Files that arrived before a failure are kept next to it; the next pull fetches the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from heads.api.checkpoint import WEIGHTS_FILE, read_config
from heads.api.errors import UserError, suggest
from heads.api.reading import read_object
from inference.folders import EXPORT_FILE, discard, plain_files, put_new
from inference.hub.config import OWN, PullConfig
from inference.hub.exchange import Exchange, hub_address, hub_token
from inference.manifest import MANIFEST_FILE, listed_files, verify_listed, write_json
from inference.terminal import make_console
from inference.writers import beside, only_writer

EVERYTHING = "all"
PUBLISHED = "push"
"""The stage in the manifest of the fetched files."""
CARD = ("README.md", ".png")
"""How names of the card and its plots end: people and programs edit them on the Hub, and nothing
reads them."""
PARTIAL_FILE = ".headstart-pull.json"
"""Marks a folder in which a pull's files arrive and names the pull; it is removed last."""


def pull(config: PullConfig, out: Path, *, console: Console | None = None) -> Path:
    """Fetch the repository, or the requested part of it, into `out` and return `out`.

    Raises `UserError` for a missing repository, revision or part, a token without rights, a
    connection that broke, a file that is not what was published, and a folder that exists.
    """
    if not config.repo:
        raise UserError("pull.repo is not set: give the repository as 'user/name'.")
    left = out / PARTIAL_FILE
    if left.is_file() and read_object(left).items() >= asked_by(config).items():
        left.unlink(missing_ok=True)  # from a pull that was killed when all files were there
        return out
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(
            f"'{out}' exists already. Delete it, or choose another folder with pull.out."
        )
    partial = partial_folder(out)
    with only_writer(*beside(out)):
        text = _pull(config, partial, out)
    (console or make_console()).print(text, soft_wrap=True)
    return out


def asked_by(config: PullConfig) -> dict[str, str]:
    """What a pull is asked for, as `PARTIAL_FILE` records it."""
    own = {"repo": config.repo, "what": config.what, "revision": config.revision}
    return {"stage": "pull", **own}


def _pull(config: PullConfig, partial: Path, out: Path) -> str:
    """Fetch into `partial`, which becomes `out`; returns a line that describes the result."""
    exchange = connect(config)
    with exchange.connect() as api:
        info = api.model_info(config.repo, revision=config.revision or None)
    names, commit = sorted(file.rfilename for file in info.siblings or ()), str(info.sha)
    if not {WEIGHTS_FILE, MANIFEST_FILE} <= set(names):
        raise UserError(
            f"'{config.repo}' was not published by `headstart push` (it lacks {WEIGHTS_FILE} or "
            f"{MANIFEST_FILE}). Fetch it with `hf download` and read it with `headstart import`."
        )
    wanted = _part(config, names)
    asked = {**asked_by(config), "commit": commit}
    begun = partial / PARTIAL_FILE
    if begun.is_file() and read_object(begun) != asked:
        keep_only(partial, ())  # the files that arrived are of another drafter
    write_json(begun, asked)
    # Files are fetched one by one, because the library's download of a whole snapshot accepts an
    # incomplete folder if the Hub does not answer. Existing files are not fetched again.
    with exchange.connect() as api:
        api.hf_hub_download(config.repo, MANIFEST_FILE, revision=commit, local_dir=partial)
        listed = {entry["file"] for entry in listed_files(partial, PUBLISHED)} | {MANIFEST_FILE}
        wanted = [name for name in wanted if name in listed]  # others have added the rest
        for name in wanted:
            api.hf_hub_download(config.repo, name, revision=commit, local_dir=partial)
    discard(partial / ".cache")  # the library's notes on what it has fetched
    keep_only(partial, (*wanted, PARTIAL_FILE))  # another part may have been requested before
    verify_listed(partial, PUBLISHED, [name for name in wanted if not is_of_card(name)])
    if config.what in (OWN, EVERYTHING):
        read_config(partial)
    put_new(partial, out)
    (out / PARTIAL_FILE).unlink()
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return f"{config.repo} at {commit[:12]}: {len(wanted)} files, {size:,} bytes, in {out}"


def is_of_card(name: str) -> bool:
    """Whether a published file is the card or one of its plots."""
    return "/" not in name and name.endswith(CARD)


def keep_only(partial: Path, names: Sequence[str]) -> None:
    """Remove the files of a folder, all of which were fetched, except those of these names."""
    for name in set(plain_files(partial)) - set(names):
        (partial / name).unlink()


def connect(config: PullConfig) -> Exchange:
    """The Hub for fetching this repository."""
    revision = f" and pull.revision={config.revision}" if config.revision else ""
    missing = f"Check pull.repo{revision}; a private one needs a token."
    kept = "Files that have arrived are kept; pull again to go on."
    return Exchange(config.repo, hub_address(), hub_token(), "pull", "read", missing, kept)


def partial_folder(out: Path) -> Path:
    """The folder next to `out` in which files arrive; raises `UserError` unless a pull made it."""
    if out.name in ("", ".."):
        raise UserError(
            f"pull.out: '{out}' is not a name for a new folder. Give a folder with a name."
        )
    partial = out.with_name(out.name + ".partial")
    full = partial.is_dir() and any(partial.iterdir())
    taken = partial.is_symlink() or partial.is_file() or full
    if taken and not (partial / PARTIAL_FILE).is_file():
        raise UserError(
            f"'{partial}', where the files are to arrive, exists and was not made by `headstart "
            "pull`. Remove it, or choose another folder with pull.out."
        )
    return partial


def _part(config: PullConfig, names: Sequence[str]) -> list[str]:
    """The files of the requested part, including the manifest. An engine's folder is one that
    contains an export."""
    what = config.what
    engines = sorted({name.split("/")[0] for name in names if name.endswith("/" + EXPORT_FILE)})
    known = [OWN, *engines, EVERYTHING]
    if what not in known:
        raise UserError(f"pull.what: '{config.repo}' holds no '{what}'.{suggest(what, known)}")
    # .gitattributes, which the Hub adds, is left out
    shown = [name for name in names if not name.startswith(".")]
    if what == EVERYTHING:
        return shown
    if what == OWN:
        return [name for name in shown if "/" not in name]
    return [name for name in shown if name.startswith(what + "/") or name == MANIFEST_FILE]
