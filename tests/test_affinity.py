"""Guards SimAffinity's and SimWhitening's losses, against double loops in float64, closed forms, invariances,
gradients; and what the scripts share, against each other."""

import argparse
import inspect
import math
import re

import numpy as np
import pytest
import torch

import margin_infonce
import sane
import simaffinity
import simtrace
import simwhitening
import vicreg_variants
from helpers import assert_finite, refused, value, views
from simaffinity import simaffinity_loss
from simwhitening import simwhitening_loss, whiten

SIZES = [(8, 3), (5, 7)]  # (N, D), both N > D and N < D <= 2N
EPS = inspect.signature(simwhitening_loss).parameters["eps"].default


def slow_affinity(z1, z2, tau, gamma):
    """ce and the symmetry norm, entry by entry."""
    n = len(z1)
    A = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            A[i, j] = z1[i] @ z2[j] / np.linalg.norm(z1[i]) / np.linalg.norm(z2[j]) / tau
    ce = np.mean([-A[i, i] + np.log(sum(np.exp(A[i, j]) for j in range(n))) for i in range(n)])
    sym = math.sqrt(sum((A[i, j] - A[j, i]) ** 2 for i in range(n) for j in range(n)))
    return ce, sym, ce + gamma * sym


def slow_whitening(z1, z2, tau, gamma, eps):
    z1, z2 = z1.numpy(), z2.numpy()
    Z = np.concatenate([z1, z2])
    C = np.cov(Z.T, bias=True)
    L = np.linalg.cholesky(C + eps * np.linalg.eigvalsh(C).mean() * np.eye(Z.shape[1]))
    w = np.array([np.linalg.inv(L) @ (row - Z.mean(0)) for row in Z])
    return slow_affinity(w[: len(z1)], w[len(z1) :], tau, gamma)


@pytest.mark.parametrize("n, d", SIZES)
@pytest.mark.parametrize("tau, gamma", [(0.2, 0.01), (1.0, 0.0), (0.05, 2.0)])
def test_values(n, d, tau, gamma):
    z1, z2 = views(n, d)
    loss, terms = simaffinity_loss(z1, z2, tau, gamma)
    ce, sym, expected = slow_affinity(z1.numpy(), z2.numpy(), tau, gamma)
    found = [terms["ce"].item(), terms["sym"].item(), loss.item()]
    assert found == pytest.approx([ce, sym, expected], rel=1e-10)
    for eps in (0.0, 0.1, 3.0):
        loss, terms = simwhitening_loss(z1, z2, tau, gamma, eps)
        ce, sym, expected = slow_whitening(z1, z2, tau, gamma, eps)
        found = [terms["ce"].item(), terms["sym"].item(), loss.item()]
        assert found == pytest.approx([ce, sym, expected], rel=1e-9)


def test_by_hand():
    """Orthonormal embeddings: A = I / tau, so ce = ln(e^(1/tau) + N - 1) - 1/tau and sym = 0."""
    z = torch.eye(8)
    expected = math.log(math.exp(2) + 7) - 2
    assert simaffinity_loss(z, z, tau=0.5, gamma=5.0)[0].item() == pytest.approx(expected, abs=1e-6)
    # A - A^T is 1/tau at one place and -1/tau at its mirror, with cosine 1 against cosine 0
    z1, z2 = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert simaffinity_loss(z1, z2, tau=0.5)[1]["sym"].item() == pytest.approx(math.sqrt(8), abs=1e-5)
    alike = torch.ones(8, 4)
    assert simaffinity_loss(alike, alike)[0].item() == pytest.approx(math.log(8), abs=1e-5)


@pytest.mark.parametrize("loss_function", [simaffinity_loss, simwhitening_loss])
def test_gradcheck_and_terms(loss_function):
    z1, z2 = (z.requires_grad_() for z in views(6, 3))
    assert torch.autograd.gradcheck(lambda a, b: loss_function(a, b, 0.5, 0.3)[0], (z1, z2))
    loss, terms = loss_function(z1, z2, 0.5, 0.3)
    assert terms.keys() == {"ce", "sym"} and not terms["ce"].requires_grad
    assert loss.item() == pytest.approx((terms["ce"] + 0.3 * terms["sym"]).item(), abs=1e-12)
    off, terms = loss_function(z1, z2, 0.5, 0.0)
    assert off.item() == terms["ce"].item()
    assert torch.autograd.gradcheck(lambda a, b: loss_function(a, b, 0.5, 0.0)[0], (z1, z2))
    assert torch.autograd.grad(off, z1)[0].abs().max() > 1e-3


@pytest.mark.parametrize("loss_function", [simaffinity_loss, simwhitening_loss])
@pytest.mark.parametrize("z", [
    torch.eye(8),  # A exactly symmetric
    torch.ones(8, 4), torch.zeros(8, 4),
    torch.randn(4, 16),  # D >= 2N
    torch.randn(1, 6).repeat(10, 1) * 1e3 + 0.1,  # constant, but for the rounding of their mean
    torch.cat([torch.randn(4, 3)] * 2)])
