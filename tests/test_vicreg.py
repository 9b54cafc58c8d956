"""Guards every loss from VICReg to SimCLR, against float64 loops, closed forms, invariances; the duality."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import ImageColor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
import vicreg_variants
from helpers import assert_finite, refused, run_here, variant_loss, views
from vicreg_variants import (
    barlow_loss, contrastive_criterion, covariance_term, logsumexp_term, noncontrastive_criterion,
    simclr_loss, spectral_loss, tcr_loss, vicreg_ctr_loss, vicreg_exp_loss, vicreg_loss)

SIZES = [(8, 3), (5, 9)]  # (N, D)


def slow_v(K):
    n, d = K.shape
    total = 0.0
    for j in range(d):
        mean = sum(K[:, j]) / n
        var = sum((x - mean) ** 2 for x in K[:, j]) / (n - 1)
        total += max(0.0, 1 - math.sqrt(var + 1e-4))
    return total / d


def slow_C(K):
    n, d = K.shape
    mean = [sum(K[:, j]) / n for j in range(d)]
    return [[sum((K[i, a] - mean[a]) * (K[i, b] - mean[b]) for i in range(n)) / (n - 1) for b in range(d)]
            for a in range(d)]


def slow_c(K):
    C = slow_C(K)
    return sum(C[i][j] ** 2 for i in range(len(C)) for j in range(len(C)) if i != j) / len(C)


def slow_c_exp(K, tau):
    C = slow_C(K)
    rows = [math.log(sum(math.exp(C[i][j] / tau) for j in range(len(C)) if j != i)) for i in range(len(C))]
    return sum(rows) / len(C)


def slow_vicreg(z1, z2, tau, kind):
    z1, z2 = z1.numpy(), z2.numpy()
    sim = sum((a - b) ** 2 for a, b in zip(z1.flat, z2.flat)) / z1.size
    K1, K2 = ((z - z.mean(0)).T for z in (z1, z2)) if kind == "ctr" else (z1, z2)
    cov = slow_c(K1) + slow_c(K2) if kind == "vicreg" else slow_c_exp(K1, tau) + slow_c_exp(K2, tau)
    return sim, (slow_v(K1) + slow_v(K2)) / 2, cov


@pytest.mark.parametrize("n, d", SIZES)
@pytest.mark.parametrize("kind", ["vicreg", "exp", "ctr"])
@pytest.mark.parametrize("weights", [(25.0, 25.0, 1.0), (1.0, 2.0, 3.0)])
def test_vicreg_and_its_variants_equal_the_loop(n, d, kind, weights):
    z1, z2 = (z.requires_grad_() for z in views(n, d))
    if kind == "vicreg":
        loss, terms = vicreg_loss(z1, z2, *weights)
    else:
        loss, terms = (vicreg_exp_loss if kind == "exp" else vicreg_ctr_loss)(z1, z2, *weights, tau=0.3)
    slow = slow_vicreg(z1.detach(), z2.detach(), 0.3, kind)
    assert [terms[k].item() for k in ("sim", "var", "cov")] == pytest.approx(slow, rel=1e-10)
    assert loss.item() == pytest.approx(sum(w * t for w, t in zip(weights, slow)), rel=1e-10)
    assert slow[1] > 0.01 and not any(t.requires_grad for t in terms.values())


def slow_simclr(z1, z2, tau, repulsion, decoupled, normalize):
    z, n = torch.cat([z1, z2]).numpy(), len(z1)
    if normalize != "embeddings":
        z = z - z.mean(0)
    if normalize == "standardize":
        u = z / np.linalg.norm(z, axis=0) * math.sqrt(2 * n / z.shape[1])
    else:
        u = z / np.linalg.norm(z, axis=1, keepdims=True)
    r = {"cos": lambda x: x, "sq": lambda x: x * x, "abs": abs}[repulsion]
    total = 0.0
    for i in range(2 * n):
        positive = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j != i and not (decoupled and j == positive)]
        total -= u[i] @ u[positive] / tau
        total += math.log(sum(math.exp(r(u[i] @ u[j]) / tau) for j in others))
    return total / (2 * n)


@pytest.mark.parametrize("n, d", SIZES)
@pytest.mark.parametrize("repulsion", ["cos", "sq", "abs"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("normalize", ["embeddings", "center", "standardize"])
def test_simclr_and_its_variants_equal_the_loop(n, d, repulsion, decoupled, normalize):
    z1, z2 = views(n, d)
    options = (0.3, repulsion, decoupled, normalize)
    assert simclr_loss(z1, z2, *options).item() == pytest.approx(slow_simclr(z1, z2, *options), rel=1e-10)


@pytest.mark.parametrize("n, d", SIZES)
def test_spectral_barlow_and_tcr_equal_the_loop(n, d):
    z1, z2 = views(n, d)
    a, b = (z.numpy() for z in (z1, z2))
    u1, u2 = (math.sqrt(1.5) * z / np.linalg.norm(z, axis=1, keepdims=True) for z in (a, b))
    slow = -2 * sum(u1[i] @ u2[i] for i in range(n)) / n
    slow += sum((u1[i] @ u2[j]) ** 2 for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    assert spectral_loss(z1, z2, radius=1.5).item() == pytest.approx(slow, rel=1e-10)

    norm = torch.nn.BatchNorm1d(d, affine=False, dtype=torch.float64)
    C = (norm(z1).T @ norm(z2) / n).numpy()
    slow = sum((1 - C[i, i]) ** 2 for i in range(d))
    slow += 0.02 * sum(C[i, j] ** 2 for i in range(d) for j in range(d) if i != j)
    assert barlow_loss(z1, z2, lambd=0.02).item() == pytest.approx(slow, rel=1e-10)

    u1, u2 = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (a, b))
    rate = (
        sum(np.log(np.linalg.eigvalsh(np.eye(d) + d / (n * 0.4) * u.T @ u)).sum() / 2 for u in (u1, u2)) / 2)
    slow = 2.0 * sum(1 - u1[i] @ u2[i] for i in range(n)) / n - rate
    assert tcr_loss(z1, z2, eps=0.4, sim_weight=2.0).item() == pytest.approx(slow, rel=1e-10)


def test_closed_forms():
    eye, ones = torch.eye(8), torch.ones(8, 4)
    assert simclr_loss(ones, ones).item() == pytest.approx(math.log(15), abs=1e-5)
    assert simclr_loss(eye, eye, tau=0.5).item() == pytest.approx(1.06288, abs=1e-5)
    assert spectral_loss(eye, eye).item() == pytest.approx(-2, abs=1e-6)
    assert spectral_loss(ones, ones).item() == pytest.approx(-1, abs=1e-6)
    assert spectral_loss(eye, eye, radius=4.0).item() == pytest.approx(-8, abs=1e-5)
    assert vicreg_loss(torch.zeros(8, 4), torch.zeros(8, 4))[0].item() == pytest.approx(24.75, abs=1e-4)
    assert -tcr_loss(eye, eye).item() == pytest.approx(4.39445, abs=1e-4)
    assert -tcr_loss(ones.repeat(1, 2), ones.repeat(1, 2)).item() == pytest.approx(1.41661, abs=1e-4)
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert barlow_loss(z, z, lambd=0.0).item() == pytest.approx(0, abs=1e-6)  # a diagonal of ones at N = 4
    assert barlow_loss(z, z).item() == pytest.approx(barlow_loss(z, 2 * z + 4).item(), abs=1e-4)
    # embeddings equal: c_exp of covariance 0 is ln(D - 1), or ln(N - 1) of the transposed
    assert vicreg_exp_loss(ones, ones)[1]["cov"].item() == pytest.approx(2 * math.log(3), abs=1e-5)
    assert vicreg_ctr_loss(ones, ones)[1]["cov"].item() == pytest.approx(2 * math.log(7), abs=1e-5)


def test_vicreg_of_the_released_code():
    """As facebookresearch/vicreg computes it, by its description: std by var + eps, hinge halved, the
    off-diagonal sum over D."""
    z1, z2 = views(32, 6)
    std = [torch.sqrt(z.var(dim=0) + 0.0001) for z in (z1, z2)]
    hinge = sum(torch.mean(F.relu(1 - s)) / 2 for s in std)
    covariances = [torch.cov(z.T) for z in (z1, z2)]
    off = sum((C - C.diag().diag()).pow(2).sum() / 6 for C in covariances)
    expected = 25 * F.mse_loss(z1, z2) + 25 * hinge + off
    torch.testing.assert_close(vicreg_loss(z1, z2)[0], expected, rtol=1e-12, atol=0)


def test_simclr_is_cross_entropy():
    z1, z2 = views(6, 4)
    u = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = (u @ u.T / 0.15).masked_fill(torch.eye(12, dtype=torch.bool), -math.inf)
    expected = F.cross_entropy(logits, torch.arange(12).roll(6))
    torch.testing.assert_close(simclr_loss(z1, z2), expected, rtol=1e-12, atol=0)


SIMCLR = {  # repulsion, decoupled
    "simclr": ("cos", False),
    "simclr-sq": ("sq", False),
    "simclr-abs": ("abs", False),
    "dcl": ("cos", True),
    "dcl-sq": ("sq", True),
    "dcl-abs": ("abs", True),
}


@pytest.mark.parametrize("name", SIMCLR)
@pytest.mark.parametrize("normalize", ["embeddings", "center", "standardize"])
def test_methods_of_simclr(name, normalize):
    z1, z2 = views(9, 6)
    found, _ = variant_loss(z1, z2, name, "--tau", "0.4", "--normalize", normalize)
    assert found.item() == pytest.approx(slow_simclr(z1, z2, 0.4, *SIMCLR[name], normalize), rel=1e-10)


def test_defaults():
    """METHODS' defaults, of the functions, and ours of the command line, which are the same but for tau
    and the weights of -exp and -ctr, and the weight of tcr."""
    z1, z2 = views(9, 6)
    slow = slow_vicreg(z1, z2, 0.1, "exp")
    expected = 25 * slow[0] + 25 * slow[1] + slow[2]
    assert vicreg_exp_loss(z1, z2)[0].item() == pytest.approx(expected, rel=1e-10)
    cov = slow_vicreg(z1, z2, 0.05, "exp")[2]
    assert value("vicreg-exp", z1, z2).item() == pytest.approx(expected - slow[2] + 25 * cov, rel=1e-10)
    slow = slow_vicreg(z1, z2, 0.1, "ctr")
    expected = 25 * slow[0] + 25 * slow[1] + slow[2]
    assert vicreg_ctr_loss(z1, z2)[0].item() == pytest.approx(expected, rel=1e-10)
    cov = slow_vicreg(z1, z2, 0.05, "ctr")[2]
    assert value("vicreg-ctr", z1, z2).item() == pytest.approx(expected - slow[2] + 25 * cov, rel=1e-10)
    slow = slow_vicreg(z1, z2, 0.1, "vicreg")
    assert value("vicreg", z1, z2).item() == pytest.approx(25 * slow[0] + 25 * slow[1] + slow[2], rel=1e-10)
    assert value("barlow", z1, z2).item() == barlow_loss(z1, z2, lambd=0.0051).item()
    assert tcr_loss(z1, z2).item() == tcr_loss(z1, z2, eps=0.5, sim_weight=1.0).item()
    assert value("tcr", z1, z2).item() == tcr_loss(z1, z2, sim_weight=50.0).item()
    assert value("spectral", z1, z2).item() == spectral_loss(z1, z2, radius=1.0).item()
    for method in SIMCLR:
        assert vicreg_variants.parse_args(["--method", method]).tau == 0.15


@pytest.mark.parametrize("method, lr, batch",
                         [("simclr", 0.5, 2048), ("vicreg", 0.3, 1024), ("dcl", 0.3, 1024)])
def test_imagenet_recipe_is_the_papers(method, lr, batch):
    args = vicreg_variants.parse_args(["--dataset", "imagenet", "--method", method])
    assert (args.base_lr, args.batch_size, args.epochs, args.warmup_epochs) == (lr, batch, 100, 10)
    assert (args.arch, args.projector, args.weight_decay) == ("resnet50", "8192-8192-8192", 1e-6)
    assert vicreg_variants.parse_args(["--dataset", "cifar10", "--method", method]).base_lr == 0.3


def value(name, z1, z2):
    loss, _ = variant_loss(z1, z2, name)
    return loss


NOT_ROTATION_INVARIANT = ("vicreg", "vicreg-exp", "vicreg-ctr", "barlow")  # -ctr: by the mean over them


@pytest.mark.parametrize("name", vicreg_variants.METHODS)
def test_invariances(name):
    """Permuting samples, or swapping the views, changes no loss; rotating the features changes those that
    look at single dimensions; a common shift only those that do not centre."""
    z1, z2 = views(9, 6)
    plain = value(name, z1, z2)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    sign = torch.tensor([1.0, -1, 1, 1, 1, 1], dtype=torch.float64)

    def same(other):
        return torch.isclose(other, plain, rtol=1e-9, atol=1e-9).item()

    assert same(value(name, z1[order], z2[order]))
    assert not same(value(name, z1, z2[order]))
    assert same(value(name, z1 @ rotation, z2 @ rotation)) == (name not in NOT_ROTATION_INVARIANT)
    assert same(value(name, z1 * sign, z2 * sign)) == (name not in ("vicreg-exp", "vicreg-ctr"))
    assert same(value(name, z1 + 3, z2 + 3)) == name.startswith(("vicreg", "barlow"))
    assert same(value(name, z2, z1))


@pytest.mark.parametrize("name", vicreg_variants.METHODS)
def test_gradients(name):
    z1, z2 = (z.requires_grad_() for z in views(6, 4, seed=3))
    assert torch.autograd.gradcheck(lambda a, b: value(name, a, b), (z1, z2))


@pytest.mark.parametrize("name", vicreg_variants.METHODS)
@pytest.mark.parametrize(
    "z", [torch.ones(8, 4), torch.zeros(8, 4), torch.eye(8), torch.randn(4, 16), 100 * torch.randn(16, 4)])
def test_degenerate_input_is_finite(name, z):
    assert_finite(lambda a, b: value(name, a, b), z)


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01, 0.005])
def test_low_temperature(tau):
    z1, z2 = (z.float().requires_grad_() for z in views(16, 8))
    for loss in (simclr_loss(z1, z2, tau), vicreg_exp_loss(z1, z2, tau=tau)[0],
                 vicreg_ctr_loss(z1, z2, tau=tau)[0]):
        loss.backward()
        assert loss.isfinite() and z1.grad.isfinite().all()
    if tau <= 0.1:
        assert simclr_loss(torch.eye(8), torch.eye(8), tau).item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("n, d, tau", [(12, 5, 0.5), (6, 9, 0.1)])
def test_logsumexp_of_small_covariances_is_a_weak_covariance_term(n, d, tau):
    """log(d - 1) + their mean / tau + their variance / 2 tau^2, of each row: the square of the covariances
    weighs 1 / (2 tau^2 (d - 1)) of what it weighs in VICReg."""
    K = 0.02 * torch.randn(n, d, dtype=torch.float64)
    C = torch.from_numpy(np.cov(K.numpy(), rowvar=False))
    mean = (C.sum(1) - C.diagonal()) / (d - 1)
    first = math.log(d - 1) + mean.mean() / tau
    second = covariance_term(K) / (2 * tau**2 * (d - 1)) - mean.square().mean() / (2 * tau**2)
    remainder = logsumexp_term(K, tau) - first - second
    assert abs(remainder) < 0.05 * abs(second)
    assert abs(remainder + second) > 0.9 * abs(second)


@pytest.mark.parametrize("tau", [0.1, 0.5])
@pytest.mark.parametrize("d", [128, 2048])
def test_collapse_to_one_dimension_costs_log_cosh(d, tau):
    """A dimension of variance 1, copied to all with either sign: c_exp is log(cosh(1 / tau)) above that of no
    correlation, whatever d, while c is d - 1."""
    x = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) * math.sqrt(3 / 4)
    K = x[:, None] * torch.tensor([1.0, -1.0]).repeat(d // 2)
    excess = logsumexp_term(K, tau).item() - math.log(d - 1)
    assert excess == pytest.approx(math.log(math.cosh(1 / tau)), abs=1.1 / (d - 1))
    assert covariance_term(K).item() == pytest.approx(d - 1)


@pytest.mark.parametrize("name", vicreg_variants.METHODS)
def test_losses_survive_compilation_and_functional_gradients(name):
    """What a loss does in place, PyTorch's compiler and torch.func see, for those who copy it out."""
    args = vicreg_variants.parse_args(["--method", name])
    z1, z2 = views(9, 5)
    x = z1.clone().requires_grad_()
    vicreg_variants.METHODS[name](x, z2, args)[0].backward()
    torch._dynamo.reset()
    y = z1.clone().requires_grad_()
    torch.compile(lambda a, b: vicreg_variants.METHODS[name](a, b, args)[0], backend="aot_eager")(
        y, z2).backward()
    found = torch.func.grad(lambda a: vicreg_variants.METHODS[name](a, z2, args)[0])(z1)
    for gradient in (y.grad, found):
        torch.testing.assert_close(gradient, x.grad, rtol=1e-9, atol=1e-12)


