"""What every method script needs and a reader of the paper would skip: processes and errors, ResNet, LARS,
learning rate, augmentation, data sets, k-NN, checkpoints, the run folder.

Nothing here knows a method: losses, projectors, recipes and the training loop are in the scripts. Each
function can be copied out with the imports it uses.
"""
import argparse
import atexit
import contextlib
import copy
import errno
import hashlib
import json
import math
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections import Counter, OrderedDict, namedtuple
from functools import partial
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


def say(text, file=None):
    """Print a line, to whoever still listens: the terminal may have hung up."""
    with contextlib.suppress(OSError):
        print(" ".join(str(text).splitlines()), file=file, flush=True)


def fail(message, status: int = 1):
    """Exit with `status` after one line on stderr (rank 0): for what every rank sees alike."""
    if os.environ.get("RANK", "0") == "0":
        say(f"error: {message}", sys.stderr)
    raise SystemExit(status)


def init_distributed(device: str = "auto") -> SimpleNamespace:
    """Join torchrun's process group, if there is one. Returns `.rank .world_size .device`.

    Status 2 for a device that is not there, or half a launcher. CUDA tensors travel by nccl, CPU tensors by
    gloo."""
    rank, world_size, local_rank, here = (
        int(text) if (text := os.environ.get(name, "")).isdecimal() else default
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 0)))
    here = here or world_size
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if rank >= world_size or world_size > 1 and missing:
        os.environ.pop("RANK", None)  # so that this process speaks
        fail(f"WORLD_SIZE {world_size}, RANK {rank}, no {', '.join(missing) or 'sense'}: half a launcher; "
             "start with torchrun or unset them", 2)
    count = {"cpu": here, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device == "auto":
        device = "cuda" if count["cuda"] else "mps" if count["mps"] and world_size == 1 else "cpu"
    if here > count[device]:
        fail(f"--device {device}: {here} process(es) but {count[device]} such device(s); try --device cpu", 2)
    if device == "cuda":
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        atexit.register(dist.destroy_process_group)

    def hook(kind, error, trace):
        lost = world_size > 1 and re.search("[Cc]onnection|Broken pipe|recvValue", str(error))
        if kind is KeyboardInterrupt:
            sys.stderr.write("stopped; the same command starts again\n" if rank == 0 else "")
        elif kind is Fault:
            say(f"error: {error}", sys.stderr) if rank == 0 else None
        elif isinstance(error, MemoryError) or re.search("out of memory|allocate memory|DataLoader worker",
                                                         str(error)):
            say(f"error: out of memory? {error} Try a lower --batch-size, --width or --workers", sys.stderr)
        elif not lost:  # a process whose peer has died leaves quietly: the peer said why
            sys.__excepthook__(kind, error, trace)
        if world_size > 1 or kind is KeyboardInterrupt:  # no waiting for the others on the way out
            os._exit(130 if kind is KeyboardInterrupt else 1)
    sys.excepthook = hook
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device(device))


def on_rank0(function, env: SimpleNamespace, hint: str = ""):
    """function() on rank 0, None elsewhere; a fault of files or network there ends all ranks in one line."""
    message, value = [None], None
    if env.rank == 0:
        try:
            value = function()
        except (OSError, RuntimeError, ValueError, EOFError, LookupError, pickle.UnpicklingError) as error:
            message = [f"{hint} ({error})" if hint else str(error)]
    if env.world_size > 1:
        dist.broadcast_object_list(message, src=0, device=torch.device("cpu"))
    return fail(message[0]) if message[0] else value


class Fault(Exception):
    """A failure on one rank or more, of which all ranks know."""


@contextlib.contextmanager
def together(env: SimpleNamespace):
    """For work without collectives: what it raises on one rank becomes a Fault on all, and none waits."""
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


def largest(number: int, env: SimpleNamespace) -> int:
    """Of the ranks' numbers, by gloo between the hosts: no device waits."""
    number = torch.tensor(int(number))
    if env.world_size > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


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


def seed_for(*numbers) -> int:
    """A hash of the numbers (run seed, epoch, batch, rank): streams that never overlap, no state to save."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big") >> 1


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
        # evaluations, which send them; as an argument, newer versions of torch warn of it
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
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                update, state = p.grad, self.state[p]
                if p.ndim > 1:
                    update = update.add(p, alpha=group["weight_decay"])
                    ratio = group["eta"] * p.norm() / update.norm()  # a zero norm makes it 0, inf or nan
                    update = update * torch.where(ratio.isfinite() & (ratio > 0), ratio, 1)
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                p.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(update), alpha=group["lr"])
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
    for t, o in zip(target.parameters(), online.parameters(), strict=True):
        t.mul_(momentum).add_(o, alpha=1 - momentum)
    for t, o in zip(target.buffers(), online.buffers(), strict=True):
        t.copy_(o)


class Augment:
    """uint8 batch (B, 3, H, W) -> float32 (B, 3, size, size), normalised: SimCLR's augmentation, on any
    device.

    RandomResizedCrop, flip, ColorJitter, grayscale, Gaussian blur (odd kernel, about size / 10), solarize as
    torchvision's on float images, each image with draws of its own from the device's default generator. One
    deviation: the order of ColorJitter's operations is drawn once per call, not per image.
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
        part = 256 if images.device.type == "cpu" else max(1, len(images))  # a CPU's cache holds 256
        for x, result in zip(images.split(part), out.split(part)):
            result.copy_(self.augment(x, order, crop).transpose(0, 1))
        return out

    def augment(self, images: Tensor, order: list[int], crop: bool) -> Tensor:  # (3, B, size, size)
        def uniform(low, high):  # one number per image, to broadcast over (3, B, H, W)
            return torch.empty(len(images), 1, 1, device=images.device).uniform_(low, high)

        def chosen(p):
            return uniform(0, 1) < p

        n, _, height, width = images.shape
        box = random_box(n, height, width, self.crop_scale, images.device) if crop else [
            torch.full((n, 1, 1), float(v), device=images.device) for v in (0, 0, height, width)]
        x = crop_and_flip(images, *box, self.size, chosen(self.flip))
        if self.jitter_p > 0:
            on = chosen(self.jitter_p)
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
            grey, on = luma(x), chosen(self.gray_p).float()
            x.mul_(1 - on).add_(grey.mul_(on))
        if self.blur_p > 0:
            x = blur(x, uniform(*self.blur_sigma).where(chosen(self.blur_p), 0), int(self.size * 0.1) | 1)
        if self.solarize_p > 0:
            x = torch.where(chosen(self.solarize_p) & (x >= 128 / 255), 1 - x, x)
        mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1, 1) for v in (self.mean, self.std))
        return x.sub_(mean).div_(std)


