"""Image folders as people have them, and runs that stay with their images."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features
from torchvision.transforms import v2

import common
import linear_eval
import margin_infonce
from test_run import log, run_here

TINY = ["--dataset", "folder", "--device", "cpu", "--width", "4", "--projector", "32-32-8", "--epochs", "1"]
TINY += ["--batch-size", "8", "--base-lr", "0.1", "--warmup-epochs", "0", "--workers", "0"]


def noise(path, size=(16, 16), seed=None, **options):
    """A file of noise, the same for the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(sum(path.name.encode()) if seed is None else seed)
    image = Image.fromarray(generator.integers(256, size=(*size[::-1], 3), dtype=np.uint8))
    image.save(path, **options)
    return path


def classes(folder, n=8, names=("ant", "bee"), size=(16, 16), seed=None):
    """n images in each of the class folders."""
    for name in names:
        for i in range(n):
            noise(folder / name / f"{name}{i}.png", size, seed)
    return folder


def load(folder, train=True, name="folder", **options):
    return common.load_images(name, folder, train, **options)


def refused(capsys, function, *args, status=1, **options):
    """The one line on stderr with which it ends."""
    with pytest.raises(SystemExit) as exit:
        function(*args, **options)
    err = capsys.readouterr().err
    assert exit.value.code == status and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def train(capfd, data, out, *flags, script="simtrace.py"):
    return run_here(capfd, script, *TINY, "--data-dir", data, "--out", out, *flags)


def evaluate(data, run, *flags):
    args = [str(run), "--data-dir", str(data), "--device", "cpu", "--workers", "0", "--protocol", "knn", *flags]
    linear_eval.main(linear_eval.parse_args(args))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "backbone.pt"
    about = dict(arch="resnet18", width=4, small_images=True, mean=[0.5] * 3, std=[0.2] * 3, image_size=16)
    state = common.resnet("resnet18", 4, True).state_dict()
    common.save_checkpoint(path, dict(state_dict=state, dataset="folder", **about))
    return path.parent


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


@pytest.mark.parametrize("loop", [{"ant/up": ".."}, {"ant/self": "."}, {"ant/bee": "../bee", "bee/ant": "../ant"},
                                  {"ant/a": "a"}, {"loop": "."}])
def test_a_loop_of_links_ends(tmp_path, loop):
    classes(tmp_path, 2)
    for link, target in loop.items():
        os.symlink(target, tmp_path / link)
    data = load(tmp_path)
    assert data.classes == ["ant", "bee"]
    assert len(data.images) == (8 if "bee/ant" in loop else 4)  # each class as part of the other, too


def test_a_broken_link_is_counted_or_named(capsys, tmp_path):
    classes(tmp_path, 2)
    os.symlink("nowhere", tmp_path / "cat")
    assert "1 broken link" in load(tmp_path).skipped
    os.symlink("nowhere", tmp_path / "ant" / "0.png")
    assert str(tmp_path / "ant" / "0.png") in refused(capsys, load, tmp_path)


def test_a_folder_of_many_files_is_listed_without_a_stat_of_each(tmp_path, monkeypatch):
    for i in range(2000):
        (tmp_path / f"{i}.jpg").touch()
    calls = []
    for name in ("stat", "lstat"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, original=original, **kw: calls.append(args) or original(*args, **kw))
    names, kinds, _ = common.find_images(tmp_path)
    assert len(names) == 2000 and set(kinds) == {""} and len(calls) < 50
    assert names[:3] == [("0.jpg",), ("1.jpg",), ("10.jpg",)]


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
    evaluate(tmp_path, backbone)
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["n_test"] == 10
    _, out, _ = train(capfd, tmp_path, tmp_path / "run", "--max-steps", "1")
    assert "16 training images of 2 classes, 6 test images, 32 px, from" in out.splitlines()[0]
    assert "test images: Val; linear_eval.py takes testing" in out.splitlines()[0]


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
        (lambda folder: noise(folder / "test" / "cat" / "1.png"), "test has classes that train lacks: cat"),
        (lambda folder: [noise(folder / "test" / name / "1.png") for name in "ced"], "lacks: c, d, e"),
        (lambda folder: noise(folder / "test" / "odd.png"), "test/odd.png lies beside"),
        (lambda folder: noise(folder / "train" / "odd.png"), "train/odd.png lies beside"),
        (flat, "test has no folder per class"),
    ]):
        folder = tmp_path / str(i)
        for split in ("train", "test"):
            classes(folder / split)
        change(folder)
        status, _, err = train(capfd, folder, tmp_path / f"run{i}", "--max-steps", "2")
        assert status == 0 and err.startswith("warning: ") and word in err and err.count("\n") == 1
        assert "knn_accuracy" not in log(tmp_path / f"run{i}")[-1]
        assert word in refused(capfd, evaluate, folder, backbone)


