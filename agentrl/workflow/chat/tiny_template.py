"""The chat template of the model `tiny`."""

TEMPLATE = """\
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}
{%- for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{%- if not loop.last %}, {% endif %}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or message.role == 'assistant' -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor -%}
<|im_end|>
{% elif message.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
