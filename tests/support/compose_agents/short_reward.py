"""A reward of one's own, for the containers."""

from typing import Any


def short(episode: Any) -> float:
    """Return 1 for an answer of at most eight characters."""
    return float(len(episode.final_answer) <= 8)
