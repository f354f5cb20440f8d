"""Measure cuattn's portable kernels beside every peer: ``python -m bench.portable --help``."""

from bench.suites import main

if __name__ == "__main__":
    raise SystemExit(main("portable"))
