"""Margins: Rho et al., "Understanding Contrastive Learning Through the Lens of Margins", arXiv 2306.11526, on
MoCo, SimCLR and BYOL.

    theta_ij = arccos(cos_ij),   p_ij = 1 at row i's positive, else 0
    delta_ij = (cos(theta_ij + m1 p_ij) - m2 p_ij) / tau,   q_i = softmax(delta_i)                    Eq. 4
    loss     = mean_i [-delta_i,pos + beta logsumexp_j delta_ij]     beta 1: InfoNCE, beta 0: BYOL    Eq. 5

What margins do to the gradient by theta_ij is two factors (q~: q without margins), and with m1 = 0, beta = 1
the second is 1 / (1 - a q~_pos), a = 1 - exp(-m2 / tau), for every j (Eq. 7):

    sin(theta_ij + m1 p_ij) / sin(theta_ij)   and   (p_ij - beta q_ij) / (p_ij - beta q~_ij)      Theorem 6

Each of four effects has a switch of its own, which leaves the loss's value alone:

    scale s         the positive's gradient times s                                                   Eq. 9
    curvature c     and times 1 - (theta_pos / pi)^c, less at large angles                        Eq. 10, 11
    ratio_m1        row i's gradient times (1 - beta q) / (1 - beta q~), q with m1 = ratio_m1     Theorem 6
    attenuation a   row i's gradient (type 2: its positive's) times 1 / (1 - a q~): it fades less as q~ -> 1.
                    Type 1 with the a above is exactly the gradient of the subtractive margin m2

MoCo: [positive | queue of earlier keys], keys from an EMA copy of the network. SimCLR: each of 2N embeddings
against the 2N - 1 others. BYOL: a predictor, an EMA copy, beta 0, both directions, whose sum of 2 - 2 cos it
is at tau 0.25, but for a constant; as it has no negatives, m2 and ratio_m1 leave its gradient alone, and
attenuation is a constant. With m1 > 0 the positive's logit falls with its angle up to theta + m1 = pi only.

On ImageNet the paper left "the baselines" as they were: the recipes there are those of MoCo v2, SimCLR and
BYOL. The latter two take a batch of 4096; where memory does not allow that, --batch-size makes it smaller and
the rate goes along, at a price that SimCLR's paper has measured; BYOL's found little of one down to 256.

Ours, not the paper's:
  the curve of Eq. 10 (the simplest with every property that the text states); the m1, m2, s and c of README's
  commands (the paper's are in its appendix, which was not at hand); SimCLR's tau but for ImageNet;
  the heads but for their widths on ImageNet: BatchNorm and ReLU between layers, none after the last (MoCo v2
  has no BatchNorm there, SimCLR one more at the end);
  one augmentation for all, SimSiam's (MoCo v2's too): SimCLR's jitter is twice as strong, BYOL's two views
  differ and are solarized at times, and the crops of both start at 0.08 of the area, not at 0.2;
  at 32 px the blur has three taps, which caps its sigma near 0.8;
  no weight decay on biases and BatchNorm (SimCLR's and BYOL's custom, not MoCo's); no residual branch starts
  at zero; the EMA copy takes over BatchNorm's running statistics as they are, and its rate is constant on all
  sets but ImageNet, for BYOL too;
  the recipes of patterns, imagenet100 (ImageNet's with a batch of 256) and folder;
  the online probe: BatchNorm before it, SGD at rate 0.1.
MoCo shuffles images over GPUs, because a positive shares its query's few-image BatchNorm statistics and the
queue does not. What stands in for it here is one BatchNorm over the whole batch, in one process and on CUDA
over all, which tells little of a single image; on CPUs it is over each rank's.

    torchrun margin_infonce.py --framework simclr                    a CPU: minutes, nothing to download
    torchrun margin_infonce.py --dataset cifar10 --m1 0.2            a GPU: the paper's recipe, MoCo, a margin
    torchrun --nproc_per_node=8 margin_infonce.py --dataset imagenet --scale 2 --curvature 1.5 --data-dir DIR

Measured (k-NN, width 16, n = 1, see .github/measurements.md), MoCo, SimCLR, BYOL: patterns 48.5, 72.5,
60.0 %, at initialisation 20.0 %; CIFAR-10 in ten epochs 48.4, 55.1, 47.0 % (BYOL at tau 1), with
ratio_m1 0.4 47.8, 55.0 %, with m1 0.2 48.7 % (BYOL), at initialisation 32.2 %.
"""
import argparse
import copy
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import utils

