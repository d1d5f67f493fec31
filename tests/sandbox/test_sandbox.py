"""The sandbox as its users see it: programs from nothing, sessions with checkpoints, calls whose value cannot be forged."""

import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.errors import ConfigError, InfraError, SandboxUnavailable
from agentrl.workflow.sandbox import CodeResult, Limits, Session, cgroups, exact_json, limits_watch, proc, spawn, uid_pool
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.bwrap import Profile
from agentrl.workflow.sandbox.cgroups import CgroupEvents
from agentrl.workflow.sandbox.find import find_sandbox
from agentrl.workflow.sandbox.limits_watch import CROWD_PER_CORE
from agentrl.workflow.sandbox.session import CALLS_OF_A_STATE
from agentrl.workflow.settings import Settings
from agentrl.workflow.tools.python import python
from tests.conftest import forbidden
from tests.support.sandbox_fixtures import MODES, SETTINGS, UIDS, alive, boxed, machine, result_with_a_core


@pytest.fixture(params=MODES)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Boxed]:
    with boxed(request.param) as made:
        yield made


@pytest.fixture
def session() -> Iterator[Session]:
    with boxed("cold") as made:
        opened = made.session()
        yield opened
        opened.close()


# Programs from nothing.


def test_sandbox_runs_program_like_interpreter(sandbox: Boxed) -> None:
    code = "import sys, threading, atexit\natexit.register(print, 'last')\n"
    code += "threading.Timer(0.05, print, ['thread']).start()\nprint(input(), __name__)\nprint('err', file=sys.stderr)"
    result = sandbox.run(code, "typed\n")
    assert (result.status, result.exit_code, result.output) == ("ok", 0, "typed __main__\nerr\nthread\nlast\n")
    assert result.kind == "bwrap"
    assert result.cpu_seconds > 0


