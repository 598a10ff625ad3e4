"""Mutation testing: change one expression of the source at a time and see whether a test fails.

    python -m tests.mutate sample --trees . ../before --count 200 --folder outputs/mutants
    python -m tests.mutate trace --trees . --folder outputs/mutants
    python -m tests.mutate run --trees . --folder outputs/mutants
    python -m tests.mutate show --trees . ../before --folder outputs/mutants

`sample` draws mutants with a seed from the code that all given checkouts share, so that the tests
of two versions are asked about the same mutants: a mutant is found again by its function's name and
its statement's text, wherever the function stands. `trace` runs a checkout's tests once and notes
which of them execute each mutated statement; `run` then runs those tests, shortest files first,
until one fails. All work on copies; `run` resumes where it stopped. A mutant that no test fails on
either changes nothing (an equivalent mutant) or shows what the tests do not look at.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

PACKAGES = ("heads", "inference", "train", "scripts", "conf", "tests")
SCOPE = (
    "heads/",
    "inference/decoding/",
    "inference/measure/metrics.py",
    "inference/parity.py",
    "train/",
)
CRITICAL = ("/rules/", "metrics.py", "parity.py", "train/state.py", "train/data/streams.py")
"""A mutant here that survives gets a test; `--critical` is how many of the sample are from here."""
HEAVY = (
    "torch",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "datasets",
    "peft",
    "hydra",
    "pydantic",
    "rich.progress",
    "pytest",
    "hypothesis",
)
"""Imported once, before the processes that run tests are forked."""
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "amin": "amax", "any": "all", "argmin": "argmax", "floor": "ceil"}
NAMES |= {new: old for old, new in NAMES.items()}
PLUGIN = """
import json, os
_seen, _file = set(), None
def hit(mutant):
    global _file
    import torch
    if torch.compiler.is_compiling():
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (mutant, test) not in _seen:
        _seen.add((mutant, test))
        with open(f"{os.environ['MUTATION_HITS']}/{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps([mutant, test]) + chr(10))
def pytest_runtest_logreport(report):
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        with open(f"{os.environ['MUTATION_HITS']}/reports.txt", "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.duration]) + chr(10))
"""


@dataclass(frozen=True)
class Mutant:
    """function, statement: where it is (unique in every tree); node: index of the changed node in
    a walk through the statement; change: the operator; text: what stands there instead; file: in
    the first tree."""

    name: str
    file: str
    function: str
    statement: str
    node: int
    change: str
    text: str


@dataclass(frozen=True)
class Place:
    """A statement, or the head of a compound statement (`parts`), in one checkout."""

    file: str
    function: str
    statement: str
    node: ast.stmt
    parts: list[ast.expr]


def source_files(tree: Path) -> Iterator[Path]:
    """Every module of the packages that mutants are drawn from."""
    for package in ("heads", "inference", "train"):
        yield from sorted((tree / package).rglob("*.py"))


def find_places(tree: Path) -> dict[tuple[str, str], Place]:
    """(function, statement) -> place, for those that occur once in a checkout."""
    found: dict[tuple[str, str], list[Place]] = defaultdict(list)

    def visit(node: ast.AST, file: str, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.stmt) and function:
                parts = [part for part in ast.iter_child_nodes(child) if isinstance(part, ast.expr)]
                if isinstance(child, ast.AnnAssign):
                    parts = [child.value] if child.value else []
                compound = hasattr(child, "body")
                if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Raise | ast.Assert):
                    text = " ; ".join(ast.unparse(part) for part in parts)
                    text = f"{type(child).__name__} {text}" if compound else ast.unparse(child)
                    found[function, text].append(Place(file, function, text, child, parts))
            decorated = [ast.unparse(item) for item in getattr(child, "decorator_list", [])]
            if not any("jit" in item for item in decorated):
                visit(child, file, inside)

    for path in source_files(tree):
        visit(ast.parse(path.read_text()), path.relative_to(tree).as_posix(), "")
    return {key: places[0] for key, places in found.items() if len(places) == 1}


def list_changes(place: Place) -> Iterator[tuple[int, str, str]]:
    """(node, operator, new text) for every change of a statement; node -1 is the statement."""
    node = place.node
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield -1, "delete", "pass"
    if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield -1, "return None", "return None"
    for index, part in enumerate(walk(place)):
        for change, text in change_expression(part):
            yield index, change, text
        if isinstance(node, ast.If | ast.While) and part is node.test:
            yield index, "negate", f"(not ({ast.unparse(part)}))"


def walk(place: Place) -> list[ast.expr]:
    """The expressions of a statement in a fixed order, without what is in an f-string."""
    found: list[ast.expr] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Lambda):
            return
        if isinstance(node, ast.expr):
            found.append(node)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for part in place.parts:
        visit(part)
    return found


def change_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    """(operator, new text) for the changes of one expression itself."""
    text = ast.unparse(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        new = ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
        yield "compare", f"({ast.unparse(new)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not is_text(node):
        swap = SWAPS[type(node.op)]()
        yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, swap, node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield "logic", f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield "branch", f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", f"({text} + 1)"
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield "name", f"{ast.unparse(node.value)}.{NAMES[node.attr]}"
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield "name", NAMES[node.id]


def is_text(node: ast.BinOp) -> bool:
    """Whether an operation joins or formats strings, or unites types."""
    kinds = ast.JoinedStr, ast.Constant
    sides = [side for side in (node.left, node.right) if isinstance(side, kinds)]
    return any(isinstance(s, ast.JoinedStr) or isinstance(s.value, str | None) for s in sides)


def sample(given: argparse.Namespace) -> None:
    """Draw the mutants and write mutants.json."""
    trees = [find_places(tree) for tree in given.trees]
    shared = set(trees[0]).intersection(*trees[1:])
    found: dict[bool, list[Mutant]] = {True: [], False: []}
    for key in sorted(shared):
        place = trees[0][key]
        if not place.file.startswith(SCOPE):
            continue
        for node, change, text in list_changes(place):
            critical = any(part in place.file for part in CRITICAL)
            mutant = Mutant("", place.file, *key, node, change, text)
            found[critical].append(mutant)
    draw = random.Random(given.seed)
    chosen = draw.sample(found[True], given.critical)
    chosen += draw.sample(found[False], given.count - given.critical)
    draw.shuffle(chosen)
    records = [{**asdict(mutant), "name": f"m{i:03}"} for i, mutant in enumerate(chosen)]
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "mutants.json").write_text(json.dumps(records, indent=1) + "\n")
    print(f"{given.count} of {sum(map(len, found.values()))} mutants: {given.folder}/mutants.json")


def read_mutants(folder: Path) -> list[Mutant]:
    """The sample."""
    path = folder / "mutants.json"
    if not path.is_file():
        sys.exit(f"{path} is not there: run `sample` first.")
    return [Mutant(**record) for record in json.loads(path.read_text())]


def span(lines: list[bytes], node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Where a node begins and ends, in bytes of its file."""
    before = [0]
    for line in lines:
        before.append(before[-1] + len(line))
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return before[node.lineno - 1] + node.col_offset, before[end_line - 1] + end


def mutate(source: bytes, mutant: Mutant, place: Place) -> bytes:
    """The file with the mutant in it."""
    node = place.node if mutant.node < 0 else walk(place)[mutant.node]
    begin, end = span(source.splitlines(keepends=True), node)
    changed = source[:begin] + mutant.text.encode() + source[end:]
    ast.parse(changed)
    return changed


def copy_tree(tree: Path, to: Path) -> None:
    """A copy of what the tests of a checkout read."""
    if to.exists():
        shutil.rmtree(to)
    unwanted = shutil.ignore_patterns("__pycache__", ".venv*", "outputs", ".*_cache")
    shutil.copytree(tree, to, ignore=unwanted, symlinks=True)


def variables(tree: Path, hits: Path) -> dict[str, str]:
    """The environment of the tests of a copied tree."""
    own = {"PYTHONPATH": str(tree), "MUTATION_HITS": str(hits), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


def trace(given: argparse.Namespace) -> None:
    """Run a tree's tests with every mutated statement marked; write which tests reach which."""
    mutants = read_mutants(given.folder)
    for tree in given.trees:
        folder = given.folder / tree.resolve().name
        copy, hits = folder / "traced", folder / "hits"
        copy_tree(tree, copy)
        shutil.rmtree(hits, ignore_errors=True)
        hits.mkdir(parents=True)
        (copy / "mutation_trace.py").write_text(PLUGIN)
        mark(copy, mutants)
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "mutation_trace",
            "-p",
            "no:cacheprovider",
        ]
        with (folder / "trace.log").open("w") as log:
            began = time.monotonic()
            subprocess.run(
                [*words, *shlex.split(given.pytest)],
                cwd=copy,
                env=variables(copy.resolve(), hits.resolve()),
                stdout=log,
                stderr=log,
                check=False,
            )
        print(f"{tree}: {time.monotonic() - began:.0f} s")
        write_coverage(folder)


def mark(tree: Path, mutants: list[Mutant]) -> None:
    """Put a call before every mutated statement of a copy."""
    places = find_places(tree)
    wanted: dict[str, dict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        place = places.get((mutant.function, mutant.statement))
        if place is None:
            continue
        line, column = place.node.lineno, place.node.col_offset
        lines = (tree / place.file).read_text().splitlines()
        while lines[line - 1].lstrip().startswith("elif"):
            # An `elif` is an `If` in the other one's `orelse`: mark the first of the chain.
            line = next(
                i
                for i in range(line - 1, 0, -1)
                if lines[i - 1][:column].isspace()
                and lines[i - 1][column:].startswith(("if", "elif"))
            )
        wanted[place.file][line, column].append(mutant.name)
    for file, marks in wanted.items():
        lines = (tree / file).read_text().splitlines()
        for (line, column), names in sorted(marks.items(), reverse=True):
            calls = "; ".join(f"__import__('mutation_trace').hit('{name}')" for name in names)
            lines.insert(line - 1, " " * column + calls)
        text = "\n".join(lines) + "\n"
        ast.parse(text)
        (tree / file).write_text(text)


def write_coverage(folder: Path) -> None:
    """Write coverage.json: mutant -> tests that passed and reach it, and the tests' seconds.

    What a fixture executes counts for every test of the file.
    """
    passed: dict[str, float] = defaultdict(float)
    failed = set()
    for line in (folder / "hits" / "reports.txt").read_text().splitlines():
        test, outcome, seconds = json.loads(line)
        passed[test] += seconds
        if outcome != "passed":
            failed.add(test)
    of_file: dict[str, list[str]] = defaultdict(list)
    for test in failed & set(passed):
        del passed[test]
    for test in passed:
        of_file[test.split("::")[0]].append(test)
    reached: dict[str, set[str]] = defaultdict(set)
    for path in (folder / "hits").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            mutant, current = json.loads(line)
            test, _, phase = current.rpartition(" ")
            if phase == "(call)":
                reached[mutant].add(test)
            elif test:
                reached[mutant].update(of_file[test.split("::")[0]])
    tests = {mutant: sorted(names & set(passed)) for mutant, names in reached.items()}
    record = {"failed": sorted(failed), "seconds": passed, "tests": tests}
    (folder / "coverage.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(passed)} tests passed, {len(failed)} did not; {len(tests)} mutants are reached")


def choose_tests(file: str, tests: list[str], seconds: dict[str, float], limit: float) -> list[str]:
    """Tests of at most `limit` seconds in all: the ones named after the file first, then one of
    each file in turn, shortest first."""
    own = f"test_{Path(file).stem}.py"
    files: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: seconds[test]):
        files[test.split("::")[0]].append(test)
    turns = [
        (not name.endswith(own), turn, seconds[test], test)
        for name, group in files.items()
        for turn, test in enumerate(group)
    ]
    chosen: list[str] = []
    spent = 0.0
    for _, _, cost, test in sorted(turns):
        if not chosen or spent + cost <= limit:
            chosen.append(test)
            spent += cost
    return chosen


def run_tests(tree: Path, tests: list[str], log: Path, limit: float) -> str:
    """Run tests in a forked process; returns 'survived', 'timeout', or the test that failed."""
    child = os.fork()
    if child == 0:
        os.setpgrp()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(tree)
        os.environ |= variables(tree, log.parent)
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.path.insert(0, str(tree))
        sys.dont_write_bytecode = True
        import pytest

        status = 3
        with contextlib.suppress(BaseException):
            status = pytest.main(
                ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *tests]
            )
        sys.stdout.flush()
        os._exit(int(status))
    began = time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() - began > limit:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return "timeout"
    if os.waitstatus_to_exitcode(status) == 0:
        return "survived"
    failures = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if line.startswith(("FAILED", "ERROR "))
    ]
    return failures[0].split(" - ")[0].split(" ", 1)[1] if failures else "ended"


