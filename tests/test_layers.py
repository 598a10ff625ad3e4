"""The rules of the code base that a machine can check: import layers and circles, independent
kinds, light imports, docstrings."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest

from heads.api.kinds import own_kinds
from inference.kernels.registry import all_ops
from inference.measure.vllm_process import SCRIPT
from scripts.evidence.sides import WORKER

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("heads", "inference", "train", "scripts", "headstart")


def sources() -> list[Path]:
    """Every Python file that ships."""
    return sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_import_linter_is_content() -> None:
    program = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_kind_imports_another_and_nothing_below_imports_a_kind() -> None:
    graph = grimp.build_graph("heads", cache_dir=None)
    kinds = {f"heads.{name}" for name in own_kinds()}
    assert {"heads.medusa", "heads.eagle3", "heads.distilled", "heads.ngram"} <= kinds
    for kind in sorted(kinds):
        importers = graph.find_modules_that_directly_import(kind)
        assert not importers, f"{kind} is imported by {sorted(importers)}"


def test_the_decoder_knows_no_kind() -> None:
    graph = grimp.build_graph("inference", "heads", cache_dir=None)
    kinds = {f"heads.{name}" for name in own_kinds()}
    for module in graph.find_descendants("inference"):
        named = kinds & graph.find_modules_directly_imported_by(module)
        assert not named, f"{module} imports {sorted(named)}"


def test_every_module_imports_without_the_optional_libraries_and_leaves_all_as_it_was() -> None:
    """Importing prints nothing and changes neither torch's threads nor its random numbers."""
    # Kernels are imported when they first run, and only where triton is.
    behind_a_door = {"train.engines.deepspeed", *(op.kernel.split(":")[0] for op in all_ops())}
    modules = [name for name in map(module_of, sources()) if name not in behind_a_door]
    program = (
        "import importlib, sys, torch\n"
        "before, threads = torch.random.get_rng_state(), torch.get_num_threads()\n"
        "for name in ('deepspeed', 'triton', 'wandb'):\n"
        "    sys.modules[name] = None\n"  # an import of it now raises ImportError
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "assert torch.equal(torch.random.get_rng_state(), before)\n"
        "assert torch.get_num_threads() == threads\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""


def imported_modules(tree: ast.AST, known: set[str]) -> set[str]:
    """The project's modules that a file imports, wherever the import stands: also in functions and
    under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (named & known) or {node.module}
    return found & known


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {module_of(path) for path in sources()}
    trees = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    imports = {name: imported_modules(tree, known) - {name} for name, tree in trees.items()}
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        pytest.fail("modules import each other in a circle: " + " -> ".join(error.args[1]))


def test_every_module_says_what_it_is_for() -> None:
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path} opens without a docstring"


def test_nothing_points_at_one_machine_or_at_unfinished_work() -> None:
    # Spelt in pieces, so that this file does not find itself.
    words = ["/" + folder + "/" for folder in ("work", "root", "home", "tmp")] + [
        "TO" + "DO",
        "FIX" + "ME",
    ]
    folders = ("conf", "docs", "tests", ".ci", *PACKAGES)
    files = [
        path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.is_file()
    ]
    files += [
        REPOSITORY / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
    ]
    for path in files:
        if path.suffix in (".py", ".md", ".yaml", ".json", ".sh", ".slurm", ".toml", ""):
            text = path.read_text(encoding="utf-8")
            found = [word for word in words if word in text]
            assert not found, f"{path.relative_to(REPOSITORY)} holds {found}"


def test_the_launchers_are_sound_shell() -> None:
    scripts = [REPOSITORY / ".ci" / "run", *(REPOSITORY / "scripts" / "launch").iterdir()]
    assert len(scripts) >= 4
    checkers = [["bash", "-n"]] + ([["shellcheck"]] if shutil.which("shellcheck") else [])
    for script in scripts:
        assert os.access(script, os.X_OK), f"{script} is not executable"
        for checker in checkers:
            done = subprocess.run(
                [*checker, str(script)], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stdout + done.stderr


def test_scripts_for_other_environments_have_no_neighbours_that_libraries_import() -> None:
    """Python puts a script's folder in front: a profile.py beside it would be the library's."""
    taken = {*sys.stdlib_module_names, *packages_distributions()}
    folders = sorted(REPOSITORY.glob("[!.]*/**/foreign"))
    assert SCRIPT.parent in folders and WORKER.parent in folders
    for folder in folders:
        assert not taken & {path.stem for path in folder.iterdir()}, folder


FOLDERS = "inference/folders.py"
REPLACE_FILES = {
    "heads/api/adapter.py",
    "heads/api/checkpoint.py",
    "inference/line_file.py",
    "inference/manifest.py",
    "train/data/answers.py",
    "train/tracking/summary.py",
    "scripts/evidence/foreign/speculators_worker.py",  # runs where our packages are not
}
"""Modules that give a file that they have just written the name of an earlier one."""
OWN_NAMES = {"rmtree", "copytree", "move", "rmdir", "removedirs", "rename", "renames"}


OF_MODULES = {"os": {*OWN_NAMES, "replace"}, "shutil": OWN_NAMES, "subprocess": set()}
SHELL = {"rm", "rmdir", "mv"}


def calls_of(source: str) -> list[str]:
    """Names in a source that may delete, rename or copy a folder, called or handed on:
    `name:line`."""
    tree, found = ast.parse(source), []
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in OF_MODULES
    }
    for node in ast.walk(tree):
        names: set[str] = set()
        if isinstance(node, ast.ImportFrom) and node.module in OF_MODULES:
            names = {alias.name for alias in node.names} & {*OWN_NAMES, "replace"}
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in modules:
                names = {node.attr} & OF_MODULES[modules[owner]]
            elif node.attr != "move":  # of a tensor
                names = {node.attr} & OWN_NAMES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = [keyword.arg for keyword in node.keywords]
            one = len(node.args) == 1 and not given
            if node.func.attr == "replace" and (one or "target" in given):  # Path.replace
                names = {"replace"}
            words = [
                item.value
                for argument in node.args
                if isinstance(argument, ast.List)
                for item in argument.elts[:1]
                if isinstance(item, ast.Constant)
            ]
            names |= {str(word) for word in words} & SHELL
        found += [f"{name}:{node.lineno}" for name in sorted(names)]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import shutil as sh; sh.rmtree(p)",
        "from shutil import rmtree as r; r(p)",
        "import shutil as sh; sh.move(p, q)",
        "import os as o; o.replace(p, q)",
        "import shutil; f = shutil.rmtree",
        "import os; map(os.rmdir, p)",
        "p.replace(q)",
        "p.replace(target=q)",
        "p.rename(q)",
        "import subprocess; subprocess.run(['rm', '-rf', p])",
    ],
)
def test_every_way_of_deleting_or_moving_is_seen(line: str) -> None:
    assert calls_of(line)


@pytest.mark.parametrize("line", ["text.replace('a', 'b')", "tensor.move(1)", "run(['ls', p])"])
def test_what_moves_nothing_is_not(line: str) -> None:
    assert not calls_of(line)


def test_folders_are_deleted_renamed_and_copied_in_one_module_alone() -> None:
    """Whoever needs it asks `inference.folders`, which asks whose the folder is."""
    assert calls_of((REPOSITORY / FOLDERS).read_text(encoding="utf-8"))
    allowed = {FOLDERS: {*OWN_NAMES, "replace"}, "inference/writers.py": {"rename", "rmdir"}}
    allowed |= {name: {"replace"} for name in REPLACE_FILES}
    wrong = {}
    for path in sources():
        name = path.relative_to(REPOSITORY).as_posix()
        known = allowed.get(name, set())
        source = path.read_text(encoding="utf-8")
        calls = [call for call in calls_of(source) if call.split(":")[0] not in known]
        wrong |= {name: calls} if calls else {}
    assert not wrong
