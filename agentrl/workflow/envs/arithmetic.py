"""arithmetic: a calculator, and a reward for the correct final number."""

from agentrl.workflow.envs import Env

arithmetic = Env(tools=("calculator",), rewards={"numeric_answer": 1.0}, correct=("numeric_answer",))
