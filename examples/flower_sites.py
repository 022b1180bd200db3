"""Three sites train one model over Flower (https://flower.ai); each keeps its data and its ledger.

    pip install flwr
    python examples/flower_sites.py server &
    python examples/flower_sites.py 0 &
    python examples/flower_sites.py 1 &
    python examples/flower_sites.py 2

Flower carries the messages of `dpbnn.Site` and adds them up. The server sees every message: against
it a site's records have the noise of that site alone. That is the epsilon of the site's ledger and
of the posterior it returns. Who sees sums alone meets the noise of all; `Site.statement` has both.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np
import torch

import dpbnn

ADDRESS = "127.0.0.1:8090"
RECORDS = (300, 200, 500)
STEPS = 20


def rows(site: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a site's own records; here they are made up."""
    generator = torch.Generator().manual_seed(site)
    x = torch.randn(RECORDS[site], 4, generator=generator)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def begun(number: int) -> dpbnn.Site:
    """Return a site as all have agreed on it."""
    plan = dpbnn.plan(epsilon=2.0, delta=1e-5, n=sum(RECORDS), batch_size=100, steps=STEPS)
    return dpbnn.Site(
        lambda: dpbnn.mlp(4, (8,), 2), rows(number), method=dpbnn.VI(learning_rate=0.5),
        plan=plan, site=number, records=RECORDS,
    )  # fmt: skip


class Turns:
    """A site that is asked turn by turn: it takes the last sum, and gives its next message."""

    def __init__(self, site: dpbnn.Site) -> None:
        self.site = site

    def told(self) -> dict[str, Any]:
        """Return who has sent the message, of which step, and what the site was begun with."""
        text = json.dumps(self.site.agreed, sort_keys=True)
        agreed = hashlib.sha256(text.encode()).hexdigest()
        return {"site": self.site.site, "step": self.site.step, "agreed": agreed}

    def answer(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return the message of the next step, given the sum of the last one; none at the end."""
        if arrays:
            self.site.apply(torch.from_numpy(np.array(arrays[0])))
        if self.site.step == self.site.steps:
            return []
        return [self.site.message().numpy()]


def added(messages: list[list[np.ndarray]], told: list[dict[str, Any]]) -> list[np.ndarray]:
    """Return the sum of all sites' messages of one step; raise where they are something else."""
    if sorted(one["site"] for one in told) != list(range(len(RECORDS))):
        raise RuntimeError("a site is missing, or is there twice")
    if len({(one["step"], one["agreed"]) for one in told}) != 1:
        raise RuntimeError("a site is at another step, or was begun with other settings")
    return [np.sum(parts, axis=0) for parts in zip(*messages, strict=True)]


def serve() -> None:
    """Add up messages until all steps are made."""
    import flwr

    class Sums(flwr.server.strategy.FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            if failures:
                raise RuntimeError("a site has failed; begin all of them anew")
            found = [flwr.common.parameters_to_ndarrays(one.parameters) for _, one in results]
            total = added(found, [one.metrics for _, one in results])
            return flwr.common.ndarrays_to_parameters(total), {}

    sums = Sums(
        fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=len(RECORDS),
        min_available_clients=len(RECORDS),
        initial_parameters=flwr.common.ndarrays_to_parameters([]),
    )  # fmt: skip
    config = flwr.server.ServerConfig(num_rounds=STEPS + 1)  # the last one answers with no message
    flwr.server.start_server(server_address=ADDRESS, config=config, strategy=sums)


def take_part(number: int) -> None:
    """Run one site."""
    import flwr

    turns = Turns(begun(number))

    class Client(flwr.client.NumPyClient):
        def fit(self, parameters: list[np.ndarray], config: Any) -> Any:
            return turns.answer(parameters), RECORDS[number], turns.told()

    flwr.client.start_client(server_address=ADDRESS, client=Client().to_client())
    posterior = turns.site.posterior()
    x, y = rows(number)
    right = posterior.predict(x).mean.argmax(-1) == y
    print(f"site {number}: accuracy on its own records {right.double().mean():.3f}")
    print(posterior.privacy)


if __name__ == "__main__":
    if sys.argv[1:] == ["server"]:
        serve()
    else:
        take_part(int(sys.argv[1]))
