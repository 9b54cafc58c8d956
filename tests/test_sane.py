"""Guards SANE: labels, mixup and loss against loops, closed forms and by hand; queue and key encoder."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import v2

import common
import helpers
import sane
from helpers import pixels, refused, table
from sane import momentum_mixup, mu_schedule, refine_labels, soft_infonce_loss

TINY = [*helpers.TINY, "--batch-size", "8", "--queue", "20"]


def unit(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=1)


def slow_labels(key_cos, tau, tau_prime, mu, use_p=True, use_q=True):
    rows = []
    for i, row in enumerate(key_cos.tolist()):
        e = [math.exp(c / (tau * tau_prime)) for c in row]
        p = [v / sum(e) for v in e]
        rest = sum(e) - e[i]
        q = [0.0 if k == i else v / rest for k, v in enumerate(e)]
        a, b = mu * max(p) * use_p, mu * max(q) * use_q
        z = 1 + a + b
        alpha, beta = a / z, b / z
        rows.append([(1 - alpha - beta) * (k == i) + alpha * p[k] + beta * q[k] for k in range(len(row))])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("s, d, queue", [(6, 3, 5), (4, 9, 0), (2, 5, 11)])
@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("use", [(True, True), (False, True), (True, False), (False, False)])
def test_labels_equal_the_loop(s, d, queue, mu, use):
    keys = unit(s + queue, d)
    key_cos = keys[:s] @ keys.T
    labels = refine_labels(key_cos, 0.2, 0.8, mu, *use)
    torch.testing.assert_close(labels, slow_labels(key_cos, 0.2, 0.8, mu, *use), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(labels.sum(1), torch.ones(s, dtype=torch.float64))
    assert ((labels >= 0) & (labels <= 1)).all()
    if mu == 0 or use == (False, False):
        assert torch.equal(labels, torch.eye(s, s + queue, dtype=torch.float64))


def test_labels_by_hand():
    """K = 3, one row, softmax temperature 1. Cosines ln 4, ln 2, ln 2 (not real, but exact): p is 1/2, 1/4,
    1/4, and q is 0, 1/2, 1/2. mu = 2 makes z = 1 + 1 + 1, alpha = beta = 1/3."""
    key_cos = torch.tensor([[math.log(4), math.log(2), math.log(2)]], requires_grad=True)
    labels = refine_labels(key_cos, 0.5, 2.0, 2.0)
    torch.testing.assert_close(labels, torch.tensor([[1 / 3 + 1 / 6, 1 / 12 + 1 / 6, 1 / 12 + 1 / 6]]))
    assert not labels.requires_grad
    # p alone: z = 2, alpha = 1/2; q alone: the same, and q leaves the positive alone
    torch.testing.assert_close(refine_labels(key_cos, 0.5, 2.0, 2.0, use_q=False),
                               torch.tensor([[0.75, 0.125, 0.125]]))
    torch.testing.assert_close(refine_labels(key_cos, 0.5, 2.0, 2.0, use_p=False),
                               torch.tensor([[0.5, 0.25, 0.25]]))
    assert refine_labels(key_cos, 0.5, 2.0, 0.0).tolist() == [[1, 0, 0]]


def test_labels_of_the_second_row_have_their_positive_in_the_second_column():
    key_cos = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    labels = refine_labels(key_cos, 0.2, 0.8, 1.0)
    torch.testing.assert_close(labels[0, [0, 1, 2]], labels[1, [1, 0, 2]])
    assert labels[1].argmax() == 1


def test_joint_permutation_of_the_queue():
    keys, x = unit(12, 5), unit(4, 5, seed=1)
    order = torch.cat([torch.arange(4), 4 + torch.randperm(8, generator=torch.Generator().manual_seed(2))])
    labels, moved = (refine_labels(k[:4] @ k.T, 0.2, 0.8, 1.0) for k in (keys, keys[order]))
    torch.testing.assert_close(moved, labels[:, order])
    losses = [soft_infonce_loss(x @ k.T, y, 0.2) for k, y in ((keys, labels), (keys[order], moved))]
    torch.testing.assert_close(*losses)
    assert not torch.isclose(soft_infonce_loss(x @ keys.T, moved, 0.2), losses[0], rtol=1e-4)


def test_the_refinery_finds_clusters():
    """Five clusters: weight on keys of the own cluster, the positive aside, is 0 in a one-hot label, grows
    with mu and beyond what chance would put there."""
    generator = torch.Generator().manual_seed(0)
    cluster = torch.arange(60) % 5
    keys = F.normalize(6 * torch.eye(5, 16)[cluster] + torch.randn(60, 16, generator=generator), dim=1)
    own = (cluster[:20, None] == cluster) & ~torch.eye(20, 60, dtype=torch.bool)
    weights, shares = [], []
    for mu in (0.0, 0.1, 0.5, 1.0, 10.0):
        labels = refine_labels(keys[:20] @ keys.T, 0.2, 0.8, mu)
        weights.append(labels[own].sum().item() / 20)
        shares.append(sane.same_class(labels, cluster[:20], cluster).item())
    assert weights[0] == 0 and all(a < b - 0.005 for a, b in zip(weights, weights[1:]))
    assert shares[0] == 0 and all(0.6 < share < 1 for share in shares[1:])  # chance: 11 of 59
    few = torch.where(torch.arange(60) % 3 == 0, cluster, -1)  # a third labelled: the same share
    known = sane.same_class(refine_labels(keys[:20] @ keys.T, 0.2, 0.8, 10.0), few[:20], few).item()
    assert abs(known - shares[-1]) < 0.15
    unknown = torch.full((20,), -1)
    assert sane.same_class(labels, unknown, torch.full((60,), -1)) == 0


def test_mixup_at_its_ends_and_between():
    generator = torch.Generator().manual_seed(0)
    x, x_key = (torch.randn(4, 3, 2, 2, generator=generator) for _ in range(2))
    labels, perm = torch.rand(4, 7, generator=generator).softmax(1), torch.tensor([2, 0, 3, 1])
    mixed, y = momentum_mixup(x, x_key, labels, torch.ones(4), perm)
    assert torch.equal(mixed, x) and torch.equal(y, labels)
    mixed, y = momentum_mixup(x, x_key, labels, torch.zeros(4), perm)
    assert torch.equal(mixed, x_key[perm]) and torch.equal(y, labels[perm])
    theta = torch.tensor([0.25, 0.5, 0.75, 1.0])
    mixed, y = momentum_mixup(x, x_key, labels, theta, perm)
    for i in range(4):  # a theta of its own for each row, the same for image and label
        t, j = theta[i].item(), perm[i].item()
        torch.testing.assert_close(mixed[i], t * x[i] + (1 - t) * x_key[j])
        torch.testing.assert_close(y[i], t * labels[i] + (1 - t) * labels[j])
    torch.testing.assert_close(y.sum(1), torch.ones(4))


def test_loss_equals_the_loop_and_cross_entropy():
    cos, labels = unit(5, 9) @ unit(11, 9, seed=1).T, unit(5, 11, seed=2).softmax(1)
    slow = 0.0
    for i in range(5):
        total = math.log(sum(math.exp(c / 0.3) for c in cos[i].tolist()))
        slow -= sum(labels[i, k].item() * (cos[i, k].item() / 0.3 - total) for k in range(11)) / 5
    assert soft_infonce_loss(cos, labels, 0.3).item() == pytest.approx(slow, rel=1e-12)
    onehot = torch.eye(5, 11, dtype=torch.float64)
    plain = F.cross_entropy(cos / 0.3, torch.arange(5))
    torch.testing.assert_close(soft_infonce_loss(cos, onehot, 0.3), plain, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda c: soft_infonce_loss(c, labels, 0.3), cos.requires_grad_())


def test_known_values_of_the_loss():
    """All embeddings equal: ln K. A query on its key, orthogonal to the queue: 0, as no key is its own
    negative."""
    assert soft_infonce_loss(torch.ones(4, 17), torch.eye(4, 17), 0.2).item() == pytest.approx(
        math.log(17), abs=1e-6)
    z = torch.eye(32)
    keys = torch.cat([z[:8], z[8:]])
    assert soft_infonce_loss(z[:8] @ keys.T, torch.eye(8, 32), 0.07) < 1e-4


@pytest.mark.parametrize("tau", [0.2, 0.005])
def test_low_temperature_and_half_precision(tau):
    cos = (unit(6, 4) @ unit(40, 4, seed=1).T).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        labels = refine_labels(cos[:, :40], tau, 0.8, 1.0)
        x = cos.clone().requires_grad_()
        loss = soft_infonce_loss(x, labels, tau)
    assert labels.dtype == loss.dtype == torch.float32
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and labels.isfinite().all()
    torch.testing.assert_close(labels, refine_labels(cos.float(), tau, 0.8, 1.0))
    torch.testing.assert_close(loss, soft_infonce_loss(cos.float(), labels, tau))
    assert soft_infonce_loss(cos.double(), labels.double(), tau).dtype == torch.float64


def test_mu_schedule():
    assert mu_schedule(0, 100, 0.5, 10) == 0.5 and mu_schedule(100, 100, 0.5, 10) == 10
    assert mu_schedule(50, 100, 0.5, 10) == pytest.approx(5.25)
    assert mu_schedule(25, 100, 0, 1) == pytest.approx(1 - (math.sqrt(0.5) + 1) / 2)
    values = [mu_schedule(t, 100, 0, 1) for t in range(101)]
    assert values == sorted(values)


def model(*flags):
    torch.manual_seed(0)
    return sane.Model(sane.parse_args([*TINY, *flags]), small_images=True)


def test_queue_goes_round():
    net = model()
    torch.testing.assert_close(net.queue.norm(dim=1), torch.ones(20))
    batches = [unit(8, 8, seed=i).float() for i in range(3)]
    for i, keys in enumerate(batches):
        net.enqueue(keys, torch.full((8,), i))
    assert net.queue_ptr.item() == 24 % 20
    assert torch.equal(net.queue[:4], batches[2][4:]) and torch.equal(net.queue[4:8], batches[0][4:])
    assert torch.equal(net.queue[16:], batches[2][:4]) and torch.equal(net.queue[8:16], batches[1])
    assert net.queue_y.tolist() == [2] * 4 + [0] * 4 + [1] * 8 + [2] * 4
    torch.testing.assert_close(net.queue.norm(dim=1), torch.ones(20))


def test_what_learns_and_what_does_not():
    net = model()
    x1, x2, x3 = torch.randn(3, 8, 3, 16, 16)
    _, z1, z2, z3 = net(x1, x2, x3)
    with torch.no_grad():
        torch.testing.assert_close(F.normalize(net.target(x2), dim=1), F.normalize(z2, dim=1))
    (z1.sum() + (z2 * z3).sum()).backward()
    for name, p in net.named_parameters():
        assert (p.grad is None) == (not p.requires_grad) == name.startswith("target."), name


@pytest.mark.parametrize("ablation", ["none", "no-mixup", "vanilla-mixup"])
def test_mix(ablation):
    args = sane.parse_args([*TINY, "--ablation", ablation])
    x1, x2 = torch.zeros(64, 3, 8, 8), torch.ones(64, 3, 8, 8)
    labels = torch.eye(64, 80)
    torch.manual_seed(0)
    (mixed,), (y,) = sane.mix(x1, x2, [], labels, args)
    share = mixed.mean((1, 2, 3))  # of x2
    if ablation == "none":
        assert ((share > 0) & (share < 1)).all()
        assert len(share.unique()) == 64 and 0.4 < share.mean() < 0.6  # a theta per row
        own = y.diagonal()
        torch.testing.assert_close(torch.where(own == 1, 1 - share, own), 1 - share)  # 1: perm(i) is i
    else:
        assert (share == 0).all() and torch.equal(y, labels) == (ablation == "no-mixup")
    torch.manual_seed(0)
    assert torch.equal(sane.mix(x1, x2, [], labels, args)[1][0], y)
    assert sane.mix(x1, x2, [], labels, sane.parse_args([*TINY, "--lam", "0"])) == ([], [])
    small = sane.mix(x1, x2, [torch.zeros(64, 3, 6, 6), torch.zeros(64, 3, 4, 4)], labels, args)
    assert [x.shape[2] for x in small[0]] == [6, 4] and len(small[1]) == 2


def data(size):
    return common.Images([], None, [], (0.5,) * 3, (0.25,) * 3, size)


def test_small_crops(capsys):
    def sizes(size, *flags):
        views = sane.small_crops(sane.parse_args([*TINY, *flags]), data(size))
        return [(view.size, type(view).__name__) for view in views]

    weak, strong = "Augment", "StrongAugment"
    assert sizes(224) == [(96, weak)] and sizes(224, "--strong") == [(96, strong)]
    assert sizes(224, "--crops", "multi") == [(s, weak) for s in (224, 192, 160, 128, 96)]
    assert sizes(32) == [] and sizes(32, "--strong") == [(32, strong)] and not capsys.readouterr().err
    assert sizes(32, "--crops", "multi") == []
    assert capsys.readouterr().err == "warning: --crops multi is for images above 64 px, and these have 32\n"
    assert sizes(224, "--lam", "0", "--strong") == []
    (view,) = sane.small_crops(sane.parse_args(TINY), data(224))
    assert view.crop_scale == pytest.approx((0.086, 0.429), abs=1e-3)


def operate(name, image, v):
    """In a batch with another image, of another strength."""
    images, v = torch.stack([image.flip(2), image]), torch.tensor([0.5, v]).view(2, 1, 1, 1)
    x = sane.OPERATIONS[name](images, v)
    assert x.shape == images.shape and x.dtype == torch.uint8
    return x[1]


def test_strong_operations():
    """Fourteen: each, but for the identity, changes images."""
    assert len(sane.OPERATIONS) == 14 and "invert" not in sane.OPERATIONS
    image = pixels(3, 32, 32) // 2 + 60
    for name in sane.OPERATIONS:
        results = [operate(name, image, level / 10) for level in range(1, 10)]
        assert all(torch.equal(x, image) for x in results) == (name == "identity"), name
    for name, function in (("auto-contrast", "autocontrast"), ("equalize", "equalize")):
        assert torch.equal(operate(name, image, 0.5), getattr(v2.functional, function)(image))


def slope(image):
    """Of a white line on black (H, W): by how much its column moves with its row, by least squares."""
    rows = image.double().sum(1).nonzero()[:, 0]
    columns = (image.double() @ torch.arange(image.shape[1]).double())[rows] / image.double().sum(1)[rows]
    rows, columns = rows - rows.double().mean(), columns - columns.mean()
    return ((rows * columns).sum() / (rows * rows).sum()).item()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("level", [1, 5, 9])
def test_strong_ranges(level, sign):
    """CLSA's: factors 0.9 level / 10 + 0.05, only down; 4 to 8 bits; threshold 256 - 256 level / 10; angle,
    shift and slope up to 30 degrees, 0.3 of the size, 0.3."""
    image, share = pixels(3, 100, 100), level / 10
    x = {name: operate(name, image, sign * share) for name in sane.OPERATIONS}
    for name in ("brightness", "contrast", "saturation", "sharpness"):  # float32 may round down
        adjusted = getattr(v2.functional, f"adjust_{name}")(image, {1: 0.14, 5: 0.5, 9: 0.86}[level])
        difference = (x[name.replace("saturation", "colour")].float() - adjusted).abs()
        assert difference.max() <= 1 and difference.mean() < 0.02, name
    assert torch.equal(x["posterize"], image & {1: 0b11110000, 5: 0b11111100, 9: 0b11111110}[level])
    threshold = {1: 231, 5: 128, 9: 26}[level]
    assert torch.equal(x["solarize"], torch.where(image >= threshold, 255 - image, image))
    assert torch.equal(x["rotate"], v2.functional.rotate(image, -sign * 3 * level))
    for name, dim in (("translate x", 2), ("translate y", 1)):
        kept = torch.arange(100)[3 * level :] if sign > 0 else torch.arange(100)[: 100 - 3 * level]
        moved = image.roll(sign * 3 * level, dim).index_select(dim, kept)
        assert torch.equal(x[name].index_select(dim, kept), moved) and (x[name] == 0).sum() > 300 * level
    upright = torch.zeros(3, 101, 101, dtype=torch.uint8)
    upright[:, :, 50] = 255
    for name, lines in (("shear x", upright), ("shear y", upright.mT.contiguous())):
        leaning, opposite = (operate(name, lines, v)[0] for v in (sign * share, -sign * share))
        slopes = [slope(line if name == "shear x" else line.T) for line in (leaning, opposite)]
        assert abs(slopes[0]) == pytest.approx(0.03 * level, abs=0.01) and slopes[0] * slopes[1] < 0
        assert torch.equal(operate(name, lines.mT.contiguous(), sign * share), lines.mT)


def strong_draws(monkeypatch, n):
    """(operation, strength) for each image that one got, of n images; these images; what is made of all when
    operations do nothing; what the weak augmentation makes of them by the same draws."""
    calls, got = [], []
    for name in sane.OPERATIONS:

        def operation(x, v, name=name):
            calls.extend((name, strength) for strength in v.flatten().tolist())
            got.extend(x.clone())
            return x

        monkeypatch.setitem(sane.OPERATIONS, name, operation)
    images = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8)
    torch.manual_seed(0)
    x = sane.StrongAugment(8, (0.2, 1.0), (0.0,) * 3, (1.0,) * 3)(images)
    torch.manual_seed(0)
    weak = common.Augment(8, (0.2, 1.0), mean=(0.0,) * 3, std=(1.0,) * 3)(images)
    return calls, got, (x * 255).round(), (weak * 255).round()


def test_strong_draws(monkeypatch):
    """Five draws with p .5 of 14 operations, levels 1 to 9, either sign, each within five standard errors."""
    n = 4000
    calls, *_ = strong_draws(monkeypatch, n)

    def near(count, trials, p):
        return abs(count - trials * p) < 5 * math.sqrt(trials * p * (1 - p))

    assert near(len(calls), 5 * n, 13 / 28)  # nobody calls the identity
    for name in sane.OPERATIONS.keys() - {"identity"}:
        assert near(sum(name == other for other, _ in calls), 5 * n, 1 / 28), name
    strengths = [round(10 * v) for _, v in calls]
    assert {abs(v) for v in strengths} == set(range(1, 10))
    for level in range(1, 10):
        assert near(sum(abs(v) == level for v in strengths), len(calls), 1 / 9), level
    assert near(sum(v > 0 for v in strengths), len(calls), 0.5)


def test_strong_comes_after_weak(monkeypatch):
    """What the operations get is the weak augmentation's image: jitter, grey, blur, flip with their p."""
    calls, got, x, weak = strong_draws(monkeypatch, 600)
    assert torch.equal(x, weak)  # these operations do nothing
    rows = {tuple(row.flatten().tolist()) for row in weak}
    assert all(tuple(image.float().flatten().tolist()) in rows for image in got)
    assert abs((weak.amax(1) == weak.amin(1)).all(2).all(1).float().mean() - 0.2) < 0.09
    view = sane.StrongAugment(8, (0.2, 1.0), (0.0,) * 3, (1.0,) * 3).weak
    assert (view.jitter_p, view.gray_p, view.blur_p, view.flip, view.solarize_p) == (0.8, 0.2, 0.5, 0.5, 0)


