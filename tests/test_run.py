"""Whole training runs: resume, signals, two processes, errors, the files of a run folder."""

import importlib
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

import simtrace
import vicreg_variants

ROOT = Path(__file__).parent.parent
SCRIPTS = [p.name for p in sorted(ROOT.glob("*.py")) if p.name not in ("common.py", "linear_eval.py")]
TINY = [
    "--dataset",
    "folder",
    "--data-dir",
    tempfile.mkdtemp(),
    "--device",
    "cpu",
    "--width",
    "4",
    "--projector",
    "32-32-8",
    "--batch-size",
    "32",
    "--epochs",
    "2",
    "--base-lr",
    "3",
    "--warmup-epochs",
    "0.5",
    "--eval-every",
    "9",
]


@pytest.fixture(scope="module", autouse=True)
def images():
    """320 training images (10 steps an epoch) and 64 test images: 16x16 noise of two classes, one darker."""
    generator, folder = torch.Generator().manual_seed(0), Path(TINY[3])
    for i in range(384):
        path = folder / ("train" if i < 320 else "test") / ("dark" if i % 2 else "light") / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        torchvision.utils.save_image(torch.rand(3, 16, 16, generator=generator) / (1 + i % 2), path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in every run here: sums over other numbers of threads round differently
    yield
    torch.set_num_threads(threads)
    shutil.rmtree(folder)


# Processes are forked from one that has imported torch: an import costs more than most of these runs.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torchvision.transforms.v2"])


def program(script, args, env, out, err):
    """What `python SCRIPT ARGS` does, in a process just forked."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv, sys.path[0] = [script, *args], str(ROOT)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def start(script, *args, world=1, env=None, target=program):
    """The processes of one run: one without a launcher, or `world` as torchrun would start them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes, folder = [], Path(tempfile.mkdtemp())
    for rank in range(world):
        launcher = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        launcher |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        env_ = {k: str(v) for k, v in {**(launcher if world > 1 else {}), **(env or {})}.items()}
        files = [str(folder / f"{name}{rank}") for name in ("out", "err")]
        words = [str(a) for a in args]
        process = FORK.Process(target=target, args=(str(ROOT / script), words, env_, *files))
        process.files = files
        process.start()
        processes.append(process)
    return processes


def finish(processes, timeout=120):
    """(exit status, stdout, stderr) of each process."""
    results = []
    for p in processes:
        p.join(timeout)
        if p.exitcode is None:
            for q in processes:
                q.kill()
            pytest.fail(f"hangs: {p._args}")
        results.append((p.exitcode, *(Path(file).read_text() for file in p.files)))
    for p in processes:
        shutil.rmtree(Path(p.files[0]).parent, ignore_errors=True)
    return results


def run(script, *args, **options):
    results = finish(start(script, *args, **options))
    assert all(status == 0 for status, _, _ in results), results
    return results


def run_here(capfd, script, *args):
    """One run without a launcher, in this process, as that starts sooner: (status, stdout, stderr)."""
    module, status, hook = importlib.import_module(script.removesuffix(".py")), 0, sys.excepthook
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        module.main(module.parse_args([str(a) for a in args]))
    except SystemExit as exit:
        status = exit.code
    finally:
        sys.excepthook = hook
        for number, handler in handlers:
            signal.signal(number, handler)
    return status, *capfd.readouterr()


def weights(folder):
    state = torch.load(folder / "checkpoint.pt")  # default options
    momentum = {f"{k}.{n}": v for k, s in state["optimizer"]["state"].items() for n, v in s.items()}
    return {**state["model"], **momentum, **state["probe"]}


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [k for k in a if not torch.equal(a[k], b[k])] == []


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def same_rows(a, b):
    return [{k: v for k, v in row.items() if k != "images_per_s"} for row in a] == [
        {k: v for k, v in row.items() if k != "images_per_s"} for row in b
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run to compare with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("simtrace.py", *TINY, "--out", folder)
    return folder


def test_run_folder(whole):
    assert {p.name for p in whole.iterdir()} == {
        "args.json",
        "log.jsonl",
        "checkpoint.pt",
        "backbone.pt",
        "views.png",
        "affinity.png",
    }
    rows = log(whole)
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 10), (2, 20)]
    assert {"lr", "loss", "alignment", "images_per_s", "embedding_std", "probe_accuracy"} <= rows[0].keys()
    assert rows[1]["knn_accuracy"] > 0 and "knn_accuracy" not in rows[0]
    for name in ("views.png", "affinity.png"):
        assert np.asarray(torchvision.datasets.folder.pil_loader(whole / name)).std() > 5
    for file in ("checkpoint.pt", "backbone.pt"):
        torch.load(whole / file)


