"""What we know of torch's ops by their names, beyond what their schemas say: the one place for it, as plain data.

A line here is a claim about every kernel of the op on the devices that we run on; a test of who uses it holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# ---- what schemas leave out

IDENTITIES = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift.default"})  # views that change nothing
# Calls that write to arguments without saying so: the places of these.
UNDECLARED_WRITES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "aten.native_batch_norm.default": (3, 4),
        "aten.cudnn_batch_norm.default": (3, 4),
        "aten.miopen_batch_norm.default": (3, 4),
    }
)
# Calls that return the same outputs when they are given None for what they update.
DETACHABLE = frozenset(UNDECLARED_WRITES)
# Calls whose results have contents that nobody can make up; who reads them is measured behind the call itself.
OPAQUE = frozenset({"aten.mkldnn_rnn_layer.default"})
# Calls whose kernels for the processor read the second argument for its sizes only.
SIZES_ONLY = frozenset(
    {
        "aten.max_pool2d_with_indices_backward.default",
        "aten.max_pool3d_with_indices_backward.default",
        "aten.adaptive_max_pool2d_backward.default",
        "aten.avg_pool2d_backward.default",
        "aten.avg_pool3d_backward.default",
        "aten._adaptive_avg_pool2d_backward.default",
        "aten._adaptive_avg_pool3d_backward.default",
    }
)

# Calls that leave what they make as it was: nothing is read or written.
UNWRITTEN = frozenset(
    {
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.empty_strided.default",
        "aten.new_empty.default",
        "aten.new_empty_strided.default",
    }
)

# Calls that read few elements of what they are given: as many as they make.
PICKING = frozenset(
    {
        "aten.embedding.default",
        "aten.index.Tensor",
        "aten.index_select.default",
        "aten.gather.default",
        "aten.nll_loss_forward.default",
        "aten.nll_loss2d_forward.default",
        "aten.nll_loss_backward.default",
        "aten.nll_loss2d_backward.default",
    }
)
# Calls that write to few elements of what they update, and read no others.
PATCHING = frozenset(
    {
        "aten.index_put_.default",
        "aten.index_add_.default",
        "aten.index_copy_.default",
        "aten.scatter_.src",
        "aten.scatter_.value",
        "aten.scatter_add_.default",
    }
)
# Calls that write over all that they update without reading it.
OVERWRITING = frozenset(
    {
        "aten.copy_.default",
        "aten.zero_.default",
        "aten.fill_.Scalar",
        "aten.fill_.Tensor",
        "aten.bernoulli_.float",
        "aten.uniform_.default",
        "aten.normal_.default",
    }
)

# Calls that read sizes of their arguments and no contents, and whose results are filled with one number or left as they
# were: the same for every part of a batch.
SAME_ANYWAY = UNWRITTEN | {
    "aten.ones_like.default",
    "aten.zeros_like.default",
    "aten.full_like.default",
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_full.default",
    "aten.zeros.default",
    "aten.ones.default",
    "aten.full.default",
}

# ---- what numbers come out

CAST = "aten._to_copy.default"  # keeps sizes and strides; cast to bool, what is not zero is true, NaN included
ADD = "aten.add.Tensor"  # with which autograd adds up gradients
# Draws of 0 or 1.
COINS = frozenset({"aten.bernoulli_.float", "aten.bernoulli_.Tensor", "aten.bernoulli.default", "aten.bernoulli.p"})
QUOTIENTS = frozenset({"aten.div_.Scalar", "aten.div.Scalar"})
# Losses that divide by the weights of the labels that count, and the places of their arguments: labels, weights,
# reduction, the label that does not count.
LABELLED: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(
    {"aten.nll_loss_forward.default": (1, 2, 3, 4), "aten.nll_loss2d_forward.default": (1, 2, 3, 4)}
)
MEAN, SUM = 1, 2  # reductions
# Backwards that make each of their results by a kernel of its own, and the place of the argument that asks for each.
SEPARABLE: Mapping[str, int] = MappingProxyType({"aten.convolution_backward.default": 10})
RELU, RELU_ITSELF, RELU_BACKWARD = "aten.relu.default", "aten.relu_.default", "aten.threshold_backward.default"
# Calls whose second result counts the elements of a plane of their argument: the dimensions of that plane.
INDICES: Mapping[str, int] = MappingProxyType(
    {
        "aten.max_pool2d_with_indices.default": 2,
        "lowtide.blocked_pool.default": 2,
        "aten.max_pool3d_with_indices.default": 3,
        "aten.adaptive_max_pool2d.default": 2,
        "aten.adaptive_max_pool3d.default": 3,
    }
)
# Calls that write each element of the result after reading just the same element of their arguments.
ELEMENTWISE = frozenset(
    """
    aten.relu.default aten.gelu.default aten.silu.default aten.tanh.default aten.sigmoid.default aten.exp.default
    aten.sqrt.default aten.neg.default aten.hardtanh.default aten.leaky_relu.default aten.add.Tensor aten.add.Scalar
    aten.sub.Tensor aten.sub.Scalar aten.mul.Tensor aten.mul.Scalar aten.div.Tensor aten.div.Scalar
    aten.pow.Tensor_Scalar aten.addcmul.default aten.addcdiv.default aten.masked_fill.Scalar aten.where.self
    aten.threshold_backward.default aten.gelu_backward.default aten.silu_backward.default aten.tanh_backward.default
    aten.sigmoid_backward.default lowtide.norm_apply.default lowtide.norm_spread.default
    """.split()  # noqa: SIM905 - a list of one name a line says no more
)

# Calls that treat so many examples of a batch together: the place of that number among their arguments.
GROUPED: Mapping[str, int] = MappingProxyType(
    {"lowtide.grouped_norm.default": 5, "lowtide.grouped_norm_backward.default": 5}
)

# ---- views

UNBIND, SELECT = "aten.unbind.int", "aten.select.int"  # one of many equal parts
# Calls on one of many equal parts, and the argument that says on which.
PART: Mapping[str, int] = MappingProxyType({"aten.select_backward.default": 3})
# Where calls say how they see a storage: the argument with the sizes, before those with strides and offset.
STRIDED: Mapping[str, int] = MappingProxyType(
    {"aten.as_strided": 1, "aten.as_strided_": 1, "aten.as_strided_copy": 1, "aten.as_strided_scatter": 2}
)
REINTERPRETING = "aten.view.dtype"  # takes the bytes for numbers of another dtype
OTHER_ELEMENTS = frozenset({REINTERPRETING, "aten.view_as_real.default", "aten.view_as_complex.default"})

# ---- layers, and what is expensive

LSTM, LSTM_BACKWARD = "aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"
RECURRENT = frozenset({LSTM, LSTM_BACKWARD})  # one layer in one direction, over all time steps in one call
# Words in the names of calls that mix many elements into one, by which the literature tells what to keep.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "matmul", "linear", "einsum")
LAYERS = ("convolution", "conv1d", "conv2d", "conv3d", "attention", "rnn", "lstm", "gru")
EXPENSIVE = frozenset(PRODUCTS + LAYERS)
