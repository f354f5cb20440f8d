"""A small Llama-shaped decoder with its gradients written out, on NumPy or CuPy: cuattn inside a training step.

``text`` packs documents into sequences, ``layers`` holds functions with their gradients, ``heads`` the ways to compute
attention, ``model`` the decoder and its step, ``adamw`` the optimiser.
"""
