"""Adapters as PEFT lays them out: adapter_config.json and adapter_model.safetensors, in and out.

    base, rank, *adapters = find_base("export/adapters")
    read_weights(look_at_weights(base), model, *adapters)        # merged

Where a folder has several matrices for one of ours, such as q, k and v, each has its own A and B. Written, each gets
our A and its rows of B: the same product. fan_in_fan_out says how PEFT keeps the base; A and B are the same.

Left out: other variants of LoRA, adapters of embeddings, adapters on adapters.
Tests: pytest tests/test_adapters.py tests/test_nf4.py
"""

import json
from pathlib import Path

from snug.options import in_one_line
from snug.options.typed import Fields
from snug.pretrained.hub import local_folder
from snug.pretrained.shapes import family_of, read_config
from snug.pretrained.tensors import appearing, entries, rows_of, write_json

# Variants of LoRA. Tensors of others have no place in the base.
NOTHING = """bias use_dora use_qalora use_bdlora modules_to_save rank_pattern alpha_pattern alora_invocation_tokens
arrow_config kasa_config monteclora_config"""


def find_base(folder: Path, weights: bool = True):
    """A folder of adapters -> (its base's folder, rank, their file, scale). Another folder: (itself, 0, None, 0.0).

    weights=False: a base on the hub is perhaps without its weights. Raises SnugError, also for variants of LoRA.
    """
    if (folder / "config.json").is_file():
        return folder, 0, None, 0.0
    path = folder / "adapter_config.json"
    with in_one_line(f"{path}: cannot be used"):
        config = Fields(json.loads(path.read_bytes()), "PEFT")
        config.want("peft_type", "LORA")
        config.want("init_lora_weights", True, False, "gaussian")  # pissa and others change the base
        for name in NOTHING.split():
            config.want(name, False, "none", {})
        rank, scale = config.get("r", int), config.get("lora_alpha", float)
        scale /= rank ** (0.5 if config.get("use_rslora", bool, False) else 1)
        names = map(config.values.get, ("base_model_name_or_path", "revision"))
        base = local_folder("@".join(filter(None, names)), weights)
        read_config(base)
    return base, rank, folder / "adapter_model.safetensors", scale


def save_adapters(model, folder: str | Path, base: str, settings):
    """Write a folder that PEFT loads beside `base`, a Hugging Face folder or owner/name@commit. Raises SnugError.

    settings: lora_rank and lora_alpha. The folder must be new or empty, and appears complete or not at all.
    """
    from safetensors.torch import save_file

    family, tensors, modules = family_of(model.config), {}, set()
    for entry in entries(vars(model.config), family, model.config.n_vocab):
        layer = model.get_submodule(entry.ours.rpartition(".")[0])
        if len(entry.shape) == 2 and hasattr(layer, "lora_A"):
            name = entry.name.removesuffix(".weight")
            # GPT-2 has a c_proj in both halves of a block.
            modules.add(".".join(name.split(".")[-2 if family == "gpt2" else -1 :]))
            for letter, value in (("A", layer.lora_A), ("B", rows_of(layer.lora_B, entry))):
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = value.detach().cpu().clone()
    base, _, revision = base.partition("@")
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision or None,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=sorted(modules),
        fan_in_fan_out=family == "gpt2",
        inference_mode=True,
    )
    with appearing(folder) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "adapter_config.json", config)
