"""What became of an episode, as a sentence for a person."""

from collections.abc import Mapping
from typing import Any

from agentrl.workflow.runtime.shown_text import cell, one_line

SENTENCES = {
    "trained": "trained: advantage {advantage} in the update of iteration {iteration}, which made policy version {iteration}",
    "no_variance": "taught nothing: the rewards of its group are all alike, so that it has no advantage",
    "strayed": "not trained: of its group {dropped}",
    "truncated": "not trained: a limit cut it off ({stop_reason}), and update.mask_truncated leaves such episodes out",
    "too_few": "not trained: its group was dropped, {dropped}",
    "surplus": "not trained: its group was dropped, {dropped}",
    "skipped": "not trained: the update of iteration {iteration} was skipped, {skipped}",
    "tainted": "not trained: a tool gave another output when its state was rebuilt",
    "no_reward": "not trained: it has no reward in the set that was trained on",
    "failed": "not trained: it failed ({error})",
    "infra_error": "not trained: the system failed it ({error})",
    "cancelled": "not trained: the run was cancelled",
    "searched": "made to choose a text; no update trains on it",
    "evaluated": "made to measure a policy; no update trains on it",
    "served": "made for a client of agentrl serve; train on it: agentrl submit --from-episodes {run}",
    "imported": "imported: it was sampled elsewhere; train on it: agentrl submit --from-episodes {run}",
    "forked": "made by a fork; train on its group: agentrl submit --from-groups {run}",
    "waiting": "done, and not trained yet: its iteration is still open",
    "open": "not over yet: {status}",
}
"""Fate -> sentence for a person."""


def fate_sentence(fate: Mapping[str, Any]) -> str:
    """The sentence of a fate, as `ledger.explain_fate` tells it."""
    error = one_line(fate["error"] or "", 1000)
    shown = {**fate, "error": error, "advantage": cell(fate["advantage"])}
    return SENTENCES.get(fate["fate"], "what became of it is not known").format(**shown)
