"""The public ``merge_states``: partial attentions over disjoint keys, merged by their log-sum-exps."""

from __future__ import annotations

import torch

from swa_plan._checks import check_head_dim
from swa_torch import _op  # noqa: F401  (defines the operators)
from swa_torch._validate import QUERY_DTYPES, check_head_options, check_no_gradients, check_tensor, names


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial attentions (shared prefixes, cascades, context shards) into one.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log(sum_i exp(lse_i) + exp(sink))``. Partials are computed
    without sinks and gate, best with ``out_dtype=torch.float32``; the merge adds both once. ``lse_i = -inf`` is the
    identity: such a part adds nothing, whatever its output holds. A row without any keys is zero with an LSE of
    ``-inf``, sinks or not.

    Args:
        outs: ``[parts, tokens, heads, v_dim]``, bf16, fp16 or fp32, last stride 1.
        lses: ``[parts, tokens, heads]``, fp32, natural logarithms.
        sinks: ``[heads]`` extra logits in the denominator.
        gate: ``[tokens, heads]`` logits of a sigmoid gate.
        out_dtype: output dtype; None means that of ``outs``.

    Returns:
        ``(out, lse)``: ``[tokens, heads, v_dim]`` and fp32 ``[tokens, heads]``.

    Raises:
        TypeError: kinds or dtypes.
        ValueError: shapes, strides or devices.
        NotImplementedError: an input requires gradients.
    """
    check_no_gradients(outs=outs, lses=lses, sinks=sinks, gate=gate)
    if not isinstance(outs, torch.Tensor):
        raise TypeError(f"outs must be a torch tensor, got {type(outs).__name__}")
    check_tensor("outs", outs, QUERY_DTYPES, like=outs)
    if outs.ndim != 4 or not outs.shape[0]:
        raise ValueError(f"outs must have shape [parts >= 1, tokens, heads, v_dim], got {list(outs.shape)}")
    check_head_dim("v_dim", int(outs.shape[3]))
    check_tensor("lses", lses, (torch.float32,), tuple(outs.shape[:3]), like=outs, unit_stride=False)
    check_head_options(outs[0], gate, sinks)
    dtype = outs.dtype if out_dtype is None else out_dtype
    if dtype not in QUERY_DTYPES:
        raise TypeError(f"out_dtype must be one of {names(QUERY_DTYPES)}, got {dtype}")
    output = outs.new_empty(outs.shape[1:], dtype=dtype)
    lse = torch.ops.swa_torch.merge_states(outs, lses, sinks, gate, output)
    return output, lse
