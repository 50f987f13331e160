"""Everything private in torch and Thunder that both packages rest on, as data. A test looks up each entry, so that a
release which lacks one fails the test of that name."""

from __future__ import annotations

from typing import NamedTuple

from passes.compat.versions import CHECKPOINT_GENERATOR


class Private(NamedTuple):
    """A private name: where it is, and what for. An ``attribute`` may be one that only instances have."""

    module: str
    attribute: str
    purpose: str


THUNDER = (
    Private("thunder.core.symbol", "BoundSymbol._call_ctx", "the function that a line calls"),
    Private("thunder.core.symbol", "Symbol._bind_postprocess", "gives each line of a symbol its function"),
    Private("thunder.core.trace", "TraceCtx._siginfo", "the name and arguments of the function that a trace prints"),
    Private("thunder.core.proxies", "Proxy._name", "names that Python can read; copies under another name"),
    Private("thunder.core.proxies", "Proxy._tags", "copies of proxies have their own tags"),
    Private("thunder.core.proxies", "TensorProxy._shape", "a proxy's shape outside of a trace"),
    Private("thunder.core.prims", "PrimIDs._GROUPED_MM", "its FLOPs"),
    Private("thunder.core.transforms", "_get_gradfn_and_executor", "whether and by whom a line is differentiated"),
    Private("thunder.executors.passes", "_transform_for_operator_executor_execution", "the unsharded program, lowered"),
    Private("thunder.core.compile_data", "_compile_data", "the current compilation"),
    Private("thunder.core.interpreter", "InterpreterRuntimeCtx._proxied_values", "the parameters that a trace met"),
    Private("thunder.core.jit_ext", "JitCtx._constraints", "the checks that the prologue makes"),
    Private("thunder.core.jit_ext", "JitCtx._additional_outputs", "results of a step that forward does not return"),
    Private("thunder.core.jit_ext", "JitCtx._proxy_swapmap", "values named like the user's variables"),
    Private("thunder.core.jit_ext", "_maybe_update_proxy_name", "likewise"),
    Private("thunder.core.module", "ThunderModule._model", "the module that was jitted"),
    Private("thunder.core.module", "ThunderModule._module_cache", "submodules that changed since the last trace"),
    Private("thunder.core.module", "ThunderModule._overrides_parameters", "parameters that were replaced after fsdp"),
    Private("thunder.core.module", "ThunderModule._lc_transforms", "the transforms passed to thunder.jit"),
    Private("thunder.common", "CompileData._thunder_module_map", "the jitted modules of a compilation"),
    Private("thunder.core.proxies", "_thunder_device", "the device on which a meta tensor is traced"),
    Private("thunder.torch", "_torch_to_thunder_function_map", "Thunder's symbols of torch's functions"),
    Private("thunder.torch", "_get_fake_arg", "fake arguments of a function that Thunder does not know"),
    Private("thunder.torch", "_softmax", "the kernel of softmax"),
    Private("thunder.executors.sdpaex", "_fused_sdp_choice", "the attention of a GPU that is absent"),
)

