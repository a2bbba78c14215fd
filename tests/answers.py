"""Answers of models to "Write f, which adds one", and whether the program in each is right."""

GOOD, BAD = "def f(x):\n    return x + 1\n", "def f(x):\n    return 0\n"


def fenced(code, before="```python", after="```"):
    return f"{before}\n{code.rstrip()}\n{after}\n"


RIGHT = {
    "no block": GOOD,
    "a block": fenced(GOOD),
    "a block without a language": fenced(GOOD, "```"),
    "a block with a space before the language": fenced(GOOD, "``` python"),
    "a block with attributes": fenced(GOOD, '```python title="f.py" {.numbers}'),
    "lines that end as in Windows": fenced(GOOD).replace("\n", "\r\n"),
    "tildes": fenced(GOOD, "~~~python", "~~~"),
    "tildes around backticks": fenced(f'text = """\n```\n"""\n{GOOD}', "~~~python", "~~~"),
    "four backticks around three": fenced(f"# Say:\n'''\n```\n'''\n{GOOD}", "````", "````"),
    "text on both sides": f"Sure! Here it is:\n\n{fenced(GOOD)}\nThe function adds one.",
    "text before the fence": f"Sure: {fenced(GOOD)}",
    "text behind the fence": f"{fenced(GOOD)[:-1]} This adds one.",
    "code in a sentence before": f"I write ```f(x)``` as follows:\n{fenced(GOOD)}",
    "code in a sentence behind": f"{fenced(GOOD)}Call it with ```f(1)``` to see 2.\n",
    "cut off behind the program": f"```python\n{GOOD}",
    "a fence that is never closed": f"```python\n{GOOD}\n```python\nprint(f(1))\n```",
    "a list": f"1. So:\n   ```python\n   {GOOD.replace(chr(10), chr(10) + '   ')}\n   ```\n2. Done.",
    "a list with an example": f"- So:\n\n  ```python\n  def f(x):\n      return x + 1\n  ```\n- {fenced('print(f(1))')}",
    "an example behind": f"{fenced(GOOD)}For example:\n{fenced('print(f(1))  # 2' + chr(10))}",
    "an example that imports": f"{fenced(GOOD)}Use it:\n{fenced('from solution import f' + chr(10) + 'print(f(1))')}",
    "an example in a console": f"{fenced(GOOD)}{fenced('>>> f(1)' + chr(10) + '2' + chr(10))}",
    "an example that keeps the result": f"{fenced(GOOD)}{fenced('y = f(1)' + chr(10))}",
    "an example that hides a name of Python": f"{fenced(GOOD + 'max(1, 2)' + chr(10))}{fenced('max = f(1)' + chr(10))}",
    "its output behind": f"{fenced(GOOD)}{fenced('2' + chr(10), '```text')}",
    "a shell behind": f"{fenced(GOOD)}Run:\n{fenced('python f.py' + chr(10), '```bash')}",
    "tests behind": f"{fenced(GOOD)}{fenced('def test_f():' + chr(10) + '    assert f(1) == 2' + chr(10))}",
    "a class with such a method behind": f"{fenced(GOOD)}{fenced('class A:' + chr(10) + '    def f(self): pass' + chr(10))}",
    "prose in a block behind": f"{fenced(GOOD)}{fenced('Here def f( takes x, and adds one.' + chr(10), '```text')}",
    "a signature in a block behind": f"{fenced(GOOD)}{fenced('def f(x: int) -> int' + chr(10), '```')}",
    "a wrong program that is mended": f"{fenced(BAD)}No, that is wrong:\n{fenced(GOOD)}",
    "a lambda": fenced("f = lambda x: x + 1\n"),
    "a lambda and an example": f"{fenced('f = lambda x: x + 1' + chr(10))}{fenced('print(f(1))' + chr(10))}",
    "a lambda with a type": f"{fenced('f: object = lambda x: x + 1' + chr(10))}{fenced('f(1)' + chr(10))}",
    "another name": f"{fenced(GOOD.replace('f(', 'g(') + 'f = g' + chr(10))}{fenced('f(1)' + chr(10))}",
    "a space before the parenthesis": f"{fenced(GOOD.replace('f(', 'f ('))}{fenced('f(1)' + chr(10))}",
    "a parameter of types": f"{fenced(GOOD.replace('f(', 'f[T]('))}{fenced('f(1)' + chr(10))}",
    "a decorator": f"{fenced('import functools' + chr(10) + '@functools.cache' + chr(10) + GOOD)}{fenced('f(1)' + chr(10))}",
    "two versions of Python": fenced(
        f"try:\n    from nowhere import f\nexcept ImportError:\n    {GOOD.replace('    ', ' ' * 8)}"
    ),
    "a fence in the docstring": fenced('def f(x):\n    """Add one:\n```\nf(1)\n```\n    """\n    return x + 1\n'),
    "a program in a docstring": fenced(f'def f(x):\n    """Not so:\n```python\n{BAD}```\n    """\n    return x + 1\n'),
    "a fence in a string": fenced(f"MARK = '''\n```\n'''\n{GOOD}") + fenced("f(1)\n"),
    "a fence in a string of two lines": fenced(f'MARK = "a\\\n```"\n{GOOD}'),
    "quotes in a comment": fenced(f"# Don't write ''' here, nor \"\"\"\n{GOOD}") + 'Or """so""".\n' + fenced("f(1)\n"),
    "quotes in a string": fenced(f'MARK = \'"""\', "\\"\'\'\'"\n{GOOD}') + "'''\n" + fenced('"""\n'),
    "a docstring that is cut off before": f"{fenced('def f(x):' + chr(10) + '    ' + chr(34) * 3 + 'Add.' + chr(10))}So:\n"
    + fenced('def f(x):\n    """Add one."""\n    return x + 1\n'),
    "a helper before": f"{fenced('def g(x):' + chr(10) + '    return x + 1' + chr(10))}Now:\n{fenced('def f(x):' + chr(10) + '    return g(x)' + chr(10))}",
    "a helper behind": f"{fenced('def f(x):' + chr(10) + '    return g(x)' + chr(10))}With:\n{fenced('def g(x):' + chr(10) + '    return x + 1' + chr(10))}",
    "a helper of a helper": f"{fenced('ONE = 1' + chr(10))}{fenced('def g(x): return x + ONE' + chr(10))}{fenced('def f(x): return g(x)' + chr(10))}",
    "an import before": f"{fenced('import math' + chr(10))}{fenced('def f(x): return math.floor(x) + 1' + chr(10))}",
    "a backslash that Python warns of": fenced(f"MARK = '\\d'\n{GOOD}"),
}
# Behind a prompt that has the signature alone.
BODIES = {"the body alone": fenced("    return x + 1\n")}
BODIES["the body alone and an example"] = BODIES["the body alone"] + fenced("print(f(1))\n")
WRONG = {
    "nothing": "",
    "no program": "I do not know.",
    "an empty block": "```\n```",
    "a wrong program": fenced(BAD),
    "a right program that is withdrawn": f"{fenced(GOOD)}No:\n{fenced(BAD)}",
    "another function": fenced(GOOD.replace("f(", "g(")),
    "a method alone": fenced("class A:\n    def f(self, x): return x + 1\n"),
    "a right program in the docstring of a wrong one": fenced(
        f'def f(x):\n    """\n```\n{GOOD}```\n    """\n    return x\n'
    ),
    "a right program in a string": fenced(f"MARK = '''\n{GOOD}'''\n{BAD}"),
    "a program that does not parse": fenced(f"{GOOD}    return (\n"),
    "a program that needs what nobody has": fenced("def f(x): return g(x)\n"),
    "a function inside of another": fenced("def g():\n    def f(x): return x + 1\n"),
    "thousands of signs": fenced(f"{GOOD}y = {'-' * 9000}1\n"),
    "fences alone": "```\n" * 3000,
    "quotes alone": "```\n" + '\\"""' * 9000,
    "backticks alone": "`" * 50_000,
    "many programs": fenced("def g(x): return f(x)\n") * 400,
}
