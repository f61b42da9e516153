"""Any compressor over any collective by two words of the command line."""

import pytest

from lightning_distlab.app import instantiate
from lightning_distlab.collectives import ALIASES, COLLECTIVES
from lightning_distlab.compression import COMPRESSORS
from tests.app.compose import ROOT, composed

GROUP = ROOT / "lightning_distlab" / "conf" / "strategy"


def build(compressor, collective, *words):
    pair = (f"strategy/compressor={compressor}", f"strategy/collective={collective}")
    with composed("strategy=compressed", *pair, *words) as cfg:
        return instantiate(cfg.strategy, "strategy")


def test_every_method_has_a_file():
    assert {path.stem for path in (GROUP / "compressor").glob("*.yaml")} == set(COMPRESSORS)
    assert {path.stem for path in (GROUP / "collective").glob("*.yaml")} == {*COLLECTIVES, *ALIASES}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor(name):
    strategy = build(name, "gather")
    assert type(strategy.compressor) is COMPRESSORS[name]
    # The configuration says nothing else than the class would by itself.
    default = COMPRESSORS[name]()
    differing = {key for key, value in vars(default).items() if repr(value) != repr(vars(strategy.compressor)[key])}
    assert differing <= {"exclusion", "warmup"}


@pytest.mark.parametrize("name", [*COLLECTIVES, *ALIASES])
def test_every_collective(name):
    assert type(build("none", name).collective) is COLLECTIVES[ALIASES.get(name, name)]


def test_options_of_both():
    strategy = build(
        "powersgd", "hierarchical", "strategy.compressor.rank=3", "strategy.collective.ranks_per_node=4",
        "strategy.collective.outer=tree",
    )  # fmt: skip
    assert strategy.compressor.rank == 3
    assert (strategy.collective.ranks_per_node, strategy.collective.outer.name) == (4, "tree")
    assert build("none", "parameter_server", "strategy.collective.delay=2").collective.delay == 2


@pytest.mark.parametrize(
    ("compressor", "collective", "message"),
    [
        ("dgc", "native", "native adds dense tensors of a fixed size.*Use one of gather"),
        ("onebit", "ring", "SignPayload cannot be merged without loss. Use one of gather, auto"),
        ("terngrad", "native", "LevelPayload is none"),
        ("sparse", "hierarchical", "whole gradient first"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(compressor, collective, message):
    with pytest.raises(Exception, match=message):
        build(compressor, collective)
