"""math: word problems whose answer is one number, with a calculator."""

from agentrl.workflow.envs import Env

math = Env(
    system_prompt=(
        "Solve the problem step by step. Then write the answer on a line of its own after ####, like `#### 36`. "
        "You may call the calculator."
    ),
    tools=("calculator",),
    rewards={"numeric_answer": 1.0, "format": 0.1},
    correct=("numeric_answer",),
)
