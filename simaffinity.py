"""SimAffinity, Sec. 3.1, of UniCLR.

Li et al., "A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix", arXiv
2211.14516; its siblings are simwhitening.py and simtrace.py.

    A    = norm(z1) norm(z2)^T / tau   (N, N)
    loss = CE(A, arange(N)) + gamma ||A - A^T||_F            Eq. 1 + gamma Eq. 5 = Eq. 6

CE, one direction only, asks each row of A to be largest on the diagonal, against N - 1 negatives; the
symmetry term asks both views to agree on who resembles whom. It is a norm, not a mean: relative to CE its
gradient grows with sqrt(N), and gamma means more in a larger batch. With --predictor or --momentum-encoder
A is not symmetric by itself: there the term won over CE and a short training learnt nothing, with --gamma 0
it did (n = 1 each).

Ours, not the paper's: tau; the mean in --symmetric; the last BatchNorm without scale and shift;
jitter strengths (SimSiam's); a blur of 3 taps at 32 px, which caps sigma near 0.8; no zero-init of residual
branches; EMA copies BatchNorm's buffers; the online probe; recipes of data sets other than cifar10, cifar100,
imagenet100, imagenet.

    torchrun simaffinity.py                                             a CPU: minutes, nothing to download
    torchrun simaffinity.py --dataset cifar10                           a GPU: the paper's recipe
    torchrun --nproc_per_node=8 simaffinity.py --dataset imagenet --data-dir DIR

Measured, k-NN: patterns 77.8 % (n = 1); CIFAR-10, means of three seeds: in ten epochs 60.4 % (60.1 to
60.7), in four of 10,000 images 43.1 %. At initialisation 20.0, 32.2, 27.9 %. Width 16: see
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
    parser = argparse.ArgumentParser(prog="simaffinity.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tau", type=common.positive, default=0.2, help="temperature (ours)")
    add("--gamma", type=common.rate, default=0.01, help="weight of the symmetry term (Eq. 6)")
    add("--momentum-encoder", type=common.fraction, metavar="M",
        help="second view through an EMA copy, no gradient (Sec. 3); 0: SimSiam's stop-gradient")
    add("--predictor", action="store_true", help="MLP on the online branch (Sec. 3.1, after Eq. 6)")
    add("--symmetric", action="store_true", help="both directions: also the loss of swapped branches")
    common.add_run_args(parser)
    args = common.parse_run_args(parser, RECIPES, argv)
    return args


def simaffinity_loss(z1: Tensor, z2: Tensor, tau: float = 0.2,
                     gamma: float = 0.01) -> tuple[Tensor, dict[str, Tensor]]:
    """SimAffinity's loss of two views' embeddings, (N, D) each: a 0-d tensor, float32 or float64, and its
    terms ce and sym, unweighted."""
    if z1.shape != z2.shape:
        raise ValueError(f"the shapes of the views differ: {tuple(z1.shape)} and {tuple(z2.shape)}")
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = (z if z.dtype == torch.float64 else z.float() for z in (z1, z2))
        A = F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T / tau  # (N, N)
        ce = F.cross_entropy(A, torch.arange(len(A), device=A.device))  # Eq. 1
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
    """The affinity matrix, whose diagonal lights up with training."""
    return [F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T]


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
            loss, terms = simaffinity_loss(z1, z2, args.tau, args.gamma)
            if args.symmetric:
                loss_, terms_ = simaffinity_loss(*swapped, args.tau, args.gamma)
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
