"""What every script needs and a reader of the papers would skip. A section uses those above it only:

    processes               several of them or one, and how they end
    network and optimiser   ResNet, EMA, LARS, the learning rate, bf16
    augmentation            SimCLR's, of a whole batch on its device
    data                    images, in memory or in files, and batches of them
    evaluation              features, k-NN, the online probe, RankMe
    files and pictures      what a kill leaves whole; plots and heat maps
    command line            the flags that all scripts share
    the run                 a folder in which a training goes on

Nothing here knows a method: losses, projectors, recipes and the training loop are in the scripts. Each
function can be copied out, with its imports and the functions of this file that it calls. A new method
is a copy of the script nearest to it; a new data set has its name in DATASETS, its images in load_images,
and a recipe in each script.
"""
import argparse
import atexit
import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn
from torchvision import datasets, utils
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.transforms import v2
from tqdm import tqdm

# processes


def say(text, file=None, every_rank=False):
    """Print a line, from rank 0, to whoever still listens: the terminal may have hung up."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(" ".join(str(text).splitlines()), file=file, flush=True)


def fail(message, status: int = 1):
    """Exit with `status` after one line on stderr: for what every rank sees alike."""
    say(f"error: {message}", sys.stderr)
    raise SystemExit(status)


class Fault(Exception):
    """A failure on one rank or more, of which all ranks know."""


def last_words(kind, error, trace):
    """sys.excepthook: one line for what a user can mend, a traceback for the rest."""
    several, text = os.environ.get("WORLD_SIZE", "1") != "1", str(error)
    if kind is KeyboardInterrupt:
        say("stopped; the same command starts again", sys.stderr)
    elif kind is MemoryError or re.search("out of memory|allocate memory|DataLoader worker", text):
        say(f"error: out of memory? {text} Try a lower --batch-size, --width or --workers", sys.stderr, True)
    elif several and re.search("[Cc]onnection|Broken pipe|recvValue", text):
        pass  # the peer that died said why
    elif issubclass(kind, (Fault, OSError)):
        say(f"error: {text}", sys.stderr, every_rank=kind is not Fault)
    else:
        sys.__excepthook__(kind, error, trace)
    if several or kind is KeyboardInterrupt:  # no waiting for the others on the way out
        os._exit(130 if kind is KeyboardInterrupt else 1)


def init_distributed(device: str = "auto") -> SimpleNamespace:
    """Join torchrun's process group, if there is one. Returns `.rank .world_size .device`.

    Status 2 for a device that is not there, or half a launcher. CPU tensors go by gloo, CUDA's by nccl."""
    given = {name: int(text) for name, text in os.environ.items() if text.isdecimal()}
    rank, world_size = given.get("RANK", 0), given.get("WORLD_SIZE", 1)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if rank >= world_size or world_size > 1 and missing:
        os.environ.pop("RANK", None)  # so that this process speaks
        fail(f"WORLD_SIZE {world_size}, RANK {rank}, no {', '.join(missing) or 'sense'}: half a launcher; "
             "start with torchrun or unset them", 2)
    here = given.get("LOCAL_WORLD_SIZE", world_size)
    there = {"cpu": here, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device == "auto":
        device = "cuda" if there["cuda"] else "mps" if there["mps"] and world_size == 1 else "cpu"
    if here > there[device]:
        fail(f"--device {device}: {here} process(es) but {there[device]} such device(s); try --device cpu", 2)
    if device == "cuda":
        device = f"cuda:{given.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        atexit.register(dist.destroy_process_group)
    sys.excepthook = last_words
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device(device))


@contextlib.contextmanager
def together(env: SimpleNamespace):
    """What a rank's own work raises becomes a Fault on all ranks, and none waits for it."""
    faults = [None]
    try:
        yield
    except Exception as error:  # out of memory, an unreadable file, a matrix that does not converge, ...
        faults = [" ".join(str(error).split()) or repr(error)]
    if env.world_size > 1:
        faults, own = [None] * env.world_size, faults[0]
        dist.all_gather_object(faults, own)
    if any(faults):
        raise Fault(next(filter(None, faults)))


def on_rank0(function, env: SimpleNamespace, hint: str = ""):
    """function() on rank 0, None elsewhere. If it fails there, all ranks end in one line."""
    try:
        with together(env):
            return function() if env.rank == 0 else None
    except Fault as fault:
        fail(f"{hint} ({fault})" if hint else fault)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        rows = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, z)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(memory_format=torch.contiguous_format))
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather(z: Tensor) -> Tensor:
    """All ranks' rows, (N / world, D) -> (N, D) in rank order, with gradient; z itself without a group.

    Each rank computes the same global loss, so backward sums over ranks, and DDP's mean over ranks then gives
    the exact gradient of the global loss."""
    return _Gather.apply(z.contiguous()) if dist.is_initialized() else z


def digest(*parts) -> str:
    """A hash of plain values."""
    return hashlib.blake2b(repr(parts).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def seed_for(*numbers) -> int:
    """A seed out of run seed, epoch, batch, rank, ...: streams that never overlap, no state to save."""
    return int(digest(*numbers), 16) >> 1


# network and optimiser


def resnet(arch: str = "resnet18", width: int = 64, small_images: bool = True) -> nn.Sequential:
    """ResNet without `fc`, of torchvision's blocks and with its state-dict keys: images (N, 3, H, W) ->
    pooled features (N, .feature_dim). small_images: 3x3 stride-1 stem, no max-pool."""
    block, depths = {"resnet18": (BasicBlock, (2, 2, 2, 2)), "resnet34": (BasicBlock, (3, 4, 6, 3)),
                     "resnet50": (Bottleneck, (3, 4, 6, 3))}[arch]
    kernel, stride = (3, 1) if small_images else (7, 2)
    net = OrderedDict(conv1=nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False),
                      bn1=nn.BatchNorm2d(width), relu=nn.ReLU(True),
                      maxpool=nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1))
    channels = width
    for i, depth in enumerate(depths):
        blocks, out = [], width * 2**i * block.expansion
        for stride in [1 if i == 0 else 2] + [1] * (depth - 1):
            shortcut = None if stride == 1 and channels == out else nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if channels < 8 and stride > 1:  # there oneDNN's strided 1x1 convolution may write out of bounds
                shortcut[0].stride = 1, 1
                layers = {"skip": nn.MaxPool2d(1, stride), **dict(shortcut.named_children())}
                shortcut = nn.Sequential(OrderedDict(layers))
            blocks.append(block(channels, width * 2**i, stride, shortcut))
            channels = out
        net[f"layer{i + 1}"] = nn.Sequential(*blocks)
    net = nn.Sequential(OrderedDict(net, avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    net.feature_dim = channels
    return net


def distribute(model: nn.Module, env: SimpleNamespace, compile: bool = False) -> nn.Module:
    """The module to call in the loop: gradients averaged over ranks, BatchNorm synchronised (CUDA only)."""
    if env.world_size > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if env.device.type == "cuda" else model
        model = nn.parallel.DistributedDataParallel(model)
        # at each step: the ranks' queues are equal by themselves, and BatchNorm's buffers are only read by
        # rank 0's pictures and by evaluations, which send them; as an argument, newer torch warns of it
        model.broadcast_buffers = False
    return torch.compile(model) if compile else model


def autocast(device: torch.device, precision: str = "auto") -> torch.autocast:
    """bf16 autocast, or none; auto takes it where the hardware multiplies bf16 itself and so is faster."""
    if precision == "auto" and device.type == "cuda":
        precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    elif precision == "auto" and device.type == "cpu":
        able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        precision = "bf16" if able.get("avx512_bf16") or able.get("amx_bf16") else "fp32"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


class LARS(torch.optim.Optimizer):
    """SGD with momentum, each tensor's step scaled to its norm (You et al., arXiv 1708.03888).

    ratio = eta |p| / |g + wd p|, or 1 where either norm is 0; buffer = momentum buffer + ratio (g + wd p);
    p -= lr buffer. Parameters with ndim <= 1 (biases, BatchNorm) get neither ratio nor weight decay."""

    def __init__(self, params, lr: float, momentum=0.9, weight_decay=0.0, eta=0.001):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta))

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)() if closure else None
        for group, scaled in itertools.product(self.param_groups, (True, False)):
            params = [p for p in group["params"] if p.grad is not None and (p.ndim > 1) == scaled]
            if not params:
                continue
            updates = [p.grad for p in params]
            if scaled:
                updates = torch._foreach_add(updates, params, alpha=group["weight_decay"])
                norms, update_norms = (torch.stack(torch._foreach_norm(x)) for x in (params, updates))
                ratio = group["eta"] * norms / update_norms  # a zero norm makes it 0, inf or nan
                ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1)
                torch._foreach_mul_(updates, ratio.unbind())
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_add_(params, buffers, alpha=-group["lr"])
        return loss


