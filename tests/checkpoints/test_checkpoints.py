"""Checkpoints at a URL: on a folder that stands for a shared mount, and on a real S3 server."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.workers.requests.submit import submission_of
from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import object_store
from agentrl.workflow.checkpoints.sealed_folder import MANIFEST, OPTIMIZER, STATE, WEIGHTS, verify
from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import BrokenCheckpoint, CheckpointError, ConfigError, ServiceError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.installation import install_command
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import PolicyRef
from bench.faults.cluster import small_disk
from tests.support.network_machines import BUCKET, S3, s3_server

NAME = "v00001.t1.0123abcd"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A real S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as made:
        yield made


@pytest.fixture
def bucket(s3: S3, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of this test's own in the bucket, as a URL."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}/run"


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> str:
    """A run's URL; the test runs on a shared folder and on S3."""
    return f"file://{tmp_path}/mount/run" if request.param == "file" else str(request.getfixturevalue("bucket"))


def writer_of(content: bytes) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(content)
        (folder / OPTIMIZER).write_bytes(b"moments" * 50)
        (folder / STATE).write_text('{"iteration": 1}')

    return fill


def written(place: str, content: bytes = b"weights" * 100, name: str = NAME) -> tuple[str, str]:
    """A checkpoint at the URL that no copy on this host knows of: its path and sha256."""
    path = f"{place}/{name}"
    sha256 = checkpoints.write(path, writer_of(content))
    forget(path)
    return path, sha256


def forget(path: str) -> None:
    """As if this were another host."""
    shutil.rmtree(object_store.copy_of(path), ignore_errors=True)


def spoil(path: str, name: str, content: bytes, tmp_path: Path) -> None:
    """Overwrites one stored file."""
    (tmp_path / "spoilt").write_bytes(content)
    object_store.put(path, name, tmp_path / "spoilt")


ELSEWHERE = """
import sys
from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import object_store
print("ready", flush=True)
print(checkpoints.local_part(sys.argv[1], sys.argv[2]))
"""


def process(path: str, sha256: str) -> "subprocess.Popen[str]":
    """Another process of this host that wants the weights."""
    return subprocess.Popen([sys.executable, "-c", ELSEWHERE, path, sha256], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_cache_fetches_all_or_part_of_checkpoint(place: str) -> None:
    path, sha256 = written(place)
    folder = checkpoints.local_part(path, sha256)
    assert sorted(file.name for file in folder.iterdir()) == [MANIFEST, WEIGHTS]
    assert checkpoints.local_part(path, sha256, "start") == folder
    assert verify(folder, without=(OPTIMIZER,))[WEIGHTS].sha256 == sha256
    assert not (folder / OPTIMIZER).exists()
    assert set(verify(checkpoints.local_part(path, sha256, "all"))) == {WEIGHTS, OPTIMIZER, STATE}


@pytest.mark.slow
def test_cache_writes_manifest_last_and_nothing_twice(bucket: str, home: Path, s3: S3) -> None:
    checkpoints.write(f"{bucket}/{NAME}", writer_of(b"weights"))
    key = bucket.removeprefix(f"s3://{BUCKET}")
    puts = [line.split()[2].rpartition("/")[2] for line in s3.requests("PUT", "") if key in line]
    assert sorted(puts) == sorted([MANIFEST, WEIGHTS, OPTIMIZER, STATE])
    assert puts[-1] == MANIFEST


def test_cache_of_writing_host_fetches_nothing(bucket: str, home: Path, s3: S3) -> None:
    path = f"{bucket}/{NAME}"
    sha256 = checkpoints.write(path, writer_of(b"weights"))
    assert set(verify(checkpoints.local_part(path, sha256, "all"))) == {WEIGHTS, OPTIMIZER, STATE}
    assert not [line for line in s3.requests("GET", "") if path.removeprefix(f"s3://{BUCKET}") in line]


@pytest.mark.usefixtures("forked_programs")
def test_cache_fetches_once_for_processes_of_a_host(bucket: str, home: Path, s3: S3) -> None:
    path, sha256 = written(bucket)
    run = object_store.copy_of(path).parent
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = [process(path, sha256) for _ in range(4)]
        for one in waiting:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        assert not object_store.copy_of(path).exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
    assert {one.communicate(timeout=60)[0].strip() for one in waiting} == {str(object_store.copy_of(path))}
    assert len(s3.requests("GET", f"{path.removeprefix(f's3://{BUCKET}')}/{WEIGHTS}")) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (WEIGHTS, b"\x76" + b"weights" * 99 + b"eights", f"{WEIGHTS} was altered"),
        (WEIGHTS, b"weights" * 99, f"{WEIGHTS} has 693 bytes instead of 700"),
        (MANIFEST, b"{", r"manifest\.json cannot be read"),
        (MANIFEST, b'{"files": {}}', "its weights differ from the record"),
    ],
    ids=["flipped bit", "truncated", "broken manifest", "empty manifest"],
)
def test_cache_refuses_broken_remote_checkpoint(place: str, tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path, sha256 = written(place)
    spoil(path, name, content, tmp_path)
    with pytest.raises(CheckpointError, match=said) as raised:
        checkpoints.local_part(path, sha256)
    assert path in str(raised.value)
    assert not [entry for entry in object_store.copy_of(path).parent.iterdir() if entry.name.startswith(NAME)]


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS])
def test_cache_rejects_interrupted_upload(place: str, name: str) -> None:
    path, sha256 = written(place)
    object_store.remove(path, name)
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        checkpoints.local_part(path, sha256)


