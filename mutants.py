"""Do the tests see a wrong sign? `python mutants.py` breaks hygrow.py in one place at a time.

For each entry of MUTANTS, hygrow.py is copied to an empty folder with that one edit, beside toy.py
and the tests of the maths, and pytest runs there until its first failure. A mutant that passes all
tests has survived: it is printed, and the exit status is 1. Takes about five minutes on two cores.
That every edit still fits hygrow.py is part of the ordinary tests.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = ["test_hygrow.py", "test_estimators.py"]
MUTANTS = [  # function, what stands there, what is put in its place
    ("token_gae", "+ gamma * _next(v, after) - v", "- gamma * _next(v, after) - v"),
    ("token_gae", "gamma * _next(v, after) - v", "_next(v, after) - v"),
    ("token_gae", "_next(v, after)", "_next(v, 0)"),
    ("token_gae", "gamma * lam)", "lam)"),
    ("token_gae", "gamma * lam)", "gamma)"),
    ("token_gae", "restore(advantage + v)", "restore(advantage)"),
    ("token_gae", "- v, torch", "- v.roll(-1, 1), torch"),
    ("turn_gae", "at, elapsed = end, _next(length, 1)", "at, elapsed = end, length"),
    ("turn_gae", "_next(length, 1)", "_next(length, 0)"),
    ("turn_gae", "at, elapsed = end,", "at, elapsed = start,"),
    ("turn_gae", "at, elapsed, reward = start, length,", "at, elapsed, reward = end, length,"),
    ("turn_gae", "start, length, _pack(", "start, _next(length, 1), _pack("),
    ("turn_gae", "start, length, _pack(", "start, length - 1, _pack("),
    ("turn_gae", "at, elapsed = end,", "at, elapsed = end.roll(-1, 1) | end & start,"),
    ("turn_gae", "_pack(r, end) + aggregate", "_pack(r, start) + aggregate"),
    ("turn_gae", "aggregate_reward * gamma * _next", "aggregate_reward * _next"),
    ("turn_gae", "_next(way, 0)", "way"),
    ("turn_gae", "_backward(r * ~end, step)", "_backward(r, step)"),
    ("turn_gae", "step = gamma * (~end).double()", "step = (~end).double()"),
    ("turn_gae", "step = gamma * (~end).double()", "step = gamma * torch.ones_like(r)"),
    ("turn_gae", "gamma**elapsed if", "gamma + 0 * elapsed if"),
    ("turn_gae", "torch.full_like(elapsed, turn_gamma)", "turn_gamma**elapsed"),
    ("turn_gae", "+ discount * _next", "- discount * _next"),
    ("turn_gae", "after) - _pack(v, at)", "after) + _pack(v, at)"),
    ("turn_gae", "_next(_pack(v, at), after)", "_next(_pack(v, at), 0)"),
    ("turn_gae", "discount * lam)", "discount)"),
    ("turn_gae", "discount * lam)", "lam + 0 * discount)"),
    ("turn_gae", "torch.where(end, across, step)", "torch.where(end, gamma, step)"),
    ("turn_gae", ".masked_fill(at, 0)", ""),
    ("turn_gae", "torch.where(at, advantage + v, r)", "torch.where(at, advantage, r)"),
    ("turn_gae", "r), step, after)", "r), step)"),
    ("hybrid_gae", "alpha * turn + (1 - alpha) * token", "(1 - alpha) * turn + alpha * token"),
    ("hybrid_gae", "alpha * turn + (1 - alpha) * token", "turn + (1 - alpha) * token"),
    ("hybrid_gae", "alpha * high + (1 - alpha) * low", "alpha * low + (1 - alpha) * high"),
    ("hybrid_gae", "gamma=gamma, lam=token_lam", "gamma=gamma, lam=lam"),
    ("hybrid_gae", "low if hybrid_return ==", "high if hybrid_return =="),
    ("hybrid_gae", "turn_end != 0, returns, 0", "turn_end == 0, returns, 0"),
    ("hybrid_gae", "dict(gamma=0.0, lam=0.0", "dict(gamma=gamma, lam=0.0"),
    ("hybrid_gae", "bootstrap=bootstrap)\n    turn", "bootstrap=None)\n    turn"),
    ("bi_level_gae", "+ turn_gamma * _next", "- turn_gamma * _next"),
    ("bi_level_gae", "turn_gamma * lam)", "lam)"),
    ("bi_level_gae", "_next(value, after)", "_next(value, 0)"),
    ("bi_level_gae", "value = _pack(v, end)", "value = _pack(v, start)"),
    ("bi_level_gae", "step = gamma * (~end).double()", "step = gamma * torch.ones_like(r)"),
    ("bi_level_gae", "step = gamma * (~end).double()", "step = (~end).double()"),
    ("bi_level_gae", "end, high + v, r", "end, high, r"),
    ("bi_level_gae", "step * lam)", "step)"),
    ("rl4vlm_gae", "value = _pack(v, start)", "value = _pack(v, end)"),
    ("rl4vlm_gae", "+ gamma * _next", "- gamma * _next"),
    ("rl4vlm_gae", "_pack(r, end)", "_pack(r, start)"),
    ("rl4vlm_gae", "gamma * lam)", "gamma)"),
    ("rl4vlm_gae", "(advantage + v) * start", "(advantage + v) * end"),
    ("turn_start", "done.roll(1, 1)", "done"),
    ("turn_start", " * (torch.arange(mask.shape[1], device=mask.device) > 0)", ""),
    ("turn_start", "== 1)", "== 2)"),
    ("masked_reinforce", "lam=1.0", "lam=0.0"),
    ("masked_reinforce", "gamma=gamma", "gamma=1.0"),
    ("trajectory_group_advantages", "advantage[:, None]", "-advantage[:, None]"),
    ("trajectory_group_advantages", "g, ddof, eps", "g, 0, eps"),
    ("trajectory_group_advantages", "r.abs().sum(1)[some]", "r.sum(1)[some].abs()"),
    ("trajectory_group_advantages", "mask.any(1), r.double()", "mask.any(1) | True, r.double()"),
    ("trajectory_group_advantages", "r = _float(rewards.dtype), mask.any(1), r.double()",
     "r = _float(rewards.dtype), mask.any(1), r.sum(1, True).double()"),
    ("leave_one_out_advantages", "(score - mean) / (1 - share)", "score - mean"),
    ("leave_one_out_advantages", "share < 1", "share < 2"),
    ("grow_rewards", "repeat_interleave(lengths) - 1", "repeat_interleave(lengths)"),
    ("grow_rewards", "gamma ** to_go.double() *", "gamma ** -to_go.double() *"),
    ("grow_rewards", "to_go - torch.arange", "to_go + torch.arange"),
    ("grow_weights", "share / (g.max() + 1)", "share"),
    ("grow_weights", "(g.max() + 1)", "(g.max() + 1).clamp(max=2)"),
    ("grow_rewards", "| (success < 0)", ""),
    ("grow_advantages", "r.abs(), dtype", "r, dtype"),
    ("grow_advantages", 'statistics == "balanced"', 'statistics == "pooled"'),
    ("_shares", "pairs[0].bincount()[g] * i.bincount()[i]", "i.bincount()[i]"),
    ("_shares", "torch.stack([g, trajectory])", "torch.stack([0 * g, trajectory])"),
    ("_standardise", "gap = x - total", "gap = x + total"),
    ("_standardise", "zero.index_add(0, g, y)[g]", "zero.index_add(0, 0 * g, y)[0 * g]"),
    ("_standardise", "4 * torch.finfo(dtype).eps * largest", "0 * largest"),
    ("_standardise", "4 * torch.finfo(dtype).eps", "2 * torch.finfo(dtype).eps"),
    ("_standardise", ".clamp(min=torch.finfo(dtype).smallest_normal)", ""),
    ("_standardise", '- reduce(x, "amin")', '+ reduce(x, "amin")'),
    ("_standardise", "var.sqrt() + eps", "var + eps"),
    ("_standardise", "* count / (count - ddof)", ""),
    ("_standardise", "x, eps, count = x / largest, eps / largest,", "x, eps, count = x, eps,"),
    ("_standardise", "eps / largest", "eps"),
    ("whiten", "/ (count - 1)", "/ count"),
    ("whiten", "x64 - total / count", "x64"),
    ("whiten", "var + 1e-8", "var"),
    ("masked_mean", "count.clamp(min=1)", "x.numel()"),
    ("policy_loss", "torch.maximum(", "torch.minimum("),
    ("policy_loss", "clamp(1 - clip, 1 + clip)", "clamp(1 - clip, 1 + 2 * clip)"),
    ("policy_loss", "clamp(1 - clip, 1 + clip)", "clamp(max=1 + clip)"),
    ("policy_loss", "gain < 0", "gain > 0"),
    ("policy_loss", ".clamp(-20, 20)", ""),
    ("policy_loss", "(new - old)", "(old - new)"),
    ("turn_policy_loss", "coef * (new - old)", "(new - old)"),
    ("turn_policy_loss", "old_logprobs.detach()", "old_logprobs"),
    ("turn_policy_loss", "exists, clip=clip,", "exists, clip=clip, dual_clip=3,"),
    ("policy_stats", ".clamp(-20, 20)", ""),
    ("hybrid_gae", "torch.promote_types(rewards.dtype, values.dtype)", "rewards.dtype"),
    ("_sum_over_ranks", "group=dist", "group=None"),
    ("turn_policy_loss", "thought_coef, 1.0)", "1.0, thought_coef)"),
    ("turn_policy_loss", "torch.where(turn_end != 0, gain, 0)", "gain"),
    ("grow_loss", "(advantages * weights)", "advantages"),
    ("grow_loss", "/ mask.sum(1, keepdim=True).clamp(min=1)", "/ 1"),
    ("grow_loss", "denominator=1", "denominator=None"),
    ("grow_loss", 'ratio == "action"', 'ratio == "token"'),
    ("policy_stats", "kl_terms(old, new, mask)", "kl_terms(new, old, mask)"),
    ("policy_stats", "(ratio - 1).abs() > clip", "(ratio - 1) > clip"),
    ("value_loss", "torch.maximum(", "torch.minimum("),
    ("value_loss", "old + (new - old)", "new + (new - old)"),
    ("value_loss", "return 0.5 *", "return"),
    ("kl_terms", "torch.expm1(back) - back", "torch.expm1(back) + back"),
    ("kl_terms", "(-d).clamp(max=20)", "(-d)"),
    ("_turns", "(valid & ~end).roll(1, 1)", "(valid & end).roll(1, 1)"),
    ("_turns", "valid.cumsum(1)", "valid.cumsum(1) + 1"),
    ("_ahead", "turn_end.flip(1).cumsum(1).flip(1)", "turn_end.cumsum(1)"),
    ("_backward", "torch.addcmul(x_t, factor_t, y)", "torch.addcmul(x_t, factor_t, y, value=-1)"),
]


def mutate(source: str, function: str, old: str, new: str) -> str:
    """source with old -> new in one function; ValueError unless old stands there exactly once."""
    head, start, rest = source.partition(f"\ndef {function}(")
    body = re.split(r"\n(?=\S)(?!\) ->)", rest, maxsplit=1)[0]
    code = re.sub(r'""".*?"""', lambda doc: " " * len(doc[0]), body, flags=re.DOTALL)
    if code.count(old) != 1:
        raise ValueError(f"{function}: {old!r} stands there {code.count(old)} times, not once")
    at = code.index(old)
    return head + start + body[:at] + new + body[at + len(old) :] + rest[len(body) :]


def run(source: str, tests: list[str]) -> str:
    """The first of the tests that fails for this hygrow.py, or "" if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (*TESTS, "toy.py", "mutants.py"):
            shutil.copy(HERE / name, folder)
        Path(folder, "hygrow.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests,
                   "-k", "not mutants_fit and not stands_alone"]  # these read the text itself
        out = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if out.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", out.stdout, re.MULTILINE)
    return failed[1] if failed else out.stdout[-300:] + out.stderr[-300:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="mutants tested at the same time")
    parser.add_argument("--tests", nargs="+", default=TESTS, choices=TESTS, help="files to run")
    args = parser.parse_args()
    source = (HERE / "hygrow.py").read_text()
    broken = run(source, args.tests)
    if broken:
        sys.exit(f"the tests fail for hygrow.py as it is: {broken}")
    with ThreadPoolExecutor(args.workers) as pool:
        kills = list(pool.map(lambda mutant: run(mutate(source, *mutant), args.tests), MUTANTS))
    for (function, old, new), kill in zip(MUTANTS, kills):
        print(f"{kill or 'SURVIVED':75} {function}: {old!r} -> {new!r}")
    alive = kills.count("")
    print(f"{len(kills) - alive} of {len(kills)} mutants killed")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
