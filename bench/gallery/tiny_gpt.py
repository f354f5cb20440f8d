"""A language model of one screen, trained on the Zen of Python: causal attention and its gradients in each step."""

import codecs
import contextlib
import io

import torch
from torch import nn

from bench.style import INK, OURS, panels
from cuattn.torch import attention


def text():
    """Return the Zen of Python, which every interpreter holds."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this

    return codecs.decode(this.s, "rot13")


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """Return the next state of each character."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v, is_causal=True, score=alibi).transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.norms[1](x))


def alibi(s, b, h, i, j):
    """Where characters stand is told by a slope for each head."""
    return s - 0.5 ** (2 * h + 1) * (i - j)


def trained(steps=150, width=64, heads=4, length=64, batch=8):
    """Return a model, the letters that it knows, and the losses on the way."""
    torch.manual_seed(0)
    letters = sorted(set(text()))
    data = torch.tensor([letters.index(letter) for letter in text()])
    blocks = [Block(width, heads) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(len(letters), width), *blocks, nn.Linear(width, len(letters)))
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - length - 1, (batch,))
        some = torch.stack([data[start : start + length + 1] for start in starts])
        loss = nn.functional.cross_entropy(model(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return model, letters, losses


@torch.no_grad()
def written(model, letters, begin="Beautiful is", count=60):
    """Return how the model goes on."""
    said = [letters.index(letter) for letter in begin]
    for _ in range(count):
        said.append(int(model(torch.tensor([said]))[0, -1].argmax()))
    return "".join(letters[index] for index in said)


def figure(steps=150, count=60):
    """Draw the losses, and what the model writes."""
    model, letters, losses = trained(steps)
    drawn, (axis,) = panels(1, 7.4, 3.4)
    axis.plot(losses, color=OURS)
    axis.set(xlabel="step", ylabel="nats per character")
    axis.set_title(repr(written(model, letters, count=count))[1:-1], fontsize=9, color=INK, family="monospace")
    return drawn
