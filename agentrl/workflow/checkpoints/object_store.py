"""Checkpoints at a URL: their files, read and written with retries, and the copies of them on each host.

Object stores cannot rename, so each key is written once and never changed. The manifest is written last: a checkpoint with a
manifest is complete.

A copy is in `AGENTRL_HOME/cache/RUN/CHECKPOINT`. One process fetches it while the others wait. The copy is verified against the
manifest and the policy's row before it gets its name, and again when a process first uses it. The `KEEP` most recently used
copies of a run stay on the host.

Every function raises ConfigError if the store refuses this host, and ServiceError if the store did not respond for
RETRY_SECONDS or this host's disk is full. Neither error means that the files are broken.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.checkpoints.sealed_folder import MANIFEST, NO_SPACE_ERRNOS, Part, Writer
from agentrl.workflow.errors import CheckpointError, ConfigError, ServiceError
from agentrl.workflow.installation import install_command
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.settings import is_url, settings

T = TypeVar("T")

RETRY_SECONDS = 30.0
"""The time for which a request is repeated if the store does not respond, in seconds."""
KEEP = 10
"""The number of copies of one run's checkpoints that stay on a host: enough for nine overlapping iterations and one evaluation.
"""

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # Retries are made here; with botocore's own four on top, a dead connection would look like a slow one.
    "s3": {"config_kwargs": {"retries": {"max_attempts": 0}}, "use_listings_cache": False}
}
_DENIED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNFINISHED_SUFFIXES = (".tmp", ".old", ".fetch")
"""The suffixes of the names that folders have while they are being written."""
_verified_copies: set[tuple[Path, Part]] = set()
"""The copies whose bytes this process has compared with their manifest."""
URL_HINT = "Write file:///FOLDER or s3://BUCKET/PREFIX."


def check_place(place: str) -> Path | None:
    """Check with one request that the store at the URL exists.

    Return the folder of a path or a `file://` URL, and None for other URLs. Raise ConfigError if the bucket does not exist,
    access is denied, a package is missing, or the URL contains a password. Raise ServiceError if the store does not respond.
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
        raise ConfigError(f"There is no bucket {bucket!r} for checkpoints in {place!r}.", "Create the bucket.") from error
    except PermissionError as error:
        raise ConfigError(f"Checkpoints in {place!r} cannot be accessed: {_words(error)}.", "Check the credentials.") from error
    except Exception as error:  # every store has its own error classes
        raise _no_answer_error(place, error) from error
    return None


def mounted_folder(url: str) -> Path | None:
    """Return the folder of a `file://` URL; None for any other URL."""
    files, key = _store(url)
    return Path(key) if _is_folder(files) else None


def write(url: str, writer: Writer) -> str:
    """Write a checkpoint to the URL, and leave a copy on this host. Return the sha256 of its weights. Raise CheckpointError if
    the disk refused the files, or the bucket does not exist. An exception leaves at most an unpublished checkpoint without a
    manifest at the URL.
    """
    copy = copy_of(url)
    with report_host_trouble(url), hold_lock(copy.parent):  # so that no process evicts it before it is stored
        sha256 = sealed_folder.write(copy, writer)
        _upload(copy, url)
        faultpoint("checkpoint.uploaded")
        _evict(copy.parent)
    return sha256


def local_copy(url: str, sha256: str, part: Part) -> Path:
    """Return this host's copy of a part of a checkpoint. Fetch the part if needed. `sha256` is the hash that the checkpoint's
    weights must have. Raise BrokenCheckpoint if the checkpoint is missing or incomplete, or its weights have another hash.
    """
    copy = copy_of(url)
    if (copy, part) in _verified_copies and _touch(copy) and sealed_folder.has_part(copy, part):
        return copy
    with report_host_trouble(url), hold_lock(copy.parent):
        if not sealed_folder.is_sound(copy, sha256, part):
            _fetch(url, copy, sha256, part)
        _verified_copies.add((copy, part))
        os.utime(copy)
        _evict(copy.parent)
    return copy


def forget_copy(url: str, part: Part) -> None:
    """Mark this host's copy as unverified, so it is verified again before its next use."""
    _verified_copies.discard((copy_of(url), part))


def verify(url: str, sha256: str, part: Part) -> None:
    """Verify a part in the store itself, not in this host's copy. Raise BrokenCheckpoint with the first wrong file."""
    with tempfile.TemporaryDirectory() as scratch:
        _fetch(url, Path(scratch) / "checkpoint", sha256, part)


def copy_of(url: str) -> Path:
    """Return the folder for this host's copy of the checkpoint at that URL."""
    parent, _, name = url.rstrip("/").rpartition("/")
    run = f"{parent.rpartition('/')[2]}-{hashlib.sha256(parent.encode()).hexdigest()[:8]}"
    return settings().cache_dir / run / name


def _touch(copy: Path) -> bool:
    """Mark the copy as just used. Return False if it does not exist; another process may have removed it."""
    try:
        os.utime(copy)
    except FileNotFoundError:
        return False
    return True


