"""What each algorithm must send, worked out from the supports alone, apart from the code under test."""

from __future__ import annotations

from itertools import pairwise

from lightning_distlab.payloads import even_bounds

SPARSE_HEADER = 16


def message(supports: list[set[int]], low: int, high: int) -> int:
    """Bytes of the fp64 sum of entries in [low, high): int32 indices filled up to 8, or dense where that is smaller."""
    entries = len({i for support in supports for i in support if low <= i < high})
    return SPARSE_HEADER + min((4 * entries + 7) // 8 * 8 + 8 * entries, 8 * (high - low))


def ring_bytes(supports: list[set[int]], size: int) -> list[int]:
    """Bytes sent by each rank of a ring, chunk by chunk along its way."""
    world = len(supports)
    if world == 1:
        return [0]
    ranges = list(pairwise(even_bounds(size, world)))
    sent = [0] * world
    for chunk, (low, high) in enumerate(ranges):
        collected: list[set[int]] = []
        for hop in range(world - 1):  # from chunk + 1 round to its owner
            sender = (chunk + 1 + hop) % world
            collected.append(supports[sender])
            sent[sender] += message(collected, low, high)
        for hop in range(world - 1):  # from the owner round to the last rank before it
            sent[(chunk + hop) % world] += message(supports, low, high)
    return sent


def doubling_bytes(supports: list[set[int]], size: int) -> list[int]:
    """Bytes sent by each rank of recursive doubling."""
    world = len(supports)
    power = 1 << (world.bit_length() - 1)
    extra = world - power
    # Participants of the butterfly: the real rank that speaks, and all ranks that it speaks for.
    speakers = [(2 * j + 1, [2 * j, 2 * j + 1]) for j in range(extra)] + [(j, [j]) for j in range(2 * extra, world)]
    sent = [0] * world
    for pair in range(extra):
        sent[2 * pair] += message([supports[2 * pair]], 0, size)
        sent[2 * pair + 1] += message(supports, 0, size)
    distance = 1
    while distance < power:
        for start in range(0, power, distance):
            block = [supports[r] for _, members in speakers[start : start + distance] for r in members]
            for speaker, _ in speakers[start : start + distance]:
                sent[speaker] += message(block, 0, size)
        distance *= 2
    return sent


def gather_bytes(supports: list[set[int]], size: int) -> list[int]:
    """Bytes sent by each rank of a direct exchange."""
    return [(len(supports) - 1) * message([support], 0, size) for support in supports]
