"""SANE: Zhou et al., "A Theory-Driven Self-Labeling Refinement Method for Contrastive Representation
Learning", arXiv 2106.14749. MoCo, with labels that a refinery softens and with momentum mixup.

    z1_i = norm(f(x1_i)),   z2_i = norm(g(x2_i)),   g an EMA copy of f, no gradient
    B    = [z2 of this batch; queue of earlier z2]   (K, D): row i's positive is column i
    p_i  = softmax(z2_i B^T / (tau tau')),   q_i = the same without column i                  before Eq. 5
    z    = 1 + mu max p_i + mu max q_i,   alpha = mu max p_i / z,   beta = mu max q_i / z
    ybar_i = (1 - alpha - beta) onehot_i + alpha p_i + beta q_i           the refined label       Eq. 5
    x'_i = theta x1_i + (1 - theta) x2_j,   y'_i = theta ybar_i + (1 - theta) ybar_j,   j = perm(i)   Eq. 8
    loss = (1 - lam) CE(z1 B^T / tau, onehot) + lam CE(norm(f(x')) B^T / tau, y')                 Eq. 4, 9

Keys of like images lie near each other: a one-hot label pushes the query away from them, a refined label does
not. mu, the refinery's weight, grows from m1 to m2 with training. theta ~ Beta(kappa, kappa).

The paper's main text has all of the above; network, a head of three layers, epochs, queue, tau, tau', kappa,
m1, m2 of cifar10 and imagenet; imagenet's batch of 256; k and tau of cifar10's k-NN; the sizes of the crops.
Its App. B, which was not at hand, has lam, rate, weight decay and the head. Ours, not the paper's:
  p from the key encoder (its formula is not in the text at hand); lam 0.5, said to matter little;
  SGD, rate, warm-up, weight decay, cifar10's batch and the rate of the EMA (MoCo's customs); no decay of
  biases and BatchNorm; the EMA copy takes over BatchNorm's running statistics as they are;
  the head's widths, BatchNorm after each layer; no residual branch starts at zero;
  jitter's strengths, SimSiam's; at 32 px the blur has three taps, which caps its sigma near 0.8;
  the mixup's partner j: a permutation of the process's own share of the batch; x2 resized to a small crop;
  --strong after CLSA (2104.07713), after the weak operations, with its code's ranges; its level as a whole
  number of 1 to 9, to which its factors of .14 to .86 point, turning and shearing about the centre onto
  black; small crops' share of the area as CLSA's; on images up to 64 px a full-sized crop of its own;
  all recipes but cifar10's and imagenet's; the online probe: BatchNorm before it, SGD at rate 0.1.
MoCo shuffles images over GPUs, because a positive shares its query's BatchNorm statistics and the queue does
not. Nothing is shuffled here: BatchNorm sees the whole batch in one process, and on CUDA over all; on CPUs,
each rank's.

    torchrun sane.py                                                a CPU: minutes, nothing to download
    torchrun sane.py --dataset cifar10                              a GPU: the paper's recipe (--arch
                                                                    resnet18 is cheaper)
    torchrun --nproc_per_node=8 sane.py --dataset imagenet --crops multi --strong --data-dir DIR

Measured (k-NN, width 16, n = 1, AMD EPYC, see .github/measurements.md): patterns 50.6 %; CIFAR-10 in ten
epochs 56.7 %, MoCo (--lam 0) 49.9 %; initialisation 20.0, 32.2 %. The paper's recipes have not been run.
"""
import argparse
import copy
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as TF

import common

CIFAR = dict(arch="resnet50", width=64, projector="2048-2048-128", epochs=2000, batch_size=256, base_lr=0.06,
             weight_decay=5e-4, warmup_epochs=5.0, queue=4096, momentum_encoder=0.99, tau=0.2,
             tau_prime=0.8, kappa=2.0, m1=0.0, m2=1.0)
IMAGENET = dict(CIFAR, epochs=200, base_lr=0.03, weight_decay=1e-4, warmup_epochs=0.0, queue=65536,
                momentum_encoder=0.999, tau_prime=1.0, kappa=0.1, m1=0.5, m2=10.0)
