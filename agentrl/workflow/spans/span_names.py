"""Names in spans of agent-lightning 0.3.0, of OpenLLMetry and of OpenTelemetry's conventions (GenAI: 1.37, in development)."""

PREFIX = "agentlightning."
KINDS = {
    "agentlightning.annotation": "annotation",
    "agentlightning.message": "message",
    "agentlightning.object": "object",
    "agentlightning.exception": "exception",
    "agentlightning.operation": "operation",
    "agentlightning.reward": "reward",
}
"""The kind of annotation for each span name."""
REWARD = r"agentlightning\.reward\.(\d{1,4})\.(name|value)"
MESSAGE_BODY = "agentlightning.message.body"
OBJECT_JSON = "agentlightning.object.json"
OBJECT_LITERAL = "agentlightning.object.literal"
OPERATION_NAME = "agentlightning.operation.name"
EPISODE = ("agentlightning.rollout_id", "rollout_id")
"""Attributes with the id of the span's episode."""
ATTEMPT = ("agentlightning.attempt_id", "attempt_id")
EXCEPTION_EVENT = "exception"
EXCEPTION_TYPE, EXCEPTION_MESSAGE = "exception.type", "exception.message"
TASK, REFERENCE = "agentrl.task.key", "agentrl.task.reference"
"""Attributes with the key and the reference answer of an imported episode's task."""
CONVERSATION = "gen_ai.conversation.id"
PROMPT_IDS = ("prompt_token_ids", "llm.hosted_vllm.prompt_token_ids")
SAMPLED_IDS = ("response_token_ids", "llm.hosted_vllm.response_token_ids")
LOGPROBS = "logprobs.content"
"""The attribute with the logprobs of a turn's tokens; PROMPT_IDS and SAMPLED_IDS are those with the ids. agent-lightning's
proxy and vLLM write them.
"""
GEN_AI_INPUT, GEN_AI_OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
GEN_AI_SYSTEM, GEN_AI_TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
GEN_AI_ENDINGS = "gen_ai.response.finish_reasons"
GEN_AI_RESULT = ("response", "result", "content")
"""Keys of a message part with the result of a call; the first is the convention's."""
NUMBERED = r"(gen_ai\.prompt|gen_ai\.completion|llm\.request\.functions)\.(\d{1,5})\.(.{1,200})"
NUMBERED_CALL = r"tool_calls\.(\d{1,3})\.(id|name|arguments)"
PROMPT, COMPLETION, FUNCTIONS = "gen_ai.prompt", "gen_ai.completion", "llm.request.functions"
"""OpenLLMetry's attribute prefixes of a turn, which agent-lightning's tracer writes: messages, answers and tools, each followed
by a number.
"""
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_NAMED = ("gen_ai.tool.name", "gen_ai.agent.name", "gen_ai.request.model")
"""Attributes with the name of a GenAI operation; the first that exists is used."""
