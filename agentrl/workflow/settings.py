"""The settings of the machine: data folder, database, broker. They come from `AGENTRL_*` variables, never from a run's config.

By default everything is in the folder `.agentrl` of the current directory: a SQLite file, a private Redis and the models.
`AGENTRL_DATABASE_URL` and `AGENTRL_BROKER_URL` name other servers.
"""

import hashlib
import os
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PAGE_HOST, PAGE_PORT = "127.0.0.1", 7788
"""The default address of `agentrl ui`."""


def is_url(path: str) -> bool:
    """Return True if the text is `scheme://...`, and not a path of this host."""
    return "://" in path


def digest(key: str, value: str) -> str:
    """Return a keyed BLAKE2b hash (32 hexadecimal digits). With it, secret values can be compared without being shown."""
    return hashlib.blake2b(os.fsencode(value), key=key.encode(), digest_size=16).hexdigest()


class Settings(BaseSettings):
    """The settings of the machine: each field is the variable `AGENTRL_<NAME>`. Empty counts as unset."""

    model_config = SettingsConfigDict(env_prefix="AGENTRL_", env_ignore_empty=True, frozen=True, extra="ignore")

    home: Path = Field(default=Path(".agentrl"), description="Folder for the database, models, checkpoints, logs.")
    database_url: str = Field(default="", description="SQLAlchemy URL; empty: SQLite in home.")
    database_reader_url: str = Field(
        default="",
        description="Postgres URL with which `agentrl sql` logs in; empty: AGENTRL_DATABASE_URL with the user agentrl_reader.",
    )
    reader_password: str = Field(default="", description="Password of agentrl_reader, set by `agentrl db upgrade`.")
    tools_password: str = Field(
        default="", description="Password of agentrl_tools, a login for tools workers. Set by `agentrl db upgrade`."
    )
    agents_password: str = Field(
        default="", description="Password of agentrl_agents, a login for agents workers. Set by `agentrl db upgrade`."
    )
    broker_url: str = Field(default="", description="redis:// URL of a broker; empty: the embedded one.")
    broker_password: str = Field(default="", description="Password of the broker, if the URL has none.")
    redis_server: str = Field(default="", description="Path of a redis-server or valkey-server; `none`: no embedded broker.")
    gsm8k_dir: Path | None = Field(default=None, description="Folder with gsm8k's train.jsonl and test.jsonl.")
    lease_seconds: float = Field(default=30.0, gt=0, description="How long a claim lives without a heartbeat.")
    tick_seconds: float = Field(
        default=2.0, gt=0, description="How often the control loop compares the rows with the messages."
    )
    idle_stop_seconds: float = Field(default=60.0, ge=0, description="How long an embedded stack runs after its last run.")
    checkpoints: str = Field(
        default="",
        description="Where new runs keep checkpoints: s3://BUCKET/PREFIX, file:///MOUNT or a folder; empty: AGENTRL_HOME/runs.",
    )
    device: str = Field(default="auto", description="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")
    slots: int = Field(default=128, ge=1, description="Maximum turns sampled at once; fewer while memory is short.")
    engine_url: str = Field(
        default="", description="http:// URLs, separated by commas, of servers for the engines openai, openai_text, llamacpp."
    )
    engine_key: str = Field(default="", description="API key of the servers at engine_url, if they need one.")
    vllm_args: str = Field(default="", description="More arguments of the server of the engine vllm, as in a shell.")
    critic_url: str = Field(default="", description="URL of the server with the critic model of apo and gepa.")
    critic_key: str = Field(default="", description="API key of the server at critic_url, if it needs one.")
    search: str = Field(
        default="", description="What the tool search reads: a folder of text files, a .jsonl file, or an http:// URL."
    )
    sql_database: str = Field(
        default="",
        description="What the tool sql reads: a SQLite file, a .sql script, or a postgresql:// URL of a read-only login.",
    )
    fetch_hosts: str = Field(
        default="", description="Hosts that the tool fetch may access: docs.python.org,*.example.org; empty: off."
    )
    tools_token: str = Field(
        default="", description="Token that clients of `agentrl tools serve` must send; empty: a random one."
    )
    endpoint_url: str = Field(
        default="", description="URL at which agents reach the endpoint; empty: the address that it reports."
    )
    endpoint_port: int = Field(default=0, ge=0, le=65535, description="Port of the endpoint; 0: a free one.")
    endpoint_wait_seconds: float = Field(
        default=300.0, ge=0, description="How long a call waits in the endpoint for a rollout worker."
    )
    endpoint_calls: int = Field(default=1024, ge=1, description="Maximum open calls of an endpoint.")
    tasks_key: str = Field(
        default="",
        description="Key with which external agents ask for tasks; empty: a random one, stored in AGENTRL_HOME.",
    )
    rewards_key: str = Field(
        default="", description="Key with which external agents send rewards; empty: their rewards are refused."
    )
    serve_key: str = Field(
        default="", description="API key that clients of `agentrl serve` must send; empty: none, from this machine only."
    )
    serve_origins: str = Field(
        default="",
        description="Origins of pages that may call `agentrl serve` with its key: https://app.example.org,...; empty: none.",
    )
    agents: int = Field(default=16, ge=1, le=10_000, description="Agents that an agents worker runs at once.")
    sampler_host: str = Field(
        default="127.0.0.1", description="Address at which a rollout worker serves agents; auto: this machine's."
    )
    ranks_host: str = Field(
        default="", description="Private address of a train worker, for updates with other hosts; empty: only this host."
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of the model; 0: torch's choice.")
    report_seconds: float = Field(
        default=60.0,
        gt=0,
        description="How long a tracker may take to write the metrics of one step before its process is ended.",
    )
    sandbox: Literal["auto", "bwrap", "landlock", "docker", "none-unsafe"] = Field(
        default="auto", description="Sandbox of model-written code; auto: bwrap, else landlock; none-unsafe: no sandbox."
    )
    sandbox_python: str = Field(
        default="", description="Python interpreter inside the sandbox; empty: /usr/bin/python3, or the first that can be read."
    )
    sandbox_uids: str = Field(
        default="231000-231255", description="User ids for sandboxes that root starts, one each; no other program may use them."
    )
    sandbox_image: str = Field(default="", description="Image of the docker sandbox; it needs a python3.")

    ready_file: Path | None = Field(default=None, description="File that exists while a worker is ready, for health checks.")
    metrics_port: int = Field(
        default=0,
        ge=0,
        le=65_000,
        description="Port of /metrics of the control loop; 0: off. Next ports: rollout, train, tools, agents, endpoint, ranks.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address of /metrics.")
    log: Literal["text", "json"] = Field(default="text", description="Format of the workers' logs: text or json.")
    notify_url: str = Field(default="", description="http:// URL that gets a POST when a run ends or waits.")
    notify_command: str = Field(default="", description="Command to run when a run ends or waits; it gets JSON on stdin.")
    image: bool = Field(
        default=False, description="True in the image of the compose stack: messages then name commands of docker compose."
    )

    @field_validator("home", mode="before")
    @classmethod
    def _home(cls, value: object) -> object:
        return value or ".agentrl"  # set but empty means not set

    @field_validator("notify_url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("write http://HOST/PATH or https://HOST/PATH")
        return url

    @field_validator("notify_command", "vllm_args")
    @classmethod
    def _is_command(cls, command: str) -> str:
        shlex.split(command)  # raises ValueError for a quotation without an end
        return command

    @property
    def root(self) -> Path:
        """The absolute path of the data folder."""
        return self.home.expanduser().resolve()

    @property
    def database(self) -> str:
        """The URL of the database: `database_url`, or the SQLite file in the data folder."""
        return self.database_url or f"sqlite:///{quote(str(self.root / 'agentrl.db'))}"

    @property
    def models_dir(self) -> Path:
        """The folder of the models that `agentrl sft` makes."""
        return self.root / "models"

    @property
    def checkpoint_root(self) -> str:
        """The folder or URL under which each new run has a folder for its checkpoints."""
        if is_url(self.checkpoints):
            scheme, _, place = self.checkpoints.partition("://")
            return f"{scheme}://{place.rstrip('/')}"
        return str(Path(self.checkpoints).expanduser().resolve() if self.checkpoints else self.root / "runs")

    @property
    def cache_dir(self) -> Path:
        """The folder for local copies of checkpoints that are stored at a URL."""
        return self.root / "cache"

    @property
    def trackers_dir(self) -> Path:
        """The folder for the files of trackers that need no server."""
        return self.root / "trackers"

    @property
    def stack_dir(self) -> Path:
        """The folder with pid files, sockets and logs of the embedded stack."""
        return self.root / "stack"


@lru_cache(maxsize=1)
def settings() -> Settings:
    """Return the settings of this process. They are read once."""
    return Settings()
