"""Byte-pair encoding of bytes: how a list of merges becomes tiktoken's ranks, where both give the same ids.

tiktoken merges any two neighbours that make a token, the lowest rank first; `tokenizers` merges the pairs of a list. They agree where
the pair that tiktoken comes upon is always in the list. That is shown for each token when a file is read (Trees); a file for which it
cannot be shown is refused.

Left out: encoding itself, which is tiktoken's; learning merges.
"""

SUPPORTED = "snug reads byte-level BPE (GPT-2, SmolLM2, Llama 3, Qwen2.5, Qwen3)"


class Trees:
    """Of which two tokens each token is made, when BPE makes it of its bytes; tokens are added in the order of their ranks.

    Take any two neighbours that BPE merges into a token, in any text. Nothing has been merged across the token's ends so far, so what
    happened between them is what happens to the token's bytes alone: the two neighbours are always the same two. So tiktoken never
    merges another pair into this token, and the list of merges needs this pair, and no others.
    """

    def __init__(self):
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.ranks = {token: rank for rank, token in enumerate(self.tokens)}
        self.left, self.right = (
            list(range(256)),
            list(range(256)),
        )  # ranks of the two parts; None where they are not known

    def add(self, token, cuts):
        """Gives the token the next rank and -> at which of these bytes it is cut in two; None, and no rank, if that cannot be said."""
        for cut in cuts:
            left, right = self.ranks.get(token[:cut]), self.ranks.get(token[cut:])
            if left is None or right is None or self.left[left] is None or self.left[right] is None:
                continue
            if self.stay_apart(left, right):
                self.append(token, left, right)
                return cut
        return None

    def append(self, token, left=None, right=None):
        self.ranks[token] = len(self.tokens)
        self.tokens.append(token)
        self.left.append(left)
        self.right.append(right)

    def stay_apart(self, left, right):
        """Of the bytes of two tokens, one after the other, does BPE make just these two, with the ranks so far?

        It does if it merges nothing across. Time is run backwards: of the two tokens that touch there, the one of the higher rank was
        made last, and before, its part stood there. A pair that was there would have been merged, had it come before that in turn;
        of equal ranks the left one does.
        """
        tokens, ranks = self.tokens, self.ranks
        limit = len(tokens)
        while ranks.get(tokens[left] + tokens[right], limit) >= limit:
            if left < 256 and right < 256:
                return True
            if left > right:
                limit, left = left, self.right[left]
            else:
                limit, right = right + 1, self.left[right]
        return False


def byte_symbols():
    """The characters that tokenizer.json has for the 256 bytes: printable ones stand for themselves, the others are U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


SYMBOLS = byte_symbols()


BYTES = {code: "\uffff" for code in range(256)} | {
    ord(symbol): chr(byte) for byte, symbol in SYMBOLS.items()
}  # U+FFFF: no byte


def bytes_of(symbols):
    """Symbols of a vocabulary -> bytes; None if they are others than the 256."""
    try:
        return symbols.translate(BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def symbols_of(token):
    return "".join(SYMBOLS[byte] for byte in token)


def read_merges(merges, whole, vocab, tokens):
    """tokenizer.json's merges, its ignore_merges, and {symbols: bytes} of its vocabulary that may come from text -> those tokens that BPE or a look at the
    whole piece makes, in the order of their ranks. Raises ValueError where tiktoken would not make the same of them.
    """
    missing = set(SYMBOLS.values()) - set(tokens)
    if missing:
        raise ValueError(
            f"{len(missing)} of the 256 bytes are not in the vocabulary: it is not byte-level; {SUPPORTED}"
        )
    groups, trees, known = grouped(merges, vocab, tokens), Trees(), dict.fromkeys(tokens.values())
    if whole:  # a piece that is a token is not looked at further, be there merges for it or not
        groups |= {token: [] for token in known if len(token) > 1 and token not in groups}
    for token, cuts in groups.items():
        if trees.add(token, cuts):
            continue
        if not whole or any(
            token[:cut] in known and token[cut:] in known for cut in range(1, len(token)) if cut not in cuts
        ):
            raise ValueError(
                f"tiktoken would not make the token {shown(token)} of the parts that merges have; {SUPPORTED}"
            )
        trees.append(token)  # whichever two parts it is made of, they are in the list
    return trees.tokens


def grouped(merges, vocab, tokens):
    """-> {token in bytes: the places that its merges join it at}, in their order. A token's merges have to follow each other."""
    groups, last = {}, None
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], str):
            raise ValueError(f"a merge must be two tokens, not {shown(merge)}")
        a, b = pair
        left, right, token = tokens.get(a), tokens.get(b), tokens.get(a + b)
        if left and right and token:
            if token != last and token in groups:
                raise ValueError(f"the token {shown(token)} has merges of ranks that are apart; {SUPPORTED}")
            groups.setdefault(token, []).append(len(left))
            last = token
        elif a not in vocab or b not in vocab or a + b not in vocab:
            raise ValueError(f"the merge {shown(merge)} has tokens that are not in the vocabulary")
    return groups


def shown(value):
    """A value in few words, in one line."""
    return type(value).__name__ if isinstance(value, dict | list) else f"{value!r:.60}"
