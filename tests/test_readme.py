"""Guards README and .github/measurements.md: every command and code block runs, two at a time, long ones cut
to a step, on a few small images."""

import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision

import common
from helpers import ROOT, SCRIPTS, noise, random_backbone

README = (ROOT / "README.md").read_text()
MEASUREMENTS = (ROOT / ".github" / "measurements.md").read_text()
TEXT = README + MEASUREMENTS
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
LINES = [line.split("&& ")[-1]
         for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()]


def expand(line):
    """The commands of a line: of a loop what a shell makes of it."""
    if not line.startswith("for "):
        return [line]
    words = ["bash", "-c", line.replace("; do ", "; do echo ")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


COMMANDS = [command for line in LINES for command in expand(line)]
SHORT = "--max-steps 1 --arch resnet18 --width 4 --projector 16-8 --batch-size 16 --limit-images 64".split()
SHORT += ["--image-size", "32"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_measured_figures(script):
    """A docstring's last lines, three at most, and README's table have no figure but those of the script's
    section in measurements.md, or of its first one and that of patterns."""
    parts = re.split("^## ", MEASUREMENTS, flags=re.M)
    section = "".join(part for part in parts if script in part.split("\n")[0] or part == parts[0]
                      or part.startswith("patterns"))
    lines = importlib.import_module(script.removesuffix(".py")).__doc__.strip().split("\n\n")[-1]
    row = "".join(line for line in README.splitlines() if f"| `{script} " in line)
    for text in (lines, row):
        figures = re.findall(r"\b\d\d\.\d\b", text)
        assert figures and {*figures} <= {*re.findall(r"\b\d\d\.\d\b", section)}, text
    assert lines.startswith("Measured") and lines.count("\n") < 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the scripts, a CIFAR-10 of noise in torchvision's layout, and an ImageNet of two
    classes."""
    place, generator = tmp_path_factory.mktemp("readme"), np.random.default_rng(0)
    for script in ROOT.glob("*.py"):
        shutil.copy(script, place)
    cifar = place / "data" / "cifar-10-batches-py"
    cifar.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = generator.integers(0, 256, (64, 3072), dtype=np.uint8)
        (cifar / name).write_bytes(pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(64)]}))
    (cifar / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    (place / "sitecustomize.py").write_text(  # these are not the files whose md5 sums torchvision knows
        "from torchvision.datasets import CIFAR10\nCIFAR10._check_integrity = lambda self: True\n"
        "CIFAR10.meta['md5'] = None\n"
    )
    for split in ("train", "val"):
        for i in range(64):
            noise(place / "DIR" / "imagenet" / split / "ab"[i % 2] / f"{i}.jpg", (90, 80))
    return place


def run(command, place, *extra):
    """The command on a CPU, with two processes in place of more."""
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=2").replace("HOST:", "localhost:")
    words = command.split()
    torchrun = words[0] == "torchrun" and ("simtrace.py" in command or "linear_eval.py" in command)  # quicker
    launcher = [sys.executable, "-m", "torch.distributed.run"] if torchrun else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([*launcher, *words[1:], *extra], cwd=place, env=environment, text=True,
                            capture_output=True, timeout=150)
    assert result.returncode == 0, (command, result.stderr)
    return result.stdout


def port_for(command, i):
    """A port of its own for each torchrun that would take the default, so that two can run at a time."""
    if command.startswith("torchrun simtrace.py"):
        return command.replace("torchrun", f"torchrun --master_port={29510 + i}", 1)
    return command


def test_the_first_two_commands_are_one_line_each():
    first = re.search(r"```sh\n(.*?)```", README, re.S).group(1).splitlines()
    assert first == [f"pip install -r requirements.txt && {command}"
                     for command in ("torchrun simtrace.py", "python -m pytest")]
    assert first[1] in (ROOT / ".ci" / "run").read_text()


def test_no_two_commands_want_the_same_folder():
    """A run folder refuses other settings, so each command of other settings needs another --out."""
    folders = {}
    for command in COMMANDS:
        script = re.search(r"(\w+)\.py (.*)", command + " ")
        if script and script[1] != "linear_eval":
            args = vars(importlib.import_module(script[1]).parse_args(script[2].split()))
            run = {k: v for k, v in args.items() if k not in common.FREE}
            assert folders.setdefault(args["out"], (script[1], run)) == (script[1], run), command
    assert len(folders) > 20


def test_training_commands(place):
    once = {expand(line)[0] for line in LINES}  # of a loop the first, as the others differ in a number
    commands = sorted({c for c in once if "linear_eval.py" not in c and "pytest" not in c})
    assert {name for c in commands for name in re.findall(r"\w+\.py", c)} == set(SCRIPTS)
    together = [c for c in commands if "--nnodes=2" in c]
    launched = [c for c in commands if "simtrace.py" in c and c not in together]
    plain = [c.split()[1:] for c in commands if "simtrace.py" not in c]
    (place / "train.py").write_text(  # one process for many, as importing torch takes longer than a step
        "import sys, importlib\nstart, first = int(sys.argv[1]), sys.argv[2:]\n"
        f"for i, (script, *args) in list(enumerate({plain}))[start::2]:\n"
        "    module = importlib.import_module(script[:-3])\n"
        "    module.main(module.parse_args([*args, *first, '--out', f'runs/{script}{i}']))\n")

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, f"python train.py {i}", place, *SHORT) for i in (0, 1)]
        jobs += [pool.submit(run, port_for(c, i), place, *SHORT, "--out", f"runs/{i}")
                 for i, c in enumerate(launched)]
        jobs += [pool.submit(run, c.replace("--nproc_per_node=8", "--nproc_per_node=1"), place, *SHORT)
                 for c in together * 2]
        for job in jobs:
            job.result()
    folders = [f"{i}" for i in range(len(launched))]
    folders += [f"{script}{i}" for i, (script, *_) in enumerate(plain)]
    for folder, command in zip(folders, [*launched, *map(" ".join, plain)]):
        file = "margin.png" if "--plot-gradients" in command else "backbone.pt"
        assert (place / "runs" / folder / file).exists(), command


def test_evaluation_commands_and_code(place):
    run("python simtrace.py --dataset cifar10", place, *SHORT, "--epochs", "1", "--max-steps", "4")
    shutil.copytree(place / "runs" / "simtrace-cifar10", place / "runs" / "simaffinity-cifar10")
    commands = [c for c in COMMANDS if "linear_eval.py" in c]
    assert len(commands) >= 8

    classify, = (block for block in BLOCKS if "classifier.pt" in block)
    torchvision.utils.save_image(torch.rand(3, 50, 40), place / "photo.jpg")
    plain = [c.split()[2:] for c in commands if c.startswith("python linear_eval.py")]
    (place / "evaluate.py").write_text(  # one process for all, as importing torch takes longer than most
        "import linear_eval\n"
        f"for args in {[args + ['--epochs', '1'] for args in plain]}:\n"
        "    linear_eval.main(linear_eval.parse_args(args))\n"
        f"    print('end')\n{classify}"
    )

    def evaluate(command):
        return run(command, place, *(["--epochs", "1"] if "linear_eval" in command else []))

    launched = [c for c in commands if c.startswith("torchrun")]
    assert len(launched) == 1 and len(plain) + 1 == len(commands)
    with ThreadPoolExecutor(2) as pool:
        launched, *outputs = pool.map(evaluate, [*launched, "python evaluate.py"])
    *outputs, label = outputs[0].split("end\n")
    assert len(outputs) == len(plain) and label.strip() in list("abcdefghij")
    assert all(output.splitlines()[-1].startswith('{"protocol": ') for output in [launched, *outputs])
    assert (place / "runs" / "curves" / "curves.png").exists()


def test_detectron2_names(tmp_path, monkeypatch):
    """Of its R-50, as its build_resnet_backbone has them."""
    state = {k: v for k, v in torchvision.models.resnet50().state_dict().items() if not k.startswith("fc.")}
    (tmp_path / "runs" / "sane-imagenet").mkdir(parents=True)
    torch.save({"state_dict": state}, tmp_path / "runs" / "sane-imagenet" / "backbone.pt")
    block, = (block for block in BLOCKS if "pickle" in block)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    found = pickle.loads((tmp_path / "backbone.pkl").read_bytes())
    assert found["matching_heuristics"] is True and isinstance(found["__author__"], str)

    convolutions = ["stem.conv1"]
    for stage, depth in (("res2", 3), ("res3", 4), ("res4", 6), ("res5", 3)):
        for i in range(depth):
            names = (["shortcut"] if i == 0 else []) + ["conv1", "conv2", "conv3"]
            convolutions += [f"{stage}.{i}.{name}" for name in names]
    norms = [f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    assert set(found["model"]) == {f"{c}.{name}" for c in convolutions for name in ["weight", *norms]}
    for ours, theirs in (
        ("conv1.weight", "stem.conv1.weight"),
        ("bn1.running_var", "stem.conv1.norm.running_var"),
        ("layer1.0.conv3.weight", "res2.0.conv3.weight"),
        ("layer1.0.downsample.0.weight", "res2.0.shortcut.weight"),
        ("layer2.0.downsample.1.bias", "res3.0.shortcut.norm.bias"),
        ("layer3.5.bn2.running_mean", "res4.5.conv2.norm.running_mean"),
        ("layer4.2.bn3.weight", "res5.2.conv3.norm.weight"),
    ):
        value = found["model"][theirs]
        assert isinstance(value, np.ndarray) and np.array_equal(value, state[ours].numpy())


def test_code_blocks(place):
    """The first wants a backbone of full width; the others go on from each other."""
    folder = place / "runs" / "simtrace-cifar10"
    folder.mkdir(parents=True, exist_ok=True)
    random_backbone(folder, 64)
    blocks = [block for block in BLOCKS if "classifier.pt" not in block and "pickle" not in block]
    check = """
import simaffinity, simwhitening, simtrace  # on the views that SimTrace's block has centred
for value, script in ((affinity, simaffinity), (whitening, simwhitening), (trace, simtrace)):
    loss = getattr(script, script.__name__ + "_loss")(z1 + mu, z2 + mu)
    torch.testing.assert_close(value, loss[0] if isinstance(loss, tuple) else loss, rtol=1e-4, atol=1e-4)
"""
    duality = [block for block in blocks if "noncontrastive_criterion" in block]  # to be pasted by itself
    (place / "duality.py").write_text(*duality)
    sides = run("python duality.py", place).split()[:2]
    assert float(sides[0][7:-1]) == pytest.approx(float(sides[1][7:-1]), rel=1e-5)
    (place / "blocks.py").write_text("\n".join(["import common", *blocks, check]))
    output = run("python blocks.py", place)
    assert "missing_keys=['fc.weight', 'fc.bias'], unexpected_keys=[]" in output
