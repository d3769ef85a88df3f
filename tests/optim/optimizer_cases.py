"""How the conformance test of optimizers builds one: every card of kind "optimizer" has ``tests/<room>/<method>_cases.py`` with CASES."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


class Regressor(nn.Module):
    """Three equal blocks between two linear layers, and a parameter that no output depends on."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for _ in range(3))
        self.last = nn.Linear(6, 1, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.last(h).squeeze(-1)


@dataclass(frozen=True)
class Case:
    """One optimizer under test.

    `build(model, groups, **options)` makes it over `groups`, what one would give any `torch.optim.Optimizer` as its first argument;
    `closure(model, optimizer, x, y)` makes what its ``step`` takes. `moves_unused`: whether it may move a parameter without gradient.
    """

    name: str
    build: Callable
    closure: Callable


def mean_square_closure(model, optimizer, x, y):
    """The closure of ordinary optimizers."""

    def closure():
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    return closure
