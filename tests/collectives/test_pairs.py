"""Which rounds an algorithm can carry."""

import pytest

from lightning_distlab.collectives import Gather, Native, RecursiveDoubling, Ring, check_pair, legal_collectives
from lightning_distlab.payloads import DensePayload, Op, RoundSpec, SparsePayload, Traits

MERGING = ["halving_doubling", "tree", "parameter_server", "hierarchical", "auto", "gtopk", "balanced"]


class Unmergeable(SparsePayload):
    traits = Traits(linear=True, mergeable=False, fixed_size=False, unbiased=False)


def spec(op, payload=DensePayload):
    return RoundSpec(op, payload)


@pytest.mark.parametrize(
    ("rounds", "legal"),
    [
        ([spec(Op.SUM)], ["native", "gather", "ring", "recursive_doubling", *MERGING, "sequential"]),
        (
            [spec(Op.MAX), spec(Op.SUM)],
            ["native", "gather", "ring", "recursive_doubling", *MERGING, "sequential"],
        ),
        ([spec(Op.SUM, SparsePayload)], ["gather", "ring", "recursive_doubling", *MERGING, "sequential"]),
        ([spec(Op.SUM, Unmergeable)], ["gather", "sequential"]),
        ([spec(Op.GATHER, SparsePayload)], ["gather", "auto"]),
        ([spec(Op.SCATTER_SUM), spec(Op.ALL_GATHER)], ["gather", "ring", "auto"]),
        ([spec(Op.MAX, SparsePayload)], []),
    ],
)
def test_legal_collectives(rounds, legal):
    assert legal_collectives(rounds) == legal


@pytest.mark.parametrize(
    ("collective", "rounds", "reason"),
    [
        (Native(), spec(Op.SUM, SparsePayload), "native adds dense tensors of a fixed size, and SparsePayload is none"),
        (Native(), spec(Op.GATHER), "native cannot perform GATHER"),
        (Ring(), spec(Op.SUM, Unmergeable), "Unmergeable cannot be merged without loss"),
        (RecursiveDoubling(), spec(Op.MAX, SparsePayload), "a maximum is taken of dense payloads only"),
    ],
)
def test_refusal_names_reason_and_remedy(collective, rounds, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        check_pair((rounds,), "some", collective, ["gather", "ring"])
    assert "compressor='some'" in str(caught.value)
    assert "Use one of gather, ring." in str(caught.value)


def test_no_gather_without_support():
    with pytest.raises(AssertionError, match="ring does not perform GATHER"):
        Ring().gather(None, 0, 2)
    assert Gather().supports(spec(Op.GATHER)) is None
