"""The GPU's clock and why it is held down, read from the driver's management library; nothing where there is none.

Called through ctypes: two numbers are not worth a dependency. Reading them changes no setting of the card.
"""

import ctypes
import functools

# nvmlClocksEventReason*: bits that mean "slower than asked for".
_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_CLOCK_SM = 1  # nvmlClockType_t


class Gpu:
    """One GPU by its UUID ("GPU-…", as torch gives it). ``None`` for whatever the driver does not tell."""

    def __init__(self, uuid: str) -> None:
        self._handle = ctypes.c_void_p()
        self._library = _library()
        if self._library is not None:
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            failed = self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._handle))
            if failed:
                self._library = None

    def sm_clock_mhz(self) -> int | None:
        """The clock of the multiprocessors now, in MHz."""
        clock = ctypes.c_uint()
        if self._library is None or self._library.nvmlDeviceGetClockInfo(self._handle, _CLOCK_SM, ctypes.byref(clock)):
            return None
        return clock.value

    def slowdowns(self) -> set[str]:
        """Why the clock is below what was asked for, now; empty when it is not or the driver does not tell."""
        bits = ctypes.c_ulonglong()
        if self._library is None or self._library.nvmlDeviceGetCurrentClocksThrottleReasons(
            self._handle, ctypes.byref(bits)
        ):
            return set()
        return {reason for bit, reason in _REASONS.items() if bits.value & bit}


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library
