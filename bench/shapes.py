"""Measure the shapes that users call beside every peer: ``python -m bench.shapes --help``."""

from bench.suites import main

if __name__ == "__main__":
    raise SystemExit(main("shapes"))
