"""Doors to other worlds: ONNX graphs, torch modules, Hugging Face's transformers. A module is imported by its name."""
