"""agentrl: reinforcement learning for tool-calling language models, with every token and reward in a database.

Its packages are `agentrl.workflow` (the library), `agentrl.workers` (the processes), `agentrl.cli` (the commands) and
`agentrl.migrations`. The top of a checkout has a link to each of them.

`__all__` lists the public, stable names. Each is loaded when it is first used, so `import agentrl` itself is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentrl import elsewhere

if TYPE_CHECKING:
    from agentrl.api.algorithms import GRPO, PPO
    from agentrl.api.curve import Curve
    from agentrl.api.episode import Episodes, StoredEpisode
    from agentrl.api.lists import Rows, Table
    from agentrl.api.loop import GRPOTrainer, RolloutWorker
    from agentrl.api.run import Run, StoredPolicy
    from agentrl.api.run_trainer import Trainer
    from agentrl.api.store import InMemoryStore, Store
    from agentrl.api.store import open_store as open
    from agentrl.workflow.adapters import Adapter, Turn
    from agentrl.workflow.agents import LLM, AgentTask, Answer
    from agentrl.workflow.agents.classes import Agent
    from agentrl.workflow.algorithms import Algorithm
    from agentrl.workflow.annotations import Annotation
    from agentrl.workflow.emitters import emit_annotation, emit_exception, emit_message, emit_object, emit_reward, operation
    from agentrl.workflow.envs import Env
    from agentrl.workflow.errors import AgentRLError
    from agentrl.workflow.hooks import Hook, LoggingHook
    from agentrl.workflow.inference.open_policy import OpenPolicy, open_policy
    from agentrl.workflow.resources import Prompt
    from agentrl.workflow.spans import Span
    from agentrl.workflow.tools import Tool
    from agentrl.workflow.trajectory import Episode, Message, Rollout, Step, Task, ToolCall

__version__ = "0.1.0"

__all__ = [
    "GRPO",
    "LLM",
    "PPO",
    "Adapter",
    "Agent",
    "AgentRLError",
    "AgentTask",
    "Algorithm",
    "Annotation",
    "Answer",
    "Curve",
    "Env",
    "Episode",
    "Episodes",
    "GRPOTrainer",
    "Hook",
    "InMemoryStore",
    "LoggingHook",
    "Message",
    "OpenPolicy",
    "Prompt",
    "Rollout",
    "RolloutWorker",
    "Rows",
    "Run",
    "Span",
    "Step",
    "Store",
    "StoredEpisode",
    "StoredPolicy",
    "Table",
    "Task",
    "Tool",
    "ToolCall",
    "Trainer",
    "Turn",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "open",
    "open_policy",
    "operation",
]
_MODULES = {
    "agentrl.api.loop": ("GRPOTrainer", "RolloutWorker"),
    "agentrl.api.curve": ("Curve",),
    "agentrl.api.episode": ("Episodes", "StoredEpisode"),
    "agentrl.api.algorithms": ("GRPO", "PPO"),
    "agentrl.api.lists": ("Rows", "Table"),
    "agentrl.api.run": ("Run", "StoredPolicy"),
    "agentrl.api.store": ("InMemoryStore", "Store", "open"),
    "agentrl.api.run_trainer": ("Trainer",),
    "agentrl.workflow.adapters": ("Adapter", "Turn"),
    "agentrl.workflow.agents": ("LLM", "AgentTask", "Answer"),
    "agentrl.workflow.agents.classes": ("Agent",),
    "agentrl.workflow.algorithms": ("Algorithm",),
    "agentrl.workflow.annotations": ("Annotation",),
    "agentrl.workflow.emitters": ("operation", *(name for name in __all__ if name.startswith("emit_"))),
    "agentrl.workflow.envs": ("Env",),
    "agentrl.workflow.errors": ("AgentRLError",),
    "agentrl.workflow.hooks": ("Hook", "LoggingHook"),
    "agentrl.workflow.inference.open_policy": ("OpenPolicy", "open_policy"),
    "agentrl.workflow.spans": ("Span",),
    "agentrl.workflow.tools": ("Tool",),
    "agentrl.workflow.resources": ("Prompt",),
    "agentrl.workflow.trajectory": ("Episode", "Message", "Rollout", "Step", "Task", "ToolCall"),
}
"""A mapping from each module to the public names that it defines."""


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None and name in elsewhere.ADVICE:
        # `from agentrl import NAME` would replace the text of an AttributeError by its own, without the advice.
        raise ImportError(f"agentrl has no {name}: {elsewhere.ADVICE[name]}", name=name)
    if module is None:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), "open_store" if name == "open" else name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
