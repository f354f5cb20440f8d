"""Examples from the sciences, each with a picture: ``python -m bench.gallery``.

On :mod:`cuattn.pairwise`, and on :mod:`cuattn.torch`: what needs derivatives of higher order.
"""
