"""An engine that only sleeps: it answers each turn with a few tokens, some seconds later, so many at once."""

from agentrl.workflow.engines import Backend, GenerateRequest
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from tests.support.scripted_engine import ScriptedEngine

SECONDS = 0.5
SLOTS = 8

sleeper = Backend(
    name="sleeper",
    start=f"{__name__}:start",
    keyed=True,
    logprobs=True,
    weights=frozenset({"lora", "full"}),
    quantised=True,
    options=frozenset({"temperature", "top_k", "top_p", "min_p", "stop"}),
    local=True,
)


def start(policy: Policy, settings: Settings) -> ScriptedEngine:
    """The engine, as `engines` starts one."""
    end = min(policy.chat.end_ids)

    def answer(request: GenerateRequest) -> tuple[int, ...]:
        return (*request.prompt_ids[:16], end)

    return ScriptedEngine(answer, SECONDS, SLOTS)
