"""Guards one step of each script, computed again from outside: its logged loss, the weights, key encoder and
queue that it leaves."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
from helpers import FixedViews, log, pixels, process_kept, saved, small_network, value

COMMON = "--dataset patterns --batch-size 16 --projector 12-8 --epochs 2 --base-lr 4 --device cpu"
COMMON += " --warmup-epochs 0 --precision fp32 --weight-decay 0.01"
LR = 4 * 16 / 256 * (1 + math.cos(math.pi / 8)) / 2  # step 1 of 8


def step(monkeypatch, tmp_path, capfd, name, flags):
    """Two steps of a script. Returns it, its args, the models before and after the second, an optimizer for
    the first, the views of the second and what it logged."""
    script = importlib.import_module(name)
    monkeypatch.setattr(common, "resnet", small_network)
    monkeypatch.setattr(common, "Augment", FixedViews)
    images = pixels(64, 3, 32, 32)
    monkeypatch.setattr(common, "patterns", lambda train=True: (images, torch.arange(64) % 10))
    monkeypatch.setattr(script, "mlp", lambda widths: nn.Linear(widths[0], widths[-1]))
    states, rows, bias_lr = [], [], ["--bias-lr", "0.5"] if name == "vicreg_variants" else []
    words = [*COMMON.split(), *flags, *bias_lr, "--out", str(tmp_path / "run"), "--max-steps"]
    for steps in "12":
        args = script.parse_args([*words, steps])
        with process_kept():
            script.main(args)
        states.append(saved(tmp_path / "run" / "checkpoint.pt"))
        rows.append(log(tmp_path / "run")[-1])
    capfd.readouterr()  # rows are means of steps
    logged = {k: 2 * v - rows[0][k] for k, v in rows[1].items() if isinstance(v, float)}
    models = []
    for state in states:
        models.append(script.Model(args, True))
        models[-1].load_state_dict(state["model"])
    params = [p for p in models[0].parameters() if p.requires_grad]
    groups = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]]
    groups = [params] if name.startswith("sim") else groups
    groups = [{"params": group} for group in groups]
    if "SGD" in open(script.__file__).read() and "lars" not in flags:
        groups[0]["weight_decay"] = 0.01
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    else:
        optimizer = common.LARS(groups, lr=0.0, momentum=0.9, weight_decay=0.01)
    optimizer.load_state_dict(states[0]["optimizer"])
    decays = [group["weight_decay"] for group in optimizer.param_groups]  # the script's
    assert decays[0] == 0.01 and (decays[-1] == 0 or isinstance(optimizer, common.LARS))
    for group, share in zip(optimizer.param_groups, (1, 0.5)):  # --bias-lr
        group["lr"] = LR * (share if name == "vicreg_variants" else 1)
    return script, args, models, optimizer, FixedViews.last, logged


def check_weights(before, after, optimizer, loss, momentum=None):
    """One step down the loss, then the key encoder's."""
    loss.backward()
    optimizer.step()
    pairs = zip(before.named_parameters(), after.parameters(), strict=True)
    for (name, p), q in pairs:
        if not name.startswith("target."):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)
    assert any(p.grad is not None and p.grad.abs().max() > 1e-4 for p in before.parameters())
    if momentum is not None:
        online = [*before.backbone.parameters(), *before.projector.parameters()]
        for t, o, new in zip(before.target.parameters(), online, after.target.parameters(), strict=True):
            torch.testing.assert_close(momentum * t + (1 - momentum) * o, new, rtol=1e-4, atol=1e-6)


def embed(model, x):
    return model.projector(model.backbone(x))


def check_queue(before, after, keys):
    expected = before.queue.clone()
    expected[16:24], expected[:8] = keys[:8], keys[8:]  # 24 columns, 16 were written before
    torch.testing.assert_close(after.queue, expected, rtol=1e-4, atol=1e-6)
    assert (before.queue_ptr.item(), after.queue_ptr.item()) == (16, 8)


SANE = "--queue 24 --lam 0.3 --m1 0.2 --m2 2 --momentum-encoder 0.9 --tau 0.3 --tau-prime 0.7".split()


