import math

import pytest

from lightning_distlab.exchange.drivers import Link
from lightning_distlab.simulation import PROFILES, parse_link


def test_profiles_and_numbers():
    assert parse_link("globe") is PROFILES["globe"] == Link(0.08, 12.5e6)
    assert parse_link("20ms,100mbit") == Link(0.02, 12.5e6)
    assert parse_link("1gbit, .5us") == Link(0.5e-6, 1.25e8)
    assert parse_link("3s") == Link(3.0, math.inf)
    assert parse_link("64kbit") == Link(0.0, 8000.0)


@pytest.mark.parametrize("text", ["", "fast", "20", "20ms,30ms", "20ms,", "-1ms", "0mbit", "1gb"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ValueError, match=r"must be one of rack|must be greater than 0"):
        parse_link(text)
