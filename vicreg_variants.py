"""From VICReg to SimCLR, one loss at a time: Garrido et al., "On the duality between contrastive and
non-contrastive self-supervised learning", arXiv 2206.02574.

    v(K)     = mean_j relu(1 - sqrt(var_j(K) + 1e-4))          K: (n, d), var over its rows, unbiased
    C(K)     = (K - mean)^T (K - mean) / (n - 1)               (d, d), centred over rows
    c(K)     = sum_{i != j} C_ij^2 / d
    c_exp(K) = mean_i log sum_{j != i} exp(C_ij / tau)                                                Eq. 11

    vicreg      sim_weight mse(z1, z2) + var_weight (v(z1) + v(z2)) / 2 + cov_weight (c(z1) + c(z2))
    vicreg-exp  c_exp for c                                                                           Eq. 12
    vicreg-ctr  v and c_exp of the transposed embeddings (z - mean)^T, samples for dimensions         Eq. 13
    simclr      mean_i of -u_i.u_i' / tau + log sum_{j != i} exp(u_i.u_j / tau), u the 2N unit rows of both
                views, u_i' the other view of u_i
    -sq, -abs   the square or the absolute value of u_i.u_j in the sum; dcl: the positive left out of it
    spectral, barlow, tcr: beside their functions

The variance term is halved, as in VICReg's released code; VICReg's paper adds the two views'. What is left
between vicreg-ctr and simclr is how negative pairs are sampled: N - 1 of the same view, or 2N - 2 of both
views and the positive with them.

Ours, not the paper's: tau and the weights of vicreg-exp and vicreg-ctr (the paper's are in its Table S6:
check there), tcr's weight; on ImageNet the recipes of dcl, spectral, barlow and tcr; all other recipes;
bilinear crops (Table S1: bicubic); a blur of 3 taps at 32 px, which caps sigma near 0.8; no zero-init of
residual branches; the online probe's BatchNorm and rate; rankme of one batch, not of the whole set.

Why tau 0.5 and weights 25, 25, 1 collapse: embeddings of one dimension, copied to all with either sign, cost
log cosh(1 / tau) = 1.3 more of c_exp than decorrelated ones, whatever d, where c is d - 1, 2047 at d = 2048.
For covariances small beside tau, c enters c_exp times 1 / (2 tau^2 (d - 1)), so that vicreg-exp's weight w is
worth w / (2 tau^2 (d - 1)) of VICReg's: 0.001 at d = 2048. tau 0.05 and weight 25 make that 2.4 there, and
39 at d = 128 (vicreg-ctr: d is the batch), where it was searched: another projector may want another weight.

    torchrun vicreg_variants.py --method vicreg-ctr                  a CPU: minutes, nothing to download
    torchrun vicreg_variants.py --dataset cifar10                    a GPU: VICReg
    torchrun --nproc_per_node=8 vicreg_variants.py --dataset imagenet --data-dir DIR

Measured (k-NN, width 16, one run each, see .github/measurements.md), VICReg, VICReg-exp, VICReg-ctr, SimCLR:
on patterns 67.0, 75.5, 80.2, 79.0 %, at initialisation 20.0 %; in ten epochs of CIFAR-10 54.4 (60.0 with
cov_weight 16), 60.9, 61.4, 62.2 %, at initialisation 32.2 %.
"""
import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common

CIFAR = dict(arch="resnet18", width=64, projector="2048-2048-2048", epochs=1000, batch_size=256, base_lr=0.3,
             bias_lr=1.0, weight_decay=1e-6, warmup_epochs=10.0, augment="simsiam")  # ours
IMAGENET = dict(CIFAR, arch="resnet50", projector="8192-8192-8192", epochs=100, batch_size=1024,
                augment="byol")
