"""math: word problems whose answer is one number, with a calculator.

The correct final answer earns 1. Well-formed turns earn up to 0.1 more. While a model solves no task yet, only this second part
differs within a group. So the model first learns to end its turns and to write answers that can be parsed.
"""

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