def test_cache_refuses_weights_of_another_record(place: str) -> None:
    path, _ = written(place)
    with pytest.raises(CheckpointError, match="its weights differ from the record"):
        checkpoints.local_part(path, "0" * 64)


def test_cache_refuses_manifest_with_path_outside(place: str, tmp_path: Path) -> None:
    path, sha256 = written(place)
    files = json.loads((checkpoints.local_part(path, sha256) / MANIFEST).read_text())["files"]
    forget(path)
    spoil(path, MANIFEST, json.dumps({"files": files | {"../../../out": files[STATE]}}).encode(), tmp_path)
    with pytest.raises(CheckpointError, match="its manifest has an invalid file name"):
        checkpoints.local_part(path, sha256, "all")


def test_cache_fetches_spoilt_copy_again(place: str) -> None:
    path, sha256 = written(place)
    file = checkpoints.local_part(path, sha256) / WEIGHTS
    file.write_bytes(b"\0" * 700)
    assert process(path, sha256).communicate(timeout=60)[0].endswith(f"{file.parent}\n")
    assert file.read_bytes() == b"weights" * 100


@pytest.mark.parametrize("harm", [lambda file: file.write_bytes(b"cut"), lambda file: shutil.rmtree(file.parent)])
def test_cache_refetches_copy_spoilt_or_evicted_after_use(place: str, harm: Callable[[Path], object]) -> None:
    path, sha256 = written(place)
    folder = checkpoints.local_part(path, sha256, "all")

    def harmed_once(folder: Path) -> bytes:
        if harms:
            harms.pop()(folder / WEIGHTS)
        verify(folder)
        return (folder / WEIGHTS).read_bytes()

    harms = [harm]
    assert checkpoints.read(path, sha256, "all", harmed_once) == b"weights" * 100
    assert checkpoints.local_part(path, sha256, "all") == folder
    object_store.remove(path, WEIGHTS)
    harms = [harm]
    with pytest.raises(BrokenCheckpoint, match=f"{WEIGHTS} is missing"):
        checkpoints.read(path, sha256, "all", harmed_once)


def test_cache_blames_full_or_forbidden_disk(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sha256 = written(place, bytes(200_000))
    with small_disk(tmp_path / "full", "64k") as full:
        monkeypatch.setattr("tempfile.tempdir", str(full))
        with pytest.raises(ServiceError, match="has no space for the checkpoint"):
            checkpoints.find_fault(path, sha256)
        subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
        with pytest.raises(ConfigError, match="cannot be read by this host"):
            checkpoints.find_fault(path, sha256)


def test_host_trouble_tells_refusal_from_outage() -> None:
    assert isinstance(object_store.host_trouble("s3://b/v1", PermissionError("The provided token has expired.")), ConfigError)
    assert isinstance(object_store.host_trouble("s3://b/v1", OSError(errno.EDQUOT, "Disk quota exceeded")), ServiceError)
    assert object_store.host_trouble("s3://b/v1", OSError(errno.ECONNRESET, "reset")) is None


def test_cache_tells_unmounted_share_from_broken_checkpoint(tmp_path: Path, home: Path) -> None:
    path, sha256 = written(f"file://{tmp_path}/mount/run")
    (tmp_path / "mount").rename(tmp_path / "away")
    for ask in (checkpoints.local_part, checkpoints.find_fault):
        with pytest.raises(ConfigError, match="cannot access"):
            ask(path, sha256)


def test_cache_evicts_no_unfinished_copy_and_waits_for_lock(bucket: str, home: Path) -> None:
    run = object_store.copy_of(f"{bucket}/v00000.t1.key").parent
    unfinished = [run / f"v0000{number}.t1.key{suffix}" for number, suffix in enumerate((".tmp", ".old", ".fetch"), 7)]
    for folder in unfinished:
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))

    def held_by_us(folder: Path) -> None:
        with (run / ".lock").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writer_of(b"weights")(folder)

    for number in range(object_store.KEEP + 1):
        checkpoints.write(f"{bucket}/v0000{number}.t2.key", held_by_us)
    assert all(folder.is_dir() for folder in unfinished)
    assert len([entry for entry in run.iterdir() if entry.is_dir()]) == object_store.KEEP + len(unfinished)


def test_cache_keeps_most_recently_used_copies(place: str) -> None:
    stored = [written(place, b"%d" % number, f"v{number:05d}.t1.key") for number in range(object_store.KEEP + 1)]
    for path, sha256 in stored[:-1]:
        checkpoints.local_part(path, sha256)
    checkpoints.local_part(*stored[0])
    checkpoints.local_part(*stored[-1])
    kept = {entry.name for entry in object_store.copy_of(stored[0][0]).parent.iterdir() if entry.is_dir()}
    assert kept == {Path(path).name for path, _ in stored if path != stored[1][0]}
    assert (checkpoints.local_part(*stored[1]) / WEIGHTS).read_bytes() == b"1"


