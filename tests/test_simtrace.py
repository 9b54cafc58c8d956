"""Guards SimTrace's loss, against the paper's N x N form in float64, closed forms, invariances, gradients."""

import argparse
import inspect

import numpy as np
import pytest
import torch

import simtrace
import simwhitening
from helpers import assert_finite, views
from simtrace import picture, simtrace_loss

SIZES = [(8, 3), (20, 7), (5, 2)]  # (N, D), N != D
EPS = inspect.signature(simtrace_loss).parameters["eps"].default


def test_one_default_ridge_for_functions_and_scripts():
    defaults = [inspect.signature(f).parameters["eps"].default
                for f in (simtrace_loss, simwhitening.simwhitening_loss)]
    assert defaults == [script.parse_args([]).eps for script in (simtrace, simwhitening)]


def slow_loss(z1, z2, eps):
    """Eq. 3 as it is written: the whole N x N affinity of the whitened views, entry by entry, and its
    trace."""
    z1, z2 = z1.numpy(), z2.numpy()
    n, d = z1.shape
    mu, C = np.zeros(d), np.zeros((d, d))
    for row in [*z1, *z2]:
        mu += row / (2 * n)
    for row in [*z1, *z2]:
        C += np.outer(row - mu, row - mu) / (2 * n)
    inverse = np.linalg.inv(C + eps * np.linalg.eigvalsh(C).mean() * np.eye(d))
    A = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            A[i, j] = (z1[i] - mu) @ inverse @ (z2[j] - mu)
    return -np.trace(A) / (2 * n)


@pytest.mark.parametrize("n, d", SIZES)
@pytest.mark.parametrize("eps", [0.0, 1e-4, 0.3, 10.0])
def test_equals_the_slow_form(n, d, eps):
    z1, z2 = views(n, d)
    assert simtrace_loss(z1, z2, eps).item() == pytest.approx(slow_loss(z1, z2, eps), rel=1e-10)


@pytest.mark.parametrize("n, d", SIZES)
def test_closed_forms(n, d):
    z1, z2 = views(n, d)
    assert simtrace_loss(z1, z1, eps=0.0).item() == pytest.approx(-d / 2, abs=1e-9)
    centred = z1 - z1.mean(0)
    assert simtrace_loss(centred, -centred, eps=0.0).item() == pytest.approx(d / 2, abs=1e-9)
    assert -d / 2 <= simtrace_loss(z1, z2, eps=0.0).item() <= d / 2


def test_by_hand():
    # D = 1: mu = 0, S = (1 + 1 + 4 + 4) / 4 = 2.5, trace = 1 * 2 + (-1) * (-2) = 4, loss = -4 / 2.5 / 4
    z1, z2 = torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0], [-2.0]])
    assert simtrace_loss(z1, z2, eps=0.0).item() == pytest.approx(-0.4, abs=1e-6)


