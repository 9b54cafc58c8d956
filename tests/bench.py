"""Ratios, measured side by side on this machine (not part of pytest):

    python tests/bench.py [--device cuda] [--arch resnet18 --width 16 --batch-size 256]
    python tests/bench.py --losses [--device cuda] [--size 1024 8192]

whole script / bare model step: images/s of simtrace.py, all included but evaluation, against forward,
backward and optimiser step of the same model on ready batches of the same size and precision.
Augment / torchvision: images/s of common.Augment on a batch, against torchvision's transforms image by image
in as many processes as there are cores.
--losses: time of each loss of vicreg_variants.py, forward and backward on float32 embeddings (N, D), over
that of the products alone that make its matrices, forward only (D x D of each view for vicreg and vicreg-exp,
of one with the other for barlow; N x N of each for vicreg-ctr, of one with the other for spectral; the
smaller of the two of each view for tcr; 2N x 2N for simclr and its kin), of which the backward pass needs two
more; and the memory it takes at its peak over that of one such matrix.
"""

import argparse
import io
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).parent.parent))
import common  # noqa: E402
import simtrace  # noqa: E402
import vicreg_variants  # noqa: E402


def script_speed(flags, steps):
    with tempfile.TemporaryDirectory() as out, redirect_stdout(io.StringIO()):
        simtrace.main(simtrace.parse_args([*flags, "--out", out, "--max-steps", str(steps)]))
        return json.loads((Path(out) / "log.jsonl").read_text().splitlines()[-1])["images_per_s"]


def bare_speed(flags, steps):
    args = simtrace.parse_args(flags)
    env = common.init_distributed(args.device)
    model = simtrace.Model(args, True).to(env.device, memory_format=torch.channels_last)
    optimizer = common.LARS(model.parameters(), lr=0.01)
    x = [
        torch.randn(args.batch_size, 3, 32, 32, device=env.device).to(memory_format=torch.channels_last)
        for _ in "12"
    ]

    def synchronize():
        if env.device.type == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    for _ in range(steps):
        with common.autocast(env.device, args.precision):
            _, z1, z2 = model(*x)
        loss = (z1.float() - z2.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    synchronize()
    return steps * args.batch_size / (time.perf_counter() - start)


def torchvision_chunk(images):
    torch.set_num_threads(1)
    pipeline = transforms.Compose(
        [
            transforms.RandomResizedCrop(32, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(0.2),
            transforms.RandomApply([transforms.GaussianBlur(3, (0.1, 2.0))], p=0.5),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * 3, (0.25,) * 3),
        ]
    )
    images = [transforms.functional.to_pil_image(image) for image in images]
    start = time.perf_counter()
    for image in images:
        pipeline(image)
    return time.perf_counter() - start


def augment_speed(images):
    """In a process of its own, like a training run's: no other thread competes for the cores."""
    augment = common.Augment(32)
    torch.zeros(7 * 2**20)  # 28 MB come and go, as in a training step: from then on malloc keeps such blocks
    for _ in range(5):
        augment(images)
    start = time.perf_counter()
    for _ in range(40):
        augment(images)
    return 40 * len(images) / (time.perf_counter() - start)


GRAMS = {"vicreg": "d", "vicreg-exp": "d", "barlow": "d", "vicreg-ctr": "n", "spectral": "n", "tcr": "small"}


def loss_cost(name, n, d, device):
    """(seconds, bytes) of one loss and (seconds, bytes) of its matrix products, in a process of its own."""
    args = vicreg_variants.parse_args(["--method", name])
    z1, z2 = (torch.randn(n, d, device=device, requires_grad=True) for _ in "12")
    cuda = device == "cuda"

    def gram():
        with torch.no_grad():
            kind = GRAMS.get(name, "2n")
            kind = ("d" if d < n else "n") if kind == "small" else kind
            if kind == "2n":
                z = torch.cat([z1, z2])
                return [z @ z.T]
            if name in ("barlow", "spectral"):
                return [z1.T @ z2 if kind == "d" else z1 @ z2.T]
            return [z.T @ z if kind == "d" else z @ z.T for z in (z1, z2)]

    def timed(function):
        start = time.perf_counter()
        result = function()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, result

    def memory():
        kilobyte = 1024 if sys.platform == "linux" else 1
        return (
            torch.cuda.max_memory_allocated()
            if cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte
        )

    def step():
        vicreg_variants.METHODS[name](z1, z2, args)[0].backward()

    torch.randn(64, 64, device=device) @ torch.randn(64, 64, device=device)
    z1.grad, z2.grad = torch.zeros_like(z1), torch.zeros_like(z2)  # so that they are in the baseline
    before = memory()
    seconds, peak = min(timed(step)[0] for _ in range(2)), memory() - before
    product, matrices = min((timed(gram) for _ in range(2)), key=lambda pair: pair[0])
    return seconds, peak, product, matrices[0].numel() * 4


def losses(n, d, device):
    for name in vicreg_variants.METHODS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            seconds, peak, product, matrix = pool.submit(loss_cost, name, n, d, device).result()
        print(
            f"{name:12} {seconds:7.2f} s, {seconds / product:5.1f} x its matrix products alone; "
            f"peak {peak / 2**20:7.0f} MiB, {peak / matrix:5.1f} x one such matrix",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--width", default="16")
    parser.add_argument("--batch-size", default="256")
    parser.add_argument("--steps", type=int, default=39)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--size", type=int, nargs=2, default=(1024, 8192), metavar=("N", "D"))
    args = parser.parse_args()
    if args.losses:
        return losses(*args.size, str(common.init_distributed(args.device).device.type))
    flags = ["--device", args.device, "--arch", args.arch, "--width", args.width]
    flags += ["--batch-size", args.batch_size]
    bare_speed(flags, 3)
    ratios = []
    for _ in range(args.rounds):
        script, bare = script_speed(flags, args.steps), bare_speed(flags, args.steps)
        ratios.append(script / bare)
        print(
            f"script {script:8.0f} images/s, bare model step {bare:8.0f}, ratio {ratios[-1]:.3f}", flush=True
        )
    print(f"whole script / bare model step: median {statistics.median(ratios):.3f} (target 0.93)")

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    images, ratios = torch.randint(0, 256, (512, 3, 32, 32), dtype=torch.uint8), []
    for _ in range(args.rounds):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as pool:
            fast = pool.submit(augment_speed, images).result()
        with ProcessPoolExecutor(cores, spawn) as pool:
            slow = len(images) / max(pool.map(torchvision_chunk, images.chunk(cores)))
        ratios.append(fast / slow)
        print(
            f"Augment {fast:8.0f} images/s, torchvision {slow:8.0f} on {cores} cores, {ratios[-1]:.1f} x",
            flush=True,
        )
    print(f"Augment / torchvision: median {statistics.median(ratios):.1f} x (target 8)")


if __name__ == "__main__":
    main()
