"""Kinds of drafters from packages of their own, installed as pip installs them, without a change in
this repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from heads.api.errors import UserError
from heads.api.kinds import kind_names, own_kinds
from heads.api.registry import get_kind
from scripts.config.compose import options
from scripts.config.help import stage_help
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.drafters import untrained, untrained_recipes

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "more-drafters"
version = "1.0"
[project.entry-points."headstart.kinds"]
last_token = "more_drafters.last_token"
repeater = "more_drafters.repeater"
lost = "more_drafters.no_such_module"
ngram = "more_drafters.last_token"
misnamed = "more_drafters.last_token"
[project.entry-points."headstart.conf"]
more_drafters = "more_drafters.conf"
[tool.setuptools]
packages = ["more_drafters", "more_drafters.conf"]
package-data = {"*" = ["**/*.yaml"]}
"""
KIND = '''
"""Drafts the last token again and again."""
from dataclasses import dataclass
from typing import ClassVar

from heads import ngram
from heads.api.config import PositiveInt, config


@config("head")
@dataclass(frozen=True)
class Config(ngram.Config):
    """Configuration of a drafter that repeats."""

    times: PositiveInt = 3
    """How often."""


class Drafter(ngram.Drafter):
    kind: ClassVar[str] = "last_token"
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed in it."""
    source = tmp_path_factory.mktemp("source")
    (source / "pyproject.toml").write_text(PROJECT)
    recipes = source / "more_drafters" / "conf" / "head"
    recipes.mkdir(parents=True)
    (source / "more_drafters" / "__init__.py").write_text("")
    (source / "more_drafters" / "last_token.py").write_text(KIND)
    renamed = KIND.replace('"last_token"', '"repeater"')
    (source / "more_drafters" / "repeater.py").write_text(renamed)
    (recipes / "repeater.yaml").write_text("kind: repeater\ntimes: 7\n")
    (recipes / "last_token_twice.yaml").write_text("kind: last_token\ntimes: 2\n")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config", "--offline"),
            *("--no-deps", "--no-build-isolation", "--target", str(folder), str(source)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package on the import path."""
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.usefixtures("installed")
def test_a_kind_of_another_package_is_one_like_ours() -> None:
    assert "last_token" in kind_names() and "last_token" not in own_kinds()
    kind = get_kind("last_token")
    assert kind.drafter_class.__module__ == "more_drafters.last_token" and not kind.trainable
    settings = load_settings(STAGES["train"], ["head=last_token", "head.times=5"])
    assert (settings.head.kind, settings.head.config.times) == ("last_token", 5)
    assert settings.choices["head"] == "last_token"
    shown = stage_help(STAGES["train"], ["head=last_token"], "head")
    assert "head.times = 3\n      How often." in shown
    with pytest.raises(UserError, match=r"head\.tmes: there is no such key\. Did you mean 'times'"):
        load_settings(STAGES["train"], ["head=last_token", "head.tmes=5"])
    assert {"last_token", "last_token_twice"} <= set(options("head"))
    assert {"last_token", "last_token_twice"} <= set(untrained_recipes())
    assert untrained("last_token", {}).kind == "last_token"
    twice = load_settings(STAGES["train"], ["head=last_token_twice"])
    assert (twice.head.kind, twice.head.config.times) == ("last_token", 2)


@pytest.mark.usefixtures("installed")
def test_a_kind_with_a_recipe_of_its_name_takes_the_recipe(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Hydra would take an entry beside a file for the file's schema, and warn."""
    load_settings(STAGES["measure"], [])
    settings = load_settings(STAGES["train"], ["head=repeater"])
    assert settings.head.config.times == 7
    assert not [item for item in recwarn if "schema" in str(item.message)]


@pytest.mark.usefixtures("installed")
def test_what_packages_do_wrong_is_named() -> None:
    with pytest.raises(UserError, match=r"more_drafters\.no_such_module.*cannot be imported"):
        get_kind("lost")
    with pytest.raises(UserError, match=r"2 drafter kinds are called 'ngram': heads\.ngram, more_"):
        get_kind("ngram")
    with pytest.raises(UserError, match="defines the kind 'last_token'"):
        get_kind("misnamed")


def test_it_is_gone_with_the_package() -> None:
    assert "last_token" not in kind_names() and "last_token" not in options("head")
    with pytest.raises(UserError, match="there is no drafter kind 'last_token'"):
        get_kind("last_token")
    assert get_kind("ngram").name == "ngram"
