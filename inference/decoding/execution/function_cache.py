"""Compiled functions kept on disk, so that later processes do not compile them again.

Inductor has such caches, but not for functions whose weights are constants. It turns a graph into a
Python module that contains the C++, and constants: the weights in the order in which the products
read them. An entry holds the module and the names of its constants. The constants are separate
files named by content, so that steps with the same weights share them. The C++ compiler's results
are in inductor's cache; if the results of an entry are missing there, it is compiled again.

A function's key is a hash of everything that it depends on: the graph, the layouts of its inputs,
the content of its weights, the number of threads, the machine, torch, and this package's settings
of inductor. Entries are stored under inductor's folder (TORCHINDUCTOR_CACHE_DIR), which torch also
runs code from; `MOST_BYTES` bounds their size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from inference.kernels.cpp_operations import cpp_sources
from inference.manifest import write_bytes

logger = logging.getLogger(__name__)
MOST_BYTES = 4 << 30
"""Most bytes of all entries and constants; the least recently used entries are removed first."""
MOST_WEIGHTS = 1 << 30
"""Most bytes of a graph's weights; functions with more are not kept."""
CALLING = "def _wrap_func("
"""The beginning of the part of a module that calls its C++."""
Function = Callable[..., Any]
_Address = tuple[int, torch.Size, tuple[int, ...], torch.dtype]

_constants: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
"""Constants of compiled functions by content, shape and type."""


# Keys


def layout(graph: GraphModule, arguments: Sequence[Tensor]) -> str:
    """What a compiled graph depends on besides its weights, as text: the operations, independent of
    the names that tracing gave their values, and the layouts of the inputs."""
    number = {node: place for place, node in enumerate(graph.graph.nodes)}

    def plain(value: Any) -> Any:
        return map_arg(value, lambda node: f"%{number[node]}")

    operations = []
    for node in graph.graph.nodes:
        name = str(node.target) if node.op.startswith("call") else ""
        operations.append((node.op, name, plain(node.args), plain(node.kwargs)))
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in arguments]
    return repr((operations, layouts, torch.get_num_threads()))


