"""Which sequences are padded and read together.

Legend: R sequences.
"""

from __future__ import annotations

PADDING = 512
"""Most padded positions of sequences that are read together. They take as long as tokens do;
another pass takes another look at the weights."""


def of_like_length(lengths: list[int]) -> list[list[int]]:
    """Places in `lengths` [R] in groups, each to be padded to its longest: from the longest on, a
    group ends where it would hold more than `PADDING` padded positions."""
    groups: list[list[int]] = []
    padding = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        padding += lengths[groups[-1][0]] - lengths[place] if groups else 0
        if not groups or padding > PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(place)
    return groups
