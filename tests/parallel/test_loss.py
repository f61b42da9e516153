import pytest
import torch
import torch.nn.functional as F

from lightning_distlab.parallel.loss import LossContract

ACCUMULATE = 3
# tokens per rank and micro-batch, far from even, with an empty one and an empty rank
COUNTS = {2: [[5, 1, 7], [0, 2, 11]], 4: [[3, 1, 1], [0, 0, 0], [9, 0, 4], [2, 2, 2]]}


def problem():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    return generator, weight


def micro_batches(counts, generator):
    """By rank and micro-batch: inputs (12, 6) and targets (12,), of which the first n count, the rest is padding."""
    batches = []
    for row in counts:
        batches.append([])
        for n in row:
            inputs = torch.randn(12, 6, dtype=torch.float64, generator=generator)
            targets = torch.randint(4, (12,), generator=generator)
            targets[n:] = -100
            batches[-1].append((inputs, targets))
    return batches


def rank_gradient(contract, weight, batches, output):
    """What a rank accumulates: Lightning divides every weighed loss by the accumulation factor."""
    weight = weight.clone().requires_grad_()
    for inputs, targets in batches:
        loss, tokens = contract.read(output(F.linear(inputs, weight), targets))
        (contract.weigh(loss, tokens) / contract.accumulate).backward()
    return weight.grad


def token_output(logits, targets):
    return {"loss": F.cross_entropy(logits, targets), "num_tokens": int((targets >= 0).sum())}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scale_first", [True, False])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_token_form_is_the_mean_over_the_union_batch(world, scale_first, as_tensor):
    generator, weight = problem()
    batches = micro_batches(COUNTS[world], generator)

    def output(logits, targets):
        made = token_output(logits, targets)
        return made | {"num_tokens": torch.tensor([made["num_tokens"]])} if as_tensor else made

    contracts = [LossContract(ACCUMULATE) for _ in range(world)]
    grads = [rank_gradient(c, weight, b, output) for c, b in zip(contracts, batches)]
    assert all(c.exchanges for c in contracts)
    summed = sum(c.summary() for c in contracts)
    factors = [c.close(summed, world) for c in contracts]
    if scale_first:
        got = sum(f * g for f, g in zip(factors, grads)) / world
    else:
        got = factors[0] * (sum(grads) / world)

    reference = weight.clone().requires_grad_()
    inputs, targets = (torch.cat([b[i] for row in batches for b in row]) for i in (0, 1))
    F.cross_entropy(F.linear(inputs, reference), targets).backward()
    torch.testing.assert_close(got, reference.grad, rtol=1e-12, atol=1e-14)


def test_scalar_form_is_the_mean_over_ranks_of_means_and_differs_from_the_token_form():
    generator, weight = problem()
    batches = micro_batches([[5, 1, 7], [3, 2, 11]], generator)
    contracts = [LossContract(ACCUMULATE) for _ in range(2)]
    grads = [rank_gradient(c, weight, b, F.cross_entropy) for c, b in zip(contracts, batches)]
    factors = [c.close(sum(c.summary() for c in contracts), 2) for c in contracts]
    assert factors == [1.0, 1.0]
    got = sum(grads) / 2

    reference = weight.clone().requires_grad_()
    losses = [torch.stack([F.cross_entropy(F.linear(x, reference), y) for x, y in row]).mean() for row in batches]
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(got, reference.grad, rtol=1e-12, atol=1e-14)

    union = weight.clone().requires_grad_()
    inputs, targets = (torch.cat([b[i] for row in batches for b in row]) for i in (0, 1))
    F.cross_entropy(F.linear(inputs, union), targets).backward()
    assert (union.grad - got).abs().max() > 1e-3


def test_a_micro_batch_without_tokens_contributes_zero_although_its_mean_is_nan():
    generator, weight = problem()
    (((inputs, targets),),) = micro_batches([[0]], generator)
    assert token_output(F.linear(inputs, weight), targets)["loss"].isnan()
    contract = LossContract()
    gradient = rank_gradient(contract, weight, [(inputs, targets)], token_output)
    assert torch.equal(gradient, torch.zeros_like(weight))
    loss, tokens = contract.read({"loss": torch.tensor(torch.nan), "num_tokens": 0})
    assert contract.weigh(loss, tokens).item() == 0


def test_steps_do_not_leak_into_each_other_and_scalars_stop_exchanging():
    tokens, scalar = LossContract(2), LossContract(2)
    for step in range(3):
        for n in (3, 4):
            tokens.weigh(*tokens.read({"loss": torch.tensor(1.0), "num_tokens": n + step}))
            scalar.weigh(*scalar.read(torch.tensor(1.0)))
        assert tokens.exchanges
        assert scalar.exchanges == (step == 0)
        assert tokens.summary().tolist() == [7 + 2 * step, 1]
        assert tokens.close(tokens.summary(), 1) == 1 / (7 + 2 * step)
        assert scalar.close(scalar.summary() if scalar.exchanges else None, 1) == 1.0


def test_weight_follows_an_accumulation_schedule():
    contract = LossContract(2)
    assert (contract.weight(5), contract.weight(None)) == (10, 1)
    contract.accumulate = 4
    assert contract.weight(5) == 20


def test_mixing_within_a_rank_and_across_ranks_names_the_rule():
    contract = LossContract()
    contract.read(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"returned a tokens loss after a scalar loss.*mean over all tokens"):
        contract.read({"loss": torch.tensor(1.0), "num_tokens": 3})

    ranks = [LossContract(), LossContract(), LossContract()]
    for i, rank in enumerate(ranks):
        rank.weigh(*rank.read({"loss": torch.tensor(1.0), "num_tokens": 3} if i else torch.tensor(1.0)))
    summed = sum(rank.summary() for rank in ranks)
    for rank in ranks:
        with pytest.raises(ValueError, match=r"2 of 3 ranks return num_tokens.*mean over ranks of means"):
            rank.close(summed, 3)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (None, "not None"),
        ({"lossy": torch.tensor(1.0)}, "'lossy'"),
        (torch.ones(2), r"shape \(2,\)"),
        ({"loss": torch.tensor(1.0), "num_tokens": -1}, "num_tokens=-1"),
        ({"loss": torch.tensor(1.0), "num_tokens": 2.5}, "num_tokens=2.5"),
        ({"loss": torch.tensor(1.0), "num_tokens": True}, "num_tokens=True"),
        ({"loss": torch.tensor(1.0), "num_tokens": torch.tensor(-2)}, "num_tokens=tensor"),
        ({"loss": torch.tensor(1.0), "num_tokens": torch.tensor(1.5)}, "num_tokens=tensor"),
    ],
)
def test_bad_outputs_are_refused(output, text):
    with pytest.raises(ValueError, match=text):
        LossContract().read(output)


def test_a_step_without_any_token_and_a_bad_factor_are_refused():
    contract = LossContract()
    contract.weigh(*contract.read({"loss": torch.tensor(1.0), "num_tokens": 0}))
    with pytest.raises(ValueError, match="no rank of 4 has a token"):
        contract.close(contract.summary() * 4, 4)
    with pytest.raises(ValueError, match="accumulate=0"):
        LossContract(0)
