"""Chat templates as the families of models have them: their special tokens and their way with tools, each in a few lines."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from agentrl.workflow.models.tiny import save_tiny, tiny_model, tiny_tokenizer

_CHATML = """\
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
CALL
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

_HERMES = """\
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
_NAMED = """\
<tool_call name="{{ call.function.name }}">{{ call.function.arguments | tojson }}</tool_call>"""
_QWEN_CODER = """\
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""

_GLM_CALL = """\
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>"""

_KEYWORDS = """\
{% for key, value in call.function.arguments.items() %}
{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor %}"""
_LFM2 = f"""\
{{% if loop.first %}}<|tool_call_start|>[{{% endif %}}
{{{{ call.function.name }}}}({_KEYWORDS}){{% if loop.last %}}]<|tool_call_end|>{{% else %}},{{% endif %}}"""
_LFM2_JSON = """\
{% if loop.first %}<|tool_call_start|>[{% endif %}
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
{%- if loop.last %}]<|tool_call_end|>{% else %},{% endif %}"""
_LINES = f"""\
{{% if loop.first %}}START
{{% endif %}}{{{{ call.function.name }}}}({_KEYWORDS}){{% if loop.last %}}
END{{% endif %}}"""
_DEEPSEEK = """\
{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}
<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"""
_DEEPSEEK_V31 = """\
{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}
<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>
{%- if loop.last %}<｜tool▁calls▁end｜>{% endif %}"""
_BRACES = """\
START{{ 'call:' ~ call.function.name ~ '{' }}
{%- for key, value in call.function.arguments.items() -%}
{{ key }}:{% if value is string %}QUOTE{{ value }}QUOTE{% else %}{{ value | tojson }}{% endif %}
{%- if not loop.last %},{% endif -%}
{%- endfor -%}
{{ '}' }}END"""

_LLAMA3 = """\
<|begin_of_text|>
{%- for message in messages -%}
{%- if message.role == 'system' or (loop.first and tools) -%}
<|start_header_id|>system<|end_header_id|>

Environment: ipython
{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}
{% endfor %}{% if message.role == 'system' %}{{ message.content }}{% endif %}<|eot_id|>
{%- endif -%}
{%- if message.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call in a turn, not more') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role != 'system' -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
"""

_MISTRAL = """\
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}
<s>
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if tools and message == asked[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {% if messages[0].role == 'system' and message == asked[-1] %}{{ messages[0].content }}

{% endif %}{{ message.content }}[/INST]
{%- elif message.role == 'tool' -%}
{%- if (message.tool_call_id or '') | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif message.tool_calls -%}
CALLS</s>
{%- elif message.role == 'assistant' %} {{ message.content }}</s>
{%- endif -%}
{%- endfor -%}
"""
_OLD_CALLS = """\
[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
{%- if (call.id or '') | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
]"""
_NEW_CALLS = """\
{% for call in message.tool_calls -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor -%}
"""

_PYTHONIC = """\
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ tools | tojson if tools }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role != 'system' -%}
<|im_start|>{{ 'ipython' if message.role == 'tool' else message.role }}
{{ message.content }}
{%- if message.tool_calls %}{% if message.content %}<|python_start|>{% endif %}[
{%- for call in message.tool_calls -%}
{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() -%}
{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor -%}
){% if not loop.last %}, {% endif %}
{%- endfor -%}
]{% if message.content %}<|python_end|>{% endif %}{% endif -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

_GLM = """\
[gMASK]<sop>
{%- if tools -%}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- else -%}
<|{{ message.role }}|>
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
CALL
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""
_PHI = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% else -%}{{ eos_token }}{%- endif -%}
"""

_GRANITE = """\
{%- if tools or messages[0].role == 'system' -%}
<|start_of_role|>system<|end_of_role|>
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{{ tools | tojson if tools }}<|end_of_text|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role != 'system' -%}
<|start_of_role|>{{ 'tool_response' if message.role == 'tool' else message.role }}<|end_of_role|>{{ message.content }}
{%- if message.tool_calls -%}
<|tool_call|>[
{%- for call in message.tool_calls -%}
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif -%}
{%- endfor -%}
]END{% endif -%}
<|end_of_text|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_of_role|>assistant<|end_of_role|>
{%- endif -%}
"""
_PHI_TOOLS = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{{- message.content }}
{%- if loop.first and tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif -%}
{%- for call in message.tool_calls or [] -%}
<|tool_call|>{{ call.function | tojson }}<|/tool_call|>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{% else -%}{{ eos_token }}{%- endif -%}
"""

_GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_LLAMA_TOKENS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
)  # fmt: skip
_MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip
_GRANITE_TOKENS = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
_PHI_TOKENS = (
    "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>",
)  # fmt: skip
_LFM2_TOKENS = ("<|tool_call_start|>", "<|tool_call_end|>")
_DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
_FUNCTION_GEMMA_TOKENS = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
_GEMMA4_TOKENS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


def _braces(start: str, end: str, quote: str) -> str:
    return _BRACES.replace("START", start).replace("END", end).replace("QUOTE", quote)


FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (_CHATML.replace("CALL", _HERMES), ()),
    "named": (_CHATML.replace("CALL", _NAMED), ()),
    "qwen_coder": (_CHATML.replace("CALL", _QWEN_CODER), ()),
    "glm": (_GLM.replace("CALL", "{{ '\\n' }}" + _GLM_CALL), _GLM_TOKENS),
    "llama3": (_LLAMA3, _LLAMA_TOKENS),
    "mistral": (_MISTRAL.replace("CALLS</s>", f"{_OLD_CALLS}</s>"), _MISTRAL_TOKENS),
    "mistral_args": (_MISTRAL.replace("CALLS</s>", f"{_NEW_CALLS}</s>"), _MISTRAL_TOKENS),
    "granite": (_GRANITE.replace("END", ""), _GRANITE_TOKENS),
    "phi4_mini": (_PHI_TOOLS, _PHI_TOKENS),
    "pythonic": (_PYTHONIC, ()),
    "lfm2": (_CHATML.replace("CALL", _LFM2), _LFM2_TOKENS),
    "olmo3": (_CHATML.replace("CALL", _LINES.replace("START", "<function_calls>").replace("END", "</function_calls>")), ()),
    "gemma": (_CHATML.replace("CALL", _LINES.replace("START", "```tool_code").replace("END", "```")), ()),
    "deepseek": (_CHATML.replace("CALL", _DEEPSEEK), _DEEPSEEK_TOKENS),
    "deepseek_v31": (_CHATML.replace("CALL", _DEEPSEEK_V31), _DEEPSEEK_TOKENS),
    "function_gemma": (_CHATML.replace("CALL", _braces(*_FUNCTION_GEMMA_TOKENS[:3])), _FUNCTION_GEMMA_TOKENS),
    "gemma4": (_CHATML.replace("CALL", _braces(*_GEMMA4_TOKENS[:3])), _GEMMA4_TOKENS),
}
"""Format -> a template of a family that writes it, and the family's special tokens."""

VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "phi4_mini": (_GRANITE.replace("END", "<|/tool_call|>"), (*_GRANITE_TOKENS, "<|/tool_call|>")),
    "lfm2": (_CHATML.replace("CALL", _LFM2_JSON), _LFM2_TOKENS),
}
"""Format -> another template that writes it: Phi's calls in one list, LFM2's in JSON."""

ENDINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "next role": (_GLM.replace("CALL", _HERMES), _GLM_TOKENS),
    "end of sequence behind": (_PHI, ("<|end|>", "<|user|>", "<|assistant|>")),
}
"""Ways to end a turn -> a template that does so, and its special tokens."""

PLAIN = """\
{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that knows of no tools."""


@cache
def family_tokenizer(name: str) -> Qwen2Tokenizer:
    """A tiny tokenizer with that family's template and special tokens."""
    return tokenizer_of(*(FAMILIES | ENDINGS)[name])


def tokenizer_of(template: str, special: tuple[str, ...]) -> Qwen2Tokenizer:
    """A tiny tokenizer with that template and these special tokens."""
    made = tiny_tokenizer([])
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    made.chat_template = template
    return made


def family_model(folder: Path, name: str) -> Path:
    """A random model with that family's tokenizer, saved in `folder`."""
    tokenizer = family_tokenizer(name)
    save_tiny(folder, tiny_model(len(tokenizer), 0, 2, 32), tokenizer)
    return folder
