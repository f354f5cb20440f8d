"""The constants that kernels are specialised by: ``namespace cfg`` in front of each.

======================  =======  ==================================================================================
name                    type     meaning
======================  =======  ==================================================================================
``elem``                type     q, k, v (do): ``__half``, ``__nv_bfloat16``, ``float``, ``double``
``acc``                 type     accumulators, softmax, l, m: ``float`` or ``double``
``out``                 type     o of the forward, or merged: ``elem`` or ``acc``; add: what is written
``part``                type     merge: o of the parts; add: what is read (backward: an int, see ``chunk``)
``adds``                bool     add: there are two terms
``width``               int      add, merge: elements of one access
``o_elem``              type     o read by the backward: ``elem`` or ``acc``
``bias_elem``           type     the bias (``acc`` without one)
``grad``, ``bias_grad`` type     dq, dk, dv, and dbias, as they are written
``head_dim``            int      of q and k, rounded up to the kernel's step (``Params::head_dim`` is the true one)
``head_dim_v``          int      of v and o, likewise
``exact``               bool     forward: head_dim and head_dim_v are true, no column is missing
``whole_columns``       bool     backward: likewise, and 16-byte loads are allowed
``block_m``             int      query rows per tile
``block_n``             int      keys per tile
``warps``               int      warps per block (forward: per team)
``teams``               int      forward of few rows: teams of a warp that divide a block's keys among them
``scores_m``            int      backward: warps along the rows of a tile of scores
``stages``              int      k (and v) tiles in flight
``q_stages``            int      sm90 forward: query tiles in flight
``v_stages``            int      sm90 row kernel: v tiles in flight
``min_blocks``          int      forward, along tangents: blocks meant to share a multiprocessor
``blocks_per_sm``       int      backward: likewise
``pack``                int      forward: heads of a group whose rows share a row tile
``rows_per_item``       int      mask tables: units of the bounds in a row tile
``row_warps``           int      merge: warps that share a row
``stacked``             bool     merge: the parts lie one after another
``tangents``            bool     merge: of jvps, with the tangents of o and of lse
``load_bytes``          int      widest access that every address and stride of q, k, v (do) allows: 16, 8, 4 or 2
``dropout``             int      threshold T; 0 = no dropout
``runs``                bool     a shard's rows and keys are looked up in ``row_blocks``, ``key_blocks``
``statistics``          bool     forward: l and m are written; else their addresses are null
``bias``                bool     a bias is added
``bias_tiles``          bool     sm90: the copy engine brings it, in tiles
``bias_keys``           bool     sm90: it is broadcast along rows
``split_bias``          bool     sm90: such a one is kept in parts, for tensor cores to add
``split_score``         bool     sm90: so is what a function adds to keys, the same in all rows
``row_offsets``         bool     sm90: beside that it adds something to each row of a tile
``bias_shared``         bool     sm90 forward: batches that share it are worked on side by side
``bias_rows``           bool     sm90 forward: it is broadcast along keys
``batches_first``       bool     sm90 backward: sequences are worked on side by side
``dbias``               int      sm90 backward: how the main kernel makes dbias, see kernels/attn/bwd_workspace.cuh
``softcap``             bool     scores pass through softcap * tanh(s / softcap)
``score``               bool     scores pass through a function, ``traced::score``
``reads_keys``          bool     sm90 forward: it reads arrays by keys
``additive``            bool     which adds ``traced::addend``, so that its slope is 1
``sloped``              bool     the slope of softcap and function together is not 1
``prescaled``           bool     scores are scaled before the maximum is taken
``negate``              bool     sm90: scale < 0, products are negated
``overlap``             bool     sm90 forward: the softmax begins under the warpgroup's own product
``diagonal``            bool     sm90 forward: keys end with the row, at a corner of square tiles
``band_left``           bool     keys further left than ``Params::band_left`` are invisible
``band_right``          bool     keys further right than ``Params::band_right`` are invisible (causal: 0)
``mask``                int      which masks there are, see kernels/attn/mask_format.cuh
``split``               bool     forward over parts of the key axis, partial results of type ``acc``; bias kernel: parts
                                 of the heads that share a bias
``whole_rows``          bool     Hopper forward: not all row tiles are in parts
``some_absent``         bool     Hopper forward: the last row tile has warpgroups without rows
``merges``              bool     the last block of a row tile to finish its part merges them all
``flush_every``         int      float32, float64: tiles after which long sums are added to memory; 0 = never
``atomic_dq``           bool     backward: dq is added up in memory, in no fixed order
``deterministic``       bool     sm90 backward: key tiles take turns to add to dq
``dq_tiles``            int      sm90 backward: row tiles of which a block holds dq over all keys; 0 = none
``tail``                bool     sm90 backward: the last key tiles are shared likewise
``in_parts``            bool     sm90 backward: several blocks share a key tile; dk and dv are sums of their parts
``keeps_ds``            bool     sm90 backward: dS is kept in memory for the kernel that makes dq
``pair_warpgroups``     int      sm90 passes over pairs of tiles: warpgroups that share a tile
``inputs``              bool     sm90 passes over pairs of tiles: weights depend on scores
``dp_late``             bool     sm90 passes over pairs of tiles: dP is begun when P is done
``split_delta``         bool     backward: delta is kept in parts, for tensor cores to subtract
``dlse``                bool     backward's preprocess: there is a gradient by the rows' log-sum-exps
``sum_dq``, ``sum_dk``  bool     the gradient (``sum_dv`` likewise) is added up over broadcast axes later, and leaves
                                 unrounded
``sum_rows``            bool     bias kernel: the bias is broadcast along rows
``sum_keys``            bool     bias kernel: the bias is broadcast along keys
``weights``             int      gradients of a function's arrays: numbers that ``traced::weights`` returns
``weight``              int      which of them
``shared``              int      what scores share the index of each, three bits a weight (kernels/attn/score_sums.cuh)
``rests``, ``climbs``   int      sm90 backward: bits of weights that grow by the same from row to row; by more than 0;
                                 that are multiples of s beside (``tilts``); of all others (``apart``)
``slopes_of_heads``     bool     sm90 backward: all scores of a head have the same slope
``gathers``             int      the same of one weight, whose sums are added to the elements of its array
``sharers``             int      threads that share their sums of a slice
``walk``                int      which scores a block adds up, see there
``by_batch``            bool     the index depends on b
``by_head``             bool     the index depends on h
``alike``               bool     but for the first element of a head it does not
``adds``, ``rounds``    bool     there is a sum already; these are the last to be added
``result``              type     of what is written then
``chunk``, ``part``     int      backward of wide heads: columns loaded at a time, columns that a block owns; else 0
``tf32``                bool     float32 products in one TF32 pass instead of float32 accuracy
``source``, ``stat``    type     along tangents: operands in memory, and l, m and unrounded sums
``to_elem``             type     the tangent of o read by the backward: ``elem`` or ``acc``
``columns``             int      along tangents: columns of a result that a block sums
``sharers``             int      along tangents: warps that share rows, keys and columns of a result divided among them
``owner``               int      along tangents: what a block of the backward sums (kernels/sm80/bwd_jvp.cuh)
``keys_own``            bool     sm90 likewise: dk and dv, else dq
``one_pass``            bool     likewise: the launch for dk and dv adds dq up in memory, in no fixed order
``first_parts``         int      likewise: parts of a head's first tile of rows, or of keys
``unit``                int      sm90 along tangents: rows whose numbers lie together
``whole_loads``         bool     likewise: rows of o, do and their tangents may be read by 16 bytes
``moves``               bool     scores have a tangent
``tq``, ``tk``          bool     there is a tangent of q, of k (``tv``, ``tdo``, ``tbias`` likewise)
``primal``              bool     the gradients are wanted beside their tangents
``ddo``                 bool     so is the gradient by do, which is the tangent of o
``dim``                 int      pairwise: coordinates of a point
``width``               int      pairwise: columns that a block takes
``thread_rows``         int      pairwise: rows of a thread
``tiles``               int      pairwise, near and far: 16-row tiles of a warp
``blocks``              int      likewise: blocks meant to share a multiprocessor
``reduction``           int      pairwise: what is summed, see kernels/pairwise/rows.cu
``function``            int      pairwise: of the distance, see kernels/pairwise/functions.cuh
``logs``                bool     pairwise gradients: weights of rows and keys are given by their logarithms
``log``                 type     pairwise: of those logarithms
``warpgroups``          int      pairwise, tensor cores: warpgroups of a block on Hopper; 0: warps multiply
``adders``              int      pairwise, tensor cores: blocks that sum keys for their mean
``values``              bool     pairwise gradients: sums of values are wanted, too
======================  =======  ==================================================================================
"""

