"""Shell completion: `headstart -sc install=bash` (zsh, fish) prints code that the shell evaluates.

    eval "$(headstart -sc install=bash)"      in ~/.bashrc, and in ~/.zshrc with install=zsh
    headstart -sc install=fish | source       in ~/.config/fish/config.fish

The shell then asks `headstart -sc query=<shell>` with the line up to the cursor in COMP_LINE. The
syntax of the arguments is Hydra's; Hydra's own completion knows neither stages nor keys that only
have a default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from heads.api.errors import UserError
from scripts.config.compose import CONF, conf_folders, options
from scripts.config.fields import Field, group_fields, leaves
from scripts.config.flags import SWITCHES, WITH_VALUE
from scripts.config.stages import OPTION_GROUPS, RECIPE_GROUPS, STAGES, Stage

SHELLS = {
    "bash": """\
_{name}() {{
    local IFS=$'\\n' line=${{COMP_LINE:0:COMP_POINT}}
    local word=${{line##* }}
    COMPREPLY=($(COMP_LINE="$line" {name} -sc query=bash 2>/dev/null))
    if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then
        COMPREPLY=("${{COMPREPLY[@]#"${{word%"${{word##*=}}"}}"}}")
    fi
}}
complete -o nospace -F _{name} {name}
""",
    "zsh": """\
_{name}() {{
    local -a found
    found=("${{(@f)$(COMP_LINE="$LBUFFER" {name} -sc query=zsh 2>/dev/null)}}")
    [[ -n "$found" ]] && compadd -Q -S '' -- "${{found[@]}}"
}}
compdef _{name} {name}
""",
    "fish": """\
function __{name}
    set -lx COMP_LINE (commandline -cp)
    {name} -sc query=fish
end
complete -c {name} -f -a '(__{name})'
""",
}
"""The output of `install`."""
UNDONE = {
    "bash": "complete -r {name}; unset -f _{name}\n",
    "zsh": "compdef -d {name}; unfunction _{name}\n",
    "fish": "complete -e -c {name}; functions -e __{name}\n",
}
"""The output of `uninstall`."""
OPEN = ("=", ".", "/", ",")
"""Last characters of an unfinished word; any other word is followed by a space."""
LAUNCHING = {
    "hydra/launcher": ("basic", "joblib", "submitit_local", "submitit_slurm"),
    "hydra/sweeper": ("basic", "optuna"),
    "hydra/sweeper/sampler": ("tpe", "random", "cmaes", "nsgaii", "qmc", "grid"),
}


def run(arguments: list[str]) -> None:
    """`-sc install=<shell>`, `uninstall=<shell>` or `query=<shell>`; raises `UserError`."""
    command, _, shell = arguments[0].partition("=") if len(arguments) == 1 else ("", "", "")
    if command not in ("install", "uninstall", "query") or shell not in SHELLS:
        wrong = f" '{shell}' is none of them." if shell else ""
        raise UserError(
            f"-sc is followed by install=<shell>, uninstall=<shell> or query=<shell>, with bash, "
            f"zsh or fish.{wrong}"
        )
    name = Path(sys.argv[0]).name
    name = name if name.isidentifier() else "headstart"
    if command != "query":
        print((SHELLS if command == "install" else UNDONE)[shell].format(name=name), end="")
        return
    for found in complete(os.environ.get("COMP_LINE", "")):
        print(found if shell == "fish" or found.endswith(OPEN) else f"{found} ")


def complete(line: str) -> list[str]:
    """The completions of the last word of a command line, sorted."""
    words = line.split()[1:]
    word = words.pop() if words and not line[-1:].isspace() else ""
    try:
        return sorted({item for item in candidates(words, word) if item.startswith(word)})
    except UserError:
        return []


def candidates(words: list[str], word: str) -> Iterable[str]:
    """Words that may follow `words`; `word` is the beginning of the next one."""
    if not words:
        return [*STAGES, "help", "--help", "--version", "-sc"]
    if words[0] == "help":
        words = [*words[1:], "--help"] if words[1:] else words
    if words == ["help"]:
        return STAGES
    if words[0] in ("-sc", "--shell-completion"):
        return [f"{command}={shell}" for command in ("install", "uninstall") for shell in SHELLS]
    stage = STAGES.get(words[0])
    if stage is None:
        return []
    if word.startswith("-"):
        return [*SWITCHES, *WITH_VALUE]
    if words[-1] == "--help":
        return [*stage.groups, "all"]
    if words[-1] == "--config-dir":
        return files("", word)
    after = WITH_VALUE.get({"-c": "--cfg", "-i": "--info"}.get(words[-1], words[-1]), ())
    key, equals, value = word.partition("=")
    if after:
        return after
    return values(stage, words, key, value) if equals else keys(stage, words, word)


def keys(stage: Stage, words: list[str], word: str) -> Iterator[str]:
    """Groups and keys that begin a setting."""
    mark = word[:1] if word[:1] in ("~", "+") else ""
    end = "" if mark == "~" else "="
    if "." not in word:
        chosen = [name for name in OPTION_GROUPS if name in (*stage.groups, *RECIPE_GROUPS)]
        yield from (f"{mark}{name}{end}" for name in (*chosen, *dict(stage.short)))
        yield from (f"{mark}{name}." for name in stage.groups)
        yield from (f"{mark}{name}=" for name in LAUNCHING)
        return
    group = word.removeprefix(mark).split(".")[0]
    if group in stage.groups:
        yield from (f"{mark}{key}{end}" for key, _ in leaves(group, known_fields(group, words)))


def values(stage: Stage, words: list[str], key: str, value: str) -> Iterable[str]:
    """Values of a key; after a comma, the next value of a list."""
    key_only = key.lstrip("+~")
    key_only = dict(stage.short).get(key_only, key_only)
    before = value[: value.rfind(",") + 1].strip("[") if "," in value else ""
    opening = "[" if value.startswith("[") else ""
    names: Iterable[str] = ()
    if key_only in OPTION_GROUPS:
        names = options(key_only)
    elif key_only in LAUNCHING:
        names = LAUNCHING[key_only]
    elif key_only == "run.name":
        names = (path.name for path in folders(root(words)))
    elif key_only.split(".")[-1] in ("drafter", "drafters"):
        names = (path.name for path in folders(root(words) / run_name(words) / "train"))
    else:
        group = key_only.split(".")[0]
        found = dict(leaves(group, known_fields(group, words))) if group in stage.groups else {}
        field = found.get(key_only)
        names = allowed(field) if field else ()
    made = [f"{key}={opening}{before}{name}" for name in names]
    return made or files(f"{key}=", value)


def allowed(field: Field) -> list[str]:
    """The values that a key allows, if they can be listed."""
    if field.allowed.startswith("one of "):
        return field.allowed.removeprefix("one of ").split(", ")
    return ["true", "false"] if field.default in ("true", "false") else []


def known_fields(group: str, words: list[str]) -> list[Field]:
    """The keys of a group; those of `head` follow the option on the command line."""
    if group != "head":
        return group_fields(group, {})
    base = yaml.safe_load((CONF / "base.yaml").read_text(encoding="utf-8"))["defaults"]
    default = next(item["head"] for item in base if isinstance(item, dict) and "head" in item)
    name = setting(words, "head", default)
    files = (folder / "head" / f"{name}.yaml" for folder in conf_folders())
    file = next((path for path in files if path.is_file()), None)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    return group_fields("head", content or {})


def setting(words: list[str], key: str, default: str) -> str:
    """The value of a key on the command line."""
    given = [word.partition("=")[2] for word in words if word.startswith(f"{key}=")]
    return given[-1] if given else default


def root(words: list[str]) -> Path:
    """The folder of all runs."""
    return Path(setting(words, "run.root", "outputs"))


def run_name(words: list[str]) -> str:
    """The run on the command line."""
    return setting(words, "run.name", "default")


def folders(path: Path) -> list[Path]:
    """The folders in a folder, which may be missing."""
    return [item for item in path.iterdir() if item.is_dir()] if path.is_dir() else []


def files(prefix: str, start: str) -> list[str]:
    """Paths that begin with `start`, folders with a slash at their end."""
    place, slash, name = start.rpartition("/")
    parent = Path(f"{place}{slash}" or ".").expanduser()
    if not parent.is_dir():
        return []
    return [
        f"{prefix}{place}{slash}{item.name}{'/' if item.is_dir() else ''}"
        for item in parent.iterdir()
        if item.name.startswith(name) and (name.startswith(".") or not item.name.startswith("."))
    ]
