"""The rule by which an episode counts as right, and its group and task as solved, as SQL.

An episode is right if all decisive parts of its reward have their full value. `stats.evaluation.is_right`, which evaluations
use too, says which parts are decisive. If no part is decisive, an episode is right if its reward is 1 or more. A group is
solved if one of its episodes is right.

The rule of a run that samples is fixed. So are the rewards of an ended group in the reward set `default`, which is the one
used while sampling. So `groups.solved` is written once, when the group ends. It is the verdict of the run that sampled the
group: a run that takes the group from the store may have another reward set, and judges it itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.stats.evaluation import FULL_VALUE, is_right
from agentrl.workflow.store.driver_reader import among, select_rows
from agentrl.workflow.trajectory import storable

ID_RANGE = 2**40
"""A number that is larger than the id of every group."""
_REWARDS = "g.mean_reward, g.std_reward, g.best_reward, g.worst_reward"
_PLACE = f"(i.number + 1) * {ID_RANGE} + g.id"
MEMBERS = f"""
    SELECT g.id, g.task_id, i.number + 1 AS iteration, {_PLACE} AS place, {_REWARDS}, g.solved AS verdict FROM iterations i
    JOIN groups g ON g.iteration_id = i.id WHERE i.run_id = :run_id
    UNION ALL
    SELECT g.id, g.task_id, i.number + 1, {_PLACE}, {_REWARDS}, NULL FROM iterations i
    JOIN iteration_groups l ON l.iteration_id = i.id JOIN groups g ON g.id = l.group_id WHERE i.run_id = :run_id"""
"""The SQL of the groups of the run `:run_id`, those that it sampled and those that it took from the store.

`place` grows with the iteration and the id, and `place % ID_RANGE` is the id: `max(place)` finds a task's newest group without
sorting the groups. `verdict` is whether the group is solved, as stored at its end by the rule of the run that sampled it: 1 or
0; NULL if it must be judged.
"""


@dataclass(frozen=True, slots=True)
class SolvedRule:
    """The rule of a run.

    Args:
        reward_set: the name of the reward set that decides.
        reward_sets: the ids of the reward sets of this name: that of the run, and those of the runs whose stored groups the run
            trains on.
        weights: the weights of the env's named rewards.
        correct: the parts that the env names as decisive.
        gives: True if the env computes further reward parts itself.
        own: the parts that have a weight in the run's reward set. All other parts belong to the env.
    """

    reward_set: str
    reward_sets: Sequence[int]
    weights: Mapping[str, float]
    correct: Sequence[str]
    gives: bool
    own: Mapping[str, float]

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of the parameters in `condition`."""
        own = {f"own_{place}": storable(name) for place, name in enumerate(sorted(self.own))} if self._asks_env else {}
        return {f"part_{place}": storable(name) for place, name in enumerate(self._named)} | own

    def condition(self, episodes: str) -> str:
        """Return the SQL condition that an episode is right. `episodes` is the name of the table `episodes` in the query."""
        rewards = f"FROM rewards w WHERE w.reward_set_id IN ({among(self.reward_sets)}) AND w.episode_id = {episodes}.id"
        full = [
            f"coalesce((SELECT sum(w.value) {rewards} AND w.part = :part_{place}), 0.0) >= {FULL_VALUE}"
            for place in range(len(self._named))
        ]
        verdict = f"({' AND '.join(full)})" if full else f"coalesce({episodes}.reward, 0.0) >= {FULL_VALUE}"
        if not self._asks_env:
            return verdict
        own = ", ".join(f":own_{place}" for place in range(len(self.own))) or "''"
        of_env = f"{rewards} AND w.part NOT IN ({own}) GROUP BY w.part"
        is_full = f"NOT EXISTS (SELECT 1 {of_env} HAVING sum(w.value) < {FULL_VALUE})"
        if max(self.weights.values(), default=0.0) == 1:
            return f"({verdict} AND {is_full})"
        return f"(CASE WHEN EXISTS (SELECT 1 {of_env}) THEN {is_full} ELSE {verdict} END)"

    def verdict(self, group: str) -> str:
        """Return the SQL of whether a group is solved: 1 or 0. `group` is the SQL of the group's id.

        The form of the SQL makes both databases look up the episodes of this group only, and only until one is right. With an
        EXISTS instead of the LIMIT, Postgres would judge all episodes of the database. With a condition on `status`, which is
        indexed, Postgres without statistics would look up all done episodes for each group; an episode has a stop reason if and
        only if it is done.
        """
        return f"""
            coalesce((SELECT 1 FROM episodes e WHERE e.group_id = {group} AND e.stop_reason IS NOT NULL
                      AND {self.condition("e")} LIMIT 1), 0)"""

    def judged_groups(self, condition: str = "1 = 1") -> str:
        """Return the SQL of the run's groups (MEMBERS) with the column `solved`: 1 or 0, or NULL if the group has no reward.
        `condition` is an SQL condition on the groups, whose alias is `m`. Only groups without a stored verdict are judged. The
        stored verdicts are those of the reward set `default`.

        Without MATERIALIZED, SQLite would judge a group again for each use of `solved`.
        """
        stored = "m.verdict" if self.reward_set == "default" else "NULL"
        return f"""
            WITH judged AS MATERIALIZED (
              SELECT m.*, coalesce({stored}, CASE WHEN m.mean_reward IS NOT NULL THEN {self.verdict("m.id")} END) AS solved
              FROM ({MEMBERS}) m WHERE {condition}) SELECT * FROM judged"""

    def groups_no_longer_solved(self, condition: str = "1 = 1") -> str:
        """Return the SQL of the ids of the groups that the run sampled and that are not solved, although the previous group of
        the same task was solved.
        """
        return f"""
            SELECT id FROM (SELECT id, solved, lag(solved) OVER (PARTITION BY task_id ORDER BY iteration, id) AS before
                            FROM ({self.judged_groups(condition)}) judged WHERE solved IS NOT NULL) following
            WHERE solved = 0 AND before = 1 AND (SELECT g.run_id FROM groups g WHERE g.id = following.id) = :run_id"""

    @property
    def words(self) -> str:
        """A phrase for users that says when a group counts as solved."""
        if not self.gives and is_right({}, self.weights, self.correct) is None:
            return "an episode's reward is 1 or more"
        max_weight = max(self.weights.values(), default=0.0)
        names = self.correct or [name for name, weight in self.weights.items() if weight == max_weight > 0]
        right = f"an episode is right: {', '.join(sorted(names)) or 'what the env gives'} at full value"
        return right if self.reward_set == "default" else f"{right} in {self.reward_set}; the rewards here are the first ones"

    @property
    def _named(self) -> Sequence[str]:
        if self.correct:
            return list(self.correct)
        max_weight = max(self.weights.values(), default=0.0)
        return [name for name, weight in self.weights.items() if weight == max_weight > 0]

    @property
    def _asks_env(self) -> bool:
        return self.gives and not self.correct and max(self.weights.values(), default=0.0) <= 1


