"""Drop-in torch optimizers: those that learn a distribution, and those for points that torch lacks.

`IVON`, `VOGN`, `Vadam` and `VON` are the learning rule for a diagonal Gaussian, `EVON` for one that
is diagonal in the eigenbases of a layer's gradients. `AdaBound`, `AMSBound`, `AMSGrad`, `RAdam` and
`YellowFin` move points; `robust_region` says which rates and momenta suit a range of curvatures.
"""

from credo.optim.adabound import AdaBound, AMSBound
from credo.optim.amsgrad import AMSGrad
from credo.optim.base import NaturalOptimizer
from credo.optim.descent import Descent
from credo.optim.evon import EVON
from credo.optim.ivon import IVON
from credo.optim.rectified_adam import RAdam
from credo.optim.vadam import Vadam
from credo.optim.vogn import VOGN
from credo.optim.von import VON
from credo.optim.yellowfin import YellowFin

__all__ = [
    "EVON",
    "IVON",
    "VOGN",
    "VON",
    "AMSBound",
    "AMSGrad",
    "AdaBound",
    "Descent",
    "NaturalOptimizer",
    "RAdam",
    "Vadam",
    "YellowFin",
]
