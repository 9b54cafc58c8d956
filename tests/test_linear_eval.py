"""Guards the evaluation protocols: closed forms, plain loops, what is accepted and refused, two processes,
what the network is shown, going on after a kill."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import ImageColor

import common
import linear_eval
from helpers import (ALONE, TINY, assert_error_line, evaluate, noise, random_backbone, refused, run, run_here,
                     saved)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """202 training and 67 test images, 16x16, of two classes that even a random network can tell: red,
    blue."""
    root = tmp_path_factory.mktemp("images")
    for i in range(269):
        path = root / ("train" if i < 202 else "test") / ("blue" if i % 2 else "red") / f"{i:03}.png"
        noise(path, seed=i, shade=(0.2, 0.6, 1.0) if i % 2 else (1.0, 0.6, 0.2))
    return root


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """84 training and 35 test images of seven shades that overlap, so that top-1, top-5 and 1 all differ."""
    root, generator = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    for i in range(119):
        path = root / ("train" if i < 84 else "test") / "abcdefg"[i % 7] / f"{i:03}.png"
        noise(path, seed=i, shade=0.3 + 0.05 * (i % 7) + 0.1 * generator.normal(size=3))
    return root


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A run folder with the backbone.pt of a random network, of odd mean and std."""
    torch.manual_seed(0)
    about = dict(mean=[0.1] * 3, std=[0.9] * 3, image_size=16, dataset="folder")
    return random_backbone(tmp_path_factory.mktemp("run"), 16, **about)


