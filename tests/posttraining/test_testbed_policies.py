"""Policies over enumerable tasks: the whole enumeration against teacher forcing, torch's own GRU, finite differences and brute force."""

import itertools

import pytest
import torch

from cameraready.posttraining._testbed import EnumerableTask, GRUs, Tabular, exact, from_function, seed_generators

pytestmark = pytest.mark.torch


def ragged(prompts=3, features=4, seed=0):
    """Completions of several lengths, some with a tail without choice, rewards that are no 0 and 1."""
    g = torch.Generator().manual_seed(seed)
    rows = [
        [0, 1, 2, 9],
        [0, 1, 3, 9],
        [0, 2, 9],
        [1, 4, 5, 6, 9],
        [2, 9],
        [2, 1, 1, 1, 9],
        [2, 1, 2, 9],
        [0, 1, 2, 3, 9],
    ]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return EnumerableTask(
        "ragged",
        tokens,
        torch.tensor([len(row) for row in rows]),
        torch.rand(prompts, len(rows), generator=g) < 0.4,
        torch.randn(prompts, features, generator=g, dtype=torch.float64),
        reward=torch.rand(prompts, len(rows), generator=g, dtype=torch.float64),
        vocabulary=11,
    )


def allowed_by_brute_force(task):
    """(N, T, V): the tokens that some completion has after each completion's prefix."""
    rows = [tuple(t[:n].tolist()) for t, n in zip(task.tokens, task.lengths, strict=True)]
    allowed = torch.ones(len(rows), task.tokens.shape[1], task.vocabulary, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t in range(len(row)):
            allowed[i, t] = False
            allowed[i, t, [other[t] for other in rows if other[:t] == row[:t] and len(other) > t]] = True
    return allowed


def policies(task):
    gru = GRUs([3, 7], task.vocabulary + 2, task.features.shape[1], width=6, layers=2, dtype=torch.float64)
    tabular = Tabular(task, 2, dtype=torch.float64)
    with torch.no_grad():
        for p in tabular.parameters():
            p.normal_(generator=torch.Generator().manual_seed(1))
    return {"gru": gru, "tabular": tabular}


@pytest.fixture(params=["gru", "tabular"])
def policy_and_task(request):
    task = ragged()
    return policies(task)[request.param], task


def test_probabilities_of_all_completions_sum_to_one(policy_and_task):
    policy, task = policy_and_task
    log_p = policy.all_log_probs(task)
    assert log_p.shape == (2, 3, 8)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64), rtol=0, atol=1e-14)


def test_enumeration_is_teacher_forcing_restricted_to_the_task():
    task = ragged()
    policy = policies(task)["gru"]
    n = task.completions
    allowed = torch.cat([allowed_by_brute_force(task), torch.zeros(n, 5, 2, dtype=torch.bool)], -1)
    for prompt in range(task.prompts):
        forced = policy.log_probs(
            task.tokens.expand(2, -1, -1),
            task.features[prompt].expand(n, -1),
            task.mask.expand(2, -1, -1),
            allowed=allowed,
        )
        torch.testing.assert_close(policy.all_log_probs(task)[:, prompt], forced.sum(-1), rtol=0, atol=1e-12)
        index = torch.arange(n).expand(2, 1, n)
        tokens = policy.sample_log_probs(task, torch.tensor([prompt]), index)[:, 0]
        torch.testing.assert_close(tokens, forced, rtol=0, atol=1e-12)


def test_samples_log_probabilities_and_entropies_are_those_of_the_enumeration(policy_and_task):
    policy, task = policy_and_task
    g = torch.Generator().manual_seed(0)
    prompts = torch.tensor([[2, 0, 2], [1, 1, 0]])  # a prompt may come twice
    index = torch.randint(task.completions, (2, 3, 7), generator=g)
    logps, entropies = policy.sample_log_probs(task, prompts, index, entropy=True)
    every = policy.all_log_probs(task)
    expected = every[torch.arange(2)[:, None, None], prompts[..., None], index]
    torch.testing.assert_close(logps.sum(-1), expected, rtol=0, atol=1e-12)
    assert bool((logps[~task.mask[index]] == 0).all())
    assert bool((entropies >= -1e-15).all())