def test_a_part_of_the_schedule_then_the_rest(capfd, whole, tmp_path):
    out = tmp_path / "run"
    first = run_here(capfd, "simtrace.py", *TINY, "--out", out, "--max-steps", "13")
    assert log(out)[-1]["step"] == 13 and log(out)[-1]["epoch"] == 2 and (out / "backbone.pt").exists()
    again = run_here(capfd, "simtrace.py", *TINY, "--out", out, "--max-steps", "13")
    assert "finished" in again[1] and "finished" not in first[1] and first[0] == again[0] == 0
    run_here(capfd, "simtrace.py", *TINY, "--out", out)
    assert_same(weights(out), weights(whole))
    assert same_rows(log(out), log(whole))


def test_signals(whole, tmp_path):
    """SIGTERM and Ctrl-C, to a run each."""
    folders, numbers = [tmp_path / "a", tmp_path / "b"], [signal.SIGTERM, signal.SIGINT]
    processes = [start("simtrace.py", *TINY, "--out", out)[0] for out in folders]
    for out, number, process in zip(folders, numbers, processes):
        while not (out / "log.jsonl").exists() or not log(out):
            time.sleep(0.02)
        os.kill(process.pid, number)
    for (code, _, err), status in zip(finish(processes), (143, 130)):
        assert code == status
        assert err.startswith("stopped at step") and err.endswith("the same command continues\n")
        assert err.count("\n") == 1
    for process in [start("simtrace.py", *TINY, "--out", out)[0] for out in folders]:
        assert finish([process])[0][0] == 0
    for out in folders:
        assert_same(weights(out), weights(whole))


def test_sigkill_at_any_moment(whole, tmp_path):
    out, moments = tmp_path / "run", random.Random(0)
    for _ in range(3):
        (process,) = start("simtrace.py", *TINY, "--out", out)
        while process.exitcode is None and not (out / "args.json").exists():
            time.sleep(0.05)
        time.sleep(moments.uniform(0.2, 2.5))
        process.kill()
        finish([process])
        if (out / "checkpoint.pt").exists():
            torch.load(out / "checkpoint.pt")
    run("simtrace.py", *TINY, "--out", out)
    assert_same(weights(out), weights(whole))
    assert same_rows(log(out), log(whole))
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_two_processes(tmp_path):
    out = tmp_path / "run"
    finish_2 = run("simtrace.py", *TINY, "--out", out, "--max-steps", "13", world=2)
    assert finish_2[1][1] == ""  # only rank 0 speaks
    run("simtrace.py", *TINY, "--out", out, world=2)
    run("simtrace.py", *TINY, "--out", tmp_path / "whole", world=2)
    assert_same(weights(out), weights(tmp_path / "whole"))


def test_sigterm_at_two_processes(tmp_path):
    processes = start("simtrace.py", *TINY, "--out", tmp_path / "run", "--epochs", "50", world=2)
    while not (tmp_path / "run" / "log.jsonl").exists() or not log(tmp_path / "run"):
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGTERM)  # one alone is enough
    results = finish(processes)
    assert [r[0] for r in results] == [143, 143]
    assert results[0][2].startswith("stopped at step") and results[1][2] == ""