def test_strong_augment_draws_for_each_image():
    view = sane.StrongAugment(16, (0.2, 1.0), (0.5,) * 3, (0.25,) * 3)
    images = torch.randint(0, 256, (1, 3, 20, 20), dtype=torch.uint8).repeat(64, 1, 1, 1)
    torch.manual_seed(0)
    x = view(images)
    assert x.shape == (64, 3, 16, 16) and x.dtype == torch.float32 and x.min() >= -2 and x.max() <= 2
    assert len({tuple(row.flatten().tolist()) for row in x}) >= 62
    torch.manual_seed(0)
    assert torch.equal(view(images), x) and not torch.equal(view(images), x)


def test_labels_picture_shows_the_nearest_keys():
    net = model()
    x1, x2 = torch.randn(2, 16, 3, 16, 16)
    x2[9] = x2[3] + 1e-4  # the key nearest to row 3's is row 9's
    shown = sane.labels_picture(net, x1, x2)
    assert shown.shape == (12, 10, 3, 16, 16)
    assert torch.equal(shown[3, 0], x1[3]) and torch.equal(shown[3, 1], x2[3])
    assert torch.equal(shown[3, 2], x2[9]) and net.training
    for i in range(12):
        assert not any(torch.equal(shown[i, j], x2[i]) for j in range(2, 10))