def test_sequence_entropy_is_the_expected_sum_of_token_entropies(policy_and_task):
    policy, task = policy_and_task
    everything = torch.arange(task.completions).expand(2, task.prompts, -1)
    _, entropies = policy.sample_log_probs(task, torch.arange(task.prompts), everything, entropy=True)
    log_p = policy.all_log_probs(task)
    chain = (log_p.exp() * entropies.sum(-1)).sum(-1)
    torch.testing.assert_close(exact.sequence_entropy(log_p), chain, rtol=0, atol=1e-12)
    lengths = task.lengths.to(torch.float64)
    torch.testing.assert_close(
        exact.token_entropy(log_p, task.lengths), chain / (log_p.exp() * lengths).sum(-1), rtol=0, atol=1e-12
    )


def test_exact_gradient_against_finite_differences(policy_and_task):
    policy, task = policy_and_task
    gradient = exact.expected_gradient(policy, task, chunk=2)

    def value():
        with torch.no_grad():
            return exact.mean_reward(policy.all_log_probs(task), task.reward).mean(-1)

    g = torch.Generator().manual_seed(5)
    for parameter, grad in zip(policy.parameters(), gradient, strict=True):
        direction = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        step = 1e-5
        with torch.no_grad():
            parameter += step * direction
            up = value()
            parameter -= 2 * step * direction
            down = value()
            parameter += step * direction
        torch.testing.assert_close((grad * direction).flatten(1).sum(1), (up - down) / (2 * step), rtol=1e-6, atol=1e-9)


def test_exact_gradient_is_the_expected_score_times_reward(policy_and_task):
    policy, task = policy_and_task
    total = [torch.zeros_like(p) for p in policy.parameters()]
    weight = policy.all_log_probs(task).detach().exp() * task.reward / task.prompts
    for prompt, completion in itertools.product(range(task.prompts), range(task.completions)):
        score = policy.sample_log_probs(task, torch.tensor([prompt]), torch.full((2, 1, 1), completion)).sum()
        if not score.requires_grad:
            continue
        for into, g in zip(total, torch.autograd.grad(score, policy.parameters(), allow_unused=True), strict=True):
            if g is not None:
                into += g * weight[:, prompt, completion].view(-1, *[1] * (g.dim() - 1))
    for expected, found in zip(total, exact.expected_gradient(policy, task), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)