@pytest.mark.parametrize(("end", "code"), [("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("raise KeyError", 1)])
def test_sandbox_reports_exit_code_of_program(sandbox: Boxed, end: str, code: int) -> None:
    result = sandbox.run(f"import sys\n{end}")
    assert (result.exit_code, result.status) == (code, "error" if code else "ok")


def test_sandbox_traceback_shows_only_program_lines(sandbox: Boxed) -> None:
    said = sandbox.run("def f():\n    return 1 / 0\nf()").output
    assert "return 1 / 0" in said
    assert "ZeroDivisionError" in said
    assert said.count("File") == 2
    assert 'File "<code>", line 1\n' in sandbox.run("def f(:").output


def test_sandbox_keeps_nothing_of_last_program(sandbox: Boxed) -> None:
    sandbox.run("import builtins, math\nbuiltins.left = math.pi = 3\nopen('/tmp/left', 'w').close()\nx = 1")
    said = sandbox.run("import os, math\nprint(os.listdir('/tmp'), 'left' in dir(__builtins__), 'x' in globals(), math.pi > 3)")
    assert said.output == "[] False False True\n"


def test_sandbox_limits_are_of_one_program(sandbox: Boxed) -> None:
    full = "n = 0\ntry:\n  f = open('/tmp/x', 'wb', 0)\n  while True: n += f.write(b'x' * 4096)\nexcept OSError: print(n)"
    sizes = [int(sandbox.run(full, limits=Limits(tmp_bytes=size)).output) for size in (1 << 20, 3 << 20)]
    assert sizes[0] < sizes[1]


def test_sandbox_program_ends_with_its_first_process(sandbox: Boxed) -> None:
    forks = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')\n"
    result = sandbox.run(f"{forks}raise SystemExit(3 if pid else 4)")
    assert (result.output, result.exit_code) == ("child\nparent\n", 3)


def test_sandbox_set_order_is_fixed(sandbox: Boxed) -> None:
    assert len({sandbox.run("print({'a', 'b', 'c', 'd', 'e'})").output for _ in range(3)}) == 1


def test_sandbox_serves_many_threads(sandbox: Boxed) -> None:
    with ThreadPoolExecutor(8) as pool:
        said = [result.output for result in pool.map(lambda number: sandbox.run(f"print({number})"), range(24))]
    assert said == [f"{number}\n" for number in range(24)]


def test_sandbox_close_ends_all_sessions_and_is_repeatable() -> None:
    with boxed("warm") as sandbox:
        sandbox.run("print(1)")
        session = sandbox.session()
        sandbox.close()
        sandbox.close()
        assert alive() == []
        assert session.run("1").status == "killed"


# The clock.


def test_wall_limit_grows_with_crowd_on_cores() -> None:
    cores = os.cpu_count() or 1
    assert Limits(cpu_seconds=10).wall(1) == 45
    assert Limits(cpu_seconds=10).wall(8 * cores) == 105
    assert Limits(cpu_seconds=10).wall(2 * cores) == 45
    assert Limits(cpu_seconds=10, wall_seconds=2).wall(4 * cores) == 2


def test_sleeping_program_ends_before_its_call_times_out() -> None:
    """Else it would be the system's failure, tried again and again, and not the program's."""
    crowd = CROWD_PER_CORE * (os.cpu_count() or 1)
    assert python.limits.wall(crowd) <= python.timeout_seconds - 5


def test_sandbox_status_is_unchanged_by_busy_neighbours() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with boxed("warm") as sandbox, ThreadPoolExecutor(4) as pool:
            code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint('done')"
            results = list(pool.map(lambda _: sandbox.run(code, limits=Limits(cpu_seconds=1)), range(4)))
        assert [result.status for result in results] == ["ok"] * 4
    finally:
        for process in busy:
            process.kill()
            process.wait()


SLEEPS = "import time\nwhile time.process_time() < {}: pass\ntime.sleep(999)"


@pytest.mark.parametrize("burnt", [0, 0.3])
def test_sleeping_program_is_timeout_and_not_starved(burnt: float) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=99, asleep_seconds=0.5)
    with boxed("warm") as sandbox:
        assert sandbox.run(SLEEPS.format(burnt), limits=limits).status == "timeout_wall"
        session = sandbox.session(limits)
        assert session.run(SLEEPS.format(burnt)).status == "timeout_wall"
        assert session.run("1").output == "1\n"


def test_starved_program_is_reported_as_starved() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin, start_new_session=True) for _ in range(8 * (os.cpu_count() or 1))]
    try:
        with boxed("cold") as sandbox:
            result = sandbox.run("while True: pass", limits=Limits(cpu_seconds=5, wall_seconds=1.5))
        assert result.status == "starved"
        assert result.waited_seconds >= 0.75
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_waiting_threads_of_program_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{"a": 1, "b": 2}, {"a": 3, "b": 3, "c": 1}, {"c": 1}, {"c": 2}])
    monkeypatch.setattr(proc, "_waits", lambda process: ((name, int(wait * 1e9)) for name, wait in next(seen).items()))
    waits = proc.Waits()
    assert [waits.look([1]) for _ in range(4)] == [2, 4, 4, 5]


def test_status_follows_kernel_counters() -> None:
    limits, nothing = Limits(cpu_seconds=1), CgroupEvents()
    assert limits_watch.status(limits, None, 0, 0.1, nothing) == "ok"
    assert limits_watch.status(limits, None, 1, 0.1, nothing) == "error"
    assert limits_watch.status(limits, None, -11, 0.1, nothing) == "killed"
    assert limits_watch.status(limits, None, -9, 1.1, nothing) == "timeout_cpu"
    assert limits_watch.status(limits, None, -9, 0.1, CgroupEvents(oom=1)) == "oom"
    assert limits_watch.status(limits, None, 1, 0.1, CgroupEvents(pids=1)) == "pids"
    assert limits_watch.status(limits, None, 0, 0.1, CgroupEvents(pids=1)) == "ok"
    assert limits_watch.status(limits, "timeout_wall", None, 0.1, nothing) == "timeout_wall"
    assert limits_watch.status(limits, "starved", None, 0.1, nothing) == "starved"
    assert limits_watch.status(limits, "timeout_wall", None, 1.1, nothing) == "timeout_cpu"


