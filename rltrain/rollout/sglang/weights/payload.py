"""What SGLang's /update_weights_from_tensor takes as a rank's named tensors: a pickle that holds a text and no data.

SGLang unpickles it with an allow-list that has torch.Tensor on it. The bytes are put together here, so that nothing
depends on how this or the server's torch pickles a tensor, and rltrain pickles nothing.
"""

import base64

NO_TENSORS = base64.b64encode(b"\x80\x03}.").decode()
"""An empty dict, as /load_lora_adapter_from_tensors takes a rank's tensors by name: an adapter of zeros."""

_BEFORE = b"\x80\x03](X"  # protocol 3; a list; a mark; a text whose length and bytes follow
_AFTER = b"ctorch\nTensor\n)R\x86e."  # torch.Tensor(); both as a pair, appended to the list


def payload(text: str) -> str:
    """[(text, an empty tensor)] as SGLang's HTTP server takes it."""
    data = text.encode()
    return base64.b64encode(_BEFORE + len(data).to_bytes(4, "little") + data + _AFTER).decode()
