"""Guards what a GPU could get wrong: training, waits for the host, compiled networks, losses, views, nccl.

Each check is a function of a device; without CUDA only its CPU form runs, as far as there can be one."""

import contextlib
import functools
import importlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import common
import simaffinity
import simtrace
import simwhitening
import vicreg_variants
from helpers import joined, log, margin_loss, process_kept, sane_loss, saved, spread, value, variant_loss

COUNT = torch.cuda.device_count()
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(COUNT < 1, reason="no GPU"))
TWO = pytest.param("cuda", marks=pytest.mark.skipif(COUNT < 2, reason="no two GPUs"))
devices = pytest.mark.parametrize("device", ["cpu", CUDA])

TINY = "--width 4 --projector 32-32 --image-size 16 --batch-size 32 --warmup-epochs 0 --eval-every 99"
QUEUE = "--queue 32 --momentum-encoder 0.5 --tau 0.5"
METHODS = {  # with what each learns from 30 steps
    "simtrace": "simtrace --base-lr 3",
    "simaffinity": "simaffinity --base-lr 3",
    "simwhitening": "simwhitening --base-lr 3",
    "sane": f"sane --base-lr 3 {QUEUE}",
    "moco": f"margin_infonce --base-lr 1 {QUEUE}",
    "simclr": "margin_infonce --framework simclr --base-lr 1",
    "byol": "margin_infonce --framework byol --optimizer lars --base-lr 1 --momentum-encoder 0",
    "vicreg": "vicreg_variants --base-lr 3 --bias-lr 1",
    "vicreg-exp": "vicreg_variants --method vicreg-exp --base-lr 1 --bias-lr 0.01",
    "vicreg-ctr": "vicreg_variants --method vicreg-ctr --base-lr 1 --bias-lr 0.01",
    "vicreg_variants' simclr": "vicreg_variants --method simclr --base-lr 3 --bias-lr 1"}
BRANCHES = {
    "branches": "simtrace --base-lr 1 --momentum-encoder 0.9 --predictor --symmetric",
    "margins": f"margin_infonce --base-lr 1 {QUEUE} --m1 0.2 --optimizer lars --final-momentum 1",
    "ratio": "margin_infonce --framework simclr --base-lr 1 --ratio-m1 0.4 --attenuation 0.5"}


def squares(train=True):
    """For common.patterns: 960 or 64 images of 3 x 3 squares in random colours; classes by brightness."""
    n = 960 if train else 64
    x = torch.rand(n, 3, 3, 3, generator=torch.Generator().manual_seed(int(train)))
    return (255 * F.interpolate(x, 16)).to(torch.uint8), 10 * x.mean((1, 2, 3)).argsort().argsort() // n


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Small images, full fp32; what a run leaves behind in the process is put back."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True
    monkeypatch.setattr(common, "patterns", squares)
    with process_kept():
        yield
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark, cudnn.allow_tf32, cudnn.deterministic = before


def train(monkeypatch, device, out, method, *flags):
    """One run in this process: the loss of each step."""
    name, *words = {**METHODS, **BRANCHES}[method].split()
    script, losses, log = importlib.import_module(name), [], common.Run.log
    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "log", lambda run, lr, loss, *rest: (
            losses.append(loss.detach().clone()), log(run, lr, loss, *rest)))
        words += [*TINY.split(), "--device", device, "--out", str(out), *map(str, flags)]
        script.main(script.parse_args(words))
    return torch.stack(losses).tolist()


def weights(folder):
    """The parameters of a run, as one vector."""
    state = saved(folder / "checkpoint.pt")["model"]
    return torch.cat([v.flatten().double() for k, v in state.items()
                      if "running" not in k and "tracked" not in k and "queue" not in k])


@devices
@pytest.mark.parametrize("method", METHODS)
def test_30_steps_in_bf16_bring_the_loss_down(monkeypatch, tmp_path, device, method):
    easy = dict(crop_scale=(0.5, 1.0), jitter_p=0.0, gray_p=0.0, blur_p=0.0)
    monkeypatch.setattr(common, "Augment", functools.partial(common.Augment, **easy))
    losses = train(monkeypatch, device, tmp_path / "run", method, "--precision", "bf16", "--epochs", 1)
    assert len(losses) == 30 and all(map(math.isfinite, losses))
    # not the first two: the queue's random keys are easy to tell from a positive
    (high, low), (a, b) = zip(*((v.mean(), v.var() / 6) for v in torch.tensor([losses[2:8], losses[-6:]])))
    assert high - low > 2 * (a + b).sqrt(), losses


