"""Arrays that go to a device as one arrive as they were."""

import numpy as np
import pytest
import torch

from xinfer.engine.transfer import send_together


def test_shapes_and_numbers_are_kept_as_int32() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([2**31 - 1]), np.zeros((0,), np.int32)]
    sent = send_together(arrays, torch.device("cpu"))
    assert [each.dtype for each in sent] == [torch.int32] * 3
    assert [each.tolist() for each in sent] == [each.tolist() for each in arrays]
    assert all(each.is_contiguous() for each in sent)


def test_an_array_that_is_no_whole_is_sent_whole() -> None:
    part = np.arange(20, dtype=np.int32).reshape(4, 5)[:, :2]
    (sent,) = send_together([part], torch.device("cpu"))
    assert sent.tolist() == part.tolist()


def test_fractions_are_refused() -> None:
    with pytest.raises(TypeError):
        send_together([np.array([0.5])], torch.device("cpu"))  # type: ignore[list-item]
