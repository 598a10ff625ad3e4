"""A server on loopback that streams answers like an OpenAI-compatible one and counts like the
engine it stands in for, with faults to order. What its counters look like was written by hand from
the engines' documented formats."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np

from tests.loopback import http_server

DEPTH = 3
MODEL = "stub-model"
CHANCES = {"code": 0.8, "prose": 0.5}
LABELS = 'model_name="stub-model"'


def spec_lines(form: str, stub: Stub) -> list[str]:
    """The counters of speculation as an engine of this form shows them."""
    reached = stub.reached
    accepted, drafted = sum(reached), DEPTH * stub.passes
    if form == "vllm":
        names = {"drafts": stub.passes, "draft_tokens": drafted, "accepted_tokens": accepted}
        return [
            *(
                f'vllm:spec_decode_num_{name}_total{{engine="0",{LABELS}}} {float(value)}'
                for name, value in names.items()
            ),
            *(f"vllm:spec_decode_num_{name}_created{{{LABELS}}} 1.7e9" for name in names),
            *(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                f'{{engine="0",{LABELS},position="{place}"}} {float(count)}'
                for place, count in enumerate(reached)
            ),
        ]
    if form == "sglang":
        return [
            f"sglang:spec_verify_calls_total{{{LABELS}}} {float(stub.passes)}",
            f'sglang:spec_accept_length{{tp_rank="0",{LABELS}}} {1 + accepted / stub.passes}',
        ]
    if form == "sglang_gauge":
        return [f'sglang:spec_accept_length{{tp_rank="0",{LABELS}}} {1 + accepted / stub.passes}']
    if form == "trtllm":
        rows = (("drafted", [stub.passes] * DEPTH), ("accepted", reached))
        return [
            f'trtllm_spec_decode_{name}_tokens_total{{{LABELS},token_position="{place}"}} {count}'
            for name, counts in rows
            for place, count in enumerate(counts)
        ]
    if form == "trtllm_totals":
        return [
            f"trtllm_spec_decode_num_draft_tokens_total{{{LABELS}}} {drafted}",
            f"trtllm_spec_decode_num_accepted_tokens_total{{{LABELS}}} {accepted}",
        ]
    return []


REQUESTS = {
    "vllm": ("vllm:request_success_total", 'finished_reason="length",', "vllm:generation_tokens"),
    "sglang": ("sglang:num_requests_total", "", "sglang:generation_tokens"),
    "trtllm": (
        "trtllm_request_success_total",
        'finished_reason="length",',
        "trtllm_generation_tokens",
    ),
}


@dataclass
class Stub:
    """The server. form: whose counters it shows ("none": no metrics at all, "llama": timings in
    responses, "vllm_responses": vLLM's in responses); faults: what the next completions do instead
    of answering, one each: a status, "hang", "cut", "kill" (the answer breaks off, and the server
    starts again as `reborn` says), "restart" (the same behind the answer's last text), "twice"
    (somebody else's answer is counted as well), "error" (an event with `refusal`). steps: seconds
    of a verification."""

    form: str = "vllm"
    speculates: bool = True
    key: str = ""
    steps: float = 0.0
    model: str = MODEL
    metrics: str = ""
    faults: deque[Any] = field(default_factory=deque)
    usage: bool = True
    burst: bool = False
    """One event per token instead of one per verification."""
    events: list[Any] = field(default_factory=list)
    """More events behind an answer's text."""
    parts: bool = False
    """A message's text is a list of parts."""
    looks: deque[Any] = field(default_factory=deque)
    """What the next looks at the metrics show instead, one each: a status, a text; None: nothing
    else."""
    base: str = ""
    tokenize: deque[Any] | None = None
    """What /tokenize answers, then {"count": 9}; a number: a status; empty: a broken connection;
    None: there is none."""
    text: str = "x"
    card: dict[str, Any] = field(default_factory=dict)
    """More of the model's entry in /v1/models."""
    counts: bool = False
    """/tokenize counts four characters as a token."""
    longest: int = 10**9
    """Most characters of a prompt; longer ones are refused with `refusal`."""
    refusal: str = "This model's maximum context length is 64 tokens."
    retry_after: str = ""
    reborn: dict[str, Any] = field(default_factory=dict)
    """Attributes that a restart changes."""
    obeys: bool = True
    """Answers are JSON if it is asked for."""
    shut: bool = False
    """The metrics want a key that nobody has."""
    passes: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * DEPTH)
    committed: int = 0
    answers: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    by_prompt: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt -> (committed, passes), of its last answer."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when the stub ends, for those that hang."""

    def show(self) -> str:
        """The text of /metrics."""
        if self.metrics:
            return self.metrics
        requests, label, tokens = REQUESTS[self.form.split("_")[0]]
        with self.lock:
            lines = [
                "# HELP anything Something.",
                f"{requests}{{{label}{LABELS}}} {float(self.answers)}",
                f"{tokens}_total{{{LABELS}}} {float(self.committed + self.answers)}",
            ]
            return "\n".join(lines + (spec_lines(self.form, self) if self.passes else [])) + "\n"

    def next_look(self) -> Any:
        """What a look at the metrics shows instead; None for nothing else."""
        with self.lock:
            return self.looks.popleft() if self.looks else None

    def step(self, text: str, size: int, chat: bool) -> Iterator[dict[str, Any]]:
        """The events of a verification that gave this many pieces of text."""
        for piece in [text] * size if self.burst else [text * size]:
            content = [{"type": "text", "text": piece}] if self.parts else piece
            yield {"choices": [{"delta": {"content": content}} if chat else {"text": piece}]}

    def steps_for(self, prompt: str, limit: int) -> list[int]:
        """Accepted drafts of each verification of an answer with `limit` tokens; all prompts of a
        domain are alike, and each has always the same ones."""
        domain = next((name for name in CHANCES if name in prompt), "prose")
        rng = np.random.default_rng(sum(prompt.encode()))
        found: list[int] = []
        while sum(found) + len(found) < limit - 1:
            drawn = int(min(DEPTH, rng.geometric(1.0 - CHANCES[domain]) - 1))
            room = limit - 2 - sum(found) - len(found)
            found.append(min(drawn, room) if self.speculates else 0)
        return found

    def count(self, steps: list[int], prompt: str) -> None:
        with self.lock:
            self.answers += 1
            self.committed += sum(steps) + len(steps)
            self.by_prompt[prompt] = (sum(steps) + len(steps), len(steps))
            if self.speculates:
                self.passes += len(steps)
                for step in steps:
                    for place in range(step):
                        self.reached[place] += 1

    def restart(self) -> None:
        with self.lock:
            self.passes = self.committed = self.answers = 0
            self.reached = [0] * DEPTH
            for name, value in self.reborn.items():
                setattr(self, name, value)

    def breaks_off(self, fault: Any) -> bool:
        """Whether an answer ends after its first text, with the server if it is killed."""
        if fault == "kill":
            self.restart()
        return fault in ("cut", "kill")


def last_events(stub: Stub, steps: list[int], prompt: str, tokens: int) -> Iterator[dict[str, Any]]:
    """What an answer's stream has behind its text."""
    yield from stub.events
    yield {"choices": [{"delta": {}, "finish_reason": "length"}]}
    usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": tokens}
    if stub.usage:
        yield {"choices": [], "usage": usage, **figures(stub, steps)}


def figures(stub: Stub, steps: list[int]) -> dict[str, Any]:
    """What a form says of speculation in its responses."""
    accepted, passes = sum(steps), len(steps)
    if stub.form == "llama" and stub.speculates:
        counts = {"draft_n": DEPTH * passes, "draft_n_accepted": accepted}
        return {"timings": {"predicted_n": accepted + passes + 1, "predicted_ms": 5.0, **counts}}
    if stub.form == "vllm_responses" and stub.speculates:
        histogram = [steps.count(accepted) for accepted in range(DEPTH + 1)]
        counts = {"num_spec_steps": passes, "num_draft_tokens": DEPTH * passes}
        return {"metrics": {"speculative_decoding": {"acceptance_histogram": histogram, **counts}}}
    return {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    stub: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == 503 and self.stub.retry_after:
            self.send_header("Retry-After", self.stub.retry_after)
        self.end_headers()
        self.wfile.write(content)

    def allowed(self) -> bool:
        given = self.headers.get("Authorization", "")
        if self.stub.key and given != f"Bearer {self.stub.key}":
            self.send(401, json.dumps({"error": f"wrong key {given}"}).encode())
            return False
        return True

    def do_GET(self) -> None:
        stub = self.stub
        if not self.allowed():
            return
        if self.path == "/v1/models":
            self.send(200, json.dumps({"data": [{"id": stub.model, **stub.card}]}).encode())
        elif self.path.endswith("/metrics") and (look := stub.next_look()) is not None:
            status, text = (look, "") if isinstance(look, int) else (200, look)
            self.send(status, text.encode(), "text/plain")
        elif self.path.endswith("/metrics") and stub.shut:
            self.send(403, b"{}")
        elif self.path == "/metrics" and stub.form.startswith("trtllm"):
            self.send(200, b"[]")  # its own statistics
        elif self.path in ("/metrics", "/prometheus/metrics") and (
            stub.metrics or stub.form.split("_")[0] in REQUESTS
        ):
            self.send(200, stub.show().encode(), "text/plain")
        else:
            self.send(404, b"{}")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length))
        if not self.allowed():
            return
        if self.path == "/tokenize" and self.stub.counts:
            prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
            self.send(200, json.dumps({"count": len(prompt) // 4}).encode())
            return
        if self.path == "/tokenize" and self.stub.tokenize is not None:
            with self.stub.lock:
                said = self.stub.tokenize.popleft() if self.stub.tokenize else {"count": 9}
            if isinstance(said, int):
                self.send(said, b"{}")
            elif said:
                self.send(200, json.dumps(said).encode())
            else:  # closing alone leaves the client waiting: other objects hold the socket
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            self.send(404, b"{}")
            return
        self.answer(body, chat="chat" in self.path)

    def refuses(self, fault: Any, prompt: str) -> bool:
        """Whether there is no stream; then it has sent what there is instead."""
        if isinstance(fault, int):
            self.send(fault, b'{"error": {"message": "planted"}}')
        elif fault == "hang":
            self.stub.gone.wait(8.0)
        elif len(prompt) > self.stub.longest:
            self.send(400, json.dumps({"error": {"message": self.stub.refusal}}).encode())
        else:
            return False
        return True

    def answer(self, body: dict[str, Any], chat: bool) -> None:
        stub = self.stub
        with stub.lock:
            fault = stub.faults.popleft() if stub.faults else None
            stub.bodies.append(body)
        prompt = body["messages"][-1]["content"] if chat else str(body["prompt"])
        if self.refuses(fault, prompt):
            return
        text = stub.text
        if stub.obeys and {"response_format", "json_schema"} & set(body):
            text = "{"
        steps = stub.steps_for(prompt, body["max_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

        def event(content: dict[str, Any] | str) -> None:
            data = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

        if fault == "error":
            event({"error": {"message": stub.refusal, "code": 400}})
            return
        for size in (1, *(step + 1 for step in steps)):
            time.sleep(stub.steps)
            for content in stub.step(text, size, chat):
                event(content)
            if stub.breaks_off(fault):
                return
        if fault == "restart":
            stub.restart()
        if fault == "abort":
            event({"choices": [{"delta": {}, "finish_reason": "abort"}]})
            return
        stub.count(steps, prompt)
        if fault == "twice":
            stub.count(steps, prompt)
        for content in last_events(stub, steps, prompt, body["max_tokens"]):
            event(content)
        event("[DONE]")


@contextmanager
def serving(**settings: Any) -> Iterator[Stub]:
    """A stub that serves until the block ends."""
    stub = Stub(**settings)
    handler = type("Handler", (_Handler,), {"stub": stub})
    with http_server(handler) as stub.base:
        try:
            yield stub
        finally:
            stub.gone.set()
