"""The two keys of an agent's attempt at an episode: one may sample, the other may also write annotations.

The sampling key is derived from the other key, and not the reverse. So whoever has only the sampling key, such as a command
that a model wrote, cannot write annotations. The database has the hash of the sampling key only.
"""

import base64
import hashlib
import secrets

PREFIX = "agentrl-"


def new_emit_key() -> str:
    """Return a random key that cannot be guessed; it may sample and write annotations."""
    return f"{PREFIX}emit-{secrets.token_urlsafe(32)}"


def sampling_key(emit_key: str) -> str:
    """Return the sampling key of the same attempt."""
    digest = hashlib.sha256(b"agentrl sampling key\0" + emit_key.encode(errors="surrogateescape")).digest()
    return PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def key_hash(key: str) -> str:
    """Return the hash of a key, as the database stores it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
