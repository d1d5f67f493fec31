"""phi4_mini: all calls in one list between marks, `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>`.

For Phi-4-mini, which may also write `functools[...]`. Its template does not render calls. The format is recognised by the marks
that the template writes around the tools.
"""

from agentrl.workflow.tool_formats.mistral import list_format

phi4_mini = list_format("phi4_mini", "<|tool_call|>", "functools", end="<|/tool_call|>", marks=("<|tool|>", "<|/tool|>"))
