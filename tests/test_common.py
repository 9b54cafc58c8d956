"""Guards common.py, by values computed by hand, slow independent forms, torchvision, processes and files."""

import ast
import colorsys
import errno
import io
import copy
import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import nn
from torchvision import transforms
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf
from tqdm import tqdm

import common
from helpers import ALONE, joined, one_thread, pixels, refused, saved, spread


@pytest.fixture(autouse=True, scope="module")
def threads():
    with one_thread():
        yield


def assert_close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_dtype=False, check_stride=False)


def assert_same_distribution(a, b):
    """Two-sample Kolmogorov-Smirnov at alpha 1e-4: gap < sqrt(-ln(alpha / 2) / 2 (1 / n + 1 / m))."""
    a, b = np.sort(a), np.sort(b)
    grid = np.concatenate([a, b])
    below_a, below_b = (np.searchsorted(x, grid, "right") / len(x) for x in (a, b))
    assert np.abs(below_a - below_b).max() < math.sqrt(-math.log(1e-4 / 2) / 2 * (1 / len(a) + 1 / len(b)))


def assert_same_correlations(a, b):
    """Correlation matrices of the rows of a and b, each entry within 4.5 standard errors."""
    gap = np.abs(np.corrcoef(a) - np.corrcoef(b)).max()
    assert gap < 4.5 * math.sqrt(1 / len(a[0]) + 1 / len(b[0]))


def assert_rate(hits, p):
    """A share of p, within 4 standard errors (6 in 100,000 honest samples fall outside)."""
    assert abs(hits.double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / len(hits))


# ---- LARS, learning rate, EMA


def parameter(values, gradient):
    p = nn.Parameter(torch.tensor(values))
    p.grad = torch.tensor(gradient)
    return p


def test_lars_two_steps_of_a_matrix_by_hand():
    p = parameter([[3.0, 4.0]], [[0.9, 0.1]])
    optimizer = common.LARS([p], lr=10, momentum=0.9, weight_decay=0.1, eta=0.0026)
    optimizer.step()  # g + wd p = (1.2, 0.5), norm 1.3; |p| = 5; ratio 0.01; buffer (0.012, 0.005)
    assert_close(p.data, torch.tensor([[2.88, 3.95]]))
    p.grad = torch.tensor([[0.012, 0.005]])
    optimizer.step()  # g + wd p = (0.3, 0.4), |p| = 4.888446; ratio 0.0254199; buffer (0.018426, 0.014668)
    assert_close(p.data, torch.tensor([[2.695740, 3.803320]]))


def test_lars_leaves_biases_and_batchnorm_to_sgd():
    zero = [parameter([1.0, -2.0], [0.0, 0.0]), parameter(3.0, 0.0)]
    moved = parameter([1.0, 100.0], [1.0, 1.0])
    optimizer = common.LARS([*zero, moved], lr=1, momentum=0.9, weight_decay=0.1)
    optimizer.step()
    assert moved.tolist() == [0.0, 99.0]
    optimizer.step()
    assert_close(moved.data, torch.tensor([1 - 2.9, 100 - 2.9]))
    assert zero[0].tolist() == [1.0, -2.0] and zero[1].item() == 3.0


def test_lars_ratio_is_one_where_a_norm_is_zero():
    new, still = parameter([[0.0, 0.0]], [[1.0, 2.0]]), parameter([[1.0, 2.0]], [[0.0, 0.0]])
    unused = nn.Parameter(torch.ones(1, 1))
    common.LARS([new, still, unused], lr=0.5).step()
    assert new.tolist() == [[-0.5, -1.0]] and still.tolist() == [[1.0, 2.0]] and unused.item() == 1


def test_lars_goes_on_from_its_state_dict(tmp_path):
    def steps(model, optimizer, n, seed):
        torch.manual_seed(seed)
        for _ in range(n):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        return model, common.LARS(model.parameters(), lr=1.0, weight_decay=0.01, eta=0.1)

    model, optimizer = fresh()
    steps(model, optimizer, 3, 1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    common.save_checkpoint(tmp_path / "c.pt", state)
    steps(model, optimizer, 2, 2)
    again, again_optimizer = fresh()
    state = common.load_checkpoint(tmp_path / "c.pt")
    again.load_state_dict(state["model"])
    again_optimizer.load_state_dict(state["optimizer"])
    steps(again, again_optimizer, 2, 2)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_cosine_lr_by_hand():
    lr = [common.cosine_lr(step, 25, 3.0, warmup_steps=5, final_lr=0.5) for step in range(25)]
    assert lr[:5] == pytest.approx([0.6, 1.2, 1.8, 2.4, 3.0])
    assert lr[5] == 3.0 and lr[15] == pytest.approx(1.75)  # t = 0 and t = 1/2
    assert lr[10] == pytest.approx(0.5 + 2.5 * (2 + math.sqrt(2)) / 4)  # t = 1/4
    assert all(a > b for a, b in zip(lr[5:], lr[6:])) and lr[24] > 0.5
    assert common.cosine_lr(25, 25, 3.0, 5, 0.5) == pytest.approx(0.5)
    assert lr[5:] == pytest.approx([0.5 + 2.5 * math.cos(math.pi / 2 * t / 20) ** 2 for t in range(20)])


def test_cosine_lr_without_warm_up():
    assert [common.cosine_lr(step, 4, 2.0) for step in range(5)] == pytest.approx(
        [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0], abs=1e-12)
    assert common.cosine_lr(3, 4, 2.0, warmup_steps=4) == 2.0


@pytest.mark.parametrize("momentum", (0, 1, 0.5))
def test_ema_update(momentum):
    torch.manual_seed(0)
    target, online = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    for _ in range(3):
        online(torch.randn(8, 3))
    before = [p.clone() for p in target.parameters()]
    common.ema_update(target, online, momentum)
    for t, old, o in zip(target.parameters(), before, online.parameters(), strict=True):
        expected = {0: o, 1: old, 0.5: (old + o) / 2}[momentum]
        assert torch.equal(t, expected) if momentum != 0.5 else torch.allclose(t, expected, atol=1e-7)
        assert t.grad is None and t.is_leaf
    for t, o in zip(target.buffers(), online.buffers(), strict=True):
        assert torch.equal(t, o) and t.dtype == o.dtype and t is not o
    assert target[1].num_batches_tracked.item() == 3


# ---- ResNet


@pytest.mark.parametrize("small", (True, False))
@pytest.mark.parametrize("arch", ("resnet18", "resnet50"))
def test_resnet_is_torchvisions(arch, small):
    torch.manual_seed(0)
    ours, theirs = common.resnet(arch, small_images=small), getattr(torchvision.models, arch)()
    if small:
        theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    x = torch.randn(4, 3, *((32, 32) if small else (64, 96)))
    ours(x)  # gives BatchNorm statistics to compare
    result = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert set(result.missing_keys) == {"fc.weight", "fc.bias"} and not result.unexpected_keys
    theirs.fc = nn.Identity()
    with torch.no_grad():
        h = ours.eval()(x)
        assert h.shape == (4, ours.feature_dim)
        assert_close(h, theirs.eval()(x), 1e-4)


@pytest.mark.parametrize("arch, width, dim", (
    ("resnet18", 64, 512), ("resnet18", 16, 128), ("resnet34", 8, 64), ("resnet50", 16, 512),
    ("resnet50", 5, 160)))
def test_resnet_dimensions(arch, width, dim):
    net, shapes = common.resnet(arch, width), []
    net.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, dim) and net.feature_dim == dim
    assert shapes == [(2, dim, 4, 4)] and net.conv1.weight.shape == (width, 3, 3, 3)


