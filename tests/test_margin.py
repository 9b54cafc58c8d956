"""Guards the margin loss, against the theorem, closed forms and loops in float64; the three frameworks."""

import math

import pytest
import torch
import torch.nn.functional as F

import helpers
import margin_infonce
from helpers import refused, table, views
from margin_infonce import margin_infonce_loss, similarities

N, K = 5, 7
TINY = [*helpers.TINY, "--batch-size", "8", "--queue", "20"]


def angles(seed=0):
    generator = torch.Generator().manual_seed(seed)
    theta = 0.1 + (math.pi - 0.2) * torch.rand(N, K, generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), torch.tensor([0, 6, 3, 3, 1])


def by_angle(theta, pos, **options):
    """Gradient of each row's loss by its angles."""
    return torch.autograd.grad(margin_infonce_loss(theta.cos(), pos, **options) * N, theta)[0]


def softmax(theta, pos, tau, m1=0.0, m2=0.0):
    """q of Eq. 4, entry by entry."""
    rows = []
    for i in range(N):
        p = [float(j == pos[i]) for j in range(K)]
        e = [math.exp((math.cos(theta[i, j].item() + m1 * p[j]) - m2 * p[j]) / tau) for j in range(K)]
        rows.append([v / sum(e) for v in e])
    return torch.tensor(rows, dtype=torch.float64)


def slow_loss(theta, pos, tau, beta, m1, m2):
    total = 0.0
    for i in range(N):
        p = [float(j == pos[i]) for j in range(K)]
        logits = [(math.cos(theta[i, j].item() + m1 * p[j]) - m2 * p[j]) / tau for j in range(K)]
        total += -logits[pos[i]] + beta * math.log(sum(map(math.exp, logits)))
    return total / N


MARGINS = [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.5, 0.1), (1.2, -0.3)]


@pytest.mark.parametrize("m1, m2", MARGINS)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
def test_value_and_theorem(m1, m2, beta, tau):
    theta, pos = angles()
    p = F.one_hot(pos, K).double()
    options = dict(tau=tau, beta=beta)
    value = margin_infonce_loss(theta.cos(), pos, m1=m1, m2=m2, **options).item()
    assert value == pytest.approx(slow_loss(theta, pos, tau, beta, m1, m2), rel=1e-10)
    q, q0 = softmax(theta, pos, tau, m1, m2), softmax(theta, pos, tau)
    with torch.no_grad():
        ratio = torch.where((p - beta * q0).abs() > 0, (p - beta * q) / (p - beta * q0), 1)
        expected = by_angle_plain(theta, pos, **options) * (theta + m1 * p).sin() / theta.sin() * ratio
    found = by_angle(theta, pos, m1=m1, m2=m2, **options)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    assert found.abs().max() > 1e-2
    if beta == 1:
        shift = (((theta + m1).cos() - theta.cos() - m2) / tau).exp().gather(1, pos[:, None])
        factor = 1 / (1 - (1 - shift) * q0.gather(1, pos[:, None]))  # for every column of the row
        torch.testing.assert_close(ratio, factor.expand(N, K), rtol=1e-8, atol=1e-8)


def by_angle_plain(theta, pos, tau, beta):
    """Gradient of the loss without margins, by hand: (p - beta q) sin(theta) / tau."""
    q = softmax(theta, pos, tau)
    return (F.one_hot(pos, K) - beta * q) * theta.detach().sin() / tau


def test_plain_infonce():
    theta, pos = angles()
    cos = theta.detach().cos()
    cos[0, 0], cos[1, 6], cos[2, 3], cos[3, 3] = 1.0, -1.0, 1 + 1e-7, -1 - 1e-7  # positives at the ends
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        x, y = (cos.detach().to(dtype, copy=True).requires_grad_() for _ in range(2))
        loss, plain = margin_infonce_loss(x, pos, tau=0.2), F.cross_entropy(y / 0.2, pos)
        assert loss.dtype == dtype
        loss.backward(), plain.backward()
        torch.testing.assert_close(loss, plain, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=tolerance)
    assert margin_infonce_loss(torch.ones(3, 9), torch.tensor([0, 1, 2]), tau=0.2).item() == pytest.approx(
        math.log(9))
    assert margin_infonce_loss(cos, pos, tau=0.5, beta=0.0).item() == pytest.approx(
        -2 * cos.gather(1, pos[:, None]).mean().item())


