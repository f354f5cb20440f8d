"""Measure cuattn on a Hopper GPU beside every peer: ``python -m bench.hopper --help``."""

from bench.suites import main

if __name__ == "__main__":
    raise SystemExit(main("hopper"))
