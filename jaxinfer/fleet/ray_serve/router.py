"""Ray Serve's router of requests, which asks `ReplicaChoice`. It runs in the process that has a deployment's handle."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica  # pyright: ignore[reportMissingImports]

from jaxinfer.fleet.ray_serve.choice import ReplicaChoice, Routing, tell_running


class FleetRequestRouter(RequestRouter):
    """Calls have two arguments by position: keys of the prompt, and names of replicas to be avoided."""

    def initialize_state(self, routing: Routing = "prefix", max_imbalance: int = 8) -> None:
        self._choice = ReplicaChoice(routing, max_imbalance)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not by_name:
            return [candidate_replicas]
        keys, avoided = (*pending_request.args, (), ())[:2]
        request = pending_request.metadata.internal_request_id
        order = self._choice.order(request, keys, tuple(by_name), avoided)
        # One that is given up before it is sent is not counted.
        pending_request.future.add_done_callback(
            lambda future: self._choice.complete(request) if future.cancelled() else None
        )
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._choice.route(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._choice.complete(internal_request_id)

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(list(replicas))
        self._keep()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep()

    def _keep(self) -> None:
        names = [replica_id.unique_id for replica_id in self.curr_replicas]
        tell_running(self, names)  # not kept here: Ray may pickle this class by value, with globals of its own
        self._choice.keep(names)
