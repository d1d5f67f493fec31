"""The keywords of `agentrl.Trainer`, typed. Made from `workflow.config` by `make generated`; do not edit."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """Options of a run by their names; a section takes a mapping of its keys."""

    agent_network: Literal["endpoint", "all"]
    agent_sandbox: bool | None
    agent_unsafe: bool
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"]
    batch_size: int | None
    batch_tasks: int | None
    beam_width: int | None
    branch_factor: int | None
    chat_template: str | None
    choose_tasks: int
    clip: float
    clip_high: float | None
    clip_low: float | None
    convention: Literal["verl", "trl"]
    critic_temperature: float
    critic_tokens: int
    dataset: str
    decay: Literal["none", "linear", "cosine"]
    devices: int | Literal["auto"]
    discount: float | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    dual_clip: float | None
    dynamic_sampling: int
    engine: str
    entropy_coef: float
    epochs: int | None
    eval_every: int | None
    every: int | None
    filter: str | None
    frozen_clock: bool
    gae_lambda: float | None
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    group_size: int
    groups: int | Sequence[int]
    held_out_tasks: int
    hook: str | Sequence[str]
    hosts: int
    importance: Literal["auto", "truncate", "mask", "none"]
    importance_cap: float
    importance_level: Literal["token", "sequence"]
    iterations: int | None
    keep_solved: str | None
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3", "k3-corrected"]
    kl_horizon: int | None
    kl_in: Literal["loss", "reward"]
    kl_target: float | None
    last_turn: Literal["auto", "ask", "plain"]
    learning_rate: float
    load_in_4bit: bool
    load_in_8bit: bool
    lora: Literal["continue", "new"]
    lora_alpha: float
    lora_dropout: float
    lora_r: int | None
    lora_targets: str | Sequence[str]
    loss_coef: float
    map: str | Mapping[str, Any]
    mask_truncated: bool
    max_attempts: int
    max_bad_updates: int
    max_calls: int
    max_grad_norm: float
    max_kl: float | None
    max_new_tokens: int
    max_rollouts: int | None
    max_sampler_difference: float | None
    max_staleness: int
    max_steps: int
    max_tasks: int | None
    max_tool_calls: int
    memory_mb: int
    microbatch_tokens: int | None
    min_p: float
    name: str | None
    network: Literal["endpoint", "all"]
    numerics: Literal["fast", "exact"]
    optimizer: Literal["adamw", "adamw_8bit"]
    order: Literal["shuffled", "easy_first"]
    output_bytes: int
    output_dir: str | None
    own_rewards: bool
    path: str
    processes: int
    replay_ignore: str | Sequence[str]
    report_samples: int
    report_to: str | Sequence[str]
    resources: str | Mapping[str, Any]
    resume: Literal["replay", "restart"]
    resume_agent: Literal["replay", "restart"]
    reuse: bool
    reward: str | Mapping[str, Any]
    reward_set: str
    rounds: int | None
    runs: str | Sequence[str]
    sampler_dtype: Literal["auto", "float32", "bfloat16"]
    samples: int
    sandbox: bool | None
    save_every: int | None
    scale: Literal["group", "batch", "none"] | None
    seed: int
    served_tools: Sequence[Any]
    show_reference: bool
    side_calls: bool
    skip_bad_rows: bool
    split: str
    stop: str | Sequence[str]
    strict_api: bool
    strict_calls: bool
    tasks: int | None
    tasks_per_iteration: int
    tau_negative: float | None
    tau_positive: float | None
    temperature: float
    to: str | Sequence[str]
    tool_format: str | None
    tools: str | Sequence[str]
    top_k: int
    top_p: float
    trainer: str
    trust_remote_code: bool
    unsafe: bool
    weight_decay: float
    critic: Mapping[str, Any]
    eval: Mapping[str, Any]
    report: Mapping[str, Any]
    rollout: Mapping[str, Any]
    search: Mapping[str, Any]
    source: Mapping[str, Any]
    update: Mapping[str, Any]
