"""The views: for each its columns with their types and SQL, and its rows as Python values.

A view joins the tables that a question needs; its columns have names that a researcher knows. No view reads a blob.

Notes on the SQL: a table that has the run's name comes first, with CROSS JOIN, because SQLite keeps this order whatever its
statistics say. Rows of an episode's current attempt have the attempt number of the episode, but the condition is written with
`<=`: for `=`, Postgres without statistics expects almost no rows, and chooses a bad plan. A status is tested in a FILTER if the
episodes are found by their groups: otherwise Postgres would begin with the index on the status.

`staleness` is the number of versions by which the trainer was ahead of the policy that sampled (NULL if nothing was sampled for
an update of the run). Iterations and epochs are counted from 1, so that iteration k makes policy version k; the tables, and the
keys of all draws, count them from 0. `eval_reward` is the mean reward on the held-out split: for an iteration, that of the
version with which it sampled (`policy_version`); for a run, that of the newest evaluated version.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from agentrl.workflow.stats.group_variance import CUT_OFF, DIFFERENT, NO_VARIANCE, SURPLUS
from agentrl.workflow.tables.column_values import list_in_sql
from agentrl.workflow.tables.step_values import CONTENT, FINAL_ANSWER, THOUGHT
from agentrl.workflow.tables.view_row import ViewRow, column
from agentrl.workflow.trajectory import TRUNCATED

_EPOCH, _ITERATION = "i.epoch + 1", "i.number + 1"
_STALENESS = "CASE WHEN r.kind = 'train' THEN i.number - p.version END"
_EVALS_OF_RUN = """
    FROM runs m JOIN evals v ON v.run_id = m.id
    WHERE m.measures_id = r.id AND v.mean_reward IS NOT NULL AND v.errors <= v.episodes"""  # too few episodes tell little
_BEST_EVAL = f"{_EVALS_OF_RUN} ORDER BY v.mean_reward DESC, m.measures_version LIMIT 1"
_NEWEST_EVAL = f"{_EVALS_OF_RUN} ORDER BY m.measures_version DESC LIMIT 1"
_GROUPS_OF_RESOURCE = "FROM group_resources l CROSS JOIN episodes e WHERE l.resource_id = v.id AND e.group_id = l.group_id"
_OF_RUN = "FILTER (WHERE e.run_id = v.run_id AND e.status = 'done')"


def _seconds_between(start: str, end: str) -> Any:
    return column(f"{{seconds:{start},{end}}}")


def _update_metric(name: str) -> Any:
    """Return the column of an iteration that sums up a metric of its optimizer steps."""
    function = "max" if name.endswith("_max") else "avg"  # a subquery: a join would aggregate all iterations to show one
    return column(f"(SELECT {function}(u.{name}) FROM updates u WHERE u.iteration_id = i.id)")


class RunRow(ViewRow, view="v_runs", source="runs r"):
    """A run: what it trains or measures, and its progress."""

    id: int = column("r.id")
    run: str = column("r.name")
    kind: str = column("r.kind")
    status: str = column("r.status")
    reason: str = column("r.reason")
    dataset: str = column("r.dataset")
    model: str = column("r.base")
    seed: int = column("r.seed")
    epochs: int = column("r.epochs")
    iterations: int = column("r.iterations")
    iterations_done: int = column("(SELECT count(*) FROM iterations i WHERE i.run_id = r.id AND i.status = 'done')")
    policy_version: int | None = column("(SELECT max(p.version) FROM policies p WHERE p.run_id = r.id)")
    episodes_done: int = column("(SELECT count(*) FROM episodes e WHERE e.run_id = r.id AND e.status = 'done')")
    last_reward: float | None = column("""
        (SELECT i.mean_reward FROM iterations i WHERE i.run_id = r.id AND i.mean_reward IS NOT NULL
         ORDER BY i.number DESC LIMIT 1)""")
    eval_reward: float | None = column(f"(SELECT v.mean_reward {_NEWEST_EVAL})")
    best_reward: float | None = column(f"(SELECT v.mean_reward {_BEST_EVAL})")
    best_version: int | None = column(f"(SELECT m.measures_version {_BEST_EVAL})")
    measures: str | None = column("(SELECT m.name FROM runs m WHERE m.id = r.measures_id)")
    created_at: datetime = column("r.created_at")
    started_at: datetime | None = column("r.started_at")
    finished_at: datetime | None = column("r.finished_at")
    seconds: float | None = _seconds_between("r.started_at", "r.finished_at")
    tokens_removed_at: datetime | None = column("r.tokens_removed_at")


class EvalRow(
    ViewRow,
    view="v_evals",
    source="""
        runs r
        JOIN policies p ON p.run_id = r.id
        LEFT JOIN evals v ON v.run_id = r.id
        LEFT JOIN runs m ON m.id = r.measures_id
        WHERE r.kind = 'eval'""",
):
    """An evaluation of a policy on tasks."""

    id: int = column("r.id")
    run: str = column("r.name")
    measures: str | None = column("m.name")
    policy_version: int = column("p.version")
    status: str = column("r.status")
    reason: str = column("r.reason")
    dataset: str = column("r.dataset")
    split: str | None = column("v.split")
    tasks: int | None = column("v.tasks")
    episodes: int | None = column("v.episodes")
    errors: int | None = column("v.errors")
    mean_reward: float | None = column("v.mean_reward")
    low: float | None = column("v.low")
    high: float | None = column("v.high")
    interval_by: str | None = column("v.interval_by")
    accuracy: float | None = column("v.accuracy")
    pass_at: Mapping[str, float] | None = column("v.pass_at")
    policy: str | None = column("v.policy")
    created_at: datetime = column("r.created_at")
    finished_at: datetime | None = column("r.finished_at")


class IterationRow(
    ViewRow,
    view="v_iterations",
    source="""
        iterations i
        JOIN runs r ON r.id = i.run_id
        JOIN policies p ON p.id = i.policy_id""",
):
    """An iteration of a run: its rollouts and its update."""

    id: int = column("i.id")
    run: str = column("r.name")
    epoch: int = column(_EPOCH)
    iteration: int = column(_ITERATION)
    status: str = column("i.status")
    skipped: str = column("i.skipped")
    episodes: int = column("i.episodes")
    trainable: int = column("i.trainable")
    dropped_groups: int = column("i.dropped_groups")
    more_groups: int = column("i.more_groups")
    groups: int = column("(SELECT count(*) FROM groups g WHERE g.iteration_id = i.id)")
    flat_groups: int = column("(SELECT count(*) FROM groups g WHERE g.iteration_id = i.id AND g.std_reward = 0)")
    mean_reward: float | None = column("i.mean_reward")
    policy_version: int = column("p.version")
    eval_reward: float | None = column("""(SELECT v.mean_reward FROM runs m JOIN evals v ON v.run_id = m.id
                WHERE m.measures_id = r.id AND m.measures_version = p.version)""")
    staleness: int | None = column("""CASE WHEN r.kind = 'train' AND EXISTS (SELECT 1 FROM groups g WHERE g.iteration_id = i.id)
                    THEN i.number - p.version END""")
    loss: float | None = _update_metric("loss")
    kl: float | None = _update_metric("kl")
    policy_kl: float | None = _update_metric("policy_kl")
    entropy: float | None = _update_metric("entropy")
    clip_fraction: float | None = _update_metric("clip_fraction")
    grad_norm: float | None = _update_metric("grad_norm")
    value_loss: float | None = _update_metric("value_loss")
    explained_variance: float | None = _update_metric("explained_variance")
    sampler_difference_mean: float | None = _update_metric("sampler_difference_mean")
    sampler_difference_max: float | None = _update_metric("sampler_difference_max")
    importance_outside: float | None = _update_metric("importance_outside")
    importance_weight: float | None = _update_metric("importance_weight")
    importance_truncated: float | None = _update_metric("importance_truncated")
    effective_sample_size: float | None = _update_metric("effective_sample_size")
    log_ratio_clamped: float | None = _update_metric("log_ratio_clamped")
    tokens: int = column("i.prompt_tokens + i.sampled_tokens")
    prompt_tokens: int = column("i.prompt_tokens")
    sampled_tokens: int = column("i.sampled_tokens")
    tool_calls: int = column("i.tool_calls")
    tool_errors: int = column("i.tool_errors")
    update_seconds: float | None = column("i.update_seconds")
    peak_memory_bytes: float | None = column("i.peak_memory_bytes")
    tflops: float | None = column("i.tflops")
    mfu: float | None = column("i.mfu")
    rollout_seconds: float | None = _seconds_between("i.started_at", "i.rolled_out_at")
    seconds: float | None = _seconds_between("i.started_at", "i.finished_at")
    started_at: datetime | None = column("i.started_at")
    finished_at: datetime | None = column("i.finished_at")


class GroupRow(
    ViewRow,
    view="v_groups",
    source="""
        groups g
        JOIN runs r ON r.id = g.run_id
        JOIN iterations i ON i.id = g.iteration_id
        JOIN tasks t ON t.id = g.task_id""",
):
    """A group: the episodes of a task in an iteration; they share a baseline."""

    id: int = column("g.id")
    run: str = column("r.name")
    iteration: int = column(_ITERATION)
    slot: int = column("g.slot")
    kind: str = column("g.kind")
    status: str = column("g.status")
    dropped: str = column("g.dropped")
    task: str = column("t.key")
    reference: str = column("t.reference")
    mean_reward: float | None = column("g.mean_reward")
    std_reward: float | None = column("g.std_reward")
    attempt: int = column("g.attempt")
    losses: int = column("g.losses")
    failures: int = column("g.failures")
    worker: str = column("g.worker")
    started_at: datetime | None = column("g.started_at")
    finished_at: datetime | None = column("g.finished_at")
    seconds: float | None = _seconds_between("g.started_at", "g.finished_at")


class EpisodeRow(
    ViewRow,
    view="v_episodes",
    source="""
        episodes e
        JOIN runs r ON r.id = e.run_id
        JOIN iterations i ON i.id = e.iteration_id
        JOIN groups g ON g.id = e.group_id
        JOIN tasks t ON t.id = e.task_id
        JOIN policies p ON p.id = i.policy_id
        LEFT JOIN consumptions c ON c.episode_id = e.id AND c.run_id = e.run_id AND c.stage = 'train'""",
):
    """An episode: its turns and its reward. v_ledger has its fate."""

    id: int = column("e.id")
    run: str = column("r.name")
    epoch: int = column(_EPOCH)
    iteration: int = column(_ITERATION)
    slot: int = column("g.slot")
    sample: int = column("e.sample")
    task: str = column("t.key")
    status: str = column("e.status")
    stop_reason: str | None = column("e.stop_reason")
    reward: float | None = column("e.reward")
    advantage: float | None = column("c.advantage")
    final_answer: str = column(FINAL_ANSWER)
    reference: str = column("t.reference")
    policy_version: int = column("p.version")
    staleness: int | None = column(_STALENESS)
    steps: int = column("e.steps")
    prompt_tokens: int = column("e.prompt_tokens")
    sampled_tokens: int = column("e.sampled_tokens")
    tool_calls: int = column("e.tool_calls")
    tool_errors: int = column("e.tool_errors")
    generate_seconds: float = column("e.generate_seconds")
    tool_seconds: float = column("e.tool_seconds")
    seconds: float | None = _seconds_between("e.started_at", "e.finished_at")
    error_class: str = column("e.error_class")
    error: str = column("e.error")
    tainted: bool = column("e.tainted")
    attempt: int = column("e.attempt")
    parent_id: int | None = column("e.parent_id")
    fork_step: int | None = column("e.fork_step")
    inherited_steps: int = column("e.inherited_steps")
    group_id: int = column("e.group_id")
    started_at: datetime | None = column("e.started_at")
    finished_at: datetime | None = column("e.finished_at")


class StepRow(
    ViewRow,
    view="v_steps",
    source="""
        steps s CROSS JOIN episodes e CROSS JOIN iterations i CROSS JOIN runs r CROSS JOIN policies p
        WHERE e.id = s.episode_id AND e.attempt <= s.attempt AND i.id = e.iteration_id AND r.id = i.run_id
        AND p.id = s.policy_id""",
):
    """One turn of the policy in an episode."""

    id: int = column("s.id")
    run: str = column("s.run")
    iteration: int = column(_ITERATION)
    episode_id: int = column("s.episode_id")
    step: int = column("s.number")
    attempt: int = column("s.attempt")
    thought: str = column(THOUGHT)
    content: str = column(CONTENT)
    text: str = column("s.text")
    finish_reason: str = column("s.finish_reason")
    prompt_tokens: int = column("s.prompt_tokens")
    sampled_tokens: int = column("s.sampled_tokens")
    mean_logprob: float | None = column("s.logprob_sum / nullif(s.sampled_tokens, 0)")
    generate_seconds: float = column("s.generate_seconds")
    policy_version: int = column("p.version")
    staleness: int | None = column(_STALENESS)
    new_row: str | None = column("s.new_row")
    chain: int = column("s.chain")
    parent_step: int | None = column("s.parent_step")
    shared_tokens: int | None = column("s.shared_tokens")
    delivered: bool = column("s.delivered")
    replayed: bool = column("s.replayed")
    side_call: bool = column("s.side_call")
    request_id: str | None = column("s.request_id")
    sampled_at: datetime = column("s.sampled_at")
    observed_at: datetime | None = column("s.observed_at")


class CallRow(
    ViewRow,
    view="v_tool_calls",
    source="""
        tool_calls c CROSS JOIN episodes e CROSS JOIN iterations i
        WHERE e.id = c.episode_id AND e.attempt <= c.attempt AND i.id = e.iteration_id""",
):
    """One call of a tool, or of an episode's judge."""

    id: int = column("c.id")
    run: str = column("c.run")
    iteration: int = column(_ITERATION)
    episode_id: int = column("c.episode_id")
    step: int = column("c.step")
    call: int = column("c.call")
    kind: str = column("c.kind", "call: run by a tool; grade: by a judge; agent: by the agent")
    tool: str = column("c.tool")
    arguments: Any = column("c.arguments")
    loose: bool = column("c.loose")
    status: str = column("c.status", "pending, started, done, unknown_outcome, unobserved")
    result: str | None = column("c.result")
    error_class: str | None = column("c.error_class")
    effects: str = column("c.effects")
    starts: int = column("c.starts")
    attempts: int = column("c.sends")
    seconds: float = column("c.seconds")
    cpu_seconds: float | None = column("c.cpu_seconds")
    queue_seconds: float | None = _seconds_between("c.created_at", "c.started_at")
    sandbox: str | None = column("c.sandbox")
    exit_status: str | None = column("c.exit_status")
    exit_code: int | None = column("c.exit_code")
    worker: str = column("c.worker")
    created_at: datetime = column("c.created_at")
    started_at: datetime | None = column("c.started_at")
    finished_at: datetime | None = column("c.finished_at")


