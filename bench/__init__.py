"""Measurements of cuattn beside its peers, and of the papers' claims.  Run from the repository root.

``pip install -e ".[cuda13,bench]"`` and the peers that are wanted: PyTorch (every command that uses a GPU needs it),
JAX, FlashAttention-4 and -3.  ``python -m bench.reproduce`` measures everything, on a GPU machine without git or
network if need be, in as many parts as one likes: a case that a file of ``bench/results`` already holds for the same
machine and sources is not repeated.  ``python -m bench.redraw`` makes the pictures, the tables and the README's section
from those files, anywhere.

Beside peers: ``hopper``, ``shapes``, ``scores``, ``portable``, ``gpt2``, ``lengths``, ``cpu``, each also with
``--beside PATH``, another checkout of cuattn in the same run (``suites`` names them, ``cases`` the problems;
``compare`` checks and times one; ``report`` shows them, ``bars`` what they have to reach; ``prepare`` compiles ahead
what they need).  Questions of their own: ``block_size``, ``block_sparse``, ``traffic``, ``loop_order``, ``sparsity``,
``mask_memory``, ``same_bits``, ``training``, ``denoise``, ``kernel_profiles``.  All of them are points that ``harness``
runs (``--tiny`` tries a command, ``--device cpu`` without a GPU; its rows go to a file of their own); ``counters``
reads hardware counters, ``sections`` show the rows, in one ``style``.  What is no public API of cuattn is in
``internals``.
"""
