"""Texts as sets of hashed shingles: runs of letters and digits.

All hashes of a text are computed together, with wrapping 64-bit arithmetic: with prefix sums S of
byte_i * p^i, the run of bytes i to j has the hash (S[j] - S[i]) * p^-i (p is odd, so has an
inverse). They are the same on every machine.
"""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np
from numpy.typing import NDArray

from train.data.permute import mix

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint64]

PRIME = 0x9E3779B185EBCA87
INVERSE = pow(PRIME, -1, 1 << 64)
SIGNATURE = 64
"""MinHash values of a text."""
BANDS = 16
"""Number of bands of `SIGNATURE / BANDS` values; texts that agree in a band are compared. Above a
similarity of 0.75, hardly any pair is missed."""
WIDTH = 12
"""Letters of a shingle for similarity."""
WIDE = 0xE3
"""First byte in UTF-8 from which on characters say about as much as two letters: those of Chinese,
Japanese and Korean, from U+3000 on."""
LONGEST = 1 << 16
"""Bytes of a text that are compared for similarity."""

TOGETHER = 512
"""Hashes that are permuted together: as many as stay in the processor's cache."""

_KEPT = np.zeros(256, dtype=bool)
_KEPT[[*range(ord("0"), ord("9") + 1), *range(ord("a"), ord("z") + 1), *range(128, 256)]] = True
_MULTIPLIERS = mix(np.arange(1, SIGNATURE + 1, dtype=np.uint64)) | np.uint64(1)
_powers: dict[int, Hashes] = {}


def normalise(text: str) -> Bytes:
    """Letters and digits of a text in one case and one compatible form, as UTF-8 bytes."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    content = np.frombuffer(folded.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    return content[_KEPT[content]]


def runs_of(content: Bytes, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the runs of `width` letters begin and end [byte], one from each character that is
    followed by enough of them. A wide character counts as two letters."""
    begins = np.flatnonzero((content & 0xC0) != 0x80)
    edges = np.append(begins, len(content))
    letters = np.concatenate([[0], np.cumsum(1 + (content[begins] >= WIDE))])
    count = int(np.searchsorted(letters, letters[-1] - width, side="right"))
    return begins[:count], edges[np.searchsorted(letters, letters[:count] + width)]


def shingles(content: Bytes, width: int) -> Hashes:
    """Hashes of all runs of `width` letters (`runs_of`)."""
    begins, ends = runs_of(content, width)
    if not len(begins):
        return np.zeros(0, dtype=np.uint64)
    sums = np.zeros(len(content) + 1, dtype=np.uint64)
    values = content.astype(np.uint64) + np.uint64(1)
    np.cumsum(values * _powers_of(PRIME, len(content)), out=sums[1:])
    return mix((sums[ends] - sums[begins]) * _powers_of(INVERSE, len(content))[begins])


def whole(content: Bytes | bytes) -> int:
    """One hash of all of a text, below 2^64."""
    return int.from_bytes(hashlib.blake2b(bytes(content), digest_size=8).digest(), "big")


def signature(content: Bytes) -> NDArray[np.uint32]:
    """MinHash values [SIGNATURE] of a text's shingles: two texts agree in about as large a share of
    them as they share shingles (Broder, 1997). A text shorter than a shingle counts as one."""
    hashes = np.unique(shingles(content[:LONGEST], WIDTH))
    if not len(hashes):
        hashes = np.array([whole(content)], dtype=np.uint64)
    # Odd multipliers permute the hashes; the highest bits of the smallest one are kept.
    least = np.full(SIGNATURE, ~np.uint64(0))
    for begin in range(0, len(hashes), TOGETHER):
        permuted = hashes[begin : begin + TOGETHER] * _MULTIPLIERS[:, None]
        np.minimum(least, permuted.min(axis=1), out=least)
    return (least >> np.uint64(32)).astype(np.uint32)


def band_keys(signatures: NDArray[np.uint32]) -> Hashes:
    """Keys [n, BANDS] of signatures [n, SIGNATURE]; the same key only for the same band."""
    bands = signatures.reshape(len(signatures), BANDS, -1).astype(np.uint64)
    keys = np.broadcast_to(np.arange(BANDS, dtype=np.uint64), bands.shape[:2])
    for place in range(bands.shape[2]):
        keys = mix(keys * np.uint64(PRIME) + bands[:, :, place])
    return keys


def _powers_of(base: int, count: int) -> Hashes:
    """base^0 ... base^(count - 1), wrapped to 64 bits."""
    known = _powers.get(base)
    if known is None or len(known) < count:
        factors = np.full(max(count, 1 << 12), base, dtype=np.uint64)
        factors[0] = 1
        known = np.cumprod(factors)
        if len(known) <= LONGEST:  # a giant text must not leave giant tables behind
            _powers[base] = known
    return known[:count]