def test_resnet_large_stem_and_initialisation():
    torch.manual_seed(0)
    net, shapes = common.resnet("resnet18", 16, small_images=False), []
    net.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    net(torch.randn(1, 3, 224, 224))
    assert shapes == [(1, 128, 7, 7)]
    weight = net.layer4[0].conv1.weight  # 64 -> 128 channels, He et al., fan out: std sqrt(2 / (128 * 9))
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 1152), rel=0.02)


# ---- augmentation


def only(size=32, **on):
    """An Augment with everything off, and no normalisation, but for what is named."""
    off = dict(crop_scale=(1.0, 1.0), flip=0, jitter_p=0, gray_p=0, blur_p=0, solarize_p=0)
    return common.Augment(size, **{**off, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), **on})


@pytest.mark.parametrize("size", (8, 32, 50))
def test_crop_and_flip_is_torchvisions(size):
    boxes = [(0, 0, 40, 56), (3, 7, 20, 30), (39, 55, 1, 1), (10, 5, 17, 50), (0, 0, 5, 3), (35, 0, 5, 56)]
    images, flip = pixels(6, 3, 40, 56), torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.bool).view(6, 1, 1)
    corners = torch.tensor(boxes, dtype=torch.float32).T[..., None, None]
    result = common.crop_and_flip(images, *corners, size, flip)
    for i, box in enumerate(boxes):
        expected = tvf.resized_crop(images[i] / 255, *box, [size, size], antialias=True)
        assert_close(result[:, i], expected.flip(2) if flip[i] else expected)


def test_luma_is_torchvisions():
    x = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_close(common.luma(x.transpose(0, 1)), tvf.rgb_to_grayscale(x)[:, 0])


def test_shift_hue_is_torchvisions():
    x = torch.rand(9, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] = torch.tensor([[0, 1, 0.5, 1, 0, 0, 1, 0],  # black, white, grey and pure colours
                               [0, 1, 0.5, 0, 1, 0, 1, 1],
                               [0, 1, 0.5, 0, 0, 1, 0, 1]])
    shift = torch.tensor([-0.5, -0.3, -0.1, -0.01, 0, 0.02, 0.1, 0.25, 0.5])
    result = common.shift_hue(x.transpose(0, 1).clone(), shift.view(9, 1, 1)).transpose(0, 1)
    for image, s, y in zip(x, shift.tolist(), result):
        assert_close(y, tvf.adjust_hue(image, s))


@pytest.mark.parametrize("taps", (3, 7, 23))
def test_blur_is_torchvisions(taps):
    x = torch.rand(6, 3, 30, 40, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.0, 0.1, 0.4, 1, 2, 10])
    result = common.blur(x.transpose(0, 1).clone(), sigma.view(6, 1, 1), taps).transpose(0, 1)
    assert_close(result[0], x[0], 0)
    for image, s, y in zip(x[1:], sigma[1:].tolist(), result[1:]):
        assert_close(y, tvf.gaussian_blur(image, [taps, taps], [s, s]))


@pytest.mark.parametrize("size, taps", ((32, 3), (64, 7), (224, 23)))
def test_blur_kernel_is_a_tenth_of_the_size(size, taps):
    image = torch.zeros(1, 3, size, size, dtype=torch.uint8)
    image[..., size // 2, size // 2] = 255
    out = only(size, blur_p=1, blur_sigma=(50.0, 50.0))(image)
    assert (out[0, 0] > 1e-4).sum(0).max() == taps and (out[0, 0] > 1e-4).sum(1).max() == taps


def test_solarize_is_torchvisions():
    image = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 3, 1, 1)
    assert_close(only(16, solarize_p=1)(image), tvf.solarize(image, 128) / 255)


