"""Names and options of other frameworks, with their equivalents in agentrl."""

_NO_ADAPTER = "leave it out: every call is a row with its messages and tokens, so that nothing is converted"
_NO_TRACER = "leave it out: calls are recorded where the model is; an exporter may send spans to /v1/traces of the endpoint"
_NO_RUNNER = "leave it out: fit starts the workers, n_runners=8 agents at once; Trainer.dev tries an agent in this process"
_ENDPOINT = "an agent is given llm.base_url, llm.api_key and llm.model"
_CRITIC = "write critic=MODEL, which criticises and edits; AGENTRL_CRITIC_URL says where it is"
_ADVICE = {
    "LlmProxyTraceToTriplet OtelTraceAdapter TraceAdapter TraceToMessages TracerTraceToTriplet": _NO_ADAPTER,
    "AgentOpsTracer DummyTracer OtelTracer Tracer": _NO_TRACER,
    "LitAgentRunner Runner": _NO_RUNNER,
    "LLMProxy ProxyLLM": _ENDPOINT,
    "llm_rollout prompt_rollout rollout": (
        "leave the decorator out: a function of task, llm and the run's texts by their names is an agent"
    ),
    "LitAgent": "derive agentrl.Agent, and write rollout(self, task, llm)",
    "PromptTemplate": 'write the text, resources={"prompt": "... {question}"}: an agent is given it as an agentrl.Prompt',
    "NamedResources": "resources are texts by their names, a mapping",
    "Dataset": "a list of mappings is a dataset, as a Hugging Face dataset, a DataFrame and a file are",
    "APO": 'write agentrl.Trainer("apo", search={"critic": MODEL}); AGENTRL_CRITIC_URL says where that model is',
    "Baseline FastAlgorithm": 'write agentrl.Trainer("fast"): each task once, as things are',
    "VERL": 'write agentrl.Trainer("grpo", model=...); its options are keywords, group_size=8',
    "algo": "write a class with run(self, resources, rollouts, train_tasks), and pass it: agentrl.Trainer(Mine)",
    "InMemoryLightningStore": "pass store=agentrl.InMemoryStore()",
    "LightningStore LightningStoreClient LightningStoreServer LightningStoreThreaded": (
        "pass store= a folder or a URL; agentrl.open(store) reads it"
    ),
    "SharedMemoryExecutionStrategy": 'pass strategy="threads"',
    "ClientServerExecutionStrategy ExecutionStrategy": 'pass strategy="processes", or "cluster" for workers elsewhere',
    "reward": "return the number from the agent, or call agentrl.emit_reward",
    "find_final_reward find_reward_spans get_reward_value get_rewards_from_span": (
        "an episode has them: run.episode(ID).rewards, and what was emitted among its annotations"
    ),
    "get_message_value get_object_value": "what was emitted, and spans that were sent, are run.episode(ID).annotations",
    "Triplet": "run.episode(ID).value.steps have prompt_ids, sampled_ids and logprobs",
    "Attempt AttemptedRollout RolloutConfig": (
        "what the system loses is tried again, max_attempts=3; agentrl.Trainer(agent={'timeout_seconds': 60}) bounds a try"
    ),
    "build_component": "pass the object, its class, or its path",
    "lightning_cli": 'write options into a file: agentrl.Trainer(config="run.yaml"), or agentrl submit --config run.yaml',
    "configure_logger setup_logging": (
        'write logging.basicConfig(level="INFO"); what the workers say is shown by the command agentrl logs'
    ),
    "MiniGRPO": "write agentrl.GRPO(model, tokenizer)",
    "PPOTrainer": "write agentrl.GRPOTrainer(policy, 'ppo')",
    "TrajectoryBuffer": "keep episodes in a list, which GRPOTrainer.update takes",
    "BasePolicy": "agentrl.open_policy(model) has generate, stream and forward",
    "AgentEnv": "derive agentrl.Env: reset, step and final_reward",
    "CodeExecEnv": 'name env="code", or write agentrl.Env(tools=("python",), rewards={...})',
    "ToolRegistry": "an env has its tools: agentrl.Env(tools=(tool, ...))",
    "BaseTool": "write agentrl.Tool(function): its name, docstring and types are what the model is told",
    "CodeExecTool": 'the tool "python" runs code in the sandbox: agentrl.Env(tools=("python",))',
    "ToolCallingAgent": "agentrl.RolloutWorker(policy, env).run_episode(task) is the loop of turns and calls",
}
ADVICE = {name: advice for names, advice in _ADVICE.items() for name in names.split()}
"""The advice for each name that another framework exports: what to write with agentrl instead."""

OPTIONS = {
    "adapter": _NO_ADAPTER,
    "apply_edit_model": _CRITIC,
    "beam_rounds": "write rounds",
    "daemon": "leave it out: workers that have nothing to do end by themselves, or by agentrl down",
    "dev": "write trainer.dev(agent, rows)",
    "diversity_temperature": "write critic_temperature",
    "gradient_batch_size": "write batch_tasks",
    "gradient_model": _CRITIC,
    "initial_resources": 'write resources={"prompt": "... {question}"}, texts by their names',
    "llm_proxy": f"leave it out: fit starts the endpoint, and {_ENDPOINT}",
    "n_workers": "write n_runners=8",
    "port": "leave it out: the endpoint takes a free one, or AGENTRL_ENDPOINT_PORT",
    "runner": _NO_RUNNER,
    "tracer": _NO_TRACER,
    "triplet_exporter": _NO_ADAPTER,
    "val_batch_size": "write choose_tasks",
}
"""The advice for each option of another framework's trainer or algorithm: what to write with agentrl instead."""
