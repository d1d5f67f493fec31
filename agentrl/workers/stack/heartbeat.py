"""The heartbeat of a worker process: one thread renews the leases of all its claims."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import getLogger

from agentrl.workflow.store import agent_attempts, rollout_claims, train_claims
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.rollout_claims import Fence

log = getLogger("agentrl.heartbeat")


@dataclass
class Heartbeat:
    """A thread that renews this process's leases. If another worker has taken over a claim, the thread calls the function
    `lost` of that claim.
    """

    db: Database
    lease_seconds: float
    _groups: dict[Fence, Callable[[], None]] = field(default_factory=dict)
    _iterations: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    _agents: dict[tuple[int, str], Callable[[], None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start the thread as a daemon."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Stop renewing all leases."""
        self._over.set()

    def hold_group(self, fence: Fence, lost: Callable[[], None]) -> None:
        """Renew the group's lease from now on. Call `lost` once if another worker takes the lease."""
        with self._lock:
            self._groups[fence] = lost

    def drop_group(self, fence: Fence) -> None:
        """Stop renewing the group's lease."""
        with self._lock:
            self._groups.pop(fence, None)

    def hold_iteration(self, iteration: int, token: int, lost: Callable[[], None]) -> None:
        """Renew the iteration's lease from now on. Call `lost` once if another trainer takes the lease."""
        with self._lock:
            self._iterations[iteration, token] = lost

    def drop_iteration(self, iteration: int, token: int) -> None:
        """Stop renewing the iteration's lease."""
        with self._lock:
            self._iterations.pop((iteration, token), None)

    def hold_agent(self, agent: int, claim: str, lost: Callable[[], None]) -> None:
        """Renew the agent's lease from now on. Call `lost` once if the attempt is over or another worker has the agent."""
        with self._lock:
            self._agents[agent, claim] = lost

    def drop_agent(self, agent: int, claim: str) -> None:
        """Stop renewing the agent's lease."""
        with self._lock:
            self._agents.pop((agent, claim), None)

    def _run(self) -> None:
        while not self._over.wait(self.lease_seconds / 3):
            try:
                self._beat()
            except Exception:
                log.exception("leases could not be renewed")

    def _beat(self) -> None:
        with self._lock:
            groups, iterations, agents = dict(self._groups), dict(self._iterations), dict(self._agents)
        if groups:
            held = rollout_claims.extend_leases(self.db, list(groups), self.lease_seconds)
            for fence, lost in groups.items():
                if fence.group not in held:
                    self.drop_group(fence)
                    lost()
        if agents:
            had = agent_attempts.extend_agents(self.db, list(agents), self.lease_seconds)
            for (agent, claim), lost in agents.items():
                if agent not in had:
                    self.drop_agent(agent, claim)
                    lost()
        for (iteration, token), lost in iterations.items():
            if not train_claims.extend_lease(self.db, iteration, token, self.lease_seconds):
                self.drop_iteration(iteration, token)
                lost()
