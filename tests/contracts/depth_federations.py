"""Small federations for the tests of policies by depth: unequal clients, short batches, dropout, three models."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

import fedcover as fc
from fedcover.models import TransformerExits
from fedcover.seeding import ambient
from fedcover.structure.exits import ExitModel
from tests.networks import ExitConvolutions, ExitNet

POLICIES: dict[str, Callable[[], fc.Policy]] = {
    "DepthFL": lambda: fc.depthfl(ramp_up=4),
    "ScaleFL": lambda: fc.scalefl(distil=0.5),
    "InclusiveFL": fc.inclusivefl,
    "FeDepth": lambda: fc.fedepth(batch_size=512),
}
TOGETHER = [name for name in POLICIES if name != "FeDepth"]
"""Those whose clients can be trained as one batch, and whose budgets limit what they hold."""
SIZES = {
    "linear": (5, 16, 3, 9, 20, 12),
    "convolutions": (4, 8, 4, 12, 8, 4),
    "text": (5, 8, 3, 6, 9, 4),
}
"""The numbers of examples of clients; in batches of 4, most end with a short one, but for a model with batch norm."""
KINDS = ("weight", "bias")


def text_net() -> TransformerExits:
    return TransformerExits((5,), 7, width=8, head=4, layers=5)


NETWORKS: dict[str, tuple[Callable[[], ExitModel], Tensor]] = {
    "linear": (ExitNet, torch.randn(2, 6)),
    "convolutions": (ExitConvolutions, torch.randn(2, 1, 6, 6)),
    "text": (text_net, torch.randint(7, (2, 5))),
}


@cache
def parts(network: str) -> tuple[fc.Task, fc.Population]:
    """Return a task and clients of unequal sizes; those with batch norm have full batches."""
    make, example = NETWORKS[network]
    rng, sizes = torch.Generator().manual_seed(0), SIZES[network]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    owned = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    with ambient(1, "depth"):
        net = make()
    if network == "text":
        x = torch.randint(7, (ends[-1], 5), generator=rng)
        return fc.Task(net), fc.data.from_parts((x, x.roll(-1, 1)), owned)
    x = torch.randn(ends[-1], *example.shape[1:], generator=rng)
    return fc.Task(net), fc.data.from_parts((x, x.flatten(1)[:, :3].argmax(1)), owned)


def playing(engine: fc.Engine, network: str, policy: fc.Policy, **changes: object) -> fc.Federation:
    task, clients = parts(network)
    settings: dict[str, object] = {"local": fc.LocalSGD(2, 4, 0.05, 0.5), "cohort": 5, "seed": 2, **changes}
    return fc.Federation(task, clients, policy, fc.by_slot("1,1,0.75,0.5,0.25"), engine=engine, **settings)  # type: ignore[arg-type]


def policy_for(name: str, network: str) -> fc.Policy:
    """Return a policy; the stages of convolutions differ, so that InclusiveFL has no momentum there."""
    return fc.inclusivefl(momentum=0) if (name, network) == ("InclusiveFL", "convolutions") else POLICIES[name]()
