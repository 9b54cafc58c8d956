"""Each loss on gathered embeddings: two processes with different data equal one process with all of it."""

import os
import socket

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


def worker(rank, port, results):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    env = common.init_distributed("cpu")
    net = common.distribute(encoder(), env)
    shard = [x.chunk(2)[rank] for x in data()]
    results[rank] = {
        name: loss_and_gradients(net, *shard, loss_function) for name, loss_function in LOSSES.items()
    }
    z = torch.full((2, 3), float(rank))
    assert common.gather(z)[:, 0].tolist() == [0, 0, 1, 1]


@pytest.fixture(scope="module")
def two_processes():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(worker, (port, results), nprocs=2)
        return dict(results)


@pytest.mark.parametrize("name", LOSSES)
def test_world_2_equals_world_1(two_processes, name):
    expected = loss_and_gradients(encoder(), *data(), LOSSES[name])
    # far above the tolerance; a last bias that the loss does not see has gradient 0
    assert sum(g.abs().max() > 0.01 for g in expected) >= 3
    for rank in (0, 1):
        for a, b in zip(two_processes[rank][name], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
