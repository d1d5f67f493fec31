"""`agentrl.Trainer`: what a person types in Python becomes the run that the command line would make."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import agentrl
from agentrl.api import command_process
from agentrl.api.store import StoreLocation
from agentrl.workflow import errors
from agentrl.workflow.config import build
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.errors import AgentRLError, ConfigError, DatasetError, NotFoundError, ServiceError, StateError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.settings import settings
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import start, submission
from tests.support.small_models import tiny_random

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(4)]


def right(episode: agentrl.Episode) -> float:
    """Whether it is."""
    return float(episode.final_answer == episode.task.reference)


def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> str:
    """Answers."""
    return "1"


class Counts(agentrl.Hook):
    """A hook that holds a number."""

    def __init__(self, most: int) -> None:
        self.most = most


class Guess(agentrl.Env):
    """An env of one's own."""

    def final_reward(self, episode: agentrl.Episode) -> Mapping[str, float]:
        """For any answer."""
        return {"guessed": float(bool(episode.final_answer))}


class Needy(agentrl.Env):
    """An env that cannot be made without arguments."""

    def __init__(self, least: int) -> None:
        super().__init__(system_prompt=str(least))


guess = Guess(rewards={"format": 0.5})


@pytest.fixture(autouse=True)
def _home(home: Path) -> Iterator[None]:
    yield
    settings.cache_clear()


def test_trainer_options_equal_config_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 3\nrollout: {group_size: 2, max_new_tokens: 9}\n")
    given: dict[str, Any] = {"group_size": 4, "update": {"epochs": 2}, "hooks": [Counts]}
    trainer = agentrl.Trainer("grpo", agent=solve, rewards={right: 0.5, "format": 2.0}, config=tmp_path / "run.yaml", **given)
    keys = trainer.config(train_dataset=ROWS, val_dataset="arithmetic", learning_rate=0.01)
    made = build(keys)
    assert (made.seed, made.rollout.group_size, made.rollout.max_new_tokens, made.update.epochs) == (3, 4, 9, 2)
    assert made.agent is not None
    assert (made.agent.name, made.hooks) == ("tests.api.test_trainer:solve", ("tests.api.test_trainer:Counts",))
    assert made.rewards == {"tests.api.test_trainer:right": 0.5, "format": 2.0}
    assert made.env == "plain"
    named = agentrl.Trainer(rewards=[right], env="arithmetic").config(train_dataset=ROWS)
    assert named["rewards"] == {"tests.api.test_trainer:right": 1.0}
    assert Experiment(build(named)).weights == {"numeric_answer": 0.0, "tests.api.test_trainer:right": 1.0}
    assert (made.update.learning_rate, made.eval.dataset, made.eval.every, made.eval.split) == (0.01, "arithmetic", 10, "test")
    assert [task.reference for task in load_tasks(made.dataset).tasks] == ["1", "2", "3", "4"]


def test_trainer_agent_mapping_is_its_section() -> None:
    made = build(agentrl.Trainer(agent={"timeout_seconds": 5, "max_calls": 2}).config(solve, ROWS))
    assert made.agent is not None
    assert (made.agent.name, made.agent.timeout_seconds, made.agent.max_calls) == ("tests.api.test_trainer:solve", 5, 2)
    with pytest.raises(ConfigError, match=r"agent\.seconds"):
        build(agentrl.Trainer(agent={"seconds": 5}).config(solve, ROWS))


def test_trainer_scores_unanswered_rows_by_agent_result() -> None:
    unanswered = [{"question": row["question"]} for row in ROWS]
    for trainer, rows, env in (
        (agentrl.Trainer(agent=solve), unanswered, "plain"),
        (agentrl.Trainer(agent=solve), [*ROWS, *unanswered], None),
        (agentrl.Trainer(agent=solve, env="arithmetic"), unanswered, "arithmetic"),
        (agentrl.Trainer(), unanswered, None),
    ):
        assert build(trainer.config(train_dataset=rows)).env == env


