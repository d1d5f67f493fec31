"""Who comes from agent-lightning: the flow of its first agent, with the lines that the manual says, and a page that is true."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentrl as agl
from agentrl import elsewhere
from agentrl.workflow.settings import settings
from tests.project.documents import DOCS, between, rows
from tests.support.real_stack import embedded_stack
from tests.support.scripted_critic import ScriptedCritic, serving
from tests.support.small_models import tiny_calling

PAGE = DOCS / "from-agent-lightning.md"
ROOMS = {"Fir": 2, "Elm": 8, "Oak": 50}
FIRST, BETTER = "Which room is for {people}?", "Which is the smallest room for {people}?"
FREE: Any = {
    "type": "function",
    "function": {
        "name": "free_rooms",
        "description": "Names the rooms that are free, with their seats.",
        "parameters": {"type": "object", "properties": {"people": {"type": "integer"}}},
    },
}
WISHES = [
    {"question": f"For {n}.", "wish": {"people": n}, "room": next(name for name, seats in ROOMS.items() if seats >= n)}
    for n in range(1, 17)
]


def book(task: agl.AgentTask, prompt_template: agl.Prompt, llm: agl.LLM) -> float:
    """Asks for a room, hears which are free where it calls for that, and is graded."""
    from openai import OpenAI

    asked = prompt_template.format(**task.metadata["wish"])
    messages: list[Any] = [{"role": "user", "content": asked}]
    with OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        said = client.chat.completions.create(model="gpt-4.1-nano", messages=messages, tools=[FREE]).choices[0].message
        if said.tool_calls:
            heard = [{"role": "tool", "tool_call_id": call.id, "content": json.dumps(ROOMS)} for call in said.tool_calls]
            client.chat.completions.create(model="gpt-4.1-nano", messages=[*messages, said, *heard])
    agl.emit_message("asked", called=bool(said.tool_calls))
    return float(chosen(asked, task.metadata["wish"]["people"]) == task.metadata["room"])


def chosen(asked: str, people: int) -> str:
    """The room that is booked: the model here is too small to name one, so that what it was told decides."""
    fitting = [name for name, seats in ROOMS.items() if seats >= people]
    return fitting[0 if "smallest" in asked else -1]


@pytest.fixture
def critic(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedCritic]:
    """Whose every edit is the better prompt."""
    made = ScriptedCritic(f"<prompt>{BETTER}</prompt>")
    with serving(made) as url:
        monkeypatch.setenv("AGENTRL_CRITIC_URL", url)
        settings.cache_clear()
        yield made
    settings.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_agent_lightning_first_agent_learns_prompt_in_threads(critic: ScriptedCritic, tmp_path: Path) -> None:
    trainer = agl.Trainer(
        algorithm="apo",
        search={"critic": "scripted", "rounds": 1, "beam_width": 2, "branch_factor": 2, "choose_tasks": 8},
        resources={"prompt_template": FIRST},
        model=str(tiny_calling(tmp_path / "model")),
        max_new_tokens=24,
        n_runners=8,
        store=agl.InMemoryStore(),
        strategy="threads",
    )
    run = trainer.fit(agent=book, train_dataset=WISHES[:12], val_dataset=WISHES[12:])
    assert run.status == "done"
    assert run.resources == {"prompt_template": BETTER}
    assert [row.text for row in run.prompts().rows()] == [FIRST, BETTER]
    episodes = [run.episode(row.id) for row in run.episodes(status="done")]
    for episode in episodes:
        wish, asked = episode.value.task.metadata, episode.messages[0]["content"]
        assert episode.rewards["default"] == {"agent": float(chosen(asked, wish["wish"]["people"]) == wish["room"])}
        assert [said.data["message"] for said in episode.annotations] == ["asked"]
    assert {episode.reward for episode in episodes} == {0.0, 1.0}
    assert any(question.count("reward 0") for question in critic.asked)


def sides() -> dict[str, str]:
    """The program that the page shows, before and after."""
    (shown,) = between(PAGE, "quickstart", "diff")
    lines = [(line[:1], line[1:]) for line in shown.splitlines()]
    return {sign: "".join(f"{line}\n" for mark, line in lines if mark in (" ", sign)) for sign in "-+"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_agent_lightning_page_program_searches_in_processes(short_folder: Path, tmp_path: Path) -> None:
    model = str(tiny_calling(tmp_path / "model"))
    program = sides()["+"].replace('"Qwen/Qwen2.5-0.5B-Instruct"', f"{model!r}, max_new_tokens=8")
    assert model in program
    shown = "\nrun = trainer.run\nprint(run.status, run.resources, [row.text for row in run.prompts().rows()])\n"
    (tmp_path / "rooms.py").write_text(program + shown)
    edited = "Elm has 8 seats, Oak more. A room for {people}?"
    with serving(ScriptedCritic(f"<prompt>{edited}</prompt>")) as url, embedded_stack(short_folder, "3600") as stack:
        stack.environment["AGENTRL_CRITIC_URL"] = url
        command = [sys.executable, "rooms.py"]
        done = subprocess.run(command, cwd=tmp_path, env=stack.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + stack.logs()
    first = "A room for {people}?"
    assert done.stdout.splitlines()[-1] == f"done { ({'prompt_template': first}) } {[first, edited]}"


def test_agent_lightning_removed_lines_are_refused_with_advice() -> None:
    before = sides()["-"].replace("import agentlightning as agl", "import agentrl as agl")
    compile(before, "before.py", "exec")
    gone = set(re.findall(r"\bagl\.(\w+)", before)) - set(agl.__all__)
    assert gone == {"rollout", "PromptTemplate", "APO", "TraceToMessages"} <= elsewhere.ADVICE.keys()
    assert {"initial_resources", "adapter"} <= elsewhere.OPTIONS.keys() & set(re.findall(r"(\w+)=", before))


def test_agent_lightning_table_names_exist_or_are_refused() -> None:
    table = rows(PAGE.read_text())
    theirs = {name for cells in table for name in re.findall(r"`@?(\w+)(?:\(.*?\)|=)?`", cells[0])} - {"agl"}
    known = {*agl.__all__, *elsewhere.ADVICE, *elsewhere.OPTIONS}
    assert len(theirs) >= 20
    assert theirs <= known
    assert set(re.findall(r"`agentrl\.(\w+)", PAGE.read_text())) <= set(agl.__all__)
