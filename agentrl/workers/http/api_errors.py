"""The error responses that the servers write themselves. The dialect of the request's path determines their format."""

import json
from typing import Any

from agentrl.workflow.dialects import RequestError
from agentrl.workflow.dialects.paths import dialect_of

Headers = list[tuple[bytes, bytes]]


class ApiError(RequestError):
    """An error response that a server writes itself.

    `retry_after` is the time after which the client should retry, in seconds. `final` tells SDKs not to retry. `allow` is the
    method that the path supports, for status 405.
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
        super().__init__(status, message, code, kind=kind)
        self.retry_after, self.final, self.allow = retry_after, final, allow


def headers_of(error: RequestError) -> Headers:
    """Return the headers of the response to a request that fails, except those that describe its body."""
    if not isinstance(error, ApiError):
        return [(b"x-should-retry", b"false")] if error.code == "max_calls" else []
    headers: Headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.final:
        headers.append((b"x-should-retry", b"false"))
    if error.allow:
        headers.append((b"allow", error.allow.encode()))
    return headers


def as_json(value: Any) -> bytes:
    """Return the value as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def error_json(error: RequestError, path: str = "") -> bytes:
    """Return the JSON body of an error response, in the dialect of the request's path."""
    return as_json(dialect_of(path).error_body(error))


def unknown_key() -> ApiError:
    """Return the error for a key that is missing or that belongs to no attempt."""
    message = "Unknown API key. Send the attempt's key: Authorization: Bearer KEY, x-api-key: KEY, or /attempt/KEY/v1."
    return ApiError(401, message, "invalid_api_key", final=True)


def no_route(routes: str) -> ApiError:
    """Return the error for a path that is not served."""
    return ApiError(404, f"Unknown path. Paths: {routes}.", "unknown_url")


def no_model(name: str, served: str) -> ApiError:
    """Return the error for a lookup of a model that is not served. Requests for turns never get this error, because they may
    name any model.
    """
    return ApiError(404, f"Unknown model {name[:100]!r}. Use {served!r}.", "model_not_found")


def wrong_method(allow: str) -> ApiError:
    """Return the error for a path that exists but does not accept the request's method."""
    return ApiError(405, f"This path supports only {allow}.", "method_not_allowed", allow=allow)


def long_head(max_bytes: int) -> ApiError:
    """Return the error for a request whose path and headers together exceed the limit."""
    return ApiError(431, f"The path and the headers have more than {max_bytes} bytes.", "headers_too_large")


def encoded_body() -> ApiError:
    """Return the error for a compressed body. Such a body is refused because its real size is unknown."""
    return ApiError(415, "The body must not be compressed. Leave Content-Encoding out.", "unsupported_encoding")


def wrong_type(content_type: str) -> ApiError:
    """Return the error for a body that has another content type than `content_type`."""
    return ApiError(415, f"The body's Content-Type must be {content_type}.", "unsupported_media_type")


def too_large(max_bytes: int) -> ApiError:
    """Return the error for a body that has more than `max_bytes` bytes."""
    return ApiError(413, f"The body has more than {max_bytes} bytes.", "request_too_large")


def too_slow(seconds: float) -> ApiError:
    """Return the error for a body that did not arrive in time."""
    return ApiError(408, f"The body was not received within {seconds:g} s.", "request_timeout")


def over(episode: int, why: str) -> ApiError:
    """Return the error for an episode that accepts no more requests."""
    return ApiError(409, f"Episode {episode} {why}. Calls of it are no longer accepted.", "episode_over", final=True)


def too_many(what: str) -> ApiError:
    """Return the error for a request beyond a limit on open requests; `what` describes the limit."""
    return ApiError(429, f"{what}. Wait until some of them have ended.", "too_many_requests", "rate_limit_error", retry_after=1)


def no_holder(seconds: float, is_local: bool = False) -> ApiError:
    """Return the error for an episode that no worker has held for `seconds`. If `is_local`, only this process can hold it."""
    problem = f"No rollout worker has served this episode for {seconds:g} s."
    if is_local:  # the reason may contain addresses, which are not for clients
        problem = f"This episode could not be served for {seconds:g} s; the reason is in the server's log."
    return ApiError(503, f"{problem} Send the call again.", "no_holder", "server_error", retry_after=5)


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
    """Return the error for a response that was interrupted and whose repetition differs from the bytes already sent."""
    return ApiError(
        500,
        "The response was interrupted, and its repetition differs. Send the call again.",
        "reply_broke",
        "server_error",
    )


def internal(server: str) -> ApiError:
    """Return the error for a bug of the server. `server` is its name in the message."""
    return ApiError(500, f"The {server} failed; the reason is in its log.", "internal_error", "server_error")