def random_box(n: int, height: int, width: int, scale, device, ratio=(3 / 4, 4 / 3)) -> list[Tensor]:
    """top, left, height, width (n, 1, 1) as RandomResizedCrop draws them: ten tries, then the centre."""
    area = height * width * torch.empty(n, 10, device=device).uniform_(*scale)
    aspect = torch.empty(n, 10, device=device).uniform_(math.log(ratio[0]), math.log(ratio[1])).exp_()
    w, h = (area * aspect).sqrt_().round_(), (area / aspect).sqrt_().round_()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first, found = fits.float().argmax(1, keepdim=True), fits.any(1, keepdim=True)
    w = w.gather(1, first).where(found, min(width, round(height * ratio[1])))
    h = h.gather(1, first).where(found, min(height, round(width / ratio[0])))
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
    k = hue + torch.tensor([5.0, 3.0, 1.0], device=x.device).view(3, 1, 1, 1)
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


DATASETS = ("patterns", "cifar10", "cifar100", "stl10", "tinyimagenet", "imagenet100", "imagenet", "folder")
STATS = {"patterns": ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
         "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
         "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
         "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}  # the rest take imagenet's
# images: uint8 (N, 3, H, W), or a list of files where they are large; labels: int64 (N,), -1 unknown, or
# None; classes: names; mean, std: per channel, of [0, 1] pixels; image_size: pixels of a side the network
# sees; fingerprint: of names, labels and a few images; in words: where they are from, which files were no
# images, why labels are None
Images = namedtuple("Images", "images labels classes mean std image_size fingerprint source skipped "
                    "unlabelled", defaults=("", "", "", ""))
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


def find_images(folder: Path, only: set[str] | None = None) -> tuple[list[tuple], list[str], Counter]:
    """Image files below `folder`, sorted, each as the parts of its path there; the class of each: its first
    folder, or what Tiny ImageNet's list says, or ""; other files by suffix. only: files of these classes.

    Links are followed, but not into a folder that one is in. Hidden files and a run's own are passed over."""
    formats, known = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}, Image.registered_extensions().items()
    formats = {*Image.OPEN, "MPO"} - formats  # those Pillow recognises but leaves to other programs
    suffixes = {suffix for suffix, format in known if format in formats}
    found, skipped, above = [], Counter(), {}
    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        above[root] = {*above.get(os.path.dirname(root), ()), os.path.realpath(root)}
        folders[:] = [name for name in folders if not name.startswith(".")
                      and os.path.realpath(os.path.join(root, name)) not in above[root]]
        own = RUN_FILES if {"args.json", "log.jsonl"} <= {*files} or "eval.jsonl" in files else ()
        parts = Path(root).parts[len(folder.parts):]
        for name in files:
            suffix = os.path.splitext(name)[1].lower()
            if name.startswith(".") or name in own:
                continue
            if suffix in suffixes:
                found.append((*parts, name))
            else:
                broken = os.path.islink(path := os.path.join(root, name)) and not os.path.exists(path)
                skipped["broken link" if broken else suffix or "without suffix"] += 1
    table = folder / "val_annotations.txt"
    rows = table.read_text().splitlines() if table.is_file() else ()
    listed = dict(row.split("\t")[:2] for row in rows if "\t" in row)
    kinds = {parts: listed.get(parts[-1], parts[0] if len(parts) > 1 else "") for parts in sorted(found)}
    kinds = {parts: kind for parts, kind in kinds.items() if only is None or kind in only}
    return list(kinds), list(kinds.values()), skipped


def fingerprint(names, labels: Tensor | None, content: list) -> str:
    """Hash of the files' names, the labels and some content (arrays)."""
    digest = hashlib.blake2b(os.fsencode("\n".join("/".join(parts) for parts in names)), digest_size=8)
    for part in ([] if labels is None else [labels.numpy()]) + content:
        digest.update(part.tobytes())
    return digest.hexdigest()