class ToolSessionRow(
    ViewRow,
    view="v_tool_sessions",
    source="""
        tool_sessions s
        JOIN episodes e ON e.id = s.episode_id
        JOIN iterations i ON i.id = e.iteration_id
        JOIN runs r ON r.id = e.run_id""",
):
    """An interpreter that an episode's calls share."""

    run: str = column("r.name")
    iteration: int = column(_ITERATION)
    episode_id: int = column("s.episode_id")
    attempt: int = column("s.attempt")
    tool: str = column("s.tool")
    owner: str = column("s.owner")
    builds: int = column("s.builds")
    differs: str = column("s.differs")
    tainted: bool = column("e.tainted")
    created_at: datetime = column("s.created_at")


class AgentAttemptRow(
    ViewRow,
    view="v_agent_attempts",
    source="""
        agent_attempts a CROSS JOIN episodes e CROSS JOIN iterations i
        WHERE e.id = a.episode_id AND i.id = e.iteration_id""",
):
    """One attempt of an external agent at an episode."""

    id: int = column("a.id")
    run: str = column("a.run")
    iteration: int = column(_ITERATION)
    episode_id: int = column("a.episode_id")
    attempt: int = column("a.attempt")
    status: str = column("a.status", "pending, running, ended, lost")
    worker: str = column("a.worker")
    exit_code: int | None = column("a.exit_code", "exit code of the agent's process; negative: a signal")
    error_class: str | None = column("nullif(a.error_class, '')")
    error: str = column("a.error")
    answer: str | None = column("a.answer")
    attempts: int = column("a.sends", "how often the job was sent")
    seconds: float | None = _seconds_between("a.started_at", "a.finished_at")
    created_at: datetime = column("a.created_at")
    started_at: datetime | None = column("a.started_at")
    finished_at: datetime | None = column("a.finished_at")


