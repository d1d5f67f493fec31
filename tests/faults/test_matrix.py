"""The fault matrix: what may happen to a run from outside, and the tests that show that it is survived.

The third column selects tests with `pytest -k`; `test_faults_*` inject a fault at every point.

| row | fault | tests |
|---|---|---|
| 1 | kill -9 of a rollout worker | test_faults_*; rollout_worker_kill; test_resume |
| 2 | kill -9 of a trainer | test_faults_*; train_claim_by_second_trainer |
| 3 | kill -9 of a tools worker | test_faults_*; call_with_effects_starts_once |
| 4 | SIGTERM | matrix_sigterm; worker_stop_returns_claims |
| 5 | Redis lost with all it knew | matrix_redis_death |
| 6 | Redis hangs or refuses | matrix_redis_hang; submit_without_broker; result_store_failure |
| 7 | delivered twice, visibility timeout | matrix_duplicate_messages; rollout_message_for |
| 8 | Postgres restarts at once | matrix_postgres_restart; database_reconnects |
| 9 | no connections, locks | database_thread; postgres_without_free_connection; postgres_lock |
| 10 | the database's disk is full | matrix_full_database_disk; full_rollback_by_sqlite |
| 11 | the checkpoints' disk is full | matrix_full_checkpoint_disk; sealed_folder_on_full_disk |
| 12 | a checkpoint cut short | test_mending; sealed_folder_names_truncated; cache_refuses_broken |
| 13 | one flipped bit | test_mending; sealed_folder_names_altered; policy_refuses_flipped_bit |
| 15 | NaN | matrix_nan; update_with_nan; hook_reward_that_is_none |
| 17 | a tool hangs | matrix_hanging_tool; calls_that_never_end |
| 18 | malformed tool calls | malformed_call; call_with_any_json; parse_text; test_agent |
| 22 | 20 submits of one name | matrix_twenty_submits; submit_of_one_name |
| 23 | two trainers | matrix_trainer_after_its_lease; test_faults_* (`sleep`); train_claim_by_second_trainer |
| 24 | the clock jumps | worker_clock; state_machine |
| 31 | pickle on the broker | matrix_forged_messages |
| 32 | a forged job | matrix_forged_messages |
| 33 | a malicious checkpoint | malicious_checkpoint; pickled_weights; policy_refuses_broken_weights |
| 35 | out-of-memory killer | killed_for_memory; count_kills; a kill itself is as in rows 1 and 2 |
| 36 | GPU out of memory | matrix_full_gpu; update_in_smaller_microbatches; engine_without_memory |
| 37 | another model or tokenizer | matrix_wrong_model; base_hash |

Rows 16, 19 to 21, 25 to 30 and 39 belong to the rooms that they happen in.
"""

import pickle
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from safetensors.torch import load_file, save_file

from agentrl.workers.stack import broker
from agentrl.workers.stack.celery_app import QUEUES, make_app
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.store import planning
from bench.faults import world
from bench.faults.cluster import ROLES, Crew, fill, small_disk
from bench.faults.cluster import crew as crew
from bench.faults.fault_plugins import Harmful
from bench.faults.fork_server import Nursery
from tests.support.gate import arrivals, at_gate, open_gate
from tests.support.own_postgres import own_postgres

pytestmark = pytest.mark.slow

HELD = "SELECT count(*) FROM groups WHERE status = 'running' AND worker <> ''"


def held_at_its_first_calls(crew: Crew, **changes: Any) -> None:
    """A run whose rollouts are at work and stay so until the tools' gate is open."""
    crew.submit(env="bench.faults.fault_plugins:held", **changes)
    asked = "SELECT count(*) FROM tool_calls WHERE result IS NULL"

    def at_work() -> bool:
        """No message is on its way: a tools worker has each of the calls."""
        return crew.count(HELD) == world.GROUPS and 0 < crew.count(asked) <= arrivals(crew.home, "tool")

    crew.wait(at_work, "the rollouts at work")


# --- signals, Redis ---------------------------------------------------------------------------------------------------------


