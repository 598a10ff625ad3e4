"""Processes for tests, forked from one that has imported torch, transformers and our stages.

A new Python spends four seconds of processor time on these imports. Where a test needs a process
but not its start, it takes one from here: `start("scripts.cli", "train", ...)` runs a module as
`python -m` does, with an environment and a working directory of its own, in a process that can be
waited for, killed and read from. Each worker of pytest has one server, started when the first test
asks for it; it ends with the worker, and so do its processes. `start("-c", program, ...)` runs a
program's text.

What libraries read from the environment when they are imported (`OMP_NUM_THREADS`, `HF_HUB_*`) is
the worker's: tests that change it start a Python of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parents[1]
NEEDED = ("train.run", "inference.decoding.engine", "scripts.run.runner")
"""What the server imports."""
MOST = 1 << 20
"""Bytes of a request, at most."""


class Process:
    """A forked process, with the part of `subprocess.Popen` that tests use.

    stdin, stdout, stderr: pipes; stderr is None where `stdout` has both streams.
    """

    def __init__(self, request: dict[str, Any], apart: bool) -> None:
        self.args = [request["module"], *request["arguments"]]
        self.returncode: int | None = None
        given = os.pipe()
        pipes = [os.pipe() for _ in range(2 if apart else 1)]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server())
        writing = [end for _, end in pipes]
        message = json.dumps(request).encode()
        socket.send_fds(self._connection, [message + b"\n"], [given[0], writing[0], writing[-1]])
        for end in (given[0], *writing):
            os.close(end)
        self.stdin: IO[str] = os.fdopen(given[1], "w", encoding="utf-8")
        self.stdout: IO[str] = os.fdopen(pipes[0][0], encoding="utf-8")
        self.stderr: IO[str] | None = os.fdopen(pipes[1][0], encoding="utf-8") if apart else None
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative when a signal ended it."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._answers.readline())
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from error
            self._answers.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        if self.returncode is None:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._connection, selectors.EVENT_READ)
                if waiting.select(0):
                    self.wait()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it prints until its end."""
        texts = ["", ""]

        def read(index: int, stream: IO[str]) -> None:
            texts[index] = stream.read()

        self.stdin.close()
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        readers = [
            threading.Thread(target=read, args=each, daemon=True) for each in enumerate(streams)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        for stream in streams:
            stream.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal to it, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    module: str,
    *arguments: object,
    env: dict[str, str] | None = None,
    cwd: Path = REPOSITORY,
    apart: bool = False,
) -> Process:
    """Start `module` as `python -m` does. env: its whole environment, in place of this process's.
    apart: give standard error a pipe of its own."""
    request = {
        "module": module,
        "arguments": [str(item) for item in arguments],
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd),
    }
    return Process(request, apart)


def run(
    module: str, *arguments: object, timeout: float = 600, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `module` to its end, its streams apart; see `start`."""
    process = start(module, *arguments, apart=True, **options)
    try:
        out, errors = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@cache
def server() -> str:
    """The address of this worker's server, which is started."""
    folder = tempfile.mkdtemp(prefix="forked")  # a socket's address has at most 108 characters
    address = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # libraries speak when they are imported
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        Path(address).unlink()
        Path(folder).rmdir()

    atexit.register(end)
    return address


# The server


class Server:
    """Forks a process per connection and tells each one's end to who asked for it."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.asked: dict[int, socket.socket] = {}
        """Process -> the connection it was asked for on."""
        self.ends, self.ended = socket.socketpair()
        self.ends.setblocking(False)
        self.ended.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.ended.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Work until standard input ends; returns in every forked process, with its work in
        `sys.argv`."""
        with selectors.DefaultSelector() as ready:
            for each in (self.listener, self.ends, sys.stdin):
                ready.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self.listener:
                        connection, _ = self.listener.accept()
                        if self.fork(connection):
                            return
                        ready.register(connection, selectors.EVENT_READ)
                    elif key.fileobj is self.ends:
                        with contextlib.suppress(BlockingIOError):
                            self.ends.recv(MOST)
                        self.tell(ready)
                    elif key.fileobj is sys.stdin:
                        for child in self.asked:
                            os.kill(child, signal.SIGKILL)
                        os._exit(0)
                    else:  # who asked has gone
                        self.forget(key.fileobj, ready)

    def fork(self, connection: socket.socket) -> bool:
        """Fork the process that a connection asks for; whether this is it."""
        data, streams, _, _ = socket.recv_fds(connection, MOST, 3)
        while not data.endswith(b"\n"):
            data += connection.recv(MOST)
        child = os.fork()
        if child:
            for stream in streams:
                os.close(stream)
            self.asked[child] = connection
            connection.sendall(f"{child}\n".encode())
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (connection, self.listener, self.ends, self.ended, *self.asked.values()):
            each.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        request = json.loads(data)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path.insert(0, request["cwd"])
        sys.argv = [request["module"], *request["arguments"]]
        return True

    def tell(self, ready: selectors.BaseSelector) -> None:
        """Tell the ends of processes."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                child, status = found
                connection = self.asked.pop(child, None)
                if connection is not None:
                    with contextlib.suppress(OSError):
                        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    ready.unregister(connection)
                    connection.close()

    def forget(self, connection: Any, ready: selectors.BaseSelector) -> None:
        """Kill the process that nobody waits for."""
        ready.unregister(connection)
        for child, other in list(self.asked.items()):
            if other is connection:
                del self.asked[child]
                os.kill(child, signal.SIGKILL)
        connection.close()


def main(arguments: Sequence[str]) -> None:
    """Import, then serve; forked processes go on from here."""
    for name in NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Server(socket.socket(fileno=int(arguments[0]))).serve()
    status = 0
    try:
        if sys.argv[0] == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        status = 1
    # What an interpreter does at its end, but for taking all modules apart, which copies the memory
    # shared with the server.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
