import sys
import time

import pytest
import torch

from credo.tools.compare_meter import metered

CPU = torch.device("cpu")


def test_time_is_that_of_the_block():
    with metered(CPU) as cost:
        time.sleep(0.05)
    assert cost.seconds >= 0.05
    assert cost.cpu_seconds < cost.seconds


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only growth beyond the peak is seen")
def test_memory_is_that_of_the_peak_and_not_of_the_one_before():
    """64 MiB, let go before the end; then, in the same process, a block that takes 16."""
    for mib in (64, 16):
        with metered(CPU) as cost:
            held = torch.ones(mib * 2**18)
            del held
        assert mib <= cost.mib + 1
        assert cost.mib < mib + 12
