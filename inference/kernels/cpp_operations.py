"""C++ functions that inductor calls inside compiled steps on CPUs, instead of Headstart's custom
operations.

In a trace, an operation runs its reference. Within `in_cpp`, inductor puts the C++ of every
operation registered by `call_in_cpp` into the code that it generates, and calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Inductor calls an operation on a CPU by this name. It adds `extern` before the text and a
# semicolon after it, and puts all of it between the braces of an `extern "C"`.
_FUNCTION = """AOTITorchError aoti_torch_cpu_{name}({arguments}, AtenTensorHandle* out);
}}
{source}
extern "C" {{
__attribute__((visibility("hidden")))
AOTITorchError aoti_torch_cpu_{name}({arguments}, AtenTensorHandle* out) {{
  *out = headstart::{name}({names});
  return AOTI_TORCH_SUCCESS;
}}
"""
_functions: dict[Any, str] = {}
"""C++ of every operation."""


def call_in_cpp(operation: Any, source: Path, arguments: str) -> None:
    """Register the C++ of `operation`: `source` defines headstart::<the operation's name>, which
    returns the result's handle.

    arguments: its C++ parameters, as inductor passes them: tensors are AtenTensorHandle, optional
    ones a pointer to it, numbers double or int64_t.
    """
    overload = operation._opoverload
    name = overload._schema.name.split("::")[1]
    names = ", ".join(argument.split()[-1] for argument in arguments.split(","))
    text = source.read_text()
    _functions[overload] = _FUNCTION.format(
        name=name, arguments=arguments, names=names, source=text
    )


def cpp_sources() -> list[str]:
    """The C++ of every operation."""
    return sorted(_functions.values())


@contextmanager
def in_cpp() -> Iterator[None]:
    """Within the block, code that inductor compiles calls the C++ functions."""
    import torch._inductor.config as inductor_config  # seconds to import

    known = inductor_config.aot_inductor.custom_ops_to_c_shims
    own = {operation: [text] for operation, text in _functions.items()}
    with inductor_config.patch({"aot_inductor.custom_ops_to_c_shims": {**known, **own}}):
        yield
