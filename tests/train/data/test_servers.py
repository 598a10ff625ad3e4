"""Serving engines over loopback HTTP: token ids in and out, faults waited out, wrong servers
refused, nothing lost or doubled."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import pytest
from tokenizers import processors

from heads.api.errors import UserError
from inference.decoding.requests import Completion, Request
from inference.target.loading import TargetConfig
from tests.inference.tokenizers import tiny_tokenizer
from tests.loopback import http_server
from train.generate.backends.protocols import Ended, completion_of
from train.generate.backends.servers import ServerPool
from train.generate.backends.vllm import VllmBackend
from train.generate.sampling import SamplingConfig
from train.generate.target_facts import TargetFacts
from train.generate.turns import Refused

TOKENIZER = tiny_tokenizer("marked")
EOS = TOKENIZER.eos_token_id
FACTS = TargetFacts(
    TOKENIZER,
    SimpleNamespace(id="org/Tiny-8B", vocab_size=len(TOKENIZER), max_position_embeddings=128),
    (EOS,),
)
REQUESTS = [Request(number, (3, 4, 5 + number), number, 6) for number in range(30)]


def said(tokens):
    """What the stand-in answers to a prompt."""
    return [(sum(tokens) + place) % 200 + 10 for place in range(4)]


class Standin:
    """An engine's protocol with faults: `faults` maps the number of a request (from 0) to what goes
    wrong with it."""

    def __init__(self, protocol="openai", faults=None, always=None, tokenizer=TOKENIZER, ids=True):
        self.protocol, self.faults, self.always = protocol, faults or {}, always
        self.tokenizer, self.ids = tokenizer, ids
        self.listed, self.info = [{"id": "tiny"}], {}
        self.count, self.bodies, self.busiest, self.active = 0, [], 0, 0
        self.lock = threading.Lock()

    def openai(self, body):
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=False)
        choice = {"text": "lossy", "finish_reason": "stop", "stop_reason": None}
        if self.ids:
            choice |= {"token_ids": [*said(prompt), EOS], "prompt_token_ids": prompt}
        return {"choices": [choice]}

    def sglang(self, body):
        if "text" in body:
            ids = self.tokenizer.encode(body["text"])
            return {
                "output_ids": [1],
                "meta_info": {"input_token_logprobs": [[-1.0, token, None] for token in ids]},
            }
        reason = {"type": "stop", "matched": EOS}  # which SGLang may leave out of the ids
        meta = {"finish_reason": reason, "prompt_tokens": len(body["input_ids"])}
        return {"output_ids": said(body["input_ids"]), "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    """HTTP around the server's `standin`."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        standin = self.standin
        if standin.protocol == "openai" and self.path == "/v1/models":
            return self.reply(200, {"data": standin.listed})
        return self.reply(200 if standin.protocol == "sglang" else 404, standin.info)

    def do_POST(self):
        standin = self.standin
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with standin.lock:
            probe = "text" in body or isinstance(body.get("prompt"), str)
            number = -1 if probe else standin.count
            standin.count += not probe
            standin.bodies.append((body, dict(self.headers)))
            standin.active += 1
            standin.busiest = max(standin.busiest, standin.active)
        self.counted = True
        try:
            self.answer(
                standin, body, None if probe else standin.faults.get(number, standin.always)
            )
        finally:
            self.leave()

    def leave(self):
        """This request is answered. Said before the answer leaves: its reader may ask again before
        this thread runs on."""
        if getattr(self, "counted", False):
            with self.standin.lock:
                self.standin.active -= 1
        self.counted = False

    def answer(self, standin, body, fault):
        time.sleep(0.005)
        if isinstance(fault, int):
            return self.reply(
                fault, {"error": "fault"}, {"Retry-After": "0.01"} if fault == 429 else {}
            )
        if callable(fault):  # what happens to the server
            fault(standin)
            fault = "drop"
        if fault == "drop":
            self.close_connection = True
            return self.connection.close()
        if fault == "hang":
            return time.sleep(8.0)
        full = getattr(standin, standin.protocol)(body)
        if fault == "half":
            return self.reply(200, json.dumps(full)[:20])
        if fault == "other prompt":
            full["choices"][0]["prompt_token_ids"] = [1]
        if fault == "abort":
            full["choices"][0] |= {"finish_reason": "abort", "token_ids": said(body["prompt"])[:2]}
        if fault == "foreign":
            full["choices"][0]["token_ids"] = [10**6]
        return self.reply(200, full)

    def reply(self, status, content, headers=None):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.leave()
        self.end_headers()
        self.wfile.write(data)


