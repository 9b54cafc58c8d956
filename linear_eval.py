"""Evaluate a pretrained backbone, which stays frozen and in eval mode.

    python linear_eval.py RUN                                a run folder, a checkpoint.pt or a backbone.pt
    python linear_eval.py RUN --protocol knn --k 20          a minute on a CPU
    python linear_eval.py RUN --dataset cifar100             transfer to another data set
    python linear_eval.py RUN --protocol cka --other RUN2    how alike two backbones are
    torchrun --nproc_per_node=8 linear_eval.py RUN           several GPUs: the same global batch

linear           classifier on features of random crops and flips: SGD lr 30 (x batch/256), momentum 0.9,
                 no weight decay, batch 256, 100 epochs, cosine, which is MoCo's protocol; on imagenet LARS
                 base lr 0.02, batch 1024, 90 epochs
frozen-features  the same classifier on features taken once, of images as they are
knn              vote of the k nearest training images, weight exp(cosine / tau)
rankme           effective rank of the training features (Garrido et al., arXiv 2210.02885)
cka              linear CKA of the two backbones' test features (Kornblith et al., arXiv 1905.00414)

The last line on stdout is a JSON object. accuracy: of the last epoch, over every test image once. The
classifier sees the features divided by one number, the mean norm of the training features (ours): it stays
linear, and lr 30, which was found on features of norm about 1, suits every network.
"""
import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import common
from common import rankme

PROTOCOLS = ("linear", "frozen-features", "knn", "rankme", "cka")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="linear_eval.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run folder, checkpoint.pt or backbone.pt")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="linear")
    parser.add_argument("--other", help="second run, checkpoint or backbone, for --protocol cka")
    parser.add_argument("--k", type=int, default=200, help="neighbours")
    parser.add_argument("--tau", type=float, default=0.1, help="temperature of the k-NN vote")
    parser.add_argument("--dataset", choices=common.DATASETS, help="default: that of the pretraining")
    parser.add_argument("--epochs", type=int, help="of the classifier (default 100; imagenet 90)")
    parser.add_argument("--batch-size", type=int, help="over all processes (default 256; imagenet 1024)")
    parser.add_argument("--base-lr", type=float, help="per 256 images (default 30; imagenet: LARS 0.02)")
    parser.add_argument("--out", help="folder in whose eval.jsonl the result is written, too")
    common.add_machine_args(parser)
    args = parser.parse_args(argv)
    if any(v is not None and v <= 0 for v in (args.k, args.tau, args.epochs, args.batch_size, args.base_lr)):
        parser.error("--k, --tau, --epochs, --batch-size and --base-lr must be positive")
    if (args.protocol == "cka") != (args.other is not None):
        parser.error("--other goes with --protocol cka, and cka needs it")
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
    try:
        backbone = common.resnet(about["arch"], about["width"], about["small_images"])
        backbone.load_state_dict(weights, strict=True)
        wanted = ("arch", "width", "small_images", "mean", "std", "image_size", "dataset")
        about = {key: about[key] for key in wanted}
    except (KeyError, TypeError, RuntimeError, AttributeError):
        keys = ", ".join(str(key) for key in list(about if weights is None else weights)[:3])
        common.fail(f"{path} holds no backbone of this project: its first keys are {keys or 'none'}; "
                    f"wanted: arch, width, ... and a state_dict with torchvision's keys, conv1.weight, ...")
    return backbone.requires_grad_(False).eval(), about


def fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_classifier(classifier: nn.Linear, feature_batches, optimizer, lr: float, epochs: int, steps: int,
                     env):
    """Fit it to feature_batches(epoch), which yields this rank's (features, labels) of each of its steps."""
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    step = 0
    for epoch in range(epochs):
        for h, y in feature_batches(epoch):
            optimizer.param_groups[0]["lr"] = common.cosine_lr(step, epochs * steps, lr)
            loss = F.cross_entropy(classifier(h), y)
            optimizer.zero_grad()
            loss.backward()
            for p in classifier.parameters() if env.world_size > 1 else ():
                dist.all_reduce(p.grad.div_(env.world_size))
            optimizer.step()
            step += 1
        if env.rank == 0 and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}/{epochs}: training loss {loss.item():.4f}", flush=True)
    if not all(p.isfinite().all() for p in classifier.parameters()):
        common.fail(f"the classifier is not finite after {step} steps; lower --base-lr")