def boxes_from_ramps(out, step):
    """top, left, height, width, flip of crops (N, 3, S, S) of an image whose channels are step (x, y, x)."""
    size = out.shape[2]
    a, b = size // 4, size - 1 - size // 4  # away from the border, where resizing a ramp gives no ramp
    x, y = (out[:, :2] * 255 / step).double().numpy().transpose(1, 0, 2, 3)
    x, y = x.mean(1), y.mean(2)
    slope = (x[:, b] - x[:, a]) / (b - a)
    width, height = np.abs(slope) * size, (y[:, b] - y[:, a]) / (b - a) * size
    w, h = width.round(), height.round()
    left, top = (x[:, a] + x[:, b] + 1 - w) / 2, (y[:, a] + y[:, b] + 1 - h) / 2
    for exact in (width, height, left, top):
        assert np.abs(exact - exact.round()).max() < 0.4
    return top.round(), left.round(), h, w, torch.from_numpy(slope < 0)


@pytest.mark.parametrize("height, width, scale", (  # the last two often fall back to the centre
    (64, 64, (0.2, 1.0)), (48, 84, (0.08, 0.6)), (30, 84, (0.3, 1.0)), (84, 40, (0.4, 1.0))))
def test_crop_box_and_flip_distribution(height, width, scale):
    torch.manual_seed(0)
    step, n = 3, 8000
    image = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")[::-1]) * step
    image = torch.cat([image, image[:1]]).to(torch.uint8)
    out = only(16, crop_scale=scale, flip=0.3)(image.expand(n, -1, -1, -1))
    *ours, flips = boxes_from_ramps(out, step)
    draw = transforms.RandomResizedCrop.get_params
    theirs = np.array([draw(image, scale, (3 / 4, 4 / 3)) for _ in range(4000)]).T

    def measures(top, left, h, w):
        return h * w, w / h, left / np.maximum(width - w, 1), top / np.maximum(height - h, 1)

    for a, b in zip(measures(*ours), measures(*theirs)):
        assert_same_distribution(a, b)
    assert_same_correlations([*measures(*ours)], [*measures(*theirs)])
    assert_rate(flips, 0.3)


HALVES = torch.tensor([[100, 40], [60, 80], [80, 60]], dtype=torch.uint8)  # left and right colour
HALVES = HALVES.repeat_interleave(4, 1)[:, None].repeat(1, 8, 1)


def jitter_factors(out, hue):
    """Factors of ColorJitter from jittered HALVES (N, 3, 8, 8), nothing clamped: brightness and hue shift, or
    brightness, contrast and saturation."""

    def colours(x):
        return x[..., :, 0, 0].double().numpy(), x[..., :, 0, 7].double().numpy()

    (a, b), (a0, b0) = colours(out), colours(HALVES / 255)
    if hue:
        turned = np.array([colorsys.rgb_to_hsv(*row)[0] for row in a]) - colorsys.rgb_to_hsv(*a0)[0]
        return a.max(1) / a0.max(), (turned + 0.5) % 1 - 0.5
    weights = np.array([0.2989, 0.587, 0.114])
    mean, mean0, gap, gap0 = ((a + b) @ weights, (a0 + b0) @ weights, (a - b) @ weights, (a0 - b0) @ weights)
    chroma = (a[:, 0] - a[:, 1]) / (a0[0] - a0[1])
    return mean / mean0, gap / gap0 / (mean / mean0), chroma / (gap / gap0)


@pytest.mark.parametrize("jitter, kept", (
    ((0.4, 0.4, 0.4, 0), (0, 1, 2)), ((0.8, 0, 0.8, 0), (0, 2)), ((0.4, 0, 0, 0.1), (0, 1)),
    ((1.2, 0, 0, 0), (0,)), ((0, 0, 0, 0.5), (1,))))
def test_jitter_distribution(jitter, kept):
    torch.manual_seed(0)
    ours = only(8, jitter=jitter, jitter_p=1)(HALVES.expand(8000, -1, -1, -1))
    transform, image = v2.ColorJitter(*jitter), HALVES / 255
    theirs = torch.stack([transform(image) for _ in range(1500)])
    ours, theirs = ([jitter_factors(x, jitter[3] > 0)[i] for i in kept] for x in (ours, theirs))
    for a, b in zip(ours, theirs):
        assert_same_distribution(a, b)
    if len(kept) > 1:
        assert_same_correlations(ours, theirs)


@pytest.mark.parametrize(
    "i, adjust",
    ((0, tvf.adjust_brightness), (1, tvf.adjust_contrast), (2, tvf.adjust_saturation), (3, tvf.adjust_hue)))
def test_jitter_is_torchvisions_for_the_same_factor(i, adjust):
    torch.manual_seed(i)
    jitter = [0.0] * 4
    jitter[i] = 0.4
    out = only(8, jitter=jitter, jitter_p=1)(HALVES.expand(20, -1, -1, -1))
    factors = jitter_factors(out, i == 3)[i if i < 3 else 1]
    assert factors.std() > 0.1
    for y, factor in zip(out, factors):
        assert_close(y, adjust(HALVES / 255, factor))


@pytest.mark.parametrize("jitter, colours",
                         (((1, 1, 0, 0), ((0, 0, 0), (255, 255, 255))), ((1, 0, 1, 0), ((255, 0, 0),))))
