"""The measurement over ranks at toy size, and its simulation."""

from argparse import Namespace

from bench import distributed
from cuattn.distributed import connect


def test_points_of_toy_size():
    arguments = Namespace(device="cpu", tiny=True, seconds=0.0)
    points = distributed.points(arguments, distributed.Ranks(connect(), "cpu"))
    names = [point.case for point in points]
    assert len(set(names)) == len(names) and all(name.count("/") == 2 for name in names)
    for point in points[::7]:
        rows = point.measure()
        assert set(rows) == set(point.runners) == {"cuattn-1", "cuattn-2"}
        assert rows["cuattn-2"]["efficiency"] > 0 and rows["cuattn-2"]["predicted_us"] > 0


def test_the_simulation_prints_what_it_assumes(capsys):
    distributed.simulate([2, 64], (1 << 14,))
    text = capsys.readouterr().out
    assert "GB/s within islands of 8" in text and text.count("\n") == 4 + 2 * 2 * 4
