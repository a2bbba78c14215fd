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
    # batch.py
    ("off-by-one shift", "batch.py", "[sequence] + place) - 1", "[sequence] + place)", "test_grpo.py"),
    ("prompt in the mask", "batch.py", "prompt[sequence] + place", "prompt[sequence] - 1 + place", "test_batch.py test_grpo.py"),
    ("first tokens predicted from the token before", "batch.py", "(place == 0, prompt_end[sequence],", "(place == 0, prompt_end[sequence] - 1,", "test_batch.py test_grpo.py"),
    ("all first tokens predicted from the first prompt", "batch.py", "np.where(place == 0, prompt_end[sequence],", "np.where(place == 0, prompt_end[0],", "test_batch.py test_grpo.py"),
    ("first tokens predicted from their own completion", "batch.py", "np.where(place == 0, prompt_end[sequence],", "np.where(place == 0, (begins + spans)[completion][sequence],", "test_packed.py"),
    ("lengths without the last token", "batch.py", "np.flatnonzero(mask[:length])", "np.flatnonzero(mask[: length - 1])", "test_packed.py"),
    ("completions' positions from 0", "batch.py", "(begins - first).repeat(spans)", "begins.repeat(spans)", "test_batch.py test_grpo.py"),
    ("a part of a group without its prompt's tokens", "batch.py", "pack = Pack(self.prompt_lengths[i])", "pack = Pack(0)", "test_batch.py"),
    ("processes: a share of the work rounded down", "batch.py", "share = -(-sum(group.tokens for group in self.split_groups(indices, 0)) // len(loads))", "share = sum(group.tokens for group in self.split_groups(indices, 0)) // len(loads)", "test_batch.py"),
    ("episodes: replies are trained on", "batch.py", "[np.flatnonzero(mask[:length]) for", "[np.arange(length) for", "test_packed.py"),
    ("the largest micro-batch of the last step", "batch.py", "max(self.largest, *(pack.tokens for pack in packs))", "max(pack.tokens for pack in packs)", "test_batch.py"),
    ("other micro-batches for a pass stay for all", "batch.py", "other = copy(self)", "other = self", "test_batch.py"),
    ("processes: the last group's tokens alone are a load", "batch.py", "loads[group.rank] += group.tokens", "loads[group.rank] = group.tokens", "test_batch.py"),
    ("processes: a group of all tokens is one process's", "batch.py", "min(max_tokens or share, share)", "max_tokens or share", "test_batch.py"),
    # data/__init__.py
    ("a missing column found late", "data/__init__.py", "signature(function).bind(", "signature(function).bind_partial(", "test_data.py"),
    # data/answers.py
    ("a sign after a digit", "data/answers.py", 'rf"((?:[0-9A-Za-z_)', 'rf"((?:[A-Za-z_)', "test_gsm8k.py"),
    ("a sign is never one", "data/answers.py", "if sign and not sign[1] and", "if False and", "test_jsonl.py"),
    ("part of a number is one", "data/answers.py", "if PART.search(", "if not PART.search(", "test_gsm8k.py"),
    # data/calls.py
    ("calls: a late coroutine goes on", "data/calls.py", "        future.cancel()\n", "        pass\n", "test_tools.py"),
    ("calls: one alarm", "data/calls.py", "seconds, AGAIN)", "seconds)", "test_reward.py"),
    ("calls: a loop for each coroutine", "data/calls.py", "@cache\n", "", "test_tools.py test_reward.py"),
    # examples/code.py
    ("code: the last block wins, whatever it defines", "examples/code.py", "*bodies, *ours][-1]", "*bodies][-1]", "test_code.py"),
    ("code: the first block", "examples/code.py", "*bodies, *ours][-1]", "*bodies, *ours[:1]][-1]", "test_code.py"),
    ("code: what follows a function is executed", "examples/code.py", "NEXT.split(text)[0]", "text", "test_code.py"),
    ("code: a signature alone is text", "examples/code.py", '    return f"{code}\\n    pass\\n"', "    return code", "test_code.py"),
    ("code: a block in a list is indented", "examples/code.py", "in map(dedent, blocks)]", "in blocks]", "test_code.py"),
    ("code: Landlock alone must be there", "examples/code.py", '{"landlock", "seccomp"} <=', '{"landlock"} <=', "test_code.py"),
    ("code: a prompt's helpers are tested", "examples/code.py", "functions(head)[-1:]", "functions(head)[:1]", "test_code.py"),
    ("code: tests call one function", "examples/code.py", "setup, *tests]))[2])", "setup, *tests]))[2])[:1]", "test_code.py"),
    ("code: a program of one of two functions", "examples/code.py", "{*names}) - given:", "set()) - given:", "test_code.py"),
    ("code: a row's setup is not executed", "examples/code.py", 'setup = of(value, "setup")', 'setup = ""', "test_code.py"),
    ("code: all pays what was cut off", "examples/code.py", "[float(s == 1) for s in shares]", '[float(v["passed"] == 1) for v in verdicts]', "test_code.py"),
    ("code: a helper's helper is left out", "examples/code.py", "given | gives, missing | needs", "given | gives, missing", "test_code.py"),
    ("code: a block that imports the function is the program", "examples/code.py", "if symbol.is_assigned()", "if symbol.is_assigned() or symbol.is_imported()", "test_code.py"),
    ("code: imports in another block are left out", "examples/code.py", "if symbol.is_imported()", "if False", "test_code.py"),
    ("code: names of Python are sought in other blocks or called", "examples/code.py", "used - given - {*dir(builtins)}", "used - given", "test_code.py"),
    ("code: a block ends in a string", "examples/code.py", "((?:{WHOLE}|.)*?)", "((?:.)*?)", "test_code.py"),
    ("code: a block ends in strings of one kind", "examples/code.py", """\'\'\'(?:\\\\.|[^\\\\])*?\'\'\'|""", "", "test_code.py"),
    ("code: memory errors of the parser", "examples/code.py", "RecursionError, MemoryError), unwarned", "RecursionError), unwarned", "test_code.py"),
    ("code: the tests' code may fail later", "examples/code.py", "in (setup, *tests):", "in tests:", "test_code.py"),
    # data/episodes.py
    ("episodes: one turn too many", "data/episodes.py", "if self.turns == self.toolbox", "if self.turns - 1 == self.toolbox", "test_episodes.py"),
    ("episodes: a turn that is cut off is lost", "data/episodes.py", "if self.sampled < len(sampled):", "if False:", "test_episodes.py"),
    ("episodes: a reply without room stays", "data/episodes.py", "if written < self.written:", "if False:", "test_episodes.py"),
    ("episodes: special tokens in a result in tags", "data/episodes.py", '{text}</result>")', '{text}</result>", special=True)', "test_episodes.py"),
    ("episodes: the first stop token alone ends a turn", "data/episodes.py", "ids[-1] in self.tokenizer.stop_tokens", "ids[-1] == self.tokenizer.stop_token", "test_episodes.py"),
    ("episodes: the last call's error alone", "data/episodes.py", "self.tool_errors += failed", "self.tool_errors = int(failed)", "test_episodes.py"),
    ("episodes: the last answer's tokens alone", "data/episodes.py", "self.written += len(answer)", "self.written = len(answer)", "test_episodes.py"),
    ("episodes: inline calls need it in every row", "data/episodes.py", 'if any(episode.form == "inline"', 'if all(episode.form == "inline"', "test_episodes.py"),
    ("episodes: inline calls of the first tool alone", "data/episodes.py", "for schema in toolbox.schemas]", "for schema in toolbox.schemas[:1]]", "test_episodes.py"),
    ("episodes: inline calls replace the stop string", "data/episodes.py", "stops += [f", "stops = [f", "test_episodes.py"),
    ("episodes: a result of long tokens stays whole", "data/episodes.py", "if begin == text and len(ids)", "if len(ids)", "test_episodes.py"),
    ("episodes: a user's answer stays whole", "data/episodes.py", "content=self.shortened(text))] if text", "content=text)] if text", "test_episodes.py"),
    ("episodes: an empty list of tools in the prompt", "data/episodes.py", "self.schemas or None", "self.schemas", "test_episodes.py"),
    ("episodes: a long prompt loses messages to its first text", "data/episodes.py", "[*prompt[:-1], last |", "[*prompt[:1], last |", "test_episodes.py"),
    # data/jsonl.py
    ("a boolean is a number", "data/jsonl.py", "NUMBERS = (int, float)", "NUMBERS = (int, float, bool)", "test_jsonl.py"),
    # examples/programs.py
    ("code: tests go on behind a statement that failed", "examples/programs.py", "if not counts:", "if False:", "test_code.py"),
    ("code: asserts that cannot fail count", "examples/programs.py", "any(not isinstance(node.test, ast.Constant) for node in asserts)", "bool(asserts)", "test_code.py"),
    ("code: other values are None", "examples/programs.py", 'if name != "object" else object()', 'if name != "object" else None', "test_code.py"),
    ("code: a tuple arrives as a list", "examples/programs.py", '"tuple": tuple', '"tuple": list', "test_code.py"),
    ("code: any reply is JSON", "examples/programs.py", "with suppress(ValueError, TypeError, RecursionError):", "with suppress(RecursionError):", "test_code.py"),
    ("code: what a program raised is lost", "examples/programs.py", "[next(own), to_plain(value.args)]", '["RuntimeError", to_plain(value.args)]', "test_code.py"),
    ("code: an error's arguments are lost", "examples/programs.py", "to_plain(value.args)]", "to_plain(())]", "test_code.py"),
    ("code: keywords of a call are lost", "examples/programs.py", "[name, arguments, keywords], passed", "[name, arguments, {}], passed", "test_code.py"),
    ("code: a call without an answer counts", "examples/programs.py", "if unanswered:", "if False:", "test_code.py"),
    ("code: a call without an answer costs all behind it", "examples/programs.py", "unanswered.clear()", "pass", "test_code.py"),
    ("code: a lost program is an answer", "examples/programs.py", "        if lost:\n            return passed, error or lost\n", "", "test_code.py"),
    ("code: a lost program takes what was passed", "examples/programs.py", "return passed, error or lost", "return 0.0, error or lost", "test_code.py"),
    ("code: lost tests take what was passed", "examples/programs.py", "            return passed, error\n        call, passed", "            return 0.0, error\n        call, passed", "test_code.py"),
    ("code: StopIteration ends a test's loop", "examples/programs.py", '"StopIteration" not in setup + test', "False", "test_code.py"),
    ("code: StopIteration in setup is not seen", "examples/programs.py", "not in setup + test", "not in test", "test_code.py"),
    ("code: a message is measured before it is text", "examples/programs.py", "if len(json.dumps(text)) > LONGEST - 99:", "if len(text) > LONGEST - 99:", "test_code.py"),
    ("code: an error's name may be any of Python's", "examples/programs.py", "if issubclass(kind, BaseException) else object()", "if True else object()", "test_code.py"),
    ("code: a test that begins with a definition is none", "examples/programs.py", "for part in body if not", "for part in body if not isinstance(body[0], ast.FunctionDef) and not", "test_code.py"),
    # examples/gym.py
    ("gym: any score is right", "examples/gym.py", "score >= RIGHT", "score > 0", "test_gym.py"),
    # data/rewards.py
    ("an unscored completion scored 0", "data/rewards.py", "if scored else math.nan", "if scored else 0.0", "test_reward.py test_grpo.py"),
    ("reward weights ignored", "data/rewards.py", "weight * reward for weight, reward", "reward for weight, reward", "test_reward.py"),
    ("texts behind messages", "data/rewards.py", "if isinstance(prompt, str) or isinstance(completion, list):", "if True:", "test_reward.py"),
    # data/pairs.py
    ("pairs: one side of the coin", "data/pairs.py", "chances[abs(sums) >= abs(sum(units))]", "chances[sums >= abs(sum(units))]", "test_pairs.py"),
    ("pairs: signs as large as what was seen do not count", "data/pairs.py", "abs(sums) >= abs(sum(units))", "abs(sums) > abs(sum(units))", "test_pairs.py"),
    ("pairs: a repeated prompt is two", "data/pairs.py", '[json.dumps(a["prompt"])].append', '[id(a)].append', "test_pairs.py"),
    ("pairs: an interval without width", "data/pairs.py", "abs(d).max() or 1.0", "abs(d).max()", "test_pairs.py"),
    ("pairs: the interval is the plain one", "data/pairs.py", "np.append(d, [most, -most])", "d", "test_pairs.py"),
    ("pairs: differences in whole prompts", "data/pairs.py", "round(x / unit)", "round(x / PARTS)", "test_pairs.py"),
    ("pairs: the verdict on greedy answers", "data/pairs.py", 'item[0].endswith("right")][-1]', 'item[0].endswith("right")][0]', "test_pairs.py"),
    # data/scores.py
    ("evaluations: any task's reward is 1", "data/scores.py", 'sample["task_reward"] == 1', 'sample["task_reward"] is not None', "test_scoring.py"),
    ("evaluations: None is 0 in the mean", "data/scores.py", "mean_of([s[name] for s in samples if s.get(name) is not None])", "mean_of([s.get(name) or 0.0 for s in samples])", "test_scoring.py"),
    # data/task.py
    ("a chat's completions are scored as messages", "data/task.py", "texts = list(map(text_of, completions))", "texts = list(completions)", "test_data.py"),
    ("votes of a chat are messages", "data/task.py", "self.answer_of(text_of(each))", "self.answer_of(each)", "test_data.py"),
    ("a training prompt is a test prompt", "data/task.py", "split_of(self.identity(row)) == split", "split", "test_data.py"),
    # data/tools.py
    ("tools: the sandbox starts with the first call", "data/tools.py", "        if tool is python:", "        if False:", "test_sandbox.py"),
    ("episodes: a reply says None", "data/tools.py", "return None if result is None else", "return", "test_episodes.py"),
    ("tools: powers far below 1 are computed", "data/tools.py", "bits * abs(exponent)", "bits * exponent", "test_tools.py"),
    ("tools: inline texts for two required arguments", "data/tools.py", "texts and len(required) < 2", "texts and len(required) < 3", "test_tools.py"),
    ("tools: inline texts only for a required argument", "data/tools.py", "texts and len(required) < 2", "texts and len(required) == 1", "test_tools.py"),
    ("tools: an inline text is the last argument", "data/tools.py", "{texts[0]: argument}", "{texts[-1]: argument}", "test_tools.py"),
    ("tools: powers of small fractions are computed", "data/tools.py", "(base.numerator * base.denominator).bit_length()", "base.numerator.bit_length()", "test_tools.py"),
    ("tools: long errors of code", "data/tools.py", "problem[:MAX_ERROR]\n\n", "problem\n\n", "test_tools.py"),
    ("tools: a method hides a tool", "data/episodes.py", "methods.keys() & self.functions.keys()", "()", "test_tools.py"),
    ("tools: the largest power is refused", "data/tools.py", "> MAX_BITS:", ">= MAX_BITS:", "test_tools.py"),
    ("tools: a long name hides the tools", "data/tools.py", "{name:.60}", "{name}", "test_tools.py"),
    # evaluate.py
    ("the command decodes as few completions at a time as a small run", "evaluate.py", "max(settings.batch_size, AT_ONCE)", "settings.batch_size", "test_evaluate.py"),
    ("evaluations: unscored completions are right", "evaluate.py", "[total >= least -", "[not total < least -", "test_scoring.py"),
    ("evaluations: float32's 0.9 is below 0.9", "evaluate.py", " - ROUNDING * abs(least)", "", "test_scoring.py"),
    ("evaluations: 0 is as good as a small threshold", "evaluate.py", "ROUNDING * abs(least)", "ROUNDING", "test_scoring.py"),
    ("evaluations: all completions at a time", "evaluate.py", "rows[first : first + size]", "rows[first:]", "test_scoring.py"),
    ("evaluations move the generators", "evaluate.py", '    samples = limits.retry("eval", sample)\n    restore_generators(generators)\n', '    samples = limits.retry("eval", sample)\n', "test_scoring.py"),
    ("evaluations: every piece draws as the first", "evaluate.py", "(numbers.start + first) * group_size", "numbers.start * group_size", "test_evaluate.py"),
    ("evaluations: the first process's samples", "evaluate.py", "[sum(samples, []) for samples in", "[samples[0] for samples in", "test_evaluate.py"),
    # examples/gguf.py
    ("gguf: norms as they are", "examples/gguf.py", "value = value - 1", "value = value", "test_gguf.py"),
    ("gguf: queries stay sorted for neighbours", "examples/gguf.py", 'if name == "llama" and part in', 'if name == "" and part in', "test_gguf.py"),
    ("gguf: positions that are scaled pass", "examples/gguf.py", 'if values.get(key, "none") != "none":', "if False:", "test_gguf.py"),
    ("gguf: a sliding window is ignored", "examples/gguf.py", 'if name != "gemma3" and values.get(', 'if name == "" and values.get(', "test_gguf.py"),
    ("gguf: a head of its own is the embedding", "examples/gguf.py", '"lm_head.weight" not in weights', "True", "test_gguf.py"),
    ("gguf: Qwen's text is not normalized", "examples/gguf.py", 'if c["pre"] == "qwen2":', "if False:", "test_gguf.py"),
    ("gguf: merges in the vocabulary's order", "examples/gguf.py", "merges.sort(key=lambda merge: merge[0])", "pass", "test_gguf.py"),
    ("gguf: every added token is special", "examples/gguf.py", "special=kind != USER_DEFINED", "special=True", "test_gguf.py"),
    ("gguf: no space before a text", "examples/gguf.py", 'c.get("add_space_prefix", True)', "False", "test_gguf.py"),
    ("gguf: <bos> whatever the file says", "examples/gguf.py", 'c.get("add_bos_token", ', 'c.get("", ', "test_gguf.py"),
    ("gguf: one stop token", "examples/gguf.py", '("eos_token_id", "eot_token_id")', '("eos_token_id",)', "test_gguf.py"),
    # examples/functions.py
    ("functions: tests that tell no sibling", "examples/functions.py", "return sum(sibling(arguments) != result for sibling in siblings), ", "return 0, ", "test_functions.py"),
    ("functions: no test of an empty input", "examples/functions.py", "max(empty[:1] or pool,", "max(pool,", "test_functions.py"),
    # grpo.py
    ("memory: a rollout outlives its iteration", "grpo.py", "return record, training.samples(scored, entropies)", "training.kept = scored\n    return record, training.samples(scored, entropies)", "test_grpo.py"),
    ("lora: reference with adapters", "training/frozen.py", "with adapters_off(reference):", "if True:", "test_lora.py"),
    ("temperature missing in the reference", "training/frozen.py", "                settings.temperature,\n                n_vocab", "                1.0,\n                n_vocab", "test_grpo.py"),
    ("teacher: rewards taught all the same", "grpo.py", "return settings.reward_coef * advantages.flatten()", "return advantages.flatten()", "test_teacher.py"),
    ("teacher: steps without rewards are skipped", "grpo.py", "settings.entropy_coef or settings.teacher", "settings.entropy_coef", "test_teacher.py"),
    ("temperature missing in training", "grpo.py", "        temperature=settings.temperature,\n        n_vocab", "        temperature=1.0,\n        n_vocab", "test_grpo.py"),
    ("GDPO: weights of functions ignored", "grpo.py", "weights = training.prepared.reward_weights", "weights = []", "test_collect.py"),
    ("counts of the micro-batch", "grpo.py", "num_tokens=sum(len(cut.places[i]) for indices in micro_batches for i in indices)", "num_tokens=len(cut.places[0])", "test_grpo.py"),
    ("truncated completions taught", "grpo.py", "return [i for i in indices if stopped[i]]", "return list(indices)", "test_collect.py"),
    ("steps with nothing to learn", "grpo.py", "if not teaches(rollouts, indices, settings):", "if False:", "test_collect.py"),
    ("groups without variance kept", "grpo.py", "(~varied).int()", "varied.int()", "test_collect.py"),
    ("refills not remembered", "grpo.py", "training.extra_prompts += (len(parts)", "training.extra_prompts += 0 * (len(parts)", "test_collect.py"),
    ("prompts of refills used again", "grpo.py", "(iteration + number) * P", "iteration * P", "test_collect.py"),
    ("log: metrics of the last chunk alone", "grpo.py", "add_up(totals, metrics)", "add_up(totals, metrics[-2:])", "test_packed.py"),
    ("refills draw with the first round's uniforms", "grpo.py", "first_row=prompts_before * k", "first_row=0", "test_grpo.py"),
    ("every iteration draws the same numbers", "grpo.py", "* 2**32 + iteration", "* 2**32", "test_grpo.py"),
    ("log: entropies of other sequences", "grpo.py", "entropies[micro.row, micro.place]", "entropies[micro.sequence, micro.place]", "test_grpo.py"),
    ("processes: entropies of an earlier attempt", "grpo.py", "entropies[cut.step_indices[step]] = 0", "pass", "test_parallel.py"),
    ("processes: all sample the first rows", "grpo.py", "prompts_before = number * P + mine.start", "prompts_before = number * P", "test_parallel.py"),
    # loss.py
    ("mps: an operation that it lacks", "loss.py", 'off_mps(values), "sum"', 'values, "sum"', "test_fake_mps.py"),
    ("wrong-sign advantage", "loss.py", "return -torch.min(unclipped, clipped)", "return torch.min(unclipped, clipped)", "test_loss.py"),
    ("teacher: dislikes are taught", "loss.py", "(teacher_logprobs - old_logprobs)", "(old_logprobs - teacher_logprobs)", "test_teacher.py"),
    ("teacher: its weight ignored", "loss.py", "per_token = per_token + options.teacher_coef * divergence", "per_token = per_token + divergence", "test_teacher.py"),
    ("old and new log-probs swapped", "loss.py", "ratio = torch.exp(logprobs - old_logprobs)", "ratio = torch.exp(old_logprobs - logprobs)", "test_loss.py"),
    ("KL sign in the loss", "loss.py", "per_token = per_token + options.beta * kl", "per_token = per_token - options.beta * kl", "test_loss.py"),
    ("KL's two policies swapped", "loss.py", "log_ratio = ref_logprobs - logprobs", "log_ratio = logprobs - ref_logprobs", "test_loss.py"),
    ("lower clip at 1 + epsilon", "loss.py", "ratio.clamp(1 - options.epsilon, 1 +", "ratio.clamp(1 + options.epsilon, 1 +", "test_loss.py"),
    ("CISPO's weight differentiated", "loss.py", "ratio.clamp(max=options.epsilon_high).detach()", "ratio.clamp(max=options.epsilon_high)", "test_loss.py"),
    ("a sequence's ratio by its sum", "loss.py", "sequence_sum(log_ratio, lengths) / lengths)", "sequence_sum(log_ratio, lengths))", "test_loss.py"),
    ("losses: SAPO's temperatures swapped", "loss.py", "t = torch.where(advantages > 0,", "t = torch.where(advantages < 0,", "test_loss.py"),
    ("losses: LUSPO without its lengths", "loss.py", "return 1 / num_sequences\n", "return 1 / num_tokens\n", "test_loss.py"),
    ("importance upside down", "loss.py", "torch.exp(old_logprobs - sampling_logprobs)", "torch.exp(sampling_logprobs - old_logprobs)", "test_loss.py"),
    ("no correction for the sampler", "loss.py", "per_token = per_token * correction.clamp(max=options.importance_sampling_cap)", "pass", "test_loss.py"),
    ("deviation without Bessel", "loss.py", "/ (count - 1).clamp(min=1)).sqrt()", "/ count).sqrt()", "test_loss.py"),
    ("GDPO: functions are not scaled apart", "loss.py", "group_advantages(rewards.view(-1, k))", 'group_advantages(rewards.view(-1, k), "none")', "test_loss.py"),
    ("GDPO: the sum is centred in its group", "loss.py", "group_advantages(total[None])", "group_advantages(total.view(-1, k))", "test_loss.py"),
    ("0 / 0 in a group of equal rewards", "loss.py", "torch.where(centred == 0, 0, centred / (scale + eps))", "centred / (scale + eps)", "test_loss.py"),
    ("grpo averages over tokens", "loss.py", "return 1 / (num_sequences * lengths[sequence])", "return 1 / num_tokens", "test_loss.py"),
    ("the KL's metric keeps the graph", "loss.py", "kl_divergence(logprobs.detach(), ref_logprobs).sum()", "kl_divergence(logprobs, ref_logprobs).sum()", "test_loss.py"),
    ("teacher: the metric of log-probs keeps the graph", "loss.py", "(logprobs.detach() - teacher_logprobs)", "(logprobs - teacher_logprobs)", "test_loss.py"),
    ("teacher: the metric of divergences keeps the graph", "loss.py", "divergence.detach().sum()", "divergence.sum()", "test_loss.py"),
    ("losses: your own without a gradient", "loss.py", "shape != logprobs.shape or logprobs.requires_grad and not values.requires_grad", "shape != logprobs.shape", "test_loss.py"),
    ("losses: your own with any shape", "loss.py", "shape != logprobs.shape or ", "", "test_loss.py"),
    ("equal rewards whose mean rounds", "loss.py", "    rewards = rewards.double()\n", "", "test_loss.py"),
    # model.py
    ("model: frequencies that divide by 0", "snug/shape.py", "if low >= high:", "if low > high:", "test_model.py"),
    # report.py
    ("report: medians with the first iteration", "report.py", "logged(run.records[1:], name) or logged", "logged", "test_report.py"),
    ("report: a phase's last peak, in the table", "report.py", "{max(values):.1f}", "{values[-1]:.1f}", "test_report.py"),
    # runs/checkpoint.py
    ("PEFT: changed adapters go unnoticed", "runs/checkpoint.py", ' + "".join(map(sha256, adapters))', "", "test_adapters.py"),
    ("lora: another base goes unnoticed", "runs/checkpoint.py", 'identity(weights) == base["fingerprint"]', "True", "test_lora.py"),
    ("a resume takes another base", "runs/checkpoint.py", 'if init_from not in ("", checkpoint.state["settings"]["init_from"]):', "if False:", "test_lora.py"),
    # runs/ctrl_c.py
    ("Ctrl-C: a command by -m has a traceback", "runs/ctrl_c.py", 'sys.argv[0] == "-m" or ', "", "test_commands.py"),
    ("Ctrl-C: a user's script loses its traceback", "runs/ctrl_c.py", 'if sys.argv[0] == "-m" or', "if True or", "test_commands.py"),
    # runs/evaluation.py
    ("evaluate.py finds a full disk at its end", "runs/evaluation.py", '            trial.write(b" ")', "            pass", "test_evaluate.py"),
    ("samples of a model named . have no folder", "runs/evaluation.py", "os.path.abspath(path)", "str(path)", "test_evaluate.py"),
    ("pairs: files are looked for above A", "runs/evaluation.py", '{found.path}/evaluation', '{folder}/evaluation', "test_commands.py"),
    ("evaluate.py forgets the run's functions", "runs/evaluation.py", 'if task != run.task or "reward_funcs" in given', "if True", "test_scoring.py"),
    ("evaluate.py gives other functions the run's weights", "runs/evaluation.py", ' or "reward_funcs" in given', "", "test_scoring.py"),
    ("pairs: A's options hold", "runs/evaluation.py", "if not settings_of(source).task:", "if settings_of(find_run(first, tensors=False)).task:", "test_pairs.py"),
    ("pairs: a model's limit is 256 beside a run of 32", "runs/evaluation.py", '{"max_new_tokens"} if run.task else given', 'set() if run.task else given', "test_pairs.py"),
    # runs/export.py
    ("PEFT: adapters on adapters", "runs/export.py", ' or base.state["weights"][1]', "", "test_adapters.py"),
    # runs/fork.py
    ("fork: each branch has the run's seed", "runs/fork.py", 'f"seed={seed}"', 'f"seed={run.seed}"', "test_fork.py"),
    ("fork: Ctrl-C ends the command before the branch", "runs/fork.py", "    signal.signal(signal.SIGINT, lambda *_: None)", "    pass", "test_fork.py"),
    ("fork: after a stopped branch the next one", "runs/fork.py", "if code or not is_done(branch, end):", "if code:", "test_fork.py"),
    # runs/hints.py
    ("of two hints for a figure the second counts", "runs/hints.py", "lines.setdefault(", "lines.__setitem__(", "test_hints.py"),
    # runs/loading.py
    ("NF4: a base in 4 bits is merged into plain weights", "runs/loading.py", "    if settings.base_dtype:\n        hold_in_nf4", "    if False:\n        hold_in_nf4", "test_nf4.py"),
    # runs/lock.py
    ("a full disk before the start is a traceback", "runs/lock.py", "        with in_one_line(problem):\n            file.truncate", "        if True:\n            file.truncate", "test_lock.py"),
    ("a folder and a link to it have two locks", "runs/lock.py", "Path(folder).resolve()", "Path(folder).absolute()", "test_lock.py"),
    ("two runs in one folder", "runs/lock.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "test_lock.py"),
    ("a lock names earlier holders too", "runs/lock.py", "            file.truncate(0)\n", "", "test_lock.py"),
    ("the second earlier run onto the first", "runs/lock.py", "next(path for path in names if not path.exists())", "next(names)", "test_lock.py"),
    # runs/log.py
    ("report: memory of iterations that are repeated", "runs/log.py", 'if record["iter"] < start]', "]", "test_log.py"),
    ("a name commands the terminal", "runs/log.py", "        text = plain(text)\n", "", "test_log.py"),
    # runs/page/charts.py
    ("report: the lines of functions look alike", "runs/page/charts.py", "STYLES[place % len(STYLES)]", "STYLES[0]", "test_report.py"),
    # runs/page/runs.py
    ("report: the last iteration's completions are thinned out", "runs/page/runs.py", ' or s["iter"] == last]', "]", "test_report.py"),
    ("report: options of the model's shape", "runs/page/runs.py", "hidden |= fields(ModelOptions).keys()", "pass", "test_report.py"),
    # runs/page/write.py
    ("report: names of metrics turn the order of the page", "runs/page/write.py", "plain(name): shown(item)", "name: shown(item)", "test_report.py"),
    ("report: tokens turn the order of the page", "runs/page/write.py", "return list(map(shown, value))", "return value", "test_report.py"),
    ("report: folders turn the order of the page", "runs/page/write.py", " or isinstance(value, Path)", "", "test_report.py"),
    ("report: the page's own cells turn its order", "runs/page/write.py", ", finalize=shown", "", "test_report.py"),
    ("report: a completion ends the script", "runs/page/write.py", '.replace("<", "\\\\u003c")', "", "test_report.py"),
    # runs/prepare.py
    ("teacher: another tokenizer passes", "runs/prepare.py", "if theirs.backend.get_vocab() != tokenizer.backend.get_vocab():", "if False:", "test_teacher.py"),
    ("teacher: too short a teacher passes", "runs/prepare.py", ' or shape["block_size"] < length', "", "test_teacher.py"),
    ("teacher: too few rows pass", "runs/prepare.py", 'shape["vocab_size"] < tokenizer.n_vocab or ', "", "test_teacher.py"),
    ("NF4: resumed without it", "runs/prepare.py", '"lora_target_modules", "base_dtype"]', '"lora_target_modules"]', "test_nf4.py test_lora.py"),
    ("NF4: begins from adapters", "runs/prepare.py", "if begin and settings.base_dtype and", "if False and", "test_nf4.py"),
    ("model: ids without a token are sampled", "runs/prepare.py", "n_vocab=tokenizer.n_vocab)", "n_vocab=0)", "test_models.py"),
    ("settings.json has the options' shape", "runs/prepare.py", "replace(prepared.settings, **values)", "replace(prepared.settings)", "test_models.py"),
    ("prompts lose their end", "runs/prepare.py", "return self.whole(prompt)[-self.settings.max_prompt_length :]", "return self.whole(prompt)[: self.settings.max_prompt_length or None]", "test_grpo.py"),
    ("messages are cut", "runs/prepare.py", "< len(ids) and not isinstance(prompt, str):", "< len(ids) and not prompt:", "test_jsonl.py"),
    ("demonstrations are cut, too", "runs/prepare.py", "self.task.longest(self.whole)", "self.task.longest(self.encode)", "test_jsonl.py"),
    ("evaluations: weights left out", "runs/prepare.py", "            self.reward_weights,\n", "            [],\n", "test_scoring.py"),
    ("evaluations: the task's functions, not the user's", "runs/prepare.py", "            self.reward_funcs,\n", "            [self.task.rewards],\n", "test_scoring.py"),
    ("a damaged checkpoint is resumed", "runs/prepare.py", "resume = find_run(folder, tensors=not settings.plan, optimizer=True)", "resume = find_run(folder, tensors=False)", "test_checkpoint.py"),
    ("evaluations ask a prompt twice", "runs/prepare.py", 'min(settings.eval_prompts, task.size("test") or settings.eval_prompts)', "settings.eval_prompts", "test_jsonl.py"),
    ("a smaller block_size limits nothing", "runs/prepare.py", 'if "block_size" in chosen:', "if False:", "test_pretrained.py"),
    ("dtype: resumed in one that does not fit", "runs/prepare.py", 'return make_settings(before.without_task, "", values)[0]', "return type(before)(**values)", "test_checkpoint.py"),
    ("evaluations leave no room for the stop token", "runs/prepare.py", "settings.max_new_tokens or answer + 1", "settings.max_new_tokens or answer", "test_evaluate.py"),
    ("a folder's own options lost", "runs/prepare.py", "values = vars(before) | processes", "values = vars(settings) | processes", "test_checkpoint.py"),
    ("a resume takes another model", "runs/prepare.py", "if stays and was.resolve() != now.resolve() and not adapters:", "if False:", "test_checkpoint.py"),
    ("a moved model is refused", "runs/prepare.py", 'stays = "@" in before.init_from or was.exists()', "stays = True", "test_checkpoint.py"),
    ("a chat model writes 32 tokens", "runs/prepare.py", "min(PRETRAINED_LENGTH, settings.block_size // 2)", "32", "test_models.py"),
    ("episodes: another environment's turns go on", "runs/prepare.py", "settings.of_task() + CALLED + adapters", "settings.of_task() + adapters", "test_checkpoint.py"),
    # runs/saver.py
    ("two checkpoints are kept, whatever is asked for", "runs/saver.py", "paths[: -self.settings.save_total_limit]", "paths[:-2]", "test_saver.py"),
    ("of equal scores the oldest is the best", "runs/saver.py", "key=lambda path: (scores[iteration_of(path)], path.name)", "key=lambda path: scores[iteration_of(path)]", "test_saver.py"),
    ("Ctrl-C: goes on from the oldest", "runs/saver.py", "return str(paths[-1]) if paths", "return str(paths[0]) if paths", "test_notebook.py"),
    ("tokenizer not kept beside the checkpoint", "runs/saver.py", "write(self.folder, state, tensors, self.tokenizer.files)", "write(self.folder, state, tensors)", "test_models.py"),
    ("the best by pass@1 alone", "runs/saver.py", '"eval_reward_mean" if self.settings.reward_funcs else "pass_at_1"', '"pass_at_1"', "test_scoring.py"),
    # runs/verdict.py
    ("verdict: the second arm alone", "runs/verdict.py", "for other in others:", "for other in others[:1]:", "test_verdict.py"),
    ("verdict: two pairs count", "runs/verdict.py", "for seed in first if seed in second]", "for seed in first if seed in second][:2]", "test_verdict.py"),
    ("verdict: seeds in any order", "runs/verdict.py", "[(first[seed], second[seed]) for seed in first if seed in second]", "list(zip(first.values(), second.values(), strict=False))", "test_verdict.py"),
    ("verdict: runs that go on are compared", "runs/verdict.py", "and run.ended and", "and", "test_verdict.py"),
    # sample.py
    ("stop token out of the mask", "sample.py", "is_stop.int().argmax(1) + 1", "is_stop.int().argmax(1)", "test_sample.py test_grpo.py"),
    ("refills sampled with the same numbers", "sample.py", "np.arange(first_row, first_row + N)", "np.arange(N)", "test_collect.py"),
    ("model: only the first stop token ends", "sample.py", "stop_token=tokenizer.stop_tokens,", "stop_token=tokenizer.stop_token,", "test_models.py"),
    ("sampler: lengths by the first stop token", "sample.py", "torch.tensor(as_tuple(stop_token), dtype", "torch.tensor(as_tuple(stop_token)[:1], dtype", "test_sample.py"),
    ("a completion commands the terminal", "sample.py", "plain(shown + text)", "shown + text", "test_sample.py"),
    ("evaluations ignore logits_chunk_mb", "sample.py", "chunk_mb=settings.logits_chunk_mb,", "chunk_mb=0,", "test_evaluate.py"),
    ("episodes: the mask a token late", "sample.py", "~written[: len(tokens), :T_c]", "~written[: len(tokens), :T_c].roll(1, 1)", "test_episodes.py"),
    ("episodes: written tokens have a log-prob", "sample.py", "sampling_logprobs=logprobs[:, :T_c] * mask", "sampling_logprobs=logprobs[:, :T_c] - 1.0 * ~mask", "test_episodes.py"),
    # settings.py
    ("rules: SFT needs what it does not have", "settings.py", "getattr(self, name, needed)", "getattr(self, name, None)", "test_settings.py"),
    # settings.py
    ("epsilon_high ignored", "settings.py", "self.epsilon if self.epsilon_high is None else self.epsilon_high", "self.epsilon", "test_loss.py"),
    ("losses: your own by parts of sequences", "settings.py", " or self.loss is OWN_LOSS", "", "test_loss.py"),
    ("losses: your own is looked for late", "runs/prepare.py", "settings.loss is OWN_LOSS:", "False:", "test_commands.py"),
    ("a budget cuts what depends on the cut", "settings.py", '== "micro-batch"', '== "none"', "test_plan.py"),
    # settings.py
    ("rules: a misspelt option", "settings.py", "grad_offload=False", "grad_ofload=False", "test_settings.py"),
    ("rules: a value that is no choice", "settings.py", 'reference="device"', 'reference="gpu"', "test_settings.py"),
    ("NF4: fsdp", "settings.py", 'base_dtype="",', "", "test_nf4.py"),
    # snug/decoding/attention.py
    ("a tile reads another prompt", "snug/decoding/attention.py", "prompt_k + (p * G", "prompt_k + (0 * p * G", "test_kernels.py"),
    ("the new column is not seen", "snug/decoding/attention.py", "begin + completion_chunk, now + 1)", "begin + completion_chunk, now)", "test_kernels.py"),
    ("counters are not reset", "snug/decoding/attention.py", "tl.store(counters + query, 0, last)", "pass", "test_kernels.py"),
    ("parts joined without their maxima", "snug/decoding/attention.py", "tl.exp2(part_top - higher)", "tl.exp2(part_top * 0)", "test_kernels.py"),
    ("windows: a kernel writes behind the ring", "snug/decoding/attention.py", "now %= T_c", "now = tl.minimum(now, T_c - 1)", "test_kernels.py"),
    ("windows: a kernel takes no column for the ring's last", "snug/decoding/attention.py", "tl.where(age < 0, age + ring, age)", "tl.where(age < 0, WINDOW, age)", "test_kernels.py"),
    ("windows: a kernel sees one column too many", "snug/decoding/attention.py", "tl.where(age < 0, age + ring, age) < WINDOW", "tl.where(age < 0, age + ring, age) <= WINDOW", "test_kernels.py"),
    ("windows: a kernel skips a block too many", "snug/decoding/attention.py", "begin += tl.maximum(earliest + 1 - WINDOW - begin, 0) // N * N", "begin += (tl.maximum(earliest + 1 - WINDOW - begin, 0) + N - 1) // N * N", "test_kernels.py"),
    ("windows: a kernel skips by the slot that is ahead", "snug/decoding/attention.py", "latest, tl.min(latest, 0)", "latest, tl.max(latest, 0)", "test_kernels.py"),
    ("partial rotary: a kernel turns in halves of the head", "snug/decoding/attention.py", "(PART if PART else D) // 2", "D // 2", "test_kernels.py"),
    ("partial rotary: lines of cos as long as heads", "snug/decoding/attention.py", "turn = (slot * size)", "turn = (slot * D)", "test_kernels.py"),
    # snug/decoding/decode_batch.py
    ("LoRA: adapters are cast in every step", "snug/lora.py", "        layer.cast = A,", "        _ = A,", "test_lora.py"),
    ("LoRA: the trainer has the sampler's copies", "snug/lora.py", "            layer.cast = None\n", "            pass\n", "test_lora.py"),
    ("signs of life: completions that go on do not count", "snug/decoding/decode_batch.py", " + int(tokens) // self.max_new_tokens", "", "test_progress.py"),
    ("prompts read ahead are forgotten", "snug/decoding/decode_batch.py", "stays = needed | later", "stays = needed", "test_sample.py"),
    ("positions one too far", "snug/decoding/decode_batch.py", "(self.prompt_length + self.t)", "(self.prompt_length + self.t + 1)", "test_sample.py"),
    ("slots are not filled again", "snug/decoding/decode_batch.py", "            if not new and not replied:", "            if not replied and (not new or len(idle) < len(sequences)):", "test_sample.py"),
    ("sampler: only the first of several stop tokens", "snug/decoding/decode_batch.py", "for stop in self.stop_tokens:", "for stop in self.stop_tokens[:1]:", "test_sample.py"),
    ("the same t for slots that started later", "snug/decoding/decode_batch.py", "bool((started == self.first_start).all())", "True", "test_sample.py"),
    ("rehearsed with one prompt slot", "snug/decoding/decode_batch.py", "n - (prompt_slots > 1)), 1)", "n), 1)", "test_sample.py"),
    ("gpu: a step waits for the device", "snug/decoding/decode_batch.py", "hidden = self.model(self.token[:, None], positions, self.cache)[:, 0]", "self.t.max().item()\n        hidden = self.model(self.token[:, None], positions, self.cache)[:, 0]", "test_fake_cuda.py"),
    ("a new sequence goes on at the old one's length", "snug/decoding/decode_batch.py", "self.t[slots] = 0", "pass", "test_sample.py"),
    ("slots that move lose their last column", "snug/decoding/decode_batch.py", "self.started[self.held].min())", "self.started[self.held].min() - 1)", "test_sample.py"),
    ("episodes: a row gets its neighbour's reply", "snug/decoding/decode_batch.py", "zip(held, lengths, ends, replies, strict=True)", "zip(held, lengths, ends, replies[1:] + replies[:1], strict=True)", "test_episodes.py"),
    ("episodes: a tool is asked twice", "snug/decoding/decode_batch.py", "waits = np.isin(self.held, list(self.turns.waiting))", "waits = np.isin(self.held, [])", "test_episodes.py"),
    ("episodes: a reply's last token is not in the cache", "snug/decoding/decode_batch.py", "lengths - 1, added + 1", "lengths - 1, added", "test_episodes.py"),
    ("episodes: a step sees too few columns behind a reply", "snug/decoding/decode_batch.py", "self.started[held] = self.steps - ends", "self.started[held] = self.steps", "test_episodes.py"),
    # snug/decoding/draw.py
    ("tokens of probability 0", "snug/decoding/draw.py", "cdf[:, -1:], right=True)", "cdf[:, -1:], right=False)", "test_draw.py"),
    ("tokens of probability 0, in the kernel", "snug/decoding/draw.py", "(ends > target) & (p > 0)", "ends >= target", "test_kernels.py"),
    ("the second pick from the first read's total", "snug/decoding/draw.py", "return first, 1 - (end - target) / size", "return first, u", "test_kernels.py"),
    # snug/decoding/kvcache.py
    ("columns of a later token seen", "snug/decoding/kvcache.py", "(age <= t) & (age", "(age <= t + 1) & (age", "test_kvcache.py test_sample.py"),
    ("all slots write one column", "snug/decoding/kvcache.py", "+ t[:, None] % part.width", "+ t.max() % part.width", "test_kvcache.py test_sample.py"),
    ("rows read each other's prompts", "snug/decoding/kvcache.py", "slots[:, None] * G + np.arange(G)", "(slots[:, None] * G + np.arange(G))[::-1]", "test_kvcache.py"),
    ("padding of prompts seen", "snug/decoding/kvcache.py", "(column < length) & (length", "(column >= 0) & (length", "test_kvcache.py test_sample.py"),
    ("prompts stay where they were", "snug/decoding/kvcache.py", "tensors.append((self.prompt, prompt_slots", "tensors.append((self.prompt, prompt_slots.sort()[1]", "test_kvcache.py test_sample.py"),
    ("columns read that nobody wrote", "snug/decoding/kvcache.py", "            self.both[:, :, :slots, :, self.cleared : end] = 0\n", "", "test_kvcache.py"),
    ("scores rounded to bfloat16", "snug/decoding/kvcache.py", "dtype = torch.promote_types(self.dtype, torch.float32)", "dtype = self.dtype", "test_sample.py"),
    ("gpu: a graph bakes a buffer that is replaced", "snug/decoding/kvcache.py", "self.tiles.copy_(table)", "self.tiles = table", "test_kernels.py"),
    ("completions stay where they were", "snug/decoding/kvcache.py", "tensor[: len(kept), :, :width] = tensor[kept, :, :width]", "pass", "test_kvcache.py test_sample.py"),
    ("episodes: positions of a reply from the prompt's end", "snug/decoding/kvcache.py", "return columns, prompt_lengths[:, None] + columns", "return columns, prompt_lengths[:, None] + place", "test_episodes.py"),
    # snug/decoding/turns.py
    ("text looked for after the stop token", "snug/decoding/turns.py", "if ids[n - 1] in self.stop_tokens or", "if", "test_sample.py"),
    ("episodes: stop strings of earlier turns", "snug/decoding/turns.py", "self.is_over(ids[begin:n])", "self.is_over(ids[:n])", "test_episodes.py"),
    # snug/device/cpu.py
    ("products rounded to bfloat16 are float32", "snug/device/cpu.py", "< EXACT * exact.norm()", "< exact.norm()", "test_cpu.py"),
    ("a bias without gradient", "snug/device/cpu.py", "rows.sum(0) if", "None if", "test_cpu.py"),
    ("a large weight waits for MKL", "snug/device/cpu.py", " or weight.numel() > LARGE_WEIGHT", "", "test_cpu.py"),
    ("small products take oneDNN too", "snug/device/cpu.py", "LARGE = 2**23", "LARGE = 2**5", "test_cpu.py"),
    ("oneDNN stays on after an error", "snug/device/cpu.py", "    try:\n        yield\n    finally:\n", "    yield\n    if True:\n", "test_cpu.py"),
    # snug/device/cuda.py
    ("mps: it does not wait for memory that is not pinned", "snug/device/cuda.py", "return numbers.to(device)\n", "return numbers.to(device, non_blocking=True)\n", "test_device.py"),
    ("gpu: lengths are not rounded", "snug/device/cuda.py", 'if kind_of(tokens) != "cpu" else length', 'if kind_of(tokens) == "none" else length', "test_batch.py"),
    ("gpu: a broken recording's pool is deleted", "snug/device/cuda.py", "ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))", "pass", "test_replay.py"),
    ("gpu: the cache emptied after a broken recording", "snug/device/cuda.py", "is_available() and not BROKEN", "is_available()", "test_replay.py"),
    # snug/device/host.py
    ("gpu: compute uses weights on their way", "snug/device/host.py", "    block.arrival.wait()\n    fetch(following, device)", "    fetch(following, device)", "test_streams.py"),
    ("gpu: no weights are fetched ahead", "snug/device/host.py", "    block.arrival.wait()\n    fetch(following, device)", "    block.arrival.wait()", "test_streams.py"),
    ("gpu: pages are unpinned during copies", "snug/device/host.py", "        torch.cuda.synchronize()\n", "", "test_streams.py"),
    ("two threads free memory and one is not counted", "snug/device/host.py", "        size = self.sizes.pop(key)[1]\n        self.current -= size", "        self.current -= self.sizes.pop(key)[1]", "test_memory.py"),
    # snug/device/kinds.py
    ("device: auto never is mps", "snug/device/kinds.py", 'return "mps" if torch.backends.mps.is_available() else "cpu"', 'return "cpu"', "test_device.py"),
    # snug/device/pick.py
    ("dtype: an old GPU computes in bfloat16", "snug/device/pick.py", "get_device_capability() < (8, 0)", "get_device_capability() < (7, 0)", "test_device.py"),
    ("dtype: bfloat16 weights compute in float32", "snug/device/pick.py", "if fast else settings.param_dtype", 'if fast else "float32"', "test_device.py"),
    ("gpu: sums of products in bfloat16", "snug/device/pick.py", "products.allow_bf16_reduced_precision_reduction = False", "pass", "test_device.py"),
    # snug/kernels/__init__.py
    ("amd: an option of NVIDIA's Triton", "snug/kernels/__init__.py", 'constants.pop("maxnreg", None)', "pass", "test_device.py"),
    ("kernels: Triton's default says whether products are fused with sums", "snug/kernels/__init__.py", '    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")\n', "", "test_kernels.py"),
    ("kernels: products are not fused with sums", "snug/kernels/__init__.py", '"TRITON_DEFAULT_FP_FUSION", "1"', '"TRITON_DEFAULT_FP_FUSION", "0"', "test_kernels.py"),
    # snug/kernels/adamw.py
    ("gpu: stochastic rounding with 12 bits", "snug/kernels/adamw.py", "spare).bitwise_and_(0xFFFF)", "spare).bitwise_and_(0xFFF)", "test_adamw_kernel.py"),
    ("gpu: weights rounded with the moments' bits", "snug/kernels/adamw.py", "mix_bits(bits ^ key) & 0xFFFF", "bits & 0xFFFF", "test_adamw_kernel.py"),
    # snug/kernels/flash.py
    ("gpu: a token sees the end of the completion before its own", "snug/kernels/flash.py", "tl.where((token >= low) & (token <= high), z, LOW)", "tl.where(token <= high, z, LOW)", "test_flash.py"),
    ("gpu: completions do not see their prompt's last token", "snug/kernels/flash.py", "tl.where(in_prompt, prompt_end - 1, token)", "tl.where(in_prompt, prompt_end - 2, token)", "test_flash.py"),
    ("gpu: attention's sums keep an old maximum", "snug/kernels/flash.py", "total * shrunk + tl.sum(p, 1, keep_dims=True)", "total + tl.sum(p, 1, keep_dims=True)", "test_flash.py"),
    ("gpu: completions teach their prompt nothing", "snug/kernels/flash.py", "(query < stop) & (not of_prompt), 0)", "query < stop, 0)", "test_flash.py"),
    ("gpu: a key head has its first query head's gradient alone", "snug/kernels/flash.py", "tl.where(of_prompt, h + 1, h + R)", "h + 1", "test_flash.py"),
    ("gpu: a window is a token longer in a prompt", "snug/kernels/flash.py", "low = tl.maximum(low, token + behind - (WINDOW - 1))", "low = tl.maximum(low, token + behind - tl.where(in_prompt, WINDOW, WINDOW - 1))", "test_flash.py"),
    ("gpu: a window skips a block that the tile's next completion sees", "snug/kernels/flash.py", "tl.min(tl.where(token < end, token - low, T))", "tl.max(tl.where(token < end, token - low, 0))", "test_flash.py"),
    ("gpu: a window's last query teaches no key", "snug/kernels/flash.py", "tl.minimum(stop, end + (WINDOW - 1))", "tl.minimum(stop, end + (WINDOW - 2))", "test_flash.py"),
    ("gpu: a completion's window begins anew behind its prompt", "snug/kernels/flash.py", "tl.where(of_prompt, place, query) - (WINDOW - 1)", "query - (WINDOW - 1)", "test_flash.py"),
    ("gpu: attention's gradient without delta", "snug/kernels/flash.py", "tl.trans(values), input_precision=\"ieee\") - total)", "tl.trans(values), input_precision=\"ieee\"))", "test_flash.py"),
    # snug/kernels/layers.py
    ("NF4: no residual", "snug/kernels/layers.py", "return y if residual is None else residual + y", "return y", "test_nf4.py"),
    # snug/kernels/nf4.py
    ("NF4: nibbles swapped", "snug/kernels/nf4.py", "codes[::2] << 4 | codes[1::2]", "codes[1::2] << 4 | codes[::2]", "test_nf4.py"),
    ("NF4: the scales' mean is not subtracted", "snug/kernels/nf4.py", "blockwise(scales - offset,", "blockwise(scales,", "test_nf4.py"),
    ("NF4: the scales' mean is not added", "snug/kernels/nf4.py", ".add_(q.offset)", "", "test_nf4.py"),
    ("NF4: blocks of scales of 128", "snug/kernels/nf4.py", "repeat_interleave(SCALE_BLOCK)", "repeat_interleave(128)", "test_nf4.py"),
    ("NF4: every piece has the first piece's scales", "snug/kernels/nf4.py", "view_as(piece).mul_(scale)", "view_as(piece).mul_(scales[: len(piece), None])", "test_nf4.py"),
    ("NF4: every piece has the first piece's codes", "snug/kernels/nf4.py", "codes.flatten().int()", "q.codes[: piece.numel() // 2].int()", "test_nf4.py"),
    ("NF4: the kernel's nibbles swapped", "snug/kernels/nf4.py", "tl.join(byte // 16, byte % 16)", "tl.join(byte % 16, byte // 16)", "test_layer_kernels.py"),
    ("NF4: the kernel's blocks of scales of 128", "snug/kernels/nf4.py", "block // 256", "block // 128", "test_layer_kernels.py"),
    ("NF4: the kernel writes beyond the end", "snug/kernels/nf4.py", "values.to(out.dtype.element_ty), mask[:, None])", "values.to(out.dtype.element_ty))", "test_layer_kernels.py"),
    ("NF4: the kernel's products are fused", "snug/kernels/nf4.py", "        ROWS,\n        enable_fp_fusion=False", "        ROWS,\n        enable_fp_fusion=True", "test_layer_kernels.py"),
    ("NF4: pieces beside the kernel, too", "snug/kernels/nf4.py", "if not uses_triton(out):", "if True:", "test_layer_kernels.py"),
    ("NF4: NaN passes", "snug/kernels/nf4.py", "if not all(tensor.isfinite()", "if False and not all(tensor.isfinite()", "test_nf4.py"),
    ("NF4: parts in the order of the file", "snug/kernels/nf4.py", "starts = sorted(self.parts)", "starts = list(self.parts)", "test_nf4.py"),
    ("NF4: a matrix is quantized at once", "snug/kernels/nf4.py", "values.split(8 * PIECE * size)", "[values]", "test_nf4.py"),
    ("NF4: quantized in the model's type", "snug/kernels/nf4.py", "scales.new_tensor(DYNAMIC_MAP)", "torch.tensor(DYNAMIC_MAP)", "test_nf4.py"),
    ("NF4: the matrix is kept for backward", "snug/kernels/nf4.py", "        return linear(x, weight.dequantized(dtype_of(x)), bias)\n", "        w = weight.dequantized(dtype_of(x))\n        ctx.save_for_backward(w)\n        return linear(x, w, bias)\n", "test_nf4.py"),
    ("product: odd columns meet even ones", "snug/kernels/nf4.py", "tl.dot(high, odd.trans(), total)", "tl.dot(high, even.trans(), total)", "test_layer_kernels.py"),
    ("product: the last part alone", "snug/kernels/nf4.py", "total += tl.load(mine)", "total = tl.load(mine)", "test_layer_kernels.py"),
    ("product: counters are not reset", "snug/kernels/nf4.py", "                tl.store(counters + which, 0)\n", "", "test_layer_kernels.py"),
    ("product: too few counters", "snug/kernels/nf4.py", "shape[0] // 64 + 2", "shape[0] // 128 + 1", "test_layer_kernels.py"),
    ("product: every part's rows are the first", "snug/kernels/nf4.py", "        row += start\n", "        row += 0\n", "test_layer_kernels.py"),
    ("product: adapters without their scale", "snug/kernels/nf4.py", "total += alpha * adapter(", "total += adapter(", "test_layer_kernels.py"),
    ("product: scales of the block before", "snug/kernels/nf4.py", "block + i + 1, more)", "block + i, more)", "test_layer_kernels.py"),
    ("product: with gradients, too", "snug/kernels/nf4.py", "not isinstance(weight, NF4) or torch.is_grad_enabled() or", "not isinstance(weight, NF4) or", "test_layer_kernels.py"),
    ("product: of many rows, too", "snug/kernels/nf4.py", "return few and dtype_of", "return dtype_of", "test_layer_kernels.py"),
    ("NF4: backward by W^T's rows", "snug/kernels/nf4.py", "ctx.weight.dequantized(dy.dtype).t())", "ctx.weight.dequantized(dy.dtype).view(dy.shape[-1], -1).flip(0).t())", "test_nf4.py"),
    ("NF4: autocast is overlooked", "snug/kernels/nf4.py", "if torch.is_autocast_enabled(kind) else x.dtype", "if False else x.dtype", "test_nf4.py"),
    # snug/kernels/rotary.py
    ("model: Llama 3's scaling left out", "snug/kernels/rotary.py", "return (1 - kept) * (frequency / config.rope_factor) + kept * frequency", "return frequency", "test_pretrained.py"),
    ("model: linear scaling left out", "snug/kernels/rotary.py", "return frequency / config.rope_factor\n", "return frequency\n", "test_pretrained.py"),
    ("gpu: rotary gradient rotated forth", "snug/kernels/rotary.py", "        if BACK:\n            s = -s\n", "", "test_layer_kernels.py"),
    # snug/kernels/segments.py
    ("mps: every group sees as the first", "snug/kernels/segments.py", "sees[row, row])", "sees[: row.stop - row.start, : row.stop - row.start])", "test_segments.py"),
    ("completions see those before them", "snug/kernels/segments.py", "self.begins.repeat(self.lengths)", "np.repeat([b for b, _, _ in self.groups], [e - b for b, _, e in self.groups])", "test_batch.py"),
    ("selective checkpointing attends again", "snug/kernels/segments.py", "        if segments.kept:\n", "        if False:\n", "test_model.py"),
    ("selective checkpointing keeps nothing", "snug/kernels/segments.py", "segments.kept.append((y, lse))", "pass", "test_model.py"),
    ("a window is a token longer", "snug/kernels/segments.py", "(age >= 0) & (age < window)", "(age >= 0) & (age <= window)", "test_segments.py"),
    ("a window sees half of what it should of a prompt", "snug/kernels/segments.py", "max(prompt.start, prompt.stop - window + 1)", "max(prompt.start, prompt.stop - window // 2 - 1)", "test_segments.py"),
    ("a window only where it is half of a segment", "snug/kernels/segments.py", "if not 0 < window < q.shape[2]:", "if not 0 < 2 * window < q.shape[2]:", "test_segments.py"),
    ("completions' positions begin anew", "snug/kernels/segments.py", "position[middle:end] += middle - begin", "pass", "test_segments.py"),
    ("padding's gradient is not zeroed", "snug/kernels/segments.py", "inputs[0].transpose(1, 2).flatten(0, 1)[batch.padding] = 0", "pass", "test_segments.py"),
    ("log-sums joined by the larger", "snug/kernels/segments.py", "torch.logaddexp(lse", "torch.maximum(lse", "test_segments.py"),
    ("tiles see the row's first prompt", "snug/kernels/segments.py", "completions.append((first, last, begin, middle,", "completions.append((first, last, 0, middle,", "test_segments.py"),
    # families of models
    ("families: the first of n layers is the other kind", "snug/shape.py", "(layer + 1) % n == 0", "layer % n == 0", "test_families.py"),
    ("families: sliding layers turn as the others", "snug/shape.py", 'return "sliding" if self.slides(layer)', 'return "sliding" if False', "test_families.py"),
    ("families: YaRN's ramp ends a pair early", "snug/kernels/rotary.py", "math.ceil(place(", "math.floor(place(", "test_families.py"),
    ("families: attention_factor is left out", "snug/kernels/rotary.py", "angle.cos() * config.rope_attention_factor", "angle.cos()", "test_families.py"),
    ("families: norms around 0 multiply by the weight", "snug/kernels/layers.py", "weight = 1 + weight.to(", "weight = weight.to(", "test_families.py"),
    ("families: keys alone turn beside scaled queries", "model.py", "q, k = (Rotary.apply(x, *rotary, x.shape[1:2])[0] for x in (q, k))", "k = Rotary.apply(k, *rotary, k.shape[1:2])[0]", "test_families.py"),
    ("families: scaled queries turn apart from keys", "model.py", "            rotary = None\n", "", "test_families.py"),
    ("families: a norm behind the sum", "model.py", "return x + post_norm(half(y, None, *context))", "return post_norm(x + half(y, None, *context))", "test_families.py"),
    ("families: gelu's slope", "snug/kernels/gated.py", "(1 + 3 * CUBIC * gate * gate)", "(1 + CUBIC * gate * gate)", "test_layer_kernels.py"),
    ("families: a plan takes every n-th block for the others", "snug/memory/plan.py", "depth % period + period if period > 1 else 2", "2", "test_families.py"),
    ("windows: a step sees its whole completion", "snug/decoding/kvcache.py", "(age <= t) & (age < window)", "age <= t", "test_families.py"),
    ("windows: a step sees its whole prompt", "snug/decoding/kvcache.py", "(column < length) & (length + t - column < window)", "(column < length) & (t >= 0)", "test_families.py"),
    ("windows: replies in a ring", "snug/decoding/decode_batch.py", "keep_all = ask is not None", "keep_all = False", "test_families.py"),
    # snug/kernels/gated.py
    ("gpu: SwiGLU's gradient without the gate's slope", "snug/kernels/gated.py", "sigmoid * (1 + gate * (1 - sigmoid) * slope)", "sigmoid", "test_layer_kernels.py"),
    # snug/logprobs/divergence.py
    ("teacher: the gradient without its mean", "snug/logprobs/divergence.py", "gradient = p * (gap - value[:, None])", "gradient = p * gap", "test_teacher.py"),
    ("teacher: every slab is the first", "snug/logprobs/divergence.py", "value = divergence[rows] =", "value = divergence[: rows.stop - rows.start] =", "test_teacher.py"),
    ("teacher: the gradient for logits / temperature", "snug/logprobs/divergence.py", "= gradient / options.temperature", "= gradient", "test_teacher.py"),
    ("teacher: the teacher's own temperature", "snug/logprobs/divergence.py", "torch.log_softmax(teacher_z / options.temperature, -1)", "torch.log_softmax(teacher_z, -1)", "test_teacher.py"),
    # snug/logprobs/head.py
    ("teacher: every chunk has the first rows' teacher", "snug/logprobs/head.py", "hidden = self.teacher.hidden[rows]", "hidden = self.teacher.hidden[: rows.stop - rows.start]", "test_teacher.py"),
    ("teacher: all tokens' divergences weigh alike", "snug/logprobs/head.py", ".mul_(of_divergence[:, None])", ".mul_(of_divergence.mean())", "test_teacher.py"),
    ("teacher: log-probs unscaled beside a divergence", "snug/logprobs/head.py", "gradient[:, :n_vocab].mul_(coefficients[:, None])", "gradient[:, :n_vocab]", "test_teacher.py"),
    ("teacher: its logits beside the chunk's budget", "snug/logprobs/head.py", "(len(teacher.weight) if teacher else 0)", "0", "test_teacher.py"),
    ("temperature missing in the head", "snug/logprobs/head.py", "Options(temperature, n_vocab,", "Options(1.0, n_vocab,", "test_logprobs.py"),
    ("entropy bonus as a penalty", "snug/logprobs/head.py", "loss = loss - entropy_weight", "loss = loss + entropy_weight", "test_grpo.py"),
    # snug/logprobs/rows.py
    ("entropy's gradient without log p", "snug/logprobs/rows.py", "share.add_(entropy[rows, None]).mul_(", "share.zero_().add_(entropy[rows, None]).mul_(", "test_logprobs.py"),
    ("gpu: entropy's gradient without log p", "snug/logprobs/rows.py", "(log_p + tl.load(entropy + row))", "tl.load(entropy + row)", "test_logprobs.py"),
    # snug/lora.py
    ("NF4: merged without adapters", "snug/lora.py", "layer.weight.float().add_(change, alpha=layer.scale)", "layer.weight.float()", "test_nf4.py"),
    ("NF4: a matrix without an adapter stays in 4 bits", "snug/lora.py", 'isinstance(getattr(layer, "weight", None), NF4)', 'isinstance(layer, LoRALinear) and isinstance(layer.weight, NF4)', "test_nf4.py"),
    ("lora: not scaled", "snug/lora.py", "B.to(h.dtype), self.scale)", "B.to(h.dtype), 1.0)", "test_lora.py"),
    ("lora: merged twice over", "snug/lora.py", "add_(change, alpha=layer.scale)", "add_(change, alpha=2 * layer.scale)", "test_lora.py"),
    ("lora: the base trains too", "snug/lora.py", "    model.requires_grad_(False)\n", "    model.requires_grad_(True)\n", "test_lora.py"),
    ("lora: A begins at zero too", "snug/lora.py", "nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))", "nn.init.zeros_(self.lora_A)", "test_lora.py"),
    ("budget: what the host has does not count", "snug/memory/fit.py", " and planned.host <= self.host", "", "test_plan.py"),
    ("budget: pages of files are used memory", "snug/device/host.py", " + files\n", "\n", "test_plan.py"),
    ("budget: only the inner cgroup counts", "snug/device/host.py", "for folder in (inner, *inner.parents):", "for folder in (inner,):", "test_plan.py"),
    # snug/memory/fit.py
    ("a budget spends nothing that is left", "snug/memory/fit.py", "fitted = replace(settings, **{name: values[0] for name, values in steps.items()})", "fitted = settings", "test_plan.py"),
    ("a budget gives no option back", "snug/memory/fit.py", "        if not fits(fitted):\n            fitted = slower[bisect_left(slower[:-1], True, key=fits)]", "        fitted = slower[-1]", "test_plan.py"),
    # snug/memory/limits.py
    ("the next attempt has the same micro-batches", "snug/memory/limits.py", "cut.with_limit(self.max_tokens_per_micro_batch)", "cut", "test_oom.py"),
    ("evaluations make the rollouts smaller", "snug/memory/limits.py", '"eval": "max_eval_batch"', '"eval": "max_rollout_batch"', "test_oom.py"),
    # snug/memory/meter.py
    ("mps: a phase does not wait for its end", "snug/memory/meter.py", "torch.mps.synchronize()", "pass", "test_device.py"),
    ("meter: a phase's last peak", "snug/memory/meter.py", 'entry["peak"] = max(entry["peak"], before["peak"])', "pass", "test_memory.py"),
    # snug/memory/plan.py
    ("a plan forgets the deeper blocks", "snug/memory/plan.py", "steps = (depth - depths[0])", "steps = (depth - depths[-1])", "test_plan.py"),
    # snug/options/other_names.toml
    # snug/options/__init__.py
    ("0 is not false", "snug/options/__init__.py", ', "0": False}', "}", "test_settings.py"),
    ("the command line's task has no options of its own", "snug/options/__init__.py", 'if "--task" in texts:', "if False:", "test_own_task.py"),
    ("an evaluation has the options of no task", "snug/options/__init__.py", "elif class_of_runs and not wants_help:", "elif False:", "test_own_task.py"),
    ("a similar name without its folder", "snug/options/__init__.py", "did you mean {names[near[0]]}?", "did you mean {near[0]}?", "test_settings.py"),
    ("what is above a run comes before snug's", "snug/options/__init__.py", "(Path(__file__).parents[2], *above)", "(*above, Path(__file__).parents[2])", "test_commands.py"),
    ("a choice of one's own is no choice", "snug/options/__init__.py", ' and not (OWN in choices and ":" in item)', "", "test_commands.py"),
    ("joiners of emoji are shown as codes", "snug/options/__init__.py", "\\u200b\\u200e", "\\u200b-\\u200e", "test_report.py"),
    ("isolates turn the order of a terminal", "snug/options/__init__.py", "\\u2060-\\u206f", "\\u2060-\\u2065", "test_log.py test_report.py"),
    ("a panic of a library is a traceback", "snug/options/__init__.py", 'is_panic = type(error).__name__ == "PanicException"', "is_panic = False", "test_tokenizer.py"),
    ("an error commands the terminal", "snug/options/__init__.py", "return plain(", "return (", "test_log.py"),
    # snug/options/progress.py
    ("signs of life: a fast run gets lines too", "snug/options/progress.py", "if not SAID.wait(wait):", "if SAID.wait(wait) or True:", "test_progress.py"),
    ("signs of life: only the first line", "snug/options/progress.py", "                SAID.clear()\n", "                SAID.clear()\n                SAID.wait()\n", "test_progress.py"),
    ("signs of life: the first line comes late", "snug/options/progress.py", "wait = FIRST", "wait = EVERY", "test_progress.py"),
    ("signs of life: every process speaks", "snug/options/progress.py", "if IS_FIRST and not (console", "if not (console", "test_progress.py"),
    ("signs of life: a terminal gets lines too", "snug/options/progress.py", "IS_FIRST and not (console or sys.stdout).isatty()", "IS_FIRST", "test_progress.py"),
    ("signs of life: samples among the lines", "snug/options/progress.py", "file=console, flush", "flush", "test_progress.py"),
    ("signs of life: a resumed run is fast", "snug/options/progress.py", "initial=done, ", "", "test_progress.py"),
    ("signs of life: an evaluation counts its samplings apart", "snug/options/progress.py", "if total and PHASES and PHASES[-1].unit", "if total and not PHASES and PHASES[-1].unit", "test_progress.py"),
    ("signs of life: a failed loop goes on for ever", "snug/options/progress.py", "while len(PHASES) > depth:", "if PHASES[-1] is bar:", "test_progress.py"),
    ("log: the bar names no phase", "snug/options/progress.py", "depth == 1 and not total", "False", "test_progress.py"),
    # snug/options/typed.py
    ("model: NaN is a number", "snug/options/typed.py", "fits = 0 < value < LIMIT", "fits = not value <= 0", "test_pretrained.py"),
    # snug/pretrained/adapters.py
    ("PEFT: q, k and v have all of B", "snug/pretrained/adapters.py", "rows_of(layer.lora_B, entry)", "layer.lora_B", "test_nf4.py"),
    ("PEFT: another scale", "snug/pretrained/adapters.py", "lora_alpha=settings.lora_alpha", "lora_alpha=settings.lora_rank", "test_nf4.py"),
    ("PEFT: surplus tensors pass", "snug/pretrained/adapters.py", "in needed | found if", "in needed if", "test_adapters.py"),
    ("PEFT: another rank than r's", "snug/pretrained/adapters.py", "((rank, columns), (rows, rank))", "map(found.get, pair)", "test_adapters.py"),
    ("PEFT: whole numbers are adapters", "snug/pretrained/adapters.py", "if dtype in TYPES else dtype", "", "test_adapters.py"),
    ("PEFT: names of the shape's family", "snug/pretrained/adapters.py", 'entries(shape, config["model_type"], ', 'entries(shape, "llama", ', "test_families.py"),
    ("PEFT: names without eyes", "snug/pretrained/adapters.py", 'if "text_config" in config:', "if False:", "test_families.py"),
    ("PEFT: an export is not read back", "snug/pretrained/adapters.py", "        find_base(temporary, weights=False)\n", "", "test_adapters.py"),
    ("PEFT: rslora's scale is LoRA's", "snug/pretrained/adapters.py", "rank ** (0.5 if", "rank ** (1 if", "test_adapters.py"),
    ("PEFT: pissa is read", "snug/pretrained/adapters.py", 'config.want("init_lora_weights", True, False, "gaussian")', "pass", "test_adapters.py"),
    ("PEFT: the base's newest commit", "snug/pretrained/adapters.py", '("base_model_name_or_path", "revision")', '("base_model_name_or_path",)', "test_hub.py"),
    ("PEFT: an export forgets the base's commit", "snug/pretrained/adapters.py", "name, revision = name.split(\"@\")", "name = name.split(\"@\")[0]", "test_hub.py"),
    ("PEFT: the base's weights before they are wanted", "snug/pretrained/adapters.py", 'local_folder("@".join(filter(None, names)), weights)', 'local_folder("@".join(filter(None, names)))', "test_hub.py"),
    ("PEFT: the base's weights never", "snug/pretrained/adapters.py", 'local_folder("@".join(filter(None, names)), weights)', 'local_folder("@".join(filter(None, names)), False)', "test_hub.py"),
    ("PEFT: GPT-2's matrices do not lie", "snug/pretrained/adapters.py", 'fan_in_fan_out=modules[0].startswith("transformer.")', "fan_in_fan_out=False", "test_adapters.py"),
    ("PEFT: adapters that began as a normal distribution", "snug/pretrained/adapters.py", 'True, False, "gaussian")', "True)", "test_adapters.py"),
    # snug/pretrained/hub.py
    ("hub: weights of another commit than the configuration", "snug/pretrained/hub.py", "revision=folder.name", "revision=found[3]", "test_hub.py"),
    # snug/pretrained/shapes.py
    ("model: norms' epsilon is the default", "snug/pretrained/families.toml", 'norm_eps = "rms_norm_eps"', 'norm_eps = "no_such_eps"', "test_pretrained.py"),
    # snug/pretrained/shapes.py
    ("export: another shape is written in silence", "snug/pretrained/shapes.py", "    if other := [", "    if False and [", "test_families.py"),
    ("export: windows are those of the class", "snug/pretrained/shapes.py", 'if "full_every" in may_have:\n        kinds', 'if c.full_every:\n        kinds', "test_families.py"),
    ("export: a window that is none is left out", "snug/pretrained/shapes.py", 'if "sliding_window" in may_have:\n        config', "if c.sliding_window:\n        config", "test_families.py"),
    ("export: OLMo 3's base of windows is the class's", "snug/pretrained/shapes.py", 'sliding_attention=sliding)', 'sliding_attention=plain)', "test_families.py"),
    ("export: the second of two properties is not named", "snug/pretrained/shapes.py", "{', '.join(other):.300}", "{other[0]}", "test_families.py"),
    ("export: a GPT-2 without biases is refused", "snug/pretrained/shapes.py", 'again["bias"] = c.bias', 'pass', "test_pretrained.py test_families.py"),
    ("model: a window is not read", "snug/pretrained/shapes.py", 'if window := c.get("sliding_window", int, 0):', "if window := 0:", "test_pretrained.py"),
    ("configs: what one family cannot have", "snug/pretrained/shapes.py", '(ONLY["all"] | ONLY.get(family, {})).items()', 'ONLY["all"].items()', "test_configs.py"),
    ("configs: layers behind the first two periods", "snug/pretrained/shapes.py", "    if layers[:count] !=", "    count = min(count, 2 * n or count)\n    if layers[:count] !=", "test_configs.py"),
    ("configs: a list that is too short", "snug/pretrained/shapes.py", "len(layers) + 1)", "len(layers))", "test_configs.py"),
    ("configs: properties that a family has not", "snug/pretrained/shapes.py", "shape.keys() & OPTIONAL - may_have", "()", "test_configs.py"),
    ("configs: an unused window is any family's", "snug/pretrained/shapes.py", 'if "use_sliding_window" in missing:', 'if "use_sliding_window" in c.values:', "test_pretrained.py"),
    ("configs: the original context inside a rope wins", "snug/pretrained/shapes.py", "        rope.values[ORIGINAL] = original\n", "        rope.values.setdefault(ORIGINAL, original)\n", "test_configs.py"),
    ("configs: an original context of 1", "snug/pretrained/shapes.py", "if factor < 1 or original == 1:", "if factor < 1:", "test_configs.py"),
    ("configs: longrope's factor", "snug/pretrained/shapes.py", 'rope.get("factor", float, longest / original if kind == "longrope" else None)', 'longest / original if kind == "longrope" else rope.get("factor", float)', "test_families.py"),
    ("configs: every rule has a factor for attention", "snug/pretrained/shapes.py", 'if kind in ("longrope", "yarn"):', "if True:", "test_configs.py"),
    ("configs: a line for each read", "snug/pretrained/shapes.py", "@cache  # each text once\n", "", "test_configs.py"),
    ("configs: YaRN's default", "snug/pretrained/families.toml", "beta_fast = 32.0", "beta_fast = 16.0", "test_families.py"),
    ("configs: the last family's default", "snug/pretrained/families.toml", "rope_local_base_freq = 5e5, rms_norm_eps = 1e-5", "rope_local_base_freq = 5e5", "test_configs.py"),
    ("configs: unknown keys in dicts", "snug/options/typed.py", 'names |= {f"{name}.{inner}" for inner in part.unread()}', "pass", "test_configs.py"),
    ("configs: null is said", "snug/options/typed.py", " for name, value in self.values.items() if value is not None} - self.read", " for name in self.values} - self.read", "test_configs.py"),
    ("configs: longrope's long factors", "snug/shape.py", "for factors in (self.rope_short_factor, self.rope_long_factor):", "for factors in (self.rope_short_factor,):", "test_configs.py"),
    ("configs: more than a head turns", "snug/shape.py", "not 0 < size <= self.head_size", "size <= 0", "test_configs.py"),
    ("families: longrope behind its original context", "snug/shape.py", "if self.block_size > longest > 0:", "if False:", "test_families.py"),
    ("families: every second layer without positions", "snug/shape.py", "is_every(layer, self.nope_every)", "is_every(layer, 2 * self.nope_every)", "test_families.py"),
    # snug/pretrained/tensors.py
    ("NF4: q, k and v at the same rows", "snug/pretrained/tensors.py", "ours.copy_(value, entry.start)", "ours.copy_(value, 0)", "test_nf4.py"),
    ("NF4: GPT-2's matrices lie down", "snug/pretrained/tensors.py", "value = value.t() if entry.transposed else value\n            if isinstance", "if isinstance", "test_nf4.py test_pretrained.py"),
    ("model: a tied model's other head is dropped", "snug/pretrained/tensors.py", "if not torch.equal(value.to(ours), ours):", "if False:", "test_pretrained.py"),
    ("PEFT: added in the file's type", "snug/pretrained/tensors.py", "                value = value.float()\n", "", "test_adapters.py"),
    ("model: k and v rows swapped", "snug/pretrained/tensors.py", "K, C, bias, Q + K)", "K, C, bias, Q)", "test_pretrained.py"),
    ("model: GPT-2's matrices as they lie", "snug/pretrained/tensors.py", "value = value.t() if entry.transposed else value", "value = value.t() if entry.transposed and value.shape[0] != value.shape[1] else value", "test_pretrained.py"),
    ("model: gate a row too low", "snug/pretrained/tensors.py", '"mlp.gate_proj", "mlp.up", F, C)', '"mlp.gate_proj", "mlp.up", F, C, False, 1)', "test_pretrained.py"),
    ("model: surplus tensors pass", "snug/pretrained/tensors.py", "surplus.append(name)", "pass", "test_pretrained.py"),
    ("model: types are not looked at", "snug/pretrained/tensors.py", " or dtype not in TYPES:", ":", "test_pretrained.py"),
    ("model: shapes are not looked at", "snug/pretrained/tensors.py", "if size != entry.shape or dtype", "if dtype", "test_pretrained.py"),
    ("model: padded rows are exported", "snug/pretrained/tensors.py", "entries(vars(config), family, config.n_vocab)", "entries(vars(config), family, config.vocab_size)", "test_pretrained.py"),
    # snug/sandbox/__init__.py
    ("sandbox: a late reply answers the next request", "snug/sandbox/__init__.py", "        except BaseException:\n            self.close()", "        except BaseException:\n            pass", "test_sandbox.py"),
    ("sandbox: the trainer can be read", "snug/sandbox/__init__.py", 'linux.called("prctl", 4, 0)', 'linux.called("prctl", 4, 1)', "test_sandbox.py"),
    ("sandbox: a missing layer is silent", "snug/sandbox/__init__.py", "        if self.missing:", "        if False:", "test_sandbox.py"),
    # snug/sandbox/channel.py
    ("sandbox: a time limit for each byte", "snug/sandbox/channel.py", "(left := deadline - time.monotonic()) > 0", "(left := self.seconds) > 0", "test_sandbox.py"),
    # snug/sandbox/child.py
    ("sandbox: a worker goes on after executed code", "snug/sandbox/child.py", "return [value, error], executed", "return [value, error], False", "test_sandbox.py"),
    ("sandbox: without the audit hook too", "snug/sandbox/child.py", ' if "audit" in confinement.layers else 1', "", "test_sandbox.py"),
    ("sandbox: forks outlive their worker", "snug/sandbox/child.py", "for send in (os.killpg, os.kill):", "for send in (os.kill,):", "test_sandbox.py"),
    ("sandbox: a time limit for each of two messages", "snug/sandbox/child.py", "            message = channel.receive(LONGEST, deadline)", "            message = channel.receive(LONGEST)", "test_sandbox.py"),
    ("sandbox: a conversation never ends", "snug/sandbox/child.py", "Channel(end, seconds), time.monotonic() + seconds", "Channel(end, seconds), time.monotonic() + 20 * seconds", "test_code.py"),
    ("sandbox: one worker for all conversations", "snug/sandbox/child.py", 'talker, values = talker and talker.end(), [[None, ""]]', 'values = [[None, ""]]', "test_code.py"),
    # snug/sandbox/confine.py
    ("sandbox: the hook opens any file", "snug/sandbox/confine.py", "if not inside or event", "if event", "test_sandbox.py"),
    ("sandbox: the library makes no function", "snug/sandbox/confine.py", "    function.__new__ os.putenv", "    os.putenv", "test_sandbox.py"),
    ("sandbox: a module without a .pyc file is not imported", "snug/sandbox/confine.py", " marshal.dumps", "", "test_sandbox.py"),
    ("sandbox: dots lead out of a folder", "snug/sandbox/confine.py", ' and "/.." not in path', "", "test_sandbox.py"),
    ("sandbox: builtins decide what is text", "snug/sandbox/confine.py", "is text and", "is str and", "test_sandbox.py"),
    ("sandbox: Landlock is not in force", "snug/sandbox/confine.py", "            linux.landlock(folders)", "            pass", "test_sandbox.py"),
    ("sandbox: root keeps its capabilities", "snug/sandbox/confine.py", "            linux.drop_privileges()", "            linux.called('prctl', 38, 1, 0, 0, 0)", "test_sandbox.py"),
    ("sandbox: the keeper can be read", "snug/sandbox/confine.py", 'linux.called("prctl", 4, 0)', 'linux.called("prctl", 4, 1)', "test_sandbox.py"),
    ("sandbox: workers keep the keeper's socket", "snug/sandbox/confine.py", "os.closerange(PIPE + 1,", "os.closerange(PIPE + 99,", "test_sandbox.py"),
    # snug/sandbox/linux.py
    ("sandbox: the filter opens files to write", "snug/sandbox/linux.py", "(ANY_BIT, 1, 0, WRITING)", "(ANY_BIT, 0, 0, WRITING)", "test_sandbox.py"),
    # snug/tokenizer/__init__.py
    ("a panic at a text is a traceback", "snug/tokenizer/__init__.py", 'with in_one_line(f"{self.file}: cannot encode', 'with nullcontext(f"{self.file}: cannot encode', "test_tokenizer.py"),
    ("a stop string within one token alone", "snug/tokenizer/__init__.py", 'window = max(len(text.encode(errors="replace")) for text in texts) + 1', "window = 1", "test_tokenizer.py"),
    ("a prompt's date is today's", "snug/tokenizer/__init__.py", "files.setdefault(DATE, str(date.today()).encode())", "str(date.today()).encode()", "test_models.py"),
    ("a stop string's tail from within a character", "snug/tokenizer/__init__.py", 'or not tail.startswith("\\ufffd")', "or True", "test_tokenizer.py"),
    ("a prompt's text spells special tokens", "snug/tokenizer/__init__.py", "encode_special_tokens = not special", "encode_special_tokens = False", "test_tokenizer.py"),
    ("a stop token that is no special token is text", "snug/tokenizer/__init__.py", "for i in stop_tokens if not added[i].special]", "for i in ()]", "test_tokenizer.py"),
    ("episodes: a template's special tokens in a result", "snug/tokenizer/__init__.py", "special=piece in self.special)", "special=True)", "test_episodes.py"),
    ("a reply never has the end of the turn before", "snug/tokenizer/__init__.py", "if stopped and end in ids", "if end in ids", "test_tokenizer.py"),
    ("a bos of the configuration replaces the file's", "snug/tokenizer/__init__.py", "if not tokenizer.bos and config", "if config", "test_tokenizer.py"),
    ("a bos that is no token", "snug/tokenizer/__init__.py", " and begin is not None:", ":", "test_tokenizer.py"),
    ("the first of two tokens before a prompt", "snug/tokenizer/__init__.py", "[*self.bos, *self.encode(prompt)]", "[*self.bos[:1], *self.encode(prompt)]", "test_tokenizer.py"),
    ("special tokens hide a stop string", "snug/tokenizer/__init__.py", "(i for i in reversed(ids) if i not in special)", "reversed(ids)", "test_tokenizer.py"),
    ("a checkpoint keeps a generation_config.json without stop tokens", "snug/tokenizer/__init__.py", 'files["generation_config.json"] = json.dumps(generation, indent=1).encode()', 'files.setdefault("generation_config.json", json.dumps(generation, indent=1).encode())', "test_tokenizer.py"),
    # snug/tokenizer/chat.py
    ("a message's content writes special tokens", "snug/tokenizer/chat.py", "self.spellings.sub(lambda found: BREAK.join(found[0]), well_formed(value))", "well_formed(value)", "test_tokenizer.py"),
    ("template variables are not set", "snug/tokenizer/chat.py", "self.source = defaults + self.source", "pass", "test_tokenizer.py"),
    ("template variables set again and again", "snug/tokenizer/chat.py", "if not self.source.startswith(defaults):", "if True:", "test_tokenizer.py"),
    # training/dry_run.py
    ("episodes: a plan without replies", "training/dry_run.py", "ask=self.prepared.toolbox", "ask=None", "test_agents.py"),
    # training/figures.py
    ("mps: float64 on the device", "training/figures.py", "off_mps(logprobs).double()", "logprobs.double()", "test_fake_mps.py"),
    ("log: half a group of samples", "training/figures.py", "-(-SAMPLES // k) * k", "SAMPLES", "test_grpo.py"),
    ("report: the prompt among a sample's columns", "training/figures.py", 'columns.pop("prompt", "")', 'columns.get("prompt", "")', "test_grpo.py"),
    ("a function's rewards of the first part alone", "training/figures.py", "lists[name] += getattr(part, column).get(name, none)", "lists[name] += getattr(parts[0], column).get(name, none)", "test_parallel.py"),
    ("a reward that falls with length goes unseen", "training/figures.py", "corrcoef(both)[0, 1]", "corrcoef(both)[0, 0]", "test_hints.py"),
    ("completions that were cut off say how the reward falls", "training/figures.py", "rollouts.stopped.cpu() & ~both", "~both", "test_hints.py"),
    ("episodes: messages of groups that were not selected", "training/figures.py", '"by_function", "columns", "episodes"', '"by_function", "columns"', "test_agents.py"),
    # training/frozen.py
    ("teacher: hidden states of some completions planned", "training/frozen.py", "N = max(len(logprobs), settings.sequences_per_rollout)", "N = len(logprobs)", "test_teacher.py"),
    # training/loop.py
    ("a run that goes beyond its end says nothing", "training/loop.py", "if start >= settings.max_iters:", "if start == settings.max_iters:", "test_notebook.py"),
    ("another thread gets no run", "training/loop.py", "if current_thread() is not main_thread():", "if False:", "test_notebook.py"),
    ("lora: resumed without its adapters", "training/loop.py", "    if resume and settings.lora_rank:\n        load_into", "    if False:\n        load_into", "test_lora.py"),
    ("rewards: Python's generator is not seeded", "training/loop.py", "torch.manual_seed, random.seed, np.random.seed", "torch.manual_seed, np.random.seed", "test_scoring.py"),
    ("rewards: NumPy's generator is not seeded", "training/loop.py", "torch.manual_seed, random.seed, np.random.seed", "torch.manual_seed, random.seed", "test_scoring.py"),
    ("dtype: a GPU is planned in float32", "training/loop.py", "say(show(rehearse, with_dtype(settings, kind)))", "say(show(rehearse, settings))", "test_plan.py"),
    # training/notebook.py
    ("an interrupted run says it is finished", "training/notebook.py", "FinishedRun(prepared.settings, functions, finished)", "FinishedRun(prepared.settings, functions, True)", "test_notebook.py"),
    ("prompts from Python undo other options", "training/notebook.py", 'dict(task="jsonl", test_file="") | options', 'options | dict(task="jsonl", test_file="")', "test_notebook.py"),
    ("run.evaluate writes no samples", "training/notebook.py", 'samples_file="none") | options', 'samples_file="none") | options | dict(samples_file="none")', "test_notebook.py"),
    ("two functions of one name are one", "training/notebook.py", "functions.setdefault(spec, value) is not value", "functions.setdefault(spec, value) is None", "test_notebook.py"),
    ("run.sample ignores its prompt", "training/notebook.py", "dict(prompt=prompt, num_samples=n) | options", "dict(num_samples=n) | options", "test_notebook.py"),
    ("prompts from Python overwrite an earlier run's", "training/notebook.py", ".prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl", ".prompts.jsonl", "test_notebook.py"),
    # training/optimizer.py
    ("gpu: a slab is updated before it has come", "training/optimizer.py", "            fetched.wait()\n", "", "test_optimizer.py"),
    ("gpu: a slab comes while the last one leaves", "training/optimizer.py", "            free[turn].wait()\n", "", "test_optimizer.py"),
    ("every fused step is the first", "training/optimizer.py", "float(self.steps), device", "0.0, device", "test_optimizer.py"),
    ("processes: offloaded weights stay as they were", "training/optimizer.py", 'copies.keys() - {"gradient"}', 'copies.keys() - {"gradient", "weight"}', "test_parallel.py"),
    # training/parallel.py
    ("processes: a mean of gradients", "training/parallel.py", "dist.all_reduce(gradient)", "dist.all_reduce(gradient.div_(2))", "test_parallel.py"),
    ("processes: FSDP's mean of gradients", "training/parallel.py", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)", "test_parallel.py"),
    ("processes: maxima are added up", "training/parallel.py", 'max(values) if name.endswith("_max") else sum(values)', "sum(values)", "test_parallel.py"),
    ("processes: FSDP's norm of a shard alone", "training/parallel.py", "dist.all_reduce(squares)", "pass", "test_parallel.py"),
    # training/probe.py
    ("probe: it learns", "training/probe.py", "learning_rate=0.0, ", "", "test_probe.py"),
    ("probe: it evaluates first", "training/probe.py", "        return {}", "        return super().evaluate_if_due(done)", "test_probe.py"),
    ("probe: the first iteration's time counts", "training/probe.py", 'logged(records[1:], "time_s")', 'logged(records, "time_s")', "test_probe.py"),
    ("probe: the time of the whole run", "training/probe.py", "(settings.max_iters - first) * ", "settings.max_iters * ", "test_probe.py"),
    ("probe: it samples dynamically", "training/probe.py", ", max_num_gen_batches=1)", ")", "test_probe.py"),
    ("groups are counted in the first iteration alone", "training/figures.py", "            groups += sampled\n", "            groups = sampled\n", "test_probe.py"),
    ("groups of the last batch alone", "training/figures.py", 'settings.batch_size * record["gen_batches"]', "settings.batch_size", "test_probe.py"),
    ("probe: it moves the earlier run aside", "training/loop.py", "resume is None and not quiet", "resume is None and not processes.rank", "test_probe.py"),
    ("probe: exit code 0 with a verdict", "training/probe.py", "sys.exit(0 if go else 3)", "sys.exit(0)", "test_probe.py"),
    # training/state.py
    ("an attempt's gradient is kept after out-of-memory", "training/state.py", "self.optimizer.zero_grad(set_to_none=True)  # what a failed", "pass  # what a failed", "test_oom.py"),
    ("a failed evaluation loses the step", "training/state.py", "with self.saver.keeping(done,", "with self.saver.keeping(0,", "test_log.py"),
    ("the first scores overwritten", "training/state.py", 'f"before/{name}": score', 'f"{name}": score', "test_log.py"),
    ("the trainer's step stands still", "training/state.py", "        self.prepared.global_step = iteration\n", "", "test_notebook.py"),
]  # fmt: skip


