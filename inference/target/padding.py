"""Groups of sequences that are padded and read together.

Legend: R sequences.
"""

from __future__ import annotations

PADDING = 512
"""Most padded positions of sequences that are read together. A padded position takes as long as a
token; another pass reads the weights again."""


def of_like_length(lengths: list[int]) -> list[list[int]]:
    """Group the places in `lengths` [R]; each group is padded to its longest. From the longest on,
    a group ends before it would have more than `PADDING` padded positions."""
    groups: list[list[int]] = []
    padding = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        padding += lengths[groups[-1][0]] - lengths[place] if groups else 0
        if not groups or padding > PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(place)
    return groups