def test_rankme_closed_forms():
    assert linear_eval.rankme(torch.eye(7)) == pytest.approx(7)
    assert linear_eval.rankme(torch.ones(9, 4)) == pytest.approx(1)
    p = np.array([3, 1]) / 4  # singular values 3 and 1
    expected = np.exp(-(p * np.log(p)).sum())
    assert linear_eval.rankme(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(expected)


def test_cka_against_the_kernel_form():
    """HSIC of the centred Gram matrices (Kornblith et al., Eq. 3 and 4); linear_cka never makes them."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(30, 5)), generator.normal(size=(30, 8))
    H = np.eye(30) - 1 / 30

    def hsic(k, l):
        return np.trace(k @ H @ l @ H)

    k, l = x @ x.T, y @ y.T
    expected = hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))
    x, y = torch.tensor(x), torch.tensor(y)
    assert linear_eval.linear_cka(x, y) == pytest.approx(expected)
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    assert linear_eval.linear_cka(x @ rotation * 3 + 1, x) == pytest.approx(1)


@pytest.mark.parametrize("protocol", ["knn", "frozen-features", "linear"])
def test_accuracy(capsys, folder, backbone, protocol):
    flags = ["--protocol", protocol, "--epochs", "5", "--batch-size", "50", "--k", "5"]
    result = evaluate(capsys, backbone, "--data-dir", folder, *flags)
    assert result["protocol"] == protocol and result["n_test"] == 67 and result["n_train"] == 202
    assert result["accuracy"] > 0.9
    assert (result["accuracy"] * 67) == pytest.approx(round(result["accuracy"] * 67))


def test_rankme_and_cka_protocols(capsys, folder, backbone):
    assert 1 <= evaluate(capsys, backbone, "--data-dir", folder, "--protocol", "rankme")["rankme"] <= 128
    same = evaluate(capsys, backbone, "--data-dir", folder, "--protocol", "cka", "--other",
                    backbone / "backbone.pt")
    assert same["cka"] == pytest.approx(1)


def same(a, b):
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


def test_the_backbone_is_not_changed(capsys, folder, backbone, monkeypatch):
    args = [backbone, "--data-dir", folder, "--protocol", "linear", "--epochs", "1", "--batch-size", "50"]
    seen, load_backbone = [], linear_eval.load_backbone
    keep = lambda path: seen.append(load_backbone(path)) or seen[-1]  # noqa: E731
    monkeypatch.setattr(linear_eval, "load_backbone", keep)
    evaluate(capsys, *args)
    network, _ = load_backbone(backbone)
    assert same(seen[-1][0], network)
    network.bn1.running_mean += 1
    assert not same(seen[-1][0], network)

    def spoil(module, x):  # a bug that trains the backbone's statistics
        module.running_mean += 1e-3

    def spoilt(*args):
        network, about = load_backbone(*args)
        network.bn1.register_forward_pre_hook(spoil)
        return network, about

    monkeypatch.setattr(linear_eval, "load_backbone", spoilt)
    refused(capsys, evaluate, capsys, *args, words=["the backbone changed"])


def test_the_network_sees_the_pixels_of_its_pretraining(capsys, folder, backbone, monkeypatch):
    shown = []

    def resnet(*args):
        network = common_resnet(*args)
        network.register_forward_pre_hook(lambda module, args: shown.append(args[0]))
        return network

    common_resnet = common.resnet
    monkeypatch.setattr(common, "resnet", resnet)
    evaluate(capsys, backbone, "--data-dir", folder, "--protocol", "knn")
    first = sorted((folder / "train" / "blue").iterdir())[0]
    pixels = torch.tensor(np.asarray(torchvision.datasets.folder.pil_loader(first)) / 255).permute(2, 0, 1)
    torch.testing.assert_close(shown[0][0].double(), (pixels - 0.1) / 0.9, atol=1e-6, rtol=0)


def test_two_processes_count_every_test_image_once(capsys, folder, backbone, tmp_path):
    """67 test images: two ranks cannot share them evenly."""
    for protocol in ("knn", "frozen-features"):
        args = [backbone, "--data-dir", folder, "--protocol", protocol, "--epochs", "3", "--k", "3,9"]
        two = run("linear_eval.py", *args, "--device", "cpu", "--out", tmp_path / protocol, world=2)
        alone = evaluate(capsys, *args)
        assert json.loads(two[0][1].splitlines()[-1]) == alone and two[1][1] == ""
    assert [json.loads(line) for line in (tmp_path / protocol / "eval.jsonl").open()] == [alone]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Arguments and folder of a run of simtrace.py, stopped after a step of its six."""
    out = tmp_path_factory.mktemp("trained")
    args = [*TINY, "--data-dir", folder, "--epochs", "1", "--batch-size", "32"]
    run("simtrace.py", *args, "--max-steps", "1", "--out", out)
    return args, out


def test_checkpoint_and_run_folder_hold_the_same_backbone(trained):
    _, out = trained
    a, about = linear_eval.load_backbone(out)
    b, _ = linear_eval.load_backbone(out / "checkpoint.pt")
    assert about["image_size"] == 32 and about["mean"] == pytest.approx(list(common.STATS["imagenet"][0]))
    assert same(a, b) and linear_eval.method(out / "checkpoint.pt") == "simtrace"


def test_images_are_where_the_run_found_them(capsys, trained, folder):
    """Unless --data-dir, or another data set, says otherwise."""
    args = [str(trained[1]), "--protocol", "knn", "--device", "cpu"]
    linear_eval.main(linear_eval.parse_args(args))
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    linear_eval.main(linear_eval.parse_args([*args, "--data-dir", str(folder)]))
    assert said == json.loads(capsys.readouterr().out.splitlines()[-1]) and said["n_test"] > 0
    with pytest.raises(SystemExit):
        linear_eval.main(linear_eval.parse_args([*args, "--dataset", "imagenet"]))
    assert "no images in data" in capsys.readouterr().err


@pytest.mark.parametrize("change, words", [
    (lambda s: s.update(state_dict={f"net.{k}": v for k, v in s["state_dict"].items()}), ["net.conv1.weight,"]),
    (lambda s: s["state_dict"].pop("bn1.weight"), ["Missing", '"bn1.weight"']),
    (lambda s: s["state_dict"].update({"fc.weight": torch.zeros(2, 128)}), ["Unexpected", '"fc.weight"']),
    (lambda s: s["state_dict"].update({"stem.weight": s["state_dict"].pop("layer1.0.bn1.bias")}),
     ["Missing", '"layer1.0.bn1.bias"', "Unexpected", '"stem.weight"']),
    (lambda s: s.update(width=8), ["conv1.weight", "[16, 3, 3, 3]", "[8, 3, 3, 3]"]),
    (lambda s: s.pop("arch"), ["conv1.weight"]),
    (lambda s: s.update(state_dict=3), ["arch"]),
    (lambda s: [s.clear(), s.update({"layer.weight": torch.zeros(1)})], ["layer.weight"])])
def test_foreign_weights_are_refused(capsys, backbone, tmp_path, change, words):
    state = saved(backbone / "backbone.pt")
    change(state)
    torch.save(state, tmp_path / "backbone.pt")
    refused(capsys, linear_eval.load_backbone, tmp_path, words=["backbone.pt", *words])


@pytest.mark.parametrize("args, status, words", [
    (["/no/such/run"], 1, ["/no/such/run"]),
    (["RUN", "--protocol", "cka"], 2, ["--other"]),
    (["RUN", "--protocol", "best-epoch"], 2, ["--protocol"]),
    (["RUN", "--k", "0"], 2, ["--k"]),
    (["RUN", "--k", "20,x"], 2, ["--k", "whole number", "20,x"]),
    (["RUN", "--tau", "0.1,nan", "--protocol", "knn"], 2, ["--tau"]),
    (["RUN", "--weight-decay", "-1"], 2, ["--weight-decay"]),
    (["RUN", "RUN", "--save", "c.pt"], 2, ["2 runs", "--save"]),
    (["RUN"] * 11 + ["--protocol", "curves", "--out", "o"], 2, ["11 runs", "curves ten"]),
    (["RUN", "--protocol", "knn", "--save", "c.pt"], 2, ["--save"]),
    (["RUN", "--protocol", "features"], 2, ["--out"]),
    (["RUN", "RUN", "--protocol", "features", "--out", "o"], 2, ["2 runs", "features"]),
    (["RUN", "--protocol", "curves"], 2, ["--out"]),
    (["RUN", "--protocol", "curves", "--out", "FLAT"], 1, ["RUN", "log.jsonl"]),
    (["RUN", "/no/such/run", "RUN", "--protocol", "knn"], 1, ["/no/such/run"]),
    (["RUN", "--protocol", "frozen-features", "--base-lr", "1e30", "--weight-decay", "1e20"], 1,
     ["RUN", "--base-lr"]),
    (["RUN", "--data-dir", "FLAT"], 1, ["FLAT"]),
    (["RUN", "--data-dir", "/no/such/folder"], 1, ["/no/such/folder"])])
def test_errors(capsys, folder, backbone, tmp_path, args, status, words):
    for split in ("train", "test"):  # a flat, unlabelled folder
        (tmp_path / "flat" / split).mkdir(parents=True)
        for i, file in enumerate(sorted((folder / split / "red").iterdir())[:3]):
            (tmp_path / "flat" / split / f"{i}.png").write_bytes(file.read_bytes())
    places = {"RUN": str(backbone), "FLAT": str(tmp_path / "flat")}
    args = [places.get(a, a) for a in args] + ([] if "--data-dir" in args else ["--data-dir", str(folder)])
    refused(capsys, lambda: linear_eval.main(linear_eval.parse_args(args)), status=status,
            words=[places.get(word, word) for word in words])


@pytest.mark.parametrize("flag", "k tau epochs batch-size base-lr weight-decay seed workers".split())
def test_absurd_numbers(capsys, flag):
    for text in ("1e400", "nan", "-1", "x", "", "9" * 5000):
        error = refused(capsys, linear_eval.parse_args, ["RUN", f"--{flag}={text}"], status=2)
        assert error.startswith(f"error: argument --{flag}")


def frozen_features(backbone, data_dir):
    """Features and labels of both splits, by common alone."""
    network, about = linear_eval.load_backbone(backbone)
    result = []
    for train in (True, False):
        data = common.load_images("folder", data_dir, train, ALONE, 16)
        data = replace(data, **{key: about[key] for key in ("mean", "std", "image_size")})
        result += [common.features(network, data, ALONE), data.labels]
    return result


def plain_loop(x, y, classes, epochs, batch, lr, schedule, optimizer, decay):
    """The classifier, its batches in linear_eval's order and all else written out."""
    torch.manual_seed(0)
    w, b = torch.empty(classes, x.shape[1]), torch.zeros(classes)
    torch.nn.Linear(x.shape[1], classes)  # draws its own, which are not used
    w.normal_(std=0.01)
    w.requires_grad_(), b.requires_grad_()
    momenta, steps = [torch.zeros_like(w), torch.zeros_like(b)], len(x) // batch
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(common.seed_for(0, epoch)))
        for i in range(steps):
            rows, t = order[i * batch:(i + 1) * batch], epoch * steps + i
            rate = lr * (1 + math.cos(math.pi * t / (epochs * steps))) / 2
            if schedule == "step":
                rate = lr if epoch < 0.6 * epochs else lr / 10 if epoch < 0.8 * epochs else lr / 100
            loss = -F.log_softmax(x[rows] @ w.T + b, dim=1)[range(batch), y[rows]].mean()
            for p, g, m in zip((w, b), torch.autograd.grad(loss, (w, b)), momenta):
                with torch.no_grad():
                    g = g + decay * p if optimizer == "sgd" or p.ndim > 1 else g
                    if optimizer == "lars" and p.ndim > 1:
                        g = g * 0.001 * p.norm() / g.norm()
                    m.mul_(0.9).add_(g)
                    p.sub_(rate * m)
    return w.detach(), b.detach()