class AnnotationRow(
    ViewRow,
    view="v_annotations",
    source="""
        annotations a CROSS JOIN episodes e CROSS JOIN iterations i
        WHERE e.id = a.episode_id AND e.attempt <= a.attempt AND i.id = e.iteration_id""",
):
    """An annotation of an episode by an agent, a tool or a hook."""

    id: int = column("a.id")
    run: str = column("a.run")
    iteration: int = column(_ITERATION)
    episode_id: int = column("a.episode_id")
    attempt: int = column("a.attempt")
    step: int | None = column("a.step", "the turn it names, else the newest when it was written")
    source: str = column("a.source")
    kind: str = column("a.kind", "reward, message, object, exception, operation, ...")
    name: str = column("a.name")
    data: Mapping[str, Any] = column("a.data")
    seconds: float | None = column("a.seconds", "seconds that the operation took; NULL: not an operation")
    created_at: datetime = column("a.created_at")


class ResourceRow(
    ViewRow,
    view="v_resources",
    source="""
        resources v
        JOIN runs r ON r.id = v.run_id""",
):
    """A version of a prompt or another text that a run uses."""

    id: int = column("v.id")
    run: str = column("r.name")
    name: str = column("v.name")
    version: int = column("v.version")
    parent_version: int | None = column("v.parent_version")
    note: str = column("v.note")
    chosen: bool = column("v.chosen")
    text: str = column("v.text", "the text itself")
    episodes_done: int = column(f"(SELECT count(*) {_OF_RUN} {_GROUPS_OF_RESOURCE})")
    mean_reward: float | None = column(f"(SELECT avg(e.reward) {_OF_RUN} {_GROUPS_OF_RESOURCE})")
    choose_reward: float | None = column(f"""
        (SELECT avg(CASE WHEN e.status = 'done' AND 'choose' =
           (SELECT m.role FROM run_tasks m WHERE m.run_id = e.run_id AND m.task_id = e.task_id) THEN e.reward END)
         {_GROUPS_OF_RESOURCE})""")
    created_at: datetime = column("v.created_at")


