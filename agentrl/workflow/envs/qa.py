"""qa: a question with one short answer, without tools. For your own tasks: `--dataset FILE.jsonl --env qa`."""

from agentrl.workflow.envs import Env

qa = Env(
    system_prompt="Answer the question with one word or number and nothing else.",
    rewards={"text_answer": 1.0},
    correct=("text_answer",),
)
