"""Masks that leave part of the model to nobody: what the certificate says before the run, and what happens.

The run that keeps the largest weights trains 41 % of the hidden weights in 30 rounds and ends at an accuracy of 0.958;
the designed one trains all of them and ends at 0.950. That no theorem covers a run does not say that it fails: this is
one seed, and nobody here can keep more than a quarter of the model. docs/results/coverage.md has many runs.
"""

import torch

import fedcover as fc
from fedcover.theory import Steps, certificate, measure

digits = fc.data.load("digits")
clients = fc.data.iid(digits.train, clients=20, seed=0)
local = fc.LocalSGD(lr=0.05)
most = max(local.steps(clients.size(client)) for client in range(len(clients)))
steps = Steps(most, local.lr, local.momentum)  # of the client that takes most


def federation(policy):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 40), torch.nn.ReLU(), torch.nn.Linear(40, 10))
    return fc.Federation(fc.Task(net), clients, policy, fc.by_slot("10x0.25"), local, cohort=10, seed=0)


for name, policy in {"largest weights": fc.weight_pruning(), "by design": fc.optimal_masks()}.items():
    one = federation(policy)
    begun = one.begin_round(one.start())  # a cohort and its masks; nothing is trained yet
    found = certificate(measure(begun.state.theta, begun.masks), steps)
    print(f"{name}, up to {steps.count} steps a round: {found.sentence}")
    history = one.run(rounds=30, evaluate_on=digits.test)
    moved = (history.theta["1.weight"] != one.theta0["1.weight"]).float().mean()
    print(f"  after 30 rounds: accuracy {history.last.accuracy:.3f}, {moved:.0%} of the hidden weights ever trained")
