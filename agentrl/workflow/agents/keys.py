"""The two keys of an agent's attempt at an episode. The sampling key may only sample. The emit key may also write annotations.

The sampling key is derived from the emit key, and the emit key cannot be computed from it. So code that has only the sampling
key, such as a command that a model wrote, cannot write annotations. The database stores only the hash of the sampling key.
"""

import base64
import hashlib
import secrets

PREFIX = "agentrl-"


def new_emit_key() -> str:
    """Return a random key that cannot be guessed. With this key, a client may sample and write annotations."""
    return f"{PREFIX}emit-{secrets.token_urlsafe(32)}"


def sampling_key(emit_key: str) -> str:
    """Return the sampling key of the same attempt."""
    digest = hashlib.sha256(b"agentrl sampling key\0" + emit_key.encode(errors="surrogateescape")).digest()
    return PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def key_hash(key: str) -> str:
    """Return the hash of a key, as the database stores it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