@pytest.mark.parametrize("tau", [0.2, 0.005])
def test_degenerate_input_is_finite(loss_function, z, tau):
    for dtype in (torch.float32, torch.bfloat16):
        assert_finite(lambda a, b: loss_function(a, b, tau), z, dtype)


@pytest.mark.parametrize("loss_function", [simwhitening_loss, simtrace.simtrace_loss])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_no_scale_of_the_embeddings_undoes_the_ridge(loss_function, scale):
    z1, z2 = (z.requires_grad_() for z in views(12, 5))
    loss, scaled = (value(loss_function(s * z1, s * z2, eps=0.3)) for s in (1, scale))
    assert scaled.item() == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(torch.autograd.grad(scaled, (z1, z2)), torch.autograd.grad(loss, (z1, z2))):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n, d", [(8, 40), (5, 64), (16, 64)])
def test_without_a_ridge_it_is_a_constant_where_d_is_2n_or_more(n, d):
    """2N centred points in general position whiten to a simplex: each has |w|^2 = 2N - 1 and w_i.w_j = -1 for
    every other, its positive too. So A is -1 / ((2N - 1) tau) everywhere and its cross-entropy ln N."""
    z1, z2 = (z.requires_grad_() for z in views(n, d))
    w = torch.cat(whiten(z1, z2, 1e-9)).detach()
    torch.testing.assert_close(w @ w.T, 2 * n * torch.eye(2 * n).double() - 1, rtol=0, atol=1e-4)
    constant, ridged = (simwhitening_loss(z1, z2, gamma=0.0, eps=eps)[0] for eps in (1e-9, 1.0))
    assert constant.item() == pytest.approx(math.log(n), abs=1e-6) and ridged.item() < math.log(n) - 0.1
    size = [torch.cat(torch.autograd.grad(loss, (z1, z2))).norm() for loss in (constant, ridged)]
    assert size[0] < 1e-6 * size[1]


@pytest.mark.parametrize("loss_function", [simaffinity_loss, simwhitening_loss, simtrace.simtrace_loss])
def test_shapes_that_differ_are_refused(loss_function):
    for shape in ((6, 4), (8, 3), (8, 1), (1, 4)):  # broadcasting would take the last two
        with pytest.raises(ValueError, match="differ"):
            loss_function(torch.randn(8, 4), torch.randn(*shape))


