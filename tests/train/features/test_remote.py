"""Feature servers: the same training as online, several servers, servers that hang, lie or vanish,
and who may ask."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import train.features.remote.server as remote_server
import train.features.servers as servers
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from inference.target.loading import TargetConfig
from inference.target.model import TargetModel
from tests.inference.server.front.served import certificate
from tests.loopback import http_server
from tests.train.micro_run import settings
from train.data.loader import StepLoader
from train.data.pack import PackedData
from train.features.base import OnlineFeatures
from train.features.config import FeaturesConfig
from train.features.make import make_features
from train.features.remote import wire
from train.features.remote.client import content_of
from train.features.remote.server import FeatureServer
from train.features.remote.shared import SharedPasses, things
from train.features.remote.wire import Ask
from train.features.servers import FailureError
from train.features.store.layout import LAST
from train.run import train
from train.tracking.tracker import LOG_FILE, read_log

NEEDS = FeatureSpec((0, 1, 2), last_hidden=True, logits=True)
LENGTH = 64


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(servers, "FIRST_PAUSE", 0.01)


@contextmanager
def serving(
    target: TargetModel,
    dtype: torch.dtype = torch.float32,
    token: str = "",
    pair: tuple[str, ...] = (),
    shared: SharedPasses | None = None,
    loading: str = "",
) -> Iterator[FeatureServer]:
    """A server on a free port, in a thread."""
    place = ("127.0.0.1", 0, token, *pair)
    server = FeatureServer(target, dtype, *place, shared=shared, loading=loading)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.end()
        thread.join()


@contextmanager
def mute() -> Iterator[str]:
    """The address of something that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def remote(
    target: TargetModel, micro: Path, *servers: str, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[Any, StepLoader]:
    """Features from these servers, and a loader."""
    data = PackedData.from_manifest(micro / "answers", target.info, LENGTH)
    loader = StepLoader(data, 4, 2, 1, 0, seed=0)
    config = FeaturesConfig(
        mode="remote", servers=servers, **{"format": "fp32", "timeout_seconds": 5.0, **more}
    )
    return make_features(
        config, target, NEEDS, dtype, answers=micro / "answers", loader=loader, steps=8
    ), loader


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_served_features_are_those_computed_online_to_the_last_bit(
    target: TargetModel, micro: Path, dtype: torch.dtype, fmt: str
) -> None:
    online = OnlineFeatures(target, NEEDS, dtype)
    others = [TargetModel.load(TargetConfig(str(micro / "target"), device="cpu")) for _ in range(2)]
    with serving(others[0], dtype) as one, serving(others[1], dtype) as two:
        features, loader = remote(target, micro, one.address, two.address, dtype=dtype, format=fmt)
        for step in range(8):
            for packed in loader.step(step):
                got, true = features.batch(packed, step), online.batch(packed, step)
                real = got.segments > 0
                assert got.taps.dtype == dtype
                assert torch.equal(got.taps[real], true.taps[real])
                assert torch.equal(got.last_hidden[real], true.last_hidden[real])
        features.close()
        assert one.shared.answers == two.shared.answers == 8  # in turn


def test_training_with_a_server_is_training_online_and_may_rewrite_rows(
    target: TargetModel, micro: Path, tmp_path: Path
) -> None:
    from train.on_policy import OnPolicyConfig

    for name, more in (
        ("plain", {}),
        ("own_words", {"on_policy": OnPolicyConfig(share=0.5, window=3)}),
    ):
        online = settings(
            micro,
            kind="eagle3",
            head={"taps": (0, 1, 2), "ttt_steps": 3},
            max_steps=4,
            eval_every=0,
            **more,
        )
        train(out=tmp_path / f"online_{name}", **online)
        with serving(target) as server:
            features = FeaturesConfig(mode="remote", servers=(server.address,), format="fp32")
            train(out=tmp_path / f"remote_{name}", **{**online, "features": features})
            assert server.shared.answers >= 8
        logs = [
            [
                (line["loss"], line["grad_norm"])
                for line in read_log(tmp_path / f"{way}_{name}" / LOG_FILE)
            ]
            for way in ("online", "remote")
        ]
        assert len(logs[0]) == 4
        assert logs[0] == logs[1]


def test_trainings_of_several_heads_share_one_pass_of_the_target(
    target: TargetModel, micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three trainings against one server are the same three online, and the target runs as often as
    for one of them."""
    heads: dict[str, dict[str, Any]] = {
        "eagle3": {"taps": (0, 1, 2), "ttt_steps": 2},
        "medusa": {"num_heads": 2},
        "dflash": {"taps": (1, 2), "block_size": 4, "num_layers": 2, "num_anchors": 4},
    }
    runs = {
        kind: settings(micro, kind=kind, head=head, max_steps=4, eval_every=0, parity=False)
        for kind, head in heads.items()
    }
    for kind, run in runs.items():
        train(out=tmp_path / f"online_{kind}", **run)
    passes = []
    features = target.features

    def counted(*given: Any) -> Any:
        passes.append(given[0].shape)
        return features(*given)

    monkeypatch.setattr(target, "features", counted)
    shared = SharedPasses(FeatureSpec((0, 1, 2), last_hidden=True, logits=True), 1 << 30)
    with serving(target, shared=shared) as server:
        source = FeaturesConfig(mode="remote", servers=(server.address,), format="fp32")
        for kind, run in runs.items():
            train(out=tmp_path / f"remote_{kind}", **{**run, "features": source})
        assert server.shared.answers == 3 * len(passes) == 3 * shared.passes
    for kind in heads:
        logs = [
            [(line["loss"], line["grad_norm"]) for line in read_log(tmp_path / name / LOG_FILE)]
            for name in (f"online_{kind}", f"remote_{kind}")
        ]
        assert len(logs[0]) == 4
        assert logs[0] == logs[1]


def test_what_is_kept_for_other_trainings_is_bounded_and_given_out_in_parts() -> None:
    calls: list[Ask] = []

    def compute(ask: Ask) -> dict[str, dict[str, torch.Tensor]]:
        calls.append(ask)
        return {name: {"values": torch.zeros(100)} for name in things(ask)}

    shared = SharedPasses(FeatureSpec((3,), logits=True), 1600)  # two answers of two things
    small, other = Ask((3,), False, "fp32", 0), Ask((), True, "fp32", 0)
    assert list(shared.answer(b"a", small, compute)) == ["tap.3"]
    assert list(shared.answer(b"a", other, compute)) == [LAST]
    assert len(calls) == 1 == shared.passes
    for body in (b"b", b"a", b"c"):  # b is the oldest when c comes
        shared.answer(body, small, compute)
    assert len(calls) == 3
    shared.answer(b"a", other, compute)
    assert len(calls) == 3
    shared.answer(b"b", other, compute)
    assert len(calls) == 4
    shared.answer(b"b", replace(other, format="int8"), compute)
    assert len(calls) == 5  # another form is another answer
    with ThreadPoolExecutor(8) as pool:  # at once
        list(pool.map(lambda _: shared.answer(b"d", small, compute), range(8)))
    assert len(calls) == 6
    none = SharedPasses(FeatureSpec(), 0)
    for _ in range(2):
        none.answer(b"a", small, compute)
    assert none.passes == 2


def test_compressed_answers_are_smaller_and_near(target: TargetModel, micro: Path) -> None:
    online = OnlineFeatures(target, NEEDS, torch.float32)
    with serving(target) as server:
        # one target for both
        features, loader = remote(target, micro, server.address, format="int8", ahead=0)
        packed = loader.step(0)[0]
        got, true = features.batch(packed), online.batch(packed)
        real = got.segments > 0
        gap = (got.taps[real] - true.taps[real]).abs().amax(-1)
        assert bool((gap <= 0.02 * true.taps[real].abs().amax(-1)).all())
        assert not torch.equal(got.taps[real], true.taps[real])
        features.close()


def test_a_server_that_hangs_or_vanishes_is_worked_around_and_named_when_none_is_left(
    target: TargetModel, micro: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mute() as hanging, serving(target) as server:
        features, loader = remote(
            target, micro, hanging, server.address, timeout_seconds=0.3, retries=10
        )
        for packed in loader.step(0):
            features.batch(packed)
        features.close()
        assert f"{hanging}: no answer within 0.3 s" in caplog.text
    with mute() as hanging:
        with serving(target) as server:
            features, loader = remote(
                target, micro, server.address, timeout_seconds=0.3, retries=1, ahead=0
            )
            address = server.address
        with pytest.raises(
            UserError,
            match=rf"no features after 2 attempts \({address}: ConnectionRefusedError.*last saved state",
        ):
            features.batch(loader.step(0)[0])
        features.close()
        silent = rf"no feature server answers \({hanging}: no answer within 0\.3 s\).*features\.serve=true"
        with pytest.raises(UserError, match=silent):
            remote(target, micro, hanging, timeout_seconds=0.3)


@pytest.mark.parametrize("head", ["Content-Length: 1000", "Connection: close"])
def test_an_answer_that_comes_byte_by_byte_ends_with_its_time(head: str) -> None:
    def trickle() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
            while True:
                connection.sendall(b" ")
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle)
        thread.start()
        host, port = listening.getsockname()
        config = FeaturesConfig(
            mode="remote", servers=(f"http://{host}:{port}",), timeout_seconds=0.5
        )
        asked, begun = servers.Servers(config, "feature server", {}), time.monotonic()
        with pytest.raises(FailureError, match=r"no answer within 0\.5 s"):
            asked.request(asked.all[0], "GET", "/identity", most=1000)
        assert time.monotonic() - begun < 5.0
        thread.join()


def test_pauses_stay_finite_however_often_it_is_asked(
    target: TargetModel, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(target) as server:
        features, loader = remote(target, micro, server.address, retries=1100, ahead=0)
    monkeypatch.setattr("train.features.servers.FIRST_PAUSE", 0.0)
    with pytest.raises(UserError, match="no features after 1101 attempts"):
        features.batch(loader.step(0)[0])
    features.close()


def test_busy_servers_are_waited_for_as_they_ask_within_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(time.monotonic())
            self.send_response(200 if len(asked) > 8 else (503, 429)[len(asked) % 2])
            self.send_header("Retry-After", "0.05")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments: Any) -> None: ...

    asked: list[float] = []

    def ask() -> bytes:
        found = servers.Servers(config, "feature server", {})
        return found.in_turn(lambda one: found.request(one, "GET", "/", most=9))

    with http_server(Busy) as address:
        config = FeaturesConfig(mode="remote", servers=(address,), retries=1)
        assert ask() == b"{}" and len(asked) == 9
        assert min(later - sooner for sooner, later in pairwise(asked)) >= 0.05
        asked.clear()
        monkeypatch.setattr(servers, "BUSY_SECONDS", 0.12)
        with pytest.raises(UserError, match=r"no features after [23] attempts .*status (503|429)"):
            ask()


def test_an_answer_that_breaks_off_is_asked_for_again(
    target: TargetModel, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = OnlineFeatures(target, NEEDS, torch.float32)
    with serving(target) as server:
        features, loader = remote(target, micro, server.address, ahead=0)
        plain, calls = server.compute, []

        def first_time_broken(body: bytes, ask: Any) -> bytes:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("out of memory, say")
            answer = plain(body, ask)
            return answer[: len(answer) // 2] if len(calls) == 2 else answer

        monkeypatch.setattr(server, "compute", first_time_broken)
        packed = loader.step(0)[0]
        got = features.batch(packed)
        assert len(calls) == 3
        assert torch.equal(got.taps[got.segments > 0], online.batch(packed).taps[got.segments > 0])
        features.close()


def test_the_key_of_a_target_loaded_with_the_defaults_is_that_of_earlier_versions(
    target: TargetModel,
) -> None:
    info, precision = target.info, "float32 of float32"
    facts = [info.revision, info.tokenizer_hash, info.hidden_size, info.num_layers, precision]
    earlier = hashlib.sha256(json.dumps([1, *facts]).encode()).hexdigest()[:32]
    assert wire.key_of(info, precision, "") == earlier
    assert wire.key_of(info, precision, "quantization=fp8") != earlier


def test_a_server_of_another_target_or_precision_is_refused(
    target: TargetModel, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = r"its precision is bfloat16 of float32, but float32 of float32 is needed"
    with serving(target, torch.bfloat16) as server, pytest.raises(UserError, match=wrong):
        remote(target, micro, server.address)
    wrong = r"its way of loading is quantization=bnb-4bit, but the usual one is needed"
    with (
        serving(target, loading="quantization=bnb-4bit") as server,
        pytest.raises(UserError, match=wrong),
    ):
        remote(target, micro, server.address)
    with serving(target) as server:
        features, loader = remote(target, micro, server.address, ahead=0)
        server.key = "another"  # restarted with another target meanwhile
        with pytest.raises(UserError, match=r"refuses: this server runs .*not what was asked for"):
            features.batch(loader.step(0)[0])
        features.close()
    with pytest.raises(UserError, match=r"features\.servers: 'ftp://x' is not an address like"):
        remote(target, micro, "ftp://x")
    with pytest.raises(UserError, match=r"features\.mode=remote needs features\.servers"):
        FeaturesConfig(mode="remote")


@contextmanager
def saying(body: bytes) -> Iterator[str]:
    """The address of something that answers every request with the same body, without its
    length."""
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        host, port = listening.getsockname()
        try:
            yield f"http://{host}:{port}"
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                socket.create_connection((host, port)).close()
            thread.join()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * 100_000, "the answer is not readable as JSON"),
        (b"\xff\xfe", "the answer is not readable as JSON"),
        (b"[1]", "the answer is broken: it holds"),
        (b'{"format": 1, "target": 5}', "'target' is broken"),
        (b" " * (2 << 20), "an answer of more than 1,048,576 bytes"),
    ],
)
def test_what_is_no_feature_server_is_named(
    target: TargetModel, micro: Path, body: bytes, words: str
) -> None:
    with saying(body) as address, pytest.raises(UserError, match=words) as caught:
        remote(target, micro, address)
    assert address in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"x" * 100, save({"plain": torch.zeros(1)})])
def test_features_that_are_none_are_asked_for_again(body: bytes) -> None:
    with pytest.raises(FailureError, match="the answer cannot be read"):
        content_of(body)


def test_only_who_has_the_token_is_served(
    target: TargetModel, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError,
        match=r"features\.host '0\.0\.0\.0' can be reached by other machines, but no token",
    ):
        FeatureServer(target, torch.float32, "0.0.0.0", 0)
    with serving(target, token="secret") as server:
        with pytest.raises(
            UserError,
            match=r"refuses: a valid bearer token is needed.*Set HEADSTART_FEATURES_TOKEN",
        ):
            remote(target, micro, server.address)
        monkeypatch.setenv("HEADSTART_FEATURES_TOKEN", "sec\nret")
        with pytest.raises(UserError, match="printable ASCII") as caught:
            remote(target, micro, server.address)
        assert "ret" not in str(caught.value).replace("printable", "")
        monkeypatch.setenv("HEADSTART_FEATURES_TOKEN", "secret\n")  # as files end
        features, loader = remote(target, micro, server.address)
        features.batch(loader.step(0)[0])
        features.close()


def test_an_answer_that_is_not_read_keeps_its_place(
    target: TargetModel, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a server holds is bounded by the requests that it holds."""
    reached, read = threading.Event(), threading.Event()
    plain = remote_server.send_whole

    async def send_slowly(send: Any, content: bytes, kind: bytes) -> None:
        if kind == b"application/octet-stream":
            reached.set()
            while not read.is_set():
                await asyncio.sleep(0.01)
        await plain(send, content, kind)

    monkeypatch.setattr(remote_server, "send_whole", send_slowly)
    monkeypatch.setattr(remote_server, "MOST_WAITING", 1)
    monkeypatch.setattr(servers, "BUSY_SECONDS", 0.0)
    with serving(target) as server, ThreadPoolExecutor(1) as pool:
        slow, loader = remote(target, micro, server.address, timeout_seconds=30.0)
        other, _ = remote(target, micro, server.address, retries=0)
        slow.ahead = other.ahead = 0  # any further request could take the only place
        packed = loader.step(0)[0]
        answer = pool.submit(slow.batch, packed)
        assert reached.wait(20)
        with pytest.raises(UserError, match="the feature server is busy: 1 requests run or wait"):
            other.batch(packed)
        read.set()
        answer.result(20)
        slow.batch(packed)
        for features in (slow, other):
            features.close()


def test_nonsense_is_answered_with_a_sentence_and_the_server_goes_on(
    target: TargetModel, micro: Path
) -> None:
    with serving(target) as server:
        host, port = server.listening.getsockname()[:2]

        def ask(method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection(str(host), port, timeout=5)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            found = answer.status, json.loads(answer.read())["error"]["message"]
            connection.close()
            return found

        key = {"X-Headstart-Key": server.key}
        wish = json.dumps({"taps": [1], "last_hidden": False, "format": "fp32", "top_logits": 0})
        assert ask("GET", "/")[0] == 404
        assert ask("POST", "/features", b"x")[0] == 409
        assert ask("POST", "/features", b"x", **key) == (
            400,
            "the header X-Headstart-Ask is not readable (Invalid JSON: EOF while parsing a value "
            "at line 1 column 0).",
        )
        status, sentence = ask("POST", "/features", b"x", **{**key, "X-Headstart-Ask": wish})
        assert (status, "holds no rows" in sentence) == (400, True)
        status, sentence = ask(
            "POST", "/features", b"x", **{**key, "X-Headstart-Ask": wish.replace("[1]", "[9]")}
        )
        assert (status, "taps [9] do not exist" in sentence) == (400, True)
        from safetensors.torch import save

        rows = {
            name: torch.full((1, 4), 9999, dtype=torch.int32)
            for name in ("tokens", "positions", "segments")
        }
        status, sentence = ask("POST", "/features", save(rows), **{**key, "X-Headstart-Ask": wish})
        assert (status, "token ids must lie in" in sentence) == (400, True)
        limit = target.info.max_position_embeddings
        for position, expected in ((-1, 400), (limit, 400), (limit - 1, 200)):
            rows = {name: torch.ones(1, 4, dtype=torch.int32) for name in rows}
            rows["positions"][0, -1] = position
            body = save(rows)
            if expected == 200:
                assert server.compute(body, Ask.from_json(wish, target.info))
            else:
                status, sentence = ask(
                    "POST", "/features", body, **{**key, "X-Headstart-Ask": wish}
                )
                assert (status, "positions must lie in" in sentence) == (expected, True)
        features, loader = remote(target, micro, server.address)
        features.batch(loader.step(0)[0])
        features.close()


def test_a_client_costs_nothing_before_its_token_and_little_after(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = json.dumps({"taps": [1], "last_hidden": False, "format": "fp32", "top_logits": 0})
    with serving(target, token="secret") as server:
        port = server.listening.getsockname()[1]

        def ask(length: str, *lines: str) -> tuple[int, str]:
            head = ["POST /features HTTP/1.1", "Host: x", f"Content-Length: {length}", *lines]
            with socket.create_connection(("127.0.0.1", port), 20) as connection:
                connection.sendall("\r\n".join((*head, "", "")).encode("latin-1"))
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                return answer.status, json.loads(answer.read())["error"]["message"]

        token, key = "Authorization: Bearer secret", f"X-Headstart-Key: {server.key}"
        # nothing of the body was sent, and the answer is here
        assert ask("1000000")[0] == 401
        assert ask("1000000", "Authorization: Bearer \xb2")[0] == 401
        assert ask("\xb2") == (400, "the request is not HTTP (bad Content-Length).")
        assert ask(str((1 << 24) + 1), token) == (413, "a request may have 16777216 bytes.")
        for asked, words in (
            (wish.replace("[1]", "[1e999]"), "taps.0: Input should be a valid integer"),
            (wish.replace("[1]", "[" + "9" * 400 + "]"), "do not exist"),
            (wish.replace("[1]", "[1,1]"), "without repetition"),
            (wish.replace("fp32", "\\ud800"), "not readable"),
            ("[" * 3000, "not readable"),
            ("[" * 30000, "more than 4096 characters"),
            ("5", "not readable"),
        ):
            status, sentence = ask("0", token, key, f"X-Headstart-Ask: {asked}")
            assert (status, words in sentence) == (400, True), sentence


def test_a_busy_server_is_asked_again(
    target: TargetModel, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_server, "MOST_WAITING", 0)
    with serving(target) as full, serving(target) as server:
        server._places.most = 8
        features, loader = remote(target, micro, full.address, server.address, ahead=0)
        for step in range(2):
            features.batch(loader.step(step)[0])
        features.close()
        assert (full.shared.answers, server.shared.answers) == (0, 2)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_features_come_over_https_from_who_is_trusted(
    target: TargetModel, micro: Path, tmp_path: Path
) -> None:
    pair = certificate(tmp_path)
    with serving(target, pair=pair) as server:
        assert server.address.startswith("https://127.0.0.1:")
        features, loader = remote(target, micro, server.address, ssl_cafile=pair[0])
        features.batch(loader.step(0)[0])
        features.close()
        unknown = r"certificate of the feature server https://.* is not valid.*features\.ssl_cafile"
        with pytest.raises(UserError, match=unknown):
            remote(target, micro, server.address)
        plain = server.address.replace("https", "http")
        with pytest.raises(UserError, match="no feature server answers"):
            remote(target, micro, plain)