def test_prompts_in_pieces_are_the_prompts_together(policy_and_task):
    policy, task = policy_and_task
    whole = exact.expected_gradient(policy, task, chunk=99)
    for a, b in zip(whole, exact.expected_gradient(policy, task, chunk=1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
    each = torch.stack([policy.all_log_probs(task, torch.tensor([p]))[:, 0] for p in range(3)], 1)
    torch.testing.assert_close(policy.all_log_probs(task), each, rtol=0, atol=1e-13)
    own = policy.all_log_probs(task, torch.tensor([[1, 0], [2, 2]]))
    torch.testing.assert_close(own, torch.stack([each[0, [1, 0]], each[1, [2, 2]]]), rtol=0, atol=1e-13)


def test_equations_are_those_of_torch_gru():
    """Both layers, initial states from features, per-step features, and the gradient of every parameter."""
    torch_gru = torch.nn.GRU(8, 8, 2, batch_first=True, dtype=torch.float64)
    ours = GRUs(1, 5, 3, width=8, layers=2, step_features=2, dtype=torch.float64)
    state = ours.state()
    names = {"input": "weight_ih", "input_bias": "bias_ih", "hidden": "weight_hh", "hidden_bias": "bias_hh"}
    with torch.no_grad():
        for layer, (mine, theirs) in itertools.product(range(2), names.items()):
            value = state[f"{layer}.{mine}"][0]
            getattr(torch_gru, f"{theirs}_l{layer}").copy_(value.T if value.dim() == 2 else value)
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(5, (1, 4, 6), generator=g)
    features = torch.randn(4, 3, generator=g, dtype=torch.float64)
    steps = torch.randn(1, 4, 6, 2, generator=g, dtype=torch.float64)
    shifted = torch.cat([torch.full((1, 4, 1), 5), tokens[..., :-1]], -1)
    leaves = {name: value[0].clone().requires_grad_() for name, value in state.items()}
    inputs = leaves["embedding"][shifted[0]] + steps[0] @ leaves["step.weight"]
    initial = torch.tanh(features @ leaves["initial.weight"] + leaves["initial.bias"]).view(4, 2, 8).transpose(0, 1)
    outputs, _ = torch_gru(inputs, initial.contiguous())
    logits = outputs @ leaves["head.weight"] + leaves["head.bias"]
    found = ours.logits(tokens, features, step_features=steps)
    torch.testing.assert_close(found[0], logits, rtol=0, atol=1e-12)
    weights = torch.randn(logits.shape, generator=g, dtype=torch.float64)
    gradients = dict(zip(state, torch.autograd.grad((found[0] * weights).sum(), ours.parameters()), strict=True))
    (logits * weights).sum().backward()
    for name in ("embedding", "step.weight", "initial.weight", "initial.bias", "head.weight", "head.bias"):
        torch.testing.assert_close(gradients[name][0], leaves[name].grad, rtol=1e-10, atol=1e-12)
    for layer, (mine, theirs) in itertools.product(range(2), names.items()):
        grad = getattr(torch_gru, f"{theirs}_l{layer}").grad
        torch.testing.assert_close(
            gradients[f"{layer}.{mine}"][0], grad.T if grad.dim() == 2 else grad, rtol=1e-10, atol=1e-12
        )


def test_step_by_step_is_teacher_forcing():
    policy = GRUs(3, 7, width=5, step_features=2)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (3, 4, 5), generator=g)
    steps = torch.randn(3, 4, 5, 2, generator=g)
    whole = policy.logits(tokens, step_features=steps)
    state, logits = policy.advance(policy.begin(4), None, steps[:, :, 0])
    for t in range(5):
        torch.testing.assert_close(logits, whole[:, :, t], rtol=0, atol=2e-6)
        if t < 4:
            state, logits = policy.advance(state, tokens[..., t], steps[:, :, t + 1])


def test_a_masked_token_is_read_but_not_scored():
    policy = GRUs(2, 7, width=5)
    tokens = torch.randint(7, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 3, 5, dtype=torch.bool)
    mask[..., :2] = False
    scored = policy.log_probs(tokens, mask=mask)
    assert bool((scored[..., :2] == 0).all())
    torch.testing.assert_close(scored[..., 2:], policy.log_probs(tokens)[..., 2:])
    other = tokens.clone()
    other[..., 0] = (other[..., 0] + 1) % 7
    assert not torch.allclose(policy.log_probs(other, mask=mask)[..., 2:], scored[..., 2:])


def test_a_network_does_not_depend_on_the_networks_beside_it():
    task = ragged()
    together, alone = (GRUs(seeds, task.vocabulary, 4, width=16) for seeds in ([5, 1, 9], [9]))
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a[2], b[0])
    torch.testing.assert_close(together.all_log_probs(task)[2], alone.all_log_probs(task)[0], rtol=0, atol=1e-6)


