"""Pushes a drafter's Hub folder in one commit.

A dry run is the default: it builds the folder and prints what would happen. A push refuses a
drafter that has no measured report, or whose report measured other weights. All files become
visible in the same commit: a failure before it leaves the repository as it was, and repeating the
push is safe. Large files that were transferred are not sent again. Tokens come from the environment
or the Hub's own login and are passed to huggingface_hub only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    metadata_load,
    try_to_load_from_cache,
)
from rich.console import Console

from heads.api.checkpoint import build_config, read_config
from heads.api.errors import UserError
from heads.api.registry import get_kind
from inference.export.hub.config import PushConfig
from inference.export.hub.folder import STAGE, Sources, build_folder, check_folder
from inference.export.layouts.registry import ROUTES, Route
from inference.hub.config import REPO_NAME
from inference.hub.exchange import Exchange, hub_address, hub_token
from inference.manifest import MANIFEST_FILE, listed_files
from inference.terminal import make_console, make_table
from inference.writers import beside, only_writer


@dataclass
class PushResult:
    """The built folder, its files with their sizes in bytes, and the commit's address. The address
    is empty after a dry run."""

    folder: Path
    files: dict[str, int] = field(default_factory=dict)
    url: str = ""


def push(
    config: PushConfig, sources: Sources, out: Path, *, console: Console | None = None
) -> PushResult:
    """Build the Hub folder in `out` and, unless `config.dry_run`, upload it.

    The address comes from HF_ENDPOINT, the token from HF_TOKEN or `hf auth login`. Raises
    `UserError` for a missing licence, a missing or wrong token, missing rights, a missing
    repository, and a connection that broke.
    """
    if not config.repo:
        raise UserError(
            "push.repo is not set: give the repository as 'user/name', in a dry run too."
        )
    if not (config.license or config.dry_run):
        raise UserError(f"{ask_licence(sources)} Nothing is published without one.")
    with only_writer(*beside(out)):  # held until everything is sent
        return _push(config, sources, out, console or make_console())


def _push(config: PushConfig, sources: Sources, out: Path, console: Console) -> PushResult:
    folder = build_folder(sources, out, config)
    result = PushResult(folder, check_folder(folder))
    show(config, result, console)
    for note in notes(config, sources):
        console.print(note, soft_wrap=True)
    if config.dry_run:
        console.print("Dry run: nothing was sent. Push with push.dry_run=false.")
        return result
    result.url = upload(config, folder)
    console.print(f"Pushed: {result.url}", soft_wrap=True)
    if config.collection:
        console.print(f"In the collection {collect(config)}", soft_wrap=True)
    return result


def show(config: PushConfig, result: PushResult, console: Console) -> None:
    """Print the files in the folder and what a push does with them."""
    say = partial(console.print, soft_wrap=True)
    say(f"Hub folder: {result.folder}")
    table = make_table()
    table.add_column("file", no_wrap=True)
    table.add_column("bytes", justify="right")
    for name, size in result.files.items():
        table.add_row(name, f"{size:,}")
    table.add_row("total", f"{sum(result.files.values()):,}", style="bold")
    console.print(table)
    made = f"created ({'private' if config.private else 'public'}) if it does not exist"
    absent = made if config.create else "not created: it must exist"
    say(f"Repository {config.repo} at {hub_address()}: {absent}; all files in one commit.")
    if config.collection:
        say(f"Then it is added to {owner(config)}'s collection '{config.collection}'.")


def notes(config: PushConfig, sources: Sources) -> Iterator[str]:
    """The parts that the card lacks, and the settings or commands that add them."""
    if not config.license:
        yield ask_licence(sources)
    content = read_config(sources.checkpoint)
    kind = get_kind(content["kind"])
    ways = ROUTES.get(kind.export_method(build_config(kind.name, content["config"])), {})
    others = [
        engine
        for engine, way in ways.items()
        if isinstance(way, Route) and engine not in sources.engines
    ]
    if others:
        yield (
            f"Without a command in the card: {', '.join(others)}. `headstart export engine=<name>` "
            "adds the folder and the command of one, for the next push."
        )


def ask_licence(sources: Sources) -> str:
    """The request to choose a licence, with that of the target where its card names one."""
    target = read_config(sources.checkpoint)["target"]["id"]
    found = licence_of(target)
    named = (
        f"The target '{target}' has push.license={found}, by its card"
        if found
        else f"That of the target '{target}' is not known here"
    )
    return (
        "push.license is not set: without a licence others cannot tell whether they may use the "
        f"drafter. Choose one, such as push.license=apache-2.0. {named}; it may bind the drafter "
        "as well."
    )


def licence_of(target: str) -> str:
    """The licence identifier in a target's model card, from its folder or the Hub's cache; empty if
    there is none. Nothing is fetched."""
    card = Path(target) / "README.md"
    if not Path(target).is_dir() and REPO_NAME.fullmatch(target):
        card = Path(str(try_to_load_from_cache(target, "README.md") or card))
    if not card.is_file():
        return ""
    try:
        front = metadata_load(card) or {}
    except Exception:  # noqa: BLE001 - a foreign text, and a reader that raises any error
        return ""
    return str(front.get("license") or "")


def owner(config: PushConfig) -> str:
    """The user or organisation of the repository."""
    return config.repo.split("/")[0]


def connect(config: PushConfig, kept: str) -> AbstractContextManager[HfApi]:
    """The Hub's interface for a block. kept: what remains after a failure, and how to continue."""
    token, missing = hub_token(), "Create it, or push with push.create=true."
    if not token:
        raise UserError(
            "there is no Hub access token. Run `hf auth login`, or set HF_TOKEN (write access)."
        )
    return Exchange(config.repo, hub_address(), token, "push", "write", missing, kept).connect()


