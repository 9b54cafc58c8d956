"""Ratios, measured side by side on this machine (not part of pytest):

    python tests/bench.py step       whole script over the bare model step, for each method
    python tests/bench.py evaluate   an epoch's k-NN and probe, k-NN over its product, start, checkpoint
    python tests/bench.py augment    batched augmentation over torchvision's image by image
    python tests/bench.py losses     each loss over the matrix products that it cannot avoid
    python tests/bench.py files      large JPEGs: batches here over those of ImageFolder and DataLoader
    python tests/bench.py growth     images/s and memory over batch, width, queue, processes, images
    python tests/bench.py peer       SimCLR here over a plain script of it (needs CIFAR-10 in --data-dir)
    python tests/bench.py compile    each script with and without --compile
    python tests/bench.py all
    python tests/bench.py supervised the short recipe's network trained on labels (CIFAR-10; not in `all`)

At the end a table of figures and targets; status 1 if a target is missed. `step` alternates a step of the
script with a bare one: the same networks' passes on ready batches, a backward pass, the optimiser's step.
"""
import argparse
import contextlib
import copy
import importlib
import io
import json
import math
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import datasets, transforms

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import margin_infonce  # noqa: E402
import sane  # noqa: E402
import simaffinity  # noqa: E402
import simtrace  # noqa: E402
import simwhitening  # noqa: E402
import vicreg_variants  # noqa: E402

METHODS = {"simtrace": "simtrace", "simaffinity": "simaffinity", "simwhitening": "simwhitening",
           "sane": "sane", "moco": "margin_infonce --framework moco",
           "simclr": "margin_infonce --framework simclr", "byol": "margin_infonce --framework byol",
           "vicreg": "vicreg_variants --method vicreg"}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
table = []  # what was measured, figure, unit, target or None, whether more is better


def report(what: str, figure: float, unit: str = "x", target: float | None = None, more: bool = True):
    table.append((what, figure, unit, target, more))
    print(line(*table[-1]), flush=True)


def line(what, figure, unit, target, more) -> str:
    sign, missed = ">=" if more else "<=", "" if met(figure, target, more) else "  MISSED"
    return f"{what:72} {figure:9.3g} {unit:9}" + ("" if target is None else f"{sign} {target:g}{missed}")


def met(figure, target, more) -> bool:
    return target is None or (figure >= target if more else figure <= target)


