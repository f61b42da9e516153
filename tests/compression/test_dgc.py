"""Deep Gradient Compression: equal to SGD where nothing is lost, exact book-keeping where something is kept."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distlab.compression import DGC, Hyper, Param, Scratch, Step
from lightning_distlab.payloads import DensePayload, Reply, SparsePayload, Wire
from tests.compression.harness import EXACT, Ranks, copy_of, dense, random_grads, same_states, snapshot

WEIGHTS = {"conv": (7, 5, 3), "head": (13, 11), "head.bias": (13,)}
SGD_HYPERS = {
    "plain": Hyper(),
    "decay": Hyper(weight_decay=0.03),
    "heavy-ball": Hyper(momentum=0.9),
    "heavy-ball-decay": Hyper(momentum=0.9, weight_decay=0.03),
    "nesterov": Hyper(momentum=0.9, nesterov=True),
    "nesterov-decay": Hyper(momentum=0.9, nesterov=True, weight_decay=0.03),
}


def make_weights(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator, dtype=dtype) for n, shape in WEIGHTS.items()}


def gradient_of(weights, rank, t):
    """A gradient that depends on the weights, so that an error in one step shows in all later ones."""
    generator = torch.Generator().manual_seed(1000 * rank + t)
    return {
        n: 0.5 * w.flatten() + torch.randn(w.numel(), generator=generator, dtype=w.dtype) for n, w in weights.items()
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("hyper", "schedule"),
    [(hyper, "constant") for hyper in SGD_HYPERS.values()]
    + [(h, "cycling") for h in SGD_HYPERS.values() if h.momentum],
)
def test_everything_sent_without_masking_is_torch_sgd(world, hyper, schedule):
    dense_weights, weights = make_weights(), make_weights()
    parameters = {n: torch.nn.Parameter(w) for n, w in dense_weights.items()}
    settings_of = {"momentum": hyper.momentum, "nesterov": hyper.nesterov, "weight_decay": hyper.weight_decay}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, **settings_of)
    ranks = Ranks(DGC(density=1.0, momentum_masking=False), weights, world, replace(hyper))
    for t in range(20):
        if schedule == "cycling":
            momentum = 0.95 - 0.2 * abs(math.sin(t))
            optimizer.param_groups[0]["momentum"] = momentum
            for param in ranks.params.values():
                param.hyper.momentum = momentum
        grads = [gradient_of(dense_weights, rank, t) for rank in range(world)]
        for n, parameter in parameters.items():
            parameter.grad = sum(g[n] for g in grads).view_as(parameter) / world
        optimizer.step()
        averages = ranks.step([gradient_of(weights, rank, t) for rank in range(world)])
        for n, weight in weights.items():
            weight.sub_(0.1 * averages[n].view_as(weight))
    for n, parameter in parameters.items():
        torch.testing.assert_close(weights[n], parameter.data, rtol=1e-12, atol=1e-12)


def withheld(compressor, steps=10, momentum=0.9):
    """Element 0 has gradient 1 and is outbid by element 1 in all steps but the last; what arrives for it at last."""
    ranks = Ranks(compressor, {"w": torch.zeros(2, dtype=torch.float64)}, 2, Hyper(momentum=momentum))
    for t in range(steps):
        rival = 100.0 if t < steps - 1 else 0.0
        average = ranks.step([{"w": torch.tensor([1.0, rival], dtype=torch.float64)} for _ in range(2)])["w"]
        if t < steps - 1:
            assert average[0] == 0.0
    return float(average[0])


def test_an_entry_that_was_withheld_arrives_with_its_momentum():
    options = {"density": 0.5, "exclude_vectors": False, "min_numel": 0}
    assert withheld(DGC(**options)) == pytest.approx(41.38106, abs=5e-6)
    velocity = moved = 0.0
    for _ in range(10):
        velocity = 0.9 * velocity + 1.0
        moved += velocity
    assert withheld(DGC(**options)) == pytest.approx(moved, rel=1e-14)
    assert withheld(DGC(**options, momentum_correction=False)) == 10.0


@pytest.mark.parametrize("masking", [True, False])
def test_masking_clears_momentum_where_sent(masking):
    weights = make_weights()
    ranks = Ranks(DGC(density=0.05, momentum_masking=masking, min_numel=0), weights, 2, Hyper(momentum=0.9))
    for t in range(3):
        before = snapshot(ranks.states)
        grads = random_grads(2, weights, t)
        local = copy_of(grads)
        ranks.step(grads)
        for rank in range(2):
            for n in ("conv", "head"):
                expected = before[rank][n]["momentum"] * 0.9 + local[rank][n]
                if masking:
                    expected[ranks.sent[rank][n].indices] = 0.0
                assert torch.equal(ranks.states[rank][n]["momentum"], expected)


@pytest.mark.parametrize("how", ["density 1", "dense is cheaper"])
def test_masking_is_bypassed_where_everything_is_sent(how):
    weights = make_weights()
    cheaper = (lambda density: True) if how == "dense is cheaper" else (lambda density: density >= 1.0)
    compressor = DGC(density=1.0 if how == "density 1" else 0.01, min_numel=0)
    ranks = Ranks(compressor, weights, 2, Hyper(momentum=0.9), dense_is_cheaper=cheaper)
    ranks.step(random_grads(2, weights, 0))
    assert isinstance(ranks.sent[0]["head"], DensePayload)
    assert all(state["head"]["momentum"].count_nonzero() == 13 * 11 for state in ranks.states)
    assert all(state["head"]["velocity"].count_nonzero() == 0 for state in ranks.states)


def test_dense_when_cheaper_can_be_switched_off():
    weights = make_weights()
    compressor = DGC(density=0.01, min_numel=0, dense_when_cheaper=False)
    ranks = Ranks(compressor, weights, 2, dense_is_cheaper=lambda density: True)
    ranks.step(random_grads(2, weights, 0))
    assert isinstance(ranks.sent[0]["head"], SparsePayload)


def candidate_of(state, grad, hyper, scale):
    """Equations 4 and 5 of the paper, and Nesterov's form, on copies."""
    if hyper.momentum == 0:
        return state["velocity"].add(grad, alpha=scale)
    u = (state["momentum"] * hyper.momentum).add(grad, alpha=scale)
    step = (u * hyper.momentum).add(grad, alpha=scale) if hyper.nesterov else u
    return state["velocity"] + step


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 3000),
    density=st.sampled_from([0.001, 0.03, 0.5, 1.0]),
    wire=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
    hyper=st.sampled_from(list(SGD_HYPERS.values())),
    clip=st.sampled_from([None, 0.3]),
    magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 1e6]),
    seed=st.integers(0, 1 << 16),
)
def test_input_is_sent_plus_residual_bit_for_bit(numel, density, wire, hyper, clip, magnitude, seed):
    hyper = replace(hyper, weight_decay=0.0)
    compressor = DGC(density=density, exclude_vectors=False, min_numel=0, clip_norm=clip, clip_mode="tensor")
    weights = {"w": torch.zeros(numel)}
    ranks = Ranks(compressor, weights, 2, hyper, wire=Wire(value=wire, dense=wire))
    for t in range(3):
        grads = random_grads(2, weights, seed + t, dtype=torch.float32)
        for named in grads:
            named["w"].mul_(magnitude)
        before, local = snapshot(ranks.states), copy_of(grads)
        ranks.step(grads)
        for rank in range(2):
            norm = float(torch.linalg.vector_norm(local[rank]["w"]))
            scale = min(1.0, clip / math.sqrt(2) / norm) if clip and norm > 0 else 1.0
            candidate = candidate_of(before[rank]["w"], local[rank]["w"], hyper, scale)
            total = dense(ranks.sent[rank]["w"]) + ranks.states[rank]["w"]["velocity"]
            assert torch.equal(total, candidate)