def test_invariances():
    z1, z2 = views(12, 4)
    loss = simtrace_loss(z1, z2, eps=0.0).item()
    linear = torch.tensor(np.random.default_rng(0).normal(size=(4, 4))) + 3 * torch.eye(4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert simtrace_loss(z1 @ linear + 7, z2 @ linear + 7, eps=0.0).item() == pytest.approx(loss, abs=1e-9)
    assert simtrace_loss(z1[order], z2[order], eps=0.0).item() == pytest.approx(loss, abs=1e-12)
    assert simtrace_loss(z2, z1, eps=0.0).item() == pytest.approx(loss, abs=1e-12)
    assert abs(simtrace_loss(z1, z2[order], eps=0.0).item() - loss) > 0.1  # the pairing does matter


@pytest.mark.parametrize("n, d", [(8, 40), (5, 64), (16, 64)])
def test_without_a_ridge_it_is_a_constant_where_d_is_2n_or_more(n, d):
    """2N centred points in general position whiten to a simplex, where w_i.w_j = -1 for any two."""
    z1, z2 = (z.requires_grad_() for z in views(n, d))
    constant, ridged = (simtrace_loss(z1, z2, eps) for eps in (1e-9, 1.0))
    assert constant.item() == pytest.approx(0.5, abs=1e-6) and ridged.item() < 0.4
    size = [torch.cat(torch.autograd.grad(loss, (z1, z2))).norm() for loss in (constant, ridged)]
    assert size[0] < 1e-6 * size[1]


@pytest.mark.parametrize("eps", [0.0, 1e-2, 3.0])
def test_gradcheck(eps):
    z1, z2 = (z.requires_grad_() for z in views(6, 3))
    assert torch.autograd.gradcheck(lambda a, b: simtrace_loss(a, b, eps), (z1, z2))


def test_detach_cov_is_the_gradient_at_constant_mu_and_s():
    """With mu and S constant the loss is bilinear: d loss / d z1 = -(z2 - mu) S^-1 / (2N)."""
    z1, z2 = views(9, 4)
    z1.requires_grad_()
    simtrace_loss(z1, z2, eps=1e-3, detach_cov=True).backward()
    Z = np.concatenate([z1.detach().numpy(), z2.numpy()])
    C = np.cov(Z.T, bias=True)
    S = C + 1e-3 * np.trace(C) / 4 * np.eye(4)
    expected = -(z2.numpy() - Z.mean(0)) @ np.linalg.inv(S) / 18
    np.testing.assert_allclose(z1.grad.numpy(), expected, rtol=1e-9)
    full = z1.detach().clone().requires_grad_()
    simtrace_loss(full, z2, eps=1e-3).backward()
    assert not torch.allclose(full.grad, z1.grad, rtol=0.1)
    assert simtrace_loss(z1, z2, 1e-3, True).item() == pytest.approx(
        simtrace_loss(z1, z2, 1e-3).item(), abs=1e-12)


@pytest.mark.parametrize("z", [
    torch.ones(8, 4), torch.zeros(8, 4), torch.randn(4, 16), torch.randn(1, 300).repeat(64, 1) * 1e3 + 0.1,
    torch.randn(3, 4).repeat(4, 1)])
@pytest.mark.parametrize("eps", [0.1, EPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_covariance_is_finite(z, eps, dtype):
    loss, gradient = assert_finite(lambda a, b: simtrace_loss(a, b, eps), z, dtype)
    if (z == z[0]).all():  # constant: nothing to align, and no gradient that blows up
        assert loss.abs() < 1e-3 and gradient.abs().max() < 1e-3


def test_bad_input_gives_nan_and_not_an_exception():
    z = torch.randn(8, 4)
    z[0, 0] = torch.nan
    assert simtrace_loss(z, z).isnan()
    assert simtrace_loss(torch.randn(8, 4), torch.randn(8, 4), eps=-1.0).isnan()  # S is not positive definite


def test_half_precision_input_is_computed_in_float32():
    z1, z2 = (z.to(torch.bfloat16) for z in views(32, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = simtrace_loss(z1, z2)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(slow_loss(z1.double(), z2.double(), EPS), rel=1e-3)
    assert simtrace_loss(z1.double(), z2.double()).dtype == torch.float64


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_picture(scale):
    """A trace of minus twice the loss, the identity for equal views; constant embeddings, which no matrix can
    whiten, do not fail."""
    z1, z2 = (z * scale for z in views(200, 4))
    for eps in (0.0, 2.0):
        (matrix,) = picture(z1, z2, argparse.Namespace(eps=eps))
        assert matrix.trace().item() == pytest.approx(-2 * slow_loss(z1, z2, eps), rel=1e-6)
        assert picture(torch.ones(8, 4), torch.ones(8, 4), argparse.Namespace(eps=eps))[0].isfinite().all()
    identity = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(picture(z1, z1, argparse.Namespace(eps=0.0))[0], identity, atol=1e-6, rtol=0)
