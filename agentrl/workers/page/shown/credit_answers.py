"""Explains how the advantage of an episode and of each of its tokens was computed, as far as the stored rows allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.workflow.algorithms import ROUNDING
from agentrl.workflow.analysis.credit_reasons import (
    BY_EPISODE,
    Credit,
    Scored,
    credit_by_returns,
    explain_credit,
)
from agentrl.workflow.store.reads.credit_rows import (
    Member,
    load_algorithm,
    load_earned,
    load_group_members,
    load_shapes,
    load_update_members,
)
from agentrl.workflow.store.reads.episode_relations import load_readers, load_run_of
from agentrl.workflow.trajectory import WHOLE, Episode

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreditReader:
    """The update that trained on an episode, and the run of that update. `update` is None if there is no such update."""

    run: Row
    update: Row | None

    @property
    def recorded(self) -> float | None:
        """The advantage that the update recorded; None if there is no update."""
        return None if self.update is None else self.update["advantage"]


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """The advantages of an episode's tokens.

    Args:
        source: "stored", "computed" or "missing".
        how: a sentence that explains the source.
        of_all: the advantage of every token that is trained on; None if the tokens have different advantages or the advantage
            is unknown.
        of_steps: the advantages of the sampled tokens of each step, by step; None if all tokens have the same advantage.
    """

    source: str
    how: str
    of_all: float | None = None
    of_steps: Mapping[int, Sequence[float]] | None = None


def find_reader(tx: Any, episode: int, run_id: int, run: Row | None = None) -> tuple[CreditReader, list[Row]]:
    """Return two values: the update whose advantages are shown, with its run; and all updates that trained on the episode. If
    an update of the episode's own run trained on the episode, that update is shown.
    """
    readers = load_readers(tx, episode)
    if not readers:
        return CreditReader(run or load_run_of(tx, run_id), None), []
    first = readers[0]
    same = run is not None and run["id"] == first["run_id"]
    return CreditReader(run if same and run is not None else load_run_of(tx, first["run_id"]), first), readers


def explain_members(tx: Any, reader: CreditReader, members: Sequence[Member], recorded: Mapping[int, float]) -> dict[int, Any]:
    """Return the explanation of each member's advantage, by the id of the episode. `recorded` has the advantages that the
    update recorded, by the id of the episode.
    """
    name, options = load_algorithm(reader.run["config"])
    group = [_scored(member) for member in members if member.trainable]
    update = _Update(tx, reader)
    return {
        member.row["id"]: explain_credit(
            Credit(
                algorithm=name,
                options=options,
                recorded=recorded.get(member.row["id"]),
                own=_scored(member) if member.trainable else None,
                group=group,
                update=update.scored,
            )
        )
        for member in members
    }


def explain_episode(tx: Any, reader: CreditReader, episode: int, members: Sequence[Member]) -> dict[str, Any]:
    """Return the explanation of the episode's advantage. `members` are the episodes of its group. The keys `run` and `run_id`
    name the run whose update computed the advantage.
    """
    recorded = {} if reader.recorded is None else {episode: reader.recorded}
    own = [member for member in members if member.row["id"] == episode]
    name, options = load_algorithm(reader.run["config"])
    explanation = explain_credit(
        Credit(
            algorithm=name,
            options=options,
            recorded=recorded.get(episode),
            own=_scored(own[0]) if own and own[0].trainable else None,
            group=[_scored(member) for member in members if member.trainable],
            update=_Update(tx, reader).scored,
        )
    )
    return {**explanation, "run": reader.run["name"], "run_id": reader.run["id"]}


def explain_training(tx: Any, episode: int, run_id: int, group: int) -> dict[str, Any]:
    """Return why an episode of the run and the group has its advantage: the explanation, the rewards of the group in the reward
    set of the run that trained on it, and the updates that read the episode.
    """
    reader, readers = find_reader(tx, episode, run_id)
    members = load_group_members(tx, group, reader.run["reward_set"])
    return {
        "explanation": explain_episode(tx, reader, episode, members),
        "reward_set": reader.run["reward_set"],
        "group_rewards": [_shown_reward(member) for member in members],
        "read_by": shown_readers(readers),
    }


def _shown_reward(member: Member) -> dict[str, Any]:
    columns = {name: member.row[name] for name in ("id", "sample", "status", "tainted")}
    return {**columns, "reward": member.reward, "trainable": member.trainable}


def shown_readers(readers: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the updates that read an episode, without the ids of their iterations."""
    return [{name: value for name, value in update.items() if name != "iteration_id"} for update in readers]


