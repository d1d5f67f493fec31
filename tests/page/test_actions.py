"""What a page with --actions does: commands in processes of their own, made of numbers and words."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agentrl.workers.page import action_routes as actions
from agentrl.workers.page.action_routes import Action, make_words
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.service import application
from agentrl.workflow.errors import ConfigError, NotFoundError
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import label_rows
from tests.support.played_runs import claim_training, play, start, submission, update_of, values


def store(database: Database) -> ReadOnlyStore:
    return ReadOnlyStore(Settings(database_url=database.url.render_as_string(hide_password=False)))


@pytest.fixture
def trained(database: Database) -> Database:
    """A run of one iteration that is trained."""
    for group, reward in zip(start(database, submission()), (1.0, 0.25), strict=True):
        ended = play(database, group, reward)
    assert ended.iteration is not None
    work = claim_training(database, ended.iteration)
    train_commits.commit_update(database, work, update_of(work), 3)
    return database


def post(app: Any, *asked: tuple[str, dict[str, Any]]) -> list[tuple[int, Any]]:
    """The answers to actions that are asked for at once."""

    async def ask() -> list[httpx2.Response]:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:7788", timeout=60) as client:
            return await asyncio.gather(*(client.post(f"/api/actions/{kind}", json=body) for kind, body in asked))

    return [(each.status_code, each.json()) for each in asyncio.run(ask())]


def scripted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Another program takes the place of `agentrl`."""
    monkeypatch.setattr(actions, "COMMAND", (sys.executable, "-c", code))


def test_actions_disabled_name_the_command_to_type(trained: Database) -> None:
    ((status, said),) = post(application(store(trained)), ("tag", {"run": 1, "text": "good"}))
    assert (status, said["error"]) == (403, "This page is read-only.")
    assert "--actions" in said["hint"]
    assert label_rows.list_tags(trained, "1") == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_actions_write_tags_and_notes_by_command(trained: Database) -> None:
    app = application(store(trained), actions=True)
    answers = post(app, ("tag", {"run": 1, "text": "-good"}), ("note", {"run": 1, "text": "-- why\n\0; rm -rf /"}))
    assert [status for status, _ in answers] == [200, 200]
    assert [said["exit_code"] for _, said in answers] == [0, 0], answers
    assert label_rows.list_tags(trained, "1") == ["-good"]
    assert label_rows.list_notes(trained, "1")[0]["text"] == "-- why\n\ufffd; rm -rf /"
    ((status, said),) = post(app, ("untag", {"run": 1, "text": "-good"}))
    assert (status, said["exit_code"], said["command"]) == (200, 0, "agentrl tag --remove=-good -- first")
    assert label_rows.list_tags(trained, "1") == []


def test_actions_pass_refusal_of_command_on(trained: Database) -> None:
    ((status, said),) = post(application(store(trained), actions=True), ("tag", {"run": 1, "text": "x" * 1000}))
    assert (status, said["timed_out"]) == (200, False)
    assert said["exit_code"] != 0
    assert "is not a valid tag" in said["output"]


@pytest.mark.slow
def test_actions_prefer_run_number_to_equal_name(trained: Database) -> None:
    planning.submit(trained, submission("1"))
    app = application(store(trained), actions=True)
    ((status, said), (unknown, _)) = post(app, ("tag", {"run": 1, "text": "good"}), ("note", {"run": 99, "text": "good"}))
    assert (status, said["exit_code"], unknown) == (200, 0, 404)
    assert (label_rows.list_tags(trained, "first"), label_rows.list_tags(trained, "1")) == (["good"], [])


