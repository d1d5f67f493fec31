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
"""A mapping from the name of a span to the kind of annotation that it becomes."""
REWARD = r"agentlightning\.reward\.(\d{1,4})\.(name|value)"
MESSAGE_BODY = "agentlightning.message.body"
OBJECT_JSON = "agentlightning.object.json"
OBJECT_LITERAL = "agentlightning.object.literal"
OPERATION_NAME = "agentlightning.operation.name"
EPISODE = ("agentlightning.rollout_id", "rollout_id")
"""The attributes that may have the id of the span's episode."""
ATTEMPT = ("agentlightning.attempt_id", "attempt_id")
EXCEPTION_EVENT = "exception"
EXCEPTION_TYPE, EXCEPTION_MESSAGE = "exception.type", "exception.message"
TASK, REFERENCE = "agentrl.task.key", "agentrl.task.reference"
"""The attributes with the key and the reference answer of the task of an imported episode."""
CONVERSATION = "gen_ai.conversation.id"
PROMPT_IDS = ("prompt_token_ids", "llm.hosted_vllm.prompt_token_ids")
SAMPLED_IDS = ("response_token_ids", "llm.hosted_vllm.response_token_ids")
LOGPROBS = "logprobs.content"
"""The attribute with the logprobs of a turn's tokens. `PROMPT_IDS` and `SAMPLED_IDS` are the attributes with the token ids. The
proxy of agent-lightning and vLLM write these attributes.
"""
GEN_AI_INPUT, GEN_AI_OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
GEN_AI_SYSTEM, GEN_AI_TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
GEN_AI_ENDINGS = "gen_ai.response.finish_reasons"
GEN_AI_RESULT = ("response", "result", "content")
"""The keys under which a message part may have the result of a call. The first key is the convention's."""
NUMBERED = r"(gen_ai\.prompt|gen_ai\.completion|llm\.request\.functions)\.(\d{1,5})\.(.{1,200})"
NUMBERED_CALL = r"tool_calls\.(\d{1,3})\.(id|name|arguments)"
PROMPT, COMPLETION, FUNCTIONS = "gen_ai.prompt", "gen_ai.completion", "llm.request.functions"
"""The attribute prefixes of the messages, answers and tools of a turn, each followed by a number. OpenLLMetry defines them, and
agent-lightning's tracer writes them.
"""
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_NAMED = ("gen_ai.tool.name", "gen_ai.agent.name", "gen_ai.request.model")
"""The attributes that may have the name of a GenAI operation. The first attribute that exists is used."""