def _scored(member: Member) -> Scored:
    return Scored(member.row["id"], member.row["group_id"], member.reward or 0.0, member.tokens)


class _Update:
    """The episodes of an update. They are loaded at the first use."""

    def __init__(self, tx: Any, reader: CreditReader) -> None:
        self._tx, self._reader = tx, reader
        self._found: list[Member] | None = None

    def members(self) -> list[Member]:
        if self._found is None:
            run, update = self._reader.run, self._reader.update
            self._found = (
                [] if update is None else load_update_members(self._tx, update["iteration_id"], run["id"], run["reward_set"])
            )
        return self._found

    def scored(self) -> list[Scored]:
        return [_scored(member) for member in self.members() if member.trainable]


def credit_tokens(tx: Any, reader: CreditReader, episode: int) -> TokenCredit:
    name, options = load_algorithm(reader.run["config"])
    if reader.recorded is None:
        return TokenCredit("missing", "No update has used this episode.")
    if name in BY_EPISODE and not _from_a_model(options):
        return TokenCredit(
            "stored", f"{name} gives all tokens of an episode the advantage that the update recorded.", reader.recorded
        )
    if name in ("reinforce", "reinforce_plus_plus") and not _from_a_model(options):
        discount = options.get("discount")
        return _credit_by_returns(tx, reader, episode, name, 1.0 if discount is None else float(discount))
    why = (
        "depends on a critic's values"
        if name in ("ppo", "turn_ppo")
        else "depends on a KL to the reference"
        if _from_a_model(options)
        else "is computed by custom code of the run"
    )
    mean = f"{reader.recorded:.6g}"
    return TokenCredit("missing", f"A token's advantage {why}, which is not stored; the mean over the episode is {mean}.")


def _from_a_model(options: Mapping[str, Any]) -> bool:
    return options.get("kl_in") == "reward" and bool(options.get("kl_coef"))


def _credit_by_returns(tx: Any, reader: CreditReader, episode: int, name: str, discount: float) -> TokenCredit:
    members = _Update(tx, reader).members()
    if name == "reinforce":
        members = [member for member in members if member.row["id"] == episode]
    shapes = load_shapes(tx, members)
    if shapes is None:
        reason = "Advantages are whitened over the whole update, which has too many turns to recompute here"
        return TokenCredit("missing", f"{reason}; the mean over the episode is {reader.recorded:.6g}.")
    earned = load_earned(tx, [member.row for member in members], reader.run["reward_set"])
    episodes = [_with_rewards(shapes[member.row["id"]], member, earned) for member in members if member.reward is not None]
    own = credit_by_returns(episodes, episode, discount, whitened=name == "reinforce_plus_plus")
    count = sum(map(len, own.values()))
    mean = sum(map(sum, own.values())) / count if count else 0.0
    recorded = reader.recorded or 0.0
    if not count or abs(mean - recorded) > 100 * ROUNDING * max(1.0, abs(mean)):
        if not recorded:
            return TokenCredit("stored", "The update recorded 0 for the episode.", 0.0)
        reason = f"The value computed from the rows ({mean:.6g}) differs from the one that the update recorded ({recorded:.6g})"
        return TokenCredit("missing", f"{reason}: the rewards have changed since.")
    how = "Returns to go, computed from rewards and lengths; their mean over the episode equals the recorded advantage."
    return TokenCredit("computed", how, of_steps=own)


def _with_rewards(shape: Episode, member: Member, earned: Mapping[int, Mapping[int, float]]) -> Episode:
    of_steps = {step: value for step, value in earned.get(member.row["id"], {}).items() if step != WHOLE}
    steps = tuple(replace(step, reward=of_steps.get(step.index, 0.0)) for step in shape.steps)
    return replace(shape, steps=steps, reward=member.reward)
