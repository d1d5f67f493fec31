"""A connection to a server that samples: what it answers as JSON, and which of our errors its refusals are. Free of torch."""

from typing import Any

import httpx2

from workflow.errors import ConfigError, InfraError, ModelError, ServiceError
from workflow.settings import Settings

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 900.0
"""A turn that waits and samples for longer is given up: what holds the other end is gone."""

_AWAY = (429, 502, 503, 504)
"""What a server, or what stands before it, answers while it cannot serve."""


class Refused(ModelError):
    """The server `said` that it will not do what was asked; `status` is HTTP's."""

    def __init__(self, url: str, path: str, status: int, said: str) -> None:
        super().__init__(f"The server at {url} refused {path}: {status} {said:.300}")
        self.status = status
        self.said = said


class Connection:
    """A server's URL and the connections that are kept to it.

    Args:
        settings: with `engine_url` and `engine_key`.

    Raises:
        ConfigError: there is no URL.
    """

    def __init__(self, settings: Settings) -> None:
        if not settings.engine_url:
            raise ConfigError("This engine needs a server's URL.", "Set AGENTRL_ENGINE_URL=http://HOST:PORT.")
        self.url = settings.engine_url.rstrip("/").removesuffix("/v1")
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {settings.engine_key}"} if settings.engine_key else {},
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=settings.slots),
        )

    def close(self) -> None:
        """Ends the connections; who waits for an answer gets a ServiceError."""
        self._client.close()

    def get(self, path: str) -> Any:
        """What the server answers, read as JSON. Raises as `post` does."""
        return _json(self.url, path, self._ask("GET", path, None))

    def post(self, path: str, body: Any) -> Any:
        """What the server answers to `body`, read as JSON.

        Raises:
            ServiceError: it does not answer, or is not ready.
            ConfigError: it wants another API key.
            Refused: it will not.
            InfraError: it failed.
            ModelError: its answer is no JSON object.
        """
        return _json(self.url, path, self._ask("POST", path, body))

    def tell(self, path: str, body: Any) -> None:
        """As `post`, for a route whose answer says nothing."""
        self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any) -> httpx2.Response:
        try:
            response = self._client.request(method, self.url + path, json=body)
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise ConfigError(f"{self.url!r} is no URL: {error}.", "Set AGENTRL_ENGINE_URL=http://HOST:PORT.") from error
        except (httpx2.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            said = f"The engine's server at {self.url} does not answer: {type(error).__name__}: {error}."
            raise ServiceError(said, "Start it, or correct AGENTRL_ENGINE_URL.") from error
        status, said = response.status_code, " ".join(response.text.split())
        if status in _AWAY:
            raise ServiceError(f"The engine's server at {self.url} is not ready: {status} {said:.300}")
        if status in (401, 403):
            raise ConfigError(f"The server at {self.url} refuses the API key ({status}).", "Set AGENTRL_ENGINE_KEY.")
        if status >= 500:
            raise InfraError(f"The server at {self.url} failed: {status} {said:.300}")
        if status >= 300:
            raise Refused(self.url, path, status, said)
        return response


def _json(url: str, path: str, response: httpx2.Response) -> Any:
    try:
        tree = response.json()
    except ValueError as error:
        raise ModelError(f"The server at {url} answered {path} with what is no JSON: {response.text[:100]!r}.") from error
    if not isinstance(tree, dict):
        raise ModelError(f"The server at {url} answered {path} with what is no object: {response.text[:100]!r}.")
    return tree
