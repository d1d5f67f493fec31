"""`agentrl whatif`: computes what other algorithms would have done in an update of a run, and compares them. No row is
written.
"""

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.cli.console import Json, say, show_json, show_lines
from agentrl.cli.options import MAX_INTEGER, RunName
from agentrl.cli.resolve_targets import stored_database
from agentrl.workflow.runtime.shown_text import Line, format_count

if TYPE_CHECKING:
    from agentrl.workers.requests.whatif_request import WhatIfRequest
    from agentrl.workflow.analysis.counterfactual import Finding
    from agentrl.workflow.store.reads.provenance import UpdateInputs

WIDTH = 80
NAME_CHARS = 13
"""The width of the name column, in characters; a line has `WIDTH` characters. A name that is longer is printed on a separate
line.
"""

COLUMNS = (
    *(("spread", 7), ("zero", 5), ("corr", 7)),
    *(("loss", 9), ("grad", 9), ("cosine", 7)),
    *(("ratio", 7), ("clip", 7), ("kl", 9)),
)
MEANINGS = (
    "spread: standard deviation of the episodes' advantages; zero: share of them that is 0; corr: their correlation with the "
    "run's own; grad: norm before clipping; cosine: of the gradient with the run's own; kl: from the policy before the step."
)


def whatif(
    run: RunName,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME,...", help="Algorithms to compare with the run's.", show_default=False)
    ],
    iteration: Annotated[
        int | None, typer.Option(min=1, max=MAX_INTEGER, help="Iteration of the update [the last trained].", show_default=False)
    ] = None,
    convention: Annotated[
        Literal["verl", "trl"] | None,
        typer.Option(help="Convention to use where the two differ [the run's].", show_default=False),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "-s", metavar="KEY=VALUE", help="algorithm.KEY=VALUE, for the algorithms that have it.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare algorithms on an update of a run: advantages, loss, gradient, and what one optimizer step would change.

    The command uses the stored episodes of the iteration, and the policy from which the iteration's update started. The run,
    its checkpoints and the database do not change.
    """
    from agentrl.workers.requests.whatif_request import prepare_whatif

    names = [name.strip() for name in algorithm.split(",")]
    request = prepare_whatif(stored_database(), run, iteration, names, convention, assignments or [])
    findings = _run_whatif(request)
    if as_json:
        show_json(_whatif_document(request, findings))
    else:
        show_lines(_table_lines(request, findings))
    if not _is_as_recorded(request, findings[0]):
        say("The recomputed advantages differ from the recorded ones: rewards, code or numerics have changed.")


def _run_whatif(request: "WhatIfRequest") -> "list[Finding]":
    from agentrl.workflow.analysis.counterfactual import whatif as look
    from agentrl.workflow.models.policy import open_run_base
    from agentrl.workflow.settings import settings
    from agentrl.workflow.stats.group_variance import choose_groups

    past, where = request.past, settings()
    groups = choose_groups(past.groups, past.max_groups)[0] if past.max_groups else past.groups
    model, run = request.configs[0].model, past.run
    policy = open_run_base(model, run["base"], run["base_hash"], run["manifest"], where.device, where.threads)
    return list(look(policy, request.configs, past.policy, past.is_borrowed, groups, past.number, run["iterations"]))


def _is_as_recorded(request: "WhatIfRequest", own: "Finding") -> bool:
    from agentrl.workflow.algorithms import credits_alike

    return not request.past.advantages or credits_alike(own.options, own.advantages, request.past.advantages)


# as a document


def _whatif_document(request: "WhatIfRequest", findings: "Sequence[Finding]") -> dict[str, Any]:
    past = request.past
    return {
        "run": past.run["name"],
        "iteration": past.iteration,
        "policy_version": past.policy.version,
        "algorithms": [_algorithm_document(finding) for finding in findings],
        "groups": [
            {
                "slot": group.slot,
                "task": group.task.key,
                "episodes": [_episode_document(episode, findings) for episode in group.episodes],
            }
            for group in past.groups
        ],
    }


def _algorithm_document(finding: "Finding") -> dict[str, Any]:
    fields = ("own", "skipped", "spread", "zero", "correlation", "start", "cosine", "after", "blank")
    options = finding.options.model_dump(mode="json", exclude_none=True)
    return {"algorithm": _algorithm_name(finding, plain=True), "options": options} | {
        name: getattr(finding, name) for name in fields
    }


def _episode_document(episode: Any, findings: "Sequence[Finding]") -> dict[str, Any]:
    """Return the episode with one advantage per algorithm, in the order of the algorithms."""
    return {
        "id": episode.id,
        "reward": episode.reward,
        "advantages": [finding.advantages.get(episode.id) for finding in findings],
    }


# as a table


def _table_lines(request: "WhatIfRequest", findings: "Sequence[Finding]") -> Iterator[Line]:
    spans = (("advantages", 19), ("at the start", 25), ("after one step", 23))
    yield (" " * NAME_CHARS + "".join(f" {title:-^{width - 1}}" for title, width in spans), "bold")
    yield ("algorithm".ljust(NAME_CHARS) + "".join(title.rjust(width) for title, width in COLUMNS), "bold")
    for finding in findings:
        name, numbers = (
            _algorithm_name(finding),
            "".join(text.rjust(width) for text, (_, width) in zip(_table_cells(finding), COLUMNS, strict=True)),
        )
        if len(name) >= NAME_CHARS:
            yield name, ""
        yield ("" if len(name) >= NAME_CHARS else name).ljust(NAME_CHARS) + numbers, ""
    yield "", ""
    for sentence in _whatif_sentences(request, findings):
        for line in wrap(sentence, WIDTH):
            yield line, ""
    for line in wrap(MEANINGS, WIDTH):
        yield line, "dim"


def _algorithm_name(finding: "Finding", plain: bool = False) -> str:
    trl = " trl" if finding.options.convention == "trl" else ""
    return finding.options.name + ("" if plain else trl + (" *" if finding.own else ""))


def _table_cells(finding: "Finding") -> list[str]:
    start, after = finding.start, finding.after
    return [
        _format_number(finding.spread, ".3g"),
        _format_number(finding.zero, ".0%"),
        _format_number(finding.correlation, ".3f"),
        _format_number(start.get("loss"), ".2g"),
        _format_number(start.get("grad_norm"), ".3g"),
        _format_number(finding.cosine, ".3f"),
        _format_number(after.get("ratio"), ".4f"),
        _format_number(after.get("clip_fraction"), ".1%"),
        _format_number(after.get("policy_kl"), ".2g"),
    ]


def _format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _whatif_sentences(request: "WhatIfRequest", findings: "Sequence[Finding]") -> Iterator[str]:
    past, own = request.past, request.configs[0]
    credited = {episode for finding in findings for episode in finding.advantages}
    groups = sum(any(episode.id in credited for episode in group.episodes) for group in past.groups)
    episodes = f"{format_count(len(credited), 'episode')} in {format_count(groups, 'group')}"
    yield (
        f"* the run's own. {episodes} of iteration {past.iteration} of {past.run['name']}, "
        f"and policy version {past.policy.version}, from which its update started."
    )
    ratio = "to the sampler's logprobs" if own.source.given else "which is 1 before it"
    optimizer = _describe_optimizer(past, findings)
    yield f"Ratio ({ratio}), clip and kl: after one step of AdamW ({optimizer}) on all episodes, which was undone."
    if past.run["config"]["update"].get("trainer", "agentrl") != "agentrl":
        yield f"The run's updates are {past.run['config']['update']['trainer']}'s; here our trainer computes all of them."
    for key, takers in request.options.items():
        yield f"{key} is taken by {', '.join(takers)}."
    for finding in findings:
        if "critic" in finding.blank:
            yield f"{_algorithm_name(finding, plain=True)}'s critic is untrained: its values are 0."
    critical = list(
        dict.fromkeys(_algorithm_name(finding, plain=True) for finding in findings if "value_loss" in finding.start)
    )
    if critical:
        yield f"Loss and grad of {', '.join(critical)} include the critic's; the cosine is of the policy's gradient alone."
    warmup = request.configs[0].critic.warmup
    if past.number < warmup:
        yield (
            f"Iteration {past.iteration} is one of the first {warmup} (critic.warmup), in which the run's own policy does not "
            "move: in the critic's warm-up the policy's gradient is 0, and has no cosine with another."
        )
    for finding in findings:
        if finding.skipped:
            yield f"{_algorithm_name(finding, plain=True)} makes no update: {finding.skipped}."


def _describe_optimizer(past: "UpdateInputs", findings: "Sequence[Finding]") -> str:
    """Return a text about the optimizer's state at the start of the update: as the run had it, empty, or removed."""
    if all("optimizer" not in finding.blank for finding in findings):
        return "as the run had it"
    return "whose state was removed since" if past.policy.path and not past.is_borrowed else "that remembers nothing yet"
