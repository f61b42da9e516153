"""Half precision as a baseline."""

import pytest
import torch

from lightning_distlab.compression import Cast
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
    assert average[2] == 2 * 65504
