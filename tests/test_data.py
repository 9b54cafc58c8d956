"""Guards how image folders are read, as people have them, and that a run stays with its images."""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, features
from torchvision.transforms import v2

import common
import helpers
import linear_eval
import margin_infonce
from helpers import SCRIPTS, assert_error_line, evaluate, log, noise, random_backbone, refused, run_here

TINY = [*helpers.TINY, *"--epochs 1 --batch-size 8 --base-lr 0.1 --warmup-epochs 0 --workers 0".split()]


def classes(folder, n=8, names=("ant", "bee"), size=(16, 16), seed=None):
    """n images in each of the class folders."""
    for name in names:
        for i in range(n):
            noise(folder / name / f"{name}{i}.png", size, seed)
    return folder


def load(folder, train=True, name="folder", **options):
    return common.load_images(name, folder, train, **options)


def centre(file, size):
    """An image file as the evaluation of large images sees it."""
    data = common.Images([str(file)], None, [], (0.5,) * 3, (0.25,) * 3, size)
    (view,), error = data[0, 0, ()]
    assert error == ""
    return view


def train(capfd, data, out, *flags, script="simtrace.py"):
    return run_here(capfd, script, *TINY, "--data-dir", data, "--out", out, *flags)


def knn(capfd, data, run, *flags):
    return evaluate(capfd, run, "--data-dir", data, "--protocol", "knn", *flags)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    about = dict(mean=[0.5] * 3, std=[0.2] * 3, image_size=16, dataset="folder")
    return random_backbone(tmp_path_factory.mktemp("run"), 4, **about)


# ---- links


@pytest.mark.parametrize("linked", ["one class", "classes", "sub-folder", "files", "splits", "all"])
def test_links_are_followed(tmp_path, linked):
    plain, folder = tmp_path / "plain", tmp_path / "linked"
    for split in ("train", "test"):
        classes(plain / split, 2)
        noise(plain / split / "ant" / "deeper" / "x.png")
    shutil.copytree(plain, folder)
    for path in {
        "one class": ["train/ant"],
        "classes": ["train/ant", "train/bee", "test/ant", "test/bee"],
        "sub-folder": ["train/ant/deeper", "test/ant/deeper"],
        "files": [str(p.relative_to(plain)) for p in plain.rglob("*.png")],
        "splits": ["train", "test"],
        "all": ["."],
    }[linked]:
        shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()
        os.symlink(plain / path, folder / path)
    for split in (True, False):
        a, b = load(plain, split), load(folder, split)
        assert torch.equal(a.images, b.images) and a.labels.tolist() == b.labels.tolist() == [0, 0, 0, 1, 1]
        assert a.classes == b.classes == ["ant", "bee"] and a.fingerprint == b.fingerprint


@pytest.mark.parametrize("loop", [
    {"ant/up": ".."}, {"ant/self": "."}, {"ant/bee": "../bee", "bee/ant": "../ant"}, {"ant/a": "a"},
    {"ant/x.png": "y.png", "ant/y.png": "x.png"}, {"loop": "."}])
def test_a_loop_of_links_ends(tmp_path, loop):
    classes(tmp_path, 2)
    for link, target in loop.items():
        os.symlink(target, tmp_path / link)
    data = load(tmp_path)
    assert data.classes == ["ant", "bee"]
    assert len(data.images) == (8 if "bee/ant" in loop else 4)  # each class as part of the other, too


def test_a_broken_link_is_counted(tmp_path):
    classes(tmp_path, 2)
    os.symlink("nowhere", tmp_path / "cat")
    os.symlink("nowhere", tmp_path / "ant" / "0.png")
    data = load(tmp_path)
    assert len(data.images) == 4 and data.classes == ["ant", "bee"]
    assert data.source == f"{tmp_path} (skipped 1 .png, 1 without suffix)"


# ---- splits


