"""The endpoint's own responses in the shape of the OpenAI API: errors, and the list of models."""

import json
from typing import Any


class ApiError(Exception):
    """An error response of the endpoint itself.

    `retry_after` is in seconds. `final` tells SDKs not to send the request again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        kind: str = "invalid_request_error",
        retry_after: int | None = None,
        final: bool = False,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.kind = status, message, code, kind
        self.retry_after, self.final, self.allow = retry_after, final, allow

    @property
    def body(self) -> bytes:
        """Return the error as JSON."""
        return as_json({"error": {"message": self.message, "type": self.kind, "param": None, "code": self.code}})

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that belong to the error, without those of its body."""
        headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        if self.final:
            headers.append((b"x-should-retry", b"false"))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        return headers


def as_json(value: Any) -> bytes:
    """Return the value as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def event(body: bytes) -> bytes:
    """Return an error's body as an event of a stream that has begun."""
    return b"data: " + body + b"\n\n"


def unknown_key() -> ApiError:
    """Return the error for a missing key, or a key of no attempt."""
    message = "Unknown API key. Send the attempt's key: Authorization: Bearer KEY, x-api-key: KEY, or /attempt/KEY/v1."
    return ApiError(401, message, "invalid_api_key", final=True)


def no_route(routes: str) -> ApiError:
    """Return the error for a path that is not served."""
    return ApiError(404, f"Unknown path. Paths: {routes}.", "unknown_url")


def no_model(name: str, served: str) -> ApiError:
    """Return the error for the lookup of a model that is not served. Requests for turns may name any model."""
    return ApiError(404, f"Unknown model {name[:100]!r}. Use {served!r}.", "model_not_found")


def wrong_method(allow: str) -> ApiError:
    """Return the error for a served path with another method."""
    return ApiError(405, f"This path supports only {allow}.", "method_not_allowed", allow=allow)


def long_head(max_bytes: int) -> ApiError:
    """Return the error for a path and headers over the limit."""
    return ApiError(431, f"The path and the headers have more than {max_bytes} bytes.", "headers_too_large")


def encoded_body() -> ApiError:
    """Return the error for a compressed body, whose size is unknown."""
    return ApiError(415, "The body must not be compressed. Leave Content-Encoding out.", "unsupported_encoding")


def wrong_type(content_type: str) -> ApiError:
    """Return the error for a body of another content type."""
    return ApiError(415, f"The body's Content-Type must be {content_type}.", "unsupported_media_type")


def too_large(max_bytes: int) -> ApiError:
    """Return the error for a body over the limit."""
    return ApiError(413, f"The body has more than {max_bytes} bytes.", "request_too_large")


def too_slow(seconds: float) -> ApiError:
    """Return the error for a body that did not arrive in time."""
    return ApiError(408, f"The body was not received within {seconds:g} s.", "request_timeout")


def over(episode: int, why: str) -> ApiError:
    """Return the error for an episode that accepts no more requests."""
    return ApiError(409, f"Episode {episode} {why}. Calls of it are no longer accepted.", "episode_over", final=True)


def too_many(what: str) -> ApiError:
    """Return the error for more open requests than allowed."""
    return ApiError(429, f"{what}. Wait for some to end.", "too_many_requests", "rate_limit_error", retry_after=1)


def no_holder(seconds: float) -> ApiError:
    """Return the error for an episode for which no process samples."""
    message = f"No rollout worker has served this episode for {seconds:g} s. Send the call again."
    return ApiError(503, message, "no_holder", "server_error", retry_after=5)


def broken(seconds: float) -> ApiError:
    """Return the error for a database that does not answer."""
    return ApiError(
        503,
        f"The database did not answer for {seconds:g} s. Send the call again.",
        "no_database",
        "server_error",
        retry_after=5,
    )


def differs() -> ApiError:
    """Return the error for a response that began and cannot be completed."""
    return ApiError(
        500,
        "The response was interrupted, and its repetition differs. Send the call again.",
        "reply_broke",
        "server_error",
    )


def internal() -> ApiError:
    """Return the error for a bug of the endpoint."""
    return ApiError(500, "The endpoint failed; the reason is in its log.", "internal_error", "server_error")
