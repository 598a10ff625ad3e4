"""Bodies: JSON is read, and everything else is refused with a true reason."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.server.errors import ApiError
from inference.server.front.body import DEEPEST, MOST_DIGITS, read_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.integers(-(10 ** (MOST_DIGITS - 2)), 10 ** (MOST_DIGITS - 1)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES, st.booleans())
def test_json_is_read(value: object, ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(deadline=None)
@given(st.binary())
def test_bytes_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(ApiError):  # anything else is a failure
        read_json(body)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "not JSON"),
        (b"{", None, "not JSON"),
        (b"\xff\xfe", None, "not UTF-8"),
        (b"[" * 100_000, None, "more than 64 levels"),
        (b'{"a":' * 100_000, None, "more than 64 levels"),
        (b'{"t": 1' + b"0" * 309 + b"}", None, "has 310 digits"),
        (b'{"t": -1' + b"0" * 9000 + b"}", None, "digits"),
        (b'{"t": NaN}', None, "NaN is no number"),
        (b'{"t": -Infinity}', None, "-Infinity is no number"),
        (b'{"model": "\\ud800"}', "model", "'model' is not valid Unicode"),
        (b'{"\\ud800": 1}', None, "parameter's name is not valid Unicode"),
        (b'{"a": [{"b": "\\uDC00"}]}', "a", "'a' is not valid Unicode"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_taken_is_refused(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        read_json(body)
    error = caught.value.body["error"]
    assert (caught.value.status, error["param"]) == (400, param)
    json.dumps(error).encode()


def test_brackets_in_texts_and_wide_lists_are_no_depth() -> None:
    text = json.dumps({"a": "[{" * 1000 + '\\"' + "[" * 100, "b": [[]] * 1000})
    assert read_json(text.encode()) == json.loads(text)
    deep = b"[" * DEEPEST + b"]" * DEEPEST
    assert read_json(deep) is not None
    with pytest.raises(ApiError):
        read_json(b"[" + deep + b"]")
