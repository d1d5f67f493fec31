"""The outcome of an episode, as a sentence."""

from collections.abc import Mapping
from typing import Any

from agentrl.workflow.runtime.shown_text import cell, one_line

SENTENCES = {
    "trained": "trained: advantage {advantage} in the update of iteration {iteration}, which made policy version {iteration}",
    "no_variance": "no advantage: the rewards of its group are all equal",
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
    "searched": "sampled to choose a prompt; no update trains on it",
    "evaluated": "sampled to evaluate a policy; no update trains on it",
    "served": "sampled for a client of agentrl serve; train on it: agentrl submit --from-episodes {run}",
    "imported": "imported from another system; train on it: agentrl submit --from-episodes {run}",
    "forked": "sampled by a fork; train on its group: agentrl submit --from-groups {run}",
    "waiting": "done, but not trained yet: its iteration is still open",
    "open": "not finished: {status}",
}


def fate_sentence(fate: Mapping[str, Any]) -> str:
    """Return the outcome of an episode as a sentence. `fate` is the result of `ledger.explain_fate`."""
    error = one_line(fate["error"] or "", 1000)
    fields = {**fate, "error": error, "advantage": cell(fate["advantage"])}
    return SENTENCES.get(fate["fate"], "the outcome is not known").format(**fields)
