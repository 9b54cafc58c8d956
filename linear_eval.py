"""Evaluate pretrained backbones, which stay frozen and in eval mode.

    python linear_eval.py RUN                                a run folder, a checkpoint.pt or a backbone.pt
    python linear_eval.py RUN RUN RUN --protocol knn         a table of several; a minute each on a CPU
    python linear_eval.py RUN --dataset cifar100             transfer to another data set
    torchrun --nproc_per_node=8 linear_eval.py RUN           several GPUs: the same global batch

linear           classifier on features of random crops and flips: SGD lr 30 (x batch/256), momentum 0.9,
                 no weight decay, batch 256, 100 epochs, cosine; on imagenet LARS base lr 0.02, batch 1024,
                 90 epochs. Both are UniCLR's (Sec. 4). MoCo's, which the papers of the margins and of SANE
                 follow: --schedule step, on imagenet with --optimizer sgd --batch-size 256 --epochs 100;
                 SANE on CIFAR-10: --epochs 200
frozen-features  the same classifier on features taken once, of images as they are (ours: quick)
knn              vote of the k nearest training images, weight exp(cosine / tau); of lists (the duality paper,
                 App. F) accuracy is the first pair's, best_on_test chosen on test images
rankme, cka      effective rank of the training features (arXiv 2210.02885); linear CKA of two backbones' test
                 features (arXiv 1905.00414)
features         features and labels of both splits as .npy in --out, for t-SNE, UMAP, scikit-learn
curves           k-NN and online probe over the epochs of several runs, from their logs: OUT/curves.png

stdout ends with a JSON object for each run; accuracy: of the last epoch, each test image once. Features come
over their mean norm s (ours; --no-normalize: as they are): SGD with lr is then SGD with lr / s^2 without, and
lr 30 suits every network: top-1 of three pre-runs (SimCLR, VICReg-exp, SANE; frozen-features, see
.github/measurements.md) 43.3, 47.0, 34.7 %; as they are 35.3, 39.1, 32.7 %.
"""
import argparse
import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import utils
from tqdm import tqdm

import common
from common import rankme


