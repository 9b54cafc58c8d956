"""Evaluation protocols: closed forms, what is accepted and refused, two processes, what the network is
shown."""

import json

import numpy as np
import pytest
import torch
import torchvision

import common
import linear_eval
from test_run import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """202 training and 67 test images, 16x16, of two classes that even a random network can tell: red,
    blue."""
    root, generator = tmp_path_factory.mktemp("images"), torch.Generator().manual_seed(0)
    for i in range(269):
        path = root / ("train" if i < 202 else "test") / ("blue" if i % 2 else "red") / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = torch.tensor([0.2, 0.6, 1.0] if i % 2 else [1.0, 0.6, 0.2]).view(3, 1, 1)
        torchvision.utils.save_image(torch.rand(3, 16, 16, generator=generator) * colour, path)
    return root


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A run folder with the backbone.pt of a random network, of odd mean and std."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "backbone.pt"
    common.save_checkpoint(
        path,
        dict(
            state_dict=common.resnet("resnet18", 16, True).state_dict(),
            arch="resnet18",
            width=16,
            small_images=True,
            mean=[0.1] * 3,
            std=[0.9] * 3,
            image_size=16,
            dataset="folder",
        ),
    )
    return path.parent


def evaluate(capsys, *args):
    linear_eval.main(linear_eval.parse_args([str(a) for a in (*args, "--device", "cpu", "--workers", "0")]))
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_rankme_closed_forms():
    assert linear_eval.rankme(torch.eye(7)) == pytest.approx(7)
    assert linear_eval.rankme(torch.ones(9, 4)) == pytest.approx(1)
    p = np.array([3, 1]) / 4  # singular values 3 and 1
    assert linear_eval.rankme(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(
        np.exp(-(p * np.log(p)).sum())
    )


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
    result = evaluate(
        capsys,
        backbone,
        "--data-dir",
        folder,
        "--protocol",
        protocol,
        "--epochs",
        "5",
        "--batch-size",
        "50",
        "--k",
        "5",
    )
    assert result["protocol"] == protocol and result["n_test"] == 67 and result["n_train"] == 202
    assert result["accuracy"] > 0.9
    assert (result["accuracy"] * 67) == pytest.approx(round(result["accuracy"] * 67))


def test_rankme_and_cka_protocols(capsys, folder, backbone):
    assert 1 <= evaluate(capsys, backbone, "--data-dir", folder, "--protocol", "rankme")["rankme"] <= 128
    same = evaluate(
        capsys, backbone, "--data-dir", folder, "--protocol", "cka", "--other", backbone / "backbone.pt"
    )
    assert same["cka"] == pytest.approx(1)


def test_the_backbone_is_not_changed(capsys, folder, backbone, monkeypatch):
    seen = []
    original = linear_eval.fingerprint
    monkeypatch.setattr(linear_eval, "fingerprint", lambda module: seen.append(original(module)) or seen[-1])
    evaluate(
        capsys, backbone, "--data-dir", folder, "--protocol", "linear", "--epochs", "1", "--batch-size", "50"
    )
    network, _ = linear_eval.load_backbone(backbone)
    assert seen == [original(network)] * 2
    network.bn1.running_mean += 1
    assert original(network) != seen[0]


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


def test_two_processes_count_every_test_image_once(capsys, folder, backbone):
    """67 test images: two ranks cannot share them evenly."""
    for protocol in ("knn", "frozen-features"):
        args = [backbone, "--data-dir", folder, "--protocol", protocol, "--device", "cpu", "--epochs", "3"]
        alone = evaluate(capsys, *args)
        two = run("linear_eval.py", *args, world=2)
        assert json.loads(two[0][1].splitlines()[-1]) == alone and two[1][1] == ""


def test_checkpoint_and_run_folder_hold_the_same_backbone(tmp_path, folder):
    run(
        "simtrace.py",
        "--dataset",
        "folder",
        "--data-dir",
        folder,
        "--width",
        "4",
        "--projector",
        "16-8",
        "--epochs",
        "1",
        "--batch-size",
        "32",
        "--max-steps",
        "1",
        "--out",
        tmp_path,
    )
    a, about = linear_eval.load_backbone(tmp_path)
    b, _ = linear_eval.load_backbone(tmp_path / "checkpoint.pt")
    assert about["image_size"] == 32 and about["mean"] == pytest.approx(list(common.STATS["imagenet"][0]))
    assert linear_eval.fingerprint(a) == linear_eval.fingerprint(b)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda s: s.update(state_dict={"module.encoder_q." + k: v for k, v in s["state_dict"].items()}),
            ["module.encoder_q.conv1.weight"],
        ),
        (lambda s: s["state_dict"].pop("bn1.weight"), ["conv1.weight"]),
        (lambda s: s["state_dict"].update({"fc.weight": torch.zeros(2, 128)}), ["conv1.weight"]),
        (lambda s: s.update(width=8), ["conv1.weight"]),
        (lambda s: s.pop("arch"), ["conv1.weight"]),
        (lambda s: [s.clear(), s.update({"layer.weight": torch.zeros(1)})], ["layer.weight"]),
    ],
)
def test_foreign_weights_are_refused(capsys, backbone, tmp_path, change, words):
    state = torch.load(backbone / "backbone.pt")
    change(state)
    torch.save(state, tmp_path / "backbone.pt")
    with pytest.raises(SystemExit) as exit:
        linear_eval.load_backbone(tmp_path)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in words)


@pytest.mark.parametrize(
    "args, status, words",
    [
        (["/no/such/run"], 1, ["/no/such/run"]),
        (["RUN", "--protocol", "cka"], 2, ["--other"]),
        (["RUN", "--protocol", "best-epoch"], 2, ["--protocol"]),
        (["RUN", "--k", "0"], 2, ["--k"]),
        (["RUN", "--data-dir", "FLAT"], 1, ["FLAT"]),
        (["RUN", "--data-dir", "/no/such/folder"], 1, ["/no/such/folder"]),
    ],
)
def test_errors(capsys, folder, backbone, tmp_path, args, status, words):
    for split in ("train", "test"):  # a flat, unlabelled folder
        (tmp_path / "flat" / split).mkdir(parents=True)
        for i, file in enumerate(sorted((folder / split / "red").iterdir())[:3]):
            (tmp_path / "flat" / split / f"{i}.png").write_bytes(file.read_bytes())
    places = {"RUN": str(backbone), "FLAT": str(tmp_path / "flat")}
    args = [places.get(a, a) for a in args] + ([] if "--data-dir" in args else ["--data-dir", str(folder)])
    with pytest.raises(SystemExit) as exit:
        linear_eval.main(linear_eval.parse_args(args))
    error = capsys.readouterr().err
    assert exit.value.code == status and error.startswith("error: ") and error.count("\n") == 1
    assert all(places.get(word, word) in error for word in words), error
