"""Three programs as people write them who come from smaller frameworks, with the names that things have here.

SFT, RL and a chat by command lines; an env, a tool and GRPO as a loop by hand; a Trainer with an agent, a hook and runners.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentrl
from agentrl import elsewhere
from tests.support.small_models import tiny_calling, tiny_random

ROOT = Path(__file__).parents[2]
TASKS = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(2, 4) for b in range(2)]


def run_in(folder: Path, *words: str, typed: str = "") -> str:
    """What Python prints with these words, in that folder, which has its own data folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}
    environment = {**kept, "AGENTRL_HOME": str(folder / "home"), "AGENTRL_IDLE_STOP_SECONDS": "5", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def workplace(short_folder: Path) -> Iterator[Path]:
    """A folder whose workers end with the test."""
    yield short_folder
    run_in(short_folder, "-P", "-m", "agentrl.cli", "down")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_mission_runs_sft_rl_and_chat_by_command(workplace: Path) -> None:
    command = ("-P", "-m", "agentrl.cli")
    rows = "".join(json.dumps({**row, "response": f"It is {row['answer']}."}) + "\n" for row in TASKS)
    (workplace / "tasks.jsonl").write_text(rows)
    made, learned = str(workplace / "outputs" / "sft"), str(workplace / "outputs" / "rl")
    run_in(
        workplace, *command, "sft", "--model_path", str(tiny_random(workplace / "model")), "--dataset", "arithmetic",
        "--max_samples", "10", "--num_epochs", "3", "--output_dir", made,
    )  # fmt: skip
    run_in(
        workplace, *command, "submit", "--model_path", made, "--dataset", "tasks.jsonl", "--samples_per_prompt", "4",
        "--max_new_tokens", "16", "--total_epochs", "5", "--output_dir", learned, "--wait",
    )  # fmt: skip
    ask = ("chat", "--model_path", f"{learned}/epoch_5", "--max_new_tokens", "12", "--temperature", "0.7")
    assert run_in(workplace, *command, *ask, typed="What is 2 plus 1?\n").strip()


class CodeExec(agentrl.Env):
    """A task, the tools, and a reward for a right answer and for having tried them."""

    def final_reward(self, episode: agentrl.Episode) -> dict[str, float]:
        """Whether it is right, and how much of it was tried."""
        tried = any(step.results for step in episode.steps)
        return {"right": float(episode.final_answer.strip() == episode.task.reference), "tried": float(tried)}


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_mission_trains_by_hand_with_tools_evals_and_checkpoints(tmp_path: Path, algorithm: str) -> None:
    called: list[str] = []

    def calculator(expression: str) -> str:
        """Executes an expression."""
        called.append(expression)
        return "5"

    def eval_agent_on_holdout(held_out: list[dict[str, str]]) -> float:
        episodes = agentrl.RolloutWorker(policy, env, temperature=0.1).run_episodes(held_out)
        return sum(episode.reward or 0.0 for episode in episodes) / len(episodes)

    measured, saved = [], []
    # 1. the model and the policy
    with agentrl.open_policy(str(tiny_calling(tmp_path / "calling")), max_new_tokens=24) as policy:
        # 2. the tools, 3. the env
        env = CodeExec(tools=(agentrl.Tool(calculator),))
        # 4. what rolls out and learns
        worker = agentrl.RolloutWorker(policy, env, max_steps=2)
        trainer = agentrl.GRPOTrainer(policy, algorithm, learning_rate=1e-3)
        # 5. the loop
        for it in range(3):
            episodes = []
            for number in range(12):
                episodes.append(worker.run_episode(TASKS[number % 3]))
            told = trainer.update(episodes)
            assert told["reward"] == pytest.approx(sum(episode.reward or 0.0 for episode in episodes) / 12)
            if it % 2 == 0:
                measured.append(eval_agent_on_holdout(TASKS[3:]))
                saved.append(trainer.save(tmp_path / f"checkpoint_{it}"))
        assert policy.ref.version >= 2
    assert called, "the model's calls are this process's"
    assert len(measured) == 2
    with agentrl.open_policy(str(saved[-1]), max_new_tokens=4) as learned:
        assert learned.generate([agentrl.Message("user", "What is 2 plus 1?")]).sampled_ids


SCRIPT = """
import json
import sys
import urllib.request

import agentrl
from agentrl import GRPO, Agent, Hook, InMemoryStore, Rollout, Task, Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer


class MathAgent(Agent):
    def rollout(self, task, llm):
        prompt = self._build_prompt(task.input)
        response = self._chat(llm, prompt)
        return Rollout(input=task.input, output=response, traces=[prompt])

    def _build_prompt(self, question):
        return f"Think first. {question}"

    def _chat(self, llm, prompt):
        body = json.dumps({"model": llm.model, "messages": [{"role": "user", "content": prompt}]}).encode()
        headers = {"Authorization": "Bearer " + llm.api_key, "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(llm.base_url + "/chat/completions", body, headers)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"] or ""


class GRPORewardHook(Hook):
    def on_rollout_end(self, rollout: Rollout, task: Task):
        rollout.metadata["reward"] = self._compute_reward(rollout.output, task)
        return rollout

    def _compute_reward(self, output, task):
        return len(output) / 100


if __name__ == "__main__":
    model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    dataset = [{"question": f"What is {a} plus 1?", "answer": str(a + 1)} for a in range(4)]
    trainer = Trainer(
        algorithm=GRPO(model=model, tokenizer=tokenizer, lora_r=8, group_size=2, tasks_per_iteration=2, max_new_tokens=8),
        agent=MathAgent(),
        hooks=[GRPORewardHook()],
        store=InMemoryStore(),
        n_runners=4,
    )
    run = trainer.fit(dataset, epochs=1)
    episodes = [run.episode(row.id) for row in run.episodes(status="done")]
    said = [[each.rewards["default"]["reward"], len(each.value.final_answer) / 100] for each in episodes]
    asked = {each.messages[0]["content"].partition(" What")[0] for each in episodes}
    print(json.dumps([run.status, len(run.curve()), run.config["model"]["lora_r"], said, sorted(asked)]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_mission_trainer_has_agent_hook_memory_store_and_runners(workplace: Path) -> None:
    model = tiny_random(workplace / "model")
    (workplace / "train_math_agent.py").write_text(SCRIPT)
    status, iterations, rank, said, asked = json.loads(run_in(workplace, "train_math_agent.py", str(model)).splitlines()[-1])
    assert (status, iterations, rank, len(said), asked) == ("done", 2, 8, 8, ["Think first."])
    assert all(reward == pytest.approx(computed) for reward, computed in said)
    assert {reward for reward, _ in said} != {0.0}


def test_foreign_names_are_refused_with_advice() -> None:
    for name, advice in elsewhere.ADVICE.items():
        with pytest.raises(ImportError, match=f"^agentrl has no {name}: {re.escape(advice)}$"):
            getattr(agentrl, name)
        with pytest.raises(ImportError, match=f"^agentrl has no {name}: {re.escape(advice)}$"):
            exec(f"from agentrl import Trainer, {name}", {})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'agentrl\.nothing'"):
        exec("import agentrl.nothing", {})
    for name, way in elsewhere.OPTIONS.items():
        with pytest.raises(agentrl.AgentRLError, match=f"no option '{name}'. {way[0].upper()}{re.escape(way[1:])}"):
            agentrl.Trainer("apo", **{name: 1})
    with pytest.raises(agentrl.AgentRLError, match=r"no option 'zzz'. `agentrl config show` lists them.$"):
        agentrl.Trainer(zzz=1)
    with pytest.raises(AttributeError, match=r"has no attribute 'Trainerr'$"):
        agentrl.Trainerr  # noqa: B018
    with pytest.raises(agentrl.AgentRLError, match="is rows, but train_dataset"):
        agentrl.Trainer().fit(TASKS, TASKS)
