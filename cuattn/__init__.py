"""cuattn."""
