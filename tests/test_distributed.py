"""Each loss on gathered embeddings: two and three processes with different data equal one with all of it."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
import sane
import simaffinity
import simtrace
import simwhitening
import vicreg_variants


def sane_loss(z1, z2):
    """On gathered keys and queries, with a queue that all ranks share."""
    queue = torch.randn(7, z1.shape[1], generator=torch.Generator().manual_seed(2))
    z1, z2, queue = (F.normalize(z, dim=1) for z in (z1, z2.detach(), queue))
    keys = torch.cat([z2, queue])
    return sane.soft_infonce_loss(z1 @ keys.T, sane.refine_labels(z2 @ keys.T, 0.2, 0.8, 1.0), 0.2)


def vicreg_loss(name, z1, z2):
    return vicreg_variants.METHODS[name](z1, z2, vicreg_variants.parse_args(["--method", name]))


LOSSES = {
    "simtrace": simtrace.simtrace_loss,
    "simaffinity": simaffinity.simaffinity_loss,
    "simwhitening": simwhitening.simwhitening_loss,
    "sane": sane_loss,
    **{name: lambda z1, z2, name=name: vicreg_loss(name, z1, z2) for name in vicreg_variants.METHODS},
    "simtrace, detached": lambda z1, z2: simtrace.simtrace_loss(z1, z2, detach_cov=True),
}


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)
    )  # BatchNorm statistics are per process here


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator)
    return x + 0.3 * torch.randn(24, 6, generator=generator), x + 0.3 * torch.randn(
        24, 6, generator=generator
    )


def loss_and_gradients(net, x1, x2, loss_function):
    net.zero_grad()
    z1, z2 = net(torch.cat([x1, x2])).chunk(2)
    loss = loss_function(common.gather(z1), common.gather(z2))
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in net.parameters())]


def seven_images():
    """Features of 7 test images, in chunks of 2, and their k-NN accuracy: of each rank 2, 3 or 2 rows."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8)
    return common.Images(images, torch.arange(7) % 3, [], (0.5,) * 3, (0.25,) * 3, 32), common.resnet(width=4)


def seven(env):
    test, backbone = seven_images()
    x = common.features(backbone, test, env, "fp32", chunk=2)
    bank = x + 0.3 * x.std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    return x, common.knn(bank, test.labels, x, test.labels, env, k=2)


def worker(rank, world, port, results):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    env = common.init_distributed("cpu")
    net = common.distribute(encoder(), env)
    shard = [x.chunk(world)[rank] for x in data()]
    results[rank] = {
        name: loss_and_gradients(net, *shard, loss_function) for name, loss_function in LOSSES.items()
    }
    z = torch.full((2, 3), float(rank))
    assert common.gather(z)[:, 0].tolist() == [r for r in range(world) for _ in "12"]
    results[rank] = {**results[rank], "seven": seven(env)}
    model = encoder()
    model.register_buffer("queue", torch.full((4,), float(rank)))
    net = common.distribute(model, env)
    model.queue.fill_(rank)
    net(shard[0]).sum().backward()
    assert model.queue.tolist() == [rank] * 4  # no step sends it


@pytest.fixture(scope="module", params=[2, 3])
def processes(request):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(worker, (request.param, port, results), nprocs=request.param)
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
    alone = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    x, accuracy = seven(alone)
    assert (7 * accuracy) % 1 == pytest.approx(0, abs=1e-6)
    for result in processes.values():
        assert torch.equal(result["seven"][0], x) and result["seven"][1] == accuracy
