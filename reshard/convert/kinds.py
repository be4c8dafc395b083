"""The trees that Linen and NNX save: kind -> what has it."""

KINDS = {
    "linen-variables": "collections at the top: `params`, `batch_stats`, ...",
    "linen-params": "the contents of `params` alone",
    "linen-train-state": "`params` beside `opt_state` or `step`, or all variables below `params`",
    "maxtext": "a train state, and below `nnx_aux` what only NNX has",
    "nnx-state": "`nnx.state(model)`, or a module: a `value` level under each variable",
    "nnx-pure-dict": "`nnx.to_pure_dict(nnx.state(model))`",
    "nnx-optimizer": "`nnx.Optimizer`: `opt_state` and `step`",
    "nnx-model-and-optimizer": "`nnx.ModelAndOptimizer`: `model`, `opt_state` and `step`",
    "nnx-model": "a state below `model`, perhaps beside `optimizer`",
}
