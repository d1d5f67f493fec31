"""Agents' processes: real ones, that end as they like; nothing of them is left, and what they say is bounded."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.workers.agents import processes
from agentrl.workers.agents.guardian import KILLED, AgentReport, Order
from agentrl.workers.agents.processes import AgentUnready, servers
from agentrl.workflow.errors import InfraError
from tests.support.network_machines import wait_until

MODULE = "tests.agents.hostile_agents"


@pytest.fixture(autouse=True, scope="module")
def _end_servers() -> Iterator[None]:
    yield
    servers.close()


def order(**changes: Any) -> Order:
    wanted = {
        "command": [],
        "environment": {"PATH": os.environ["PATH"], "OPENAI_API_KEY": "key"},
        "folder": os.getcwd(),
        "answer_file": "",
        "files": "",
        "task": {"key": "t/1", "messages": [{"role": "user", "content": "Hi"}], "metadata": {}, "reference": None},
        "llm": {"base_url": "http://127.0.0.1:1/v1", "api_key": "key", "model": "m"},
        "timeout_seconds": 60.0,
        "memory_mb": 2048,
        "processes": 200,
        "output_bytes": 1_000_000,
    }
    return Order(**{**wanted, **changes})


def ran(name: str, **changes: Any) -> AgentReport:
    report = processes.run(order(**changes), f"{MODULE}:{name}", lambda: False)
    assert report is not None
    return report


def program(tmp_path: Path, source: str, **changes: Any) -> AgentReport:
    """Python code as a program."""
    wanted = {"folder": str(tmp_path), "files": str(tmp_path), "answer_file": str(tmp_path / "answer.json")}
    report = processes.run(order(command=[sys.executable, "-c", source], **wanted, **changes), "", lambda: False)
    assert report is not None
    return report


def test_agent_function_result_and_output_are_reported() -> None:
    report = ran("answers")
    assert (report.exit_code, report.error_class) == (0, "")
    assert (report.answer, report.rewards) == ("Hi m", {"close": 0.5})
    assert report.output == "hello from t/1\n"


def test_agent_async_function_is_awaited_and_number_is_reward() -> None:
    assert ran("answers_later").rewards == {"agent": 0.25}


def test_agent_text_result_is_answer() -> None:
    assert ran("words").answer == "a text is an answer"


def test_agent_may_return_nothing() -> None:
    report = ran("nothing")
    assert (report.answer, report.rewards, report.error_class) == (None, None, "")


def test_agent_exception_has_message_and_traceback() -> None:
    report = ran("raises")
    assert (report.error_class, report.error) == ("ValueError", "ValueError: no such luck")
    assert 'raise ValueError("no such luck")' in report.output


def test_agent_exception_has_messages_of_its_causes() -> None:
    report = ran("cannot_connect")
    assert report.error_class == "ConnectionError"
    first, second = report.error.split("; caused by ")
    assert first.startswith("ConnectionError: x")
    assert len(first) == 1000
    assert second == "ConnectionRefusedError: [Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("name", "kind"), [("a_list", "TypeError"), ("many_rewards", "ValueError"), ("infinite", "ValueError")]
)
def test_agent_result_of_wrong_type_is_error(name: str, kind: str) -> None:
    report = ran(name)
    assert (report.error_class, report.answer, report.rewards) == (kind, None, None)


def test_agent_exit_and_signal_differ_from_return() -> None:
    assert ran("leaves").error_class == "SystemExit"
    killed = ran("dies")
    assert (killed.exit_code, killed.error_class) == (-9, KILLED)


def test_agent_over_time_is_ended() -> None:
    assert ran("sleeps", timeout_seconds=0.5).error_class == "timeout"


def test_agent_with_endless_output_is_ended_and_tail_kept() -> None:
    report = ran("prints")
    assert (report.error_class, report.output[:10]) == ("output", "x" * 10)
    assert "bytes left out]" in report.output
    assert len(report.output) <= 6100


def test_agent_over_memory_is_ended() -> None:
    assert ran("allocates", memory_mb=200).error_class == "memory"


def test_agent_fork_bomb_is_ended_with_all_children() -> None:
    assert ran("forks", processes=20).error_class == "processes"
    wait_until(lambda: not _sleepers(), "nothing sleeps any more")


def test_agent_daemons_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    task = {"key": "t", "messages": [], "metadata": {"note": str(note)}, "reference": None}
    assert ran("breaks_away", task=task).error_class == ""
    assert not Path(f"/proc/{note.read_text()}").exists()


@pytest.mark.parametrize("above", [0, 1], ids=["the guardian", "its warden"])
def test_agent_daemons_end_if_supervisor_is_killed(tmp_path: Path, above: int) -> None:
    note, found = tmp_path / "guardian", list[BaseException | AgentReport | None]()
    task = {"key": "t", "messages": [], "metadata": {"note": str(note)}, "reference": None}
    stopped = threading.Event()

    def run() -> None:
        try:
            found.append(processes.run(order(task=task), f"{MODULE}:breaks_away_and_stays", stopped.is_set))
        except InfraError as error:
            found.append(error)

    running = threading.Thread(target=run)
    running.start()
    wait_until(note.exists, "the agent is at it")
    wait_until(lambda: len(_sleepers()) == 3, "all three sleep")
    watcher = int(note.read_text())
    for _ in range(above):
        watcher = int(Path(f"/proc/{watcher}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(watcher, signal.SIGKILL)
    if above:
        stopped.set()  # the guardian goes on without its warden
    running.join()
    wait_until(lambda: not _sleepers(), "nothing sleeps any more")
    assert isinstance(found[0], InfraError) is (above == 0)


def test_agent_environment_has_no_worker_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.close()
    monkeypatch.setenv("AGENTRL_DATABASE_URL", "postgresql://owner:hidden@db/agentrl")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden too")
    seen = ran("looks_around").answer
    assert seen is not None
    assert "OPENAI_API_KEY" in seen
    assert "hidden" not in seen


def test_agent_module_is_imported_again_after_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_agent.py"
    for number in (1, 22):
        file.write_text(f"def solve(task, llm):\n    return {number}\n")
        assert servers.source("edited_agent:solve") == file.read_text()
        report = processes.run(order(), "edited_agent:solve", lambda: False)
        assert report is not None
        assert report.rewards == {"agent": float(number)}


def test_agent_that_cannot_be_imported_is_unready() -> None:
    with pytest.raises(AgentUnready, match="no_such_agent"):
        processes.run(order(), "tests.agents.no_such_agent:solve", lambda: False)


def test_interpreter_killed_at_import_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "killed_agent.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(InfraError, match="interpreter was killed"):
        processes.run(order(), "killed_agent:solve", lambda: False)


def test_agent_slow_import_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    source = f"open({str(gate)!r}).read()\ndef solve(task, llm):\n    return 1\n"
    (tmp_path / "slow_agent.py").write_text(source)
    found: list[AgentReport | None] = []

    def run() -> None:
        found.append(processes.run(order(), "slow_agent:solve", lambda: False))

    slow = [threading.Thread(target=run) for _ in range(2)]
    for thread in slow:
        thread.start()
    with gate.open("w"):  # it is being imported, as somebody reads
        assert ran("answers").error_class == ""
        assert not found
    for thread in slow:
        thread.join()
    assert [report and report.rewards for report in found] == [{"agent": 1.0}] * 2


def test_agent_cancelled_during_import_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "endless_agent.py").write_text("import time\ntime.sleep(600)\n")
    wanted, found = threading.Event(), list[AgentReport | None]()

    def run() -> None:
        found.append(processes.run(order(), "endless_agent:solve", wanted.is_set))

    waiting = [threading.Thread(target=run) for _ in range(2)]
    for thread in waiting:
        thread.start()
    wanted.set()
    for thread in waiting:
        thread.join()
    assert found == [None, None]


def test_agent_forkservers_least_recently_used_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_SERVERS", 2)
    for name in ("answers", "nothing", "answers_later", "answers"):
        ran(name)
    warm = [spec for spec, place in servers._places.items() if place.server is not None]
    assert warm == [f"{MODULE}:answers_later", f"{MODULE}:answers"]


def test_agent_cancelled_is_ended() -> None:
    wanted = threading.Event()
    threading.Timer(0.7, wanted.set).start()
    marked = order(environment={"PATH": os.environ["PATH"], "MARK": "unwanted"})
    assert processes.run(marked, f"{MODULE}:program_that_sleeps", wanted.is_set) is None
    wait_until(lambda: not _marked("MARK=unwanted"), "process is gone")


def test_agent_program_answers_in_file(tmp_path: Path) -> None:
    source = (
        'import os, pathlib; pathlib.Path(\'answer.json\').write_text(\'{"text": "4", "rewards": {"a": 1}}\'); print(\'x\')'
    )
    report = program(tmp_path, source)
    assert (report.answer, report.rewards, report.output) == ("4", {"a": 1.0}, "x\n")


def test_agent_program_failure_is_exit_code(tmp_path: Path) -> None:
    report = program(tmp_path, "import sys; sys.exit('lost')")
    assert (report.exit_code, report.error_class, report.output) == (1, "exit", "lost\n")
    assert report.error == "it ended with exit code 1: lost"


def test_failed_program_error_quotes_the_last_lines_of_output(tmp_path: Path) -> None:
    report = program(tmp_path, "print('one\\n' * 9, '\\x1b[31mkey\\x1b[0m and\\x07', flush=True); 1 / 0", keys=["key"])
    first, *more = report.error.splitlines()
    assert first == "it ended with exit code 1: ZeroDivisionError: division by zero"
    assert (more[0], more[-1], len(more)) == ("The last lines of its output:", "ZeroDivisionError: division by zero", 6)
    assert "[the attempt's key] and\ufffd" in report.output


def test_limit_error_ends_before_the_output(tmp_path: Path) -> None:
    report = program(tmp_path, "print('symlink OK', flush=True); import time; time.sleep(60)", timeout_seconds=2.0)
    reason = "it ran for more than 2 s (agent.timeout_seconds)."
    assert report.error.splitlines() == [reason, "The last lines of its output:", "symlink OK"]


def test_exited_function_error_quotes_the_last_lines_of_output() -> None:
    report = ran("exits")
    assert (report.exit_code, report.error) == (3, "its process ended before it returned: no license")


@pytest.mark.parametrize(
    "source",
    [
        "open('answer.json', 'w').write('[' * 100000)",
        "open('answer.json', 'w').write('x' * 2000000)",
        "import os; os.symlink('/etc/passwd', 'answer.json')",
        "import os; os.mkfifo('answer.json')",
        "open('answer.json', 'w').write('{\"text\": 7}')",
        "open('answer.json', 'wb').write(b'\\xff\\xfe{')",
    ],
)
def test_agent_program_unreadable_answer_is_error(tmp_path: Path, source: str) -> None:
    report = program(tmp_path, source)
    assert (report.answer, report.rewards) == (None, None)
    assert report.error_class in ("answer", "")


def test_agent_program_missing_is_error(tmp_path: Path) -> None:
    wanted = {"folder": str(tmp_path), "files": str(tmp_path), "answer_file": str(tmp_path / "answer.json")}
    report = processes.run(order(command=["/nowhere/agent"], **wanted), "", lambda: False)
    assert report is not None
    assert (report.exit_code, report.error_class) == (127, "exit")


def episodes_of(name: str, count: int, **changes: Any) -> list[AgentReport]:
    reports = []
    for number in range(count):
        key = {"environment": {"PATH": os.environ["PATH"], "OPENAI_API_KEY": f"key-{number}"}}
        llm = {"llm": {"base_url": "http://127.0.0.1:1/v1", "api_key": f"key-{number}", "model": "m"}}
        reports.append(ran(name, **{**key, **llm, **changes}))
    return reports


def test_agent_has_a_new_process_for_each_episode() -> None:
    assert [report.rewards for report in episodes_of("counts", 3)] == [{"episodes": 1.0, "own key": 1.0}] * 3


def test_reused_agent_keeps_its_process_and_gets_new_keys() -> None:
    reports = episodes_of("counts", 3, reuse=True)
    assert [report.rewards for report in reports] == [{"episodes": float(n), "own key": 1.0} for n in (1, 2, 3)]
    assert [report.output for report in reports] == ["episode 1\n", "episode 2\n", "episode 3\n"]
    assert ran("counts").rewards == {"episodes": 1.0, "own key": 1.0}  # a run without reuse does not get that process


def test_reused_agent_that_raises_gets_a_new_process() -> None:
    reports = episodes_of("counts_then_raises", 4, reuse=True)
    assert [report.error_class for report in reports] == ["", "", "ValueError", ""]
    assert reports[3].rewards == {"episodes": 1.0, "own key": 1.0}


def test_reused_agent_that_died_gets_a_new_process() -> None:
    for _ in range(2):
        assert ran("counts_then_dies", reuse=True).rewards == {"episodes": 1.0, "own key": 1.0}
        time.sleep(0.3)


def test_reused_agent_over_time_is_ended_with_its_process() -> None:
    assert ran("sleeps", reuse=True, timeout_seconds=0.3).error_class == "timeout"


def test_agent_with_two_results_is_error() -> None:
    report = ran("answers_twice")
    assert report.error_class == "answer"
    assert "it has two results" in report.error


def test_reused_agent_that_sent_more_gets_a_new_process() -> None:
    pids = set()
    for _ in range(3):
        pids.add(int(ran("answers_twice", reuse=True).output))
        time.sleep(0.3)
    assert len(pids) == 3


def test_agents_do_not_outlive_worker(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        servers._places.clear()  # the parent's, whose sockets are not this process's to use
        try:
            processes.run(
                order(environment={"PATH": os.environ["PATH"], "MARK": "orphan"}),
                f"{MODULE}:program_that_sleeps",
                lambda: False,
            )
        finally:
            os._exit(0)
    wait_until(lambda: bool(_marked("MARK=orphan")), "the agent runs")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(lambda: not _marked("MARK=orphan"), "process is gone")


def _marked(mark: str) -> list[str]:
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if mark in _text(path)]


def _sleepers() -> list[str]:
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if "os.setsid(); time.sleep(600)" in _text(path)]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
