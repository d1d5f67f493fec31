"""qa: a question, no tool, one short answer. For your own tasks: `--dataset FILE.jsonl --env qa`."""

from agentrl.workflow.envs import Env

qa = Env(
    system_prompt="Answer the question with one word or number and nothing else.",
    rewards={"text_answer": 1.0},
    correct=("text_answer",),
)
