"""Reads and writes PEFT's folders of adapters: adapter_config.json and adapter_model.safetensors.

    base, *adapters = find_base("export/adapters")
    read_weights(look_at_weights(base), model, *adapters)        # merged

Where a folder has several matrices for one of ours, such as q, k and v, each of them has its own A and B. In a folder
that snug writes, each has our A and its rows of our B, so the product is the same. fan_in_fan_out says how PEFT keeps
the base; it does not change A and B.

Left out: other variants of LoRA, adapters of embeddings, adapters on adapters.
Tests: pytest tests/test_adapters.py tests/test_nf4.py
"""

from pathlib import Path

from snug.options.typed import Fields, read_object
from snug.pretrained.hub import hub_name, local_folder
from snug.pretrained.shapes import read_config
from snug.pretrained.tensors import PEFT, appearing, entries, rows_of, write_json

FILE = "adapter_model.safetensors"

# Variants of LoRA that are refused. Tensors of other variants are refused because the base has no place for them.
NOTHING = "bias use_dora modules_to_save rank_pattern alpha_pattern alora_invocation_tokens"


def find_base(folder, weights=True):
    """A folder of adapters -> (its base's folder, rank, their file, scale). Another folder: (itself, 0, None, 0.0).

    weights=False: a base on the hub may come without its weights. Raises SnugError, also for variants of LoRA.
    """
    if (folder / "config.json").is_file():
        return folder, 0, None, 0.0
    path = folder / "adapter_config.json"
    config = Fields(read_object(path), path)
    config.want("peft_type", "LORA")
    config.want("init_lora_weights", True, False, "gaussian")  # pissa and others change the base
    for name in NOTHING.split():
        config.want(name, False, "none", {})
    rank, scale = config.get("r", int), config.get("lora_alpha", float)
    scale /= rank ** (0.5 if config.get("use_rslora", bool, False) else 1)
    names = config.get("base_model_name_or_path", str), config.get("revision", str, "")
    return local_folder("@".join(filter(None, names)), weights), rank, folder / FILE, scale


def save_adapters(model, folder: str | Path, base: str | Path, settings):
    """Write a folder that PEFT loads beside `base`, a Hugging Face folder or owner/name@commit. Raises SnugError.

    settings: lora_rank and lora_alpha. The folder must be new or empty, and appears complete or not at all.
    """
    from safetensors.torch import save_file

    base = local_folder(base, weights=False)
    read = read_config(base)
    tensors = {}
    modules = []
    for entry in entries(model.config, read["model_type"]):
        layer = model.get_submodule(entry.ours.rpartition(".")[0])
        if hasattr(layer, "lora_A") and entry.ours.endswith("weight"):
            module = entry.name.removesuffix(".weight")
            # AutoModelForCausalLM reads a Gemma 3 with its eyes, a Qwen3.5 without.
            if "text_config" in read and read["model_type"] == "gemma3_text":
                module = module.replace("model.", "model.language_model.", 1)
            modules.append(module)
            for letter, value in (("A", layer.lora_A), ("B", rows_of(layer.lora_B, entry))):
                tensors[f"{PEFT}{module}.lora_{letter}.weight"] = value.detach().cpu().clone()
    name, revision = hub_name(base), None
    if name != str(base):
        name, revision = name.split("@")
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=name,
        revision=revision,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=modules,  # whole names: a vision tower's and GPT-2's two c_proj end alike
        fan_in_fan_out=modules[0].startswith("transformer."),
    )
    with appearing(folder) as temporary:
        save_file(tensors, temporary / FILE, metadata={"format": "pt"})
        write_json(temporary / "adapter_config.json", config)