def test_state_copy_and_select_round_trip(policy_and_task):
    policy, task = policy_and_task
    before = policy.all_log_probs(task).detach()
    copy, swapped, state = policy.copy(), policy.select([1, 0, 0]), policy.state()
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(0.5)
    assert not torch.allclose(policy.all_log_probs(task), before)
    assert torch.equal(copy.all_log_probs(task), before)
    torch.testing.assert_close(swapped.all_log_probs(task), before[[1, 0, 0]], rtol=0, atol=1e-13)
    assert torch.equal(policy.load(state).all_log_probs(task), before)
    assert copy.parameters()[0].requires_grad


def test_a_table_starts_from_a_distribution_exactly():
    task = ragged()
    weights = torch.rand(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.01
    log_p = Tabular(task, 2, start=weights, dtype=torch.float64).all_log_probs(task)
    torch.testing.assert_close(log_p.exp()[0], weights / weights.sum(-1, keepdim=True), rtol=1e-12, atol=0)
    weights[:, 3:] = 0
    log_p = Tabular(task, 1, start=weights).all_log_probs(task)
    assert float(log_p.detach().exp()[..., 3:].max()) < 1e-15


def test_a_task_with_one_completion_has_nothing_to_choose():
    task = from_function("one", [[1, 0]], lambda prompt, row: True, ["a", "b"])
    for policy in (GRUs(2, 2, 2, width=4), Tabular(task, 2)):
        assert torch.equal(policy.all_log_probs(task), torch.zeros(2, 2, 1))
        assert torch.equal(
            policy.sample_log_probs(task, torch.arange(2), torch.zeros(2, 2, 3, dtype=torch.int64)),
            torch.zeros(2, 2, 3, 2),
        )


def test_every_completion_of_a_full_vocabulary_needs_no_mask():
    """With all V^T completions the restriction is void: the plain softmax."""
    task = from_function(
        "full",
        itertools.product(range(3), repeat=3),
        lambda prompt, row: sum(row) == prompt,
        [0, 1],
        features=torch.randn(2, 2, generator=torch.Generator().manual_seed(0)),
    )
    policy = GRUs(2, 3, 2, width=5)
    plain = policy.log_probs(task.tokens.expand(2, -1, -1), task.features[1].expand(27, -1)).sum(-1)
    torch.testing.assert_close(policy.all_log_probs(task)[:, 1], plain, rtol=0, atol=1e-5)


def test_generators_for_the_seeds():
    a, b = seed_generators([4, 4])
    assert torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))
    one = seed_generators(2, torch.Generator().manual_seed(0))
    again = seed_generators(2, torch.Generator().manual_seed(0))
    for x, y in zip(one, again, strict=True):
        assert torch.equal(torch.rand(3, generator=x), torch.rand(3, generator=y))
    with pytest.raises(ValueError, match="2 seeds need 2 generators"):
        seed_generators(2, one[:1])
    with pytest.raises(ValueError, match="at least one seed"):
        seed_generators(0)


def test_mistakes_are_named():
    task = ragged()
    policy = policies(task)["gru"]
    with pytest.raises(ValueError, match="the task uses 11 tokens, the networks know 4"):
        GRUs(1, 4, 4, width=4).all_log_probs(task)
    with pytest.raises(ValueError, match="prompts must be between 0 and 2"):
        policy.all_log_probs(task, torch.tensor([3]))
    with pytest.raises(ValueError, match="expect 4 features"):
        policy.log_probs(task.tokens.expand(2, -1, -1), task.features[:1, :2])
    with pytest.raises(ValueError, match="tokens must be between 0 and 12, got -1"):
        policy.log_probs(torch.full((2, 1, 2), -1), task.features[:1])
    with pytest.raises(ValueError, match="without features"):
        GRUs(1, 4, width=4).begin(2, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="made for another task"):
        Tabular(ragged(prompts=2), 2).all_log_probs(task)
    with pytest.raises(ValueError, match="index must have shape"):
        policy.sample_log_probs(task, torch.arange(3), torch.zeros(2, 2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="width must be at least 1"):
        GRUs(1, 4, width=0)
    with pytest.raises(ValueError, match="other parameters"):
        policy.load({})
