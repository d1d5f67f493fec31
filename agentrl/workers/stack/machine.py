"""Measures the load of this host, and writes it to the database every few seconds while runs run.

The process that is the control loop writes the rows of its host. These rows also have the waiting work and the tokens of all
hosts. On every other host, the rollout and train workers write the rows; each row is written by one of them. A separate thread
measures and writes, so neither a slow database nor a driver that hangs delays the process.
"""

import ctypes
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from ctypes import byref
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

from agentrl.workers.stack.process import database, stopping, worker_name
from agentrl.workflow.store import leases, machine_loads
from agentrl.workflow.store.machine_loads import HostLoad
from agentrl.workflow.store.reads.load_rows import SLOT_SECONDS

log = getLogger("agentrl.machine")
NVML = "libnvidia-ml.so.1"
"""The library of the NVIDIA driver that reports the load of GPUs. A host without it has no rows of GPUs."""
AMD_GPU = Path("/dev/kfd")
"""The device that a host with a GPU of AMD has."""
MAX_GPUS = 16
STOP_SECONDS = 5.0


class _Share(ctypes.Structure):
    """`nvmlUtilization_t`: how much of the time kernels ran, and memory was accessed, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class LoadMeter:
    """Measures the load of this host. The share of busy processors is measured since the previous call of `measure`."""

    def __init__(self) -> None:
        self._ticks = _read_ticks()

    def measure(self) -> HostLoad:
        """Return the present load."""
        before, self._ticks = self._ticks, _read_ticks()
        busy, total = (now - then for now, then in zip(self._ticks, before, strict=True))
        memory = _read_memory()
        total_bytes, free_bytes = memory.get("MemTotal"), memory.get("MemAvailable")
        used = None if total_bytes is None or free_bytes is None else total_bytes - free_bytes
        return HostLoad(busy / total if total > 0 else None, used, total_bytes, _read_gpus(NVML))


class MachineRecorder:
    """The thread that writes the rows of this host until the process is asked to stop."""

    def __init__(self) -> None:
        self._meter = LoadMeter()
        self._last_step: int | None = None
        self._counted_at = 0.0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="machine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread after `stopping` was set, but not longer than STOP_SECONDS."""
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not stopping.wait(SLOT_SECONDS):
            try:
                self.record()
            except Exception as error:  # noqa: BLE001 - a row that is missing is no reason to disturb the process
                if not self._failed:
                    log.warning("the load of this host cannot be written: %s", error)
                self._failed = True
            else:
                self._failed = False

    def record(self) -> bool:
        """Write a row. Return False if no row was written, because no run is running or another process of this host writes the
        row.
        """
        db, own, host = database(), worker_name(), socket.gethostname()
        holder = leases.service_holder(db, "control") or ""
        if (holder != own and holder.rpartition(":")[0] == host) or not machine_loads.is_some_run_at_work(db):
            self._last_step = None
            return False
        load, work, rate = self._meter.measure(), None, None
        if holder == own:
            work, now = machine_loads.count_load(db, self._last_step), time.monotonic()
            rate = None if work.tokens is None else work.tokens / (now - self._counted_at)
            self._last_step, self._counted_at = work.last_step, now
        return machine_loads.record_load(db, host, load, work, rate)


def largest_memory() -> int:
    """Return the size of this host's memory, or of a GPU's memory if it is larger, in bytes; 0 if unknown, for example with a
    GPU of AMD, whose memory is not read.
    """
    if AMD_GPU.exists():
        return 0
    gpus = [gpu["memory_total"] or 0 for gpu in _read_gpus(NVML) or ()]
    return max([_read_memory().get("MemTotal", 0), *gpus])


def _read_ticks() -> tuple[int, int]:
    """Return the clock ticks that this host's processors have spent: busy, and in total. Both are 0 if unknown."""
    try:
        with open("/proc/stat", "rb") as file:
            # user, nice, system, idle, iowait, irq, softirq, steal; the ticks of guests are part of user and nice
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


def _read_memory() -> Mapping[str, int]:
    """Return the fields of `/proc/meminfo`, in bytes; empty if it cannot be read."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = (line.split() for line in file)
            return {field[0].removesuffix(":"): int(field[1]) * 1024 for field in fields if field[-1] == "kB"}
    except OSError:
        return {}


def _read_gpus(library: str) -> Sequence[Mapping[str, Any]] | None:
    """Return the load of each GPU, as in `HostLoad.gpus`; None without a driver. What the driver does not tell is None."""
    nvml = _open_nvml(library)
    count = ctypes.c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(byref(count)):
        return None
    return [_read_gpu(nvml, index) for index in range(min(count.value, MAX_GPUS))] or None


def _read_gpu(nvml: ctypes.CDLL, index: int) -> Mapping[str, Any]:
    handle, share, memory, name = ctypes.c_void_p(), _Share(), _Memory(), ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, byref(handle)):
        return {"name": "", "share": None, "memory_used": None, "memory_total": None}
    has_share = not nvml.nvmlDeviceGetUtilizationRates(handle, byref(share))
    has_memory = not nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    return {
        "name": name.value.decode("ascii", "replace"),
        "share": share.gpu / 100 if has_share else None,
        "memory_used": memory.used if has_memory else None,
        "memory_total": memory.total if has_memory else None,
    }


@cache
def _open_nvml(library: str) -> ctypes.CDLL | None:
    """Load and start the library, once per process. Return None if the host has none, or no GPU."""
    try:
        nvml = ctypes.CDLL(library)
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None