def weights_of(graph: GraphModule) -> list[Tensor]:
    """The weights that a graph reads, in its order."""
    return [getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")]


def key_of(graph: GraphModule, arguments: Sequence[Tensor], settings: str) -> str:
    """The key of a function; empty if it is not kept. settings: the settings of inductor."""
    weights = weights_of(graph)
    if not all(map(_is_plain, weights)):
        return ""
    if sum(weight.nbytes for weight in weights) > MOST_WEIGHTS:
        return ""
    machine = (platform.machine(), torch.backends.cpu.get_cpu_capability())
    versions = (Path(__file__).read_text("utf-8"), torch.__version__, platform.python_version())
    facts = repr((versions, machine, settings, cpp_sources(), layout(graph, arguments)))
    found = hashlib.sha256(facts.encode())
    for weight in weights:
        found.update(repr((weight.shape, weight.stride(), weight.dtype)).encode())
        found.update(raw(weight))
    return found.hexdigest()


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose elements can be written and read."""
    return type(value) in (Tensor, nn.Parameter) and not value.is_mkldnn


def raw(tensor: Tensor) -> bytes:
    """The memory of a tensor, from its first element to its last."""
    extent = _extent(tensor.shape, tensor.stride())
    with _disable_current_modes():
        memory = tensor.detach().as_strided((extent,), (1,))
        return memory.view(torch.uint8).numpy().tobytes()


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from a tensor's first element to its last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def shared(data: Tensor) -> Tensor:
    """The first live constant with this one's content and layout, or this one."""
    if type(data) is not Tensor or data.is_mkldnn or not data.is_contiguous():
        return data
    name = hashlib.sha256(raw(data)).hexdigest(), (*data.shape,), data.stride(), data.dtype
    return _constants.setdefault(name, data)


# What is kept


@dataclass
class Made:
    """What inductor makes of a graph: the number of modules, the code and constants of the last
    one, and the inputs and results of its first call."""

    modules: int = 0
    code: str = ""
    constants: dict[str, Tensor] = field(default_factory=dict)
    given: list[_Address] | None = None
    results: list[_Address] = field(default_factory=list)

    def watch(self, module: Any) -> None:
        """Note the first call of a module."""
        call = module.call

        def noting(given: list[Tensor]) -> list[Tensor]:
            addresses = [_address(each) for each in given] if self.given is None else []
            results: list[Tensor] = call(given)
            if self.given is None:
                self.given, self.results = addresses, [_address(each) for each in results]
            return results

        module.call = noting


@contextmanager
def recording() -> Iterator[Made]:
    """Record what inductor makes within the block."""
    from torch._inductor import codecache  # seconds to import
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    made = Made()
    load, note = codecache.PyCodeCache.load_by_key_path, CppWrapperCpu.write_constant

    def load_and_keep(key: str, path: str, *args: Any, **kwargs: Any) -> Any:
        module = load(key, path, *args, **kwargs)
        attributes = kwargs.get("attrs")
        if attributes is not None:
            made.modules += 1
            made.code = Path(path).read_text("utf-8")
            made.constants = {name: attributes[name] for name in _read(made.code) & {*attributes}}
            made.watch(module)
        return module

    # The note is a constant's address in memory; with it no process would find another one's C++.
    setattr(CppWrapperCpu, "write_constant", lambda *_: None)  # noqa: B010
    setattr(codecache.PyCodeCache, "load_by_key_path", load_and_keep)  # noqa: B010
    try:
        yield made
    finally:
        setattr(codecache.PyCodeCache, "load_by_key_path", load)  # noqa: B010
        setattr(CppWrapperCpu, "write_constant", note)  # noqa: B010


def keeping(function: Function, made: Made, key: str) -> Function:
    """`function`, kept under `key` after its first call. Until then the C++ compiler may still run,
    and the mapping of its arguments to the module's is not known."""
    if not key or made.modules != 1:
        return function
    kept = False

    def call(*arguments: Tensor) -> Any:
        nonlocal kept
        if kept:
            return function(*arguments)
        given = [_address(each) for each in arguments]
        results = function(*arguments)
        _keep(key, made, given, results)
        kept = True
        return results

    return call


def _keep(key: str, made: Made, given: list[_Address], results: Any) -> None:
    """Write a function after its first call, if it can be kept and the disk has room."""
    entry = _entry(made, given, results)
    if entry is None:
        return
    try:
        _store(key, entry, made.constants)
    except OSError as error:
        logger.warning("a compiled step is not kept for later runs: %s", error)


def _read(code: str) -> set[str]:
    """The names that a module's call reads. Inputs that a graph does not read, such as a weight
    packed for a library product that was not chosen, are not among its constants."""
    calling = code.partition(CALLING)[2].partition("\ndef ")[0]
    return {*re.findall(r"\w+", calling)}


def _address(tensor: Tensor) -> _Address:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _entry(made: Made, given: list[_Address], results: Any) -> dict[str, Any] | None:
    """The content of a function's entry. None if its module takes other arguments than the
    function's, or the function returns other results than its module's."""
    single = isinstance(results, Tensor)
    outer = [_address(each) for each in ([results] if single else results)]
    if CALLING not in made.code or not all(map(_is_plain, made.constants.values())):
        return None
    if made.given is None or not {*made.given} <= {*given} or not {*outer} <= {*made.results}:
        return None
    return {
        "code": made.code,
        "takes": [given.index(each) for each in made.given],
        "gives": [made.results.index(each) for each in outer],
        "single": single,
    }


# On disk


def folder() -> Path:
    """The folder of all entries."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "headstart"


def _store(key: str, entry: dict[str, Any], constants: dict[str, Tensor]) -> None:
    """Write an entry, its constants first, and remove old entries if needed."""
    described = {}
    for name, constant in constants.items():
        content = raw(constant)
        digest = hashlib.sha256(content).hexdigest()
        file = _constant_file(digest)
        if not file.is_file():
            write_bytes(file, content)
        dtype = str(constant.dtype).removeprefix("torch.")
        layout = {"shape": constant.shape, "stride": constant.stride(), "dtype": dtype}
        described[name] = {"sha256": digest, **layout}
    entry = {**entry, "constants": described}
    write_bytes(_entry_file(key), json.dumps(entry).encode())
    make_room()


def load(key: str) -> Function | None:
    """The function kept under `key`; None if there is none or it is incomplete."""
    from torch._inductor.codecache import PyCodeCache

    if not key:
        return None
    try:
        entry = json.loads(_entry_file(key).read_bytes())
        constants = {name: _constant(facts) for name, facts in entry["constants"].items()}
        if changed := [name for name, constant in constants.items() if constant is None]:
            raise ValueError(f"{len(changed)} of its constants were changed")
        module_key, path = PyCodeCache.write(entry["code"])
        call = PyCodeCache.load_by_key_path(module_key, path, attrs=constants).call
        _entry_file(key).touch()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("a compiled step that was kept cannot be read and is made anew: %s", error)
        return None
    takes, gives, single = entry["takes"], entry["gives"], entry["single"]

    def function(*arguments: Tensor) -> Any:
        results = call([arguments[place] for place in takes])
        return results[gives[0]] if single else [results[place] for place in gives]

    return function


def _constant(facts: dict[str, Any]) -> Tensor | None:
    """A constant from disk; None if its content has changed. Its file is then removed, so that the
    next entry with this constant writes it again."""
    shape, stride = (*facts["shape"],), (*facts["stride"],)
    dtype = getattr(torch, facts["dtype"])
    name = facts["sha256"], shape, stride, dtype
    known = _constants.get(name)
    if known is not None:
        return known
    file = _constant_file(facts["sha256"])
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != facts["sha256"]:
        file.unlink(missing_ok=True)
        return None
    with _disable_current_modes():
        memory = torch.empty(_extent(shape, stride), dtype=dtype)
        memory.view(torch.uint8).numpy()[:] = np.frombuffer(content, dtype=np.uint8)
        return _constants.setdefault(name, memory.as_strided(shape, stride))


def make_room(most: int = MOST_BYTES) -> None:
    """If all entries and constants exceed `most` bytes, remove the least recently used entries
    until the rest fits, and the constants that no entry names."""
    entries, sizes = sorted(folder().glob("*.json"), key=_used), dict[str, int]()
    for file in folder().glob("*.bin"):
        sizes[file.stem] = _size(file)
    if sum(map(_size, entries)) + sum(sizes.values()) <= most:
        return
    kept: set[str] = set()
    for file in reversed(entries):
        named = set[str]()
        with suppress(OSError, ValueError, KeyError):
            facts = json.loads(file.read_bytes())["constants"].values()
            named = {each["sha256"] for each in facts}
        most -= _size(file) + sum(sizes.get(name, 0) for name in named - kept)
        if most < 0:
            file.unlink(missing_ok=True)
        else:
            kept |= named
    for name in sizes.keys() - kept:
        _constant_file(name).unlink(missing_ok=True)


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0


def _used(file: Path) -> float:
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _entry_file(key: str) -> Path:
    return folder() / f"{key}.json"


def _constant_file(digest: str) -> Path:
    return folder() / f"{digest}.bin"