@pytest.mark.parametrize("first, second", [("Train", "Test"), ("TRAINING", "testing"), ("training", "Val"),
                                           ("train", "validation"), ("Train", "VALID")])
def test_splits_by_other_names(tmp_path, first, second):
    classes(tmp_path / first, 3)
    classes(tmp_path / second, 2, names=["bee"])
    train, test = load(tmp_path), load(tmp_path, False)
    assert len(train.images) == 6 and train.classes == ["ant", "bee"] == test.classes
    assert len(test.images) == 2 and test.labels.tolist() == [1, 1]  # that test lacks a class is no error


def test_val_watches_and_test_is_reported(tmp_path, capfd, backbone):
    for split, n in (("train", 8), ("Val", 3), ("testing", 5)):
        classes(tmp_path / split, n)
    assert len(load(tmp_path, False).images) == 6 and len(load(tmp_path, False, report=True).images) == 10
    assert knn(capfd, tmp_path, backbone)["n_test"] == 10
    _, out, _ = train(capfd, tmp_path, tmp_path / "run", "--max-steps", "1")
    assert out.splitlines()[0] == ("16 training images of 2 classes, 6 test images, 32 px, "
                                   f"from {tmp_path / 'train'} and {tmp_path / 'Val'}")


def test_only_an_evaluation_split(capsys, tmp_path):
    classes(tmp_path / "Validation", 2)
    assert "Validation" in refused(capsys, load, tmp_path)


# ---- labels


def test_what_has_no_labels_is_named(tmp_path, capfd, backbone):
    """Pretraining goes on without k-NN and says why, linear_eval refuses and says why."""
    def flat(folder):
        for path in list((folder / "test").rglob("*.png")):
            path.rename(folder / "test" / path.name)
        for name in ("ant", "bee"):
            (folder / "test" / name).rmdir()

    for i, (change, word) in enumerate([
        (lambda folder: noise(folder / "test" / "cat" / "1.png"), "test/cat/1.png"),
        (lambda folder: [noise(folder / "test" / name / "1.png") for name in "ced"], "test/c/1.png"),
        (lambda folder: noise(folder / "test" / "odd.png"), "test/odd.png"),
        (lambda folder: noise(folder / "train" / "odd.png"), "train/odd.png"),
        (flat, "test/ant0.png"),
    ]):
        folder = tmp_path / str(i)
        for split in ("train", "test"):
            classes(folder / split)
        change(folder)
        word = f"{folder / word} lies in no class folder of {folder / 'train'}"
        status, _, err = train(capfd, folder, tmp_path / f"run{i}", "--max-steps", "2")
        assert status == 0 and err.startswith("warning: ") and word in err and err.count("\n") == 1
        assert "knn_accuracy" not in log(tmp_path / f"run{i}")[-1]
        refused(capfd, knn, capfd, folder, backbone, words=[word])


