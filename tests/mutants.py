"""Bugs planted one at a time in a copy of the project; each has to make some test fail.

    python tests/mutants.py [--only=WORD]

Prints a line a mutant, the test that killed it, and one JSON object. A mutant whose text is not found, or not found once, is an error.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOME = Path(__file__).parent.parent

# what is planted: (name, file, text, what it becomes, the tests that should notice)
MUTANTS = [
    ("wrong-sign advantage", "loss.py", "return -torch.min(bounded, clipped)", "return torch.min(bounded, clipped)", "test_loss.py"),
    ("off-by-one shift", "batch.py", "rows=target - 1,", "rows=target,", "test_grpo.py"),
    ("stop token out of the mask", "sample.py", "is_stop.int().argmax(1) + 1", "is_stop.int().argmax(1)", "test_sample.py test_grpo.py"),
    ("prompt in the mask", "batch.py", "prompt[sequence] + place", "prompt[sequence] - 1 + place", "test_batch.py test_grpo.py"),
    ("prompt among the targets' states", "batch.py", "rows=target - 1,", "rows=target - 2,", "test_batch.py test_grpo.py"),
    ("temperature missing in training", "grpo.py", "settings, settings.temperature, whole", "settings, 1.0, whole", "test_grpo.py"),
    ("temperature missing in the head", "logprobs.py", "temperature, n_vocab, entropy, dtype, chunk_size", "1.0, n_vocab, entropy, dtype, chunk_size", "test_logprobs.py"),
    ("old and new log-probs swapped", "loss.py", "log_ratio = logprobs - old_logprobs", "log_ratio = old_logprobs - logprobs", "test_loss.py"),
    ("KL sign in the loss", "loss.py", "per_token = per_token + beta * (", "per_token = per_token - beta * (", "test_loss.py"),
    ("KL's two policies swapped", "loss.py", "log_ratio = ref_logprobs - logprobs", "log_ratio = logprobs - ref_logprobs", "test_loss.py"),
    ("KL sign in the reward", "grpo.py", "rewards = rewards - settings.beta * sequence_kl", "rewards = rewards + settings.beta * sequence_kl", "test_collect.py"),
    ("KL in reward and loss both", "grpo.py", "beta=0.0 if settings.use_kl_in_reward else settings.beta", "beta=settings.beta", "test_collect.py"),
    ("entropy bonus as a penalty", "loop.py", "loss = loss - entropy_weight", "loss = loss + entropy_weight", "test_grpo.py"),
    ("entropy's gradient without log p", "logprobs.py", "share.add_(entropy[rows, None]).mul_(", "share.zero_().add_(entropy[rows, None]).mul_(", "test_logprobs.py"),
    ("lower clip at 1 + epsilon", "loss.py", "ratio.clamp(1 - epsilon, 1 +", "ratio.clamp(1 + epsilon, 1 +", "test_loss.py"),
    ("epsilon_high ignored", "loss.py", "(epsilon if epsilon_high is None else epsilon_high)", "epsilon", "test_loss.py"),
    ("delta ignored", "loss.py", "(ratio if delta is None else ratio.clamp(max=delta))", "ratio", "test_loss.py"),
    ("CISPO's weight differentiated", "loss.py", "ratio.clamp(max=epsilon_high).detach()", "ratio.clamp(max=epsilon_high)", "test_loss.py"),
    ("a sequence's ratio by its sum", "loss.py", "index_add(0, sequence, values) / lengths", "index_add(0, sequence, values)", "test_loss.py"),
    ("importance upside down", "loss.py", "torch.exp(old_logprobs - sampling_logprobs)", "torch.exp(sampling_logprobs - old_logprobs)", "test_loss.py"),
    ("no correction for the sampler", "loss.py", "per_token = per_token * correction", "pass", "test_loss.py"),
    ("deviation without Bessel", "loss.py", "/ (count - 1).clamp(min=1)).sqrt()", "/ count).sqrt()", "test_loss.py"),
    ("leave-one-out leaves none out", "loss.py", "centred = centred * count / (count - 1).clamp(min=1)", "pass", "test_loss.py"),
    ("0 / 0 in a group of equal rewards", "loss.py", "torch.where(centred == 0, 0, centred / (std + eps))", "centred / (std + eps)", "test_loss.py"),
    ("an unscored completion scored 0", "reward.py", "if parts else math.nan", "if parts else 0.0", "test_reward.py test_grpo.py"),
    ("grpo averages over tokens", "loss.py", "return 1 / (num_sequences * lengths[sequence])", "return 1 / num_tokens", "test_loss.py"),
    ("counts of the micro-batch", "grpo.py", "num_tokens=sum(lengths[i] for i in rows)", "num_tokens=lengths[0]", "test_grpo.py"),
    ("truncated completions taught", "grpo.py", "return [i for i in select if stopped[i]]", "return select", "test_collect.py"),
    ("steps with nothing to learn", "grpo.py", "if teaches(rollouts, select, settings):", "if True:", "test_collect.py"),
    ("groups without variance kept", "collect.py", "torch.cat([varied.nonzero(), (~varied).nonzero()])", "torch.cat([(~varied).nonzero(), varied.nonzero()])", "test_collect.py"),
    ("prompts of refills used again", "collect.py", "(iteration + turn) * P + extra_prompts", "iteration * P + extra_prompts", "test_collect.py"),
    ("refills not remembered", "grpo.py", 'health["extra_prompts"] += (metrics["gen_batches"] - 1)', 'health["extra_prompts"] += 0 * (metrics["gen_batches"] - 1)', "test_collect.py"),
    ("refills sampled with the same numbers", "sample.py", "np.arange(first_row, first_row + flight.N)", "np.arange(flight.N)", "test_collect.py"),
    ("reward weights ignored", "reward.py", "weight * reward for weight, reward", "reward for weight, reward", "test_collect.py"),
    ("long completions rewarded", "loss.py", "return -((lengths", "return ((lengths", "test_loss.py test_collect.py"),
    ("columns of a later token seen", "kvcache.py", "> t[:, None]  # (n, columns)", "> t[:, None] + 1", "test_kvcache.py test_sample.py"),
    ("all slots write one column", "kvcache.py", "self.first + t[:, None]", "self.first + t.max()", "test_kvcache.py test_sample.py"),
    ("rows read each other's prompts", "kvcache.py", "slots[:, None] * G + np.arange(G)", "(slots[:, None] * G + np.arange(G))[::-1]", "test_kvcache.py"),
    ("padding of prompts seen", "kvcache.py", "to_prompt.view(P, -1, T_p).add_(self.prompt_bias[self.places, 0])", "pass", "test_kvcache.py test_sample.py"),
    ("padding of prompts of one completion seen", "kvcache.py", "scores.view(n, -1, k.shape[1])[..., :T_p].add_(self.prompt_bias[:n, 0])", "pass", "test_kvcache.py"),
    ("prompts stay where they were", "kvcache.py", "prompt[: len(places)] = prompt[places]", "pass", "test_kvcache.py test_sample.py"),
    ("own tokens stay where they were", "kvcache.py", "own[: len(slots), :, :columns] = own[slots, :, :columns]", "pass", "test_kvcache.py test_sample.py"),
    ("columns read that nobody wrote", "kvcache.py", "self.written : columns + 15] = 0", "self.written : self.written] = 0", "test_kvcache.py"),
    ("scores rounded to bfloat16", "kvcache.py", "wide = torch.promote_types(self.dtype, torch.float32)", "wide = self.dtype", "test_sample.py"),
    ("own columns behind the prompt of another", "kvcache.py", "np.array_equal(place[slots], slots)", "True", "test_kvcache.py test_sample.py"),
    ("even where a free slot is not", "sample.py", "bool((self.began == self.oldest).all())", "bool((self.began[alive] == self.oldest).all())", "test_sample.py"),
    ("prompts read ahead are forgotten", "sample.py", "if prompt in busy or prompt >= self.next // self.k}", "if prompt in busy}", "test_sample.py"),
    ("rehearsed with one place", "sample.py", "n - (places > 1)), 1)", "n), 1)", "test_sample.py"),
    ("positions one too far", "sample.py", "self.start_at + self.t)", "self.start_at + self.t + 1)", "test_sample.py"),
    ("a new row goes on at the old one's length", "sample.py", "self.t[slots] = 0", "pass", "test_sample.py"),
    ("slots are not filled again", "sample.py", "while len(free := np.flatnonzero((rows := self.look()) == self.N)):", "while len(free := np.flatnonzero((rows := self.look()) == self.N)) == len(rows):", "test_sample.py"),
    ("text looked for after the stop token", "sample.py", "if token in self.stop_tokens), None)", "if False), None)", "test_sample.py"),
    ("a stop string within one token alone", "tokenizer.py", "self.texts[i]), window)", "self.texts[i]), 1)", "test_tokenizer.py"),
    ("top_p leaves one token too many", "draw.py", "before < self.top_p", "before <= self.top_p", "test_draw.py"),
    ("top_p of the whole, not of what top_k left", "draw.py", "left = ranked * kept", "left = ranked", "test_draw.py"),
    ("tokens of probability 0", "draw.py", "cdf[:, -1:], right=True)", "cdf[:, -1:], right=False)", "test_draw.py"),
    ("tokens of probability 0, in the kernel", "draw.py", "(here > target) & (p > 0)", "here >= target", "test_kernels.py"),
    ("a tile's rows look at all its prompts", "kvcache.py", "columns, end, place == p, scale", "columns, end, place >= 0, scale", "test_kernels.py"),
    ("parts joined without their maxima", "kvcache.py", "row) - best)", "row) * 0)", "test_kernels.py"),
    ("model: k and v rows swapped", "pretrained.py", '("v", keys, queries + keys))', '("v", keys, queries))', "test_pretrained.py"),
    ("model: GPT-2's matrices as they lie", "pretrained.py", "copy_(tensor.t() if entry.transposed else tensor)", "copy_(tensor if not entry.transposed or tensor.shape[0] == tensor.shape[-1] else tensor.t())", "test_pretrained.py"),
    ("model: gate a row too low", "pretrained.py", 'f"{ours}.mlp.up", F, C, bias, 0)', 'f"{ours}.mlp.up", F, C, bias, 1)', "test_pretrained.py"),
    ("model: norms' epsilon is the default", "pretrained.py", 'norm_eps=c.get("rms_norm_eps", float, 1e-6)', "norm_eps=1e-2", "test_pretrained.py"),
    ("model: Llama 3's scaling left out", "model.py", "return (1 - kept) * (frequency / config.rope_factor) + kept * frequency", "return frequency", "test_pretrained.py"),
    ("model: linear scaling left out", "model.py", "return frequency / config.rope_factor\n", "return frequency\n", "test_pretrained.py"),
    ("model: surplus tensors pass", "pretrained.py", "if name not in wanted and name not in ignored]", "if False]", "test_pretrained.py"),
    ("model: shapes are not looked at", "pretrained.py", "if tuple(tensor.get_shape()) != entry.shape:", "if False:", "test_pretrained.py"),
    ("model: an index may name any file", "pretrained.py", "    if not plain:", "    if False:", "test_pretrained.py"),
    ("model: padded rows are exported", "pretrained.py", "value = value[: config.n_vocab]", "value = value[:]", "test_pretrained.py"),
    ("model: ids without a token are sampled", "prepare.py", '"n_vocab": tokenizer.n_vocab}', '"n_vocab": 0}', "test_models.py"),
    ("model: only the first stop token ends", "collect.py", "stop_token=tokenizer.stop_tokens,", "stop_token=None,", "test_collect.py test_grpo.py test_models.py"),
    ("sampler: only the first of several stop tokens", "sample.py", "for stop in self.stop_tokens:", "for stop in self.stop_tokens[:1]:", "test_sample.py"),
    ("sampler: lengths by the first stop token", "sample.py", "torch.tensor(as_tuple(stop_token), dtype", "torch.tensor(as_tuple(stop_token)[:1], dtype", "test_sample.py"),
    ("lora: not scaled", "lora.py", "wide.t(), alpha=self.scale)", "wide.t(), alpha=1.0)", "test_lora.py"),
    ("lora: reference with adapters", "grpo.py", "with adapters_off(reference), borrowed(", "with borrowed(", "test_lora.py"),
    ("lora: merged twice over", "lora.py", "add_(change, alpha=module.scale)", "add_(change, alpha=2 * module.scale)", "test_lora.py"),
    ("lora: the base trains too", "lora.py", "    model.requires_grad_(False)\n", "    model.requires_grad_(True)\n", "test_lora.py"),
    ("lora: A begins at zero too", "lora.py", "nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))", "nn.init.zeros_(self.lora_A)", "test_lora.py"),
    ("lora: another base goes unnoticed", "checkpoint.py", 'identity(place) == base["fingerprint"]', "True", "test_lora.py"),
    ("lora: resumed without its adapters", "checkpoint.py", "    if path and adapters:\n        load_into", "    if False:\n        load_into", "test_lora.py"),
    ("tokenizer not kept beside the checkpoint", "saver.py", "write(self.folder, state, tensors, self.tokenizer.files)", "write(self.folder, state, tensors)", "test_models.py"),
]  # fmt: skip


def plant(copy, file, text, becomes):
    source = (HOME / file).read_text()
    if source.count(text) != 1:
        raise SystemExit(f"{file} has {text!r} {source.count(text)} times; the mutant needs it once")
    (copy / file).write_text(source.replace(text, becomes))


def killed_by(copy, tests):
    """-> the first test that fails, or None."""
    files = [f"tests/{name}" for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    try:
        output = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600).stdout
    except subprocess.TimeoutExpired:
        return "a time limit"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return failed[1] if failed else None


def main(only):
    survivors = []
    with tempfile.TemporaryDirectory() as home:
        copy = Path(home) / "copy"
        shutil.copytree(
            HOME, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".pytest_cache")
        )
        chosen = [mutant for mutant in MUTANTS if only in mutant[0]]
        needed = " ".join(sorted({name for mutant in chosen for name in mutant[4].split()}))
        if failed := killed_by(copy, needed):
            raise SystemExit(f"without any mutant {failed} fails")
        for name, file, text, becomes, tests in chosen:
            plant(copy, file, text, becomes)
            test = killed_by(copy, tests)
            shutil.copy(HOME / file, copy / file)
            print(f"{name}: {'killed by ' + test if test else 'LIVES'}", flush=True)
            survivors += [] if test else [name]
    print(json.dumps(dict(mutants=len(chosen), survivors=survivors)))
    return survivors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plants bugs and runs the tests.")
    parser.add_argument("--only", default="", help="mutants whose name has this word")
    sys.exit(bool(main(parser.parse_args().only)))