def test_no_launcher_is_torchrun_with_one_process(whole, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(ROOT / "simtrace.py")]
    subprocess.run(
        [*torchrun, *TINY, "--out", str(tmp_path / "run"), "--max-steps", "20"],
        check=True,
        timeout=120,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert_same(weights(tmp_path / "run"), weights(whole))


def assert_refused(results, status, *words):
    for code, _, err in results:
        assert code == status, results
        assert "Traceback" not in err
    err = results[0][2]
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert all(w in err for w in words), err
    assert all(r[2] == "" for r in results[1:])


ALONE = [
    (["--no-such-flag"], 2, ["--no-such-flag"]),
    (["--dataset", "mnist"], 2, ["mnist"]),
    (["--batch-size", "0"], 2, ["--batch-size"]),
    (["--batch-size", "1", "--projector", "8-1"], 2, ["--batch-size 1", "BatchNorm"]),
    (["--base-lr", "nan"], 2, ["--base-lr"]),
    (["--projector", "32-x-8"], 2, ["--projector"]),
    (["--projector", "32-32-64", "--eps", "0.01"], 2, ["64", "32"]),  # D >= 2N
    (["--batch-size", "322"], 1, ["322", "320"]),
    (["--device", "cuda"], 2, ["cuda"]),
    (["--device", "mps"], 2, ["mps"]),
    (["--dataset", "folder", "--data-dir", "/no/such"], 1, ["/no/such"]),
    (["--base-lr", "1e30"], 1, ["step", "lr", "loss"]),
]
TOGETHER = [ALONE[0], ALONE[8], ALONE[-2], ALONE[-1]]  # one of each stage: slow to start


@pytest.mark.parametrize(
    "world, args, status, words", [(1, *case) for case in ALONE] + [(2, *case) for case in TOGETHER]
)
def test_errors(capfd, tmp_path, world, args, status, words):
    if "cuda" in args and torch.cuda.is_available() or "mps" in args and torch.backends.mps.is_available():
        return
    args = [*TINY, "--out", tmp_path / "run", *args]
    results = (
        finish(start("simtrace.py", *args, world=2), timeout=60)
        if world == 2
        else [run_here(capfd, "simtrace.py", *args)]
    )
    assert_refused(results, status, *words)


def test_batch_that_two_processes_cannot_share(tmp_path):
    results = finish(start("simtrace.py", *TINY, "--out", tmp_path, "--batch-size", "31", world=2))
    assert_refused(results, 2, "31", "2")


def test_other_settings_and_damaged_files_are_refused(capfd, tmp_path):
    out = tmp_path / "run"
    assert run_here(capfd, "simtrace.py", *TINY, "--out", out, "--max-steps", "2")[0] == 0
    before = (out / "checkpoint.pt").read_bytes()
    for results in (
        [run_here(capfd, "simtrace.py", *TINY, "--out", out, "--base-lr", "7")],
        finish(start("simtrace.py", *TINY, "--out", out, "--base-lr", "7", world=2)),
    ):
        assert_refused(results, 1, "base_lr", "7")
    assert (out / "checkpoint.pt").read_bytes() == before
    (out / "checkpoint.pt").write_bytes(before[:5000])
    for results in (
        [run_here(capfd, "simtrace.py", *TINY, "--out", out)],
        finish(start("simtrace.py", *TINY, "--out", out, world=2)),
    ):
        assert_refused(results, 1, "checkpoint.pt")
    torch.save({"step": 2, "sums": {}, "model": {"strange": torch.zeros(1)}}, out / "checkpoint.pt")
    assert_refused([run_here(capfd, "simtrace.py", *TINY, "--out", out)], 1, str(out), "strange")
    (out / "args.json").write_text("{")
    assert_refused([run_here(capfd, "simtrace.py", *TINY, "--out", out)], 1, str(out))


def test_full_disk(capfd, tmp_path, monkeypatch):
    """The files that were there stay, whole; the run ends in one line and goes on later."""
    out = tmp_path / "run"
    run_here(capfd, "simtrace.py", *TINY, "--out", out, "--max-steps", "10")
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def full(file, *args, **kwargs):
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda state, file: full(file))
        assert_refused([run_here(capfd, "simtrace.py", *TINY, "--out", out)], 1, "No space", "backbone.pt")
    assert {p.name for p in out.iterdir()} == before.keys()
    assert (out / "checkpoint.pt").read_bytes() == before["checkpoint.pt"]
    assert run_here(capfd, "simtrace.py", *TINY, "--out", out)[0] == 0
    assert [row["step"] for row in log(out)] == [10, 20]


