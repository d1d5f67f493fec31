"""What-if: what other algorithms would have made of an update, on real small runs, and that nothing of it is kept."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import correlation, mean, stdev
from typing import Any

import pytest
import torch
from sqlalchemy import text

from agentrl.cli.main import main
from agentrl.workers.requests.stored_groups import prepare_stored
from agentrl.workers.requests.submit import prepare
from agentrl.workers.requests.whatif_request import prepare_whatif
from agentrl.workflow.analysis import counterfactual as module
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import BrokenCheckpoint
from agentrl.workflow.models.critic import FILE
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.run_names import find_stored_policy
from agentrl.workflow.training.trainer import Trainer
from tests.faults.test_mending import a_worker, do_jobs
from tests.support.played_runs import altered, value, values
from tests.support.small_models import tiny_random
from tests.training.test_trainer import config, gradient, groups_of, saved, trainer_of, unchanged

ITERATIONS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model") / "random", width=16)


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Iterator[Database]:
    """The database with finished runs: `plain` of GRPO, `critical` of PPO, `choosy`, which samples on until groups vary, and
    `again` on the episodes and the last policy of `plain`; and `waiting`, which has no update yet.
    """
    with a_worker(tmp_path_factory.mktemp("home"), migrated_file) as db:
        submitted(db, folder, "plain")
        submitted(db, folder, "critical", **{"algorithm.name": "ppo", "algorithm.clip_low": 0.1, "critic.learning_rate": 0.1})
        submitted(db, folder, "choosy", **{"rollout.dynamic_sampling": 3})
        do_jobs()
        keys = {"name": "again", "source.runs": ["plain"], "rollout.tasks_per_iteration": 6}
        stored = prepare_stored(db, build(keys), dict.fromkeys(keys, "flag"), find_stored_policy(db, "plain", None))
        planning.submit(db, stored.submission)
        do_jobs()
        submitted(db, folder, "waiting")
        yield db


def submitted(db: Database, model: Path, name: str, **more: Any) -> None:
    asked = {
        "name": name, "epochs": 1, "output_dir": str(settings().root / name), "hooks": ("tests.support.parity_hook:Lucky",),
        "env": "tests.faults.test_mending:bare", "dataset.name": "arithmetic", "dataset.max_tasks": 2 * ITERATIONS,
        "model.path": str(model), "model.numerics": "exact", "rollout.tasks_per_iteration": 2, "rollout.group_size": 4,
        "rollout.max_new_tokens": 6, "rollout.max_steps": 1, "update.learning_rate": 1e-3,
    }  # fmt: skip
    planning.submit(db, prepare(db, build(asked | more)).submission)


class Asked:
    """What `agentrl whatif` printed, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> None:
        capsys.readouterr()
        found = main(["whatif", *map(str, words)])
        self.out, self.err = capsys.readouterr()
        assert found == code, f"exit {found}\n{self.out}\n{self.err}"

    @property
    def flat(self) -> str:
        """Stdout with its lines joined."""
        return " ".join(self.out.split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def everything(db: Database) -> tuple[list[str], dict[Path, bytes]]:
    """All rows, and all files of the runs."""
    files = [file for run in ("plain", "critical") for file in (settings().root / run).rglob("*") if file.is_file()]
    assert len(files) > 2 * ITERATIONS
    with closing(sqlite3.connect(str(db.url.database))) as rows:
        return list(rows.iterdump()), {file: file.read_bytes() for file in files}


# --- the command --------------------------------------------------------------------------------------------------------------


def test_whatif_table_begins_with_run_and_names_its_subject(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(capsys, "plain", "--algorithm", "dr_grpo,grpo,reinforce_plus_plus_baseline,rloo")
    lines = asked.out.splitlines()
    assert max(map(len, lines)) <= 80, asked.out
    rows = [line.split() for line in lines[2:7]]
    assert [row[0] for row in rows] == ["grpo", "dr_grpo", "reinforce_plus_plus_baseline", rows[3][0], "rloo"]
    assert rows[0][1:5:3] == ["*", "1.000"]
    assert {len(row) for row in (rows[0][1:], rows[1], rows[4])} == {10}
    assert "8 episodes in 2 groups of iteration 3 of plain, and policy version 2, from which its update started." in asked.flat
    assert "which is 1 before it" in asked.flat
    assert asked.err == ""


def test_whatif_own_row_equals_recorded_update(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("plain", "critical"):
        found = Asked(capsys, run, "--algorithm", "rloo", "--json").json
        own = found["algorithms"][0]
        query = """SELECT u.loss, u.grad_norm, u.entropy FROM updates u JOIN iterations i ON i.id = u.iteration_id
            JOIN runs r ON r.id = i.run_id WHERE r.name = :run AND i.number = 2"""
        with runs.read() as tx:
            (recorded,) = tx.execute(text(query), {"run": run}).all()
        assert own["own"]
        assert [own["start"][name] for name in ("loss", "grad_norm", "entropy")] == pytest.approx(list(recorded), rel=1e-9)
        assert (own["cosine"], own["correlation"]) == (pytest.approx(1, abs=1e-12), pytest.approx(1))
        query = (
            "SELECT c.advantage FROM consumptions c JOIN runs r ON r.id = c.run_id WHERE r.name = :run AND c.episode_id = :id"
        )
        for group in found["groups"]:
            for episode in group["episodes"]:
                assert episode["advantages"][0] == pytest.approx(value(runs, query, run=run, id=episode["id"]))


def test_whatif_credits_same_episodes_by_other_algorithm(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    found = Asked(capsys, "plain", "--algorithm", "dr_grpo,reinforce", "--json").json
    expected = []
    for group in found["groups"]:
        rewards = [episode["reward"] for episode in group["episodes"]]
        assert [episode["advantages"][1] for episode in group["episodes"]] == pytest.approx(
            [r - mean(rewards) for r in rewards]
        )
        assert [episode["advantages"][2] for episode in group["episodes"]] == pytest.approx(rewards)
        expected += [r - mean(rewards) for r in rewards]
    _, dr_grpo, reinforce = found["algorithms"]
    assert dr_grpo["spread"] == pytest.approx(stdev(expected))
    assert dr_grpo["zero"] == sum(each == 0 for each in expected) / 8
    assert 0.5 < dr_grpo["cosine"] <= 1
    assert reinforce["cosine"] < dr_grpo["cosine"]
    own, rewards = zip(
        *((e["advantages"][0], e["reward"]) for group in found["groups"] for e in group["episodes"]), strict=True
    )
    assert reinforce["correlation"] == pytest.approx(correlation(own, rewards))


def test_whatif_ratio_is_one_before_step_and_clipped_after(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    found = Asked(capsys, "plain", "--algorithm", "gspo,reinforce", "-s", "algorithm.clip_high=0.0001", "--json").json
    own, gspo, reinforce = found["algorithms"]
    for each in (own, gspo, reinforce):
        assert each["start"]["ratio"] == pytest.approx(1)
        assert each["start"]["clip_fraction"] == 0
        assert each["start"]["policy_kl"] == pytest.approx(0, abs=1e-12)
        assert each["after"]["policy_kl"] > 0
        assert each["after"]["ratio"] != pytest.approx(1, abs=1e-9)
    assert gspo["options"]["clip_high"] == 0.0001
    assert own["options"]["clip_high"] == 0.2
    assert gspo["after"]["clip_fraction"] > own["after"]["clip_fraction"]
    assert "clip_high" not in reinforce["options"]
    told = Asked(capsys, "plain", "--algorithm", "gspo,reinforce", "-s", "algorithm.clip_high=0.0001")
    assert "algorithm.clip_high is taken by gspo." in told.flat


def test_whatif_other_convention_is_own_row(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plain", "--algorithm", "grpo", "--convention", "trl")
    own, trl = Asked(capsys, *words, "--json").json["algorithms"]
    assert trl["spread"] < own["spread"], "a greater epsilon"
    assert (own["options"]["aggregation"], trl["options"]["aggregation"]) == ("token-mean", "seq-mean-token-mean")
    assert "\ngrpo trl " in Asked(capsys, *words).out


def test_whatif_loads_critic_or_says_it_is_untrained(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    without = Asked(capsys, "plain", "--algorithm", "ppo,turn_ppo")
    assert without.flat.count("critic is untrained: its values are 0.") == 2
    taught = Asked(capsys, "critical", "--algorithm", "turn_ppo,grpo", "--json").json["algorithms"]
    assert [each["blank"] for each in taught] == [[], [], []], "the optimizer's state serves the others too"
    assert taught[0]["start"]["explained_variance"] != pytest.approx(0, abs=1e-6)
    assert taught[1]["start"]["explained_variance"] != pytest.approx(0, abs=1e-6)
    assert "explained_variance" not in taught[2]["start"]
    first = Asked(capsys, "critical", "--iteration", 1, "--algorithm", "grpo", "--json").json["algorithms"]
    assert [each["blank"] for each in first] == [["critic", "optimizer"], ["optimizer"]]


def test_whatif_explains_missing_cosine_during_critic_warmup(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("critical", "--iteration", 2, "--algorithm", "grpo")
    sentence = "Iteration 2 is one of the first 2 (critic.warmup), in which the run's own policy does not move"
    assert sentence not in Asked(capsys, *words).flat
    made = json.loads(value(runs, "SELECT config FROM runs WHERE name = 'critical'"))
    made["critic"]["warmup"] = 2
    with altered(runs, "runs", "config", "name = 'critical'", json.dumps(made)):
        said = Asked(capsys, *words).flat
        assert sentence in said
        assert "the policy's gradient is 0, and has no cosine" in said
        assert "Loss and grad of ppo include the critic's" in said
        assert [each["cosine"] for each in Asked(capsys, *words, "--json").json["algorithms"]] == [None, None]
        assert sentence not in Asked(capsys, "critical", "--iteration", 3, "--algorithm", "grpo").flat


def test_whatif_uses_fresh_optimizer_if_dropped(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    dropped = Path(value(runs, "SELECT path FROM policies WHERE run_id = 2 AND version = 1"))
    assert not (dropped / sealed_folder.OPTIMIZER).exists()
    asked = Asked(capsys, "critical", "--iteration", 2, "--algorithm", "grpo")
    assert "one step of AdamW (whose state was removed since)" in asked.flat
    assert "that remembers nothing yet" in Asked(capsys, "critical", "--iteration", 1, "--algorithm", "grpo").flat
    assert "critic is untrained" not in asked.flat, "the critic is still there"
    assert "iteration 2 of critical, and policy version 1" in asked.flat


def test_whatif_reads_only_groups_of_update(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    assert value(runs, "SELECT sum(dropped_groups) FROM iterations WHERE run_id = 3") > 0
    for number in range(1, ITERATIONS + 1):
        asked = Asked(capsys, "choosy", "--iteration", number, "--algorithm", "rloo")
        assert asked.err == "", "as recorded"
        iteration = "SELECT id FROM iterations WHERE run_id = 3 AND number = :n - 1"
        used = values(runs, f"SELECT episode_id FROM consumptions WHERE iteration_id = ({iteration})", n=number)
        assert f"* the run's own. {len(used)} episodes in" in asked.flat


def test_whatif_of_stored_episodes_uses_policy_that_read_them(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(capsys, "again", "--algorithm", "rloo")
    assert "24 episodes in 6 groups of iteration 1 of again, and policy version 0" in asked.flat
    assert "Ratio (to the sampler's logprobs), clip and kl: after one step of AdamW (that remembers nothing yet)" in asked.flat
    assert asked.err == ""
    own = Asked(capsys, "again", "--algorithm", "rloo", "--json").json["algorithms"][0]
    assert own["start"]["ratio"] != pytest.approx(1, abs=1e-6), "it has learned since they were sampled"
    assert own["start"]["policy_kl"] == pytest.approx(0, abs=1e-9)
    assert own["after"]["policy_kl"] > 0


def test_whatif_changes_no_rows_or_checkpoints(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(runs)
    for run in ("plain", "critical"):
        Asked(capsys, run, "--algorithm", "ppo,rloo,sapo", "-s", "algorithm.kl_coef=0.1")
    assert everything(runs) == before


def test_whatif_reports_changed_rewards(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    number = values(runs, "SELECT episode_id FROM consumptions WHERE run_id = 1 ORDER BY 1")[-1]
    with altered(runs, "consumptions", "advantage", f"run_id = 1 AND episode_id = {number}", 7.0):
        assert "differ from the recorded ones" in Asked(capsys, "plain", "--algorithm", "rloo").err


def test_whatif_of_other_trainer_uses_ours_and_says_so(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(value(runs, "SELECT config FROM runs WHERE name = 'plain'"))
    made["update"]["trainer"] = made["algorithm"]["convention"] = "trl"
    with altered(runs, "runs", "config", "name = 'plain'", json.dumps(made)):
        asked = Asked(capsys, "plain", "--algorithm", "rloo", "--convention", "verl")
    assert "The run's updates are trl's; here our trainer computes all of them." in asked.flat
    assert "\ngrpo trl * " in asked.out
    assert "\nrloo  " in asked.out


# --- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nobody", "--algorithm", "rloo"), 5, "There is no run 'nobody'."),
        (("plain", "--algorithm", "rlo"), 2, "No algorithm is called 'rlo'."),
        (("plain", "--algorithm", "rloo,apo"), 2, "The algorithm 'apo' changes prompts, not weights."),
        (("plain", "--algorithm", "rloo", "--iteration", 4), 5, "has 3 iterations, counted from 1; there is no iteration 4."),
        (("plain", "--algorithm", "rloo", "--iteration", 0), 2, "greater than or equal to 1"),
        (("waiting", "--algorithm", "rloo"), 6, "No iteration of 'waiting' is trained yet."),
        (("waiting", "--algorithm", "rloo", "--iteration", 2), 6, "Iteration 2 of 'waiting' is not trained yet."),
        (("plain", "--algorithm", "rloo,gspo", "-s", "algorithm.tau_positive=1"), 2, "has no effect with rloo, gspo."),
        (("plain", "--algorithm", "rloo", "-s", "update.epochs=2"), 2, "update.epochs cannot change"),
        (("plain", "--algorithm", "rloo", "-s", "algorithm.kl_target=1"), 2, "it acts after an update."),
        (("plain", "--algorithm", "rloo", "-s", "algorithm.importance_cap=0.3"), 2, "algorithm.importance_cap"),
        (("plain", "--algorithm", "rloo", "-s", "algorithm.clip_hi=3"), 2, "Unknown option 'algorithm.clip_hi'."),
        (("plain", "--algorithm", "rloo", "-s", "algorithm.clip_low=3"), 2, "Invalid config: algorithm.clip_low"),
        (("plain", "--algorithm", "rloo", "--convention", "both"), 2, "'both'"),
    ],
)
def test_whatif_refuses_bad_arguments(
    runs: Database, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], code: int, said: str
) -> None:
    asked = Asked(capsys, *words, code=code)
    assert asked.out == ""
    assert said in asked.err


def test_whatif_refuses_missing_weights(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    with altered(runs, "policies", "collected_at", "run_id = 1 AND version = 2", "2026-01-02 00:00:00"):
        asked = Asked(capsys, "plain", "--algorithm", "rloo", code=9)
        assert "The weights of plain@2 were removed on 2026-01-02; the update of iteration 3 needs them." in asked.err
    weights = Path(value(runs, "SELECT path FROM policies WHERE run_id = 1 AND version = 2")) / sealed_folder.MODEL
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert "is damaged" in Asked(capsys, "plain", "--algorithm", "rloo", code=9).err
    finally:
        weights.write_bytes(whole)


def test_whatif_refuses_run_that_does_not_train(runs: Database, capsys: pytest.CaptureFixture[str]) -> None:
    with altered(runs, "runs", "kind", "name = 'plain'", "fork"):
        assert "does not train" in Asked(capsys, "plain", "--algorithm", "rloo", code=6).err


# --- which configs look -------------------------------------------------------------------------------------------------------


def configs(
    db: Database, run: str, *names: str, convention: str | None = None, assigned: tuple[str, ...] = ()
) -> list[RunConfig]:
    return list(prepare_whatif(db, run, None, names, convention, assigned).configs)


def test_whatif_options_are_of_run_or_algorithm(runs: Database) -> None:
    own, grpo, turns = configs(runs, "critical", "grpo", "turn_ppo", "ppo", "grpo")
    assert (own.algorithm.clip_low, grpo.algorithm.clip_low, turns.algorithm.clip_low) == (0.1, 0.2, 0.2)
    assert (own.critic.learning_rate, turns.critic.learning_rate) == (0.1, 0.1)
    assert grpo.rollout == own.rollout
    assert (own.update.batch_size, own.update.epochs, own.update.trainer) == (None, 1, "agentrl")
    again = configs(runs, "critical", "ppo", assigned=("algorithm.dual_clip=5",))[1]
    assert (again.algorithm.clip_low, again.algorithm.dual_clip) == (0.1, 5)


def test_whatif_keeps_requested_kl_weight(folder: Path, tmp_path: Path) -> None:
    run = config(0, algorithm__kl_coef=0.1, algorithm__kl_target=1e-9)
    _, trainer = trainer_of(folder, run)
    trainer.update(groups_of(), 0)
    sealed_folder.write(tmp_path / "v1", trainer.save)
    assert trainer.kl_coef > 0.1
    for other, expected in (({}, trainer.kl_coef), ({"algorithm.kl_target": None}, 0.1)):
        again = Trainer(Policy.load(run.model, str(folder), device="cpu"), build(run.flat() | other))
        again.load_partial(tmp_path / "v1")
        assert again.kl_coef == expected


# --- one look -----------------------------------------------------------------------------------------------------------------

LOOKED_AT = pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo", "sapo"])


@LOOKED_AT
@pytest.mark.parametrize("lora_r", [0, 4], ids=["all weights", "lora"])
def test_preview_is_first_step_of_update_without_trace(folder: Path, tmp_path: Path, name: str, lora_r: int) -> None:
    """With a second pass an update measures itself what the first has changed."""
    _, trainer = trainer_of(folder, config(lora_r, True, algorithm__name=name, algorithm__kl_coef=0.1, update__epochs=2))
    trainer.update(groups_of(seed=3), 0)
    before, draws = saved(trainer, tmp_path / "before"), torch.get_rng_state()
    look = trainer.preview(groups_of(), 1)
    assert unchanged(trainer, tmp_path / "after", before)
    assert sealed_folder.verify(tmp_path / "after") == sealed_folder.verify(tmp_path / "before"), "the critic and counters too"
    assert torch.equal(torch.get_rng_state(), draws)
    update = trainer.update(groups_of(), 1)
    first, second = update.steps
    assert {key: look.update.metrics[key] for key in first} == pytest.approx(first)
    assert look.after == pytest.approx({key: second[key] for key in look.after}, rel=1e-9, abs=1e-12)
    assert look.after["policy_kl"] > 1e-9
    assert look.update.advantages == update.advantages


def test_preview_gradient_is_that_of_optimizer(folder: Path, tmp_path: Path) -> None:
    policy, trainer = trainer_of(folder, config(0, True, update__max_grad_norm=1e9))
    found = trainer.preview(groups_of(), 0).gradient
    assert found is not None
    trainer.update(groups_of(), 0)
    names = list(policy.trainable())
    parts = dict(zip(names, found.split([p.numel() for p in policy.trainable().values()]), strict=True))
    assert torch.allclose(torch.cat([parts[name] for name in sorted(names)]), gradient(trainer, tmp_path / "v1"), rtol=1e-5)


def test_preview_without_signal_says_why(folder: Path) -> None:
    _, trainer = trainer_of(folder, config())
    look = trainer.preview(groups_of(equal=True), 0)
    assert look.update.skipped == "no advantage differs from 0"
    assert look.gradient is None
    assert trainer.preview([], 0).update.skipped == "no group has enough finished episodes"


def test_preview_refuses_altered_optimizer_state(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, config(0, algorithm__name="ppo"))
    trainer.update(groups_of(), 0)
    sealed_folder.write(tmp_path / "v1", trainer.save)
    other = Trainer(Policy.load(config().model, str(folder), device="cpu"), config())
    other.load_partial(tmp_path / "v1")
    assert (other.updates, other.preview(groups_of(), 1).blank) == (1, ())
    (tmp_path / "v1" / FILE).unlink()
    with pytest.raises(BrokenCheckpoint, match=FILE):
        other.load_partial(tmp_path / "v1")
    sealed_folder.write(tmp_path / "v2", trainer.save)
    with (tmp_path / "v2" / sealed_folder.OPTIMIZER).open("ab") as file:
        file.write(b"more")
    with pytest.raises(BrokenCheckpoint, match=sealed_folder.OPTIMIZER):
        other.load_partial(tmp_path / "v2")


def test_whatif_cosine_of_long_gradient_with_itself_is_1() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(module.CHUNK + 12345) ** 5
    assert module._cosine(gradient, gradient) == pytest.approx(1, abs=1e-12)
    assert module._cosine(gradient, -2 * gradient) == pytest.approx(-1, abs=1e-12)
    assert module._cosine(gradient, torch.zeros_like(gradient)) is None
