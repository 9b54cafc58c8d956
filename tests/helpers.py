"""What several test files use: runs, their files, images of noise, processes, losses by name."""

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import common
import linear_eval
import margin_infonce
import sane
import vicreg_variants

ROOT = Path(__file__).parent.parent
SCRIPTS = [p.name for p in sorted(ROOT.glob("*.py")) if p.name not in ("common.py", "linear_eval.py")]
TINY = ["--dataset", "folder", "--device", "cpu", "--width", "4", "--projector", "32-32-8"]
ALONE = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))


# ---- runs


# Processes are forked from one that has imported torch: an import costs more than most of these runs.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torchvision.transforms.v2", "pytest"])


def launcher(rank, world, port):
    """What torchrun puts into the environment of a process."""
    values = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_PORT=port)
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in values.items()}}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def spread(worker, world, *args):
    """worker(rank, world, port, *args) in so many processes, to their end."""
    args = world, free_port(), *args
    torch.multiprocessing.start_processes(worker, args, nprocs=world, start_method="forkserver")


def joined(rank, world, port, device="cpu"):
    """In such a process: it joins the others."""
    os.environ.update(launcher(rank, world, port))
    torch.set_num_threads(1)
    return common.init_distributed(device)


def program(script, args, env, out, err):
    """What `python SCRIPT ARGS` does, in a process just forked."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv, sys.path[0] = [script, *args], str(ROOT)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def start(script, *args, world=1, env=None, target=program):
    """The processes of one run: one without a launcher, or `world` as torchrun would start them."""
    processes, folder, port = [], Path(tempfile.mkdtemp()), free_port()
    for rank in range(world):
        here = launcher(rank, world, port) if world > 1 else {}
        here |= {name: str(value) for name, value in (env or {}).items()}
        files = [str(folder / f"{name}{rank}") for name in ("out", "err")]
        words = str(ROOT / script), [str(a) for a in args], here, *files
        process = FORK.Process(target=target, args=words)
        process.files = files
        process.start()
        processes.append(process)
    return processes


def finish(processes, timeout=120):
    """(exit status, stdout, stderr) of each process."""
    results = []
    for p in processes:
        p.join(timeout)
        if p.exitcode is None:
            for q in processes:
                q.kill()
            pytest.fail(f"hangs: {p._args}")
        results.append((p.exitcode, *(Path(file).read_text() for file in p.files)))
    for p in processes:
        shutil.rmtree(Path(p.files[0]).parent, ignore_errors=True)
    return results


def run(script, *args, **options):
    results = finish(start(script, *args, **options))
    assert all(status == 0 for status, _, _ in results), results
    return results


@contextlib.contextmanager
def process_kept():
    """Puts back what a run leaves behind in the process that it runs in."""
    hook = sys.excepthook
    handlers = [(n, signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in handlers:
            signal.signal(number, handler)


def run_here(capfd, script, *args):
    """One run without a launcher, in this process, as that starts sooner: (status, stdout, stderr)."""
    module, status = importlib.import_module(script.removesuffix(".py")), 0
    with process_kept():
        try:
            module.main(module.parse_args([str(a) for a in args]))
        except SystemExit as exit:
            status = exit.code
    return status, *capfd.readouterr()


def evaluate(capsys, *args):
    """linear_eval.py on a CPU, in this process: its last line."""
    linear_eval.main(linear_eval.parse_args([*map(str, args), "--device", "cpu", "--workers", "0"]))
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def assert_error_line(err, *words):
    """All of stderr is one line, an error that has these words."""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert all(str(word) in err for word in words), err


def refused(capsys, function, *args, status=1, words=(), **options):
    """The one line with which a call ends, on stderr."""
    with pytest.raises(SystemExit) as exit:
        function(*args, **options)
    out, err = capsys.readouterr()
    assert (exit.value.code, out) == (status, ""), err
    assert_error_line(err, *words)
    return err


@contextlib.contextmanager
def one_thread():
    """Sums over other numbers of threads round differently, and of small tensors the threads only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- files


def saved(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def log_lines(folder):
    return (folder / "log.jsonl").read_text().splitlines()


def log(folder):
    return [json.loads(line) for line in log_lines(folder)]


def noise(path, size=(16, 16), seed=None, shade=1, **options):
    """A file of noise, the same for the same name or seed, times a number or one a colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(sum(path.name.encode()) if seed is None else seed)
    x = generator.integers(256, size=(*size[::-1], 3), dtype=np.uint8)
    Image.fromarray((x * shade).clip(0, 255).astype(np.uint8)).save(path, **options)
    return path


def random_backbone(folder, width, **about):
    """The folder, with a backbone.pt of random weights."""
    state = common.resnet("resnet18", width, True).state_dict()
    about = dict(arch="resnet18", width=width, small_images=True, **about)
    common.save_checkpoint(folder / "backbone.pt", dict(state_dict=state, **about))
    return folder


def table(text):
    """Cells, row by row, of lines with | between them, the first of titles."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().splitlines()[1:]]


# ---- tensors


def pixels(*shape, seed=0):
    """Noise from 0 to 255."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def views(n, d, seed=0):
    """Embeddings of two views, (n, d) each, alike, of mean about 0.5."""
    generator = torch.Generator().manual_seed(seed)
    z, noise = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in "12")
    return z + 0.5, 0.7 * z + 0.5 * noise + 0.5


class FixedViews:
    """For common.Augment: the images as they are, then mirrored, in turn; the last two are kept."""

    last, calls = [], 0

    def __init__(self, size, crop_scale=(1, 1), **options):
        self.size, self.crop_scale = size, crop_scale

    def __call__(self, images, crop=True):
        FixedViews.calls += 1
        x = F.interpolate(images / 255 - 0.5, self.size)
        FixedViews.last = [*FixedViews.last[-1:], x.flip(3) if FixedViews.calls % 2 == 0 else x]
        return FixedViews.last[-1]


def small_network(*_):
    """For common.resnet: a network without BatchNorm."""
    net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10), nn.Tanh())
    net.feature_dim = 10
    return net


# ---- losses


def value(loss):
    """Of a loss with or without its terms."""
    return loss[0] if isinstance(loss, tuple) else loss


def assert_finite(loss_function, z, dtype=torch.float32):
    """The loss of twice the same embeddings and its gradients, in bfloat16 under autocast. Returns both."""
    z1, z2 = (z.to(dtype).clone().requires_grad_() for _ in "12")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = value(loss_function(z1, z2))
    loss.backward()
    assert loss.isfinite() and z1.grad.isfinite().all() and z2.grad.isfinite().all()
    return loss, z1.grad


def sane_loss(z1, z2, queue, tau=0.2, mu=1.0, **options):
    """Of queries, keys and a queue of unit rows, without mixup."""
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2.detach(), dim=1)
    keys = torch.cat([z2, queue])
    labels = sane.refine_labels(z2 @ keys.T, tau, 0.8, mu, **options)
    return sane.soft_infonce_loss(z1 @ keys.T, labels, tau)


def margin_loss(framework, z1, z2, queue, **options):
    cos, pos = margin_infonce.similarities(framework, z1, z2, queue)
    return margin_infonce.margin_infonce_loss(cos, pos, beta=float(framework != "byol"), **options)


def variant_loss(z1, z2, method, *flags):
    """Of vicreg_variants.py with these flags: the loss and its terms."""
    args = vicreg_variants.parse_args(["--method", method, *flags])
    return vicreg_variants.METHODS[method](z1, z2, args)