def seconds(function, times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def resident_bytes() -> int:
    """Now; the peak so far where the system does not tell (it may be an import's)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak_bytes()


def alone(function, *args):
    """function(*args) in a process of its own, whose peak memory and threads are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def train(method: str, flags: str, device: str):
    """The script's main on patterns, into a folder that goes away."""
    name, *own = METHODS[method].split()
    script = importlib.import_module(name)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        script.main(script.parse_args([*own, *flags.split(), "--device", device, "--out", out]))
        return json.loads((Path(out) / "log.jsonl").read_text().splitlines()[-1])


# step


def bare_step(method, model, optimizer, x1, x2, args, device):
    with common.autocast(device, args.precision):
        if method == "sane":
            with torch.no_grad():
                model.target(x2)
            _, z1, z2 = model(x1, x2)
        else:
            _, z1, z2 = model(x1, x2)
    loss = (z1.float() - z2.float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def step_ratio(method, width, batch, steps, device) -> tuple[float, float]:
    """Images/s of the script, and its ratio to the bare step's: medians over steps taken in turn."""
    times, batches = [], common.Run.batches

    def in_turn(run, epoch, views):
        model, optimizer = copy.deepcopy((run.model, run.parts["optimizer"]))
        start = None
        for step, x, y in batches(run, epoch, views):
            x1, x2 = (v.detach().clone(memory_format=torch.channels_last) for v in x[:2])
            yield step, x, y
            if start is not None:
                whole = seconds(lambda: None) + time.perf_counter() - start  # a GPU has finished then
                bare = seconds(lambda: bare_step(method, model, optimizer, x1, x2, run.args, run.env.device))
                times.append((whole, bare))
            start = time.perf_counter()

    common.Run.batches = in_turn
    try:
        train(method, f"--width {width} --batch-size {batch} --limit-images 1280 --max-steps {steps + 3} "
                      f"--warmup-epochs 0 --base-lr 0.01 --queue 4096"
              .replace("--queue 4096" if method not in ("sane", "moco") else "\0", ""), device)
    finally:
        common.Run.batches = batches
    whole, bare = zip(*times[2:])
    return batch / statistics.median(whole), statistics.median(b / w for w, b in zip(whole, bare))


def step(args):
    for width, batch, steps in ((16, 128, 16), (64, 64, 6)):
        for method in METHODS:
            speed, ratio = step_ratio(method, width, batch, steps, args.device)
            what = f"{method}, width {width}, batch {batch} ({speed:.0f} images/s)"
            report(f"{what}: script / bare", ratio, "x", 0.95)


# evaluate


def knn_seconds():
    torch.manual_seed(0)
    bank, test = torch.randn(50000, 512), torch.randn(10000, 512)
    y = torch.arange(50000) % 10
    before = resident_bytes()
    whole = seconds(lambda: common.knn_accuracy(bank, y, test, y[:10000], k=20))
    memory = peak_bytes() - before
    return whole, seconds(lambda: [x @ bank.T for x in test.split(256)]), memory


def start_seconds():
    """Of a process: imports; from there to the end of the first step of simtrace.py's defaults."""
    code = ("import time; start = time.perf_counter(); import simtrace, common\n"
            "imported = time.perf_counter()\n"
            "def first(*args): print('TIMES', imported - start, time.perf_counter() - imported); log(*args)\n"
            "log, common.Run.log = common.Run.log, first\n"
            "simtrace.main(simtrace.parse_args(['--max-steps', '1', '--out', OUT]))")
    with tempfile.TemporaryDirectory() as out:
        text = subprocess.run([sys.executable, "-c", code.replace("OUT", repr(out))], cwd=ROOT, check=True,
                              env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True).stdout
    return [float(v) for v in text.split("TIMES")[1].split()[:2]]


def evaluate(args):
    env = common.init_distributed(args.device)
    data, test = (common.load_images("patterns", train=kind, env=env) for kind in (True, False))
    backbone = common.resnet("resnet18", 16).to(env.device, memory_format=torch.channels_last)
    probe = common.Probe(backbone.feature_dim, data, env)
    flags = simtrace.parse_args(["--device", args.device])
    row = train("simtrace", "--max-steps 12 --warmup-epochs 0 --base-lr 0.01", args.device)
    cost = seconds(lambda: common.evaluate(backbone, probe, data, test, flags, env))  # 12,000 images
    report("evaluation of 50,000 + 10,000 images over an epoch of 50,000, width 16",
           100 * 5 * cost / (50000 / row["images_per_s"]), "%", 8, False)
    whole, product, memory = alone(knn_seconds)
    report("k-NN of 10,000 over 50,000 x 512 / its matrix product", whole / product, "x", 1.5, False)
    report("k-NN of 10,000 over 50,000 x 512: memory", memory / 2**20, "MiB", 600, False)
    imports, start = start_seconds()
    report("imports", imports, "s")
    report("start to the end of the first step on patterns", start, "s", 6, False)
    with tempfile.TemporaryDirectory() as out:
        flags = simtrace.parse_args(["--device", args.device, "--out", out])
        model = simtrace.Model(flags, True)
        optimizer = common.LARS(model.parameters(), lr=0.1)
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        run = common.Run(flags, env, data, test, model, optimizer, probe)
        report("a checkpoint over an epoch of a minute", 100 * seconds(run.checkpoint, 5) / 60, "%", 1, False)


# augment


def torchvision_views(size, blur, strong=False):
    return transforms.Compose([
        transforms.RandomResizedCrop(size, scale=(0.2, 1.0)), transforms.RandomHorizontalFlip(),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        transforms.RandomGrayscale(0.2),
        transforms.RandomApply([transforms.GaussianBlur(blur, (0.1, 2.0))], p=0.5),
        transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)])


class Twice:
    """Two views of an image; a class, as DataLoader's workers may have to unpickle it."""

    def __init__(self, views):
        self.views = views

    def __call__(self, image):
        return torch.stack([self.views(image), self.views(image)])


def one_by_one(images, size, blur):
    torch.set_num_threads(1)
    pipeline = torchvision_views(size, blur)
    images = [transforms.functional.to_pil_image(image) for image in images]
    return seconds(lambda: [pipeline(image) for image in images])


def in_batch(images, size, crop):
    augment = common.Augment(size)
    torch.zeros(7 * 2**20)  # 28 MB come and go, as in a training step: from then on malloc keeps such blocks
    seconds(lambda: augment(images, crop=crop), 3)
    return seconds(lambda: augment(images, crop=crop), 20 if size < 64 else 3)


def strong(images, batched):
    augment = sane.StrongAugment(32, (0.2, 1.0), (0.5,) * 3, (0.25,) * 3)
    seconds(lambda: augment(images[:8]))
    return seconds(lambda: augment(images))


def augment(args):
    for size, blur, n, target in ((32, 3, 512, 10), (96, 9, 256, None), (224, 23, 64, 3)):
        images, crop = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8), size != 224
        fast = alone(in_batch, images, size, crop)
        with ProcessPoolExecutor(CORES, multiprocessing.get_context("spawn")) as pool:
            parts = images.chunk(CORES)
            slow = max(pool.map(one_by_one, parts, [size] * CORES, [blur] * CORES))
        what = f"augmentation at {size} px ({n / fast:.0f} images/s), in batch / torchvision"
        report(what, slow / fast, "x", target)
    images = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    report("sane.py --strong at 32 px", len(images) / alone(strong, images, True), "images/s")


