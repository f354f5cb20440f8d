"""Random problems over everything the API takes, against float64: ``python -m bench.fuzz --seconds 60 --seed 1``."""
