"""Networks with something special about them."""

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conformance.case import Case
from tests.conformance.networks import Frozen, Normalised, Regression, Tied, Unused, dataset, loader
from tests.conformance.table import thing


@thing("frozen parameters")
def frozen(case: Case) -> None:
    facts = case.parity(Frozen())
    assert torch.equal(facts[0].weights["net.0.weight"], Frozen().state_dict()["net.0.weight"])


@thing("parameters unused in some steps (`find_unused_parameters`)")
def unused(case: Case) -> None:
    facts = case.parity(Unused(), options={"find_unused_parameters": True})
    assert torch.equal(facts[0].weights["never.weight"], Unused().state_dict()["never.weight"])


@thing("tied parameters")
def tied(case: Case) -> None:
    facts = case.parity(Tied())
    assert torch.equal(facts[0].weights["net.0.weight"], facts[0].weights["net.2.weight"])


@thing("`sync_batchnorm`")
def sync_batchnorm(case: Case) -> None:
    case.fit(Normalised(), sync_batchnorm=True)


@thing("BatchNorm statistics averaged at validation and saving")
def batchnorm(case: Case) -> None:
    keep = ModelCheckpoint(case.folder, filename="end")
    # Nothing is learned, so that the mean over ranks of the running means is the running mean of the united batches.
    module = Normalised(lr=0.0)
    expected = case.one(module).weights["net.1.running_mean"]
    facts = case.fit(module, val=loader(dataset(12)), callbacks=[keep], enable_checkpointing=True)
    saved = torch.load(case.folder / "end.ckpt", weights_only=True)["state_dict"]
    for name in ("net.1.running_mean", "net.1.running_var"):
        assert all(torch.equal(own.weights[name], saved[name]) for own in facts)
    torch.testing.assert_close(saved["net.1.running_mean"], expected, rtol=0, atol=1e-10)


class _Compiled(Regression):
    def build(self):
        return torch.compile(super().build(), backend="eager")


@thing("`torch.compile`d network")
def compiled(case: Case) -> None:
    case.parity(_Compiled())