class Allocations(TorchDispatchMode):
    """Counts the tensors of `numel` numbers or more that operations make: no views, no in-place results."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [[t for t in tree_leaves(v) if torch.is_tensor(t)] for v in (args, out)]
        old, new = (
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in ts} for ts in tensors)
        self.count += sum(size >= 4 * self.numel for storage, size in new.items() if storage not in old)
        return out


@pytest.mark.parametrize(
    "name, n, d, matrices",
    [("vicreg-exp", 4, 64, 2), ("vicreg-ctr", 64, 4, 2), ("simclr", 64, 4, 1), ("dcl", 64, 4, 1)])
def test_logsumexp_keeps_the_matrix_and_nothing_of_its_size(name, n, d, matrices):
    """The product makes each of the matrices, the backward pass its gradient, and that is all."""
    args = vicreg_variants.parse_args(["--method", name])
    z1, z2 = (torch.randn(n, d, requires_grad=True) for _ in "12")
    side = (2 if matrices == 1 else 1) * max(n, d)
    with Allocations(side * side) as made:
        loss = vicreg_variants.METHODS[name](z1, z2, args)[0]
        forward = made.count
        loss.backward()
    assert (forward, made.count - forward) == (matrices, matrices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, 0.1, 100.3])
def test_a_constant_dimension_stays_0_when_standardised(dtype, constant):
    """As if it were not there, but that the others get the norm sqrt(2N / D) of one dimension more."""
    z1, z2 = (z.to(dtype).requires_grad_() for z in views(16, 7))
    column = torch.full((16, 1), constant, dtype=dtype)
    wide = [torch.cat([z, column], 1) for z in (z1, z2)]
    for repulsion, decoupled in (("cos", False), ("abs", True)):
        found = simclr_loss(*wide, 0.3, repulsion, decoupled, "standardize")
        expected = simclr_loss(z1, z2, 0.3 * 8 / 7, repulsion, decoupled, "standardize")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        gradients = torch.autograd.grad(found, (z1, z2)), torch.autograd.grad(expected, (z1, z2))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", vicreg_variants.METHODS)
def test_half_precision_is_computed_in_float32(name):
    z1, z2 = (z.bfloat16() for z in views(32, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = value(name, z1, z2)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, value(name, z1.float(), z2.float()), rtol=2e-5, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        criteria = contrastive_criterion(z1), noncontrastive_criterion(z1)
    assert criteria[0].item() == pytest.approx(contrastive_criterion(z1.double()).item(), rel=1e-5)
    assert criteria[1].item() == pytest.approx(noncontrastive_criterion(z1.double()).item(), rel=1e-5)


def test_one_sample_is_refused():
    z = torch.randn(1, 4)
    for loss in (vicreg_loss, vicreg_exp_loss):
        with pytest.raises(ValueError, match="2 samples"):
            loss(z, z)
    for name, z in (("vicreg-ctr", torch.randn(1, 4)), ("vicreg-exp", torch.randn(4, 1)), ("dcl", z),
                    ("spectral", z)):
        with pytest.raises(ValueError):
            value(name, z, z)
    with pytest.raises(ValueError):
        simclr_loss(torch.ones(4, 2), torch.ones(4, 2), repulsion="cube")
    assert tcr_loss(torch.randn(1, 4), torch.randn(1, 4)).isfinite()


@pytest.mark.parametrize("n, d", [(12, 5), (5, 12), (7, 7)])
def test_duality(n, d):
    """Theorem 3.3, and both sides of Corollary 3.4.1 for unit samples."""
    z = views(n, d)[0]
    slow = sum((z[i] @ z[j]).item() ** 2 for i in range(n) for j in range(n) if i != j)
    assert contrastive_criterion(z).item() == pytest.approx(slow, rel=1e-10)
    slow = sum((z[:, i] @ z[:, j]).item() ** 2 for i in range(d) for j in range(d) if i != j)
    assert noncontrastive_criterion(z).item() == pytest.approx(slow, rel=1e-10)
    left = noncontrastive_criterion(z) + z.norm(dim=0).pow(4).sum()
    torch.testing.assert_close(left, contrastive_criterion(z) + z.norm(dim=1).pow(4).sum(), rtol=1e-12,
                               atol=0)
    u = F.normalize(z, dim=1)
    gap = (noncontrastive_criterion(u) - contrastive_criterion(u)).item()
    assert n - n**2 - 1e-9 <= gap <= n - n**2 / d + 1e-9
    one = torch.zeros(n, d, dtype=torch.float64)
    one[:, 0] = 1  # all of the weight in one dimension: the lower side is reached
    assert (noncontrastive_criterion(one) - contrastive_criterion(one)).item() == pytest.approx(n - n**2)


@pytest.mark.parametrize("n, d", [(8, 4), (4, 8), (6, 3)])
def test_duality_of_doubly_normalised_embeddings(n, d):
    """Unit rows and columns of norm sqrt(N / D): the upper side is reached."""
    z = views(n, d)[0].abs()
    for _ in range(2000):
        z = F.normalize(F.normalize(z, dim=0) * math.sqrt(n / d), dim=1)
    torch.testing.assert_close(z.norm(dim=0), torch.full((d,), math.sqrt(n / d), dtype=torch.float64))
    gap = (noncontrastive_criterion(z) - contrastive_criterion(z)).item()
    assert gap == pytest.approx(n - n**2 / d, rel=1e-9)


@pytest.mark.parametrize("flags",
                         [["--method", "simsiam"], ["--tau", "0"], ["--normalize", "rows"], ["--tau", "nan"]])
def test_errors(capsys, flags):
    refused(capsys, vicreg_variants.parse_args, flags, status=2)


def test_measures():
    z, h = torch.randn(64, 8), torch.randn(64, 16)
    found = vicreg_variants.measures(z, h)
    assert found["rankme_embeddings"] <= 8 < found["rankme"] <= 16
    u = F.normalize(z, dim=1)
    assert found["Lnc"] + u.norm(dim=0).pow(4).sum().item() == pytest.approx(found["Lc"] + 64, rel=1e-4)
    slow = sum(sum(u[i, j].item() ** 2 for i in range(64)) ** 2 for j in range(8)) / (64**2 / 8)
    assert found["column_norms"] == pytest.approx(slow, rel=1e-5) and slow > 1
    assert found["column_norms"] == pytest.approx((64 + found["Lc"] - found["Lnc"]) * 8 / 64**2, rel=1e-3)
    corners = torch.tensor([[a, b] for a in (1.0, -1) for b in (1, -1)])  # both dimensions alike
    assert vicreg_variants.measures(corners, h)["column_norms"] == pytest.approx(1)


STATED = [  # methods, data set, flag, value, where the paper states it
    ("all", "imagenet", "arch", "resnet50", "set-up"), ("all", "imagenet", "epochs", 100, "set-up"),
    ("all", "imagenet", "warmup_epochs", 10, "set-up"), ("all", "imagenet", "weight_decay", 1e-6, "set-up"),
    ("all", "imagenet", "projector", "8192-8192-8192", "App. I"),
    ("all", "imagenet", "augment", "byol", "Table S1"),
    ("vicreg vicreg-exp vicreg-ctr", "imagenet", "base_lr", 0.3, "set-up"),
    ("vicreg vicreg-exp vicreg-ctr", "imagenet", "batch_size", 1024, "set-up"),
    ("simclr simclr-sq simclr-abs", "imagenet", "base_lr", 0.5, "App. G"),
    ("simclr simclr-sq simclr-abs", "imagenet", "batch_size", 2048, "App. G"),
    ("simclr simclr-sq simclr-abs", "imagenet", "tau", 0.15, "App. G"),
    ("vicreg", "imagenet", "sim_weight", 25, "VICReg"), ("vicreg", "imagenet", "var_weight", 25, "VICReg"),
    ("vicreg", "imagenet", "cov_weight", 1, "VICReg"),
    ("barlow", "imagenet", "lambd", 0.0051, "Barlow Twins")]


@pytest.mark.parametrize("methods, dataset, flag, value, where", STATED)
def test_recipes_are_the_papers(methods, dataset, flag, value, where):
    for method in vicreg_variants.METHODS if methods == "all" else methods.split():
        args = vars(vicreg_variants.parse_args(["--dataset", dataset, "--method", method]))
        assert args[flag] == value, (method, where)
    assert vicreg_variants.parse_args(["--dataset", dataset, f"--{flag.replace('_', '-')}", str(value)])


def test_byols_pair_of_augmentations_is_table_s1():
    """crop scale, jitter and its p, grey; blur and solarize of the first view and of the second."""
    views = [common.Augment(224, **view) for view in vicreg_variants.AUGMENTS["byol"]]
    for view, blur, solarize in zip(views, (1.0, 0.1), (0.0, 0.2), strict=True):
        assert (view.crop_scale, view.jitter, view.jitter_p) == ((0.08, 1.0), (0.4, 0.4, 0.2, 0.1), 0.8)
        assert (view.gray_p, view.flip, view.blur_p, view.solarize_p) == (0.2, 0.5, blur, solarize)
    first, second = vicreg_variants.AUGMENTS["simsiam"]
    assert first == second == {}


def test_the_two_augmentations_make_the_two_views(monkeypatch, tmp_path, capfd):
    """All of the first view is blurred, none solarized; args.json counts the projector's parameters."""
    seen, batches = [], common.Run.batches
    monkeypatch.setattr(common.Run, "batches", lambda run, *a: seen.append(a[1]) or batches(run, *a))
    flags = "--width 4 --projector 6-5-3 --limit-images 64 --batch-size 32 --max-steps 1 --device cpu"
    flags += f" --out {tmp_path / 'run'} --augment byol --arch resnet18"
    status, out, _ = run_here(capfd, "vicreg_variants.py", *flags.split())
    assert status == 0
    assert [(view.blur_p, view.solarize_p) for view in seen[0]] == [(1.0, 0.0), (0.1, 0.2)]
    parameters = 32 * 6 + 6 * 2 + 6 * 5 + 5 * 2 + 5 * 3
    args = json.loads((tmp_path / "run" / "args.json").read_text())["all"]
    assert args["projector_parameters"] == parameters
    assert f"vicreg, projector 6-5-3 of {parameters} parameters" in out


