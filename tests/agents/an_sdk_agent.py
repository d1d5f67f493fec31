"""An agent that imports its SDK, as agents do, and says what of it is there before its first call."""

import ssl
import sys
from typing import Any

from openai import OpenAI

AT_THE_FIRST_CALL = ("openai.resources.chat.completions.completions", "h11")


def looks(task: Any, llm: Any) -> dict[str, float]:
    assert OpenAI
    return {name: float(name in sys.modules) for name in AT_THE_FIRST_CALL}


def connects(task: Any, llm: Any) -> dict[str, float]:
    """How often its first clients read certificates, and how often those do that find none ready."""
    read, loads = [0], ssl.SSLContext.load_verify_locations

    def counted(context: ssl.SSLContext, *files: Any, **more: Any) -> None:
        read[0] += 1
        loads(context, *files, **more)

    ssl.SSLContext.load_verify_locations = counted  # type: ignore[method-assign, assignment]
    clients, found = [], {}
    for number in range(3):
        clients.append(OpenAI(base_url=llm.base_url, api_key=llm.api_key))
        found[f"read after client {number}"] = float(read[0])
    certificates = {len(client._client._transport._pool._ssl_context.get_ca_certs()) for client in clients}  # type: ignore[attr-defined]
    contexts = {id(client._client._transport._pool._ssl_context) for client in clients}  # type: ignore[attr-defined]
    return {**found, "contexts": float(len(contexts)), "alike": float(len(certificates) == 1)}
