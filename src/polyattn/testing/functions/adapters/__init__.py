"""Adapters of the attention functions of other libraries, and of polyattn's own."""

ADAPTERS = {
    "torch-sdpa": "torch.nn.functional.scaled_dot_product_attention",
    "torch-sdpa-math": "",
    "torch-sdpa-flash": "",
    "flex-attention": "torch.nn.attention.flex_attention.flex_attention",
    "torch-mha": "torch.nn.MultiheadAttention",
    "jax-nn": "jax.nn.dot_product_attention",
    "keras-ops": "keras.ops.dot_product_attention",
    "flax-nnx": "flax.nnx.dot_product_attention",
    "mlx-fast": "mlx.core.fast.scaled_dot_product_attention",
    "onnxruntime-attention": "",
    "onnxruntime-mha": "",
    "onnx-reference": "",
    "polyattn-numpy": "",
    "polyattn-torch": "",
    "polyattn-jax": "",
    "polyattn-strict": "",
}
"""The name of each adapter, and the dotted name of the function that it is for, if there is one."""
