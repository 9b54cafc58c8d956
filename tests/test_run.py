"""Guards whole training runs: resume, signals, processes, errors, a run folder's files, what is printed."""

import argparse
import importlib
import json
import os
import random
import shutil
import signal
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
import helpers
import simtrace
import vicreg_variants
from helpers import (ROOT, SCRIPTS, FixedViews, assert_error_line, finish, log, log_lines, noise, one_thread,
                     program, run, run_here, saved, small_network, start)

TINY = [*helpers.TINY, "--data-dir", tempfile.mkdtemp(), *"--batch-size 32 --epochs 2 --base-lr 3".split(),
        *"--warmup-epochs 0.5 --eval-every 9".split()]


@pytest.fixture(scope="module", autouse=True)
def images():
    """320 training images (10 steps an epoch) and 64 test images: 16x16 noise of two classes, one darker."""
    folder = Path(TINY[TINY.index("--data-dir") + 1])
    for i in range(384):
        split, kind = "train" if i < 320 else "test", "dark" if i % 2 else "light"
        noise(folder / split / kind / f"{i:03}.png", seed=i, shade=1 / (1 + i % 2))
    with one_thread():
        yield
    shutil.rmtree(folder)


def weights(folder):
    state = saved(folder / "checkpoint.pt")
    momentum = {f"{k}.{n}": v for k, s in state["optimizer"]["state"].items() for n, v in s.items()}
    return {**state["model"], **momentum, **state["probe"]}


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert [k for k in a if not torch.equal(a[k], b[k])] == []


def same_rows(a, b):
    a, b = ([{k: v for k, v in row.items() if k != "images_per_s"} for row in rows] for rows in (a, b))
    return a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run to compare with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("simtrace.py", *TINY, "--out", folder)
    return folder


def test_run_folder(whole):
    pictures = {"views.png", "affinity.png", "curves.png"}
    files = {"args.json", "log.jsonl", "checkpoint.pt", "backbone.pt", ".lock"}
    assert {p.name for p in whole.iterdir()} == files | pictures
    rows = log(whole)
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 10), (2, 20)]
    assert {"lr", "loss", "alignment", "images_per_s", "embedding_std", "probe_accuracy"} <= rows[0].keys()
    assert rows[1]["knn_accuracy"] > 0 and "knn_accuracy" not in rows[0]
    for name in pictures:
        assert np.asarray(torchvision.datasets.folder.pil_loader(whole / name)).std() > 5
    for file in ("checkpoint.pt", "backbone.pt"):
        saved(whole / file)


def test_a_part_of_the_schedule_then_the_rest(capfd, whole, tmp_path):
    out = tmp_path / "run"
    first = run_here(capfd, "simtrace.py", *TINY, "--out", out, "--max-steps", "13")
    assert log(out)[-1]["step"] == 13 and log(out)[-1]["epoch"] == 2 and (out / "backbone.pt").exists()
    again = run_here(capfd, "simtrace.py", *TINY, "--out", out, "--max-steps", "13")
    assert "finished" in again[1] and "finished" not in first[1] and first[0] == again[0] == 0
    assert first[1].splitlines()[-1].startswith("step 13 of 20, as --max-steps asks")
    run_here(capfd, "simtrace.py", *TINY, "--out", out)
    assert_same(weights(out), weights(whole))
    assert same_rows(log(out), log(whole))


def test_what_a_person_sees(capfd, tmp_path):
    """What was found, an aligned line an epoch without a number longer than people read, the closing line."""
    args = [*TINY, "--epochs", "10", "--limit-images", "32", "--eval-every", "5", "--out", tmp_path]
    status, out, err = run_here(capfd, "simtrace.py", *args)
    found, *epochs, last = out.splitlines()
    assert (status, err) == (0, "") and found.startswith("32 training images of 2 classes, 64 test images")
    rows = log(tmp_path)
    for row, line in zip(rows, epochs, strict=True):
        words = line.split()
        number = {word: words[i + 1] for i, word in enumerate(words[:-1])}
        assert f"epoch {row['epoch']:2}/10 " in line and line.endswith(" left")
        for word, key, factor in (("loss", "loss", 1), ("alignment", "alignment", 1),
                                  ("probe", "probe_accuracy", 100), ("k-NN", "knn_accuracy", 100)):
            assert number[word] == "-" if key not in row else float(number[word]) == pytest.approx(
                factor * row[key], rel=5e-3, abs=0.051)
    assert len({*map(len, epochs)}) == 1 and len({line.index("k-NN") for line in epochs}) == 1
    assert all(f"{100 * rows[-1][key]:.1f}%" in last for key in ("knn_accuracy", "knn_init", "knn_pixels"))