def main(args):
    env = common.init_distributed(args.device)
    backbone, about = load_backbone(args.run)
    backbone.to(env.device, memory_format=torch.channels_last)
    name = args.dataset or about["dataset"]
    seen = {k: about[k] for k in ("mean", "std", "image_size")}  # what the backbone was trained to see
    train, test = (common.load_images(name, args.data_dir, split, env, about["image_size"],
                                      classes=args.classes, report=True) for split in (True, False))
    if test is None:
        common.fail(f"{args.data_dir} has no test images: put them in its folder test or val")
    train, test = (data._replace(**seen) for data in (train, test))
    if args.protocol not in ("rankme", "cka") and (train.labels is None or test.labels is None):
        why = train.unlabelled or test.unlabelled or f"{args.data_dir} must have a folder per class"
        common.fail(f"--protocol {args.protocol} needs labels: {why}")
    options = (env, args.precision, args.workers)
    result = {"protocol": args.protocol, "dataset": name, "n_train": len(train.images),
              "n_test": len(test.images)}

    if args.protocol == "knn":
        train_x, test_x = (common.features(backbone, data, *options) for data in (train, test))
        accuracy = common.knn(train_x, train.labels, test_x, test.labels, env, k=args.k, tau=args.tau)
        result.update(accuracy=accuracy, k=args.k, tau=args.tau)
    elif args.protocol == "rankme":
        result.update(rankme=rankme(common.features(backbone, train, *options)))
    elif args.protocol == "cka":
        other, other_about = load_backbone(args.other)
        other.to(env.device, memory_format=torch.channels_last)
        other_test = test._replace(**{k: other_about[k] for k in seen})
        x, y = common.features(backbone, test, *options), common.features(other, other_test, *options)
        result.update(cka=linear_cka(x, y))
    else:
        before = fingerprint(backbone)
        imagenet = name == "imagenet"
        epochs = args.epochs or (90 if imagenet else 100)
        batch_size = args.batch_size or (1024 if imagenet else 256)
        batch_size = min(batch_size, len(train.images)) // env.world_size * env.world_size
        lr = (args.base_lr or (0.02 if imagenet else 30.0)) * batch_size / 256
        test_x = common.features(backbone, test, *options)
        train_x, train_y = common.features(backbone, train, *options), train.labels.to(env.device)
        norm = train_x.norm(dim=1).mean()
        if args.protocol == "frozen-features":
            train_x = train_x / norm

            def feature_batches(epoch):
                generator = torch.Generator().manual_seed(common.seed_for(args.seed, epoch))
                order = torch.randperm(len(train_x), generator=generator)
                for index in order[:len(order) // batch_size * batch_size].split(batch_size):
                    index = index.chunk(env.world_size)[env.rank].to(env.device)
                    yield train_x[index], train_y[index]
        else:
            augment = common.Augment(train.image_size, crop_scale=(0.08, 1.0), jitter_p=0.0, gray_p=0.0,
                                     blur_p=0.0, mean=train.mean, std=train.std)

            def feature_batches(epoch):
                for (x,), y in common.batches(train, epoch, batch_size, env, args.seed, [augment],
                                              args.workers):
                    with torch.no_grad(), common.autocast(env.device, args.precision):
                        h = backbone(x)
                    yield h.float() / norm, y

        torch.manual_seed(args.seed)
        classifier = nn.Linear(backbone.feature_dim, len(train.classes)).to(env.device)
        optimizer = (common.LARS if imagenet else torch.optim.SGD)(classifier.parameters(), lr, momentum=0.9)
        steps = len(train.images) // batch_size
        train_classifier(classifier, feature_batches, optimizer, lr, epochs, steps, env)
        if fingerprint(backbone) != before:
            common.fail("the backbone changed while it was evaluated")
        hits = classifier(test_x / norm).argmax(1).cpu() == test.labels
        result.update(accuracy=hits.sum().item() / len(hits), epochs=epochs, batch_size=batch_size)

    if env.rank == 0:
        print(json.dumps(result), flush=True)
    if args.out:
        def write():
            Path(args.out).mkdir(parents=True, exist_ok=True)
            with open(Path(args.out) / "eval.jsonl", "a") as file:
                file.write(json.dumps({"run": str(args.run), **result}) + "\n")
        common.on_rank0(write, env)


if __name__ == "__main__":
    main(parse_args())