@pytest.mark.parametrize("world", [2, 4])
def test_nothing_is_lost_over_many_steps(world):
    """Σ averages + mean residual = Σ mean gradients; small integers make it exact in floating point."""
    weights = {"w": torch.zeros(40, 10, dtype=torch.float64)}
    ranks = Ranks(DGC(density=0.02), weights, world)
    generator = torch.Generator().manual_seed(3)
    arrived, given_in = torch.zeros(400, dtype=torch.float64), torch.zeros(400, dtype=torch.float64)
    for _ in range(30):
        grads = [{"w": torch.randint(-9, 10, (400,), generator=generator).double()} for _ in range(world)]
        given_in += sum(g["w"] for g in grads) / world
        arrived += ranks.step(grads)["w"]
    kept = sum(state["w"]["velocity"] for state in ranks.states) / world
    assert kept.count_nonzero() > 300
    assert torch.equal(arrived + kept, given_in)


def test_an_abandoned_step_leaves_no_trace():
    weights = make_weights()
    options = {"density": 0.05, "min_numel": 0, "clip_norm": 1.0, "clip_mode": "previous"}
    ranks, untouched = (Ranks(DGC(**options), make_weights(), 2, SGD_HYPERS["nesterov-decay"]) for _ in range(2))
    for t in range(4):
        grads = random_grads(2, weights, t)
        twin = copy_of(grads)
        if t != 1:
            before, local = snapshot(ranks.states), copy_of(grads)
            ranks.abandon(grads)
            assert same_states([ranks.states[0]], [before[0]])
            assert all(torch.equal(grads[r][n], local[r][n]) for r in range(2) for n in weights)
        ranks.step(grads)
        untouched.step(twin)
        assert same_states(ranks.states, untouched.states)


