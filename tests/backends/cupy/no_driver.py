"""CuPy without a driver: importing works, counting devices raises. A test may append another ``getDeviceCount``."""

import types

__version__ = "13.6.0"


class ndarray:
    pass


class CUDARuntimeError(RuntimeError):
    pass


def getDeviceCount():
    raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")


runtime = types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=getDeviceCount)
cuda = types.SimpleNamespace(runtime=runtime)