def test_flat_imagenet_val(capsys, tmp_path, backbone):
    classes(tmp_path / "imagenet" / "train", 2, ["n01", "n02"], (70, 70))
    noise(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG", (70, 70))
    test = load(tmp_path, False, "imagenet")
    assert test.labels is None and len(test.images) == 1 and len(load(tmp_path, name="imagenet").labels) == 4
    assert "imagenet/val/ILSVRC2012_val_00000001.JPEG lies in no class folder of" in refused(
        capsys, knn, capsys, tmp_path, backbone, "--dataset", "imagenet")


def test_unlabelled_training_images_need_no_test_labels(tmp_path):
    noise(tmp_path / "train" / "1.png")
    classes(tmp_path / "test", 1)
    assert [data.labels is None and not data.unlabelled for data in (load(tmp_path), load(tmp_path, False))]


@pytest.mark.parametrize("kind", ["released", "sorted", "sorted deeper", "sorted, list kept", "flat"])
def test_tiny_imagenet(tmp_path, kind):
    folder = classes(tmp_path / "tiny-imagenet-200" / "train", 2, ["n1/images", "n2/images"]).parent
    rows, val = [], folder / "val"
    for i, name in enumerate(["n2", "n1", "n2"]):
        place = {"released": "images", "flat": ".", "sorted deeper": f"{name}/images"}.get(kind, name)
        noise(val / place / f"val_{i}.JPEG")
        rows.append(f"val_{i}.JPEG\t{name}\t0\t0\t62\t62\n")
    if "list" in kind or kind in ("released", "flat"):
        (val / "val_annotations.txt").write_text("".join(rows))
    noise(folder / "test" / "images" / "test_0.JPEG")
    for root in (tmp_path, folder):
        test = load(root, False, "tinyimagenet", report=True)
        names, kinds, _ = common.find_images(val)
        assert {Path(name).name: kind for name, kind in zip(names, kinds)} == {
            "val_0.JPEG": "n2", "val_1.JPEG": "n1", "val_2.JPEG": "n2"}
        assert sorted(test.labels.tolist()) == [0, 1, 1] and test.classes == ["n1", "n2"]
    only = tmp_path / "list.txt"
    only.write_text("n2\n")
    assert load(tmp_path, False, "tinyimagenet", classes=only).labels.tolist() == [0, 0]


def test_classes_from_a_file(tmp_path, capsys):
    for split in ("train", "val"):
        classes(tmp_path / "imagenet" / split, 2, ["n1", "n2", "n3", "n4"], (70, 70))
    only = tmp_path / "list.txt"
    only.write_text("n4\n\n n2 \r\n")
    for name in ("imagenet", "imagenet100"):
        for split in (True, False):
            data = load(tmp_path, split, name, classes=str(only))
            assert data.classes == ["n2", "n4"] and data.labels.tolist() == [0, 0, 1, 1]
            assert [Path(file).parent.name for file in data.images] == ["n2", "n2", "n4", "n4"]
    assert "--classes" in refused(capsys, load, tmp_path, name="imagenet100")
    assert load(tmp_path, name="imagenet").fingerprint != data.fingerprint
    only.write_text("n4\nn7\nn9\n")
    assert "train/n7" in refused(capsys, load, tmp_path, name="imagenet", classes=str(only))
    assert "/no/list" in refused(capsys, load, tmp_path, name="imagenet", classes="/no/list")
    assert "--classes" in refused(capsys, load, tmp_path, name="patterns", classes=str(only), status=2)


def test_classes_on_the_command_line(capfd, tmp_path):
    classes(tmp_path / "train", 8, ["a", "b", "c"])
    (tmp_path / "list").write_text("a\nc\n")
    flags = ["--classes", tmp_path / "list", "--max-steps", "1", "--queue", "8"]
    status, out, err = train(capfd, tmp_path, tmp_path / "run", *flags, script="margin_infonce.py")
    assert (status, err) == (0, "")
    assert out.startswith("16 training images of 2 classes, no test images, 32 px")


@pytest.mark.parametrize("limit", [2, 5, 15, 16, 99])
def test_a_part_of_a_sorted_folder_keeps_its_classes(tmp_path, limit):
    classes(tmp_path, 4, "abcd")
    data = load(tmp_path, limit=limit)
    assert len(data.images) == len(data.labels) == min(limit, 16) and data.classes == list("abcd")
    count = data.labels.bincount(minlength=4)
    assert count.max() - count.min() <= 1
    for image, label in zip(data.images, data.labels):  # they still belong together
        assert any(torch.equal(image, other) for other in load(tmp_path).images[4 * label:4 * label + 4])


# ---- sizes


@pytest.mark.parametrize("odd", [(1, 1), (200, 3), (3, 60), (900, 700)])
def test_one_odd_file_spoils_nothing(tmp_path, odd):
    classes(tmp_path / "train", 10, size=(40, 24))
    classes(tmp_path / "test", 3, size=(31, 33))
    before = load(tmp_path)
    noise(tmp_path / "train" / "ant" / "odd.png", odd)
    for data, n in ((load(tmp_path), 21), (load(tmp_path, False), 6)):
        assert data.images.shape == (n, 3, 24, 40) and data.image_size == 32
    kept = load(tmp_path).images
    with Image.open(tmp_path / "train" / "bee" / "bee0.png") as image:
        assert torch.equal(kept[11], v2.functional.pil_to_tensor(image))
    assert torch.equal(kept[:10], before.images[:10]) and torch.equal(kept[11:], before.images[10:])


def test_one_small_file_among_large_ones(tmp_path):
    classes(tmp_path, 4, size=(70, 80))
    noise(tmp_path / "ant" / "small.png", (5, 5))
    data = load(tmp_path)
    assert isinstance(data.images, list) and data.image_size == 224
    assert {centre(file, 32).shape for file in data.images} == {(3, 32, 32)}


def test_sizes_that_all_differ_get_the_typical_shorter_side(tmp_path):
    sides = [(20, 31), (28, 22), (24, 60), (50, 26), (30, 30)]
    for i, size in enumerate(sides):
        noise(tmp_path / f"{i}.png", size)
    images = load(tmp_path).images
    assert images.shape == (5, 3, 24, 24)  # of 20, 22, 24, 26, 30
    image = Image.open(tmp_path / "3.png").crop((12, 0, 38, 26)).resize((24, 24), Image.Resampling.BILINEAR)
    gap = (images[3].float() - v2.functional.pil_to_tensor(image).float()).abs()
    assert gap[:, 1:-1, 1:-1].max() == 0 and gap.max() < 9  # at the border it sees what lies beyond


@pytest.mark.parametrize("sizes", [((24, 24), (20, 20)), ((20, 30), (40, 12)), ((24, 24), (90, 80))])
def test_splits_of_other_sizes(capfd, tmp_path, sizes):
    """A run goes to its end, evaluation by pixels included."""
    for split, size in zip(("train", "test"), sizes):
        classes(tmp_path / split, size=size)
    status, out, err = train(capfd, tmp_path, tmp_path / "run")
    assert (status, err) == (0, "") and "knn_pixels" in log(tmp_path / "run")[-1]


@pytest.mark.parametrize("share, size", [(0.9, (40, 24)), (0.8, (24, 24))])
def test_the_size_of_nine_in_ten(tmp_path, share, size):
    """Or else a square of the median shorter side; of train's images, also where only some are trained on."""
    for i in range(20):
        noise(tmp_path / "train" / f"{i:02}.png", (40, 24) if i < 20 * share else (30 + i, 50))
    noise(tmp_path / "test" / "1.png", (50, 50))
    for data in (load(tmp_path), load(tmp_path, False), load(tmp_path, limit=2)):
        assert data.images.shape[:1:-1] == size


@pytest.mark.parametrize("size", [(20000, 2), (2, 9000), (1, 3000)])
def test_a_strip_in_the_test_split(capfd, tmp_path, size):
    """A run goes to its end, evaluation by pixels included."""
    for split in ("train", "test"):
        classes(tmp_path / split)
    noise(tmp_path / "test" / "bee" / "strip.png", size)
    assert load(tmp_path, False).images.shape == (17, 3, 16, 16)
    status, _, err = train(capfd, tmp_path, tmp_path / "run")
    assert (status, err) == (0, "") and "knn_pixels" in log(tmp_path / "run")[-1]


@pytest.mark.parametrize("size", [(20000, 2), (2, 9000), (1, 3000)])
def test_a_strip_costs_no_more_than_others(tmp_path, monkeypatch, size):
    made = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda image, size, *a, **k: made.append(size) or resize(image, size, *a, **k))
    classes(tmp_path / "small", 5)
    noise(tmp_path / "small" / "ant" / "strip.png", size)
    assert load(tmp_path / "small").images.shape == (11, 3, 16, 16)
    file = str(tmp_path / "small" / "ant" / "strip.png")
    assert centre(file, 224).shape == (3, 224, 224)
    large = common.Images([file], None, [], (0.5,) * 3, (0.25,) * 3, 224)
    views, error = large[0, 0, [(224, (0.2, 1.0)), (96, (0.05, 0.2))]]
    assert [view.shape for view in views] == [(3, 224, 224), (3, 96, 96)] and error == ""
    assert len(made) == 11 + 3 and max(w * h for w, h in made) <= 4 * 256**2