class Reads(TorchDispatchMode):
    """Raises where the host would wait for a value: a CPU's form of set_sync_debug_mode("error")."""

    aten = torch.ops.aten
    forbidden = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
                 aten.equal.default, aten._unique2.default, aten.repeat_interleave.Tensor}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        masks = function is self.aten.index.Tensor and [
            i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if function in self.forbidden or masks:
            raise RuntimeError(f"called a synchronizing operation: {function}")
        return function(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Raises where Python's numbers, or a CPU's tensor, would become a tensor elsewhere, and that be waited
    for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") is not None:
            raise RuntimeError(f"called a synchronizing operation: {function.__name__}(..., device=...)")
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def no_waiting(device):
    """RuntimeError where the host waits for the device."""
    if device == "cpu":
        with Reads(), Copies():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@devices
@pytest.mark.parametrize("method", {**METHODS, **BRANCHES})
def test_no_step_waits_for_the_device(monkeypatch, tmp_path, device, method):
    """From the fourth step on: neither in making its views, nor from its learning rate to the end of its log.
    What lies between is the run's own: the signals that it heard, and at an epoch's end the evaluation."""
    steps, views, watch = [], [], contextlib.ExitStack()
    cosine_lr, log, batches = common.cosine_lr, common.Run.log, common.batches

    def begin(step, total, base, *warmup, **final):
        if warmup:  # the learning rate; the momentum's has none
            steps.append(step)
            watch.enter_context(no_waiting(device) if len(steps) > 3 else contextlib.nullcontext())
        return cosine_lr(step, total, base, *warmup, **final)

    def end(*args):
        log(*args)
        watch.close()

    def made(*args):
        source = batches(*args)
        while True:
            with no_waiting(device) if len(steps) > 3 and args[1] >= 0 else contextlib.nullcontext():
                batch = next(source, None)
            if batch is None:
                return
            views.append(len(steps))
            yield batch

    with monkeypatch.context() as patch, watch:
        for where, name, function in ((common, "cosine_lr", begin), (common.Run, "log", end),
                                      (common, "batches", made)):
            patch.setattr(where, name, function)
        small = "--epochs", 2, "--limit-images", 80, "--batch-size", 16
        train(monkeypatch, device, tmp_path / "run", method, *small)
    assert steps == [*range(10)]
    assert views == [0, *range(10)]  # the first are those to draw pictures of


@devices
def test_a_wait_would_be_noticed(device):
    x = torch.rand(5, device=device)
    for wait in (lambda: x.sum().item(), lambda: x[x > 0.5], lambda: bool((x > 0).all()),
                 lambda: torch.tensor([1.0, 2.0], device=device), lambda: x.nonzero()):
        with pytest.raises(RuntimeError, match="synchronizing"), no_waiting(device):
            wait()
    with no_waiting(device):
        x.where(x > 0.5, 1).masked_fill(x < 0.1, 0).clamp(min=0.2)[torch.arange(3, device=device)]


def test_a_loss_has_arrived_before_it_is_read(monkeypatch):
    """A step's loss is copied to the host behind its back: the event that says so comes after the copy."""
    class Pretended(torch.Tensor):
        is_cuda = True

        def to(self, *args, **kwargs):
            order.append("copy")
            return super().to(*args, **kwargs)

        def tolist(self):
            order.append("read")
            return super().tolist()

    order, run = [], object.__new__(common.Run)
    event = SimpleNamespace(synchronize=lambda: order.append("wait"))
    stream = SimpleNamespace(record_event=lambda: order.append("event") or event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    run.step, run.late, run.sums, run.bar = 0, None, {}, SimpleNamespace(set_postfix=lambda **_: None)
    run.log(0.1, torch.tensor(1.0).as_subclass(Pretended), {}, torch.zeros(2, 2))
    run.check()
    assert order == ["copy", "event", "wait", "read"]


@devices
@pytest.mark.parametrize("method", ["simtrace", "sane"])
def test_compiled_and_plain_networks_agree(monkeypatch, tmp_path, device, method):
    if device == "cpu":  # traced as for inductor, which takes a CPU minutes; the graphs are run as they are
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset(), torch._dynamo.utils.counters.clear()
    flags = "--epochs", 1, "--max-steps", 2, "--precision", "fp32", "--base-lr"
    for name, more in (("start", [0]), ("plain", [0.01]), ("compiled", [0.01, "--compile"])):
        train(monkeypatch, device, tmp_path / name, method, *flags, *more)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    plain, compiled = (row["loss"] for name in ("plain", "compiled") for row in log(tmp_path / name))
    assert plain == pytest.approx(compiled, rel=1e-3)
    assert_close(*(weights(tmp_path / name) for name in ("start", "plain", "compiled")))


def assert_close(start, one, other):
    """Weights that went the same way from the start. These networks are so uneven that noise of 1e-6 in their
    weights grows to a tenth of so small a step; a wrong gradient is as large as the step."""
    assert 1e-5 * start.norm() < (one - start).norm() < 0.01 * start.norm()
    assert (one - other).norm() < 0.2 * (one - start).norm()


@devices
@pytest.mark.parametrize("method", ["simtrace", "sane"])
def test_a_run_in_two_parts_gives_the_weights_of_one(monkeypatch, tmp_path, device, method):
    """Which meet within the second epoch, of 5 steps as the first."""
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)
    flags = "--epochs", 2, "--limit-images", 160, "--precision", "fp32", "--base-lr", 0.01
    train(monkeypatch, device, tmp_path / "whole", method, *flags)
    train(monkeypatch, device, tmp_path / "parts", method, *flags, "--max-steps", 7)
    start = weights(tmp_path / "parts")
    train(monkeypatch, device, tmp_path / "parts", method, *flags)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    if device == "cpu":
        assert torch.equal(whole, parts) and not torch.equal(start, whole)
    else:
        assert_close(start, whole, parts)


def embeddings(n=24, d=6):
    """Two views, (n, d), alike but not equal, and a queue (10, d)."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, d, generator=generator, dtype=torch.float64)
    views = [z + 0.5 * torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in "12"]
    return *views, F.normalize(torch.randn(10, d, generator=generator, dtype=torch.float64), dim=1)


def variant(*words):
    return lambda z1, z2, queue: variant_loss(z1, z2, *words)


LOSSES = {
    "simtrace": lambda z1, z2, queue: simtrace.simtrace_loss(z1, z2),
    "simtrace, eps 0, detached": lambda z1, z2, queue: simtrace.simtrace_loss(z1, z2, 0.0, True),
    "simaffinity": lambda z1, z2, queue: simaffinity.simaffinity_loss(z1, z2, 0.3, 0.1),
    "simwhitening": lambda z1, z2, queue: simwhitening.simwhitening_loss(z1, z2, 0.3, 0.1, 0.1),
    "sane": functools.partial(sane_loss, mu=1.5),
    "sane, no q": functools.partial(sane_loss, mu=1.5, use_q=False),
    **{f"{name}, {title}": functools.partial(margin_loss, name, tau=0.3, **options)
       for name in ("moco", "simclr", "byol") for title, options in {
           "plain": {},
           "margins": dict(m1=0.3, m2=0.2, scale=2.0, curvature=1.5, attenuation=0.5, attenuation_type=2),
           "ratio": dict(ratio_m1=0.4, attenuation=0.5)}.items()},
    **{f"vicreg_variants' {name}": variant(name) for name in vicreg_variants.METHODS},
    "vicreg_variants' simclr, centred": variant("simclr", "--normalize", "center"),
    "vicreg_variants' simclr, standardized": variant("simclr", "--normalize", "standardize"),
    "contrastive criterion": lambda z1, z2, queue: vicreg_variants.contrastive_criterion(z1),
    "noncontrastive criterion": lambda z1, z2, queue: vicreg_variants.noncontrastive_criterion(z1),
}


def loss_and_gradients(loss, device, dtype):
    """In float64 on the CPU: the loss, its terms and both gradients."""
    z1, z2, queue = (z.to(device, dtype) for z in embeddings())
    z1.requires_grad_(), z2.requires_grad_()
    found = loss(z1, z2, queue)
    found, terms = found if isinstance(found, tuple) else (found, {})
    gradients = torch.autograd.grad(found, (z1, z2), allow_unused=True)
    return [v.detach().double().cpu() for v in (found, *terms.values(), *gradients) if v is not None]


@devices
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_the_same_elsewhere(device, name):
    """A GPU's float32 against the CPU's; the CPU's float32 against float64."""
    found = loss_and_gradients(LOSSES[name], device, torch.float32)
    wanted = loss_and_gradients(LOSSES[name], "cpu", torch.float64 if device == "cpu" else torch.float32)
    assert wanted[-1].abs().max() > 1e-4
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
    views = [z.float().requires_grad_() for z in on(device, embeddings())]
    with no_waiting(device):  # what the first call had to set up is there
        value(LOSSES[name](*views)).backward()


@functools.cache
def spots(device):
    """Two images, each 1,024 times: noise, brighter to the right, more blue than green than red."""
    x = 50 * torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x += 3 * torch.arange(32) + 40 * torch.arange(3).view(3, 1, 1)
    return x.to(torch.uint8).repeat(1024, 1, 1, 1).to(device)


def statistics(device, seed, **options):
    """Of views of the same images, numbers a view: (name: (2048,))."""
    augment, parts = common.Augment(32, mean=(0,) * 3, std=(1,) * 3, **options), []
    for i, images in enumerate(spots(device).split(32)):  # an order of jitter's operations each
        torch.manual_seed(1000 * seed + i)
        parts.append(augment(images).cpu())
    x = torch.cat(parts)
    grey = ((x.amax(1) - x.amin(1)).amax((1, 2)) < 1e-3).float()
    flipped = (x[..., 16:].mean((1, 2, 3)) < x[..., :16].mean((1, 2, 3))).float()
    (red, green, blue), stds = x.mean((2, 3)).unbind(1), x.std((2, 3)).unbind(1)
    return {"grey": grey, "flipped": flipped, "red": red, "green": green, "blue": blue,
            "sharpness": x.diff(dim=3).abs().mean((1, 2, 3)) / x.std((1, 2, 3)),
            "hue": (green - red) / (blue - red).clamp(min=1e-3),
            **{f"std {i}": v for i, v in enumerate(stds)}}


def distance(a, b):
    """Kolmogorov and Smirnov's, in units that equal distributions put above 2.2 once in ten thousand."""
    points = torch.cat([a, b]).sort().values
    below = [torch.searchsorted(v.sort().values, points, right=True) / len(v) for v in (a, b)]
    return (below[0] - below[1]).abs().max().item() * math.sqrt(len(a) * len(b) / (len(a) + len(b)))


@devices
def test_augment_has_the_same_statistics(device):
    found, wanted = statistics(device, 1), statistics("cpu", 2)
    far = {name: distance(found[name], wanted[name]) for name in found}
    assert max(far.values()) < 2.2, far
    assert 0.15 < found["grey"].mean() < 0.25 and 0.45 < found["flipped"].mean() < 0.55
    other = statistics(device, 1, flip=0.3, jitter=(0.1, 0.4, 0.4, 0.0), gray_p=0.35, blur_p=0.1)
    for name in ("flipped", "red", "hue", "grey", "sharpness"):  # that far off would be seen
        assert distance(other[name], wanted[name]) > 2.2, name


def on(device, tensors):
    return [v.to(device) for v in tensors]


@devices
def test_augments_parts_give_the_same_pixels(device):
    """Numbers drawn on the CPU; there an image at a time, on a GPU all at once."""
    torch.manual_seed(0)
    images, shift = spots("cpu")[:9], torch.rand(9, 1, 1) - 0.5
    box, flip = common.random_box(9, 32, 32, (0.2, 1.0), "cpu"), torch.rand(9, 1, 1) < 0.5
    sigma = torch.rand(9, 1, 1).where(flip, 0)

    def parts(images, shift, sigma, flip, *box):
        x = common.crop_and_flip(images, *box, 24, flip)
        return [x, common.shift_hue(x.clone(), shift), common.blur(x, sigma, 3), common.luma(x)[None]]

    arguments = images, shift, sigma, flip, *box
    found = parts(*on(device, arguments))
    one = zip(*(parts(*(v[i:i + 1] for v in arguments)) for i in range(9)))
    for a, b in zip(found, one, strict=True):
        torch.testing.assert_close(a.cpu(), torch.cat(b, 1), rtol=1e-4, atol=1e-5)


def encoder(normalised=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if normalised else nn.Identity()
    return nn.Sequential(nn.Linear(12, 16), middle, nn.Tanh(), nn.Linear(16, 6))


def gathered(net, device, world=1, rank=0):
    """Loss and gradients of each loss, of this rank's share of the data."""
    results = {}
    for name, loss in LOSSES.items():
        z1, z2, queue = on(device, (z.float() for z in embeddings()))
        x = torch.cat([torch.cat([z, z.square()], 1).chunk(world)[rank] for z in (z1, z2)])
        net.zero_grad()
        found = value(loss(*(common.gather(z) for z in net(x).chunk(2)), queue))
        found.backward()
        results[name] = [found.detach().cpu(), *(p.grad.cpu().clone() for p in net.parameters())]
    return results


def worker(rank, world, port, device, folder):
    env = joined(rank, world, port, device)
    plain = common.distribute(encoder().to(env.device), env)
    normalised = common.distribute(encoder(True).to(env.device), env)
    result = dict(plain=gathered(plain, env.device, world, rank), kind=type(normalised.module[1]).__name__)
    if device == "cuda":
        result["normalised"] = gathered(normalised, env.device, world, rank)
    torch.save(result, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("device", ["cpu", TWO])
def test_two_processes_give_what_one_does(tmp_path, device):
    """Loss and gradients, by nccl or, on CPUs, gloo; on GPUs also through BatchNorm, which knows all rows."""
    spread(worker, 2, device, str(tmp_path))
    expected = {"plain": gathered(encoder().to(device), device)}
    if device == "cuda":
        expected["normalised"] = gathered(encoder(True).to(device), device)
    for rank in range(2):
        result = saved(tmp_path / f"{rank}.pt")
        assert result["kind"] == ("BatchNorm1d" if device == "cpu" else "SyncBatchNorm")
        for net, losses in expected.items():
            for name, wanted in losses.items():
                for a, b in zip(result[net][name], wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1, b.abs().max().item()))