SIMCLR_IMAGENET = dict(IMAGENET, base_lr=0.5, batch_size=2048)  # tuned; also for -sq, -abs (App. G)
RECIPES = {
    "patterns": dict(CIFAR, width=16, projector="512-512-128", epochs=7, base_lr=3.0, bias_lr=0.01,
                     warmup_epochs=1.0),
    "cifar10": CIFAR, "cifar100": CIFAR, "stl10": CIFAR, "tinyimagenet": CIFAR,
    "imagenet100": IMAGENET, "imagenet": IMAGENET, "folder": dict(CIFAR, epochs=200)}
TAU = {"vicreg-exp": 0.05, "vicreg-ctr": 0.05}  # ours; the others' 0.15 is the paper's for SimCLR
COV_WEIGHT = {"vicreg-exp": 25.0, "vicreg-ctr": 25.0}  # ours; 1 elsewhere
SIM_WEIGHT = {"tcr": 50.0}  # ours: with 1 it spreads views apart too; 25 elsewhere
BYOL = dict(crop_scale=(0.08, 1.0), jitter=(0.4, 0.4, 0.2, 0.1))
AUGMENTS = {"simsiam": (dict(), dict()),  # how common.Augment makes the two views
            "byol": (dict(BYOL, blur_p=1.0), dict(BYOL, blur_p=0.1, solarize_p=0.2))}  # Table S1


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vicreg_variants.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    method = common.chosen(argv, "--method", "vicreg")
    add("--method", choices=tuple(METHODS), default=method, help="the loss; decides --tau and the weights")
    add("--sim-weight", type=common.rate, default=SIM_WEIGHT.get(method, 25.0),
        help="of the mse, 25; of tcr's 1 - cos, 50 (ours)")
    add("--var-weight", type=common.rate, default=25.0, help="of the variance term")
    add("--cov-weight", type=common.rate, default=COV_WEIGHT.get(method, 1.0),
        help="of the covariance term, 1; of -exp and -ctr 25 (ours)")
    add("--tau", type=common.positive, default=TAU.get(method, 0.15),
        help="temperature, 0.15; of -exp and -ctr 0.05 (ours)")
    add("--normalize", choices=("embeddings", "center", "standardize"), default="embeddings",
        help="of simclr and dcl: rows, rows after centring, or dimensions (Eq. 14)")
    add("--lambd", type=common.rate, default=0.0051, help="of barlow's squares off the diagonal (paper's)")
    add("--radius", type=common.positive, default=1.0, help="of spectral: the rows' squared norm")
    add("--bias-lr", type=common.rate,
        help="of biases and BatchNorm, times that of weights, which LARS scales (ours: patterns 0.01)")
    add("--augment", choices=tuple(AUGMENTS), help="the same twice, or BYOL's two different ones (Table S1)")
    common.add_run_args(parser)
    recipes = {**RECIPES, "imagenet": SIMCLR_IMAGENET} if method.startswith("simclr") else RECIPES
    return common.parse_run_args(parser, recipes, argv)


def full_precision(*tensors: Tensor) -> list[Tensor]:
    """float32, or float64 if it was that. ValueError for different shapes."""
    if any(z.shape != tensors[0].shape for z in tensors):
        raise ValueError(f"embeddings of different shapes, {', '.join(str(tuple(z.shape)) for z in tensors)}")
    return [z if z.dtype == torch.float64 else z.float() for z in tensors]


def fill_diagonal(M: Tensor, value: float) -> Tensor:
    """M, its diagonal overwritten unseen by autograd, which would copy M: for values at which the gradient
    is 0, as 0 under a square and -inf under exp."""
    M.detach().diagonal().fill_(value)
    return M


def sum_of_squares(M: Tensor) -> Tensor:
    """M.square().sum() without a second matrix; in rows, as a norm of all would lose float32's digits."""
    return torch.linalg.vector_norm(M, dim=1).square().sum()


def logsumexp(S: Tensor) -> Tensor:
    """S.logsumexp(1) of a matrix S that nothing else needs: it is overwritten, not copied."""
    top = S.detach().amax(1, keepdim=True)
    return S.sub_(top).exp_().sum(1).log() + top.squeeze(1)