class EpisodeResourceRow(
    ViewRow,
    view="v_episode_resources",
    source="""
        group_resources l
        JOIN resources v ON v.id = l.resource_id
        JOIN episodes e ON e.group_id = l.group_id
        JOIN runs r ON r.id = e.run_id
        JOIN run_tasks m ON m.run_id = e.run_id AND m.task_id = e.task_id""",
):
    """A version of a text that an episode used."""

    run: str = column("r.name")
    episode_id: int = column("e.id")
    name: str = column("v.name")
    version: int = column("v.version")
    role: str = column("m.role")
    status: str = column("e.status")
    reward: float | None = column("e.reward")


class CriticCallRow(
    ViewRow,
    view="v_critic_calls",
    source="""
        critic_calls c
        JOIN runs r ON r.id = c.run_id""",
):
    """A request of a search to its critic, and the answer."""

    id: int = column("c.id")
    run: str = column("r.name")
    model: str = column("c.model", "the critic's model")
    messages: list[Mapping[str, str]] = column("c.messages")
    answer: str = column("c.answer", "the critic's answer")
    seconds: float = column("c.seconds", "seconds until the answer")
    created_at: datetime = column("c.created_at")


class RewardRow(
    ViewRow,
    view="v_rewards",
    source="""
        rewards w CROSS JOIN reward_sets s CROSS JOIN episodes e CROSS JOIN iterations i CROSS JOIN tasks t
        WHERE s.id = w.reward_set_id AND e.id = w.episode_id AND i.id = e.iteration_id AND t.id = e.task_id""",
):
    """A part of an episode's reward, in one reward set."""

    id: int = column("w.id")
    run: str = column("w.run")
    iteration: int = column(_ITERATION)
    episode_id: int = column("w.episode_id")
    task: str = column("t.key")
    reward_set: str = column("s.name")
    part: str = column("w.part")
    step: int | None = column(
        "CASE WHEN w.step >= 0 THEN w.step END", "the turn that earned the reward; NULL: the whole episode"
    )
    value: float = column("w.value")
    weight: float = column("w.weight")


