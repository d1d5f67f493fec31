"""The files of checkpoints behind a URL: any of fsspec's file systems, with retries.

Credentials come from the environment, as the store's own tools read them. Every function here raises ConfigError if the store
refuses this host, and ServiceError if it did not answer for RETRY_SECONDS or this host has no space: neither means that the
files are broken.
"""

import errno
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.installation import install_command
from agentrl.workflow.settings import is_url

T = TypeVar("T")

RETRY_SECONDS = 30.0
"""The time for which requests to a store that does not answer are retried."""

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # Retries are made here; with botocore's own four on top, a dead connection would look like a slow one.
    "s3": {"config_kwargs": {"retries": {"max_attempts": 0}}, "use_listings_cache": False}
}
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""The system's error numbers for a full disk."""
_DENIED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


URL_HINT = "Write file:///FOLDER or s3://BUCKET/PREFIX."


def check_place(place: str) -> Path | None:
    """Check with one request that there is a store at the URL. Returns the folder if the URL means one.

    Raises:
        ConfigError: no such bucket, no right to it, a package is missing, or the URL holds a password.
        ServiceError: the store does not answer.
    """
    if not is_url(place):
        return Path(place)
    try:
        parts = urlsplit(place)
    except ValueError as error:
        raise ConfigError(f"{place!r} is not a URL: {error}.", URL_HINT) from error
    if parts.scheme == "file" and not place.startswith("file:///"):
        raise ConfigError(f"{place!r} is a relative path, and processes run in different folders.", URL_HINT)
    if not (parts.path.strip("/") if parts.scheme in ("file", "local") else parts.netloc):
        raise ConfigError(f"{place!r} names no bucket or folder for checkpoints.", URL_HINT)
    if parts.password:
        raise ConfigError(
            "The URL for checkpoints holds a password.", "Set the password in the environment: the URL is stored."
        )
    files, key = _store(place)
    if _is_folder(files):
        return Path(key)
    bucket = key.strip("/").partition("/")[0]
    try:
        files.info(bucket)
    except FileNotFoundError as error:
        raise ConfigError(f"There is no bucket {bucket!r} for checkpoints in {place!r}.", "Make it.") from error
    except PermissionError as error:
        raise ConfigError(f"Checkpoints in {place!r} cannot be accessed: {_words(error)}.", "Check the credentials.") from error
    except Exception as error:  # every store has its own error classes
        raise _no_answer_error(place, error) from error
    return None


def mounted_folder(url: str) -> Path | None:
    """Return the folder that a `file://` URL means; None for any other."""
    files, key = _store(url)
    return Path(key) if _is_folder(files) else None


def put(url: str, name: str, file: Path) -> None:
    """Write the file as `name` under the URL.

    Raises:
        FileNotFoundError: there is no such bucket.
    """
    files, key = _store(url)
    _retry(url, lambda: files.put_file(str(file), f"{key}/{name}"))


def get(url: str, name: str, file: Path) -> None:
    """Read `name` under the URL into the file.

    Raises:
        FileNotFoundError: it is not there.
    """
    files, key = _store(url)
    _retry(url, lambda: files.get_file(f"{key}/{name}", str(file)))


def sizes(url: str) -> dict[str, int]:
    """Path -> bytes of every file under the URL; empty if nothing was ever written."""
    files, key = _store(url)
    found: dict[str, Any] = _retry(url, lambda: files.find(key, detail=True))
    return {path.removeprefix(f"{key}/"): int(facts["size"]) for path, facts in found.items()}


def remove(url: str, name: str = "") -> None:
    """Remove `name`, or everything, under the URL; it is no error if it is already gone."""
    files, key = _store(url)
    try:
        _retry(url, lambda: files.rm_file(f"{key}/{name}") if name else files.rm(key, recursive=True))
    except FileNotFoundError:
        return


def _store(url: str) -> tuple[Any, str]:
    """The file system behind the URL, and the path in it."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        files, key = url_to_fs(url, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        todo = install_command("s3") if scheme == "s3" else f"{_words(error)}."
        raise ConfigError(f"Checkpoints in {url!r} need a package that is not installed.", todo) from error
    except ValueError as error:
        raise ConfigError(f"Checkpoints cannot be in {url!r}: {_words(error)}.", "Use s3://BUCKET/PREFIX.") from error
    return files, str(key)


def _is_folder(files: Any) -> bool:
    return "file" in files.protocol


def host_trouble(path: str, error: Exception) -> ConfigError | ServiceError | None:
    """Our error for a host that may not read or write, or has no space; None for other errors."""
    found = error.errno if isinstance(error, OSError) else None
    if isinstance(error, PermissionError) or found in _DENIED_ERRNOS:
        said = f"The checkpoint {path!r} cannot be read by this host ({socket.gethostname()}): {_words(error)}."
        return ConfigError(said, "Check the credentials and rights, then `agentrl resume`.")
    if found in NO_SPACE_ERRNOS:
        said = f"This host ({socket.gethostname()}) has no space for the checkpoint {path!r}: {_words(error)}."
        return ServiceError(said, "Free disk space.")
    return None


def _retry(url: str, action: Callable[[], T]) -> T:
    """Runs the action, again and again while the store does not answer; FileNotFoundError is an answer."""
    deadline = time.monotonic() + RETRY_SECONDS
    pause = 0.1
    while True:
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:  # every store has its own error classes, and most of them mean the network
            trouble = host_trouble(url, error)
            if trouble is not None:
                raise trouble from error
            if time.monotonic() > deadline:
                raise _no_answer_error(url, error) from error
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def _no_answer_error(url: str, error: Exception) -> ServiceError:
    return ServiceError(
        f"The store of {url!r} does not answer: {_words(error)}.", "Check AGENTRL_CHECKPOINTS, the network, the credentials."
    )


def _words(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