def variance_term(K: Tensor) -> Tensor:
    """v(K): how far the standard deviations over the rows of K (n, d) are below 1. ValueError for one row."""
    if len(K) < 2:
        raise ValueError("a variance takes at least 2 samples (vicreg-ctr: 2 dimensions)")
    return F.relu(1 - (K.var(0) + 1e-4).sqrt()).mean()  # unbiased; 1e-4 bounds the root's gradient


def covariance_term(K: Tensor) -> Tensor:
    """c(K), of K (n, d)."""
    K = (K - K.mean(0)) / math.sqrt(len(K) - 1)
    return sum_of_squares(fill_diagonal(K.T @ K, 0.0)) / K.shape[1]  # C off its diagonal, (d, d)


def logsumexp_term(K: Tensor, tau: float) -> Tensor:
    """c_exp(K), of K (n, d), Eq. 11. ValueError for one column."""
    if K.shape[1] < 2:
        raise ValueError("a covariance takes at least 2 dimensions (vicreg-ctr: 2 samples)")
    K = (K - K.mean(0)) / math.sqrt((len(K) - 1) * tau)
    return logsumexp(fill_diagonal(K.T @ K, -math.inf)).mean()  # of C(K) / tau, (d, d)


def weigh(sim: Tensor, var: Tensor, cov: Tensor, weights) -> tuple[Tensor, dict[str, Tensor]]:
    loss = weights[0] * sim + weights[1] * var + weights[2] * cov
    return loss, {"sim": sim.detach(), "var": var.detach(), "cov": cov.detach()}


