"""The paper's techniques: full models, WP, NP, FS and PT, on its two networks and on any other.

On any network all hidden weight tensors (or hidden units) are pruned and the output layer and the
biases stay whole. On the paper's LeNet a code digit means what its appendix says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from fedcover.budgets import QUARTERS, Budget, Codebook
from fedcover.clients import Client
from fedcover.errors import InputError, check_whole
from fedcover.models import LeNet
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import Policy, State
from fedcover.policies.feddst import feddst
from fedcover.policies.fedecover import fedecover
from fedcover.policies.fedrolex import fedrolex, random_submodels
from fedcover.policies.fiarse import fiarse
from fedcover.policies.fjord import fjord
from fedcover.policies.grow_and_prune import p_gap, s_gap
from fedcover.policies.heterofl import heterofl
from fedcover.policies.optimal import optimal_masks, optimal_units
from fedcover.policies.prunefl import prunefl
from fedcover.policies.ranked import Block, Frozen, Kernels, Ranked, Units, Weights
from fedcover.policies.weight_complete import weight_complete
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import groups_for

# CIFAR, WP: kernels in quarters by the digit; the fully connected weights at the digit's keep, largest first.
_LENET_WP: Codebook = {
    digit: budget
    if budget.full
    else Budget(
        bands=budget.bands,
        name=digit,
        layers=(("fc1.weight", Budget(budget.keep)), ("fc2.weight", Budget(budget.keep))),
    )
    for digit, budget in QUARTERS.items()
}

# CIFAR, FS: 2 prunes everything, 3 the convolutions, 4 the fully connected layers.
_LENET_FS: Codebook = {
    "1": Budget(name="1"),
    "2": Budget(name="2", layers=(("conv1", 5), ("conv2", 12), ("fc1", 100), ("fc2", 84))),
    "3": Budget(name="3", layers=(("conv1", 5), ("conv2", 12))),
    "4": Budget(name="4", layers=(("fc1", 100), ("fc2", 84))),
}


def _weights(structure: ModelStructure) -> tuple[tuple[Block, ...], Codebook]:
    if not isinstance(structure.model, LeNet):
        return tuple(Weights(name) for name in structure.hidden), QUARTERS
    kernels = {name for name in structure.hidden if len(structure.shapes[name]) > 2}
    return tuple(Kernels(name) if name in kernels else Weights(name) for name in structure.hidden), _LENET_WP


def _units(in_order: bool) -> Callable[[ModelStructure], tuple[tuple[Block, ...], Codebook]]:
    def find(structure: ModelStructure) -> tuple[tuple[Block, ...], Codebook]:
        blocks = tuple(Units(group, in_order) for group in groups_for("FS" if in_order else "NP", structure))
        return blocks, _LENET_FS if in_order and isinstance(structure.model, LeNet) else QUARTERS

    return find


@dataclass(frozen=True)
class FullModels(Policy):
    """FedAvg: every client holds the whole model, whatever its budget."""

    any_device = True
    reads_theta = False
    moves = False

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[Mask], State]:
        """The full mask for everyone."""
        return [FULL for _ in cohort], state


def full() -> Policy:
    """Full models for all clients: FedAvg."""
    return FullModels()


def weight_pruning() -> Ranked:
    """WP: each hidden weight tensor keeps its largest weights, ranked anew every round."""
    return Ranked("WP", _weights)


def neuron_pruning() -> Ranked:
    """NP: each hidden layer keeps the units with the largest L1 norm of incoming weights."""
    return Ranked("NP", _units(in_order=False))


def fixed_subnetwork() -> Ranked:
    """FS: each hidden layer keeps its first units, always the same."""
    return Ranked("FS", _units(in_order=True))


def pretrained_mask(freeze_after: int = 3) -> Frozen:
    """PT: WP's masks, drawn anew for the first ``freeze_after`` rounds and then frozen."""
    check_whole("freeze_after", freeze_after, 1)
    return Frozen(weight_pruning(), freeze_after)


POLICIES: dict[str, Callable[..., Policy]] = {
    "full": full,
    "WP": weight_pruning,
    "NP": neuron_pruning,
    "FS": fixed_subnetwork,
    "PT": pretrained_mask,
    "optimal": optimal_masks,
    "optimal_units": optimal_units,
    "HeteroFL": heterofl,
    "random_submodels": random_submodels,
    "FedRolex": fedrolex,
    "FedEcover": fedecover,
    "weight_complete": weight_complete,
    "S-GaP": s_gap,
    "P-GaP": p_gap,
    "FIARSE": fiarse,
    "FjORD": fjord,
    "FedDST": feddst,
    "PruneFL": prunefl,
}


ALIASES = {"fedavg": "full", "random": "random_submodels", "optimal_masks": "optimal"}


def named_policy(name: str) -> Policy:
    """The policy with this short name, as it is by default; capitals, hyphens and underscores do not matter.

    >>> named_policy("wp"), named_policy("S-GaP") == named_policy("s_gap")
    (Ranked(name='WP'), True)
    """
    return factory_of(name)[1]()


def factory_of(name: str) -> tuple[str, Callable[..., Policy]]:
    """The short name of a policy as ``POLICIES`` has it, and what makes the policy."""
    known = {_plain(short): short for short in POLICIES} | {_plain(other): short for other, short in ALIASES.items()}
    if _plain(name) not in known:
        near = get_close_matches(_plain(name), map(_plain, POLICIES), n=1)
        hint = f"; did you mean '{known[near[0]]}'?" if near else ""
        raise InputError(f"there is no policy '{name}'; use one of {', '.join(POLICIES)}{hint}")
    return known[_plain(name)], POLICIES[known[_plain(name)]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
