"""Whole training runs: resume, signals, two processes, errors, the files of a run folder."""

import argparse
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
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

import common
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
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
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
    return [json.loads(line) for line in log_lines(folder)]


def log_lines(folder):
    return (folder / "log.jsonl").read_text().splitlines()


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
    files = {"args.json", "log.jsonl", "checkpoint.pt", "backbone.pt", "views.png", "affinity.png", ".lock"}
    assert {p.name for p in whole.iterdir()} == files
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
    """SIGTERM, Ctrl-C and the terminal's hang-up, to a run each."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # under nohup, in a script
    folders = [tmp_path / str(number) for number in numbers]
    processes = [start("simtrace.py", *TINY, "--out", out)[0] for out in folders]
    for out, number, process in zip(folders, numbers, processes):
        while not (out / "log.jsonl").exists() or not log(out):
            time.sleep(0.02)
        os.kill(process.pid, number)
    for (code, _, err), status in zip(finish(processes), [128 + number for number in numbers]):
        assert code == status
        assert err.startswith("stopped at step") and err.endswith("the same command continues\n")
        assert err.count("\n") == 1
    for process in [start("simtrace.py", *TINY, "--out", out)[0] for out in folders]:
        assert finish([process])[0][0] == 0
    for out in folders:
        assert_same(weights(out), weights(whole))


def test_nohup(capfd, tmp_path, monkeypatch):
    """A hang-up that was ignored at the start stays so."""
    before, seen = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    monkeypatch.setattr(simtrace, "picture", lambda *z: seen.append(signal.getsignal(signal.SIGHUP)))
    run_here(capfd, "simtrace.py", *TINY, "--out", tmp_path, "--max-steps", "1")
    signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def killed(script, args, env, out, err):
    """The script; soon after the n-th time that rank 0 opens or renames a file of the run folder, SIGKILL."""
    events, wait = iter(range(int(env["N"]))), float(env["WAIT"])

    def hook(event, arguments):
        if event in ("open", "os.rename") and "/run/" in str(arguments[0]) and next(events, "n") == "n":
            threading.Timer(wait, os.kill, (os.getpid(), signal.SIGKILL)).start()

    if env.get("RANK", "0") == "0":
        sys.addaudithook(hook)
    program(script, args, env, out, err)


@pytest.mark.parametrize("world, kills", [(1, int(os.environ.get("KILLS", 6))), (2, 3)])
def test_sigkill_at_any_moment(tmp_path, world, kills):
    """So many over one training with epochs of two steps, which saves, evaluates and draws after each. A kill
    comes at the latest some four epochs after a start. (KILLS=20 takes minutes.)"""
    epochs = 4 * kills + 2
    args = [*TINY, "--limit-images", "64", "--epochs", epochs, "--eval-every", "1"]
    reference = start("simtrace.py", *args, "--out", tmp_path / "whole", world=world)
    out, moments, reached = tmp_path / "run", random.Random(0), []
    for _ in range(kills):
        env = dict(N=moments.randrange(8, 26), WAIT=moments.choice((0, moments.uniform(0, 0.2))))
        results = finish(start("simtrace.py", *args, "--out", out, world=world, env=env, target=killed))
        assert results[0][0] == -signal.SIGKILL and all("Traceback" not in err for _, _, err in results)
        reached.append(torch.load(out / "checkpoint.pt")["step"] if (out / "checkpoint.pt").exists() else 0)
    assert sorted(reached) == reached and len(set(reached)) > min(kills, 8) - 3, reached
    run("simtrace.py", *args, "--out", out, world=world)
    finish(reference)
    assert_same(weights(out), weights(tmp_path / "whole"))
    assert same_rows(log(out), log(tmp_path / "whole")) and len(log(out)) == epochs
    assert not [p for p in out.iterdir() if p.name.endswith(".tmp")]


def test_killed_between_checkpoint_and_log_line(capfd, whole, tmp_path, monkeypatch):
    """Once with a part of the line written, once with none of it: the restart evaluates and writes it."""
    out = tmp_path / "run"

    def killed(self, row):
        with open(self.out / "log.jsonl", "a") as file:
            file.write('{"epoch": 1, "st' if row["epoch"] == 1 else "")
        raise SystemExit(137)

    for step in (10, 20):
        with monkeypatch.context() as patch:
            write = common.Run.write
            write_or_die = lambda run, row: (killed if row["step"] == step else write)(run, row)  # noqa: E731
            patch.setattr(common.Run, "write", write_or_die)
            assert run_here(capfd, "simtrace.py", *TINY, "--out", out)[0] == 137
        assert torch.load(out / "checkpoint.pt")["step"] == step and len(log_lines(out)) == 1
    status, text, _ = run_here(capfd, "simtrace.py", *TINY, "--out", out)
    assert status == 0 and "raw pixels" in text and "finished" in text
    assert_same(weights(out), weights(whole))
    assert same_rows(log(out), log(whole))


def test_two_commands_in_one_folder(whole, tmp_path):
    processes = [start("simtrace.py", *TINY, "--out", tmp_path / "run")[0] for _ in "12"]
    results = sorted(finish(processes))
    assert [status for status, _, _ in results] == [0, 1]
    assert_refused(results[1:], 1, "another process", str(tmp_path / "run"))
    assert_same(weights(tmp_path / "run"), weights(whole))
    assert same_rows(log(tmp_path / "run"), log(whole))


def test_a_failed_evaluation_or_picture_costs_a_warning(capfd, whole, tmp_path, monkeypatch):
    def fault(*args, **options):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(common, "knn_accuracy", fault)
    monkeypatch.setattr(simtrace, "picture", fault)
    status, _, err = run_here(capfd, "simtrace.py", *TINY, "--out", tmp_path)
    assert status == 0 and err.splitlines() == [
        f"warning: no {what}: CUDA out of memory. Tried"
        for what in ("affinity.png at step 10", "evaluation at step 20", "affinity.png at step 20")]
    assert_same(weights(tmp_path), weights(whole))
    expected = log(whole)
    for name in ("knn_accuracy", "knn_init", "knn_pixels", "probe_test_accuracy"):
        del expected[1][name]
    assert same_rows(log(tmp_path), expected)


def faults(script, args, env, out, err):
    """The script, but rank 1 has no memory for k-NN, and rank 0 has none for features in the second epoch."""
    sys.path[0] = str(ROOT)
    common = importlib.import_module("common")
    calls, autocast = [], common.autocast

    def fault(*args, **options):
        raise MemoryError(f"rank {env['RANK']}")

    def counted(*args):  # on rank 0: 10 steps, the bank's chunk, the test images', 10 steps, the bank's chunk
        calls.append(args)
        return fault() if len(calls) == 23 else autocast(*args)

    if env["RANK"] == "1":
        common.knn_accuracy = fault
    else:
        common.autocast = counted
    program(script, args, env, out, err)


def test_a_fault_of_one_process_is_a_warning_of_all(tmp_path):
    """None waits for the other, and both go on."""
    args = [*TINY, "--eval-every", "1", "--out", tmp_path]
    results = finish(start("simtrace.py", *args, world=2, target=faults))
    assert [status for status, _, _ in results] == [0, 0] and results[1][2] == ""
    assert results[0][2].splitlines() == [
        "warning: no evaluation at step 10: rank 1", "warning: no evaluation at step 20: rank 0"]
    assert [row["step"] for row in log(tmp_path)] == [10, 20]
    assert not {"knn_accuracy", "probe_test_accuracy"} & {name for row in log(tmp_path) for name in row}


def test_unreadable_test_image(capfd, tmp_path):
    for i in range(20):
        path = tmp_path / ("train" if i < 16 else "test") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        torchvision.utils.save_image(torch.rand(3, 70, 70), path)
    path.write_bytes(path.read_bytes()[:300])
    args = [*TINY, "--data-dir", tmp_path, "--image-size", "72", "--batch-size", "16", "--workers", "0"]
    status, _, err = run_here(capfd, "simtrace.py", *args, "--out", tmp_path / "run")
    assert status == 0 and len(log(tmp_path / "run")) == 2
    assert err.startswith("warning: no evaluation at step 2") and str(path) in err and err.count("\n") == 1


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
    (["--workers", "-1"], 2, ["--workers", "-1"]),
    (["--projector", "32-x-8"], 2, ["--projector"]),
    (["--projector", "32-32-64", "--eps", "0.01"], 2, ["64", "32"]),  # D >= 2N
    (["--batch-size", "322"], 1, ["322", "320"]),
    (["--device", "cuda"], 2, ["cuda"]),
    (["--device", "mps"], 2, ["mps"]),
    (["--dataset", "folder", "--data-dir", "/no/such"], 1, ["/no/such"]),
    (["--base-lr", "1e30"], 1, ["step", "lr", "loss"]),
]
TOGETHER = [ALONE[0], ALONE[9], ALONE[-2], ALONE[-1]]  # one of each stage: slow to start


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


@pytest.mark.parametrize("env", ["WORLD_SIZE=2", "WORLD_SIZE=2 RANK=1", "RANK=1", "WORLD_SIZE=0"])
def test_half_a_launcher(capfd, tmp_path, monkeypatch, env):
    for variable in env.split():
        monkeypatch.setenv(*variable.split("="))
    result = run_here(capfd, "simtrace.py", *TINY, "--out", tmp_path)
    assert_refused([result], 2, "WORLD_SIZE", "torchrun")


@pytest.mark.parametrize("name", SCRIPTS)
def test_absurd_numbers(capfd, monkeypatch, name):
    """Each flag that takes a number."""
    script, known, parsers = importlib.import_module(name[:-3]), argparse.ArgumentParser.parse_known_args, []
    with monkeypatch.context() as patch:
        seen = lambda parser, *args: parsers.append(parser) or known(parser, *args)  # noqa: E731
        patch.setattr(argparse.ArgumentParser, "parse_known_args", seen)
        script.parse_args([])
    flags = [(action.option_strings[0], action.type) for action in parsers[0]._actions if action.type]
    assert len(flags) > 15
    for flag, kind in flags:
        texts = ["1e400", "nan", "-1e400", "x", "", "9" * 5000]
        for text in texts + (["9" * 30, "-1"] if "int" in str(kind) else []):
            with pytest.raises(SystemExit) as exit:
                script.parse_args([f"{flag}={text}"])
            assert_refused([(exit.value.code, *capfd.readouterr())], 2, flag)


def test_out_of_memory_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    common.init_distributed("cpu")
    for error, words in (
        (torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to"), "memory. Tried to"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "Killed"),
        (MemoryError(), "memory"),
        (common.Fault("cannot read a.png"), "cannot read a.png"),
    ):
        sys.excepthook(type(error), error, None)
        assert_refused([(1, *capfd.readouterr())], 1, words)
    sys.excepthook(ValueError, ValueError("ours"), None)
    assert "ValueError: ours" in capfd.readouterr()[1]


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_three_processes_train_as_one(tmp_path, script):
    """With BatchNorm out of the way, 20 steps at world 1, 2 and 3 give the same weights, and all ranks hold
    the same: queue, pointer, key encoder and all."""
    flags, names = METHODS[script.removesuffix(".py")]
    flags = ["40" if flag == "48" else flag for flag in flags]  # so that a batch goes round the queue's end
    if script == "sane.py":  # the draws of mixup and of strong operations are each rank's own
        flags = ["--base-lr", "0.3", "--queue", "40", "--ablation", "no-mixup"]
    args = [*TINY, *flags, "--batch-size", "24", "--precision", "fp32", "--max-steps", "20"]
    processes = []
    for world in (1, 2, 3):
        (tmp_path / str(world)).mkdir()
        out = ["--out", tmp_path / str(world)]
        processes += start(script, *args, *out, world=world, target=without_batchnorm)
    assert all(status == 0 for status, _, _ in finish(processes))
    one = weights(tmp_path / "1")
    for world in (2, 3):
        more = weights(tmp_path / str(world))
        assert one.keys() == more.keys()
        for name in one:
            if name not in ("0.running_mean", "0.running_var", "1.weight", "1.bias"):  # the probe's BatchNorm
                torch.testing.assert_close(one[name], more[name], rtol=1e-3, atol=1e-5, msg=name)
        for row, other in zip(log(tmp_path / "1"), log(tmp_path / str(world)), strict=True):
            for name in {"loss", *names} - {"same_class"}:  # this is of rank 0's rows
                assert row[name] == pytest.approx(other[name], rel=1e-4), name
        ranks = [torch.load(tmp_path / str(world) / f"rank{rank}.pt") for rank in range(world)]
        for rank in ranks[1:]:
            assert_same(ranks[0], rank)
        assert ("queue" in ranks[0]) == ("--queue" in flags)


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
