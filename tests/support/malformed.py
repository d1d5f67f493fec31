"""Tool calls as a model should not write them."""

import json


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
    "</tool_call>" + GOOD[:-13],
    "<tool_call><tool_call>",
    GOOD * 1000,
    f"<think>{GOOD}</think>{tag('{')}",
    tag('{"name": "calc\x00ulator", "arguments": {"expression": "1+1"}}'),
    tag('{"name": "calculator", "arguments": {"expression": "1+1\x00"}}'),
    tag('{"name": "calculator", "arguments": {"\x00": "1+1"}}'),
    tag(json.dumps({"name": "calculator", "arguments": {"expression": "1+" * 50_000 + "1"}})),
    tag(json.dumps({"name": "calculator", "arguments": {str(number): number for number in range(5_000)}})),
    tag(json.dumps({"name": "x" * 100_000, "arguments": {}})),
]

HUGE = [
    tag(json.dumps({"name": "calculator", "arguments": {"expression": "1" * 1_000_000}})),
    tag(json.dumps({"name": "calculator", "arguments": {"expression": ["1"] * 100_000}})),
    tag(json.dumps({"name": "calculator", "arguments": {str(number): 1 for number in range(100_000)}})),
    tag(json.dumps({"name": "n" * 1_000_000, "arguments": {"expression": "1"}})),
    tag(json.dumps({"name": "calculator", "arguments": "1" * 1_000_000})),
    tag("{" * 1_000_000),
    tag('{"name": "calculator", "arguments": {"expression": ' + "9" * 1_000_000 + "}}"),
    "<tool_call>" * 100_000,
]
"""About a megabyte each: more than a turn can hold, so that no episode plays them."""
