"""RunConfig: where values come from, what is refused, and what helps after a mistake."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.api.options import keys_of
from agentrl.workflow.config import DESCRIPTIONS, KEYS, RunConfig, Section, build
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.resolve import resolve

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small config."""
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 5\nseed: 5\nrollout:\n  group_size: 5\nupdate.learning_rate: 1e-5\n")
    return path


def test_config_has_defaults() -> None:
    config, origins = resolve()
    assert config == RunConfig()
    assert (config.model.path, config.dataset.name, config.epochs) == ("Qwen/Qwen2.5-0.5B-Instruct", "gsm8k", 3)
    assert set(origins.values()) == {"default"}
    assert tuple(origins) == KEYS == tuple(config.flat())


def test_config_precedence_is_assignment_flag_environment_file(file: Path) -> None:
    environ = {"AGENTRL_RUN_SEED": "6", "AGENTRL_RUN_ROLLOUT__GROUP_SIZE": "6", "AGENTRL_RUN_NAME": "six", "HOME": "/"}
    flags = {"rollout.group_size": 7, "name": "seven", "epochs": None}
    config, origins = resolve(file, flags, ("name=eight", "rollout.temperature = 0.5"), environ)
    assert (config.epochs, config.seed, config.rollout.group_size, config.name) == (5, 6, 7, "eight")
    assert (config.update.learning_rate, config.rollout.temperature, config.rollout.max_steps) == (1e-5, 0.5, 4)
    assert {key: origins[key] for key in ("epochs", "seed", "rollout.group_size", "name", "rollout.max_steps")} == {
        "epochs": str(file),
        "seed": "environment",
        "rollout.group_size": "flag",
        "name": "flag",
        "rollout.max_steps": "default",
    }


def test_config_iterations_replace_less_direct_epochs(file: Path) -> None:
    config, origins = resolve(file, {"iterations": 20})
    assert (config.epochs, config.iterations, origins["epochs"]) == (None, 20, "default")
    config, _ = resolve(file, {}, (), {"AGENTRL_RUN_ITERATIONS": "20"})
    assert (config.epochs, config.iterations) == (None, 20)
    file.write_text("iterations: 20\n")
    config, _ = resolve(file, {"epochs": 2})
    assert (config.epochs, config.iterations) == (2, None)
    assert resolve(file, {}, ("iterations=null",))[0].epochs == 3
    assert build(build({"iterations": 20}).flat()).iterations == 20


@pytest.mark.parametrize("assigned", [("epochs=2", "iterations=20"), ("epochs=null",)])
def test_config_length_twice_or_missing_is_refused(assigned: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="epochs and iterations exclude each other: pass one of them"):
        resolve(None, {}, assigned)


def test_config_survives_flat_form() -> None:
    config = build({"hooks": ["a:B"], "dataset.max_tasks": 3, "model.lora_r": 0})
    assert build(config.flat()) == config


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("rollout.group_sise", "rollout.group_size"),
        ("group_size", "rollout.group_size"),
        ("groupsize", "rollout.group_size"),
        ("model.learning_rate", "update.learning_rate"),
        ("epoch", "epochs"),
        ("datasett", "dataset.name"),
        ("datasett.name", "dataset.name"),
        ("modell", "model.path"),
        ("eval.max_samples", "eval.tasks"),
    ],
)
def test_config_unknown_key_gets_nearest_one(key: str, suggestion: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"{key}: 1\n")
    ways: list[dict[str, Any]] = [{"assignments": (f"{key}=1",)}, {"flags": {key: 1}}, {"file": path}]
    for way in ways:
        with pytest.raises(ConfigError, match=f"Unknown option '{key}'.*Did you mean '{suggestion}'"):
            resolve(**way)


