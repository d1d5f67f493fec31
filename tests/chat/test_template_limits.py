"""Templates that never end or fill the memory: each is refused in a sentence, and the next rendering is not disturbed."""

import os
import signal
import threading
from pathlib import Path

import pytest

from agentrl.workers.requests.submit import prepare
from agentrl.workflow.chat import template_process
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.templates import MAX_CONFIG_BYTES, read_template, resolve_chat, source_of
from agentrl.workflow.chat.tiny_template import TEMPLATE
from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.tiny import tiny_tokenizer
from agentrl.workflow.trajectory import Message
from tests.support.chat_families import PLAIN
from tests.support.small_models import tiny_random

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": LOOPS,
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "number": "{{ (messages | length + 9) ** (9 ** 9) }}",
    "number while it is compiled": "{{ 9 ** (9 ** 9) }}",
    "text": "{{ 'x' * 10 ** 10 }}",
    "doubled text": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "nested lists": "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "filter": "{{ 'x' | center(10 ** 10) }}",
}


@pytest.fixture(autouse=True)
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "CPU_SECONDS", 1)


@pytest.mark.parametrize("case", HOSTILE)
def test_template_over_limits_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    folder = tiny_random(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(PLAIN + HOSTILE[case])
    with pytest.raises(ModelError, match="exceeds a limit: 1 s of processor time") as caught:
        resolve_chat(ModelConfig(), folder)
    assert caught.value.message == "The chat template exceeds a limit: 1 s of processor time, 100 s in all, or 1 GiB of memory."
    assert "--chat-template FILE" in caught.value.hint


def test_template_file_over_limits_is_refused_by_submit(tmp_path: Path, home: Path) -> None:
    folder, file = tiny_random(tmp_path / "model"), tmp_path / "bad.jinja"
    file.write_text(PLAIN + LOOPS)
    with pytest.raises(ModelError, match="exceeds a limit: 1 s of processor time"):
        prepare(None, build({"model.path": str(folder), "dataset.name": "arithmetic", "model.chat_template": str(file)}))
    with pytest.raises(ModelError, match="exceeds a limit: 1 s of processor time"):
        read_template("{{ 9 ** (9 ** 9) }}")


def test_template_that_hangs_on_one_message_refuses_it_alone() -> None:
    tokenizer = tiny_tokenizer([])
    tokenizer.chat_template = f"{{% if messages[-1].content == 'stall' %}}{LOOPS}{{% endif %}}{PLAIN}"
    chat = Chat(tokenizer)
    expected = chat.opening([Message("user", "hello")])
    with pytest.raises(ModelError, match="exceeds a limit: 1 s of processor time"):
        chat.opening([Message("user", "stall")])
    assert chat.opening([Message("user", "hello")]) == expected


def test_template_is_rendered_again_after_foreign_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer([])
    tokenizer.chat_template = PLAIN + "{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(template_process, "CPU_SECONDS", 60)
    chat = Chat(tokenizer)
    expected = chat.opening([Message("user", "hello")])
    with template_process.renderers.one() as process:
        pass
    killer = threading.Timer(0.02, process._process.send_signal, [signal.SIGTERM])
    killer.start()
    assert chat.opening([Message("user", "hello")]) == expected
    killer.join()
    assert not process.alive


def test_template_text_is_limited_by_its_input() -> None:
    tokenizer = tiny_tokenizer([])
    tokenizer.chat_template = PLAIN + "{% if messages | length == 1 %}{{ messages[0].content * 1000 }}{% endif %}"
    chat = Chat(tokenizer)
    assert len(chat.decode(chat.opening([Message("user", "x")]))) < 2000
    with pytest.raises(ModelError, match=r"renders 20\d{5} characters, far more than its input\."):
        chat.opening([Message("user", "x" * 2000)])
    long = Message("user", "x" * 2_000_000)
    assert (
        len(template_process.render_template(PLAIN, [{"role": "user", "content": long.content}], [], True, {}, chat._clock))
        > 2_000_000
    )


def test_template_of_tiny_starts_no_process() -> None:
    template_process.renderers.forget()
    tokenizer = tiny_tokenizer([])
    assert tokenizer.chat_template == TEMPLATE
    Chat(tokenizer).opening([Message("user", "hello")])
    assert not template_process.renderers._places.made


def test_template_file_of_model_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text(TEMPLATE)
    assert source_of(tmp_path) == (TEMPLATE, {})
    os.truncate(file, MAX_CONFIG_BYTES + 1)
    assert source_of(tmp_path) is None
