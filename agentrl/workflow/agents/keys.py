"""The two keys of an agent's attempt at an episode: one samples, the other also writes annotations.

The one that samples is made from the other, and not the other way round: who has it, as a command that a model wrote may, opens
nothing else with it. Rows know the hash of the one that samples alone.
"""

import base64
import hashlib
import secrets

PREFIX = "agentrl-"


def new_emit_key() -> str:
    """Return a key that nobody can guess."""
    return f"{PREFIX}emit-{secrets.token_urlsafe(32)}"


def sampling_key(emit_key: str) -> str:
    """Return the sampling key of the same attempt."""
    digest = hashlib.sha256(b"agentrl sampling key\0" + emit_key.encode(errors="surrogateescape")).digest()
    return PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def key_hash(key: str) -> str:
    """Return the hash of a key, as rows store it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
