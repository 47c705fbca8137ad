"""Numbers go to a device and come back as they are; on a CPU they stay where they are."""

import numpy as np
import pytest
import torch

from xinfer.engine.transfer import Awaited, send

CPU = torch.device("cpu")
CUDA = pytest.param(
    torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is there")
)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("values", [np.array([1, -2, 3], np.int32), [1, -2, 3], np.array([1.5, -2.0])])
def test_numbers_come_back_as_they_were(device, values):
    sent = send(values, device)
    assert sent.device.type == device.type
    back = Awaited(sent).read()
    assert back.device.type == "cpu"
    assert back.tolist() == list(values)
    assert send(values, device, torch.float64).dtype == torch.float64


def test_on_a_cpu_nothing_is_copied():
    values = np.arange(4)
    sent = send(values, CPU)
    values[0] = 7
    assert sent.tolist() == [7, 1, 2, 3]
    assert Awaited(sent).read().data_ptr() == values.ctypes.data