# losses


def products(name, a, b):
    """Pairs of matrices whose products a loss of a, b (N, D) cannot avoid, forward."""
    both, square = torch.cat([a, b]), a.new_zeros(a.shape[1], a.shape[1])
    own = {"vicreg": [(a.T, a), (b.T, b)], "vicreg-exp": [(a.T, a), (b.T, b)], "barlow": [(a.T, b)],
           "vicreg-ctr": [(a, a.T), (b, b.T)], "spectral": [(a, b.T)], "simaffinity": [(a, b.T)],
           "simtrace": [(a.T, a), (b.T, b), (a.T, b)],
           "simwhitening": [(a.T, a), (b.T, b), (a, square), (b, square), (a, b.T)],
           "margin, K 65536": [(a, a.new_zeros(a.shape[1], 65536))]}
    own["tcr"] = own["vicreg" if a.shape[1] < len(a) else "vicreg-ctr"]
    return own.get(name, [(both, both.T)])


def loss_of(name, z1, z2, queue):
    if name == "simaffinity":
        return simaffinity.simaffinity_loss(z1, z2)[0]
    if name == "simwhitening":
        return simwhitening.simwhitening_loss(z1, z2)[0]
    if name == "simtrace":
        return simtrace.simtrace_loss(z1, z2)
    if name == "margin, K 65536":
        cos, positive = margin_infonce.similarities("moco", z1, z2, queue)
        return margin_infonce.margin_infonce_loss(cos, positive, tau=0.2, m1=0.2, m2=0.1)
    args = vicreg_variants.parse_args(["--method", name])
    return vicreg_variants.METHODS[name](z1, z2, args)[0]


def loss_cost(name, n, d):
    """Seconds of a loss, forward and backward; of its products; of a Cholesky factor; peak bytes over those
    of one matrix: the first product, or z if that is larger."""
    z1, z2 = (torch.randn(n, d, requires_grad=True) for _ in "12")
    queue = F.normalize(torch.randn(65536, d), dim=1) if "margin" in name else None
    torch.randn(64, 64) @ torch.randn(64, 64)
    z1.grad, z2.grad = torch.zeros_like(z1), torch.zeros_like(z2)  # so that they are in the baseline
    before, repeat = resident_bytes(), 5 if n * d * max(n, d) < 2**34 else 2
    cost = min(seconds(lambda: loss_of(name, z1, z2, queue).backward()) for _ in range(repeat))
    peak = peak_bytes() - before
    with torch.no_grad():
        pairs = products(name, z1, z2)
        product = min(sum(seconds(lambda: x @ y) for x, y in pairs) for _ in range(repeat))
        cholesky = seconds(lambda: torch.linalg.cholesky(torch.eye(d)), 2) if d == 2048 else 0
    return cost, product, cholesky, peak / (4 * max(len(pairs[0][0]) * pairs[0][1].shape[1], n * d))