@pytest.mark.parametrize("ablation", ["none", "no-p", "no-q", "no-mixup", "vanilla-mixup"])
def test_sane(monkeypatch, tmp_path, capfd, ablation):
    import sane

    calls, mixup = [], sane.momentum_mixup
    monkeypatch.setattr(sane, "momentum_mixup", lambda *a: calls.append(a) or mixup(*a))
    _, args, (before, after), optimizer, (x1, x2), logged = step(
        monkeypatch, tmp_path, capfd, "sane", [*SANE, "--ablation", ablation])
    with torch.no_grad():
        new = F.normalize(before.target(x2), dim=1)
    keys = torch.cat([new, before.queue])
    mu = 2 - 1.8 * (math.cos(math.pi / 8) + 1) / 2
    p = ((new @ keys.T) / (0.3 * 0.7)).softmax(1)
    onehot = torch.eye(16, 40)
    q = (p * (1 - onehot)) / (p * (1 - onehot)).sum(1, keepdim=True)
    a, b = (mu * p.amax(1, keepdim=True) * (ablation != "no-p"),
            mu * q.amax(1, keepdim=True) * (ablation != "no-q"))
    z = 1 + a + b
    labels = (1 - a / z - b / z) * onehot + a / z * p + b / z * q
    _, _, used, theta, perm = calls[-1]
    torch.testing.assert_close(used, labels, rtol=1e-4, atol=1e-6)
    assert sorted(perm.tolist()) == list(range(16))
    assert (theta == 1).all() if ablation == "no-mixup" else len(theta.unique()) == 16
    t = theta[:, None]
    partner = x1 if ablation == "vanilla-mixup" else x2
    mixed = t[:, :, None, None] * x1 + (1 - t[:, :, None, None]) * partner[perm]
    target = t * labels + (1 - t) * labels[perm]

    def cross_entropy(x, y):
        return -(y * (F.normalize(embed(before, x), dim=1) @ keys.T / 0.3).log_softmax(1)).sum(1).mean()

    vanilla, mixup = cross_entropy(x1, onehot), cross_entropy(mixed, target)
    loss = 0.7 * vanilla + 0.3 * mixup
    for name, value in (("vanilla", vanilla), ("mixup", mixup), ("loss", loss), ("mu", mu)):
        assert logged[name] == pytest.approx(torch.as_tensor(value).item(), rel=1e-4), name
    check_weights(before, after, optimizer, loss, momentum=0.9)
    check_queue(before, after, new)
    assert (after.queue_y >= 0).all() and (before.queue_y[16:] == -1).all()


MARGINS = ["--m1 0.3 --m2 0.1 --scale 2 --curvature 1.5 --attenuation 0.5 --attenuation-type 2 --tau 0.4",
           "--ratio-m1 0.8 --attenuation 0.3",
           "--ratio-m1 0.8 --attenuation 0.3 --optimizer lars --final-momentum 1"]


@pytest.mark.parametrize("flags", MARGINS)
@pytest.mark.parametrize("framework", ["moco", "simclr", "byol"])
def test_margin_infonce(monkeypatch, tmp_path, capfd, framework, flags):
    all_flags = [*flags.split(), "--framework", framework, "--queue", "24", "--momentum-encoder", "0.9"]
    script, args, (before, after), optimizer, (x1, x2), logged = step(
        monkeypatch, tmp_path, capfd, "margin_infonce", all_flags)
    tau = 0.4 if "--tau" in flags else {"moco": 0.2, "simclr": 0.5, "byol": 0.25}[framework]
    options = dict(m1=0.3, m2=0.1, scale=2.0, curvature=1.5, attenuation=0.5, attenuation_type=2)
    options = options if "--m1" in flags else dict(ratio_m1=0.8, attenuation=0.3)
    if framework == "simclr":
        u = F.normalize(torch.cat([embed(before, x1), embed(before, x2)]), dim=1)
        rows = [[j for j in range(32) if j != i] for i in range(32)]
        cos = torch.stack([(u @ u.T)[i, row] for i, row in enumerate(rows)])
        pos = torch.tensor([row.index((i + 16) % 32) for i, row in enumerate(rows)])
    else:
        with torch.no_grad():
            t1, t2 = (F.normalize(before.target(x), dim=1) for x in (x1, x2))
        z1 = F.normalize(before.predictor(embed(before, x1)), dim=1)
        if framework == "moco":
            cos = torch.cat([(z1 * t2).sum(1)[:, None], z1 @ before.queue.T], dim=1)
        else:
            z2 = F.normalize(before.predictor(embed(before, x2)), dim=1)
            cos = torch.cat([(z1 * t2).sum(1), (z2 * t1).sum(1)])[:, None]
        pos = torch.zeros(len(cos), dtype=torch.long)
    positive = cos.detach().gather(1, pos[:, None]).mean().item()
    loss = script.margin_infonce_loss(cos, pos, tau=tau, beta=float(framework != "byol"), **options)
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert logged["positive_cos"] == pytest.approx(positive, rel=1e-4)
    momentum = 1 - 0.1 * (math.cos(math.pi / 8) + 1) / 2 if "--final-momentum" in flags else 0.9  # BYOL's
    check_weights(before, after, optimizer, loss, momentum=None if framework == "simclr" else momentum)
    if framework == "moco":
        check_queue(before, after, t2)