def test_trainer_rows_of_any_kind_are_written_once() -> None:
    import datasets
    import pandas

    task = agentrl.Task("t/1", (agentrl.Message("user", "Say it."),), "", {"level": 1})
    for rows in (ROWS, tuple(ROWS), iter(ROWS), pandas.DataFrame(ROWS), datasets.Dataset.from_list(ROWS)):
        keys = agentrl.Trainer().config(train_dataset=rows)
        assert len(load_tasks(build(keys).dataset).tasks) == len(ROWS)
    (file,) = (settings().root / "datasets").iterdir()
    assert str(file) == keys["dataset.name"]
    (read,) = load_tasks(build(agentrl.Trainer().config(train_dataset=[task])).dataset).tasks
    assert (read.messages, read.reference, read.metadata) == (task.messages, "", {"level": 1})


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("arithmetic", "arithmetic"),
        ("tests.api.test_trainer:guess", "tests.api.test_trainer:guess"),
        (guess, "tests.api.test_trainer:guess"),
        (Guess, "agentrl_code_"),
        (Guess(system_prompt="Guess."), "agentrl_code_"),
    ],
)
def test_trainer_agent_that_is_env_means_builtin_loop(given: Any, path: str) -> None:
    for trainer, agent in (
        (agentrl.Trainer(), given),
        (agentrl.Trainer(agent=given), None),
        (agentrl.Trainer(env=given), None),
    ):
        made = build(trainer.config(agent=agent, train_dataset=ROWS))
        assert made.agent is None
        assert str(made.env).startswith(path)
        found = Experiment(made).env
        assert type(found).__name__ == (type(guess).__name__ if given != "arithmetic" else "Env")
        assert found.system_prompt == ("Guess." if getattr(given, "system_prompt", "") == "Guess." else "")


def test_trainer_refuses_invalid_or_second_env() -> None:
    with pytest.raises(ConfigError, match="both pass an env"):
        agentrl.Trainer(env="math").config(agent=guess)
    with pytest.raises(ConfigError, match="'Needy' without arguments: TypeError"):
        agentrl.Trainer().config(agent=Needy)
    with pytest.raises(ConfigError, match=r"No env is called 'arithmetics'\. Did you mean 'arithmetic'"):
        agentrl.Trainer(agent="arithmetics").config()
    assert agentrl.Trainer(agent="no_module:solve").config()["agent.name"] == "no_module:solve"


