"""The guides that are written from the code say what the code says."""

import inspect

import pytest

from cuattn import errors
from tests import catalogue


@pytest.mark.parametrize("name", catalogue.PAGES)
def test_pages_are_the_codes(name):
    written = (catalogue.GUIDES / name).read_text()
    assert written == catalogue.PAGES[name](), "run python -m tests.catalogue"


def test_every_error_is_in_the_catalogue():
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.CuattnError)}
    assert kinds - {errors.CuattnError} == {*catalogue.ADVICE} - {catalogue.DistributedError}
    assert {message.error for message in catalogue.messages()} == {*catalogue.ADVICE}


def test_most_messages_say_what_was_expected():
    """What is unsupported has a reason instead, and what went wrong elsewhere a cause."""
    found = [m.text for m in catalogue.messages() if m.error in (errors.ArgumentError, errors.ShapeError)]
    silent = [text for text in found if "expected" not in text and "must" not in text]
    assert len(silent) < 0.2 * len(found), silent


def test_every_variable_is_described_and_read():
    assert catalogue.reads().keys() == catalogue.VARIABLES.keys()