def test_not_finite_keeps_the_last_checkpoint(capfd, tmp_path):
    out = tmp_path / "run"
    run_here(capfd, "simtrace.py", *TINY, "--out", out, "--max-steps", "2", "--seed", "1")
    good = weights(out)
    state = torch.load(out / "checkpoint.pt")
    state["model"]["projector.0.weight"].fill_(float("inf"))
    torch.save(state, out / "checkpoint.pt")
    before = (out / "checkpoint.pt").read_bytes()
    result = run_here(capfd, "simtrace.py", *TINY, "--out", out, "--seed", "1")
    assert_refused([result], 1, "loss is nan at step 2", "lr")
    assert (out / "checkpoint.pt").read_bytes() == before and all(v.isfinite().all() for v in good.values())


def test_default_warnings_are_not_ours(tmp_path):
    """No deprecated call: warnings raised by our own modules are errors."""
    flags = [
        x
        for module in ("__main__", "common")
        for kind in ("Future", "Deprecation")
        for x in ("-W", f"error::{kind}Warning:{module}")
    ]
    command = [
        sys.executable,
        *flags,
        str(ROOT / "simtrace.py"),
        *TINY,
        "--out",
        str(tmp_path),
        "--max-steps",
        "2",
    ]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


def model_after(capfd, tmp_path, *flags, steps="3"):
    run_here(capfd, "simtrace.py", *TINY, "--out", tmp_path, "--max-steps", steps, *flags)
    return torch.load(tmp_path / "checkpoint.pt")["model"]


@pytest.mark.parametrize("momentum", ["0", "0.9", "1"])
def test_momentum_encoder(capfd, tmp_path, momentum):
    """Momentum 1 leaves the copy at the initial network, 0 makes it the trained one; BatchNorm's buffers are
    copied."""
    start = model_after(capfd, tmp_path / "start", "--momentum-encoder", "1", steps="1")
    model = model_after(capfd, tmp_path / "run", "--momentum-encoder", momentum, "--predictor")
    for key, value in model.items():
        if not key.startswith("target."):
            continue
        online = "backbone" if key.startswith("target.0.") else "projector"
        trained = model[online + key.removeprefix("target.0").removeprefix("target.1")]
        is_buffer = "running" in key or "num_batches" in key
        assert torch.equal(value, trained) == (momentum == "0" or is_buffer), key
        if momentum == "1" and not is_buffer:
            assert torch.equal(value, start[key]), key


@pytest.mark.parametrize("flags", [[], ["--predictor"], ["--momentum-encoder", "0.9"]])
def test_every_trained_parameter_has_a_gradient_and_no_other(flags):
    args = simtrace.parse_args([*TINY, *flags])
    model = simtrace.Model(args, small_images=True)
    _, z1, z2 = model(torch.randn(16, 3, 16, 16), torch.randn(16, 3, 16, 16))
    simtrace.simtrace_loss(z1, z2).backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == name.startswith("target."), name
        assert p.requires_grad != name.startswith("target."), name


def test_momentum_encoder_survives_a_restart(capfd, tmp_path):
    flags = ["--momentum-encoder", "0.9", "--predictor"]
    model_after(capfd, tmp_path / "two", *flags, steps="3")
    two = model_after(capfd, tmp_path / "two", *flags, steps="12")
    assert_same(two, model_after(capfd, tmp_path / "one", *flags, steps="12"))