REFUSED: dict[str, tuple[dict[str, Any], type[agentrl.AgentRLError], str]] = {
    "an option that does not exist": ({"group_sise": 2}, ConfigError, "no option 'group_sise'. Did you mean 'group_size'"),
    "an option of two sections": (
        {"warmup": 2},
        ConfigError,
        "'warmup' is ambiguous: update.warmup, critic.warmup. Write its full name",
    ),
    "a strategy": ({"strategy": "threds"}, ConfigError, "Unknown strategy 'threds'"),
    "a cluster without a broker": ({"strategy": "cluster"}, ConfigError, "A cluster needs a broker. Set AGENTRL_BROKER_URL"),
    "runners": ({"n_runners": 0}, ConfigError, "n_runners must be an integer"),
    "a store": ({"store": 7}, ConfigError, "not 7"),
    "a store in memory": ({"store": ":memory:"}, ConfigError, "agentrl.InMemoryStore"),
    "a blank store": ({"store": "  "}, ConfigError, "not '  '"),
    "an option of a section": (
        {"rollout": {"group_sise": 2}},
        ConfigError,
        "'rollout.group_sise'. Did you mean 'rollout.group_size'",
    ),
    "a section": ({"rollout": 3}, ConfigError, "'rollout' is a section of options, not 3. Write rollout={"),
    "an object for a value": ({"group_size": object()}, ConfigError, "The option 'rollout.group_size' cannot be <object"),
    "a config": (
        {"config": {"seed": 1}},
        ConfigError,
        "config= must be the path of a YAML file, not a dict. Pass keys as options",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_trainer_unknown_option_gets_nearest_one(name: str) -> None:
    options, kind, said = REFUSED[name]
    with pytest.raises(kind) as caught:
        agentrl.Trainer(**options)
    assert said in str(caught.value)
    assert "Traceback" not in "".join(caught.value._render_traceback_())


NO_ROWS: dict[str, tuple[Any, str]] = {
    "nothing": ([], "is empty"),
    "a number": (7, "not 'int'"),
    "splits": ({"train": ROWS, "test": ROWS}, "of which it has several: train, test"),
    "a text for a row": (["What is 2?"], "Row 0 is a str"),
    "NaN": ([{"question": "What?", "answer": float("nan")}], "Row 0 has no value for 'answer': it is nan"),
    "NaN within": ([{"question": "What?", "more": [float("nan")]}], "Row 0, 'more' cannot be written as JSON"),
    "an object": (
        [{"question": "What?", "answer": object()}],
        "Row 0, 'answer' cannot be written as JSON: JSON has no type for object",
    ),
    "half a character": ([{"question": "\ud800"}], "Row 0, 'question' cannot be written as JSON: .*surrogates"),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_trainer_invalid_rows_are_named(name: str) -> None:
    given, said = NO_ROWS[name]
    with pytest.raises(DatasetError, match=said):
        agentrl.Trainer().config(train_dataset=given)


def test_trainer_rows_that_raise_write_nothing() -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield ROWS[0]
        raise OSError("the disk is gone")

    with pytest.raises(DatasetError, match=r"raised after 1 row: OSError: the disk is gone\. Nothing was submitted"):
        agentrl.Trainer().config(train_dataset=rows())
    assert not (settings().root / "datasets").exists()


def test_trainer_data_folder_unwritable_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ServiceError, match=r"Not a directory\. Pass another store"):
        agentrl.Trainer(store=tmp_path / "file" / "runs").config(train_dataset=ROWS)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("strategy", ["threads", "processes"])
@pytest.mark.parametrize("given", [7, None, ["x"], {"a": 1}, b"x", object()])
def test_trainer_refuses_constant_as_reward_or_hook(given: Any, strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not a valid reward\. Pass a function"):
        agentrl.Trainer(rewards=[given], strategy=strategy).config(train_dataset=ROWS)
    with pytest.raises(ConfigError, match=r"is not a valid hook\. Pass a function"):
        agentrl.Trainer(hooks=[given], strategy=strategy).config(train_dataset=ROWS)


def test_trainer_takes_numpy_numbers_and_none() -> None:
    import numpy

    given: dict[str, Any] = {"group_size": numpy.int64(4), "learning_rate": numpy.float64(0.5)}
    keys = agentrl.Trainer(agentrl.GRPO, rewards=None, hooks=None, **given).config()  # type: ignore[arg-type]
    assert (keys["rollout.group_size"], keys["update.learning_rate"], keys["algorithm.name"]) == (4, 0.5, "grpo")
    assert not {"rewards", "hooks"} & keys.keys()


class Refuses(agentrl.Hook):
    """Raises before anything is sent."""

    def on_run_start(self, run: str, config: Mapping[str, object]) -> None:
        """Raises."""
        raise KeyError(run)


def test_trainer_hook_error_at_start_fails_run_resumably(tmp_path: Path) -> None:
    model, store = str(tiny_random(tmp_path / "model")), tmp_path / "runs"
    trainer = agentrl.Trainer(model=model, hooks=[Refuses()], strategy="threads", store=store, env="arithmetic", name="refused")
    with pytest.raises(
        StateError,
        match=r"refused is failed: on_run_start of the hook Refuses raised KeyError: 'refused'\. Continue without the hook",
    ):
        trainer.fit(train_dataset=ROWS)
    row = agentrl.open(store).run("refused").row
    assert (row.status, row.reason) == ("failed", "on_run_start of the hook Refuses raised KeyError: 'refused'")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_trainer_raises_refusal_of_command_and_stores_nothing(tmp_path: Path) -> None:
    model = str(tiny_random(tmp_path / "model"))
    with pytest.raises(agentrl.AgentRLError, match=r"has 1 malformed row:\n  line 1: must have one of 'question'"):
        agentrl.Trainer(model=model).fit(train_dataset=[{"text": "no message"}])
    with pytest.raises(ConfigError, match="cannot be called with an episode alone"):
        agentrl.Trainer(model=model, rewards=[solve]).fit(train_dataset=ROWS)
    with pytest.raises(NotFoundError):
        agentrl.open()


def test_trainer_error_keeps_its_class() -> None:
    several = DatasetError("rows:\n  line 1: one\n  line 2: two", "Mend them.")
    for error in (NotFoundError("There is no run 'x'.", "List them."), StateError("It is over."), several):
        said = f"agentrl: {error.message}\n" + (f"  {error.hint}\n" if error.hint else "")
        back = command_process.error_of(error.exit_code, said)
        assert (back.exit_code, back.message, back.hint) == (error.exit_code, error.message, error.hint)
    assert str(command_process.error_of(77, "")) == "The command ended with 77."


def test_every_exit_code_is_converted_to_its_error() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AgentRLError)]
    for kind in kinds:
        error = kind("It failed.", "Try again.")
        back = command_process.error_of(kind.exit_code, f"agentrl: {error.message}\n  {error.hint}\n")
        assert (back.exit_code, str(back)) == (kind.exit_code, "It failed. Try again."), kind
        if "exit_code" in vars(kind) and kind is not DatasetError:  # which shares ConfigError's code
            assert type(back) is kind


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_follow_draws_the_growing_curve_in_a_notebook(monkeypatch: pytest.MonkeyPatch, own_database: Database) -> None:
    """Once at the start, with each line, and once at the end."""
    start(own_database, submission("followed"))
    planning.stop(own_database, "followed", "cancelled", "by hand")
    run = agentrl.open(str(own_database.url)).run("followed")
    place = StoreLocation.of(agentrl.open(str(own_database.url)))
    drawn: list[object] = []
    shell, display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(shell)["get_ipython"] = lambda: SimpleNamespace(kernel=object())

    def draw(curve: object, display_id: bool) -> SimpleNamespace:
        drawn.append(curve)
        return SimpleNamespace(update=drawn.append)

    vars(display)["display"] = draw
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    command_process.follow(place, run)
    assert len(drawn) >= 3
    assert {type(curve) for curve in drawn} == {agentrl.Curve}


def test_trainer_store_may_be_folder_file_url_or_memory(tmp_path: Path) -> None:
    assert StoreLocation.of(tmp_path).settings.database == f"sqlite:///{tmp_path}/agentrl.db"
    assert StoreLocation.of(tmp_path / "runs.db").settings.database == f"sqlite:///{tmp_path}/runs.db"
    assert StoreLocation.of("sqlite:///runs.db").settings.database == f"sqlite:///{Path.cwd()}/runs.db"
    assert StoreLocation.of("postgresql://me@host/runs").settings.database == "postgresql://me@host/runs"
    assert StoreLocation.of(None).environment() == dict(os.environ)
    gone = agentrl.InMemoryStore()
    assert StoreLocation.of(gone).settings.root == gone.folder
    assert StoreLocation.of(gone).settings.models_dir.resolve() == settings().models_dir.resolve()
    gone.close()
    assert not gone.folder.exists()
    assert settings().models_dir.is_dir()


def test_trainer_attach_continues_stored_run_unchanged(own_database: Database) -> None:
    start(own_database, submission("stored"))
    trainer = agentrl.Trainer.attach("stored")
    assert trainer.run is not None
    with pytest.raises(ConfigError, match="options of a submitted run cannot change"):
        trainer.fit(train_dataset=ROWS)
    planning.stop(own_database, "stored", "cancelled", "by hand")
    with pytest.raises(StateError, match="stored was cancelled"):
        trainer.fit()
    with pytest.raises(NotFoundError):
        agentrl.Trainer.attach("no-run")


SCRIPT = """
import json
import sys
import urllib.request

import agentrl

URL = "/chat/completions"

def say(task, llm):
    body = json.dumps({"model": llm.model, "messages": task.messages}).encode()
    headers = {"Authorization": "Bearer " + llm.api_key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(llm.base_url + URL, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""

def solve(task, llm):
    return say(task, llm)

def right(episode):
    return len(episode.final_answer) / 100

class Notes(agentrl.Hook):
    def __init__(self, name):
        self.name = name
    def on_rollout_end(self, episode):
        return {self.name: 0.25}

if __name__ == "__main__":
    model, how = sys.argv[1:]
    rows = [{"question": f"What is {a} plus 1?", "answer": str(a + 1)} for a in range(4)]
    trainer = agentrl.Trainer(model=model, rewards=[right], hooks=[Notes("noted")], group_size=2, tasks_per_iteration=2,
                              max_new_tokens=8, n_runners=2, agent=solve if how == "agent" else None)
    run = trainer.fit(train_dataset=rows, val_dataset=rows[:2], epochs=1, eval_every=1)
    parts = run.episode(run.episodes(status="done").head(1)[0].id).rewards["default"]
    print(json.dumps([run.name, run.status, len(run.curve()), len(list(run.episodes())), sorted(parts), run.best.version >= 0]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("how", ["loop", "agent"])
def test_trainer_script_trains_with_own_functions_and_hooks(short_folder: Path, how: str) -> None:
    model = tiny_random(short_folder / "model")
    (short_folder / "script.py").write_text(SCRIPT)
    done = in_folder(short_folder, "script.py", str(model), how)
    lines = done.stdout.splitlines()
    name, status, iterations, episodes, parts, measured = json.loads(lines[-1])
    assert (status, iterations, episodes, measured) == ("done", 2, 8, True)
    (own,) = (part for part in parts if part.startswith("agentrl_code_"))
    assert parts == sorted([own, "noted"])
    assert any(line.startswith(f"{name}: done") for line in lines), "what watch says is printed"
    shown = in_folder(short_folder, "-P", "-m", "agentrl.cli", "replay", "--verify", "all").stdout
    assert shown.rstrip().endswith("the same")
    in_folder(short_folder, "-P", "-m", "agentrl.cli", "down")


SAME = """
import json
import sys

import agentrl

rows = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(2)]
options = {"group_size": 4, "tasks_per_iteration": 4, "max_new_tokens": 8, "numerics": "exact", "env": "arithmetic"}
trainer = agentrl.Trainer("grpo", model=sys.argv[1], rewards={"format": 1.0}, learning_rate=0.001, **options)
keys = trainer.config(train_dataset=rows, epochs=2)
run = trainer.fit(train_dataset=rows, epochs=2)
open("run.yaml", "w").write(json.dumps({key: value for key, value in keys.items() if "." not in key} | {"name": "typed"}))
print(" ".join(f"-s {key}={json.dumps(value)}" for key, value in keys.items() if "." in key))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_trainer_and_command_line_make_same_weights(short_folder: Path) -> None:
    model = tiny_random(short_folder / "model")
    (short_folder / "script.py").write_text(SAME)
    command = ("-P", "-m", "agentrl.cli")
    words = in_folder(short_folder, "script.py", str(model)).stdout.splitlines()[-1].split(" -s ")
    assignments = [word for text in words for word in ("-s", text.removeprefix("-s "))]
    in_folder(short_folder, *command, "submit", "--config", "run.yaml", *assignments, "--wait")
    in_folder(short_folder, *command, "down")
    store = agentrl.open(short_folder / "home")
    runs = [store.run(), next(run for run in store.runs() if run.name != "typed")]
    tokens = [[store.episode(row.id).value.steps for row in run.episodes()] for run in runs]
    drawn, typed = ([[step.sampled_ids for step in steps] for steps in each] for each in tokens)
    assert drawn == typed
    assert len({run.last.ref.sha256 for run in runs}) == 1
    assert runs[0].last.version == 4


