"""FedProx by hand: a gradient transform of one's own, beside the built-in one; they agree in every engine."""

import torch

import fedcover as fc


@fc.gradient_transform
def pull(gradients, at):
    """Pull the client towards the values with which the round started."""
    return {name: grad + 0.1 * (at.theta[name] - at.start[name]) for name, grad in gradients.items()}


fc.check_transform(pull)
digits = fc.data.load("digits")
clients = fc.data.dirichlet(digits.train, clients=20, alpha=0.3, seed=0)


def final_model(local, engine):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 40), torch.nn.ReLU(), torch.nn.Linear(40, 10))
    budgets = fc.by_slot("4x1,3x0.5,3x0.25")
    federation = fc.Federation(fc.Task(net), clients, fc.weight_pruning(), budgets, local, seed=0, engine=engine)
    return federation.run(rounds=2, evaluate_on=digits.test)


for engine in (fc.Serial(), fc.Processes(2), fc.Vectorized("cpu")):
    by_hand = final_model(fc.LocalSGD(epochs=2, lr=0.05, transforms=[pull]), engine)
    built_in = final_model(fc.LocalSGD(epochs=2, lr=0.05, proximal=0.1), engine)
    furthest = max(float((by_hand.theta[name] - built_in.theta[name]).abs().max()) for name in by_hand.theta)
    print(f"{engine.name}: accuracy {by_hand.last.accuracy:.3f}, largest difference to proximal=0.1: {furthest:.1e}")
    assert furthest < 1e-5