def test_matrix_sigterm_hands_back_or_finishes_and_exits_0(crew: Crew) -> None:
    busy = {
        "rollout": HELD,
        "tools": "SELECT count(*) FROM tool_calls WHERE result IS NULL",
        "train": "SELECT count(*) FROM iterations WHERE status = 'running' AND worker <> ''",
        "control": "SELECT count(*) FROM service_leases",
    }
    workers = crew.fork_all()
    crew.submit(env="bench.faults.fault_plugins:held", algorithm__name="tests.support.gate:held_update")
    for role in ("control", "rollout", "tools", "train"):
        if role == "train":
            open_gate(crew.home, "tool")
        crew.wait(lambda role=role: crew.count(busy[role]) > 0, f"{role} at work")  # type: ignore[misc]
        workers[role].kill(signal.SIGTERM)
        assert workers[role].end() == 0, crew.logs()
        crew.fork(role)
    open_gate(crew.home, "update")
    crew.assert_whole()
    lost = "SELECT max(losses) FROM (SELECT losses FROM groups UNION SELECT losses FROM iterations) x"
    assert crew.count(lost) == 0


def test_matrix_redis_death_costs_nothing(crew: Crew) -> None:
    crew.fork_all()
    held_at_its_first_calls(crew)
    crew.redis.kill()
    crew.redis.wait()
    open_gate(crew.home, "tool")
    crew.wait(lambda: crew.count(HELD) == 0, "the rollouts given up")
    crew.redis = crew.start_redis()
    crew.assert_whole()
    assert crew.count("SELECT sum(losses) FROM groups") == 0


def test_matrix_redis_hang_is_one_sentence_and_workers_recover(crew: Crew) -> None:
    crew.fork_all()
    held_at_its_first_calls(crew)
    crew.redis.send_signal(signal.SIGSTOP)
    said = crew.refused("resume", world.RUN, code=4)
    assert "does not answer: Timeout reading from" in said
    assert "Check AGENTRL_BROKER_URL" in said
    crew.redis.send_signal(signal.SIGCONT)
    open_gate(crew.home, "tool")
    crew.assert_whole()


def test_matrix_duplicate_messages_change_nothing(crew: Crew) -> None:
    """The control loop, which sends again too, has long leases to wait for."""
    patient = {"AGENTRL_LEASE_SECONDS": "60"}
    for role in ROLES:
        crew.start("bench.faults.fault_plugins:impatient", [role], name=role, **patient)
    crew.submit(env="bench.faults.fault_plugins:again")
    crew.assert_whole()
    claims = (crew.folder / "hits" / "claim_group.before").stat().st_size
    assert claims > world.ITERATIONS * world.GROUPS, "no message came again"
    assert crew.count("SELECT max(attempt) FROM groups") == 1


# --- Postgres, disks --------------------------------------------------------------------------------------------------------


def test_matrix_postgres_restart_costs_nothing(short_folder: Path, forks: Nursery, world_model: Path) -> None:
    with own_postgres(connections=100) as server, server.database() as url:
        crew = Crew(short_folder, forks, world_model, None, AGENTRL_DATABASE_URL=url)
        try:
            workers = crew.fork_all()
            held_at_its_first_calls(crew)
            server.restart()
            open_gate(crew.home, "tool")
            crew.wait_for()
            assert [worker.exit_code() for worker in workers.values()] == [None] * 4
            planned = world.ITERATIONS * world.GROUPS * world.EPISODES
            assert crew.count("SELECT count(*) FROM episodes WHERE status = 'done'") == planned
            assert crew.count("SELECT count(*) FROM consumptions") == planned
            assert crew.count("SELECT count(*) FROM policies WHERE kind = 'trained'") == world.ITERATIONS
            assert crew.count("SELECT sum(losses) FROM groups") == 0
            crew.stop()
        finally:
            crew.close()


def test_matrix_full_database_disk_delays_run(crew: Crew, tmp_path: Path) -> None:
    with small_disk(crew.folder / "disk", "3m") as disk:
        shutil.move(crew.home / "agentrl.db", disk / "agentrl.db")
        (crew.home / "agentrl.db").symlink_to(disk / "agentrl.db")
        workers = crew.fork_all()
        crew.submit(hooks=("bench.faults.world:Chance", "tests.support.gate:AtSecondTurn"))
        crew.wait(lambda: at_gate(crew.home, "rollout"), "the first results")
        ballast = fill(disk)
        kept = crew.rows("SELECT step_id, sampled_ids FROM step_tokens")
        with pytest.raises(ServiceError, match=r"The disk of the database '.*agentrl\.db' is full"):
            crew.database.write(lambda tx: planning.log(tx, None, "x" * 32, detail="x" * 10**7))
        open_gate(crew.home, "rollout")
        crew.wait(lambda: "is full" in (crew.folder / "rollout.log").read_text(), "a rollout without room")
        assert [worker.exit_code() for worker in workers.values()] == [None] * 4
        ballast.unlink()
        crew.assert_whole()
        assert kept <= crew.rows("SELECT step_id, sampled_ids FROM step_tokens")
        crew.database.close()


