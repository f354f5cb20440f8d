"""FlashAttention's figure 3, runtime and memory against length: ``python -m bench.lengths --help``."""

from bench.suites import main

if __name__ == "__main__":
    raise SystemExit(main("lengths"))
