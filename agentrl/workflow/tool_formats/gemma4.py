"""gemma4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>`. For Gemma 4.

The format is that of `function_gemma` with other marks.
"""

from agentrl.workflow.tool_formats.function_gemma import brace_format

gemma4 = brace_format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', ("<|tool_response>",))