def test_jitter_order_is_drawn(jitter, colours):
    """Some channel full and none empty: only brightness > 1 after contrast or saturation < 1 gives that."""
    torch.manual_seed(0)
    image, augment = torch.tensor(colours, dtype=torch.uint8).T[:, None], only(8, jitter=jitter, jitter_p=1)
    image = image.repeat(1, 8, 8 // len(colours)).expand(64, -1, -1, -1)
    outs = torch.stack([augment(image) for _ in range(300)]).flatten(2)
    assert_rate(((outs.amax(2) == 1) & (outs.amin(2) > 0.01)).any(1), 0.5)


def test_rates_of_jitter_gray_blur_and_solarize():
    torch.manual_seed(0)
    images = pixels(1, 3, 8, 8).expand(5000, -1, -1, -1)
    plain = images[0] / 255

    def changed(out):
        return (out - plain).abs().amax((1, 2, 3)) > 1e-3

    assert_rate(changed(only(8, jitter_p=0.7)(images)), 0.7)
    assert_rate(changed(only(8, solarize_p=0.15)(images)), 0.15)
    impulse = torch.zeros(3, 32, 32, dtype=torch.uint8)
    impulse[:, 16, 16] = 255
    blurred = only(32, blur_p=0.4, blur_sigma=(1.0, 2.0))(impulse.expand(3000, -1, -1, -1))
    assert_rate(blurred[:, 0, 16, 16] < 0.9, 0.4)
    out = only(8, gray_p=0.2)(images)
    gray = (out[:, 0] - out[:, 1]).abs().amax((1, 2)) < 1e-6
    assert_rate(gray, 0.2)
    assert_close(out[gray][0], tvf.rgb_to_grayscale(plain, 3))
    assert_close(out[~gray][0], plain)


def test_blur_strength_distribution():
    torch.manual_seed(0)
    impulse = torch.zeros(3, 32, 32, dtype=torch.uint8)
    impulse[:, 16, 16] = 255
    ours = only(32, blur_p=1)(impulse.expand(6000, -1, -1, -1))
    transform = v2.GaussianBlur(3, (0.1, 2.0))
    theirs = torch.stack([transform(impulse / 255) for _ in range(1500)])
    a, b = ((x[:, 0, 16, 17] / x[:, 0, 16, 16]).numpy().round(5) for x in (ours, theirs))
    assert_same_distribution(a, b)


def test_whole_augmentation_distribution():
    """One image a call, so that ours draws its order of colour operations per image, as torchvision does."""
    torch.manual_seed(0)
    mean, std, n = (0.3, 0.5, 0.6), (0.2, 0.3, 0.4), 1200
    image = tvf.resize(pixels(3, 6, 6, seed=3), [40, 48])
    augment = common.Augment(32, jitter=(0.4, 0.4, 0.8, 0.2), solarize_p=0.3, mean=mean, std=std)
    reference = v2.Compose([
        v2.RandomResizedCrop(32, (0.2, 1.0)), v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.8, 0.2)], 0.8), v2.RandomGrayscale(0.2),
        v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], 0.5), v2.RandomSolarize(128 / 255, 0.3),
        v2.Normalize(mean, std)])
    ours = torch.cat([augment(image[None]) for _ in range(n)])
    theirs = torch.stack([reference(image / 255) for _ in range(n)])

    def measures(x):
        return [x[:, 0].mean((1, 2)), x[:, 2].mean((1, 2)), x[:, 1].std((1, 2)), x.amax((1, 2, 3)),
                x[:, 1, 16, 16], x.diff(dim=3).abs().mean((1, 2, 3)),
                (x[:, 0, :, :16] - x[:, 0, :, 16:]).mean((1, 2))]

    for a, b in zip(measures(ours), measures(theirs)):
        assert_same_distribution(a.numpy().round(4), b.numpy().round(4))


def test_every_image_has_its_own_draws():
    torch.manual_seed(0)
    copies, augment = pixels(1, 3, 32, 32).repeat(8, 1, 1, 1), common.Augment(32)
    x1, x2 = augment(copies), augment(copies)
    assert len(x1.flatten(1).unique(dim=0)) >= 7
    assert all(not torch.equal(a, b) for a, b in zip(x1, x2))
    many = augment(pixels(1, 3, 32, 32).expand(600, -1, -1, -1))
    assert len(many.flatten(1).unique(dim=0)) == 600


def test_augment_repeats_with_the_seed():
    images, augment = pixels(300, 3, 32, 32), common.Augment(32, solarize_p=0.2)
    x = [(torch.manual_seed(seed), augment(images))[1] for seed in (0, 0, 1)]
    assert torch.equal(x[0], x[1])
    assert all(not torch.equal(a, b) for a, b in zip(x[0], x[2]))
    assert torch.equal(images, pixels(300, 3, 32, 32))


@pytest.mark.parametrize("height, width, size", ((32, 32, 32), (96, 96, 64), (50, 40, 32), (20, 28, 32)))
def test_augment_output(height, width, size):
    torch.manual_seed(0)
    mean, std = (0.1, 0.5, 0.9), (0.9, 0.2, 0.05)
    strong = dict(jitter=(0.8, 0.8, 0.8, 0.2), jitter_p=1.0, solarize_p=0.5, mean=mean, std=std)
    augment, images = common.Augment(size, **strong), pixels(8, 3, height, width)
    out = torch.cat([augment(images) for _ in range(16)])  # sixteen orders of the colour operations
    assert out.shape == (128, 3, size, size) and out.dtype == torch.float32
    out = out * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1)
    assert -1e-5 < out.min() and out.max() < 1 + 1e-5 and out.std() > 0.1


def test_augment_with_all_off_only_normalises():
    torch.manual_seed(0)
    images, mean, std = pixels(300, 3, 32, 32), (0.1, 0.5, 0.9), (0.9, 0.2, 0.05)
    assert_close(only(32, mean=mean, std=std)(images), tvf.normalize(images / 255, mean, std))
    large = pixels(4, 3, 64, 64)
    assert_close(only(32)(large), tvf.resize(large / 255, [32, 32], antialias=True))
    assert_close(only(32, flip=1)(images), (images / 255).flip(3))


# ---- two processes


def loss_of(z):
    return F.cross_entropy(z @ z.roll(1, 0).T, torch.arange(len(z)))  # not linear; the order of rows matters