class UpdateRow(
    ViewRow,
    view="v_updates",
    source="""
        updates u
        JOIN iterations i ON i.id = u.iteration_id
        JOIN runs r ON r.id = i.run_id""",
):
    """An optimizer step."""

    id: int = column("u.id")
    run: str = column("r.name")
    epoch: int = column(_EPOCH)
    iteration: int = column(_ITERATION)
    minibatch: int = column("u.minibatch")
    rows: int = column("u.rows")
    tokens: int = column("u.tokens", "tokens that were trained on")
    loss: float | None = column("u.loss", "the loss of this step")
    kl: float | None = column("u.kl")
    entropy: float | None = column("u.entropy")
    clip_fraction: float | None = column("u.clip_fraction")
    ratio: float | None = column("u.ratio")
    grad_norm: float | None = column("u.grad_norm")
    learning_rate: float | None = column("u.learning_rate")
    policy_kl: float | None = column("u.policy_kl")
    kl_coef: float | None = column("u.kl_coef")
    value_loss: float | None = column("u.value_loss")
    explained_variance: float | None = column("u.explained_variance")
    sampler_difference_mean: float | None = column("u.sampler_difference_mean")
    sampler_difference_max: float | None = column("u.sampler_difference_max")
    importance_outside: float | None = column("u.importance_outside")
    importance_weight: float | None = column("u.importance_weight")
    importance_truncated: float | None = column("u.importance_truncated")
    effective_sample_size: float | None = column("u.effective_sample_size")
    log_ratio_clamped: float | None = column("u.log_ratio_clamped")


