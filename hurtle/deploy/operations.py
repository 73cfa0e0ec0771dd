"""The operations that the graph in a policy file may have: arithmetic on tensors. All others are refused.

Hurtle's own policies need less than half of these; the others are for users' networks. None runs code, reads a file, exposes
uninitialized memory, or indexes without bounds checks. Knows no file format.
"""

from __future__ import annotations

import re

_ONNX = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization BitwiseAnd BitwiseNot BitwiseOr
BitwiseXor Cast CastLike Ceil Celu Clip Compress Concat Constant ConstantOfShape Conv Cos Cosh CumSum DepthToSpace Div Dropout
Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool
Greater GreaterOrEqual GroupNormalization GRU Hardmax HardSigmoid HardSwish Identity InstanceNormalization IsInf IsNaN
LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization LSTM MatMul Max MaxPool Mean Min Mish Mod Mul Neg
Not OneHot Or Pad Pow PRelu RandomNormalLike RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape RMSNormalization RNN Round ScatterElements
ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum
Swish Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
ONNX_OPERATIONS = frozenset(_ONNX.split())
"""ONNX operations: no loops, branches, functions, strings or other domains."""

_ATEN = """
_assert_scalar _assert_tensor_metadata _log_softmax _softmax _to_copy abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_max_pool1d adaptive_max_pool2d add addcdiv addcmul addmm addmv alias all amax amin aminmax any arange argmax argmin
argsort asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bitwise_and bitwise_not bitwise_or
bitwise_xor bmm broadcast_tensors broadcast_to cat ceil celu chunk clamp clamp_max clamp_min clip clone concat concatenate
constant_pad_nd contiguous conv1d conv2d conv3d convolution copysign cos cosh cosine_similarity cross cummax cummin cumprod
cumsum detach diag diag_embed diagonal diff digamma div divide dot dropout einsum elu embedding eq erf erfc erfinv exp exp2
expand expand_as expm1 eye feature_dropout flatten flip floor floor_divide fmax fmin fmod frac full full_like gather ge gelu
glu greater greater_equal group_norm gru gru_cell gt hardshrink hardsigmoid hardswish hardtanh heaviside hstack hypot index
index_add index_copy index_fill index_put index_select instance_norm isclose isfinite isinf isnan layer_norm le leaky_relu lerp
less less_equal lgamma lift_fresh_copy linalg_norm linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid
log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lstm lstm_cell lt
masked_fill matmul max max_pool1d max_pool2d max_pool3d maximum mean median meshgrid min minimum mish mm moveaxis movedim mul
multiply mv nan_to_num nanmean nansum narrow ne neg negative new_full new_ones new_zeros norm not_equal one_hot ones ones_like
outer pad permute pixel_shuffle pixel_unshuffle pow prelu prod rand rand_like randn randn_like reciprocal reflection_pad1d
reflection_pad2d relu relu6 remainder repeat repeat_interleave replication_pad1d replication_pad2d reshape reshape_as rms_norm
rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll round rrelu rsqrt rsub scalar_tensor scaled_dot_product_attention scatter
scatter_add scatter_reduce select select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh slice
slice_scatter softmax softplus softshrink split split_with_sizes sqrt square squeeze stack std std_mean sub subtract sum
swapaxes swapdims sym_constrain_range sym_constrain_range_for_size sym_numel sym_size t tan tanh tensor_split threshold tile to
topk trace transpose tril triu true_divide trunc type_as unbind unflatten unfold unsqueeze var var_mean view view_as vstack
where xlogy zeros zeros_like
"""
_IN_PLACE = """
add_ clamp_ clamp_max_ clamp_min_ copy_ detach_ div_ elu_ exp_ fill_ hardtanh_ leaky_relu_ log_ masked_fill_ mul_ neg_ relu_
scatter_ sigmoid_ silu_ sqrt_ sub_ tanh_ zero_
"""
_OVERLOADS = """
correction decimals default device dim dim_int dim_IntList dims dtype dtype_layout generator indexing indices input int
int_Scalar int_Tensor intlist other padding reduce Scalar Scalar_mode Scalar_Scalar Scalar_Tensor ScalarOpt_dim
ScalarOpt_dim_dtype ScalarOpt_dtype ScalarOther ScalarSelf sections self_int self_Tensor sizes src start start_step Tensor
Tensor_mode Tensor_Scalar Tensor_Tensor two using_ints value value_reduce
"""
ATEN_OPERATIONS = frozenset(_ATEN.split()) | frozenset(_IN_PLACE.split())
"""Operations of torch.ops.aten."""
ATEN_OVERLOADS = frozenset(_OVERLOADS.split())
"""Overloads of them, except those that write into an `out` argument."""
_SYMBOLIC = re.compile(
    r"torch\.sym_(?:float|int|ite|max|min|not|sqrt|sum)|"
    r"_operator\.(?:add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
)
"""Functions that compute with sizes."""


def is_onnx_operation(domain: str, name: str) -> bool:
    """Whether a file may contain this operation.

    Example:
        >>> is_onnx_operation("", "Gemm"), is_onnx_operation("com.microsoft", "Gemm"), is_onnx_operation("", "Loop")
        (True, False, False)
    """
    return domain in ("", "ai.onnx") and name in ONNX_OPERATIONS


def is_torch_operation(target: str) -> bool:
    """Whether a file may call this target; torch itself would call anything in torch and the modules it imports.

    Example:
        >>> [is_torch_operation(f"torch.{name}") for name in ("ops.aten.add.Tensor", "ops.aten.add.out", "os.system")]
        [True, False, False]
    """
    parts = target.split(".")
    if parts[:3] == ["torch", "ops", "aten"] and len(parts) == 5:
        return parts[3] in ATEN_OPERATIONS and parts[4] in ATEN_OVERLOADS
    return _SYMBOLIC.fullmatch(target) is not None