def test_flat_imagenet_val(capsys, tmp_path, backbone):
    classes(tmp_path / "imagenet" / "train", 2, ["n01", "n02"], (70, 70))
    noise(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG", (70, 70))
    test = load(tmp_path, False, "imagenet")
    assert test.labels is None and len(test.images) == 1 and len(load(tmp_path, name="imagenet").labels) == 4
    assert "imagenet/val has no folder per class: sort its images into folders" in refused(
        capsys, evaluate, tmp_path, backbone, "--dataset", "imagenet")


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
        assert {parts[-1]: kind for parts, kind in zip(names, kinds)} == {
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
    status, out, err = train(capfd, tmp_path, tmp_path / "run", "--classes", tmp_path / "list", "--max-steps", "1",
                             "--queue", "8", script="margin_infonce.py")
    assert (status, err) == (0, "") and out.startswith("16 training images of 2 classes, 0 test images, 32 px")


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
    assert torch.equal(kept[:10], before.images[:10]) and torch.equal(kept[11:], before.images[10:])


def test_one_small_file_among_large_ones(tmp_path):
    classes(tmp_path, 4, size=(70, 80))
    noise(tmp_path / "ant" / "small.png", (5, 5))
    data = load(tmp_path)
    assert isinstance(data.images, list) and data.image_size == 224
    views = common.ImageFiles(data.images, 32)
    assert {views[0, i][0][0].shape for i in range(9)} == {(3, 32, 32)}


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


@pytest.mark.parametrize("size", [(20000, 2), (2, 9000), (1, 3000)])
def test_a_strip_costs_no_more_than_others(tmp_path, monkeypatch, size):
    made = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda image, size, *a, **kw: made.append(size) or resize(image, size, *a, **kw))
    classes(tmp_path / "small", 5)
    noise(tmp_path / "small" / "ant" / "strip.png", size)
    assert load(tmp_path / "small").images.shape == (11, 3, 16, 16)
    file = str(tmp_path / "small" / "ant" / "strip.png")
    assert common.ImageFiles([file], 224)[0, 0][0][0].shape == (3, 224, 224)
    assert common.ImageFiles([file], 224, [(224, (0.2, 1.0))])[0, 0][0][0].shape == (3, 224, 224)
    assert len(made) == 3 and max(w * h for w, h in made) <= 4 * 256**2


@pytest.mark.parametrize("size", [(300, 40), (90, 720), (80, 120)])
def test_the_middle_of_a_strip_is_torchvisions(tmp_path, size):
    file = noise(tmp_path / "1.png", size)
    expected = v2.Compose([v2.Resize(256), v2.CenterCrop(224)])(common.read_rgb(file))
    result = common.ImageFiles([str(file)], 224)[0, 0][0][0]
    gap = (result.float() - v2.functional.pil_to_tensor(expected).float()).abs()
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
    suffixes = ["gif", "jfif", "jpe", "JPG", "tga", "bmp", "webp", "pcx", "ico", "dds", "tif", "png", "apng", "mpo"]
    suffixes += [s for s, feature in (("jp2", "jpg_2000"), ("avif", "avif")) if feature in features.get_supported()]
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
    for image, (name,) in zip(data.images, names):
        expected = torch.tensor([255, 0, 0] if name == "2.gif" else [200, 30, 60])
        assert (image[:, 9, 9] - expected).abs().max() < 12, name
    assert data.skipped == f"{tmp_path}: 1 .h5, 1 .heic, 1 .mpg, 2 .txt, 1 without suffix"


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
    x = upright.T if orientation > 4 else upright  # as EXIF 2.3 numbers them, by the sides of row and column 0
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


# ---- runs and their images


def test_what_was_found_is_said_and_kept(capfd, tmp_path):
    classes(tmp_path / "data" / "train", 8)
    classes(tmp_path / "data" / "test", 3)
    (tmp_path / "data" / "train" / "ant" / "notes.txt").touch()
    _, out, _ = train(capfd, tmp_path / "data", tmp_path / "run", "--max-steps", "1")
    assert out.splitlines()[:2] == [
        f"16 training images of 2 classes, 6 test images, 32 px, from {tmp_path / 'data'}",
        f"skipped, as no images, in {tmp_path / 'data' / 'train'}: 1 .txt"]
    data = json.loads((tmp_path / "run" / "args.json").read_text())["data"]
    assert {**data, "fingerprint": 0} == {
        "train_images": 16, "test_images": 6, "classes": 2, "image_size": 32, "fingerprint": 0}
    noise(tmp_path / "flat" / "1.png")
    flat = load(tmp_path / "flat")
    assert common.report_data(flat, None, common.init_distributed("cpu"))["test_images"] == 0
    assert capfd.readouterr().out.startswith("1 training images without labels, 0 test images, 32 px")


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
        "images": lambda b: classes(b / "train", seed=5),  # other images of the same names
    }
    for i, (word, change) in enumerate(changes.items()):
        b = tmp_path / f"b{i}"
        shutil.copytree(a, b)
        change(b)
        status, _, err = train(capfd, b, tmp_path / "run", "--max-steps", "2")
        assert status == 1 and err.startswith("error: ") and err.count("\n") == 1
        assert word in err and "other images" in err
        assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    a.rename(tmp_path / "moved")
    os.utime(tmp_path / "moved" / "train" / "ant" / "ant0.png", (0, 0))
    status, out, err = train(capfd, tmp_path / "moved", tmp_path / "run", "--max-steps", "2")
    assert (status, err) == (0, "") and ("is finished" in out) == (steps == "2")
    assert [row["step"] for row in log(tmp_path / "run")][-1] == 2


