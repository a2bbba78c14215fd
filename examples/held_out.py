"""Families that no training prompt comes from, for examples/functions.py. They are written as those of families.py."""

from examples.families import EMPTY, FORM, ONCE, START, STOP, either, family

# fmt: off
HELD_OUT = [
    family("middle(values)",
        "Return the middle number of the sorted `values`; of two middle numbers return the $side one. "
        "Equal numbers count $once. If `values` is empty, return $empty.", """
        found = sorted($once)
        if not found:
            return $empty
        return found[$side // 2]""",
        side={"smaller": "(len(found) - 1)", "larger": "len(found)"},
        once=ONCE, empty=EMPTY),
    family("windows(values, k)",
        "Return a list of the $what of each `k` neighbours in `values`, from left to right; each group "
        "of neighbours begins $step after the one before. If `values` has fewer than `k` numbers, "
        "return $few.", """
        if len(values) < k:
            return $few
        return [$what(values[i:i + k]) for i in range(0, len(values) - k + 1, $step)]""",
        what={"sum": "sum", "largest": "max", "smallest": "min"},
        step={"one number": "1", "two numbers": "2"}, few=either("[]", "None")),
    family("account(values)",
        "An account starts at $start. The numbers in `values` are added to it one after the other; a "
        "number that would make it $bound 0 $how. Return $form.", """
        balance, history = $start, []
        for v in values:
            if balance + v $bound 0:
                $how
            balance += v
            history.append(balance)
        return $form""",
        start=either("0", "3"), bound={"less than": "<", "at most": "<="},
        how={"is skipped": "continue", "ends this: it and all behind it are ignored": "break"},
        form={"the balance at the end": "balance",
            "the list of balances, one after each added number": "history"}),
    family("list_in_words(words)",
        "Join `words` as in a sentence: with a comma and a space between them, but with ' $last ' "
        "between the last two. $comma If `words` is empty, return $empty.", """
        if not words:
            return $empty
        if len(words) < 3:
            return " $last ".join(words)
        return ", ".join(words[:-1]) + "$comma $last " + words[-1]""",
        last=either("and", "or"),
        empty={"an empty string": "''", "None": "None", "'nothing'": "'nothing'"},
        comma={"": "", "From three words on, a comma stands before this as well.": ","}),
    family("fizz(n)",
        "Return a list with an entry for each integer from $start to `n` ($stop): $both for those "
        "divisible by 2 and 3, otherwise 'Fizz' for those divisible by 2, 'Buzz' for those divisible "
        "by 3, and for all others $other.", """
        result = []
        for i in range($start, n$stop):
            if i % 6 == 0:
                result.append($both)
            elif i % 2 == 0:
                result.append("Fizz")
            elif i % 3 == 0:
                result.append("Buzz")
            else:
                result.append($other)
        return result""",
        start=either("0", "1"), stop={"included": " + 1", "excluded": ""},
        both=either("'FizzBuzz'", "'Both'"),
        other={"the integer": "i", "the integer as a string": "str(i)"}),
    family("missing_numbers(values, low, high)",
        "Return $form of the integers from `low` ($left) to `high` ($right) that are not in "
        "`values`.", """
        found = [n for n in range($left, $right) if n not in values]
        return $form""",
        form=FORM, left=START, right=STOP),
    family("depth(brackets)",
        "Read the round brackets in the string `brackets` and ignore all else. Return $form. A `)` "
        "without an open `(` $alone. If there is no round bracket, return $empty.", """
        if "(" not in brackets and ")" not in brackets:
            return $empty
        depth = deepest = 0
        for c in brackets:
            if c == "(":
                depth += 1
                deepest = max(deepest, depth)
            elif c == ")":
                if depth == 0:
                    $alone
                depth -= 1
        return $form""",
        form={"how many are open at the same time at most": "deepest",
            "how many are never closed": "depth"},
        alone={"is ignored": "continue", "makes the result -1": "return -1",
            "makes the result None": "return None"}, empty=either("0", "None")),
    family("flatten(grid)",
        "Return one list of the numbers in `grid`, a list of rows: $way. $kept $once", """
        found = [v for line in $way for v in line$kept]
        return $once""",
        way={"row by row": "grid", "column by column": "zip(*grid)",
            "row by row, the last row first": "grid[::-1]",
            "row by row, but each row from right to left": "[row[::-1] for row in grid]"},
        kept={"": "", "Leave out negative numbers.": " if v >= 0"},
        once={"": "found",
            "A number that occurs several times stays only at its first place.": "list(dict.fromkeys(found))"}),
    family("fee(n)",
        "Return the fee for parking `n` hours. The first $free hours cost nothing, each further hour "
        "costs $price. If `n` is $bound 6, add 5. The whole fee is never more than $top.", """
        total = max(n - $free, 0) * $price
        if n $bound 6:
            total += 5
        return min(total, $top)""",
        free=either("2", "3"), price=either("2", "3"), bound={"greater than": ">", "at least": ">="},
        top=either("20", "25")),
    family("cut(text, letter)",
        "Return the part of `text` $side the $which `letter` (case matters, `letter` itself is left "
        "out). If `letter` does not occur, return $missing.", """
        i = text.$which(letter)
        if i < 0:
            return $missing
        return text[$side]""",
        side={"before": ":i", "after": "i + 1:"}, which={"first": "find", "last": "rfind"},
        missing={"the whole `text`": "text", "an empty string": "''", "None": "None"}),
    family("shift(letters, k)",
        "Replace each letter in `letters` by the one `k` places $way in the alphabet (`a` and `z` are "
        "neighbours). $case All other characters are $other.", """
        alphabet = "abcdefghijklmnopqrstuvwxyz"
        result = ""
        for c in letters:
            if c.isalpha():
                new = alphabet[(alphabet.index(c.lower()) $way k) % 26]
                result += $case
            else:
                result += $other
        return result""",
        way={"later": "+", "earlier": "-"},
        other={"kept": "c", "left out": "''"},
        case={"Upper case stays upper case.": "new.upper() if c.isupper() else new",
            "The result has lower case only.": "new",
            "The result has upper case only.": "new.upper()"}),
    family("combine(values, others)",
        "Return a list of the $what of the first numbers of `values` and `others`, of the second "
        "numbers, and so on. $rest $order", """
        n = $rest(len(values), len(others))
        a = values + [0] * (n - len(values))
        b = others + [0] * (n - len(others))
        return [$what for x, y in zip(a, b)]$order""",
        what={"sum": "x + y", "larger": "max(x, y)", "product": "x * y"},
        rest={"Stop where the shorter list ends.": "min",
            "A number missing in the shorter list counts as 0.": "max"},
        order={"": "", "Then reverse the list.": "[::-1]"}),
]