def losses(args):
    whitening = ["simwhitening", "simtrace"]
    others = [*vicreg_variants.METHODS, "simaffinity"]
    for n, d, names in ((512, 256, [*others, *whitening, "margin, K 65536"]), (1024, 8192, others),
                        (4096, 256, [*others, *whitening, "margin, K 65536"]),
                        (512, 2048, whitening), (4096, 2048, whitening)):
        time_aim, memory_aim = (None, None) if d == 2048 else (1.5, 3)
        for name in names:
            cost, product, cholesky, matrices = alone(loss_cost, name, n, d)
            what = f"{name}, N {n}, D {d}"
            report(f"{what}: loss / 3 x its products", cost / product / 3, "x", time_aim, False)
            if n == 4096 or d == 8192:  # in smaller ones libraries' own buffers count for more
                report(f"{what}: memory", matrices, "matrices", memory_aim, False)
            if cholesky:
                report(f"{what}: of which one Cholesky factor", 100 * cholesky / cost, "%")


# files


def write_jpegs(folder, n):
    """Photo-like: smooth, with edges and some noise; 500 x 375."""
    for i in range(n):
        torch.manual_seed(i)
        x = F.interpolate(torch.rand(1, 3, 12, 16), (375, 500), mode="bicubic")[0]
        edges = F.interpolate(torch.rand(1, 1, 6, 8), (375, 500))[0] > 0.6
        x = 255 * (x + 0.2 * edges) + 6 * torch.randn(x.shape)
        path = Path(folder) / "train" / f"class{i % 4}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        transforms.functional.to_pil_image(x.clamp(0, 255).to(torch.uint8)).save(path, quality=90)


def files(args):
    with tempfile.TemporaryDirectory() as folder:
        write_jpegs(folder, 512)
        env = common.init_distributed(args.device)
        data = common.load_images("folder", folder, True, env)
        view = common.Augment(224, mean=data.mean, std=data.std)
        plain = datasets.ImageFolder(f"{folder}/train", Twice(torchvision_views(224, 23)))
        loader = torch.utils.data.DataLoader(plain, 64, shuffle=True, num_workers=CORES, drop_last=True)

        def ours():
            for (x1, x2), y in common.batches(data, 0, 64, env, 0, (view, view), CORES):
                assert x1.shape == x2.shape == (64, 3, 224, 224)

        def theirs():
            for x, y in loader:
                assert x.shape == (64, 2, 3, 224, 224)
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(3)]
        speed = 512 / min(here for here, _ in pairs)
        report(f"two views of 500 x 375 JPEGs ({speed:.0f} images/s) / ImageFolder's",
               statistics.median(there / here for here, there in pairs), "x", 1.3)


# growth


