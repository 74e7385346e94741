"""``moe_route_ids``: results must equal the expected order exactly; a pair with an invalid expert gets no row."""

import torch

from expected import Tensors, assert_same, moe_route

_ARGUMENTS = "Tensor ids, int experts, int alignment=128, SymInt? max_rows=None"
_NAMES = ("expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")
SCHEMA = f"cute::moe_route_ids({_ARGUMENTS}) -> ({', '.join(f'Tensor {name}' for name in _NAMES)})"
_OUTPUTS = ", ".join(f"Tensor({letter}!) {name}" for letter, name in zip("abcd", _NAMES, strict=True))
OUT_SCHEMA = f"cute::moe_route_ids.out({_ARGUMENTS}, *, {_OUTPUTS}) -> ()"

assert_results = assert_same


def results(given) -> Tensors:
    places = moe_route.places(given["ids"].cpu().numpy(), given["experts"], given)
    return tuple(torch.from_numpy(place).to(torch.int32) for place in places)


def rows_alone(given, outputs):
    """Yield calls with a single token, and their expected results."""
    tokens = len(given["ids"])
    for m in {0, tokens // 3, tokens - 1} if tokens else ():
        alone = {**given, "ids": given["ids"][m : m + 1]}
        yield alone, tuple(want.to(outputs[0].device) for want in results(alone))
