"""Measurements of cuattn beside its peers.  Run from the repository root.

``python -m bench.hopper`` and ``python -m bench.portable`` measure, on a GPU machine without git or network if need be.
``python -m bench.report FILE.json ...`` turns their rows into tables and plots, anywhere.  Measuring can be resumed: a
case that the output file already holds for the same machine and sources is not measured again.
"""
