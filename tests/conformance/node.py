"""What torchrun starts on each of two nodes: one lossless fit for each strategy with real ranks."""

import sys
from pathlib import Path

import lightning.pytorch as pl

from tests.conformance.case import QUIET, Witness
from tests.conformance.columns import BASE
from tests.conformance.networks import Regression, loader

if __name__ == "__main__":
    for column in BASE:
        if column.virtual:
            continue
        folder = Path(sys.argv[1]) / column.name
        folder.mkdir(exist_ok=True)
        strategy = column.build(lossless=True, start_method="popen")
        trainer = pl.Trainer(**QUIET, devices=1, num_nodes=2, strategy=strategy, callbacks=[Witness(folder)])
        trainer.fit(Regression(), loader())