def problem():
    torch.manual_seed(0)
    images = pixels(10, 3, 32, 32)
    data = common.Images(images, torch.arange(10), [], (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 32)
    return nn.Linear(4, 5).double(), torch.randn(6, 4, dtype=torch.float64), common.resnet(width=4), data


def worker(rank, world, port, folder):
    env = joined(rank, world, port)
    linear, x, backbone, data = problem()
    model = common.distribute(linear, env)
    z = common.gather(model(x.chunk(2)[rank]))
    loss_of(z).backward()
    h = common.features(backbone, data, env, "fp32", chunk=3)
    torch.save([z.detach(), linear.weight.grad, linear.bias.grad, h], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gather_and_features_over_two_processes(tmp_path):
    spread(worker, 2, str(tmp_path))
    linear, x, backbone, data = problem()
    z = linear(x)
    loss_of(z).backward()
    h = common.features(backbone, data, ALONE, "fp32")
    for rank in range(2):
        z_rank, weight_grad, bias_grad, h_rank = saved(tmp_path / f"{rank}.pt")
        assert_close(z_rank, z.detach(), 1e-12)
        assert_close(weight_grad, linear.weight.grad, 1e-12)
        assert_close(bias_grad, linear.bias.grad, 1e-12)
        assert_close(h_rank, h)


def test_gather_alone_is_the_identity():
    z = torch.randn(3, 2, requires_grad=True)
    assert common.gather(z) is z


# ---- k-NN and embedding_std


def slow_knn(train_x, train_y, test_x, test_y, k, tau):
    train_x, test_x = train_x.double().numpy(), test_x.double().numpy()
    correct = 0
    for x, y in zip(test_x, test_y.tolist()):
        cosines = [float(t @ x / np.linalg.norm(t) / np.linalg.norm(x)) for t in train_x]
        votes = {}
        for similarity, label in sorted(zip(cosines, train_y.tolist()), reverse=True)[:k]:
            votes[label] = votes.get(label, 0) + math.exp(similarity / tau)
        correct += max(votes, key=votes.get) == y
    return correct / len(test_x)


def blobs(n, seed, spread=1.5, dim=8):
    centres = torch.randn(5, dim, generator=torch.Generator().manual_seed(0))
    generator, y = torch.Generator().manual_seed(seed), torch.arange(n) % 5
    return centres[y] + spread * torch.randn(n, dim, generator=generator), y


@pytest.mark.parametrize("k, tau", ((1, 0.1), (20, 0.1), (20, 0.01), (60, 0.3), (200, 0.07), (500, 0.01)))
def test_knn_is_the_slow_loop(k, tau):
    train, test = blobs(200, 1), blobs(151, 2)
    accuracy = slow_knn(*train, *test, k, tau)
    assert 0.4 < accuracy < 0.9
    for chunk in (1000, 256, 7):
        assert common.knn_accuracy(*train, *test, k=k, tau=tau, chunk=chunk) == pytest.approx(accuracy)
    scale = torch.rand(200, 1, generator=torch.Generator().manual_seed(3)) * 9 + 0.1
    scaled = common.knn_accuracy(train[0] * scale, train[1], test[0] * 7, test[1], k=k, tau=tau)
    assert scaled == pytest.approx(accuracy)


def test_knn_leaves_one_out_of_separated_clusters():
    x, y = blobs(50, 1, spread=0.05, dim=16)
    for i in range(50):
        keep = torch.arange(50) != i
        assert common.knn_accuracy(x[keep], y[keep], x[i : i + 1], y[i : i + 1], k=5) == 1


def embedding_std(z):
    """What an epoch's row says of the last z given to Run.log."""
    run = SimpleNamespace(late=None, sums={}, row={}, seconds=1.0, step=0, bar=tqdm(disable=True))
    run.check = lambda: common.Run.check(run)
    common.Run.log(run, 0.1, torch.tensor(2.0), {}, z)
    common.Run.pause(run, 0.0)
    return run.row["embedding_std"]


def test_embedding_std_tells_spread_from_collapse():
    z = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    assert 0.95 < embedding_std(z) < 1.05
    assert embedding_std(z * torch.rand(256, 1)) == pytest.approx(embedding_std(z), abs=1e-5)
    assert embedding_std(torch.ones(256, 128)) < 1e-3
    two = torch.tensor([[3.0, 4.0], [-3.0, 4.0]])  # rows (0.6, 0.8), (-0.6, 0.8): stds 0.6 sqrt 2 and 0
    assert embedding_std(two) == pytest.approx(0.6)


# ---- checkpoints


def example():
    return {"step": 3, "lr": 0.5, "name": "x", "none": None, "list": [1, 2.5], "mean": (0.1, 0.2),
            "bf16": torch.ones(2, dtype=torch.bfloat16),
            "model": {"w": torch.arange(3000.0), "n": torch.tensor(2)}}


def assert_example(state):
    expected = example()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        for a, b in zip(state[key].values(), value.values()) if key == "model" else [(state[key], value)]:
            assert torch.equal(a, b) and a.dtype == b.dtype if torch.is_tensor(b) else a == b


def test_checkpoint_round_trip(tmp_path):
    path = tmp_path / "c.pt"
    common.save_checkpoint(path, {"old": 1})
    common.save_checkpoint(str(path), example())
    assert_example(saved(path))
    assert_example(common.load_checkpoint(path))
    assert os.listdir(tmp_path) == ["c.pt"]


def assert_refused(path):
    with pytest.raises(ValueError) as info:
        common.load_checkpoint(path)
    assert str(path) in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize("keep", (0, 1, 100, 5000, -1))
def test_truncated_checkpoint_is_refused(tmp_path, keep):
    path = tmp_path / "c.pt"
    common.save_checkpoint(path, example())
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(path)


def test_foreign_files_are_refused(tmp_path):
    assert_refused(tmp_path / "missing.pt")
    assert_refused(tmp_path)
    half = pickle.dumps({"step": 1, "name": "x"}, protocol=2)[:-9]
    for i, data in enumerate((b"epoch 1: loss 2.5\nepoch 2\n", b'{"step": 1}', bytes(range(256)), half)):
        (tmp_path / str(i)).write_bytes(data)
        assert_refused(tmp_path / str(i))
    torch.save(torch.ones(2), tmp_path / "tensor")
    assert_refused(tmp_path / "tensor")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", (True, False))
def test_damaged_checkpoint_loads_or_is_refused(tmp_path, zipped):
    path, generator, refused = tmp_path / "c.pt", np.random.default_rng(0), 0
    torch.save({"step": 3, "w": torch.ones(4), "name": "x"}, path, _use_new_zipfile_serialization=zipped)
    whole = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    for i in range(400):
        damaged = whole.copy()
        damaged[generator.integers(len(whole), size=4)] = generator.integers(256, size=4)
        path.write_bytes(damaged[: generator.integers(len(whole)) if i % 2 else None].tobytes())
        try:
            assert isinstance(common.load_checkpoint(path), dict)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > 200


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("save", (
    torch.save, lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    lambda state, path: path.write_bytes(pickle.dumps(state))))
def test_a_checkpoint_runs_no_code(tmp_path, save):
    marker, path = tmp_path / "marker", tmp_path / "c.pt"
    save({"w": torch.ones(2), "x": Malicious(str(marker))}, path)
    assert_refused(path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Malicious(str(marker)))).close()
    assert marker.exists()  # so the trap works


class FullDisk(io.FileIO):
    room = 0

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", (0, 2000, 10**9))
def test_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, room):
    def fsync(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "c.pt"
    common.save_checkpoint(path, example())
    monkeypatch.setattr(FullDisk, "room", room)
    monkeypatch.setattr(common, "open", FullDisk, raising=False)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError) as info:
        common.save_checkpoint(path, {"w": torch.zeros(5000)})
    assert str(path) in str(info.value) and "\n" not in str(info.value)
    assert os.listdir(tmp_path) == ["c.pt"]
    assert_example(saved(path))


