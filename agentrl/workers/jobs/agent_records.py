"""What is committed of a turn that an agent from outside asked for: one record for each of its choices."""

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from agentrl.workers.jobs.agent_turns import TOP, AgentTurn, EpisodeTurns, choice_id
from agentrl.workflow.chains import EQUAL
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.dialects.chat_completions import parse_turn
from agentrl.workflow.engines import Completion
from agentrl.workflow.inference.agent_draft import AgentDraft
from agentrl.workflow.store.agent_steps import CallStep
from agentrl.workflow.store.rollout_claims import GroupWork
from agentrl.workflow.store.steps import CallRecord, SampledStep
from agentrl.workflow.trajectory import Step, ToolCall, ToolResult

ANOTHER_CHOICE = "another choice of one request"


@dataclass(frozen=True)
class AgentRecords:
    """Makes the records of a group's turns."""

    work: GroupWork
    chat: Chat
    limits: RolloutConfig
    max_context: int

    def of(self, turn: AgentTurn, turns: EpisodeTurns) -> list[CallStep]:
        """The records of a turn that is over; whether it was cut is known from now on.

        A choice that was stopped before anything was sampled of it has none.

        Raises:
            AgentRLError: as the engine's `submit` says.
        """
        turn.completions = [_result(future) for future in turn.futures]
        turn.cut = any(done is None for done in turn.completions) or (turn.stopped and self._is_cut(turn))
        found: list[CallStep] = []
        for choice, done in enumerate(turn.completions):
            if done is not None and (done.token_ids or not turn.cut):
                found.append(self._record(turn, turns, choice, done, found[0].request_id if found else ""))
        return found

    def most_tokens(self, turn: AgentTurn) -> int:
        """The most tokens that the turn may have: the run's limit, the model's context, and what the client asked for."""
        most = min(self.max_context - len(turn.draft.context), self.limits.max_new_tokens)
        return most if turn.ask.max_tokens is None else min(most, turn.ask.max_tokens)

    def _is_cut(self, turn: AgentTurn) -> bool:
        most = self.most_tokens(turn)
        return any(done.finish_reason == "length" and len(done.token_ids) < most for done in turn.completions if done)

    def _record(self, turn: AgentTurn, turns: EpisodeTurns, choice: int, done: Completion, first: str) -> CallStep:
        """The record of one choice; `first` is the request id of the one whose prompt it shares, if it is not the first."""
        call, draft = turn.call, turn.draft
        step = self._step(turn, turns, choice, done, beside=bool(first))
        sampled = SampledStep(call.episode, step, self.work.policy_id, self.chat.decode(done.token_ids), _calls(step))
        return CallStep(
            sampled=sampled,
            request_id=choice_id(turns.stopped_id(call.request_id) if turn.cut else call.request_id, choice),
            request_hash=call.body_hash,
            asked={**call.ask.asked, **_kept(turn, draft, done), "created": call.created, "draw": turn.draws[choice]},
            tools=call.ask.tools,
            template_options=call.ask.template_options,
            shared_messages=len(step.prompt) if first else draft.shared_messages,
            beside=first,
            shown={} if first else turns.shown(call.ask),
        )

    def _step(self, turn: AgentTurn, turns: EpisodeTurns, choice: int, done: Completion, beside: bool) -> Step:
        draft = turn.draft
        message = parse_turn(self.chat, turn.ask, draft.context, done.token_ids)
        refused = tuple(_refusal(made) for made in message.tool_calls)
        return Step(
            index=len(turns.lines.steps),
            prompt=turns.messages(draft) if beside else draft.messages,
            prompt_ids=() if beside else draft.prompt_ids,
            sampled_ids=done.token_ids,
            behavior_logprobs=done.logprobs,
            finish_reason=done.finish_reason,
            message=message,
            policy_version=self.work.policy.version,
            seconds=done.seconds,
            results=tuple(result for result in refused if result is not None) if refused and all(refused) else None,
            new_row=ANOTHER_CHOICE if beside else draft.reason,
            parent=draft.parent,
            shared=len(draft.context) if beside else draft.shared,
            delivered=not turn.cut and turn.is_awaited,
            draw=turn.draws[choice],
        )


def _calls(step: Step) -> tuple[CallRecord, ...]:
    return tuple(CallRecord(made, "none", _refusal(made)) for made in step.message.tool_calls)


def _kept(turn: AgentTurn, draft: AgentDraft, done: Completion) -> dict[str, Any]:
    """What is kept beside the sampling that was asked for: the client's stop strings, without which nobody could tell why the
    turn ended; how many turns it might go on from, where it is not the only one; the likeliest tokens of each place, where they
    were asked for: whoever asks again gets the same reply.
    """
    found = {"stop": list(turn.ask.stop), EQUAL: draft.equal if draft.equal > 1 else 0, TOP: done.top}
    return {name: value for name, value in found.items() if value}


def _refusal(call: ToolCall) -> ToolResult | None:
    """What stands for the result of a call that cannot be read, and that its agent never sees as a call."""
    return None if call.error is None else ToolResult(call.error, "parse_error")


def _result(future: "Future[Completion]") -> Completion | None:
    """What was sampled; None if it was stopped before it began."""
    try:
        return future.result()
    except CancelledError:
        return None
