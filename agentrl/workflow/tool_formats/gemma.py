"""gemma: a line of Python for each call in a block, "```tool_code", which "```" closes. For Gemma 3.

Its template renders neither calls nor tools, so the prompt must describe them. A list of calls without a block is `pythonic`.
"""

from agentrl.workflow.tool_formats.olmo3 import line_format

gemma = line_format("gemma", "```tool_code", "```", ("<start_of_turn>",))