def parse_args(argv=None):
    def several(kind):
        def read(text):
            return [kind(v) for v in text.split(",")]
        read.__name__ = kind.__name__  # for argparse's message
        return read

    parser = argparse.ArgumentParser(prog="linear_eval.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder, checkpoint.pt or backbone.pt")
    add("--protocol", default="linear", help="default: linear",
        choices=("linear", "frozen-features", "knn", "rankme", "cka", "features", "curves"))
    add("--other", help="second run, checkpoint or backbone, for --protocol cka")
    add("--k", type=several(common.count), default=[200], help="neighbours, K or K,K,... (default 200)")
    add("--tau", type=several(common.positive), default=[0.1],
        help="temperature of the vote, T or T,T,... (default 0.1)")
    add("--dataset", choices=common.DATASETS,
        help="default: that of the pretraining, where it was found then, or in --data-dir")
    add("--epochs", type=common.count, help="of the classifier (default 100; imagenet 90)")
    add("--batch-size", type=common.count, help="over all processes (default 256; imagenet 1024)")
    add("--optimizer", choices=("sgd", "lars"), help="default sgd; imagenet lars")
    add("--base-lr", type=common.positive, help="per 256 images (default: sgd 30, lars 0.02)")
    add("--schedule", choices=("cosine", "step"), default="cosine", help="step: x 0.1 at 60 %% and 80 %%")
    add("--weight-decay", type=common.rate, default=0.0, help="of the classifier (default 0)")
    add("--normalize", action=argparse.BooleanOptionalAction, default=True,
        help="divide the features by one number, the mean norm of the training features (default)")
    add("--save", type=os.path.expanduser, metavar="FILE",
        help="write the classifier and what it takes to use it")
    add("--out", type=os.path.expanduser,
        help="folder for eval.jsonl (results, added), .npy, .png and the classifier of each epoch: the same "
             "command goes on from it; other settings or another backbone start anew")
    common.add_machine_args(parser)
    parser.set_defaults(data_dir=None)
    args = parser.parse_args(argv)
    if (args.protocol == "cka") != (args.other is not None):
        parser.error("--other goes with --protocol cka, and cka needs it")
    if args.save and args.protocol not in ("linear", "frozen-features"):
        parser.error("--save goes with --protocol linear or frozen-features")
    most = 1 if args.save else {"features": 1, "curves": len(common.COLOURS)}.get(args.protocol, math.inf)
    if len(args.runs) > most:
        parser.error(f"{len(args.runs)} runs, but --save and --protocol features take one, curves ten")
    if args.protocol in ("features", "curves") and not args.out:
        parser.error(f"--protocol {args.protocol} needs --out")
    return args


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Likeness in [0, 1] of two feature sets of the same N images, (N, D1) and (N, D2), centred here."""
    x, y = (f.double() - f.double().mean(0) for f in (x, y))
    return ((y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())).item()


def load_backbone(path) -> tuple[nn.Module, dict]:
    """Frozen backbone in eval mode and what its file says of it: arch, width, small_images, mean, std,
    image_size, dataset. Anything but exactly the keys of that network ends the program."""
    path = Path(path) / "backbone.pt" if Path(path).is_dir() else Path(path)
    try:
        about = common.load_checkpoint(path)
    except ValueError as error:
        common.fail(error)
    weights = about.pop("state_dict", None)
    if weights is None and "model" in about:  # checkpoint.pt: the whole model, of which backbone.* is ours
        model = about.pop("model")
        weights = {k.removeprefix("backbone."): v for k, v in model.items() if k.startswith("backbone.")}
    named = weights if isinstance(weights, dict) else about
    keys = ", ".join(str(key) for key in list(named)[:3]) or "nothing"
    try:
        backbone = common.resnet(about["arch"], about["width"], about["small_images"])
        backbone.load_state_dict(weights)
        wanted = ("arch", "width", "small_images", "mean", "std", "image_size", "dataset")
        about = {key: about[key] for key in wanted}
    except RuntimeError as error:  # a key too few or too many, a shape that differs
        common.fail(f"{path} holds no backbone of this project: its weights are {keys}, ...: "
                    f"{' '.join(str(error).split())[:300]}")
    except (KeyError, TypeError, AttributeError):
        common.fail(f"{path} holds no backbone of this project: it has {keys}, not arch, width, ... and a "
                    "state_dict with conv1.weight, ...")
    return backbone.requires_grad_(False).eval(), about


def said(run) -> dict:
    """What the args.json beside a backbone says: its `script` and its flags, if it is there."""
    try:
        file = (Path(run) if Path(run).is_dir() else Path(run).parent) / "args.json"
        about = json.loads(file.read_text())
        return {"script": about.get("script", "-"), **about.get("settings", {}), **about.get("all", {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def method(run) -> str:
    """--method, --framework or else the script that made a backbone."""
    about = said(run)
    return about.get("method") or about.get("framework") or about.get("script", "-")


def linear(run, name: str, backbone: nn.Module, about: dict, train, test, features, args, env) -> dict:
    """The protocols linear and frozen-features: train a classifier, test it, save it; what to report."""
    frozen, imagenet, n = args.protocol == "frozen-features", name == "imagenet", len(train.images)
    batch_size = min(args.batch_size or (1024 if imagenet else 256), n) // env.world_size * env.world_size
    kind, epochs = args.optimizer or ("lars" if imagenet else "sgd"), args.epochs or (90 if imagenet else 100)
    base_lr = args.base_lr or (0.02 if kind == "lars" else 30.0)
    lr, steps = base_lr * batch_size / 256, n // batch_size
    report = dict(epochs=epochs, batch_size=batch_size, optimizer=kind, base_lr=base_lr,
                  schedule=args.schedule, weight_decay=args.weight_decay, normalize=args.normalize)
    before, test_x = [v.clone() for v in backbone.state_dict().values()], features(test)
    train_x = features(train) if frozen or args.normalize else None
    scale = train_x.norm(dim=1).mean().item() if args.normalize else 1.0
    augment = common.Augment(train.image_size, crop_scale=(0.08, 1.0), jitter_p=0.0, gray_p=0.0, blur_p=0.0,
                             mean=train.mean, std=train.std)
    source, view = train, augment
    if frozen:
        source, view = replace(train, images=train_x), lambda h, crop: h
        view.size = view.crop_scale = None
    torch.manual_seed(args.seed)
    classifier = nn.Linear(backbone.feature_dim, len(train.classes)).to(env.device)
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    optimizer = (common.LARS if kind == "lars" else torch.optim.SGD)(
        classifier.parameters(), lr=0.0, momentum=0.9, weight_decay=args.weight_decay)

    first, file = 0, None
    if args.out:  # named by all that decides what is in it
        key = hashlib.sha256(repr((about, report, args.seed, args.precision)).encode())
        for v in (*backbone.state_dict().values(), train.images, train.labels):
            key.update(v.cpu().contiguous().numpy() if torch.is_tensor(v) else repr(v).encode())
        file = Path(args.out) / f"{args.protocol}-{key.hexdigest()[:12]}.pt"
    if file and file.exists():
        try:
            state = common.load_checkpoint(file)
        except ValueError as error:
            common.fail(error)
        classifier.load_state_dict(state["classifier"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    bar = tqdm(desc="classifier", total=epochs * steps, initial=first * steps, unit="step", leave=False,
               disable=True if env.rank else None)
    for epoch in range(first, epochs):
        batches = common.batches(source, epoch, batch_size, env, args.seed, [view], args.workers)
        for step, ((x,), y) in enumerate(batches, epoch * steps):
            with torch.no_grad(), common.autocast(env.device, args.precision):
                h = x if frozen else backbone(x)
            rate = common.cosine_lr(step, epochs * steps, lr) if args.schedule == "cosine" else (
                lr * 0.1 ** ((10 * epoch >= 6 * epochs) + (10 * epoch >= 8 * epochs)))
            optimizer.param_groups[0]["lr"] = rate
            loss = F.cross_entropy(classifier(h.float() / scale), y)
            optimizer.zero_grad()
            loss.backward()
            for p in classifier.parameters() if env.world_size > 1 else ():
                dist.all_reduce(p.grad.div_(env.world_size))
            optimizer.step()
            bar.update()
        if not all(p.isfinite().all() for p in classifier.parameters()):
            bar.close()
            common.fail(f"{run}: the classifier is not finite in epoch {epoch + 1}; lower --base-lr")
        bar.set_description(f"classifier, epoch {epoch + 1}/{epochs}, loss {loss.item():.3f}")
        if file:
            common.on_rank0(lambda: common.save_checkpoint(file, dict(
                classifier=classifier.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch + 1)), env)
    bar.close()
    if not all(map(torch.equal, before, backbone.state_dict().values())):
        common.fail("the backbone changed while it was evaluated")

    with torch.no_grad():
        logits = classifier(test_x / scale).cpu()
    hits = logits.topk(min(5, logits.shape[1])).indices == test.labels[:, None]
    top5 = {"top5": hits.any(1).sum().item() / len(hits)} if logits.shape[1] > 5 else {}
    if args.save:
        state = {k: v.detach().cpu() for k, v in classifier.named_parameters()}
        state.update(classes=list(train.classes), scale=scale, **about)
        common.on_rank0(lambda: common.save_checkpoint(args.save, state), env)
    return {"accuracy": hits[:, 0].sum().item() / len(hits), **top5, **report}


def evaluate(run, args, env) -> dict:
    """What there is to report of one run by all protocols but curves."""
    def features(data, of=None):
        network = (of or backbone).to(env.device, memory_format=torch.channels_last)
        try:
            return common.features(network, data, env, args.precision, args.workers)
        except common.Fault as fault:
            common.fail(f"{run}: {fault}")

    def images(train: bool, about):  # as the network was trained to see them
        data = common.load_images(name, data_dir, train, env, about["image_size"],
                                  classes=args.classes, report=True)
        return data and replace(data, **{k: about[k] for k in ("mean", "std", "image_size")})

    backbone, about = load_backbone(run)
    name, protocol = args.dataset or about["dataset"], args.protocol
    found = said(run).get("data_dir", "data")  # perhaps on another machine
    data_dir = args.data_dir or (found if name == about["dataset"] and os.path.isdir(found) else "data")
    train, test = images(True, about), images(False, about)
    if test is None and protocol not in ("rankme", "features"):
        common.fail(f"{data_dir} has no test images: put them in its folder test or val")
    if protocol in ("linear", "frozen-features", "knn") and (train.labels is None or test.labels is None):
        why = train.unlabelled or test.unlabelled or f"{data_dir} must have a folder per class"
        common.fail(f"--protocol {protocol} needs labels: {why}")
    result = {"protocol": protocol, "run": str(run), "method": method(run), "dataset": name,
              "n_train": len(train.images), "n_test": len(test.images) if test else 0}
    if protocol == "knn":
        sets = features(train), train.labels, features(test), test.labels
        tried = [dict(accuracy=common.knn_accuracy(*sets, k, tau), k=k, tau=tau)
                 for k in args.k for tau in args.tau]
        more = dict(tried=tried, best_on_test=max(tried, key=lambda setting: setting["accuracy"]))
        return {**result, **tried[0], **(more if len(tried) > 1 else {})}
    if protocol == "rankme":
        return {**result, "rankme": rankme(features(train))}
    if protocol == "cka":
        other, other_about = load_backbone(args.other)
        cka = linear_cka(features(test), features(images(False, other_about), other))
        return {**result, "other": args.other, "cka": cka}
    if protocol == "features":
        for split, data in (("train", train), ("test", test)):
            arrays = dict(features=features(data), labels=data.labels) if data else {}
            common.on_rank0(lambda: [np.save(Path(args.out) / f"{split}_{name}.npy", array.cpu().numpy())
                                     for name, array in arrays.items() if array is not None], env)
        return {**result, "dimensions": backbone.feature_dim, "classes": list(train.classes)}
    return {**result, **linear(run, name, backbone, about, train, test, features, args, env)}


def curves(args, env) -> list[dict]:
    """Draw OUT/curves.png from the runs' logs; what to report of each run."""
    results, logs, keys = [], [], ("epoch", "knn_accuracy", "probe_test_accuracy")
    for run in args.runs:
        try:
            rows = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
            rows = [row for row in rows if "knn_accuracy" in row]
            logs.append({key: [row[key] for row in rows] for key in keys})
            last = {key: rows[-1][key] for key in keys}
        except (OSError, ValueError, LookupError, TypeError):
            common.fail(f"{run} has no log.jsonl with knn_accuracy and probe_test_accuracy over epochs")
        results.append({"protocol": "curves", "run": run, "method": method(run), **last})
    picture = torch.cat([
        common.plot(f"{name} in % over epochs", {
            run: (log["epoch"], [100 * v for v in log[key]]) for run, log in zip(args.runs, logs)})
        for name, key in (("k-NN", keys[1]), ("online probe", keys[2]))], dim=1)
    common.on_rank0(lambda: common.write_file(
        Path(args.out) / "curves.png", lambda file: utils.save_image(picture, file, format="png")), env)
    return results


