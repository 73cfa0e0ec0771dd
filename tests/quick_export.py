"""torch builds the same operator tables anew for every export; imported, this makes it keep them for the process.

Exports take about half the time then, and give the same files.
"""

import functools

import torch.export.decomp_utils
import torch.export.exported_program
from torch.onnx._internal.exporter import _decomp, _registration


def keep(owner, name, make_key=lambda *values: values):
    """Replace a function of torch's, if this version of torch has it, by one that returns a copy of its first result."""
    build = getattr(owner, name, None)
    if build is None:
        return
    kept = {}

    @functools.wraps(build)
    def from_table(*values):
        key = make_key(*values)
        if key not in kept:
            kept[key] = build(*values)
        return kept[key].copy()

    setattr(owner, name, from_table)


keep(torch.export.exported_program, "_collect_all_valid_cia_ops")
keep(torch.export.decomp_utils, "_collect_all_valid_cia_ops")
keep(torch.export.decomp_utils, "_collect_all_valid_cia_ops_for_aten_namespace")
keep(_decomp, "create_onnx_friendly_decomposition_table", frozenset)
_registration.ONNXRegistry.from_torchlib = staticmethod(functools.cache(_registration.ONNXRegistry.from_torchlib))