SMALL = dict(CIFAR, arch="resnet18", epochs=1000)
RECIPES = {
    "patterns": dict(SMALL, width=16, projector="512-512-128", epochs=7, base_lr=0.3, warmup_epochs=1.0,
                     queue=2048),
    "cifar10": CIFAR, "cifar100": CIFAR, "stl10": SMALL, "tinyimagenet": SMALL,
    "imagenet100": IMAGENET, "imagenet": IMAGENET, "folder": dict(SMALL, epochs=200)}
KNN = {"cifar10": dict(k=50, tau=0.05)}  # Sec. 4; elsewhere common's


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sane.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tau", type=common.positive, help="temperature of the loss (Eq. 4)")
    add("--tau-prime", type=common.positive, help="times tau: temperature of p and q (before Eq. 5)")
    add("--m1", type=common.rate, help="mu at the first step (Sec. 4)")
    add("--m2", type=common.rate, help="mu at the end")
    add("--kappa", type=common.positive, help="theta ~ Beta(kappa, kappa) (Eq. 8)")
    add("--lam", type=common.fraction, default=0.5, help="weight of the mixup loss (Eq. 9; ours); 0: MoCo")
    add("--queue", type=common.count, help="keys of earlier batches")
    add("--momentum-encoder", type=common.fraction, metavar="M", help="of the key encoder, an EMA copy")
    add("--crops", choices=("single", "multi"), default="single",
        help="of images above 64 px, mix one crop of 96/224 of the size, or five of 224, 192, 160, 128, 96")
    add("--strong", action="store_true",
        help="on the crops to mix, after the weak operations, CLSA's 14: five draws, p .5")
    add("--ablation", choices=("none", "no-p", "no-q", "no-mixup", "vanilla-mixup"), default="none",
        help="leave out a part of the refinery or the mixup, or mix queries with queries")
    common.add_run_args(parser)
    args = common.parse_run_args(parser, RECIPES, argv)
    if args.queue < args.batch_size:
        parser.error(f"--queue {args.queue} is below --batch-size {args.batch_size}: it holds whole batches")
    return args


@torch.no_grad()
def refine_labels(key_cos: Tensor, tau: float, tau_prime: float, mu: float, use_p: bool = True,
                  use_q: bool = True) -> Tensor:
    """Refined labels ybar of Eq. 5, (s, K), rows sum to 1, float32 or float64, without gradient. ValueError
    for fewer columns than rows.

    key_cos: (s, K), K > 1, cosines of each positive's key with all keys; row i's positive is column i.
    mu = 0 gives one-hot labels exactly. use_p, use_q: the two terms of the paper's component study."""
    if key_cos.shape[1] < len(key_cos):
        raise ValueError(f"cosines {tuple(key_cos.shape)}: each row's positive needs a column")
    with torch.autocast(key_cos.device.type, enabled=False):
        logits = (key_cos if key_cos.dtype == torch.float64 else key_cos.float()) / (tau * tau_prime)
        onehot = torch.eye(*logits.shape, dtype=logits.dtype, device=logits.device)  # (s, K)
        p = logits.softmax(1)  # before Eq. 5
        q = logits.masked_fill(onehot.bool(), -math.inf).softmax(1)
        a, b = mu * use_p * p.amax(1, keepdim=True), mu * use_q * q.amax(1, keepdim=True)  # (s, 1)
        z = 1 + a + b
        return onehot / z + a / z * p + b / z * q  # Eq. 5, as 1 - alpha - beta = 1 / z


