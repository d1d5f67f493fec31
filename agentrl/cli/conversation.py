"""A conversation with a policy in this process. It uses the same chat template, sampler, parser and tools as an episode."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.cli.turn_display import Voice, turn_lines
from agentrl.workflow.agent import observe, refusal
from agentrl.workflow.chat.parsing import THINK
from agentrl.workflow.envs import Env, with_system_prompt
from agentrl.workflow.errors import StateError
from agentrl.workflow.inference.open_policy import OpenPolicy
from agentrl.workflow.runtime.shown_text import Line, format_count
from agentrl.workflow.tools import Tool
from agentrl.workflow.tools.python import Notebook
from agentrl.workflow.training.demonstrations import Demonstration
from agentrl.workflow.trajectory import Episode, Message, Step, Task, ToolCall, ToolResult

MakesVoice = Callable[[bool, Sequence[str]], Voice]
OTHER_TOOLS_NOTE = "the tools changed here"


@dataclass(frozen=True)
class _Checkpoint:
    """The state of a conversation before a message of the user."""

    steps: tuple[Step, ...]
    row: tuple[Step, ...]
    unheard: tuple[Message, ...]


class Talk:
    """A conversation. `answer` takes a message of the user, and yields the turns of the policy and the tool results as lines.

    Attributes:
        steps: the turns so far, each with the messages that were new in it.
        off: the names of the tools that are not offered.
    """

    def __init__(self, policy: OpenPolicy, env: Env, tools: Mapping[str, Tool] | None = None) -> None:
        """Begin a conversation with these tools. If `tools` is None, use the tools of the env."""
        self.policy = policy
        self.env = env
        self.tools = env.toolset() if tools is None else tools
        self.off: frozenset[str] = frozenset()
        self.steps: tuple[Step, ...] = ()
        self._row: tuple[Step, ...] = ()
        self._unheard: tuple[Message, ...] = ()
        self._before = _Checkpoint((), (), ())
        self._draws = 0
        self._notebook = Notebook()

    def close(self) -> None:
        """Close the sampler and the sessions of the tools."""
        self.policy.close()
        self._notebook.close()

    @property
    def offered_tools(self) -> dict[str, Tool]:
        return {name: tool for name, tool in self.tools.items() if name not in self.off}

    def set_tools_off(self, off: frozenset[str]) -> None:
        """Set the tools that are not offered. The next turn renders the whole conversation again."""
        self.off = off
        self._row = ()
        self._draws += 1

    def reset(self) -> None:
        """Delete all turns and the sessions of the tools."""
        self.steps = self._row = self._unheard = ()
        self._draws += 1
        self._forget_names()

    def take_back(self) -> None:
        """Remove the user's last message and its answer. If the message is sent again, another answer is drawn."""
        self.steps, self._row, self._unheard = self._before.steps, self._before.row, self._before.unheard
        self._draws += 1

    def answer(self, text: str, voice: MakesVoice | None = None) -> Generator[Line, None, None]:
        """Sample turns until a turn calls no tool, at most `max_steps` turns. Yield the lines to print.

        `voice` creates the object that displays a turn while the turn is sampled. Its two arguments are whether the turn begins
        inside a thought, and the marks that begin a call. Lines that this object has displayed are not yielded.
        """
        self._before = _Checkpoint(self.steps, self._row, self._unheard)
        question = Message("user", text)
        new = (*self._unheard, question) if self.steps else with_system_prompt(self.env.system_prompt, (question,))
        episode = Episode(Task("chat", (question,), ""))
        for _ in range(self.policy.limits.max_steps):
            step = yield from self._sample_turn(new, voice)
            cut = self._cut_reason(step)
            if cut:
                yield f"(cut at {cut})", "yellow"
            if not step.message.tool_calls or cut:
                self._unheard = ()
                return
            step = replace(step, results=(yield from self._run_calls(step.message.tool_calls)))
            self.steps, self._row = (*self.steps[:-1], step), (*self._row[:-1], replace(self._row[-1], results=step.results))
            episode = episode.with_step(replace(step, index=len(episode.steps), parent=None))
            self._unheard = new = tuple(observe(episode, self.env, self.policy.limits))
            if not new:
                return
        yield f"(stopped after {format_count(self.policy.limits.max_steps, 'turn')})", "yellow"

    def demonstration(self) -> Demonstration:
        """Return the conversation as a demonstration for `sft`. Raise StateError if there is no answer, or an answer was cut
        off.
        """
        if not self.steps:
            raise StateError("Nothing to save: there is no answer yet.", "Send a message first.")
        if any(step.finish_reason == "length" for step in self.steps):
            raise StateError("Cannot save the conversation: an answer in it was cut off.", "Start a new one: /reset")
        messages = tuple(message for step in self.steps for message in (*step.prompt, step.message))
        return Demonstration(messages, tuple(tool.schema for tool in self.offered_tools.values()))

    def _sample_turn(self, new: tuple[Message, ...], voice: MakesVoice | None) -> Generator[Line, None, Step]:
        again = bool(self.steps) and not self._row
        messages = (*(message for step in self.steps for message in (*step.prompt, step.message)), *new) if again else new
        stream = self.policy.stream(messages, tuple(self.offered_tools.values()), before=self._row, sample=self._draws)
        try:
            opens = self.policy.chat.manner.tool_format.opens
            display = voice(self._thinks_first(stream.context), opens) if voice else None
            for piece in stream if display else ():
                display.take(piece)  # type: ignore[union-attr]
            step = stream.result()
        finally:
            stream.stop()
        self._row = (*self._row, step)
        reason = OTHER_TOOLS_NOTE if again else step.new_row
        chain = self.steps[-1].chain + (reason is not None) if self.steps else 0
        numbered = replace(step, index=len(self.steps), prompt=new, new_row=reason, chain=chain, parent=None)
        self.steps = (*self.steps, numbered)
        yield from display.rest(step.message) if display else turn_lines(step.message)
        return numbered

    def _thinks_first(self, context: tuple[int, ...]) -> bool:
        """Return True if the template opens a thought, so the turn begins inside the thought."""
        return self.policy.chat.decode(context[-8:]).rstrip().endswith(THINK)

    def _run_calls(self, calls: tuple[ToolCall, ...]) -> Generator[Line, None, tuple[ToolResult, ...]]:
        results = []
        for index, call in enumerate(calls):
            results.append(self._run_tool_call(index, call))
            yield f"  -> {results[-1].content}", "red" if results[-1].error_class else "blue"
        return tuple(results)

    def _cut_reason(self, step: Step) -> str:
        if step.finish_reason == "stop":
            return ""
        sampled = len(step.sampled_ids)
        if sampled >= self.policy.limits.max_new_tokens:
            return "--max-new-tokens"
        window = self.policy.policy.max_context
        whole = len(Episode(Task("chat", (), ""), steps=self._row).context_ids) >= window
        return f"the model's window of {window} tokens" if whole else "the server's window"

    def _run_tool_call(self, index: int, call: ToolCall) -> ToolResult:
        refused = refusal(call, index, self.offered_tools, self.policy.limits)
        if refused is not None:
            return refused
        try:
            return self._notebook.call(self.tools[call.name], call.arguments)
        except KeyboardInterrupt:
            self._forget_names()
            raise

    def _forget_names(self) -> None:
        self._notebook.close()
        self._notebook = Notebook()
