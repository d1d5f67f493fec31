"""The runner of a program, which runs inside the sandbox. It runs one program from start to end, in its own process.

Any Python interpreter inside the sandbox may run this file. The file imports few modules of the standard library, and only when
they are needed, because each import makes every run slower.
"""

import os
import resource
import sys
import types

FILE, CELL = "<code>", "<cell "
"""The file name of a program in tracebacks, and the beginning of the file name of a cell."""


def limit(address_bytes: int, processes: int) -> None:
    """Lower the limits of this process permanently: address space in bytes, and the user's processes and threads."""
    for name, value in (("AS", address_bytes), ("NPROC", processes), ("NOFILE", 256), ("FSIZE", 1 << 26), ("CORE", 0)):
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def budget(cpu_seconds: int, max_seconds: int) -> None:
    """Limit the processor time of this process and of each of its children.

    Args:
        cpu_seconds: the soft limit, in seconds: a process that reaches it gets SIGXCPU, which ends it by default.
        max_seconds: the hard limit less one, in seconds. A process may raise its soft limit up to the hard limit. The kernel
            kills a process that reaches the hard limit.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, max_seconds + 1))


def connect(stdin: int, output: int) -> None:
    """Make these descriptors the standard streams, and close all other descriptors."""
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 16)


def configure_streams() -> None:
    """Make the standard streams escape characters that cannot be encoded, and flush each line, so that no line is lost if the
    program is killed.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def execute(source: str) -> int:
    """Run a program as `__main__`; return the exit code that the Python interpreter would have."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(source, FILE, "exec"), main.__dict__)
        _end_threads()
    except SystemExit as stop:
        code = exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - it is shown to who wrote the program
        show(error, source)
        code = 1
    return flush_streams(code)


def show(error: BaseException, source: str, file: str = FILE) -> None:
    """Print the traceback of an error as the Python interpreter does, without the frames of this file."""
    import linecache
    import traceback

    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith((FILE, CELL)):
        trace = trace.tb_next  # all frames, if the program could not even be compiled
    traceback.print_exception(type(error), error, trace)


def exit_code(code: object) -> int:
    """Return the exit code that the Python interpreter would have after `sys.exit(code)`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 255
    print(code, file=sys.stderr)
    return 1


def _end_threads() -> None:
    """Wait for threads and run exit handlers, which `os._exit` does not."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()


def flush_streams(code: int) -> int:
    """Flush the standard streams; return `code` or, if one cannot be written, `code or 1`."""
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except Exception:  # noqa: BLE001 - the program may have closed or replaced them
        return code or 1
    return code


def main(source: int, ready: int, cpu_seconds: int, address_bytes: int, processes: int) -> None:
    """Run the program in the file `source` within limits (see `budget` and `limit`). A byte is written to the descriptor
    `ready` just before the program's code begins.
    """
    with open(source, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    limit(address_bytes, processes)
    budget(cpu_seconds, cpu_seconds)
    os.write(ready, b"1")
    connect(0, 1)
    configure_streams()
    # An interpreter's regular exit would take tens of milliseconds after large packages were loaded.
    os._exit(execute(text))
