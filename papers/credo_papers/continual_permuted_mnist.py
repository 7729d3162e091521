r"""Khan (2019), FROMP's table: permuted MNIST, ten tasks, one head.

Published: FROMP 94.9 ± 0.1 %, improved VCL 93 ± 1 (94.6 ± 0.3 with a coreset; 90 and 93 before),
SI 86, EWC 84. The rules (`credo_papers.continual_table`), written before any run of the
verdict's seeds, ask whether FROMP is above VCL, and VCL above SI and EWC.
"""

from __future__ import annotations

from credo.types import Json
from credo_papers.continual_setup import ContinualSettings, same_for_variants
from credo_papers.continual_table import Statement, checker, drawer, run_one
from credo_papers.experiment import Experiment

PUBLISHED = {"fromp": 0.949, "vcl": 0.93, "vcl_coreset": 0.946, "si": 0.86, "ewc": 0.84}
STATEMENTS: tuple[Statement, ...] = (("fromp", "vcl"), ("vcl", "si"), ("vcl", "ewc"))

PAPER_FROMP = {
    "temperature": 0.5,
    "prior_precision": 1e-5,
    "jitter": 1e-5,
    "training": {"clip": 0.01},
}
PAPER_VCL = {"training": {"epochs": 100, "batch_size": 256}, "samples": 10}
QUICK_VCL = {**PAPER_VCL, "samples": 1, "predict_samples": 20}
QUICK_FROMP = {**PAPER_FROMP, "temperature": 1.0}
"""Half the memory, and τ twice as large: the old tasks have the paper's weight."""
STRENGTHS: dict[str, Json] = {
    "ewc": {"strength": 10.0},
    "online_ewc": {"strength": 10.0},
    "kronecker": {"strength": 10.0},
    "si": {"strength": 10.0},
}

EXPERIMENT = Experiment(
    id="004-continual-permuted-mnist",
    paper="004",
    claim="Khan (2019), FROMP's table: on permuted MNIST (ten tasks, single head) FROMP's average "
    "accuracy, 94.9 %, is above that of VCL (90 to 93), which is above SI (86) and EWC (84).",
    theorem=False,
    needs=("mnist",),
    minutes=10,
    presets={
        "quick": ContinualSettings(
            stream="permuted", data="mnist", tasks=10, net="100-100", num_data=2000, epochs=10,
            lr=1e-3, memory=100,
            options={
                **STRENGTHS,
                "vcl_natural": {"training": {"lr": 0.5}, "predict_samples": 20},
                **same_for_variants(vcl=QUICK_VCL, fromp=QUICK_FROMP),
            },
        ),
        "paper": ContinualSettings(
            stream="permuted", data="mnist", tasks=10, net="100-100", num_data=100_000,
            test_images=100_000, epochs=10, lr=1e-3, memory=200,
            options={
                **STRENGTHS,
                "vcl_natural": {"training": {"lr": 0.5}},
                **same_for_variants(vcl=PAPER_VCL, fromp=PAPER_FROMP),
            },
        ),
    },
    run_one=run_one,
    check=checker(STATEMENTS, PUBLISHED),
    figures=drawer("Permuted MNIST", "continual-permuted-mnist.png", PUBLISHED),
)  # fmt: skip