def test_projector_ends_in_a_plain_layer():
    """BatchNorm and ReLU between layers, no bias anywhere, nothing after the last."""
    kinds = [type(layer).__name__ for layer in vicreg_variants.mlp([5, 4, 3, 2])]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert all(layer.bias is None for layer in vicreg_variants.mlp([5, 4, 3, 2])[::3])


def test_pictures():
    z1, z2 = torch.randn(7, 5), torch.randn(7, 5)
    cosines, correlations = vicreg_variants.picture(z1, z2, None)
    assert cosines[2, 4] == pytest.approx(F.cosine_similarity(z1[2], z2[4], dim=0).item(), abs=1e-6)
    expected = np.corrcoef(z1[:, 1].numpy(), z2[:, 3].numpy())[0, 1]
    assert correlations[1, 3] == pytest.approx(expected, abs=1e-5)


def drawn(picture, i):
    """Of the i-th line of a plot: its height between the axes, 0 to 1, in each column between them, nan where
    another covers it."""
    colour = torch.tensor(ImageColor.getrgb(common.COLOURS[i]))[:, None, None] / 255
    found = (picture[:, :, 60:391] - colour).abs().amax(0) < 0.01
    return np.where(found.any(0), (226 - found.float().argmax(0).numpy()) / 196, np.nan)


