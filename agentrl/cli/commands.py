"""The list of commands, in groups. Only the module of the command that is run or completed is imported."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info, get_group_from_info
from typer.models import CommandInfo, TyperInfo

EXAMPLES = (
    ("agentrl submit --dataset gsm8k --epochs 3", "train; starts its own workers"),
    ("agentrl watch", "follow the newest run"),
    ('agentrl sql "SELECT * FROM v_iterations"', "query the rows"),
)


@dataclass(frozen=True)
class Entry:
    """A command in the list: the `module:object` of its function or Typer application, and one line of help."""

    where: str
    line: str


GROUPS: Mapping[str, Mapping[str, Entry]] = {
    "Train": {
        "submit": Entry("agentrl.cli.submit:submit", "Start a training run; prints its name."),
        "sft": Entry("agentrl.cli.sft:sft", "Train on demonstrations, or on stored episodes."),
        "dpo": Entry("agentrl.cli.dpo:dpo", "Train on pairs of better and worse episodes (DPO)."),
        "merge": Entry("agentrl.cli.merge:merge", "Write a stored policy as an ordinary model folder."),
        "fork": Entry("agentrl.cli.fork:fork", "Sample an episode again from one of its steps."),
        "import": Entry("agentrl.cli.import_traces:imports", "Import episodes that another system recorded."),
        "rescore": Entry("agentrl.cli.fork:rescore", "Score a run's episodes with other rewards; old scores stay."),
    },
    "Look": {
        "ui": Entry("agentrl.cli.ui:ui", "Show runs in a browser, or export one as a file."),
        "runs": Entry("agentrl.cli.browse:runs", "List the newest runs."),
        "watch": Entry("agentrl.cli.watch:watch", "Follow a run to its end; then see where its seconds went."),
        "episodes": Entry("agentrl.cli.browse:episodes", "List a run's episodes, with filters."),
        "tasks": Entry("agentrl.cli.browse:tasks", "List a run's tasks: how often and when each was solved."),
        "changes": Entry("agentrl.cli.changes:changes", "Say what is wrong in a run, or changed in an iteration."),
        "replay": Entry("agentrl.cli.browse:replay", "Show an episode's transcript or tokens, or verify it."),
        "prompts": Entry("agentrl.cli.prompts:prompts", "List the versions of a run's prompts and their gains."),
        "events": Entry("agentrl.cli.browse:events", "List the events of a run."),
        "why": Entry("agentrl.cli.fork:why", "Show which update trained on an episode, and its advantage."),
        "whatif": Entry("agentrl.cli.whatif:whatif", "Compute an update with other algorithms, and compare."),
    },
    "Ask": {
        "sql": Entry("agentrl.cli.sql:sql", "Query the database with one SELECT; --schema lists the views."),
        "eval": Entry("agentrl.cli.evaluate:evaluate", "Measure a policy: mean reward, its interval, accuracy, pass@k."),
        "compare": Entry("agentrl.cli.compare:compare", "Compare two policies on the tasks of both."),
        "chat": Entry("agentrl.cli.evaluate:chat", "Chat with a policy that can call its tools."),
        "serve": Entry("agentrl.cli.serve:serve", "Serve a policy to any client of the OpenAI or the Anthropic API."),
    },
    "Run": {
        "resume": Entry("agentrl.cli.run_control:resume", "Resume a paused or failed run, or start a run's missing workers."),
        "pause": Entry("agentrl.cli.run_control:pause", "Pause a run after the work in progress."),
        "report": Entry("agentrl.cli.report:report", "Write a run to wandb, trackio, tensorboard or mlflow."),
        "cancel": Entry("agentrl.cli.run_control:cancel", "End a run for good, and keep its rows."),
        "tag": Entry("agentrl.cli.tags:tag", "Tag a run, and find it by its tags."),
        "note": Entry("agentrl.cli.tags:note", "Attach a note to a run."),
    },
    "Machine": {
        "doctor": Entry("agentrl.cli.doctor:doctor", "Check the machine, the services, the models."),
        "up": Entry("agentrl.cli.stack:up", "Start the embedded stack."),
        "down": Entry("agentrl.cli.stack:down", "Stop the stack; unfinished runs continue at the next `up`."),
        "worker": Entry("agentrl.cli.stack:worker", "Run one worker in this process until SIGTERM."),
        "engine": Entry("agentrl.cli.engine:engine", "Install engines for --engine: vllm."),
        "agent": Entry("agentrl.cli.agent:agent", "Run agents outside of the stack: ask an endpoint for tasks."),
        "logs": Entry("agentrl.cli.logs:logs", "Show the logs of the workers; -f follows."),
        "gc": Entry("agentrl.cli.maintenance:gc", "Remove checkpoint files that no row needs, or a run's tokens."),
        "vacuum": Entry("agentrl.cli.maintenance:vacuum", "Compact the database; runs may continue meanwhile."),
        "data": Entry("agentrl.cli.data:data", "Check that a dataset's tasks can be scored."),
        "tools": Entry("agentrl.cli.serve_tools:tools", "List tools, or serve them over HTTP."),
        "config": Entry("agentrl.cli.stack:config", "Show the config of a run."),
        "db": Entry("agentrl.cli.stack:db", "Show or upgrade the database's revision."),
    },
}
COMMANDS: Mapping[str, Entry] = {name: entry for group in GROUPS.values() for name, entry in group.items()}
COMPLETION_VARIABLE = "_AGENTRL_COMPLETE"
"""The environment variable that a shell sets when it asks for completions."""


class Command(TyperCommand):
    """A command whose help shows the options of each group (`rich_help_panel`), then the options without a group."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. If an option lacks its value, the error message names the possible values."""
        from typer._click.exceptions import BadOptionUsage

        try:
            return super().parse_args(ctx, args)
        except BadOptionUsage as error:
            metavars = [str(param.metavar) for param in self.get_params(ctx) if error.option_name in param.opts]
            choices = [metavar.replace("|", ", ") for metavar in metavars if "|" in metavar]
            error.message += "".join(f" Choose one of {names}." for names in choices)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            plain = "Arguments" if param.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        sections["Options"] = sections.pop("Options")  # options without a group, --help among them, last
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class LazyCommands(Mapping[str, Any]):
    """The commands by name. A command is imported when it is first accessed."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = COMMANDS[name].where.partition(":")
        target = getattr(import_module(module), attribute)
        if isinstance(target, Typer):
            info = TyperInfo(target, name=name)
            return get_group_from_info(info, pretty_exceptions_short=True, suggest_commands=True, rich_markup_mode=None)
        if COMPLETION_VARIABLE in os.environ:
            from agentrl.cli.completion import complete

            complete(target)
        settings = {"token_normalize_func": with_hyphens}
        command = CommandInfo(name, cls=Command, callback=target, context_settings=settings)
        return get_command_from_info(command, pretty_exceptions_short=True, rich_markup_mode=None)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def with_hyphens(word: str) -> str:
    """Replace `_` by `-` in the word. Users may type options and commands with either character."""
    return word.replace("_", "-")


class Commands(TyperGroup):
    """The command `agentrl` itself. Its help and completion use only `COMMANDS`, so they import no command."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"commands": LazyCommands()})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the purpose of agentrl, then example commands."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            formatter.write_dl(EXAMPLES, col_max=44)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, with one line for each command. Lines are never shortened."""
        longest = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), entry.line) for name, entry in group.items()])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands before the global options, because most readers look for a command."""
        self.format_commands(ctx, formatter)
        records = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands and global options that begin with the incomplete word."""
        from typer._click.shell_completion import CompletionItem

        begun = [CompletionItem(name, help=entry.line) for name, entry in COMMANDS.items() if name.startswith(incomplete)]
        return begun + ([] if not incomplete.startswith("-") else super(TyperGroup, self).shell_complete(ctx, incomplete))