def test_matrix_full_checkpoint_disk_fails_run_resumably(crew: Crew) -> None:
    with small_disk(crew.home / "runs", "2m") as disk:  # room for one checkpoint
        crew.fork_all()
        crew.submit()
        crew.wait_for(status="failed")
        assert "No space left on device" in crew.reason()
        assert "Free disk space, then `agentrl resume`." in crew.reason()
        (only,) = [folder for folder in (disk / world.RUN).iterdir() if not folder.is_symlink()]
        sealed_folder.verify(only)
        assert only.name.startswith("v00001.")
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        planning.resume(crew.database, world.RUN)
        crew.assert_whole()


# --- numbers, memory, models ------------------------------------------------------------------------------------------------


def test_matrix_nan_updates_are_counted_until_run_fails(crew: Crew) -> None:
    crew.fork_all()
    crew.submit(algorithm__name="bench.faults.fault_plugins:nan_loss", update__max_bad_updates=world.ITERATIONS)
    crew.wait_for(status="failed")
    assert crew.reason() == "3 updates in a row were skipped: the loss is nan and the gradient's norm is nan"
    assert crew.count("SELECT count(*) FROM policies WHERE kind = 'alias'") == world.ITERATIONS
    assert crew.count("SELECT count(*) FROM iterations WHERE skipped <> ''") == world.ITERATIONS
    planning.resume(crew.database, world.RUN)
    assert crew.ask("SELECT status FROM runs") == "done"  # nothing is left to do