def grow(method, flags, images, device):
    """images/s and peak MiB of three steps."""
    patterns = common.patterns

    def many(train=True):
        x, y = patterns(train)
        repeat = -(-images // len(x)) if train else 1
        return x.repeat(repeat, 1, 1, 1)[:images], y.repeat(repeat)[:images]
    common.patterns = many
    speed = train(method, f"{flags} --max-steps 4 --warmup-epochs 0 --base-lr 0.01", device)["images_per_s"]
    return speed, peak_bytes() / 2**20


def growth(args):
    rows = [("simtrace", f"--width 16 --batch-size {batch}", 10000) for batch in (128, 512, 2048, 4096)]
    rows += [("simtrace", f"--width {width} --batch-size 128", 10000) for width in (32, 64)]
    queues = (4096, 16384, 65536)
    rows += [("sane", f"--width 16 --batch-size 128 --queue {queue}", 10000) for queue in queues]
    rows += [("simtrace", "--width 16 --batch-size 128", images) for images in (50000, 200000)]
    for method, flags, images in rows:
        speed, memory = alone(grow, method, flags, images, args.device)
        report(f"{method} {flags}, {images} images", speed, "images/s")
        report(f"{method} {flags}, {images} images: memory", memory, "MiB")
    for world in (1, 2):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       f"--nproc_per_node={world}", "simtrace.py", "--max-steps", "8", "--out", out,
                       "--device", args.device]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True,
                           env={**os.environ, "OMP_NUM_THREADS": str(max(1, CORES // world))})
            speed = json.loads((Path(out) / "log.jsonl").read_text().splitlines()[-1])["images_per_s"]
        report(f"simtrace, {world} process(es) on {CORES} cores", speed, "images/s")


# peer


def plain_simclr(data_dir, steps, fast):
    """SimCLR as in many a single file: transforms in a DataLoader, NT-Xent. -> seconds a step"""
    data = datasets.CIFAR10(data_dir, transform=Twice(torchvision_views(32, 3)))
    loader = torch.utils.data.DataLoader(data, 128, shuffle=True, num_workers=CORES, drop_last=True)
    net = common.resnet("resnet18", 64)  # torchvision's, with the 3x3 stem
    model = nn.Sequential(net, nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 128))
    model = model.to(memory_format=torch.channels_last) if fast else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    times = [time.perf_counter()]
    for _, (x, _) in zip(range(steps), loader):
        x = x.transpose(0, 1).flatten(0, 1)
        x = x.to(memory_format=torch.channels_last) if fast else x
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            z = F.normalize(model(x).float(), dim=1)
        s = (z @ z.T / 0.5).fill_diagonal_(-math.inf)
        loss = F.cross_entropy(s, (torch.arange(256) + 128) % 256)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(times[2:], times[3:]))


def step_times(method, flags, device):
    """Seconds of the first step, and of a later one (median)."""
    times, cosine_lr, log = [], common.cosine_lr, common.Run.log
    common.cosine_lr = lambda *args, **kwargs: times.append(time.perf_counter()) or cosine_lr(*args, **kwargs)
    common.Run.log = lambda *args: log(*args) or times.append(time.perf_counter())
    train(method, flags, device)
    return times[1] - times[0], statistics.median(b - a for a, b in zip(times[3::2], times[5::2]))


def peer(args):
    flags = (f"--dataset cifar10 --data-dir {args.data_dir} --batch-size 128 --projector 512-128 "
             "--limit-images 6400 --max-steps 10")
    _, ours = alone(step_times, "simclr", flags, args.device)
    fast, slow = (alone(plain_simclr, args.data_dir, steps, fast) for steps, fast in ((10, True), (8, False)))
    report(f"SimCLR, resnet18 of width 64, batch 128 ({128 / ours:.0f} images/s) / a plain one, fp32",
           slow / ours, "x", 2.5)
    report("the same / a plain one, bf16 and channels_last", fast / ours, "x", 1.15)


# compile


def compiled(args):
    for method in [method for method in METHODS if method not in ("simclr", "byol")]:
        whole = []
        for more in ("", " --compile"):
            first, later = alone(step_times, method, "--max-steps 8 --warmup-epochs 0 --base-lr 0.01" + more,
                                 args.device)
            whole.append(first + 272 * later)
        report(f"{method}: 7 epochs of patterns with --compile / without ({whole[0]:.0f} s)",
               whole[1] / whole[0])


# supervised


def supervised(args):
    """Ten epochs of cross-entropy on labels: network, schedule and augmented views as in the short recipe."""
    env = common.init_distributed(args.device)
    train, test = (common.load_images("cifar10", args.data_dir, split, env) for split in (True, False))
    torch.manual_seed(0)
    net = common.resnet("resnet18", 16)
    net.fc = nn.Linear(net.feature_dim, 10)
    net = net.to(env.device, memory_format=torch.channels_last)
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True)
    view, steps = common.Augment(32, mean=train.mean, std=train.std), len(train.images) // 512
    for epoch in range(10):
        for i, (x, y) in enumerate(common.batches(train, epoch, 512, env, 0, (view, view))):
            for group in optimizer.param_groups:
                group["lr"] = common.cosine_lr(epoch * steps + i, 10 * steps, 0.2, steps)
            with common.autocast(env.device):
                logits = net(torch.cat(x).to(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), y.repeat(2))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}/10  loss {loss.item():.3f}", flush=True)
    fc, net.fc = net.fc, nn.Identity()
    x, test_x = (common.features(net, data, env) for data in (train, test))
    accuracy = (fc(test_x).argmax(1).cpu() == test.labels).float().mean().item()
    report("supervised, ten epochs: test accuracy", 100 * accuracy, "%")
    report("the same: k-NN", 100 * common.knn_accuracy(x, train.labels, test_x, test.labels, 20), "%")


PARTS = {"step": step, "evaluate": evaluate, "augment": augment, "losses": losses, "files": files,
         "growth": growth, "peer": peer, "compile": compiled, "supervised": supervised}


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default="data", help="where CIFAR-10 is")
    args = parser.parse_args()
    for name, part in PARTS.items():
        if name == args.part or args.part == "all" and name != "supervised":
            part(args)
    print("\n" + "\n".join(line(*row) for row in table))
    sys.exit(not all(met(figure, target, more) for _, figure, _, target, more in table))


if __name__ == "__main__":
    main()
