"""AdamW (I. Loshchilov and F. Hutter, "Decoupled weight decay regularization", ICLR 2019)."""

from __future__ import annotations

from typing import Any

__all__ = ["AdamW"]


class AdamW:
    """Update parameters in place.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    parameters : dict of str to array
        Float32; matrices decay, vectors do not.
    rate, decay : float
        Learning rate and weight decay.
    betas : (float, float)
        Of the moments.
    """

    def __init__(
        self, xp: Any, parameters: dict[str, Any], rate: float = 1e-3, decay: float = 0.1, betas=(0.9, 0.95)
    ) -> None:
        self._xp, self._parameters = xp, parameters
        self._rate, self._decay, self._betas = rate, decay, betas
        self._moments = {name: (xp.zeros_like(p), xp.zeros_like(p)) for name, p in parameters.items()}
        self._steps = 0

    def update(self, gradients: dict[str, Any]) -> None:
        """Take one step."""
        self._steps += 1
        b1, b2 = self._betas
        unbias1, unbias2 = 1 - b1**self._steps, 1 - b2**self._steps
        for name, p in self._parameters.items():
            g = gradients[name]
            first, second = self._moments[name]
            first += (1 - b1) * (g - first)
            second += (1 - b2) * (g * g - second)
            step = first / (unbias1 * (self._xp.sqrt(second / unbias2) + 1e-8))
            if p.ndim > 1:
                step += self._decay * p
            p -= self._rate * step
