"""Adapters as PEFT lays them out: adapter_config.json and adapter_model.safetensors.

Where a folder has several matrices for one of ours, such as q, k and v, each gets our A and its rows of B: the same
product. Left out: reading such a folder. Test: pytest tests/test_nf4.py
"""

from pathlib import Path

from pretrained.shapes import family_of
from pretrained.tensors import appearing, entries, rows_of, write_json


def save_adapters(model, folder: str | Path, base: str, settings):
    """Write a folder that PEFT loads beside `base`, a Hugging Face folder or owner/name@commit. Raises SnugError.

    settings: lora_rank and lora_alpha. The folder must be new or empty, and appears complete or not at all.
    """
    from safetensors.torch import save_file

    family, tensors, modules = family_of(model.config), {}, set()
    for entry in entries(vars(model.config), family, model.config.n_vocab):
        layer = model.get_submodule(entry.ours.rpartition(".")[0])
        if entry.is_matrix and hasattr(layer, "lora_A"):
            name = entry.name.removesuffix(".weight")
            # GPT-2 has a c_proj in both halves of a block.
            modules.add(".".join(name.split(".")[-2 if family == "gpt2" else -1 :]))
            for letter, value in (("A", layer.lora_A), ("B", rows_of(layer.lora_B, entry))):
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = value.detach().cpu().clone()
    base, _, revision = base.partition("@")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base)
    config |= dict(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=sorted(modules))
    config |= dict(revision=revision or None, fan_in_fan_out=family == "gpt2", inference_mode=True)
    with appearing(folder) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "adapter_config.json", config)
