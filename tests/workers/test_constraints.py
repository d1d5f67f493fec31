"""What clients require of a turn, in every dialect, with the real sampler: kept by a grammar, or told and named as a wish."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from agentrl.workers.jobs import agent_rollout
from agentrl.workflow.analysis.credit_reasons import returns_of
from agentrl.workflow.analysis.verify_episode import TokensReport
from agentrl.workflow.analysis.verify_tokens import check_tokens
from agentrl.workflow.chat import grammar
from agentrl.workflow.chat.grammar import recorded_grammar
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.steps import load_requests
from agentrl.workflow.training.training_rows import TokenLayout, rows_of
from agentrl.workflow.trajectory import Episode, Group, PolicyRef
from tests.inference.test_guided_sampling import TOO_COMPLEX
from tests.support.agents_stage import AGENT, Stage, episode_of, group_of, run_agent, staged
from tests.support.dialect_clients import CALCULATOR, CHAT_DIALECT, CLIENTS, MESSAGES, RESPONSES, DialectClient, openai_client
from tests.support.played_runs import start, submission
from tests.support.served_endpoint import endpoint_over
from tests.support.small_models import tiny_random
from tests.workers import test_agent_rollout
from tests.workers.test_agent_endpoint import held
from tests.workers.test_agent_rollout import db as db
from tests.workers.test_dialects import Place
from tests.workers.test_workers import in_memory as in_memory

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SUM = ("plus", "Adds.", SCHEMA)
chat_dialects = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.path[4:])


class Number(BaseModel):
    """What a structured output is read into."""

    model_config = ConfigDict(extra="forbid")

    n: int


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tiny_random(tmp_path_factory.mktemp("model"))
    return Policy(ModelConfig.model_validate({"path": str(folder), "lora_r": 0}), folder, "cpu")


@contextmanager
def placed(db: Database, policy: Policy, **agent: Any) -> Iterator[Place]:
    """A rollout with the real sampler of random weights behind an endpoint."""
    engine = RollingEngine(policy, 8)
    wanted = submission(tasks=1)
    rollout = {**wanted.config["rollout"], "group_size": 1, "max_new_tokens": 300}
    config = {**wanted.config, "agent": {**AGENT, **agent}, "rollout": rollout}
    weights = PolicyRef(str(policy.folder), policy.base_hash)
    (group,) = start(db, replace(wanted, config=config, group_size=1, policy=weights))
    try:
        with staged(Stage(db, group, engine, policy.chat, 2048)) as stage, endpoint_over(db) as served:
            held(stage)
            yield Place(db, stage, served.url, run_agent(db, 1, "key-of-1"))
    finally:
        engine.close()


def required(client: DialectClient, tool: str = "") -> dict[str, Any]:
    """The fields that require a call of any tool, or of one."""
    if client is MESSAGES:
        return {"tool_choice": {"type": "tool", "name": tool} if tool else {"type": "any"}}
    if client is RESPONSES:
        return {"tool_choice": {"type": "function", "name": tool} if tool else "required"}
    return {"tool_choice": {"type": "function", "function": {"name": tool}} if tool else "required"}


def one_call(client: DialectClient) -> dict[str, Any]:
    return (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        if client is MESSAGES
        else {"parallel_tool_calls": False}
    )


def schema_of(client: DialectClient) -> dict[str, Any]:
    if client is MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    if client is RESPONSES:
        return {"text": {"format": {"type": "json_schema", "name": "number", "schema": SCHEMA}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}}


@chat_dialects
def test_required_tool_is_called_with_valid_arguments(db: Database, policy: Policy, client: DialectClient) -> None:
    with placed(db, policy) as place:
        for question in ("a", "b", "c"):
            history = [client.user(question)]
            called = client.ask(place.url, place.key, history, tools=[SUM, CALCULATOR], **required(client, "plus"))
            assert called.calls
            assert all(name == "plus" and isinstance(given["n"], int) for _, name, given in called.calls)
        streamed = client.ask(place.url, place.key, [client.user("d")], stream=True, tools=[SUM], **required(client))
        assert streamed.calls
        steps = episode_of(db, 1).steps
        records = [request.asked["grammar"] for request in load_requests(db, [1])[1].values()]
    assert {record["kept"] for record in records} == {True}
    assert {record["library"] for record in records} == {grammar.library()}
    assert all(len(record["sha256"]) == 64 for record in records)
    for step in steps:
        assert step.guided, "a random model would have drawn other tokens"
        assert set(step.guided) <= set(range(len(step.sampled_ids)))


@chat_dialects
def test_schema_of_the_answer_is_kept(db: Database, policy: Policy, client: DialectClient) -> None:
    with placed(db, policy) as place:
        turn = client.ask(place.url, place.key, [client.user("x")], **schema_of(client))
        assert isinstance(Number.model_validate_json(turn.text).n, int)
        answer = place.post(client, client.body([client.user("y")], **schema_of(client)))
        assert "x-agentrl-not-applied" not in answer.headers


def test_sdk_helpers_read_structured_outputs(db: Database, policy: Policy) -> None:
    with placed(db, policy) as place, openai_client(place.url, place.key) as client:
        message = (
            client.chat.completions.parse(model="m", messages=[{"role": "user", "content": "x"}], response_format=Number)
            .choices[0]
            .message
        )
        assert isinstance(message.parsed, Number)
        assert isinstance(client.responses.parse(model="m", input="x", text_format=Number).output_parsed, Number)
        many = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "z"}], n=20, max_tokens=4)
        assert len(many.choices) == 20


def test_guided_tokens_do_not_train(db: Database, policy: Policy) -> None:
    with placed(db, policy) as place:
        CHAT_DIALECT.ask(place.url, place.key, [CHAT_DIALECT.user("x")], **schema_of(CHAT_DIALECT))
        CHAT_DIALECT.ask(place.url, place.key, [CHAT_DIALECT.user("free")], max_tokens=5)
        episode = episode_of(db, 1)
    guided, free = episode.steps
    assert list(guided.guided) == list(range(len(guided.sampled_ids))), "the grammar chose each token of this model"
    (row,) = rows_of([episode])
    assert row.input_ids[-len(free.sampled_ids) :] == free.sampled_ids
    assert sum(row.loss_mask) == len(free.sampled_ids)
    some = replace(episode, steps=(replace(guided, guided=(0, 2)), free))
    first = rows_of([some])[0]
    trained = [index for index, trains in enumerate(first.loss_mask[len(guided.prompt_ids) :]) if trains]
    assert trained == [1, *range(3, len(guided.sampled_ids))]
    assert first.action_mask[len(guided.prompt_ids) :] == (True,) * len(guided.sampled_ids)
    rewarded = replace(some, reward=1.0)
    layout = TokenLayout.of([rewarded])
    earned = layout.make_earned([Group(rewarded.task, (rewarded,))])
    assert int(layout.lengths[0]) == len(trained) + len(free.sampled_ids)
    assert float(earned.rewards.sum()) == 2.0, "each of the two chains ends with the reward"
    assert earned.turns[0].tolist() == [0] * len(trained) + [1] * len(free.sampled_ids)
    assert [stretch.tokens for stretch in returns_of(rewarded, 1.0)] == [len(trained), len(free.sampled_ids)]


def test_draws_within_a_grammar_are_repeated(db: Database, policy: Policy) -> None:
    with placed(db, policy) as place:
        for question in "ab":
            CHAT_DIALECT.ask(place.url, place.key, [CHAT_DIALECT.user(question)], **schema_of(CHAT_DIALECT))
        CHAT_DIALECT.ask(place.url, place.key, [CHAT_DIALECT.user("free")], max_tokens=5)
        episode, work = episode_of(db, 1), place.stage.driver.work
        requests = load_requests(db, [1])[1]
    refs, limits = dict.fromkeys(requests, work.policy), place.stage.driver.limits
    records = {index: request.asked["grammar"] for index, request in requests.items() if "grammar" in request.asked}

    def check(episode: Episode, records: Any = records) -> TokensReport:
        asked = {index: (request.tools, request.template_options) for index, request in requests.items()}
        key = work.sampling_key(episode)
        return check_tokens(episode, refs, {}, policy, (), key, limits, asked, clock=work.clock, constraints=records)

    def with_token(place: int, token: int) -> Episode:
        first = episode.steps[0]
        ids = (*first.sampled_ids[:place], token, *first.sampled_ids[place + 1 :])
        return replace(episode, steps=(replace(first, sampled_ids=ids), *episode.steps[1:]))

    report = check(episode)
    assert (report.same, report.unverified) == (True, ())
    assert sum(step.same for step in report.steps) == sum(len(step.sampled_ids) for step in episode.steps)
    assert report.limited == sum(len(step.sampled_ids) for step in episode.steps[:2])
    matcher = policy.chat.grammars.matcher(recorded_grammar(records[0], (), policy.chat, ()))
    (only,) = matcher.allowed(policy.vocabulary).nonzero()[0][:1]
    for token in range(only + 2, only + 5):  # next to the allowed one in the vocabulary, or not
        assert check(with_token(0, token)).draw is not None
    for change in ({"library": "llguidance 0.0.1"}, {"sha256": "0" * 64}, {"schema": "{}"}):
        report = check(episode, {**records, 0: records[0] | change})
        assert report.same
        assert report.limited == len(episode.steps[1].sampled_ids)
        assert [sentence.partition(" (")[0] for sentence in report.unverified] == ["constrained: not checked"]
        assert [bool(step.same) for step in report.steps] == [False, True, True]


@chat_dialects
def test_at_most_one_call_ends_the_turn_at_its_mark(db: Database, client: DialectClient) -> None:
    twice = test_agent_rollout.CHAT.turn(
        test_agent_rollout.Message("assistant", "", tool_calls=(test_agent_rollout.CALL, test_agent_rollout.CALL))
    )
    scripted = test_agent_rollout.Policy(twice)
    with staged(Stage(db, group_of(db, 1), scripted.engine, test_agent_rollout.CHAT)) as stage, endpoint_over(db) as served:
        held(stage)
        key = run_agent(db, 1, "key-of-1")
        client.ask(served.url, key, [client.user("x")], tools=[CALCULATOR], **one_call(client))
        assert scripted.requests[0].stop == ("</tool_call>",)
        client.ask(served.url, key, [client.user("y")], tools=[CALCULATOR])
        assert scripted.requests[1].stop == ()


@chat_dialects
def test_constraint_without_the_library_is_told_and_named(
    db: Database, policy: Policy, client: DialectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "library", lambda: "")
    with placed(db, policy) as place:
        body = client.body([client.user("x")], tools=[SUM], **required(client, "plus"))
        answer = place.post(client, body)
        assert answer.status_code == 200, answer.text
        assert "tool_choice" in answer.headers["x-agentrl-not-applied"]
        record = next(iter(load_requests(db, [1])[1].values())).asked
        assert record["grammar"] == {"tool": "plus", "kept": False}
        assert "tool_choice" in record["not_applied"]
        assert episode_of(db, 1).steps[0].prompt[0].content == "Call the tool plus."
        assert episode_of(db, 1).steps[0].guided == ()


@chat_dialects
def test_strict_api_refuses_wishes_in_the_dialects_shape(
    db: Database, policy: Policy, client: DialectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "library", lambda: "")
    with placed(db, policy, strict_api=True) as place:
        answer = place.post(client, client.body([client.user("x")], tools=[SUM], **required(client)))
        assert answer.status_code == 400
        assert "it cannot be enforced, because the package llguidance is not installed" in client.error_of(answer.json())
        answer = place.post(client, client.body([client.user("x")]) | {"top_k": 4, "presence_penalty": 1.0})
        assert answer.status_code == 400
        assert "presence_penalty" in client.error_of(answer.json())
        assert not episode_of(db, 1).steps


@chat_dialects
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a$", "enum": ["b"]},
        {"$ref": "#/$defs/nowhere"},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
        },
        {"enum": ["x" * 70_000]},
        {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(4000)}},
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}$"} for n in range(20)]},
    ],
    ids=["unsatisfiable", "dangling", "endless", "large", "many", "hours"],
)
def test_impossible_schema_is_refused_in_one_sentence(db: Database, policy: Policy, client: DialectClient, schema: Any) -> None:
    fields = json.loads(json.dumps(schema_of(client)).replace(json.dumps(SCHEMA), json.dumps(schema)))
    with placed(db, policy) as place:
        answer = place.post(client, client.body([client.user("x")], **fields))
        assert answer.status_code == 400
        assert len(client.error_of(answer.json())) < 600
        assert not episode_of(db, 1).steps


@chat_dialects
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_turn_of_too_complex_schema_is_recorded(db: Database, policy: Policy, client: DialectClient, stream: bool) -> None:
    fields = json.loads(json.dumps(schema_of(client)).replace(json.dumps(SCHEMA), json.dumps(TOO_COMPLEX)))
    with placed(db, policy) as place:
        answer = place.post(client, client.body([client.user("x")], stream=stream, **fields))
        assert answer.status_code == 200
        client.ask(place.url, place.key, [client.user("y")], max_tokens=3)
        (cut, free), requests = episode_of(db, 1).steps, load_requests(db, [1])[1]
    assert (cut.finish_reason, free.finish_reason) == ("length", "length")
    assert cut.sampled_ids
    assert requests[0].asked["grammar"]["kept"] is False


@chat_dialects
def test_turn_whose_grammar_gives_no_token_is_refused(
    db: Database, policy: Policy, client: DialectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with placed(db, policy) as place:
        with monkeypatch.context() as patch:
            patch.setattr(agent_rollout, "grammar_of", lambda ask, ids, chat: "start: nowhere")
            answer = place.post(client, client.body([client.user("x")], **schema_of(client)))
        assert answer.status_code == 400
        assert "cannot be compiled" in client.error_of(answer.json())
        assert client.ask(place.url, place.key, [client.user("x")], **schema_of(client)).text
        assert len(episode_of(db, 1).steps) == 1


def test_tool_that_is_not_offered_cannot_be_required(db: Database, policy: Policy) -> None:
    with placed(db, policy) as place:
        for client in CLIENTS:
            answer = place.post(client, client.body([client.user("x")], tools=[SUM], **required(client, "nowhere")))
            assert answer.status_code == 400
            assert "nowhere" in client.error_of(answer.json())
            answer = place.post(client, client.body([client.user("x")], **required(client)))
            assert answer.status_code == 400


def test_penalties_are_recorded_and_named(db: Database, policy: Policy) -> None:
    with placed(db, policy) as place:
        body = CHAT_DIALECT.body([CHAT_DIALECT.user("x")], max_tokens=3, presence_penalty=1.5, logit_bias={"5": -100})
        answer = place.post(CHAT_DIALECT, body)
        assert answer.headers["x-agentrl-not-applied"] == "presence_penalty, logit_bias"
        assert next(iter(load_requests(db, [1])[1].values())).asked["not_applied"] == ["presence_penalty", "logit_bias"]
