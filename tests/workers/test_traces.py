"""An agent's own OpenTelemetry exporter posts to the endpoint: its spans are rows of its episode, once, and of no other."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx2
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from agentrl.workers.serving.endpoint_app import EndpointLimits
from agentrl.workflow.agents.keys import key_hash, new_emit_key, sampling_key
from agentrl.workflow.spans.otlp import JSON, PROTOBUF
from tests.spans.test_otlp import HOSTILE, TRACE, as_json, empty_attributes, hostile_export
from tests.support.agents_stage import Stage, write
from tests.support.played_runs import value, values
from tests.support.served_endpoint import Served, attempt, endpoint_over
from tests.workers.test_annotations import began, db, served, stage
from tests.workers.test_workers import in_memory

__all__ = ["db", "in_memory", "served", "stage"]


def post(served: Served, key: str, body: bytes, kind: str = JSON, **headers: str) -> httpx2.Response:
    told = {
        "authorization": f"Bearer {key}",
        "content-type": kind,
        **{name.replace("_", "-"): v for name, v in headers.items()},
    }
    return httpx2.post(f"{served.url}/v1/traces", content=body, headers=told, timeout=300, verify=False)


def test_traces_take_real_exporter_and_write_resent_spans_once(stage: Stage, served: Served) -> None:
    number, key = began(stage)
    exporter = OTLPSpanExporter(endpoint=f"{served.url}/v1/traces", headers={"x-api-key": key})
    provider = TracerProvider(resource=Resource({"agentlightning.rollout_id": str(number)}))
    kept: list[Any] = []
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("agent")
    for name, told in (
        ("agentlightning.reward", {"agentlightning.reward.0.name": "exact", "agentlightning.reward.0.value": 0.75}),
        ("agentlightning.message", {"agentlightning.message.body": "the plan"}),
        ("execute_tool", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "calculator"}),
    ):
        with tracer.start_as_current_span(name, attributes=told) as span:
            kept.append(span)
    assert exporter.export(kept) == SpanExportResult.SUCCESS
    provider.shutdown()
    rows = values(stage.db, "SELECT kind || ':' || name FROM annotations ORDER BY id")
    assert rows == ["reward:exact", "message:", "span:execute_tool calculator"]
    assert value(stage.db, "SELECT count(*) FROM v_annotations WHERE seconds > 0") == 2


def test_traces_refuse_foreign_episode_and_key(stage: Stage, served: Served) -> None:
    number, key = began(stage)
    other = [{"key": "agentlightning.rollout_id", "value": {"stringValue": str(number + 1)}}]
    refused = post(served, key, as_json(attributes=other))
    assert refused.status_code == 400
    assert f"a span belongs to episode {number + 1}, but the key belongs to another" in refused.json()["message"]
    assert post(served, key, as_json(attributes=[{**other[0], "value": {"stringValue": "ro-abc"}}])).status_code == 200
    for wrong in (new_emit_key(), sampling_key(key), "x"):
        assert post(served, wrong, as_json()).status_code == 401
    assert value(stage.db, "SELECT count(*) FROM annotations") == 1


def test_traces_refuse_garbage_and_bombs_without_a_trace(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    for name in HOSTILE:
        body, kind, encoding = hostile_export(name)
        refused = post(served, key, body, kind, **({"content_encoding": encoding} if encoding else {}))
        assert (refused.status_code, refused.headers["content-type"]) == (400, kind), name
        assert b"Cannot read the traces" in refused.content, name
        assert value(stage.db, "SELECT count(*) FROM annotations") == 0, name


def test_traces_invalid_span_costs_no_other(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    spans = json.loads(as_json())["resourceSpans"][0]["scopeSpans"][0]["spans"]
    bad = {**spans[0], "spanId": "ef" * 8, "name": "agentlightning.reward"}
    many = [{**spans[0], "spanId": f"{n:016x}"} for n in range(1, 251)]
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [*many, bad]}]}]}).encode()
    told = post(served, key, gzip.compress(body), content_encoding="gzip")
    assert told.status_code == 200
    assert told.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert "agentlightning.reward.0.value" in told.json()["partialSuccess"]["errorMessage"]
    assert value(stage.db, "SELECT count(*) FROM annotations") == 250


@pytest.mark.slow
def test_traces_of_busy_client_delay_no_other(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    other = new_emit_key()
    made = attempt(stage.db, "other")
    write(stage.db, f"UPDATE agent_attempts SET key_hash = '{key_hash(sampling_key(other))}' WHERE episode_id = {made.episode}")
    heavy = gzip.compress(empty_attributes(4_000_000))
    with ThreadPoolExecutor(12) as pool:
        posted = [pool.submit(post, served, key, heavy, PROTOBUF, content_encoding="gzip") for _ in range(12)]
        next(as_completed(posted))
        assert post(served, other, b"{", JSON).status_code == 400
        assert sum(each.done() for each in posted) < 6
        assert {each.result().status_code for each in posted} == {400}
    assert len(served.app._turns) == 0


def test_traces_count_among_held_bytes(stage: Stage) -> None:
    _, key = began(stage)
    text = [{"key": "k", "value": {"stringValue": "x" * 50_000}}]
    spans = [{"traceId": TRACE, "spanId": f"{n:016x}", "attributes": text} for n in range(1, 101)]
    body = gzip.compress(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode())
    with endpoint_over(stage.db, EndpointLimits(held_bytes=2**20)) as small:
        refused = post(small, key, body, content_encoding="gzip")
        assert (refused.status_code, small.app._held_bytes) == (429, 0)
    assert value(stage.db, "SELECT count(*) FROM annotations") == 0


def test_traces_refuse_other_types_methods_and_ended_episodes(stage: Stage, served: Served) -> None:
    _, key = began(stage)
    assert post(served, key, b"x", "text/plain").status_code == 415
    assert post(served, key, b"", PROTOBUF).status_code == 200
    assert httpx2.get(f"{served.url}/v1/traces", timeout=30).status_code == 405
    large = post(served, key, b"x" * (9 * 2**20))
    assert large.status_code == 413