def upload(config: PushConfig, folder: Path) -> str:
    """Send a checked folder to the Hub in one commit and return the commit's address."""
    files = check_folder(folder)
    kept = (
        "Nothing was published: files appear in one commit at the end. Push again; what has "
        "arrived is not sent twice."
    )
    with connect(config, kept) as api:
        if config.create:
            api.create_repo(config.repo, private=config.private, exist_ok=True)
        # create_commit rather than upload_folder: the latter may split a push into several commits
        operations: list[CommitOperationAdd | CommitOperationDelete]
        operations = [CommitOperationAdd(name, str(folder / name)) for name in files]
        old = sorted(pushed_before(api, config.repo) - set(files))
        operations += [CommitOperationDelete(name) for name in old]
        commit = api.create_commit(config.repo, operations, commit_message=config.message)
    return str(commit.commit_url)


def pushed_before(api: HfApi, repo: str) -> set[str]:
    """The files of an earlier push that are in the repository. Files that others put there are not
    among them."""
    info = api.model_info(repo)
    there = {file.rfilename for file in info.siblings or ()}
    if MANIFEST_FILE not in there:
        return set()
    with TemporaryDirectory() as place:
        api.hf_hub_download(repo, MANIFEST_FILE, revision=info.sha, local_dir=place)
        try:
            return there & {entry["file"] for entry in listed_files(Path(place), STAGE)}
        except UserError:  # another program's manifest
            return set()


def collect(config: PushConfig) -> str:
    """Put the pushed repository into the collection of that title; returns its identifier.

    The title is looked up among the user's collections, because the Hub allows several with the
    same title.
    """
    title, user, private = config.collection, owner(config), config.private
    kept = (
        f"'{config.repo}' is pushed and stays; only the collection lacks it. Push again: nothing "
        "is sent twice."
    )
    with connect(config, kept) as api:
        known = (found.slug for found in api.list_collections(owner=user) if found.title == title)
        slug = next(known, None)
        if slug is None:
            made = api.create_collection(title, namespace=user, private=private, exists_ok=True)
            slug = made.slug
        api.add_collection_item(slug, config.repo, "model", exists_ok=True)
    return slug
