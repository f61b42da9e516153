"""Compressors on all ranks in lock step, summed in rank order: no collective, no driver."""

from dataclasses import dataclass, field
from functools import reduce

import torch

from lightning_distlab.compression import Compressor, Hyper, Param, Scratch, Step
from lightning_distlab.payloads import Op, Payload, Reply, Wire

EXACT = Wire(value="fp64", dense="fp64")


@dataclass
class Ranks:
    """`world` ranks that hold the same named weights; `step` gives gradients in and averages out."""

    compressor: Compressor
    weights: dict[str, torch.Tensor]
    world: int = 2
    hyper: Hyper = field(default_factory=Hyper)
    wire: Wire = EXACT
    dense_is_cheaper: object = staticmethod(lambda density: density >= 1.0)
    index: int = 0
    epoch: float = 0.0

    def __post_init__(self):
        self.params = {name: Param(name, weight, self.hyper) for name, weight in self.weights.items()}
        self.states = [{n: self.compressor.init_state(p) for n, p in self.params.items()} for _ in range(self.world)]
        self.scratch = Scratch()
        # Of the last step, by rank, as rounded: what each tensor sent in its last round, and all messages in order.
        self.sent: list[dict[str, Payload]] = []
        self.messages: list[list[Payload]] = []

    def requests(self, grads):
        """Start every compressor; generators and their first requests, by rank and name."""
        running, requests = [], []
        for rank in range(self.world):
            step = Step(self.index, self.epoch, rank, self.world, scratch=self.scratch)
            step.dense_is_cheaper = self.dense_is_cheaper
            seen = grads[rank] if self.compressor.needs_whole_gradient else {}
            step.observed = self.compressor.observe(seen, self.states[rank], step)
            running.append(
                {
                    n: self.compressor.exchange(g, self.states[rank][n], self.params[n], step)
                    for n, g in grads[rank].items()
                }
            )
            # All first requests of a rank are made before any is answered, as in a bucket.
            requests.append({n: next(generator) for n, generator in running[-1].items()})
        return running, requests

    def step(self, grads):
        """Average in place; `grads` is one dict of 1-D tensors per rank."""
        running, requests = self.requests(grads)
        self.sent = [{} for _ in range(self.world)]
        self.messages = [[] for _ in range(self.world)]
        for name, replies in self._until_final(running, requests).items():
            for rank, reply in enumerate(replies):
                try:
                    running[rank][name].send(reply)
                except StopIteration:
                    continue
                raise AssertionError("asked again after the final request")
        self.index += 1
        for rank in range(1, self.world):
            for name in grads[0]:
                assert torch.equal(grads[rank][name], grads[0][name]), "averages differ between ranks"
        return grads[0]

    def _until_final(self, running, requests):
        """Replies to the final request of each tensor, by name, in rank order; one round of all tensors at a time."""
        final, waiting = {}, {name: [requests[rank][name] for rank in range(self.world)] for name in requests[0]}
        while waiting:
            answers = {name: self._answer(name, asked) for name, asked in waiting.items()}
            final |= {name: answers.pop(name) for name, asked in waiting.items() if asked[0].final}
            waiting = {
                name: [running[rank][name].send(reply) for rank, reply in enumerate(replies)]
                for name, replies in answers.items()
            }
        return final

    def _answer(self, name, asked):
        """What each rank is sent back."""
        assert len({(request.op, request.final) for request in asked}) == 1, "ranks ask for different things"
        rounded = [request.payload.rounded(self.wire) for request in asked]
        payloads, op = [payload for payload, _ in rounded], asked[0].op
        for rank, payload in enumerate(payloads):
            self.sent[rank][name] = payload  # of the last round
            self.messages[rank].append(payload)
        ranges = [payload.split_evenly(self.world) for payload in payloads]
        if op is Op.SCATTER_SUM:
            results = [type(payloads[0]).merge_all([own[r] for own in ranges]) for r in range(self.world)]
        elif op is Op.ALL_GATHER:
            results = [type(payloads[0]).concat([own[r] for r, own in enumerate(ranges)])] * self.world
        elif op is Op.MAX:
            results = [reduce(lambda a, b: a.maximum(b), payloads)] * self.world
        elif op is Op.SUM:
            results = [type(payloads[0]).merge_all(payloads)] * self.world
        else:
            results = payloads[:1] * self.world
        everyone = tuple(payloads) if op is Op.GATHER else ()
        return [Reply(result, error, everyone) for result, (_, error) in zip(results, rounded, strict=True)]

    def abandon(self, grads):
        """A step that is skipped after its messages were made."""
        self.sent = [{} for _ in range(self.world)]
        self.messages = [[] for _ in range(self.world)]
        running, requests = self.requests(grads)
        self._until_final(running, requests)
        for named in running:
            for generator in named.values():
                generator.close()


def random_grads(world, weights, seed, dtype=torch.float64):
    """Heavy-tailed gradients, one dict per rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(w.numel(), generator=generator, dtype=dtype) ** 3 for n, w in weights.items()}
        for _ in range(world)
    ]


def copy_of(grads):
    return [{n: g.clone() for n, g in named.items()} for named in grads]


def dense(payload, dtype=None):
    """A payload as the vector that it stands for."""
    values = payload.to_dense() if hasattr(payload, "indices") else payload.values
    return values.clone() if dtype is None else values.to(dtype)


def snapshot(states):
    return [{n: {k: v.clone() for k, v in s.items()} for n, s in named.items()} for named in states]


def same_states(a, b):
    return all(
        x[n].keys() == y[n].keys() and all(torch.equal(x[n][k], y[n][k]) for k in x[n])
        for x, y in zip(a, b, strict=True)
        for n in x
    )
