"""The load of hosts: measured by the control loop's process, written every few seconds while runs run, kept for an hour."""

import logging
import socket
import subprocess
import threading
import time
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.stack import machine
from agentrl.workers.stack.machine import MachineRecorder
from agentrl.workers.stack.process import stopping, worker_name
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.store import leases, machine_loads, planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.machine_loads import KEPT_SLOTS, HostLoad, record_load
from agentrl.workflow.store.reads.load_rows import SLOT_SECONDS, load_machines, mark_machines
from tests.conftest import missing
from tests.support.hostile_rows import ATTACKS
from tests.support.page_answers import PageOver
from tests.support.played_runs import play, start, submission

IDLE = HostLoad(0.25, 2**30, 2**31, None)
HOST = socket.gethostname()


@pytest.fixture
def recorder(database: Database, monkeypatch: pytest.MonkeyPatch) -> MachineRecorder:
    monkeypatch.setattr(machine, "database", lambda: database)
    return MachineRecorder()


def hold_control(database: Database, holder: str) -> None:
    """Make the process `host:pid` the control loop."""
    with database.engine.begin() as tx:
        tx.execute(text("DELETE FROM service_leases"))
    assert leases.take_service_lease(database, "control", holder, 60)


def age_rows(database: Database, slots: int = 1) -> None:
    """Move all rows into the past."""
    with database.engine.begin() as tx:
        tx.execute(text(f"UPDATE machine_loads SET slot = slot - {slots}"))


def test_recorder_of_control_loop_counts_all_work(database: Database, recorder: MachineRecorder) -> None:
    groups = start(database, submission())
    hold_control(database, worker_name())
    assert recorder.record()
    age_rows(database)
    play(database, groups[0])
    time.sleep(0.05)  # some clock ticks, over which the share of busy processors is measured
    assert recorder.record()
    first, second = load_machines(database).rows
    assert (first["waiting_rollout"], second["waiting_rollout"]) == (2, 1)
    assert (first["tokens_per_second"], second["waiting_train"], second["waiting_tools"]) == (None, 0, 0)
    assert second["tokens_per_second"] > 0
    assert second["host"] == HOST
    assert 0 <= second["cpu_share"] <= 1
    assert 0 < second["memory_used"] < second["memory_total"]


def test_recorder_counts_tokens_of_new_turns_once(database: Database, recorder: MachineRecorder) -> None:
    groups = start(database, submission())
    play(database, groups[0])
    before = machine_loads.count_load(database, None)
    assert before.tokens is None
    assert machine_loads.count_load(database, before.last_step).tokens == 0
    play(database, groups[1])
    after = machine_loads.count_load(database, before.last_step)
    assert after.tokens == 4
    with database.engine.begin() as tx:
        tx.execute(text(f"UPDATE steps SET replayed = true WHERE id = {after.last_step}"))
    assert machine_loads.count_load(database, before.last_step).tokens == 2


def test_recorder_of_other_host_writes_no_work(database: Database, recorder: MachineRecorder) -> None:
    start(database, submission())
    hold_control(database, "elsewhere:1")
    assert recorder.record()
    (row,) = load_machines(database).rows
    assert row["memory_total"] > 0
    assert [row[name] for name in ("waiting_rollout", "waiting_train", "waiting_tools", "tokens_per_second")] == [None] * 4


def test_recorder_leaves_rows_to_control_loop_of_host(database: Database, recorder: MachineRecorder) -> None:
    start(database, submission())
    hold_control(database, f"{HOST}:1")
    assert not recorder.record()
    assert load_machines(database).rows == []


def test_recorder_writes_nothing_without_running_run(database: Database, recorder: MachineRecorder) -> None:
    hold_control(database, worker_name())
    assert not recorder.record()
    start(database, submission())
    planning.stop(database, "first", "paused", "by hand")
    assert not recorder.record()
    assert load_machines(database).rows == []


