"""The list of commands, in groups. Only the file of a command that is called or completed is imported."""

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
    ("agentrl submit --dataset gsm8k --epochs 3", "train, with workers of its own"),
    ("agentrl watch", "follow the newest run"),
    ('agentrl sql "SELECT * FROM v_iterations"', "query the rows"),
)


@dataclass(frozen=True)
class Entry:
    """A command: `module:object` of a function or a Typer, and one line of help."""

    where: str
    line: str


GROUPS: Mapping[str, Mapping[str, Entry]] = {
    "Train": {
        "submit": Entry("agentrl.cli.submit:submit", "Start a training run; prints its name."),
        "sft": Entry("agentrl.cli.sft:sft", "Imitate demonstrations, or what stored episodes sampled."),
        "dpo": Entry("agentrl.cli.dpo:dpo", "Prefer a run's better episodes to their siblings."),
        "merge": Entry("agentrl.cli.merge:merge", "Make a plain model of a stored policy."),
        "fork": Entry("agentrl.cli.fork:fork", "Go on from a step of an episode, several times."),
        "import": Entry("agentrl.cli.import_traces:imports", "Take episodes that were sampled elsewhere into the store."),
        "rescore": Entry("agentrl.cli.fork:rescore", "Score a run's episodes by other rewards, beside the first."),
    },
    "Look": {
        "ui": Entry("agentrl.cli.ui:ui", "Show the rows in a browser; write a run into one file."),
        "runs": Entry("agentrl.cli.browse:runs", "List the newest runs."),
        "watch": Entry("agentrl.cli.watch:watch", "Follow a run to its end."),
        "episodes": Entry("agentrl.cli.browse:episodes", "List a run's episodes, with filters."),
        "replay": Entry("agentrl.cli.browse:replay", "Show an episode's transcript, or verify it."),
        "prompts": Entry("agentrl.cli.prompts:prompts", "List a run's prompts, version by version, and what they gained."),
        "events": Entry("agentrl.cli.browse:events", "List the events of a run."),
        "why": Entry("agentrl.cli.fork:why", "Tell which update trained on an episode, or why none did."),
        "whatif": Entry("agentrl.cli.whatif:whatif", "Compare what other algorithms make of an update."),
    },
    "Ask": {
        "sql": Entry("agentrl.cli.sql:sql", "Ask the database: one SELECT, read-only; --schema explains it."),
        "eval": Entry("agentrl.cli.evaluate:evaluate", "Measure a policy: mean reward, its interval, accuracy, pass@k."),
        "compare": Entry("agentrl.cli.compare:compare", "Compare two policies on the tasks of both."),
        "chat": Entry("agentrl.cli.evaluate:chat", "Talk to a policy, its tools at hand."),
        "serve": Entry("agentrl.cli.serve:serve", "Serve a policy to any client of the OpenAI API."),
    },
    "Run": {
        "resume": Entry("agentrl.cli.run_control:resume", "Set a paused, failed or stranded run going again."),
        "pause": Entry("agentrl.cli.run_control:pause", "Pause a run: its workers stop after what they hold."),
        "report": Entry("agentrl.cli.report:report", "Write a run to trackers such as wandb; list where it is."),
        "cancel": Entry("agentrl.cli.run_control:cancel", "End a run for good; what it has stays."),
        "tag": Entry("agentrl.cli.tags:tag", "Give a run tags, by which it is found again."),
        "note": Entry("agentrl.cli.tags:note", "Write down what is to be known of a run."),
    },
    "Machine": {
        "doctor": Entry("agentrl.cli.doctor:doctor", "Check the machine, the services, the models."),
        "up": Entry("agentrl.cli.stack:up", "Start the embedded stack."),
        "down": Entry("agentrl.cli.stack:down", "Stop it; unfinished runs go on at the next `up`."),
        "worker": Entry("agentrl.cli.stack:worker", "Run one worker in this process until SIGTERM."),
        "logs": Entry("agentrl.cli.logs:logs", "Show what this home's workers wrote; -f follows."),
        "gc": Entry("agentrl.cli.maintenance:gc", "Remove what no row needs from the checkpoint folders."),
        "vacuum": Entry("agentrl.cli.maintenance:vacuum", "Compact the database; runs may go on meanwhile."),
        "data": Entry("agentrl.cli.data:data", "Check that a dataset's tasks can be scored."),
        "tools": Entry("agentrl.cli.serve_tools:tools", "List what a model may call; serve it over HTTP."),
        "config": Entry("agentrl.cli.stack:config", "Show the config of a run."),
        "db": Entry("agentrl.cli.stack:db", "Show or upgrade the database's revision."),
    },
}
COMMANDS: Mapping[str, Entry] = {name: entry for group in GROUPS.values() for name, entry in group.items()}
COMPLETION_VARIABLE = "_AGENTRL_COMPLETE"
"""The environment variable by which a shell asks for completions."""


class Command(TyperCommand):
    """A command whose help lists the options of each group (`rich_help_panel`) after those without a group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then each group of options."""
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
    """The commands by name; each is imported at first access."""

    def __getitem__(self, name: str) -> Any:
        """The command.

        Raises:
            KeyError: there is no command of that name.
        """
        module, _, attribute = COMMANDS[name].where.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, Typer):
            info = TyperInfo(found, name=name)
            return get_group_from_info(info, pretty_exceptions_short=True, suggest_commands=True, rich_markup_mode=None)
        if COMPLETION_VARIABLE in os.environ:
            from agentrl.cli.completion import complete

            complete(found)
        settings = {"token_normalize_func": with_hyphens}
        wanted = CommandInfo(name, cls=Command, callback=found, context_settings=settings)
        return get_command_from_info(wanted, pretty_exceptions_short=True, rich_markup_mode=None)

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of the groups."""
        return iter(COMMANDS)

    def __len__(self) -> int:
        """The number of commands."""
        return len(COMMANDS)


def with_hyphens(word: str) -> str:
    """The word with `-` for `_`: options and commands may be spelled with either."""
    return word.replace("_", "-")


class Commands(TyperGroup):
    """`agentrl` itself: its help and completion use the list above and import no command."""

    def __init__(self, **attributes: Any) -> None:
        """Takes all commands of the list."""
        super().__init__(**attributes | {"commands": LazyCommands()})

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands."""
        return list(COMMANDS)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Writes the purpose, and the first commands to type."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            formatter.write_dl(EXAMPLES, col_max=44)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section for each group, with a whole line for each command."""
        longest = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), entry.line) for name, entry in group.items()])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands before the options, for they are what a person looks for."""
        self.format_commands(ctx, formatter)
        records = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The commands and global options that begin with the incomplete word."""
        from typer._click.shell_completion import CompletionItem

        begun = [CompletionItem(name, help=entry.line) for name, entry in COMMANDS.items() if name.startswith(incomplete)]
        return begun + ([] if not incomplete.startswith("-") else super(TyperGroup, self).shell_complete(ctx, incomplete))
