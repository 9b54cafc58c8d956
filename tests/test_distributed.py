"""Guards that two and three processes with different data equal one with all of it: each loss on gathered
embeddings, features and evaluation; and that all hear where one fails."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import simaffinity
import simtrace
import simwhitening
import vicreg_variants
from helpers import ALONE, joined, margin_loss, one_thread, sane_loss, spread, value, variant_loss

QUEUE = F.normalize(torch.randn(7, 5, generator=torch.Generator().manual_seed(2)), dim=1)  # shared
LOSSES = {
    "simtrace": simtrace.simtrace_loss,
    "simaffinity": simaffinity.simaffinity_loss,
    "simwhitening": simwhitening.simwhitening_loss,
    "sane": lambda z1, z2: sane_loss(z1, z2, QUEUE),
    **{name: lambda z1, z2, name=name: variant_loss(z1, z2, name) for name in vicreg_variants.METHODS},
    **{framework: lambda z1, z2, framework=framework: margin_loss(
        framework, z1, z2, QUEUE, tau=0.5, m1=0.2, attenuation=0.3)
       for framework in ("moco", "simclr", "byol")},
    "simtrace, detached": lambda z1, z2: simtrace.simtrace_loss(z1, z2, detach_cov=True),
}


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))  # BatchNorm's are per process here


def data():
    generator = torch.Generator().manual_seed(1)
    x, *noise = torch.randn(3, 24, 6, generator=generator)
    return [x + 0.3 * n for n in noise]


def loss_and_gradients(net, x1, x2, loss_function):
    net.zero_grad()
    z1, z2 = net(torch.cat([x1, x2])).chunk(2)
    loss = value(loss_function(common.gather(z1), common.gather(z2)))
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in net.parameters())]


def seven(env):
    """Features of 7 test images, in chunks of 2, so of each rank 2, 3 or 2 rows, and an evaluation with the
    others as the bank, of which each rank has a part. On ranks after the first, BatchNorm's statistics are
    spoilt."""
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (1207, 3, 8, 8), dtype=torch.uint8), torch.arange(1207) % 3
    every = common.Images(images, labels, list("abc"), (0.5,) * 3, (0.25,) * 3, 8)
    train, test = every.subset(torch.arange(1200)), every.subset(torch.arange(1200, 1207))
    backbone, initial, probe = common.resnet(width=4), common.resnet(width=4), common.Probe(32, every, env)
    x = common.features(backbone, test, env, "fp32", chunk=2)
    backbone.bn1.running_mean += env.rank
    args = SimpleNamespace(precision="fp32", workers=0)
    return x, common.evaluate(backbone, probe, train, test, args, env, k=2, initial=initial)


def told(env, failing):
    """What a rank hears of a failure on another."""
    try:
        with common.together(env):
            if env.rank == failing:
                raise ValueError(f"rank {failing}\nfails")
    except common.Fault as fault:
        return str(fault)


def worker(rank, world, port, results):
    env = joined(rank, world, port)
    net = common.distribute(encoder(), env)
    shard = [x.chunk(world)[rank] for x in data()]
    result = {name: loss_and_gradients(net, *shard, function) for name, function in LOSSES.items()}
    z = torch.full((2, 3), float(rank))
    assert common.gather(z)[:, 0].tolist() == [r for r in range(world) for _ in "12"]
    result.update(seven=seven(env), told=[told(env, failing) for failing in (0, world - 1, None)])
    results[rank] = result
    model = encoder()
    model.register_buffer("queue", torch.full((4,), float(rank)))
    net = common.distribute(model, env)
    model.queue.fill_(rank)
    net(shard[0]).sum().backward()
    assert model.queue.tolist() == [rank] * 4  # no step sends it


@pytest.fixture(scope="module", params=[2, 3])
def processes(request):
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        spread(worker, request.param, results)
        return dict(results)


@pytest.mark.parametrize("name", LOSSES)
def test_worlds_2_and_3_equal_world_1(processes, name):
    expected = loss_and_gradients(encoder(), *data(), LOSSES[name])
    # far above the tolerance; a last bias that the loss does not see has gradient 0
    assert sum(g.abs().max() > 0.01 for g in expected) >= 3
    for result in processes.values():
        for a, b in zip(result[name], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_seven_images_count_once_each(processes):
    with one_thread():  # as each process has
        x, row = seven(ALONE)
    assert row.keys() == {"knn_accuracy", "knn_init", "knn_pixels", "probe_test_accuracy"}
    assert all(7 * v == pytest.approx(round(7 * v), abs=1e-5) for v in row.values())
    for result in processes.values():
        assert torch.equal(result["seven"][0], x) and result["seven"][1] == row


def test_all_hear_of_a_failure_on_one(processes):
    for result in processes.values():
        assert result["told"] == ["rank 0 fails", f"rank {len(processes) - 1} fails", None]
