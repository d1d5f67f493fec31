"""Inside: one program from beginning to end, in a process that is its own.

This file runs inside the sandbox, with whatever interpreter is there, and imports nothing but the standard library, late and
little: each import is paid with every run.
"""

import os
import resource
import sys
import types

FILE, CELL = "<code>", "<cell "
"""What the files of programs, and those of cells, are called in a traceback."""


def limit(address_bytes: int, processes: int) -> None:
    """Lowers what this process and its children may use; it cannot be raised again.

    Args:
        address_bytes: address space of each process.
        processes: processes and threads of this user.
    """
    for name, value in (("AS", address_bytes), ("NPROC", processes), ("NOFILE", 256), ("FSIZE", 1 << 26), ("CORE", 0)):
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def budget(cpu_seconds: int, most: int) -> None:
    """Processor seconds of this process and of each child: SIGXCPU ends them; a second after `most`, SIGKILL.

    Args:
        most: nobody in here can raise it again.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, most + 1))


def connect(stdin: int, output: int) -> None:
    """Makes these the standard streams and closes every other file."""
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 16)


def configure_streams() -> None:
    """Text that no encoding can write is escaped, and what was printed before a kill is not lost."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def execute(source: str) -> int:
    """Runs a program as `__main__`; the exit code that an interpreter would have had."""
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
    """Prints the traceback as an interpreter does, without this file's own frames."""
    import linecache
    import traceback

    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith((FILE, CELL)):
        trace = trace.tb_next  # all of them, where it could not even be compiled
    traceback.print_exception(type(error), error, trace)


def exit_code(code: object) -> int:
    """What an interpreter makes of `sys.exit(code)`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 255
    print(code, file=sys.stderr)
    return 1


def _end_threads() -> None:
    """An interpreter waits for its threads and calls what was registered; `os._exit` does neither."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()


def flush_streams(code: int) -> int:
    """`code`, or 1 where what was printed cannot be written. A stream that the program has set to None has nothing to write."""
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except Exception:  # noqa: BLE001 - the program may have closed or replaced them
        return code or 1
    return code


def main(source: int, ready: int, cpu_seconds: int, address_bytes: int, processes: int) -> None:
    """Runs the program in the file `source`; a byte on `ready` says that from here on it is the program that acts."""
    with open(source, encoding="utf-8", errors="surrogateescape") as file:
        text = file.read()
    limit(address_bytes, processes)
    budget(cpu_seconds, cpu_seconds)
    os.write(ready, b"1")
    connect(0, 1)
    configure_streams()
    # The interpreter's own end would take tens of milliseconds where large packages were loaded.
    os._exit(execute(text))
