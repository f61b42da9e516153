"""Names that users write: adding to them is a decision, and taking one away breaks somebody's program."""

import importlib
import inspect

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_distlab
from lightning_distlab.strategies import NAMES

PUBLIC = {
    "lightning_distlab": {
        "CompressedStrategy",
        "DGCStrategy",
        "LightningDDP",
        "OneBitStrategy",
        "PowerSGDStrategy",
        "QSGDStrategy",
        "TernGradStrategy",
        "ThresholdStrategy",
        "SparseStrategy",
        "__version__",
    },
    "lightning_distlab.strategies": {
        "NAMES",
        "CompressedStrategy",
        "DGCStrategy",
        "LightningDDP",
        "OneBitStrategy",
        "PowerSGDStrategy",
        "QSGDStrategy",
        "TernGradStrategy",
        "ThresholdStrategy",
        "SparseStrategy",
    },
    "lightning_distlab.app": {
        "JobResult",
        "TargetNotAllowedError",
        "allow_targets",
        "evaluate",
        "guarded",
        "instantiate",
        "register_resolvers",
        "run_job",
        "train",
    },
    "lightning_distlab.compression": {
        "COMPRESSORS",
        "DGC",
        "QSGD",
        "Cast",
        "Compression",
        "Compressor",
        "Hyper",
        "NoCompression",
        "OneBit",
        "Param",
        "PowerSGD",
        "Scratch",
        "Sparse",
        "State",
        "Step",
        "TernGrad",
        "Threshold",
    },
    "lightning_distlab.collectives": {
        "ALIASES",
        "COLLECTIVES",
        "Auto",
        "Balanced",
        "Collective",
        "Exchange",
        "GTopK",
        "Gather",
        "HalvingDoubling",
        "Hierarchical",
        "Native",
        "NativeRound",
        "ParameterServer",
        "Receive",
        "RecursiveDoubling",
        "Ring",
        "Round",
        "Sequential",
        "Tree",
        "check_pair",
        "combine",
        "legal_collectives",
    },
    "lightning_distlab.payloads": {
        "COMPACT_WIRE",
        "PAPER_WIRE",
        "Bundle",
        "DensePayload",
        "ExactPayload",
        "Flags",
        "LevelPayload",
        "Op",
        "Payload",
        "QuantaPayload",
        "Reply",
        "Request",
        "RoundSpec",
        "SignPayload",
        "SparsePayload",
        "Traits",
        "Wire",
        "accumulation_dtype",
        "even_bounds",
    },
}
REGISTERED = {
    "distlab_ddp",
    "lightning_ddp",
    "dgc_ring",
    "dgc_gather",
    "dgc_halving",
    "dgc_ps",
    "dgc_recursive_doubling",
    "sparse_ring",
    "sparse_gather",
    "powersgd",
    "dgc_hierarchical",
    "sparse_halving",
    "onebit",
    "threshold",
    "terngrad",
    "qsgd",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    imported = importlib.import_module(module)
    assert set(imported.__all__) == PUBLIC[module]
    assert all(hasattr(imported, name) for name in imported.__all__)


def test_registered_names_are_known_to_lightning():
    assert set(NAMES) == REGISTERED
    assert set(StrategyRegistry.available_strategies()) >= REGISTERED


def test_first_arguments_of_the_strategies():
    first = {
        "DGCStrategy": ["density", "collective", "wire"],
        "SparseStrategy": ["density", "collective", "wire"],
        "PowerSGDStrategy": ["rank", "collective", "wire"],
        "OneBitStrategy": ["collective", "wire"],
        "ThresholdStrategy": ["threshold", "collective", "wire"],
        "TernGradStrategy": ["clip", "collective", "wire"],
        "QSGDStrategy": ["bits", "collective", "wire"],
        "CompressedStrategy": ["compressor", "collective", "wire"],
    }
    for name, expected in first.items():
        parameters = list(inspect.signature(getattr(lightning_distlab, name).__init__).parameters)
        assert parameters[1 : 1 + len(expected)] == expected