def momentum_mixup(x: Tensor, x_key: Tensor, labels: Tensor, theta: Tensor,
                   perm: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8: images theta x + (1 - theta) x_key[perm], and their labels with the same theta and permutation.

    x: (s, 3, H, W) crops of the queries; x_key: the same shape, of the positives, which went through the key
    encoder; labels: (s, K); theta, perm: (s,)."""
    t = theta.view(-1, 1, 1, 1)
    mixed = t * x + (1 - t) * x_key[perm]
    t = theta.view(-1, 1)
    return mixed, t * labels + (1 - t) * labels[perm]


def soft_infonce_loss(cos: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Eq. 4: cross-entropy of softmax(cos / tau) with soft labels, both (s, K): a 0-d tensor, float32 or
    float64. ValueError for different shapes."""
    if cos.shape != labels.shape:
        raise ValueError(f"cosines {tuple(cos.shape)} and labels {tuple(labels.shape)} differ in shape")
    with torch.autocast(cos.device.type, enabled=False):
        cos = cos if cos.dtype == torch.float64 else cos.float()
        return -(labels.to(cos.dtype) * F.log_softmax(cos / tau, dim=1)).sum(1).mean()


def mu_schedule(step: int, total: int, m1: float, m2: float) -> float:
    """mu of a step: from m1 at step 0 along half a cosine to m2 at step `total`."""
    return m2 - (m2 - m1) * (math.cos(math.pi * step / total) + 1) / 2


def affine(x: Tensor, angle=0.0, right=0.0, down=0.0, shear_x=0.0, shear_y=0.0) -> Tensor:
    """Squares (n, 3, H, H), each turned by `angle` degrees, moved by shares of its size, sheared by slopes,
    about its centre; numbers or (n, 1, 1, 1). The nearest pixel, black outside."""
    n, size = len(x), x.shape[3]
    angle, right, down, shear_x, shear_y = (
        torch.as_tensor(v, device=x.device).float().flatten().expand(n)
        for v in (angle, right, down, shear_x, shear_y))
    cos, sin = angle.deg2rad().cos(), angle.deg2rad().sin()
    right, down = (-2 * (share * size).round() / size for share in (right, down))  # whole pixels
    theta = torch.stack([cos, sin + shear_x, right, shear_y - sin, cos, down], 1).view(n, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x.float(), grid, "nearest", align_corners=False).to(torch.uint8)


def blend(x: Tensor, other: Tensor, v: Tensor) -> Tensor:
    """From `other` to x, the further the stronger v."""
    return other.float().lerp(x.float(), 0.9 * v.abs() + 0.05).to(torch.uint8)


OPERATIONS = {  # CLSA's 14, of uint8 images (n, 3, H, H) and strengths v (n, 1, 1, 1) in [-1, 1]
    "shear x": lambda x, v: affine(x, shear_x=0.3 * v),
    "shear y": lambda x, v: affine(x, shear_y=0.3 * v),
    "translate x": lambda x, v: affine(x, right=0.3 * v),
    "translate y": lambda x, v: affine(x, down=0.3 * v),
    "rotate": lambda x, v: affine(x, angle=30 * v),  # these five heed the sign of v
    "auto-contrast": lambda x, v: TF.autocontrast(x),
    "identity": lambda x, v: x,  # CLSA's paper lists invert
    "equalize": lambda x, v: TF.equalize(x),
    "solarize": lambda x, v: torch.where(x >= 256 - (256 * v.abs()).floor(), 255 - x, x),
    "posterize": lambda x, v: x - x % 2 ** (4 - (4 * v.abs()).byte()),
    "contrast": lambda x, v: blend(x, TF.rgb_to_grayscale(x).float().mean((1, 2, 3), keepdim=True), v),
    "colour": lambda x, v: blend(x, TF.rgb_to_grayscale(x), v),
    "brightness": lambda x, v: blend(x, torch.zeros_like(x), v),
    "sharpness": lambda x, v: blend(x, TF.adjust_sharpness(x, 0.0), v)}


class StrongAugment:
    """For common.Augment: all that it does, then five draws of an operation for each image, each applied with
    p .5, with a level of 1 to 9 in tenths for a strength and either sign; images of one draw together."""

    def __init__(self, size: int, crop_scale, mean, std):
        self.size, self.crop_scale, self.mean, self.std = size, crop_scale, mean, std
        self.weak = common.Augment(size, crop_scale, mean=(0,) * 3, std=(1,) * 3)

    def __call__(self, images: Tensor, crop: bool = True) -> Tensor:
        x = (self.weak(images, crop) * 255).round().to(torch.uint8)
        n, names = len(x), [*OPERATIONS]
        for _ in range(5):  # draws on the CPU, so that a GPU is not waited for
            kinds = torch.randint(len(names), (n,)).where(torch.rand(n) < 0.5, names.index("identity"))
            v = torch.randint(1, 10, (n,)) * (2 * torch.randint(2, (n,)) - 1) / 10
            order, counts = kinds.argsort(), kinds.bincount(minlength=len(names)).tolist()
            order, v = (t.to(x.device, non_blocking=True) for t in (order, v[order].view(n, 1, 1, 1)))
            for name, at, strength in zip(names, order.split(counts), v.split(counts)):
                if name != "identity" and len(at):
                    x[at] = OPERATIONS[name](x[at], strength)
        return TF.normalize(x / 255, self.mean, self.std)


def mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers, BatchNorm after each, ReLU after each but the last."""
    layers = []
    for a, b in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


class Model(nn.Module):
    def __init__(self, args, small_images: bool):
        super().__init__()
        self.backbone = common.resnet(args.arch, args.width, small_images)
        widths = [int(w) for w in args.projector.split("-")]
        self.projector = mlp([self.backbone.feature_dim, *widths])
        self.target = copy.deepcopy(nn.Sequential(self.backbone, self.projector)).requires_grad_(False)  # g
        self.register_buffer("queue", F.normalize(torch.randn(args.queue, widths[-1]), dim=1))
        self.register_buffer("queue_y", torch.full((args.queue,), -1))  # classes, to watch the refinery by
        self.register_buffer("queue_ptr", torch.tensor(0))

    def forward(self, x1: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        h = self.backbone(x1)  # (N, feature_dim)
        return h, self.projector(h), *(self.projector(self.backbone(x)) for x in others)  # (N, D) each

    @torch.no_grad()
    def enqueue(self, keys: Tensor, y: Tensor | None):
        """Write keys (N, D) over the oldest, around the end of the queue if need be."""
        at = (self.queue_ptr + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[at] = keys
        if y is not None:
            self.queue_y[at] = y
        self.queue_ptr.add_(len(keys)).remainder_(len(self.queue))


def picture(z1: Tensor, z2: Tensor, args) -> list[Tensor]:
    """The cosines of the two views' embeddings, whose diagonal lights up with training."""
    return [F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T]


def small_crops(args, data: common.Images) -> list:
    """An augmentation for each further view that is mixed: the small crops of large images, whose scale goes
    with their size. Small images are mixed as x1 or, if --strong, as one view more."""
    size, pixels = data.image_size, (224, 192, 160, 128, 96) if args.crops == "multi" else (96,)
    if size <= 64:
        pixels = (224,) if args.strong else ()
        if args.crops == "multi":
            common.say(f"warning: --crops multi is for images above 64 px, and these have {size}", sys.stderr)
    shares = [p / 224 for p in pixels] if args.lam else []
    augment = StrongAugment if args.strong else common.Augment
    return [augment(round(size * s), (0.2 * s, s), mean=data.mean, std=data.std) for s in shares]


def mix(x1: Tensor, x2: Tensor, crops: list[Tensor], labels: Tensor, args) -> tuple[list, list]:
    """Mixed queries and their labels: of each crop, or of x1 if there is none. Draws by torch's generator."""
    pairs = []
    for x in (crops or [x1]) if args.lam else []:
        kappa = torch.full((len(x),), args.kappa, device=x.device)
        theta = torch.distributions.Beta(kappa, kappa, validate_args=False).sample()
        theta = torch.ones_like(theta) if args.ablation == "no-mixup" else theta
        x_key = x if args.ablation == "vanilla-mixup" else TF.resize(x2, x.shape[2:])
        pairs.append(momentum_mixup(x, x_key, labels, theta, torch.randperm(len(x), device=x.device)))
    return [x for x, _ in pairs], [y for _, y in pairs]


def same_class(labels: Tensor, y: Tensor, keys_y: Tensor) -> Tensor:
    """Of the weight that refined labels (s, K) put off the positives, the share on keys of the same class."""
    known = (y >= 0)[:, None] & (keys_y >= 0)  # neither images without label nor the queue's random start
    weight = labels * known * (1 - torch.eye(*labels.shape, device=labels.device))
    return (weight * (y[:, None] == keys_y)).sum() / weight.sum().clamp(min=1e-12)


def labels_picture(model: nn.Module, x1: Tensor, x2: Tensor) -> Tensor:
    """Twelve rows of ten images: a query, its positive, and the eight other keys of this batch to which its
    refined label gives most weight: the nearest to the positive's key. -> (12, 10, 3, H, W)"""
    keys = F.normalize(model.target(x2).float(), dim=1)
    cos = (keys @ keys.T).fill_diagonal_(-2)  # p and q rise with it
    best = cos[:12].topk(min(8, len(keys) - 1), dim=1).indices  # (12, 8)
    return torch.cat([x1[:12, None], x2[:12, None], x2[best]], 1)


def main(args):
    env = common.init_distributed(args.device)
    train, test = common.load_splits(args, env)
    torch.manual_seed(args.seed)
    model = Model(args, train.image_size <= 64).to(env.device, memory_format=torch.channels_last)
    initial = copy.deepcopy(model.backbone)  # to be compared with at the end
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim <= 1]}]
    groups[0]["weight_decay"] = args.weight_decay
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    augment = common.Augment(train.image_size, mean=train.mean, std=train.std)
    views = (augment, augment, *small_crops(args, train))
    probe = common.Probe(model.backbone.feature_dim, train, env)
    run = common.Run(args, env, train, test, model, optimizer, probe)  # goes on where it stopped
    net = common.distribute(model, env, args.compile)  # the model, as the loop calls it
    fixed = common.fixed_batch(train, args, env, views[:2])  # x1, x2, always the same
    run.draw("views.png", lambda: common.grid(torch.stack(fixed, 1)[:32].flatten(0, 1), 16))

    for epoch in run.epochs():
        for step, (x1, x2, *crops), y in run.batches(epoch, views):
            lr = args.base_lr * args.batch_size / 256
            lr = common.cosine_lr(step, run.total_steps, lr, run.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            mu = mu_schedule(step, run.total_steps, args.m1, args.m2)

            with torch.no_grad(), common.autocast(env.device, args.precision):
                z2 = F.normalize(model.target(x2).float(), dim=1)  # (N / world, D), this rank's keys
            new_keys, new_y = common.gather(z2), None if y is None else common.gather(y)  # of all ranks
            first = -env.rank * len(z2)  # own keys first: row i's positive is column i on every rank
            keys = torch.cat([new_keys.roll(first, 0), model.queue])  # (K, D)
            labels = refine_labels(z2 @ keys.T, args.tau, args.tau_prime, mu, args.ablation != "no-p",
                                   args.ablation != "no-q")  # (N / world, K)

            mixed, mixed_labels = mix(x1, x2, crops, labels, args)

            with common.autocast(env.device, args.precision):
                h, z1, *z_mixed = net(x1, *mixed)
            onehot = torch.eye(*labels.shape, device=labels.device)
            vanilla, *mixup = (soft_infonce_loss(F.normalize(z.float(), dim=1) @ keys.T, target, args.tau)
                               for z, target in zip([z1, *z_mixed], [onehot, *mixed_labels]))
            mixup = torch.stack(mixup).mean() if mixup else torch.zeros_like(vanilla)
            vanilla, mixup = common.gather(torch.stack([vanilla, mixup])[None]).mean(0)  # of all ranks' rows
            loss = (1 - args.lam) * vanilla + args.lam * mixup  # Eq. 9

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            online = nn.Sequential(model.backbone, model.projector)
            common.ema_update(model.target, online, args.momentum_encoder)
            terms = {"vanilla": vanilla.detach(), "mixup": mixup.detach(), "mu": torch.tensor(mu)}
            if y is not None:  # only to watch the refinery by
                terms["same_class"] = same_class(labels, y, torch.cat([new_y.roll(first, 0), model.queue_y]))
            model.enqueue(new_keys, new_y)
            terms.update(probe.step(h, y))  # of h detached: it watches, and trains nothing else
            run.log(lr, loss, terms, z1)
        run.save(epoch)
        if run.due(epoch):
            run.attempt("evaluation", lambda: common.evaluate(
                model.backbone, probe, train, test, args, env, initial=initial if run.is_over() else None,
                **KNN.get(args.dataset, {})))
        run.draw("affinity.png", lambda: common.heatmaps(*picture(*model(*fixed)[1:3], args)))
        run.draw("labels.png", lambda: common.grid(
            labels_picture(model, *fixed).flatten(0, 1), min(10, 1 + args.batch_size)))
        run.end_epoch(epoch)


if __name__ == "__main__":
    main(parse_args())