def test_a_warm_up_longer_than_the_training_is_said(capfd, tmp_path):
    args = [*TINY, "--epochs", "1", "--warmup-epochs", "1", "--out", tmp_path]
    status, out, err = run_here(capfd, "simtrace.py", *args)
    assert (status, err) == (0, "") and "--warmup-epochs 1 of --epochs 1: the learning rate only" in out


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


def stopped(script, args, env, out, err):
    """The script, with a SIGTERM in the 14th step."""
    sys.path[0] = str(ROOT)
    common_run = importlib.import_module("common").Run
    book = common_run.log

    def log(self, *values):
        book(self, *values)
        if self.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    common_run.log = log
    program(script, args, env, out, err)


def test_sigterm_inside_an_epoch(capfd, whole, tmp_path):
    """The part of the epoch that is done is kept with the time it took."""
    (code, _, err), = finish(start("simtrace.py", *TINY, "--out", tmp_path, target=stopped))
    state = saved(tmp_path / "checkpoint.pt")
    assert (code, err) == (143, "stopped at step 14; the same command continues\n")
    assert state["step"] == 14 and state["sums"]["steps"] == 4 and 0.01 < state["seconds"] < 100
    assert run_here(capfd, "simtrace.py", *TINY, "--out", tmp_path)[0] == 0
    assert_same(weights(tmp_path), weights(whole))
    assert same_rows(log(tmp_path), log(whole))


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


KILLS = os.environ.get("KILLS")


@pytest.mark.parametrize("world, kills", [(1, int(KILLS or 6)), (2, int(KILLS or 3))])
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
        checkpoint = out / "checkpoint.pt"
        reached.append(saved(checkpoint)["step"] if checkpoint.exists() else 0)
    assert sorted(reached) == reached and len(set(reached)) > min(kills, 8) - 3, reached
    run("simtrace.py", *args, "--out", out, world=world)
    finish(reference)
    assert_same(weights(out), weights(tmp_path / "whole"))
    assert same_rows(log(out), log(tmp_path / "whole")) and len(log(out)) == epochs
    assert not [p for p in out.iterdir() if p.name.endswith(".tmp")]


def test_killed_between_checkpoint_and_log_line(capfd, whole, tmp_path, monkeypatch):
    """Once with a part of the line written, once with none of it: the restart evaluates and writes it."""
    out, end = tmp_path / "run", common.Run.end_epoch

    def killed(self, epoch):
        if self.step != step:
            return end(self, epoch)
        with open(self.out / "log.jsonl", "a") as file:
            file.write('{"epoch": 1, "st' if epoch == 0 else "")
        raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "end_epoch", killed)
        for step in (10, 20):
            assert run_here(capfd, "simtrace.py", *TINY, "--out", out)[0] == 137
            assert saved(out / "checkpoint.pt")["step"] == step and len(log_lines(out)) == 1
    for words in ("alignment", "finished"):
        status, text, _ = run_here(capfd, "simtrace.py", *TINY, "--out", out)
        assert status == 0 and words in text and ("raw pixels" in text) == (words == "alignment")
    assert_same(weights(out), weights(whole))
    assert same_rows(log(out), log(whole))


def test_two_commands_in_one_folder(whole, tmp_path):
    processes = [start("simtrace.py", *TINY, "--out", tmp_path / "run")[0] for _ in "12"]
    results = sorted(finish(processes))
    assert [status for status, _, _ in results] == [0, 1]
    assert_refused(results[1:], 1, "another process", str(tmp_path / "run"))
    assert_same(weights(tmp_path / "run"), weights(whole))
    assert same_rows(log(tmp_path / "run"), log(whole))