def test_spectrum_picture():
    """Four dimensions whose variances are 1, 1e-2, 1e-4 and 1e-6: 2 decades each of the 8. Samples on two
    axes: cosines -1, 0 and 1."""
    signs = torch.tensor([[a, b, a * b, c] for a in (1.0, -1) for b in (1, -1) for c in (1, -1)])
    z, h = signs * torch.tensor([1, 1e-1, 1e-2, 1e-3]), signs[:, :2] * torch.tensor([1, 10**-2.5])
    top = vicreg_variants.spectrum_picture(z, h)[:, :256]
    assert drawn(top, 0)[[110, 220, 330]] == pytest.approx([0.75, 0.5, 0.25], abs=0.015)
    assert drawn(top, 1)[[0, 110]] == pytest.approx([1, 3 / 8], abs=0.015)  # over the embeddings' first
    collapsed = vicreg_variants.spectrum_picture(torch.ones(8, 4), torch.eye(8))[:, :256]
    assert np.nanmax(drawn(collapsed, 0)) < 0.02

    z = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0], [0, 1], [0, -1]])
    below = vicreg_variants.spectrum_picture(z, torch.randn(12, 3))[:, 256:]
    cosines, correlations = drawn(below, 0), drawn(below, 1)
    # of 30 pairs 16 at 0, 10 at -1, 4 at 1
    assert cosines[[0, -1]] == pytest.approx([10 / 16, 4 / 16], abs=0.015)
    assert correlations[166] == pytest.approx(1, abs=0.015) and np.nanmax(correlations[:160]) < 0.02
