"""Blocks of a dimension that several devices split. The one rule for all sizes is torch.chunk's: 5 over 4 is 2, 2, 1, 0.

All blocks but the last ones have one size. So the blocks are those of a longer dimension that is split evenly, without the rows
at its end. Compiled programs compute with these padded blocks.
"""

from __future__ import annotations

__all__ = ["block_range", "block_size", "block_sizes"]


def block_size(extent: int, parts: int) -> int:
    """Return the size of the largest block, which is the first."""
    return -(-extent // parts)


def block_range(extent: int, parts: int, number: int) -> slice:
    """Return the rows of a block."""
    size = block_size(extent, parts)
    return slice(min(number * size, extent), min((number + 1) * size, extent))


def block_sizes(extent: int, parts: int) -> str:
    """Return the sizes of all blocks in words: "2, 2, 1, 0", or "4 (7 times), 2 and 0 (8 times)" for many."""
    size = block_size(extent, parts)
    full, rest = divmod(extent, size) if size else (0, 0)
    if parts <= 8:
        return ", ".join(map(str, [size] * full + [rest] * bool(rest) + [0] * (parts - full - bool(rest))))
    runs = [(size, full), (rest, int(bool(rest))), (0, parts - full - bool(rest))]
    told = [f"{rows} ({times} times)" if times > 1 else f"{rows}" for rows, times in runs if times]
    return " and ".join([", ".join(told[:-1]), told[-1]]) if len(told) > 1 else told[0]
