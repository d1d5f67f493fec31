"""The results of a prompt search: the gain in reward, the tree of tried candidates, and the origin of each candidate.

A candidate is a combination of versions of the run's texts, one version per text. The groups of a candidate are those whose
episodes used exactly these versions. A mean reward on a task is computed as in the search: a failed episode counts as 0, and an
episode that ended because of a system failure is left out.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from typing import Any, Literal

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.runtime.shown_text import cell, clean, format_count
from agentrl.workflow.stats.paired_test import PairedComparison, compare_paired
from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.row_codecs import MAX_ID
from agentrl.workflow.trajectory import OPEN

MAX_LINKS = 100_000
"""The most pairs of a group and one of its texts that are read."""
MAX_CANDIDATES = 500
"""The most candidates of a tree. Those that were tried later are left out, except the way to the best one."""
MAX_NAME_CHARS = 40
COMPARED_CHARS, DIFFERENCE_CHARS = 4000, 120
"""The most characters of a text that are compared for `SearchCandidate.difference`, and the most of that."""
MAX_REWARD = 1e100
"""The largest mean reward, by its size, that counts. The square of a larger one may be infinite."""
MAX_DIFF_LINES = 400
"""The most lines of a text that are compared. The time grows with the square of their number."""
MAX_CALLS, MAX_CALLS_CHARS, CALLS_AT_ONCE = 200, 4_000_000, 20
"""The most requests to the critic, and the most characters of them, in which the origin of a candidate is looked for."""

Role = Literal["held_out", "choose", "train"]
ROLES: Mapping[Role, tuple[str, str]] = {
    "held_out": ("held-out task", ""),
    "choose": ("task", " for choosing"),
    "train": ("task", ""),
}
"""The roles of tasks, the most convincing first, each with the words for a number of such tasks."""


@dataclass(frozen=True, slots=True)
class SearchCandidate:
    """A candidate of a search.

    Args:
        number: the candidate's place in the order of first trials, from 0. Candidate 0 has the texts with which the search
            started.
        parent: the number of the candidate from which this one was made; None if there is none, or if it is not known.
        label: the versions that differ from the parent's, such as `prompt @3`.
        versions: the id of the version of each text, by name.
        changed: the names of the texts whose version differs from the parent's.
        group: the id of the candidate's first group; None if the candidate was not tried.
        status: `untried`; `running` while a group is open; `failed` if no episode is done; else `tried`.
        is_best: True for the candidate that the search chose; in a search without a choice, for the best one so far.
        on_path: True for the best candidate and all candidates from which it was made.
        rewards: the mean reward on each task, by the task's id, for each role of tasks.
        difference: the beginning of the part of the text that differs from the parent's text; if there is no parent, the
            beginning of the text.
    """

    number: int
    parent: int | None
    label: str
    note: str
    versions: Mapping[str, int]
    changed: Sequence[str]
    group: int | None
    status: str
    episodes: int
    is_best: bool = False
    on_path: bool = False
    rewards: Mapping[Role, Mapping[int, float]] = field(default_factory=dict)
    difference: str = ""

    def score(self, role: Role) -> tuple[float | None, int]:
        """Return the mean reward over the tasks of a role, and the number of these tasks."""
        rewards = self.rewards.get(role, {})
        return (_mean(rewards.values()), len(rewards)) if rewards else (None, 0)

    @property
    def scored_on(self) -> Role:
        """The role of the tasks by which this candidate is compared with others."""
        return "choose" if self.rewards.get("choose") else "train"


@dataclass(frozen=True, slots=True)
class SearchTree:
    """The results of a search.

    Args:
        candidates: the candidates in the order of their first trials. A parent comes before its children.
        left_out: the number of candidates that are left out.
        gain: the comparison of the first candidate with the best one, on the tasks that were tried with both; None if there is
            no such task.
        gain_on: the role of these tasks.
        sentences: one or two sentences that say what the search gained.
    """

    candidates: Sequence[SearchCandidate]
    left_out: int
    gain: PairedComparison | None
    gain_on: Role
    sentences: str


@sql_read_transaction
def load_search_tree(tx: Any, run: str) -> SearchTree:
    """Return the results of a search so far. Raise NotFoundError if the run does not exist, or is not a search."""
    run_row = _find_search(tx, run)
    candidates = _mark_best(*_list_candidates(tx, run_row["id"]))
    best = next((one for one in candidates if one.is_best), None)
    gain, gain_on = _compare(candidates[0], best) if candidates and best else (None, "held_out")
    members = [one for one in candidates if one.on_path or one.number < MAX_CANDIDATES]
    calls = select_rows(tx, "SELECT count(*) AS count FROM critic_calls WHERE run_id = :id", id=run_row["id"])[0]["count"]
    sentences = _describe(candidates, best, gain, gain_on, calls, run_row["status"] in OPEN)
    return SearchTree(_add_differences(tx, members), len(candidates) - len(members), gain, gain_on, sentences)


def _add_differences(tx: Any, candidates: Sequence[SearchCandidate]) -> list[SearchCandidate]:
    """Return the candidates with `difference`. Only the beginnings of texts are compared."""
    ids = {version for one in candidates for version in one.versions.values()}
    query = f"SELECT id, substr(text, 1, {COMPARED_CHARS}) AS text FROM resources WHERE id IN ({among(ids)})"
    texts = {row["id"]: row["text"] for row in select_rows(tx, query)}
    by_number = {one.number: one for one in candidates}
    result = []
    for one in candidates:
        name = one.changed[0] if one.changed else ""
        text = texts.get(one.versions.get(name), "")
        before = texts.get(by_number[one.parent].versions.get(name), "") if one.parent is not None else ""
        result.append(replace(one, difference=_cut_shared(text, before)))
    return result


def _cut_shared(text: str, before: str) -> str:
    """Return the beginning of a text, without the words with which the text `before` begins too."""
    shared = next((place for place, (one, other) in enumerate(zip(text, before, strict=False)) if one != other), len(before))
    rest = text[shared:]
    if not rest:  # nothing is new
        return text[:DIFFERENCE_CHARS]
    start = shared if rest[0].isspace() else max(text.rfind(" ", 0, shared), text.rfind("\n", 0, shared)) + 1
    return f"{'... ' if start else ''}{text[start:].strip()}"[:DIFFERENCE_CHARS]


def _find_search(tx: Any, run: str) -> Row:
    (row,) = select_rows(tx, "SELECT id, name, kind, status FROM runs WHERE id = :id", id=run_id_and_name(tx, run)["id"])
    if row["kind"] != "search":
        raise NotFoundError(f"{row['name']} is not a prompt search.", f"List its texts: agentrl prompts {row['name']}")
    return row


@dataclass(slots=True)
class _Trials:
    """The groups of a candidate: the first one, whether one is open, and by role and task the means of the ended ones."""

    group: int
    open: bool = False
    episodes: int = 0
    done: int = 0
    means: dict[Role, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


def _list_candidates(tx: Any, run_id: int) -> tuple[list[SearchCandidate], frozenset[int]]:
    """Return all candidates of a search, without the marks of the best one, and the ids of the versions that it chose."""
    query = "SELECT id, name, version, parent_version, note, chosen FROM resources WHERE run_id = :id ORDER BY id"
    versions = {row["id"]: row for row in select_rows(tx, query, id=run_id)}
    trials = _load_trials(tx, run_id)
    chosen = frozenset(row["id"] for row in versions.values() if row["chosen"])
    order = [*trials, *([chosen] if chosen and chosen not in trials else [])]
    by_key = {(row["name"], row["version"]): row["id"] for row in versions.values()}
    numbers: dict[frozenset[int], int] = {}
    first_with: dict[int, int] = {}
    candidates: list[SearchCandidate] = []
    for number, ids in enumerate(order):
        new = sorted(version for version in ids if version not in first_with)
        before = {version: by_key.get((versions[version]["name"], versions[version]["parent_version"])) for version in new}
        parent = _find_parent(ids, before, numbers, first_with, order[: min(number, MAX_CANDIDATES)])
        mine = {versions[version]["name"]: version for version in sorted(ids)}
        theirs = candidates[parent].versions if parent is not None else {}
        changed = [name for name in mine if mine[name] != theirs.get(name)]
        label = ", ".join(f"{name[:MAX_NAME_CHARS]} @{versions[mine[name]]['version']}" for name in changed[:3])
        label += ", ..." if len(changed) > 3 else ""
        note = versions[max(new)]["note"] if new else ""
        candidates.append(_candidate(number, parent, label, note, mine, changed, trials.get(ids)))
        numbers[ids] = number
        first_with |= dict.fromkeys(new, number)
    return candidates, chosen


def _find_parent(
    ids: frozenset[int],
    before: Mapping[int, int | None],
    numbers: Mapping[frozenset[int], int],
    first_with: Mapping[int, int],
    earlier: Sequence[frozenset[int]],
) -> int | None:
    """Return the number of the candidate from which one was made. `before` are its new versions, each with the version from
    which that was made.
    """
    if not before:  # known versions in a new combination
        return max(range(len(earlier)), key=lambda number: len(ids & earlier[number]), default=None)
    sources = {old for old in before.values() if old is not None and old in first_with}
    exact = numbers.get(ids.difference(before) | sources)
    return exact if exact is not None else min((first_with[old] for old in sources), default=None)


def _candidate(
    number: int,
    parent: int | None,
    label: str,
    note: str,
    versions: Mapping[str, int],
    changed: Sequence[str],
    trials: _Trials | None,
) -> SearchCandidate:
    if trials is None:
        return SearchCandidate(number, parent, label, note, versions, changed, None, "untried", 0)
    status = "running" if trials.open else "tried" if trials.done else "failed"
    rewards: dict[Role, dict[int, float]] = {}
    for role, tasks in trials.means.items():
        means = {task: sum(values) / len(values) for task, values in tasks.items()}
        rewards[role] = {task: mean for task, mean in means.items() if abs(mean) <= MAX_REWARD}
    return SearchCandidate(
        number, parent, label, note, versions, changed, trials.group, status, trials.episodes, rewards=rewards
    )


def _load_trials(tx: Any, run_id: int) -> dict[frozenset[int], _Trials]:
    """Return the trials of each candidate, in the order of the first ones."""
    query = """
        SELECT l.group_id, l.resource_id, g.task_id, g.status, m.role FROM resources v
        JOIN group_resources l ON l.resource_id = v.id JOIN groups g ON g.id = l.group_id AND g.run_id = v.run_id
        LEFT JOIN run_tasks m ON m.run_id = g.run_id AND m.task_id = g.task_id
        WHERE v.run_id = :id ORDER BY l.group_id, l.resource_id LIMIT :limit"""
    links = select_rows(tx, query, id=run_id, limit=MAX_LINKS + 1)
    if len(links) > MAX_LINKS:
        links = [link for link in links if link["group_id"] < links[-1]["group_id"]]
    query = """
        SELECT e.group_id, count(*) AS episodes, sum(CASE WHEN e.status = 'done' THEN 1 ELSE 0 END) AS done,
               sum(CASE WHEN e.status IN ('done', 'failed') THEN 1 ELSE 0 END) AS ended,
               sum(CASE WHEN e.status = 'done' THEN coalesce(e.reward, 0.0) ELSE 0.0 END) AS reward
        FROM episodes e WHERE e.run_id = :id GROUP BY e.group_id"""
    sums = {row["group_id"]: row for row in select_rows(tx, query, id=run_id)}
    texts: dict[int, set[int]] = defaultdict(set)
    groups = {link["group_id"]: link for link in links}
    for link in links:
        texts[link["group_id"]].add(link["resource_id"])
    trials: dict[frozenset[int], _Trials] = {}
    for group, row in groups.items():
        mine = trials.setdefault(frozenset(texts[group]), _Trials(group))
        mine.open |= row["status"] in OPEN
        if (counts := sums.get(group)) is None:
            continue
        mine.episodes += counts["episodes"]
        mine.done += counts["done"]
        if counts["ended"]:
            role: Role = row["role"] if row["role"] in ROLES else "train"
            mine.means[role][row["task_id"]].append(counts["reward"] / counts["ended"])
    return trials


def _mark_best(candidates: Sequence[SearchCandidate], chosen: frozenset[int]) -> list[SearchCandidate]:
    """Return the candidates with marks on the best one and on those from which it was made."""
    best: SearchCandidate | None
    if chosen:
        best = next((one for one in candidates if chosen == frozenset(one.versions.values())), None)
    else:
        scored = [one for one in candidates if one.score("choose")[0] is not None]
        best = max(scored, key=lambda one: one.score("choose")[0] or 0.0, default=None)  # of equal ones the oldest
    path: set[int] = set()
    number = best.number if best else None
    while number is not None:
        path.add(number)
        number = candidates[number].parent
    return [replace(one, is_best=one is best, on_path=one.number in path) for one in candidates]


def _compare(first: SearchCandidate, best: SearchCandidate) -> tuple[PairedComparison | None, Role]:
    for role in ROLES:
        gain = compare_paired(first.rewards.get(role, {}), best.rewards.get(role, {}))
        if gain.tasks and best is not first:
            return gain, role
    return None, "held_out"


def _describe(
    candidates: Sequence[SearchCandidate],
    best: SearchCandidate | None,
    gain: PairedComparison | None,
    gain_on: Role,
    calls: int,
    is_open: bool,
) -> str:
    """Return sentences that say what a search gained. `calls` is the number of its requests to the critic."""
    if not candidates:
        return "No version has been tried yet." if is_open else "No version was tried."
    first, others = candidates[0], len(candidates) - 1
    if gain is not None and best is not None:
        return _describe_gain(first, best, gain, gain_on, is_open)
    score, tasks = first.score(first.scored_on)
    scores = "" if score is None else f"The first scores {cell(score)} on {_count_tasks(tasks, first.scored_on)}."
    if not others:
        critic = f"The critic was called {format_count(calls, 'time')}, and none of its edits could be used."
        why = (
            critic
            if calls and not is_open
            else "No other version has been tried yet."
            if is_open
            else "No other version was tried."
        )
        return f"{why} {scores}".strip()
    if best is not None and best is not first:
        return f"The search chose {best.label}, which was not measured on a task of the first version. {scores}".strip()
    none = "The only other version was not" if others == 1 else f"None of the {others} other versions was"
    return f"{'So far: ' * is_open}{none} better than the first. {scores}".strip()


def _describe_gain(first: SearchCandidate, best: SearchCandidate, gain: PairedComparison, role: Role, is_open: bool) -> str:
    tasks = [task for task in first.rewards[role] if task in best.rewards[role]]
    values = [[one.rewards[role][task] for task in tasks] for one in (best, first)]
    counted = _count_tasks(len(tasks), role)
    if {*values[0], *values[1]} <= {0.0, 1.0}:
        now, before = f"solves {sum(values[0]):.0f} of {counted}", f"solved {sum(values[1]):.0f}"
    else:
        now, before = f"scores {cell(gain.second)} on {counted}", f"scored {cell(gain.first)}"
    name = "So far, the best version" if is_open else "The best version" if gain.difference > 0 else "The chosen version"
    nothing = "" if gain.difference > 0 or is_open else ": nothing was gained"
    sentence = f"{name} ({best.label}) {now}; the first {before}{nothing}."
    if role == "held_out":
        return sentence
    return f"{sentence} {'Held-out tasks are measured at the end.' if is_open else 'No held-out task was measured.'}"


def _count_tasks(count: int, role: Role) -> str:
    noun, suffix = ROLES[role]
    return format_count(count, noun) + suffix


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, slots=True)
class CandidateText:
    """A text of a candidate. `parent_text` is the parent's text of the same name; None if the candidate has no parent."""

    name: str
    version: int
    text: str
    parent_text: str | None