def work(
    tree: Path, folder: Path, mutants: list[Mutant], part: int, given: argparse.Namespace
) -> None:
    """Run the mutants of one worker on a copy of the tree; one line of results.jsonl each."""
    copy = (folder / f"worker{part}").resolve()
    copy_tree(tree, copy)
    # Bytecode that is checked by its source's hash: a mutant of the same size and second is seen.
    compileall.compile_dir(copy, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    places, coverage = find_places(copy), json.loads((folder / "coverage.json").read_text())
    seconds = coverage["seconds"]
    sound: dict[str, bool] = {}
    """Whether a test passes without a mutant, for those that failed with one."""

    def ask(mutant: Mutant, place: Place) -> str:
        path, log = copy / place.file, folder.resolve() / f"{mutant.name}.log"
        while True:
            reached = [t for t in coverage["tests"].get(mutant.name, ()) if sound.get(t, True)]
            if not reached:
                return "unreached"
            tests = choose_tests(place.file, reached, seconds, given.seconds)
            limit = 90 + 6 * sum(seconds[test] for test in tests)
            original = path.read_bytes()
            path.write_bytes(mutate(original, mutant, place))
            outcome = run_tests(copy, tests, log, limit)
            path.write_bytes(original)
            if outcome in seconds and outcome not in sound:
                sound[outcome] = run_tests(copy, [outcome], log, limit) == "survived"
            if sound.get(outcome, True):
                return outcome

    for mutant in mutants:
        began, place = time.monotonic(), places.get((mutant.function, mutant.statement))
        outcome = ask(mutant, place) if place else "absent"
        record = {"name": mutant.name, "outcome": outcome, "seconds": time.monotonic() - began}
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def run(given: argparse.Namespace) -> None:
    """Run, in `--workers` processes, every mutant without a result that all given trees have."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in HEAVY:
        __import__(name)
    shared = set.intersection(*(set(find_places(tree)) for tree in given.trees))
    mutants = [m for m in read_mutants(given.folder) if (m.function, m.statement) in shared]
    for tree in given.trees:
        folder = given.folder / tree.resolve().name
        done = read_results(folder)
        left = [mutant for mutant in mutants if mutant.name not in done]
        children = []
        for part in range(given.workers):
            child = os.fork()
            if child == 0:
                work(tree, folder, left[part :: given.workers], part, given)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    show(given)


def read_results(folder: Path) -> dict[str, str]:
    """Mutant -> outcome."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {record["name"]: record["outcome"] for record in map(json.loads, lines)}


def is_caught(outcome: str) -> bool:
    """Whether a test noticed a mutant. One that only took too long is not counted: fixtures may."""
    return outcome not in ("survived", "unreached", "absent", "timeout")


def show(given: argparse.Namespace) -> None:
    """Print, over the mutants that every given tree has run, the share caught, and survivors."""
    mutants = read_mutants(given.folder)
    results = [read_results(given.folder / tree.resolve().name) for tree in given.trees]
    common = [m for m in mutants if all(r.get(m.name, "absent") != "absent" for r in results)]
    for tree, result in zip(given.trees, results, strict=True):
        outcomes = {mutant.name: result[mutant.name] for mutant in common}
        caught = sum(map(is_caught, outcomes.values()))
        kinds = Counter(
            o if o in ("survived", "unreached", "timeout") else "caught" for o in outcomes.values()
        )
        share = caught / max(len(common), 1)
        print(f"{tree}: {caught} of {len(common)} caught ({share:.1%}) {dict(kinds)}")
    for mutant in common:
        marks = ["caught" if is_caught(r[mutant.name]) else r[mutant.name] for r in results]
        if set(marks) != {"caught"}:
            critical = "!" if any(part in mutant.file for part in CRITICAL) else " "
            print(f"{critical} {mutant.name} {' '.join(marks)} {mutant.file}:{mutant.function}:")
            print(f"    {mutant.statement[:90]} [{mutant.change}: {mutant.text[:60]}]")


def main() -> None:
    """The command line. It imports nothing of the packages, which the forked tests import anew."""
    parser = argparse.ArgumentParser("python -m tests.mutate", description=__doc__)
    add = parser.add_argument
    add("work", choices=("sample", "trace", "run", "show"))
    add("--trees", type=Path, nargs="+", default=[Path()], help="checkouts")
    add("--folder", type=Path, default=Path("outputs/mutants"), help="where everything is written")
    add("--count", type=int, default=200)
    add("--critical", type=int, default=60, help="mutants of rules, metrics, parity and resume")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=30.0, help="of tests per mutant")
    add("--workers", type=int, default=2)
    add("--pytest", default="-n 2 --dist loadfile", help="options for trace")
    given = parser.parse_args()
    globals()[given.work](given)


if __name__ == "__main__":
    main()