@pytest.mark.parametrize("flags", ["--queue 7", "--lam 1.5", "--momentum-encoder 2", "--tau 0", "--kappa -1",
                                   "--m1 -1", "--ablation all", "--crops 3"])
def test_errors(capsys, flags):
    refused(capsys, sane.parse_args, [*TINY, *flags.split()], status=2)


RECIPE = """
data sets        | flag       | value    | where it is stated
cifar10 imagenet | arch       | resnet50 | main text
cifar10          | epochs     | 2000     | main text
imagenet         | epochs     | 200      | main text, which has 800 too
imagenet         | batch_size | 256      | main text
cifar10          | queue      | 4096     | main text
imagenet         | queue      | 65536    | main text
cifar10 imagenet | tau        | 0.2      | main text
cifar10          | tau_prime  | 0.8      | main text
imagenet         | tau_prime  | 1        | main text
cifar10          | kappa      | 2        | main text
imagenet         | kappa      | 0.1      | main text
cifar10          | m1         | 0        | main text
cifar10          | m2         | 1        | main text
imagenet         | m1         | 0.5      | main text
imagenet         | m2         | 10       | main text
"""


@pytest.mark.parametrize("datasets, flag, value, source", table(RECIPE))
def test_recipes_are_the_papers(datasets, flag, value, source):
    for dataset in datasets.split():
        found = vars(sane.parse_args(["--dataset", dataset]))[flag]
        assert found == type(found)(value)
        assert len(sane.parse_args(["--dataset", dataset]).projector.split("-")) == 3  # main text: the head


def test_the_papers_knn():
    assert sane.KNN == {"cifar10": {"k": 50, "tau": 0.05}}
    over = sane.parse_args("--dataset imagenet --tau 0.4 --m2 3 --queue 512 --epochs 800 --kappa 1".split())
    assert (over.tau, over.m2, over.queue, over.epochs, over.kappa) == (0.4, 3, 512, 800, 1)