@pytest.mark.parametrize("flags, settings", [
    (["--base-lr", "3"], (3, "cosine", "sgd", 0)),
    (["--base-lr", "3", "--schedule", "step", "--weight-decay", "0.01"], (3, "step", "sgd", 0.01)),
    (["--optimizer", "lars", "--base-lr", "20", "--weight-decay", "0.1"], (20, "cosine", "lars", 0.1)),
    (["--base-lr", "0.5", "OTHER"], (0.5, "cosine", "sgd", 0))])
def test_classifier_is_the_plain_loop_and_top5(capsys, many, backbone, tmp_path, flags, settings):
    default = linear_eval.parse_args(["x"]).normalize
    other = "--no-normalize" if default else "--normalize"
    normalize = default != ("OTHER" in flags)
    flags = [other if flag == "OTHER" else flag for flag in flags]
    result = evaluate(capsys, backbone, "--data-dir", many, "--protocol", "frozen-features", "--epochs", "5",
                      "--batch-size", "20", *flags, "--save", tmp_path / "c.pt")
    train_x, train_y, test_x, test_y = frozen_features(backbone, many)
    state = saved(tmp_path / "c.pt")
    scale = sum(row.norm().item() for row in train_x) / len(train_x) if normalize else 1
    assert state["scale"] == pytest.approx(scale, rel=1e-5) and result["normalize"] == normalize
    lr, *rest = settings
    w, b = plain_loop(train_x / state["scale"], train_y, 7, 5, 20, lr * 20 / 256, *rest)
    assert (w - 0.01 * torch.randn_like(w)).abs().max() > 1e-3 and b.abs().max() > 1e-3  # it was trained
    torch.testing.assert_close(state["weight"], w, atol=1e-6, rtol=0)
    torch.testing.assert_close(state["bias"], b, atol=1e-6, rtol=0)

    top1 = top5 = 0
    for h, y in zip(test_x, test_y):
        logits = [(h / scale) @ row + bias for row, bias in zip(w, b)]
        better = sum(v > logits[y] for v in logits)
        top1, top5 = top1 + (better < 1), top5 + (better < 5)
    assert result["accuracy"] == top1 / 35 < result["top5"] == top5 / 35 < 1
    assert state["classes"] == list("abcdefg") and state["arch"] == "resnet18" and state["mean"] == [0.1] * 3
    assert (state["width"], state["small_images"], state["image_size"]) == (16, True, 16)