# Sessions.


def test_session_keeps_names_and_prints_last_expression(session: Session) -> None:
    assert session.run("import math\nx = [1]").output == ""
    assert session.run("x.append(2)\nx").output == "[1, 2]\n"
    assert session.run("print(x)\nmath.floor(2.5)").output == "[1, 2]\n2\n"
    assert session.run("open('/tmp/kept', 'w').write('k')\nNone").output == ""
    assert session.run("open('/tmp/kept').read()").output == "'k'\n"


@pytest.fixture
def impatient() -> Iterator[None]:
    """Every new socket has a timeout, as Celery has it for a moment where a worker ends."""
    socket.setdefaulttimeout(0.01)
    yield
    socket.setdefaulttimeout(None)


def test_session_works_with_default_socket_timeout(impatient: None, session: Session) -> None:
    time.sleep(0.1)
    assert session.run("import time; time.sleep(0.1)\n1").output == "1\n"


def test_sandbox_works_with_default_socket_timeout(impatient: None, sandbox: Boxed) -> None:
    assert sandbox.run("import time; time.sleep(0.1); print(1)").output == "1\n"


def test_session_syntax_error_shows_only_cell(session: Session) -> None:
    said = session.run("x = (").output
    assert "<cell 1>" in said
    assert "SyntaxError" in said
    assert "Traceback" not in said


def test_session_traceback_names_earlier_cell(session: Session) -> None:
    session.run("def half(x): return 1 / x")
    said = session.run("half(0)").output
    assert said.index("<cell 2>") < said.index('"<cell 1>", line 1, in half')


def test_session_output_is_restored_after_each_cell(session: Session) -> None:
    assert session.run("import sys; sys.stdout = None; x = 1").status == "ok"
    assert session.run("sys.stdout = sys.__stdout__; x").output == "1\n"


def test_session_exception_ends_cell_and_keeps_names(session: Session) -> None:
    result = session.run("x = 1\nraise ValueError('no')")
    assert (result.status, result.exit_code) == ("error", 1)
    assert 'File "<cell 1>", line 2' in result.output
    assert session.run("x").output == "1\n"
    assert session.run("def f(:").status == "error"
    assert session.run("import sys; sys.exit(4)").exit_code == 4
    assert session.run("x").output == "1\n"


def test_session_draws_are_repeatable() -> None:
    cells = ["import random\nrandom.random()", "random.random()", "import os; os.abort()", "random.random()", "{'a', 'b', 'c'}"]
    with boxed("cold") as sandbox:
        said, again = [[session.run(cell).output for cell in cells] for session in (sandbox.session(), sandbox.session())]
    assert said[0] != said[1] != said[3]
    assert said == again


def test_sandbox_programs_draw_differently(sandbox: Boxed) -> None:
    assert len({sandbox.run("import random\nprint(random.random())").output for _ in range(3)}) == 3


