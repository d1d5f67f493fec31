"""math: word problems whose answer is one number, with a calculator."""

from agentrl.workflow.envs import Env

math = Env(
    system_prompt=(
        "Write one short line for each computation, like `12 * 3 = 36`, and nothing else. "
        "Then write the answer after ####, like `#### 36`. You may call the calculator."
    ),
    tools=("calculator",),
    rewards={"numeric_answer": 1.0, "format": 0.1},
    correct=("numeric_answer",),
)
