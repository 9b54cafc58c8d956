"""Guards every loss, on thousands of random inputs: finite values and gradients; and that shapes that do not
match are refused."""

import random

import pytest
import torch
import torch.nn.functional as F

import margin_infonce
import sane
import simaffinity
import simtrace
import simwhitening
import vicreg_variants as vicreg
from helpers import margin_loss, sane_loss

MARGINS = [{}, dict(m1=0.3, m2=0.1), dict(scale=2.0, curvature=1.5), dict(ratio_m1=0.8),
           dict(attenuation=0.9), dict(attenuation=0.9, attenuation_type=2)]


def margin(framework, options):
    def loss(z1, z2, tau):
        queue = F.normalize(torch.ones(3, z1.shape[1]), dim=1)
        return margin_loss(framework, z1, z2, queue, tau=tau, **options)
    return loss


LOSSES = {  # (z1, z2, tau) -> loss
    "sane": lambda z1, z2, tau: sane_loss(z1.float(), z2.float(), z2[:0].float(), tau),
    "vicreg": lambda z1, z2, tau: vicreg.vicreg_loss(z1, z2)[0],
    "vicreg-exp": lambda z1, z2, tau: vicreg.vicreg_exp_loss(z1, z2, tau=tau)[0],
    "vicreg-ctr": lambda z1, z2, tau: vicreg.vicreg_ctr_loss(z1, z2, tau=tau)[0],
    "spectral": lambda z1, z2, tau: vicreg.spectral_loss(z1, z2),
    "barlow": lambda z1, z2, tau: vicreg.barlow_loss(z1, z2),
    "tcr": lambda z1, z2, tau: vicreg.tcr_loss(z1, z2),
    **{f"simclr {r} {d} {n}": lambda z1, z2, tau, r=r, d=d, n=n: vicreg.simclr_loss(z1, z2, tau, r, d, n)
       for r in ("cos", "sq", "abs") for d in (False, True) for n in ("embeddings", "center", "standardize")},
    **{f"{framework} {i}": margin(framework, options)
       for framework in ("moco", "simclr", "byol") for i, options in enumerate(MARGINS)},
    "simaffinity": lambda z1, z2, tau: simaffinity.simaffinity_loss(z1, z2, tau)[0],
    "simwhitening": lambda z1, z2, tau: simwhitening.simwhitening_loss(z1, z2, tau)[0],
    "simtrace": lambda z1, z2, tau: simtrace.simtrace_loss(z1, z2),
}


def draw(rng):
    """Two views' embeddings and tau: of any scale, with duplicates, constants, one constant row."""
    n, d = rng.randint(2, 64), rng.choice((1, 2, 3, 8, 32, 64, 128))
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    z1, z2 = torch.randn(2, n, d, generator=generator)
    kind = rng.choice("normal views same opposite constant row duplicates zero column".split())
    if kind == "views":
        z2 = z1 + 0.1 * z2
    elif kind in ("same", "opposite"):
        z2 = z1.clone() if kind == "same" else -z1
    elif kind == "constant":
        z1, z2 = torch.full_like(z1, 0.3), torch.full_like(z2, 0.3)
    elif kind == "row":
        z1[0], z2[0] = 1.0, 1.0
    elif kind == "duplicates":
        z1, z2 = z1[torch.arange(n) // 2], z2[torch.arange(n) // 2]
    elif kind == "zero":
        z1[0], z2[-1] = 0.0, 0.0
    elif kind == "column":
        z1[:, 0], z2[:, 0] = 5.0, 5.0
    scale = 10 ** rng.uniform(-4, 4)
    return scale * z1, scale * z2, 10 ** rng.uniform(-2, 1), f"{kind}, N {n}, D {d}, scale {scale:.3g}"


@pytest.mark.parametrize("name, loss", LOSSES.items())
def test_finite(name, loss):
    rng = random.Random(name)  # at least 60 inputs for each of some 40 losses
    for i in range(60):
        z1, z2, tau, what = draw(rng)
        if z1.shape[1] < 2 and name in ("vicreg-exp", "vicreg-ctr"):
            continue  # refused
        z1.requires_grad_(), z2.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
            value = loss(*((z1.bfloat16(), z2.bfloat16()) if i % 2 else (z1, z2)), tau)
        value.backward()
        gradients = [z.grad for z in (z1, z2) if z.grad is not None]
        what += f", tau {tau:.3g}, {'bf16' if i % 2 else 'fp32'}"
        assert value.dtype == torch.float32 and value.isfinite(), (what, value)
        assert gradients and all(g.isfinite().all() for g in gradients), what


@pytest.mark.parametrize("name, loss", LOSSES.items())
@pytest.mark.parametrize("shape", [(6, 5), (1, 5), (8, 4), (8, 1)])
def test_other_shapes_are_refused(name, loss, shape):
    if name != "sane":  # below: its losses take cosines
        with pytest.raises(ValueError, match="shape"):
            loss(torch.randn(8, 5), torch.randn(shape), 0.2)


def test_other_shapes_of_cosines_are_refused():
    cos = torch.rand(8, 9)
    for labels in (torch.rand(1, 9), torch.rand(8, 1), torch.rand(9)):
        with pytest.raises(ValueError):
            sane.soft_infonce_loss(cos, labels, 0.2)
    with pytest.raises(ValueError):
        sane.refine_labels(cos.T, 0.2, 0.8, 1.0)
    for pos in (torch.zeros(1, dtype=torch.long), torch.zeros(8, 1, dtype=torch.long)):
        with pytest.raises(ValueError):
            margin_infonce.margin_infonce_loss(cos, pos, tau=0.2)