@pytest.mark.parametrize("parent", ("missing", "file"))
def test_no_folder_for_the_checkpoint(tmp_path, parent):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as info:
        common.save_checkpoint(tmp_path / parent / "c.pt", example())
    assert f"cannot write {tmp_path / parent / 'c.pt'}" in str(info.value)


# ---- data sets


def test_patterns():
    (train, y), (test, test_y) = common.patterns(), common.patterns(train=False)
    for images, labels, n in ((train, y, 10000), (test, test_y, 2000)):
        assert images.shape == (n, 3, 32, 32) and images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert labels.bincount().tolist() == [n // 10] * 10
    torch.manual_seed(9)
    torch.set_num_threads(2)
    again, again_y = common.patterns()
    torch.set_num_threads(1)
    assert torch.equal(train, again) and torch.equal(y, again_y)
    distinct = {image.tobytes() for image in torch.cat([train, test]).numpy()}
    assert len(distinct) == 12000


def test_load_patterns():
    data = common.load_images("patterns", train=False, limit=50)
    assert data.images.shape == (50, 3, 32, 32) and data.image_size == 32 and len(set(data.classes)) == 10
    assert data.labels.tolist() == list(range(10)) * 5


def save(path, colour=(255, 0, 0), size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return str(path)


def assert_error(capsys, *words, **options):
    refused(capsys, common.load_images, "folder", words=words, **options)


def test_class_folders_with_train_and_test(tmp_path):
    for split, n in (("train", 3), ("test", 2)):
        for label, name in enumerate(("ant", "bee")):
            for i in range(n):
                save(tmp_path / split / name / f"{i}.png", (100 * label + i, 0, 0))
    save(tmp_path / "train" / ".cache" / "x.png")
    train, test = (common.load_images("folder", tmp_path, train=train) for train in (True, False))
    assert train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 100, 101, 102]
    assert test.images[:, 0, 0, 0].tolist() == [0, 1, 100, 101]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1] and test.labels.tolist() == [0, 0, 1, 1]
    assert train.classes == test.classes == ["ant", "bee"] and train.image_size == 32
    limited = common.load_images("folder", tmp_path, limit=4)
    assert limited.images[:, 0, 0, 0].tolist() == [0, 1, 100, 101]  # of both classes


def test_class_folders_alone(tmp_path):
    for name in ("b", "a"):
        save(tmp_path / name / "x.png")
    data = common.load_images("folder", tmp_path)
    assert data.labels.tolist() == [0, 1] and data.classes == ["a", "b"]
    assert common.load_images("folder", tmp_path, train=False) is None


def test_flat_folder_of_every_mode(tmp_path):
    save(tmp_path / "1.png", 77, mode="L")
    palette = Image.new("P", (32, 32), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "2.png")
    save(tmp_path / "3.png", (40, 50, 60, 128), mode="RGBA")
    save(tmp_path / "4.jpg", (0, 255, 255, 0), mode="CMYK")  # red
    save(tmp_path / "5.JPEG", (0, 0, 254))
    save(tmp_path / "6.png", (70, 128), mode="LA")
    save(tmp_path / "7.png", 1, mode="1")
    save(tmp_path / ".hidden.png")
    save(tmp_path / ".trash" / "8.png")
    (tmp_path / "notes.txt").write_text("no image")
    data = common.load_images("folder", tmp_path)
    assert data.images.shape == (7, 3, 32, 32) and data.images.dtype == torch.uint8
    assert data.labels is None and data.classes == []
    expected = [(77,) * 3, (10, 20, 30), (40, 50, 60), (255, 0, 0), (0, 0, 254), (70,) * 3, (255,) * 3]
    assert_close(data.images[:, :, 5, 5].float(), torch.tensor(expected).float(), 3)
    assert len(common.load_images("folder", tmp_path, limit=3).images) == 3


def test_16_bit_grey_keeps_its_brightness(tmp_path):
    Image.fromarray(np.full((32, 32), 77 * 256, dtype=np.uint16)).save(tmp_path / "1.png")
    assert_close(common.load_images("folder", tmp_path).images[0, :, 5, 5].float(), torch.full((3,), 77.0), 1)


def test_small_images_of_different_sizes_become_one(tmp_path):
    save(tmp_path / "1.png", size=(64, 40))
    save(tmp_path / "2.png", size=(30, 28), colour=(0, 9, 0))
    images = common.load_images("folder", tmp_path).images
    assert images.shape == (2, 3, 28, 28) and images[:, :, 3, 3].tolist() == [[255, 0, 0], [0, 9, 0]]


