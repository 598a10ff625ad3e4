"""Published drafters by name: fetched once into a cache, checked, and then read from the cache.

    <HF_HOME>/headstart/<user>--<name>/<commit>/    a checkpoint as `headstart pull` writes it

huggingface_hub's cache contains links, but a checkpoint's folder must consist of files that its
manifest lists. Headstart therefore has a separate cache. Without a connection, the most recently
requested copy is used, or the copy of the given revision.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants, errors
from rich.console import Console

from heads.api.errors import UserError
from heads.api.reading import read_object, require_fit
from inference.folders import is_temporary
from inference.hub.config import REPO_NAME, PullConfig
from inference.hub.exchange import causes
from inference.hub.pull import connect, pull
from inference.manifest import write_json
from inference.writers import turn

logger = logging.getLogger(__name__)
REVISION = "@"
"""Separates a repository from its branch, tag or commit: user/name@v1."""
REVISIONS = "revisions.json"
"""Revision -> commit, for revisions that were requested by name."""


def is_published_name(text: str) -> bool:
    """Whether `text` reads like "user/name" or "user/name@revision"."""
    return REPO_NAME.fullmatch(text.partition(REVISION)[0]) is not None


def fetch(name: str) -> Path:
    """The checkpoint folder of a published drafter, "user/name" or "user/name@revision".

    The newest commit of the revision is fetched unless it is in the cache. Where the Hub cannot be
    reached (or HF_HUB_OFFLINE is set), the copy in the cache is used. Raises `UserError` as `pull`
    does, and without a connection and a copy.
    """
    repo, _, revision = name.partition(REVISION)
    cache = Path(constants.HF_HOME) / "headstart" / repo.replace("/", "--")
    config = PullConfig(repo=repo, revision=revision)
    try:
        commit = find_commit(config)
    except UserError as error:
        kept = kept_copy(cache, revision) if is_unreachable(error) else None
        if kept is None:
            raise
        logger.warning("%s: the Hub cannot be reached; using the copy in %s", name, kept)
        return kept
    folder = cache / commit
    if not folder.is_dir():
        with turn(cache):  # another process may be fetching it
            if not folder.is_dir():
                pull(PullConfig(repo=repo, revision=commit), folder, console=Console(stderr=True))
    known = known_revisions(cache)
    with suppress(OSError):  # a read-only cache is usable too
        if revision and known.get(revision) != commit:
            write_json(cache / REVISIONS, {**known, revision: commit})
        folder.touch()  # the newest is the one requested last
    return folder


def find_commit(config: PullConfig) -> str:
    """The commit that a repository's revision stands at; raises `UserError` as `pull` does."""
    with connect(config).connect() as api:
        return str(api.model_info(config.repo, revision=config.revision or None).sha)


def kept_copy(cache: Path, revision: str) -> Path | None:
    """The copy of a revision in the cache. The revision is a commit, or a branch or tag, which
    stands for its commit at the last fetch. Without a revision, the most recently requested
    copy."""
    copies = [path for path in cache.glob("*") if path.is_dir() and not is_temporary(path.name)]
    if revision:
        commit = known_revisions(cache).get(revision, revision)
        copies = [path for path in copies if path.name == commit]
    return max(copies, key=lambda path: path.stat().st_mtime, default=None)


def known_revisions(cache: Path) -> dict[str, str]:
    """Revision -> the commit that it stood at when it was last fetched."""
    path = cache / REVISIONS
    return require_fit(dict[str, str], read_object(path), f"'{path}'") if path.is_file() else {}


def is_unreachable(error: UserError) -> bool:
    """Whether no server answered: offline mode, or a connection that could not be opened."""
    chain = list(causes(error.__cause__ or error.__context__))
    if any(isinstance(item, errors.OfflineModeIsEnabled) for item in chain):
        return True
    answered = any(getattr(item, "response", None) is not None for item in chain)
    return not answered and any(isinstance(item, (errors.HTTPError, OSError)) for item in chain)
