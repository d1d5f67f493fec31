"""The SQL for values of a step that its row does not repeat, because another row has them. `s` is the step's row in `steps`, and
`t` is its row in `step_tokens`.
"""

PROMPT = "coalesce(prompt_step.prompt, s.prompt)"
JOIN_PROMPT = "LEFT JOIN steps prompt_step ON prompt_step.id = s.prompt_step_id"
"""The join that PROMPT needs."""
PROMPT_IDS = "coalesce(prompt_tokens.prompt_ids, t.prompt_ids)"
JOIN_PROMPT_IDS = "LEFT JOIN step_tokens prompt_tokens ON prompt_tokens.step_id = s.prompt_step_id"
"""The join that PROMPT_IDS needs."""
