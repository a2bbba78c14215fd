"""Families of small functions for examples/functions.py: a signature, a docstring and a body with holes.

A hole `$name` is filled in several ways: the words go into the docstring, the code into the body. `either` is for
holes where both are the same. Most twists (ends included or not, ties, the empty case, the order) occur in many
families. Those of held_out.py have them too, but other ideas.
"""

from dataclasses import dataclass


@dataclass
class Family:
    signature: str
    doc: str
    body: str
    holes: dict[str, dict[str, str]]  # {hole: {words of the docstring: code of the body}}


def family(signature, doc, body, **holes):
    return Family(signature, doc, body, holes)


def either(*words):
    return {each: each for each in words}


BOUND = {"greater than": ">", "at least": ">=", "less than": "<", "at most": "<="}
EMPTY = either("None", "-1", "0")
EXTREME = {"largest": "max", "smallest": "min"}
FIRST = {"first": "0", "last": "-1"}
FORM = {"a list": "found", "the number": "len(found)", "the sum": "sum(found)"}
INSIDE = {"included": "<=", "excluded": "<"}
ONCE = {"once": "set(values)", "separately": "values"}
START, STOP = {"included": "low", "excluded": "low + 1"}, {"included": "high + 1", "excluded": "high"}

# fmt: off
TRAINING = [
    family("count_beyond(values, t)",
        "Return how many numbers in `values` are $bound `t`. $once If `values` is empty, return "
        "$empty.", """
        if not values:
            return $empty
        return len([v for v in $once if v $bound t])""",
        bound=BOUND, empty=EMPTY,
        once={"": "values", "A number that occurs several times counts once.": "set(values)"}),
    family("sum_between(values, low, high)",
        "Return the sum of the $kind in `values` from `low` ($left) to `high` ($right).", """
        return sum(v for v in values if low $left v $right high$kind)""",
        kind={"numbers": "", "even numbers": " and v % 2 == 0", "odd numbers": " and v % 2 == 1"},
        left=INSIDE, right=INSIDE),
    family("index_of_extreme(values)",
        "Return the position of the $extreme number in `values`; the first number has position $base. "
        "If it occurs several times, return its $tie position. If `values` is empty, return "
        "$empty.", """
        if not values:
            return $empty
        best = $extreme(values)
        return [i for i, v in enumerate(values, $base) if v == best][$tie]""",
        extreme=EXTREME, base=either("0", "1"), tie=FIRST, empty=either("None", "-1")),
    family("every_kth(values, k)",
        "Return a list of every `k`-th number in `values`, starting with the $start one. $kept "
        "$order", """
        picked = values[$start::k]
        return [v for v in picked$order$kept]""",
        start={"first": "0", "second": "1", "`k`-th": "k - 1"},
        order={"": "", "Then reverse the list.": "[::-1]"},
        kept={"": "", "Then remove negative numbers.": " if v >= 0"}),
    family("split_chunks(values, k)",
        "Cut `values` from left to right into pieces of `k` numbers. A shorter piece at the end is "
        "$rest. Return a list of $form, $order.", """
        pieces = [values[i:i + k] for i in range(0, $rest, k)]
        return [$form for piece in pieces$order]""",
        rest={"kept": "len(values)", "left out": "len(values) - k + 1"},
        form={"the pieces": "piece", "the sum of each piece": "sum(piece)",
            "the largest of each piece": "max(piece)"},
        order={"the first piece first": "", "the last piece first": "[::-1]"}),
    family("running(values)",
        "Return a list as long as `values`: for each position the $what of the numbers $where it "
        "(without the number at it). Where there are no such numbers, the entry is $empty.", """
        result = []
        for i in range(len(values)):
            part = values[$where]
            result.append($what(part) if part else $empty)
        return result""",
        what={"sum": "sum", "largest": "max", "smallest": "min"},
        where={"before": ":i", "after": "i + 1:"},
        empty=either("0", "None")),
    family("differences(values)",
        "Return a list of the differences of neighbours in `values`: $which. $kept", """
        pairs = zip(values, values[1:])
        return [$which for a, b in pairs$kept]""",
        which={"each number minus the one before it": "b - a",
            "each number minus the one after it": "a - b",
            "the larger one minus the smaller one": "abs(a - b)"},
        kept={"": "", "Leave out differences of 0.": " if a != b",
            "Skip pairs with a negative number.": " if min(a, b) >= 0"}),
    family("longest_run(values)",
        "Find the longest stretch of neighbours in `values` in which each number is $bound the one "
        "before it. If several are longest, take the $tie. Return $form.", """
        best, run = [], []
        for v in values:
            run = run + [v] if run and v $bound run[-1] else [v]
            if len(run) $tie len(best):
                best = run
        return $form""",
        bound={"equal to": "==", "greater than": ">", "at least": ">=", "less than": "<"},
        tie={"first": ">", "last": ">="},
        form={"it as a list": "best", "the sum of its numbers": "sum(best)"}),
    family("dedupe(values)",
        "Return a list of the numbers that occur in `values` $times, each of them once, $order.", """
        found = $order
        return [v for v in found if values.count(v) $times]""",
        times={"at least once": ">= 1", "exactly once": "== 1", "at least twice": ">= 2",
            "exactly twice": "== 2"},
        order={"in ascending order": "sorted(set(values))",
            "in descending order": "sorted(set(values), reverse=True)",
            "in the order of their first occurrence": "list(dict.fromkeys(values))"}),
    family("top_k(values, k)",
        "Return a list of the `k` $extreme numbers in `values`, in $order order. Equal numbers count "
        "$once. If there are fewer than `k`, return $few.", """
        found = sorted($once, reverse=$extreme)[:k]
        return sorted(found, reverse=$order)$few""",
        extreme={"largest": "True", "smallest": "False"},
        order={"ascending": "False", "descending": "True"},
        once=ONCE,
        few={"all of them": "", "an empty list": " if len(found) == k else []"}),
    family("most_common(values)",
        "Return the number that occurs $often in `values`. If there are several, return the $tie of "
        "them. If `values` is empty, return $empty.", """
        if not values:
            return $empty
        times = $often(values.count(v) for v in values)
        return $tie(v for v in values if values.count(v) == times)""",
        often={"most often": "max", "least often": "min"}, tie=EXTREME, empty=EMPTY),
    family("rotate(values, k)",
        "Return a list of the numbers in `values`, moved by `k` places to the $way: what falls out at "
        "one end comes in at the other. `k` may be larger than the length. $then If `values` is empty, "
        "return $empty.", """
        if not values:
            return $empty
        k = $way % len(values)
        return (values[k:] + values[:k])$then""",
        way={"left": "k", "right": "-k"}, empty=either("[]", "None"),
        then={"": "", "Then reverse the list.": "[::-1]", "Then remove its first number.": "[1:]"}),
    family("count_pairs(values, t)",
        "Return for how many pairs of positions i $order j in `values` the $what of the two numbers is "
        "$bound `t`.", """
        count = 0
        for i, a in enumerate(values):
            for b in values[$order:]:
                if $what $bound t:
                    count += 1
        return count""",
        order={"<": "i + 1", "<=": "i"}, what={"sum": "a + b", "distance": "abs(a - b)"},
        bound={**BOUND, "equal to": "=="}),
    family("alternate(values, others)",
        "Return a list that takes numbers in turn from `values` and `others`, beginning with $begin. "
        "$read When one list is used up, $rest.", """
        a, b = $begin
        a, b = a$read, b$read
        n = min(len(a), len(b))
        return [v for pair in zip(a, b) for v in pair]$rest""",
        begin={"`values`": "values, others", "`others`": "others, values"},
        read={"Read both lists from the start.": "[:]", "Read both lists from the end.": "[::-1]"},
        rest={"stop": "", "add the rest of the other list": " + a[n:] + b[n:]"}),
    family("common(values, others)",
        "Return a list of the numbers in `values` that are $where in `others`, $once, $order.", """
        found = [v for v in $once if v $where others]
        return $order""",
        where={"also": "in", "not": "not in"},
        once={"as often as in `values`": "values", "each of them once": "dict.fromkeys(values)"},
        order={"in their order in `values`": "found", "in ascending order": "sorted(found)",
            "in descending order": "sorted(found, reverse=True)"}),
    family("limit(values, low, high)",
        "Return a list of the numbers in `values`, but with $what in place of each number outside the "
        "range from `low` ($left) to `high` ($right).", """
        return [v if low $left v $right high else $what for v in values]""",
        what=EMPTY, left=INSIDE, right=INSIDE),
    family("second(values)",
        "Return the second $extreme number in `values`. Equal numbers count $once. If there is none, "
        "return $empty.", """
        found = sorted($once)
        if len(found) < 2:
            return $empty
        return found[$extreme]""",
        extreme={"largest": "-2", "smallest": "1"},
        once=ONCE, empty=EMPTY),
    family("partition(values, t)",
        "Return a list of the numbers in `values`: first those $bound `t`, $front, then all others, "
        "$back.", """
        front = [v for v in values if v $bound t]
        back = [v for v in values if not v $bound t]
        return $front + $back""",
        bound=BOUND,
        front={"in their order": "front", "in ascending order": "sorted(front)",
            "in reverse order": "front[::-1]"},
        back={"in their order": "back", "in descending order": "sorted(back, reverse=True)"}),
    family("weighted_sum(values)",
        "Return the sum of the numbers in `values`, each multiplied by its position. The $end number "
        "has position $base. $kept", """
        total = 0
        for position, v in enumerate(values$end, $base):
            if v $kept:
                total += position * v
        return total""",
        end={"first": "", "last": "[::-1]"}, base=either("0", "1", "2"),
        kept={"": "!= 0", "Ignore negative numbers.": ">= 0", "Ignore even numbers.": "% 2 == 1"}),
    family("peaks(values)",
        "Return $form of the numbers in `values` that are $bound each of their neighbours. The first "
        "and the last number, which have at most one neighbour, $ends.", """
        found = []
        for i in $ends:
            neighbours = values[max(i - 1, 0):i] + values[i + 1:i + 2]
            if all(values[i] $bound v for v in neighbours):
                found.append(values[i])
        return $form""",
        form=FORM, bound=BOUND,
        ends={"can be among them": "range(len(values))",
            "are never among them": "range(1, len(values) - 1)"}),
    family("reduce_grid(grid)",
        "Return a list of the $what number of each $line of `grid`, a list of rows, $order.", """
        result = [$what(line) for line in $line]
        return $order""",
        what=EXTREME, line={"row": "grid", "column": "zip(*grid)"},
        order={"in order": "result", "the last one first": "result[::-1]",
            "sorted, each number once": "sorted(set(result))"}),
    family("digits(number)",
        "Return the $what of the decimal digits of `number` that are $kind. A minus sign does not "
        "matter. If there are none, return $empty.", """
        digits = [int(c) for c in str(abs(number))]
        digits = [d for d in digits if d $kind]
        if not digits:
            return $empty
        return $what(digits)""",
        what={"sum": "sum", "largest": "max", "number": "len"}, empty=either("-1", "None"),
        kind={"even": "% 2 == 0", "odd": "% 2 == 1", "greater than 4": "> 4"}),
    family("multiples(low, high, k)",
        "Return $form of the integers from `low` ($left) to `high` ($right) that are $which by "
        "`k`.", """
        found = [n for n in range($left, $right) if n % k $which]
        return $form""",
        form=FORM, left=START, right=STOP, which={"divisible": "== 0", "not divisible": "!= 0"}),
    family("path_to_one(n)",
        "Start with `n`. While the number is greater than 1: if it is even, halve it, otherwise $odd. "
        "Return $form. If `n` is less than 1, return $empty.", """
        if n < 1:
            return $empty
        path = [n]
        while n > 1:
            n = n // 2 if n % 2 == 0 else $odd
            path.append(n)
        return $form""",
        odd={"subtract 1": "n - 1", "multiply it by 3 and add 1": "3 * n + 1"},
        empty=either("None", "-1"),
        form={"the list of all numbers, with `n` and 1": "path", "the number of steps": "len(path) - 1",
            "the largest number": "max(path)"}),
    family("sequence(n)",
        "A sequence begins with $begin; each further number is the sum of the two before it$plus. "
        "Return $form. If `n` is 0, return $empty.", """
        if n == 0:
            return $empty
        numbers = [$begin]
        while len(numbers) < n:
            numbers.append(numbers[-1] + numbers[-2]$plus)
        return $form""",
        begin=either("0, 1", "1, 2", "2, 1"), plus={"": "", ", plus 1": " + 1"},
        empty=either("[]", "None"),
        form={"the list of its first `n` numbers": "numbers[:n]",
            "its `n`-th number": "numbers[n - 1]"}),
    family("position_beyond(values, t)",
        "Return the position, counted from 0, of the $which number in `values` that is $bound `t`. If "
        "there is none, return $missing.", """
        found = [i for i, v in enumerate(values) if v $bound t]
        return found[$which] if found else $missing""",
        which=FIRST, bound=BOUND,
        missing={"None": "None", "-1": "-1", "the length of `values`": "len(values)"}),
    family("count_characters(text)",
        "Return how many $kind `text` has. $once If `text` is empty, return $empty.", """
        if not text:
            return $empty
        return len([c for c in $once if c$kind])""",
        kind={"vowels (a, e, i, o, u, also in upper case)": " in 'aeiouAEIOU'",
            "lower-case letters": ".islower()",
            "upper-case letters": ".isupper()", "digits": ".isdigit()",
            "characters other than letters": ".isalpha() is False"},
        once={"": "text", "A character that occurs several times counts once.": "set(text)"},
        empty=either("0", "-1", "None")),
    family("compress(string)",
        "Replace each stretch of equal neighbours in `string` by $form. $case $end", """
        from itertools import groupby
        result = ""
        for c, group in groupby(string$case$end):
            n = len(list(group))
            result += $form
        return result""",
        form={"the character and its count": "c + str(n)", "the count and the character": "str(n) + c",
            "the character and, if it is greater than 1, its count": "c + (str(n) if n > 1 else '')"},
        case={"": "", "First change the string to lower case.": ".lower()"},
        end={"": "", "Read it from the end.": "[::-1]"}),
    family("sort_words(words)",
        "Return a list of the `words` sorted by length, the $which first; words of equal length are "
        "$tie. $once", """
        found = $once
        found = $tie
        return sorted(found, key=len$which)""",
        which={"shortest": "", "longest": ", reverse=True"},
        tie={"in alphabetical order, where case does not matter": "sorted(found, key=str.lower)",
            "in reverse alphabetical order, where case does not matter": "sorted(found, key=str.lower, reverse=True)",
            "in their order in `words`": "found[:]"},
        once={"": "words", "Each word occurs once.": "list(dict.fromkeys(words))"}),
    family("acronym(sentence)",
        "Return a string of the $which letter of each word in `sentence`, in $case case, $dots. "
        "$short", """
        words = [w for w in sentence.split()$short]
        return "$dots".join(w[$which].$case() for w in words)""",
        which=FIRST, case=either("upper", "lower"),
        dots={"with nothing between them": "", "separated by dots": "."},
        short={"": "", "Leave out words of fewer than 3 letters.": " if len(w) >= 3"}),
    family("turn_words(sentence)",
        "Reverse $what in `sentence`, and return the words joined by $joint, $case.", """
        words = sentence.split()
        return "$joint".join($what)$case""",
        what={"the order of the words": "words[::-1]",
            "the letters of each word": "[w[::-1] for w in words]",
            "the letters of each word of more than 3 letters": "[w[::-1] if len(w) > 3 else w for w in words]"},
        joint={"one space": " ", "a dash": "-"},
        case={"with upper and lower case as they are": "", "in upper case": ".upper()"}),
    family("extreme_word(words)",
        "Return the $which of the `words`. If there are several, return the $tie one. If `words` is "
        "empty, return $empty.", """
        if not words:
            return $empty
        length = $which(len(w) for w in words)
        return [w for w in words if len(w) == length][$tie]""",
        which={"longest": "max", "shortest": "min"}, tie=FIRST,
        empty={"an empty string": "''", "None": "None", "-1": "-1"}),
    family("group_words(words)",
        "Return a dict from each $key of the `words` to $value.", """
        result = {}
        for w in words:
            key = $key
            result[key] = $value
        return result""",
        key={"length": "len(w)", "first letter, in lower case,": "w[0].lower()",
            "last letter": "w[-1]"},
        value={"the list of words with it": "result.get(key, []) + [w]",
            "the number of words with it": "result.get(key, 0) + 1",
            "the first word with it": "result.get(key, w)", "the last word with it": "w"}),
    family("alternate_caps(text)",
        "Return `text` with the $parity $unit and so on in upper case, and all others in lower case. "
        "$then", """
        result, count = "", 0
        for c in text:
            result += c.upper() if count % 2 == $parity else c.lower()
            count += $unit
        return result$then""",
        parity={"first, third, fifth": "0", "second, fourth, sixth": "1"},
        unit={"character": "1", "letter (only letters are counted)": "c.isalpha()"},
        then={"": "", "Then remove all spaces.": '.replace(" ", "")', "Then reverse it.": "[::-1]"}),
    family("reads_backwards(phrase)",
        "Return True if `phrase` reads the same from both ends, otherwise False. $case $kept If no "
        "character is left to compare, return $empty.", """
        found = [c for c in phrase$case$kept]
        if not found:
            return $empty
        return found == found[::-1]""",
        case={"Upper and lower case are different.": "", "Upper and lower case are equal.": ".lower()"},
        empty=either("True", "False"),
        kept={"All characters count.": "", "Only letters count.": " if c.isalpha()",
            "Spaces do not count.": ' if c != " "'}),
    family("extreme_names(scores)",
        "`scores` is a dict from names to numbers. Return $form with the $which number. $kept If there "
        "is none, return $empty.", """
        kept = {name: v for name, v in scores.items()$kept}
        if not kept:
            return $empty
        best = $which(kept.values())
        names = sorted(name for name, v in kept.items() if v == best)
        return $form""",
        form={"the sorted list of the names": "names", "the alphabetically first name": "names[0]",
            "the count of names": "len(names)"},
        which=EXTREME, kept={"": "", "Ignore numbers less than 2.": " if v >= 2"},
        empty=either("None", "-1")),
]
