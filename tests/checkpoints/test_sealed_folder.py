"""Checkpoints: whole or absent, and every damage is named."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.workflow.checkpoints.sealed_folder import MANIFEST, WEIGHTS, remove_rivals, sha256_file, verify, write
from agentrl.workflow.errors import BrokenCheckpoint, CheckpointError


def writer_of(content: bytes) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(content)
        (folder / "deep").mkdir()
        (folder / "deep" / "state.json").write_text("{}")

    return fill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "runs" / "v1", writer_of(b"weights" * 100))
    return tmp_path / "runs" / "v1"


def test_sealed_folder_verifies_and_returns_hash_of_weights(tmp_path: Path) -> None:
    sha256 = write(tmp_path / "v1", writer_of(b"abc"))
    assert sha256 == sha256_file(tmp_path / "v1" / WEIGHTS) == verify(tmp_path / "v1")[WEIGHTS].sha256
    assert sorted(verify(tmp_path / "v1")) == ["deep/state.json", WEIGHTS]
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_sealed_folder_write_replaces_unpublished_folder(folder: Path) -> None:
    assert write(folder, writer_of(b"new")) == verify(folder)[WEIGHTS].sha256
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_sealed_folder_names_truncated_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"weights" * 99)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} has 693 bytes instead of 700"):
        verify(folder)


@pytest.mark.parametrize("content", [b"\0" * 700, b"\x76" + b"weights" * 99 + b"eights"], ids=["zeroed", "flipped bit"])
def test_sealed_folder_names_altered_file(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} was altered"):
        verify(folder)


def test_sealed_folder_names_missing_file(folder: Path) -> None:
    (folder / "deep" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"deep/state\.json is missing"):
        verify(folder)


def test_sealed_folder_missing_has_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        verify(tmp_path / "never")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"files": {"a": 1}}', '{"files": []}', "[" * 100_000),
        *(f'{{"files": {{"a": {{"size": {size}, "sha256": "x"}}}}}}' for size in ("1e999", "NaN", "9" * 5000, '"1"')),
    ],
)
def test_sealed_folder_with_broken_manifest_is_own_error(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        verify(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "deep/../../secret", "/secret", "a" * 5000, "a/" * 300 + "a", "a\0b", "\ud800", "", "a\nb"]
)
def test_sealed_folder_manifest_reads_no_path_outside(folder: Path, name: str) -> None:
    secret = folder.parent / "secret"
    secret.write_text("x")
    entry = {"size": 1, "sha256": sha256_file(secret)}
    (folder / MANIFEST).write_text(json.dumps({"files": {name: entry}}))
    with pytest.raises(BrokenCheckpoint, match="its manifest has an invalid file name"):
        verify(folder)


def test_sealed_folder_reads_file_linked_from_other_disk(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")
    assert verify(folder)


@pytest.mark.parametrize("make", [lambda file: file.symlink_to(file), Path.mkdir, os.mkfifo], ids=["loop", "folder", "pipe"])
def test_sealed_folder_manifest_must_be_file(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / MANIFEST).unlink()
    make(folder / MANIFEST)
    with pytest.raises(BrokenCheckpoint, match=r"manifest\.json is missing"):
        verify(folder)


def test_sealed_folder_is_read_behind_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.parent)
    assert verify(tmp_path / "link" / folder.name) == verify(folder)


def test_sealed_folder_half_written_is_replaced_by_next_attempt(tmp_path: Path) -> None:
    beside = tmp_path / "v1.tmp"
    beside.mkdir()
    (beside / "half").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        verify(beside)
    write(tmp_path / "v1", writer_of(b"whole"))
    assert list(verify(tmp_path / "v1")) == ["deep/state.json", WEIGHTS]
    assert not beside.exists()


def test_sealed_folder_survives_death_between_renames(folder: Path) -> None:
    before = verify(folder)
    folder.rename(folder.with_name("v1.old"))

    def fails(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError):
        write(folder, fails)
    assert verify(folder) == before


@pytest.mark.parametrize("bytes_before_the_end", [0, 10])
def test_sealed_folder_on_full_disk_keeps_old_one(folder: Path, bytes_before_the_end: int) -> None:
    before = verify(folder)

    def fills_the_disk(beside: Path) -> None:
        (beside / WEIGHTS).write_bytes(b"x" * bytes_before_the_end)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device\. Free disk space"):
        write(folder, fills_the_disk)
    assert verify(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_sealed_folder_advises_free_space_only_on_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory\. Make that folder writable"):
        write(tmp_path / "file" / "v1", lambda _: None)


def test_sealed_folder_write_that_raises_keeps_old_one(folder: Path) -> None:
    before = verify(folder)

    def fails(_: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(folder, fails)
    assert verify(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_sealed_folder_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"written without weights"):
        write(tmp_path / "v1", lambda folder: None)
    assert list(tmp_path.iterdir()) == []


def test_sealed_folder_manifest_lists_size_and_hash(folder: Path) -> None:
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files[WEIGHTS] == {"size": 700, "sha256": sha256_file(folder / WEIGHTS)}


def test_remove_rivals_keeps_published_and_other_folders(tmp_path: Path) -> None:
    mine = tmp_path / "v00002.t3.abc"
    others = [tmp_path / name for name in ("v00001.t1.abc", "v00002.t1.xyz", "v00012.t1.abc")]
    rivals = [tmp_path / name for name in ("v00002.t1.abc", "v00002.t2.abc.tmp", "v00002.t1.abc.old")]
    for folder in (mine, *others, *rivals):
        folder.mkdir()
    remove_rivals(mine)
    assert set(tmp_path.iterdir()) == {mine, *others}