DEATHS = {
    "abort": ("import os; x = 2; os.abort()", "killed"),
    "exit": ("import os; x = 2; os._exit(0)", "killed"),
    "segmentation fault": ("import ctypes; x = 2; ctypes.string_at(0)", "killed"),
    "spin": ("x = 2\nwhile True: pass", "timeout_cpu"),
    "spin, signals ignored": ("import signal\nsignal.signal(24, signal.SIG_IGN)\nx = 2\nwhile True: pass", "timeout_cpu"),
    "endless output": ("x = 2\nwhile True: print('y' * 99)", "output_cap"),
    "children": ("import subprocess, time\nx = 2\nsubprocess.Popen(['sleep', '999'])\nwhile True: pass", "timeout_cpu"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_session_state_is_restored_after_cell_death(session: Session, name: str) -> None:
    code, status = DEATHS[name]
    session.run("x = 1")
    assert session.run(code, Limits(cpu_seconds=1)).status == status
    assert session.run("x").output == "1\n"
    assert "sleep" not in alive()


WITHOUT_ITS_FIRST_THREAD = """
import ctypes, os, threading, time
def say():
    time.sleep(0.2)
    for fd in range(3, 64):
        try: os.write(fd, b'{"done": {"code": 0, "value": ""}}\\n')
        except OSError: pass
    while True: time.sleep(999)
threading.Thread(target=say).start()
ctypes.CDLL(None).syscall(60, 0)
"""


def test_session_detects_checkpoint_without_first_thread(session: Session) -> None:
    before = time.process_time()
    assert session.run(WITHOUT_ITS_FIRST_THREAD).status == "killed"
    assert time.process_time() - before < 1
    assert not session.alive
    assert alive() == []


def keeps_nothing_of_what_passed_its_limit(session: Session) -> None:
    """Also where the cell ends by itself as it is killed."""
    session.run("x = 1")
    for more in range(1, 60):
        result = session.run(f"x = 2\nprint('y' * {1000 + more}, end='')", Limits(output_bytes=1000))
        assert (result.status, len(result.output)) == ("output_cap", 1000)
        assert session.run("x").output == "1\n"
    assert session.run("x = 3\nprint('y' * 1000, end='')", Limits(output_bytes=1000)).status == "ok"
    assert session.run("x").output == "3\n"


def test_session_state_is_restored_if_cell_ends_at_limit(session: Session) -> None:
    keeps_nothing_of_what_passed_its_limit(session)


def test_session_sleeping_cell_ends_at_wall_limit(session: Session) -> None:
    session.run("x = 1")
    sleeps = "x = 2\nimport time; time.sleep(99)"
    assert result_with_a_core(lambda: session.run(sleeps, Limits(wall_seconds=0.5))).status == "timeout_wall"
    assert session.run("x").output == "1\n"


def test_session_budget_is_of_each_cell(session: Session) -> None:
    spin = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    for _ in range(4):
        assert session.run(spin, Limits(cpu_seconds=1)).status == "ok"


def test_session_cell_cannot_raise_its_budget(session: Session) -> None:
    raises = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, ({0}, {0}))"
    most = "resource.getrlimit(resource.RLIMIT_CPU)[1]"
    for _ in range(2):
        assert session.run(f"import resource\n{most}").output == "11\n"
        assert "ValueError" in session.run(raises.format(12)).output
    with pytest.raises(ConfigError, match="cpu_seconds"):
        session.run("1", Limits(cpu_seconds=10.5))


@pytest.mark.slow
def test_session_state_hands_over_before_cpu_time_runs_out() -> None:
    spin = "import time\nend = time.process_time() + 0.8\nwhile time.process_time() < end: pass"
    with boxed("cold") as sandbox:
        session = sandbox.session(Limits(cpu_seconds=1))
        session.run("import time\ndef used(): return time.process_time()")
        assert session.run(spin).status == "ok"
        assert exact_json.decode(session.call("used", []).value) < 0.5
        for _ in range(2 * CALLS_OF_A_STATE):
            assert session.call("used", [], keeps=False).status == "ok"


def test_session_output_of_leftovers_is_not_of_next_cell(session: Session) -> None:
    prints = "def prints():\n  while True: print('left')"
    for _ in range(5):
        session.run(f"import threading\n{prints}\nthreading.Thread(target=prints, daemon=True).start()")
        assert session.run("print('mine')").output == "mine\n"


EVERY = "import os\nfor fd in range(3, 64):\n  try: os.write(fd, {})\n  except OSError: pass"
EVERYBODY = "import os, signal; os.kill(-1, signal.SIGKILL)"
KILLS = {
    "the waiting state": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit(0)",
    "a broken line": EVERY.format("b'{broken\\n'"),
    "a line without end": "def all():\n  " + EVERY.format("b'x' * 4096").replace("\n", "\n  ") + "\nwhile True: all()",
    "deep nesting": EVERY.format("b'[' * 100000 + b'\\n'"),
    "an exit code of its own": EVERY.format("""b'{"done": {"code": 1' + b'0' * 99 + b', "value": ""}}\\n'"""),
    "a wrong end": EVERY.format("""b'{"done": {"code": "0"}}\\n'"""),
}


FORKS = """
import os
n = 0
pid = os.fork()
n += 1
if pid: os.waitpid(pid, 0)
print("parent" if pid else "child", n)
"""
FORK_ENDS = """
import os
for end in (lambda: os.sys.exit(3), lambda: 1 / 0, lambda: None):
    if os.fork() == 0: end(); break
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def forks_once(session: Session) -> None:
    """Programs that a cell, or a call, forks are no second session."""
    result = session.run(FORKS)
    assert (result.status, result.output) == ("ok", "child 1\nparent 1\n")
    assert session.run("n, pid > 0").output == "(1, True)\n"
    said = session.run(FORK_ENDS).output
    assert [line for line in said.splitlines() if line.isdigit()] == ["3", "1", "0"]
    assert said.count("ZeroDivisionError") == 1
    for number in range(5):
        session.run(f"if os.fork() == 0: n = -1\nelse: n = {number}")
        assert session.run("n").output == f"{number}\n"
    session.run("import os\ndef forks(): return os.fork() > 0")
    for _ in range(3):
        assert session.call("forks", []).value == "true"


def test_session_cell_that_forks_ends_once(session: Session) -> None:
    forks_once(session)


def test_session_forks_end_with_dead_cell(session: Session) -> None:
    session.run("import os, time\nn = 1")
    assert session.run("if os.fork(): os.abort()\ntime.sleep(999)").status == "killed"
    assert session.run("n").output == "1\n"


@pytest.mark.parametrize("name", KILLS)
def test_session_that_destroys_itself_is_killed(session: Session, name: str) -> None:
    assert session.run(KILLS[name], Limits(cpu_seconds=2, wall_seconds=20)).status == "killed"
    after = session.run("1")
    assert (after.status, after.value) == ("killed", "")


def test_session_cell_survives_killing_everyone_else(session: Session) -> None:
    for number in range(3):
        assert session.run(f"x = {number}\n{EVERYBODY}").status == "ok"
        assert session.run("x").output == f"{number}\n"


# Calls.


def test_session_call_takes_and_returns_plain_data(session: Session) -> None:
    session.run("def both(a, b):\n    return (a, [b, {'k': {1, 2}}], float('nan'), 10 ** 400)")
    result = session.call("both", [1, (2, None)])
    assert result.status == "ok"
    value = exact_json.decode(result.value)
    assert value[:2] == (1, [(2, None), {"k": {1, 2}}])
    assert math.isnan(value[2])
    assert value[3] == 10**400


def test_session_call_error_has_reason(session: Session) -> None:
    session.run("def f(a): return a / 0")
    wrong = {"f": ([1], "ZeroDivisionError"), "g": ([], "'g' is not defined"), "print": (["x"], "'print' is not defined")}
    for function, (args, said) in wrong.items():
        result = session.call(function, args)
        assert (result.status, result.value) == ("error", "")
        assert said in result.output


def test_session_survives_too_large_value(session: Session) -> None:
    session.run("def f(n): return 'x' * n")
    assert session.call("f", [2 << 20]).status == "error"
    assert len(session.call("f", [1 << 19]).value) == (1 << 19) + 2


def test_session_cell_cannot_change_session_limits(session: Session) -> None:
    with pytest.raises(ConfigError, match="memory_bytes"):
        session.run("1", Limits(memory_bytes=1))


PASSED = '{"done": {"code": 0, "value": "42"}}'
NO_PLAIN_DATA = {
    "an object without a truth value": "class A:\n  def __bool__(self): raise ValueError\ndef f(): return A()",
    "itself": "a = []\na.append(a)\ndef f(): return a",
    "sys.exit": "import sys\ndef f(): sys.exit(0)",
    "an exit from a thread of code": "def f(): raise SystemExit",
    "an exception with a message": f"def f(): raise ValueError('{PASSED}')",
}
CONVERTED = {
    "an object that equals everything": (
        "class A:\n  def __eq__(self, o): return True\ndef f(): return A()",
        '{"$object": true}',
    ),
    "an object that is false": ("class A:\n  def __bool__(self): return False\ndef f(): return [A()]", '[{"$object": false}]'),
    "a number that equals everything": (
        "class A(int):\n  def __eq__(self, o): return True\n  def __int__(self): return 42\ndef f(): return A(1)",
        "1",
    ),
    "a string that shows another": ("class A(str):\n  def __str__(self): return '43'\ndef f(): return A('42')", '"42"'),
    "a list that gives others": ("class A(list):\n  def __iter__(self): return iter([3])\ndef f(): return A([1])", "[1]"),
    "a dict that gives others": ("class A(dict):\n  def items(self): return [(1, 2)]\ndef f(): return A(a=0)", '{"a": 0}'),
    "a generator": ("def f(): yield 42", '{"$iterator": [42]}'),
}
DIES = {
    "os._exit": "import os\ndef f(): os._exit(0)",
    "os.abort": "import os\ndef f(): os.abort()",
}


@pytest.mark.parametrize("name", NO_PLAIN_DATA | DIES)
def test_call_without_plain_data_has_no_value(session: Session, name: str) -> None:
    session.run((NO_PLAIN_DATA | DIES)[name])
    result = session.call("f", [])
    assert (result.status, result.value) == ("error" if name in NO_PLAIN_DATA else "killed", "")
    assert session.run("1 + 1").output == "2\n"


@pytest.mark.parametrize("name", CONVERTED)
def test_call_value_of_subclass_is_base_and_of_others_truth(session: Session, name: str) -> None:
    code, text = CONVERTED[name]
    session.run(code)
    assert session.call("f", []).value == text


FORGERIES = {
    "a printed frame": f"def f():\n  print('{PASSED}')\n  return 0",
    "a frame on every descriptor, and out": f"""
import os
def f():
    for fd in range(3, 64):
        try: os.write(fd, b'{PASSED}' + bytes([10]))
        except OSError: pass
    os._exit(0)
""",
    "values from the frames of callers": """
import sys
def f():
    frame, seen = sys._getframe(), []
    while frame is not None:
        seen += [str(value) for value in frame.f_locals.values()]
        frame = frame.f_back
    return 'expected' in ' '.join(seen)
""",
    "a json of its own": """
import json, sys
json.dumps = lambda *a, **k: '"anything"'
json.encoder.encode_basestring_ascii = json.encoder.c_make_encoder = None
def f(): return 0
""",
    "an encoder of its own": """
import sys
def f():
    frame = sys._getframe().f_back
    frame.f_globals['plain'].encode = lambda value: '{"$nonsense": 1}'
    return 0
""",
}


def claimed(result: CodeResult) -> Any:
    """What a call handed out, as who judges it reads it; None where that is nothing."""
    try:
        return exact_json.decode(result.value) if result.status == "ok" else None
    except ValueError:
        return None


TOO_LONG = {
    "a value of more than may be handed out": 'b\'{"done": {"code": 0, "value": "\' + b"x" * (1 << 20) + b\'y"}}\'',
    "a line without an end": 'b"[" * (3 << 20)',
    "nested ever deeper": 'b"[" * (1 << 20)',
    "a number of a million digits": 'b\'{"done": {"code": \' + b"9" * (1 << 20) + b"}}"',
    "no end but a claim of one": 'b\'{"done": {"code": 0}}\'',
    "no text": "bytes(range(256))",
}


def hands_out_no_more_than_it_may(session: Session, name: str) -> None:
    """What a process inside says on each of its descriptors is refused out here, and costs little."""
    session.run(
        "import os\ndef f():\n    os.set_blocking(1, True)\n"
        f"    said = {TOO_LONG[name]} + bytes([10])\n"
        "    for fd in range(3, 64):\n"
        "        try:\n            left = said\n            while left: left = left[os.write(fd, left):]\n"
        "        except OSError: pass\n"
        "    os._exit(0)"
    )
    began = time.process_time()
    result = session.call("f", [])
    assert (result.status, result.value) == ("killed", "")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", TOO_LONG)
def test_call_value_beyond_limits_is_refused_outside(session: Session, name: str) -> None:
    hands_out_no_more_than_it_may(session, name)


BEGINS_TO_END = """
import os, stat
for line in range(3, 256):
    try:
        if stat.S_ISSOCK(os.fstat(line).st_mode): os.write(line, b'{"done": {"code": 0, ')
    except OSError: pass
for _ in range(3): os.fork()
while True: pass
"""


def uses_no_more_than_its_time(session: Session) -> None:
    """A cell that begins to say that it has ended, and works on, is ended as any other that works for too long."""
    session.run("x = 1")
    result = session.run(f"x = 2\n{BEGINS_TO_END}", Limits(cpu_seconds=1.0))
    assert result.status == "timeout_cpu", result
    assert session.run("x").output == "1\n"


def test_session_cell_with_partial_end_message_times_out(session: Session) -> None:
    uses_no_more_than_its_time(session)


def test_call_value_is_not_built_outside(session: Session) -> None:
    """To build this set takes half a minute: 40,000 numbers of one hash."""
    session.run(f"def f(): return [n * {2**61 - 1} for n in range(40_000)]")
    session.run("import json, sys\nplain = sys.modules['agentrl.workflow.sandbox.exact_json']")
    session.run("plain.encode = lambda value: '{\"$set\": ' + json.dumps(value) + '}'")
    began = time.process_time()
    result = session.call("f", [])
    assert (result.status, result.value[:9]) == ("ok", '{"$set": ')
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", FORGERIES)
def test_call_value_forged_is_only_data(session: Session, name: str) -> None:
    """Who compares outside with an expected value that was never inside finds what the function could as well have returned."""
    session.run(FORGERIES[name])
    expected = "a value of which nothing inside has heard"
    result = session.call("f", [])
    assert result.status in ("ok", "error", "killed")
    value = claimed(result)
    assert type(value) in (int, str, bool, type(None))
    assert value != expected
    assert value is not True


# Plain data.

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers())
data = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$tuple"), inner)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
    ),
    max_leaves=20,
)


def types(value: Any) -> Any:
    """The shape of data in types, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return dict, sorted((repr(key), types(key), types(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    return type(value)


@given(data)
def test_plain_data_is_read_back(value: Any) -> None:
    back = exact_json.decode(exact_json.encode(value))
    assert back == value
    assert str(types(back)) == str(types(value))


NO_TEXT = (
    *("", "{", "NaN", "Infinity", '{"$no": 1}', '{"$tuple": 1}', '{"$set": [[]]}', '{"$dict": 3}', '{"$int": 5}'),
    *('{"$float": "1"}', '{"$tuple": [], "$set": []}', "[" * 100_000, "9" * 5000, '{"$bytes": "x"}', '{"$dict": [[{}, 1]]}'),
    *('{"$fraction": [1, 0]}', '{"$fraction": [1]}', '{"$decimal": "1.2.3"}', '{"$type": "eval"}', '{"$complex": [1, "2"]}'),
    *('{"$object": 1}', '{"$keys": [[]]}', '{"$items": [1]}', '{"$fraction": [0.5, 1]}'),
    *('{"$set": {"a": 1}}', '{"$tuple": "ab"}', '{"$dict": [1]}', '{"$int": "x"}'),
)


@pytest.mark.parametrize("text", NO_TEXT)
def test_plain_data_reader_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError):
        exact_json.decode(text)


# Finding one.


def test_auto_option_finds_working_sandbox() -> None:
    assert machine().kind == "bwrap"
    found = find_sandbox(SETTINGS)
    assert found.kind == "bwrap"
    found.close()


def test_find_sandbox_runs_nothing_unconfined_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed") as caught:
        find_sandbox(Settings(sandbox="bwrap"))
    assert "install" in caught.value.hint
    assert caught.value.exit_code == 10


@pytest.mark.slow
def test_unsafe_option_has_no_sandbox_and_says_so() -> None:
    found = find_sandbox(Settings(sandbox="none-unsafe"))
    result = found.run("import os; print(os.getuid())")
    assert (result.kind, result.output) == ("unsafe", f"{os.getuid()}\n")
    session = found.session()
    session.run("x = 1")
    assert session.run("x = 2\nwhile True: pass", Limits(cpu_seconds=1)).status == "timeout_cpu"
    for code in (  # nobody counts here: each process is looked at
        "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.fork(), os.fork()\nwhile True: pass",
    ):
        assert found.run(code, limits=Limits(cpu_seconds=1)).status == "timeout_cpu"
    assert session.run("x").output == "1\n"
    found.close()


def test_find_sandbox_refuses_missing_interpreter() -> None:
    machine()
    with pytest.raises(SandboxUnavailable):
        find_sandbox(Settings(sandbox="bwrap", sandbox_python="/nowhere/python3"))


def test_sandbox_start_failure_is_system_failure() -> None:
    machine()
    profile = Profile(shutil.which("bwrap") or "", "/nowhere/python3")
    for nests in (False, True):
        broken = Boxed(spawn.launch(replace(profile, nests=nests), UIDS))
        result = broken.run("print(1)")
        assert result.status == "sandbox_fault"
        assert "/nowhere/python3" in result.output
        with pytest.raises(InfraError):
            broken.session()
        broken.close()
    assert alive() == []


def test_sandbox_failure_on_our_side_is_system_failure(sandbox: Boxed) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        result = sandbox.run("print(1)")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (result.status, "Too many open files" in result.output) == ("sandbox_fault", True)
    assert sandbox.run("print(1)").output == "1\n"


@pytest.mark.parametrize("text", ["", "5", "0-9", "9-5", "a-b", "1-2-3"])
def test_uid_range_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ConfigError, match="AGENTRL_SANDBOX_UIDS"):
        uid_pool.uid_range(text)


def test_lease_uid_reports_that_all_are_taken() -> None:
    if os.geteuid() != 0:
        assert uid_pool.lease_uid(range(0)).uid is None
        return
    one = range(232999, 233000)
    seat = uid_pool.lease_uid(one)
    with pytest.raises(InfraError, match="in use"):
        uid_pool.lease_uid(one)
    seat.release()
    uid_pool.lease_uid(one).release()


# Control groups, where the kernel has the second version.


def test_cgroup_parent_is_nearest_with_delegated_controllers(tmp_path: Path) -> None:
    leaf = tmp_path / "user" / "app" / "terminal"
    leaf.mkdir(parents=True)
    for folder, handed in ((leaf, ""), (leaf.parent, "cpu memory pids\n"), (leaf.parent.parent, "memory pids\n")):
        (folder / "cgroup.subtree_control").write_text(handed)
        (folder / "cgroup.procs").touch()
    (tmp_path / "self").write_text("0::/user/app/terminal\n")
    assert set(cgroups.parents(tmp_path, tmp_path / "self").values()) == {leaf.parent}
    (tmp_path / "self").write_text("0::/\n")
    assert cgroups.parents(tmp_path, tmp_path / "self") == {}


def test_cgroup_v2_files_are_read_and_written(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (tmp_path / name).touch()
    (tmp_path / "memory.events").write_text("low 0\nmax 7\noom 2\noom_kill 1\n")
    (tmp_path / "pids.events").write_text("max 3\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    group = cgroups.Cgroup(dict.fromkeys(cgroups.CONTROLLERS, tmp_path))
    group.set_limits(64, 10)
    assert (tmp_path / "memory.max").read_text() == "64"
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert (tmp_path / "pids.max").read_text() == str(10 + cgroups.SPARE_PROCESSES)
    assert group.events() == CgroupEvents(oom=1, pids=3)
    assert group.cpu_seconds() == 1.5
    assert group.joins == [str(tmp_path / "cgroup.procs")]


def test_cgroups_of_ended_processes_are_removed() -> None:
    if not (places := set(cgroups.parents().values())):
        forbidden("a control group")
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = [place / f"{cgroups.PREFIX}{gone.pid}-0" for place in places]
    for folder in left:
        folder.mkdir()
    cgroups.sweep()
    assert not any(folder.exists() for folder in left)