def test_momentum_is_not_cleared_where_the_whole_value_came_back():
    compressor = DGC(density=0.5, exclude_vectors=False, min_numel=0)
    param = Param("w", torch.zeros(4), Hyper(momentum=0.9))
    state = compressor.init_state(param)
    grad = torch.tensor([4.0, 3.0, 0.5, 0.1])
    running = compressor.exchange(grad, state, param, Step(0, 0.0, 0, 2))
    sent = next(running).payload
    assert sent.indices.tolist() == [0, 1]
    lost = replace(sent, indices=sent.indices[1:], values=sent.values[1:])
    with pytest.raises(StopIteration):
        running.send(Reply(sent, lost))
    assert state["momentum"].tolist() == pytest.approx([0.0, 3.0, 0.5, 0.1])
    assert state["velocity"].tolist() == pytest.approx([0.0, 3.0, 0.5, 0.1])


def test_velocity_is_clipped_to_the_share_of_one_rank():
    weights = make_weights()
    norm_of = {
        "exact": lambda named, n: torch.linalg.vector_norm(torch.cat(list(named.values()))),
        "tensor": lambda named, n: torch.linalg.vector_norm(named[n]),
    }
    for mode, norm in norm_of.items():
        compressor = DGC(density=0.001, clip_norm=6.0, clip_mode=mode, min_numel=0)
        assert compressor.needs_whole_gradient == (mode == "exact")
        ranks = Ranks(compressor, weights, 4)
        grads = random_grads(4, weights, 5)
        local = copy_of(grads)
        average = ranks.step(grads)
        for n in ("conv", "head"):
            for rank in range(4):
                expected = local[rank][n] * min(1.0, 6.0 / 2 / float(norm(local[rank], n)))
                got = ranks.states[rank][n]["velocity"] + dense(ranks.sent[rank][n])
                torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)
        bias = sum(local[r]["head.bias"] * min(1.0, 3.0 / float(norm(local[r], "head.bias"))) for r in range(4)) / 4
        torch.testing.assert_close(average["head.bias"], bias, rtol=1e-14, atol=0)


