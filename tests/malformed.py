"""Tool calls as a model should not write them."""


def tag(inside: str) -> str:
    """A call with that inside."""
    return f"<tool_call>{inside}</tool_call>"


GOOD = tag('{"name": "calculator", "arguments": {"expression": "1+1"}}')
MALFORMED = [
    tag(""),
    tag("not json"),
    tag("null"),
    tag("[]"),
    tag("42"),
    tag('"calculator"'),
    tag("{}"),
    tag('{"name": "calculator"}'),
    tag('{"name": null, "arguments": {}}'),
    tag('{"name": 7, "arguments": {}}'),
    tag('{"name": "", "arguments": {}}'),
    tag('{"name": "rm -rf /", "arguments": {}}'),
    tag('{"name": "../../etc/passwd", "arguments": {"expression": "1"}}'),
    tag('{"name": "__class__", "arguments": {"expression": "1"}}'),
    tag('{"name": "calculator", "arguments": "1+1"}'),
    tag('{"name": "calculator", "arguments": [1, 2]}'),
    tag('{"name": "calculator", "arguments": {"expression": 2}}'),
    tag('{"name": "calculator", "arguments": {"expression": null}}'),
    tag('{"name": "calculator", "arguments": {"expression": "1", "self": 1}}'),
    tag('{"name": "calculator", "arguments": {"expression": "9**9**9"}}'),
    tag('{"name": "calculator", "arguments": {"expression": "__import__(\'os\')"}}'),
    tag('{"name": "calculator", "arguments": {"expression": "1+1",}}'),
    tag("{'name': 'calculator', 'arguments': {'expression': '1+1'}}"),
    tag('{"name": "calculator", "arguments": {"expression": NaN}}'),
    tag('{"name": "calculator", "arguments": {"expression": "\\u0000\\ud800"}}'),
    tag('{"name": "calculator", "name": "x", "arguments": {}}'),
    tag(GOOD),
    tag(tag(tag(""))),
    tag("[" * 500),
    tag('{"name": "calculator", "arguments": ' + '{"a": ' * 100 + "1" + "}" * 101),
    "</tool_call>" + GOOD[:-12],
    "<tool_call><tool_call>",
    GOOD * 1000,
    f"<think>{GOOD}</think>{tag('{')}",
]
