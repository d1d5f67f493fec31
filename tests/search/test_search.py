"""A search goes on from its record: the same way each time, whatever a critic says, and what it chose is measured apart."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.workflow.algorithms import Algorithm, Search, resolve_run, resolve_search, search_function, searches
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ConfigError, InfraError, ServiceError
from agentrl.workflow.inference.http import Connection
from agentrl.workflow.inference.server_responses import ChatReply
from agentrl.workflow.plugins import find
from agentrl.workflow.resources import MAX_RESOURCE_CHARS, MAX_RESOURCES, Prompt, read_resources, validation_error
from agentrl.workflow.search import Chosen, Given, Request, Resources, Rollouts, Tried, go_on, score
from agentrl.workflow.search.beam import edited
from agentrl.workflow.search.feedback import MAX_FEEDBACK_CHARS as MAX_TOLD
from agentrl.workflow.search.feedback import describe_group
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import Episode, Group, Message, Step, Task, ToolCall, ToolResult
from tests.support.scripted_critic import ScriptedCritic, ruled_parts

SEED = {"prompt": "Solve this: {question}"}
TASKS = [Task(f"t/{number}", (Message("user", f"{number} + 1?"),), str(number + 1)) for number in range(12)]
SMALL = {"batch_tasks": 2, "rounds": 4, "beam_width": 2, "branch_factor": 4, "max_rollouts": 150}


class Heard:
    """A critic that remembers its answers, as the rows do."""

    def __init__(self, script: ScriptedCritic) -> None:
        self.script, self.answers = script, dict[tuple[str, int], str]()
        self.times: dict[str, int] = {}

    def __call__(self, prompt: str) -> str:
        self.times[prompt] = self.times.get(prompt, 0) + 1
        key = (prompt, self.times[prompt])
        if key not in self.answers:
            self.answers[key] = self.script.answer(prompt).encode("utf-8", "replace").decode()
        return self.answers[key]

    def each(self, prompts: Sequence[str]) -> list[str]:
        return [self(prompt) for prompt in prompts]


def rolled_out(candidate: Any, task: Task) -> Group:
    parts = ruled_parts(candidate["prompt"])
    reward = 0.1 + 0.3 * sum(parts.values())
    return Group(task, (Episode(task, status="done", stop_reason="answered", rewards=parts, reward=reward),))


def searched(name: str, script: ScriptedCritic, seed: int = 0, options: Any = None) -> tuple[Chosen, list[Tried]]:
    """The whole search, called anew for every round of rollouts."""
    run, record, heard = search_function(find("algorithms", name)), list[Tried](), Heard(script)
    while True:
        heard.times.clear()
        given = Given(
            Resources(SEED), Rollouts(SEED, record), TASKS[:6], TASKS[6:9], heard, random.Random(seed), options or SMALL
        )
        found = go_on(run, given, TASKS[9:])
        if isinstance(found, Chosen):
            return found, record
        record += [Tried(found.candidates[place], rolled_out(found.candidates[place], task)) for place, task in found.groups]


def gain(chosen: Chosen) -> float:
    assert chosen.candidate is not None
    return sum(ruled_parts(chosen.candidate["prompt"]).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_search_gains_from_informed_critic_only(name: str) -> None:
    informed = [gain(searched(name, ScriptedCritic("informed", seed), seed)[0]) for seed in range(5)]
    blind = [gain(searched(name, ScriptedCritic("blind", seed), seed)[0]) for seed in range(5)]
    assert informed == [3.0] * 5
    assert max(blind) < 3.0
    assert sum(blind) <= 2.0


@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_search_measures_choice_beside_seed_on_unread_tasks(name: str) -> None:
    chosen, record = searched(name, ScriptedCritic())
    last = record[-6:]
    assert [each.group.task for each in last] == [*TASKS[9:], *TASKS[9:]]
    assert [each.candidate for each in last] == [SEED] * 3 + [chosen.candidate] * 3
    assert not {each.group.task.key for each in record[:-6]} & {task.key for task in TASKS[9:]}


def test_search_stays_within_rounds_or_episodes() -> None:
    _, record = searched("apo", ScriptedCritic("informed", 3))
    assert len(record) <= 3 + 4 * (2 * 2 + 8 * 3) + 6
    _, record = searched("gepa", ScriptedCritic("informed", 3))
    assert len(record) <= 150 + 2 * 3 + 6  # it ends after the step that reaches its budget


WAY = """
import json, sys
from tests.search.test_search import ScriptedCritic, searched
print(json.dumps([[each.candidate["prompt"], each.group.task.key] for each in searched(sys.argv[1], ScriptedCritic())[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_search_is_repeatable_in_every_process(name: str) -> None:
    ways = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", WAY, name]
        environment = {"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        ways.add(done.stdout)
    assert len(ways) == 1
    assert len(json.loads(ways.pop())) > 20


NONSENSE = {
    "nothing": "",
    "no tags": "I would rather not.",
    "tags of nothing": "<prompt>  </prompt>",
    "a prompt without its place": "<prompt>Solve it.</prompt> ```\nSolve it.\n```",
    "a prompt that is too long": f"<prompt>{{question}} {'x' * MAX_RESOURCE_CHARS}</prompt>",
    "no characters": "<prompt>{question} \ud800</prompt>",
    "a zero": "<prompt>{question} \0</prompt>",
    "tags in tags": "<prompt>" * 1000 + "</prompt>" * 1000,
}


@pytest.mark.parametrize("name", ["apo", "gepa"])
@pytest.mark.parametrize("said", NONSENSE)
def test_search_ignores_nonsense_of_critic(name: str, said: str) -> None:
    chosen, record = searched(name, ScriptedCritic(NONSENSE[said]), options={**SMALL, "max_rollouts": 40})
    assert chosen.candidate == SEED
    assert all("{question}" in each.candidate["prompt"] for each in record)


def test_edited_reads_text_between_tags() -> None:
    assert edited("So: <prompt>\nAdd {a}.\n</prompt> Done.") == "Add {a}."
    assert edited("</prompt>") == ""


def test_edited_reads_unclosed_tags_in_linear_time() -> None:
    began = time.process_time()
    assert edited("<prompt>" * 12_500) == ""
    assert edited("<prompt>" * 6_000 + "</prompt>" * 5_000) != ""
    assert time.process_time() - began < 0.5


def test_critic_answer_that_drips_or_is_huge_is_given_up() -> None:
    """Bytes that come now and then keep no search waiting for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        settings = Settings(critic_url=f"http://127.0.0.1:{listening.getsockname()[1]}")

        def drip(piece: bytes, pause: float) -> None:
            link, _ = listening.accept()
            with link, contextlib.suppress(OSError):
                link.recv(65536)
                link.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{")
                for _ in range(200):
                    link.sendall(piece)
                    time.sleep(pause)

        for piece, pause, kind, said in (
            (b" ", 0.05, ServiceError, "has not ended after 1 seconds"),
            (b" " * 65536, 0.0, InfraError, "with more than 1048576 bytes"),
        ):
            server = threading.Thread(target=drip, args=(piece, pause))
            server.start()
            asked = Connection(settings, "critic", max_bytes=2**20, seconds=1.0)
            with pytest.raises(kind, match=said):
                asked.read(ChatReply, "/v1/chat/completions", {})
            asked.close()
            server.join()


def test_search_that_leaves_its_record_says_so() -> None:
    _, record = searched("apo", ScriptedCritic())
    given = Given(Resources(SEED), Rollouts(SEED, record), TASKS[:6], TASKS[6:9], Heard(ScriptedCritic("blind")), options=SMALL)
    with pytest.raises(ConfigError, match="requested other rollouts than the first time"):
        go_on(search_function(find("algorithms", "apo")), given, TASKS[9:])


class OneEdit:
    """A user's own."""

    def run(self, resources: Resources, rollouts: Rollouts, choose_tasks: Sequence[Task]) -> dict[str, str]:
        """Tries one other text, even where something catches every exception."""
        other = resources.with_text(resources, "prompt", "Think step by step. {question}")
        try:
            seeds, others = rollouts.each([resources, other], choose_tasks)
        except Exception:  # noqa: BLE001 - which must not swallow what is asked for
            return dict(resources)
        return other if score(others) > score(seeds) else dict(resources)


class Strange:
    """Takes what there is not."""

    def run(self, gpu: int) -> None:
        """Never called."""


def test_searches_accepts_class_with_run() -> None:
    assert searches(OneEdit)
    assert searches(OneEdit())
    assert not searches(find("algorithms", "grpo"))
    assert isinstance(find("algorithms", "grpo"), Algorithm)
    assert isinstance(find("algorithms", "apo"), Search)
    chosen, record = searched(f"{__name__}:OneEdit", ScriptedCritic())
    assert gain(chosen) == 1.0
    assert len(record) == 3 * 2 + 3 * 2
    with pytest.raises(ConfigError, match="The search's method `run` has an unknown parameter 'gpu'"):
        searched(f"{__name__}:Strange", ScriptedCritic())
    with pytest.raises(ConfigError, match="no Algorithm but of type"):
        find("algorithms", f"{__name__}:SMALL")


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ({}, "must have the texts prompt"),
        ({"prompt": "x {question}", "more": "y"}, "must have the texts prompt"),
        ({"prompt": "no place"}, "it lacks {question}"),
        ({"prompt": 7}, "it is of type int"),
    ],
)
def test_rollouts_refuse_invalid_candidate(candidate: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Rollouts(SEED, [])(candidate, TASKS)


def test_rollouts_limit_groups_and_need_none_for_no_tasks() -> None:
    rollouts = Rollouts(SEED, [])
    with pytest.raises(ValueError, match="4097 groups are too many"):
        rollouts(SEED, [TASKS[0]] * 4097)
    assert rollouts(SEED, []) == []


def test_rollouts_score_is_mean_over_tasks_of_done_episodes() -> None:
    done = Episode(TASKS[0], status="done", stop_reason="answered", reward=1.0)
    failed = Episode(TASKS[0], status="infra_error")
    groups = [
        Group(TASKS[0], (done, failed)),
        Group(TASKS[1], (failed,)),
        Group(TASKS[2], (done, Episode(TASKS[2], status="done", reward=0.0))),
    ]
    assert score(groups) == 0.75
    broke = Episode(TASKS[3], status="failed", error="KeyError")
    assert score([*groups, Group(TASKS[3], (broke, broke))]) == 0.5, "what broke its agent earned nothing"
    assert score([Group(TASKS[1], (failed,))]) == float("-inf")


# texts


def test_prompt_fills_only_its_placeholders() -> None:
    text = Prompt('{question} is {{json: {"a": 1}}} {other} {question.__class__} {0}')
    assert text.format(question="{other}") == '{other} is {{json: {"a": 1}}} {other} {question.__class__} {0}'
    with pytest.raises(ValueError, match="no placeholder for 'answer'"):
        text.format(answer=1)
    with pytest.raises(ValueError, match="pass the values"):
        text.format("x")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": ""}, "it is empty"),
        ({"a b": "x"}, "letters, digits"),
        ({"prompt": "x" * (MAX_RESOURCE_CHARS + 1)}, "32768 are allowed"),
        ({f"p{number}": "x" for number in range(MAX_RESOURCES + 1)}, "at most 64"),
        ({"prompt": ["x"]}, "it is of type list"),
    ],
)
def test_config_refuses_resource_that_is_not_text(values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_resources(values)
    with pytest.raises(ConfigError, match="resources"):
        build({"resources": values})


def test_resource_edit_may_add_but_not_lose_placeholders() -> None:
    assert validation_error("{a} {b}", "{a}") == ""
    assert validation_error("{b}", "{a} {b} {c}") == "it lacks {a}, {c}"


def test_critic_reads_episode_within_bounds() -> None:
    call = ToolCall("calculator", {"expression": "1/0" * 10_000})
    message = Message("assistant", "x" * 100_000, tool_calls=(call,) * 50)
    results = (ToolResult("division by zero" * 1000, "tool_error"),) * 50
    step = Step(0, (Message("user", "y" * 100_000),), (), (), (), "stop", message, 0, results=results)
    long = Episode(
        Task("t", (), "z" * 100_000), steps=(step,) * 20, status="done", rewards={f"p{n}": 1.0 for n in range(999)}, reward=0.5
    )
    text = describe_group(Group(long.task, (long, long)))
    assert len(text) < 2 * MAX_TOLD + 200
    short = Episode(
        TASKS[0],
        steps=(Step(0, (), (), (), (), "stop", Message("assistant", "", tool_calls=(call,)), 0, results=results[:1]),),
        status="done",
        reward=0.0,
    )
    assert "calculator failed: division by zero" in describe_group(Group(TASKS[0], (short,)))
    assert "the right answer: 1" in describe_group(Group(TASKS[0], (short,)))


# options


SETTLED: dict[str, tuple[dict[str, Any], str]] = {
    "an option of the optimizer": ({"update.learning_rate": 0.1}, "update.* has no effect with apo"),
    "an option of another algorithm": (
        {"search.max_rollouts": 9},
        "search.max_rollouts has no effect with apo. apo takes search.batch",
    ),
    "a group's size": ({"rollout.group_size": 4}, "rollout.group_size has no effect with apo. Set search.group_size"),
    "a length": ({"iterations": 4}, "apo sets its own length"),
    "a clip": ({"algorithm.clip_low": 0.1}, "With apo, no option algorithm.* has an effect except algorithm.name"),
    "rounds of what has none": (
        {"algorithm.name": "fast", "search.rounds": 2},
        "search.rounds has no effect with fast. fast takes none",
    ),
    "choosing what does not": (
        {"algorithm.name": "fast", "search.choose_tasks": 2},
        "search.choose_tasks has no effect with fast",
    ),
}


@pytest.mark.parametrize("name", SETTLED)
def test_search_refuses_option_that_it_ignores(name: str) -> None:
    values, said = SETTLED[name]
    with pytest.raises(ConfigError) as caught:
        resolve_search(build({"algorithm.name": "apo", **values}))
    assert said in str(caught.value)


def test_search_options_have_defaults_and_suit_no_gradient() -> None:
    with pytest.raises(ConfigError, match=r"search.\* has no effect with grpo"):
        resolve_run(build({"search.group_size": 2}))
    made = resolve_search(build({"algorithm.name": "gepa", "search.group_size": 2}))
    assert (made.search.max_rollouts, made.search.batch_tasks, made.search.rounds, made.rollout.group_size) == (300, 3, None, 2)
    assert made.epochs == 1
    assert resolve_search(made) == made
    assert resolve_run(RunConfig()).search == RunConfig().search


def test_search_reports_requests_with_their_reasons() -> None:
    given = Given(Resources(SEED), Rollouts(SEED, []), TASKS[:6], TASKS[6:9], Heard(ScriptedCritic()), options=SMALL)
    found = go_on(search_function(find("algorithms", "apo")), given, TASKS[9:])
    assert isinstance(found, Request)
    assert (found.candidates, found.notes, len(found.groups)) == ((SEED,), ("the beginning",), 3)