def plant(copy, file, text, becomes):
    source = (HOME / file).read_text()
    if source.count(text) != 1:
        raise SystemExit(f"{file} has {text!r} {source.count(text)} times; the mutant needs it once")
    (copy / file).write_text(source.replace(text, becomes))


def killed_by(copy, tests, limit=600):
    """-> the first test that fails, or None. The long ones are asked last."""
    files = [f"tests/{name}" for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    for more in ([], ["--long-only"]):
        try:
            output = subprocess.run([*command, *more], cwd=copy, capture_output=True, text=True, timeout=limit).stdout
        except subprocess.TimeoutExpired:
            return "a time limit"
        if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M):
            return failed[1]
    return None


def main(only):
    if not importlib.util.find_spec("pytest"):
        raise SystemExit(f"{sys.executable} has no pytest: pip install -r requirements-dev.txt")
    survivors = []
    with tempfile.TemporaryDirectory() as home:
        copy = Path(home) / "copy"
        shutil.copytree(
            HOME, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out", "models", "__pycache__", ".pytest_cache")
        )
        chosen = [mutant for mutant in MUTANTS if only in mutant[0] or only in mutant[1]]
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
    parser.add_argument("--only", default="", help="mutants whose name or file has this word")
    sys.exit(bool(main(parser.parse_args().only)))
