"""Options that say which attention shape is meant: a model by name, fields of it changed, one tensor-parallel shard."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from swa_plan.models import MODELS, ModelShape

CUSTOM = "custom"
MODEL_NAMES = (*MODELS, CUSTOM)
_NEEDED = ("heads", "kv_heads", "k_dim", "window")
_PANEL = "Shape (needed for custom, else changes the model's)"

Model = Annotated[str, typer.Option("--model", metavar="NAME", help=f"One of {', '.join(MODEL_NAMES)}.")]
Tp = Annotated[int, typer.Option("--tp", metavar="N", min=1, help="Tensor-parallel ranks; one rank is decoded.")]
Heads = Annotated[int | None, typer.Option("--heads", min=1, help="Query heads.", rich_help_panel=_PANEL)]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", min=1, help="Heads of the cache.", rich_help_panel=_PANEL)]
KDim = Annotated[int | None, typer.Option("--k-dim", help="Head size of keys.", rich_help_panel=_PANEL)]
VDim = Annotated[
    int | None, typer.Option("--v-dim", help="Head size of values (custom: as keys).", rich_help_panel=_PANEL)
]
Window = Annotated[
    int | None, typer.Option("--window", help="Keys a row sees, its own included.", rich_help_panel=_PANEL)
]
QueryLen = Annotated[
    int | None, typer.Option("--query-len", min=1, help="Rows a request: 1 + drafts.", rich_help_panel=_PANEL)
]
Gate = Annotated[bool | None, typer.Option("--gate/--no-gate", help="A sigmoid gate a head.", rich_help_panel=_PANEL)]
Sinks = Annotated[bool | None, typer.Option("--sinks/--no-sinks", help="A sink a head.", rich_help_panel=_PANEL)]
Softcap = Annotated[float | None, typer.Option("--softcap", help="Cap of the logits.", rich_help_panel=_PANEL)]


def model_shape(name: str, tp: int, **changes: Any) -> ModelShape:
    """Return one rank's shape.

    Args:
        name: a name of ``MODELS`` or ``custom``.
        tp: tensor-parallel ranks.
        changes: fields of ``ModelShape``; None leaves the model's.

    Raises:
        ValueError: no such model, ``custom`` lacks a field, a value is out of range or ``tp`` does not divide.
    """
    given = {field: value for field, value in changes.items() if value is not None}
    unknown = set(given) - {field.name for field in fields(ModelShape)}
    if unknown:
        raise TypeError(f"changes must be fields of ModelShape, got {', '.join(sorted(unknown))}")
    if name == CUSTOM:
        missing = [field for field in _NEEDED if field not in given]
        if missing:
            options = ", ".join(f"--{field.replace('_', '-')}" for field in missing)
            raise ValueError(f"--model custom also needs {options}")
        model = ModelShape(**{"name": CUSTOM, "v_dim": given["k_dim"], **given})
    elif name in MODELS:
        model = replace(MODELS[name], **given)
    else:
        raise ValueError(f"--model must be one of {', '.join(MODEL_NAMES)}, got {name!r}")
    return model.shard(tp)
