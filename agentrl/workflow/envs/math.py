"""math: word problems with one number as the answer, and a calculator at hand.

The reward is on the final answer alone; whether the turns are well formed is recorded beside it, with weight 0.
"""

from agentrl.workflow.envs import Env

math = Env(
    system_prompt=(
        "Solve the problem step by step. Use the calculator for every computation. "
        "End your last message with a line that holds only the answer: #### <number>"
    ),
    tools=("calculator",),
    rewards={"numeric_answer": 1.0, "format": 0.0},
    correct=("numeric_answer",),
)
