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
    module = Normalised(lr=0.0)
    facts = case.fit(module, val=loader(dataset(12)), callbacks=[keep], enable_checkpointing=True)
    one = {}
    for name in ("net.1.running_mean", "net.1.running_var"):
        assert all(torch.equal(own.weights[name], facts[0].weights[name]) for own in facts)
        one[name] = torch.load(case.folder / "end.ckpt", weights_only=True)["state_dict"][name]
        assert torch.equal(one[name], facts[0].weights[name])
    # With lr 0 and a momentum of 0.1, the mean of the ranks' statistics is that of all their batches' means.
    hidden = module.net[0](dataset().tensors[0]).mean(0)
    assert (one["net.1.running_mean"] - hidden * (1 - 0.9**6)).abs().max() < 0.35 * hidden.abs().max()


class _Compiled(Regression):
    def build(self):
        return torch.compile(super().build(), backend="eager")


@thing("`torch.compile`d network")
def compiled(case: Case) -> None:
    case.parity(_Compiled())
