"""TernGrad and QSGD: unbiased, integer multiples of a scale that all ranks share, reproducible, without memory."""

import math

import pytest
import torch

from lightning_distlab.compression import QSGD, Param, Step, TernGrad
from lightning_distlab.compression.stochastic import Uniform, random_round
from lightning_distlab.payloads import LevelPayload, Wire
from tests.compression.harness import Ranks, random_grads

F = torch.float64
METHODS = {
    "terngrad": (lambda: TernGrad(clip=None), 1),
    "base3": (lambda: TernGrad(clip=None, code="base3"), 1),
    "qsgd-4": (lambda: QSGD(bits=4, block=10**9), 7),
    "qsgd-8": (lambda: QSGD(bits=8, block=10**9), 127),
    "qsgd-4-blocks": (lambda: QSGD(bits=4, block=4096), 7),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_of_many_draws_is_the_gradient(method):
    """1e5 draws of each of 8 values, within five standard deviations of their mean; largest values on the edge too."""
    make, bound = METHODS[method]
    draws = 100_000
    values = torch.tensor([1.0, -1.0, 0.6, -0.3, 0.049, -0.0077, 1e-5, 0.0], dtype=F)
    ranks = Ranks(make(), {"w": torch.zeros(draws, 8, dtype=F)}, world=1)
    drawn = ranks.step([{"w": values.repeat(draws)}])["w"].view(draws, 8)
    scaled = values.abs() * bound
    share = scaled - scaled.floor()
    sigma = (share * (1 - share) / draws).sqrt() / bound
    # one random number is a multiple of 2^-24 where it is added to a level in fp32
    assert ((drawn.mean(0) - values).abs() <= 5 * sigma + 2.0**-23).all()
    variance = drawn.var(0, unbiased=False)
    torch.testing.assert_close(variance, share * (1 - share) / bound**2, rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_integer_multiples_of_the_shared_scale(method, dtype):
    make, bound = METHODS[method]
    weights = {"w": torch.zeros(50, 40, dtype=dtype), "b": torch.zeros(5, dtype=dtype)}
    ranks = Ranks(make(), weights, world=3, wire=Wire())
    grads = random_grads(3, weights, 0, dtype=dtype)
    grads[1]["w"] *= 4  # its scale is the one that is shared
    scale = float(grads[1]["w"].abs().max())
    for grad in grads:
        grad["w"].clamp_(-scale, scale)
    own = [g["w"].clone() for g in grads]
    average = ranks.step(grads)
    unit = scale / bound / 3
    multiples = average["w"].double() / unit
    assert (multiples - multiples.round()).abs().max() <= (1e-3 if dtype.itemsize > 2 else 3 * bound * 2.0**-7)
    assert multiples.abs().max() <= 3 * bound * (1 + 1e-2)
    assert all(states["w"] == {} for states in ranks.states)
    # Of a fraction in fp16, what is too small for it is kept.
    assert all(states["b"].keys() <= ({"rounding"} if dtype == torch.float16 else set()) for states in ranks.states)
    for rank in range(3):
        levels = ranks.sent[rank]["w"]
        assert isinstance(levels, LevelPayload)
        assert (levels.levels.double() * scale / bound - own[rank].double()).abs().max() <= scale / bound * 1.001


def test_ranks_steps_and_tensors_draw_differently_and_again_the_same():
    weights = {name: torch.zeros(40, 40, dtype=F) for name in ("a", "b")}

    def sent():
        ranks = Ranks(TernGrad(clip=None), weights, world=2)
        out = []
        for _ in range(2):
            same = torch.linspace(-1, 1, 1600, dtype=F)
            ranks.step([{name: same.clone() for name in weights} for _ in range(2)])
            out += [ranks.sent[rank][name].levels for rank in range(2) for name in weights]
        return out

    first, again = sent(), sent()
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    for i, x in enumerate(first):
        for y in first[:i]:
            assert 0.2 < (x != y).double().mean() < 0.8


def test_clipping_at_some_sigma():
    values = torch.ones(1000, dtype=F)
    values[0] = 100.0
    ranks = Ranks(TernGrad(clip=2.5), {"w": torch.zeros(10, 100, dtype=F)}, world=1)
    average = ranks.step([{"w": values.clone()}])["w"]
    limit = 2.5 * math.sqrt((999 + 1e4) / 1000)
    assert average[0] == pytest.approx(limit, rel=1e-12)
    assert set(average.tolist()) <= {0.0, average[0].item()}


def test_a_tensor_of_equal_elements_is_not_clipped_away():
    ranks = Ranks(TernGrad(), {"w": torch.zeros(20, 20, dtype=F)}, world=2)
    average = ranks.step([{"w": torch.full((400,), 3.0, dtype=F)} for _ in range(2)])["w"]
    assert torch.equal(average, torch.full((400,), 3.0, dtype=F))


@pytest.mark.parametrize("make", [TernGrad, QSGD, lambda: QSGD(block=7)])
@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-30, 1e30])
def test_extreme_scales(make, value):
    ranks = Ranks(make(), {"w": torch.zeros(20, 20)}, world=2)
    average = ranks.step([{"w": torch.full((400,), value)} for _ in range(2)])["w"]
    assert average.isfinite().all()
    if value not in (0.0, 1e-44):
        torch.testing.assert_close(average, torch.full((400,), value), rtol=1e-6, atol=0)


def test_a_block_has_its_own_scale():
    small, large = torch.full((256,), 1e-6, dtype=F), torch.full((300,), 1e3, dtype=F)
    ranks = Ranks(QSGD(bits=4, block=256), {"w": torch.zeros(4, 139, dtype=F)}, world=2)
    average = ranks.step([{"w": torch.cat([small, large])} for _ in range(2)])["w"]
    torch.testing.assert_close(average, torch.cat([small, large]), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("make", "bits"),
    [(TernGrad, 2), (lambda: TernGrad(code="base3"), 1.6), (lambda: QSGD(bits=4), 4), (QSGD, 8)],
)
def test_bits_of_an_element(make, bits):
    ranks = Ranks(make(), {"w": torch.zeros(100, 100)}, world=2)
    ranks.step(random_grads(2, ranks.weights, 0, dtype=torch.float32))
    assert ranks.sent[0]["w"].wire_size() == 10_000 * bits / 8


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_gradients_in_half_precision_are_not_shrunk(dtype, scale):
    weights = {"w": torch.zeros(128, 128, dtype=dtype)}
    ranks = Ranks(QSGD(), weights, world=4, wire=Wire())
    true = (scale * torch.randn(128 * 128, generator=torch.Generator().manual_seed(0))).to(dtype)
    average = ranks.step([{"w": true.clone()} for _ in range(4)])["w"].double()
    slope = (average @ true.double()) / (true.double() @ true.double())
    assert slope == pytest.approx(1.0, abs=0.004)


@pytest.mark.parametrize("bound", [1, 7, 127])
def test_integers_stay_and_draws_do_not_leave_their_neighbours(bound):
    count = 2_000_000
    uniform = Uniform(Param("w", torch.zeros(1)), Step(0, 0.0, 0, 1))
    draws = uniform.draw(count)
    assert 0.0 < draws.min() < 1e-5
    assert 1 - 1e-5 < draws.max() < 1.0
    for value in (0.0, -0.0, 1.0, -1.0, float(bound), -float(bound), 1e-30, -1e-30):
        rounded = random_round(torch.full((count,), value), uniform, bound)
        assert torch.equal(rounded.abs(), torch.full((count,), abs(round(value)), dtype=torch.float32)), value
