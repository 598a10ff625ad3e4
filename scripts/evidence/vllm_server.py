"""vLLM's OpenAI server as a process group that can be stopped, frozen and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from heads.api.errors import UserError
from inference.measure.vllm_process import inherited

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
READY_SECONDS = 400.0
ROOT = Path(__file__).resolve().parents[2]


class VllmServer:
    """A server on a fixed free port of loopback, whose model is called tiny."""

    def __init__(
        self, python: str, model: Path, log: Path, rows: int = 4, more: Sequence[str] = ()
    ) -> None:
        """log: file for its output; rows: requests decoded together; more: further arguments, which
        override the others."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.command = [
            python,
            # the command line of vllm-cpu does not find its version
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "tiny",
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            str(rows),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *more,
        ]

    def launch(self) -> None:
        """Start the process without waiting."""
        environment = {**inherited(), "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                env={**environment, **SETTINGS},
                start_new_session=True,
            )

    def start(self) -> None:
        """Start, and wait until it answers; raises `UserError` if it does not."""
        self.launch()
        begin = time.monotonic()
        while time.monotonic() - begin < READY_SECONDS:
            if self.process is None or self.process.poll() is not None:
                raise UserError(f"vLLM's server ended: {self.last_words()}")
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(1.0)
        raise UserError(
            f"vLLM's server is not up after {READY_SECONDS:g} seconds: {self.last_words()}"
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The server is up within the block, and killed at its end."""
        try:
            self.start()
            yield
        finally:
            self.kill()

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:]

    def send(self, what: signal.Signals) -> None:
        """Send a signal to the server and the processes that it started."""
        if self.process is not None:
            os.killpg(self.process.pid, what)

    def kill(self) -> None:
        """End it at once, like a machine that fails."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGKILL)
            self.process.wait()
            self.process = None