def serving(standin):
    """The stand-in at an address."""
    return http_server(type("Bound", (Handler,), {"standin": standin}))


def settings(*addresses, **options):
    given = {
        "retries": 3,
        "backoff": 0.01,
        "timeout": 5.0,
        "concurrency": 4,
        "shape": "none",
        "temperature": 1.0,
        **options,
    }
    return SamplingConfig(server=addresses, **given)


def sample(*standins, requests=REQUESTS, **options):
    """All outcomes by index, each one handed out once."""
    with all_serving(standins) as addresses:
        outcomes = list(ServerPool(settings(*addresses, **options), FACTS).sample(requests))
    assert Counter(outcome.request.index for outcome in outcomes) == Counter(
        request.index for request in requests
    )
    return {outcome.request.index: outcome for outcome in outcomes}


@contextmanager
def all_serving(standins):
    with ExitStack() as stack:
        yield [stack.enter_context(serving(standin)) for standin in standins]


@pytest.mark.parametrize("protocol", ["openai", "sglang"])
def test_token_ids_go_in_and_come_out(protocol, monkeypatch):
    monkeypatch.setenv("HEADSTART_SERVER_KEY", "secret")
    standin = Standin(protocol)
    found = sample(standin)
    assert all(found[r.index].tokens == [*said(r.tokens), EOS] for r in REQUESTS), (
        "the end is part of an answer"
    )
    assert {outcome.finish for outcome in found.values()} == {"stop"}
    assert standin.busiest <= 4
    body, headers = standin.bodies[-1]
    assert headers["Authorization"] == "Bearer secret"
    if protocol == "openai":
        assert body["return_token_ids"] is True
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 6, 1.0)
        assert {body["seed"] for body, _ in standin.bodies[1:]} == {
            request.seed for request in REQUESTS
        }


@pytest.mark.parametrize("protocol", ["openai", "sglang"])
def test_a_tokenizer_that_adds_a_beginning_of_text_is_the_targets(protocol):
    tokenizer = tiny_tokenizer("marked")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    )
    assert tokenizer.encode("x")[:-1] == [tokenizer.bos_token_id]
    with serving(Standin(protocol, tokenizer=tokenizer)) as address:
        pool = ServerPool(settings(address), replace(FACTS, tokenizer=tokenizer))
        assert len(list(pool.sample(REQUESTS[:1]))) == 1


def test_faults_that_pass_are_waited_out():
    faults = {0: 429, 1: 500, 2: "drop", 3: "hang", 4: "half", 7: 503, 9: 502, 10: 429, 12: "drop"}
    faults[14] = "abort"  # a server that is paused
    standin = Standin(faults=faults)
    found = sample(standin)
    assert all(found[r.index].tokens == [*said(r.tokens), EOS] for r in REQUESTS)
    assert standin.count == len(REQUESTS) + len(faults)


def test_a_refused_request_fails_alone():
    found = sample(Standin(faults={3: 400}))
    assert sorted(type(outcome).__name__ for outcome in found.values()).count("Refused") == 1
    (refused,) = (outcome for outcome in found.values() if isinstance(outcome, Refused))
    assert "status 400" in refused.reason


def test_a_dead_server_leaves_its_work_to_the_others():
    good, dead = Standin(), Standin(always=500)
    found = sample(dead, good, retries=2, concurrency=1)
    assert all(isinstance(outcome, Completion) for outcome in found.values())
    assert good.count == len(REQUESTS)


