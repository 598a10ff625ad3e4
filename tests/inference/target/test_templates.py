"""Chat templates of other people: what they may cost, and that they cost nobody else anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.target import chat, templates
from tests.inference.tokenizers import tiny_tokenizer
from tests.waiting import until

TALK = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that are given one second of computing."""
    workers = templates.Worker(), templates.Worker()
    monkeypatch.setattr(templates, "SECONDS", 1)
    monkeypatch.setattr(templates, "WORKERS", workers)
    yield
    for worker in workers:
        worker.stop()


def render(template: str, **values: object) -> str:
    return templates.render(template, TALK, values).text


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
POWER = "{{ (7 ** 9999999) % 10 }}{{ 9 ** 9 ** 9 }}"


@pytest.mark.parametrize("template", [LOOP, MACRO, POWER])
def test_a_template_that_does_not_end_is_ended(template: str, quick: None) -> None:
    with pytest.raises(UserError, match="the chat template was ended: it took more than 1 seconds"):
        render(template)
    assert render("{{ messages[0].content }}") == "Hello!"  # the next one has a process again


def test_a_conversation_that_takes_long_keeps_no_other_one_waiting(quick: None) -> None:
    render("{{ 1 }}")
    with templates.free_worker(), templates.free_worker():
        pass  # both are free again
    with ThreadPoolExecutor(1) as pool:
        process = templates.WORKERS[0]._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # does not end before the other one
        long = pool.submit(render, LOOP)
        until(templates.WORKERS[0].lock.locked)
        assert render("{{ messages[0].content }}") == "Hello!"
        assert not long.done()
        process.send_signal(signal.SIGCONT)
        with pytest.raises(UserError, match="was ended"):
            long.result()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
        ("{% include 'other' %}", "refuses this conversation: "),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception('no system message') }}", "conversation: no system message"),
        ("{{ ('x' * 1000000) * 70 }}", "it writes 70,000,000 characters"),
        ("{{ '%1000000000d' % 1 }}{{ '%1000000000d' % 1 }}", "refuses this conversation|ended"),
    ],
)
def test_what_a_template_does_wrong_is_one_sentence(template: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        render(template)
    assert "\n" not in str(caught.value)


def test_a_template_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    worker = templates.Worker()
    try:
        process = worker._start()
        assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    finally:
        worker.stop()


def test_a_process_that_ends_as_it_starts_is_no_fault_of_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = templates.Worker()
    monkeypatch.setattr(templates.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"ended as it started, with status 1.*/bin/false -P"):
        worker.render({})
    monkeypatch.undo()
    try:
        assert worker.render({"template": "a", "messages": [], "values": {}, "marks": False})
    finally:
        worker.stop()


def test_values_that_json_has_no_type_for_are_named() -> None:
    assert render("{{ value }} {{ more.a }}", value={1, 2}, more={"a": None}) == "<set> None"


def test_a_forked_process_has_a_renderer_of_its_own() -> None:
    template = "{{ messages[0].content }}{{ number }}"
    assert render(template, number=0) == "Hello!0"
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, render(template, number=1).encode())
        finally:
            for worker in templates.WORKERS:
                worker.stop()
            os._exit(0)
    assert [render(template, number=number) for number in range(2, 6)] == [
        f"Hello!{number}" for number in range(2, 6)
    ]
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"Hello!1"


def test_the_library_renders_the_same() -> None:
    """Text and assistant's tokens are those of `apply_chat_template`."""
    talk = [
        *TALK,
        {"role": "assistant", "content": "Hi, größer than 😀."},
        {"role": "user", "content": "Add?"},
        {"role": "assistant", "content": " a + b"},
    ]
    tokenizer = tiny_tokenizer("marked")
    ids, spans = chat.render_conversation(tokenizer, talk)
    theirs = tokenizer.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"]
    assert spans == chat.spans_of(theirs["assistant_masks"])