def test_training_raises_knn(capfd, tmp_path):
    """The default run on half of its images, two epochs: 32 % against 19 % at initialisation."""
    args = [
        "--limit-images",
        "5000",
        "--epochs",
        "2",
        "--eval-every",
        "2",
        "--device",
        "cpu",
        "--out",
        tmp_path,
    ]
    torch.set_num_threads(os.cpu_count())
    status, out, _ = run_here(capfd, "simtrace.py", *args)
    torch.set_num_threads(1)
    last = log(tmp_path)[-1]
    assert status == 0 and "raw pixels" in out
    assert last["knn_accuracy"] > last["knn_init"] + 0.08 and last["knn_accuracy"] > last["knn_pixels"] + 0.08


@pytest.mark.parametrize("world", [1, 2])
def test_no_data_and_no_internet(tmp_path, world):
    env = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    args = [
        "--dataset",
        "cifar10",
        "--data-dir",
        tmp_path / "none",
        "--out",
        tmp_path / "run",
        "--device",
        "cpu",
    ]
    results = finish(start("simtrace.py", *args, world=world, env=env), timeout=30)
    assert_refused(results, 1, "cifar10", str(tmp_path / "none"), "cifar-10-batches-py")


MOCO = ["--base-lr", "0.3", "--queue", "48"]  # 48: the second batch goes round the end
METHODS = {
    "simtrace": ([], {"alignment"}),
    "simaffinity": ([], {"ce", "sym"}),
    "simwhitening": ("--symmetric --predictor --momentum-encoder 0.9".split(), {"ce", "sym"}),
    "sane": ([*MOCO, "--strong"], {"vanilla", "mixup", "mu", "same_class"}),
    "margin_infonce": ([*MOCO, "--m1", "0.2", "--attenuation", "0.5"], {"positive_cos"}),
    "margin_infonce simclr": (
        ["--base-lr", "0.3", "--ratio-m1", "0.4", "--framework", "simclr"],
        {"positive_cos"},
    ),
    "vicreg_variants": ([], {"sim", "var", "cov", "Lc", "Lnc", "rankme", "rankme_embeddings"}),
    "vicreg_variants ctr": (  # its two pictures, of 32 and of 12 rows, differ in height
        ["--method", "vicreg-ctr", "--base-lr", "0.3", "--projector", "32-12"],
        {"sim", "var", "cov"},
    ),
    "margin_infonce byol": (["--base-lr", "0.075", "--scale", "2", "--framework", "byol"], {"positive_cos"}),
}
for loss in [
    name for name in vicreg_variants.METHODS if name not in ("vicreg", "vicreg-ctr")
]:  # 4 steps each
    METHODS[f"vicreg_variants {loss}"] = (
        ["--base-lr", "0.3", "--limit-images", "64", "--method", loss],
        {"Lc", "Lnc", "rankme"},
    )


def test_every_script_has_its_cases():
    assert {f"{method.split()[0]}.py" for method in METHODS} == set(SCRIPTS)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "simtrace"])
def test_every_script_goes_on_bit_for_bit(capfd, tmp_path, method):
    script, args = f"{method.split()[0]}.py", [*TINY, *METHODS[method][0]]
    for out, steps in (("two", "3"), ("two", "12"), ("one", "12")):
        status, _, err = run_here(capfd, script, *args, "--out", tmp_path / out, "--max-steps", steps)
        assert (status, err) == (0, "")
    assert_same(weights(tmp_path / "two"), weights(tmp_path / "one"))
    assert {"loss", *METHODS[method][1]} <= log(tmp_path / "two")[-1].keys()


class FixedViews:
    """For common.Augment: the image as it is, then mirrored, in turn."""

    calls = 0

    def __init__(self, size, crop_scale=(1, 1), **options):
        self.size, self.crop_scale = size, crop_scale

    def __call__(self, images, crop=True):
        FixedViews.calls += 1
        x = torch.nn.functional.interpolate(images / 255 - 0.5, self.size)
        return x.flip(3) if FixedViews.calls % 2 == 0 else x


