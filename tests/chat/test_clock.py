"""Chat templates that print the time always read the same one."""

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.templates import check_template, resolve_chat
from agentrl.workflow.chat.tiny_template import TEMPLATE
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.tiny import tiny_tokenizer
from agentrl.workflow.trajectory import Message
from tests.chat.test_rendering import CALLING, QUESTION, RESULT, SCHEMA
from tests.support.small_models import tiny_random

DATED = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y %H:%M:%S.%f') }}.<|im_end|>\n" + TEMPLATE
MIDNIGHT = datetime(2026, 11, 25, 23, 59, 59, 5, tzinfo=UTC)


def dated() -> Chat:
    """A chat whose template prints the time to the microsecond."""
    tokenizer = tiny_tokenizer([])
    tokenizer.chat_template = DATED
    return Chat(tokenizer)


def test_chat_at_sets_time_of_template() -> None:
    text = dated().decode(dated().at(MIDNIGHT).opening([QUESTION]))
    assert "Today is 25 Nov 2026 23:59:59.000005." in text
    elsewhere = MIDNIGHT.astimezone(timezone(timedelta(hours=9)))
    assert dated().at(elsewhere).opening([QUESTION]) == dated().at(MIDNIGHT).opening([QUESTION])


def test_continuation_is_exact_later_if_templates_print_time() -> None:
    first, second = dated(), dated().at(MIDNIGHT)
    for chat in (first, second, first.at(MIDNIGHT + timedelta(days=400))):
        opening = chat.opening([QUESTION], [SCHEMA])
        ids, reason = chat.continuation([RESULT], [SCHEMA], chat.turn(CALLING))
        assert ids is not None, reason
        assert opening + chat.turn(CALLING) + ids == chat.opening([QUESTION, CALLING, RESULT], [SCHEMA])


def test_check_template_accepts_a_template_that_prints_the_time(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    check_template(resolve_chat(ModelConfig(chat_template=DATED), folder), folder, system=True, tools=True)


def test_chat_at_another_time_shares_no_cached_prompt() -> None:
    chat = dated()
    early, late = chat.at(MIDNIGHT), chat.at(MIDNIGHT + timedelta(days=1))
    turn = Message("assistant", "19")
    assert early.turn(turn) == late.turn(turn) == chat.turn(turn)
    for each in (early, late, early):
        assert each.continuation([QUESTION])[0] is not None
    assert early.opening([QUESTION]) != late.opening([QUESTION])
    assert early.opening([QUESTION]) == chat.at(MIDNIGHT).opening([QUESTION])