def test_config_list_takes_single_text_and_empty() -> None:
    config, _ = resolve(assignments=("hooks=a:B", "source.runs=r", "source.groups=5", "rollout.stop=", "tools="))
    assert (config.hooks, config.source.runs, config.source.groups) == (("a:B",), ("r",), (5,))
    assert (config.rollout.stop, config.tools) == ((), ())
    for wrong in ("hooks=5", "hooks=true", "source.groups=r", "source.groups=true", "source.groups=0"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            resolve(assignments=(wrong,))


def test_config_unknown_key_of_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown option 'rollout.size' \(environment\)"):
        resolve(environ={"AGENTRL_RUN_ROLLOUT__SIZE": "1"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "must contain keys and values, not a list"),
        ("just text", "must contain keys and values, not a str"),
        ("1: 2", "Unknown option '1'"),
        ("rollout: 5", "Unknown option 'rollout'"),
        ("epochs: many", "epochs: .*found 'many'"),
        ("epochs: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("name: {{ name }}", "a key must be text"),
        ("? [1]\n: 2", "a key must be text"),
        ("[" * 20_000, "it nests too deep"),
        ("{a: " * 20_000, "it nests too deep"),
        ("name: 2026-99-99", "is not YAML: month must be in"),
        ("epochs: !!int ''", "an invalid value"),
        ("epochs: !!bool maybe", "an invalid value"),
        ("epochs: !!timestamp soon", "an invalid value"),
        ("seed: 0x" + "f" * 10_000, "a number of 10002 digits is too large"),
        ("a0: &a0 {x: 1}\na1: {<<: [*a0, *a0]}", r"aliases are not supported; write the value of \*a0 in full"),
        ("a: &a [*a]", "aliases are not supported"),
        ("? " + "x" * 100_000 + "\n: 1", "Unknown option 'xxx"),
        (f"name: {'x' * 2_000_000}", "is larger than 1048576 bytes"),
    ],
)
def test_config_file_that_is_invalid_is_one_sentence(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        resolve(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml': No such file"):
        resolve(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not YAML"):
        resolve(tmp_path / "binary.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert resolve(tmp_path / "empty.yaml")[0] == RunConfig()


@pytest.mark.parametrize(
    "assignment",
    [
        *("epochs", "=1", "epochs=[", "epochs={a: 1}", "seed=2026-99-99", "seed=2026-01-01", "name={{ name }}"),
        *("seed=" + "[" * 2000, "seed=" + "9" * 5000, "seed=0b" + "1" * 50_000),
    ],
)
def test_config_assignment_that_cannot_be_read_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError):
        resolve(assignments=(assignment,))


def test_config_environment_value_must_be_yaml() -> None:
    with pytest.raises(ConfigError, match="The value of 'AGENTRL_RUN_EPOCHS' is not YAML"):
        resolve(environ={"AGENTRL_RUN_EPOCHS": "["})


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": 0},
        {"seed": -1},
        {"seed": 2**31},
        {"name": "../up"},
        {"name": "a\x1b[2J"},
        {"name": "A"},
        {"name": ""},
        {"rollout.temperature": 0},
        {"rollout.temperature": float("nan")},
        {"rollout.top_k": -1},
        {"source.groups": [2**63]},
        {"rollout.top_p": 0},
        {"rollout.top_p": 1.1},
        {"rollout.min_p": -0.1},
        {"rollout.min_p": 1.1},
        {"rollout.stop": [""]},
        {"rollout.stop": ""},
        {"rollout.stop": ["\ud800"]},
        {"rollout.stop": {"Observation": None}},
        {"rollout.group_size": 1.5},
        {"update.learning_rate": -1},
        {"dataset.max_tasks": 0},
        {"model.load_in_4bit": True, "model.load_in_8bit": True},
        {"model.load_in_4bit": True, "model.lora_r": 0},
        {"model.numerics": "exact", "model.dtype": "float32"},
        {"model.dtype": "float8"},
        {"model.attn_implementation": "flash"},
        {"model.attn_implementation": "flash_attention_2", "model.dtype": "float32"},
        {"model.attn_implementation": "flash_attention_2", "model.numerics": "exact"},
    ],
)
def test_config_values_that_do_not_fit_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Invalid config"):
        build(values)


COUNTED = [
    f"{section}.{name}".removeprefix(".")
    for section, fields in [("", RunConfig), *((name, type(part)) for name, part in RunConfig() if isinstance(part, Section))]
    for name, field in fields.model_fields.items()
    if field.annotation in (int, int | None)
]


@pytest.mark.parametrize("key", COUNTED)
def test_config_integer_too_large_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve(assignments=(f"{key}=999999999999999999999999",))


def test_config_names_every_wrong_value_at_once() -> None:
    with pytest.raises(ConfigError, match=r"epochs: .*rollout.group_size: "):
        build({"epochs": 0, "rollout.group_size": 0})


def test_config_is_frozen() -> None:
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.epochs = 4  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.rollout.group_size = 4  # type: ignore[misc]


def test_config_keys_are_all_described() -> None:
    assert set(DESCRIPTIONS) == set(KEYS)
    assert all(DESCRIPTIONS.values())


@pytest.mark.parametrize("name", ["gsm8k", "code", "search_qa"])
def test_config_examples_are_valid(name: str) -> None:
    config, origins = resolve(CONFIGS / f"{name}_grpo.yaml")
    assert (config.dataset.name, config.algorithm.name) == (name, "grpo")
    assert origins["dataset.name"].endswith(f"{name}_grpo.yaml")


@pytest.mark.parametrize("key", ["update.learning_rate", "algorithm.kl_coef", "model.lora_alpha", "rollout.timeout_seconds"])
@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_config_non_finite_number_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve(assignments=(f"{key}={value}",))


def test_config_key_twice_in_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 1\nrollout:\n  group_size: 2\n  group_size: 4\n")
    with pytest.raises(ConfigError, match="'group_size' is written twice"):
        resolve(file)


def test_config_stop_takes_one_or_several_texts_and_is_stored() -> None:
    for written, expected in (
        ("</answer>", ("</answer>",)),
        ('["\\n\\n", "Observation:"]', ("\n\n", "Observation:")),
        ("[]", ()),
    ):
        config, origins = resolve(assignments=(f"rollout.stop={written}", "rollout.top_p=0.9"))
        assert (config.rollout.stop, config.rollout.top_p, origins["rollout.stop"]) == (expected, 0.9, "flag")
        assert build(config.flat()) == RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_config_older_key_names_still_work(tmp_path: Path) -> None:
    older = {"dataset.max_samples": 3, "eval.every": 1, "eval.samples": 2}
    file = tmp_path / "older.yaml"
    file.write_text("dataset: {max_samples: 3}\neval: {every: 1, samples: 2}\n")
    for made in (
        build(older),
        resolve(file)[0],
        resolve(assignments=tuple(f"{key}={value}" for key, value in older.items()))[0],
    ):
        assert (made.dataset.max_tasks, made.eval.group_size) == (3, 2)
    assert keys_of({"max_samples": 3}) == {"dataset.max_tasks": 3}
    with pytest.raises(ConfigError, match=r"'eval\.samples' and 'eval\.group_size' are the same option"):
        resolve(assignments=("eval.group_size=3", "eval.samples=2"))


def test_config_section_used_as_key_suggests_its_key() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'dataset\.name'\?"):
        resolve(assignments=("dataset=code",))
