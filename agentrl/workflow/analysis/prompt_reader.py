"""The prompts of tasks as the model reads them: rendered with the model's chat template and counted in its tokens."""

from dataclasses import dataclass
from pathlib import Path

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.models.loading import context_and_vocabulary, load_chat
from agentrl.workflow.trajectory import Task


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The prompt of a task's first turn, as the model reads it."""

    text: str
    tokens: int


class PromptReader:
    """A renderer of tasks' prompts, with the env, tools and chat template of a run.

    Raises:
        ModelError: the folder has no tokenizer with a chat template.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment = experiment
        self._chat: Chat = load_chat(experiment.config.model, folder)
        self._schemas = tuple(tool.schema for tool in experiment.tools.values())
        self.window = context_and_vocabulary(folder, experiment.config.model.trust_remote_code)[0]

    def read(self, task: Task) -> FirstPrompt:
        """Return the prompt of the task's first turn. Raise ModelError if the template refuses the task's messages."""
        ids = self._chat.opening(self._experiment.env.reset(task), self._schemas)
        return FirstPrompt(self._chat.decode(ids), len(ids))
