"""A forked Python program does what an executed one would: streams, exit codes, signals, folder, environment, its children."""

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from bench.faults.fork_server import FORKED, Nursery

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]


IS_FORKED = "import sys; print('torch' in sys.modules)"


def python(*words: str, typed: str = "", **options: object) -> tuple[int, str, str]:
    """Run Python; return its exit code, stdout and stderr."""
    command = [sys.executable, *words]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=100, check=False, **options)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


def test_forked_program_has_its_streams_arguments_and_parent() -> None:
    code = "import os, sys; print(sys.argv, input(), os.getppid()); print('e', file=sys.stderr)"
    assert python("-c", code, "a", typed="b\n") == (0, f"['-c', 'a'] b {os.getpid()}\n", "e\n")
    assert python("-c", IS_FORKED)[1] == "True\n"


def test_forked_program_has_its_folder_environment_and_path(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'found'\n")
    (tmp_path / "program.py").write_text("import os, helper; print(__name__, helper.NAME, dict(os.environ), os.getcwd())")
    assert python("program.py", cwd=tmp_path, env={"ONLY": "1"})[1] == f"__main__ found {{'ONLY': '1'}} {tmp_path}\n"
    assert "No module named 'helper'" in python("-P", "program.py", cwd=tmp_path)[2]
    assert python("-P", "-c", "import helper", cwd="/", env={"PYTHONPATH": str(tmp_path)})[0] == 0


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, "why"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, os, sys; atexit.register(os.write, 2, b'last'); sys.exit(3)", 3, "last"),
    ],
)
def test_forked_program_ends_like_executed_one(code: str, exit_code: int, error: str) -> None:
    code_of_fork, _, written = python("-c", code)
    assert code_of_fork == exit_code
    assert error in written


def test_forked_program_receives_signals_of_parent() -> None:
    end = "lambda *_: (os.write(1, b'heard'), os._exit(0))"  # it ends in its handler, also before it pauses
    code = f"import os, signal; signal.signal(15, {end}); print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "heard"
    assert process.returncode == 0


def test_forked_program_forks_commands_and_executes_others() -> None:
    version = "['-P', '-m', 'agentrl.cli', '--version']"
    run = "run = lambda words: subprocess.run([sys.executable, *words], text=True).returncode"
    code = f"import subprocess, sys; {run}; print(run({version}), flush=True); run(['-c', {IS_FORKED!r}])"
    assert python("-c", code)[1].splitlines()[1:] == ["0", "False"]


def test_program_with_another_hub_folder_is_executed(tmp_path: Path) -> None:
    assert python("-c", IS_FORKED, env={**os.environ, "HF_HOME": str(tmp_path)})[1] == "False\n"


@pytest.mark.parametrize("modules", [FORKED, ()])
def test_forked_program_forks_modules_that_its_server_names(forks: Nursery, modules: Collection[str]) -> None:
    server = replace(forks.server, forked_by_children=modules)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-P', '-m', 'agentrl.cli', '--version'])"
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # an interpreter reads it when it begins
    with replace(forks, server=server).popen(["-c", code], env=environment, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=100)
    assert (b"import time:" in errors) == (modules == ())


def test_forked_program_uses_the_fork_server_that_it_has() -> None:
    code = f"""
import subprocess, sys
from pathlib import Path
from bench.faults import fork_server
with fork_server.nursery(Path()) as forks, forks.forking_programs():
    subprocess.run([sys.executable, "-c", {IS_FORKED!r}])
print(forks.server is fork_server._own_server)
"""
    assert python("-c", code)[1] == "True\nTrue\n"