def test_top5_only_with_more_than_five_classes(capsys, folder, backbone):
    args = [backbone, "--data-dir", folder, "--protocol", "frozen-features", "--epochs", "1"]
    assert "top5" not in evaluate(capsys, *args)


def test_knn_lists_are_the_single_calls(capsys, many, backbone):
    x = frozen_features(backbone, many)
    args = [backbone, "--data-dir", many, "--protocol", "knn"]
    result = evaluate(capsys, *args, "--k", "3,300,20", "--tau", "0.1,1")
    tried = [(row["k"], row["tau"], row["accuracy"]) for row in result["tried"]]
    pairs = [(k, tau) for k in (3, 300, 20) for tau in (0.1, 1.0)]
    assert tried == [(k, tau, common.knn_accuracy(*x, k=k, tau=tau)) for k, tau in pairs]
    assert (result["k"], result["tau"], result["accuracy"]) == tried[0]
    assert result["best_on_test"]["accuracy"] == max(accuracy for _, _, accuracy in tried)
    alone = evaluate(capsys, *args, "--k", "3")
    assert alone["accuracy"] == tried[0][2] and "tried" not in alone and "best_on_test" not in alone


def test_table_of_several_runs(capsys, folder, backbone, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "backbone.pt").write_bytes((backbone / "backbone.pt").read_bytes())
    said = {"settings": {"framework": "byol"}, "script": "s"}
    (tmp_path / "other" / "args.json").write_text(json.dumps(said))
    runs = [str(backbone), str(tmp_path / "other")]
    args = [*runs, "--data-dir", str(folder), "--protocol", "knn", "--k", "5,7"]
    args += ["--out", str(tmp_path / "out")]
    for _ in range(2):  # the second time a result is told again, but not written again
        linear_eval.main(linear_eval.parse_args([*args, "--device", "cpu", "--workers", "0"]))
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["run"] for line in lines[-2:]] == runs and len(lines) == 1 + 4 + 2
        assert json.loads(lines[-1])["method"] == "byol" and json.loads(lines[-2])["method"] == "-"
        columns = [lines[0].index(title) for title in ("run", "method", "dataset", "protocol", "top-1")]
        for line, k in zip(lines[1:5], (5, 7, 5, 7)):
            cells = [line[a:b].strip() for a, b in zip(columns, [*columns[1:], None])]
            assert cells[0] in runs and cells[3].startswith(f"knn, k {k}, tau 0.1") and float(cells[4]) > 0.9
        assert sum("(best on test)" in line for line in lines) == 2
    assert (tmp_path / "out" / "eval.jsonl").read_text().splitlines() == lines[-2:]


