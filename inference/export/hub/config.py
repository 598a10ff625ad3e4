"""Configuration of `headstart push`."""

from __future__ import annotations

from dataclasses import dataclass

from heads.api.config import config
from heads.api.errors import UserError
from inference.hub.config import REPO_NAME

DRAFTER = "@drafter"
"""In push.repo, the place of a drafter's name: the Hub's names cannot hold the character @, and
Hydra reads it without quotes."""


@config("push")
@dataclass(frozen=True)
class PushConfig:
    """The repository and the cards of published drafters."""

    repo: str = ""
    """Repository on the Hub, "user/name". With several drafters it must contain @drafter, which is
    replaced by the name of each; characters that the Hub refuses become "-"."""
    license: str = ""
    """Identifier of the licence that you choose (apache-2.0, mit, llama3.1, ...). Nothing is
    published without one. A dry run prints the target's licence if it is known."""
    base_model: str = ""
    """Hub id of the target; empty: the id by which it was loaded, if that is a Hub id."""
    datasets: tuple[str, ...] = ()
    """Hub ids of the data sets that the prompts came from, for the card."""
    tags: tuple[str, ...] = ()
    """Tags in addition to those that every card has."""
    private: bool = True
    """Make a repository or collection private that the push creates; an existing one keeps its
    visibility."""
    create: bool = True
    """Create the repository if it does not exist."""
    collection: str = ""
    """Title of a collection of the same user to put the repository into, created if it does not
    exist; empty: none."""
    dry_run: bool = True
    """Build the folder and print what would happen, without any connection."""
    allow_mismatches: bool = False
    """Publish even if measured text differed from the target's; the card then opens with a
    warning."""
    message: str = "Upload drafter with its measured report"
    """Commit message."""

    def __post_init__(self) -> None:
        if self.repo and not REPO_NAME.fullmatch(self.repo.replace(DRAFTER, "drafter")):
            raise UserError(f"push.repo must look like 'user/name'; given: '{self.repo}'.")
