"""SimTrace (UniCLR): Li et al., "A Unified Framework for Contrastive Learning from a Perspective of Affinity Matrix",
arXiv 2211.14516, Sec. 3.2.

    Z    = [z1; z2] (2N, D),  mu = mean of the 2N rows,  S = (Z - mu)^T (Z - mu) / (2N) + eps I
    loss = - Trace[(z1 - mu) S^-1 (z2 - mu)^T] / (2N)                                              Eq. 3 (eps = 0)
         = - Trace[S^-1 (z2 - mu)^T (z1 - mu)] / (2N)                                              Eq. 4: D x D only
"""
import argparse
import copy

import torch
from torch import Tensor, nn

import common

RECIPES = {
    "patterns": dict(arch="resnet18", width=16, projector="512-512-128", epochs=10, batch_size=256, base_lr=3.0,
                     weight_decay=1e-6, warmup_epochs=1),
}
RECIPES["cifar10"] = RECIPES["patterns"]
RECIPES["folder"] = RECIPES["patterns"]


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="simtrace.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, default=1e-4, help="ridge on the covariance S (ours; the paper has none)")
    parser.add_argument("--detach-cov", action="store_true", help="no gradient through mu and S (the authors' port)")
    parser.add_argument("--momentum-encoder", type=float, default=None, metavar="M",
                        help="second view through an EMA copy of the network with this momentum (Sec. 3.3)")
    parser.add_argument("--predictor", action="store_true", help="MLP on top of the first view's embedding (Sec. 3.3)")
    common.add_run_args(parser)
    return common.parse_run_args(parser, RECIPES, argv)


def simtrace_loss(z1: Tensor, z2: Tensor, eps: float = 1e-4, detach_cov: bool = False) -> Tensor:
    """Loss of two views' embeddings, each (N, D): 0-d tensor in [-D/2, D/2], float32 or float64."""
    with torch.autocast(z1.device.type, enabled=False):
        z1, z2 = (z if z.dtype == torch.float64 else z.float() for z in (z1, z2))
        n, d = z1.shape
        mu = torch.cat([z1, z2]).mean(0)
        mu = mu.detach() if detach_cov else mu
        z1, z2 = z1 - mu, z2 - mu
        S = (z1.T @ z1 + z2.T @ z2) / (2 * n) + eps * torch.eye(d, dtype=z1.dtype, device=z1.device)  # (D, D)
        S = S.detach() if detach_cov else S
        L, info = torch.linalg.cholesky_ex(S)  # S = L L^T; unlike cholesky() no wait for the device
        loss = -torch.trace(torch.cholesky_solve(z2.T @ z1, L)) / (2 * n)  # Eq. 4
        return torch.where(info == 0, loss, torch.nan)  # S not positive definite: say so


class Model(nn.Module):
    def __init__(self, args, small_images: bool):
        super().__init__()
        self.backbone = common.resnet(args.arch, args.width, small_images)
        widths, layers = [self.backbone.feature_dim, *map(int, args.projector.split("-"))], []
        for a, b in zip(widths[:-1], widths[1:]):
            layers += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU(True)]
        self.projector = nn.Sequential(*layers[:-1])  # BN only after the last layer
        d = widths[-1]
        self.predictor = nn.Sequential(nn.Linear(d, d, bias=False), nn.BatchNorm1d(d), nn.ReLU(True),
                                       nn.Linear(d, d)) if args.predictor else nn.Identity()
        self.target = None
        if args.momentum_encoder is not None:
            self.target = copy.deepcopy(nn.Sequential(self.backbone, self.projector)).requires_grad_(False)

    def forward(self, x1, x2):
        if self.target is None:
            h = self.backbone(torch.cat([x1, x2]))  # (2N, feature_dim)
            z1, z2 = self.projector(h).chunk(2)  # (N, D) each
        else:
            h = self.backbone(x1)
            z1, z2 = self.projector(h), self.target(x2)
        return h, self.predictor(z1), z2


def whitened_covariances(z1, z2):
    """Covariance of the whitened embeddings of both views, and their cross-covariance"""
    z1, z2 = z1 - z1.mean(0), z2 - z2.mean(0)
    S = (z1.T @ z1 + z2.T @ z2) / (2 * len(z1)) + 1e-4 * torch.eye(z1.shape[1], device=z1.device)
    W = torch.linalg.inv(torch.linalg.cholesky(S)).T
    w1, w2 = z1 @ W, z2 @ W
    return (w1.T @ w1 + w2.T @ w2) / (2 * len(z1)), w1.T @ w2 / len(z1)


def main(args):
    env = common.init_distributed(args.device)
    d = int(args.projector.split("-")[-1])
    if d >= 2 * args.batch_size:
        common.fail(f"the covariance of 2 x {args.batch_size} embeddings of dimension {d} is singular: --batch-size must be "
                    f"above {d // 2}, or the last width of --projector below {2 * args.batch_size}", 2)
    train = common.load_images(args.dataset, args.data_dir, True, env, args.image_size, args.limit_images, unlabelled=True)
    test = common.load_images(args.dataset, args.data_dir, False, env, args.image_size)
    torch.manual_seed(args.seed)
    model = Model(args, train.image_size <= 64).to(env.device, memory_format=torch.channels_last)
    net = common.distribute(model, env, args.compile)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = common.LARS(params, lr=0.0, momentum=0.9, weight_decay=args.weight_decay)
    augment = common.Augment(train.image_size, mean=train.mean, std=train.std)
    run = common.Run(args, env, train, test, model, optimizer, (augment, augment), whitened_covariances)

    for epoch in run.epochs():
        for step, (x1, x2), y in run.batches(epoch):
            lr = common.cosine_lr(step, run.total_steps, args.base_lr * args.batch_size / 256, run.warmup_steps)
            optimizer.param_groups[0]["lr"] = lr
            with common.autocast(env.device, args.precision):
                h, z1, z2 = net(x1, x2)
            z1, z2 = common.gather(z1.float()), common.gather(z2.float())  # (N, D) over all ranks
            loss = simtrace_loss(z1, z2, args.eps, args.detach_cov)
            terms = {"alignment": -2 * loss.detach() / z1.shape[1]}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.momentum_encoder is not None:
                common.ema_update(model.target, nn.Sequential(model.backbone, model.projector), args.momentum_encoder)
            run.log(lr, loss, terms, z1, h, y)
        run.end_epoch(epoch)


if __name__ == "__main__":
    main(parse_args())