def test_a_gradient_below_the_limit_is_not_touched():
    weights = make_weights()
    ranks = Ranks(DGC(density=0.001, clip_norm=1e6, min_numel=0), weights, 4)
    grads = random_grads(4, weights, 5)
    local = copy_of(grads)
    ranks.step(grads)
    total = ranks.states[2]["head"]["velocity"] + dense(ranks.sent[2]["head"])
    assert torch.equal(total, local[2]["head"])


def test_clipping_with_the_previous_norm_starts_at_the_second_step_and_survives_a_restart():
    weights = make_weights()
    options = {"density": 0.001, "clip_norm": 6.0, "clip_mode": "previous", "min_numel": 0}
    ranks, restarted = Ranks(DGC(**options), weights, 4), Ranks(DGC(**options), weights, 4)
    assert not ranks.compressor.needs_whole_gradient
    first, second = random_grads(4, weights, 5), random_grads(4, weights, 6)
    local = [copy_of(first), copy_of(second)]
    ranks.step(first)
    assert torch.equal(ranks.states[1]["head"]["velocity"] + dense(ranks.sent[1]["head"]), local[0][1]["head"])
    restarted.states = snapshot(ranks.states)
    again = copy_of(second)
    before = ranks.states[1]["head"]["velocity"].clone()
    ranks.step(second)
    norm = float(torch.linalg.vector_norm(torch.cat(list(local[0][1].values()))))
    expected = before + local[1][1]["head"] * (3.0 / norm)
    total = ranks.states[1]["head"]["velocity"] + dense(ranks.sent[1]["head"])
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-15)
    restarted.step(again)
    assert same_states(ranks.states, restarted.states)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_observing_a_gradient_that_is_not_finite_clips_nothing(bad):
    compressor = DGC(clip_norm=1.0)
    grads = {"a": torch.tensor([1.0, bad]), "b": torch.ones(3)}
    assert compressor.observe(grads, {}, Step(0, 0.0, 0, 4)) == 1.0


def test_excluded_tensors_have_dense_averages_with_the_same_momentum():
    weights = make_weights()
    ranks = Ranks(DGC(density=0.001, exclude=["conv"], min_numel=0), weights, 2, Hyper(momentum=0.5))
    totals = dict.fromkeys(("conv", "head.bias"), 0.0)
    for t in range(3):
        grads = random_grads(2, weights, t)
        local = copy_of(grads)
        averages = ranks.step(grads)
        for n in totals:
            totals[n] = 0.5 * totals[n] + (local[0][n] + local[1][n]) / 2
            torch.testing.assert_close(averages[n], totals[n], rtol=1e-13, atol=1e-14)
    assert set(ranks.states[0]["conv"]) == {"momentum"}


def test_the_error_of_a_half_precision_tail_is_kept():
    weights = {"bias": torch.zeros(50, dtype=torch.float64)}
    ranks = Ranks(DGC(), weights, 2, wire=Wire(value="fp16", dense="fp16"))
    assert ranks.states[0]["bias"] == {}
    arrived = given_in = torch.zeros(50, dtype=torch.float64)
    for t in range(10):
        grads = random_grads(2, weights, t)
        given_in = given_in + (grads[0]["bias"] + grads[1]["bias"]) / 2
        arrived = arrived + ranks.step(grads)["bias"]
    kept = (ranks.states[0]["bias"]["rounding"] + ranks.states[1]["bias"]["rounding"]) / 2
    assert 0 < kept.abs().max() < 0.01
    torch.testing.assert_close(arrived + kept, given_in, rtol=1e-13, atol=1e-13)