def _upload(folder: Path, url: str) -> None:
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    try:
        for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
            put(url, name, folder / name)
    except FileNotFoundError as error:
        message = f"Cannot write the checkpoint {url!r}: {error}."
        raise CheckpointError(message, "Check that the bucket exists, then type `agentrl resume`.") from error


def _fetch(url: str, copy: Path, sha256: str, part: Part) -> None:
    """Fetch the files of a part that are missing or broken in the folder `copy`."""
    folder = mounted_folder(url)
    if folder is not None:
        must_see(folder.parent)
    beside = copy.with_name(f"{copy.name}.fetch")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _get(url, MANIFEST, beside)
        manifest = sealed_folder.read_manifest(beside, url)
        if sealed_folder.weights_sha256(manifest) != sha256:
            raise sealed_folder.broken_error(url, f"its weights differ from the record ({sha256[:12]})")
        for name in sealed_folder.part_of(manifest, part):
            if sealed_folder.file_error(copy / name, manifest[name]):
                _get(url, name, beside)
                fault = sealed_folder.file_error(beside / name, manifest[name])
                if fault:
                    raise sealed_folder.broken_error(url, f"{name} {fault}")
        _move(beside, copy)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _get(url: str, name: str, folder: Path) -> None:
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        get(url, name, target)
    except FileNotFoundError as error:
        raise sealed_folder.broken_error(url, f"{name} is missing") from error


def _move(beside: Path, copy: Path) -> None:
    for file in [file for file in beside.rglob("*") if file.is_file()]:
        target = copy / file.relative_to(beside)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock inside the context. At any time, only one thread of one process on this host holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _evict(folder: Path) -> None:
    used: dict[Path, int] = {}
    for entry in [entry for entry in folder.iterdir() if entry.is_dir() and entry.suffix not in _UNFINISHED_SUFFIXES]:
        with suppress(FileNotFoundError):  # another process removed it meanwhile
            used[entry] = entry.stat().st_mtime_ns
    for old in sorted(used, key=used.__getitem__)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def must_see(place: Path) -> None:
    """Raise ConfigError if this host does not see the folder in which a run stores its checkpoints."""
    if not place.is_dir():  # the whole place is missing, so no checkpoint in it is broken
        raise ConfigError(
            f"This host ({socket.gethostname()}) cannot access {str(place)!r}, the run's folder for checkpoints.",
            "Mount it here, or submit with AGENTRL_CHECKPOINTS=s3://BUCKET/PREFIX.",
        )


@contextmanager
def report_host_trouble(path: str) -> Iterator[None]:
    """Convert errors of this host (permissions, a full disk) to exceptions that do not blame the checkpoint."""
    try:
        yield
    except OSError as error:
        raise host_trouble(path, error) or error from error


def put(url: str, name: str, file: Path) -> None:
    """Write a local file to the store, as `name` under the URL. Raise FileNotFoundError if the bucket does not exist."""
    files, key = _store(url)
    _retry(url, lambda: files.put_file(str(file), f"{key}/{name}"))


def get(url: str, name: str, file: Path) -> None:
    """Read `name` under the URL from the store into a local file. Raise FileNotFoundError if the name does not exist."""
    files, key = _store(url)
    _retry(url, lambda: files.get_file(f"{key}/{name}", str(file)))


def sizes(url: str) -> dict[str, dict[str, int]]:
    """Return the sizes in bytes of the files under a run's URL, by checkpoint and path; empty without files."""
    files, key = _store(url)
    listed: dict[str, Any] = _retry(url, lambda: files.find(key, detail=True))
    sizes_by_name: dict[str, dict[str, int]] = {}
    for path, entry in listed.items():
        name, _, file = path.removeprefix(f"{key}/").partition("/")
        sizes_by_name.setdefault(name, {})[file] = int(entry["size"])
    return sizes_by_name


def remove(url: str, name: str = "") -> None:
    """Remove `name` under the URL, or everything under it if `name` is empty. It is not an error if nothing exists there."""
    files, key = _store(url)
    try:
        _retry(url, lambda: files.rm_file(f"{key}/{name}") if name else files.rm(key, recursive=True))
    except FileNotFoundError:
        return


def _store(url: str) -> tuple[Any, str]:
    """Return the file system of the URL, and the path within that file system."""
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
    """Return the exception to raise if this host has no permission to read or write, or its disk is full; else None."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, PermissionError) or code in _DENIED_ERRNOS:
        message = f"The checkpoint {path!r} cannot be read by this host ({socket.gethostname()}): {_words(error)}."
        return ConfigError(message, "Check the credentials and rights, then `agentrl resume`.")
    if code in NO_SPACE_ERRNOS:
        message = f"This host ({socket.gethostname()}) has no space for the checkpoint {path!r}: {_words(error)}."
        return ServiceError(message, "Free disk space.")
    return None


def _retry(url: str, action: Callable[[], T]) -> T:
    """Run the action until the store responds. FileNotFoundError is a response."""
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
