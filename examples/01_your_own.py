import torch

import fedcover as fc

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
points = torch.randn(3000, 2)
labels = (points.prod(1) > 0).long()


@fc.policy
def random_weights(theta, client, this_round):
    rng = this_round.generator("mask", client.id)
    return {k: torch.rand(t.shape, generator=rng) < client.budget.keep for k, t in theta.items() if t.ndim > 1}


clients = fc.data.dirichlet((points[:2400], labels[:2400]), clients=30, alpha=1.0, seed=0)
budgets = fc.by_client("1,0.75,0.5")
federation = fc.Federation(fc.Task(net), clients, random_weights, budgets, fc.LocalSGD(lr=0.1), cohort=10, seed=0)
history = federation.run(rounds=15, evaluate_on=(points[2400:], labels[2400:]))
print(f"accuracy {history.last.accuracy:.3f}, Gamma_min {history.gamma_min}, delta^2 {history.last.pruning_noise:.3f}")