ON = """
import sys

import agentrl

rows = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(2)]
if sys.argv[2:]:
    run = agentrl.Trainer.attach(sys.argv[2]).fit()
    print(run.status, len(run.curve()))
else:
    trainer = agentrl.Trainer(model=sys.argv[1], env="arithmetic", group_size=2, tasks_per_iteration=4, max_new_tokens=8)
    trainer.fit(train_dataset=rows, epochs=20, name="long")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_trainer_pauses_on_ctrl_c_and_other_process_continues(short_folder: Path) -> None:
    model = tiny_random(short_folder / "model")
    (short_folder / "script.py").write_text(ON)
    environment = own_environment(short_folder)
    command = [sys.executable, "-u", "script.py", str(model)]
    with subprocess.Popen(command, cwd=short_folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) as script:
        assert script.stdout is not None
        while not (line := script.stdout.readline()).startswith("iteration 1/40"):
            assert line, "it ended before"
        script.send_signal(signal.SIGINT)
        said = script.stdout.read()
    assert script.returncode
    assert "long is paused, and nothing is lost. Continue: Trainer.attach('long').fit()" in said
    assert agentrl.open(short_folder / "home").run("long").status == "paused"
    assert in_folder(short_folder, *command[1:3], str(model), "long").stdout.splitlines()[-1] == "done 40"
    in_folder(short_folder, "-P", "-m", "agentrl.cli", "down")


def own_environment(folder: Path) -> dict[str, str]:
    """With a data folder of its own there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}
    return {**kept, "AGENTRL_HOME": str(folder / "home"), "AGENTRL_IDLE_STOP_SECONDS": "5", "PYTHONPATH": str(ROOT)}


def in_folder(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """What Python does with these words, in that folder."""
    command, environment = [sys.executable, *words], own_environment(folder)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done
