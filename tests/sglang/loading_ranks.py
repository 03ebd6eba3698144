"""One of several tensor-parallel ranks that load a message of load_names: `python -m tests.sglang.loading_ranks`.

Arguments: rank, address of the rendezvous, and the message in JSON. Prints what the rank's model was given. SGLang's
Python runs it, with rltrain's modules for servers on its path.
"""

import json
import sys
from collections.abc import Iterable

import rltrain_weight_loader as loader
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import get_parallel
from torch import Tensor


class Model(torch.nn.Module):
    """Takes every tensor into the parameter of its name."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict({name: torch.zeros(4) for name in names})

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            self.held[name].data.copy_(tensor)


def main() -> None:
    rank, address, text = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    parallel_state.init_distributed_environment(
        world_size=2, rank=rank, local_rank=rank, distributed_init_method=address, backend="gloo"
    )
    message = json.loads(text)
    model = Model(field[0] for fields in message["shares"] for field in fields)
    with get_parallel().override(tp_group=parallel_state.get_world_group()):
        loader.load(model, [(text, torch.empty(0))])
    print(json.dumps({name: tensor.tolist() for name, tensor in model.held.items()}))


if __name__ == "__main__":
    main()