@pytest.mark.parametrize("place, what", [(common, "knn_accuracy"), (common.Images, "subset")])
def test_a_failed_evaluation_or_picture_costs_a_warning(capfd, whole, tmp_path, monkeypatch, place, what):
    def fault(*args, **options):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(place, what, fault)
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
        path = noise(tmp_path / ("train" if i < 16 else "test") / "ab"[i % 2] / f"{i}.png", (70, 70))
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


def own_disk(script, args, env, out, err):
    """The script, on rank 1 with a run folder of its own: as on machines that share none."""
    program(script, [*args[:-1], args[-1] + "/" + env["RANK"]], env, out, err)


def test_machines_must_share_the_run_folder(tmp_path):
    """At a restart one would go on from its checkpoint, the other begin anew."""
    args = [*TINY, "--max-steps", "3", "--out", str(tmp_path)]
    finish(start("simtrace.py", *args, world=2, target=own_disk))
    results = finish(start("simtrace.py", *args, world=2, target=own_disk))
    assert_refused(results, 1, "not every process sees the same", "--out")


def test_no_launcher_is_torchrun_with_one_process(whole, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(ROOT / "simtrace.py")]
    subprocess.run([*torchrun, *TINY, "--out", str(tmp_path / "run"), "--max-steps", "20"], check=True,
                   timeout=120, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert_same(weights(tmp_path / "run"), weights(whole))


def assert_refused(results, status, *words):
    for code, _, err in results:
        assert code == status, results
        assert "Traceback" not in err
    assert_error_line(results[0][2], *words)
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


@pytest.mark.parametrize("world, args, status, words",
                         [(1, *case) for case in ALONE] + [(2, *case) for case in TOGETHER])
def test_errors(capfd, tmp_path, world, args, status, words):
    if "cuda" in args and torch.cuda.is_available() or "mps" in args and torch.backends.mps.is_available():
        return
    args = [*TINY, "--out", tmp_path / "run", *args]
    if world == 2:
        results = finish(start("simtrace.py", *args, world=2), timeout=60)
    else:
        results = [run_here(capfd, "simtrace.py", *args)]
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
    flags = [(action.option_strings[0], action.type) for action in parsers[-1]._actions
             if action.type not in (None, os.path.expanduser)]  # all but words and paths
    assert len(flags) > 15 and sum("whole" in kind.__name__ for _, kind in flags) > 7
    for flag, kind in flags:
        texts = ["1e400", "nan", "-1e400", "x", "", "9" * 5000]
        whole = kind in (int, common.widths) or "whole" in kind.__name__
        for text in texts + (["9" * 30, "-1", "1.5"] if whole else []):
            with pytest.raises(SystemExit) as exit:
                script.parse_args([f"{flag}={text}"])
            assert_refused([(exit.value.code, *capfd.readouterr())], 2, flag)


def test_out_of_memory_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    common.init_distributed("cpu")
    for error, words in ((torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to"), "memory. Tried to"),
                         (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "Killed"),
                         (MemoryError(), "memory"), (common.Fault("cannot read a.png"), "cannot read a.png")):
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
    other = [*TINY, "--out", out, "--base-lr", "7"]
    for results in [run_here(capfd, "simtrace.py", *other)], finish(start("simtrace.py", *other, world=2)):
        assert_refused(results, 1, "base_lr", "7")
    assert (out / "checkpoint.pt").read_bytes() == before
    (out / "checkpoint.pt").write_bytes(before[:5000])
    args = [*TINY, "--out", out]
    for results in [run_here(capfd, "simtrace.py", *args)], finish(start("simtrace.py", *args, world=2)):
        assert_refused(results, 1, "checkpoint.pt")
    torch.save({"step": 2, "sums": {}, "model": {"strange": torch.zeros(1)}}, out / "checkpoint.pt")
    assert_refused([run_here(capfd, "simtrace.py", *args)], 1, str(out), "backbone.conv1.weight")
    (out / "checkpoint.pt").write_bytes(before)
    (out / "log.jsonl").write_text("{}\n")
    assert_refused([run_here(capfd, "simtrace.py", *args)], 1, str(out))
    (out / "args.json").write_text("{")
    assert_refused([run_here(capfd, "simtrace.py", *args)], 1, str(out))


def test_a_log_without_checkpoint_is_not_written_over_by_other_settings(capfd, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint.pt").unlink()
    results = [run_here(capfd, "simtrace.py", *TINY, "--out", tmp_path, "--seed", "9")]
    assert_refused(results, 1, "seed 0 (now 9)")
    assert log(tmp_path) == log(whole)


def test_a_run_that_ended_before_its_first_checkpoint_holds_nothing(capfd, tmp_path):
    args = [*TINY, "--out", tmp_path, "--max-steps", "1"]
    (tmp_path / "args.json").write_text(json.dumps({"settings": {"base_lr": 7}, "data": {"train_images": 1}}))
    (tmp_path / "log.jsonl").touch()
    assert run_here(capfd, "simtrace.py", *args)[0] == 0 and (tmp_path / "checkpoint.pt").exists()
    assert json.loads((tmp_path / "args.json").read_text())["settings"]["base_lr"] != 7


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
    state = saved(out / "checkpoint.pt")
    state["model"]["projector.0.weight"].fill_(float("inf"))
    torch.save(state, out / "checkpoint.pt")
    before = (out / "checkpoint.pt").read_bytes()
    result = run_here(capfd, "simtrace.py", *TINY, "--out", out, "--seed", "1")
    assert_refused([result], 1, "loss is nan at step 2", "lr")
    assert (out / "checkpoint.pt").read_bytes() == before and all(v.isfinite().all() for v in good.values())


def test_default_warnings_are_not_ours(tmp_path):
    """No deprecated call: warnings raised by our own modules are errors."""
    flags = [f"-Werror::{kind}Warning:{module}"
             for module in ("__main__", "common") for kind in ("Future", "Deprecation")]
    command = [sys.executable, *flags, str(ROOT / "simtrace.py"), *TINY, "--out", str(tmp_path)]
    subprocess.run([*command, "--max-steps", "2"], check=True, timeout=120, capture_output=True)


def model_after(capfd, tmp_path, *flags, steps="3"):
    run_here(capfd, "simtrace.py", *TINY, "--out", tmp_path, "--max-steps", steps, *flags)
    return saved(tmp_path / "checkpoint.pt")["model"]


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
    args = ["--limit-images", "5000", "--epochs", "2", "--eval-every", "2", "--device", "cpu",
            "--out", tmp_path]
    torch.set_num_threads(os.cpu_count())
    status, out, _ = run_here(capfd, "simtrace.py", *args)
    torch.set_num_threads(1)
    last = log(tmp_path)[-1]
    assert status == 0 and "raw pixels" in out
    assert last["knn_accuracy"] > last["knn_init"] + 0.08 and last["knn_accuracy"] > last["knn_pixels"] + 0.08


@pytest.mark.parametrize("world", [1, 2])
def test_no_data_and_no_internet(tmp_path, world):
    env = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    args = ["--dataset", "cifar10", "--data-dir", tmp_path / "none", "--out", tmp_path / "run"]
    args += ["--device", "cpu"]
    results = finish(start("simtrace.py", *args, world=world, env=env), timeout=30)
    assert_refused(results, 1, "cifar10", str(tmp_path / "none"), "cifar-10-batches-py")


MOCO = ["--base-lr", "0.3", "--queue", "48"]  # 48: the second batch goes round the end
METHODS = {
    "simtrace": ([], {"alignment"}),
    "simaffinity": ([], {"ce", "sym"}),
    "simwhitening": ("--symmetric --predictor --momentum-encoder 0.9".split(), {"ce", "sym"}),
    "sane": ([*MOCO, "--strong"], {"vanilla", "mixup", "mu", "same_class"}),
    "margin_infonce": ([*MOCO, "--m1", "0.2", "--attenuation", "0.5"], {"positive_cos"}),
    "margin_infonce simclr": ("--base-lr 0.3 --ratio-m1 0.4 --framework simclr".split(), {"positive_cos"}),
    "vicreg_variants": ([], {"sim", "var", "cov", "Lc", "Lnc", "rankme", "rankme_embeddings"}),
    "vicreg_variants ctr": (  # its two pictures are of 32 and of 12 rows
        "--method vicreg-ctr --base-lr 0.3 --projector 32-12".split(), {"sim", "var", "cov"}),
    "margin_infonce byol": ("--base-lr 0.075 --scale 2 --framework byol".split(), {"positive_cos"}),
}
for loss in vicreg_variants.METHODS.keys() - {"vicreg", "vicreg-ctr"}:  # 4 steps each
    flags = f"--base-lr 0.3 --limit-images 64 --method {loss}".split()
    METHODS[f"vicreg_variants {loss}"] = flags, {"Lc", "Lnc", "rankme"}


def test_every_script_has_its_cases():
    assert {f"{method.split()[0]}.py" for method in METHODS} == set(SCRIPTS)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "simtrace"])
def test_every_script_goes_on_bit_for_bit(capfd, tmp_path, method):
    script, args = f"{method.split()[0]}.py", [*TINY, *METHODS[method][0]]
    for out, steps in (("two", "3"), ("two", "12"), ("one", "12")):
        status, _, err = run_here(capfd, script, *args, "--out", tmp_path / out, "--max-steps", steps)
        assert status == 0 and "error" not in err  # so small a BYOL may be near a collapse, and warned of
    assert_same(weights(tmp_path / "two"), weights(tmp_path / "one"))
    assert {"loss", *METHODS[method][1]} <= log(tmp_path / "two")[-1].keys()


def without_batchnorm(script, args, env, out, err):
    """The script with a small network and fixed views: all that may depend on the rank is ours. Writes each
    rank's model beside the checkpoint."""
    sys.path[0] = str(ROOT)
    os.environ.update(env)
    torch.set_num_threads(1)
    module = importlib.import_module(Path(script).stem)

    module.common.resnet, module.common.Augment = small_network, FixedViews
    module.mlp = lambda widths: torch.nn.Linear(widths[0], widths[-1], bias=False)
    end = module.common.Run.end_epoch

    def keep_and_end(run, epoch):
        torch.save(run.model.state_dict(), run.out / f"rank{run.env.rank}.pt")
        end(run, epoch)

    module.common.Run.end_epoch = keep_and_end
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
        ranks = [saved(tmp_path / str(world) / f"rank{rank}.pt") for rank in range(world)]
        for rank in ranks[1:]:
            assert_same(ranks[0], rank)
        assert ("queue" in ranks[0]) == ("--queue" in flags)


def kept_by_rank(script, args, env, out, err):
    """The script as it is; each rank's model is written beside the checkpoint after its evaluation."""
    sys.path[0] = str(ROOT)
    run = importlib.import_module("common").Run
    end = run.end_epoch

    def keep_and_end(self, epoch):
        torch.save(self.model.state_dict(), self.out / f"rank{self.env.rank}.pt")
        end(self, epoch)

    run.end_epoch = keep_and_end
    program(script, args, env, out, err)


def test_both_processes_evaluate_the_same_network(tmp_path):
    """BatchNorm's statistics are each process's own on a CPU: not those that are evaluated and saved."""
    args = [*TINY, *METHODS["margin_infonce"][0], "--epochs", "1", "--out", tmp_path]
    run("margin_infonce.py", *args, world=2, target=kept_by_rank)
    ranks = [saved(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert_same(ranks[0], saved(tmp_path / "checkpoint.pt")["model"])
    differ = [name for name in ranks[0] if not torch.equal(ranks[0][name], ranks[1][name])]
    assert differ and not any(name.startswith("backbone.") for name in differ)
    assert ranks[0]["backbone.bn1.running_mean"].abs().max() > 0


def test_sane_mixes_small_crops_of_large_images(capfd, tmp_path):
    for i in range(24):
        noise(tmp_path / "images" / "ab"[i % 2] / f"{i}.jpg", (90, 110))
    args = [*TINY, "--data-dir", tmp_path / "images", *"--image-size 112 --batch-size 8 --queue 16".split()]
    args += "--crops multi --strong --epochs 1 --base-lr 0.1 --workers 2".split()
    status, _, err = run_here(capfd, "sane.py", *args, "--out", tmp_path / "run")
    assert (status, err) == (0, "") and log(tmp_path / "run")[-1]["step"] == 3
    picture = torchvision.datasets.folder.pil_loader(tmp_path / "run" / "labels.png")
    assert picture.size == (114 * 9 + 2, 114 * 8 + 2)  # 8 queries; query, positive and the 7 other keys
