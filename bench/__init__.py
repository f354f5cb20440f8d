"""Measurements of cuattn beside its peers, and of the papers' claims.  Run from the repository root.

``python -m bench.reproduce`` measures everything, on a GPU machine without git or network if need be, in as many parts
as one likes: a case that a file of ``bench/results`` already holds for the same machine and sources is not repeated.
``python -m bench.redraw`` makes the pictures, the tables and the README's section from those files, anywhere.

Beside peers: ``hopper``, ``portable``, ``gpt2``, ``lengths``, ``cpu`` (``cases`` names the problems, ``session`` runs
them, ``report`` and ``plots`` show them; ``prepare`` compiles ahead what they need).  Questions of their own:
``block_size``, ``block_sparse``, ``traffic``, ``loop_order``, ``sparsity``, ``mask_memory``, ``same_bits``,
``training``, ``denoise``, ``kernel_profiles`` (``study`` runs them, ``counters`` reads hardware counters, ``sections``
shows them).
"""
