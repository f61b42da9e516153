"""Half precision as a baseline."""

import pytest
import torch

from lightning_distlab.collectives import Native, Ring
from lightning_distlab.compression import Cast, Param
from lightning_distlab.exchange.drivers import InProcessDriver
from lightning_distlab.exchange.engine import Engine
from lightning_distlab.payloads import Wire
from tests.compression.harness import Ranks, random_grads


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_mean_of_what_was_rounded(name, dtype, world):
    weights = {"w": torch.zeros(30, 7), "b": torch.zeros(5)}
    ranks = Ranks(Cast(dtype=name), weights, world, wire=Wire())
    grads = random_grads(world, weights, 0, dtype=torch.float32)
    expected = {n: torch.stack([g[n].to(dtype).float() for g in grads]).mean(0) for n in weights}
    average = ranks.step(grads)
    for n, weight in weights.items():
        torch.testing.assert_close(average[n], expected[n], rtol=1e-6, atol=1e-7)
        assert ranks.sent[0][n].wire_size() - 2 * weight.numel() in (0, 2)  # fp16 has a scale
    assert all(state == {} for states in ranks.states for state in states.values())


def test_large_gradients_stay_finite_in_fp16():
    ranks = Ranks(Cast(dtype="fp16"), {"w": torch.zeros(3)}, world=2, wire=Wire())
    average = ranks.step([{"w": torch.tensor([6e4, -6e4, 1e6])} for _ in range(2)])["w"]
    torch.testing.assert_close(average[:2], torch.tensor([6e4, -6e4]))
    assert average[2] == 65504


@pytest.mark.parametrize("collective", [Native, Ring])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stops_all_ranks(name, collective, bad):
    params = {"w": Param("w", torch.zeros(20))}
    engine = Engine(Cast(dtype=name), collective(), InProcessDriver(2), params)
    grads = {r: {"w": torch.ones(20)} for r in range(2)}
    grads[0]["w"][3] = bad
    engine.begin()
    engine.submit(grads)
    assert engine.finish().skipped


@pytest.mark.parametrize("collective", [Native, Ring])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_any_type(name, dtype, collective):
    params = {"w": Param("w", torch.zeros(3, dtype=dtype))}
    engine = Engine(Cast(dtype=name), collective(), InProcessDriver(4, faithful=collective is Ring), params)
    large = 3e4 if dtype == torch.float16 else 4e5
    grads = {r: {"w": torch.tensor([large, 1e-3, -2.0], dtype=dtype)} for r in range(4)}
    engine.begin()
    engine.submit(grads)
    assert not engine.finish().skipped
    top = 65504.0 if name == "fp16" and large > 3e4 else large
    expected = torch.tensor([top, 1e-3, -2.0], dtype=torch.float64)
    assert all(torch.equal(g["w"], grads[0]["w"]) for g in grads.values())
    torch.testing.assert_close(grads[0]["w"].double(), expected, rtol=1e-2, atol=1e-5)