@dataclass(frozen=True, slots=True)
class CandidateOrigin:
    """The origin of a candidate of a search.

    Args:
        texts: the candidate's texts that differ from those of its parent; all of its texts if it has no parent.
        critic: the requests to the critic that led to the candidate, the last one first: the request whose answer contains the
            new text, and before it the request whose answer is quoted in that request.
    """

    texts: Sequence[CandidateText]
    critic: Sequence[Row]


@sql_read_transaction
def load_candidate(tx: Any, run: str, number: int) -> CandidateOrigin:
    """Return the origin of a candidate of a search. Raise NotFoundError if the run has no such candidate, or is not a
    search.
    """
    run_id = _find_search(tx, run)["id"]
    candidates, _ = _list_candidates(tx, run_id)
    if not 0 <= number < len(candidates):
        there = f"Its candidates are 0 to {len(candidates) - 1}." if candidates else f"List its texts: agentrl prompts {run}"
        raise NotFoundError(f"{run} has no candidate {number}.", there)
    candidate = candidates[number]
    theirs = candidates[candidate.parent].versions if candidate.parent is not None else {}
    ids = [version for name in candidate.changed for version in (candidate.versions[name], theirs.get(name))]
    query = f"SELECT id, version, text, created_at FROM resources WHERE id IN ({among([one for one in ids if one])})"
    rows = {row["id"]: row for row in select_rows(tx, query)}
    texts = []
    for name in candidate.changed:
        mine = rows[candidate.versions[name]]
        before = rows[theirs[name]]["text"] if name in theirs else None
        texts.append(CandidateText(name, mine["version"], mine["text"], before))
    newest = max((rows[candidate.versions[name]] for name in candidate.changed), key=lambda row: row["id"], default=None)
    critic = _find_critic_calls(tx, run_id, newest) if newest and candidate.parent is not None else []
    return CandidateOrigin(texts, critic)


