"""granite: all calls in one list after a mark, `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`. For Granite 3.0 to 3.3.

Some of these models write `<tool_call>` instead of the mark. Granite 4 uses the format `hermes`.
"""

from agentrl.workflow.tool_formats.mistral import list_format

granite = list_format("granite", "<|tool_call|>", "<tool_call>")
