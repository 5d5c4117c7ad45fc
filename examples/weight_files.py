"""Write a bfloat16 model as several safetensors files, and read it with another library.

One backend creates the blocks and writes them with an index file, in the format of Hugging Face's libraries. Another
backend reads them, memory-mapped; every bit of every parameter is the same. Then one bit of one file is flipped, and
reading the file raises an error.

    python examples/weight_files.py --folder model
    python examples/weight_files.py --folder model --writer torch --reader jax

Needs ml_dtypes, for NumPy's bfloat16: pip install ml_dtypes
"""

import argparse
import sys
from pathlib import Path

import polyattn as pa
from polyattn.checkpoint import read_tensors, write_shards
from polyattn.interop import weights

WIDTH, HEADS, HIDDEN, BLOCKS = 64, 4, 256, 4
Layers = dict[str, pa.TransformerBlock]


def blocks(backend: str, seed: int) -> Layers:
    return {
        f"blocks.{i}": pa.TransformerBlock(WIDTH, HEADS, HIDDEN, dtype="bfloat16", backend=backend, seed=seed + i)
        for i in range(BLOCKS)
    }


def bits(layers: Layers) -> dict[str, bytes]:
    return {name: pa.to_backend(p, "numpy").tobytes() for name, p in weights.parameters_of(layers).items()}


def flip_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def main(arguments: list[str] | None = None) -> tuple[int, bool, str]:
    parser = argparse.ArgumentParser(description="Write a model as several files, and read it with another library.")
    parser.add_argument("--folder", type=Path, default=Path("runs/model"), help="default: %(default)s")
    parser.add_argument("--writer", default="numpy", help="the backend that writes; default: %(default)s")
    parser.add_argument("--reader", default="numpy", help="the backend that reads; default: %(default)s")
    options = parser.parse_args(arguments)

    written, read = blocks(options.writer, seed=0), blocks(options.reader, seed=100)
    options.folder.mkdir(parents=True, exist_ok=True)
    index = options.folder / "model.safetensors.index.json"
    files = write_shards(index, weights.parameters_of(written), {"made by": options.writer}, shard_size=100_000)
    print(f"{len(bits(written))} parameters in {len(files)} files of {sum(f.stat().st_size for f in files)} bytes")

    one, metadata = read_tensors(index, ["blocks.3.attention.q_proj.weight"])  # opens one of the files
    print(", ".join(f"{name} {x.dtype} {x.shape}" for name, x in one.items()), metadata)

    tensors, _ = read_tensors(index, mapped=True)  # reads data on first use
    weights.load(read, tensors)
    same = bits(read) == bits(written)
    print(f"{options.reader} has {'the same bits' if same else 'other bits'} as {options.writer}")

    del tensors
    flip_one_bit(files[0])
    try:
        read_tensors(index)
    except pa.CheckpointError as error:
        message = str(error)
        print(f"with one bit flipped: {message}")
        return len(files), same, message
    raise AssertionError("reading a damaged file raised no error")


if __name__ == "__main__":
    try:
        main()
    except pa.PolyattnError as error:
        sys.exit(f"weight_files: {error}")
