"""Bugs planted one at a time in a copy of the project; each has to make some test fail.

    python tests/mutants.py [--only=WORD]

Prints a line a mutant, the test that killed it, and one JSON object. A mutant whose text is not found, or not found once, is an error.
"""

import argparse
import importlib.util
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
    ("wrong-sign advantage", "loss.py", "return -torch.min(bounded, clipped), clipped < bounded", "return torch.min(bounded, clipped), clipped < bounded", "test_loss.py"),
    ("teacher: forward and reverse swapped", "logprobs/divergence.py", 'if name == "forward_kl":\n        return', 'if name == "reverse_kl":\n        return', "test_teacher.py"),
    ("teacher: the gradient without its mean", "logprobs/divergence.py", "p * (gap - divergence[:, None])", "p * gap", "test_teacher.py"),
    ("teacher: half of jsd's gradient", "logprobs/divergence.py", "p * (gap - own[:, None]) / 2", "p * (gap - own[:, None]) / 4", "test_teacher.py"),
    ("teacher: the gradient for logits / temperature", "logprobs/divergence.py", "= gradient / options.temperature", "= gradient", "test_teacher.py"),
    ("teacher: the teacher's own temperature", "logprobs/divergence.py", "torch.log_softmax(teacher_z / options.temperature, -1)", "torch.log_softmax(teacher_z, -1)", "test_teacher.py"),
    ("teacher: padding in the kernel's sums", "logprobs/divergence.py", "known = start + lane < n_vocab\n", "known = start + lane < n_vocab + 4\n", "test_teacher.py"),
    ("teacher: the kernel's gradient without its mean", "logprobs/divergence.py", "d = p * (gap - own)\n", "d = p * gap\n", "test_teacher.py"),
    ("teacher: every chunk has the first rows' teacher", "logprobs/head.py", "hidden = self.teacher.hidden[rows]", "hidden = self.teacher.hidden[: rows.stop - rows.start]", "test_teacher.py"),
    ("teacher: all tokens' divergences weigh alike", "logprobs/head.py", ".mul_(of_divergence[:, None])", ".mul_(of_divergence.mean())", "test_teacher.py"),
    ("teacher: log-probs unscaled beside a divergence", "logprobs/head.py", "gradient[:, :n_vocab].mul_(coefficients[:, None])", "gradient[:, :n_vocab]", "test_teacher.py"),
    ("teacher: dislikes are taught", "loss.py", "(teacher_logprobs - old_logprobs)", "(old_logprobs - teacher_logprobs)", "test_teacher.py"),
    ("teacher: its weight ignored", "loss.py", "per_token = per_token + options.teacher_coef * divergence", "per_token = per_token + divergence", "test_teacher.py"),
    ("teacher: rewards taught all the same", "grpo.py", "settings.reward_coef * advantages.flatten()", "advantages.flatten()", "test_teacher.py"),
    ("teacher: steps without rewards are skipped", "grpo.py", "settings.entropy_coef or settings.teacher", "settings.entropy_coef", "test_teacher.py"),
    ("teacher: another tokenizer passes", "runs/prepare.py", "    if differ:\n        text, i", "    if False:\n        text, i", "test_teacher.py"),
    ("teacher: too short a teacher passes", "runs/prepare.py", ' or shape["block_size"] < length', "", "test_teacher.py"),
    ("teacher: hidden states of some completions planned", "training/forward.py", "N = max(len(logprobs), settings.sequences_per_rollout)", "N = len(logprobs)", "test_teacher.py"),
    ("teacher: its logits beside the chunk's budget", "logprobs/head.py", "(len(teacher.weight) if teacher else 0)", "0", "test_teacher.py"),
    ("off-by-one shift", "batch.py", "[sequence] + place) - 1", "[sequence] + place)", "test_grpo.py"),
    ("stop token out of the mask", "sample.py", "is_stop.int().argmax(1) + 1", "is_stop.int().argmax(1)", "test_sample.py test_grpo.py"),
    ("prompt in the mask", "batch.py", "prompt[sequence] + place", "prompt[sequence] - 1 + place", "test_batch.py test_grpo.py"),
    ("first tokens predicted from the token before", "batch.py", "(place == 0, prompt_end[sequence],", "(place == 0, prompt_end[sequence] - 1,", "test_batch.py test_grpo.py"),
    ("all first tokens predicted from the first prompt", "batch.py", "np.where(place == 0, prompt_end[sequence],", "np.where(place == 0, prompt_end[0],", "test_batch.py test_grpo.py"),
    ("first tokens predicted from their own completion", "batch.py", "np.where(place == 0, prompt_end[sequence],", "np.where(place == 0, (begins + spans)[completion][sequence],", "test_packed.py"),
    ("lengths without the last token", "batch.py", "np.flatnonzero(mask[:length])", "np.flatnonzero(mask[: length - 1])", "test_packed.py"),
    ("completions' positions from 0", "batch.py", "(begins - first).repeat(spans)", "begins.repeat(spans)", "test_batch.py test_grpo.py"),
    ("a part of a group without its prompt's tokens", "batch.py", "bin = Bin(self.prompt_lengths[i])", "bin = Bin(0)", "test_batch.py"),
    ("completions see those before them", "kernels/segments.py", "self.begins.repeat(self.lengths)", "np.repeat([b for b, _, _ in self.groups], [e - b for b, _, e in self.groups])", "test_batch.py"),
    ("selective checkpointing attends again", "kernels/segments.py", "        if segments.kept:\n", "        if False:\n", "test_model.py"),
    ("selective checkpointing keeps nothing", "kernels/segments.py", "segments.kept.append((y, lse))", "pass", "test_model.py"),
    ("padding's gradient is not zeroed", "kernels/segments.py", "inputs[0].transpose(1, 2).flatten(0, 1)[batch.padding] = 0", "pass", "test_segments.py"),
    ("log-sums joined by the larger", "kernels/segments.py", "torch.logaddexp(lse", "torch.maximum(lse", "test_segments.py"),
    ("tiles see the row's first prompt", "kernels/segments.py", "completions.append((first, last, begin, middle,", "completions.append((first, last, 0, middle,", "test_segments.py"),
    ("temperature missing in training", "grpo.py", "        temperature=settings.temperature,\n        n_vocab", "        temperature=1.0,\n        n_vocab", "test_grpo.py"),
    ("temperature missing in the head", "logprobs/head.py", "temperature, n_vocab, entropy, dtype, chunk_size", "1.0, n_vocab, entropy, dtype, chunk_size", "test_logprobs.py"),
    ("old and new log-probs swapped", "loss.py", "log_ratio = logprobs - old_logprobs", "log_ratio = old_logprobs - logprobs", "test_loss.py"),
    ("KL sign in the loss", "loss.py", "per_token = per_token + options.beta * kl", "per_token = per_token - options.beta * kl", "test_loss.py"),
    ("KL's two policies swapped", "loss.py", "log_ratio = ref_logprobs - logprobs", "log_ratio = logprobs - ref_logprobs", "test_loss.py"),
    ("KL sign in the reward", "grpo.py", "rewards = rewards - settings.beta * sequence_kl", "rewards = rewards + settings.beta * sequence_kl", "test_collect.py"),
    ("KL in reward and loss both", "loss.py", "if options.beta and not options.use_kl_in_reward:", "if options.beta:", "test_collect.py"),
    ("entropy bonus as a penalty", "logprobs/head.py", "loss = loss - entropy_weight", "loss = loss + entropy_weight", "test_grpo.py"),
    ("entropy's gradient without log p", "logprobs/rows.py", "share.add_(entropy[rows, None]).mul_(", "share.zero_().add_(entropy[rows, None]).mul_(", "test_logprobs.py"),
    ("lower clip at 1 + epsilon", "loss.py", "ratio.clamp(1 - options.epsilon, 1 +", "ratio.clamp(1 + options.epsilon, 1 +", "test_loss.py"),
    ("epsilon_high ignored", "settings.py", "self.epsilon if self.epsilon_high is None else self.epsilon_high", "self.epsilon", "test_loss.py"),
    ("delta ignored", "loss.py", "bounded = ratio.clamp(max=options.delta) * advantages", "bounded = ratio * advantages", "test_loss.py"),
    ("CISPO's weight differentiated", "loss.py", "ratio.clamp(max=options.epsilon_high).detach()", "ratio.clamp(max=options.epsilon_high)", "test_loss.py"),
    ("a sequence's ratio by its sum", "loss.py", "sequence_sum(log_ratio, sequence, lengths) / lengths)", "sequence_sum(log_ratio, sequence, lengths))", "test_loss.py"),
    ("losses: SAPO's temperatures swapped", "loss.py", "t = torch.where(advantages > 0,", "t = torch.where(advantages < 0,", "test_loss.py"),
    ("losses: LUSPO without its lengths", "loss.py", "return 1 / num_sequences\n", "return 1 / num_tokens\n", "test_loss.py"),
    ("losses: VESPO's weight differentiated", "loss.py", "change.detach()", "change", "test_loss.py"),
    ("losses: GMPO clips both sides", "loss.py", "change.clamp(max=options.upper_epsilon)", "low.clamp(max=options.upper_epsilon)", "test_loss.py"),
    ("losses: GMPO and VESPO by parts of sequences", "settings.py", ' or self.loss_type in ("gmpo", "vespo")', "", "test_packed.py"),
    ("importance upside down", "loss.py", "log_ratio = old_logprobs - sampling_logprobs", "log_ratio = sampling_logprobs - old_logprobs", "test_loss.py"),
    ("importance: masks keep what is below the cap at the cap", "loss.py", "ratio.masked_fill(ratio > cap,", "ratio.masked_fill(ratio > 0,", "test_loss.py"),
    ("importance: a mask truncates", "loss.py", '0 if "mask" in mode else cap', "cap", "test_loss.py"),
    ("importance: a sequence's mean", "loss.py", "sequence_sum(log_ratio, sequence, lengths)[sequence]", "(sequence_sum(log_ratio, sequence, lengths) / lengths)[sequence]", "test_loss.py"),
    ("importance: of parts of sequences", "settings.py", "self.importance_sampling_level + self.importance_sampling_mode", "self.importance_sampling_level", "test_packed.py"),
    ("no correction for the sampler", "loss.py", "per_token = per_token * correction", "pass", "test_loss.py"),
    ("deviation without Bessel", "loss.py", "/ (count - 1).clamp(min=1)).sqrt()", "/ count).sqrt()", "test_loss.py"),
    ("leave-one-out leaves none out", "loss.py", "centred = centred * count / (count - 1).clamp(min=1)", "pass", "test_loss.py"),
    ("GDPO: functions are not scaled apart", "loss.py", "group_advantages(rewards.view(-1, k))", 'group_advantages(rewards.view(-1, k), "none")', "test_loss.py"),
    ("GDPO: the sum is centred in its group", "loss.py", "group_advantages(total[None])", "group_advantages(total.view(-1, k))", "test_loss.py"),
    ("GDPO: weights of functions ignored", "grpo.py", "weights = training.prepared.reward_weights", "weights = []", "test_collect.py"),
    ("advantages divided by a negative mean", "loss.py", "mean.masked_fill(mean <= 0, torch.inf)", "mean", "test_loss.py"),
    ("0 / 0 in a group of equal rewards", "loss.py", "torch.where(centred == 0, 0, centred / (scale + eps))", "centred / (scale + eps)", "test_loss.py"),
    ("an unscored completion scored 0", "data/rewards.py", "if scored else math.nan", "if scored else 0.0", "test_reward.py test_grpo.py"),
    ("grpo averages over tokens", "loss.py", "return 1 / (num_sequences * lengths[sequence])", "return 1 / num_tokens", "test_loss.py"),
    ("counts of the micro-batch", "grpo.py", "num_tokens=sum(len(cut.places[i]) for indices in micro_batches for i in indices)", "num_tokens=len(cut.places[0])", "test_grpo.py"),
    ("truncated completions taught", "grpo.py", "return [i for i in indices if stopped[i]]", "return list(indices)", "test_collect.py"),
    ("steps with nothing to learn", "grpo.py", "if not teaches(rollouts, select, settings):", "if False:", "test_collect.py"),
    ("groups without variance kept", "grpo.py", "(~varied).int()", "varied.int()", "test_collect.py"),
    ("prompts of refills used again", "training/state.py", "(iteration + turn) * P", "iteration * P", "test_collect.py"),
    ("refills not remembered", "training/state.py", "self.extra_prompts += (rollouts - 1)", "self.extra_prompts += 0 * (rollouts - 1)", "test_collect.py"),
    ("refills sampled with the same numbers", "sample.py", "np.arange(first_row, first_row + N)", "np.arange(N)", "test_collect.py"),
    ("reward weights ignored", "data/rewards.py", "weight * reward for weight, reward", "reward for weight, reward", "test_collect.py"),
    ("long completions rewarded", "loss.py", "return -((lengths", "return ((lengths", "test_loss.py test_collect.py"),
    ("columns of a later token seen", "decoding/kvcache.py", "> t[:, None]  # (n, columns)", "> t[:, None] + 1", "test_kvcache.py test_sample.py"),
    ("all slots write one column", "decoding/kvcache.py", "self.first_row + t[:, None]", "self.first_row + t.max()", "test_kvcache.py test_sample.py"),
    ("rows read each other's prompts", "decoding/kvcache.py", "slots[:, None] * G + np.arange(G)", "(slots[:, None] * G + np.arange(G))[::-1]", "test_kvcache.py"),
    ("padding of prompts seen", "decoding/kvcache.py", "prompt_scores.view(P, -1, T_p).add_(self.prompt_bias[self.prompts_in_use])", "pass", "test_kvcache.py test_sample.py"),
    ("prompts stay where they were", "decoding/kvcache.py", "prompt[: len(prompt_slots)] = prompt[prompt_slots]", "pass", "test_kvcache.py test_sample.py"),
    ("columns read that nobody wrote", "decoding/kvcache.py", "return torch.zeros(shape", "return torch.empty(shape", "test_kvcache.py"),
    ("scores rounded to bfloat16", "decoding/kvcache.py", "dtype = torch.promote_types(self.dtype, torch.float32)", "dtype = self.dtype", "test_sample.py"),
    ("prompts read ahead are forgotten", "decoding/decode_batch.py", "if p in busy or p >= waiting}", "if p in busy}", "test_sample.py"),
    ("positions one too far", "decoding/decode_batch.py", "(self.prompt_length + self.t)", "(self.prompt_length + self.t + 1)", "test_sample.py"),
    ("slots are not filled again", "decoding/decode_batch.py", "            if not new and not replied:", "            if not replied and (not new or len(idle) < len(sequences)):", "test_sample.py"),
    ("text looked for after the stop token", "decoding/decode_batch.py", "if ids[n - 1] in self.stop_tokens or", "if", "test_sample.py"),
    ("a stop string within one token alone", "tokenizer/__init__.py", 'window = max(len(text.encode(errors="replace")) for text in texts) + 1', "window = 1", "test_tokenizer.py"),
    ("tokens of probability 0", "decoding/draw.py", "cdf[:, -1:], right=True)", "cdf[:, -1:], right=False)", "test_draw.py"),
    ("tokens of probability 0, in the kernel", "decoding/draw.py", "(ends > target) & (p > 0)", "ends >= target", "test_kernels.py"),
    ("the second pick from the first read's total", "decoding/draw.py", "return first, 1 - (end - target) / size", "return first, u", "test_kernels.py"),
    ("a tile reads another prompt", "decoding/attention.py", "prompt_k += (p * G", "prompt_k += (0 * p * G", "test_kernels.py"),
    ("the new column is read from the cache too", "decoding/attention.py", "end = tl.minimum((split + 1) * completion_chunk, now)", "end = tl.minimum((split + 1) * completion_chunk, now + 1)", "test_kernels.py"),
    ("counters are not reset", "decoding/attention.py", "tl.store(counters + query, 0, last)", "pass", "test_kernels.py"),
    ("parts joined without their maxima", "decoding/attention.py", "tl.exp2(part_top - higher)", "tl.exp2(part_top * 0)", "test_kernels.py"),
    ("model: Llama 3's scaling left out", "kernels/rotary.py", "return (1 - kept) * (frequency / config.rope_factor) + kept * frequency", "return frequency", "test_pretrained.py"),
    ("model: linear scaling left out", "kernels/rotary.py", "return frequency / config.rope_factor\n", "return frequency\n", "test_pretrained.py"),
    ("model: k and v rows swapped", "pretrained/tensors.py", "(K, C), qkv_bias, Q + K)", "(K, C), qkv_bias, Q)", "test_pretrained.py"),
    ("model: GPT-2's matrices as they lie", "pretrained/tensors.py", "copy_(tensor.t() if entry.transposed else tensor)", "copy_(tensor.t() if entry.transposed and tensor.shape[0] != tensor.shape[1] else tensor)", "test_pretrained.py"),
    ("model: gate a row too low", "pretrained/tensors.py", '.mlp.up", (F, C), bias, 0)', '.mlp.up", (F, C), bias, 1)', "test_pretrained.py"),
    ("model: norms' epsilon is the default", "pretrained/shapes.py", '("rms_norm_eps", float, 1e-6)', '("no_such_eps", float, 1e-2)', "test_pretrained.py"),
    ("model: surplus tensors pass", "pretrained/tensors.py", "surplus.append(name)", "pass", "test_pretrained.py"),
    ("model: types are not looked at", "pretrained/tensors.py", "if dtype not in TYPES:", "if False:", "test_pretrained.py"),
    ("model: an index may name any file", "pretrained/tensors.py", "if any(name != Path(name).name for name in names):", "if False:", "test_pretrained.py"),
    ("model: shapes are not looked at", "pretrained/tensors.py", "if size != entry.shape:", "if False:", "test_pretrained.py"),
    ("model: NaN is a number", "options/typed.py", "fits = 0 < value < LIMIT or zero and value == 0", "fits = not value <= 0", "test_pretrained.py"),
    ("model: padded rows are exported", "pretrained/tensors.py", "entries(vars(config), family, config.n_vocab)", "entries(vars(config), family, config.vocab_size)", "test_pretrained.py"),
    ("model: ids without a token are sampled", "runs/prepare.py", 'shape["n_vocab"] = tokenizer.n_vocab', 'shape["n_vocab"] = 0', "test_models.py"),
    ("model: only the first stop token ends", "sample.py", "stop_token=episodes.tokenizer.stop_tokens,", "stop_token=episodes.tokenizer.stop_token,", "test_models.py"),
    ("sampler: only the first of several stop tokens", "decoding/decode_batch.py", "for stop in self.stop_tokens:", "for stop in self.stop_tokens[:1]:", "test_sample.py"),
    ("sampler: lengths by the first stop token", "sample.py", "torch.tensor(as_tuple(stop_token), dtype", "torch.tensor(as_tuple(stop_token)[:1], dtype", "test_sample.py"),
    ("model: Llama's o_proj without its bias", "pretrained/tensors.py", '(C, Q), proj_bias)', '(C, Q), bias)', "test_pretrained.py"),
    ("model: a window does not limit the block size", "pretrained/shapes.py", 'min(shape["block_size"], c.get("sliding_window", int, 4096))', 'shape["block_size"]', "test_pretrained.py"),
    ("gguf: tensors that nobody reads pass", "tools/from_gguf.py", "if numbers_in(tensors) != numbers_in(wanted):", "if False:", "test_from_gguf.py"),
    ("gguf: missing tensors stay random", "tools/from_gguf.py", 'if info["missing_keys"]:', "if False:", "test_from_gguf.py"),
    ("gguf: digits are cut as GPT-2 does", "tools/from_gguf.py", 'if cut == "smollm":', "if False:", "test_from_gguf.py"),
    ("gguf: Qwen's text is not normalized", "tools/from_gguf.py", 'elif cut == "qwen2":', "elif False:", "test_from_gguf.py"),
    ("gguf: Llama 3's words are merged", "tools/from_gguf.py", "elif cut in WHOLE_WORDS:", "elif False:", "test_from_gguf.py"),
    ("gguf: any rule of cutting text passes", "tools/from_gguf.py", '"gpt-2", "smollm")', '"gpt-2", "smollm", cut)', "test_from_gguf.py"),
    ("a panic of a library is a traceback", "options/__init__.py", 'is_panic = type(error).__name__ == "PanicException"', "is_panic = False", "test_tokenizer.py"),
    ("lora: not scaled", "lora.py", "B.t(), alpha=self.scale)", "B.t(), alpha=1.0)", "test_lora.py"),
    ("lora: reference with adapters", "training/forward.py", "with adapters_off(reference), borrowed(", "with borrowed(", "test_lora.py"),
    ("lora: merged twice over", "lora.py", "add_(change, alpha=module.scale)", "add_(change, alpha=2 * module.scale)", "test_lora.py"),
    ("lora: the base trains too", "lora.py", "    model.requires_grad_(False)\n", "    model.requires_grad_(True)\n", "test_lora.py"),
    ("lora: A begins at zero too", "lora.py", "nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))", "nn.init.zeros_(self.lora_A)", "test_lora.py"),
    ("a completion commands the terminal", "sample.py", "(shown + text).translate(CONTROLS)", "shown + text", "test_sample.py"),
    ("a prompt's date is today's", "tokenizer/__init__.py", "files = {DATE: today.encode()} | files", "files = files | {DATE: today.encode()}", "test_models.py"),
    ("settings.json has the options' shape", "runs/prepare.py", "settings = replace(settings, **resolved)", "settings = replace(settings)", "test_models.py"),
    ("lora: another base goes unnoticed", "runs/checkpoint.py", 'identity(weights.path) == base["fingerprint"]', "True", "test_lora.py"),
    ("lora: resumed without its adapters", "training/loop.py", "    if resume and settings.lora_rank:\n        load_into", "    if False:\n        load_into", "test_lora.py"),
    ("tokenizer not kept beside the checkpoint", "runs/saver.py", "write(self.folder, state, tensors, self.tokenizer.files)", "write(self.folder, state, tensors)", "test_models.py"),
    ("the same t for slots that started later", "decoding/decode_batch.py", "bool((self.started[active] == self.first_start).all())", "True", "test_sample.py"),
    ("rehearsed with one prompt slot", "decoding/decode_batch.py", "n - (prompt_slots > 1)), 1)", "n), 1)", "test_sample.py"),
    ("a stop string's tail from within a character", "tokenizer/__init__.py", 'or not tail.startswith("\\ufffd")', "or True", "test_tokenizer.py"),
    ("a prompt's text spells special tokens", "tokenizer/__init__.py", "encode_special_tokens = not special", "encode_special_tokens = False", "test_tokenizer.py"),
    ("a stop token that is no special token is text", "tokenizer/__init__.py", "for i in stop_tokens if not added[i].special]", "for i in ()]", "test_tokenizer.py"),
    ("a message's content writes special tokens", "tokenizer/chat.py", "self.spellings.sub(lambda found: BREAK.join(found[0]), text)", "text", "test_tokenizer.py"),
    ("temperature missing in the reference", "training/forward.py", "                settings.temperature,\n                n_vocab", "                1.0,\n                n_vocab", "test_grpo.py"),
    ("refills draw with the first round's uniforms", "grpo.py", "first_row=before * settings.group_size", "first_row=0", "test_grpo.py"),
    ("prompts lose their end", "sample.py", "[ids[-settings.max_prompt_length :] for", "[ids[: settings.max_prompt_length or None] for", "test_grpo.py"),
    ("every iteration draws the same numbers", "grpo.py", "seed=settings.seed * 2**32 + iteration", "seed=settings.seed * 2**32", "test_grpo.py"),
    ("an attempt's gradient is kept after out-of-memory", "training/state.py", "self.optimizer.zero_grad(set_to_none=True)  # what a failed", "pass  # what a failed", "test_oom.py"),
    ("evaluations: unscored completions are right", "evaluate.py", "total is not None and total >= least", "total is None or total >= least", "test_scoring.py"),
    ("evaluations: float32's 0.9 is below 0.9", "evaluate.py", " - ROUNDING * abs(least)", "", "test_scoring.py"),
    ("evaluations: 0 is as good as a small threshold", "evaluate.py", "ROUNDING * abs(least)", "ROUNDING", "test_scoring.py"),
    ("rewards: the end of the grace stays", "data/rewards.py", "            faulthandler.cancel_dump_traceback_later()\n", "", "test_reward.py"),
    ("rewards: Python's generator is not seeded", "training/loop.py", "    random.seed(seed)", "    pass", "test_scoring.py"),
    ("rewards: NumPy's generator is not seeded", "training/loop.py", "    np.random.seed(seed)", "    pass", "test_scoring.py"),
    ("evaluations: weights left out", "runs/prepare.py", "functions, weights, limit = self.reward_funcs, self.reward_weights,", "functions, weights, limit = self.reward_funcs, [],", "test_scoring.py"),
    ("evaluations: all completions at a time", "evaluate.py", "rows[first : first + size]", "rows[first:]", "test_scoring.py"),
    ("evaluations: the task's functions, not the user's", "runs/prepare.py", "functions, weights, limit = self.reward_funcs,", "functions, weights, limit = [self.task.rewards],", "test_scoring.py"),
    ("evaluations: any task's reward is 1", "data/scores.py", 'sample["task_reward"] == 1', 'sample["task_reward"] is not None', "test_scoring.py"),
    ("evaluations: None is 0 in the mean", "data/scores.py", "mean_of([s[name] for s in samples if s[name] is not None])", "mean_of([s[name] or 0.0 for s in samples])", "test_scoring.py"),
    ("evaluations move the generators", "evaluate.py", "    restore_generators(generators, model.device)\n", "", "test_scoring.py"),
    ("evaluate.py forgets the run's functions", "evaluate.py", 'if task != run.task or "reward_funcs" in given', "if True", "test_scoring.py"),
    ("evaluate.py gives other functions the run's weights", "evaluate.py", ' or "reward_funcs" in given', "", "test_scoring.py"),
    ("the best by pass@1 alone", "runs/saver.py", '"eval_reward_mean" if self.settings.reward_funcs else "pass_at_1"', '"pass_at_1"', "test_scoring.py"),
    ("a failed evaluation loses the step", "training/state.py", "with self.saver.keeping(done,", "with self.saver.keeping(0,", "test_log.py"),
    ("a sign after a digit", "data/answers.py", r'(?<![0-9A-Za-z_)', r'(?<![A-Za-z_)', "test_gsm8k.py"),
    ("a sign is never one", "data/answers.py", r"%+\u2212-])[-+\u2212])?", r"%+\u2212-])[-+\u2212]{9})?", "test_jsonl.py"),
    ("part of a number is one", "data/answers.py", "if PART.search(", "if not PART.search(", "test_gsm8k.py"),
    ("a training prompt is a test prompt", "data/task.py", "split_of(self.identity(row)) == split", "split", "test_data.py"),
    ("sandbox: a worker goes on after executed code", "sandbox/child.py", "return [value, error], executed", "return [value, error], False", "test_sandbox.py"),
    ("sandbox: without the audit hook too", "sandbox/child.py", 'if "audit" in confinement.layers else 1', "", "test_sandbox.py"),
    ("sandbox: a late reply answers the next request", "sandbox/__init__.py", "        except BaseException:\n            self.close()", "        except BaseException:\n            pass", "test_sandbox.py"),
    ("sandbox: forks outlive their worker", "sandbox/child.py", "for send in (os.killpg, os.kill):", "for send in (os.kill,):", "test_sandbox.py"),
    ("sandbox: the filter opens files to write", "sandbox/seccomp.py", "(ANY_BIT, WRITING, 1, 0)", "(ANY_BIT, WRITING, 0, 0)", "test_sandbox.py"),
    ("sandbox: workers keep the keeper's socket", "sandbox/confine.py", "os.closerange(PIPE + 1,", "os.closerange(PIPE + 99,", "test_sandbox.py"),
    ("gym: any score is right", "data/reasoning_gym.py", "score >= RIGHT", "score > 0", "test_gym.py"),
    ("a boolean is a number", "data/jsonl.py", "NUMBERS = (int, float)", "NUMBERS = (int, float, bool)", "test_jsonl.py"),
    ("a plan forgets the deeper blocks", "memory/plan.py", "return a + (b - a) * (depth - DEPTHS[0])", "return a + (b - a) * (depth - DEPTHS[1])", "test_plan.py"),
    ("products rounded to bfloat16 are float32", "device/cpu.py", "< EXACT * exact.norm()", "< exact.norm()", "test_cpu.py"),
    ("a bias without gradient", "device/cpu.py", "rows.sum(0) if", "None if", "test_cpu.py"),
    ("small products take oneDNN too", "device/cpu.py", "LARGE = 2**23", "LARGE = 2**5", "test_cpu.py"),
    ("oneDNN stays on after an error", "device/cpu.py", "    try:\n        yield\n    finally:\n        allow_bfloat16(False)", "    yield\n    allow_bfloat16(False)", "test_cpu.py"),
    ("the idle team stays", "device/cpu.py", "            team.end()\n            team = None", "            team = None", "test_cpu.py"),
    ("a thread of ours outlives the command", "device/cpu.py", "(over.set(), thread.join())", "over.set()", "test_cpu.py"),
    ("gpu: compute uses weights on their way", "device/host.py", "    block.arrival.wait()\n    fetch(following, device)", "    fetch(following, device)", "test_streams.py"),
    ("gpu: no weights are fetched ahead", "device/host.py", "    block.arrival.wait()\n    fetch(following, device)", "    block.arrival.wait()", "test_streams.py"),
    ("gpu: a block's input goes during its copy", "kernels/layers.py", "            before.copied.wait()\n", "", "test_streams.py"),
    ("gpu: a slab is updated before it has come", "training/optimizer.py", "            fetched.wait()\n", "", "test_optimizer.py"),
    ("gpu: a slab comes while the last one leaves", "training/optimizer.py", "            free[turn].wait()\n", "", "test_optimizer.py"),
    ("gpu: stochastic rounding with 12 bits", "kernels/adamw.py", "spare).bitwise_and_(0xFFFF)", "spare).bitwise_and_(0xFFF)", "test_adamw_kernel.py"),
    ("gpu: weights rounded with the moments' bits", "kernels/adamw.py", "mix_bits(bits ^ key) & 0xFFFF", "bits & 0xFFFF", "test_adamw_kernel.py"),
    ("gpu: rotary gradient rotated forth", "kernels/rotary.py", "        if BACK:\n            s = -s\n", "", "test_layer_kernels.py"),
    ("gpu: SwiGLU's gradient without the gate's slope", "kernels/swiglu.py", "sigmoid * (1 + gate * (1 - sigmoid))", "sigmoid", "test_layer_kernels.py"),
    ("gpu: a token sees the end of the completion before its own", "kernels/flash.py", "tl.where((token >= low) & (token <= high), z, LOW)", "tl.where(token <= high, z, LOW)", "test_flash.py"),
    ("gpu: completions do not see their prompt's last token", "kernels/flash.py", "last = tl.where(in_prompt, prompt_end - 1, token)\n            z = scores(x, keys, key[None, :], tl.where(in_prompt, prompt, low), last)  # (M, N)\n            higher", "last = tl.where(in_prompt, prompt_end - 2, token)\n            z = scores(x, keys, key[None, :], tl.where(in_prompt, prompt, low), last)\n            higher", "test_flash.py"),
    ("gpu: attention's sums keep an old maximum", "kernels/flash.py", "total = total * shrunk + tl.sum(p, 1, keep_dims=True)", "total = total + tl.sum(p, 1, keep_dims=True)", "test_flash.py"),
    ("gpu: completions teach their prompt nothing", "kernels/flash.py", "inside & (not of_prompt), 0)", "inside, 0)", "test_flash.py"),
    ("gpu: a key head has its first query head's gradient alone", "kernels/flash.py", "tl.where(of_prompt, h + 1, h + R)", "h + 1", "test_flash.py"),
    ("log: entropies of other sequences", "grpo.py", "entropies[micro.index[micro.sequence], micro.place]", "entropies[micro.sequence, micro.place]", "test_grpo.py"),
    ("log: half a group of samples", "training/figures.py", "-(-settings.samples_per_iteration // k) * k", "settings.samples_per_iteration", "test_grpo.py"),
    ("report: a completion ends the script", "page/write.py", '.replace("<", "\\\\u003c")', "", "test_report.py"),
    ("report: tiles backwards", "page/write.py", "{values[0]:.3f} → {values[-1]:.3f}", "{values[-1]:.3f} → {values[0]:.3f}", "test_report.py"),
    ("report: medians with the first iteration", "report.py", "logged(run.records[1:], name) or logged", "logged", "test_report.py"),
    ("report: a phase's last peak, in the table", "report.py", "{max(values):.1f}", "{values[-1]:.1f}", "test_report.py"),
    ("report: a phase's last peak, in the chart", "page/charts.py", "{phase: max(values) for", "{phase: values[-1] for", "test_report.py"),
    ("meter: a phase's last peak", "memory/meter.py", 'entry["peak"] = max(entry["peak"], self.peak_since_reset())', 'entry["peak"] = self.peak_since_reset()', "test_memory.py"),
    ("report: memory of iterations that are repeated", "page/runs.py", "if int(step) <= last:", "if True:", "test_report.py"),
    ("report: the last iteration's completions are thinned out", "page/runs.py", ' or s["iter"] == last]', "]", "test_report.py"),
    ("report: options of the model's shape", "page/runs.py", "hidden |= fields(ModelOptions).keys()", "pass", "test_report.py"),
    ("report: the lines of functions look alike", "page/charts.py", "STYLES[place % len(STYLES)]", "STYLES[0]", "test_report.py"),
    ("report: the prompt among a sample's columns", "training/figures.py", 'columns.pop("prompt", "")', 'columns.get("prompt", "")', "test_grpo.py"),
    ("log: a narrow terminal gets whole lines", "runs/log.py", "self.max_iters, console_width())", "self.max_iters)", "test_log.py"),
    ("log: a narrow line goes to the file", "runs/log.py", "[console_line(record, self.max_iters)]", "[console_line(record, self.max_iters, 80)]", "test_log.py"),
    ("log: the bar names no phase", "training/loop.py", "meter.show = log.show", "pass", "test_log.py"),
    ("the first scores overwritten", "training/state.py", 'f"before/{name}": score', 'f"{name}": score', "test_log.py"),
    ("an evaluation that failed is not repeated", "training/loop.py", "training.make_up_evaluation(log.start)", "pass", "test_log.py"),
    ("evaluations make the rollouts smaller", "memory/limits.py", 'self.halve_decoding("max_eval_batch", self', 'self.halve_decoding("max_rollout_batch", self', "test_oom.py"),
    ("two runs in one folder", "runs/lock.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "test_lock.py"),
    ("tensors are read before options are checked", "runs/prepare.py", "task, config, read_tensors=False)", "task, config, read_tensors=True)", "test_checkpoint.py"),
    ("evaluations ask a prompt twice", "runs/prepare.py", "held_out < settings.eval_prompts:", "held_out == 0:", "test_jsonl.py"),
    ("a smaller block_size limits nothing", "runs/prepare.py", 'settings.block_size if "block_size" in chosen else shape["block_size"]', 'shape["block_size"]', "test_pretrained.py"),
    ("processes: hsdp planned over all machines", "memory/plan.py", 'settings.processes_per_machine if settings.parallel == "hsdp" else settings.num_processes', "settings.num_processes", "test_parallel.py"),
    ("report: reserved memory as the peak", "page/charts.py", "y = [run.memory[i][phase].peak", "y = [run.memory[i][phase].reserved", "test_report.py"),
    ("gpu: sums of products in bfloat16", "device/pick.py", "products.allow_bf16_reduced_precision_reduction = False", "pass", "test_device.py"),
    ("gpu: a broken recording's pool is deleted", "device/cuda.py", "ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))", "pass", "test_replay.py"),
    ("gpu: the cache emptied after a broken recording", "device/cuda.py", "is_available() and not BROKEN", "is_available()", "test_replay.py"),
    ("gpu: attention's gradient without delta", "kernels/flash.py", "(p * (dp - slope)).to(keys.dtype)", "(p * dp).to(keys.dtype)", "test_flash.py"),
    ("gpu: a graph bakes a buffer that is replaced", "decoding/kvcache.py", "self.tiles.copy_(table)", "self.tiles = table", "test_replay.py"),
    ("gpu: a step waits for the device", "decoding/decode_batch.py", "hidden = self.model(self.token[:, None], positions, self.cache)[:, 0]", "self.t.max().item()\n        hidden = self.model(self.token[:, None], positions, self.cache)[:, 0]", "test_replay.py"),
    ("gpu: lengths are not rounded", "device/cuda.py", 'if kind_of(tokens) == "cuda" else length', 'if kind_of(tokens) == "none" else length', "test_batch.py"),
    ("processes: a mean of gradients", "training/parallel.py", "dist.all_reduce(gradient)", "dist.all_reduce(gradient.div_(2))", "test_parallel.py"),
    ("processes: FSDP's mean of gradients", "training/parallel.py", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)", "test_parallel.py"),
    ("processes: maxima are added up", "training/parallel.py", 'max(values) if name.endswith("_max") else sum(values)', "sum(values)", "test_parallel.py"),
    ("processes: hsdp's norm over all machines", "training/parallel.py", 'dist.all_reduce(squares, group=self.mesh["near"].get_group())', "dist.all_reduce(squares)", "test_parallel.py"),
    ("processes: entropies of an earlier attempt", "grpo.py", "entropies[cut.sequences(step)] = 0", "pass", "test_parallel.py"),
    ("processes: a share of the work rounded down", "batch.py", "share = -(-sum(group.tokens for group in self.groups_within(sequences, 0)) // len(loads))", "share = sum(group.tokens for group in self.groups_within(sequences, 0)) // len(loads)", "test_batch.py"),
    ("evaluations leave no room for the stop token", "runs/prepare.py", "settings.max_new_tokens or answer + 1", "settings.max_new_tokens or answer", "test_evaluate.py"),
    ("evaluations ignore logits_chunk_mb", "sample.py", "chunk_mb=settings.logits_chunk_mb,", "chunk_mb=0,", "test_evaluate.py"),
    ("two threads free memory and one is not counted", "device/host.py", "        size = self.sizes.pop(key)[1]\n        self.current -= size", "        self.current -= self.sizes.pop(key)[1]", "test_memory.py"),
    ("a function's rewards of the first part alone", "training/figures.py", "lists[name] += getattr(part, column).get(name, none)", "lists[name] += getattr(parts[0], column).get(name, none)", "test_parallel.py"),
    ("texts behind messages", "data/rewards.py", "if isinstance(prompt, str) or isinstance(completion, list):", "if True:", "test_reward.py"),
    ("the trainer's step stands still", "training/state.py", "        self.prepared.trainer_state.global_step = iteration\n", "", "test_notebook.py"),
    ("a missing column found late", "data/__init__.py", "if missing := sorted(wanted - ARGUMENTS - {*columns}):", "if missing := []:", "test_data.py"),
    ("template variables are not set", "tokenizer/chat.py", "self.source, self.template = defaults + self.source, None", "self.template = None", "test_tokenizer.py"),
    ("template variables set again and again", "tokenizer/chat.py", "if not self.source.startswith(defaults):", "if True:", "test_tokenizer.py"),
    ("a folder's own options lost", "runs/prepare.py", "settings = replace(before, **changes)", "settings = replace(settings, **changes)", "test_checkpoint.py"),
    ("a chat model writes 32 tokens", "runs/prepare.py", "return max(1, min(PRETRAINED_LENGTH, room))", "return 32", "test_models.py"),
    ("cut-off answers go unseen", "training/state.py", "if share > 0.5 and", "if share > 1.5 and", "test_models.py"),
    ("an earlier run is kept", "training/loop.py", "if settings.overwrite:", "if False:", "test_lock.py"),
    ("an interrupted run says it is finished", "training/notebook.py", "FinishedRun(prepared.settings, functions, finished)", "FinishedRun(prepared.settings, functions, True)", "test_notebook.py"),
    ("async functions one after the other", "data/rewards.py", "await asyncio.gather(*map(one, functions), return_exceptions=True)", "[await one(f) for f in functions]", "test_reward.py"),
    ("processes: all sample the first rows", "grpo.py", "before = turn * settings.batch_size + share.start", "before = turn * settings.batch_size", "test_parallel.py"),
    ("processes: offloaded weights stay as they were", "training/optimizer.py", 'copies.keys() - {"gradient"}', 'copies.keys() - {"gradient", "weight"}', "test_parallel.py"),
    ("completions stay where they were", "decoding/kvcache.py", "completion[: len(slots), :, :columns] = completion[slots, :, :columns]", "pass", "test_kvcache.py test_sample.py"),
    ("a new sequence goes on at the old one's length", "decoding/decode_batch.py", "self.t[slots] = 0", "pass", "test_sample.py"),
    ("episodes: the mask a token late", "sample.py", "mask &= ~written[: len(tokens), :T_c]", "mask &= ~written[: len(tokens), :T_c].roll(1, 1)", "test_episodes.py"),
    ("episodes: replies are trained on", "batch.py", "[np.flatnonzero(mask[:length]) for", "[np.arange(length) for", "test_packed.py"),
    ("episodes: a row gets its neighbour's reply", "decoding/decode_batch.py", "zip(held, lengths, ends, replies, strict=True)", "zip(held, lengths, ends, replies[1:] + replies[:1], strict=True)", "test_episodes.py"),
    ("episodes: positions of a reply from the prompt's end", "decoding/kvcache.py", "return columns, prompt_lengths + columns", "return columns, prompt_lengths + place", "test_episodes.py"),
    ("episodes: written tokens have a log-prob", "sample.py", "sampling_logprobs=logprobs[:, :T_c] * mask", "sampling_logprobs=logprobs[:, :T_c] - 1.0 * ~mask", "test_episodes.py"),
    ("episodes: a tool is asked twice", "decoding/decode_batch.py", "waits = np.isin(self.held, list(self.asked))", "waits = np.isin(self.held, [])", "test_episodes.py"),
    ("episodes: stop strings of earlier turns", "decoding/decode_batch.py", "self.is_over(ids[begin:n])", "self.is_over(ids[:n])", "test_episodes.py"),
    ("episodes: a reply's last token is not in the cache", "decoding/decode_batch.py", "lengths - 1, added + 1", "lengths - 1, added", "test_episodes.py"),
    ("episodes: a step sees too few columns behind a reply", "decoding/decode_batch.py", "self.started[slots] = self.steps - ends", "self.started[slots] = self.steps", "test_episodes.py"),
    ("episodes: one turn too many", "data/episodes.py", "if self.turns == self.toolbox", "if self.turns - 1 == self.toolbox", "test_episodes.py"),
    ("episodes: a turn that is cut off is lost", "data/episodes.py", "if self.sampled < len(sampled):", "if False:", "test_episodes.py"),
    ("episodes: a reply without room stays", "data/episodes.py", "if written < self.written:", "if False:", "test_episodes.py"),
    ("episodes: a template's special tokens in a result", "tokenizer/__init__.py", "special=piece in self.special)", "special=True)", "test_episodes.py"),
    ("episodes: special tokens in a result in tags", "data/episodes.py", '</result>" if is_result else text)', '</result>" if is_result else text, special=True)', "test_episodes.py"),
    ("episodes: a reply says None", "data/tools.py", "return None if result is None else", "return", "test_episodes.py"),
    ("episodes: messages of groups that were not selected", "training/figures.py", "chosen(self.episodes),", "self.episodes,", "test_agents.py"),
    ("episodes: another environment's turns go on", "runs/prepare.py", "PROBLEM + CALLED + adapters", "PROBLEM + adapters", "test_agents.py"),
    ("episodes: a plan without replies", "training/dry_run.py", "ask=episodes or None", "ask=None", "test_agents.py"),
    ("evaluations: every piece draws as the first", "evaluate.py", "(numbers.start + first) * group_size", "numbers.start * group_size", "test_evaluate.py"),
]  # fmt: skip


def plant(copy, file, text, becomes):
    source = (HOME / file).read_text()
    if source.count(text) != 1:
        raise SystemExit(f"{file} has {text!r} {source.count(text)} times; the mutant needs it once")
    (copy / file).write_text(source.replace(text, becomes))


def killed_by(copy, tests, limit=600):
    """-> the first test that fails, or None."""
    files = [f"tests/{name}" for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    try:
        output = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=limit).stdout
    except subprocess.TimeoutExpired:
        return "a time limit"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return failed[1] if failed else None


def main(only):
    if not importlib.util.find_spec("pytest"):
        raise SystemExit(f"{sys.executable} has no pytest: pip install -r requirements-dev.txt")
    survivors = []
    with tempfile.TemporaryDirectory() as home:
        copy = Path(home) / "copy"
        shutil.copytree(
            HOME, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out", "models", "__pycache__", ".pytest_cache")
        )
        chosen = [mutant for mutant in MUTANTS if only in mutant[0]]
        needed = " ".join(sorted({name for mutant in chosen for name in mutant[4].split()}))
        if failed := killed_by(copy, needed, limit=None):
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
