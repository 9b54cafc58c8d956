"""SimWhitening, Sec. 3.1, of UniCLR.

Li et al., "A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix", arXiv
2211.14516; its siblings are simaffinity.py and simtrace.py.

    Z    = [z1; z2] (2N, D),   mu = mean of its 2N rows,   C = (Z - mu)^T (Z - mu) / (2N)
    S    = C + eps (trace(C) / D) I = L L^T
    w    = (z - mu) L^-T                                     whitened rows, Eq. 2 at eps = 0
    A    = norm(w1) norm(w2)^T / tau   (N, N)                norm and Cholesky: the text after Eq. 6
    loss = CE(A, arange(N)) + gamma ||A - A^T||_F            Eq. 2 + gamma Eq. 5 = Eq. 6

SimAffinity on whitened embeddings; the gradient flows through mu and S, of both views together.

eps counts in mean eigenvalues of C, so that no scale of z undoes it. It is what there is to tune: at eps = 0
and D >= 2N (the paper's ImageNet: D 2048, N 512) the loss is a constant, ln N, as 2N points in so many
dimensions whiten to a simplex, wherever they are.

Ours, not the paper's: tau; eps; the mean in --symmetric; the last BatchNorm without scale and shift;
jitter strengths (SimSiam's); a blur of 3 taps at 32 px, which caps sigma near 0.8; no zero-init of residual
branches; EMA copies BatchNorm's buffers; the online probe; recipes of data sets other than cifar10, cifar100,
imagenet100, imagenet.

    torchrun simwhitening.py                                             a CPU: minutes, nothing to download
    torchrun simwhitening.py --dataset cifar10                           a GPU: the paper's recipe
    torchrun --nproc_per_node=8 simwhitening.py --dataset imagenet --data-dir DIR

Measured, k-NN: patterns 79.4 % (n = 1); CIFAR-10, means of three seeds: in ten epochs 62.6 % (62.3 to
62.8), in four of 10,000 images 43.6 %. At initialisation 20.0, 32.2, 27.9 %. Width 16: see
.github/measurements.md.
"""
import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common

CIFAR = dict(arch="resnet18", width=64, projector="2048-2048-256", epochs=1000, batch_size=512, base_lr=0.03,
             weight_decay=1e-6, warmup_epochs=0.0)  # Sec. 4
IMAGENET = dict(CIFAR, arch="resnet50", projector="2048-2048-2048", epochs=200, base_lr=0.05)
RECIPES = {
    "patterns": dict(CIFAR, width=16, projector="512-512-32", epochs=10, batch_size=256, base_lr=3.0,
                     warmup_epochs=1.0),
    "cifar10": CIFAR, "cifar100": CIFAR, "stl10": CIFAR, "tinyimagenet": CIFAR,
    "imagenet100": IMAGENET, "imagenet": dict(IMAGENET, warmup_epochs=10.0),
    "folder": dict(CIFAR, epochs=200, batch_size=256, warmup_epochs=10.0)}


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simwhitening.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tau", type=common.positive, default=0.2, help="temperature (ours)")
    add("--gamma", type=common.rate, default=0.01, help="weight of the symmetry term (Eq. 6)")
    add("--eps", type=common.rate, default=3.0, help="ridge on S, in mean eigenvalues of C (ours)")
    add("--momentum-encoder", type=common.fraction, metavar="M",
        help="second view through an EMA copy, no gradient (Sec. 3); 0: SimSiam's stop-gradient")
    add("--predictor", action="store_true", help="MLP on the online branch (Sec. 3.1, after Eq. 6)")
    add("--symmetric", action="store_true", help="both directions: also the loss of swapped branches")
    common.add_run_args(parser)
    args = common.parse_run_args(parser, RECIPES, argv)
    n, d = args.batch_size, int(args.projector.split("-")[-1])
    if d >= 2 * n and args.eps < 0.1:
        parser.error(f"--batch-size {n}, embedding dimension {d}, --eps {args.eps}: 2 x {n} points in {d} "
                     f"dimensions whiten to a simplex, whatever they are, unless --eps is 0.1 or more")
    return args


