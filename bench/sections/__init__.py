"""What is shown of each study: a `bench.report.Section` each, read from ``bench/results`` alone.

``SECTIONS`` is in the order of ``bench/README.md``; `PEER_TABLES`, every case of every table that is measured beside
peers, are in ``bench/results/tables.md`` only.
"""

from bench.sections import masks, others, papers, peers, speed
from bench.sections.peers import PEER_TABLES  # noqa: F401

SECTIONS = speed.SECTIONS | peers.SECTIONS | papers.SECTIONS | masks.SECTIONS | others.SECTIONS