@pytest.mark.parametrize("size", [(300, 40), (90, 720), (80, 120)])
def test_the_middle_of_a_strip_is_torchvisions(tmp_path, size):
    file = noise(tmp_path / "1.png", size)
    expected = v2.Compose([v2.Resize(256), v2.CenterCrop(224)])(common.read_rgb(file))
    gap = (centre(file, 224).float() - v2.functional.pil_to_tensor(expected).float()).abs()
    assert gap.mean() < 2 and gap.max() <= (8 if max(size) > 4 * min(size) else 0)  # of noise


# ---- files


@pytest.mark.parametrize("dtype, values, expected", [
    (np.dtype("<u2"), [0, 77 * 257, 65535], [0, 77, 255]),
    (np.dtype(">u2"), [0, 77 * 257, 65535], [0, 77, 255]),
    (np.dtype("<u2"), [0, 128, 255], [0, 0, 1]),  # a dark one stays dark
    (np.dtype(">u2"), [0, 128, 255], [0, 0, 1]),
    (np.int32, [0, 77, 200], [0, 77, 200]),  # bytes
    (np.int32, [0, 77 * 257, 65535], [0, 77, 255]),
    (np.int32, [0, 10**6, 2 * 10**6], [0, 128, 255]),
    (np.int32, [-1000, 0, 1000], [0, 128, 255]),
    (np.float32, [0, 0.31, 1], [0, 79, 255]),
    (np.float32, [0.2, 0.31, 0.31], [51, 79, 79]),
    (np.float32, [0, 77, 200.4], [0, 77, 200]),
    (np.float32, [-1, 0, 1], [0, 128, 255]),
    (np.float32, [0, 0, 0], [0, 0, 0]),
])
def test_grey_of_many_bits_keeps_its_brightness(tmp_path, dtype, values, expected):
    dtype = np.dtype(dtype)
    image = Image.fromarray(np.repeat(np.array([values], dtype=dtype.newbyteorder("=")), 3, 0))
    if dtype.byteorder == ">":
        image = Image.frombytes("I;16B", (3, 3), np.repeat(np.array([values], dtype=dtype), 3, 0).tobytes())
    image.save(tmp_path / "1.tiff")
    with Image.open(tmp_path / "1.tiff") as image:
        assert image.mode[0] in "IF"
    result = np.asarray(common.read_rgb(tmp_path / "1.tiff"))
    assert result.shape == (3, 3, 3) and result[1, :, 0].tolist() == result[2, :, 2].tolist() == expected


