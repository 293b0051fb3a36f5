"""SmolLM2 in the forms that peers read, made once of the packaged GGUF file: bfloat16 weights for all of them.

vLLM and transformers read a folder in Hugging Face form, llama.cpp a GGUF file with BF16 tensors. Prompts are token ids, so
that no tokenizer is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginebay.models.catalogue import cache_dir
from enginebay.models.reference import ModelFiles, resolve_model


def peer_model(name: str, form: str) -> ModelFiles:
    """The packaged model `name` as ``"hf_dir"`` or ``"gguf"``, converted on first use."""
    source = resolve_model(name)
    folder = cache_dir() / "benchmarks" / name
    folder.mkdir(parents=True, exist_ok=True)
    if form == "hf_dir":
        if not (folder / "config.json").exists():
            write_folder(source.gguf_path, folder)
        return ModelFiles(kind="hf_dir", path=folder, name=name)
    file = f"{name}.BF16.gguf"
    if not (folder / file).exists():
        write_gguf(source.gguf_path, folder / file)
    return ModelFiles(kind="gguf", path=folder, gguf_file=file, name=name)


def write_folder(source: Path, folder: Path) -> None:
    """A Hugging Face folder with bfloat16 weights, through transformers' own reading of the GGUF file."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)


def write_gguf(source: Path, target: Path) -> None:
    """The same GGUF file with its matrices as BF16; vectors stay float32, as llama.cpp's own converter leaves them."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, architecture)
    for key, field in reader.fields.items():
        # the reader's own three, and what the writer sets itself
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