import common

# The paper's for all frameworks, after ReSSL; the projector is ours
CIFAR = dict(arch="resnet18", width=64, projector="512-128", epochs=200, batch_size=256, optimizer="sgd",
             base_lr=0.06, weight_decay=5e-4, warmup_epochs=5.0, queue=4096,
             momentum_encoder=0.99)
STL = dict(CIFAR, queue=16384, momentum_encoder=0.996)
# The baselines' own papers'; the 100 epochs are this paper's, and BYOL's rate is the one it has for them
LARGE = dict(CIFAR, arch="resnet50", epochs=100)
IMAGENET = {
    "moco": dict(LARGE, projector="2048-128", base_lr=0.03, weight_decay=1e-4, warmup_epochs=0.0, tau=0.2,
                 queue=65536, momentum_encoder=0.999),
    "simclr": dict(LARGE, projector="2048-128", batch_size=4096, optimizer="lars", base_lr=0.3,
                   weight_decay=1e-6, warmup_epochs=10.0, tau=0.1),
    "byol": dict(LARGE, projector="4096-256", batch_size=4096, optimizer="lars", base_lr=0.45,
                 weight_decay=1.5e-6, warmup_epochs=10.0, momentum_encoder=0.99, final_momentum=1.0)}
RECIPES = {
    "patterns": dict(CIFAR, width=16, projector="512-512-128", epochs=7, base_lr=0.3, warmup_epochs=1.0,
                     queue=2048),
    "cifar10": CIFAR, "cifar100": CIFAR, "stl10": STL, "tinyimagenet": STL, "folder": CIFAR}
# MoCo v2's; ours; with BYOL's the loss is its 2 - 2 cos, summed over both directions, but for a constant
TAU = {"moco": 0.2, "simclr": 0.5, "byol": 0.25}
SWITCHES = ("m1", "m2", "scale", "curvature", "ratio_m1", "attenuation", "attenuation_type")


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="margin_infonce.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    framework = common.chosen(argv, "--framework", "moco")
    add("--framework", choices=tuple(TAU), default=framework, help="decides --tau, on ImageNet all")
    add("--tau", type=common.positive, default=TAU.get(framework),
        help="temperature: moco 0.2, simclr 0.5, on imagenet 0.1, byol 0.25")
    add("--m1", type=common.number(-100, 100), default=0.0, help="angular margin, in radians (Eq. 4)")
    add("--m2", type=common.number(-100, 100), default=0.0, help="subtractive margin (Eq. 4)")
    add("--scale", type=common.positive, default=1.0, help="s, of the positive's gradient (Eq. 9)")
    add("--curvature", type=common.positive, help="c: 1 - (theta / pi)^c on it too (Eq. 10, 11)")
    add("--ratio-m1", type=common.number(-100, 100), default=0.0,
        help="angular margin whose ratio (Theorem 6) each row's gradient gets")
    add("--attenuation", type=common.number(0, 0.999999), default=0.0,
        help="a in [0, 1): 1 / (1 - a q~) on the gradient; 1 - exp(-m2 / tau): that of the margin m2")
    add("--attenuation-type", type=int, choices=(1, 2), default=1, help="1: of a row, 2: of its positive")
    add("--queue", type=common.count, help="keys of earlier batches (moco)")
    add("--momentum-encoder", type=common.fraction, metavar="M", help="momentum of the EMA copy (moco, byol)")
    add("--final-momentum", type=common.fraction, metavar="M",
        help="where half a cosine takes it by the end (BYOL's schedule; default: it stays)")
    add("--optimizer", choices=("sgd", "lars"), help="with momentum 0.9")
    add("--plot-gradients", action="store_true", help="draw margin.png in --out, and do not train")
    common.add_run_args(parser)
    large = IMAGENET.get(framework, {})
    recipes = {**RECIPES, "imagenet": large, "imagenet100": dict(large, batch_size=256)}
    args = common.parse_run_args(parser, recipes, argv)
    args.final_momentum = args.momentum_encoder if args.final_momentum is None else args.final_momentum
    if args.ratio_m1 and (args.m1 or args.m2):
        parser.error("--ratio-m1 is for a loss without margins: leave out --m1 and --m2")
    if args.framework == "moco" and args.queue < args.batch_size:
        parser.error(f"--queue {args.queue} is below --batch-size {args.batch_size}: it holds whole batches")
    return args


