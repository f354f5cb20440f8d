"""A small Llama-shaped decoder in PyTorch whose attention is cuattn's, and text to train it on."""