@pytest.mark.parametrize(
    ("standin", "options", "problem"),
    [
        (Standin(always=500), {}, "no server is left|a request failed 4 times"),
        (Standin(always=503), {"patience": 0.2}, "no server has answered for 0.2 seconds"),
        (Standin(always=404), {}, "answers with status 404"),
        (Standin(always=401), {}, "wants a valid key.*HEADSTART_SERVER_KEY"),
        (Standin(always="other prompt"), {}, "read another prompt"),
        (Standin(always="foreign"), {}, "beyond the target's vocabulary"),
    ],
)
def test_what_does_not_pass_ends_the_run_with_the_reason(standin, options, problem):
    with pytest.raises(UserError, match=problem):
        sample(standin, **options)


@pytest.mark.parametrize(
    ("standin", "options", "problem"),
    [
        (Standin(ids=False), {}, "returns no token ids.*return_token_ids"),
        (Standin(tokenizer=tiny_tokenizer("llama3")), {}, "has another tokenizer than the target"),
        (
            Standin("sglang", tokenizer=tiny_tokenizer("llama3")),
            {},
            "has another tokenizer than the target",
        ),
        (Standin(), {"served_model": "big"}, "serves tiny; sampling.served_model is 'big'"),
        (Standin("neither"), {"protocol": "openai"}, "neither a vLLM nor an SGLang server"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_before_the_start(standin, options, problem):
    with serving(standin) as address, pytest.raises(UserError, match=problem):
        ServerPool(settings(address, **options), FACTS)
    assert standin.count == 0


def entry(name, root=None, **more):
    return {"id": name, **({} if root is None else {"root": root}), **more}


LORA = [entry("tiny-8b", "org/Tiny-8B"), entry("law", "adapters/law", parent="tiny-8b")]


@pytest.mark.parametrize(
    ("listed", "served_model", "warning"),
    [
        ([entry("chat", "org/Tiny-8B")], "", ""),
        ([entry("chat", "cache/models--org--Tiny-8B/snapshots/0a1b")], "", ""),
        ([entry("tiny-8b", "models/x")], "", ""),  # its operator says that it is the target
        ([entry("vendor/tiny-8b"), entry("vendor/huge")], "vendor/tiny-8b", ""),  # a hosted API
        (LORA, "tiny-8b", ""),
        (LORA, "law", "serves 'law' from 'adapters/law', but the target is 'org/Tiny-8B'"),
        ([entry("chat", "models/x")], "", "serves 'chat' from 'models/x'"),
        ([entry("tiny-8b-awq", "org/Tiny-8B-AWQ")], "", "or a copy of it"),
        ([entry("tiny-4b")], "", "serves 'tiny-4b', but the target is"),
        ({"model_path": "models/Tiny-8B"}, "", ""),  # SGLang
        ({"model_path": "org/Tiny-4B"}, "", "serves from 'org/Tiny-4B', but"),
        ({}, "", ""),
    ],
)
def test_another_name_than_the_targets_is_a_warning(listed, served_model, warning, caplog):
    standin = Standin("openai" if isinstance(listed, list) else "sglang")
    standin.listed = standin.info = listed
    found = sample(standin, requests=REQUESTS[:2], served_model=served_model)
    assert all(isinstance(outcome, Completion) for outcome in found.values())
    assert (warning in caplog.text) if warning else not caplog.text


def test_responses_are_continued_by_the_model_that_gave_them(tmp_path):
    """Of the same name at another place, or of the same place under another name."""

    def connect(name, root):
        standin = Standin("openai")
        standin.listed = [entry(name, root)]
        with serving(standin) as address:
            ServerPool(settings(address), FACTS, out=tmp_path)

    connect("law", "models/b")  # gave none
    connect("tiny-8b", "models/a")
    (tmp_path / "parts" / "0.parquet").touch()
    connect("chat", "elsewhere/a")
    connect("chat", None)
    for name, root in (("tiny-8b", "models/b"), ("law", None)):
        with pytest.raises(UserError, match=f"serves '{name}'.*those of 'tiny-8b' from 'models/a'"):
            connect(name, root)
    served = json.loads((tmp_path / "parts" / "served.json").read_text())
    assert [each["name"] for each in served] == ["tiny-8b", "chat", "chat"]


def became(*listed, info=None):
    """A server is started again, and serves these."""

    def act(standin):
        standin.listed, standin.info, standin.replaced_at = [*listed], info, standin.count

    return act


@pytest.mark.parametrize(
    ("protocol", "after", "problem"),
    [
        ("openai", became(entry("tiny", "models/tuned")), "'tiny' from 'models/tuned'; before: 't"),
        ("openai", became(entry("other", "models/a")), "'other' from 'models/a'; before: 'tiny'"),
        ("openai", became(), "model: one that it does not name"),
        ("sglang", became(info={"model_path": "models/b"}), "from 'models/b'; before: from 'm"),
    ],
)
def test_a_server_that_comes_back_with_another_model_is_asked_nothing(protocol, after, problem):
    standin = Standin(protocol, faults={9: after})
    standin.listed, standin.info = [entry("tiny", "models/a")], {"model_path": "models/a"}
    found = []
    with serving(standin) as address:
        pool = ServerPool(settings(address, concurrency=1), FACTS)
        with pytest.raises(UserError, match=rf"{problem}.*What was answered is kept"):
            found.extend(pool.sample(REQUESTS))  # keeps what came before an error
    assert len(found) == 9
    assert standin.count == standin.replaced_at == 10


def test_a_server_that_comes_back_with_its_model_goes_on():
    """Even if it has other models besides, such as adapters."""
    same = entry("tiny", "models/a")
    standin = Standin(faults={9: became(same, entry("law", "adapters/law"))})
    standin.listed = [same]
    found = sample(standin)
    assert all(isinstance(outcome, Completion) for outcome in found.values())


def test_a_server_that_was_replaced_between_two_calls_is_noticed():
    """While nobody asks it, nobody sees it fail."""
    standin = Standin()
    with serving(standin) as address:
        pool = ServerPool(settings(address), FACTS)
        assert len(list(pool.sample(REQUESTS[:5]))) == 5
        became(entry("tiny", "models/tuned"))(standin)
        with pytest.raises(UserError, match=r"'tiny' from 'models/tuned'; before: 'tiny'\. Serve"):
            list(pool.sample(REQUESTS[5:]))
    assert standin.count == 5


def test_one_thread_checks_a_server_and_the_others_wait(monkeypatch):
    """A server that hangs keeps one thread, not all, and their requests go to another server."""
    hung, good = Standin(faults={0: "drop"}), Standin()
    begun, ended = threading.Event(), threading.Event()
    checks, probe, answer = [], ServerPool._probe, good.openai
    # it leaves requests for the other one, until that is checked
    good.openai = lambda body: (isinstance(body["prompt"], str) or begun.wait(10)) and answer(body)

    def slow(self, server, ask):
        checks.append(server.address)
        begun.set()
        assert ended.wait(10)
        return probe(self, server, ask)

    with all_serving([hung, good]) as addresses:
        pool = ServerPool(settings(*addresses), FACTS)
        monkeypatch.setattr(ServerPool, "_probe", slow)
        outcomes = pool.sample(REQUESTS)
        found = [next(outcomes) for _ in range(len(REQUESTS) - 1)]
        ended.set()
        found += outcomes
    assert len(found) == len(REQUESTS) and checks == addresses[:1]


def test_an_error_of_this_side_ends_the_run_and_nobody_waits(monkeypatch):
    """Such as states that do not fit on the disk."""

    def full(self, server, request):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "states")

    with serving(Standin()) as address:
        pool = ServerPool(settings(address), FACTS)
        monkeypatch.setattr(ServerPool, "_answer", full)
        with pytest.raises(OSError, match="No space left"):
            list(pool.sample(REQUESTS))


def test_nobody_there_is_one_clear_sentence():
    with pytest.raises(UserError, match=r"/v1/models does not answer: .*Is the server up\?"):
        ServerPool(settings("http://127.0.0.1:9", retries=1), FACTS)


def test_answers_are_what_our_decoder_would_hand_out():
    request = Request(0, (1,), 0, 3)
    assert completion_of(request, [10, 11], Ended("stop", None), (EOS,), 300).tokens == [
        10,
        11,
        EOS,
    ]
    assert completion_of(request, [10, EOS], Ended("stop", EOS), (EOS,), 300).tokens == [10, EOS]
    assert (
        completion_of(request, [10, 11, 12], Ended("length", None), (EOS,), 300).finish == "length"
    )
    assert completion_of(request, [10], Ended("stop", 7), (EOS, 7), 300).tokens == [10, 7]
    for tokens, ended, problem in [
        ([10], Ended("stop", 9), "no end-of-text token"),
        ([10], Ended("abort", None), "neither stop nor length"),
        ([], Ended("length", None), "with 0 tokens"),
    ]:
        with pytest.raises(Exception, match=problem):
            completion_of(request, tokens, ended, (EOS,), 300)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"backend": "server"}, "names none"),
        ({"backend": "vlm"}, "Did you mean 'vllm'"),
        ({"server": "host:8000"}, "must begin with http"),
        ({"server": "http://a", "shape": "chain"}, "shape is only known to our own decoder"),
        ({"server": "http://a", "structure": "json"}, "structure is only known to our own"),
        ({"backend": "vllm", "structure": "json"}, "structure is only known to our own"),
        ({"server": "http://a", "concurrency": 0}, r"concurrency must lie in \[1, 65536\]"),
    ],
)
def test_wrong_settings_are_refused(options, problem):
    with pytest.raises(UserError, match=problem):
        SamplingConfig(**{"shape": "none", **options})