from cuattn.errors import UnsupportedError
from cuattn.masks.base import KINDS
from cuattn.masks.cuda_half import CudaHalf
from cuattn.problem import DTYPES, Problem
from cuattn.tracing import Node, addend
from cuattn.tracing.graph import variable

Constants = dict[str, object]


def problem_constants(problem: Problem) -> Constants:
    """Return what kernels are told of a problem, as far as they ask (:func:`cuattn.cuda.source.constants_of`)."""
    acc, band, bias, score = DTYPES[problem.stat_dtype].cuda, problem.band, problem.bias, function_of(problem)
    return {
        "elem": problem.row.cuda,
        "acc": acc,
        "out": DTYPES[problem.out_dtype].cuda,
        "bias_elem": acc if bias is None else DTYPES[bias].cuda,
        "grad": DTYPES[problem.grad_dtype(problem.dtype)].cuda,
        "bias_grad": acc if bias is None else DTYPES[problem.grad_dtype(bias)].cuda,
        "statistics": problem.statistics,
        "dropout": problem.dropout,
        "runs": problem.runs,
        "bias": bias is not None,
        "softcap": problem.softcap is not None,
        "score": score is not None,
        "additive": score is not None and addend(score) is not None,
        "sloped": is_sloped(problem),
        "prescaled": any(x is not None for x in (bias, problem.softcap, score)) or not problem.scale > 0,
        "band_left": band is not None and band.left is not None,
        "band_right": band is not None and band.right is not None,
        "tf32": problem.precision == "tf32",
        "mask": sum(half.code for half in halves(problem)),
        "moves": problem.moves,
        **{f"t{name}": name in problem.tangents for name in ("q", "k", "v", "bias")},
    }


def is_sloped(problem: Problem) -> bool:
    """Return whether the derivative of scores by scaled products is not 1: under a softcap, and by most functions."""
    score = function_of(problem)
    return problem.softcap is not None or (score is not None and addend(score) is None)


def function_of(problem: Problem) -> Node | None:
    """Return what scores pass through, None if it changes nothing."""
    score = problem.score
    return None if score is None or score.root is variable("s") else score.root


def halves(problem: Problem) -> list[CudaHalf]:
    """Return how kernels take each mask of a problem.

    Raises
    ------
    UnsupportedError
        A kind of mask is not for GPUs, or there are more of it than a kernel takes.
    """
    found = []
    for kind in problem.masks:
        half, count = KINDS[kind].cuda, problem.masks.count(kind)
        if half is None:
            raise UnsupportedError(f"mask holds a {kind} mask; expected kinds that a GPU takes")
        if count > half.most:
            raise UnsupportedError(f"mask holds {count} {kind} masks; expected at most {half.most} on a GPU")
        found.append(half)
    return found
