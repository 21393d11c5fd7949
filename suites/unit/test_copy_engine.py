"""The driver's copy as a binding sees it: what is asked of it, and what is said where it is missing."""

import ctypes

import pytest
import torch

from gem.sharding.copy_engine import Attributes, CopyEngine, NoCopyEngine


def test_attributes_lie_as_the_driver_reads_them() -> None:
    # sizeof and offsetof by gcc of cuda.h 13.0's CUmemcpyAttributes.
    assert ctypes.sizeof(Attributes) == 24
    offsets = [getattr(Attributes, name).offset for name in ("srcAccessOrder", "srcLocHint", "dstLocHint", "flags")]
    assert offsets == [0, 4, 12, 20]


class Driver:
    """A driver in C as far as the binding sees: cuGetProcAddress_v2 gives the address of a real C function."""

    def __init__(self, gives: int = 0, answers: int = 0) -> None:
        self.calls: list[tuple] = []
        from gem.sharding.copy_engine import _Batch

        def batch(to, of, size, count, attributes, first, number, failed_at, stream):
            a = attributes[0]
            self.calls.append(
                (to[0], of[0], size[0], count, a.srcAccessOrder, a.flags, first[0], number, failed_at[0], stream)
            )
            if not answers:
                ctypes.memmove(to[0], of[0], size[0])
            return answers

        self._batch = _Batch(batch)

        def look_up(name, pointer, version, flags, status):
            assert (name, version.value, flags.value) == (b"cuMemcpyBatchAsync", 12_080, 0)
            pointer._obj.value = None if gives else ctypes.cast(self._batch, ctypes.c_void_p).value
            return gives

        self.cuGetProcAddress_v2 = look_up


def test_a_copy_is_one_batch_of_one_that_prefers_to_overlap() -> None:
    driver = Driver()
    source, target = torch.arange(1000, dtype=torch.int32), torch.zeros(1000, dtype=torch.int32)
    CopyEngine(lambda name: driver).copy(target, source, 77)
    assert torch.equal(target, source)
    assert driver.calls == [(target.data_ptr(), source.data_ptr(), 4000, 1, 1, 1, 0, 1, 0, 77)]


def test_what_is_missing_is_named() -> None:
    def no_library(name: str):
        raise OSError(name)

    for driver, text in (
        (no_library, r"no NVIDIA driver here \(libcuda\.so\.1\)"),
        (lambda name: object(), "older than CUDA 12.0"),
        (lambda name: Driver(gives=500), r"no cuMemcpyBatchAsync; it needs CUDA 12\.8"),
    ):
        with pytest.raises(NoCopyEngine, match=text):
            CopyEngine(driver)
    one = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"CUDA error 1$"):
        CopyEngine(lambda name: Driver(answers=1)).copy(one, one.clone(), 7)
