"""The SQL for values of a step that are stored once, in another column or row. `s` is the step's row in `steps`, and
`t` is its row in `step_tokens`.
"""

CONTENT, THOUGHT = (f"coalesce(substr(s.text, s.{part}_start, s.{part}_length), s.{part})" for part in ("content", "thought"))
FINAL_ANSWER = f"""
    CASE WHEN e.answer_step IS NULL THEN e.final_answer ELSE (
      SELECT {CONTENT} FROM steps s WHERE s.episode_id = e.id AND s.attempt = e.attempt AND s.number = e.answer_step) END"""
"""The final answer of the episode `e`."""
PROMPT = "coalesce(prompt_step.prompt, s.prompt)"
JOIN_PROMPT = "LEFT JOIN steps prompt_step ON prompt_step.id = s.prompt_step_id"
"""The join that PROMPT needs."""
PROMPT_IDS = "coalesce(prompt_tokens.prompt_ids, t.prompt_ids)"
JOIN_PROMPT_IDS = "LEFT JOIN step_tokens prompt_tokens ON prompt_tokens.step_id = s.prompt_step_id"
"""The join that PROMPT_IDS needs."""
