"""Force matching: a model of the energy is taught by its slopes, so that each step of learning differentiates twice."""

import numpy as np
import torch

from bench.style import OURS, QUIET, WORSE, panels
from cuattn.torch import attention

BASIS = torch.linspace(0.5, 3.5, 12)


def energy(x):
    """Return the true energy of clusters (..., atoms, 2): Morse's of each pair."""
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    r = (x[..., i, :] - x[..., j, :]).norm(dim=-1)
    return ((1 - torch.exp(-2 * (r - 1))) ** 2 - 1).sum(-1)


def forces(function, x, learn=False):
    """Return minus the slope of an energy, which can be differentiated itself if one wants to learn."""
    x = x.detach().requires_grad_()
    return -torch.autograd.grad(function(x).sum(), x, create_graph=learn)[0]


class Model(torch.nn.Module):
    """Atoms that attend to each other, by a bias made of their distances; the sum of what each then says."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.atom = torch.nn.Parameter(torch.randn(width))
        self.of_distance = torch.nn.Linear(len(BASIS), heads, bias=False)
        self.near = torch.nn.Linear(len(BASIS), width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.SiLU(), torch.nn.Linear(64, 1))

    def forward(self, x):
        """Return the energy of each cluster."""
        between = x[..., :, None, :] - x[..., None, :, :]
        r = (between.square().sum(-1) + 1e-6).sqrt()
        basis = torch.exp(-((r[..., None] - BASIS) ** 2) / 0.08)
        state = self.atom + self.near(basis.sum(-2))
        q, k, v = self.qkv(state).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = attention(q, k, v, bias=self.of_distance(basis).movedim(-1, 1))
        return self.out(state + mixed.transpose(1, 2).flatten(-2)).sum((-2, -1))


def clusters(count, atoms, rng):
    """Return clusters of atoms that are nowhere too near to each other."""
    x = torch.tensor(rng.standard_normal((count, atoms, 2)), dtype=torch.float32) * 1.2
    for _ in range(40):
        push = forces(energy, x)
        x = x + 0.02 * push / (1 + 0.2 * push.norm(dim=-1, keepdim=True))
    return x


def fitted(steps=300, atoms=8, count=64):
    """Return a model that has learnt, and clusters that it has not seen."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    known, unseen = clusters(512, atoms, rng), clusters(64, atoms, rng)
    wanted, model = forces(energy, known), Model()
    adam = torch.optim.Adam(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-2, steps)
    for _ in range(steps):
        some = torch.from_numpy(rng.integers(0, len(known), count))
        loss = (forces(model, known[some], learn=True) - wanted[some]).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return model, unseen


def figure(steps=300):
    """Draw the forces of the model beside the true ones."""
    model, x = fitted(steps)
    true, found = forces(energy, x), forces(model, x)
    drawn, (left, right) = panels(2, 4.6, 4.4)
    left.plot(*[[float(true.min()), float(true.max())]] * 2, color=QUIET, linewidth=0.7)
    left.scatter(true.flatten(), found.flatten(), s=3, color=OURS)
    left.set_xlabel("true force")
    left.set_title(f"forces, of which the model explains {explained(true, found):.1%}", fontsize=10)
    right.scatter(*x[0].T, s=60, color=QUIET)
    for arrows, colour, width in ((true[0], WORSE, 0.016), (found[0], OURS, 0.007)):
        right.quiver(*x[0].T, *arrows.T, color=colour, width=width, angles="xy")
    right.set_title("on a cluster that it has not seen", fontsize=10)
    return drawn


def explained(true, found):
    """Return the share of the variance that is explained."""
    return float(1 - (true - found).square().sum() / true.square().sum())
