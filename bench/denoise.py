"""Non-local-means denoising of a photograph as one attention call: pixels are tokens, their patches queries and keys.

    python -m bench.denoise --device cpu          # NumPy: rows and the picture
    python -m bench.denoise                       # CuPy: rows

A. Buades, B. Coll and J.-M. Morel ("A non-local algorithm for image denoising", CVPR 2005) replace each pixel by a
mean of others, weighted by exp(-|P_i - P_j|^2 / h^2), where P_i is the patch of pixels around i.  Expanded, the
exponent is 2 P_i . P_j - |P_i|^2 - |P_j|^2 over h^2; a softmax over j forgets the term in i, and a column more in
queries and keys holds the term in j.  So the whole method is ``attention(q, k, pixels, scale=2 / h^2)``, over
N = number of pixels, in float32.

A pixel must not vote for its own noise: a column mask hides the diagonal.  A window over the rows keeps the search
local.
"""

import functools
import io
import math
import time
from pathlib import Path

import numpy as np

import cuattn
from bench import harness
from bench.harness import one
from cuattn.masks import ColumnMask

SIGMA = 0.1  # of the noise; pixels lie in [0, 1]
PATCH = 3  # pixels of a patch's side, of three colours
STRENGTH = 0.45  # h over what noise alone makes patches differ by; smaller keeps more detail and more noise
ROWS = 10  # image rows above and below that a local search looks at
TINY = np.s_[:24, :32]


def photograph(path=None):
    """Return a photograph, (height, width, 3) float32 in [0, 1].

    Parameters
    ----------
    path : Path, optional
        An image that matplotlib reads, or a ``.npy`` file; by default Grace Hopper's portrait, which matplotlib ships
        (NASA/US Navy, public domain).
    """
    if path is not None and path.suffix == ".npy":
        image = np.load(path)
    else:
        from matplotlib import cbook
        from matplotlib import image as files

        image = files.imread(path or cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    image = image[..., :3].astype(np.float32)
    return image / 255 if image.max() > 1 else image


def noisy(image):
    """Return the image with white noise, the same at every call."""
    return image + np.float32(SIGMA) * np.random.default_rng(0).standard_normal(image.shape, np.float32)


def patches(xp, image):
    """Return each pixel's patch, (pixels, 3 PATCH^2), about the mean of all."""
    rim = (PATCH // 2, PATCH // 2)
    padded = xp.pad(image, (rim, rim, (0, 0)), mode="reflect")
    windows = xp.lib.stride_tricks.sliding_window_view(padded, (PATCH, PATCH), axis=(0, 1))
    found = windows.reshape(image.size // 3, -1)
    return found - found.mean(axis=0)  # distances stay; inner products lose fewer digits


def denoise(xp, image, rows=ROWS):
    """Return the image with each pixel replaced by the weighted mean of those with similar surroundings.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    image : array, (height, width, 3), float32
        With noise.
    rows : int or None
        Image rows above and below to search; None searches the whole image.
    """
    width = image.shape[1]
    q, k, v, scale = operands(xp, image)
    window = None if rows is None else (rows * width, rows * width)
    o = cuattn.attention(q, k, v, scale=scale, mask=but_itself(len(q)), window=window)
    return o.reshape(image.shape)


def operands(xp, image):
    """Return queries, keys, values and the scale under which attention is the non-local mean."""
    p = patches(xp, image)
    n, d = p.shape
    half = (p * p).sum(axis=1, keepdims=True) / 2
    q = xp.concatenate([p, xp.ones_like(half)], axis=1)
    k = xp.concatenate([p, -half], axis=1)
    h = STRENGTH * SIGMA * math.sqrt(2 * d)
    return q, k, image.reshape(n, 3), 2 / h**2


def but_itself(n):
    """Return the mask in which everyone sees all others: column j hides row j."""
    j, nothing = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
    return ColumnMask(j, j + 1, nothing, nothing, n_queries=n)


def psnr(image, truth):
    """Return the peak signal-to-noise ratio in decibels, higher is better."""
    return float(-10 * np.log10(np.mean((np.clip(image, 0, 1) - truth) ** 2)))


def measure(truth, rows, device, seconds):
    """Denoise, judge and time."""
    xp = harness.namespace(device)
    image = xp.asarray(noisy(truth))
    call = functools.partial(denoise, xp, image, rows)
    start = time.perf_counter()
    result = call()
    harness.synchronize(xp)
    first = time.perf_counter() - start
    height, width, _ = truth.shape
    n = height * width
    result = result if device == "cpu" else result.get()
    return {
        **harness.timed({"": call}, device, seconds, least=3 if device == "cuda" else 1, most=10)[""],
        "first_call_s": round(first, 3),
        "problem": {"height": height, "width": width, "rows": rows, "sigma": SIGMA},
        "pairs": n * (n if rows is None else min(2 * rows * width, n)),
        "psnr_before": round(psnr(noisy(truth), truth), 2),
        "psnr_after": round(psnr(result, truth), 2),
    }


def points(arguments):
    """Yield what is measured: a local search, and on a GPU one of the whole image too."""
    device, tiny, seconds = arguments.device, arguments.tiny, arguments.seconds
    runner = f"cuattn-{harness.namespace(device).__name__}"
    truth = photograph(arguments.photo)[TINY if tiny else ...]
    yield one("denoise/local/float32", runner, measure, truth, ROWS, device, seconds)
    if device == "cuda" or tiny:
        yield one("denoise/whole/float32", runner, measure, truth, None, device, seconds)


def picture(truth, path):
    """Draw the photograph, the noisy one and the denoised one, with a detail of each below."""
    from matplotlib.figure import Figure
    from PIL import Image

    dirty = noisy(truth)
    clean = denoise(np, dirty)
    figure = Figure(figsize=(9.6, 6.2), layout="constrained")
    panels = figure.subplots(2, 3, height_ratios=(1.17, 0.6))
    y, x = int(truth.shape[0] * 0.36), int(truth.shape[1] * 0.52)
    detail = slice(max(y - 48, 0), y + 48), slice(max(x - 80, 0), x + 80)
    shown = {
        "photograph": truth,
        f"with noise, {psnr(dirty, truth):.1f} dB": dirty,
        f"non-local means, {psnr(clean, truth):.1f} dB": clean,
    }
    for column, (title, image) in zip(panels.T, shown.items(), strict=True):
        column[0].set_title(title, fontsize=11)
        for axis, part in zip(column, (image, image[detail]), strict=True):
            axis.imshow(np.clip(part, 0, 1), interpolation="nearest")
            axis.set_axis_off()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(256).save(path, optimize=True)  # noise takes much room in full colour


PHOTO = {"--photo": {"type": Path, "help": "another photograph, or one as .npy where matplotlib is missing"}}

if __name__ == "__main__":
    harness.main(__doc__, "denoise", points, PHOTO)
