"""echo: the model sends a text through the tool echo and repeats it. Half of the reward is for the call, and half for the
answer.
"""

from agentrl.workflow.envs import Env

echo = Env(
    system_prompt="Call the tool echo with the text, then answer with what it returned and nothing else.",
    tools=("echo",),
    rewards={"echoed": 0.5, "text_answer": 0.5},
    correct=("echoed", "text_answer"),
)
