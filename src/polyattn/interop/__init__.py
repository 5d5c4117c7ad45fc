"""Interoperability with ONNX, torch, Hugging Face's transformers, Keras and Flax. Import each module by its name."""