def test_large_images_stay_files(tmp_path):
    files = [save(tmp_path / f"{name}.png", size=(65, 20)) for name in "cab"]
    data = common.load_images("folder", str(tmp_path))
    assert data.images == sorted(files) and data.image_size == 224 and data.labels is None
    limited = common.load_images("folder", tmp_path, limit=2, image_size=96)
    assert limited.images == sorted(files)[:2] and limited.labels is None and limited.image_size == 96


def test_bad_folders_end_in_one_line(tmp_path, capsys):
    assert_error(capsys, tmp_path / "missing", data_dir=tmp_path / "missing")
    (tmp_path / "empty" / "class").mkdir(parents=True)
    assert_error(capsys, tmp_path / "empty", data_dir=tmp_path / "empty")
    whole = Path(save(tmp_path / "a" / "1.png", size=(64, 64))).read_bytes()
    bitmap = bytearray(Path(save(tmp_path / "c.bmp")).read_bytes())
    bitmap[18:26] = (10**5).to_bytes(4, "little") * 2  # width and height: more than Pillow opens
    for data in (b"", b"no image at all", whole[:60], whole[:-40], bitmap):
        (tmp_path / "a" / "2.png").write_bytes(data)
        assert_error(capsys, tmp_path / "a" / "2.png", data_dir=tmp_path / "a")