def test_invariances():
    z1, z2 = views(12, 4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    scale = torch.rand(12, 1, dtype=torch.float64) + 0.5
    affinity, whitening = simaffinity_loss(z1, z2)[0], simwhitening_loss(z1, z2, eps=0.0)[0]
    ridged = simwhitening_loss(z1, z2)[0]
    torch.testing.assert_close(simaffinity_loss(z1[order], z2[order])[0], affinity)
    torch.testing.assert_close(simaffinity_loss(z1 @ rotation * scale, z2 @ rotation)[0], affinity)
    torch.testing.assert_close(simwhitening_loss(z1[order], z2[order], eps=0.0)[0], whitening)
    torch.testing.assert_close(simwhitening_loss(z1 @ rotation * 3 + 7, z2 @ rotation * 3 + 7)[0], ridged)
    linear = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    affine = [z @ linear + 7 for z in (z1, z2)]  # whitening undoes it, up to a rotation
    torch.testing.assert_close(simwhitening_loss(*affine, eps=0.0)[0], whitening)
    assert not torch.isclose(simwhitening_loss(*affine)[0], ridged, rtol=0.05)
    assert not torch.isclose(simaffinity_loss(z1, z2[order])[0], affinity, rtol=0.1)
    assert not torch.isclose(simwhitening_loss(z1, z2[order])[0], whitening, rtol=0.1)


@pytest.mark.parametrize("eps", [0.01, 3.0])
def test_picture_has_the_ridge_of_the_loss(eps):
    """The loss from the picture: its rows' cross-entropy over tau."""
    z1, z2 = views(12, 5)
    (cosines,) = simwhitening.picture(z1, z2, argparse.Namespace(eps=eps))
    ce = torch.nn.functional.cross_entropy(cosines / 0.2, torch.arange(12)).item()
    assert ce == pytest.approx(slow_whitening(z1, z2, 0.2, 0.0, eps)[0], rel=1e-9)


def test_whitened_covariance_is_the_identity():
    z1, z2 = (z.float() for z in views(300, 6))
    w = torch.cat(whiten(z1 @ torch.randn(6, 6), z2 @ torch.randn(6, 6), 1e-6)).numpy()
    np.testing.assert_allclose(np.cov(w.T, bias=True), np.eye(6), atol=1e-3)
    np.testing.assert_allclose(w.mean(0), 0, atol=1e-4)


@pytest.mark.parametrize("loss_function", [simaffinity_loss, simwhitening_loss])
def test_half_precision_input_is_computed_in_float32(loss_function):
    z1, z2 = (z.to(torch.bfloat16) for z in views(32, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = loss_function(z1, z2)
    assert loss.dtype == torch.float32
    z1, z2 = z1.double(), z2.double()
    slow = slow_whitening(z1, z2, 0.2, 0.01, EPS) if loss_function is simwhitening_loss else slow_affinity(
        z1.numpy(), z2.numpy(), 0.2, 0.01)
    assert loss.item() == pytest.approx(slow[2], rel=1e-3)
    assert loss_function(z1, z2)[0].dtype == torch.float64


def test_the_three_scripts_share_all_but_the_method():
    """From the model on, only the loss's call and its terms and the picture may differ."""
    scripts = {"simtrace": simtrace, "simaffinity": simaffinity, "simwhitening": simwhitening}
    for part in ("mlp", "Model"):
        assert len({inspect.getsource(getattr(script, part)) for script in scripts.values()}) == 1
    loops = set()
    for name, script in scripts.items():
        method = r"(?<=of all ranks\n)|(?=\n +optimizer.zero_grad)"
        before, own, after = re.split(method, inspect.getsource(script.main))
        assert f"{name}_loss(" in own and own.count("\n") <= 4
        loops.add(before + after)
    assert len(loops) == 1


STATED = [  # data sets, flag, value, where the paper states it
    ("cifar10 cifar100", "arch", "resnet18", "Sec. 4"),
    ("imagenet100 imagenet", "arch", "resnet50", "Sec. 4"),
    ("cifar10 cifar100", "projector", "2048-2048-256", "Sec. 4"),
    ("imagenet100 imagenet", "projector", "2048-2048-2048", "Sec. 4"),
    ("cifar10 cifar100", "epochs", 1000, "Sec. 4"), ("imagenet100 imagenet", "epochs", 200, "Sec. 4"),
    ("cifar10 cifar100 imagenet100 imagenet", "batch_size", 512, "Sec. 4"),
    ("cifar10 cifar100", "base_lr", 0.03, "Sec. 4"), ("imagenet100 imagenet", "base_lr", 0.05, "Sec. 4"),
    ("imagenet", "warmup_epochs", 10, "Sec. 4"),
    ("cifar10 cifar100 imagenet100 imagenet", "weight_decay", 1e-6, "Sec. 4"),
    ("cifar10 cifar100 imagenet100 imagenet", "width", 64, "a ResNet's own"),
    ("cifar10 imagenet", "gamma", 0.01, "Sec. 4"),
    ("cifar10 imagenet", "momentum_encoder", None, "Sec. 3: an ablation"),
    ("cifar10 imagenet", "predictor", False, "Sec. 3.1: an ablation")]


@pytest.mark.parametrize("script", [simaffinity, simwhitening, simtrace])
@pytest.mark.parametrize("names, flag, value, where", STATED)
def test_recipes_are_the_papers(script, names, flag, value, where):
    for name in names.split():
        args = vars(script.parse_args(["--dataset", name]))
        assert flag == "gamma" and script is simtrace or args[flag] == value, (name, where)


@pytest.mark.parametrize("script", [simwhitening, simtrace])
def test_a_singular_covariance_wants_a_ridge(script, capsys):
    flags = ["--batch-size", "64", "--projector", "16-128"]
    assert script.parse_args(flags).eps >= 0.1
    assert script.parse_args([*flags, "--eps", "0.1"]).eps == 0.1
    script.parse_args(["--batch-size", "65", "--projector", "16-128", "--eps", "0"])
    refused(capsys, script.parse_args, [*flags, "--eps", "0.09"], status=2,
            words=["--batch-size 64", "dimension 128", "--eps 0.09"])


SHARED = ["init_distributed(", "load_splits(", "manual_seed(", "Model(args", "initial = copy", "params = [",
          "common.Probe(", "common.Run(", "common.distribute(", 'run.draw("views.png"', "for epoch in ",
          "lr = args.base_lr", "lr = common.cosine_lr(", "with common.autocast(", "optimizer.zero_grad(",
          ".backward(", "optimizer.step(", "probe.step(", "run.log(", "run.save(", "run.due(",
          'run.attempt("evaluation"', "initial=initial", 'run.draw("affinity.png"', "run.end_epoch("]


def test_all_scripts_have_the_same_loop():
    """These lines, once each, in this order and with the same text; a method's own come between them."""
    loops = set()
    for script in (simtrace, simaffinity, simwhitening, sane, margin_infonce, vicreg_variants):
        source = inspect.getsource(script.main)
        lines = [line.rstrip("),") for line in source.splitlines() if any(word in line for word in SHARED)]
        assert len(lines) == len(SHARED) and all(map(str.__contains__, lines, SHARED)), (script, lines)
        loops.add("\n".join(lines))
        assert len(re.findall(r"\n {8}for step, \(x1, x2.*\), y in run.batches\(epoch, ", source)) == 1
        assert len(re.findall(r"\n {16}h, z1, .* = net\(x1, ", source)) == 1
        assert len(re.findall(r"\n {12}loss\b.* = ", source)) == 1
    assert len(loops) == 1