def test_matrix_nan_model_stops_run_without_zero_reward(crew: Crew, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(crew.model, tmp_path / "nan"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    crew.fork_all()
    crew.submit(model__path=str(broken))
    crew.wait_for(status="failed")
    assert crew.reason() == "The model returned NaN instead of logits."
    assert crew.count("SELECT count(*) FROM episodes WHERE reward IS NOT NULL") == 0


def test_matrix_hanging_tool_is_reported_and_blocks_no_stop(crew: Crew) -> None:
    crew.fork_all()
    crew.submit(env="bench.faults.fault_plugins:hanging")
    crew.assert_whole()
    heard = crew.rows("SELECT DISTINCT result, error_class FROM tool_calls WHERE tool = 'plus'")
    assert ("plus took longer than 0.5 s", "timeout") in heard
    assert {error for _, error in heard} <= {"timeout", "tool_error"}  # the model may forget an argument


def test_matrix_trainer_after_its_lease_writes_nothing(crew: Crew) -> None:
    asleep = {"AGENTRL_FAULT": "update.after:1:sleep", "AGENTRL_FAULT_SLEEP": "600"}
    for role in ("rollout", "tools", "control"):
        crew.fork(role)
    for number in "12":
        crew.start("bench.faults.fork_server:serve", ["train"], name=f"train{number}", **asleep)
    crew.submit()
    crew.wait(lambda: crew.asleep() is not None, "a trainer falling asleep")
    zombie = crew.asleep()
    assert zombie
    crew.wait(lambda: crew.count("SELECT max(train_token) FROM iterations") == 2, "the other one taking over")
    crew.wake(zombie)
    # It notices at its next heartbeat, or at its commit.
    crew.wait(lambda: "was taken over" in crew.logs() or "is out of date" in crew.logs(), "the zombie's end")
    crew.assert_whole()
    assert crew.rows("SELECT number, losses, train_token FROM iterations") == {(0, 1, 2), (1, 0, 1), (2, 0, 1)}


def test_matrix_full_gpu_shrinks_microbatches_or_advises(crew: Crew) -> None:
    crew.fork_all()
    crew.submit(algorithm__name="bench.faults.fault_plugins:full_loss", name="nothing")
    crew.wait_for("nothing", "failed")
    assert "InfraError: Memory does not suffice for one row of" in crew.reason()
    assert "Set update.gradient_checkpointing=true or model.load_in_4bit=true," in crew.reason()
    assert crew.count("SELECT count(*) FROM events WHERE kind = 'update_failed'") == 3
    crew.submit(algorithm__name="bench.faults.fault_plugins:greedy_loss", name="little")
    crew.wait_for("little")
    taught = crew.count("SELECT count(*) FROM consumptions WHERE advantage <> 0")  # an episode here is a row
    assert len((crew.home / "rows").read_text()) == taught > 0


def test_matrix_wrong_model_is_refused_until_it_is_back(crew: Crew, tmp_path: Path) -> None:
    mine, other = Path(shutil.copytree(crew.model, tmp_path / "mine")), tmp_path / "other"
    shutil.copytree(mine, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    crew.fork_all()
    held_at_its_first_calls(crew, model__path=str(mine))  # sampled with the right model; no trainer has read it yet
    mine.rename(tmp_path / "kept")
    other.rename(mine)
    open_gate(crew.home, "tool")
    crew.wait_for(status="failed")
    assert "Copy the same model here" in crew.reason()
    mine.rename(other)
    (tmp_path / "kept").rename(mine)
    planning.resume(crew.database, world.RUN)
    crew.assert_whole()


# --- at the door ------------------------------------------------------------------------------------------------------------


def test_matrix_twenty_submits_of_one_name_make_one_run(crew: Crew) -> None:
    asked = [
        crew.start("bench.faults.fault_plugins:submit", str(crew.model), {}, name=f"submit{number}") for number in range(20)
    ]
    assert [child.end() for child in asked] == [0] * 20, crew.logs()
    assert crew.rows("SELECT name FROM runs") == {(world.RUN,)}
    assert crew.count("SELECT count(*) FROM iterations") == 1
    assert crew.count("SELECT count(*) FROM episodes") == world.GROUPS * world.EPISODES


FORGED = (
    ("os.system", ["true"]),
    ("celery.backend_cleanup", []),
    ("agentrl.calls", []),
    ("agentrl.calls", [[], "agentrl.replies"]),
    ("agentrl.calls", [["1; DROP TABLE runs"], "agentrl.replies"]),
    ("agentrl.calls", [[2**80], "agentrl.replies"]),
    ("agentrl.calls", [[1] * 9, "agentrl.replies"]),
    ("agentrl.calls", [{"id": [[[1]]]}, {"$ne": 1}]),
    ("agentrl.calls", [[7], "agentrl.tools"]),
    ("agentrl.rollout", ["abc"]),
    ("agentrl.rollout", [[-1, 2**63]]),
    ("agentrl.rollout", [[[[]]]]),
    ("agentrl.rollout", [[999_999]]),
    ("agentrl.train", [None]),
    ("agentrl.train", [True]),
    ("agentrl.train", [1e300]),
    ("agentrl.train", [999_999]),
)


def forge(crew: Crew, fired: Path) -> None:
    """Pickles, no JSON, no message at all, jobs that do not exist, arguments that do not fit; into every queue."""
    app = make_app(crew.settings)
    app.conf.task_routes = ()
    pickled = pickle.dumps(([Harmful(fired)], {}, {}))
    with app.connection_for_write() as connection, broker.connect_redis(crew.settings) as redis:
        producer = app.amqp.Producer(connection)
        for queue, job in zip(QUEUES, ("agentrl.rollout", "agentrl.calls", "agentrl.train"), strict=True):
            headers = {"task": job, "id": str(uuid4()), "lang": "py"}
            for content_type, body in (("application/x-python-serialize", pickled), ("text/plain", b"\xff")):
                kind = {"content_type": content_type, "content_encoding": "binary", "headers": headers}
                producer.publish(body, exchange="", routing_key=queue, **kind)
            for name, arguments in FORGED:
                app.send_task(name, args=arguments, queue=queue, connection=connection, ignore_result=True)
            redis.lpush(f"agentrl.{queue}", b"no message at all", b"5", b"{}", b"[]", b"null", b"\xff")


def test_matrix_forged_messages_do_nothing(crew: Crew) -> None:
    workers, fired = crew.fork_all(), crew.folder / "fired"
    forge(crew, fired)
    crew.wait(lambda: not crew.waiting(), "empty queues")
    assert [worker.exit_code() for worker in workers.values()] == [None] * 4
    assert crew.rows("SELECT kind FROM events") == crew.rows("SELECT name FROM runs") == set()
    crew.submit()
    crew.assert_whole()
    assert not fired.exists()
    said = {role: (crew.folder / f"{role}.log").read_text() for role in QUEUES}
    for role in QUEUES:
        assert "Refusing to deserialize" in said[role]
        assert "Received unregistered task" in said[role]
        assert "row id must be a number" in said[role]
        assert "sent an invalid message, or it could not be accepted" in said[role]