def test_what_is_done_is_told_when_a_later_run_fails(capsys, folder, backbone, tmp_path):
    state = saved(backbone / "backbone.pt")
    state["state_dict"]["conv1.weight"][0] = torch.nan
    torch.save(state, tmp_path / "spoilt.pt")
    with pytest.raises(SystemExit):
        evaluate(capsys, backbone, tmp_path / "spoilt.pt", "--data-dir", folder, "--protocol", "rankme")
    out, error = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["run"] == str(backbone)
    assert_error_line(error, "spoilt.pt")


class Killed(BaseException):
    """No error that a program could take for its own."""


@pytest.mark.parametrize("protocol", ["linear", "frozen-features"])
def test_goes_on_after_a_kill(capsys, many, backbone, tmp_path, monkeypatch, protocol):
    args = [backbone, "--data-dir", many, "--protocol", protocol, "--epochs", "4", "--batch-size", "20",
            "--base-lr", "3", "--save", tmp_path / "c.pt", "--out"]
    whole = evaluate(capsys, *args, tmp_path / "whole")
    expected = saved(tmp_path / "c.pt")

    epochs, original = [], common.batches

    def batches(data, epoch, *rest):
        epochs.append(epoch)
        return original(data, epoch, *rest)

    def save(path, state):
        common_save(path, state)
        if state.get("epoch") == 2:
            raise Killed

    common_save = common.save_checkpoint
    monkeypatch.setattr(common, "batches", batches)
    monkeypatch.setattr(common, "save_checkpoint", save)
    with pytest.raises(Killed):
        evaluate(capsys, *args, tmp_path / "out")
    monkeypatch.setattr(common, "save_checkpoint", common_save)
    assert epochs == [0, 1] and not (tmp_path / "out" / "eval.jsonl").exists()
    for _ in range(2):  # the second time there is nothing left to train
        assert evaluate(capsys, *args, tmp_path / "out") == whole
        assert epochs == [0, 1, 2, 3]
        found = saved(tmp_path / "c.pt")
        assert all(torch.equal(found[name], expected[name]) for name in ("weight", "bias"))
        assert (tmp_path / "out" / "eval.jsonl").read_text() == json.dumps(whole) + "\n"

    def starts_anew(*more):
        epochs.clear()
        evaluate(capsys, *args, tmp_path / "out", *more)
        return epochs == [0, 1, 2, 3]

    assert starts_anew("--base-lr", "4") and starts_anew("--seed", "1")
    state = saved(backbone / "backbone.pt")
    state["state_dict"]["bn1.bias"] += 0.1
    torch.save(state, tmp_path / "backbone.pt")
    args[0] = tmp_path
    assert starts_anew() and len(list((tmp_path / "out").glob(f"{protocol}-*.pt"))) == 4


def test_damaged_state_is_refused(capsys, folder, backbone, tmp_path):
    args = [backbone, "--data-dir", folder, "--protocol", "frozen-features", "--epochs", "1"]
    args += ["--out", tmp_path]
    evaluate(capsys, *args)
    file, = tmp_path.glob("*.pt")
    file.write_bytes(file.read_bytes()[:500])
    refused(capsys, evaluate, capsys, *args, words=[file.name])