def covariance(z1: Tensor, z2: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Both views less their joint mean, (N, D) each, and S (D, D), positive definite even where C is 0."""
    n, d = z1.shape
    mu = torch.cat([z1, z2]).mean(0)  # (D,)
    z1, z2 = z1 - mu, z2 - mu
    C = (z1.T @ z1 + z2.T @ z2) / (2 * n)  # (D, D)
    floor = torch.finfo(C.dtype).eps * mu.square().mean() + 1e-30  # what rounding leaves of a constant (ours)
    return z1, z2, C + (eps * C.trace() / d + floor) * torch.eye(d, dtype=C.dtype, device=C.device)


def whiten(z1: Tensor, z2: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Both views with joint mean 0 and, at eps = 0, covariance I; nan if S is not positive definite."""
    z1, z2, S = covariance(z1, z2, eps)
    L, failed = torch.linalg.cholesky_ex(S)  # S = L L^T; unlike cholesky(), no wait for the device
    w = torch.linalg.solve_triangular(L, torch.cat([z1, z2]).T, upper=False).T  # (2N, D)
    w1, w2 = torch.where(failed == 0, w, torch.nan).chunk(2)
    return w1, w2


def simwhitening_loss(z1: Tensor, z2: Tensor, tau: float = 0.2, gamma: float = 0.01,
                      eps: float = 3.0) -> tuple[Tensor, dict[str, Tensor]]:
    """SimWhitening's loss of two views' embeddings, (N, D) each: a 0-d tensor, float32 or float64, and its
    terms ce and sym, unweighted."""
    if z1.shape != z2.shape:
        raise ValueError(f"the shapes of the views differ: {tuple(z1.shape)} and {tuple(z2.shape)}")
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = (z if z.dtype == torch.float64 else z.float() for z in (z1, z2))
        w1, w2 = whiten(z1, z2, eps)  # (N, D) each
        A = F.normalize(w1, dim=1) @ F.normalize(w2, dim=1).T / tau  # (N, N)
        ce = F.cross_entropy(A, torch.arange(len(A), device=A.device))  # Eq. 2
        sym = torch.linalg.norm(A - A.T)  # Eq. 5
        loss = ce + gamma * sym if gamma else ce  # Eq. 6
        return loss, {"ce": ce.detach(), "sym": sym.detach()}


def mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers, BatchNorm and ReLU after each but the last (Sec. 4); after that BatchNorm without scale
    and shift (ours): a learnt shift is a direction common to all embeddings, into which they can collapse."""
    layers = []
    for a, b in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-2], nn.BatchNorm1d(widths[-1], affine=False))


class Model(nn.Module):
    def __init__(self, args, small_images: bool):
        super().__init__()
        self.backbone = common.resnet(args.arch, args.width, small_images)
        widths = [int(w) for w in args.projector.split("-")]
        self.projector = mlp([self.backbone.feature_dim, *widths])
        self.predictor = mlp([widths[-1]] * 3) if args.predictor else nn.Identity()
        self.symmetric = args.symmetric
        self.target = None  # EMA copy of backbone and projector
        if args.momentum_encoder is not None:
            self.target = copy.deepcopy(nn.Sequential(self.backbone, self.projector)).requires_grad_(False)

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, ...]:
        """Features h; z1 of the online branch and z2 of the other, (N, D) each; if symmetric, then the same
        of the views in the other branch."""
        x, n = torch.cat([x1, x2]), len(x1)
        h = self.backbone(x if self.target is None or self.symmetric else x1)  # (2N or N, feature_dim)
        online = self.projector(h)
        other = online if self.target is None else self.target(x if self.symmetric else x2)
        pair = self.predictor(online[:n]), other[-n:]
        return (h, *pair, self.predictor(online[n:]), other[:n]) if self.symmetric else (h, *pair)


def picture(z1: Tensor, z2: Tensor, args) -> list[Tensor]:
    """The affinity matrix of the whitened embeddings, whose diagonal lights up with training."""
    w1, w2 = whiten(z1.cpu().double(), z2.cpu().double(), args.eps)
    return [F.normalize(w1, dim=1) @ F.normalize(w2, dim=1).T]


def main(args):
    env = common.init_distributed(args.device)
    train, test = common.load_splits(args, env)
    torch.manual_seed(args.seed)
    model = Model(args, train.image_size <= 64).to(env.device, memory_format=torch.channels_last)
    initial = copy.deepcopy(model.backbone)  # to be compared with at the end
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = common.LARS(params, lr=0.0, momentum=0.9, weight_decay=args.weight_decay)
    augment = common.Augment(train.image_size, mean=train.mean, std=train.std)
    probe = common.Probe(model.backbone.feature_dim, train, env)
    run = common.Run(args, env, train, test, model, optimizer, probe)  # goes on where it stopped
    net = common.distribute(model, env, args.compile)  # the model, as the loop calls it
    fixed = common.fixed_batch(train, args, env, (augment, augment))  # x1, x2, always the same
    run.draw("views.png", lambda: common.grid(torch.stack(fixed, 1)[:32].flatten(0, 1), 16))

    for epoch in run.epochs():
        for step, (x1, x2), y in run.batches(epoch, (augment, augment)):
            lr = args.base_lr * args.batch_size / 256
            lr = common.cosine_lr(step, run.total_steps, lr, run.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr

            with common.autocast(env.device, args.precision):
                h, z1, z2, *swapped = net(x1, x2)
            z1, z2, *swapped = (common.gather(z.float()) for z in (z1, z2, *swapped))  # (N, D), of all ranks
            loss, terms = simwhitening_loss(z1, z2, args.tau, args.gamma, args.eps)
            if args.symmetric:
                loss_, terms_ = simwhitening_loss(*swapped, args.tau, args.gamma, args.eps)
                loss, terms = (loss + loss_) / 2, {k: (terms[k] + terms_[k]) / 2 for k in terms}

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.momentum_encoder is not None:
                online = nn.Sequential(model.backbone, model.projector)
                common.ema_update(model.target, online, args.momentum_encoder)
            terms.update(probe.step(h, y))  # of h detached: it watches, and trains nothing else
            run.log(lr, loss, terms, z1)
        run.save(epoch)
        if run.due(epoch):
            run.attempt("evaluation", lambda: common.evaluate(
                model.backbone, probe, train, test, args, env, initial=initial if run.is_over() else None))
        run.draw("affinity.png", lambda: common.heatmaps(*picture(*model(*fixed)[1:3], args)))
        run.end_epoch(epoch)


if __name__ == "__main__":
    main(parse_args())
