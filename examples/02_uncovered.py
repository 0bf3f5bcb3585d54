"""Masks that leave part of the model uncovered: the certificate before the run, and the result of the run.

With weight pruning 41 % of the hidden weights are trained in 30 rounds, and the accuracy is 0.958 at the end. With
designed masks all of them are trained, and the accuracy is 0.950. A run that no theorem covers does not have to fail:
this is one seed, and no client can keep more than a quarter of the model. docs/results/coverage.md has many runs.
"""

import torch

import fedcover as fc
from fedcover.theory import Steps, certificate, measure

digits = fc.data.load("digits")
clients = fc.data.iid(digits.train, clients=20, seed=0)
local = fc.LocalSGD(lr=0.05)
longest = max(local.steps(clients.size(client)) for client in range(len(clients)))
steps = Steps(longest, local.lr, local.momentum)  # of the client that takes the most steps


def federation(policy):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 40), torch.nn.ReLU(), torch.nn.Linear(40, 10))
    return fc.Federation(fc.Task(net), clients, policy, fc.by_slot("10x0.25"), local, cohort=10, seed=0)


for name, policy in {"weight pruning": fc.weight_pruning(), "designed masks": fc.optimal_masks()}.items():
    pruned = federation(policy)
    planned = pruned.begin_round(pruned.start())  # a cohort and its masks; nothing is trained yet
    bound = certificate(measure(planned.state.theta, planned.masks), steps)
    print(f"{name}, up to {steps.count} steps per round: {bound.sentence}")
    history = pruned.run(rounds=30, evaluate_on=digits.test)
    trained = (history.theta["1.weight"] != pruned.theta0["1.weight"]).float().mean()
    print(f"  after 30 rounds: accuracy {history.last.accuracy:.3f}, {trained:.0%} of the hidden weights were trained")
