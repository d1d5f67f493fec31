"""Which engine may sample for which run, and what a process needs that uses one."""

from pathlib import Path

import pytest

from agentrl.cli.conversation import Talk
from agentrl.workers.jobs.model_slot import Models
from agentrl.workers.requests.submit import prepare
from agentrl.workflow import engines
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig, RunConfig, build
from agentrl.workflow.errors import CheckpointError, ConfigError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference.open_policy import open_policy
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import PolicyRef
from tests.support.model_server import served
from tests.support.small_models import tiny_random

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base") / "small")


def test_submit_refuses_run_that_engine_cannot_sample() -> None:
    exact, full, small = build({"model.numerics": "exact"}), build({"model.lora_r": 0}), build({"model.lora_r": 4})
    for name, config, said in [
        ("openai", exact, "numerics: exact"),
        ("openai", full, "kind 'full'"),
        ("llamacpp", small, "only from unchanged base models"),
        ("llamacpp", build({}), "only from unchanged base models"),
        ("openai", build({"model.load_in_4bit": True}), "quantise"),
        ("openai", build({"model.sampler_dtype": "bfloat16"}), "sampler_dtype"),
    ]:
        with pytest.raises(ConfigError, match=said):
            engines.check(find("engines", name), config, trains=True)
    engines.check(find("engines", "openai"), small, trains=True)
    engines.check(find("engines", "rolling"), full, trains=True)
    engines.check(find("engines", "llamacpp"), full, trains=False)
    engines.check(find("engines", "openai"), full, trains=False)
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        engines.check(find("engines", "llamacpp"), build({"rollout.temperature": 0.5}), trains=False)
    for name in ("openai", "rolling"):
        engines.check(find("engines", name), build({"rollout.temperature": 0.5, "model.lora_r": 4}), trains=True)


@pytest.mark.parametrize(
    ("name", "rank", "said"), [("llamacpp", 4, "only from unchanged base models"), ("openai", 0, "kind 'full'")]
)
def test_submit_refuses_eval_of_weights_engine_cannot_sample(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, name: str, rank: int, said: str
) -> None:
    at_url(monkeypatch, "http://127.0.0.1:9")
    config = build({"model.path": str(folder), "model.lora_r": rank, "dataset.name": "arithmetic", "rollout.engine": name})
    with pytest.raises(ConfigError, match=said):
        prepare(None, config, kind="eval", policy=PolicyRef(str(folder), "hash", "runs/v1", "sha256", 1))
    assert prepare(None, config, kind="eval").submission.kind == "eval"


def at_url(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AGENTRL_ENGINE_URL", url)
    settings.cache_clear()


def over_a_server(folder: Path, **more: object) -> RunConfig:
    return build({"model.path": str(folder), "dataset.name": "arithmetic", "rollout.engine": "openai", **more})


def test_submit_refuses_full_training_on_adapter_only_engine(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_url(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"kind 'full'.*model\.lora_r"):
        prepare(None, over_a_server(folder))
    assert prepare(None, over_a_server(folder, **{"model.lora_r": 4})).submission.kind == "train"
    monkeypatch.setattr("agentrl.workflow.models.lookup.SMALL", 1)
    assert prepare(None, over_a_server(folder)).submission.kind == "train"


@pytest.mark.parametrize("url", ["", "bogus", "ftp://x", "http://", "http://host:port", "http://a\x01b"])
def test_submit_refuses_invalid_engine_url(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    at_url(monkeypatch, url)
    with pytest.raises(ConfigError, match=r"AGENTRL_ENGINE_URL=http://HOST:PORT"):
        prepare(None, over_a_server(folder, **{"model.lora_r": 4}))
    monkeypatch.setenv("AGENTRL_BROKER_URL", "redis://elsewhere")  # whose workers have an environment of their own
    settings.cache_clear()
    assert prepare(None, over_a_server(folder, **{"model.lora_r": 4})).submission.kind == "train"


def test_train_worker_needs_no_engine_server(folder: Path, home: Path) -> None:
    config = build({"model.path": str(folder), "model.lora_r": 4, "rollout.engine": "openai"})
    with Models().use(Experiment(config), str(folder)) as loaded:
        loaded.release()
        assert loaded.policy.trainable()
        with pytest.raises(ConfigError, match=r"AGENTRL_ENGINE_URL.*agentrl down"):
            assert loaded.engine


def test_lazy_weights_are_those_that_were_hashed(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "small")
    late = Policy.load(ModelConfig(lora_r=4), str(base), "cpu", 1, weights=False)
    tiny_random(base, seed=1)
    with pytest.raises(CheckpointError, match="has changed"):
        late.trainable()


def test_chat_with_trained_policy_works_over_server(
    folder: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Policy.load(ModelConfig(lora_r=4), str(folder), "cpu", 1)
    sha256 = sealed_folder.write(tmp_path / "v1", lambda beside: trainer.save_weights(beside / sealed_folder.WEIGHTS))
    ref = PolicyRef(str(folder), trainer.base_hash, str(tmp_path / "v1"), sha256, 1)
    config = build({"model.path": str(folder), "model.lora_r": 4, "rollout.engine": "openai"})
    with served(folder) as (routes, url):
        at_url(monkeypatch, url)
        talk = Talk(open_policy(config, ref, max_new_tokens=8), find("envs", "arithmetic"))
        assert list(talk.answer("What is 2 plus 2?"))
        talk.close()
        assert {each.model for each in routes.sampled} == {ref.sha256}
    with pytest.raises(ConfigError, match="only from unchanged base models"):
        open_policy(config, ref, engine="llamacpp")
