"""Cross-origin requests: which web pages of other sites may read the responses of `agentrl serve` in a browser.

A browser first sends an OPTIONS request (a preflight). The browser shows a response to a page only if the response names the
page's origin. Origins are compared in the form that browsers send: scheme, host and port, without patterns.
"""

import re
from collections.abc import Mapping, Set

from agentrl.workers.http.api_errors import Headers

HEADERS = (
    b"authorization, content-type, idempotency-key, x-api-key, x-agentrl-episode, "
    b"anthropic-version, anthropic-beta, anthropic-dangerous-direct-browser-access"
)
"""The headers that a page may send. In addition, a page may send the headers of the SDKs (`x-stainless-...`)."""
EXPOSED = b"x-request-id, request-id, retry-after, x-agentrl-not-applied, x-agentrl-policy-version"
"""The headers of a response that a page may read."""
PREFLIGHT_SECONDS = b"600"
_ORIGIN = re.compile(r"https?://[a-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")
_OF_SDK = re.compile(rb"x-stainless-[a-z\-]{1,40}")


def read_origins(text: str) -> frozenset[str]:
    """Return the origins in a comma-separated text.

    Raises:
        ValueError: a part of the text is not an origin in the form that browsers send.
    """
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin: write scheme://host or scheme://host:port in lower case")
    return frozenset(origins)


def answer_headers(headers: Mapping[str, str], origins: Set[str]) -> Headers:
    """Return the headers that let a browser show a response to the page. If the page's origin is not allowed, return only
    `vary`.
    """
    vary: Headers = [(b"vary", b"Origin")]  # a cache must not give one origin what names another
    origin = headers.get("origin", "")
    if origin not in origins:
        return vary
    return [*vary, (b"access-control-allow-origin", origin.encode()), (b"access-control-expose-headers", EXPOSED)]


def preflight_headers(headers: Mapping[str, str], method: str) -> Headers:
    """Return the additional headers of the response to a preflight. The response needs the headers of `answer_headers` too."""
    names = headers.get("access-control-request-headers", "").lower().replace(" ", "").encode("latin-1").split(b",")
    of_sdk = [name for name in names[:50] if _OF_SDK.fullmatch(name)]
    return [
        (b"access-control-allow-methods", method.encode()),
        (b"access-control-allow-headers", b", ".join([HEADERS, *of_sdk])),
        (b"access-control-max-age", PREFLIGHT_SECONDS),
    ]
