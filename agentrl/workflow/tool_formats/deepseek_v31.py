"""deepseek_v31: each call `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. For DeepSeek V3.1.

The marks around all calls are those of `deepseek`.
"""

from agentrl.workflow.tool_formats.deepseek import SEPARATOR, marked_format

deepseek_v31 = marked_format("deepseek_v31", between=SEPARATOR, marks=())