def _find_critic_calls(tx: Any, run_id: int, version: Row) -> list[Row]:
    """Return the newest request to the critic whose answer has the text of a version, and the request whose answer is the
    longest one in that request.
    """
    text = version["text"].strip()
    edit = critique = None
    for call in _iterate_calls(tx, run_id, version["created_at"]):
        answer = call["answer"].strip()
        if edit is None:
            edit = call if text in answer else None
        elif answer in edit["messages"] and len(answer) > len(critique["answer"].strip() if critique else ""):
            critique = call
    return [call for call in (edit, critique) if call]


def _iterate_calls(tx: Any, run_id: int, until: Any) -> Iterator[Row]:
    """Yield the requests to the critic before a time, the newest first, with their messages as one text."""
    last, chars = MAX_ID, 0
    for _ in range(MAX_CALLS // CALLS_AT_ONCE):
        query = """
            SELECT id, model, messages, answer, seconds FROM critic_calls
            WHERE run_id = :id AND id < :last AND created_at <= :until ORDER BY id DESC LIMIT :limit"""
        rows = select_rows(tx, query, id=run_id, last=last, until=until, limit=CALLS_AT_ONCE)
        for row in rows:
            messages = row["messages"] if isinstance(row["messages"], list) else []
            contents = [str(one.get("content", "")) for one in messages if isinstance(one, Mapping)]
            chars += len(row["answer"]) + sum(map(len, contents))
            if chars > MAX_CALLS_CHARS:
                return
            yield {**row, "messages": "\n\n".join(contents)}
        if len(rows) < CALLS_AT_ONCE:
            return
        last = rows[-1]["id"]


def diff_lines(before: str, after: str, before_title: str = "", after_title: str = "") -> list[str]:
    """Return the lines of a unified diff of two texts, without control characters. Only the first lines of long texts are
    compared; the last line of the result then says so.
    """
    one, other = (clean(text).splitlines() for text in (before, after))
    left_out = max(len(one), len(other)) - MAX_DIFF_LINES
    lines = unified_diff(one[:MAX_DIFF_LINES], other[:MAX_DIFF_LINES], before_title, after_title, lineterm="", n=2)
    return [*lines, *([f"... {format_count(left_out, 'more line')} not compared"] if left_out > 0 else [])]
