"""The processes of one launch, forked from one that has imported what all of them need: `python -m
tests.train.ranks N module ...`.

What torchrun does for a test that is not about torchrun, without an import of torch in each process
and one more in the launcher. A SIGTERM or SIGUSR1 that it gets is passed on to all of them.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys

from tests.loopback import free_port

NEEDED = ("train.run", "inference.decoding.engine")


def main() -> int:
    """Run `module` in N processes; returns the first status that is not 0, having ended the
    others."""
    count, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for name in (*NEEDED, *(["deepspeed"] if "deepspeed" in " ".join(arguments) else [])):
        importlib.import_module(name)
    port = free_port()
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_PORT": port,
            }
            os.environ.update(
                {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}
            )
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        children.append(child)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: [os.kill(child, number) for child in children])
    return first_failure(children)


def first_failure(children: list[int]) -> int:
    """Wait for all processes; when one fails, end the others."""
    failure, left = 0, set(children)
    while left:
        child, status = os.wait()
        left.discard(child)
        code = os.waitstatus_to_exitcode(status)
        if code and not failure:
            failure = abs(code)
            for other in left:
                os.kill(other, signal.SIGTERM)
    return failure


if __name__ == "__main__":
    sys.exit(main())