def test_sets_in_memory_have_fingerprints():
    a, b = (common.load_images("patterns", train=False, limit=limit) for limit in (50, 60))
    assert a.fingerprint == common.fingerprint([], torch.arange(50) % 10, []) != b.fingerprint
    assert common.fingerprint([], a.labels, [a.images.numpy()]) != common.fingerprint(
        [], a.labels, [255 - a.images.numpy()])
    assert common.fingerprint([], a.labels, []) != common.fingerprint([], a.labels.flip(0), [])
    assert common.fingerprint([("a",)], None, []) != common.fingerprint([("b",)], None, [])


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
    assert (status, err) == (0, "") and out.startswith("16 training images of 2 classes, 0 test images, 32 px")
    after = load(".")
    assert after.fingerprint == before.fingerprint and not after.skipped
    assert {"views.png", "affinity.png"} <= {p.name for p in Path(place).iterdir()}


def test_a_runs_pictures_are_no_class(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(classes(tmp_path))
    assert train(capfd, ".", "runs/a", "--max-steps", "1")[0] == 0
    _, out, _ = train(capfd, ".", "runs/b", "--max-steps", "1", "--queue", "8", script="margin_infonce.py")
    assert out.startswith("16 training images of 2 classes") and load(".").classes == ["ant", "bee"]


def test_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = margin_infonce.parse_args(["--out=~/x", "--data-dir=~", "--classes", "~/list"])
    assert (args.out, args.data_dir, args.classes) == (
        str(tmp_path / "x"), str(tmp_path), str(tmp_path / "list"))
    assert linear_eval.parse_args(["RUN", "--data-dir=~/y"]).data_dir == str(tmp_path / "y")
