"""What the benchmark's models and workloads say, on both sides of a comparison, is what they were made to say."""

from itertools import pairwise
from pathlib import Path

import torch

from agentrl.workflow.chat.parsing import parse_text
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import Message, ToolCall
from bench.performance import digits, lookup, parrot
from bench.performance.models import VOCABULARY

TURNS = [(task, turn) for task in range(lookup.TASKS) for turn in range(lookup.TURNS)]


def test_every_word_of_the_script_is_followed_by_one_other() -> None:
    followers: dict[str, set[str]] = {}
    for place in TURNS:
        for word, following in pairwise([lookup.cue(*place), *lookup.script(*place)]):
            followers.setdefault(word, set()).add(following)
    assert all(len(words) == 1 for words in followers.values())
    assert not followers.keys() & {lookup.call(*place) for place in TURNS}


def test_the_parrots_head_answers_every_word_with_the_next() -> None:
    tokenizer = parrot.scripted_tokenizer()
    assert len(tokenizer) == VOCABULARY
    embeddings, head = parrot.scripted_weights(tokenizer)
    for place in TURNS[:: lookup.TASKS]:
        said = tokenizer.convert_tokens_to_ids([lookup.cue(*place), *lookup.script(*place), parrot.END])
        logits = torch.nn.functional.normalize(embeddings[said[:-1]]) @ head.T
        assert logits.argmax(-1).tolist() == said[1:]
        assert len(said) - 1 == lookup.length(*place)


def test_an_episode_of_the_script_is_two_calls_and_an_answer() -> None:
    [task] = [task for task in lookup.dataset.load("train") if task.key == "train/7"]
    chat, look = Chat(parrot.scripted_tokenizer()), lookup.tool_0
    cues: list[str] = []
    calls: tuple[ToolCall, ...] = ()
    for turn in range(lookup.TURNS):
        message = parse_text("".join(lookup.script(7, turn)))
        heard = task.messages if turn == 0 else (Message("tool", look.call(calls[0].arguments), name="look"),)
        ids = chat.opening(heard, [look.schema]) if turn == 0 else chat.continuation(heard, [look.schema])[0]
        assert ids is not None
        cues.append(chat.decode(ids[-1:]))
        calls = message.tool_calls
    assert cues == [lookup.cue(7, turn) for turn in range(lookup.TURNS)]
    assert calls == ()


def test_the_endless_model_never_says_its_end(tmp_path: Path) -> None:
    path = parrot.endless("tiny", tmp_path)
    policy = Policy.load(ModelConfig(path=str(path)), str(path), "cpu")
    with policy.sampling() as model, torch.no_grad():
        prompt = policy.chat.opening([Message("user", digits.question(0))])
        logprobs = model(input_ids=torch.tensor([prompt])).logits.log_softmax(-1)[0]
    assert len(prompt) == 64
    said = ~torch.isin(torch.tensor(prompt), torch.tensor(sorted(policy.chat.end_ids)))
    assert float(logprobs[said][:, sorted(policy.chat.end_ids)].max()) < -50
