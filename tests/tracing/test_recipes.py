"""Every mask and score of the guide is its own formula; tiles and columns are found."""

import numpy as np
import pytest

from cuattn.tracing.bound import facts
from cuattn.tracing.cuda import source
from cuattn.tracing.cuda_tiles import tile_source
from cuattn.tracing.derivatives import addend, derivative, split_visible, weights
from cuattn.tracing.functions import MASK, SCORE, trace
from cuattn.tracing.recognition import columns
from cuattn.tracing.tiles import tile_states
from cuattn.tracing.values import evaluate
from tests.tolerances import assert_close
from tests.tracing.recipes import BATCH, HEADS, MASKS, SCORES, N

SHAPE = (BATCH, HEADS, N, N)
NAMES = {name: x.astype(np.int32) for name, x in zip("bhij", np.ogrid[tuple(map(slice, SHAPE))], strict=True)}


@pytest.mark.parametrize("recipe", MASKS, ids=lambda recipe: recipe.name)
def test_masks(recipe):
    bound = trace(recipe.function, MASK).bind()
    wanted = np.broadcast_to(recipe.formula(), SHAPE)
    np.testing.assert_array_equal(np.broadcast_to(evaluate(bound, NAMES, limits=SHAPE), SHAPE), wanted)
    first = np.arange(0, N, 8)
    for b, h in np.ndindex(BATCH, HEADS):
        states = tile_states(bound, (first, first + 7), (first, first + 7), b, h)
        tiles = wanted[b, h].reshape(N // 8, 8, N // 8, 8).swapaxes(1, 2)
        some, every = tiles.any((2, 3)), tiles.all((2, 3))
        assert not (some & (states == 0)).any() and not (~every & (states == 2)).any()
        assert (states == 1).sum() <= 1.5 * (some & ~every).sum()  # almost all that can be resolved is
        found = columns(bound, np.arange(N), np.arange(N), b, h)
        assert (found is not None) or not recipe.columns
        if found is not None:
            i, (lts, lte, uts, ute) = np.arange(N)[:, None], found
            np.testing.assert_array_equal(((lts <= i) & (i < lte)) | ((uts <= i) & (i < ute)), ~wanted[b, h])


@pytest.mark.parametrize("recipe", SCORES, ids=lambda recipe: recipe.name)
def test_scores(recipe):
    bound = trace(recipe.function, SCORE, recipe.args).bind(recipe.args)
    s = np.random.default_rng(3).normal(size=SHAPE, scale=3)
    exact = recipe.formula(s.astype(np.float32).astype(float))
    for dtype in (np.float32, np.float64):
        found = evaluate(bound, {**NAMES, "s": s.astype(np.float32).astype(dtype)}, dtype, SHAPE)
        assert found.dtype == dtype
        assert_close(found, exact, exact.astype(dtype), magnitude=8 * np.abs(exact[np.isfinite(exact)]).max())


def test_additive_scores_are_told_from_others():
    others = {"softcap", "approximate_softcap", "temperature", "gated"}
    for recipe in SCORES:
        traced = trace(recipe.function, SCORE, recipe.args)
        visible, score = split_visible(traced.root)
        assert (addend(score) is None) == (recipe.name in others), recipe.name
        assert (visible is not None) == (recipe.name in ("natten_with_bias", "window_and_alibi"))


PLACES = {
    "alibi": ["head"],
    "window_and_alibi": ["head"],
    "patch_distance": ["head"],
    "learned_alibi": ["head"],
    "relative": ["diagonal"],
    "t5": ["diagonal"],
    "key_bias": ["key"],
    "pair_bias": ["element"],
    "temperature": ["head"],
    "graphormer": ["element"],
    "natten_with_bias": ["element"],
}


def test_the_sums_of_array_gradients_are_planned_by_index():
    for recipe in SCORES:
        bound = trace(recipe.function, SCORE, recipe.args).bind(recipe.args)
        found = [x.place for slot in range(len(bound.arrays)) for x in weights(bound.root, slot)]
        assert found == PLACES.get(recipe.name, []), recipe.name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_recipes_compile(arch):
    pytest.importorskip("cupy")
    from cuattn.cuda import source as files
    from tests.cuda.nvrtc import compile_log

    texts = []
    for recipe in (*MASKS, *SCORES):
        names = MASK if recipe in MASKS else SCORE
        bound = trace(recipe.function, names, recipe.args).bind(recipe.args)
        roots = [bound.root, derivative(bound.root)] if names == SCORE else [bound.root]
        made = {"": source({"score": roots}, facts(bound, SHAPE), short=True)}
        if names == MASK:
            made["_tiles"] = tile_source(bound.root, facts(bound, SHAPE))
        for end, one in made.items():
            begin = f"namespace {recipe.name}{end} {{ using namespace traced;"
            texts.append(one.text.replace("namespace traced {", begin))
    compile_log(files.flatten_text("\n".join(texts), "recipes.cu"), arch)
