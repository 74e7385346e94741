"""Conversions between numbers and narrow formats, by torch. The tests compare the emulator's conversions with them."""

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e2m1_value(code: np.ndarray) -> np.ndarray:
    """Decode e2m1 codes."""
    return E2M1[code]


def scale_value(byte: np.ndarray, name: str) -> np.ndarray:
    """Decode scales of the format ``"e4m3"`` or ``"ue8m0"``."""
    byte = np.asarray(byte)
    if name == "e4m3":
        return torch.from_numpy(byte.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    return np.exp2(byte.astype(np.float64) - 127)


def e4m3(value: np.ndarray) -> np.ndarray:
    """Encode numbers in e4m3, with saturation. NaN becomes 0x7F."""
    numbers = torch.from_numpy(np.asarray(value, np.float32))
    codes = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(value), np.uint8(0x7F), codes)