SWITCHED = [
    dict(scale=2.0), dict(curvature=1.5), dict(scale=2.0, curvature=0.5), dict(ratio_m1=0.4),
    dict(ratio_m1=3.1), dict(attenuation=0.6), dict(attenuation=0.6, attenuation_type=2),
    dict(attenuation=0.6, m1=0.3, m2=0.1), dict(scale=3.0, curvature=1.0, ratio_m1=0.8, attenuation=0.9),
    dict(scale=3.0, curvature=1.0, attenuation=0.9, attenuation_type=2, m1=0.3, m2=0.1)]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("switches", SWITCHED, ids=str)
def test_switches_leave_the_value_and_give_the_closed_forms(switches, beta):
    theta, pos = angles(1)
    tau, column = 0.3, pos[:, None]
    margins = {k: v for k, v in switches.items() if k in ("m1", "m2")}
    options = dict(tau=tau, beta=beta)
    plain = margin_infonce_loss(theta.cos(), pos, **margins, **options)
    switched = margin_infonce_loss(theta.cos(), pos, **switches, **options)
    assert switched.item() == pytest.approx(plain.item(), rel=1e-12)
    q0 = softmax(theta, pos, tau).gather(1, column)
    of_pos, of_row = torch.full((N, 1), switches.get("scale", 1.0)).double(), torch.ones(N, 1).double()
    if "curvature" in switches:
        of_pos *= 1 - (theta.detach().gather(1, column) / math.pi) ** switches["curvature"]
    if "ratio_m1" in switches:
        q = softmax(theta, pos, tau, m1=switches["ratio_m1"]).gather(1, column)
        of_row *= (1 - beta * q) / (1 - beta * q0)
    if "attenuation" in switches:
        factor = 1 / (1 - switches["attenuation"] * q0)
        if switches.get("attenuation_type", 1) == 1:
            of_row *= factor
        else:
            of_pos *= factor
    expected = by_angle(theta, pos, **margins, **options) * of_row
    expected.scatter_(1, column, expected.gather(1, column) * of_pos)
    found = by_angle(theta, pos, **switches, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if not ("ratio_m1" in switches and len(switches) == 1 and beta == 0):  # without negatives it does nothing
        assert (found - by_angle(theta, pos, **margins, **options)).abs().max() > 1e-3


def test_ratio_gives_the_gradient_ratio_of_the_margin():
    """What ratio_m1 is for: the negatives' gradients are those of the angular margin, which does no more to
    them."""
    theta, pos = angles(2)
    ratio, margin = (by_angle(theta, pos, tau=0.3, **o) for o in (dict(ratio_m1=0.4), dict(m1=0.4)))
    negative = F.one_hot(pos, K) == 0
    torch.testing.assert_close(ratio[negative], margin[negative], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(ratio[~negative], margin[~negative], rtol=1e-2)


@pytest.mark.parametrize("m2", [0.02, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("tau", [0.1, 0.3, 1.0])
def test_attenuation_is_the_subtractive_margins_gradient(m2, tau):
    """Eq. 7: m2 by itself is attenuation of type 1 with a = 1 - exp(-m2 / tau), in every column."""
    theta, pos = angles(4)
    margin = by_angle(theta, pos, tau=tau, m2=m2)
    attenuated = by_angle(theta, pos, tau=tau, attenuation=1 - math.exp(-m2 / tau))
    torch.testing.assert_close(attenuated, margin, rtol=1e-10, atol=1e-14)
    assert (margin - by_angle(theta, pos, tau=tau)).abs().max() > 1e-3
    positive = by_angle(theta, pos, tau=tau, attenuation=1 - math.exp(-m2 / tau), attenuation_type=2)
    assert not torch.allclose(positive, margin, rtol=1e-3)


@pytest.mark.parametrize("positive", [1.0, -1.0, 1 + 1e-7, -1 - 1e-7])
@pytest.mark.parametrize("options", [{}, dict(m1=0.5), dict(m1=0.5, m2=0.2), *SWITCHED], ids=str)
@pytest.mark.parametrize("k", [1, 8, 65536])
def test_finite_at_the_ends(positive, options, k):
    cos = torch.linspace(-1, 1, k).repeat(2, 1)
    cos[:, 0] = positive
    for tau in (0.01, 0.2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = cos.clone().requires_grad_()
            loss = margin_infonce_loss(x, torch.zeros(2, dtype=torch.long), tau=tau, **options)
        loss.backward()
        assert loss.dtype == torch.float32 and loss.isfinite() and x.grad.isfinite().all()
        if len(options) <= 2 and "attenuation" not in options and "ratio_m1" not in options:
            assert x.grad.abs().max() <= 1e4 / tau


def test_the_gradient_is_bounded_by_cutting_the_angle():
    """d cos(theta + m1) / d cos(theta) = sin(theta + m1) / sin(theta), sin(theta) 1e-4 at least."""
    cos = torch.tensor([[1 - 1e-12, 0.3], [-1 + 1e-12, 0.3]], dtype=torch.float64, requires_grad=True)
    loss = margin_infonce_loss(cos, torch.tensor([0, 0]), tau=1.0, beta=0.0, m1=0.5)
    loss.backward()
    assert cos.grad[:, 0].abs().max() * 2 <= 1e4
    close = torch.tensor([[math.cos(2e-4), 0.3]], dtype=torch.float64, requires_grad=True)
    margin_infonce_loss(close, torch.tensor([0]), tau=1.0, beta=0.0, m1=0.5).backward()
    assert -close.grad[0, 0].item() == pytest.approx(math.sin(0.5002) / math.sin(2e-4), rel=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("tau", [0.05, 0.02])
def test_ratio_where_the_positive_has_won(dtype, tolerance, tau):
    """1 - q~ is 5.6e-9 and 2e-21 here: the margin's 1 - q is all the same what scales the gradient, by hand
    (1 - q~) / tau times (1 - q) / (1 - q~)."""
    x = torch.tensor([[0.95, 0.0]], dtype=dtype, requires_grad=True)
    margin_infonce_loss(x, torch.tensor([0]), tau=tau, ratio_m1=1.6).backward()
    q = 1 / (1 + math.exp(-math.cos(math.acos(0.95) + 1.6) / tau))
    assert -x.grad[0, 0].item() == pytest.approx((1 - q) / tau, rel=tolerance)
    assert x.grad[0, 1].item() == pytest.approx((1 - q) / tau, rel=tolerance)


def test_half_precision_is_computed_in_float32():
    theta, pos = angles()
    cos = theta.detach().cos().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = margin_infonce_loss(cos, pos, tau=0.05, m1=0.3)
    torch.testing.assert_close(loss, margin_infonce_loss(cos.float(), pos, tau=0.05, m1=0.3))


def test_the_logit_falls_up_to_pi_minus_m1_and_a_margin_never_lowers_the_loss():
    theta = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    logit = margin_infonce.add_angle(theta.cos(), 0.5)
    torch.testing.assert_close(logit[1:-1], (theta + 0.5).cos()[1:-1], rtol=1e-9, atol=1e-9)
    assert (logit.diff()[: int((math.pi - 0.5) / math.pi * 180) - 1] < 0).all()
    theta, pos = angles(3)
    cos = (theta * (math.pi - 0.6) / math.pi).cos()
    losses = [margin_infonce_loss(cos, pos, tau=0.2, m1=m).item() for m in (0.0, 0.1, 0.3, 0.6)]
    assert losses == sorted(losses) and losses[0] < losses[-1]


def test_wrong_settings():
    cos, pos = torch.zeros(2, 3), torch.tensor([0, 1])
    for options in (dict(ratio_m1=0.4, m1=0.1), dict(ratio_m1=0.4, m2=0.1), dict(attenuation=1.0),
                    dict(attenuation=-0.1), dict(attenuation=0.5, attenuation_type=3), dict(curvature=0.0),
                    dict(curvature=-1.0), dict(curvature=math.nan)):
        with pytest.raises(ValueError):
            margin_infonce_loss(cos, pos, tau=0.2, **options)


@pytest.mark.parametrize("n, d", [(3, 5), (6, 2)])
def test_simclr_pairs(n, d):
    z1, z2 = views(n, d)
    cos, pos = similarities("simclr", z1, z2, None)
    z, slow = torch.cat([z1, z2]), 0.0
    assert cos.shape == (2 * n, 2 * n - 1)
    for i in range(2 * n):
        others = [j for j in range(2 * n) if j != i]
        row = [F.cosine_similarity(z[i], z[j], dim=0).item() for j in others]
        assert cos[i].tolist() == pytest.approx(row) and others[pos[i]] == (i + n) % (2 * n)
        slow += (-row[pos[i]] / 0.5 + math.log(sum(math.exp(c / 0.5) for c in row))) / (2 * n)
    assert margin_infonce_loss(cos, pos, tau=0.5).item() == pytest.approx(slow)


def test_moco_and_byol_pairs():
    z1, z2 = views(4, 3)
    queue = F.normalize(views(6, 3, seed=1)[0], dim=1)
    cos, pos = similarities("moco", z1, z2, queue)
    assert cos.shape == (4, 7) and pos.tolist() == [0] * 4
    torch.testing.assert_close(cos[:, 0], F.cosine_similarity(z1, z2))
    torch.testing.assert_close(cos[2, 4], F.cosine_similarity(z1[2], queue[3], dim=0))
    cos, pos = similarities("byol", z1, z2, None)
    loss = margin_infonce_loss(cos, pos, tau=1.0, beta=0.0)
    squared = (F.normalize(z1, dim=1) - F.normalize(z2, dim=1)).pow(2).sum(1).mean()  # BYOL's own form
    torch.testing.assert_close(2 + 2 * loss, squared)
    # at the script's tau: (N, D) each of predictions and targets, 2 - 2 cos of both directions, summed
    p1, t1, p2, t2 = *views(4, 3), *views(4, 3, seed=2)
    sides = [(2 - 2 * F.cosine_similarity(p, t)).mean() for p, t in ((p1, t2), (p2, t1))]
    cos, pos = similarities("byol", torch.cat([p1, p2]), torch.cat([t2, t1]), None)
    tau = margin_infonce.parse_args([*TINY, "--framework", "byol"]).tau
    torch.testing.assert_close(4 + margin_infonce_loss(cos, pos, tau=tau, beta=0.0), sum(sides))
    equal = torch.ones(4, 3, dtype=torch.float64)
    cos, pos = similarities("moco", equal, equal, F.normalize(torch.ones(6, 3, dtype=torch.float64), dim=1))
    assert margin_infonce_loss(cos, pos, tau=0.2).item() == pytest.approx(math.log(7))
    z = torch.eye(40)
    cos, pos = similarities("moco", z[:8], z[:8], z[8:])
    assert margin_infonce_loss(cos, pos, tau=0.07).item() < 1e-4


def model(framework):
    torch.manual_seed(0)
    return margin_infonce.Model(margin_infonce.parse_args([*TINY, "--framework", framework]),
                                small_images=True)


@pytest.mark.parametrize("framework", ["moco", "simclr", "byol"])
def test_models(framework):
    net = model(framework)
    x1, x2 = torch.randn(2, 8, 3, 16, 16)
    h, z1, z2 = net(x1, x2)
    rows = 16 if framework == "byol" else 8
    assert z1.shape == z2.shape == (rows, 8) and h.shape == (8 if framework == "moco" else 16, 32)
    cos, pos = similarities(framework, z1, z2, net.queue)
    margin_infonce_loss(cos, pos, tau=0.2, beta=float(framework != "byol")).backward()
    for name, p in net.named_parameters():
        assert (p.grad is None) == (not p.requires_grad) == name.startswith("target."), name
    assert (net.target is None) == (framework == "simclr") and (net.queue is None) == (framework != "moco")
    if framework == "byol":  # row i of the predictions is of x1, of the targets of x2, and the other way
        net.eval()
        _, z1, z2 = net(x1, x2)
        _, other1, other2 = net(x2, x1)
        torch.testing.assert_close(z1, other1.roll(8, 0))
        torch.testing.assert_close(z2, other2.roll(8, 0))


def test_queue_goes_round():
    net = model("moco")
    torch.testing.assert_close(net.queue.norm(dim=1), torch.ones(20))
    assert torch.linalg.matrix_rank(net.queue) == 8
    batches = [torch.randn(8, 8) for _ in range(3)]
    for keys in batches:
        net.enqueue(keys)
    keys = [F.normalize(k, dim=1) for k in batches]
    assert net.queue_ptr.item() == 24 % 20
    assert torch.equal(net.queue, torch.cat([keys[2][4:], keys[0][4:], keys[1], keys[2][:4]]))
    torch.testing.assert_close(net.queue.norm(dim=1), torch.ones(20))


def theorem(theta, q0, m1, m2, tau):
    """The two factors of Theorem 6 on the positive's gradient at beta 1, with e: the probability falls from
    q0 to q."""
    e = math.exp((math.cos(theta + m1) - math.cos(theta) - m2) / tau)
    q = q0 * e / (q0 * e + 1 - q0)
    return math.sin(theta + m1) / math.sin(theta), (1 - q) / (1 - q0)


def factors(*flags):
    return margin_infonce.gradient_factors(margin_infonce.parse_args([*TINY, *flags]))


X = [(i + 0.5) / 360 for i in range(360)]


def close(curve, expected):
    return curve.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("m1, m2", [(0.4, 0.1), (0.0, 0.3), (0.4, 0.0)])
def test_plot_shows_theorem_6(m1, m2):
    """The two factors are the closed form's and their product is what autograd finds, of the positive and of
    the negative, whose own angle no margin moves."""
    positive, negative, over_angle, over_q = factors("--m1", str(m1), "--m2", str(m2))
    sines, ratio = zip(*(theorem(math.pi * x, 0.5, m1, m2, 0.2) for x in X))
    product = [a * b for a, b in zip(sines, ratio)]
    for curve, expected in zip(positive, (sines, ratio, product)):
        assert close(curve, expected)
    for curve, expected in zip(negative, ([1] * 360, ratio, ratio)):
        assert close(curve, expected)
    for q0, curve in zip((0.1, 0.5, 0.9), over_angle):
        assert close(curve, [math.prod(theorem(math.pi * x, q0, m1, m2, 0.2)) for x in X])
    for angle, curve in zip((20, 60, 100), over_q):
        assert close(curve, [math.prod(theorem(math.radians(angle), q0, m1, m2, 0.2)) for q0 in X])


def test_plot_of_the_switches():
    """ratio_m1 takes the second factor by itself; what scale does is not in the theorem's factors."""
    ratio = [theorem(math.pi * x, 0.5, 0.4, 0, 0.2)[1] for x in X]
    for panel in factors("--ratio-m1", "0.4")[:2]:
        assert all(close(curve, expected) for curve, expected in zip(panel, ([1] * 360, ratio, ratio)))
    positive, negative, *_ = factors("--scale", "2", "--attenuation", "0.6")
    assert close(positive[0], [1] * 360) and close(positive[1], [1] * 360)
    assert close(positive[2], [2 / 0.7] * 360) and close(negative[2], [1 / 0.7] * 360)


def test_plot_of_byol():
    positive, negative, over_angle, over_q = factors("--m1", "0.4", "--framework", "byol")
    sines = [math.sin(math.pi * x + 0.4) / math.sin(math.pi * x) for x in X]
    for curve, expected in zip([*positive, *over_angle], (sines, [1] * 360, sines, sines, sines, sines)):
        assert close(curve, expected)
    assert all((curve == 0).all() for curve in negative)
    assert close(over_q[0], [math.sin(math.pi / 9 + 0.4) / math.sin(math.pi / 9)] * 360)


def test_plot_picture():
    def draw(*flags):
        return margin_infonce.gradient_picture(margin_infonce.parse_args([*TINY, *flags]))

    plain, margin = draw(), draw("--m1", "0.4")
    assert plain.shape == margin.shape == (3, 2 * 256, 2 * 640) and plain.min() < 0.2 and plain.max() == 1
    colourful = plain.amax(0) - plain.amin(0) > 0.1  # the curves: without margins all at factor 1
    for panel in (colourful[top:top + 256, left:left + 396] for top in (0, 256) for left in (0, 640)):
        rows = panel.nonzero()[:, 0]
        assert len(rows) > 600 and rows.max() - rows.min() <= 4
    assert not torch.equal(plain, margin) and not torch.equal(margin, draw("--scale", "2"))


@pytest.mark.parametrize("flags", [
    "--queue 7", "--ratio-m1 0.4 --m1 0.1", "--attenuation 1", "--tau 0", "--momentum-encoder 2",
    "--framework simsiam", "--curvature -1", "--attenuation-type 3", "--optimizer adam",
    "--final-momentum 2"])
def test_errors(capsys, flags):
    refused(capsys, margin_infonce.parse_args, [*TINY, *flags.split()], status=2)


RECIPE = """
data sets              | frameworks | flag             | value    | where it is stated
small                  | all        | arch             | resnet18 | margins' experiments
small                  | all        | epochs           | 200      | margins' experiments
small                  | all        | batch_size       | 256      | margins' experiments
small                  | all        | optimizer        | sgd      | margins' experiments
small                  | all        | base_lr          | 0.06     | margins' experiments
small                  | all        | weight_decay     | 5e-4     | margins' experiments
small                  | all        | warmup_epochs    | 5        | margins' experiments
cifar                  | moco byol  | momentum_encoder | 0.99     | ReSSL, which margins follows
cifar                  | moco byol  | final_momentum   | 0.99     | ReSSL: constant
cifar                  | moco       | queue            | 4096     | ReSSL
stl10 tinyimagenet     | moco byol  | momentum_encoder | 0.996    | ReSSL
stl10 tinyimagenet     | moco byol  | final_momentum   | 0.996    | ReSSL: constant
stl10 tinyimagenet     | moco       | queue            | 16384    | ReSSL
cifar10 stl10 imagenet | moco       | tau              | 0.2      | MoCo v2
cifar10 stl10 imagenet | byol       | tau              | 0.25     | BYOL's loss, 2 - 2 cos in both directions
imagenet               | all        | arch             | resnet50 | margins' experiments
imagenet               | all        | epochs           | 100      | margins' experiments
imagenet               | moco       | batch_size       | 256      | margins' experiments, MoCo v2
imagenet               | moco       | optimizer        | sgd      | MoCo v2
imagenet               | moco       | base_lr          | 0.03     | MoCo v2
imagenet               | moco       | weight_decay     | 1e-4     | MoCo v2
imagenet               | moco       | warmup_epochs    | 0        | MoCo v2
imagenet               | moco       | momentum_encoder | 0.999    | MoCo v2
imagenet               | moco       | final_momentum   | 0.999    | MoCo v2: constant
imagenet               | moco       | queue            | 65536    | MoCo v2
imagenet               | moco       | projector        | 2048-128 | MoCo v2
imagenet               | simclr     | optimizer        | lars     | SimCLR
imagenet               | simclr     | base_lr          | 0.3      | SimCLR
imagenet               | simclr     | weight_decay     | 1e-6     | SimCLR
imagenet               | simclr     | warmup_epochs    | 10       | SimCLR
imagenet               | simclr     | tau              | 0.1      | SimCLR
imagenet               | simclr     | batch_size       | 4096     | SimCLR
imagenet               | simclr     | projector        | 2048-128 | SimCLR
imagenet               | byol       | optimizer        | lars     | BYOL
imagenet               | byol       | base_lr          | 0.45     | BYOL, for 100 epochs
imagenet               | byol       | weight_decay     | 1.5e-6   | BYOL
imagenet               | byol       | warmup_epochs    | 10       | BYOL
imagenet               | byol       | momentum_encoder | 0.99     | BYOL
imagenet               | byol       | final_momentum   | 1        | BYOL: by a cosine
imagenet               | byol       | projector        | 4096-256 | BYOL, its predictor too
imagenet               | byol       | batch_size       | 4096     | BYOL
"""
NAMES = {"small": "cifar10 cifar100 stl10 tinyimagenet", "cifar": "cifar10 cifar100",
         "all": "moco simclr byol"}


def recipe_cells(text):
    rows = [[NAMES.get(cell, cell) for cell in row] for row in table(text)]
    return [(d, f, flag, value) for ds, fs, flag, value, _ in rows for d in ds.split() for f in fs.split()]


@pytest.mark.parametrize("dataset, framework, flag, value", recipe_cells(RECIPE))
def test_recipes_are_the_papers(dataset, framework, flag, value):
    argv = ["--dataset", dataset, "--framework", framework]
    found = vars(margin_infonce.parse_args(argv))[flag]
    assert found == type(found)(value)


@pytest.mark.parametrize("framework", ["moco", "simclr", "byol"])
def test_the_command_line_is_over_the_recipe(framework):
    flags = "--tau 0.3 --optimizer sgd --base-lr 7 --weight-decay 0.2 --warmup-epochs 3 --queue 9000"
    flags += " --momentum-encoder 0.5 --final-momentum 0.7 --batch-size 64 --projector 9-8 --epochs 11"
    words = flags.split()
    argv = ["--dataset", "imagenet", "--framework", framework, *words]
    args = vars(margin_infonce.parse_args(argv))
    for flag, value in zip(words[::2], words[1::2]):
        found = args[flag[2:].replace("-", "_")]
        assert found == type(found)(value), flag


def test_imagenets_networks():
    """BYOL's predictor has its projector's widths."""
    argv = ["--framework", "byol", "--dataset", "imagenet", "--arch", "resnet18", "--width", "4"]
    net = margin_infonce.Model(margin_infonce.parse_args(argv), small_images=False)
    widths = [m.weight.shape for m in net.predictor if isinstance(m, torch.nn.Linear)]
    assert widths == [(4096, 256), (256, 4096)] and net.projector[-1].weight.shape == (256, 4096)