def scale_gradient(x: Tensor, w: Tensor) -> Tensor:
    """x, with its gradient times w: w x + stopgrad(x - w x), so written that no digit of x is lost."""
    return x.detach() + w.detach() * (x - x.detach())


def add_angle(cos: Tensor, m1: float) -> Tensor:
    """cos(theta + m1) of cos(theta); cut where sin(theta) < 1e-4, so that the gradient is bounded."""
    if m1 == 0:
        return cos
    sin = ((1 - cos) * (1 + cos)).clamp(min=1e-8).sqrt()
    return cos * math.cos(m1) - sin * math.sin(m1)


def margin_infonce_loss(cos: Tensor, pos: Tensor, *, tau: float, beta: float = 1.0, m1: float = 0.0,
                        m2: float = 0.0, scale: float = 1.0, curvature: float = math.inf,
                        ratio_m1: float = 0.0, attenuation: float = 0.0, attenuation_type: int = 1) -> Tensor:
    """The margin loss of cosines (N, K), row i's positive in column pos[i]: a 0-d tensor, float32 or float64.

    m1 in radians. ValueError for another number of rows, ratio_m1 with m1 or m2, curvature not above 0,
    attenuation outside [0, 1), an unknown type."""
    if pos.shape != cos.shape[:1]:
        raise ValueError(f"cosines {tuple(cos.shape)} and positives {tuple(pos.shape)} differ in rows")
    if ratio_m1 and (m1 or m2):
        raise ValueError("ratio_m1 is for a loss without margins: m1 and m2 must be 0")
    if not curvature > 0:
        raise ValueError(f"curvature {curvature} is not above 0")
    if not 0 <= attenuation < 1 or attenuation_type not in (1, 2):
        raise ValueError(f"attenuation {attenuation} is not in [0, 1), or type {attenuation_type} not 1 or 2")
    with torch.autocast(cos.device.type, enabled=False):
        cos = cos if cos.dtype == torch.float64 else cos.float()
        column = pos[:, None]
        cos_pos = cos.gather(1, column)  # (N, 1)

        negatives = (cos / tau).scatter_(1, column, -math.inf).logsumexp(1, keepdim=True)  # (N, 1)

        def softmax_pos(delta):  # the positive's probability if delta is its logit
            return (delta - negatives).sigmoid()

        def one_minus_beta_q(delta):  # so that it does not round to 0 with q near 1
            return 1 - beta + beta * (negatives - delta).sigmoid()

        delta_pos = (add_angle(cos_pos, m1) - m2) / tau  # Eq. 4
        of_pos, of_row = torch.full_like(cos_pos, scale), torch.ones_like(cos_pos)  # (N, 1), Eq. 9
        with torch.no_grad():
            if curvature < math.inf:
                of_pos = of_pos * (1 - (cos_pos.clamp(-1, 1).acos() / math.pi) ** curvature)  # Eq. 10, 11
            if ratio_m1:
                q_ratio = one_minus_beta_q(add_angle(cos_pos, ratio_m1) / tau)
                of_row = of_row * q_ratio / one_minus_beta_q(cos_pos / tau).clamp(min=1e-30)
            if attenuation and attenuation_type == 1:
                of_row = of_row / (1 - attenuation * softmax_pos(cos_pos / tau))
            elif attenuation:
                of_pos = of_pos / (1 - attenuation * softmax_pos(cos_pos / tau))

        delta_pos = scale_gradient(delta_pos, of_pos)
        # Eq. 5, beta logsumexp_j delta_j - delta_pos, as log q = logsigmoid(delta_pos - negatives)
        loss = -beta * F.logsigmoid(delta_pos - negatives) - (1 - beta) * delta_pos
        return scale_gradient(loss, of_row).mean()