def cosine_lr(step: int, total_steps: int, base_lr: float, warmup_steps=0, final_lr=0.0) -> float:
    """Learning rate of step 0 .. total_steps - 1: linear warm-up that ends on base_lr, then half a cosine."""
    if step < warmup_steps:
        return base_lr * (step + 1) / warmup_steps
    t = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return final_lr + (base_lr - final_lr) * (1 + math.cos(math.pi * t)) / 2


@torch.no_grad()
def ema_update(target: nn.Module, online: nn.Module, momentum: float):
    """target = momentum target + (1 - momentum) online, for parameters; buffers (BatchNorm's) are copied."""
    targets, onlines = zip(*zip(target.parameters(), online.parameters(), strict=True))
    torch._foreach_mul_(targets, momentum)
    torch._foreach_add_(targets, onlines, alpha=1 - momentum)
    for t, o in zip(target.buffers(), online.buffers(), strict=True):
        t.copy_(o)


# augmentation


class Augment:
    """uint8 batch (B, 3, H, W) -> float32 (B, 3, size, size), normalised: SimCLR's augmentation, on any
    device.

    RandomResizedCrop, flip, ColorJitter, grayscale, Gaussian blur (odd kernel, about size / 10), solarize as
    torchvision's on float images, each image with draws of its own from the device's default generator (which
    images to blur: from the CPU's). One deviation: the order of ColorJitter's operations is drawn once per
    call, not per image.
    crop=False takes images that were cropped to `size` already."""

    def __init__(self, size: int, crop_scale=(0.2, 1.0), flip=0.5, jitter=(0.4, 0.4, 0.4, 0.1), jitter_p=0.8,
                 gray_p=0.2, blur_sigma=(0.1, 2.0), blur_p=0.5, solarize_p=0.0,
                 mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)):
        self.size, self.crop_scale, self.flip = size, crop_scale, flip
        self.jitter, self.jitter_p, self.gray_p = jitter, jitter_p, gray_p
        self.blur_sigma, self.blur_p, self.solarize_p = blur_sigma, blur_p, solarize_p
        self.mean, self.std = mean, std

    def __call__(self, images: Tensor, crop: bool = True) -> Tensor:
        order = torch.randperm(4).tolist()
        out = torch.empty(len(images), self.size, self.size, 3, device=images.device).permute(0, 3, 1, 2)
        on_cpu = images.device.type == "cpu"  # whose cache holds so much
        part = max(1, 2**18 // self.size**2 if on_cpu else len(images))
        for x, result in zip(images.split(part), out.split(part)):
            result.copy_(self.augment(x, order, crop).transpose(0, 1))
        return out

    def augment(self, images: Tensor, order: list[int], crop: bool) -> Tensor:  # (3, B, size, size)
        def uniform(low, high):  # one number per image, to broadcast over (3, B, H, W)
            return torch.empty(len(images), 1, 1, device=images.device).uniform_(low, high)

        def drawn(p):
            return uniform(0, 1) < p

        n, _, height, width = images.shape
        if crop:
            box = random_box(n, height, width, self.crop_scale, images.device)
            x = crop_and_flip(images, *box, self.size, drawn(self.flip))
        else:
            x = images.transpose(0, 1).float().div_(255)
            x = torch.where(drawn(self.flip), x.flip(3), x)
        if self.jitter_p > 0:
            on = drawn(self.jitter_p)
            brightness, contrast, saturation = (
                uniform(max(0, 1 - s), 1 + s).where(on, 1) for s in self.jitter[:3])
            hue = uniform(-self.jitter[3], self.jitter[3]).where(on, 0)
            for operation in order:
                if operation == 0:
                    x.mul_(brightness).clamp_(0, 1)
                elif operation == 1:
                    grey = luma(x).mean((1, 2), keepdim=True)
                    x.mul_(contrast).add_(grey * (1 - contrast)).clamp_(0, 1)
                elif operation == 2:
                    grey = luma(x)
                    x.mul_(saturation).add_(grey.mul_(1 - saturation)).clamp_(0, 1)
                else:
                    x = shift_hue(x, hue)
        if self.gray_p > 0:
            grey, on = luma(x), drawn(self.gray_p).float()
            x.mul_(1 - on).add_(grey.mul_(on))
        if self.blur_p > 0:
            sigma = uniform(*self.blur_sigma)
            on = [i for i, draw in enumerate(torch.rand(n).tolist()) if draw < self.blur_p]
            if on:  # drawn on the CPU, so that a GPU is not waited for
                on = torch.tensor(on).to(x.device, non_blocking=True)
                x[:, on] = blur(x[:, on], sigma[on], int(self.size * 0.1) | 1)
        if self.solarize_p > 0:
            x = torch.where(drawn(self.solarize_p) & (x >= 128 / 255), 1 - x, x)
        for channel, mean, std in zip(x, self.mean, self.std):
            channel.sub_(mean).div_(std)
        return x


def random_box(n: int, height: int, width: int, scale, device) -> list[Tensor]:
    """top, left, height, width (n, 1, 1) as RandomResizedCrop draws them: ten tries, then the centre."""
    low, high = 3 / 4, 4 / 3  # width / height
    area = height * width * torch.empty(n, 10, device=device).uniform_(*scale)
    aspect = torch.empty(n, 10, device=device).uniform_(math.log(low), math.log(high)).exp_()
    w, h = (area * aspect).sqrt_().round_(), (area / aspect).sqrt_().round_()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first, found = fits.float().argmax(1, keepdim=True), fits.any(1, keepdim=True)
    w = w.gather(1, first).where(found, min(width, round(height * high)))
    h = h.gather(1, first).where(found, min(height, round(width / low)))
    top, left = ((torch.rand_like(v) * (all_ - v + 1)).where(found, (all_ - v) / 2).floor_()
                 for v, all_ in ((h, height), (w, width)))
    return [v[..., None] for v in (top, left, h, w)]


def crop_and_flip(images: Tensor, top, left, height, width, size: int, flip: Tensor) -> Tensor:
    """uint8 (B, 3, H, W) -> (3, B, size, size) in [0, 1]. Resizing is linear in rows and in columns: the
    crop of an image is two small matrices (flipping reverses one), a batch's are two batched products."""
    def resize(start, length, pixels, flip):  # (B, size, pixels): antialiased, blind outside the box
        output = torch.arange(size, device=images.device)[:, None] + 0.5
        centre = start + torch.where(flip, size - output, output) * (length / size)
        pixel = torch.arange(pixels, device=images.device) + 0.5
        weight = (1 - (pixel - centre).abs_() / (length / size).clamp(min=1)).clamp_(min=0)
        weight *= (pixel > start) & (pixel < start + length)
        return weight / weight.sum(2, keepdim=True)

    n, _, h, w = images.shape
    rows, columns = resize(top, height, h, torch.zeros_like(flip)), resize(left, width, w, flip)
    x = images.transpose(1, 2).contiguous().float().div_(255)  # (B, H, 3, W)
    x = (rows @ x.view(n, h, 3 * w)).view(n, size * 3, w) @ columns.transpose(1, 2)
    return x.view(n, size, 3, size).permute(2, 0, 1, 3).contiguous()


def luma(x: Tensor) -> Tensor:
    """Grey value (B, H, W) of RGB (3, B, H, W), weights as torchvision's rgb_to_grayscale (ITU-R 601-2)."""
    return (0.2989 * x[0]).add_(x[1], alpha=0.587).add_(x[2], alpha=0.114)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """RGB (3, B, H, W) in [0, 1] with the hue of HSV turned by `shift` (1 is a full turn), S and V kept."""
    red, green, blue = x
    value = x.amax(0)
    chroma = (value - x.amin(0)).clamp_(min=1e-12)
    hue = torch.where(value == green, (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4))
    hue = torch.where(value == red, green - blue, hue).div_(chroma).add_(6 * shift)  # in sixths of a turn
    k = hue + torch.arange(5, 0, -2, device=x.device).view(3, 1, 1, 1)
    # a channel is V - chroma clamp(2 - |k mod 6 - 2|, 0, 1)
    k.sub_((k / 6).floor_(), alpha=6).sub_(2).abs_()
    return k.sub_(2).clamp_(-1, 0).mul_(chroma).add_(value)


def blur(x: Tensor, sigma: Tensor, taps: int) -> Tensor:
    """Gaussian blur of (3, B, H, W), reflected at the border; sigma (B, 1, 1), where 0 changes nothing."""
    r = taps // 2
    weight = torch.exp(-0.5 * (torch.arange(r + 1, device=x.device) / sigma.clamp(min=0.01)) ** 2)
    weight = (weight / (2 * weight.sum(2, keepdim=True) - 1)).split(1, dim=2)  # of the centre and one side
    for dim, pad in ((2, (0, 0, r, r)), (3, (r, r, 0, 0))):
        padded, size, x = F.pad(x, pad, mode="reflect"), x.shape[dim], x * weight[0]
        for d in range(1, r + 1):
            x.addcmul_(padded.narrow(dim, r - d, size) + padded.narrow(dim, r + d, size), weight[d])
    return x


# data

DATASETS = ("patterns", "cifar10", "cifar100", "stl10", "tinyimagenet", "imagenet100", "imagenet", "folder")
STATS = {"patterns": ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
         "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
         "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
         "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}  # the rest take imagenet's
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test",
          "val": "val", "valid": "val", "validation": "val"}
RUN_FILES = {"args.json", "log.jsonl", "eval.jsonl", "checkpoint.pt", "backbone.pt", "views.png",
             "affinity.png", "spectrum.png", "labels.png", "margin.png", "curves.png"}
PATTERNS = {  # ink where the field is positive; a, b: turned and scaled x, y; k in [1, 4), one per image
    "stripes": lambda a, b, k: a.sin(),
    "checks": lambda a, b, k: 2 * a.sin() * b.sin(),
    "dots": lambda a, b, k: a.cos() + b.cos() - 0.8,
    "rings": lambda a, b, k: torch.hypot(a, b).sin(),
    "zigzag": lambda a, b, k: (a + 2.5 * b.sin().asin()).sin(),
    "spirals": lambda a, b, k: (torch.hypot(a, b) + k.floor() * torch.atan2(b, a)).sin(),
    "grid": lambda a, b, k: torch.maximum(a.cos(), b.cos()) - 0.8,
    "rays": lambda a, b, k: ((k + 3).floor() * torch.atan2(b, a)).sin(),
    "bricks": lambda a, b, k: 0.8 - torch.maximum(
        (a / 2 + (b / math.tau).floor() * math.pi / 2).cos().abs(), b.cos()),
    "blobs": lambda a, b, k: sum(
        (0.8 * (a * (i * k).cos() + b * (i * k).sin()) + i * i * k).sin() for i in range(6)) / 1.5}


def patterns(train: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 (N, 3, 32, 32) and labels (N,): 10,000 train or 2,000 test images, generated, always the same.

    The class is the kind of pattern. An image is a quilt of 2 x 2 patches of its kind, each with colours,
    scale, angle, position, warp and noise of its own: two crops of it have little in common but the kind."""
    n, generator = 4 * (10000 if train else 2000), torch.Generator().manual_seed(int(train))

    def uniform(low, high, *shape):
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    y, x = torch.meshgrid(torch.arange(16) - 7.5, torch.arange(16) - 7.5, indexing="ij")
    x = x + uniform(-6, 6, 1, 1) + uniform(0, 0.8, 1, 1) * (y / 3 + uniform(0, math.tau, 1, 1)).sin()
    y = y + uniform(-6, 6, 1, 1) + uniform(0, 0.8, 1, 1) * (x / 3 + uniform(0, math.tau, 1, 1)).sin()
    angle, scale = uniform(0, math.tau, 1, 1), math.tau / uniform(4, 8, 1, 1)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    plane = cos * x + sin * y, cos * y - sin * x, uniform(1, 4, 1, 1)
    field = torch.empty(n, 1, 16, 16)
    for i, pattern in enumerate(PATTERNS.values()):
        field[i::10, 0] = pattern(*(v[i::10] for v in plane))
    ink = field.mul_(torch.where(uniform(0, 1, 1, 1, 1) < 0.5, 4.0, -4.0)).sigmoid_()
    dark = uniform(0, 0.35, 1, 1, 1) + uniform(0, 0.15, 3, 1, 1)
    light = uniform(0.55, 0.85, 1, 1, 1) + uniform(0, 0.15, 3, 1, 1)
    image = dark.lerp(light, ink)
    image += uniform(0, 0.12, 1, 1, 1) * torch.randn(n, 1, 16, 16, generator=generator)
    image = image.clamp_(0, 1).mul_(255).round_().to(torch.uint8)
    a, b, c, d = image.chunk(4)  # of each kind in turn, so that the four belong together
    return torch.cat([torch.cat([a, b], 3), torch.cat([c, d], 3)], 2), torch.arange(n // 4) % 10


def read_rgb(file: str, least: int = 2**20) -> Image.Image:
    """First frame, turned as EXIF says, in RGB: alpha is dropped; grey of 16 bits is scaled by their range,
    of 32 bits from 0 to 1 (floats), 255, 65535 or its maximum, or from a negative minimum to its maximum.
    Of a JPEG that is larger, a half, 4th or 8th that keeps `least` pixels of the shorter side. OSError if it
    cannot be read."""
    try:
        with Image.open(file) as image:
            image.draft(None, [-(-pixels * least // min(image.size)) for pixels in image.size])
            image.load()
        with contextlib.suppress(Exception):  # a damaged tag spoils no picture
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode[0] in "IF":
            x, tops = np.asarray(image).astype(float), (1, 255, 65535)
            low, high = min(0, x.min()), x.max()
            if not np.isfinite(high - low):
                raise ValueError("not all of its values are finite")
            if image.mode.startswith("I;16") or image.mode == "I" and image.format in ("PNG", "PPM"):
                high = 65535
            elif low == 0:
                high = next((top for top in tops[image.mode != "F":] if high <= top), high)
            image = Image.fromarray(((x - low) * (255 / max(high - low, 1e-30))).round().astype(np.uint8))
        elif image.mode in ("P", "PA"):  # at once to RGB, Pillow would warn of transparent colours
            image = image.convert("RGBA")
        return image.convert("RGB")
    except Exception as error:  # a damaged file can raise anything
        raise OSError(f"cannot read image {file}: {error}") from None


@dataclass
class Images:
    """A split of a data set."""
    images: Tensor | list[str]  # uint8 (N, 3, H, W) on the device; the files, where they are large
    labels: Tensor | None  # int64 (N,), -1 unknown
    classes: list[str]
    mean: tuple[float, ...]  # of pixels in [0, 1], per channel; so is std
    std: tuple[float, ...]
    image_size: int  # pixels of a side that the network sees
    fingerprint: str = ""  # of names, labels and some content
    source: str = ""  # in words: where they are from
    unlabelled: str = ""  # in words: why there are no labels

    def __getitem__(self, key):
        """Of a file, by DataLoader's workers, which only decode and crop: uint8 views, what failed."""
        index, seed, crops = key
        views = [v2.RandomResizedCrop(size, scale) for size, scale in crops] or [
            v2.Compose([v2.Resize(self.image_size * 256 // 224), v2.CenterCrop(self.image_size)])]
        least = [size / math.sqrt(0.75 * max(scale[0], 0.01)) for size, scale in crops]
        least = math.ceil(max(least, default=self.image_size * 256 / 224))
        try:  # the smallest crop, of aspect 3/4, keeps `size` pixels
            image, error = read_rgb(self.images[index], least), ""
        except OSError as fault:  # as data: an exception would come with its traceback
            image, error = Image.new("RGB", (1, 1)), str(fault)
        if not crops:  # of a strip the middle: whole it would become as much longer as wider
            longest = 4 * min(image.size)
            image = v2.functional.center_crop(image, [min(v, longest) for v in image.size[::-1]])
        torch.manual_seed(seed)
        return [v2.functional.pil_to_tensor(view(image)) for view in views], error

    def subset(self, index: Tensor) -> "Images":
        """Some of the images, with labels."""
        images = self.images
        images = images[index.to(images.device)] if torch.is_tensor(images) else [images[i] for i in index]
        return replace(self, images=images, labels=self.labels[index])

    def read(self, rows: list, env: SimpleNamespace, workers=0, crops=(), seed=()):
        """For each list of indices: uint8 batches on the device, of files one for each crop (size, scale),
        drawn by seed and index; without crops one, of the centres. OSError for a file that is bad."""
        if torch.is_tensor(self.images):
            for row in rows:
                x = self.images[torch.as_tensor(row).to(env.device, non_blocking=True)]
                if not crops and x.shape[2:] != (self.image_size, self.image_size):
                    x = v2.functional.resize(x, self.image_size)
                    x = v2.functional.center_crop(x, self.image_size)
                yield [x] * max(1, len(crops))
            return
        keys = [[(int(i), seed_for(*seed, int(i)), crops) for i in row] for row in rows]
        for views, errors in torch.utils.data.DataLoader(
                self, batch_sampler=keys, num_workers=min(workers, os.cpu_count()),
                pin_memory=env.device.type == "cuda"):
            if any(errors):
                raise OSError(next(filter(None, errors)))
            yield [view.to(env.device, non_blocking=True) for view in views]


def files_below(folder: str, inside: tuple = ()):
    """Paths of the files below a folder, sorted. Links are followed, but not to a folder that one is in.
    Hidden files and a run's own are passed over."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    own = RUN_FILES if {"args.json", "eval.jsonl"} & {entry.name for entry in entries} else ()
    inside = (*inside, os.path.realpath(folder))
    for entry in entries:
        is_folder = os.path.isdir(entry.path)  # entry.is_dir() raises where a link leads to itself
        if not is_folder and not entry.name.startswith(".") and entry.name not in own:
            yield entry.path
        elif is_folder and not entry.name.startswith(".") and os.path.realpath(entry.path) not in inside:
            yield from files_below(entry.path, inside)


def find_images(folder: Path, only: set[str] | None = None) -> tuple[list[str], list[str], str]:
    """Names of the image files below `folder`; the class of each: the folder there, or what Tiny ImageNet's
    list says, or ""; in words, what other files there are. only: images of these classes."""
    unread = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}  # Pillow leaves these to other programs
    known = {suffix for suffix, kind in Image.registered_extensions().items()
             if kind in {*Image.OPEN, "MPO"} - unread}
    table = folder / "val_annotations.txt"
    lines = table.read_text().splitlines() if table.is_file() else ()
    listed = dict(line.split("\t")[:2] for line in lines if "\t" in line)
    names, kinds, others = [], [], Counter()
    for name in (os.path.relpath(path, folder) for path in files_below(str(folder))):
        suffix, parts = os.path.splitext(name)[1].lower(), name.split(os.sep)
        kind = listed.get(parts[-1], parts[0] if len(parts) > 1 else "")
        if suffix not in known or not os.path.exists(folder / name):  # a broken link
            others[suffix or "without suffix"] += 1
        elif only is None or kind in only:
            names.append(name)
            kinds.append(kind)
    return names, kinds, ", ".join(f"{n} {suffix}" for suffix, n in sorted(others.items()))


def read_small(files: list[str], sample: list[str], size: int | None) -> Tensor | list[str]:
    """All files as one uint8 tensor, each resized and cut to the size of nine in ten of `sample`, or else to
    a square of the median shorter side; the files as they are if the median of the longer sides, or `size`,
    is over 64 px."""
    sizes = [read_rgb(file, 128).size for file in sample]
    if median_low(map(max, sizes)) > 64 or (size or 0) > 64:
        return files
    shape, n = Counter(sizes).most_common(1)[0]
    shape = shape if n >= 0.9 * len(sizes) else (median_low(map(min, sizes)),) * 2
    images = (ImageOps.fit(read_rgb(file), shape, Image.Resampling.BILINEAR) for file in files)
    return torch.stack([v2.functional.pil_to_tensor(image) for image in images])


def load_files(name: str, root: Path, train: bool, size, limit, classes, report: bool) -> Images | None:
    """load_images of a data set of files."""
    hint = "put images there, a folder per class or all in one, or change --data-dir"
    inside = {"folder": (), "tinyimagenet": ("tiny-imagenet-200",), "imagenet100": (name, "imagenet")}
    folder = next((root / place for place in inside.get(name, (name,)) if (root / place).is_dir()), root)
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
        only = {line.strip() for line in open(classes)} - {""} if classes else None
    except (OSError, ValueError) as error:
        fail(f"no images in {folder} ({error}); {hint}" if not folder.is_dir() else f"--classes: {error}")
    splits = {SPLITS[p.name.lower()]: p for p in inner if p.name.lower() in SPLITS} or {"train": folder}
    if "train" not in splits:
        fail(f"{folder} has a folder {min(splits.values()).name} but no folder train")
    if name == "imagenet100" and folder == root / "imagenet" and not classes:
        fail(f"{name} in {folder} needs --classes FILE, the name of a class folder on each line")
    order = ("test", "val") if report and name == "folder" else ("val", "test")  # others' test has no labels
    split = "train" if train else next((s for s in order if s in splits), None)
    names, kinds, others = find_images(splits["train"], only)
    for lacking in sorted((only or {""}) - {*kinds}) if only or not names else ():
        fail(f"no images in {splits['train'] / lacking}; {hint}")
    known, flat = sorted({*kinds} - {""}), "" in kinds
    sample = [str(splits["train"] / file) for file in names[::len(names) // 200 + 1]]  # both get one size
    if split not in ("train", None):
        names, kinds, others = find_images(splits[split], only)
    if not names or split is None:
        return None
    lost = [file for file, kind in zip(names, kinds) if kind not in known]
    why = f"{splits[split] / lost[0]} lies in no class folder of {splits['train']}" if lost else ""
    labels = None if flat or lost else torch.tensor([known.index(kind) for kind in kinds])
    if limit and limit < len(names):  # spread over all classes, though they are sorted
        keep = [i * len(names) // limit for i in range(limit)]
        names, labels = [names[i] for i in keep], None if labels is None else labels[keep]
    files = [str(splits[split] / file) for file in names]
    try:
        heads = [np.fromfile(file, np.uint8, 2**16).tobytes() for file in files[::len(files) // 16 + 1]]
        images = files if name.startswith("imagenet") else read_small(files, sample, size)
    except OSError as error:
        fail(error)
    source = f"{splits[split]}" + (f" (skipped {others})" if others else "")
    size = size or (64 if name == "tinyimagenet" else 32 if torch.is_tensor(images) else 224)
    return Images(images, labels, [] if flat else known, *STATS["imagenet"], size,
                  digest(names, labels is not None and labels.tolist(), heads), source, why if known else "")


def load_images(name: str, data_dir="data", train: bool = True, env: SimpleNamespace | None = None,
                image_size: int | None = None, limit: int | None = None, unlabelled=False,
                classes: str | None = None, report=False) -> Images | None:
    """Training or test split; None for a folder without test split.

    Small images (typically up to 64 px, stl10) come as one tensor on env.device, large ones as files. limit:
    so many images only, the first, or every (n / limit)-th file; unlabelled: stl10 with its unlabelled
    images; classes: a file that names the class folders to use, one a line; report: of a folder's test and
    val take test, not val. Only rank 0 downloads (cifar10, cifar100, stl10)."""
    root, env = Path(data_dir), env or SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    if name not in ("patterns", "cifar10", "cifar100", "stl10"):
        data = load_files(name, root, train, image_size, limit, classes, report)
        in_memory = data and torch.is_tensor(data.images)
        return replace(data, images=data.images.to(env.device)) if in_memory else data
    if classes:
        fail(f"--classes picks class folders, and {name} has none", 2)
    if name == "patterns":
        (images, labels), names = patterns(train), list(PATTERNS)
    else:
        kind, split = getattr(datasets, name.upper()), dict(train=train)
        if name == "stl10":
            split = dict(split="test" if not train else "train+unlabeled" if unlabelled else "train")
        socket.setdefaulttimeout(20)
        hint = f"{name} is not in {root} and cannot be downloaded; put {kind.base_folder} there"
        data = on_rank0(lambda: kind(root, download=True, **split), env, hint) or kind(root, **split)
        images, names = torch.from_numpy(data.data), data.classes
        images = images if name == "stl10" else images.permute(0, 3, 1, 2).contiguous()
        labels = torch.as_tensor(data.labels if name == "stl10" else data.targets).long()
    images, labels = images[:limit], labels[:limit]
    few = [] if name == "patterns" else images[::len(images) // 16 + 1].tolist()  # patterns may be rounded
    size = image_size or (64 if name == "stl10" else 32)
    return Images(images.to(env.device), labels, names, *STATS.get(name, STATS["imagenet"]), size,
                  digest(labels.tolist(), few), name if name == "patterns" else f"{root}")


def load_splits(args: argparse.Namespace, env: SimpleNamespace) -> tuple[Images, Images | None]:
    """Training and test images as the flags say, and a line that says what was found."""
    train = load_images(args.dataset, args.data_dir, True, env, args.image_size, args.limit_images, True,
                        args.classes)
    test = load_images(args.dataset, args.data_dir, False, env, train.image_size, classes=args.classes)
    kinds = f"of {len(train.classes)} classes" if train.classes else "without labels"
    tests = f"{len(test.images)} test images" if test else "no test images"
    sources = " and ".join(dict.fromkeys(data.source for data in (train, test) if data))
    say(f"{len(train.images)} training images {kinds}, {tests}, {train.image_size} px, from {sources}")
    for data in (train, test):
        if data and data.unlabelled:
            say(f"warning: {data.unlabelled}; no k-NN", sys.stderr)
    return train, test


def batches(data: Images, epoch: int, batch_size: int, env, seed: int, views, workers=0, first=0):
    """(list of views, labels or None): this rank's share of each whole batch of an epoch, from `first` on.

    views: an Augment per view. The order depends on (seed, epoch), each other draw on (seed, epoch, batch,
    rank), so that a run can go on inside an epoch with no random state saved."""
    n, crops = len(data.images) // batch_size * batch_size, [(view.size, view.crop_scale) for view in views]
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(seed_for(seed, epoch)))
    order = order[:n].view(-1, env.world_size, batch_size // env.world_size)[first:, env.rank]
    source = data.read(order, env, workers, crops, (seed, epoch))
    for i, (row, images) in enumerate(zip(order, source), first):
        torch.manual_seed(seed_for(seed, epoch, i, env.rank))
        x = [view(x, crop=torch.is_tensor(data.images)) for view, x in zip(views, images)]
        yield x, None if data.labels is None else data.labels[row].to(env.device, non_blocking=True)


def fixed_batch(data: Images, args, env: SimpleNamespace, views) -> list[Tensor]:
    """The same views of the same images at every call, on every rank: to draw pictures of."""
    alone, n = SimpleNamespace(rank=0, world_size=1, device=env.device), min(args.batch_size, 512)
    return next(batches(data, -1, n, alone, args.seed, views, args.workers))[0]


# evaluation


@torch.no_grad()
def features(backbone: nn.Module, data: Images, env: SimpleNamespace, precision="auto", workers=0, chunk=250):
    """Backbone features (N, feature_dim) of all images, in order, on every rank; eval mode, centre crop.

    Ranks take whole chunks in turn: the chunks, and the numbers, are the same at every world size. Fault for
    an unreadable file, features that are not finite, and whatever else stops a rank."""
    mean, std = (torch.tensor(v, device=env.device).view(3, 1, 1) for v in (data.mean, data.std))
    rows = torch.arange(len(data.images)).split(chunk)[env.rank::env.world_size]
    training = backbone.training
    with together(env):
        result = torch.zeros(len(data.images), backbone.feature_dim, device=env.device)
        backbone.eval()
        bar = tqdm(rows, "features", leave=False, disable=True if env.rank else None)
        for row, (x,) in zip(bar, data.read(rows, env, workers)):
            with autocast(env.device, precision):
                x = ((x / 255 - mean) / std).to(memory_format=torch.channels_last)
                result[row[0]:row[-1] + 1] = backbone(x).float()
        backbone.train(training)
        if not result.isfinite().all():
            raise ValueError("the features are not finite")
    if env.world_size > 1:
        dist.all_reduce(result)
    return result


@torch.no_grad()
def knn_accuracy(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor,
                 k: int = 200, tau: float = 0.1, chunk: int = 256) -> float:
    """Accuracy in [0, 1] of a vote, with weight exp(sim / tau), of the k rows of train_x (N, D) that are
    nearest by cosine to a row of test_x (M, D) (Wu et al., arXiv 1805.01978). Memory: chunk x N."""
    train_y, test_y = train_y.to(train_x.device), test_y.to(test_x.device)
    bank, correct = F.normalize(train_x.float(), dim=1).T, 0
    for x, y in zip(F.normalize(test_x.float(), dim=1).split(chunk), test_y.split(chunk)):
        similarity, index = (x @ bank).topk(min(k, len(train_x)), dim=1)
        weight = ((similarity - similarity[:, :1]) / tau).exp()  # the same vote, no overflow
        votes = torch.zeros(len(x), int(train_y.max()) + 1, device=x.device)
        correct += (votes.scatter_add_(1, train_y[index], weight).argmax(1) == y).sum().item()
    return correct / max(1, len(test_y))


def rankme(x: Tensor) -> float:
    """Effective rank of features (N, D), 1 to min(N, D): exp(-sum p log p), p = singular values over their
    sum (Garrido et al., arXiv 2210.02885)."""
    s = torch.linalg.svdvals((x.cpu() if x.is_mps else x).double())  # mps has no float64
    return torch.special.entr(s / s.sum()).sum().exp().item()


class Probe:
    """Online linear probe: a classifier of the features as they are learnt, to watch them by."""

    def __init__(self, feature_dim: int, data: Images, env: SimpleNamespace):
        classifier = nn.Linear(feature_dim, max(1, len(data.classes)))
        # the features' scale changes meanwhile, so standardise them
        self.net = nn.Sequential(nn.BatchNorm1d(feature_dim, affine=False), classifier).to(env.device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.world_size = env.world_size

    def step(self, h: Tensor, y: Tensor | None) -> dict[str, Tensor]:
        """A step on this rank's features h, of one view or more, and labels y (-1: unknown). Its accuracy."""
        if y is None:
            return {}
        y = y.repeat(len(h) // len(y))
        logits, known = self.net.train()(h.detach().float()), (y >= 0).sum().clamp(min=1)
        self.optimizer.zero_grad()
        (F.cross_entropy(logits, y, ignore_index=-1, reduction="sum") / known).backward()
        for p in self.net.parameters() if self.world_size > 1 else ():
            dist.all_reduce(p.grad.div_(self.world_size))
        self.optimizer.step()
        return {"probe_accuracy": (logits.argmax(1) == y).sum() / known}


def evaluate(backbone: nn.Module, probe: Probe, train: Images, test: Images, args, env, k: int = 20,
             tau: float = 0.1, initial: nn.Module | None = None) -> dict[str, float]:
    """Test accuracies, as log.jsonl names them: knn_accuracy, whose bank are up to 50,000 labelled training
    images, and probe_test_accuracy; with `initial`, the network before training, and images in memory also
    knn_init and knn_pixels. Fault if it fails."""
    for buffer in backbone.buffers() if env.world_size > 1 else ():  # BatchNorm's, each process's own on CPUs
        dist.broadcast(buffer, 0)
    with together(env):
        keep = (train.labels >= 0).nonzero()[:, 0]
        bank = train.subset(keep[::max(1, math.ceil(len(keep) / 50000))])

    def embed(network):
        return [features(network, data, env, args.precision, args.workers) for data in (bank, test)]

    pairs = {"knn_accuracy": embed(backbone)}
    if initial is not None and torch.is_tensor(bank.images) and torch.is_tensor(test.images):
        pairs["knn_init"] = embed(initial)
    with together(env):
        if "knn_init" in pairs:
            pairs["knn_pixels"] = [x.images.flatten(1) / 255 for x in (bank, test)]
        hits = probe.net.eval()(pairs["knn_accuracy"][1]).argmax(1).cpu() == test.labels
        accuracies = {name: knn_accuracy(x, bank.labels, test_x, test.labels, k, tau)
                      for name, (x, test_x) in pairs.items()}
    return {**accuracies, "probe_test_accuracy": hits.float().mean().item()}


# files and pictures


def write_file(path, write):
    """write(file) to a temporary file, then rename: `path` is always the old file or the new one, whole."""
    path, temporary = Path(path), Path(path).with_name(f".{Path(path).name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        raise OSError(f"cannot write {path}: {error}; free space there or choose another folder") from None
    finally:
        if temporary.exists():  # unlink(missing_ok=True) raises where the folder is a file
            temporary.unlink()


def save_checkpoint(path, state: dict):
    """Write tensors and plain values; a kill leaves the old file or the new one. OSError if it cannot."""
    write_file(path, lambda file: torch.save(state, file))


def load_checkpoint(path) -> dict:
    """Read a checkpoint onto the CPU as data: no code in it runs. ValueError if missing or damaged."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {**state}
    except FileNotFoundError:
        raise ValueError(f"no file {path}") from None
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())[:60]
        raise ValueError(f"{path} is damaged or not a checkpoint ({reason})") from None


def heatmaps(*matrices: Tensor) -> Tensor:
    """Square matrices side by side, 512 px each: white is 0, red a matrix's largest magnitude, blue its
    negative. -> picture (3, H, W)"""
    pictures = []
    for m in matrices:
        m = F.interpolate((m / m.abs().max().clamp(min=1e-12)).float()[None, None], (512, 512))[0, 0].cpu()
        pictures.append(torch.stack([1 + m.clamp(max=0), 1 - m.abs(), 1 - m.clamp(min=0)]))
    return utils.make_grid(pictures, padding=4, pad_value=1)


def grid(x: Tensor, columns: int) -> Tensor:
    """Normalised images (N, 3, H, W) as one picture, small ones enlarged to about 64 px."""
    return utils.make_grid(F.interpolate(x, scale_factor=max(1, 64 // x.shape[3])), columns, normalize=True)


COLOURS = ("navy", "dodgerblue", "orange", "green", "crimson", "purple", "peru", "hotpink", "teal", "grey")


def plot(title: str, curves: dict, low: float | None = None, high: float | None = None) -> Tensor:
    """Lines through points, {name: (x values, y values)}, in COLOURS, beside their names and between axes.
    Points that are not finite are left out, those beyond low and high lie there. -> picture (3, 256, 640)"""
    curves = {name: torch.stack([torch.as_tensor(v, dtype=torch.double) for v in curve])
              for name, curve in curves.items()}
    x, y = torch.cat([*curves.values()], dim=1)
    (x0, x1), (y0, y1) = ((v[v.isfinite()].min().item(), v[v.isfinite()].max().item()) for v in (x, y))
    y0, y1 = y0 if low is None else low, y1 if high is None else high
    picture = Image.new("RGB", (640, 256), "white")
    pen = ImageDraw.Draw(picture)

    def at(x, y):
        return 60 + 330 * (x - x0) / (x1 - x0 or 1), 226 - 196 * (min(max(y, y0), y1) - y0) / (y1 - y0 or 1)

    for i in range(5):
        tick_x, tick_y = x0 + (x1 - x0) * i / 4, y0 + (y1 - y0) * i / 4
        pen.line([at(x0, tick_y), at(x1, tick_y)], "lightgrey")
        pen.text((4, at(x0, tick_y)[1] - 6), f"{tick_y:.4g}", "black")
        pen.text((at(tick_x, y0)[0] - 6, 232), f"{tick_x:.4g}", "black")
    pen.text((60, 8), title, "black")
    for i, (name, curve) in enumerate(curves.items()):
        points = [at(*point) for point in curve[:, curve.isfinite().all(0)].T.tolist()]
        pen.line(points, COLOURS[i], 2)
        for x, y in points[:1] if len(points) == 1 else ():  # a line through one point is invisible
            pen.ellipse([x - 2, y - 2, x + 2, y + 2], COLOURS[i])
        pen.text((402, 24 + 14 * i), name[-38:], COLOURS[i])
    return v2.functional.pil_to_tensor(picture) / 255


# command line


def number(low: float, high: float, kind=float):
    """For argparse: reads a number from low to high."""
    def read(text: str):
        if not low <= (value := kind(text)) <= high:
            raise ValueError
        return value
    read.__name__ = f"{'whole ' * (kind is int)}number from {low:g} to {high:g}"  # argparse's word for it
    return read


count, side, natural = number(1, 10**7, int), number(1, 2**16, int), number(0, 2**63 - 1, int)
rate, positive, fraction = number(0, 1e30), number(1e-30, 1e30), number(0, 1)


def widths(text: str) -> str:
    """For argparse: A-B-C."""
    return "-".join(str(side(width)) for width in text.split("-"))


def add_machine_args(parser):
    """The flags that every program here shares; errors become one line and status 2."""
    parser.error = lambda message: fail(f"{message}; see --help", 2)
    add = parser.add_argument
    add("--data-dir", type=os.path.expanduser, default="data", help="where the data set is")
    add("--classes", type=os.path.expanduser, metavar="FILE", help="use the class folders named there only")
    add("--seed", type=natural, default=0, help="of everything random")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="auto: the fastest there is")
    add("--precision", default="auto", choices=("auto", "bf16", "fp32"), help="auto: bf16 where it is faster")
    add("--workers", type=natural, default=4, help="processes that decode large images")


def add_run_args(parser):
    """The flags that all training scripts share. Without a default here, the data set's recipe has it."""
    add_machine_args(parser)
    add = parser.add_argument
    add("--dataset", default="patterns", choices=DATASETS, help="what to train on; decides the recipe")
    add("--out", type=os.path.expanduser, help="run folder; the same command again goes on there")
    add("--image-size", type=side, help="pixels the network sees; 64 or less: 3x3 stem")
    add("--arch", choices=("resnet18", "resnet34", "resnet50"), help="backbone")
    add("--width", type=side, help="channels of the first stage")
    add("--projector", type=widths, help="widths of its layers, A-B-D")
    add("--epochs", type=count, help="length of the schedule")
    add("--batch-size", type=count, help="images per step over all processes")
    add("--base-lr", type=rate, help="learning rate per 256 images of the batch")
    add("--weight-decay", type=rate, help="of weights; none on biases and BatchNorm")
    add("--warmup-epochs", type=rate, help="of linear warm-up")
    add("--limit-images", type=count, help="train on so many images; of files every k-th")
    add("--compile", action="store_true", help="torch.compile the network")
    add("--save-every", type=count, default=1, help="epochs between checkpoints")
    add("--eval-every", type=count, help="epochs between k-NN; without it a twentieth of --epochs")
    add("--max-steps", type=count, help="stop after so many steps in all, of the same schedule")


def chosen(argv: list[str] | None, flag: str, default: str) -> str:
    """What the command line says to `flag`, before it is parsed, as that decides other flags' defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(flag, nargs="?", default=default, dest="value")
    return parser.parse_known_args(argv)[0].value


def parse_run_args(parser, recipes: dict, argv=None) -> argparse.Namespace:
    """The command line over the data set's recipe over the defaults, all of which --help shows."""
    dataset = chosen(argv, "--dataset", "patterns")
    parser.set_defaults(out=f"runs/{Path(parser.prog).stem}-{dataset}", **recipes.get(dataset, {}))
    for action in parser._actions:
        default = parser.get_default(action.dest)
        if default is not None and default is not False and default != argparse.SUPPRESS:  # 0 is one
            action.help += " (default %(default)s)"
    args = parser.parse_args(argv)
    args.eval_every = args.eval_every or max(1, args.epochs // 20)
    return args


# the run

# Settings that may differ when a run goes on in its folder; the images themselves have their fingerprint.
FREE = {"max_steps", "device", "workers", "data_dir", "classes", "save_every", "eval_every", "compile", "out"}


class Run:
    """A run folder, and how far the training in it is. It changes no weight but by loading a checkpoint.

    An epoch: batches() gives steps, log() books each, save() writes the checkpoint, attempt() and draw() are
    for what may fail, end_epoch() writes the log's line. An epoch ends with its line: one that was killed
    between save() and end_epoch() comes again, without steps."""

    def __init__(self, args, env, train: Images, test: Images | None, model, optimizer, probe: Probe):
        self.args, self.env, self.data, self.out = args, env, train, Path(args.out)
        self.model = model
        if args.batch_size % env.world_size:
            fail(f"--batch-size {args.batch_size} does not divide by {env.world_size} processes", 2)
        if args.batch_size < 2 * env.world_size:
            fail(f"--batch-size {args.batch_size}: BatchNorm needs two images or more in each process", 2)
        if len(train.images) < args.batch_size:
            fail(f"{len(train.images)} training images are fewer than --batch-size {args.batch_size}")
        self.steps_per_epoch = len(train.images) // args.batch_size
        self.total_steps = args.epochs * self.steps_per_epoch
        self.warmup_steps = round(args.warmup_epochs * self.steps_per_epoch)
        if self.warmup_steps >= self.total_steps:
            say(f"--warmup-epochs {args.warmup_epochs:g} of --epochs {args.epochs}: the learning rate only rises")
        self.last_step = min(self.total_steps, args.max_steps or self.total_steps)
        self.tested = test and test.labels is not None
        self.late = None  # the last step's loss, not looked at yet
        self.signal = 0
        self.parts = dict(model=model, optimizer=optimizer, probe=probe.net, probe_optimizer=probe.optimizer)
        on_rank0(self.lock, env)
        self.resume({"train_images": len(train.images), "test_images": len(test.images) if test else 0,
                     "classes": len(train.classes), "image_size": train.image_size,
                     "fingerprint": "-".join(data.fingerprint for data in (train, test) if data)})
        for which in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(which) != signal.SIG_IGN:  # nohup's
                signal.signal(which, lambda which, frame: setattr(self, "signal", which))

    def lock(self):
        """Refuse a folder that another process writes to. A record lock ends with its process, however that
        ends, is not inherited by workers, and holds over NFS."""
        self.out.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError):  # Windows has none
            import fcntl
            self.locked = open(self.out / ".lock", "a")
            try:
                fcntl.lockf(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # another one: a file system without locks
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise ValueError(f"another process trains in {self.out}; wait or choose another --out")

    def resume(self, data: dict):
        """Check that the folder holds this run or nothing; take up its checkpoint and cut its log there."""
        now = {"settings": {k: v for k, v in vars(self.args).items() if k not in FREE}, "data": data}
        arguments, checkpoint, log = (self.out / name for name in ("args.json", "checkpoint.pt", "log.jsonl"))
        state = {"step": 0, "sums": {}, "seconds": 0.0, "row": {}}
        try:
            with together(self.env):  # all have read before rank 0 writes
                before = {**now, **(json.loads(arguments.read_text()) if arguments.exists() else {})}
                other = [f"{k} {before[part].get(k)} (now {now[part].get(k)})" for part in now
                         for k in {**before[part], **now[part]} if before[part].get(k) != now[part].get(k)]
                lines = log.read_text().splitlines(keepends=True) if log.exists() else []
                if other and (lines or checkpoint.exists()):
                    raise ValueError(f"it holds another run: {', '.join(other)}")
                if checkpoint.exists():
                    state = load_checkpoint(checkpoint)
                    for name, part in self.parts.items():
                        part.load_state_dict(state.get(name, {}))
                self.step, self.seconds, self.row = state["step"], state["seconds"], state["row"]
                self.sums = {k: v.to(self.env.device) for k, v in state["sums"].items()}
                done, rows = self.step >= self.last_step, (json.loads(line) for line in lines if line[-1] == "\n")
                self.rows = [row for row in rows if row["step"] <= self.step
                             and (done or row["step"] % self.steps_per_epoch == 0)]  # else of a part of an epoch
        except Fault as fault:
            fail(f"cannot go on in {self.out}: {str(fault)[:300]}; choose another --out")
        if self.env.world_size > 1:
            steps = torch.tensor([self.step, -self.step])
            dist.all_reduce(steps, dist.ReduceOp.MAX)
            if steps.sum():
                fail(f"not every process sees the same {self.out}: machines must share the folder of --out")
        if self.rows and self.rows[-1]["step"] == self.step:  # that stretch has its line
            self.sums, self.seconds, self.row = {}, 0.0, {}

        def write():
            about = {"script": Path(sys.argv[0]).stem, **now, "all": vars(self.args)}
            write_file(arguments, lambda file: file.write(json.dumps(about, indent=1).encode()))
            lines = [f"{json.dumps(row)}\n".encode() for row in self.rows]
            write_file(log, lambda file: file.writelines(lines))
        on_rank0(write, self.env)

    def epochs(self):
        """The epochs to run, from the first without a line in the log."""
        first, end = self.rows[-1]["epoch"] if self.rows else 0, -(-self.last_step // self.steps_per_epoch)
        if first >= end:
            say(f"{self.out} is finished: step {self.step} of {self.total_steps}, as asked")
            return
        yield from range(first, end)
        if self.step < self.total_steps:
            say(f"step {self.step} of {self.total_steps}, as --max-steps asks; without it, it goes on")

    def batches(self, epoch: int, views):
        """(step, views, labels) for the rest of an epoch. A signal: checkpoint, and exit."""
        args, first, start = self.args, self.step - epoch * self.steps_per_epoch, time.perf_counter()
        self.late = None
        self.bar = tqdm(desc=f"epoch {epoch + 1}/{args.epochs}", total=self.steps_per_epoch * args.batch_size,
                        initial=first * args.batch_size, unit="images", unit_scale=True, leave=False,
                        disable=True if self.env.rank else None)
        shares = batches(self.data, epoch, args.batch_size, self.env, args.seed, views, args.workers, first)
        for x, y in itertools.islice(shares, max(0, self.last_step - self.step)):
            stop = torch.tensor(self.signal)
            if self.env.world_size > 1:  # between the hosts, by gloo: no device waits
                dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                self.pause(start)
                on_rank0(self.checkpoint, self.env)
                say(f"stopped at step {self.step}; the same command continues", sys.stderr)
                os._exit(128 + stop.item())
            yield self.step, x, y
            self.step += 1
            self.bar.update(args.batch_size)
        self.pause(start)

    def pause(self, start: float):
        """Note what is of the last step only, and the time since `start`."""
        if self.late:
            self.check()
            std = F.normalize(self.z.float(), dim=1).std(0).mean().item() * self.z.shape[1] ** 0.5
            self.row = {**self.row, "lr": self.lr, "embedding_std": std}
        self.seconds += time.perf_counter() - start
        self.bar.close()

    def ends(self, step: int) -> bool:
        """Whether a step is the last of its epoch, or of what --max-steps allows."""
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.last_step

    def log(self, lr: float, loss: Tensor, terms: dict[str, Tensor], z: Tensor):
        """Add a step's values to the epoch's means; stop if the loss of the step before was not finite.
        z (N, D): for embedding_std."""
        if self.late:
            self.check()
        values = {"loss": loss.detach(), **terms, "steps": torch.ones_like(loss)}
        self.sums = {k: self.sums.get(k, 0) + v for k, v in values.items()}
        shown = torch.stack([values["loss"], values.get("probe_accuracy", loss.new_zeros(()))])
        shown = shown.to("cpu", non_blocking=True)
        arrival = loss.is_cuda and torch.cuda.current_stream().record_event()  # of that copy
        self.z, self.lr = z.detach(), lr
        self.late = self.step, shown, arrival

    def check(self):
        """Stop if the loss was not finite: a step late, when its value has come and no device must wait."""
        step, shown, arrival = self.late
        if arrival:
            arrival.synchronize()
        loss, probe = shown.tolist()
        if not math.isfinite(loss):
            self.bar.close()
            fail(f"loss is {loss} at step {step}, lr {self.lr:.3g}; lower --base-lr or lengthen "
                 f"--warmup-epochs; {self.out} keeps its last good checkpoint")
        self.bar.set_postfix(loss=f"{loss:.3f}", lr=f"{self.lr:.3g}", probe=f"{probe:.1%}", refresh=False)

    def save(self, epoch: int):
        """The checkpoint, if one is due after this epoch, or after what --max-steps allows of it."""
        whole = self.step == (epoch + 1) * self.steps_per_epoch
        if self.step == self.last_step or whole and (epoch + 1) % self.args.save_every == 0:
            on_rank0(self.checkpoint, self.env)

    def checkpoint(self):
        """checkpoint.pt: all that resume() takes up. backbone.pt: all it takes to use the features."""
        args, data = self.args, self.data
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        bad = [k for k, v in parts["model"].items() if not v.isfinite().all()]
        if bad:
            raise ValueError(f"{bad[0]} is not finite at step {self.step}; lower --base-lr")
        about = dict(arch=args.arch, width=args.width, dataset=args.dataset, image_size=data.image_size,
                     small_images=data.image_size <= 64, mean=list(data.mean), std=list(data.std))
        backbone = {k: v.cpu().contiguous() for k, v in self.model.backbone.state_dict().items()}
        save_checkpoint(self.out / "backbone.pt", dict(state_dict=backbone, **about))
        state = dict(step=self.step, sums=self.sums, seconds=self.seconds, row=self.row)
        save_checkpoint(self.out / "checkpoint.pt", dict(**state, **parts, **about))

    def due(self, epoch: int) -> bool:
        """Whether an epoch ends with an evaluation: every --eval-every epochs and at the schedule's end."""
        whole = self.step == (epoch + 1) * self.steps_per_epoch
        return self.tested and whole and (self.is_over() or (epoch + 1) % self.args.eval_every == 0)

    def is_over(self) -> bool:
        return self.step == self.total_steps

    @torch.no_grad()
    def attempt(self, what: str, function):
        """Call function(), the model in eval mode, and add what it returns to the epoch's log line; a failure
        on any rank costs a warning, not the run."""
        self.model.eval()
        try:
            with together(self.env):
                more = function()
            self.row.update(more)
        except Fault as fault:
            say(f"warning: no {what} at step {self.step}: {fault}", sys.stderr)
        self.model.train()

    def draw(self, name: str, make):
        """Write the picture that make() returns, on rank 0."""
        def write():
            if self.env.rank == 0:
                picture = make()
                write_file(self.out / name, lambda file: utils.save_image(picture, file, format="png"))
            return {}
        self.attempt(name, write)

    def curves(self) -> Tensor:
        """Accuracies and loss over the epochs so far."""
        keys = {"k-NN": "knn_accuracy", "probe": "probe_test_accuracy", "probe on views": "probe_accuracy"}
        lines = {name: zip(*[(row["epoch"], 100 * row[key]) for row in self.rows if key in row])
                 for name, key in keys.items()}
        lines = {name: line for name, line in ((name, [*line]) for name, line in lines.items()) if line}
        loss = plot("loss over epochs", {"loss": [*zip(*((row["epoch"], row["loss"]) for row in self.rows))]})
        return torch.cat([plot("accuracy in % over epochs", lines), loss], dim=1) if lines else loss

    def end_epoch(self, epoch: int):
        """The epoch's line in log.jsonl, curves.png, and a line to read."""
        args, steps = self.args, self.sums["steps"].item()
        means = {k: v.item() / steps for k, v in self.sums.items() if k != "steps"}
        row = {"epoch": epoch + 1, "step": self.step, "lr": self.row["lr"], **means, **self.row,
               "images_per_s": steps * args.batch_size / self.seconds}
        self.rows.append(row)
        self.sums, self.seconds, self.row = {}, 0.0, {}

        def write():
            with open(self.out / "log.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
        on_rank0(write, self.env)
        self.draw("curves.png", self.curves)
        left = round((self.last_step - self.step) * args.batch_size / row["images_per_s"])
        line = [f"epoch {row['epoch']:{len(str(args.epochs))}}/{args.epochs}"]
        line += [f"{k} {v:9.4g}" for k, v in means.items() if k != "probe_accuracy"]
        for name, key in (("probe", "probe_accuracy"), ("k-NN", "knn_accuracy")) if self.data.classes else ():
            line.append(f"{name} {100 * row[key]:5.1f} %" if key in row else f"{name}    -   ")
        line += [f"{row['images_per_s']:5.0f} img/s", f"{left // 60}:{left % 60:02} left"]
        say("  ".join(line))
        if row["embedding_std"] < 0.1:
            say(f"warning: embedding_std is {row['embedding_std']:.3f}: the embeddings collapse", sys.stderr)
        if "knn_pixels" in row:
            say(f"k-NN on the test images: trained {row['knn_accuracy']:.1%}, same network at initialisation "
                f"{row['knn_init']:.1%}, raw pixels {row['knn_pixels']:.1%}")