def test_16_bit_png_and_pgm(tmp_path):
    for values, expected in (([0, 100, 77 * 257], [0, 0, 77]), ([0, 128, 255], [0, 0, 1])):
        values = np.array([values], dtype=np.uint16)
        Image.fromarray(values).save(tmp_path / "1.png")
        (tmp_path / "2.pgm").write_bytes(b"P5 3 1 65535\n" + values.byteswap().tobytes())
        for file in ("1.png", "2.pgm"):
            assert np.asarray(common.read_rgb(tmp_path / file))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_none_are_refused(capsys, tmp_path, value):
    Image.fromarray(np.array([[0, value]], dtype=np.float32)).save(tmp_path / "1.tif")
    assert str(tmp_path / "1.tif") in refused(capsys, load, tmp_path)


def test_every_suffix_that_pillow_decodes(tmp_path):
    suffixes = "gif jfif jpe JPG tga bmp webp pcx ico dds tif png apng mpo".split()
    optional = {"jp2": "jpg_2000", "avif": "avif"}
    suffixes += [suffix for suffix, feature in optional.items() if feature in features.get_supported()]
    for suffix in suffixes:
        image = Image.new("RGB", (32, 32), (200, 30, 60))
        image.save(tmp_path / f"1.{suffix}", **({"format": "JPEG"} if suffix == "mpo" else {}))
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "2.gif", save_all=True, append_images=frames[1:])
    for name in ("3.heic", "4.txt", "5.txt", "README", "6.h5", "7.mpg", ".hidden.gif"):
        (tmp_path / name).write_text("")
    data = load(tmp_path)
    assert len(data.images) == len(suffixes) + 1
    names, _, _ = common.find_images(tmp_path)
    for image, name in zip(data.images, names):
        expected = torch.tensor([255, 0, 0] if name == "2.gif" else [200, 30, 60])
        assert (image[:, 9, 9] - expected).abs().max() < 12, name
    assert data.source == f"{tmp_path} (skipped 1 .h5, 1 .heic, 1 .mpg, 2 .txt, 1 without suffix)"


