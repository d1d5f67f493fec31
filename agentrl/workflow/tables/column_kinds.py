"""Columns that SQLite returns as text or numbers. Made from `tables.schema` by `make generated`; do not edit.

A read without SQLAlchemy finds the type of a result column here, by its name.
"""

DOCUMENTS = frozenset(
    {
        "annotations",
        "arguments",
        "asked",
        "config",
        "data",
        "gpus",
        "manifest",
        "messages",
        "metadata",
        "opening",
        "pass_at",
        "prompt",
        "rewards",
        "template_options",
        "tools",
        "weights",
    }
)
"""JSON; SQLite returns its text."""
FLAGS = frozenset(
    {
        "chosen",
        "delivered",
        "loose",
        "replayed",
        "side_call",
        "tainted",
    }
)
"""Booleans; SQLite returns 0 or 1."""
MOMENTS = frozenset(
    {
        "collected_at",
        "created_at",
        "finished_at",
        "observed_at",
        "rolled_out_at",
        "sampled_at",
        "started_at",
        "tokens_removed_at",
    }
)
"""Moments in UTC; SQLite returns ISO text without a zone."""
