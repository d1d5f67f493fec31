"""Draws curves as text: a sparkline on one line, or a small plot for a summary."""

from collections.abc import Sequence
from itertools import pairwise

from agentrl.cli.console import format_decimals

BLOCKS = "▁▂▃▄▅▆▇█"


def buckets(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` numbers, each the mean of neighbouring values."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return one block character per bucket. The smallest value has the lowest block, and the largest has the highest."""
    points = buckets(values, width)
    if not points:
        return ""
    return "".join(BLOCKS[level] for level in _levels(points, len(BLOCKS)))


def plot(values: Sequence[float], width: int = 60, height: int = 8) -> list[str]:
    """Return the curve as lines of ASCII with its highest and lowest value; empty for fewer than two values."""
    points = buckets(values, width)
    if len(points) < 2:
        return []
    low, high = min(points), max(points)
    if low == high:
        height = 1
    levels = _levels(points, height)
    beside = max(8, len(format_decimals(low)), len(format_decimals(high)))
    lines = []
    for level in reversed(range(height)):
        label = high if level == height - 1 else low if level == 0 else None
        margin = format_decimals(label) if label is not None else ""
        lines.append(f"{margin:>{beside}} |{''.join('*' if here == level else ' ' for here in levels)}".rstrip())
    return [*lines, f"{' ' * beside} +{'-' * len(points)}"]


def _levels(points: Sequence[float], height: int) -> list[int]:
    """Return the row of each point, from 0 for the lowest value to height - 1 for the highest."""
    low, high = min(points), max(points)
    return [round((height - 1) * ((point - low) / (high - low))) if high > low else 0 for point in points]


def histogram(values: Sequence[int], width: int = 40, bins: int = 10) -> list[str]:
    """Return a histogram of at most `bins` equal ranges. A line has the ends of a range, the count and a bar."""
    low, high = min(values), max(values)
    step = max(1, -(-(high - low + 1) // bins))
    counts = {start: sum(start <= value < start + step for value in values) for start in range(low, high + 1, step)}
    largest = max(counts.values())
    bars = {start: "*" * -(-count * width // largest) for start, count in counts.items()}
    return [f"{start:>6}-{start + step - 1:<6} {count:>7} {bars[start]}".rstrip() for start, count in counts.items()]