_FATE_OF_KIND = {"eval": "evaluated", "fork": "forked", "search": "searched", "serve": "served", "import": "imported"}
_FATE = f"""
    CASE WHEN e.status IN ('planned', 'running') THEN 'open'
    WHEN e.status <> 'done' THEN e.status
    {" ".join(f"WHEN r.kind = '{kind}' THEN '{fate}'" for kind, fate in _FATE_OF_KIND.items())}
    WHEN c.id IS NULL AND i.status = 'cancelled' THEN 'cancelled'
    WHEN c.id IS NULL AND i.status <> 'done' THEN 'waiting'
    WHEN c.id IS NULL AND e.tainted THEN 'tainted'
    WHEN c.id IS NULL AND g.dropped = '{NO_VARIANCE}' THEN 'no_variance'
    WHEN c.id IS NULL AND g.dropped = '{SURPLUS}' THEN 'surplus'
    WHEN c.id IS NULL AND g.dropped <> '' THEN 'too_few'
    WHEN c.id IS NULL THEN 'no_reward'
    WHEN c.advantage = 0 AND NOT EXISTS (  -- a critic's values were trained on them all the same
      SELECT 1 FROM updates u WHERE u.iteration_id = i.id AND u.value_loss IS NOT NULL)
      AND NOT EXISTS (  -- a value for each sibling, and no join: one that began with the run would read it all
      SELECT 1 FROM episodes sibling WHERE sibling.group_id = e.group_id AND 0 <> (
        SELECT other.advantage FROM consumptions other WHERE other.run_id = i.run_id
        AND other.episode_id = sibling.id AND other.stage = 'train'))
      AND (g.dropped = '' OR EXISTS (  -- else all that could have taught something strayed
      SELECT 1 FROM groups flat WHERE flat.id = e.group_id AND flat.std_reward = 0)) THEN 'no_variance'
    WHEN c.advantage = 0 AND g.dropped LIKE '%{CUT_OFF}%' AND e.stop_reason IN ({list_in_sql(TRUNCATED)}) THEN 'truncated'
    WHEN c.advantage = 0 AND g.dropped LIKE '%{DIFFERENT}%' THEN 'strayed'
    WHEN i.skipped <> '' THEN 'skipped'
    ELSE 'trained' END"""
_OWN_EPISODES = "iterations i JOIN groups g ON g.iteration_id = i.id JOIN episodes e ON e.group_id = g.id"
_STORED_EPISODES = "iterations i JOIN iteration_groups g ON g.iteration_id = i.id JOIN episodes e ON e.group_id = g.group_id"
_FATE_OF = """
    JOIN runs r ON r.id = i.run_id
    JOIN tasks t ON t.id = e.task_id
    LEFT JOIN consumptions c ON c.run_id = i.run_id AND c.episode_id = e.id AND c.stage = 'train'"""