def is_solved(tx: Any, run_id: int, group: int) -> bool:
    """Return whether an episode of the group is right by the rule of the run. Call this inside a transaction."""
    rule = load_rule(tx, run_id)
    rows = select_rows(tx, rule.judged_groups("m.id = :group"), run_id=run_id, group=group, **rule.parameters)
    return bool(rows and rows[0]["solved"])


def judge_group(tx: Any, run_id: int, group: int) -> int:
    """Return 1 if an episode of the group is right by the rule of the run, else 0. Call this inside a transaction, after the
    rewards of the group's last episode were written.
    """
    rule = load_rule(tx, run_id)
    (row,) = select_rows(tx, f"SELECT {rule.verdict(':group')} AS solved", group=group, **rule.parameters)
    return int(row["solved"])


def load_rule(tx: Any, run_id: int, name: str = "") -> SolvedRule:
    """Return the rule of the run with this id. `name` is the reward set that decides; by default that of the run."""
    query = """
        SELECT r.reward_set, r.manifest, coalesce(own.weights, theirs.weights) AS weights FROM runs r
        LEFT JOIN reward_sets own ON own.run_id = r.id AND own.name = r.reward_set
        LEFT JOIN reward_sets theirs ON theirs.name = r.reward_set AND theirs.run_id =
          (SELECT g.run_id FROM run_groups l JOIN groups g ON g.id = l.group_id WHERE l.run_id = r.id ORDER BY g.id LIMIT 1)
        WHERE r.id = :id"""
    row = select_rows(tx, query, id=run_id)[0]
    query = """
        SELECT s.id FROM reward_sets s WHERE s.name = :name AND s.run_id IN (
          SELECT CAST(:id AS BIGINT) UNION
          SELECT g.run_id FROM run_groups l JOIN groups g ON g.id = l.group_id WHERE l.run_id = :id)
        ORDER BY s.id"""
    name = name or row["reward_set"]
    sets = [one["id"] for one in select_rows(tx, query, id=run_id, name=name)]
    right_by: Mapping[str, Any] = row["manifest"].get("right_by", {})
    own = row["weights"] or {}
    weights, correct = right_by.get("weights", own), right_by.get("correct", ())
    return SolvedRule(name, sets, weights, correct, bool(right_by.get("gives")), own)
