"""Evidence of comparisons that never ran: every kind, with numbers that are plausible."""

import numpy as np

from credo.report import Evidence, Run, ShiftScores

HOSTILE = "<script>alert('x')</script> & \"$\\frac{a}{b}$\" </svg> {{ 7 * 7 }}"
"""A method's name, a class, a reason: whatever a page shows may hold this."""


def classes(methods=("MAP", "VI", "IVON"), seeds=3, examples=120, pictures=True) -> Evidence:
    rng = np.random.RandomState(0)
    targets = rng.randint(0, 3, examples)
    runs = [
        _classifier(rng, method, seed, targets, 0.5 + index)
        for index, method in enumerate(methods)
        for seed in range(seeds)
    ]
    inputs = rng.rand(examples, 1, 8, 8) if pictures else rng.randn(examples, 4)
    about = {"test": examples, "environment": {"credo": "0", "torch": "2"}, "notes": ["a note"]}
    return Evidence("classification", runs, inputs, targets, ("cat", "dog", "ant"), about)


def _classifier(rng, method: str, seed: int, targets, sharpness: float) -> Run:
    logits = rng.randn(len(targets), 3)
    logits[np.arange(len(targets)), targets] += 1.5
    probs = _softmax(sharpness * logits)
    foreign = _softmax(sharpness * rng.randn(90, 3))
    confidence, predicted = probs.max(1), probs.argmax(1)
    correct = predicted == targets
    nll = -np.log(probs[np.arange(len(targets)), targets])
    scores = {
        "accuracy": float(correct.mean()),
        "nll": float(nll.mean()),
        "ece": 0.03 + 0.01 * rng.rand(),
        "ece_floor": 0.03,
        "ece_floor_std": 0.01,
        "ood_auroc": 0.8 + 0.1 * rng.rand(),
        "train_seconds": 2 + rng.rand(),
        "odd_score": 1.0,
    }
    shifts = [
        ShiftScores(
            shift,
            severity,
            {"accuracy": scores["accuracy"] / (1 + 0.2 * severity), "nll": severity},
        )
        for shift in ("rotation", "noise")
        for severity in (1, 2, 3)
    ]
    history = [
        {"epoch": epoch, "nll": 2 / (epoch + 1), "kl": 900 + epoch, "temperature": 0.1,
         "kl_segments": {"0.weight": 1.0}}
        for epoch in range(6)
    ]  # fmt: skip
    arrays = {
        "confidence": confidence, "correct": correct, "predicted": predicted, "nll": nll,
        "entropy": _entropy(probs), "ood_entropy": _entropy(foreign),
    }  # fmt: skip
    settings = {"method": {"type": method, "lr": 0.003}, "epochs": 6, "warnings": ["hot"]}
    return Run(method, seed, scores, arrays, shifts, history, settings)


def numbers(methods=("MAP", "VI"), seeds=2, examples=80) -> Evidence:
    rng = np.random.RandomState(1)
    targets = rng.randn(examples)
    runs = []
    for method in methods:
        for seed in range(seeds):
            std = 0.2 + 0.3 * rng.rand(examples)
            mean = targets + std * rng.randn(examples)
            arrays = {
                "mean": mean, "std": std, "error": targets - mean,
                "ood_std": 1 + rng.rand(50), "crps": np.abs(targets - mean),
            }  # fmt: skip
            rmse = float(np.sqrt(np.mean((targets - mean) ** 2)))
            scores = {"rmse": rmse, "nll": 0.4 + 0.1 * rng.rand(), "crps": 0.2, "coverage": 0.9}
            shifts = [ShiftScores("tilt", s, {"rmse": rmse * (1 + s)}) for s in (1, 2)]
            runs.append(Run(method, seed, scores, arrays, shifts))
    inputs = rng.randn(examples, 9)
    names = ("age", "dose", "mass")
    return Evidence("regression", runs, inputs, targets, about={"test": examples}, features=names)


def pixels(methods=("MAP", "VI"), images=6) -> Evidence:
    rng = np.random.RandomState(2)
    runs = []
    for method in methods:
        entropy, correct = rng.rand(images, 16, 16), rng.rand(images, 16, 16) > 0.2
        arrays = {
            "entropy": entropy.mean((1, 2)), "correct": correct.mean((1, 2)),
            "confidence": rng.rand(images), "entropy_map": entropy, "correct_map": correct,
            "pixel_confidence": 0.3 + 0.7 * rng.rand(500), "pixel_correct": rng.rand(500) > 0.2,
        }  # fmt: skip
        scores = {"accuracy": float(correct.mean()), "nll": 0.5, "mean_iou": 0.6, "ece": 0.1}
        runs.append(Run(method, 0, scores, arrays))
    targets = rng.randint(0, 3, (images, 16, 16))
    return Evidence("dense", runs, rng.rand(images, 3, 16, 16), targets)


def _softmax(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _entropy(probs):
    return -(probs * np.log(probs)).sum(1)