@pytest.mark.parametrize("momentum", ["0", "1"])
@pytest.mark.parametrize("framework", ["moco", "byol"])
def test_momentum_one_keeps_the_target_and_zero_makes_it_the_online_network(
    monkeypatch, tmp_path, capfd, framework, momentum):
    flags = ["--framework", framework, "--queue", "24", "--momentum-encoder", momentum]
    _, _, (before, after), *_ = step(monkeypatch, tmp_path, capfd, "margin_infonce", flags)
    online = nn.Sequential(after.backbone, after.projector)
    old = nn.Sequential(before.backbone, before.projector)
    assert not all(map(torch.equal, online.parameters(), old.parameters()))
    expected = before.target if momentum == "1" else online
    for found, wanted in zip(after.target.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted)


PURE = {  # the function and what comes after the views
    "simtrace --eps 0.01": ("simtrace_loss", 0.01),
    "simtrace --eps 0.01 --detach-cov": ("simtrace_loss", 0.01, True),
    "simaffinity --tau 0.3 --gamma 0.2": ("simaffinity_loss", 0.3, 0.2),
    "simwhitening --tau 0.3 --gamma 0.2 --eps 0.01": ("simwhitening_loss", 0.3, 0.2, 0.01),
    "vicreg_variants --sim-weight 2 --var-weight 3 --cov-weight 4": ("vicreg_loss", 2, 3, 4),
    "vicreg_variants --method vicreg-exp --cov-weight 4 --tau 0.3": ("vicreg_exp_loss", 25, 25, 4, 0.3),
    "vicreg_variants --method vicreg-ctr --var-weight 3 --tau 0.3": ("vicreg_ctr_loss", 25, 3, 25, 0.3),
    "vicreg_variants --method simclr-sq --tau 0.3": ("simclr_loss", 0.3, "sq"),
    "vicreg_variants --method dcl-abs --normalize center": ("simclr_loss", 0.15, "abs", True, "center"),
    "vicreg_variants --method spectral --radius 3": ("spectral_loss", 3),
    "vicreg_variants --method barlow --lambd 0.2": ("barlow_loss", 0.2),
    "vicreg_variants --method tcr --sim-weight 7": ("tcr_loss", 0.5, 7),
}


@pytest.mark.parametrize("flags", PURE)
def test_two_views_and_a_loss(monkeypatch, tmp_path, capfd, flags):
    name, *rest = flags.split()
    script, _, (before, after), optimizer, (x1, x2), logged = step(monkeypatch, tmp_path, capfd, name, rest)
    function, *options = PURE[flags]
    loss = value(getattr(script, function)(embed(before, x1), embed(before, x2), *options))
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    check_weights(before, after, optimizer, loss)


BRANCHES = ["--momentum-encoder 0.9 --predictor", "--momentum-encoder 0.9 --symmetric", "--symmetric",
            "--predictor --symmetric", "--momentum-encoder 0.9 --predictor --symmetric"]


@pytest.mark.parametrize("name", ["simaffinity", "simwhitening", "simtrace"])
@pytest.mark.parametrize("flags", BRANCHES)
def test_branches(monkeypatch, tmp_path, capfd, name, flags):
    """Predictor and EMA copy, one direction or both: every branch computed by itself."""
    options = "" if name == "simtrace" else " --tau 0.3 --gamma 0.2"
    script, _, (before, after), optimizer, (x1, x2), logged = step(
        monkeypatch, tmp_path, capfd, name, (flags + options).split())

    def target(x):
        if "--momentum-encoder" not in flags:
            return embed(before, x)
        with torch.no_grad():
            return before.target(x)

    pairs = [(before.predictor(embed(before, x1)), target(x2))]
    if "--symmetric" in flags:
        pairs.append((before.predictor(embed(before, x2)), target(x1)))
    if name == "simtrace":
        loss = sum(script.simtrace_loss(*pair) for pair in pairs) / len(pairs)
    else:
        results = [getattr(script, f"{name}_loss")(*pair, 0.3, 0.2) for pair in pairs]
        loss = sum(loss for loss, _ in results) / len(pairs)
        for term in ("ce", "sym"):
            expected = sum(terms[term].item() for _, terms in results) / len(pairs)
            assert logged[term] == pytest.approx(expected, rel=1e-4)
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-4)
    check_weights(before, after, optimizer, loss, momentum=0.9 if "--momentum-encoder" in flags else None)