def without_batchnorm(script, args, env, out, err):
    """The script with a linear network and fixed views: all that may depend on the rank is ours. Writes each
    rank's model beside the checkpoint."""
    sys.path[0] = str(ROOT)
    os.environ.update(env)
    torch.set_num_threads(1)
    module = importlib.import_module(Path(script).stem)

    def network(*_):
        net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 16))
        net.feature_dim = 16
        return net

    module.common.resnet, module.common.Augment = network, FixedViews
    module.mlp = lambda widths: torch.nn.Linear(widths[0], widths[-1], bias=False)
    write = module.common.Run.end_epoch

    def end_epoch(run, *args):
        torch.save(run.model.state_dict(), run.out / f"rank{run.env.rank}.pt")
        write(run, *args)

    module.common.Run.end_epoch = end_epoch
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    module.main(module.parse_args(args))


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(tmp_path, method):
    """With BatchNorm out of the way, 12 steps at world 1 and 2 give the same weights, and both ranks hold the
    same: queue, pointer, key encoder and all."""
    script, flags = f"{method.split()[0]}.py", METHODS[method][0]
    if method == "sane":  # the draws of mixup and of strong operations are each rank's own
        flags = [*MOCO, "--ablation", "no-mixup"]
    for world in (1, 2):
        args = [*TINY, *flags, "--precision", "fp32", "--max-steps", "12", "--out", tmp_path / str(world)]
        (tmp_path / str(world)).mkdir()
        processes = start(script, *args, world=world, target=without_batchnorm)
        assert all(status == 0 for status, _, _ in finish(processes))
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert one.keys() == two.keys()
    for name in one:
        if name not in ("0.running_mean", "0.running_var", "1.weight", "1.bias"):  # the probe has a BatchNorm
            # barlow does not see a shift, so the gradient of the bias, the third parameter, is rounding alone
            atol = 1e-4 if (method.split()[-1], name) == ("barlow", "2.momentum_buffer") else 1e-5
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=atol, msg=name)
    for row, other in zip(log(tmp_path / "1"), log(tmp_path / "2"), strict=True):
        for name in {"loss", *METHODS[method][1]} - {"same_class"}:  # this is of rank 0's rows
            assert row[name] == pytest.approx(other[name], rel=1e-4), name
    ranks = [torch.load(tmp_path / "2" / f"rank{rank}.pt") for rank in (0, 1)]
    assert_same(*ranks)


def kept_by_rank(script, args, env, out, err):
    """The script as it is; each rank's model is written beside the checkpoint after its evaluation."""
    sys.path[0] = str(ROOT)
    run = importlib.import_module("common").Run
    evaluate = run.evaluate

    def evaluate_and_keep(self, final):
        row = evaluate(self, final)
        torch.save(self.model.state_dict(), self.out / f"rank{self.env.rank}.pt")
        return row

    run.evaluate = evaluate_and_keep
    program(script, args, env, out, err)


def test_both_processes_evaluate_the_same_network(tmp_path):
    """BatchNorm's statistics are each process's own on a CPU: not those that are evaluated and saved."""
    args = [*TINY, *METHODS["margin_infonce"][0], "--epochs", "1", "--out", tmp_path]
    run("margin_infonce.py", *args, world=2, target=kept_by_rank)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert_same(*ranks)
    assert_same(ranks[0], torch.load(tmp_path / "checkpoint.pt")["model"])
    assert any("running_mean" in name and value.abs().max() > 0 for name, value in ranks[0].items())


def test_sane_mixes_small_crops_of_large_images(capfd, tmp_path):
    for i in range(24):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        torchvision.utils.save_image(torch.rand(3, 110, 90), path)
    args = [
        *TINY,
        "--data-dir",
        tmp_path / "images",
        "--image-size",
        "112",
        "--batch-size",
        "8",
        "--queue",
        "16",
    ]
    args += ["--crops", "multi", "--strong", "--epochs", "1", "--base-lr", "0.1", "--workers", "2"]
    status, _, err = run_here(capfd, "sane.py", *args, "--out", tmp_path / "run")
    assert (status, err) == (0, "") and log(tmp_path / "run")[-1]["step"] == 3
    picture = torchvision.datasets.folder.pil_loader(tmp_path / "run" / "labels.png")
    assert picture.size == (114 * 9 + 2, 114 * 8 + 2)  # 8 queries; query, positive and the 7 other keys
