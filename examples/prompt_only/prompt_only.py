"""No weight changes: a prompt learns. A critic reads episodes, edits the prompt, and a beam keeps what earns more."""

import argparse

from openai import OpenAI

import agentrl

PROMPT = "Answer the question. {question}"


def solve(task: agentrl.AgentTask, llm: agentrl.LLM, resources: dict[str, agentrl.Prompt]) -> str:
    """Asks once, with the prompt that is tried."""
    text = resources["prompt"].format(question=task.input)
    with OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        reply = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content or ""


def right(episode: agentrl.Episode) -> float:
    """Whether the answer's last word is the right number."""
    said = (episode.answer or "").split()
    return float(bool(said) and said[-1].strip(".") == episode.task.reference)


def main() -> None:
    """Searches, and says what was gained on tasks that no choice has read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--critic", default="gpt-4o-mini", help="a model at AGENTRL_CRITIC_URL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=80)
    asked = parser.parse_args()
    rows = [{"question": f"What is {n} plus {n + 7}?", "answer": str(2 * n + 7)} for n in range(asked.tasks)]
    search = {
        "critic": asked.critic,
        "rounds": asked.rounds,
        "choose_tasks": asked.tasks // 4,
        "held_out_tasks": asked.tasks // 4,
    }
    trainer = agentrl.Trainer("apo", model=asked.model, rewards=[right], max_new_tokens=48, search=search)
    run = trainer.fit(solve, rows, resources={"prompt": PROMPT})
    print(run.resources["prompt"])
    print(f"{run.name}: {run.status}, {sum(1 for _ in run.prompts())} versions tried")


if __name__ == "__main__":
    main()