def test_cache_drops_optimizer_and_removes_twice(place: str) -> None:
    path, sha256 = written(place)
    assert set(object_store.sizes(place)[NAME]) == {MANIFEST, WEIGHTS, OPTIMIZER, STATE}
    for _ in range(2):
        checkpoints.drop_optimizer(path)
    assert object_store.sizes(place)[NAME][WEIGHTS] == 700
    assert OPTIMIZER not in object_store.sizes(place)[NAME]
    assert checkpoints.local_part(path, sha256, "start")
    for _ in range(2):
        checkpoints.remove(path)
    assert object_store.sizes(place) == {}
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoints.local_part(path, sha256)


def test_check_place_names_missing_bucket(bucket: str, home: Path) -> None:
    with pytest.raises(ConfigError, match="There is no bucket 'nowhere' for checkpoints"):
        object_store.check_place("s3://nowhere/run")
    with pytest.raises(CheckpointError, match="Cannot write the checkpoint 's3://nowhere/run/v1'"):
        checkpoints.write("s3://nowhere/run/v1", writer_of(b"weights"))
    assert object_store.check_place(bucket) is None


@pytest.mark.usefixtures("forked_programs")
def test_object_store_outage_is_service_error(home: Path, s3: S3) -> None:
    code = """
from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import object_store
from agentrl.workflow.errors import ServiceError
object_store.RETRY_SECONDS = 0.0
for ask in (lambda: checkpoints.local_part("s3://b/run/v1", "0" * 64), lambda: object_store.check_place("s3://b/run")):
    try:
        ask()
    except ServiceError as error:
        print(error.message)
"""
    environment = {**os.environ, **s3.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.count("does not answer") == 2


def test_object_store_without_s3fs_says_what_to_install(home: Path) -> None:
    code = "import sys; sys.modules['s3fs'] = None\nfrom agentrl.workflow.checkpoints import object_store as place\n"
    code += "place.check_place('s3://bucket/run')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr
    assert install_command("s3") in done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://place/run", "nosuch"),
        ("s3://key:secret@bucket/run", "holds a password"),
        ("s3://[", "is not a URL"),
        ("file://ckpt", "is a relative path"),
        ("file:///", "names no bucket or folder"),
        ("s3://", "names no bucket or folder"),
        ("s3:///run", "names no bucket or folder"),
    ],
)
def test_check_place_refuses_unusable_url(home: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        object_store.check_place(url)
    assert "secret" not in str(raised.value)


def test_cache_names_remedy_for_invisible_folder(tmp_path: Path) -> None:
    for ask in (checkpoints.local_part, checkpoints.find_fault):
        with pytest.raises(ConfigError, match=r"cannot access '/nowhere/runs/run'.*AGENTRL_CHECKPOINTS=s3://"):
            ask(f"/nowhere/runs/run/{NAME}", "0" * 64)
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoints.local_part(str(tmp_path / NAME), "0" * 64)


def test_cache_finds_remote_damage_despite_sound_copy(place: str, tmp_path: Path) -> None:
    path, sha256 = written(place)
    assert checkpoints.local_part(path, sha256, "all")
    assert checkpoints.find_fault(path, sha256, "all") == ""
    spoil(path, OPTIMIZER, b"moments" * 49, tmp_path)
    assert checkpoints.find_fault(path, sha256) == ""
    assert f"{OPTIMIZER} has 343 bytes" in checkpoints.find_fault(path, sha256, "all")
    assert checkpoints.local_part(path, sha256, "all")


def test_new_run_keeps_checkpoints_at_place_of_settings(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(config: RunConfig) -> str:
        named = Experiment(config.model_copy(update={"name": "run"}))
        more = {"manifest": {}, "tasks": (), "code_hash": ""}
        return submission_of(None, named, "train", PolicyRef("tiny", "hash"), "", **more).output_dir

    config = RunConfig()
    assert place(config) == f"{home}/runs/run"
    for asked, expected in (
        (f"file://{tmp_path}/mount/", f"file://{tmp_path}/mount/run"),
        (str(tmp_path), f"{tmp_path}/run"),
    ):
        monkeypatch.setenv("AGENTRL_CHECKPOINTS", asked)
        settings.cache_clear()
        assert place(config) == expected
    config = config.model_copy(update={"output_dir": f"file://{tmp_path}/chosen"})
    assert place(config) == f"file://{tmp_path}/chosen"
    (tmp_path / "file").touch()
    for refused in (f"file://{tmp_path}/file", "/proc/checkpoints"):
        with pytest.raises(ConfigError, match="Cannot write checkpoints"):
            place(config.model_copy(update={"output_dir": refused}))
    monkeypatch.setenv("AGENTRL_CHECKPOINTS", "s3://")
    settings.cache_clear()
    with pytest.raises(ConfigError, match="names no bucket or folder"):
        place(RunConfig())
