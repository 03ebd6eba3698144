"""The device that a command's option names."""

from typing import TYPE_CHECKING

from rltrain.errors import UserError

if TYPE_CHECKING:
    import torch

EXPECTED = 'expected "cpu", "cuda" or "cuda:N"'


def device_named(text: str | None, option: str = "--device") -> "torch.device":
    """Returns the device that `option` names; by default the first GPU, or the CPU where there is none.

    UserError where this machine's torch cannot use that device.
    """
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UserError(f"{option}: got {text!r}; {EXPECTED}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"{option}: got {text!r}, a device that rltrain has no code for; {EXPECTED}")
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU here"
        raise UserError(f"{option}: got {text!r}, but {why}; expected {option} cpu, or a machine with a GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{option}: got {text!r}; expected one of the {torch.cuda.device_count()} GPUs, from cuda:0")
    return device