FATES = (
    "trained", "no_variance", "strayed", "truncated", "too_few", "surplus", "skipped", "tainted", "no_reward", "failed",
    "infra_error", "cancelled", "evaluated", "forked", "searched", "served", "imported", "waiting", "open",
)  # fmt: skip
"""The possible outcomes of a planned episode in a run. `trained` means that an update trained on the episode. Each other
outcome says why no update did, or why not yet.
"""


_KIND_IN_RUN = "run_id = :run_id AND (SELECT kind FROM runs WHERE id = :run_id)"
_TRAINING = f"{_KIND_IN_RUN} = 'train'"
_DONE = "stop_reason IS NOT NULL"  # a condition on `status` would let Postgres begin with its index, and sort all rows
_UNREAD = """NOT EXISTS (SELECT 1 FROM consumptions c
      WHERE c.run_id = :run_id AND c.episode_id = episodes.id AND c.stage = 'train')"""
_CANCELLED, _SKIPPED, _WAITING = (
    f"iteration_id IN (SELECT id FROM iterations WHERE run_id = :run_id AND {condition})"
    for condition in ("status = 'cancelled'", "skipped <> ''", "status <> 'done'")
)
_STRAYED, _CUT, _DROPPED, _SURPLUS = (
    f"group_id IN (SELECT id FROM groups WHERE run_id = :run_id AND dropped {condition})"
    for condition in (f"LIKE '%{DIFFERENT}%'", f"LIKE '%{CUT_OFF}%'", "<> ''", f"= '{SURPLUS}'")
)
FATE_CONDITIONS: Mapping[str, str] = {
    "trained": _TRAINING,
    "no_variance": _TRAINING,
    "strayed": _STRAYED,
    "truncated": _CUT,
    "too_few": _DROPPED,
    "surplus": _SURPLUS,
    "skipped": _SKIPPED,
    "tainted": f"{_TRAINING} AND {_DONE} AND tainted",
    "no_reward": f"{_TRAINING} AND {_DONE} AND NOT tainted AND {_UNREAD}",
    **{status: f"run_id = :run_id AND status = '{status}'" for status in ("failed", "infra_error")},
    "cancelled": f"run_id = :run_id AND (status = 'cancelled' OR {_CANCELLED})",
    **{fate: f"{_KIND_IN_RUN} = '{kind}'" for kind, fate in _FATE_OF_KIND.items()},
    "waiting": _WAITING,
    "open": "run_id = :run_id AND status IN ('planned', 'running')",
}
"""For each fate, a fast SQL condition on `episodes` that every episode with this fate in the run `:run_id`, which sampled it,
meets. Episodes of other runs do not meet it. A search checks the fate itself only for the episodes that meet the condition.
"""


class FateRow(
    ViewRow,
    view="v_ledger",
    source=[f"{members} {_FATE_OF}" for members in (_OWN_EPISODES, _STORED_EPISODES)],
):
    """The outcome of a planned episode in one run."""

    run: str = column("r.name")
    iteration: int = column(_ITERATION)
    episode_id: int = column("e.id")
    task: str = column("t.key")
    slot: int = column("g.slot")
    sample: int = column("e.sample")
    advantage: float | None = column("c.advantage")
    dropped: str = column("g.dropped")
    skipped: str = column("i.skipped")
    fate: str = column(_FATE)


class MachineRow(ViewRow, view="v_machine", source="machine_loads m"):
    """The load of a host while a run was running; kept for an hour."""

    host: str = column("m.host")
    created_at: datetime = column("m.created_at")
    cpu_share: float | None = column("m.cpu_share")
    memory_used: int | None = column("m.memory_used")
    memory_total: int | None = column("m.memory_total")
    gpus: Any = column("m.gpus")
    waiting_rollout: int | None = column("m.waiting_rollout")
    waiting_train: int | None = column("m.waiting_train")
    waiting_tools: int | None = column("m.waiting_tools")
    tokens_per_second: float | None = column("m.tokens_per_second")


VIEWS: Mapping[str, type[ViewRow]] = {kind.VIEW: kind for kind in ViewRow.__subclasses__()}
"""Every view by its name."""
