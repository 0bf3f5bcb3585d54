"""Units of models that run other operations in training than in evaluation."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.structure.trace import trace
from fedcover.structure.units import UnitStructure, unit_structure
from fedcover.structure.units.tracing import follow_units
from tests.conftest import small_data

ROWS = torch.linspace(-1, 1, 12).reshape(2, 6)


class TwoModes(nn.Module):
    """Hidden units that a function changes in training."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        scores: Tensor = self.last(self.change(x) if self.training else x)
        return scores


class Auxiliary(nn.Module):
    """A second head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aux, self.last = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        scores: Tensor = self.last(x)
        return scores + self.aux(x) if self.training else scores


class OtherHead(Auxiliary):
    """Training and evaluation use different heads, by the same operations."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        scores: Tensor = self.aux(x) if self.training else self.last(x)
        return scores


class Places(nn.Module):
    """A batch norm whose channels are places, so that it takes its statistics over the units of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(1, 8), nn.BatchNorm1d(6), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.relu(self.norm(self.first(x.unsqueeze(-1)))).mean(1))
        return scores


def units_of(model: nn.Module) -> UnitStructure:
    return unit_structure(trace(model, ROWS))


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "centred": (lambda: TwoModes(lambda x: x - x.mean(1, keepdim=True)), "takes one number over all of them"),
    "scaled by their number": (lambda: TwoModes(lambda x: x / x.shape[1]), "in training mode, a smaller copy"),
    "of a fixed number": (lambda: TwoModes(lambda x: x.reshape(-1, 8)), "fixed in the code"),
    "noise by hand": (lambda: TwoModes(lambda x: x + torch.randn_like(x)), "or on random numbers"),
    "normalised over units": (Places, "'norm', a BatchNorm1d, normalises over all of them, at least in training"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_units_that_mix_only_in_training_stay_whole(case: str) -> None:
    build, reason = WHOLE[case]
    units = units_of(build())
    assert not units.groups
    assert reason in units.left_whole["first"]


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "in place": lambda x: F.dropout(x, 0.5, inplace=True),
    "channels": lambda x: F.dropout1d(x.unsqueeze(-1)).squeeze(-1),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "whole rows": lambda x: x * torch.empty(len(x), 1).bernoulli_(0.5),
    "a factor": lambda x: 2 * x,
}


@pytest.mark.parametrize("case", DROPOUTS)
def test_units_that_drop_in_training_are_found(case: str) -> None:
    units = units_of(TwoModes(DROPOUTS[case]))
    assert [group.size for group in units.groups] == [8]


@pytest.mark.parametrize("kind", [Auxiliary, OtherHead])
def test_heads_of_both_modes_lose_the_inputs_of_removed_units(kind: type[nn.Module]) -> None:
    (group,) = units_of(kind()).groups
    assert {member.tensor for member in group.members} == {"first.weight", "first.bias", "aux.weight", "last.weight"}


@pytest.mark.filterwarnings("ignore::fedcover.CoverageWarning", "ignore::fedcover.WholeLayersWarning")
@pytest.mark.parametrize("build", [Auxiliary, OtherHead, lambda: TwoModes(lambda x: 2 * x)])
def test_a_smaller_model_trains_to_the_same_parameters(build: Callable[[], nn.Module]) -> None:
    thetas = []
    for shrink in (False, True):
        torch.manual_seed(0)
        clients, engine = fc.data.iid(small_data(24), 3, seed=1), fc.Serial(shrink=shrink)
        task, local = fc.Task(build()), fc.LocalSGD(2, 4, 0.1)
        federation = fc.Federation(
            task, clients, fc.neuron_pruning(), fc.by_slot("3x0.5"), local, cohort=3, engine=engine
        )
        theta = federation.run(2).theta
        assert theta is not None
        thetas.append(theta)
    for name, tensor in thetas[0].items():
        torch.testing.assert_close(thetas[1][name], tensor)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)),
        TwoModes(lambda x: F.dropout(x, 0.5)),
    ],
)
def test_models_that_differ_only_by_dropout_and_batch_norm_are_verified_once(model: nn.Module) -> None:
    assert follow_units(trace(model, ROWS)).modes == (False,)
