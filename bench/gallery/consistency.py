"""Generation in one step: a mean velocity is learnt whose slope along the way is part of its own target (MeanFlow).

Z. Geng et al., "Mean Flows for One-step Generative Modeling", 2025.  The slope is one product in forward mode.
"""

import torch
from torch import func

from bench.style import SHADES, panels
from cuattn.torch import attention

HEADS = 4


class Block(torch.nn.Module):
    """A layer of a transformer without order: the points of a shape attend to each other."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.SiLU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x):
        """Return the states after it."""
        q, k, v = self.qkv(norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(norm(x))


def norm(x):
    """Return states of mean 0 and variance 1."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


class Model(torch.nn.Module):
    """The mean velocity from time r to time t of noisy points."""

    def __init__(self, points, width=64, layers=2):
        super().__init__()
        self.place = torch.nn.Parameter(torch.randn(points, width) * 0.5)
        self.point, self.times = torch.nn.Linear(2, width), torch.nn.Linear(8, width)
        self.blocks = torch.nn.Sequential(*[Block(width) for _ in range(layers)])
        self.end = torch.nn.Linear(width, 2)

    def forward(self, z, r, t):
        """Return a velocity for each point."""
        waves = torch.stack([f(k * x) for x in (t, t - r) for k in (1.5, 3.0) for f in (torch.sin, torch.cos)], -1)
        return self.end(norm(self.blocks(self.point(z) + self.place + self.times(waves)[:, None])))


def shapes(count, points):
    """Return circles anywhere, of any size, as points in order."""
    angle = torch.arange(points) * (2 * torch.pi / points)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    return torch.randn(count, 1, 2) * 0.8 + (0.4 + torch.rand(count, 1, 1)) * circle


def loss_of(model, x):
    """Return how far the mean velocity is from what it says of itself."""
    noise, times = torch.randn_like(x), torch.sigmoid(torch.randn(2, len(x)))
    t, r = times.amax(0), times.amin(0)
    r = torch.where(torch.rand(len(x)) < 0.5, t, r)  # half of the time the velocity at a moment
    z, velocity = torch.lerp(x, noise, t[:, None, None]), noise - x
    along = velocity, torch.zeros_like(r), torch.ones_like(t)
    _, slope = func.jvp(model, (z, r, t), along)
    target = velocity - (t - r)[:, None, None] * slope
    error = (model(z, r, t) - target.detach()).square().sum((-2, -1))
    return (error / (error.detach() + 1e-2)).mean()


def learnt(steps=700, points=16, count=64):
    """Return a model that has learnt."""
    torch.manual_seed(0)
    model = Model(points)
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 3e-3, steps)
    for _ in range(steps):
        loss = loss_of(model, shapes(count, points))
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return model


@torch.no_grad()
def generated(model, noise):
    """Return shapes from noise, in one step."""
    ones = torch.ones(len(noise))
    return noise - model(noise, 0 * ones, ones)


def figure(steps=700, points=16):
    """Draw noise and the shapes that one step makes of it."""
    model = learnt(steps, points)
    noise = torch.randn(len(SHADES), points, 2)
    drawn, (first, second) = panels(2, 4.4, 4.4)
    for axis, sets, title in ((first, noise, "noise"), (second, generated(model, noise), "one step later")):
        for shade, one in zip(SHADES, sets, strict=True):
            axis.plot(*torch.cat([one, one[:1]]).T, ".-", color=shade, linewidth=0.6, markersize=4)
        axis.set_title(title, fontsize=10)
        axis.set_aspect("equal")
    return drawn
