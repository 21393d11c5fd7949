"""Copies by a GPU's copy engine, which hold no multiprocessor: within its memory, or from a peer's.

A plain device-to-device copy may be a kernel where both ends are on one GPU (on an H200 with driver 580 it was none).
The driver's batched copy with the flag that prefers to overlap with compute is not (CUDA 12.8 and later); that it is so
here is tried before it is believed.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

_VERSION = 12_080  # of the interface that is asked for, whatever later ones look like
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class NoCopyEngine(RuntimeError):
    """What is missing, in one line."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
        ("flags", ctypes.c_uint),
    )


_ADDRESSES = ctypes.POINTER(ctypes.c_uint64)
_SIZES = ctypes.POINTER(ctypes.c_size_t)
# cuMemcpyBatchAsync of 12.8: dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream.
_Batch = ctypes.CFUNCTYPE(
    ctypes.c_int, _ADDRESSES, _ADDRESSES, _SIZES, ctypes.c_size_t, ctypes.POINTER(Attributes), _SIZES, ctypes.c_size_t,
    _SIZES, ctypes.c_void_p,
)  # fmt: skip


class CopyEngine:
    """Raises NoCopyEngine where the driver has no batched copy."""

    def __init__(self, driver: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            library = driver("libcuda.so.1")
        except OSError:
            raise NoCopyEngine("no NVIDIA driver here (libcuda.so.1)") from None
        pointer, status = ctypes.c_void_p(), ctypes.c_int()
        look_up = getattr(library, "cuGetProcAddress_v2", None)
        if look_up is None:
            raise NoCopyEngine("the driver is older than CUDA 12.0; cuMemcpyBatchAsync needs 12.8")
        failed = look_up(
            b"cuMemcpyBatchAsync", ctypes.byref(pointer), ctypes.c_int(_VERSION), ctypes.c_uint64(0),
            ctypes.byref(status),
        )  # fmt: skip
        if failed or not pointer.value:
            raise NoCopyEngine("the driver has no cuMemcpyBatchAsync; it needs CUDA 12.8 or later")
        self._batch = _Batch(pointer.value)

    def copy(self, target: Tensor, source: Tensor, stream: int) -> None:
        """Queue a copy of ``source``'s bytes on a stream (its handle, not the default one); RuntimeError if refused."""
        self.copies([target], [source], stream)

    def copies(self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: int) -> None:
        """Several at once, in any order."""
        pairs = list(zip(targets, sources, strict=True))
        assert stream and pairs
        assert all(a.nbytes == b.nbytes and a.is_contiguous() and b.is_contiguous() for a, b in pairs)
        to, of = ((ctypes.c_uint64 * len(pairs))(*(x.data_ptr() for x in xs)) for xs in (targets, sources))
        sizes = (ctypes.c_size_t * len(pairs))(*(x.nbytes for x in sources))
        attributes = Attributes(srcAccessOrder=_STREAM_ORDER, flags=_OVERLAP)
        first, failed_at, by = ctypes.c_size_t(0), ctypes.c_size_t(0), ctypes.byref
        failed = self._batch(to, of, sizes, len(pairs), by(attributes), by(first), 1, by(failed_at), stream)
        if failed:
            raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {failed}")
