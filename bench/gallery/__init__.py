"""Examples from the sciences on :mod:`cuattn.pairwise`, each with a picture: ``python -m bench.gallery``."""
