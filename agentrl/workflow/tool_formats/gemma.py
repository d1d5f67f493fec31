"""gemma: calls as lines of Python in a block that begins with "```tool_code" and ends with "```". For Gemma 3.

Gemma's template renders neither calls nor tools, so the prompt must describe them. A list of calls without a block has the
format `pythonic`.
"""

from agentrl.workflow.tool_formats.olmo3 import line_format

gemma = line_format("gemma", "```tool_code", "```", ("<start_of_turn>",))
