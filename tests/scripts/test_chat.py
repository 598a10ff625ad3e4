"""The chat: text appears whole, the conversation is remembered, a piped prompt is answered, numbers
go to standard error."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from heads.api.errors import UserError
from inference.decoding.config import DecodeConfig
from inference.decoding.engine import Engine
from inference.decoding.requests import PassRecord
from inference.target.model import TargetModel
from scripts.config.schema import load_settings
from scripts.config.stages import STAGES
from scripts.run.conversation import Answer, Chat, TextStream, converse, summary
from scripts.stages.chat import run
from tests.inference.tokenizers import save_micro_target


class Bytes:
    """A tokenizer whose tokens are single bytes: characters beyond ASCII arrive in pieces."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_is_shown_when_all_its_bytes_are_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = TextStream(Bytes(), ends=(0,))
    pieces = []
    for byte in "né€\0".encode():
        stream.add([byte])
        pieces.append(capsys.readouterr().out)
    assert pieces == ["n", "", "é", "", "", "€", ""]
    stream.add(["€".encode()[0]])
    stream.close()
    # what never became whole is not held back for ever
    assert capsys.readouterr().out == "\ufffd\n"


def test_accepted_drafts_are_green_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = TextStream(Bytes(), ends=(0,), colour=True)
    stream.add(list(b"abc"), drafted=2)
    stream.add(list(b"d"))
    stream.add([0], drafted=1)
    stream.add([*"é".encode()], drafted=1)  # a character is green only if it was drafted whole
    assert capsys.readouterr().out == "\x1b[32mab\x1b[0mcdé"
    stream = TextStream(Bytes(), ends=(0,))
    stream.add(list(b"abc"), drafted=2)
    assert capsys.readouterr().out == "abc"


def test_the_summary_is_a_ratio_of_sums() -> None:
    answer = Answer("text", 8, [PassRecord(2, 3, True), PassRecord(3, 4, False)], 2.0)
    assert summary(answer, "medusa") == "[medusa: tau 3.50, 4 tokens/s, 8 tokens in 2.00 s]"
    assert "tau 0.00" in summary(Answer("", 1, [], 0.5), "medusa")  # ended with its first token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def engine(folder: Path) -> Engine:
    from inference.target.loading import TargetConfig

    return Engine(
        TargetModel.load(TargetConfig(str(folder), device="cpu")),
        None,
        DecodeConfig(max_new_tokens=8),
    )


def test_a_conversation_is_remembered_and_forgotten(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(engine, "Be brief.", seed=0)
    answer = chat.answer("hello")
    assert capsys.readouterr().out == answer.text + "\n"
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == answer.text
    chat.answer("and now")
    assert len(chat.messages) == 5
    chat.clear()
    assert [message["role"] for message in chat.messages] == ["system"]


class Lines:
    """A terminal that types prepared lines."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __call__(self, prompt: str = "") -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


def test_the_terminal_loop(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    too_long = "word " * 400
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "500")
    typed = ["hello", "", too_long, "/help", "/clera", "/etc is a folder", "/clear", "again"]
    monkeypatch.setattr("builtins.input", Lines([*typed, "/quit", "never"]))
    chat = Chat(engine, "", seed=0)
    converse(chat, "no drafter")
    text = capsys.readouterr().out
    # a sentence that begins with a path is a prompt, an unknown command is none
    assert text.count("[no drafter: tau 1.00") == 3
    assert "there is no command '/clera'. Did you mean '/clear'?" in text
    assert "/clear  forget the conversation" in text
    assert (tmp_path / "headstart" / "chat_history").is_file()
    assert "(/clear starts a new conversation)" in text
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == [
        "again"
    ]


def test_a_piped_prompt(
    folder: Path,
    in_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [
        f"target.path={folder}",
        "target.device=cpu",
        "decode.max_new_tokens=8",
        "chat.drafter=ngram",
    ]
    settings = load_settings(STAGES["chat"], given)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    run(settings)
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("[ngram: tau ")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    run(load_settings(STAGES["chat"], [*given[:-1], "chat.drafter=none"]))
    assert capsys.readouterr().out == shown.out  # the drafter changes nothing
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(UserError, match="standard input is empty"):
        run(settings)
    with pytest.raises(UserError, match=r"there is no drafter 'nogram' in 'outputs/default'"):
        run(load_settings(STAGES["chat"], [*given[:-1], "chat.drafter=nogram"]))
