r"""Khan (2019), FROMP's table: split CIFAR, several heads, a convolutional network.

The paper has CIFAR-10 and then five tasks of ten classes of CIFAR-100. Published: joint training
78.1 ± 0.3 %, FROMP 76.2 ± 0.4, separate networks 73.6 ± 0.4, SI 73.5 ± 0.5, EWC 71.6 ± 0.9, VCL
with a coreset 67.4 ± 1.4. The quick preset is split CIFAR-10, five tasks of two classes, at half
the resolution and with fewer channels; the ``paper`` preset is the paper's, and needs CIFAR-100.

The rules (`credo_papers.continual_table`), written before any run of the verdict's seeds, ask
whether FROMP is above EWC, SI and VCL with a coreset, and joint training above FROMP.
"""

from __future__ import annotations

from credo.types import Json
from credo_papers.continual_setup import ContinualSettings, same_for_variants
from credo_papers.continual_table import Statement, checker, drawer, run_one
from credo_papers.experiment import Experiment

PUBLISHED = {"joint": 0.781, "fromp": 0.762, "si": 0.735, "ewc": 0.716, "vcl_coreset": 0.674}
STATEMENTS: tuple[Statement, ...] = (
    ("fromp", "ewc"),
    ("fromp", "si"),
    ("fromp", "vcl_coreset"),
    ("joint", "fromp"),
)

PAPER_FROMP = {
    "temperature": 10.0,
    "prior_precision": 1e-4,
    "jitter": 1e-6,
    "training": {"clip": 100.0},
}
QUICK_FROMP = {**PAPER_FROMP, "temperature": 100.0}
STRENGTHS: dict[str, Json] = {
    "ewc": {"strength": 100.0},
    "online_ewc": {"strength": 100.0},
    "kronecker": {"strength": 100.0},
    "si": {"strength": 100.0},
    "vcl_natural": {"training": {"lr": 0.02}},
}

EXPERIMENT = Experiment(
    id="004-continual-split-cifar",
    paper="004",
    claim="Khan (2019), FROMP's table: on CIFAR-10 followed by five tasks of CIFAR-100 "
    "(multi-head) FROMP's average accuracy, 76.2 %, is above that of SI (73.5), EWC (71.6) and VCL "
    "with a coreset (67.4), and below that of joint training (78.1).",
    theorem=False,
    needs=("cifar10",),
    minutes=6,
    presets={
        "quick": ContinualSettings(
            stream="split", data="cifar10", tasks=5, net="conv 16-16-32-32, 128", num_data=1000,
            epochs=15, batch_size=64, lr=1e-3, memory=40, pool=2,
            options={
                **STRENGTHS,
                "vcl_natural": {"training": {"lr": 0.02}, "predict_samples": 20},
                **same_for_variants(vcl={"predict_samples": 20}, fromp=QUICK_FROMP),
            },
        ),
        "paper": ContinualSettings(
            stream="cifar10 then cifar100", data="cifar10 and cifar100", tasks=6,
            net="conv 32-32-64-64, 512", num_data=100_000, test_images=100_000, epochs=80,
            batch_size=256, lr=1e-3, memory=200,
            options={
                **STRENGTHS,
                **same_for_variants(vcl={}, fromp=PAPER_FROMP),
            },
        ),
    },
    run_one=run_one,
    check=checker(STATEMENTS, PUBLISHED),
    figures=drawer(
        "Split CIFAR", "continual-split-cifar.png", PUBLISHED,
        "published, of the longer stream with CIFAR-100",
    ),
)  # fmt: skip