def test_recorder_thread_survives_failures_and_warns_once(
    database: Database, recorder: MachineRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start(database, submission())
    hold_control(database, worker_name())
    failures = iter([ServiceError("The database is away."), OSError("no /proc"), None])

    def fail_twice() -> Database:
        if error := next(failures, None):
            raise error
        return database

    monkeypatch.setattr(machine, "database", fail_twice)
    monkeypatch.setattr(machine, "SLOT_SECONDS", 0.02)
    with caplog.at_level(logging.WARNING, "agentrl.machine"):
        recorder.start()
        deadline = time.monotonic() + 30
        while not load_machines(database).rows:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    stopping.set()
    try:
        recorder.join()
        assert "machine" not in {thread.name for thread in threading.enumerate()}
    finally:
        stopping.clear()
    assert [record.getMessage() for record in caplog.records] == [
        "the load of this host cannot be written: The database is away."
    ]


def test_rows_are_one_per_host_and_slot(database: Database) -> None:
    written = [record_load(database, host, IDLE, None, None) for host in ("a", "b", "a", "b")]
    rows = load_machines(database).rows
    assert sum(written) == len(rows)  # a slot may have ended between two of them
    assert {row["host"] for row in rows} == {"a", "b"}
    assert len(rows) < 4


def test_rows_are_kept_for_an_hour(database: Database) -> None:
    assert KEPT_SLOTS * SLOT_SECONDS == 3600
    now = int(time.time()) // SLOT_SECONDS
    slots = [*range(now - 2 * KEPT_SLOTS, now - 2), *range(now + 50, now + 100)]
    with database.engine.begin() as tx:
        insert = text("INSERT INTO machine_loads (slot, host) VALUES (:slot, :host)")
        tx.execute(insert, [{"slot": slot, "host": host} for slot in slots for host in ("a", "gone")])
    assert record_load(database, "a", IDLE, None, None)
    with database.read() as tx:
        kept = tx.execute(text("SELECT count(*) FROM machine_loads GROUP BY host")).scalars().all()
        least, most = tx.execute(text("SELECT min(slot), max(slot) FROM machine_loads")).one()
    assert max(kept) <= KEPT_SLOTS
    assert min(kept) >= KEPT_SLOTS - 5
    assert most - least < KEPT_SLOTS


def test_long_host_name_is_cut(database: Database) -> None:
    assert record_load(database, "h" * 300, IDLE, None, None)
    assert load_machines(database).rows[0]["host"] == "h" * 64


def test_mark_moves_with_rows_and_silence(database: Database) -> None:
    marks = [mark_machines(database)]
    record_load(database, "a", IDLE, None, None)
    marks.append(mark_machines(database))
    assert load_machines(database).fresh
    age_rows(database, 6)
    marks.append(mark_machines(database))
    assert not load_machines(database).fresh
    assert len(load_machines(database).rows) == 1
    age_rows(database, 120)
    assert load_machines(database).rows == []
    assert len({*marks}) == 3


def test_machine_route_tells_rows_and_command(database: Database) -> None:
    page = PageOver(database)
    told = page.read("/api/machine")
    assert (told["rows"], told["running"], told["fresh"], told["start"]) == ([], 0, False, "agentrl up")
    start(database, submission())
    gpu = {"name": "G", "share": 0.5, "memory_used": 1, "memory_total": 2}
    record_load(database, "a", HostLoad(float("inf"), None, None, [gpu]), None, None)
    told = page.read("/api/machine")
    assert (told["running"], told["fresh"]) == (1, True)
    assert (told["rows"][0]["gpus"], told["rows"][0]["cpu_share"]) == ([gpu], None)


def test_machine_route_bounds_hostile_rows(sqlite: Database) -> None:
    now = int(time.time()) // SLOT_SECONDS
    texts = [*ATTACKS, "h" * 1_000_000]
    with sqlite.engine.begin() as tx:
        insert = text("INSERT INTO machine_loads (slot, host, gpus) VALUES (:slot, :host, :gpus)")
        rows: list[dict[str, Any]] = [{"slot": now, "host": host, "gpus": '[{"share": "x"}, null, 1]'} for host in texts]
        deep = '{"a":' * 900 + "1" + "}" * 900
        odd = [{"slot": now - 2, "host": "deep", "gpus": deep}, {"slot": now - 1, "host": "big", "gpus": "[" * 1_000_000}]
        tx.execute(insert, [*rows, *odd])
        tx.execute(text("UPDATE machine_loads SET cpu_share = :long WHERE host = 'big'"), {"long": "x" * 1_000_000})
    told = PageOver(sqlite).read("/api/machine")["rows"]
    assert {row["host"] for row in told} == {host[:64] for host in texts} | {"deep", "big"}
    assert told[0]["gpus"].startswith('{"a": {"a": ')
    assert told[1]["gpus"] is None
    assert len(told[1]["cpu_share"]) == 2000


NVML = r"""
#include <string.h>
typedef struct { unsigned gpu, memory; } Share;
typedef struct { unsigned long long total, free, used; } Memory;
static int gpus[2];
int nvmlInit_v2(void) { return FAILS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &gpus[index]; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, Share *share) {
  if (device != &gpus[0]) return 3;
  share->gpu = 87; share->memory = 5; return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
  memory->total = 80ull << 30; memory->free = 60ull << 30; memory->used = 20ull << 30; return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned length) { strncpy(name, "Test GPU", length); return 0; }
"""
"""A driver's library with two GPUs, in the C interface of NVML. The second GPU does not tell its share."""


@pytest.fixture
def compiled(tmp_path: Path) -> dict[str, str]:
    """The libraries of a driver that works and of one that fails."""
    if which("cc") is None:
        missing("a C compiler")
    files = {name: str(tmp_path / f"{name}.so") for name in ("works", "fails")}
    for name, file in files.items():
        command = ["cc", "-shared", "-fPIC", f"-DFAILS={int(name == 'fails')}", "-x", "c", "-", "-o", file]
        subprocess.run(command, input=NVML, text=True, check=True)
    return files


def test_gpus_are_read_from_driver_library(compiled: dict[str, str]) -> None:
    memory = {"name": "Test GPU", "memory_used": 20 * 2**30, "memory_total": 80 * 2**30}
    assert machine._read_gpus(compiled["works"]) == [{**memory, "share": 0.87}, {**memory, "share": None}]


def test_gpus_are_none_without_driver(compiled: dict[str, str]) -> None:
    assert machine._read_gpus(compiled["fails"]) is None
    assert machine._read_gpus("libmissing.so.1") is None
    assert machine._read_gpus("libc.so.6") is None
