"""prototype"""
from __future__ import annotations
import inspect
from typing import Any
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN, Rows

_PAIRS = (("attention_mask", ("input_ids", "inputs_embeds")), ("decoder_attention_mask", ("decoder_input_ids", "decoder_inputs_embeds")))

class Entering(TorchFunctionMode):
    def __init__(self, layouts, heads):
        super().__init__()
        self.layouts, self.heads = layouts, heads
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.embedding and self.layouts:
            ids = args[0] if args else kwargs["input"]
            layout = self.layouts.get((ids.data_ptr(), ids.shape))
            if layout is not None and not isinstance(ids, Rows):
                rest = args[1:]
                rows = func(ids.flatten().index_select(0, layout.index), *rest, **{k: v for k, v in kwargs.items() if k != "input"})
                return PaddedRows(rows, layout, (BATCH, TOKEN, 0))
        elif func is F.linear and self.heads:
            x, weight = args[0], args[1]
            if id(weight) in self.heads and x.ndim == 3:
                rest = args[1:]
                later = lambda rows: func(rows, *rest, **kwargs)
                if isinstance(x, Rows):
                    x.rows
                    return type(x)(x.base, x.positions, x.dims, (later,))
                layout = Layout(torch.ones(x.shape[:2], dtype=torch.bool, device=x.device))
                return PaddedRows(x.flatten(0, 1), layout, (BATCH, TOKEN, 0), (later,))
        return func(*args, **kwargs)

def layouts_of(model, args, kwargs):
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    bound = {**bound, **bound.get("kwargs", {})}
    found = {}
    for mask_name, names in _PAIRS:
        mask = bound.get(mask_name)
        if not isinstance(mask, Tensor) or mask.ndim != 2: continue
        m = mask.bool()
        if bool(m.all()) or not bool(m.any(1).all()): continue
        for n in names:
            ids = bound.get(n)
            if isinstance(ids, Tensor) and ids.shape[:2] == mask.shape:
                found[(ids.data_ptr(), ids.shape)] = Layout(m)
    return found

def boosted_call(model, args, kwargs, unpad=True, head=True):
    heads = set()
    if head and hasattr(model, "get_output_embeddings"):
        e = model.get_output_embeddings()
        if e is not None: heads.add(id(e.weight))
    with Entering(layouts_of(model, args, kwargs) if unpad else {}, heads):
        return model(*args, **kwargs)
