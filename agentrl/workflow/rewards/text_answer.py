"""text_answer: 1.0 if the final answer equals the reference word for word, else 0.0.

The answer is the text after the last `####` of the last turn, else the last line of that turn. A leading `Answer:` is removed.
Case, punctuation at the ends of words, articles and extra spaces are ignored. `metadata["aliases"]` lists other right answers.
A turn that called a tool, or was cut off at a limit, is not an answer.
"""

import re
import unicodedata

from agentrl.workflow.trajectory import Episode

MAX_CHARACTERS = 10_000
"""The most characters of a reference and of an answer. A longer answer counts as wrong. Normalising accents takes time
quadratic in the number of characters.
"""

LEAD = re.compile(r"(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is\b\s*:?|:))\s*", re.IGNORECASE)
ARTICLES = frozenset({"a", "an", "the"})
ENDS = "\"'`*_.,;:!?()[]{}\u201c\u201d\u2018\u2019"


def text_answer(episode: Episode) -> float:
    """Return 1.0 if the answer is right, else 0.0. Raise ValueError if the reference or an alias has no usable word."""
    references = (episode.task.reference, *episode.task.metadata.get("aliases", ()))
    if any(len(text) > MAX_CHARACTERS for text in references):
        raise ValueError(f"a reference of task {episode.task.key!r} has more than {MAX_CHARACTERS} characters")
    right = set(map(normal, references))
    if "" in right:
        raise ValueError(f"a reference of task {episode.task.key!r} contains no word")
    if episode.stop_reason != "answered":
        return 0.0
    answer = read_answer(episode.final_answer)
    return float(len(answer) <= MAX_CHARACTERS and normal(answer) in right)


text_answer.reference_form = "#### {}"  # type: ignore[attr-defined]


def read_answer(text: str) -> str:
    """Return the text after the last `####`, or else the last line, without a leading `Answer:`."""
    marked = text.rpartition("####")
    answer = marked[2] if marked[1] else text
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if not lines:
        return ""
    line = (lines[0] if marked[1] else lines[-1]).lstrip("*_ ")
    return LEAD.sub("", line, count=1) if LEAD.match(line) else line


def normal(text: str) -> str:
    """Return the words of a text in lower case, without articles and without punctuation at their ends."""
    terms = (term.strip(ENDS) for term in unicodedata.normalize("NFKC", text).casefold().split())
    return " ".join(term for term in terms if term and term not in ARTICLES)
