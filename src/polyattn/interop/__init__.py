"""Doors to other worlds, one a module: :mod:`polyattn.interop.onnx`. Each imports its library when it is called."""