def vicreg_loss(z1: Tensor, z2: Tensor, sim_weight: float = 25.0, var_weight: float = 25.0,
                cov_weight: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """VICReg's loss of two views' embeddings, (N, D) each: a 0-d tensor, float32 or float64, and its terms
    sim, var, cov, unweighted. ValueError for N = 1."""
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = full_precision(z1, z2)
        var = (variance_term(z1) + variance_term(z2)) / 2  # halved: VICReg's code; cov is not
        cov = covariance_term(z1) + covariance_term(z2)
        return weigh(F.mse_loss(z1, z2), var, cov, (sim_weight, var_weight, cov_weight))


def vicreg_exp_loss(z1: Tensor, z2: Tensor, sim_weight: float = 25.0, var_weight: float = 25.0,
                    cov_weight: float = 1.0, tau: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """VICReg-exp, Eq. 12: VICReg with the LogSumExp of each dimension's covariances. ValueError for D = 1.
    The script passes tau 0.05 and cov_weight 25, here and to vicreg-ctr, which learn more so
    (.github/measurements.md)."""
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = full_precision(z1, z2)
        var = (variance_term(z1) + variance_term(z2)) / 2
        cov = logsumexp_term(z1, tau) + logsumexp_term(z2, tau)
        return weigh(F.mse_loss(z1, z2), var, cov, (sim_weight, var_weight, cov_weight))


def vicreg_ctr_loss(z1: Tensor, z2: Tensor, sim_weight: float = 25.0, var_weight: float = 25.0,
                    cov_weight: float = 1.0, tau: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """VICReg-ctr, Eq. 13: VICReg-exp of the transposed embeddings, so that samples repel each other.
    ValueError for N = 1 or D = 1."""
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = full_precision(z1, z2)
        K1, K2 = (z1 - z1.mean(0)).T, (z2 - z2.mean(0)).T  # (D, N), Table 1
        var = (variance_term(K1) + variance_term(K2)) / 2
        cov = logsumexp_term(K1, tau) + logsumexp_term(K2, tau)
        return weigh(F.mse_loss(z1, z2), var, cov, (sim_weight, var_weight, cov_weight))


def simclr_loss(z1: Tensor, z2: Tensor, tau: float = 0.15, repulsion: str = "cos", decoupled: bool = False,
                normalize: str = "embeddings") -> Tensor:
    """SimCLR's loss of two views' embeddings, (N, D) each, or a variant: a 0-d tensor, float32 or float64.

    repulsion: "cos", or "sq" or "abs" of it, in the sum. decoupled: without the positive there (DCL).
    normalize: "embeddings", unit rows; "center", the same after subtracting the mean of all rows;
    "standardize", centred dimensions of norm sqrt(2N / D) instead of unit rows (Eq. 14), constant ones 0.
    ValueError for other names, and for N = 1 where no row would be left in the sum."""
    if repulsion not in ("cos", "sq", "abs") or normalize not in ("embeddings", "center", "standardize"):
        raise ValueError(f"no repulsion {repulsion} or no normalize {normalize}")
    if decoupled and len(z1) < 2:
        raise ValueError("decoupled takes at least 2 samples")
    with torch.autocast(z1.device.type, enabled=False):
        z, n = torch.cat(full_precision(z1, z2)), len(z1)  # (2N, D)
        rounding = 10 * torch.finfo(z.dtype).eps * z.norm(dim=0)  # what centring leaves of a constant
        z = z if normalize == "embeddings" else z - z.mean(0)
        if normalize == "standardize":
            u = F.normalize(z, dim=0).masked_fill(z.norm(dim=0) <= rounding, 0)
            u = u * math.sqrt(2 * n / z.shape[1])
        else:
            u = F.normalize(z, dim=1)
        attraction = (u[:n] * u[n:]).sum(1).mean() / tau
        S = u @ u.T if repulsion != "cos" else (u / tau) @ u.T  # (2N, 2N)
        S = S.square().div_(tau) if repulsion == "sq" else S.abs().div_(tau) if repulsion == "abs" else S
        fill_diagonal(S, -math.inf)
        if decoupled:
            fill_diagonal(S[:n, n:], -math.inf)
            fill_diagonal(S[n:, :n], -math.inf)
        return logsumexp(S).mean() - attraction


def spectral_loss(z1: Tensor, z2: Tensor, radius: float = 1.0) -> Tensor:
    """Spectral contrastive loss (HaoChen et al., arXiv 2106.04156) of embeddings (N, D):
    -2 mean_i u1_i.u2_i + mean_{i != j} (u1_i.u2_j)^2, u rows scaled to norm sqrt(radius). ValueError for
    N = 1."""
    if len(z1) < 2:
        raise ValueError("the spectral loss takes at least 2 samples")
    with torch.autocast(z1.device.type, enabled=False):
        u1, u2 = (math.sqrt(radius) * F.normalize(z, dim=1) for z in full_precision(z1, z2))
        n, off = len(u1), sum_of_squares(fill_diagonal(u1 @ u2.T, 0.0))  # of (N, N)
        return -2 * (u1 * u2).sum(1).mean() + off / (n * (n - 1))


def barlow_loss(z1: Tensor, z2: Tensor, lambd: float = 0.0051) -> Tensor:
    """Barlow Twins (Zbontar et al., arXiv 2103.03230) of embeddings (N, D): sum_i (1 - C_ii)^2 + lambd
    sum_{i != j} C_ij^2, C the cross-correlation of the dimensions, each normalised as by BatchNorm."""
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = ((z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt() for z in full_precision(z1, z2))
        off = sum_of_squares(fill_diagonal(z1.T @ (z2 / len(z2)), 0.0))  # C off its diagonal, (D, D)
        return (1 - (z1 * z2).mean(0)).square().sum() + lambd * off


def tcr_loss(z1: Tensor, z2: Tensor, eps: float = 0.5, sim_weight: float = 1.0) -> Tensor:
    """Total coding rate (as in EMP-SSL, arXiv 2304.03977) of embeddings (N, D): sim_weight mean_i
    (1 - u1_i.u2_i) - mean over views of logdet(I + D / (N eps) u^T u) / 2, u unit rows; eps not squared."""
    with torch.autocast(z1.device.type, enabled=False):
        u1, u2 = (F.normalize(z, dim=1) for z in full_precision(z1, z2))
        (n, d), rates = u1.shape, []
        for u in (u1, u2):
            gram = u.T @ u if d < n else u @ u.T  # the smaller one: the determinant is the same
            I = torch.eye(len(gram), dtype=u.dtype, device=u.device)
            L, _ = torch.linalg.cholesky_ex(I + d / (n * eps) * gram)
            rates.append(L.diagonal().log().sum())  # half the log-determinant
        return sim_weight * (1 - (u1 * u2).sum(1)).mean() - (rates[0] + rates[1]) / 2


def contrastive_criterion(z: Tensor) -> Tensor:
    """Lc = sum_{i != j} (z_i.z_j)^2 over the rows of z (N, D)."""
    with torch.autocast(z.device.type, enabled=False):
        (z,) = full_precision(z)
        return sum_of_squares(fill_diagonal(z @ z.T, 0.0))  # of (N, N)


def noncontrastive_criterion(z: Tensor) -> Tensor:
    """Lnc, the same over the columns of z. Theorem 3.3: Lnc + sum_j |column j|^4 = Lc + sum_i |row i|^4."""
    return contrastive_criterion(z.T)


def simclr_variant(repulsion: str, decoupled: bool):
    return lambda z1, z2, args: (simclr_loss(z1, z2, args.tau, repulsion, decoupled, args.normalize), {})


def weights_of(args):
    return args.sim_weight, args.var_weight, args.cov_weight


METHODS = {  # embeddings -> loss, terms
    "vicreg": lambda z1, z2, args: vicreg_loss(z1, z2, *weights_of(args)),
    "vicreg-exp": lambda z1, z2, args: vicreg_exp_loss(z1, z2, *weights_of(args), args.tau),
    "vicreg-ctr": lambda z1, z2, args: vicreg_ctr_loss(z1, z2, *weights_of(args), args.tau),
    "simclr": simclr_variant("cos", False), "simclr-sq": simclr_variant("sq", False),
    "simclr-abs": simclr_variant("abs", False), "dcl": simclr_variant("cos", True),
    "dcl-sq": simclr_variant("sq", True), "dcl-abs": simclr_variant("abs", True),
    "spectral": lambda z1, z2, args: (spectral_loss(z1, z2, args.radius), {}),
    "barlow": lambda z1, z2, args: (barlow_loss(z1, z2, args.lambd), {}),
    "tcr": lambda z1, z2, args: (tcr_loss(z1, z2, sim_weight=args.sim_weight), {})}


def mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers, BatchNorm and ReLU after each but the last, which has no bias."""
    layers = []
    for a, b in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-2])


class Model(nn.Module):
    def __init__(self, args, small_images: bool):
        super().__init__()
        self.backbone = common.resnet(args.arch, args.width, small_images)
        self.projector = mlp([self.backbone.feature_dim, *(int(w) for w in args.projector.split("-"))])

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.backbone(torch.cat([x1, x2]))  # (2N, feature_dim)
        return h, *self.projector(h).chunk(2)  # (N, D) each


def picture(z1: Tensor, z2: Tensor, args) -> list[Tensor]:
    """The cosines of the two views' embeddings (N, N), and the correlations of their dimensions (D, D)."""
    c1, c2 = (F.normalize(z - z.mean(0), dim=0) for z in (z1, z2))
    return [F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T, c1.T @ c2]


def spectrum_picture(z: Tensor, h: Tensor) -> Tensor:
    """Of embeddings z (N, D) and representations h (2N, feature_dim): singular values of their covariances
    over the first, log10 (App. J). Below, histograms of the embeddings' cosines and of their dimensions'
    correlations, without the diagonals. -> (3, H, W)"""
    z, h = z.float().cpu(), h.float().cpu()
    spectra, histograms, c = {}, {}, F.normalize(z - z.mean(0), dim=0)
    for name, x in ((f"{min(z.shape)} of embeddings", z), (f"{min(h.shape)} of representations", h)):
        s = torch.linalg.svdvals(x - x.mean(0)).square().clamp(min=1e-30)  # of the covariance, times N - 1
        spectra[name] = torch.arange(len(s)), (s / s[0].clamp(min=1e-20)).log10()
    for name, G in (("cosines of samples", F.normalize(z, dim=1) @ F.normalize(z, dim=1).T),
                    ("correlations of dimensions", c.T @ c)):
        counts = torch.histc(G[~torch.eye(len(G), dtype=torch.bool)], 120, -1, 1)
        histograms[name] = torch.linspace(-1, 1, 120), counts / counts.max().clamp(min=1)
    return torch.cat([common.plot("singular values over the first, log10", spectra, -8, 0),
                      common.plot("pairs, of the most frequent", histograms)], dim=1)


def measures(z: Tensor, h: Tensor) -> dict[str, float]:
    """Of the epoch's last batch: both criteria of the normalised embeddings z (N, D); column_norms (App. H),
    sum_j |column j|^4 / (N^2 / D), 1 if all dimensions are alike; the effective ranks of z and of the
    representations h (2N, feature_dim)."""
    u = F.normalize(z, dim=1)
    n, d = u.shape
    return {"Lc": contrastive_criterion(u).item(), "Lnc": noncontrastive_criterion(u).item(),
            "column_norms": u.norm(dim=0).pow(4).sum().item() * d / n**2,
            "rankme_embeddings": common.rankme(z), "rankme": common.rankme(h)}


def main(args):
    env = common.init_distributed(args.device)
    train, test = common.load_splits(args, env)
    torch.manual_seed(args.seed)
    model = Model(args, train.image_size <= 64).to(env.device, memory_format=torch.channels_last)
    initial = copy.deepcopy(model.backbone)  # to be compared with at the end
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim <= 1]}]
    optimizer = common.LARS(groups, lr=0.0, momentum=0.9, weight_decay=args.weight_decay)
    augments = [common.Augment(train.image_size, mean=train.mean, std=train.std, **view)
                for view in AUGMENTS[args.augment]]
    args.projector_parameters = sum(p.numel() for p in model.projector.parameters())  # for args.json, App. I
    common.say(f"{args.method}, projector {args.projector} of {args.projector_parameters:,} parameters")
    probe = common.Probe(model.backbone.feature_dim, train, env)
    run = common.Run(args, env, train, test, model, optimizer, probe)  # goes on where it stopped
    net = common.distribute(model, env, args.compile)  # the model, as the loop calls it
    fixed = common.fixed_batch(train, args, env, augments)  # x1, x2, always the same
    run.draw("views.png", lambda: common.grid(torch.stack(fixed, 1)[:32].flatten(0, 1), 16))

    for epoch in run.epochs():
        for step, (x1, x2), y in run.batches(epoch, augments):
            lr = args.base_lr * args.batch_size / 256
            lr = common.cosine_lr(step, run.total_steps, lr, run.warmup_steps)
            for group, share in zip(optimizer.param_groups, (1, args.bias_lr)):
                group["lr"] = lr * share

            with common.autocast(env.device, args.precision):
                h, z1, z2 = net(x1, x2)
            z1, z2 = common.gather(z1.float()), common.gather(z2.float())  # (N, D), of all ranks
            loss, terms = METHODS[args.method](z1, z2, args)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            terms.update(probe.step(h, y))  # of h detached: it watches, and trains nothing else
            run.log(lr, loss, terms, z1)
            if run.ends(step):
                z1, h = z1.detach(), common.gather(h.detach().float())
                run.attempt("measures", lambda: measures(z1, h))
                run.draw("spectrum.png", lambda: spectrum_picture(z1, h))
        run.save(epoch)
        if run.due(epoch):
            run.attempt("evaluation", lambda: common.evaluate(
                model.backbone, probe, train, test, args, env, initial=initial if run.is_over() else None))
        run.draw("affinity.png", lambda: common.heatmaps(*picture(*model(*fixed)[1:3], args)))
        run.end_epoch(epoch)


if __name__ == "__main__":
    main(parse_args())