def test_features_protocol(capsys, many, backbone, tmp_path):
    args = [backbone, "--protocol", "features", "--out", tmp_path / "out", "--data-dir"]
    result = evaluate(capsys, *args, many)
    assert result["classes"] == list("abcdefg") and (result["n_train"], result["n_test"]) == (84, 35)
    names = ("train_features", "train_labels", "test_features", "test_labels")
    for name, expected in zip(names, frozen_features(backbone, many), strict=True):
        assert np.array_equal(np.load(tmp_path / "out" / f"{name}.npy"), expected.numpy())

    (tmp_path / "flat").mkdir()
    for file in sorted((many / "train" / "a").iterdir())[:4]:
        (tmp_path / "flat" / file.name).write_bytes(file.read_bytes())
    args[-2] = tmp_path / "flat out"
    result = evaluate(capsys, *args, tmp_path / "flat")
    assert result["classes"] == [] and (result["n_train"], result["n_test"]) == (4, 0)
    assert [file.name for file in (tmp_path / "flat out").glob("*.npy")] == ["train_features.npy"]
    assert np.load(tmp_path / "flat out" / "train_features.npy").shape == (4, 128)


def test_curves(capsys, tmp_path, monkeypatch):
    """Two runs, of five epochs from 20 to 60 % and of one at 50 %; these are the axes' ends."""
    for name, values in (("long", [0.2, 0.3, 0.4, 0.5, 0.6]), ("short", [0.5])):
        rows = [{"epoch": i + 1, "knn_accuracy": v, "probe_test_accuracy": v} for i, v in enumerate(values)]
        (tmp_path / name).mkdir()
        lines = [json.dumps({"epoch": 0, "loss": 1.0}), *map(json.dumps, rows)]
        (tmp_path / name / "log.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    args = ["long", "short", "--protocol", "curves", "--out", "out", "--device", "cpu"]
    linear_eval.main(linear_eval.parse_args(args))
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["knn_accuracy"] for line in lines[-2:]] == [0.6, 0.5] and len(lines) == 5
    assert (tmp_path / "out" / "eval.jsonl").read_text().splitlines() == lines[-2:]
    picture = torch.from_numpy(np.asarray(torchvision.datasets.folder.pil_loader("out/curves.png")).copy())
    assert picture.shape == (512, 640, 3)

    def rows_of(i, columns, top):  # of the i-th line in a plot
        colour = torch.tensor(ImageColor.getrgb(common.COLOURS[i]))
        near = (picture[top:top + 256, columns].int() - colour).abs().amax(2) < 64  # letters are anti-aliased
        return near.nonzero()[:, 0].double()

    def height(i, column, top):
        return rows_of(i, slice(column, column + 1), top).mean().item()

    for top in (0, 256):
        for epoch, value in ((2, 30), (3, 40), (4, 50), (5, 60)):
            wanted = 226 - 196 * (value - 20) / 40
            assert height(0, 60 + 330 * (epoch - 1) // 4, top) == pytest.approx(wanted, abs=2)
        assert height(1, 60, top) == pytest.approx(226 - 196 * 30 / 40, abs=2)
        assert math.isnan(height(1, 100, top)) and math.isnan(height(0, 395, top))
        for i in (0, 1):  # the names
            rows = rows_of(i, slice(402, 640), top)
            assert len(rows) > 10 and 24 + 14 * i <= rows.min() and rows.max() < 38 + 14 * i


@pytest.mark.parametrize("change, words", [
    (lambda s: [s.clear(), s.update(epoch=3, net=torch.zeros(1))], ["Missing", "backbone.conv1.weight"]),
    (lambda s: s["model"].update({"fc.bias": s["model"].pop("backbone.bn1.bias")}),
     ["Missing", "backbone.bn1.bias", "Unexpected", "fc.bias"]),
    (lambda s: s["probe"].update({"1.weight": torch.zeros(5, 32)}), ["1.weight", "[5, 32]", "[2, 32]"])])
def test_a_foreign_checkpoint_in_a_run_folder_is_refused_by_its_keys(capfd, trained, tmp_path, change, words):
    args, out = trained
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    state = saved(tmp_path / "checkpoint.pt")
    change(state)
    torch.save(state, tmp_path / "checkpoint.pt")
    code, _, error = run_here(capfd, "simtrace.py", *args, "--out", tmp_path)
    assert code == 1
    assert_error_line(error, *words)
