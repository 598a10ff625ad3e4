"""A stand-in for an engine's server of hidden states; a real target computes the states. For vLLM:
its API over HTTP, and files and locks as `ExampleHiddenStatesConnector` leaves them. For SGLang: the
states in the answer of /generate, as the source of sglang 0.5.23 writes them."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from heads.api.features import FeatureSpec
from inference.target.model import TargetModel
from train.features.vllm.states_file import NAME

UNPREPARED = (
    "The server is not configured to return hidden states. Please set "
    "`--enable-return-hidden-states`."
)
PASS = threading.Lock()
"""Stubs may have one target together."""


class Stub:
    """A server of `target` on loopback. faults: what befalls the next requests for states, in
    order: a status; "cut" (the connection), "hang", "nothing" (no file: its folder is full), "half"
    (of the file), "late" (the file comes after the answer), "other" (states of another text),
    "foreign" (the name of somebody else's file), "another" (answer and states of another text),
    "aborted" (answer and file come half a second later), "paused" (the engine ends the request
    without a token); of /generate: "cached" (the first tokens have no states), "null" (in place of a
    number), "infinite" (a number), "stateless", "words" (no JSON), "other" as above; or a
    function: what happens to the server, whose connection is then cut."""

    def __init__(
        self, target: TargetModel, folder: Path, layers: tuple[int, ...], **more: Any
    ) -> None:
        self.target, self.folder, self.layers = target, folder, layers
        self.faults: list[int | str | Callable[[], None]] = []
        self.requests: list[list[int]] = []
        self.token, self.connector, self.longest, self.fp8 = "", True, 65, False
        self.flag, self.width = True, None  # --enable-return-hidden-states; numbers of a state
        self.root = "models/served"
        self.encode = target.tokenizer.encode
        vars(self).update(more)
        self._lock, self.ended = threading.Lock(), threading.Event()
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, always at the same port."""
        stub, self.ended = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if stub.allowed(self):
                    model = {"id": "served", "root": stub.root, "max_model_len": stub.longest}
                    reply(self, 200, {"object": "list", "data": [model]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if stub.allowed(self):
                    (stub.generate if self.path == "/generate" else stub.answer)(self, body)

        class Server(ThreadingHTTPServer):
            allow_reuse_address = daemon_threads = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def allowed(self, handler: BaseHTTPRequestHandler) -> bool:
        if not self.token or handler.headers.get("Authorization") == f"Bearer {self.token}":
            return True
        reply(handler, 401, {"error": "Unauthorized"})
        return False

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """One completion, as the next fault says."""
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.encode(prompt, add_special_tokens=False)
        with self._lock:
            self.requests.append(prompt)
            fault = self.faults.pop(0) if self.faults else ""
        if self.failed(handler, fault, prompt):
            return
        if fault == "another":
            prompt = prompt[::-1]
        path = self.folder / f"cmpl-{handler.headers['X-Request-Id']}-0-1a2b3c4d.safetensors"
        states, choice = self.compute(prompt, body["max_tokens"])
        with_output = body.get("kv_transfer_params", {}).get("include_output_tokens", False)
        tokens = torch.tensor([*prompt, *choice["token_ids"][:-1]] if with_output else prompt)
        states = states[: len(tokens)]
        if fault == "other":
            tokens = tokens.flip(0)
        written = in_fp8(states) if self.fp8 else {"hidden_states": states}
        content = save({**written, "token_ids": tokens})
        with held(path) as release:
            if fault == "aborted":
                self.ended.wait(0.5)
            if fault in ("half", "late"):
                path.write_bytes(content[: len(content) // 2])
            elif fault not in ("nothing", "foreign"):
                path.write_bytes(content)
            if fault != "late":
                release()
            answer = {"choices": [choice]}
            if fault == "foreign":
                path = path.with_name(f"cmpl-{NAME}other-1.safetensors")
            if self.connector:
                answer["kv_transfer_params"] = {"hidden_states_path": str(path)}
            reply(handler, 200, answer)
            if fault == "late":
                time.sleep(0.2)
                path.write_bytes(content)

    def generate(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        """One answer of SGLang's, as the next fault says."""
        prompt, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        with self._lock:
            self.requests.append(prompt)
            fault = self.faults.pop(0) if self.faults else ""
        if not self.flag:
            return reply(handler, 400, {"error": {"message": UNPREPARED}})
        if self.failed(handler, fault, prompt):
            return None
        if fault == "words":
            return reply(handler, 200, "warming up")
        assert limit == 1 and body["return_hidden_states"] is True and body["return_logprob"]
        _, last, logprob, token = self.step(prompt)
        if fault == "other":
            last = self.step(prompt[::-1])[1]
        rows: list[list[Any]] = last[:, : self.width].tolist()
        if fault in ("null", "infinite"):
            rows[0][0] = None if fault == "null" else 1e999
        meta = {
            "id": "3f0c",
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": len(prompt),
            "input_token_logprobs": [],
            "output_token_logprobs": [[logprob, token, None]],
            "completion_tokens": 1,
            "cached_tokens": 0,
        }
        if fault != "stateless":
            meta["hidden_states"] = [rows[2 if fault == "cached" else 0 :]]
        return reply(handler, 200, {"text": "x", "output_ids": [token], "meta_info": meta})

    def failed(
        self,
        handler: BaseHTTPRequestHandler,
        fault: int | str | Callable[[], None],
        prompt: list[int],
    ) -> bool:
        """Whether a fault comes before any computing; the request is then ended."""
        if callable(fault):
            fault()
            handler.close_connection = True
        elif fault == "hang":
            self.ended.wait(20)
        elif fault == "paused":
            ended = {"finish_reason": "abort", "token_ids": [], "prompt_token_ids": prompt}
            reply(handler, 200, {"choices": [ended]})
        elif fault == "cut":
            handler.close_connection = True
        elif isinstance(fault, int):
            reply(handler, fault, {"error": {"message": "EngineCore encountered an issue"}})
        else:
            return False
        return True

    def compute(self, prompt: list[int], limit: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """States [N, L, H] of prompt and answer, and the choice of a greedy completion."""
        said, logprobs, ends = list[int](), list[float](), self.target.eos_token_ids
        while len(said) < limit and not {*said[-1:]} & {*ends}:
            states, _, logprob, token = self.step([*prompt, *said])
            said.append(token)
            logprobs.append(logprob)
        stopped = said[-1] in ends
        return states, {
            "prompt_token_ids": prompt,
            "token_ids": said,
            "finish_reason": "stop" if stopped else "length",
            "stop_reason": said[-1] if stopped else None,
            "logprobs": {"token_logprobs": logprobs},
        }

    def step(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, float, int]:
        """States [N, L, H] and last hidden states [N, H] of a text, and the likeliest next token
        with its log-probability."""
        tokens = torch.tensor([text])
        positions = torch.arange(len(text))[None]
        with PASS, torch.no_grad():
            there = tuple(sorted({*self.layers}))
            needs = FeatureSpec(there, last_hidden=True)
            ones = torch.ones_like(tokens, dtype=torch.int32)
            taps, last = self.target.features(tokens, positions, ones, needs)
            assert taps is not None
            assert last is not None
            logprob, token = self.target.weights.logits(last[0, -1:]).log_softmax(-1).max(-1)
        states = taps[0][:, [there.index(layer) for layer in self.layers]]
        return states, last[0], float(logprob), int(token)


def in_fp8(states: torch.Tensor) -> dict[str, torch.Tensor]:
    """States as speculators' connector writes them: a scale per token."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = states.float().abs().amax((1, 2), keepdim=True) / largest
    codes = (states.float() / scales).to(torch.float8_e4m3fn)
    return {"hidden_states": codes, "hidden_states_scales": scales}


@contextmanager
def held(path: Path) -> Iterator[Any]:
    """The lock of a file, until the block ends or what it yields is called."""
    handle = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield lambda: fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def reply(handler: BaseHTTPRequestHandler, status: int, content: dict[str, Any] | str) -> None:
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    with suppress(OSError):  # a client that has given up
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def serving(
    target: TargetModel, folder: Path, layers: tuple[int, ...] = (0, 1, 2), **more: Any
) -> Iterator[Stub]:
    """A stub for a block."""
    folder.mkdir(exist_ok=True)
    stub = Stub(target, folder, layers, **more)
    try:
        yield stub
    finally:
        stub.stop()