def test_the_error_of_the_tail_is_sent_once_when_the_wire_becomes_exact():
    weights = {"bias": torch.zeros(50, dtype=torch.float64)}
    ranks = Ranks(DGC(), weights, 2, wire=Wire(value="fp16", dense="fp16"))
    arrived = given_in = torch.zeros(50, dtype=torch.float64)
    for t in range(6):
        if t == 3:
            ranks.wire = EXACT
        grads = random_grads(2, weights, t)
        given_in = given_in + (grads[0]["bias"] + grads[1]["bias"]) / 2
        arrived = arrived + ranks.step(grads)["bias"]
    assert ranks.states[0]["bias"]["rounding"].count_nonzero() == 0
    torch.testing.assert_close(arrived, given_in, rtol=1e-13, atol=1e-13)


def test_memory_is_one_tensor_for_each_ingredient():
    param = Param("w", torch.zeros(20, 30))
    for hyper, keys in [
        (Hyper(), {"velocity"}),
        (Hyper(momentum=0.9), {"velocity", "momentum"}),
        (Hyper(momentum=0.9, weight_decay=1e-4), {"velocity", "momentum", "decay"}),
    ]:
        param.hyper = hyper
        state = DGC().init_state(param)
        assert set(state) == keys
        assert all(t.shape == (600,) and t.dtype == torch.float32 for t in state.values())
        assert set(DGC(momentum_correction=False).init_state(param)) == {"velocity"}
    half = DGC().init_state(Param("w", torch.zeros(20, 30, dtype=torch.bfloat16)))
    assert half["velocity"].dtype == torch.float32


def test_momentum_that_a_schedule_raises_from_zero_starts_then():
    weights = {"w": torch.zeros(20, 20, dtype=torch.float64)}
    ranks = Ranks(DGC(density=1.0), weights, 2)
    first = ranks.step(random_grads(2, weights, 0))["w"].clone()
    ranks.params["w"].hyper.momentum = 0.5
    second, third = (ranks.step(random_grads(2, weights, t))["w"].clone() for t in (1, 2))
    plain = [sum(g["w"] for g in random_grads(2, weights, t)) / 2 for t in range(3)]
    torch.testing.assert_close(first, plain[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(second, plain[1], rtol=1e-14, atol=0)
    torch.testing.assert_close(third, plain[2] + 0.5 * plain[1], rtol=1e-12, atol=1e-14)


def test_weight_decay_of_a_channels_last_weight_meets_its_own_gradient():
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    ranks = Ranks(DGC(density=1.0), {"w": weight}, 1, Hyper(weight_decay=0.5), wire=Wire())
    grad = torch.randn_like(weight)
    average = ranks.step([{"w": grad.as_strided((300,), (1,)).clone()}])["w"]
    torch.testing.assert_close(average.as_strided(weight.shape, weight.stride()), grad + 0.5 * weight)


def test_scratch_is_shared_by_all_tensors_of_a_bucket():
    """Compressors that wait at the same time must not depend on what the next one writes into the scratch."""
    compressor, scratch = DGC(density=0.1, min_numel=0), Scratch()
    params = [Param(n, torch.zeros(10, 10), Hyper(momentum=0.9)) for n in "ab"]
    grads = [torch.randn(100), torch.randn(100)]
    local = [g.clone() for g in grads]
    step = Step(0, 0.0, 0, 1, scratch=scratch)
    running = [compressor.exchange(g, compressor.init_state(p), p, step) for p, g in zip(params, grads, strict=True)]
    payloads = [next(r).payload for r in running]
    for r, payload, grad, g in zip(running, payloads, grads, local, strict=True):
        with pytest.raises(StopIteration):
            r.send(Reply(payload))
        assert torch.equal(grad[payload.indices], g[payload.indices])
        assert grad.count_nonzero() == 10


def test_description_states_the_rule_and_the_switches():
    params = {n: Param(n, w) for n, w in make_weights().items()}
    text = DGC(clip_norm=2.0, clip_mode="previous", warmup_epochs=4, exclude=["conv*", "typo"], min_numel=0).describe(
        params
    )
    for part in ("1 of 3 tensors", "dim <= 1", "'conv*'", "match no parameter: 'typo'", "previous at 2", "93.75 %"):
        assert part in text
