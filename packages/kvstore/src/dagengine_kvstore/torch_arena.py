"""The tensors that pages index. The only module that imports torch; knows shapes, no bookkeeping."""

from __future__ import annotations

import torch

from dagengine_kvstore.errors import KVStoreError


class TorchArena:
    """One tensor per layer, `[num_pages, 2, num_kv_heads, page_size, head_dim]`: 0 = K (rotated at its stored
    position), 1 = V. Starts as zeros. A slot is `page * page_size + row`.

    Raises KVStoreError `invalid_layout` for a size below 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_pages, 2, num_kv_heads, page_size, head_dim)
        names = ("num_pages", "", "num_kv_heads", "page_size", "head_dim")
        for name, size in (("num_layers", num_layers), *zip(names, shape, strict=True)):
            if size < 1:
                raise KVStoreError("invalid_layout", f"{name} must be at least 1, not {size}", field=name)
        self.num_pages = num_pages
        self.page_size = page_size
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self._layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_bytes // self.num_pages

    def layer(self, index: int) -> torch.Tensor:
        """The whole arena of one layer, not a copy."""
        return self._layers[index]
