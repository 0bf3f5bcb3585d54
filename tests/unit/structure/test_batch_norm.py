"""Static batch norm: no averages in training, statistics gathered before evaluation."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.engines.processes.pool import Processes
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.params import params_of
from fedcover.structure.batch_norm import gather_statistics, static_form
from fedcover.structure.trace import trace

LABELS = torch.arange(120) % 2
INPUTS = torch.randn(120, 2, 6, 6, generator=torch.Generator().manual_seed(0)) + 3 + LABELS.view(-1, 1, 1, 1)


def net(bn: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6) if bn else nn.GroupNorm(1, 6)
    return nn.Sequential(nn.Conv2d(2, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def federation(**more: object) -> fc.Federation:
    clients = fc.data.iid((INPUTS, LABELS), clients=6, seed=0)
    local = fc.LocalSGD(epochs=2, batch_size=10, lr=0.05)
    settings = {"cohort": 3, "local": local, "budgets": fc.by_slot("1,0.5,0.5"), **more}
    return fc.Federation(fc.Task(net()), clients, fc.fixed_subnetwork(), **settings)  # type: ignore[arg-type]


def test_training_keeps_no_averages_and_does_not_change_the_callers_model() -> None:
    model = net()
    static = static_form(trace(model, INPUTS[:2]), model)
    assert static is not model
    assert not list(static.buffers())
    assert [tuple(p.shape) for p in static.parameters()] == [tuple(p.shape) for p in model.parameters()]
    assert model.get_buffer("1.running_mean") is not None
    plain = net(bn=False)
    assert static_form(trace(plain, INPUTS[:2]), plain) is plain


def test_gathered_statistics_are_those_of_the_inputs() -> None:
    model = gather_statistics(net(), INPUTS)
    with torch.no_grad():
        out = model[0](INPUTS)
    torch.testing.assert_close(model.get_buffer("1.running_mean"), out.mean((0, 2, 3)))
    torch.testing.assert_close(model.get_buffer("1.running_var"), out.var((0, 2, 3)))
    assert not model.training
    assert model[1].momentum == nn.BatchNorm2d(6).momentum
    once = copy.deepcopy(model)
    gather_statistics(model, INPUTS)
    assert torch.equal(once(INPUTS), model(INPUTS))  # nothing is left of what was gathered before


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_have_the_type_of_the_model(affine: bool) -> None:
    model = net()
    model[1] = nn.BatchNorm2d(6, affine=affine)
    clients = fc.data.iid((INPUTS.double(), LABELS), clients=6, seed=0)
    playing = fc.Federation(fc.Task(model.double()), clients, local=fc.LocalSGD(1, 10, 0.05), cohort=3)
    history = playing.run(1, evaluate_on=(INPUTS.double(), LABELS))
    assert history.last.accuracy is not None
    static = gather_statistics(static_form(trace(model, INPUTS[:2].double()), model), INPUTS.double())
    assert static.get_buffer("1.running_var").dtype == torch.float64


def test_a_model_with_batch_norm_learns_and_is_evaluated_with_gathered_statistics() -> None:
    run = federation()
    history = run.run(4, evaluate_on=(INPUTS, LABELS))
    assert history.last.accuracy is not None
    assert history.last.accuracy > 0.9
    few = [run.run(4, evaluate_on=(INPUTS[i : i + 1], LABELS[i : i + 1])).last.accuracy or 0.0 for i in range(10)]
    assert sum(few) >= 8  # a test batch of one has no statistics of its own
    assert history.gamma_min == 1


def test_engines_agree_on_batch_norm() -> None:
    serial = [record.loss for record in federation().run(2, evaluate_on=(INPUTS, LABELS))]
    with Processes(workers=2) as processes:
        assert [r.loss for r in federation(engine=processes).run(2, evaluate_on=(INPUTS, LABELS))] == serial
    vectorized = federation(engine=Vectorized("cpu")).run(2, evaluate_on=(INPUTS, LABELS))
    assert [record.loss for record in vectorized] == pytest.approx(serial, abs=1e-4)


def test_engines_agree_on_short_batches_of_batch_norms() -> None:
    """Clients have 19 or 20 examples, in batches of 10."""
    clients = fc.data.iid((INPUTS[:115], LABELS[:115]), clients=6, seed=0)
    losses = [
        [r.loss for r in replace(federation(engine=engine), clients=clients).run(2, evaluate_on=(INPUTS, LABELS))]
        for engine in (fc.Serial(), Vectorized("cpu"))
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_short_batches_are_trained_also_after_full_ones() -> None:
    """With one local step a client of 15 examples has only a full batch, and one of 8 only a short one."""
    clients = fc.data.from_parts((INPUTS[:23], LABELS[:23]), [torch.arange(15), torch.arange(15, 23)])
    recipe, engine = fc.LocalSGD(batch_size=10, local_steps=1), Vectorized("cpu")
    run = fc.Federation(fc.Task(net()), clients, local=recipe, cohort=2)
    jobs = sorted(run.begin_round(run.start()).jobs, key=lambda job: -job.examples)
    expected = fc.Serial(shrink=False).train(jobs)
    actual = [update for job in jobs for update in engine.train([job])]
    for one, other in zip(expected, actual, strict=True):
        for name, tensor in one.theta.items():
            torch.testing.assert_close(other.theta[name], tensor, rtol=0, atol=2e-5)


def test_a_saved_model_gets_its_statistics_back(tmp_path: object) -> None:
    run = federation()
    history = run.run(2, evaluate_on=(INPUTS, LABELS), out=f"{tmp_path}/run")
    model = fc.gather_statistics(fc.load_model(f"{tmp_path}/run", net()), INPUTS)
    with torch.no_grad():
        accuracy = float((model(INPUTS).argmax(1) == LABELS).double().mean())
    assert accuracy == pytest.approx(history.last.accuracy)
    assert set(params_of(model)) == set(params_of(net()))


def test_a_last_batch_of_one_example_is_refused_where_it_cannot_be_normalised() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    clients = fc.data.from_parts((INPUTS, LABELS), [list(range(20)), list(range(20, 51))])
    with pytest.raises(fc.InputError, match=r"client 1 has 31 examples.* batches of 10 .* group norm"):
        fc.Federation(fc.Task(flat), clients, cohort=1)
    assert fc.Federation(fc.Task(flat), clients, cohort=1, local=fc.LocalSGD(batch_size=8)).run(1).gamma_min == 1
    assert fc.Federation(fc.Task(net()), clients, cohort=1).run(1).gamma_min == 1  # images have more than one place