@pytest.mark.filterwarnings("error")
def test_transparent_colours_of_a_palette_cost_no_warning(tmp_path):
    image = Image.new("P", (32, 32), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "1.png", transparency=bytes([0, 128]))
    assert load(tmp_path).images[0, :, 3, 3].tolist() == [10, 20, 30]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(tmp_path, orientation):
    upright = np.zeros((16, 24), np.uint8)
    upright[:8, :12] = 255  # top left
    x = upright.T if orientation > 4 else upright  # as EXIF 2.3 numbers them: the sides of row and column 0
    rows, columns = (orientation in (3, 4, 6, 7)), (orientation in (2, 3, 7, 8))
    stored = Image.fromarray(np.ascontiguousarray(x[::-1 if rows else 1, ::-1 if columns else 1]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    for suffix in ("png", "jpg"):
        stored.save(tmp_path / f"1.{suffix}", exif=exif)
        image = common.read_rgb(tmp_path / f"1.{suffix}")
        assert image.size == (24, 16) and image.getpixel((3, 3))[0] > 200
        assert max(image.getpixel(place)[0] for place in ((20, 3), (3, 13), (20, 13))) < 50


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_damaged_exif_spoils_no_picture(tmp_path, suffix):
    for exif in (b"garbage!!", b"MM\0*\0\0\0", b"MM\0*\0\0\0\x08\xff\xff\x01\x12\0\x03"):
        file = noise(tmp_path / f"1.{suffix}", exif=b"Exif\0\0" + exif)
        assert common.read_rgb(file).size == (16, 16)


@pytest.mark.parametrize("odd", [b"new\nline", b"caf\xe9", b"-x", b"it's \"%d\" #1", "\u65e5\u672c".encode()])
def test_odd_names(capfd, tmp_path, odd):
    """Of files and of a class folder, in UTF-8 or not: found as plain ones are, and a run goes to its end."""
    odd = os.fsdecode(odd)
    for split in ("train", "test"):
        for i in range(4):
            noise(tmp_path / split / "ant" / f"{i}.png").rename(tmp_path / split / "ant" / f"{i}{odd}.png")
            noise(tmp_path / split / f"b{odd}" / f"{i}.png")
    data = load(tmp_path)
    assert data.classes == ["ant", f"b{odd}"] and data.labels.tolist() == [0] * 4 + [1] * 4
    assert torch.equal(data.images[:4], data.images[4:])  # as noise is the same for the same name
    status, out, err = train(capfd, tmp_path, tmp_path / "run")
    assert (status, err) == (0, "") and out.startswith("8 training images of 2 classes, 8 test images")


# ---- runs and their images


def test_what_was_found_is_said_and_kept(capfd, tmp_path):
    classes(tmp_path / "data" / "train", 8)
    classes(tmp_path / "data" / "test", 3)
    (tmp_path / "data" / "train" / "ant" / "notes.txt").touch()
    _, out, _ = train(capfd, tmp_path / "data", tmp_path / "run", "--max-steps", "1")
    assert out.splitlines()[0] == (
        "16 training images of 2 classes, 6 test images, 32 px, "
        f"from {tmp_path / 'data' / 'train'} (skipped 1 .txt) and {tmp_path / 'data' / 'test'}")
    data = json.loads((tmp_path / "run" / "args.json").read_text())["data"]
    assert {**data, "fingerprint": 0} == {
        "train_images": 16, "test_images": 6, "classes": 2, "image_size": 32, "fingerprint": 0}
    for i in range(8):
        noise(tmp_path / "flat" / f"{i}.png")
    _, out, _ = train(capfd, tmp_path / "flat", tmp_path / "flat run", "--max-steps", "1")
    assert out.splitlines()[0] == (
        f"8 training images without labels, no test images, 32 px, from {tmp_path / 'flat'}")
    assert json.loads((tmp_path / "flat run" / "args.json").read_text())["data"]["test_images"] == 0


@pytest.mark.parametrize("steps", ["1", "2"])
def test_a_run_goes_on_with_its_images_only(capfd, tmp_path, steps):
    """In the middle and at the end."""
    a = tmp_path / "a"
    for split in ("train", "test"):
        classes(a / split)
    assert train(capfd, a, tmp_path / "run", "--max-steps", steps)[0] == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    changes = {
        "train_images 16 (now 17)": lambda b: noise(b / "train" / "ant" / "new.png"),
        "test_images 16 (now 17)": lambda b: noise(b / "test" / "ant" / "new.png"),
        "classes 2 (now 3)": lambda b: noise(b / "train" / "cat" / "new.png"),
        "fingerprint": lambda b: (b / "train" / "ant" / "ant0.png").rename(b / "train" / "bee" / "ant0.png"),
        "(now": lambda b: (b / "test" / "ant" / "ant0.png").rename(b / "test" / "ant" / "z.png"),
        "fingerprint ": lambda b: classes(b / "train", seed=5),  # other images of the same names
    }
    for i, (word, change) in enumerate(changes.items()):
        b = tmp_path / f"b{i}"
        shutil.copytree(a, b)
        change(b)
        status, _, err = train(capfd, b, tmp_path / "run", "--max-steps", "2")
        assert status == 1
        assert_error_line(err, word, "it holds another run", "--out")
        assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    a.rename(tmp_path / "moved")
    os.utime(tmp_path / "moved" / "train" / "ant" / "ant0.png", (0, 0))
    status, out, err = train(capfd, tmp_path / "moved", tmp_path / "run", "--max-steps", "2")
    assert (status, err) == (0, "") and ("is finished" in out) == (steps == "2")
    assert [row["step"] for row in log(tmp_path / "run")][-1] == 2


def test_sets_in_memory_have_fingerprints(monkeypatch):
    def fingerprint(images, labels, limit=None):
        def cifar(root, train, download=False):
            return SimpleNamespace(data=images, targets=labels, classes=["a", "b"])

        cifar.base_folder = "cifar"
        monkeypatch.setattr(common.datasets, "CIFAR10", cifar)
        return load("data", name="cifar10", limit=limit).fingerprint

    images = np.random.default_rng(0).integers(256, size=(20, 32, 32, 3), dtype=np.uint8)
    same, *others = [fingerprint(images, [0, 1] * 10), fingerprint(255 - images, [0, 1] * 10),
                     fingerprint(images, [1, 0] * 10), fingerprint(images, [0, 1] * 10, 10)]
    assert len({same, *others}) == 4 and fingerprint(images.copy(), [0, 1] * 10) == same
    a, b, c = (load("data", False, "patterns", limit=limit).fingerprint for limit in (50, 60, 50))
    assert a == c != b


@pytest.mark.parametrize("place", ["runs/one", ".", "train", "train/ant", "train/ant/run"])
def test_a_runs_pictures_are_no_data(capfd, tmp_path, monkeypatch, place):
    monkeypatch.chdir(classes(tmp_path / "train").parent)
    before = load(".")
    assert train(capfd, ".", place, "--max-steps", "1")[::2] == (0, "")
    evaluation = Path(place) / "evaluation"
    evaluation.mkdir()
    (evaluation / "eval.jsonl").touch()
    noise(evaluation / "curves.png")
    status, out, err = train(capfd, ".", place)
    assert (status, err) == (0, "")
    assert out.startswith("16 training images of 2 classes, no test images, 32 px")
    after = load(".")
    assert after.fingerprint == before.fingerprint and after.source == before.source == "train"
    assert {"views.png", "affinity.png"} <= {p.name for p in Path(place).iterdir()}


def test_a_runs_pictures_are_no_class(capfd, tmp_path, monkeypatch):
    """Each script finds what the first one found."""
    monkeypatch.chdir(classes(tmp_path))
    for script in SCRIPTS:
        flags = ["--queue", "8"] if script == "margin_infonce.py" else []
        status, out, err = train(capfd, ".", f"runs/{script}", *flags, script=script)
        assert status == 0, err
        assert out.startswith("16 training images of 2 classes, no test images, 32 px, from .\n")
    assert load(".").classes == ["ant", "bee"] and len([*tmp_path.glob("runs/*/*.png")]) >= 3 * len(SCRIPTS)


def test_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = margin_infonce.parse_args(["--out=~/x", "--data-dir=~", "--classes", "~/list"])
    assert (args.out, args.data_dir, args.classes) == (
        str(tmp_path / "x"), str(tmp_path), str(tmp_path / "list"))
    assert linear_eval.parse_args(["RUN", "--data-dir=~/y"]).data_dir == str(tmp_path / "y")


def smooth(path, width, height):
    x = F.interpolate(torch.rand(1, 3, 6, 8), (height, width), mode="bicubic")[0]
    v2.functional.to_pil_image(x.clamp(0, 1)).save(path, quality=95)
    return str(path)


@pytest.mark.parametrize("size, read", [((1600, 1200), (800, 600)), ((4800, 3600), (600, 450)),
                                        ((1100, 800), (1100, 800)), ((4800, 300), (4800, 300))])
def test_large_jpegs_are_read_smaller_where_no_crop_shows_it(tmp_path, size, read):
    """By the largest power of 2 that leaves `least` pixels of the shorter side; other formats as they are."""
    file = smooth(tmp_path / "a.jpg", *size)
    assert common.read_rgb(file, 420).size == read and common.read_rgb(file).size == size
    Image.open(file).save(tmp_path / "a.png")
    assert common.read_rgb(str(tmp_path / "a.png"), 420).size == size


@pytest.mark.parametrize("crops", [((64, (0.2, 1.0)), (32, (0.2, 1.0))), ((96, (0.08, 0.4)),), ()])
def test_a_jpeg_is_read_so_that_its_smallest_crop_keeps_the_pixels(tmp_path, monkeypatch, crops):
    data = common.Images([smooth(tmp_path / "a.jpg", 1600, 1200)], None, [], *common.STATS["imagenet"], 64)
    sizes, read_rgb = [], common.read_rgb
    monkeypatch.setattr(common, "read_rgb", lambda file, least: sizes.append(read_rgb(file, least).size)
                        or read_rgb(file, least))
    small, _ = data[0, 5, crops]
    (width, height), = sizes
    assert width < 1600 and all(math.sqrt(0.75 * scale[0] * width * height) >= size for size, scale in crops)
    if not crops:  # of the centre there is nothing to draw: it is the whole image's but for the resampling
        monkeypatch.setattr(common, "read_rgb", lambda file, least: read_rgb(file))
        assert (small[0].float() - data[0, 5, crops][0][0].float()).abs().mean() < 2
