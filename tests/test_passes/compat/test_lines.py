from passes.compat.jit import function_of, grad_rule_of, shape_of, symbol_that_calls

import thunder
import torch


def test_lines_and_their_functions():
    """A line of ours holds its function. A line of torch's names it."""
    line = symbol_that_calls("mine", lambda: None, abs, is_prim=True).bind(output=None)
    assert function_of(line) is abs
    jitted = thunder.jit(lambda x: torch.cos(x))
    jitted(torch.ones(2, 3))
    traced = thunder.last_traces(jitted)[0].bound_symbols[-2]
    assert (traced.sym.name, function_of(traced)) == ("cos", None)
    assert shape_of(traced.flat_proxy_outs[0]) == (2, 3)
    assert grad_rule_of(traced) is None
    assert grad_rule_of(traced.subsymbols[0]) is not None
