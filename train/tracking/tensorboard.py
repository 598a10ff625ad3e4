"""Scalars as TensorBoard reads them, without the tensorboard package: one event file, made from log.jsonl.

Event files can only grow, so a run that continues would show what a killed session wrote after its last saved state twice. The
log is cut there; so the file is made anew from the log whenever a run starts, and grows with it from then on.

A record (TFRecord): length (uint64), masked CRC-32C of the length, the event, masked CRC-32C of the event; little endian. An event
is a protocol buffer: wall time (1, double), step (2, varint), file version (3) or summary (5), whose values (1) have a tag (1)
and a number (2, float).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
_POLYNOMIAL, _MASK = 0x82F63B78, 0xA282EAD8


def _crc_table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_TABLE = _crc_table()


def crc32c(content: bytes) -> int:
    """Castagnoli's CRC-32 of bytes."""
    value = 0xFFFFFFFF
    for byte in content:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def _masked(content: bytes) -> bytes:
    value = crc32c(content)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + _MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def record(event: bytes) -> bytes:
    """An event as it stands in the file."""
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def event(at: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """One step's scalars, at `at` seconds since 1970."""
    values = b"".join(
        _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars.items()
    )
    return b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + _field(5, values)


def scalars(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Names and values of all numbers in a line of the log; nested ones as `outer/inner`. The step itself is left out."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name != "step"):
            yield prefix + name, float(value)


class EventFile:
    """The event file of a run in <out>/tensorboard. lines: what the log holds already."""

    def __init__(self, out: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        folder = out / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        now = time.time()
        self._file = (folder / f"events.out.tfevents.{int(now):010d}.headstart").open("wb")
        self._file.write(record(b"\x09" + struct.pack("<d", now) + _field(3, b"brain.Event:2")))
        for line in lines:
            self.write(line["step"], line)
        self._file.flush()

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Append a line's numbers."""
        found = dict(scalars(figures))
        if found:
            self._file.write(record(event(time.time(), step, found)))
            self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()