def similarities(framework: str, z1: Tensor, z2: Tensor, queue: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines (rows, K) and positives' columns (rows,) of two views' embeddings, (N, D) each, or, for BYOL,
    of predictions and targets in both directions, (2N, D) each. ValueError for different shapes."""
    if z1.shape != z2.shape:
        raise ValueError(f"embeddings of different shapes, {tuple(z1.shape)} and {tuple(z2.shape)}")
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    first = torch.zeros(len(z1), dtype=torch.long, device=z1.device)
    if framework == "simclr":
        z, n = torch.cat([z1, z2]), 2 * len(z1)
        # without the diagonal: but for the first, its entries are n + 1 apart
        cos = (z @ z.T).flatten()[1:].view(n - 1, n + 1)[:, :-1].reshape(n, n - 1)
        own = torch.arange(n // 2, device=z.device)
        return cos, torch.cat([own + n // 2 - 1, own])
    cos = (z1 * z2).sum(1, keepdim=True)
    return (torch.cat([cos, z1 @ queue.T], dim=1) if framework == "moco" else cos), first


def switches(args) -> dict:
    """margin_infonce_loss's arguments from the command line; a curvature not given is infinite, so off."""
    given = {name: getattr(args, name) for name in SWITCHES}
    return {**given, "curvature": math.inf if args.curvature is None else args.curvature}


def gradient_factors(args) -> list[list[Tensor]]:
    """Four panels of three curves (360,), factors on the gradient, with one negative that makes q~.

    Over the positive's angle, 0 to pi, at q~ 0.5, on the positive and then on the negative: the two factors
    of Theorem 6 (q with ratio_m1 for m1, if that is given) and the factor of all settings together. The
    latter on the positive, over its angle for q~ 0.1, 0.5, 0.9, and over q~, 0 to 1, for 20, 60, 100 degrees.
    BYOL has no negatives: the factors there are 0, and q~ is 1."""
    beta, byol = float(args.framework != "byol"), args.framework == "byol"

    def probability(theta, q0, m1, m2):  # the positive's, q0 without margins
        return (((theta + m1).cos() - theta.cos() - m2) / args.tau + (q0 / (1 - q0)).log()).sigmoid()

    def gradient(theta, q0, **options):  # by autograd, of the positive and of the negative: (360, 2)
        cos = theta.cos()
        cos = torch.stack([cos, cos + args.tau * (1 / q0 - 1).log()], 1)
        cos = (cos[:, :1] if byol else cos).requires_grad_()
        pos = torch.zeros(len(cos), dtype=torch.long)
        loss = margin_infonce_loss(cos, pos, tau=args.tau, beta=beta, **options)
        return F.pad(torch.autograd.grad(loss, cos)[0], (0, int(byol)))

    def together(theta, q0):
        return (gradient(theta, q0, **switches(args)) / gradient(theta, q0)).nan_to_num(0).unbind(1)

    x = (torch.arange(360, dtype=torch.float64) + 0.5) / 360
    theta, half, one = x * math.pi, torch.full_like(x, 0.5), torch.ones_like(x)
    q = probability(theta, half, args.m1 or args.ratio_m1, args.m2)
    sines = (theta + args.m1).sin() / theta.sin()
    positive, negative = together(theta, half)
    return [[sines, (1 - beta * q) / (1 - beta * half), positive],
            [one * beta, beta * (1 - q) / (1 - half), negative],
            [together(theta, torch.full_like(x, value))[0] for value in (0.1, 0.5, 0.9)],
            [together(torch.full_like(x, math.radians(angle)), x)[0] for angle in (20, 60, 100)]]


def gradient_picture(args) -> Tensor:
    """The panels of gradient_factors, two by two. -> (3, H, W)"""
    panels = gradient_factors(args)
    values = torch.cat([curve for panel in panels for curve in panel])  # a margin's have no bound at 0 and pi
    low, high = math.floor(min(0.0, values.quantile(0.05))), math.ceil(max(2.0, 1.05 * values.quantile(0.95)))
    none, all_ = ": none in BYOL" if args.framework == "byol" else "", "both and the switches"
    texts = [("Theorem 6: factor on the positive's gradient, over its angle; q~ 0.5",
              ("sin(theta + m1) / sin(theta)", "(1 - q) / (1 - q~)", all_)),
             (f"Theorem 6: factor on a negative's gradient{none}, over the positive's angle; q~ 0.5",
              ("1", "q_j / q~_j", all_)),
             ("All of it on the positive's gradient, over its angle", ("q~ 0.1", "q~ 0.5", "q~ 0.9")),
             ("All of it on the positive's gradient, over q~", ("20 degrees", "60 degrees", "100 degrees"))]
    x = (torch.arange(360) + 0.5) / 360
    charts = [common.plot(title, {name: (x if "over q~" in title else 180 * x, curve)
                                  for name, curve in zip(names, curves)}, low, high)
              for curves, (title, names) in zip(panels, texts)]
    return torch.cat([torch.cat(charts[:2], dim=2), torch.cat(charts[2:], dim=2)], dim=1)


def plot(args):
    path = Path(args.out) / "margin.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    common.write_file(path, lambda file: utils.save_image(gradient_picture(args), file, format="png"))
    print(f"{path} is drawn")


def mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers, BatchNorm and ReLU after each but the last."""
    layers = []
    for a, b in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-2])


class Model(nn.Module):
    def __init__(self, args, small_images: bool):
        super().__init__()
        self.framework = args.framework
        self.backbone = common.resnet(args.arch, args.width, small_images)
        widths = [int(w) for w in args.projector.split("-")]
        self.projector = mlp([self.backbone.feature_dim, *widths])
        byol = args.framework == "byol"
        self.predictor = mlp([widths[-1], widths[0], widths[-1]]) if byol else nn.Identity()
        self.target = None
        self.register_buffer("queue", None)
        if args.framework != "simclr":  # EMA copy: MoCo's key encoder, BYOL's target
            self.target = copy.deepcopy(nn.Sequential(self.backbone, self.projector)).requires_grad_(False)
        if args.framework == "moco":
            self.register_buffer("queue", F.normalize(torch.randn(args.queue, widths[-1]), dim=1))
            self.register_buffer("queue_ptr", torch.tensor(0))

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.framework == "moco":
            h = self.backbone(x1)  # (N, feature_dim)
            return h, self.projector(h), self.target(x2)  # (N, D) each
        h = self.backbone(torch.cat([x1, x2]))  # (2N, feature_dim)
        z = self.projector(h)
        if self.framework == "byol":
            return h, self.predictor(z), self.target(torch.cat([x2, x1]))  # (2N, D) each
        return h, *z.chunk(2)  # (N, D) each

    @torch.no_grad()
    def enqueue(self, keys: Tensor):
        """Write keys (N, D) over the oldest, around the end of the queue if need be."""
        at = (self.queue_ptr + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[at] = F.normalize(keys, dim=1)
        self.queue_ptr.add_(len(keys)).remainder_(len(self.queue))


def picture(z1: Tensor, z2: Tensor, args) -> list[Tensor]:
    """The cosines of the two views' embeddings (BYOL: predictions and targets): the diagonal lights up."""
    return [F.normalize(z1, dim=1) @ F.normalize(z2, dim=1).T]


def main(args):
    env = common.init_distributed(args.device)
    if args.plot_gradients:
        common.on_rank0(lambda: plot(args), env)
        return
    train, test = common.load_splits(args, env)
    torch.manual_seed(args.seed)
    model = Model(args, train.image_size <= 64).to(env.device, memory_format=torch.channels_last)
    initial = copy.deepcopy(model.backbone)  # to be compared with at the end
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim <= 1]}]
    groups[0]["weight_decay"] = args.weight_decay
    optimizer = {"sgd": torch.optim.SGD, "lars": common.LARS}[args.optimizer](groups, lr=0.0, momentum=0.9)
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
                h, z1, z2 = net(x1, x2)
            z1, z2 = common.gather(z1.float()), common.gather(z2.float())  # (N, D), of all ranks; BYOL: 2N
            cos, pos = similarities(args.framework, z1, z2, model.queue)
            loss = margin_infonce_loss(cos, pos, tau=args.tau, beta=float(args.framework != "byol"),
                                       **switches(args))
            terms = {"positive_cos": cos.detach().gather(1, pos[:, None]).mean()}

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if model.target is not None:
                online, final = nn.Sequential(model.backbone, model.projector), args.final_momentum
                momentum = common.cosine_lr(step, run.total_steps, args.momentum_encoder, final_lr=final)
                common.ema_update(model.target, online, momentum)
            if args.framework == "moco":  # after the logits: no key is its own negative
                model.enqueue(z2)
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