def test_actions_run_the_command_shown_with_chosen_values(trained: Database) -> None:
    episode = values(trained, "SELECT min(id) FROM episodes")[0]
    of, shown = store(trained), {"episode": episode}
    assert make_words(of, "verify", Action(**shown)) == ["replay", str(episode), "--verify", "all"]
    assert make_words(of, "fork", Action(**shown))[:3] == ["fork", str(episode), "--step"]
    assert make_words(of, "fork", Action(**shown, step=0, n=3)) == ["fork", str(episode), "--step", "0", "-n", "3"]
    what = ["whatif", "first", "--iteration", "1", "--algorithm"]
    assert make_words(of, "whatif", Action(**shown)) == [*what, "rloo"]
    assert make_words(of, "whatif", Action(**shown, algorithm="-x; ls")) == [*what, "-x; ls"]
    rewards = Action(**shown, reward=["exact", "-b=2"])
    assert make_words(of, "rescore", rewards) == ["rescore", "first", "--reward=exact", "--reward=-b=2"]
    with pytest.raises(ConfigError, match="needs a reward"):
        make_words(of, "rescore", Action(**shown))
    with pytest.raises(NotFoundError):
        make_words(of, "verify", Action(episode=999))
    for kind in ("tag", "note", "untag", "verify", "fork"):
        with pytest.raises(ConfigError):
            make_words(of, kind, Action())


def test_actions_refuse_other_kinds_and_values(trained: Database) -> None:
    app = application(store(trained), actions=True)
    for kind, body in (
        ("rm", {"run": 1}),
        ("tag", {"run": "x; ls", "text": "a"}),
        ("tag", {"run": 2**70, "text": "a"}),
        ("tag", {"run": 1, "text": ["a"]}),
        ("note", {"run": 1, "text": "x" * 20_001}),
        ("fork", {"episode": 1, "n": 10**6}),
        ("verify", {"episode": -1}),
    ):
        ((status, _),) = post(app, (kind, body))
        assert status == 422, (kind, body)


def test_actions_end_slow_command_with_its_children(trained: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    late = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    scripted(
        monkeypatch, f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {late!r}])"
    )
    monkeypatch.setattr(actions, "SECONDS", {"tag": 0.5})
    began = time.monotonic()
    ((status, said),) = post(application(store(trained), actions=True), ("tag", {"run": 1, "text": "a"}))
    assert time.monotonic() - began < 2
    assert (status, said["timed_out"], said["output"]) == (200, True, "begun\n")
    assert said["exit_code"] != 0
    time.sleep(2)
    assert not mark.exists()


def test_actions_end_with_their_service(trained: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "import time; time.sleep(60)")
    app, began = application(store(trained), actions=True), time.monotonic()
    app.state.is_ending = lambda: time.monotonic() - began > 0.5
    ((_, said),) = post(app, ("tag", {"run": 1, "text": "a"}))
    assert said["timed_out"]
    assert time.monotonic() - began < 5


def test_actions_run_one_of_a_kind_at_a_time(trained: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "import time; time.sleep(1)")
    asked = [("tag", {"run": 1, "text": "a"}), ("tag", {"run": 1, "text": "b"}), ("note", {"run": 1, "text": "c"})]
    app = application(store(trained), actions=True)
    answers = post(app, *asked)
    assert sorted(status for status, _ in answers) == [200, 200, 409]
    assert answers[2][0] == 200
    assert post(app, asked[0])[0][0] == 200  # and again, once it is over


def test_actions_clean_output_and_keep_its_end(trained: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "print('x' * 10**6); print('\\x1b[31mred\\x1b[0m \\x07 end'); raise SystemExit(3)")
    ((_, said),) = post(application(store(trained), actions=True), ("tag", {"run": 1, "text": "a"}))
    assert said["exit_code"] == 3
    assert len(said["output"]) <= actions.MAX_OUTPUT + 3
    assert said["output"].startswith("...x")
    assert said["output"].endswith("red \ufffd end\n")


def test_actions_refuse_body_that_is_not_text(trained: Database) -> None:
    app = application(store(trained), actions=True)

    async def ask(body: bytes) -> int:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:7788") as client:
            headers = {"Content-Type": "application/json"}
            return (await client.post("/api/actions/note", content=body, headers=headers)).status_code

    for body in (b"", b"{", b"[]", b"\xff", b'{"run": 1, "text": "\\ud800"}', b'{"run": NaN}', b"[" * 10_000):
        assert asyncio.run(ask(body)) in (400, 422), body