def load_files(name: str, root: Path, train: bool, size: int | None, limit: int | None, classes: str | None,
               report: bool) -> Images | None:
    """load_images of a data set of files."""
    hint = "put images there, a folder per class or all in one, or change --data-dir"
    places = {"folder": [], "tinyimagenet": ["tiny-imagenet-200"], "imagenet100": ["imagenet100", "imagenet"]}
    folder = next((root / place for place in places.get(name, [name]) if (root / place).is_dir()), root)
    folders = next(os.walk(folder, onerror=lambda error: fail(f"no images in {folder} ({error}); {hint}")))[1]
    splits = {SPLITS[p.lower()]: folder / p for p in sorted(folders) if p.lower() in SPLITS}
    splits = splits or {"train": folder}
    if "train" not in splits:
        fail(f"{folder} has a folder {min(splits.values()).name} but no folder train")
    if name == "imagenet100" and folder == root / "imagenet" and not classes:
        fail(f"{name} in {folder} needs --classes FILE, the name of a class folder on each line")
    order = ("test", "val") if report and name == "folder" else ("val", "test")  # others' test has no labels
    split = "train" if train else next((s for s in order if s in splits), None)
    if split is None:
        return None
    try:
        only = {*map(str.strip, Path(classes).read_text().splitlines())} - {""} if classes else None
    except (OSError, ValueError) as error:
        fail(f"cannot read --classes {classes}: {error}")
    names, kinds, skipped = find_images(splits["train"], only)
    lacking = min((only or set()) - {*kinds}, default=None if names else "")
    if lacking is not None:
        fail(f"no images in {splits['train'] / lacking}; {hint}")
    known = [] if "" in kinds else sorted({*kinds})
    sample = [os.path.join(splits["train"], *parts) for parts in names[::len(names) // 1000 + 1]]
    if not train:
        names, kinds, skipped = find_images(splits[split], only)
    if not names:
        return None
    place, why, new = splits[split], "", sorted({*kinds} - {*known})
    if "" in kinds and any(kinds):
        why = f"{place / names[kinds.index('')][0]} lies beside the class folders"
    elif known and "" in new:
        why = f"{place} has no folder per class: sort its images into folders named as those of train"
    elif known and new:
        why = f"{place} has classes that train lacks: {', '.join(new[:5])}{', ...' * (len(new) > 5)}"
    number, labels = {kind: i for i, kind in enumerate(known)}, None
    if known and not why:
        labels = torch.tensor([number[kind] for kind in kinds])
    if limit and limit < len(names):  # of all classes, though they are sorted
        keep = [i * len(names) // limit for i in range(limit)]
        names, labels = [names[i] for i in keep], None if labels is None else labels[keep]
    files = [os.path.join(place, *parts) for parts in names]
    try:
        heads = [np.fromfile(file, np.uint8, 2**16) for file in files[::len(files) // 16 + 1]]
        images = files if name.startswith("imagenet") else read_small(files, sample, size)
    except OSError as error:
        fail(error)
    size = size or (64 if name == "tinyimagenet" else 32 if torch.is_tensor(images) else 224)
    source = f"from {root}"
    if name == "folder" and {"val", "test"} <= {*splits}:
        source += f" (test images: {splits['val'].name}; linear_eval.py takes {splits['test'].name})"
    skipped = ", ".join(f"{n} {suffix}" for suffix, n in sorted(skipped.items()))
    return Images(images, labels, known, *STATS.get(name, STATS["imagenet"]), size,
                  fingerprint(names, labels, heads), source, skipped and f"{place}: {skipped}", why)


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
        return data._replace(images=data.images.to(env.device)) if in_memory else data
    if classes:
        fail(f"--classes picks class folders, and {name} has none", 2)
    if name == "patterns":
        (images, labels), names, source = patterns(train), list(PATTERNS), "generated"
    else:
        kind, split = getattr(datasets, name.upper()), dict(train=train)
        if name == "stl10":
            split = dict(split="test" if not train else "train+unlabeled" if unlabelled else "train")
        socket.setdefaulttimeout(20)
        hint = f"{name} is not in {root} and cannot be downloaded; put {kind.base_folder} there"
        data = on_rank0(lambda: kind(root, download=True, **split), env, hint) or kind(root, **split)
        images, names, source = torch.from_numpy(data.data), data.classes, f"from {root}"
        images = images if name == "stl10" else images.permute(0, 3, 1, 2).contiguous()
        labels = torch.as_tensor(data.labels if name == "stl10" else data.targets).long()
    images, labels = images[:limit], labels[:limit]
    few = [] if name == "patterns" else [images[::len(images) // 16 + 1].numpy()]  # patterns may be rounded
    size = image_size or (64 if name == "stl10" else 32)
    return Images(images.to(env.device), labels, names, *STATS.get(name, STATS["imagenet"]), size,
                  fingerprint([], labels, few), source)


def report_data(train: Images, test: Images | None, env: SimpleNamespace) -> dict:
    """Say on rank 0 what was found. -> what tells these images from others, wherever they lie."""
    splits = [split for split in (train, test) if split]
    data = {"train_images": len(train.images), "test_images": len(test.images) if test else 0,
            "classes": len(train.classes), "image_size": train.image_size,
            "fingerprint": "-".join(split.fingerprint for split in splits)}
    if env.rank == 0:
        kinds = f"of {len(train.classes)} classes" if train.classes else "without labels"
        print(f"{data['train_images']} training images {kinds}, {data['test_images']} test images, "
              f"{train.image_size} px, {train.source}", flush=True)
        for split in splits:
            if split.skipped:
                print(f"skipped, as no images, in {split.skipped}", flush=True)
            if split.unlabelled:
                print(f"warning: {split.unlabelled}; no k-NN", file=sys.stderr, flush=True)
    return data


@contextlib.contextmanager
def opened(file: str):
    """Pillow's image. Whatever is wrong with it becomes an OSError that names the file."""
    try:
        with Image.open(file) as image:
            yield image
    except Exception as error:  # a damaged file can raise anything
        raise OSError(f"cannot read image {file}: {error}") from None


def read_rgb(file: str) -> Image.Image:
    """First frame, turned as EXIF says, in RGB: alpha is dropped; grey of 16 bits is scaled by their range,
    of 32 bits by the image's own: to 1 (floats), 255, 65535 or its maximum, from its minimum if that is
    below 0. OSError that names a file it cannot read."""
    with opened(file) as image:
        image.load()
        with contextlib.suppress(Exception):  # a damaged tag spoils no picture
            ImageOps.exif_transpose(image, in_place=True)
        if image.mode[0] in "IF":
            x = np.asarray(image).astype(float)
            if not np.isfinite(x).all():
                raise ValueError("not all of its values are finite")
            low, high, tops = min(0, x.min()), x.max(), (1, 255, 65535) if image.mode == "F" else (255, 65535)
            if image.mode.startswith("I;16") or image.mode == "I" and image.format in ("PNG", "PPM"):
                high = 65535
            elif low == 0:
                high = next((top for top in tops if high <= top), high)
            image = Image.fromarray(((x - low) * (255 / max(high - low, 1e-30))).round().astype(np.uint8))
        elif image.mode in ("P", "PA"):  # at once to RGB, Pillow would warn of transparent colours
            image = image.convert("RGBA")
        return image.convert("RGB")


def read_small(files: list[str], sample: list[str], size: int | None) -> Tensor | list[str]:
    """All files as one uint8 tensor, each resized and cut to the size of nearly all of `sample`, or to the
    median of its shorter sides; the files if the median of the longer ones, or `size`, is over 64 px."""
    def read(file):
        image = read_rgb(file)
        image = image if image.size == shape else ImageOps.fit(image, shape, Image.Resampling.BILINEAR)
        return v2.functional.pil_to_tensor(image)

    sides = []
    for file in sample:
        with opened(file) as image:
            sides.append(max(image.size))
    if median_low(sides) > 64 or (size or 0) > 64:
        return files
    sizes = Counter(read_rgb(file).size for file in sample)
    shape, n = sizes.most_common(1)[0]
    if n < 0.9 * len(sample):
        shape = (median_low(map(min, sizes.elements())),) * 2
    return torch.stack([read(file) for file in files])


class ImageFiles:
    """Large images for DataLoader workers, which only decode and crop: (seed, index) -> uint8 crops, one for
    each (size, scale) in crops or else the centre of `size`; index; error."""

    def __init__(self, files: list[str], size: int, crops=()):
        self.files, self.size, self.crops = files, size, crops

    def __getitem__(self, key):
        views = [v2.RandomResizedCrop(size, scale) for size, scale in self.crops]
        views = views or [v2.Compose([v2.Resize(self.size * 256 // 224), v2.CenterCrop(self.size)])]
        try:
            image = read_rgb(self.files[key[1]])
            if not self.crops:  # of a strip the middle: whole it would become as much longer as wider
                longest = 4 * min(image.size)
                image = v2.functional.center_crop(image, [min(v, longest) for v in image.size[::-1]])
        except OSError as error:  # sent as data: an exception would come with its traceback
            sizes = [size for size, _ in self.crops] or [self.size]
            return [torch.zeros(3, size, size, dtype=torch.uint8) for size in sizes], key[1], str(error)
        torch.manual_seed(key[0])
        return [v2.functional.pil_to_tensor(view(image)) for view in views], key[1], ""


def read_files(data: Images, keys: list, crops, workers: int, env: SimpleNamespace, ends: bool = True):
    """Yield (list of uint8 view batches on the device, index) for each list of (seed, index) keys. An
    unreadable file ends the program, or else is an OSError."""
    loader = torch.utils.data.DataLoader(
        ImageFiles(data.images, data.image_size, crops), batch_sampler=keys,
        num_workers=min(workers, os.cpu_count()), pin_memory=env.device.type == "cuda")
    for views, index, errors in loader:
        if any(errors) and not ends:
            raise OSError(next(filter(None, errors)))
        if any(errors):  # this rank alone knows
            say(f"error: {next(filter(None, errors))}", sys.stderr)
            os._exit(1)
        yield [view.to(env.device, non_blocking=True) for view in views], index


def batches(data: Images, epoch: int, batch_size: int, env, seed: int, views, workers=0, first=0):
    """(list of views, labels or None): this rank's share of each whole batch of an epoch, from `first` on.

    views: an Augment per view. The order depends on (seed, epoch), each other draw on (seed, epoch, batch,
    rank), so that a run can go on inside an epoch with no random state saved."""
    n, in_memory = len(data.images) // batch_size * batch_size, torch.is_tensor(data.images)
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(seed_for(seed, epoch)))
    order = order[:n].view(-1, env.world_size, batch_size // env.world_size)[first:, env.rank]
    if in_memory:
        source = (([data.images[index]] * len(views), index) for index in order.to(env.device))
    else:
        keys = [[(seed_for(seed, epoch, i), i) for i in row] for row in order.tolist()]
        source = read_files(data, keys, [(view.size, view.crop_scale) for view in views], workers, env)
    labels = None if data.labels is None else data.labels.to(env.device)
    for i, (images, index) in enumerate(source, first):
        torch.manual_seed(seed_for(seed, epoch, i, env.rank))
        x = [view(x, crop=in_memory) for view, x in zip(views, images)]
        yield x, None if labels is None else labels[index.to(env.device)]


@torch.no_grad()
def features(backbone: nn.Module, data: Images, env: SimpleNamespace, precision="auto", workers=0, chunk=500):
    """Backbone features (N, feature_dim) of all images, in order, on every rank; eval mode, centre crop.

    Ranks take whole chunks in turn: the chunks, and the numbers, are the same at every world size. Fault for
    an unreadable file, features that are not finite, and whatever else stops a rank."""
    n, size, in_memory = len(data.images), data.image_size, torch.is_tensor(data.images)
    mean, std = (torch.tensor(v, device=env.device).view(3, 1, 1) for v in (data.mean, data.std))
    rows = [range(i, min(i + chunk, n)) for i in range(0, n, chunk)][env.rank::env.world_size]
    source = (([data.images[r.start:r.stop]], r) for r in rows) if in_memory else read_files(
        data, [[(0, i) for i in r] for r in rows], (), workers, env, ends=False)
    with together(env):
        training, result = backbone.training, torch.zeros(n, backbone.feature_dim, device=env.device)
        backbone.eval()
        bar = tqdm(zip(rows, source), "features", len(rows), leave=False, disable=True if env.rank else None)
        for r, ((x,), _) in bar:
            if x.shape[2:] != (size, size):
                x = v2.functional.center_crop(v2.functional.resize(x, size), size)
            with autocast(env.device, precision):
                x = ((x / 255 - mean) / std).to(memory_format=torch.channels_last)
                result[r.start:r.stop] = backbone(x).float()
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
    nearest by cosine to a row of test_x (M, D) (Wu et al., arXiv 1805.01978). Memory: chunk x N.

    Lists of k and of tau: a list of lists, [k][tau], at the price of one search for neighbours."""
    ks, taus = (v if isinstance(v, list) else [v] for v in (k, tau))
    n_classes, correct = int(train_y.max()) + 1, [[0] * len(taus) for _ in ks]
    bank = F.normalize(train_x.float(), dim=1).T
    for x, y in zip(F.normalize(test_x.float(), dim=1).split(chunk), test_y.split(chunk)):
        similarity, index = (x @ bank).topk(min(max(ks), len(train_x)), dim=1)
        similarity, labels = similarity - similarity[:, :1], train_y[index]  # same vote, no overflow
        for row, k_ in zip(correct, ks):
            for i, tau_ in enumerate(taus):
                weight = (similarity[:, :k_] / tau_).exp()
                votes = torch.zeros(len(x), n_classes, device=x.device)
                votes.scatter_add_(1, labels[:, :k_], weight)
                row[i] += (votes.argmax(1) == y).sum().item()
    accuracies = [[n / max(1, len(test_y)) for n in row] for row in correct]
    return accuracies if isinstance(k, list) or isinstance(tau, list) else accuracies[0][0]


def knn(train_x, train_y, test_x, test_y, env: SimpleNamespace, **options) -> float:
    """knn_accuracy on env.device, the test rows shared out over the ranks."""
    with together(env):
        x, y = test_x[env.rank::env.world_size], test_y[env.rank::env.world_size].to(env.device)
        accuracy = knn_accuracy(train_x, train_y.to(env.device), x, y, **options)
        hits = torch.tensor(accuracy, dtype=torch.float64) * len(y)
    if env.world_size > 1:
        dist.all_reduce(hits)
    return (hits.round() / len(test_y)).tolist()


def rankme(x: Tensor) -> float:
    """Effective rank of features (N, D), 1 to min(N, D): exp(-sum p log p), p = singular values over their
    sum (Garrido et al., arXiv 2210.02885)."""
    s = torch.linalg.svdvals((x.cpu() if x.is_mps else x).double())  # mps has no float64
    p = s / s.sum()
    return torch.special.entr(p).sum().exp().item()


def embedding_std(z: Tensor) -> float:
    """Std over z's l2-normalised rows (N, D), mean over dimensions, times sqrt(D): 1 spread, 0 collapsed."""
    return F.normalize(z.float(), dim=1).std(0).mean().item() * z.shape[1] ** 0.5


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
        if temporary.exists():
            temporary.unlink()


def save_checkpoint(path, state: dict):
    """Write tensors and plain values; a kill leaves the old file or the new one. OSError if it cannot."""
    write_file(path, lambda file: torch.save(state, file))


def load_checkpoint(path) -> dict:
    """Read a checkpoint onto the CPU as data: no code in it runs. ValueError if missing or damaged."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"no file {path}") from None
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())[:60]
        raise ValueError(f"{path} is damaged or not a checkpoint ({reason})") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a checkpoint: it holds a {type(state).__name__}")
    return state


def unlike(wanted: dict, found: dict) -> str:
    """How state dict `found` differs from `wanted`: the first key missing, the first unexpected, else the
    first of another shape, in words; nothing if it loads."""
    odd = [f"no {key}" for key in wanted if key not in found][:1]
    odd += [f"an unexpected {key}" for key in found if key not in wanted][:1]
    shapes = [[tuple(getattr(v[k], "shape", ())) for v in (found, wanted)] + [k] for k in wanted if not odd]
    odd += [f"{key} of shape {a}, not {b}" for a, b, key in shapes if a != b][:1]
    return " and ".join(odd)


def grid(x: Tensor, data: Images, columns: int) -> Tensor:
    """Normalised images (N, 3, H, W) as one picture, small ones enlarged to about 64 px."""
    mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (data.mean, data.std))
    x = F.interpolate(x * std + mean, scale_factor=max(1, 64 // x.shape[3]))  # nearest
    return utils.make_grid(x, nrow=columns)


COLOURS = ((0.1, 0.1, 0.5), (0.2, 0.5, 0.8), (0.95, 0.6, 0.2), (0.2, 0.6, 0.2), (0.8, 0.15, 0.15),
           (0.55, 0.3, 0.7), (0.45, 0.3, 0.2), (0.9, 0.4, 0.7), (0.4, 0.7, 0.65), (0.4, 0.4, 0.4))


def chart(curves: list[Tensor], texts: dict[str, tuple], level: float | list[float] = 0.0) -> Tensor:
    """Curves, a value in [0, 1] or nan for each column, in COLOURS: blue, light blue, orange, ..., over grey
    lines at `level`; texts at (left, top), or (left, top, i) in the i-th colour. -> picture (3, 256, columns
    + 16)"""
    image = torch.ones(3, 240, len(curves[0]))
    image[:, (239 * (1 - torch.tensor(level))).round().long()] = 0.8
    for curve, colour in zip(curves, COLOURS):
        y = (239 * (1 - curve.clamp(0, 1))).round().tolist()
        for x, (a, b) in enumerate(zip(y[:-1], y[1:])):
            if not math.isnan(a + b):
                image[:, int(min(a, b)):int(max(a, b)) + 2, x:x + 2] = torch.tensor(colour)[:, None, None]
    picture = v2.functional.to_pil_image(F.pad(image, (8, 8, 8, 8), value=1))
    for text, (left, top, *i) in texts.items():
        colour = tuple(round(255 * v) for v in COLOURS[i[0]]) if i else (0, 0, 0)
        ImageDraw.Draw(picture).text((left + 8, top + 8), text, colour)
    return v2.functional.pil_to_tensor(picture) / 255


def heatmaps(matrices: list[Tensor]) -> Tensor:
    """Square matrices, the first 512 rows and columns of each, side by side, small ones enlarged. -> picture
    (3, H, W): white is 0, red the largest magnitude of a matrix, blue its negative."""
    matrices = [(m.float() / m.abs().max().clamp(min=1e-12))[:512, :512].cpu() for m in matrices]
    side, pictures = max(256, *map(len, matrices)), []
    for m in matrices:
        m = m.repeat_interleave(-(-side // len(m)), 0).repeat_interleave(-(-side // len(m)), 1)
        pictures.append(torch.stack([1 + m.clamp(max=0), 1 - m.abs(), 1 - m.clamp(min=0)]))
    height = max(len(picture[0]) for picture in pictures)
    pad = [(4, 4, 4, 4 + height - len(picture[0])) for picture in pictures]
    return torch.cat([F.pad(*picture, value=1) for picture in zip(pictures, pad)], dim=2)


def add_machine_args(parser):
    """The flags that every program here shares; errors become one line and status 2."""
    parser.error = lambda message: fail(f"{message}; see --help", 2)
    add = parser.add_argument
    add("--data-dir", type=os.path.expanduser, default="data", help="where the data set is")
    add("--classes", type=os.path.expanduser, metavar="FILE", help="use the class folders named there only")
    add("--seed", type=whole, default=0, help="of everything random")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    add("--precision", default="auto", choices=("auto", "bf16", "fp32"), help="auto: bf16 where it is faster")
    add("--workers", type=whole, default=4, help="processes that decode large images")


def within(kind, low, high, text: str):
    """For argparse, as partial(within, int or float, low, high): a number from low to high."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        whole = "whole " if kind is int else ""
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a {whole}number from {low:g} to {high:g}")
    return value


count = partial(within, int, 1, 10**7)
side = partial(within, int, 1, 2**16)
whole = partial(within, int, 0, 2**63 - 1)
rate = partial(within, float, 0, 1e30)
positive = partial(within, float, 1e-30, 1e30)
fraction = partial(within, float, 0, 1)


def layers(text: str) -> str:
    """For argparse: widths, A-B-C."""
    return "-".join(str(side(width)) for width in text.split("-"))


def add_run_args(parser):
    """The flags that all training scripts share. Default None: the data set's recipe says."""
    add_machine_args(parser)
    add = parser.add_argument
    add("--dataset", default="patterns", choices=DATASETS)
    add("--out", type=os.path.expanduser,
        help="run folder (default runs/SCRIPT-DATASET); the same command again goes on there")
    add("--image-size", type=side, help="pixels the network sees; 64 or less: 3x3 stem")
    add("--arch", choices=("resnet18", "resnet34", "resnet50"))
    add("--width", type=side, help="channels of the first stage")
    add("--projector", type=layers, help="widths of its layers, A-B-D")
    add("--epochs", type=count, help="length of the schedule")
    add("--batch-size", type=count, help="images per step over all processes")
    add("--base-lr", type=rate, help="learning rate per 256 images of the batch")
    add("--weight-decay", type=rate, help="of weights; none on biases and BatchNorm")
    add("--warmup-epochs", type=rate, help="of linear warm-up")
    add("--limit-images", type=count, help="train on so many images; of files every k-th")
    add("--compile", action="store_true", help="torch.compile the network")
    add("--save-every", type=count, default=1, help="epochs between checkpoints")
    add("--eval-every", type=count, help="epochs between k-NN (default: a twentieth of --epochs)")
    add("--max-steps", type=count, help="stop after so many steps in all, of the same schedule")


def parse_run_args(parser, recipes: dict, argv=None):
    """The command line over the data set's recipe over the defaults."""
    parser.set_defaults(**recipes[parser.parse_known_args(argv)[0].dataset])
    args = parser.parse_args(argv)
    args.out = args.out or f"runs/{Path(parser.prog).stem}-{args.dataset}"
    args.eval_every = args.eval_every or max(1, args.epochs // 20)
    return args


# Settings that cannot change the result; the others must be the same for a run to go on in its folder.
FREE = {"max_steps", "device", "workers", "data_dir", "classes", "save_every", "eval_every", "compile",
        "out"}


class Run:
    """Folder and books of a training: opens or resumes it, hands out batches, logs, saves, draws, evaluates.

    views: an Augment per view. picture(z1, z2, args) -> matrices to draw, for one fixed batch in eval mode.
    k, tau: of the k-NN that watches the training.
    model.backbone is evaluated; what must survive a restart is in the state_dict of model or optimizer."""

    def __init__(self, args, env, train: Images, test: Images | None, model, optimizer, views, picture,
                 k: int = 20, tau: float = 0.1):
        self.args, self.env, self.train, self.test = args, env, train, test
        self.out, self.model, self.views, self.picture = Path(args.out), model, views, picture
        self.k, self.tau = k, tau
        if args.batch_size % env.world_size:
            fail(f"--batch-size {args.batch_size} does not divide by {env.world_size} processes", 2)
        if args.batch_size < 2 * env.world_size:
            fail(f"--batch-size {args.batch_size}: BatchNorm needs two images or more in each process", 2)
        if len(train.images) < args.batch_size:
            fail(f"{len(train.images)} training images are fewer than --batch-size {args.batch_size}")
        self.steps_per_epoch = len(train.images) // args.batch_size
        self.total_steps = args.epochs * self.steps_per_epoch
        self.warmup_steps = round(args.warmup_epochs * self.steps_per_epoch)
        self.last_step = min(self.total_steps, args.max_steps or self.total_steps)
        self.initial, self.flying, self.signal = copy.deepcopy(model.backbone), [], 0
        d = model.backbone.feature_dim  # the features' scale changes as they are learnt, so standardise them
        self.probe = nn.Sequential(nn.BatchNorm1d(d, affine=False), nn.Linear(d, max(1, len(train.classes))))
        probe_optimizer = torch.optim.SGD(self.probe.to(env.device).parameters(), lr=0.1, momentum=0.9)
        self.parts = dict(model=model, optimizer=optimizer, probe=self.probe, probe_optimizer=probe_optimizer)
        on_rank0(self.lock, env)
        self.resume()
        alone, n = SimpleNamespace(rank=0, world_size=1, device=env.device), min(args.batch_size, 512)
        self.fixed, _ = next(batches(train, -1, n, alone, args.seed, views[:2], args.workers))
        pairs = torch.stack([x[:32] for x in self.fixed], 1).flatten(0, 1)
        self.draw("views.png", lambda: grid(pairs, train, 16))
        for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's
                signal.signal(number, lambda number, frame: setattr(self, "signal", number))

    def lock(self):
        """Refuse a folder that another process writes to. A record lock ends with its process, however that
        ends, is not inherited by workers, and holds over NFS."""
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl  # Windows has none
            self.locked = open(self.out / ".lock", "a")
        except (ImportError, OSError):  # nor can anybody else write
            return
        try:
            fcntl.lockf(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # another one: a file system without locks
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(f"another process trains in {self.out}; wait for it or choose another --out")

    def resume(self):
        """Check that the folder holds this run or nothing; take up its checkpoint and cut its log there."""
        settings = {k: v for k, v in vars(self.args).items() if k not in FREE}
        data = report_data(self.train, self.test, self.env)
        arguments, checkpoint, log = (self.out / name for name in ("args.json", "checkpoint.pt", "log.jsonl"))
        try:
            old = json.loads(arguments.read_text()) if arguments.exists() else {"settings": settings}
            pairs = ("settings", old["settings"], settings), ("images", old.get("data", data), data)
            for what, old, new in pairs:
                other = [f"{k} {old.get(k)} (now {new.get(k)})" for k in {**old, **new}
                         if old.get(k) != new.get(k)]
                if other:
                    raise ValueError(f"it holds a run with other {what}, " + ", ".join(other))
            state = {"step": 0, "sums": {}, "seconds": 0.0, "row": None}
            state = load_checkpoint(checkpoint) if checkpoint.exists() else state
            for name, part in self.parts.items() if checkpoint.exists() else ():
                odd = unlike(part.state_dict(), state.get(name, state))
                if odd:
                    raise ValueError(f"the {name} in {checkpoint.name} is another's, it has {odd}")
                part.load_state_dict(state[name])
            self.step, self.seconds, self.row = state["step"], state["seconds"], state["row"]
            self.sums = {k: v.to(self.env.device) for k, v in state["sums"].items()}
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            fail(f"cannot go on in {self.out}: {error}; choose another --out")

        def write():  # keep the log lines of whole epochs; does the checkpoint's lack, after a kill between?
            lines = log.read_text().splitlines(keepends=True) if log.exists() else []
            done, whole = self.step >= self.last_step, self.step // self.steps_per_epoch
            rows = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
            rows = [(line, row) for line, row in rows if done or row["epoch"] <= whole]
            owed = self.row and (done or self.row["epoch"] <= whole) and self.row["step"] == self.step
            owed = owed and all(row["step"] < self.step for _, row in rows)
            if owed or not done:
                text = {"script": Path(sys.argv[0]).stem, "data": data, "settings": settings,
                        "all": vars(self.args)}
                text = json.dumps(text, indent=1)
                write_file(arguments, lambda file: file.write(text.encode()))
                write_file(log, lambda file: file.write("".join(line for line, _ in rows).encode()))
            return owed
        self.owed = largest(on_rank0(write, self.env) or 0, self.env)

    def epochs(self):
        """The epochs yet to run, the current one included; none if the run is at its end."""
        if self.owed:
            self.report()
        if self.step >= self.last_step:
            if self.env.rank == 0:
                print(f"{self.out} is finished: step {self.step} of {self.total_steps}, as asked")
            return
        yield from range(self.step // self.steps_per_epoch, -(-self.last_step // self.steps_per_epoch))

    def batches(self, epoch: int):
        """(step, views, labels) for the rest of an epoch. SIGTERM or Ctrl-C: checkpoint, exit 143 or 130."""
        args, first, start = self.args, self.step - epoch * self.steps_per_epoch, time.perf_counter()
        self.bar = tqdm(desc=f"epoch {epoch + 1}/{args.epochs}", total=self.steps_per_epoch * args.batch_size,
                        initial=first * args.batch_size, unit="images", unit_scale=True, leave=False,
                        disable=True if self.env.rank else None)
        for views, y in batches(self.train, epoch, args.batch_size, self.env, args.seed, self.views,
                                args.workers, first):
            if stop := largest(self.signal, self.env):
                self.bar.close()
                on_rank0(self.save, self.env)
                if self.env.rank == 0:
                    say(f"stopped at step {self.step}; the same command continues", sys.stderr)
                os._exit(128 + stop)
            yield self.step, views, y
            self.step += 1
            self.bar.update(args.batch_size)
            if self.step == self.last_step:
                break
        if self.env.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.bar.close()

    def log(self, lr: float, loss: Tensor, terms: dict, z: Tensor, h: Tensor, y: Tensor | None):
        """Book a step, train the online probe on the features h, stop if the loss is not finite: on CUDA one
        step late, when its value has arrived, so that the device need not wait."""
        values = {"loss": loss.detach(), **terms, "steps": torch.ones_like(loss)}
        if y is not None:
            y = y.repeat(len(h) // len(y))
            logits, known = self.probe(h.detach().float()), (y >= 0).sum().clamp(min=1)
            self.probe.zero_grad()
            (F.cross_entropy(logits, y, ignore_index=-1, reduction="sum") / known).backward()
            for p in self.probe.parameters() if self.env.world_size > 1 else ():
                dist.all_reduce(p.grad.div_(self.env.world_size))
            self.parts["probe_optimizer"].step()
            values["probe_accuracy"] = (logits.argmax(1) == y).sum() / known
        self.sums = {k: self.sums.get(k, 0) + v for k, v in values.items()}
        self.lr, self.z = lr, z.detach()
        shown = torch.stack([values["loss"], values.get("probe_accuracy", torch.zeros_like(loss))])
        shown = torch.empty(2, pin_memory=loss.is_cuda).copy_(shown, non_blocking=True)
        arrival = torch.cuda.current_stream().record_event() if loss.is_cuda else None
        self.flying.append((self.step, lr, shown, arrival))
        while len(self.flying) > loss.is_cuda:
            self.land()

    def land(self):
        step, lr, shown, arrival = self.flying.pop(0)
        if arrival:
            arrival.synchronize()
        loss, probe = shown.tolist()
        if not math.isfinite(loss):
            self.bar.close()
            fail(f"loss is {loss} at step {step}, lr {lr:.3g}; lower --base-lr or lengthen --warmup-epochs; "
                 f"{self.out} keeps its last good checkpoint")
        self.bar.set_postfix(loss=f"{loss:.3f}", lr=f"{lr:.3g}", probe=f"{probe:.1%}", refresh=False)

    def end_epoch(self, epoch: int, more=dict):
        """Checkpoint and log line of an epoch, or of the part of it that --max-steps allows; more() gives
        further values of the line. What only looks at the training may fail."""
        while self.flying:
            self.land()
        steps, whole = self.sums["steps"].item(), self.step == (epoch + 1) * self.steps_per_epoch

        def measured():
            with together(self.env):
                return more()

        self.row = {"epoch": epoch + 1, "step": self.step, "lr": self.lr,
                    **{k: v.item() / steps for k, v in self.sums.items() if k != "steps"},
                    **self.attempt("measures", measured), "embedding_std": embedding_std(self.z),
                    "images_per_s": steps * self.args.batch_size / self.seconds}
        if whole:
            self.sums, self.seconds = {}, 0.0
        if self.step == self.last_step or (whole and (epoch + 1) % self.args.save_every == 0):
            on_rank0(self.save, self.env)
        self.report()

    def report(self):
        """Evaluation and picture that go with the last row, and its line in the log."""
        row, final, labels = dict(self.row), self.step == self.total_steps, self.test and self.test.labels
        due = row["step"] == row["epoch"] * self.steps_per_epoch and (
            final or row["epoch"] % self.args.eval_every == 0)
        if due and labels is not None:
            row.update(self.attempt("evaluation", lambda: self.evaluate(final)))
        self.draw("affinity.png", lambda: heatmaps(
            self.picture(*(z.float() for z in self.model(*self.fixed)[1:3]), self.args)))
        on_rank0(lambda: self.write(row), self.env)

    def attempt(self, what: str, function) -> dict:
        """function(), or, where that is a Fault, nothing and a warning."""
        try:
            return function()
        except Fault as fault:
            if self.env.rank == 0:
                say(f"warning: no {what} at step {self.step}: {fault}", sys.stderr)
            return {}
        finally:
            self.model.train(), self.probe.train()

    def evaluate(self, final: bool) -> dict:
        """Test accuracy of k-NN (bank: at most 50,000 labelled training images) and of the online probe; at
        the end also of k-NN with the network at initialisation and on pixels."""
        for buffer in self.model.buffers() if self.env.world_size > 1 else ():  # BatchNorm's differ on CPUs
            dist.broadcast(buffer, 0)
        with together(self.env):
            keep = (self.train.labels >= 0).nonzero()[:, 0]
            keep, images = keep[::-(-len(keep) // 50000)], self.train.images
            images = images[keep.to(images.device)] if torch.is_tensor(images) else [images[i] for i in keep]
            bank, test = self.train._replace(images=images), self.test
        options = (self.env, self.args.precision, self.args.workers)

        def accuracy(bank_x, test_x):
            return knn(bank_x, self.train.labels[keep], test_x, test.labels, self.env, k=self.k, tau=self.tau)

        bank_x, test_x = (features(self.model.backbone, data, *options) for data in (bank, test))
        with together(self.env):
            hits = self.probe.eval()(test_x).argmax(1).cpu() == test.labels
            sets = (bank, test) if final and torch.is_tensor(images) else ()
            pixels = [(data.images / 255).flatten(1) for data in sets]
        row = {"knn_accuracy": accuracy(bank_x, test_x), "probe_test_accuracy": hits.float().mean().item()}
        if pixels:
            row["knn_init"] = accuracy(*(features(self.initial, data, *options) for data in (bank, test)))
            row["knn_pixels"] = accuracy(*pixels)
        return row

    def write(self, row: dict):
        with open(self.out / "log.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        say(json.dumps(row))
        if row["embedding_std"] < 0.1:
            say(f"warning: embedding_std {row['embedding_std']:.3f} is below 0.1: the embeddings collapse",
                sys.stderr)
        if "knn_pixels" in row:
            say(f"k-NN (k {self.k}) on {len(self.test.images)} test images: "
                f"trained {row['knn_accuracy']:.1%}, same network at initialisation {row['knn_init']:.1%}, "
                f"raw pixels {row['knn_pixels']:.1%}")

    @torch.no_grad()
    def draw(self, name: str, make):
        """The picture that make() is, on rank 0, the model in eval mode; one that cannot be drawn costs a
        warning."""
        if self.env.rank:
            return
        self.model.eval()
        try:
            picture = make()
            write_file(self.out / name, lambda file: utils.save_image(picture, file, format="png"))
        except Exception as error:
            say(f"warning: no {name} at step {self.step}: {error}", sys.stderr)
        self.model.train()

    def save(self):
        """checkpoint.pt, all it takes to go on, and backbone.pt, all it takes to use the features."""
        args, train = self.args, self.train
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        bad = [k for k, v in parts["model"].items() if not v.isfinite().all()]
        if bad:
            raise ValueError(f"{bad[0]} is not finite at step {self.step}, lr {self.lr:.3g}; lower --base-lr")
        about = dict(arch=args.arch, width=args.width, dataset=args.dataset, image_size=train.image_size,
                     small_images=train.image_size <= 64, mean=list(train.mean), std=list(train.std))
        backbone = {k: v.cpu().contiguous() for k, v in self.model.backbone.state_dict().items()}
        save_checkpoint(self.out / "backbone.pt", dict(state_dict=backbone, **about))
        state = dict(step=self.step, sums=self.sums, seconds=self.seconds, row=self.row)
        save_checkpoint(self.out / "checkpoint.pt", dict(**state, **parts, **about))
