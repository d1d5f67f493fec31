"""code: write a function, try it out with the tool python, repair it, and answer with it.

The reward is the share of the hidden tests that the answer passes, plus a tenth of the share of visible tests that the tried
programs pass. Whether the turns are well formed is recorded with weight 0.
"""

from agentrl.workflow.envs import Env

code = Env(
    system_prompt=(
        "Write the Python function that is asked for. Run it with the tool python, which prints what your program prints, "
        "until it passes the tests that you see. Then answer with the whole function in one ```python block: "
        "other tests decide whether it is right."
    ),
    tools=("python",),
    rewards={"tests_passed": 1.0, "progress": 0.1, "format": 0.0},
    correct=("tests_passed",),
)