TORCH = (
    Private("torch", "Tensor._version", "whether a function has written into a tensor"),
    Private("torch", "UntypedStorage._cdata", "whether tensors share memory"),
    Private("torch", "_foreach_add_", "adds many gradients in one kernel"),
    Private("torch", "_chunk_cat", "packs gradients of all ranks in one kernel"),
    Private("torch", "ops.aten._grouped_mm", "its fake kernel"),
    Private("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu", "attention on a CPU"),
    Private("torch", "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "attention on a CPU"),
    Private("torch", "ops.aten._fused_rms_norm", "RMSNorm in one kernel"),
    Private("torch", "ops.aten._fused_rms_norm_backward", "RMSNorm in one kernel"),
    Private("torch", "ops.aten._softmax", "softmax in one kernel"),
    Private("torch", "ops.aten._softmax_backward_data", "softmax in one kernel"),
    Private("torch", "ops.aten._log_softmax", "softmax in one kernel"),
    Private("torch", "ops.aten._log_softmax_backward_data", "softmax in one kernel"),
    Private("torch._C", "_autograd._get_current_graph_task_keep_graph", "backward(retain_graph=True)"),
    Private("torch._C", "_functorch.peek_interpreter_stack", "calls below torch.vmap and torch.func"),
    Private("torch._C", "_functorch.TransformType", "derivatives in forward mode are refused"),
    Private("torch._C", "_dispatch_has_kernel", "whether autocast knows a function"),
    Private("torch._C", "_dispatch_has_kernel_for_dispatch_key", "whether autocast knows a function"),
    Private("torch._C._distributed_c10d", "FakeWork", "what a collective gives that is not sent"),
    Private("torch._C", "_get_dispatch_mode", "whether modules run on fake tensors"),
    Private("torch._C", "_TorchDispatchModeKey", "likewise"),
    Private("torch._subclasses.fake_tensor", "FakeTensorMode._allow_unsafe_data_ptr_access", "fakes have no memory"),
    Private("torch._C", "DisableTorchFunction", "functions that kernels of fake tensors call are not recorded"),
    Private("torch.nn.utils.parametrize", "_cache_enabled", "calls within parametrize.cached() are refused"),
    Private("torch._C", "ScriptFunction", "a scripted function is recorded as one call"),
    Private("torch._C", "ScriptMethod", "a scripted method is recorded as one call"),
    Private("torch", "_ops.OpOverload._schema", "the arguments into which an operator writes"),
    Private("torch.autograd.function", "FunctionMeta._forward_cls", "the node that runs Thunder's backward"),
    Private("torch", "Tensor._backward_hooks", "hooks on results that would see a part of a gradient"),
    Private("torch.autograd.function", "_SingleLevelFunction", "an autograd function is recorded as one call"),
    Private("torch._C", "_FunctionBase", "an autograd function is recorded as one call"),
    Private("torch.autograd.profiler", "_is_profiler_enabled", "ranges of collectives only while someone looks"),
    Private("torch._dynamo", "is_compiling", "models are told that they are compiled"),
    Private("torch._meta_registrations", "_create_grouped_mm_output_tensor", "grouped products in all dtypes"),
    Private("torch._subclasses.fake_tensor", "DataDependentOutputException", "forward needs the values of tensors"),
    Private("torch._subclasses.fake_tensor", "DynamicOutputShapeException", "forward needs the values of tensors"),
    Private("torch._subclasses.fake_tensor", "FakeTensor", "forward is recorded on tensors without memory"),
    Private("torch._subclasses.fake_tensor", "FakeTensorMode", "forward is recorded on tensors without memory"),
    Private("torch._subclasses.fake_tensor", "unset_fake_temporarily", "a module is tried on real tensors"),
    Private("torch._C", "_len_torch_function_stack", "whether torch.vmap calls an autograd function"),
    Private("torch", "_assert", "a check that only raises is a line"),
    Private("torch", "_check_tensor_all_with", "a check that only raises is a line"),
    Private("torch.overrides", "_pop_mode_temporarily", "a call is recorded as a whole"),
    Private("torch.utils.checkpoint", CHECKPOINT_GENERATOR, "what backward recomputes is recorded as such"),
    Private("torch.utils", "_pytree", "arguments and results of calls"),
    Private("torch.utils._pytree", "tree_leaves", "arguments and results of calls"),
    Private("torch.utils._pytree", "tree_map", "arguments and results of calls"),
    Private("torch.utils._pytree", "tree_map_only", "arguments and results of calls"),
    Private("torch.utils._python_dispatch", "TorchDispatchMode", "operators below torch's functions"),
    Private("torch.utils._python_dispatch", "is_traceable_wrapper_subclass", "quantized and nested parameters"),
    Private("torch.nn", "Module._parameters", "swaps parameters by shards and stand-ins"),
    Private("torch.nn", "Module._buffers", "swaps buffers"),
    Private("torch.nn", "Module._modules", "submodules that were replaced after fsdp"),
    Private("torch.nn", "Module._backward_hooks", "hooks that a compiled backward would not call"),
    Private("torch.nn", "Module._backward_pre_hooks", "hooks that a compiled backward would not call"),
    Private("torch.nn.modules.module", "_global_backward_hooks", "hooks that a compiled backward would not call"),
    Private("torch.nn.modules.module", "_global_backward_pre_hooks", "hooks that a compiled backward would not call"),
    Private("torch.nn.modules.module", "_IncompatibleKeys", "what load_state_dict returns"),
    Private("torch.nn.modules.batchnorm", "_NormBase", "norms that stay in float32"),
    Private("torch.nn.utils.stateless", "_reparametrize_module", "runs a module with other tensors"),
    Private("torch.nn.utils.clip_grad", "_get_total_norm", "the norm over all ranks"),
    Private("torch.amp", "GradScaler._unscale_grads_", "overflows of any rank"),
    Private("torch.cuda.memory", "_record_memory_history", "snapshots of memory"),
    Private("torch.cuda.memory", "_dump_snapshot", "snapshots of memory"),
    Private("torch.distributed.distributed_c10d", "_get_default_store", "ranks compare what they are about to send"),
    Private("torch.distributed.distributed_c10d", "_world", "all process groups, which a failure aborts"),
    Private("torch.distributed.distributed_c10d", "_get_backend", "the communicators of nccl"),
    Private("torch.distributed.distributed_c10d", "_coalescing_manager", "communicators of nccl are aborted together"),
    Private("torch.distributed.device_mesh", "DeviceMesh._flatten", "one group for several dimensions of a mesh"),
    Private("torch.distributed.fsdp.wrap", "ModuleWrapPolicy._run_policy", "policies of FSDP are spellings of ours"),
    Private("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", "fully_shard refuses shards"),
    Private("torch.distributed.checkpoint.state_dict", "_verify_options", "torch's state dicts refuse shards"),
    Private("torch.testing._internal.distributed.fake_pg", "FakeStore", "fake ranks"),
)

TRAINERS = (
    Private("accelerate.accelerator", "Accelerator._models", "loads sharded models"),
    Private("accelerate.accelerator", "Accelerator._optimizers", "saves and loads their states whole"),
    Private("transformers.trainer", "Trainer._save", "is given whole parameters"),
    Private("transformers.trainer", "Trainer._save_optimizer_and_scheduler", "saves the state whole"),
    Private("transformers.trainer", "Trainer._load_optimizer_and_scheduler", "each rank reads its rows"),
    Private("lightning.pytorch.strategies", "DDPStrategy._setup_model", "shards the module"),
    Private("lightning.pytorch.strategies", "ParallelStrategy._layer_sync", "is refused"),
    Private("lightning.pytorch.core.optimizer", "LightningOptimizer._optimizer", "the optimizer of torch"),
)
