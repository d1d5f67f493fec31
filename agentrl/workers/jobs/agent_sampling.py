"""How a turn that an agent from outside asks for is sampled: by the run's sampling, or where clients are served by theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from agentrl.workers.jobs.agent_calls import AgentCall
from agentrl.workers.jobs.agent_turns import AgentTurn, EpisodeTurns, prompt_hash
from agentrl.workflow import engines
from agentrl.workflow.config import CLIENTS, AgentConfig, RolloutConfig
from agentrl.workflow.dialects import Ask, RequestError
from agentrl.workflow.dialects.client_sampling import key_asked, limits_asked, with_stop
from agentrl.workflow.engines import Backend, GenerateRequest
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.inference.agent_draft import AgentDraft
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_holds
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import GroupWork
from agentrl.workflow.trajectory import Episode

MOST_OPEN = 64
"""Calls of one episode that are sampled at the same time; more are told to come again."""
_told_runs: set[int] = set()
"""Runs whose events say already that sampling is theirs."""


@dataclass(frozen=True)
class AgentSampling:
    """The sampling of a group's turns."""

    db: Database
    work: GroupWork
    limits: RolloutConfig
    agent: AgentConfig
    engine: Backend
    is_clients: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_clients", self.agent.name == CLIENTS)

    def check_count(self, turns: EpisodeTurns) -> None:
        """Lets one more call of the episode in.

        Raises:
            RequestError: there were too many, or too many are open.
        """
        if turns.count >= self.agent.max_calls:
            said = f"This episode has had its {self.agent.max_calls} calls of the model (agent.max_calls)."
            raise RequestError(429, said, code="max_calls")
        most = settings().endpoint_calls if self.is_clients else MOST_OPEN
        if len(turns.open) >= most:
            raise RequestError(429, f"{most} calls of this episode are open already.", code="rate_limit_exceeded")

    def check(self, ask: Ask) -> None:
        """Looks whether such a turn can be sampled.

        Raises:
            RequestError: the engine does not know what it asks for.
        """
        if ask.top_logprobs and not self.engine.top_logprobs:
            said = f"The engine {self.engine.name!r} does not tell the likeliest tokens."
            raise RequestError(400, said, code="unsupported_parameter", param="top_logprobs")
        if ask.stop and "stop" not in self.engine.options:
            said = f"The engine {self.engine.name!r} cannot end a turn at a text."
            raise RequestError(400, said, code="unsupported_parameter", param="stop")
        try:
            engines.check_options(self.engine, self._limits(ask))
        except ConfigError as error:
            raise RequestError(400, error.message, code="unsupported_parameter") from error

    def draws(self, turns: EpisodeTurns, call: AgentCall, draft: AgentDraft) -> Sequence[int]:
        """For each choice the number that tells it from others of the same prompt: with a client's seed from 0 each time."""
        if self.is_clients and "seed" in call.ask.asked:
            return tuple(range(call.ask.count))
        return turns.draws(call, prompt_hash(draft))

    def request(self, turn: AgentTurn, choice: int, draw: int, most: int, episode: Episode) -> GenerateRequest:
        """What the engine is asked for; of a call in training only its stop strings and its `most` tokens count."""
        limits, ask = self._limits(turn.ask), turn.ask
        keys = self.work.sampling_key(episode)
        keys = key_asked(keys, ask.asked) if self.is_clients else keys
        key = keys.of_turn(turn.draft.context, draw)
        request = GenerateRequest.within(limits, turn.draft.context, self.work.policy, key, session=turn.session)
        return replace(
            request,
            max_new_tokens=most,
            follows_length=True,
            heard=partial(turn.hear, choice),
            top_logprobs=ask.top_logprobs,
        )

    def note_asked(self, ask: Ask) -> None:
        """Says once in the run's events that sampling is the run's, whatever its clients ask for."""
        if ask.asked and not self.is_clients and self.work.run_id not in _told_runs:
            _told_runs.add(self.work.run_id)
            agent_holds.note_asked(self.db, self.work.run_id, ", ".join(sorted(ask.asked)))

    def _limits(self, ask: Ask) -> RolloutConfig:
        return with_stop(limits_asked(self.limits, ask.asked) if self.is_clients else self.limits, ask.stop)