COLUMNS = {"run": "run", "method": "method", "dataset": "dataset", "protocol": "protocol",
           "accuracy": "top-1", "top5": "top-5", "rankme": "RankMe", "cka": "CKA", "dimensions": "dimensions",
           "epoch": "epoch", "knn_accuracy": "k-NN", "probe_test_accuracy": "probe"}


def table(results: list[dict]) -> str:
    """Aligned columns; a row for each result, of k-NN one for each k and tau."""
    keys = [key for key in COLUMNS if any(key in result for result in results)]
    lines = [[COLUMNS[key] for key in keys]]
    for result in results:
        for tried in result.get("tried", [result]):
            row = {**result, **tried}
            row["protocol"] += f", k {row['k']}, tau {row['tau']}" if "k" in row else ""
            row["protocol"] += " (best on test)" if tried is result.get("best_on_test") else ""
            cells = [row.get(key, "-") for key in keys]
            lines.append([f"{v:.4f}" if isinstance(v, float) else str(v) for v in cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main(args):
    env = common.init_distributed(args.device)

    def write():  # a result stands there once
        with open(Path(args.out) / "eval.jsonl", "a+") as file:
            file.seek(0)
            there = file.readlines()
            file.writelines(line for line in (f"{json.dumps(row)}\n" for row in results) if line not in there)

    if args.out:
        common.on_rank0(lambda: Path(args.out).mkdir(parents=True, exist_ok=True), env)
    results = curves(args, env) if args.protocol == "curves" else []
    try:
        if results:
            common.on_rank0(write, env)
        for run in args.runs if args.protocol != "curves" else ():
            if not results:  # what cannot be read ends the program before the work
                [load_backbone(path) for path in (*args.runs, args.other) if path]
            results.append(evaluate(run, args, env))
            if args.out:
                common.on_rank0(write, env)
    finally:  # what is done is told even if a later run fails
        if results and env.rank == 0:
            print(table(results), *map(json.dumps, results), sep="\n", flush=True)


if __name__ == "__main__":
    main(parse_args())