def test_vllm_in_this_process_is_asked_with_ids(monkeypatch):
    seen = {}

    class LLM:
        def __init__(self, **arguments):
            seen["engine"] = arguments
            self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=8))

        def generate(self, prompts, settings, use_tqdm):
            return [SimpleNamespace(outputs=[self.one(prompt)]) for prompt in prompts]

        def one(self, prompt):
            ids = [*said(prompt["prompt_token_ids"]), EOS]
            return SimpleNamespace(token_ids=ids, finish_reason="stop", stop_reason=None)

    module = SimpleNamespace(
        LLM=LLM, SamplingParams=lambda **arguments: seen.setdefault("sampling", arguments)
    )
    monkeypatch.setitem(sys.modules, "vllm", module)
    sampling = SamplingConfig(
        backend="vllm", shape="none", vllm_arguments={"tensor_parallel_size": 2}
    )
    backend = VllmBackend(sampling, FACTS, TargetConfig("some/model"))
    found = list(backend.sample(REQUESTS[:3]))
    assert [outcome.tokens for outcome in found] == [[*said(r.tokens), EOS] for r in REQUESTS[:3]]
    long = Request(7, (5,) * 8, 7, 6)  # leaves no room for an answer
    refused, answered = backend.sample([long, REQUESTS[0]])
    assert isinstance(refused, Refused) and "takes 7 tokens of a prompt" in refused.reason
    assert answered.request is REQUESTS[0]
    assert seen["engine"]["tensor_parallel_size"] == 2
    assert seen["sampling"]["detokenize"] is False
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="vLLM cannot be imported here"):
        VllmBackend(sampling, FACTS, TargetConfig("some/model"))


def test_a_restart_does_not_use_up_the_patience_with_a_server():
    """Every request that waits meets the same outage: they must not count down the server's
    failures one after the other."""
    standin = Standin(faults=dict.fromkeys(range(4), 502))
    begun = time.monotonic()
    found = sample(standin, retries=4, backoff=0.05, concurrency=1)
    assert all(isinstance(outcome, Completion) for outcome in found.values())
    assert time.monotonic() - begun > 0.05 * (2 + 4 + 8), "the pauses doubled, request by request"


def test_pauses_grow_to_a_limit_after_any_number_of_refusals():
    pool = ServerPool.__new__(ServerPool)
    pool.sampling = SamplingConfig(server="http://localhost:1", shape="none", backoff=0.5)
    assert [pool._backoff(refusals) for refusals in (0, 3, 5000)] == [0.5, 4.0, 60.0]
