"""code_tiny: the tool python, and a reward for the hidden tests that the answered function passes."""

from agentrl.workflow.envs import Env

code_tiny = Env(tools=("python",), rewards={"tests_passed": 1.0}, correct=("tests_passed",))