@pytest.mark.parametrize("workers", (0, 1))
def test_unreadable_large_image_ends_the_run_in_one_line(tmp_path, workers):
    """One that is damaged after the start, when a sample of all is read."""
    for i in range(4):
        save(tmp_path / f"{i}.jpg", size=(80, 80))
    code = """if True:
        import os, sys, common
        env = common.init_distributed("cpu")
        data = common.load_images("folder", sys.argv[1], image_size=32)
        os.truncate(data.images[2], 300)
        for _ in common.batches(data, 0, 2, env, 0, [common.Augment(32)], workers=int(sys.argv[2])):
            pass
        print("went on")"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(workers)],
        cwd=Path(common.__file__).parent, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("error:") and result.stderr.count("\n") == 1
    assert str(tmp_path / "2.jpg") in result.stderr


# ---- batches and features


def in_memory(n=24, images=None):
    images = pixels(n, 3, 32, 32) if images is None else images
    return common.Images(images, torch.arange(n), [], (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 32)


def rank_of(rank, world_size=2):
    return SimpleNamespace(rank=rank, world_size=world_size, device=ALONE.device)


def labels(data, epoch=0, batch_size=8, env=ALONE, seed=0):
    return [y.tolist() for _, y in common.batches(data, epoch, batch_size, env, seed, [only(8)])]


def assert_same_batches(a, b):
    a, b = list(a), list(b)
    assert len(a) == len(b) > 0
    for (views_a, y_a), (views_b, y_b) in zip(a, b):
        assert len(views_a) == len(views_b) and all(torch.equal(u, v) for u, v in zip(views_a, views_b))
        assert y_a is y_b is None or torch.equal(y_a, y_b)


def test_order_of_images():
    data = in_memory()
    first = labels(data)
    assert [len(y) for y in first] == [8, 8, 8]
    assert sorted(sum(first, [])) == list(range(24)) != sum(first, [])
    assert first == labels(data) and first != labels(data, epoch=1) and first != labels(data, seed=1)
    odd = labels(in_memory(27))
    assert [len(y) for y in odd] == [8, 8, 8] and len(set(sum(odd, []))) == 24


def test_ranks_share_each_batch():
    data = in_memory()
    whole, parts = labels(data), [labels(data, env=rank_of(rank)) for rank in range(2)]
    assert [a + b for a, b in zip(*parts)] == whole


def test_images_go_with_their_labels():
    data = in_memory()
    for views, y in common.batches(data, 0, 8, rank_of(1), 0, [only(32), only(32, flip=1.0)]):
        assert_close(views[0], data.images[y] / 255)
        assert_close(views[1], (data.images[y] / 255).flip(3))


def views_of_two_epochs(data, batch_size, views):
    """Of both ranks, a row each."""
    passes = [common.batches(data, epoch, batch_size, rank_of(rank), 0, views)
              for epoch in range(2) for rank in range(2)]
    return torch.cat([x for batches in passes for xs, _ in batches for x in xs]).flatten(1)


def test_every_draw_of_an_augmentation_is_new():
    data, augment = in_memory(images=pixels(1, 3, 32, 32).expand(24, -1, -1, -1)), common.Augment(32)
    views = views_of_two_epochs(data, 8, [augment, augment])  # of 24 times the same picture
    assert len(views.unique(dim=0)) == len(views) == 96


def test_a_pass_can_start_anywhere():
    data, views = in_memory(), [common.Augment(32), common.Augment(16)]
    for env in (ALONE, rank_of(1)):
        whole = list(common.batches(data, 2, 4, env, 0, views))
        torch.rand(5)
        for first in (0, 1, 5):
            assert_same_batches(whole[first:], common.batches(data, 2, 4, env, 0, views, first=first))
    assert not list(common.batches(data, 2, 4, ALONE, 0, views, first=6))


@pytest.fixture
def large(tmp_path):
    for i in range(12):
        image = tvf.resize(pixels(3, 5, 6, seed=i), [70, 90]).permute(1, 2, 0).numpy()
        Image.fromarray(image).save(tmp_path / f"{i:02}.png")
    return common.load_images("folder", tmp_path, image_size=32)


def test_large_images_repeat_with_and_without_workers(large):
    views = [common.Augment(32), common.Augment(24, crop_scale=(0.05, 0.3))]
    whole = list(common.batches(large, 0, 4, ALONE, 0, views))
    assert [x.shape for x in whole[0][0]] == [(4, 3, 32, 32), (4, 3, 24, 24)] and whole[0][1] is None
    torch.rand(5)
    assert_same_batches(whole, common.batches(large, 0, 4, ALONE, 0, views, workers=2))
    assert_same_batches(whole[1:], common.batches(large, 0, 4, ALONE, 0, views, workers=2, first=1))
    assert_same_batches(whole[2:], common.batches(large, 0, 4, ALONE, 0, views, first=2))


def test_large_images_are_cropped_anew(large):
    large = replace(large, images=large.images[:1] * 12)
    crops = [only(32, crop_scale=(0.2, 0.6))] * 2
    views = views_of_two_epochs(large, 6, crops)
    assert len(views.unique(dim=0)) == len(views) == 48


def test_large_images_with_all_off(large, tmp_path):
    file = save(tmp_path / "square.png", size=(80, 80), colour=(10, 20, 30))
    large = replace(large, images=[file] * 4, labels=torch.arange(4))
    ((views, y),) = common.batches(large, 0, 4, ALONE, 0, [only(32)])
    assert_close(views[0], torch.tensor([10, 20, 30]).view(1, 3, 1, 1).expand(4, 3, 32, 32) / 255)
    assert sorted(y.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ("same size", "other size", "files"))
def test_features_are_a_plain_loop(kind, large):
    torch.manual_seed(0)
    shape = (32, 32) if kind == "same size" else (40, 50)
    data = large if kind == "files" else in_memory(11, pixels(11, 3, *shape))
    net = common.resnet(width=4)
    net(torch.randn(8, 3, 32, 32))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    result = common.features(net, data, ALONE, "fp32", chunk=4)
    assert net.training and all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    expected = []
    net.eval()
    for image in data.images:
        if kind == "files":
            image = tvf.pil_to_tensor(tvf.center_crop(tvf.resize(Image.open(image), 36), 32))
        elif kind == "other size":
            image = tvf.center_crop(tvf.resize(image, 32), 32)
        with torch.no_grad():
            expected.append(net(tvf.normalize(image / 255, data.mean, data.std)[None]))
    assert_close(result, torch.cat(expected), 1e-4)
    assert result.std(0).mean() > 1e-2


@pytest.mark.parametrize("sizes", [(48,), (16, 12), (512, 128), (600, 3)])
def test_heatmaps(sizes):
    """Each 512 px; white, red and blue where they belong, one matrix's scale apart from the other's."""
    matrices = []
    for i, n in enumerate(sizes):
        matrices.append(torch.zeros(n, n))
        matrices[-1][1, 0], matrices[-1][0, 1] = 4.0 * (1 + i), -2.0 * (1 + i)
    picture, margin = common.heatmaps(*matrices), 4 * (len(sizes) > 1)
    assert picture.shape == (3, 512 + 2 * margin, (512 + margin) * len(sizes) + margin)
    for i, n in enumerate(sizes):
        square = picture[:, margin:margin + 512, margin + i * (512 + margin):][:, :, :512]
        for row in (0, 511 // n, -(-512 // n), 2 * 512 // n - 1, 300, 511):  # pixel p shows entry p n // 512
            for column in (0, 511 // n, -(-512 // n), 2 * 512 // n - 1, 300, 511):
                entry = row * n // 512, column * n // 512
                colour = {(1, 0): [1, 0, 0], (0, 1): [0.5, 0.5, 1]}.get(entry, [1, 1, 1])
                assert square[:, row, column].tolist() == colour
    assert (picture[:, :margin] == 1).all() and (picture[:, :, :margin] == 1).all()


def sections(text):
    """{section of common.py: its part of the text}, by the headers that its docstring lists."""
    lines = ast.get_docstring(ast.parse(text)).split("\n")
    names = [line[4:].split("  ")[0] for line in lines if line.startswith("    ")]
    parts = re.split("\n# (" + "|".join(names) + ")\n", text)
    assert parts[1::2] == names and len(names) == 8
    return dict(zip(["head", *names], parts[::2]))


def used_before_defined(parts):
    """Names that a section uses and only a later one defines."""
    defined = [{name.id for node in ast.parse(part).body if isinstance(node, ast.Assign)
                for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
               | {node.name for node in ast.parse(part).body if hasattr(node, "name")} for part in parts]
    used = [set() for _ in parts]
    for names, node in ((names, node) for names, part in zip(used, parts) for node in ast.parse(part).body):
        inside = [*ast.walk(node)]  # of a function, a class, an assignment: what it reads and does not bind
        bound = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound |= {n.arg for n in inside if isinstance(n, ast.arg)}
        bound |= {n.name for n in inside if isinstance(n, ast.FunctionDef)}
        names |= {n.id for n in inside if isinstance(n, ast.Name)} - bound
    return {name for i, names in enumerate(used) for name in names & set().union(*defined[i + 1:])}


def test_a_section_uses_those_above_it_only():
    parts = sections(Path(common.__file__).read_text())
    assert used_before_defined([*parts.values()]) == set()
    assert used_before_defined(["def f():\n    return g()\n", "def g():\n    return 1\n"]) == {"g"}
    swapped = [parts["head"], parts["evaluation"], parts["data"]]
    assert "Images" in used_before_defined(swapped)  # the check sees it where there is one


def test_narrow_networks_skip_pixels_before_the_shortcut():
    """Below 8 channels, for oneDNN's sake: a strided 1x1 convolution by another name."""
    net = common.resnet("resnet18", 4).eval()
    strided, x = copy.deepcopy(net), torch.randn(2, 3, 32, 32)
    shortcut = strided.layer2[0].downsample
    shortcut.skip, shortcut[1].stride = torch.nn.Identity(), (2, 2)
    assert torch.equal(net(x), strided(x)) and not hasattr(net.layer3[0].downsample, "skip")
    assert net.state_dict().keys() == common.resnet("resnet18", 64).state_dict().keys()
