"""The plain average."""

import pytest
import torch

from lightning_distlab.compression import NoCompression, Param, Step
from lightning_distlab.payloads import DensePayload, Reply, Wire
from tests.compression.harness import Ranks, random_grads


@pytest.mark.parametrize("world", [1, 2, 3])
def test_average_without_state(world):
    weights = {"w": torch.zeros(9, 7, dtype=torch.float64), "b": torch.zeros(7, dtype=torch.float64)}
    ranks = Ranks(NoCompression(), weights, world)
    grads = random_grads(world, weights, 0)
    expected = {n: sum(g[n] for g in grads) / world for n in weights}
    averages = ranks.step(grads)
    assert all(torch.equal(averages[n], expected[n]) for n in weights)
    assert all(state == {} for named in ranks.states for state in named.values())


def test_the_reply_may_lie_in_the_gradient_itself():
    grad = torch.tensor([1.0, 2.0, 3.0])
    running = NoCompression().exchange(grad, {}, Param("w", torch.zeros(3)), Step(0, 0.0, 0, 4))
    sent = next(running).payload
    assert sent.values.data_ptr() == grad.data_ptr()  # nothing is copied
    grad.mul_(8)  # a backend that reduces in place
    with pytest.raises(StopIteration):
        running.send(Reply(DensePayload(grad)))
    assert grad.tolist() == [2.0, 4.0, 6.0]


def test_half_precision_is_divided_before_the_sum():
    grads = [torch.full((3,), 60000.0, dtype=torch.float16) for _ in range(4)]
    running = [NoCompression().exchange(g, {}, Param("w", g), Step(0, 0.0, r, 4)) for r, g in enumerate(grads)]
    total = sum(next(r).payload.values for r in running)  # in fp16, as a backend adds
    assert all(torch.equal(g, torch.full_like(g, 60000.0)) for g in grads)
    for r, g in zip(running, grads, strict=True):
        with pytest.raises(StopIteration):
            r.send(Reply(DensePayload(total)))
        assert g.tolist() == [60000.0] * 3


def test_the_rounding_of_a_lossy_wire_is_dropped():
    weights = {"w": torch.zeros(100)}
    ranks = Ranks(NoCompression(), weights, 2, wire=Wire(dense="fp16"))
    grads = random_grads(2, weights, 0, dtype=torch.float32)
    expected = (grads[0]["w"] + grads[1]["w"]) / 2
    average = ranks.step(grads)["w"]
    assert not torch.equal(average, expected)
    torch.testing.assert_close(average, expected, rtol=2e-3, atol=1e-2)
    assert ranks.states[0]["w"] == {}
