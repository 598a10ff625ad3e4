"""Files from outside: what is well is read, and whatever else they hold is one `UserError`."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from typing_extensions import TypedDict

from heads.api import reading, tensors
from heads.api.errors import UserError

QUICK = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were cut, or have a few bytes changed, put in or taken out."""
    content = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(content)))
        content[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)


def as_json(values: Any) -> bytes:
    return json.dumps(values).encode()


READERS = {
    "json": lambda path: reading.read_json(path),
    "object": lambda path: reading.read_object(path),
    "lines": lambda path: list(reading.read_json_lines(path)),
    "yaml": lambda path: reading.read_yaml(path),
    "text": lambda path: reading.read_text(path),
    "tensors": lambda path: tensors.read_tensors(path),
    "shapes": lambda path: tensors.tensor_shapes(path),
}


def read_or_refuse(name: str, path: Path) -> Any:
    """What a reader returns, or its `UserError`; nothing else may come out of it."""
    try:
        return READERS[name](path)
    except UserError as error:
        refusal = error
    assert str(path) in str(refusal)
    assert "\n" not in str(refusal)
    return refusal


@QUICK
@given(content=st.binary() | damaged(PLAIN.map(as_json)))
@pytest.mark.parametrize("reader", ["json", "object", "lines", "yaml", "text"])
def test_any_bytes_are_read_or_refused(tmp_path: Path, reader: str, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    read_or_refuse(reader, path)


@QUICK
@given(values=PLAIN)
def test_what_python_writes_is_read(tmp_path: Path, values: Any) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps([values]), encoding="utf-8")
    read = read_or_refuse("json", path)
    assert isinstance(read, UserError) or json.dumps(read) == json.dumps([values])


@QUICK
@given(content=damaged(PLAIN.map(lambda values: yaml.safe_dump(values).encode())))
def test_damaged_yaml_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    read_or_refuse("yaml", path)


WHOLE = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)})


@QUICK
@given(content=damaged(st.just(WHOLE)) | st.binary(max_size=64))
@pytest.mark.parametrize("reader", ["tensors", "shapes"])
def test_damaged_tensors_are_read_or_refused(tmp_path: Path, reader: str, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    read_or_refuse(reader, path)


@QUICK
@given(
    shape=st.lists(st.integers(-1, 2**64), max_size=4),
    offsets=st.lists(st.integers(0, 2**64), min_size=2, max_size=2),
    kind=st.sampled_from(["F32", "F64", "BF16", "I8", "BOOL", "F4", "zzz"]),
)
def test_shapes_of_a_header_are_never_larger_than_the_file(
    tmp_path: Path, shape: list[int], offsets: list[int], kind: str
) -> None:
    header = json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    found = read_or_refuse("shapes", path)
    if not isinstance(found, UserError):
        count = 1
        for size in found["a"]:
            count *= size
        assert count <= 64 * 8
    read_or_refuse("tensors", path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{}", "is not readable as JSON"),
        (b"[" * 100_000, "is not readable as JSON"),
        (b"[" * 101 + b"]" * 101, "more than 100 lists or mappings inside each other"),
        (b"9" * 5000, "is not readable as JSON"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"a": 1', "is not readable as JSON"),
    ],
)
def test_json_that_is_none_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        reading.read_json(path, "Fetch it again.")
    assert str(caught.value).endswith("Fetch it again.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("!!python/object/apply:os.system [ls]", "no YAML of plain values"),
        ("!!int ''", "no YAML of plain values"),
        ("!!timestamp x", "no YAML of plain values"),
        ("[" * 5000, "no YAML of plain values"),
        ("&a [*a]", "more than 100 lists or mappings inside each other"),
        (
            "\n".join(
                [
                    "a0: &a0 [x, x, x, x, x, x, x, x, x, x]",
                    *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)),
                ]
            ),
            "more than 1,000,000 values",
        ),
    ],
)
def test_yaml_that_does_more_than_hold_values_is_refused(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=words):
        reading.read_yaml(path)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    for path, words in [
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("/dev/null/x"), "Not a directory"),
        (Path("a\0b"), "null"),
    ]:
        with pytest.raises(UserError, match=words):
            reading.read_text(path)
    path = tmp_path / "latin"
    path.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(UserError, match=r"is not text in UTF-8 \(byte 2 is 0xf6\)"):
        reading.read_text(path)


def test_a_byte_order_mark_is_no_part_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "marked"
    path.write_bytes(b"\xef\xbb\xbf" + '{"a": "é"}\n'.encode())
    assert reading.read_text(path) == '{"a": "é"}\n'
    assert reading.read_json(path) == reading.read_yaml(path) == {"a": "é"}
    assert list(reading.read_json_lines(path)) == [(1, {"a": "é"})]
    path.write_bytes(b"\xef\xbb\xbf\n{}\n")
    assert list(reading.read_json_lines(path)) == [(2, {})]


def test_a_file_is_read_up_to_a_limit() -> None:
    with pytest.raises(UserError, match="larger than 1,000 bytes"):
        reading.read_bytes(Path("/dev/zero"), most=1000)


def test_numbers_and_dates_of_yaml_do_not_end_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for content in ("a: 2020-99-99", f"a: {'9' * 5000}", "? [a]\n: b", "=", "a: 1:99:99"):
        path.write_text(content)
        read_or_refuse("yaml", path)


class Inner(TypedDict):
    count: int


class Outer(TypedDict):
    inner: Inner
    more: NotRequired[list[float]]


@dataclass(frozen=True)
class Stored:
    count: int
    share: float = 0.5


def test_keys_that_are_missing_or_of_another_type_are_named(tmp_path: Path) -> None:
    fine = {"inner": {"count": 3}, "other": "of another version"}
    assert reading.require_fit(Outer, fine, "it") is fine
    for values, words in [
        ({"inner": {}}, "it is broken: inner.count: Field required"),
        ({"inner": {"count": "many"}}, "it is broken: inner.count: "),
        ({"inner": {"count": 1}, "more": [1, "x"]}, r"it is broken: more\.1: "),
        ([], "it is broken: the whole: "),
    ]:
        with pytest.raises(UserError, match=words):
            reading.require_fit(Outer, values, "it")
    path = tmp_path / "stored.json"
    path.write_text('{"count": 2, "share": NaN}')
    with pytest.raises(UserError, match=r"stored\.json\.share must be a finite number"):
        reading.read_as(Stored, path)
    path.write_text('{"count": 2}')
    assert reading.read_as(Stored, path) == Stored(2)
